"""`python -m bagua.cuda`: prints CUDA's libraries and devices as JSON. `compile` writes the kernels to a folder."""

import json
import sys

from bagua import cuda
from bagua.commands.parser import Parser
from bagua.cuda import kernels
from bagua.errors import BaguaError


def _architectures(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> int:
    """Prints `bagua.cuda.info()`, or compiles the kernels and prints the names of the files. Returns the exit code."""
    parser = Parser(
        prog="python -m bagua.cuda",
        description="Reports the libraries and devices of CUDA, as JSON.",
        epilog="example: python -m bagua.cuda compile --out kernels --arch 80,90",
    )
    actions = parser.add_subparsers(dest="action", metavar="info|compile")
    actions.add_parser("info", help="print CUDA's libraries and devices (the default)")
    compiling = actions.add_parser("compile", help="compile the kernels with NVRTC, without a driver")
    compiling.add_argument("--out", required=True, metavar="DIR", help="folder for NAME.sm_X.ptx and NAME.sm_X.cubin")
    compiling.add_argument(
        "--arch",
        type=_architectures,
        metavar="80,90",
        help="compute capabilities times ten (default: those of 70, 75, 80, 86, 89, 90, 100, 120 that NVRTC knows)",
    )
    arguments = parser.parse_args()
    if arguments.action == "compile":
        try:
            for path in kernels.compile_to(arguments.out, arguments.arch):
                print(path)
        except (BaguaError, OSError) as error:
            print(f"python -m bagua.cuda: {error}", file=sys.stderr)
            return 1
    else:
        print(json.dumps(cuda.info(), indent=2, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
