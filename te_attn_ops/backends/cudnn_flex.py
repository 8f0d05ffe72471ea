"""All policies of a batch in one launch: the interval-mask attention of cuDNN's Python frontend (``cudnn.flex_attention``).

The library's way is a ``MaskPlan`` object and a function with its own autograd: 0.4-0.6 ms of host time a call [seen]. Here it
is a few plain tensors, made once per batch geometry (:meth:`CudnnFlex.make_plan`), and the library's compiled kernels are
called directly with views of them. That leans on its internals, so the version is pinned, and on its sm90 kernels' argument
lists, so other architectures, which the library supports, are refused here.

What is said of the kernels below was read in 1.32.0 unless marked [seen], which was observed on an H200.

* A row that sees nothing: out 0, lse -inf, dq 0; keys that no row sees: dk = dv = 0. So is every other row of a slot: nothing
  needs filling inside the slots. Rows behind the last slot are not touched.
* Q, K, V and grad_out are read in whole tiles, over the slots' ends, and what is masked is multiplied by 0: a NaN spreads.
* The sm90 kernels depend on the exact size of nothing in the plan but its list of forward tasks. So a plan can have room for
  other geometries (:meth:`CudnnFlex.refresh_plan`), see :func:`_write`.
* The backward's grids follow a bound of the slots' lengths, the forward's the number of tasks: both are shapes in the plan.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import environment
from ..masks import Band
from ..params import AttentionParams, seqlen_bucket
from .base import Backend, BackwardCall, Call, ForwardCall, common_fused_refusals, release_frames

_LOG = logging.getLogger(__name__)
_SUPPORTED_VERSION = (1, 32)
_MAX_SEQUENCES = 65535  # the sequence is a grid's z dimension in the planner, the preprocess and the postprocess
_ALIGNMENT = 32  # words of 4 bytes: every array of a plan starts on 128 bytes (the kernels ask for 16)


class _Spec(NamedTuple):
    """What the kernels are compiled for, besides options. A plan's arrays have a layout of their own for each."""

    num_heads: int
    num_gqa_groups: int
    head_dim_qk: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device


class _Sizes(NamedTuple):
    """Capacities of one direction's arrays: rows of blocks (of queries forward, of keys backward), partial and full blocks."""

    rows: int
    partial: int
    full: int


class _Shape(NamedTuple):
    """The host ints of a plan. They travel as the shapes of empty tensors: a shape is known without a sync, wherever the plan
    goes, and a compiler keeps it symbolic. In groups, since a tensor's strides are products of its extents."""

    heads_and_widths: tuple[int, int, int, int]
    rows: tuple[int, int]  # of q, and of k and v
    slots: tuple[int, int, int]  # how many sequences; a bound of their slots' rows in q, and in k and v
    forward: _Sizes
    backward: _Sizes | None

    def as_tensors(self, device: torch.device) -> list[Tensor]:
        return [torch.empty((0, *part), dtype=torch.int32, device=device) for part in self if part is not None]

    @classmethod
    def of(cls, plan: list[Tensor]) -> _Shape:
        parts: list[Any] = [tuple(tensor.shape[1:]) for tensor in plan[1:]]
        heads_and_widths, rows, slots, forward, *backward = parts
        return cls(heads_and_widths, rows, slots, _Sizes(*forward), _Sizes(*backward[0]) if backward else None)


_TENSORS_FOR_TRAINING = 1 + len(_Shape._fields)


class _Layout(NamedTuple):
    """What the library decides of the arrays: the packed mask of one partial block, and forward tasks per row of blocks."""

    forward_mask: tuple[int, int, int]
    tasks_per_row: int
    backward_mask: tuple[int, int, int] | None

    @classmethod
    def of(cls, packed: Any) -> _Layout:
        backward = packed.bwd_tensors
        return cls(
            tuple(packed.mask_block_masks.shape[1:]),
            packed.fwd_work_desc.shape[0] // packed.mask_block_cnt.shape[1],
            None if backward is None else tuple(backward.mask_block_masks.shape[1:]),
        )


class _Arrays(NamedTuple):
    """A plan as the kernels take it: views, in the library's argument order."""

    cu_q: Tensor
    cu_kv: Tensor
    forward: tuple[Tensor | None, ...]
    backward: tuple[Tensor | None, ...] | None
    longest_q: int
    longest_kv: int


