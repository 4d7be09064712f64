"""Data-parallel training by a wrapper around the model."""
