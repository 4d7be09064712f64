"""`python -m bagua.cuda`: what there is of CUDA, as one JSON object."""

import argparse
import json
import sys

from bagua import cuda


def main() -> int:
    """Prints `bagua.cuda.info()`."""
    parser = argparse.ArgumentParser(prog="python -m bagua.cuda", description="Tells what there is of CUDA, as JSON.")
    parser.add_argument("action", nargs="?", choices=["info"], default="info", help="info, which is the default")
    parser.parse_args()
    print(json.dumps(cuda.info(), indent=2, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
