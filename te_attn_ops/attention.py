"""``thd_attention``: the public function. Plain Python that runs in eager and that Dynamo traces: checks, one choice that is a
constant for the graph, the routing, one op."""

from __future__ import annotations

import contextlib
import math
import operator
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import guard_or_false

from . import environment, ops, packing, plan as plans, policies as policy_module, rows, selection
from .checks import check_bool, check_selection
from .masks import Band, resolve_mask, warn_once
from .params import SEQLEN_BUCKETS, round_up, seqlen_bucket
from .policies import DISPATCHES, PreparedPolicies, prepare_thd_policies

PolicyList = Sequence[Mapping[str, Any]]


def thd_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    attn_mask_type: str | None = None,
    window_size: tuple[int, int] | None = None,
    bottom_right_diagonal: bool | None = None,
    thd_attention_policies: PreparedPolicies | PolicyList | None = None,
    thd_attention_policy_dispatch: str = "auto",
    softmax_scale: float | None = None,
    deterministic: bool | None = None,
    sanitize_padding: bool = False,
    backend: str | None = None,
    pad_head_dim: bool | None = None,
    selection: str | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
) -> Any:
    """Attention over a packed batch, each sequence by itself, under one mask or under a mask of its own.

    Differentiable in q, k and v; one op for Dynamo whatever the number of policies; no host sync where max_seqlen is given.

    Args:
        q: [total_q, num_heads, head_dim_qk].
        k: [total_kv, num_gqa_groups, head_dim_qk]; num_heads is a multiple of num_gqa_groups.
        v: [total_kv, num_gqa_groups, head_dim_v].
        cu_seqlens_q, cu_seqlens_kv: [N + 1] int32 or int64 on the device of q: token offsets of the sequences. cu_seqlens_kv None,
            or the same object as cu_seqlens_q, says that every sequence has as many query as key tokens; two tensors do not,
            equal contents or not.
        max_seqlen_q, max_seqlen_kv: upper bounds in tokens. A larger one changes nothing but speed; a smaller one is wrong, which only
            TE_ATTN_OPS_VALIDATE=1 and CPU tensors have checked. Missing ones are read from
            cu_seqlens in eager (one sync) and refused under compile and capture. kv defaults to q in self-attention.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: [N + 1] where each sequence's slot starts, if there are gaps; the sequence is the
            first cu_seqlens[n+1] - cu_seqlens[n] rows of its slot.
        attn_mask_type: a padding mask type (default "padding_causal"), with window_size ((left, right) in tokens, -1 unbounded) and
            bottom_right_diagonal as TransformerEngine reads them: see :func:`te_attn_ops.masks.resolve_mask`.
        thd_attention_policies: what :func:`prepare_thd_policies` returns or, in eager, the list it takes. Exclusive with
            attn_mask_type and window_size; bottom_right_diagonal is the default of policies that name none.
        thd_attention_policy_dispatch: "auto", "padded" (each policy in place), "single_launch" (all in one launch) or "grouped"
            (sort, run, restore).
        softmax_scale: default head_dim_qk ** -0.5, of the width given, padded or not.
        deterministic: a bitwise reproducible backward; default NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 or
            torch.are_deterministic_algorithms_enabled().
        sanitize_padding: select away what stands in rows of no sequence (q, k, v and grad_out) first. Without it, non-finite values
            there are the caller's risk on kernels that load whole tiles (flash3, flash4, cudnn_flex).
        backend: a backend's name, for this call; an error if it cannot run it. pad_head_dim: True or False to force the padding
            decision. selection: "static" or "measured"; default TE_ATTN_OPS_SELECTION or static.
        return_lse, return_max_logit: also return lse [num_heads, total_q] float32 (natural log of the scaled scores' sum of
            exponentials; not differentiable) and max_logit [num_heads] float32.

    Returns:
        out [total_q, num_heads, head_dim_v], or a tuple (out[, lse][, max_logit]). Rows that see no key, and rows of no sequence, are 0
        with lse -inf.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing has run then.
        NoBackendError: no backend takes the call; the message holds every reason.
    """
    cu_seqlens = (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
    mask = (attn_mask_type, window_size, bottom_right_diagonal)
    options = (thd_attention_policy_dispatch, backend, pad_head_dim, selection, deterministic, return_max_logit)
    try:
        is_training = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    except AttributeError:
        _check_qkv(q, k, v)
        raise
    eager = not environment.is_tracing()
    if torch._C._are_functorch_transforms_active() or (
        eager and (forward_ad._current_level >= 0 or torch._C._get_tracing_state() is not None)
    ):
        _refuse_transforms(q, k, v)
    if eager and isinstance(thd_attention_policies, (PreparedPolicies, type(None))):
        routing = _ROUTINGS.find(cu_seqlens, thd_attention_policies, q)
    else:
        routing = None
    if routing is None:
        pack = packing.make_packing(q, *cu_seqlens)
        prepared = _prepared(thd_attention_policies, pack)
        if eager and prepared is not thd_attention_policies:  # a list, perhaps met before
            routing = _ROUTINGS.find(cu_seqlens, prepared, q)
    else:
        pack = packing.trusted_packing(*cu_seqlens)
        prepared = thd_attention_policies  # type: ignore[assignment]
    bound_q, bound_kv, bucket = _max_seqlens(pack, max_seqlen_q, max_seqlen_kv)
    decide = _decide_eager if eager else _decide
    decision = decide(q, k, v, pack, prepared, bucket, is_training, mask, options)
    if eager:
        sizes = (q.shape[0], k.shape[0], bound_q, bound_kv)
        if routing is None or sizes not in routing.checked:
            checked = _check_contents(pack, prepared, q, k, bound_q, bound_kv)
            routing = _ROUTINGS.keep(cu_seqlens, prepared) if routing is None else routing
            if routing is not None and checked:
                routing.note(sizes)
    if eager and decision.plan[1] & plans.PLAIN_CU_SEQLENS:
        subsets = packing.plain_subsets(pack.cu_seqlens_q, pack.cu_seqlens_kv, copy=is_training)
    else:
        subsets = _subsets(pack, prepared, decision, routing)

    if sanitize_padding is not False:
        check_bool("sanitize_padding", sanitize_padding)
        q, k, v, real_rows = _sanitize(q, k, v, pack)
    scale = operator.index(q.shape[2]) ** -0.5 if softmax_scale is None else _check_scale(softmax_scale)
    plan = decision.plan
    if eager and prepared is not None and plan[1] & plans.CONTIGUOUS:
        plan = _with_runs(plan, prepared, q)
    tensors: list[Tensor] = []
    if decision.single_launch is not None:
        tensors = prepared.plans[decision.single_launch].tensors  # type: ignore[union-attr]
    rest = (tensors, bound_q, bound_kv, scale, plan)
    out, lse, max_logit = ops.attend(is_training, q, k, v, subsets, *rest)
    if sanitize_padding:
        # Selecting once more on the way out keeps a non-finite grad_out of those rows from the backward kernels.
        out = torch.where(real_rows, out, torch.zeros((), dtype=out.dtype, device=out.device))
    if return_lse is not False:
        check_bool("return_lse", return_lse)
    if not (return_lse or return_max_logit):
        return out
    return (out, *([lse] if return_lse else []), *([max_logit] if return_max_logit else []))


# ------------------------------------------------------------------------------------------------------------------- checks
def _refuse_transforms(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Under torch.func requires_grad reads False in compiled code, and kernels drop a tangent: both would be silent zeros. A trace of
    TorchScript has tensors for sizes."""
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError("thd_attention cannot be traced by torch.jit.trace: use torch.compile or torch.export")
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "thd_attention does not work inside a torch.func transform (grad, vjp, jvp, vmap, ...); use torch.autograd.grad or backward"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"thd_attention has no forward-mode derivative, but {name} is a dual tensor")


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor [tokens, heads, head_dim], got {type(x).__name__}")
        if x.dim() != 3:
            raise ValueError(f"{name} must be [tokens, heads, head_dim] (the packed thd layout), got shape {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}; got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}; got {x.device}")
    if not q.dtype.is_floating_point:
        raise TypeError(f"q must have a floating dtype, got {q.dtype}")
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"k and v must have the same number of tokens, got {k.shape[0]} and {v.shape[0]}")
    heads, groups = operator.index(q.shape[1]), operator.index(k.shape[1])
    if operator.index(v.shape[1]) != groups:
        raise ValueError(f"k and v must have the same number of heads, got {groups} and {v.shape[1]}")
    if groups == 0 or heads == 0 or heads % groups:
        raise ValueError(f"q's number of heads must be a multiple of k's, got {heads} and {groups}")
    if operator.index(q.shape[2]) != operator.index(k.shape[2]):
        raise ValueError(f"q and k must have the same head_dim, got {q.shape[2]} and {k.shape[2]}")
    if operator.index(q.shape[2]) == 0 or operator.index(v.shape[2]) == 0:
        raise ValueError(f"head_dim must be at least 1, got q {q.shape[2]} and v {v.shape[2]}")


def _check_scale(softmax_scale: object) -> float:
    if isinstance(softmax_scale, Tensor):
        raise TypeError(
            "softmax_scale must be a number, got a tensor, which would get no gradient: multiply q by it and pass softmax_scale=1.0"
        )
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"softmax_scale must be a number, got {type(softmax_scale).__name__}")
    if not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale must be positive and finite, got {softmax_scale}")
    return float(softmax_scale)


def _check_contents(
    pack: packing.Packing, prepared: PreparedPolicies | None, q: Tensor, k: Tensor, max_seqlen_q: int, max_seqlen_kv: int
) -> bool:
    """What only the contents of cu_seqlens can tell, where reading them is free: on the CPU; elsewhere with TE_ATTN_OPS_VALIDATE=1.

    Returns whether that is settled: False where they could not be read now.
    """
    if type(q) is not Tensor or type(k) is not Tensor:
        return False
    readable = packing.may_read_contents(pack.cu_seqlens_q)
    if not readable:
        return readable is False
    packing.validate_packed(
        pack.cu_seqlens_q,
        pack.cu_seqlens_kv,
        total_q=q.shape[0],
        total_kv=k.shape[0],
        cu_seqlens_q_padded=pack.slots_q,
        cu_seqlens_kv_padded=pack.slots_kv,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
    )
    if prepared is not None and prepared.equal_lengths and not pack.equal_lengths:
        policy_module.check_equal_lengths(pack)
    return True


def _check_options(dispatch: str, policies: object, selection_mode: str | None, backend: object) -> None:
    if dispatch not in DISPATCHES:
        raise ValueError(f"thd_attention_policy_dispatch={dispatch!r} is unknown; use one of {', '.join(DISPATCHES)}")
    if dispatch != "auto" and policies is None:
        raise ValueError(f"thd_attention_policy_dispatch={dispatch!r} needs thd_attention_policies, got None")
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be a backend's name or None, got {type(backend).__name__} {backend!r}")
    check_selection(selection_mode)


def _check_exclusive(attn_mask_type: object, window_size: object) -> None:
    for name, value in (("attn_mask_type", attn_mask_type), ("window_size", window_size)):
        if value is not None:
            raise ValueError(f"{name}={value!r} cannot stand beside thd_attention_policies: each policy names its own")


def _prepared(policies: PreparedPolicies | PolicyList | None, pack: packing.Packing) -> PreparedPolicies | None:
    if policies is None:
        return None
    if not isinstance(policies, PreparedPolicies):
        if environment.is_tracing():
            raise ValueError(
                "thd_attention_policies must be what prepare_thd_policies returns under torch.compile: a list is checked on the host. "
                "Call prepare_thd_policies before the compiled function"
            )
        policies = _RAW_LISTS.prepare(policies, pack)
    if policies.policy_index.shape[0] != pack.cu_seqlens_q.shape[0] - 1:
        raise ValueError(
            f"thd_attention_policies was prepared for {policies.policy_index.shape[0]} sequences, cu_seqlens_q has "
            f"{pack.cu_seqlens_q.shape[0] - 1}: prepare it again for this batch"
        )
    if policies.policy_index.device != pack.cu_seqlens_q.device:
        raise ValueError(
            f"thd_attention_policies was prepared on {policies.policy_index.device}, cu_seqlens_q is on {pack.cu_seqlens_q.device}"
        )
    return policies


def _types(window: Any) -> tuple[type, ...]:
    """Beside a window in a key of something remembered: (2.0, 1) == (2, True)."""
    return () if window is None else tuple(map(type, window))


class _RawLists:
    """Lists of dicts that were checked before, by the identity and version of their tensors and of cu_seqlens, so that a list used under
    capture needs no sync; one first seen there is an error. Keeps no tensor of the caller alive."""

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[tuple[Any, ...], tuple[tuple[weakref.ref[Tensor], ...], PreparedPolicies]] = OrderedDict()
        # A CUDA graph reads their indices at every replay, and nobody else holds them: never dropped.
        self._captured: dict[int, PreparedPolicies] = {}

    def prepare(self, policies: PolicyList, pack: packing.Packing) -> PreparedPolicies:
        key, tensors = self._key(policies, pack)
        entry = self._entries.get(key) if key is not None else None
        if entry is not None and all(reference() is tensor for reference, tensor in zip(entry[0], tensors)):
            with contextlib.suppress(KeyError):  # another thread may just have dropped it
                self._entries.move_to_end(key)  # type: ignore[arg-type]
            if pack.cu_seqlens_q.is_cuda and torch.cuda.is_current_stream_capturing():
                self._captured[id(entry[1])] = entry[1]
            return entry[1]
        prepared = prepare_thd_policies(
            policies,
            pack.cu_seqlens_q,
            pack.cu_seqlens_kv,
            cu_seqlens_q_padded=pack.slots_q,
            cu_seqlens_kv_padded=pack.slots_kv,
        )
        if key is not None:
            self._entries[key] = (tuple(weakref.ref(tensor) for tensor in tensors), prepared)
            while len(self._entries) > self._capacity:
                self._entries.popitem(last=False)
        return prepared

    @staticmethod
    def _key(policies: PolicyList, pack: packing.Packing) -> tuple[tuple[Any, ...] | None, list[Tensor]]:
        tensors = list(pack[:4])
        masks: list[object] = []
        if isinstance(policies, Tensor):
            return None, tensors
        try:
            for policy in policies:
                tensors.append(policy["sequence_ids"])
                window = policy["window_size"]
                window = window if window is None else tuple(window)
                aligned = policy.get("bottom_right_diagonal")
                masks.append((policy["mask_type"], window, _types(window), aligned, type(aligned), len(policy)))
            key = (tuple(masks), *[(id(tensor), tensor._version) for tensor in tensors])
            hash(key)
        except (TypeError, KeyError, AttributeError, RuntimeError):
            return None, tensors  # malformed (prepare says how), or inference tensors, which have no version
        return key, tensors

    def clear(self) -> None:
        self._entries.clear()


_RAW_LISTS = _RawLists()


# ------------------------------------------------------------------------------------------------------------------ geometry
def _bands(
    prepared: PreparedPolicies | None, attn_mask_type: str | None, window_size: object, bottom_right_diagonal: bool | None
) -> tuple[Band, ...]:
    if prepared is not None:
        return policy_module.bands_of(prepared, bottom_right_diagonal)
    resolved = resolve_mask("padding_causal" if attn_mask_type is None else attn_mask_type, window_size, bottom_right_diagonal)
    if resolved.warnings and not environment.is_tracing():
        warn_once(resolved.warnings, stacklevel=4)
    return (resolved.band,)


def _max_seqlens(pack: packing.Packing, max_seqlen_q: int | None, max_seqlen_kv: int | None) -> tuple[int, int, tuple[int, int]]:
    """The bounds that the op gets, and the buckets that the choice is made for. Under compile they are the same, so that a batch
    within a bucket neither recompiles nor records another CUDA graph."""
    if type(max_seqlen_q) is int and type(max_seqlen_kv) in (int, type(None)) and not environment.is_tracing():
        # The common eager call, without a detour.
        if max_seqlen_kv is None and pack.equal_lengths and max_seqlen_q >= 0:
            bucket = seqlen_bucket(max_seqlen_q)
            return max_seqlen_q, max_seqlen_q, (bucket, bucket)
    if max_seqlen_q is None:
        max_seqlen_q = packing.derive_max_seqlen("max_seqlen_q", pack.cu_seqlens_q)
    if max_seqlen_kv is None:
        if pack.equal_lengths:
            max_seqlen_kv = max_seqlen_q
        else:
            max_seqlen_kv = packing.derive_max_seqlen("max_seqlen_kv", pack.cu_seqlens_kv)
    max_seqlen_q = packing.check_max_seqlen("max_seqlen_q", max_seqlen_q)
    max_seqlen_kv = packing.check_max_seqlen("max_seqlen_kv", max_seqlen_kv)
    if environment.is_tracing():
        bucket_q = _traced_bucket(max_seqlen_q)
        bucket_kv = bucket_q if max_seqlen_kv is max_seqlen_q else _traced_bucket(max_seqlen_kv)
        return bucket_q, bucket_kv, (bucket_q, bucket_kv)
    return max_seqlen_q, max_seqlen_kv, (seqlen_bucket(max_seqlen_q), seqlen_bucket(max_seqlen_kv))


def _traced_bucket(length: Any) -> int:
    for bound in SEQLEN_BUCKETS:
        if guard_or_false(length <= bound):
            return bound
    if guard_or_false(length > SEQLEN_BUCKETS[-1]):
        return round_up(operator.index(length), SEQLEN_BUCKETS[-1])  # a symbolic one cannot enter a constant function
    return SEQLEN_BUCKETS[-1]  # a value that is not known while tracing


class _Routing:
    """What is remembered of one batch's offsets and policies: they were checked, and how prepared policies route its sequences."""

    __slots__ = ("checked", "references", "subsets", "versions")

    def __init__(self, tensors: list[Tensor], prepared: PreparedPolicies | None) -> None:
        self.references: list[weakref.ref[Any]] = [weakref.ref(tensor) for tensor in tensors]
        self.versions = [tensor._version for tensor in tensors]
        self.checked: set[tuple[int, ...]] = set()  # rows and bounds that the contents were checked against
        self.subsets: dict[tuple[bool, int], packing.Subsets] = {}  # by whether the policies' index routes, and the stream
        if prepared is not None:
            self.references.append(weakref.ref(prepared))

    def note(self, sizes: tuple[int, ...]) -> None:
        if len(self.checked) >= 16:
            self.checked.clear()
        self.checked.add(sizes)


class _Routings:
    """The routings of the last eager calls, by the identity and version of their tensors: a model's layers share them. Keeps no
    tensor of the caller alive."""

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[tuple[int, ...], _Routing] = OrderedDict()

    def find(self, cu_seqlens: tuple[Tensor | None, ...], prepared: PreparedPolicies | None, q: Tensor) -> _Routing | None:
        found = self._entries.get((id(prepared), *map(id, cu_seqlens)))
        if found is None or cu_seqlens[0].device != q.device:  # type: ignore[union-attr]
            return None
        tensors = [tensor for tensor in cu_seqlens if tensor is not None]
        if prepared is not None:
            tensors.append(prepared.policy_index)
        for tensor, reference, version in zip(tensors, found.references, found.versions):
            if reference() is not tensor or tensor._version != version:
                return None
        return found if prepared is None or found.references[-1]() is prepared else None

    def keep(self, cu_seqlens: tuple[Tensor | None, ...], prepared: PreparedPolicies | None) -> _Routing | None:
        tensors = [tensor for tensor in cu_seqlens if tensor is not None]
        if prepared is not None:
            tensors.append(prepared.policy_index)
        if any(type(tensor) is not Tensor or tensor.is_inference() for tensor in tensors):
            return None  # inference tensors have no version, subclasses a life of their own
        routing, key = _Routing(tensors, prepared), (id(prepared), *map(id, cu_seqlens))
        self._entries[key] = routing
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        return routing

    def clear(self) -> None:
        self._entries.clear()


_ROUTINGS = _Routings()


def _subsets(pack: packing.Packing, prepared: PreparedPolicies | None, decision: _Decision, routing: _Routing | None) -> Any:
    """The routing as tensors: one small kernel. Eager calls keep it for prepared policies, which belong to one batch, except
    during a capture or a trace: a replay must read what the tensors hold then. cu_seqlens alone promise nothing: a broadcast into them,
    for one, does not raise their version."""
    keep, stream = False, 0
    if routing is not None and prepared is not None and not prepared.mutable and not ops.is_observed():
        if pack.cu_seqlens_q.is_cuda:
            keep = not torch.cuda.is_current_stream_capturing()
            stream = torch._C._cuda_getCurrentRawStream(pack.cu_seqlens_q.get_device())
        else:
            keep = True
    if keep and routing is not None:
        found = routing.subsets.get((decision.routed, stream))
        if found is not None:
            return found
    index = prepared.policy_index if decision.routed and prepared is not None else None
    slots_q = pack.slots_q if pack.slots_q is not pack.cu_seqlens_q else None
    slots_kv = pack.slots_kv if pack.slots_kv is not pack.cu_seqlens_kv else None
    fresh = packing.Subsets(*ops.policy_subsets(pack.cu_seqlens_q, pack.cu_seqlens_kv, slots_q, slots_kv, index, decision.num_policies))
    if keep and routing is not None and not fresh.starts_q.is_inference():
        routing.subsets[decision.routed, stream] = fresh  # an inference tensor could not be saved for a later call's backward
    return fresh


# -------------------------------------------------------------------------------------------------------------------- choice
def _flags(
    deterministic: bool | None,
    env: tuple[bytes, ...],
    return_max_logit: bool,
    equal_lengths: bool,
    is_training: bool,
) -> int:
    if deterministic is None:
        deterministic = env[6] == b"0" or torch.are_deterministic_algorithms_enabled()
    flags = 0
    if deterministic:
        flags |= plans.DETERMINISTIC | (plans.DETERMINISTIC_ALGORITHMS if environment.deterministic_algorithms() else 0)
    if return_max_logit:
        flags |= plans.MAX_LOGIT
    if equal_lengths:
        flags |= plans.EQUAL_LENGTHS
    if is_training:
        flags |= plans.TRAINING
    return flags


_WIDE = 1 << 31


def _is_wide(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a tensor of the call, padded as a kernel may want it, has 2^31 elements or more. An exported graph is taken to have
    fewer: it may not be bounded by a guard."""
    head_dim = round_up(max(operator.index(q.shape[2]), operator.index(v.shape[2])), 8)
    size_q, size_k = q.shape[0] * q.shape[1] * head_dim, k.shape[0] * k.shape[1] * head_dim
    if not environment.is_tracing() and type(size_q) is type(size_k) is int:
        return size_q >= _WIDE or size_k >= _WIDE
    if torch.compiler.is_exporting():
        return False
    return guard_or_false(size_q >= _WIDE) or guard_or_false(size_k >= _WIDE)


def _selection_of(variable: bytes) -> str:
    """What TE_ATTN_OPS_SELECTION asks for."""
    if variable not in (b"static", b"measured", b"") and not environment.is_tracing():
        name = variable.decode(errors="replace")
        warn_once((f"TE_ATTN_OPS_SELECTION={name!r} is unknown and 'static' is used: it takes static or measured",), stacklevel=6)
    return "measured" if variable == b"measured" else "static"


class _Decision(NamedTuple):
    """All that a call does differently from another of the same geometry."""

    plan: list[int]
    num_policies: int
    routed: bool  # by the policies' index; False where one policy holds every sequence
    single_launch: int | None  # which of the policies' plans the one launch takes; None for another dispatch


_Mask = tuple[Any, Any, Any]
_Options = tuple[Any, ...]


def _decide(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pack: packing.Packing,
    prepared: PreparedPolicies | None,
    bucket: tuple[int, int],
    is_training: bool,
    mask: _Mask,
    options: _Options,
) -> _Decision:
    """Reduces a call to constants, asks for the choice and writes it down. Widths and head counts go through ``operator.index``: a
    symbolic one cannot enter a constant function, and each is a property of the model."""
    dispatch, backend, pad_head_dim, selection_mode, deterministic, return_max_logit = options
    _check_qkv(q, k, v)
    if pack.equal_lengths and pack.slots_kv is pack.slots_q and q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q has {q.shape[0]} tokens and k {k.shape[0]}: with one cu_seqlens for both (self-attention) they must be as many. q, k "
            "and v are [tokens, heads, head_dim]; for cross-attention pass cu_seqlens_kv"
        )
    _check_options(dispatch, prepared, selection_mode, backend)
    check_bool("return_max_logit", return_max_logit)
    for name, value in (("pad_head_dim", pad_head_dim), ("deterministic", deterministic)):
        if value is not None:
            check_bool(name, value)
    if prepared is not None:
        _check_exclusive(mask[0], mask[1])
    equal_lengths = pack.equal_lengths or (prepared is not None and prepared.equal_lengths)
    bands = tuple([band.canonical(equal_lengths) for band in _bands(prepared, *mask)])
    env = environment.snapshot()
    flags = _flags(deterministic, env, return_max_logit, equal_lengths, is_training)
    heads = (operator.index(q.shape[1]), operator.index(k.shape[1]))
    head_dims = (operator.index(q.shape[2]), operator.index(v.shape[2]))
    if _is_wide(q, k, v):
        flags |= plans.WIDE_OFFSETS
    single_launch = _single_launch_plan(prepared, q.dtype, heads, head_dims, bands, is_training)
    if selection_mode is None:
        selection_mode = _selection_of(env[7])

    def choose(flags: int) -> tuple[int, ...]:
        return selection.select_numbers(
            q.dtype,
            q.device,
            heads,
            head_dims,
            tuple([band.as_ints() for band in bands]),
            bucket,
            flags,
            pack.has_gaps,
            prepared is None or not prepared.mutable,
            single_launch is not None,
            backend,
            pad_head_dim,
            dispatch,
            selection_mode,
            env,
            environment.STATE.generation,
        )

    # Runs of neighbours touch only without gaps. Dynamo guards what is read: there, only where a kernel makes use of them.
    tracing, may_be_runs = environment.is_tracing(), prepared is not None and len(bands) > 1 and not pack.has_gaps
    told = not tracing and may_be_runs and prepared.contiguous  # type: ignore[union-attr]
    numbers = choose(flags | plans.CONTIGUOUS if told else flags)
    if may_be_runs and selection.uses_runs(numbers[2:]) and prepared.contiguous:  # type: ignore[union-attr]
        if tracing:
            numbers = choose(flags | plans.CONTIGUOUS)
        if numbers[0] == plans.PADDED and selection.uses_runs(numbers[2:]):
            flags |= plans.CONTIGUOUS
    if pack.has_gaps:
        flags |= plans.GAPS
    # One policy over all sequences needs no routing, unless its members may still change.
    routed = prepared is not None and (len(bands) > 1 or prepared.mutable)
    if numbers[0] == plans.PADDED and not routed and not pack.has_gaps:
        flags |= plans.PLAIN_CU_SEQLENS
    plan = plans.encode(flags, numbers[0], numbers[1], bands, numbers[2:])
    return _Decision(plan, len(bands), routed, single_launch if numbers[0] == plans.SINGLE_LAUNCH else None)


def _with_runs(plan: list[int], prepared: PreparedPolicies, q: Tensor) -> list[int]:
    """The plan with the run of each policy, for kernels that can be told of it by a slice of cu_seqlens."""
    runs = prepared.runs
    if runs is None or ops.is_observed():
        return plan
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        policy_module.note_capture(prepared)
    return plans.with_runs(plan, runs)


_DECISIONS: dict[tuple[Any, ...], _Decision] = {}
selection.on_invalidate(_DECISIONS.clear)
selection.on_invalidate(_ROUTINGS.clear)
selection.on_invalidate(_RAW_LISTS.clear)


def _decide_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pack: packing.Packing,
    prepared: PreparedPolicies | None,
    bucket: tuple[int, int],
    is_training: bool,
    mask: _Mask,
    options: _Options,
) -> _Decision:
    """:func:`_decide`, and the checks that come with it, once per kind of call: afterwards a tuple and a look-up."""
    key: tuple[Any, ...] | None = (
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, q.shape[1:], k.shape[1:], v.shape[1:], k.shape[0] == v.shape[0],
        q.shape[0] == k.shape[0], q.dim() == k.dim() == v.dim() == 3 and _is_wide(q, k, v), pack.equal_lengths,
        pack.slots_q is pack.slots_kv, pack.has_gaps, bucket, is_training, mask, options,
        # 1 == True, and 2.0 == 2
        type(mask[2]), _types(mask[1]) if type(mask[1]) is tuple else type(mask[1]), *map(type, options),
        torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only(),
        environment.snapshot(), environment.STATE.generation,
    )  # fmt: skip
    if prepared is not None:
        key = (*key, prepared.kind, *[plan.spec for plan in prepared.plans])  # type: ignore[misc]
    if selection.is_recording():
        key = None
    try:
        found = _DECISIONS.get(key)  # type: ignore[arg-type]
    except TypeError:  # a window given as a list
        key = found = None
    if found is None:
        found = _decide(q, k, v, pack, prepared, bucket, is_training, mask, options)
        if key is not None:
            if len(_DECISIONS) >= 4096:
                _DECISIONS.clear()
            _DECISIONS[key] = found
    return found


def _single_launch_plan(
    prepared: PreparedPolicies | None,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    bands: tuple[Band, ...],
    is_training: bool,
) -> int | None:
    """The number of the plan that was made for this attention."""
    if prepared is None:
        return None
    for number, plan in enumerate(prepared.plans):
        spec = plan.spec
        if (
            spec.dtype == dtype
            and (spec.num_heads, spec.num_gqa_groups) == heads
            and (spec.head_dim_qk, spec.head_dim_v) == head_dims
            and (spec.training or not is_training)
            and spec.bands == bands
        ):
            return number
    return None


# ------------------------------------------------------------------------------------------------------------------- tensors
def _sanitize(q: Tensor, k: Tensor, v: Tensor, pack: packing.Packing) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v with 0 at rows of no sequence, and the mask [total_q, 1, 1] of q's real rows."""
    real_q = rows.subset_row_mask(pack.slots_q, pack.cu_seqlens_q[1:] - pack.cu_seqlens_q[:-1], q.shape[0])[:, None, None]
    real_kv = rows.subset_row_mask(pack.slots_kv, pack.cu_seqlens_kv[1:] - pack.cu_seqlens_kv[:-1], k.shape[0])[:, None, None]
    zero = torch.zeros((), dtype=q.dtype, device=q.device)
    return torch.where(real_q, q, zero), torch.where(real_kv, k, zero), torch.where(real_kv, v, zero), real_q
