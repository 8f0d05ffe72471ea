"""torch.nn modules with TransformerEngine's argument names around :func:`te_attn_ops.thd_attention`."""

from .checkpointing import save_attention
from .dot_product_attention import DotProductAttention
from .mlp import LayerNormMLP
from .multihead_attention import MultiheadAttention
from .rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from .transformer_layer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "LayerNormMLP",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "save_attention",
]
