"""Horovod's API over Bagua. Scripts import `bagua.horovod.torch`."""

from bagua.require_torch import require

require("bagua.horovod")
