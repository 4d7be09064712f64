"""Mixture-of-experts layers with the experts distributed over the ranks."""

from .experts import Experts, is_moe_param
from .gate import TopKGate
from .layer import MoE, MOELayer, has_moe_layers

__all__ = ["Experts", "MOELayer", "MoE", "TopKGate", "has_moe_layers", "is_moe_param"]