class _ForwardKernel(NamedTuple):
    launch: Callable[..., None]
    layout: _Layout
    num_sms: int


class _BackwardKernel(NamedTuple):
    preprocess: Callable[..., None]
    main: Callable[..., None]
    post_dq: Callable[..., None]
    post_dk: Callable[..., None] | None  # with grouped heads, dk and dv are summed in float32 first
    post_dv: Callable[..., None] | None
    layout: _Layout
    tile_q: int
    tile_kv: int


class CudnnFlex(Backend):
    name = "cudnn_flex"
    switches = ("NVTE_FUSED_ATTN",)
    single_launch = True
    loads_whole_tiles = True

    def __init__(self) -> None:
        self._views: OrderedDict[tuple[object, ...], tuple[_Arrays, object]] = OrderedDict()

    def version(self) -> str | None:
        return environment.package_version("nvidia-cudnn-frontend", module="cudnn")

    def refusals(self, p: AttentionParams) -> Iterator[str]:
        yield from common_fused_refusals(p, min_sm=90)
        if p.device_type != "cuda":
            return
        if p.sm > 90:
            yield f"is written against the sm90 kernels of cudnn.flex_attention, found sm{p.sm}"
        version = self.version()
        if version is not None and environment.version_tuple(version)[:2] != _SUPPORTED_VERSION:
            wanted = ".".join(map(str, _SUPPORTED_VERSION))
            yield f"calls internals of nvidia-cudnn-frontend {wanted}, found {version}"
        if not p.single_launch_plan:
            yield "needs a plan made by prepare_thd_policies(..., attention=...) for these heads, widths, dtype and masks"
        if not p.static_membership:
            yield "bakes the policies' sequences into its plan, found mutable=True"
        yield from _width_refusals(p)

    # ------------------------------------------------------------------------------------------------------------- plans
    def make_plan(
        self,
        *,
        starts_q: Tensor,
        lens_q: Tensor,
        starts_kv: Tensor,
        lens_kv: Tensor,
        bands: tuple[Band, ...],
        total_q: int,
        total_kv: int,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        dtype: torch.dtype,
        num_heads: int,
        num_gqa_groups: int,
        head_dim_qk: int,
        head_dim_v: int,
        training: bool,
        deterministic: bool = False,
        return_max_logit: bool = False,
        reserve: float = 0.25,
    ) -> list[Tensor]:
        """The mask of one batch geometry as plain tensors, for any number of layers and steps. Eager only: it syncs twice.

        It also compiles the kernels that calls with this plan need (about 10 s the first time in a process), so that a capture
        may follow. Works on the current stream.

        Args:
            starts_q, starts_kv: [N + 1] int32, the last entry being the end of the last slot. lens_q, lens_kv: [P, N] int32.
            bands: P of them.
            total_q, total_kv: rows of q and of k and v.
            max_seqlen_q, max_seqlen_kv: bounds that a later geometry in the same tensors may use.
            training: whether calls will have a backward.
            deterministic, return_max_logit: which kernels to compile; a call may use others, once, outside a capture.
            reserve: room for later geometries, as a share of this one's blocks: see :meth:`refresh_plan`.

        Returns:
            One int32 tensor with everything, then empty tensors whose shapes are the numbers that the host must know.
        """
        device = starts_q.device
        spec = _Spec(num_heads, num_gqa_groups, head_dim_qk, head_dim_v, dtype, device)
        with _eager_only("make_plan", device):
            geometry = _Geometry(starts_q, lens_q, starts_kv, lens_kv, bands, total_q, total_kv)
            if geometry.is_empty:
                # Such calls launch nothing.
                none = _Sizes(2, 2, 2)
                shape = _Shape(spec[:4], (total_q, total_kv), (lens_q.shape[1], 2, 2), none, none if training else None)
                return [torch.zeros(2, dtype=torch.int32, device=device), *shape.as_tensors(device)]
            # First, so that the planner's kernels too are compiled for the sample, whose arrays are none of them empty.
            _forward_kernel(spec, return_max_logit, training)
            if training:
                _backward_kernel(spec, deterministic)
            built = _build(geometry, spec, training)
            forward = _with_room(_used(built.packed), reserve)
            backward = _with_room(_used(built.packed.bwd_tensors), reserve) if training else None
            bounds = (_bound(max_seqlen_q, built.longest_q), _bound(max_seqlen_kv, built.longest_kv))
            shape = _Shape(spec[:4], (total_q, total_kv), (lens_q.shape[1], *bounds), forward, backward)
            sections = _sections(shape, _Layout.of(built.packed))
            data = torch.zeros(_words(sections), dtype=torch.int32, device=device)
            _write(data, sections, built)
        return [data, *shape.as_tensors(device)]

    def refresh_plan(
        self,
        old_plan: list[Tensor],
        *,
        starts_q: Tensor,
        lens_q: Tensor,
        starts_kv: Tensor,
        lens_kv: Tensor,
        bands: tuple[Band, ...],
        total_q: int,
        total_kv: int,
        dtype: torch.dtype,
    ) -> None:
        """Writes another geometry with as many sequences and rows into ``old_plan``, so that graphs captured with it follow.

        Eager, on the current stream: order it before the replays and after those that still read the old geometry.

        Raises:
            ValueError: it does not fit. ``old_plan`` is as it was: make a new plan and capture again.
        """
        device = starts_q.device
        shape = _Shape.of(old_plan)
        geometry = _Geometry(starts_q, lens_q, starts_kv, lens_kv, bands, total_q, total_kv)
        for what, old, new in (
            ("sequences", shape.slots[0], lens_q.shape[1]),
            ("rows of q and of k and v", shape.rows, (total_q, total_kv)),
        ):
            if old != new:
                raise ValueError(f"this plan is for {old} {what}, the new geometry has {new}: {_RECAPTURE}")
        with _eager_only("refresh_plan", device):
            if geometry.is_empty:
                return
            built = _build(geometry, _Spec(*shape.heads_and_widths, dtype, device), shape.backward is not None)
            _check_fits(shape, built)
            _write(old_plan[0], _sections(shape, _Layout.of(built.packed)), built)

    # ------------------------------------------------------------------------------------------------------------- calls
    def forward(self, call: ForwardCall) -> None:
        spec = _spec(call)
        training = len(call.single_launch_plan) == _TENSORS_FOR_TRAINING
        kernel = _forward_kernel(spec, call.max_logit is not None, training)
        arrays = self._arrays(call, spec, kernel.layout)
        # The tasks are drawn from a counter on the device; the kernel leaves it used.
        counter = torch.zeros(1, dtype=torch.int32, device=spec.device)
        kernel.launch(
            _plain(call.q),
            _plain(call.k),
            _plain(call.v),
            call.out,
            call.lse,
            call.max_logit,  # raised by atomics, never lowered
            call.scale,
            arrays.cu_q,
            arrays.cu_kv,
            arrays.forward,
            counter,
            kernel.num_sms,
        )

    def backward(self, call: BackwardCall) -> None:
        if len(call.single_launch_plan) != _TENSORS_FOR_TRAINING:
            raise ValueError("this single-launch plan was made with training=False: make one with training=True for a backward")
        spec = _spec(call)
        kernel = _backward_kernel(spec, call.deterministic)
        _launch_backward(call, spec, kernel, self._arrays(call, spec, kernel.layout))

    def _arrays(self, call: Call, spec: _Spec, layout: _Layout) -> _Arrays:
        """Views of the call's plan. Cutting 22 of them takes longer than the launch, so those of the last plans are kept; they
        read the plan's memory, so a refreshed plan needs no new ones. An entry goes with its plan."""
        data = call.single_launch_plan[0]
        batch = (call.lens_q.shape[1], call.q.shape[0], call.k.shape[0])
        key = (data.data_ptr(), data.numel(), batch, spec)
        entry = self._views.get(key)
        if entry is not None:
            return entry[0]
        shape = _Shape.of(call.single_launch_plan)
        made_for = (shape.slots[0], *shape.rows)
        if made_for != batch or shape.heads_and_widths != spec[:4]:
            raise ValueError(
                f"this single-launch plan was made for (sequences, rows of q, rows of kv) = {made_for} and (num_heads, "
                f"num_gqa_groups, head_dim_qk, head_dim_v) = {shape.heads_and_widths}; the call has {batch} and {spec[:4]}"
            )
        arrays = _cut(data, shape, layout)
        if not (data.is_cuda and torch.cuda.is_current_stream_capturing()):
            # Not under capture: the memory there may belong to a graph's pool, which must not be kept.
            views = self._views
            views[key] = (arrays, weakref.ref(data, lambda _: views.pop(key, None)))
            while len(views) > 16:
                views.popitem(last=False)
        return arrays


