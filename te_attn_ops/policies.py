"""Per-sequence policies: the user's list, checked once, as a small pytree that Dynamo and export take."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import packing
from .checks import check_bool, check_dtype, check_int, check_positive_int
from .environment import is_tracing
from .masks import Band, normalize_window, require_padding_mask_type, resolve_mask, warn_once

DISPATCHES = ("auto", "padded", "single_launch", "grouped")
_KEYS = frozenset({"sequence_ids", "mask_type", "window_size", "bottom_right_diagonal"})
_REQUIRED_KEYS = frozenset({"sequence_ids", "mask_type", "window_size"})
ARGUMENT = "thd_attention_policies"
SINGLE_LAUNCH_BACKEND = "cudnn_flex"


@dataclass(frozen=True)
class AttentionPolicy:
    """One policy's mask. ``bottom_right_diagonal`` None falls back to the call's, then to the module's."""

    mask_type: str
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None

    def band(self, default_bottom_right: bool | None) -> Band:
        aligned = self.bottom_right_diagonal if self.bottom_right_diagonal is not None else default_bottom_right
        return resolve_mask(self.mask_type, self.window_size, aligned).band


@dataclass(frozen=True)
class PlanSpec:
    """The attention that a single-launch plan was made for."""

    dtype: torch.dtype
    num_heads: int
    num_gqa_groups: int
    head_dim_qk: int
    head_dim_v: int
    training: bool
    bands: tuple[Band, ...] = ()

    def __post_init__(self) -> None:
        """
        Raises:
            TypeError, ValueError: naming the field.
        """
        check_dtype("dtype", self.dtype)
        for name in ("num_heads", "num_gqa_groups", "head_dim_qk", "head_dim_v"):
            check_positive_int(name, getattr(self, name))
        if self.num_heads % self.num_gqa_groups:
            raise ValueError(f"num_heads must be a multiple of num_gqa_groups, got {self.num_heads} and {self.num_gqa_groups}")
        check_bool("training", self.training)


@dataclass(frozen=True)
class SingleLaunchPlan:
    """A single-launch backend's mask as plain tensors, and the attention it fits."""

    tensors: list[Tensor]
    spec: PlanSpec


