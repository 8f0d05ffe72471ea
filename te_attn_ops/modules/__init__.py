"""torch.nn modules with TransformerEngine's argument names around :func:`te_attn_ops.thd_attention`."""

from .dot_product_attention import DotProductAttention

__all__ = ["DotProductAttention"]