def _width_refusals(p: AttentionParams) -> Iterator[str]:
    """plan/validation.py and kernels/sm90/*/..._config.py of 1.32.0."""
    widths = (p.head_dim_qk, p.head_dim_v)
    if not (max(widths) <= 128 or widths in ((192, 128), (256, 256))):
        yield f"needs widths up to 128, (192, 128) or (256, 256), found {widths}"
    if not p.is_training:
        return
    if p.num_heads != p.num_gqa_groups and p.head_dim_qk != p.head_dim_v:
        yield f"needs head_dim_qk == head_dim_v to train with grouped heads, found {widths}"
    if 48 < p.head_dim_qk <= 64 and p.head_dim_v > 96:
        yield f"lacks shared memory to train widths (49..64, > 96), found {widths}"
    if p.deterministic and widths == (256, 256) and p.num_heads == p.num_gqa_groups:
        # The library builds a second plan with other tiles for it.
        yield "has no deterministic backward here for widths (256, 256) without grouped heads"


# ---------------------------------------------------------------------------------------------------------------- making a plan
class _Geometry(NamedTuple):
    starts_q: Tensor
    lens_q: Tensor
    starts_kv: Tensor
    lens_kv: Tensor
    bands: tuple[Band, ...]
    total_q: int
    total_kv: int

    @property
    def is_empty(self) -> bool:
        return self.total_q == 0 or self.total_kv == 0 or self.lens_q.shape[1] == 0


