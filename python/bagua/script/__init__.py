"""Programs of their own, under the names of the original."""
