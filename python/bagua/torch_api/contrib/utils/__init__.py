"""Key-value stores for the sample cache, and the encoding of values in them."""