class _Built(NamedTuple):
    """One geometry as the library packs it, exactly sized."""

    cu_q: Tensor
    cu_kv: Tensor
    longest_q: int
    longest_kv: int
    packed: Any  # cudnn.flex_attention.plan.kernels.BlockSparseTensorsTorch


@contextlib.contextmanager
def _eager_only(what: str, device: torch.device) -> Iterator[None]:
    if environment.is_tracing():
        raise RuntimeError(f"CudnnFlex.{what} reads tensors on the host: call it outside the compiled function")
    if device.type != "cuda":
        # Tests; a real plan fails in the library.
        yield
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"CudnnFlex.{what} reads tensors on the host: call it before the capture of a CUDA graph")
    # The library asks tensors for their version, which those of inference mode do not have.
    with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
        yield


def _build(geometry: _Geometry, spec: _Spec, training: bool) -> _Built:
    """The slots become the library's sequences: a sequence and the gap behind it (in front of it too, for the first one), so
    that they fill [0, end of the last slot) as the library wants it. What is no row of a sequence sees nothing and is seen by
    none. The tail is left out: the planner gets only as many rows as there are slots for; the kernels never ask."""
    from ..kernels import intervals

    if len(geometry.bands) != geometry.lens_q.shape[0]:
        raise ValueError(f"bands must have one entry per policy: got {len(geometry.bands)} for {geometry.lens_q.shape[0]}")
    num_seqs = geometry.lens_q.shape[1]
    if num_seqs > _MAX_SEQUENCES:
        raise ValueError(f"a single-launch plan takes at most {_MAX_SEQUENCES} sequences, got {num_seqs}")
    cu_q, cu_kv = intervals.slot_bounds(geometry.starts_q), intervals.slot_bounds(geometry.starts_kv)
    numbers = torch.stack([cu_q[-1], cu_kv[-1], cu_q.diff().max(), cu_kv.diff().max()])
    end_q, end_kv, longest_q, longest_kv = numbers.tolist()
    for side, end, total in (("q", end_q, geometry.total_q), ("kv", end_kv, geometry.total_kv)):
        if end > total:
            raise ValueError(f"starts_{side}: the last slot ends at {end}, beyond the {total} rows")
    table = intervals.band_table(geometry.bands, geometry.total_q + geometry.total_kv, cu_q.device)
    mask = intervals.intervals(
        cu_q, geometry.starts_q, geometry.lens_q, geometry.starts_kv, geometry.lens_kv, table, end_q, longest_q
    )
    packed = _pack(mask, spec, (end_q, end_kv), (cu_q, cu_kv), (longest_q, longest_kv), training)
    return _Built(cu_q, cu_kv, longest_q, longest_kv, packed)


