"""Programs that start and serve jobs: `python -m bagua.distributed.run` and `python -m bagua.distributed.store`."""
