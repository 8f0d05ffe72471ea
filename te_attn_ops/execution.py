"""Runs a plan: padding inside the op, the dispatch, and the row contract around it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import grouping, plan as plans
from .inplace import BackwardBatch, Batch, Buffers, run_backward, run_forward
from .params import seqlen_bucket
from .rows import device_guard, fill_outside_backward, fill_outside_forward


def kernel_ready(x: Tensor) -> Tensor:
    """A tensor that every kernel can read: last stride 1, base and rows 16-byte aligned, no row repeated by a stride of 0. A view
    that reaches over 2^31 elements of a larger tensor is copied: not every kernel that takes as many itself can address it."""
    if x.shape[1] == 1 and x.stride(1) != x.shape[2]:  # says nothing, but a graph would be built for it
        x = x.as_strided(x.shape, (x.stride(0), x.shape[2], x.stride(2)))
    unit = 16 // x.element_size() or 1
    row, head, last = x.stride()
    if last != 1 or row % unit or head % unit or row == 0 or head == 0:
        return x.clone(memory_format=torch.contiguous_format)
    if x.data_ptr() % 16 or (x.shape[0] * row >= 1 << 31 and x.numel() < 1 << 31):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def pad_head_dim(x: Tensor, width: int) -> Tensor:
    """Zero columns up to ``width``; 0 means as it is."""
    return x if width in (0, x.shape[-1]) else F.pad(x, (0, width - x.shape[-1]))


def trim_head_dim(x: Tensor, width: int) -> Tensor:
    # No view, not even of a single row: an output of an autograd.Function.
    return x if x.shape[-1] == width else x[..., :width].clone(memory_format=torch.contiguous_format)


def forward(batch: Batch, plan: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """out [T_q, H, D_v], lse [H, T_q] and max_logit ([H], or empty where not wanted): every element defined."""
    decoded = plans.decode(tuple(plan))
    q = batch.q
    heads, head_dim_v = q.shape[1], batch.v.shape[2]
    buffers = Buffers()
    if decoded.has(plans.MAX_LOGIT):
        buffers.max_logit = q.new_full((heads,), float("-inf"), dtype=torch.float32)
    if _nothing_to_do(batch):
        out = q.new_zeros(q.shape[0], heads, head_dim_v)
        lse = q.new_full((heads, q.shape[0]), float("-inf"), dtype=torch.float32)
    else:
        _tighten(batch)
        with device_guard(q):
            if decoded.width:
                batch.q, batch.k, batch.v = (pad_head_dim(x, decoded.width) for x in (q, batch.k, batch.v))
            batch.q, batch.k, batch.v = kernel_ready(batch.q), kernel_ready(batch.k), kernel_ready(batch.v)
            run = grouping.forward if decoded.dispatch == plans.GROUPED else run_forward
            run(batch, decoded, buffers)
            assert buffers.out is not None and buffers.lse is not None
            out, lse = trim_head_dim(buffers.out, head_dim_v), buffers.lse
            fill_outside_forward(out, lse, batch.subsets.starts_q, batch.subsets.lens_q)
    # An absent output is an empty tensor of its own: no output may alias another.
    return out, lse, q.new_empty(0, dtype=torch.float32) if buffers.max_logit is None else buffers.max_logit


def backward(batch: BackwardBatch, plan: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous and in the shapes of q, k and v: every element defined."""
    decoded = plans.decode(tuple(plan))
    q, k, v = batch.q, batch.k, batch.v
    if _nothing_to_do(batch):
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    _tighten(batch)
    with device_guard(q):
        batch.q, batch.k, batch.v = (kernel_ready(pad_head_dim(x, decoded.width)) for x in (q, k, v))
        batch.grad_out, batch.out = (kernel_ready(pad_head_dim(x, decoded.width)) for x in (batch.grad_out, batch.out))
        buffers = Buffers()
        run = grouping.backward if decoded.dispatch == plans.GROUPED else run_backward
        run(batch, decoded, buffers)
        assert buffers.grads is not None
        dq, dk, dv = (trim_head_dim(grad, x.shape[2]) for grad, x in zip(buffers.grads, (q, k, v)))
        fill_outside_backward(dq, dk, dv, *batch.subsets)
    return dq, dk, dv


def _tighten(batch: Batch) -> None:
    """No sequence has more tokens than there are rows: a loose bound costs idle thread blocks. In steps, for kernels built per bound;
    one cap for both sides, for which of the two is larger decides what a kernel takes."""
    rows = max(batch.q.shape[0], batch.k.shape[0])
    if max(batch.max_seqlen_q, batch.max_seqlen_kv) > rows:
        cap = seqlen_bucket(rows)
        batch.max_seqlen_q, batch.max_seqlen_kv = min(batch.max_seqlen_q, cap), min(batch.max_seqlen_kv, cap)


def _nothing_to_do(batch: Batch) -> bool:
    return batch.q.shape[0] == 0 or batch.k.shape[0] == 0 or batch.subsets.num_seqs == 0