def _pack(
    mask: Tensor, spec: _Spec, rows: tuple[int, int], cu: tuple[Tensor, Tensor], longest: tuple[int, int], training: bool
) -> Any:
    """The library's planner. It raises ValueError for slots that descend."""
    from cudnn.flex_attention import create_mask_plan

    def phantom(count: int, heads: int, width: int) -> Tensor:
        # The planner looks at shapes and dtypes only.
        return torch.empty(width, dtype=spec.dtype, device=spec.device).expand(count, heads, width)

    with _quiet(), _own_schedule():
        plan = create_mask_plan(
            mask,
            phantom(rows[0], spec.num_heads, spec.head_dim_qk),
            phantom(rows[1], spec.num_gqa_groups, spec.head_dim_qk),
            phantom(rows[1], spec.num_gqa_groups, spec.head_dim_v),
            cu_seqlens_q=cu[0],
            cu_seqlens_k=cu[1],
            max_seqlen_q=longest[0],
            max_seqlen_k=longest[1],
            build_backward=training,
        )
    return plan._packed_plan


_SCHEDULE_LOCK = threading.Lock()


@contextlib.contextmanager
def _own_schedule() -> Iterator[None]:
    """Puts :mod:`te_attn_ops.kernels.flex_schedule` in the place of the library's sort of the forward's tasks, which takes longer
    than the rest of the planner. A thread that uses the library meanwhile gets as good an order."""
    from cudnn.flex_attention.plan import builder

    from ..kernels.flex_schedule import forward_schedule

    def ours(config: Any, partial_counts: Tensor, full_counts: Tensor, **geometry: Any) -> tuple[Tensor | None, Tensor]:
        one_mask = config.is_varlen and partial_counts.shape[0] == 1 and geometry["total_m_blocks"] > 0
        schedule = forward_schedule if one_mask and config.arch == 90 else theirs
        return schedule(config, partial_counts, full_counts, **geometry)

    with _SCHEDULE_LOCK:
        theirs = builder._build_forward_schedule
        builder._build_forward_schedule = ours
        try:
            yield
        finally:
            builder._build_forward_schedule = theirs


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The library prints a line per kernel that it compiles."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        yield
    for line in text.getvalue().splitlines():
        _LOG.debug("%s", line)


def _bound(max_seqlen: int, longest_slot: int) -> int:
    """The caller's bound where the slots keep it; gaps may make them longer than any sequence."""
    if longest_slot > max_seqlen:
        max_seqlen = seqlen_bucket(longest_slot)
    return max(max_seqlen, 2)


def _used(packed: Any) -> _Sizes:
    return _Sizes(packed.mask_block_cnt.shape[1], packed.mask_block_idx.shape[0], packed.full_block_idx.shape[0])


