"""The commands of `bagua`, one module each; `bagua.cli` puts them together. None imports torch at its top."""
