"""The torch.library ops: schemas, fakes, autograd and FLOP formulas; nothing else. Names are public and stable.

* ``policy_subsets``: the routing of sequences to policies, on the device.
* ``attention_forward``, ``attention_backward``: raw; the first is what selective checkpointing should save.
* ``attention``: differentiable, an Autograd-key kernel around an autograd.Function over the raw two.

Registered with define/impl: a third to a seventh of the host time of ``custom_op`` and ``register_autograd``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext
from torch.utils.flop_counter import register_flop_formula

from . import execution, packing, plan as plans
from .inplace import BackwardBatch, Batch

_LIB = torch.library.Library("te_attn_ops", "FRAGMENT")

_GEOMETRY = (
    "Tensor starts_q, Tensor lens_q, Tensor starts_kv, Tensor lens_kv, Tensor[] single_launch_plan, "
    "SymInt max_seqlen_q, SymInt max_seqlen_kv, float scale, int[] plan"
)
_SCHEMAS = {
    "policy_subsets": (
        "(Tensor cu_seqlens_q, Tensor cu_seqlens_kv, Tensor? cu_seqlens_q_padded, Tensor? cu_seqlens_kv_padded, "
        "Tensor? policy_index, int num_policies) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "attention_forward": f"(Tensor q, Tensor k, Tensor v, {_GEOMETRY}) -> (Tensor, Tensor, Tensor)",
    "attention_backward": (
        f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_GEOMETRY}) -> (Tensor, Tensor, Tensor)"
    ),
    "attention": f"(Tensor q, Tensor k, Tensor v, {_GEOMETRY}) -> (Tensor, Tensor, Tensor)",
}
for _name, _schema in _SCHEMAS.items():
    _LIB.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))

policy_subsets = torch.ops.te_attn_ops.policy_subsets.default
attention_forward = torch.ops.te_attn_ops.attention_forward.default
attention_backward = torch.ops.te_attn_ops.attention_backward.default
attention = torch.ops.te_attn_ops.attention.default


# ---------------------------------------------------------------------------------------------------------- policy_subsets
def _policy_subsets(
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    policy_index: Tensor | None,
    num_policies: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots_q = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
    slots_kv = cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded
    return packing.build_subsets(cu_seqlens_q, cu_seqlens_kv, slots_q, slots_kv, policy_index, num_policies)


def _policy_subsets_fake(
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    policy_index: Tensor | None,
    num_policies: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    entries = cu_seqlens_q.shape[0]

    def new(*shape: int) -> Tensor:
        return cu_seqlens_q.new_empty(shape, dtype=torch.int32)

    return new(entries), new(num_policies, entries - 1), new(entries), new(num_policies, entries - 1)


# --------------------------------------------------------------------------------------------------------------- attention
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    lens_q: Tensor,
    starts_kv: Tensor,
    lens_kv: Tensor,
    single_launch_plan: list[Tensor],
    max_seqlen_q: int,
    max_seqlen_kv: int,
    scale: float,
    plan: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    subsets = packing.Subsets(starts_q, lens_q, starts_kv, lens_kv)
    return execution.forward(Batch(q, k, v, subsets, single_launch_plan, max_seqlen_q, max_seqlen_kv, scale), plan)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads = q.shape[0], q.shape[1]
    wants_max_logit = plans.decode(tuple(rest[-1])).has(plans.MAX_LOGIT)
    return (
        q.new_empty((tokens, heads, v.shape[2])),
        q.new_empty((heads, tokens), dtype=torch.float32),
        q.new_empty((heads if wants_max_logit else 0,), dtype=torch.float32),
    )


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts_q: Tensor,
    lens_q: Tensor,
    starts_kv: Tensor,
    lens_kv: Tensor,
    single_launch_plan: list[Tensor],
    max_seqlen_q: int,
    max_seqlen_kv: int,
    scale: float,
    plan: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    subsets = packing.Subsets(starts_q, lens_q, starts_kv, lens_kv)
    batch = BackwardBatch(q, k, v, subsets, single_launch_plan, max_seqlen_q, max_seqlen_kv, scale, grad_out, out, lse)
    return execution.backward(batch, plan)


def _backward_fake(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_EXACT = {Tensor}
_PRE_DISPATCH: Any = torch._C.DispatchKey.PreDispatch
_VMAP: Any = torch._C._parse_dispatch_key("VmapMode")
_FAST_EAGER = os.environ.get("TE_ATTN_OPS_DISPATCHER") != "1"
_PLAIN_KEYS: set[int] = set()  # the dispatch keys of tensors that were found plain


def _is_plain(x: Tensor) -> bool:
    if type(x) not in _PLAIN_TYPES:
        return False
    keys = torch._C._dispatch_keys(x).raw_repr()
    if keys in _PLAIN_KEYS:
        return True
    plain = (
        (x.is_cuda or x.is_cpu)
        and x.layout is torch.strided
        and not x.is_neg()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and not torch._is_functional_tensor(x)
        and not x._is_zerotensor()
    )
    if plain:
        _PLAIN_KEYS.add(keys)
    return plain


def is_observed() -> bool:
    """Whether a mode, a transform, a trace or a profiler looks at this thread's ops."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or (torch._C._len_torch_function_stack() and not _only_a_default_device())
        or torch._C._are_functorch_transforms_active()
        or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
        or torch._C._dispatch_tls_is_dispatch_key_included(_VMAP)
        or torch._C._get_tracing_state() is not None
        or torch.autograd.profiler._is_profiler_enabled  # in any thread
        or torch._C._autograd._profiler_enabled()  # in this one, without the Python front
    )