def _with_room(used: _Sizes, reserve: float) -> _Sizes:
    """Room for other geometries, in coarse steps so that plans of like batches share their shapes. Rows get less: each spare
    one is a task per head that loads a tile and finds nothing to do. One is always spare, see :func:`_write`."""

    def grow(count: int, share: float) -> int:
        count = max(2, count + int(count * share))
        step = 1 << max(0, count.bit_length() - 5)
        return -(-count // step) * step

    return _Sizes(grow(used.rows + 1, reserve / 8), grow(used.partial, reserve), grow(used.full, reserve))


# ------------------------------------------------------------------------------------------------------- the arrays of a plan
_RECAPTURE = "make a new plan, and capture again what was captured with this one"
_Section = tuple[int, tuple[int, ...]]  # first word, shape


def _sections(shape: _Shape, layout: _Layout) -> dict[str, _Section]:
    """Where each array lies in the plan's data, in words of 4 bytes."""
    num_seqs, forward, backward = shape.slots[0], shape.forward, shape.backward
    arrays: dict[str, tuple[int, ...]] = {"cu_q": (num_seqs + 1,), "cu_kv": (num_seqs + 1,)}
    arrays |= _direction("forward", num_seqs, forward, layout.forward_mask)
    arrays["forward.sequences"] = (num_seqs, 8)
    arrays["forward.tasks"] = (forward.rows * layout.tasks_per_row, 4)
    if backward is not None and layout.backward_mask is not None:
        arrays |= _direction("backward", num_seqs, backward, layout.backward_mask)
        arrays |= {"backward.partial_order": (backward.partial,), "backward.full_order": (backward.full,)}
    sections, at = {}, 0
    for name, extents in arrays.items():
        sections[name] = (at, extents)
        at += -(-math.prod(extents) // _ALIGNMENT) * _ALIGNMENT
    return sections


def _direction(name: str, num_seqs: int, sizes: _Sizes, mask: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.cu_rows": (num_seqs + 1,),
        f"{name}.partial_count": (1, sizes.rows),
        f"{name}.partial_offset": (sizes.rows + 1,),
        f"{name}.partial": (sizes.partial,),
        f"{name}.full_count": (1, sizes.rows),
        f"{name}.full_offset": (sizes.rows + 1,),
        f"{name}.full": (sizes.full,),
        f"{name}.masks": (sizes.partial, *mask),
    }


def _words(sections: dict[str, _Section]) -> int:
    at, extents = list(sections.values())[-1]
    return at + math.prod(extents)


def _sources(built: _Built) -> dict[str, Tensor]:
    """The library's arrays under the names of :func:`_sections`."""
    sources = {"cu_q": built.cu_q, "cu_kv": built.cu_kv}
    for name, packed in (("forward", built.packed), ("backward", built.packed.bwd_tensors)):
        if packed is None:
            continue
        sources |= {
            f"{name}.cu_rows": packed.cu_total_m_blocks,
            f"{name}.partial_count": packed.mask_block_cnt,
            f"{name}.partial_offset": packed.mask_block_offset,
            f"{name}.partial": packed.mask_block_idx,
            f"{name}.full_count": packed.full_block_cnt,
            f"{name}.full_offset": packed.full_block_offset,
            f"{name}.full": packed.full_block_idx,
            f"{name}.masks": packed.mask_block_masks,
        }
    sources |= {"forward.sequences": built.packed.sequence_desc, "forward.tasks": built.packed.fwd_work_desc}
    if built.packed.bwd_tensors is not None:
        sources["backward.partial_order"] = built.packed.bwd_tensors.dq_write_order
        sources["backward.full_order"] = built.packed.bwd_tensors.dq_write_order_full
    return sources


def _write(data: Tensor, sections: dict[str, _Section], built: _Built) -> None:
    """Copies the exactly sized arrays into the roomier ones.

    Kernels reach everything but the tasks through offsets, so what lies behind is never read. Spare tasks are drawn like
    others, so they name a block of query rows that does not exist: one of the last sequence, at the plan's last row, which is
    always spare and has no key blocks. The kernel loads a tile of Q there (zeros or the tail), finds nothing to see, and its
    stores fall outside the sequence's bounds.
    """
    sources = {name: source.reshape(-1).view(torch.int32) for name, source in _sources(built).items()}
    filled = {name: source for name, source in sources.items() if source.numel()}
    torch._foreach_copy_([data[sections[name][0] :][: source.numel()] for name, source in filled.items()], list(filled.values()))
    for direction in ("forward", "backward"):
        for name in (f"{direction}.partial_count", f"{direction}.full_count"):
            if name in sources:
                at, extents = sections[name]
                data[at + sources[name].numel() : at + math.prod(extents)].zero_()
    at, extents = sections["forward.tasks"]
    spare = data[at : at + math.prod(extents)].view(extents)[built.packed.fwd_work_desc.shape[0] :]
    last = built.cu_q.shape[0] - 2
    rows = sections["forward.partial_count"][1][1]
    spare.zero_()
    spare[:, 0].copy_((rows - 1) - built.packed.cu_total_m_blocks[last])
    spare[:, 2].fill_(last)


def _check_fits(shape: _Shape, built: _Built) -> None:
    wanted = {
        "query rows in the longest slot": (built.longest_q, shape.slots[1]),
        "key rows in the longest slot": (built.longest_kv, shape.slots[2]),
    }
    directions = (("forward", shape.forward, built.packed), ("backward", shape.backward, built.packed.bwd_tensors))
    for name, room, packed in directions:
        if room is not None:
            used = _used(packed)
            wanted[f"{name} rows of blocks"] = (used.rows + 1, room.rows)
            wanted[f"{name} partial blocks"] = (used.partial, room.partial)
            wanted[f"{name} full blocks"] = (used.full, room.full)
    problems = [f"{need} {what} where there is room for {room}" for what, (need, room) in wanted.items() if need > room]
    if problems:
        raise ValueError(f"the new geometry has {'; '.join(problems)}: {_RECAPTURE} (with more reserve if this is frequent)")


def _cut(data: Tensor, shape: _Shape, layout: _Layout) -> _Arrays:
    """The plan's arrays in the order of the library's ``_block_sparse_runtime_tuple``."""
    sections = _sections(shape, layout)
    if data.numel() != _words(sections):
        raise ValueError(f"this single-launch plan has {data.numel()} words, not {_words(sections)}: made by another version?")

    # Shares the storage but knows nothing of ``data``, so that these views do not keep it alive.
    words = torch.empty(0, dtype=torch.int32, device=data.device)
    words.set_(data.untyped_storage(), data.storage_offset(), data.shape, data.stride())

    def view(name: str) -> Tensor:
        at, extents = sections[name]
        part = words[at : at + math.prod(extents)]
        return (part.view(torch.uint32) if name.endswith(".masks") else part).view(extents)

    def direction(name: str, orders: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor | None, ...]:
        counts = (view(f"{name}.partial_count"), view(f"{name}.partial"), view(f"{name}.full_count"), view(f"{name}.full"))
        offsets = (view(f"{name}.partial_offset"), view(f"{name}.full_offset"))
        return (*counts, view(f"{name}.cu_rows"), *orders, *offsets, view(f"{name}.masks"))

    forward = (*direction("forward", (None, None)), view("forward.sequences"), view("forward.tasks"))
    backward = None
    if shape.backward is not None:
        orders = (view("backward.partial_order"), view("backward.full_order"))
        backward = (*direction("backward", orders), None, None)
    return _Arrays(view("cu_q"), view("cu_kv"), forward, backward, *shape.slots[1:])


# ------------------------------------------------------------------------------------------------------------------ the kernels
def _spec(call: Call) -> _Spec:
    q, k = call.q, call.k
    return _Spec(q.shape[1], k.shape[1], q.shape[2], call.v.shape[2], q.dtype, q.device)


def _plain(x: Tensor) -> Tensor:
    """DLPack takes no tensor that requires grad."""
    return x.detach() if x.requires_grad else x


class _Sample(NamedTuple):
    """Two causal sequences of 512 rows: partial and full blocks in both directions, and no extent of 1 that matters. The
    compiled kernels are generic in every extent and stride (but a stride of 0)."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    plan: Any
    layout: _Layout


def _sample(spec: _Spec, training: bool) -> _Sample:
    from cudnn.flex_attention import create_mask_plan

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "cudnn_flex must compile a kernel, which cannot be done during CUDA graph capture: run one such call before it"
        )
    rows, length = 1024, 512

    def new(*shape: int, dtype: torch.dtype = spec.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=spec.device)

    q = new(rows, spec.num_heads, spec.head_dim_qk)
    k, v = new(rows, spec.num_gqa_groups, spec.head_dim_qk), new(rows, spec.num_gqa_groups, spec.head_dim_v)
    cu = torch.arange(0, rows + 1, length, dtype=torch.int32, device=spec.device)
    mask = (torch.arange(rows, dtype=torch.int32, device=spec.device) % length + 1).expand(1, 3, rows).contiguous()
    bounds = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": length, "max_seqlen_k": length}
    plan = create_mask_plan(mask, q, k, v, **bounds, build_backward=training)
    out, lse = new(rows, spec.num_heads, spec.head_dim_v), new(spec.num_heads, rows, dtype=torch.float32)
    return _Sample(q, k, v, out, lse, plan, _Layout.of(plan._packed_plan))


@contextlib.contextmanager
def _compiling(spec: _Spec) -> Iterator[None]:
    with torch.cuda.device(spec.device), torch.inference_mode(False), torch.no_grad(), _quiet():
        yield
    release_frames()


@functools.cache
def _forward_kernel(spec: _Spec, max_logit: bool, training: bool) -> _ForwardKernel:
    """Compiles in 3 s [seen]; FLEX_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 lets the library keep kernels on disk."""
    from cudnn.flex_attention import FlexAttentionFwd

    with _compiling(spec):
        sample = _sample(spec, training)
        maximum = torch.zeros(spec.num_heads, dtype=torch.float32, device=spec.device) if max_logit else None
        api = FlexAttentionFwd(sample.q, sample.k, sample.v, sample.out, sample.plan, sample.lse, sample_max_logit=maximum)
        api.check_support()
        api.compile()
    num_sms = torch.cuda.get_device_properties(spec.device).multi_processor_count
    return _ForwardKernel(api._compiled_kernel, sample.layout, num_sms)


@functools.cache
def _backward_kernel(spec: _Spec, deterministic: bool) -> _BackwardKernel:
    """Compiles in 8-9 s [seen]."""
    from cudnn.flex_attention import FlexAttentionBwd

    with _compiling(spec):
        sample = _sample(spec, training=True)
        q, k, v = sample.q, sample.k, sample.v
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        api = FlexAttentionBwd(
            q, k, v, sample.out, torch.zeros_like(sample.out), sample.lse, *grads, sample.plan, deterministic=deterministic
        )
        api.check_support()
        api.compile()
    compiled = api._compiled_kernel
    tile_q, tile_kv = sample.plan._packed_plan.bwd_tensors.block_size
    return _BackwardKernel(
        compiled.preprocess, compiled.main, compiled.post_dq, compiled.post_dk, compiled.post_dv, sample.layout, tile_q, tile_kv
    )


def _launch_backward(call: BackwardCall, spec: _Spec, kernel: _BackwardKernel, arrays: _Arrays) -> None:
    """The library's ``_flex_attn_bwd`` for sm90: preprocess (sum of out * grad_out, lse in base 2, clears dq's accumulator),
    the main kernel, and the conversion of what is summed in float32."""
    q, k, v, grad_out = _plain(call.q), _plain(call.k), _plain(call.v), _plain(call.grad_out)
    dq, dk, dv = call.grads
    longest_q, longest_kv = arrays.longest_q, arrays.longest_kv
    num_seqs = arrays.cu_q.shape[0] - 1
    # Each sequence's rows start on a tile of their own in the accumulators.
    padded_q = (q.shape[0] + (num_seqs + 1) * kernel.tile_q - 1) // kernel.tile_q * kernel.tile_q
    padded_kv = (k.shape[0] + (num_seqs + 1) * kernel.tile_kv - 1) // kernel.tile_kv * kernel.tile_kv
    width_qk, width_v = -(-spec.head_dim_qk // 16) * 16, -(-spec.head_dim_v // 16) * 16
    if max(padded_q, padded_kv) * max(width_qk, width_v) >= 1 << 31:
        raise OverflowError(f"cudnn_flex's backward counts in int32: {max(padded_q, padded_kv)} rows are too many for one call")

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=spec.device)

    def cleared(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=spec.device)

    sum_dq = new(spec.num_heads, padded_q * width_qk)
    delta, lse_log2 = new(spec.num_heads, padded_q), new(spec.num_heads, padded_q)
    sum_dk, sum_dv = dk, dv
    if kernel.post_dk is not None:
        sum_dk = cleared(spec.num_gqa_groups, padded_kv * width_qk, dtype=torch.float32)
        sum_dv = cleared(spec.num_gqa_groups, padded_kv * width_v, dtype=torch.float32)
    # deterministic: turns at each block of dq, and with grouped heads at each block of dk and dv.
    turns_q = turns_k = turns_v = None
    if call.deterministic:
        turns_q = cleared(num_seqs, spec.num_heads, -(-longest_q // kernel.tile_q), 1)
        if kernel.post_dk is not None:
            turns_k = cleared(num_seqs, spec.num_gqa_groups, -(-longest_kv // kernel.tile_kv), 2)
            turns_v = torch.zeros_like(turns_k)

    kernel.preprocess(_plain(call.out), grad_out, delta, call.lse, lse_log2, sum_dq, arrays.cu_q, None, longest_q)
    kernel.main(
        q, k, v, grad_out, lse_log2, delta, sum_dq, sum_dk, sum_dv, call.scale, arrays.cu_q, arrays.cu_kv,
        turns_q, turns_k, turns_v, arrays.backward, longest_q, longest_kv,
    )  # fmt: skip
    kernel.post_dq(sum_dq, dq, call.scale, arrays.cu_q, longest_q)
    if kernel.post_dk is not None and kernel.post_dv is not None:
        kernel.post_dk(sum_dk, dk, call.scale, arrays.cu_kv, longest_kv)
        kernel.post_dv(sum_dv, dv, 1.0, arrays.cu_kv, longest_kv)