@dataclass(frozen=True, eq=False)
class PreparedPolicies:
    """Checked policies of one batch. Made by :func:`prepare_thd_policies`; read-only.

    Attributes:
        policy_index: [N] int32, the policy of each sequence. The only thing read at run time: with ``mutable=True`` its
            contents may change under a captured graph.
        plans: single-launch plans, one per attention spec.
        policies: the masks, in the order of the index.
        mutable: the partition may change.
        contiguous: each policy's sequences are one run of neighbours.
        equal_lengths: every sequence has as many query as key tokens (promised by the caller and checked).
    """

    policy_index: Tensor
    plans: list[SingleLaunchPlan]
    policies: tuple[AttentionPolicy, ...]
    mutable: bool = False
    contiguous: bool = False
    equal_lengths: bool = False

    @property
    def num_policies(self) -> int:
        return len(self.policies)

    @property
    def runs(self) -> tuple[tuple[int, int], ...] | None:
        """(first sequence, number of sequences) of each policy, where they are runs of neighbours and the host knows them. For eager
        calls: no field, for a compiled graph that saw it would be one batch's."""
        if self.mutable or not self.contiguous:
            return None
        known = _RUNS.get(self.policy_index)
        return None if known is None else known.each

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PreparedPolicies:
        """The same policies on another device, as a data loader's worker hands them on. Single-launch plans are left behind: they
        are made on the device that they are for."""
        if isinstance(device, (torch.dtype, Tensor)):
            raise TypeError(f"device must be a device, got {type(device).__name__}: policies have no floating dtype")
        with torch.inference_mode(False):  # as in prepare_thd_policies
            index = self.policy_index.to(device, non_blocking=non_blocking)
        if index is self.policy_index:
            return self
        _note_runs(index, self.runs)
        return dataclasses.replace(self, policy_index=index, plans=[])

    def pin_memory(self) -> PreparedPolicies:
        """The same policies in pinned memory, as ``DataLoader(pin_memory=True)`` asks for them."""
        with torch.inference_mode(False):
            index = self.policy_index.pin_memory()
        if index is not self.policy_index:
            _note_runs(index, self.runs)
        return dataclasses.replace(self, policy_index=index)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tells the allocator that a stream other than the one they were made on uses the tensors: ``Tensor.record_stream`` of each."""
        for tensor in (self.policy_index, *[tensor for plan in self.plans for tensor in plan.tensors]):
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def pad_to(self, num_sequences: int, fill_policy: int = 0) -> PreparedPolicies:
        """The same policies for a batch with empty sequences added at its end, as :func:`te_attn_ops.pad_packed_batch` adds them; they go
        to policy number ``fill_policy``. Single-launch plans are left behind."""
        count = self.policy_index.shape[0]
        num_sequences = check_int("num_sequences", num_sequences)
        fill_policy = check_int("fill_policy", fill_policy)
        if num_sequences < count:
            raise ValueError(f"num_sequences={num_sequences} is below the {count} sequences that were prepared")
        if not 0 <= fill_policy < self.num_policies:
            raise ValueError(f"fill_policy={fill_policy} is out of range: there are {self.num_policies} policies")
        with torch.inference_mode(False):  # as in prepare_thd_policies
            index = torch.cat([self.policy_index, self.policy_index.new_full((num_sequences - count,), fill_policy)])
        contiguous = self.contiguous and num_sequences == count  # else not known without reading the index
        return dataclasses.replace(self, policy_index=index, plans=[], contiguous=contiguous)

    @functools.cached_property
    def kind(self) -> tuple[object, ...]:
        """What a choice may depend on, as one hashable value."""
        return (self.policies, self.mutable, self.contiguous, self.equal_lengths)


def _register_constant(cls: type[Any], restore: Callable[[list[Any]], Any]) -> None:
    """Makes a class part of the structure of an exported program's inputs. ``pytree.register_constant`` could not be saved."""
    torch.utils._pytree.register_pytree_node(
        cls,
        lambda value: ([], value),
        lambda children, value: value,
        serialized_type_name=f"te_attn_ops.{cls.__name__}",
        to_dumpable_context=lambda value: [str(x) if isinstance(x, torch.dtype) else x for x in dataclasses.astuple(value)],
        from_dumpable_context=restore,
        flatten_with_keys_fn=lambda value: ([], value),
    )


_register_constant(AttentionPolicy, lambda x: AttentionPolicy(x[0], None if x[1] is None else tuple(x[1]), x[2]))
_register_constant(PlanSpec, lambda x: PlanSpec(*[getattr(torch, x[0].split(".")[1]), *x[1:-1], tuple(Band(*band) for band in x[-1])]))
torch.export.register_dataclass(SingleLaunchPlan, serialized_type_name="te_attn_ops.SingleLaunchPlan")
torch.export.register_dataclass(PreparedPolicies, serialized_type_name="te_attn_ops.PreparedPolicies")
torch.serialization.add_safe_globals([AttentionPolicy, Band, PlanSpec, PreparedPolicies, SingleLaunchPlan])


