"""`python -m bagua`: the command line."""

import sys

from bagua.cli import main

if __name__ == "__main__":
    sys.exit(main())
