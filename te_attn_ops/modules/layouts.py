"""sbhd, bshd and packed projections as the packed (thd) layout: views wherever strides allow."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value

QKV_FORMATS = ("sbhd", "bshd", "thd")


class PackedInputs(NamedTuple):
    """Arguments of :func:`te_attn_ops.thd_attention`, by its names."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor | None
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None


def check_qkv_format(qkv_format: str, argument: str = "qkv_format") -> str:
    if qkv_format not in QKV_FORMATS:
        raise ValueError(f"{argument}={qkv_format!r} is unknown; use one of {', '.join(QKV_FORMATS)}")
    return qkv_format


def unpack_projection(
    query_layer: Tensor | None,
    key_layer: Tensor | None,
    value_layer: Tensor | None,
    qkv_layer: Tensor | None,
    kv_layer: Tensor | None,
    qkv_interleave_dim: int,
    qkv_format: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, as views of the packed projection where one is given.

    Raises:
        ValueError: inputs missing or given twice, or a packed tensor of another shape.
    """
    given = {"query_layer": query_layer, "key_layer": key_layer, "value_layer": value_layer, "qkv_layer": qkv_layer, "kv_layer": kv_layer}
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if qkv_layer is None and kv_layer is None:
        if query_layer is None or key_layer is None or value_layer is None:
            raise ValueError(
                "query_layer, key_layer and value_layer are needed, or qkv_layer, or query_layer and kv_layer: got "
                + _given(query_layer=query_layer, key_layer=key_layer, value_layer=value_layer)
            )
        return query_layer, key_layer, value_layer
    if qkv_interleave_dim not in (-3, -2):
        raise ValueError(f"qkv_interleave_dim must be -3 ([..., 3, h, d]) or -2 ([..., h, 3, d]), got {qkv_interleave_dim}")
    rank = 4 if qkv_format == "thd" else 5
    if qkv_layer is not None:
        if not (query_layer is None and key_layer is None and value_layer is None and kv_layer is None):
            raise ValueError(
                "qkv_layer holds queries, keys and values and stands alone: got also "
                + _given(query_layer=query_layer, key_layer=key_layer, value_layer=value_layer, kv_layer=kv_layer)
            )
        _check_packed("qkv_layer", qkv_layer, rank, 3, qkv_interleave_dim, qkv_format)
        q, k, v = qkv_layer.unbind(qkv_interleave_dim)
        return q, k, v
    assert kv_layer is not None
    if query_layer is None or key_layer is not None or value_layer is not None:
        raise ValueError(
            "kv_layer holds keys and values and needs query_layer beside it: got "
            + _given(query_layer=query_layer, key_layer=key_layer, value_layer=value_layer)
        )
    _check_packed("kv_layer", kv_layer, rank, 2, qkv_interleave_dim, qkv_format)
    k, v = kv_layer.unbind(qkv_interleave_dim)
    return query_layer, k, v


def _given(**tensors: Tensor | None) -> str:
    return ", ".join(name for name, tensor in tensors.items() if tensor is not None) or "none"


def _check_packed(name: str, tensor: Tensor, rank: int, count: int, dim: int, qkv_format: str) -> None:
    if tensor.dim() != rank or tensor.shape[dim] != count:
        raise ValueError(
            f"{name} must have {rank} dimensions for qkv_format {qkv_format!r}, with {count} at dimension {dim} "
            f"(qkv_interleave_dim): got shape {tuple(tensor.shape)}"
        )
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have stride 1 in its last dimension, got strides {tuple(tensor.stride())}")


# ----------------------------------------------------------------------------------------------------------- sbhd and bshd
def _uniform_offsets(count: int, step: int, like: Tensor) -> Tensor:
    """[count + 1] int32: 0, step, 2 step, ...; built on the device."""
    return torch.arange(count + 1, dtype=torch.int32, device=like.device) * step


def batch_joins_heads(qkv_format: str, padding: bool, batch: int) -> bool:
    """Whether dense attention sees [s, b * h, d]: in sbhd without padding, where heads of different samples never meet, so that
    nothing is transposed. The number of heads is a constant of a compiled graph: a symbolic batch does not join it."""
    return qkv_format == "sbhd" and not padding and has_static_value(batch) and batch != 0


def pack_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qkv_format: str,
    padding: bool,
    joined: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
) -> PackedInputs:
    """Dense q [s_q, b, h, d] or [b, s_q, h, d] (and k, v alike) as packed rows.

    bshd: sequence n is rows n * s .. of [b * s, h, d]; with ``padding`` its first cu_seqlens[n + 1] - cu_seqlens[n] rows count
    and the others are gaps, in place. sbhd: the batch joins the heads, whose groups of GQA stay in order, where ``joined``
    (:func:`batch_joins_heads`) says so; else it is transposed first.
    """
    if joined:
        q, k, v = (x.flatten(1, 2) for x in (q, k, v))
        count, len_q, len_kv = 1, q.shape[0], k.shape[0]
    else:
        if qkv_format == "sbhd":
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        count, len_q, len_kv = q.shape[0], q.shape[1], k.shape[1]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    slots_q = _uniform_offsets(count, len_q, q)
    slots_kv = slots_q if len_q == len_kv else _uniform_offsets(count, len_kv, k)
    if not padding:
        return PackedInputs(q, k, v, slots_q, slots_kv, None, None, len_q, len_kv)
    if cu_seqlens_q is None:
        raise ValueError(f"cu_seqlens_q is needed by a padding attn_mask_type in {qkv_format}: it holds the samples' lengths")
    if cu_seqlens_kv is None:
        cu_seqlens_kv = cu_seqlens_q
    if cu_seqlens_kv is cu_seqlens_q and len_q != len_kv:
        raise ValueError(f"cu_seqlens_kv is needed where queries and keys have {len_q} and {len_kv} rows a sample")
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        if isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1 and cu_seqlens.shape[0] != count + 1:
            raise ValueError(f"{name} must have {count + 1} entries for a batch of {count}, got {cu_seqlens.shape[0]}")
    max_seqlen_q = len_q if max_seqlen_q is None else max_seqlen_q
    max_seqlen_kv = len_kv if max_seqlen_kv is None else max_seqlen_kv
    return PackedInputs(q, k, v, cu_seqlens_q, cu_seqlens_kv, slots_q, slots_kv, max_seqlen_q, max_seqlen_kv)


def unpack_dense(out: Tensor, qkv_format: str, joined: bool, batch: int, len_q: int) -> Tensor:
    """The module's output, [s, b, h * d_v] or [b, s, h * d_v], of what attention gave for :func:`pack_dense`'s inputs."""
    if joined:
        return out.unflatten(1, (batch, -1)).flatten(2, 3)
    out = out.flatten(1, 2).unflatten(0, (batch, len_q))
    return out.transpose(0, 1).contiguous() if qkv_format == "sbhd" else out
