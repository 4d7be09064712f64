"""`python -m bagua.cuda`: prints CUDA's libraries and devices as JSON."""

import json

from bagua import cuda

if __name__ == "__main__":
    print(json.dumps(cuda.info(), indent=2, allow_nan=False))
