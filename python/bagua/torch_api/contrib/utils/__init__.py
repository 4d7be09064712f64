"""Where the cache keeps its values: key-value stores, and the form in which values are written."""
