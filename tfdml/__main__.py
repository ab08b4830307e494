"""`python -m tfdml`: the command `tfdml`."""

import os
import sys

# Where Python has put the current folder first, its files would stand in for any package.
if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]

from tfdml.cli import main

if __name__ == "__main__":
    main()
