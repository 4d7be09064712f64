"""Short name of :mod:`bagua.torch_api.model_parallel.moe`, as in the original Bagua."""

from .model_parallel.moe import Experts, MoE, MOELayer, TopKGate, has_moe_layers, is_moe_param

__all__ = ["Experts", "MOELayer", "MoE", "TopKGate", "has_moe_layers", "is_moe_param"]