def _only_a_default_device() -> bool:
    """torch.set_default_device is a mode too; no factory function runs in a call that depends on it."""
    return torch._C._len_torch_function_stack() == 1 and type(torch._C._get_function_stack_at(0)) is DeviceContext


def _is_direct(floating: tuple[Tensor, ...], integers: Sequence[Tensor]) -> bool:
    """Whether a trip through the dispatcher would change nothing for a call of these tensors. A subclass among the integers (what a
    collective returned) is for the dispatcher to unwrap."""
    # Dynamo first: it is not to trace the rest, nor the kernels.
    if torch.compiler.is_dynamo_compiling() or not _FAST_EAGER or is_observed():
        return False
    return all(map(_is_plain, floating)) and {*map(type, integers)} == _EXACT


def attend(
    is_training: bool, q: Tensor, k: Tensor, v: Tensor, geometry: packing.Subsets, plan: list[Tensor], *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The op ``attention`` if ``is_training``, else ``attention_forward``. In plain eager mode without the dispatcher, whose two
    trips with Python kernels take 20 us and more of a call's host time."""
    if not _is_direct((q, k, v), (*geometry, *plan)):
        if is_training:
            return attention(q, k, v, *geometry, plan, *rest)
        return _trimmed_forward(v.shape[2], *_padded(q, k, v, rest[-1]), *geometry, plan, *rest)
    if not is_training:
        return _forward(q, k, v, *geometry, plan, *rest)
    # What Function.apply does where functorch has no part in it.
    return super(torch.autograd.Function, _Attention).apply(_forward, q, k, v, geometry, plan, rest)


def _padded(q: Tensor, k: Tensor, v: Tensor, plan: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """To the plan's width by ops of their own, which Inductor fuses into what produces q, k and v. In plain eager mode
    ``attention_forward`` pads by itself, and autograd saves less."""
    width = plan[plans.WIDTH]
    return execution.pad_head_dim(q, width), execution.pad_head_dim(k, width), execution.pad_head_dim(v, width)


def _trimmed_forward(head_dim_v: int, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, max_logit = attention_forward(*args)
    return execution.trim_head_dim(out, head_dim_v), lse, max_logit


class _Attention(torch.autograd.Function):
    """``forward``: what to call. ``geometry``: the four tensors of it. All but q, k and v in as few arguments as can be: apply looks at
    each."""

    @staticmethod
    def forward(
        ctx: Any, forward: Any, q: Tensor, k: Tensor, v: Tensor, geometry: tuple[Tensor, ...], plan: list[Tensor], rest: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, max_logit = forward(q, k, v, *geometry, plan, *rest)
        ctx.save_for_backward(q, k, v, out, lse, *geometry, *plan)
        ctx.rest = rest
        ctx.mark_non_differentiable(lse, max_logit)
        ctx.set_materialize_grads(False)
        return out, lse, max_logit

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        if grads[0] is None:
            return (None,) * 7
        # With create_graph the op: it refuses a second derivative.
        direct = not torch.is_grad_enabled() and _is_direct((q, k, v, grads[0]), tensors)
        backward: Any = _backward if direct else attention_backward
        # Out was saved as the next layer reads it, and is padded again in the op: no second copy of it is kept.
        grad_out = execution.pad_head_dim(grads[0], v.shape[2])
        dq, dk, dv = backward(grad_out, q, k, v, out, lse, *tensors[:4], tensors[4:], *ctx.rest)
        return None, dq, dk, dv, None, None, None


class _RefuseSecondDerivative(torch.autograd.Function):
    """Stands around the backward op wherever one of its inputs requires grad: differentiating it again must not pass silently
    (``once_differentiable`` lets ``(out.sum() + grad.pow(2).sum()).backward()`` through)."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return attention_backward(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("te_attn_ops attention has no second derivative: its backward cannot be differentiated")


def _attention_autograd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        forward: Any = attention_forward
        if not all(map(_is_plain, (q, k, v))):
            # A trace. What is observed in eager mode saves what an unobserved call saves: a checkpoint compares them.
            forward = functools.partial(_trimmed_forward, v.shape[2])
            q, k, v = _padded(q, k, v, rest[-1])
        return _Attention.apply(forward, q, k, v, rest[:4], rest[4], rest[5:])
    return attention_forward(q, k, v, *rest)


def _attention_backward_autograd(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in (grad_out, q, k, v)):
        return _RefuseSecondDerivative.apply(grad_out, q, k, v, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        return attention_backward(grad_out, q, k, v, *rest)


for _key in ("CPU", "CUDA"):
    _LIB.impl("policy_subsets", _policy_subsets, _key)
    _LIB.impl("attention_forward", _forward, _key)
    _LIB.impl("attention_backward", _backward, _key)
    _LIB.impl("attention", _forward, _key)
_FAKES: dict[str, Any] = {
    "policy_subsets": _policy_subsets_fake,
    "attention_forward": _forward_fake,
    "attention_backward": _backward_fake,
    "attention": _forward_fake,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"te_attn_ops::{_name}", _fake, lib=_LIB)
_LIB.impl("attention", _attention_autograd, "Autograd")
_LIB.impl("attention_backward", _attention_backward_autograd, "Autograd")


# -------------------------------------------------------------------------------------------------------------------- FLOPs
def _matmul_flops(q_shape: torch.Size, v_shape: torch.Size, max_seqlen_kv: int) -> tuple[int, int]:
    """FLOPs of one product over head_dim_qk and of one over head_dim_v, as if every row saw max_seqlen_kv keys (or all there
    are): an upper bound, since the lengths stand on the device."""
    tokens, heads, head_dim_qk = q_shape
    keys = min(int(max_seqlen_kv), v_shape[0])
    return 2 * heads * tokens * keys * head_dim_qk, 2 * heads * tokens * keys * v_shape[2]


@register_flop_formula([torch.ops.te_attn_ops.attention_forward, torch.ops.te_attn_ops.attention])
def _forward_flops(q_shape: Any, k_shape: Any, v_shape: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return sum(_matmul_flops(q_shape, v_shape, rest[6]))


@register_flop_formula(torch.ops.te_attn_ops.attention_backward)
def _backward_flops(grad_shape: Any, q_shape: Any, k_shape: Any, v_shape: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    # Q K^T again, dQ and dK over head_dim_qk; dP and dV over head_dim_v.
    over_qk, over_v = _matmul_flops(q_shape, v_shape, rest[8])
    return 3 * over_qk + 2 * over_v
