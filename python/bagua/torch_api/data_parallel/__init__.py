"""Data-parallel training of one model: its hooks, its buckets in order, and the exchange of its gradients."""
