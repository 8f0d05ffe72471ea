"""The loop over subsets into one set of buffers: each policy in place, or all of them in one launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from . import plan as plans
from .backends import backend_name, get_backend
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


def _launches(batch: Batch, plan: plans.Plan) -> Iterator[tuple[Backend, dict[str, Any]]]:
    """The backend and the common call arguments of each launch."""
    starts_q, lens_q, starts_kv, lens_kv = batch.subsets
    count = 1 if plan.dispatch == plans.SINGLE_LAUNCH else len(plan.bands)
    for p in range(count):
        own = slice(p, p + 1) if count > 1 else slice(None)
        yield (
            get_backend(backend_name(plan.backends[p])),
            {
                "q": batch.q,
                "k": batch.k,
                "v": batch.v,
                "starts_q": starts_q,
                "lens_q": lens_q[own] if count > 1 else lens_q,
                "starts_kv": starts_kv,
                "lens_kv": lens_kv[own] if count > 1 else lens_kv,
                "bands": plan.bands[own],
                "max_seqlen_q": batch.max_seqlen_q,
                "max_seqlen_kv": batch.max_seqlen_kv,
                "scale": batch.scale,
                "plain_cu_seqlens": count == 1 and plan.has(plans.PLAIN_CU_SEQLENS),
                "equal_lengths": plan.has(plans.EQUAL_LENGTHS),
                "deterministic": plan.has(plans.DETERMINISTIC),
                "single_launch_plan": batch.single_launch_plan,
                "contiguous_run": plan.has(plans.CONTIGUOUS),
                "sole": count == 1,
            },
        )


def run_forward(batch: Batch, plan: plans.Plan, buffers: Buffers, *, shared: bool = False) -> None:
    """Fills the rows of every sequence. ``shared``: other calls write into the same buffers, so no kernel may replace them."""
    for backend, common in _launches(batch, plan):
        common["sole"] = common["sole"] and not shared
        call = ForwardCall(
            **common, is_training=plan.has(plans.TRAINING), max_logit=buffers.max_logit, _out=buffers.out, _lse=buffers.lse
        )
        backend.forward(call)
        buffers.out, buffers.lse = call.out, call.lse


def run_backward(batch: BackwardBatch, plan: plans.Plan, buffers: Buffers, *, shared: bool = False) -> None:
    """:func:`run_forward`'s counterpart."""
    for backend, common in _launches(batch, plan):
        common["sole"] = common["sole"] and not shared
        call = BackwardCall(**common, grad_out=batch.grad_out, out=batch.out, lse=batch.lse, _grads=buffers.grads)
        backend.backward(call)
        buffers.grads = call.grads
