"""The dispatch "grouped": sort the sequences by policy, run each policy on its run of neighbours, restore the order.

One gather before and one after, whatever the number of policies, with shapes that do not depend on the partition: no sync, and
a captured graph may replay another partition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .inplace import BackwardBatch, Batch, Buffers, run_backward, run_forward
from .packing import Subsets
from .plan import CONTIGUOUS, GAPS, PADDED, PLAIN_CU_SEQLENS, Plan
from .rows import row_coordinates


class _Side(NamedTuple):
    """One side's compaction: which row each compact row comes from, where each physical row went, the compact geometry."""

    source: Tensor  # int64 [T]
    target: Tensor  # int64 [T]
    starts: Tensor  # int32 [N + 1], sequences in the order of their policies
    lens: Tensor  # int32 [P, N]


def _compact(starts: Tensor, lens: Tensor, order: Tensor, rows: int) -> _Side:
    sorted_lens = lens[:, order]
    total = sorted_lens.sum(0)
    compact = torch.zeros(order.shape[0] + 1, dtype=torch.int64, device=starts.device)
    torch.cumsum(total, 0, out=compact[1:])
    place, offset = row_coordinates(compact, rows)
    source = (starts.long()[order][place] + offset).clamp(max=rows - 1)
    # Rows beyond the last sequence repeat its own last one: a kernel that loads whole tiles sees nothing there that is not its.
    last = source.index_select(0, (compact[-1:] - 1).clamp(min=0))
    source = torch.where(offset < total.long()[place], source, last)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.shape[0], device=order.device)
    sequence, inside = row_coordinates(starts, rows)
    target = (compact[rank[sequence]] + inside).clamp(0, rows - 1)
    return _Side(source, target, compact.to(torch.int32), sorted_lens.contiguous())


def _sides(q: Tensor, k: Tensor, subsets: Subsets) -> tuple[_Side, _Side]:
    num_policies = subsets.lens_q.shape[0]
    used = (subsets.lens_q > 0) | (subsets.lens_kv > 0)
    numbers = torch.arange(num_policies, device=used.device)[:, None]
    # Sequences without a token on either side sort last.
    policy = torch.where(used, numbers, num_policies).amin(0)
    order = torch.argsort(policy, stable=True)
    return (
        _compact(subsets.starts_q, subsets.lens_q, order, q.shape[0]),
        _compact(subsets.starts_kv, subsets.lens_kv, order, k.shape[0]),
    )


def _policy_subsets(q: _Side, kv: _Side, p: int) -> Subsets:
    """Policy p's sequences as plain cu_seqlens: the others, all before or all after it, shrink to length 0."""
    clamped = []
    for side in (q, kv):
        before = side.lens[:p].sum()
        end = before + side.lens[p].sum()
        starts = torch.minimum(torch.maximum(side.starts, before.to(torch.int32)), end.to(torch.int32))
        clamped += [starts, side.lens[p : p + 1]]
    return Subsets(*clamped)


def _policy_plan(plan: Plan, p: int) -> Plan:
    flags = (plan.flags | PLAIN_CU_SEQLENS | CONTIGUOUS) & ~GAPS
    return Plan(flags, PADDED, plan.width, plan.bands[p : p + 1], plan.backends[p : p + 1])


def forward(batch: Batch, plan: Plan, buffers: Buffers) -> None:
    side_q, side_kv = _sides(batch.q, batch.k, batch.subsets)
    q, k, v = (x.index_select(0, side.source) for x, side in ((batch.q, side_q), (batch.k, side_kv), (batch.v, side_kv)))
    compact = Buffers(max_logit=buffers.max_logit)
    for p in range(len(plan.bands)):
        subsets = _policy_subsets(side_q, side_kv, p)
        part = Batch(q, k, v, subsets, [], batch.max_seqlen_q, batch.max_seqlen_kv, batch.scale)
        run_forward(part, _policy_plan(plan, p), compact)
    assert compact.out is not None and compact.lse is not None
    buffers.out = compact.out.index_select(0, side_q.target)
    buffers.lse = compact.lse.index_select(1, side_q.target)


def backward(batch: BackwardBatch, plan: Plan, buffers: Buffers) -> None:
    side_q, side_kv = _sides(batch.q, batch.k, batch.subsets)
    grad_out, q, out = (x.index_select(0, side_q.source) for x in (batch.grad_out, batch.q, batch.out))
    k, v = batch.k.index_select(0, side_kv.source), batch.v.index_select(0, side_kv.source)
    lse = batch.lse.index_select(1, side_q.source)
    compact = Buffers()
    for p in range(len(plan.bands)):
        subsets = _policy_subsets(side_q, side_kv, p)
        part = BackwardBatch(q, k, v, subsets, [], batch.max_seqlen_q, batch.max_seqlen_kv, batch.scale, grad_out, out, lse)
        run_backward(part, _policy_plan(plan, p), compact)
    assert compact.grads is not None
    dq, dk, dv = compact.grads
    buffers.grads = (
        dq.index_select(0, side_q.target),
        dk.index_select(0, side_kv.target),
        dv.index_select(0, side_kv.target),
    )
