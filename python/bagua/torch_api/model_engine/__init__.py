"""Communication for one model: its buckets in order, and the exchange of its gradients or weights."""