def prepare_thd_policies(
    policies: Sequence[Mapping[str, Any]],
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None = None,
    *,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    mutable: bool = False,
    keep_empty: bool = False,
    equal_lengths: bool = False,
    validate: bool = True,
    attention: Any = None,
    bottom_right_diagonal: bool | None = None,
    total_q: int | None = None,
    total_kv: int | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
) -> PreparedPolicies:
    """Checks a list of policies against a packed batch and routes every sequence to its policy.

    Eager only, once per batch geometry (in a data loader, or before a graph is captured); it reads the ids on the host. What it
    returns belongs to these cu_seqlens: eager calls remember the routing for as long as the tensors are these and PyTorch counts no
    change in them. It counts none that is made through another library (a NumPy array over the same memory): then prepare anew.

    Args:
        policies: dicts with ``sequence_ids`` (1-D int32/int64 tensor on the device of cu_seqlens, strictly ascending),
            ``mask_type`` (a padding type), ``window_size`` ((left, right) or None) and optionally ``bottom_right_diagonal``.
            Together the ids cover every sequence once. The order of the list means nothing. A policy without sequences is
            accepted and, unless ``mutable`` or ``keep_empty``, dropped.
        cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded: [N + 1], as in :func:`thd_attention`.
        mutable: the contents of ``policy_index`` will be changed later; backends that bake the partition are not used.
        keep_empty: keep policies without sequences too. Compiled code makes one graph per list of policies that it meets: with
            this, one for all batches, which pay a launch for an empty policy.
        equal_lengths: promise that every sequence has as many query as key tokens although cu_seqlens_q and cu_seqlens_kv
            are two tensors; checked here.
        validate: also check the contents of cu_seqlens (:func:`validate_packed`).
        attention: makes the mask plan of the single-launch backend too, where that takes the attention: a :class:`PlanSpec`, a
            module with a ``plan_spec()`` method (ours have one), or a list (a ModuleList) of these. Without it, or where the
            backend refuses, calls use another dispatch and ``explain`` says so.
        bottom_right_diagonal: for policies that name none, before the calls' own default.
        total_q, total_kv: rows of q and of k/v, checked with ``validate`` and for the plan; default the end of the last slot.
        max_seqlen_q, max_seqlen_kv: bounds in tokens, checked with ``validate`` and for the plan and its later refreshes; default
            the longest sequence.

    Raises:
        TypeError, ValueError: naming the policy, the key, the value seen and what would be right.
    """
    if is_tracing():
        raise RuntimeError("prepare_thd_policies reads tensors on the host: call it before the compiled function and pass its result")
    if not isinstance(cu_seqlens_q, Tensor):
        raise TypeError(f"cu_seqlens_q must be a tensor [num_sequences + 1], got {type(cu_seqlens_q).__name__}; policies come first")
    if cu_seqlens_q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("prepare_thd_policies reads tensors on the host: call it before the capture of a CUDA graph")
    for name, value in (("mutable", mutable), ("keep_empty", keep_empty), ("equal_lengths", equal_lengths), ("validate", validate)):
        check_bool(name, value)
    if bottom_right_diagonal is not None:
        check_bool("bottom_right_diagonal", bottom_right_diagonal)
    pack = packing.make_packing(cu_seqlens_q, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
    bounds: dict[str, Any] = {"total_q": total_q, "total_kv": total_kv, "max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv}
    if validate:
        slots: dict[str, Any] = {"cu_seqlens_q_padded": cu_seqlens_q_padded, "cu_seqlens_kv_padded": cu_seqlens_kv_padded}
        packing.validate_packed(cu_seqlens_q, cu_seqlens_kv, **slots, **bounds)
    if equal_lengths and not pack.equal_lengths:
        check_equal_lengths(pack)
    num_seqs = cu_seqlens_q.shape[0] - 1
    masks, ids = _check_policies(policies, cu_seqlens_q.device, bottom_right_diagonal)
    owner = _route(ids, num_seqs)
    if not (mutable or keep_empty):
        used = [p for p in range(len(masks)) if ids[p]] or list(range(min(1, len(masks))))
        masks = [masks[p] for p in used]
        owner = [used.index(p) for p in owner]
    with torch.inference_mode(False):  # refreshed later, perhaps outside inference mode
        policy_index = torch.tensor(owner, dtype=torch.int32, device=cu_seqlens_q.device)
    plans: list[SingleLaunchPlan] = []
    if attention is not None and not mutable:
        bands = tuple(policy.band(None).canonical(pack.equal_lengths or equal_lengths) for policy in masks)
        geometry = _PlanGeometry.of(pack, policy_index, bands, **bounds)
        plans = _make_plans(attention, geometry)
    contiguous = not mutable and _is_contiguous(owner)
    if contiguous:
        _note_runs(policy_index, _runs_of(owner, len(masks)))
    return PreparedPolicies(policy_index, plans, tuple(masks), mutable, contiguous, equal_lengths)


def check_equal_lengths(pack: packing.Packing) -> None:
    q = pack.cu_seqlens_q.long().diff()
    kv = pack.cu_seqlens_kv.long().diff()
    if not torch.equal(q, kv):
        n = int((q != kv).nonzero()[0])
        raise ValueError(f"equal_lengths=True, but sequence {n} has {int(q[n])} query and {int(kv[n])} key tokens")


def _check_policies(
    policies: object, device: torch.device, default_bottom_right: bool | None
) -> tuple[list[AttentionPolicy], list[list[int]]]:
    if isinstance(policies, (Mapping, str)) or not isinstance(policies, Sequence):
        raise TypeError(f"{ARGUMENT} must be a list of dicts, got {type(policies).__name__}")
    if not policies:
        raise ValueError(f"{ARGUMENT} must hold at least one policy, got an empty list")
    masks: list[AttentionPolicy] = []
    ids: list[Tensor] = []
    for p, policy in enumerate(policies):
        where = f"{ARGUMENT}[{p}]"
        if not isinstance(policy, Mapping):
            raise TypeError(f"{where} must be a dict, got {type(policy).__name__}")
        missing, unknown = _REQUIRED_KEYS - policy.keys(), policy.keys() - _KEYS
        if missing:
            raise ValueError(f"{where} lacks {', '.join(sorted(missing))}; it needs {', '.join(sorted(_REQUIRED_KEYS))}")
        if unknown:
            raise ValueError(f"{where} has unknown keys {', '.join(sorted(map(str, unknown)))}; it takes {', '.join(sorted(_KEYS))}")
        masks.append(_check_mask(policy, where, default_bottom_right))
        ids.append(_check_ids(policy["sequence_ids"], f"{where}.sequence_ids", device))
    return masks, _read_ids(ids)


def _check_mask(policy: Mapping[str, Any], where: str, default_bottom_right: bool | None) -> AttentionPolicy:
    mask_type = require_padding_mask_type(policy["mask_type"], f"{where}.mask_type")
    window = normalize_window(policy["window_size"], f"{where}.window_size")
    aligned = policy.get("bottom_right_diagonal")
    resolved = resolve_mask(mask_type, window, aligned, argument_prefix=f"{where}.")
    warn_once(resolved.warnings, stacklevel=5)
    return AttentionPolicy(mask_type, window, default_bottom_right if aligned is None else aligned)


def _check_ids(ids: object, name: str, device: torch.device) -> Tensor:
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name} must be a 1-D int32 or int64 tensor, got {type(ids).__name__}; torch.as_tensor(ids) makes one")
    if ids.dtype not in (torch.int32, torch.int64):
        remedy = ".nonzero().flatten() of a mask gives them" if ids.dtype == torch.bool else "pass dtype=torch.int64, also for an empty one"
        raise TypeError(f"{name} must be int32 or int64, got {ids.dtype}; {remedy}")
    if ids.dim() != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {tuple(ids.shape)}")
    if ids.device != device:
        raise ValueError(f"{name} must be on {device}, as cu_seqlens_q is; got {ids.device}")
    return ids


def _read_ids(ids: list[Tensor]) -> list[list[int]]:
    """All policies' ids on the host, with one sync; each list must ascend."""
    joined: list[int] = torch.cat(ids).tolist()
    values, end = [], 0
    for p, tensor in enumerate(ids):
        start, end = end, end + tensor.shape[0]
        values.append(joined[start:end])
        for before, after in zip(values[p], values[p][1:]):
            if after <= before:
                name = f"{ARGUMENT}[{p}].sequence_ids"
                problem = "holds a duplicate" if after == before else "is not ascending"
                raise ValueError(f"{name} must be strictly ascending, but {problem}: {after} after {before}")
    return values


def _route(ids: list[list[int]], num_seqs: int) -> list[int]:
    owner = [-1] * num_seqs
    for p, values in enumerate(ids):
        for n in values:
            if not 0 <= n < num_seqs:
                raise ValueError(f"{ARGUMENT}[{p}].sequence_ids holds {n}, out of range for {num_seqs} sequences")
            if owner[n] >= 0:
                raise ValueError(f"{ARGUMENT}[{p}].sequence_ids overlaps policy {owner[n]}: both hold sequence {n}")
            owner[n] = p
    if -1 in owner:
        raise ValueError(f"{ARGUMENT} must cover every sequence: sequence {owner.index(-1)} of {num_seqs} is in no policy")
    return owner


def bands_of(prepared: PreparedPolicies, default_bottom_right: bool | None) -> tuple[Band, ...]:
    check_bool("bottom_right_diagonal", default_bottom_right, or_none=True)
    return tuple(policy.band(default_bottom_right) for policy in prepared.policies)


# ------------------------------------------------------------------------------------------------------- single-launch plans
@dataclass(frozen=True)
class _PlanGeometry:
    subsets: packing.Subsets
    bands: tuple[Band, ...]
    total_q: int
    total_kv: int
    max_seqlen_q: int
    max_seqlen_kv: int

    @classmethod
    def of(
        cls,
        pack: packing.Packing,
        policy_index: Tensor,
        bands: tuple[Band, ...],
        total_q: int | None,
        total_kv: int | None,
        max_seqlen_q: int | None,
        max_seqlen_kv: int | None,
    ) -> _PlanGeometry:
        subsets = packing.build_subsets(
            pack.cu_seqlens_q, pack.cu_seqlens_kv, pack.slots_q, pack.slots_kv, policy_index, len(bands)
        )
        if max_seqlen_q is None:
            max_seqlen_q = packing.derive_max_seqlen("max_seqlen_q", pack.cu_seqlens_q)
        if max_seqlen_kv is None:
            same = pack.equal_lengths
            max_seqlen_kv = max_seqlen_q if same else packing.derive_max_seqlen("max_seqlen_kv", pack.cu_seqlens_kv)
        if total_q is None:
            total_q = int(pack.slots_q[-1])
        if total_kv is None:
            total_kv = total_q if pack.slots_kv is pack.slots_q else int(pack.slots_kv[-1])
        return cls(subsets, bands, total_q, total_kv, max_seqlen_q, max_seqlen_kv)

    def arguments(self) -> dict[str, Any]:
        return {**self.subsets._asdict(), "bands": self.bands, "total_q": self.total_q, "total_kv": self.total_kv}


def _specs(attention: Any) -> list[PlanSpec]:
    specs = []
    for item in attention if isinstance(attention, (list, tuple, torch.nn.ModuleList)) else [attention]:
        spec = item if isinstance(item, PlanSpec) else getattr(item, "plan_spec", None)
        if spec is None or isinstance(item, type):
            raise TypeError(
                f"attention must be a PlanSpec, a module with a plan_spec() method (an attention or a layer of this package), or a list "
                f"of these; got {type(item).__name__}"
            )
        specs.append(spec if isinstance(spec, PlanSpec) else spec())
    return list(dict.fromkeys(specs))


def single_launch_refusals(spec: PlanSpec, geometry: Any, device: torch.device) -> tuple[str, ...]:
    """Why the single-launch backend cannot take an attention; empty if it can."""
    from .backends import get_backend
    from .environment import compute_capability
    from .params import AttentionParams

    backend = get_backend(SINGLE_LAUNCH_BACKEND)
    if backend.version() is None:
        return ("not installed",)
    on_cuda = device.type == "cuda"
    index = (device.index if device.index is not None else torch.cuda.current_device()) if on_cuda else -1
    params = AttentionParams(
        dtype=spec.dtype,
        device_type=device.type,
        sm=compute_capability(index) if on_cuda else 0,
        num_heads=spec.num_heads,
        num_gqa_groups=spec.num_gqa_groups,
        head_dim_qk=spec.head_dim_qk,
        head_dim_v=spec.head_dim_v,
        bands=geometry.bands,
        max_seqlen_q=geometry.max_seqlen_q,
        max_seqlen_kv=geometry.max_seqlen_kv,
        is_training=spec.training,
        single_launch_plan=True,
        device_index=index,
    )
    return tuple(backend.refusals(params))


def _make_plans(attention: Any, geometry: _PlanGeometry) -> list[SingleLaunchPlan]:
    from .backends import get_backend

    backend: Any = get_backend(SINGLE_LAUNCH_BACKEND)
    plans = []
    for spec in _specs(attention):
        if single_launch_refusals(spec, geometry, geometry.subsets.starts_q.device):
            continue
        tensors = backend.make_plan(
            **geometry.arguments(),
            max_seqlen_q=geometry.max_seqlen_q,
            max_seqlen_kv=geometry.max_seqlen_kv,
            dtype=spec.dtype,
            num_heads=spec.num_heads,
            num_gqa_groups=spec.num_gqa_groups,
            head_dim_qk=spec.head_dim_qk,
            head_dim_v=spec.head_dim_v,
            training=spec.training,
        )
        plans.append(SingleLaunchPlan(tensors, dataclasses.replace(spec, bands=geometry.bands)))
    return plans


def refresh_thd_policies(
    prepared: PreparedPolicies,
    policies: Sequence[Mapping[str, Any]] | PreparedPolicies,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None = None,
    *,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    bottom_right_diagonal: bool | None = None,
    total_q: int | None = None,
    total_kv: int | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
) -> None:
    """Writes a new partition (and geometry) of as many sequences into ``prepared``'s tensors, so that graphs captured with it
    follow. Eager; order it, on the current stream, before the replays and after those that still read the old contents.

    cu_seqlens that a graph reads must be refilled by the caller.

    Args:
        prepared: what the graphs were captured with.
        policies: a list as :func:`prepare_thd_policies` takes it, of the same masks in the same order, or what that returned for the
            new batch, for example in a data loader and then padded to the capacity (:meth:`PreparedPolicies.pad_to`).
        cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded: [N + 1] of the new batch.
        bottom_right_diagonal: what it was for :func:`prepare_thd_policies`.
        total_q, total_kv, max_seqlen_q, max_seqlen_kv: the rows and bounds that were captured, in tokens. A replay cannot check
            them: given here, a batch beyond them is refused.

    Raises:
        ValueError: other masks, another number of sequences, a batch beyond the bounds, or a single-launch plan that does not
            fit the old one's tensors: then prepare anew and capture again. ``prepared`` is as it was.
    """
    if not isinstance(prepared, PreparedPolicies):
        raise TypeError(f"prepared must be what prepare_thd_policies returned, got {type(prepared).__name__}")
    slots = {"cu_seqlens_q_padded": cu_seqlens_q_padded, "cu_seqlens_kv_padded": cu_seqlens_kv_padded}
    bounds = {"total_q": total_q, "total_kv": total_kv, "max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv}
    if isinstance(policies, PreparedPolicies):
        packing.validate_packed(cu_seqlens_q, cu_seqlens_kv, **slots, **bounds)  # type: ignore[arg-type]
        if policies.mutable and not prepared.mutable:  # refilled by hand, perhaps
            for n, p in enumerate(policies.policy_index.tolist()):
                if not 0 <= p < policies.num_policies:
                    raise ValueError(f"policy_index[{n}] is {p}, out of range for {policies.num_policies} policies")
        fresh = policies.to(prepared.policy_index.device)
    else:
        prepare = functools.partial(
            prepare_thd_policies,
            policies,
            cu_seqlens_q,
            cu_seqlens_kv,
            bottom_right_diagonal=bottom_right_diagonal,
            **slots,  # type: ignore[arg-type]
        )
        fresh = prepare(keep_empty=True, **bounds)  # type: ignore[arg-type]
        if fresh.policies != prepared.policies:  # empty ones were perhaps dropped then
            fresh = prepare(validate=False)
    if fresh.policies != prepared.policies:
        raise ValueError(
            f"{ARGUMENT} must hold the masks that were prepared, in the same words and order: {_first_difference(prepared, fresh)}. Where "
            "a policy may have no sequence in some batch, prepare all with keep_empty=True"
        )
    if fresh.policy_index.shape != prepared.policy_index.shape:
        raise ValueError(
            f"{ARGUMENT} was prepared for {prepared.policy_index.shape[0]} sequences, got {fresh.policy_index.shape[0]}: "
            "see pad_packed_batch, and pad_to of what prepare_thd_policies returns"
        )
    if prepared.contiguous:
        contiguous, runs, known = True, fresh.runs, _RUNS.get(prepared.policy_index)
        if runs is None:  # there are none, or the host does not know
            owner = fresh.policy_index.tolist()
            contiguous, runs = _is_contiguous(owner), _runs_of(owner, fresh.num_policies)
        if not contiguous or (known is not None and known.captured and runs != known.each):
            raise ValueError(
                f"{ARGUMENT} was prepared with each policy's sequences in one run, which kernels and captured graphs rely on; the new "
                "partition has others: prepare with mutable=True, or anew"
            )
    pack = packing.make_packing(cu_seqlens_q, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
    if fresh.policy_index.shape[0] != cu_seqlens_q.shape[0] - 1:
        raise ValueError(
            f"{ARGUMENT} was prepared for {fresh.policy_index.shape[0]} sequences, cu_seqlens_q has {cu_seqlens_q.shape[0] - 1}"
        )
    if prepared.equal_lengths and not pack.equal_lengths:
        check_equal_lengths(pack)
    if prepared.plans:
        _refresh_plans(prepared, pack, fresh.policy_index, total_q, total_kv)
    prepared.policy_index.copy_(fresh.policy_index)
    if prepared.contiguous:
        _note_runs(prepared.policy_index, runs)


def _first_difference(prepared: PreparedPolicies, fresh: PreparedPolicies) -> str:
    for p, (before, after) in enumerate(zip(prepared.policies, fresh.policies)):
        if before != after:
            return f"policy {p} was {before}, now it is {after}"
    return f"there were {prepared.num_policies} policies, now there are {fresh.num_policies}"


def _refresh_plans(
    prepared: PreparedPolicies, pack: packing.Packing, policy_index: Tensor, total_q: int | None, total_kv: int | None
) -> None:
    """All plans or none: what was written before one that does not fit is put back."""
    from .backends import get_backend

    backend: Any = get_backend(SINGLE_LAUNCH_BACKEND)
    written: list[tuple[Tensor, Tensor]] = []
    try:
        for plan in prepared.plans:
            geometry = _PlanGeometry.of(pack, policy_index, plan.spec.bands, total_q, total_kv, 0, 0)
            saved = [(tensor, tensor.clone()) for tensor in plan.tensors] if len(prepared.plans) > 1 else []
            backend.refresh_plan(plan.tensors, **geometry.arguments(), dtype=plan.spec.dtype)
            written += saved
    except ValueError:
        for tensor, before in written:
            tensor.copy_(before)
        raise


@dataclass
class _Runs:
    """What the host knows of an index's contents: facts of the tensor, whichever policies hold it. ``captured``: a CUDA graph was
    captured with them in it."""

    each: tuple[tuple[int, int], ...] | None
    captured: bool


_RUNS: Any = WeakTensorKeyDictionary()


def _note_runs(index: Tensor, runs: tuple[tuple[int, int], ...] | None) -> None:
    known = _RUNS.get(index)
    _RUNS[index] = _Runs(runs, known is not None and known.captured)


def note_capture(prepared: PreparedPolicies) -> None:
    """A CUDA graph was captured with the runs in it: :func:`refresh_thd_policies` must leave them."""
    _RUNS[prepared.policy_index].captured = True


def _runs_of(owner: list[int], num_policies: int) -> tuple[tuple[int, int], ...] | None:
    """Each policy's first sequence and their number, of a contiguous partition; None where a policy has none."""
    counts = [owner.count(p) for p in range(num_policies)]
    return tuple((owner.index(p), count) for p, count in enumerate(counts)) if all(counts) else None


def _is_contiguous(owner: list[int]) -> bool:
    return sum(a != b for a, b in zip(owner, owner[1:])) + 1 <= len(set(owner)) or not owner
