"""Horovod's API over Bagua. Scripts import `bagua.horovod.torch`."""

from bagua.torch_needed import require

require("bagua.horovod")
