"""The commands of `bagua`, one module each, which `bagua.cli` combines. No module here imports torch at its top."""
