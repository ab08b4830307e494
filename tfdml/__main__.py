"""`python -m tfdml`: the command `tfdml`."""

from tfdml_command import main

if __name__ == "__main__":
    main()
