"""The loop over subsets into one set of buffers: each policy in place, or all of them in one launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from . import plan as plans
from .backends import backend_by_number
from .backends.base import Backend, BackwardCall, ForwardCall
from .packing import Subsets


@dataclass
class Batch:
    """One attention call's inputs, as the kernels get them (shapes as in :class:`te_attn_ops.backends.base.Call`)."""

    q: Tensor
    k: Tensor
    v: Tensor
    subsets: Subsets
    single_launch_plan: list[Tensor]
    max_seqlen_q: int
    max_seqlen_kv: int
    scale: float


@dataclass
class BackwardBatch(Batch):
    grad_out: Tensor
    out: Tensor
    lse: Tensor


@dataclass
class Buffers:
    """What all policies of a call write into. None until the first of them allocates or adopts it."""

    out: Tensor | None = None
    lse: Tensor | None = None
    max_logit: Tensor | None = None
    grads: tuple[Tensor, Tensor, Tensor] | None = None


def _launches(batch: Batch, plan: plans.Plan) -> Iterator[tuple[Backend, tuple[Any, ...], tuple[int, int] | None]]:
    """The backend of each launch, the arguments of :class:`te_attn_ops.backends.base.Call` in their order, and its run."""
    if any(backend_by_number(number).reads_lens for number in plan.backends):
        batch.subsets = batch.subsets.with_lens()
    starts_q, lens_q, starts_kv, lens_kv = batch.subsets
    lone = plan.dispatch == plans.SINGLE_LAUNCH or len(plan.bands) == 1
    for p in range(1 if lone else len(plan.bands)):
        yield (
            backend_by_number(plan.backends[p]),
            (
                batch.q,
                batch.k,
                batch.v,
                starts_q,
                lens_q if lone else lens_q[p : p + 1],
                starts_kv,
                lens_kv if lone else lens_kv[p : p + 1],
                plan.bands if lone else plan.bands[p : p + 1],
                batch.max_seqlen_q,
                batch.max_seqlen_kv,
                batch.scale,
                lone and plan.has(plans.PLAIN_CU_SEQLENS),
                plan.has(plans.EQUAL_LENGTHS),
                plan.has(plans.DETERMINISTIC),
                batch.single_launch_plan,
                plan.has(plans.CONTIGUOUS),
            ),
            plan.runs[p] if plan.runs else None,
        )


def run_forward(batch: Batch, plan: plans.Plan, buffers: Buffers) -> None:
    """Fills the rows of every sequence."""
    is_training, has_gaps = plan.has(plans.TRAINING), plan.has(plans.GAPS)
    for backend, common, run in _launches(batch, plan):
        call = ForwardCall(
            *common,
            run=run,
            first=buffers.out is None,
            has_gaps=has_gaps,
            is_training=is_training,
            max_logit=buffers.max_logit,
            _out=buffers.out,
            _lse=buffers.lse,
        )
        backend.forward(call)
        buffers.out, buffers.lse = call.out, call.lse


def run_backward(batch: BackwardBatch, plan: plans.Plan, buffers: Buffers) -> None:
    """:func:`run_forward`'s counterpart."""
    for backend, common, run in _launches(batch, plan):
        call = BackwardCall(
            *common,
            run=run,
            has_gaps=plan.has(plans.GAPS),
            first=buffers.grads is None,
            grad_out=batch.grad_out,
            out=batch.out,
            lse=batch.lse,
            _grads=buffers.grads,
        )
        backend.backward(call)
        buffers.grads = call.grads
