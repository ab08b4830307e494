"""`python -m tfdml`: the command `tfdml`."""

from tfdml.cli import main

if __name__ == "__main__":
    main()
