"""The commands of `bagua`, one module each; `bagua.cli` puts them together. None imports rich or torch at its top."""
