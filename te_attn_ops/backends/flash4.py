"""FlashAttention 4 (package ``flash-attn-4``, module ``flash_attn.cute``): a subset in place, by cu_seqlens and seqused.

cu_seqlens = starts says where each sequence begins and seqused = lens how long it is; the last entry of starts only ends the
storage. Without seqused (one policy, no gaps) the library compiles a kernel of another kind that reads one tensor less.

**Two ways to the same kernels.** The library's entries ``_flash_attn_fwd`` and ``_flash_attn_bwd`` validate, build a key of
some 70 fields and look up a compiled kernel: 67 us of host time a forward call. So the first call
of each key of our own goes through the entry while :class:`_Recorder` notes which kernels it launches with which arguments;
if these are exactly the arguments that this file would pass, later calls launch the kernels themselves, else the key stays
with the entry for good and :attr:`Flash4.fallbacks` says why. Only on sm90 and only with :data:`VERSION_READ`.

**What is written where** (read in 4.0.0b36; "sm90" files; nothing has to be filled in afterwards):

* A sequence with seqused_q == 0 has no q tiles (tile_scheduler.py:954-999): its out, lse and dq are left alone.
* out: a TMA store that ends at seqused_q (seqlen_info.py:173-187), else a predicated one; lse likewise (flash_fwd.py:368-390).
* A row without keys, for want of keys or under the diagonal (L_q > L_k): its tile runs one fully masked step
  (flash_fwd_sm90.py:768-783, mask.py:205-209), hence out 0 and lse -inf (softmax.py:276-287). That step multiplies 0 with the
  V rows it loads, which may lie before the sequence: they must be finite.
* dq: cleared for every tile of seqused_q (flash_bwd_preprocess.py:468-483), converted up to seqused_q: 0 without keys. In P,
  lse = -inf counts as 0 and rows past seqused_q as +inf (flash_bwd_preprocess.py:360-365, 486-498).
* dk, dv: a key tile that no row sees stores zeros (flash_bwd_sm90.py:1441-1463); rows beyond seqused_kv are left alone. GQA
  accumulates in zeroed float32 buffers and converts up to seqused_kv.
* sm100 and sm120 do the same (flash_bwd_sm100.py:3937-3992, sm100_hd256_2cta_fmha_backward_dqkernel.py:2081,
  flash_bwd.py:803-880): read only, never run here.

Sizes: strides are int64 (quack compile_utils.py:29), but offsets into the float32 accumulators are int32
(seqlen_info.py:60): (tokens + (N + 1) * tile) * width must stay below 2**31, which is checked.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..environment import compute_capability, package_version, version_tuple
from ..masks import Band
from ..params import AttentionParams, round_up
from .base import Backend, BackwardCall, Call, ForwardCall, bottom_right_only_refusals, common_fused_refusals, release_frames

DISTRIBUTION = "flash-attn-4"
VERSION_READ = "4.0.0b36"

_log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------------------------- the mask
class KernelMask(NamedTuple):
    """A band as the kernels take it: causal, or local with each side None or a number of tokens, or neither."""

    causal: bool
    left: int | None
    right: int | None

    @property
    def local(self) -> bool:
        return self.left is not None or self.right is not None

    @property
    def kind(self) -> int:
        """What a compiled kernel depends on. The numbers of tokens themselves are arguments."""
        return self.causal + 2 * (self.left is not None) + 4 * (self.right is not None)


# The kernels add a side to row and key numbers in int32. No packed tensor has this many rows, so the cap bounds nothing.
_LARGEST_SIDE = 1 << 30


@functools.lru_cache(maxsize=1024)
def kernel_mask(band: Band) -> KernelMask:
    """The alignment is bottom-right, per sequence, in all of them. 0 is a bound of 0; only None is unbounded."""
    if band.is_causal:
        return KernelMask(True, None, None)
    left, right = (None if side is None else min(side, _LARGEST_SIDE) for side in (band.left, band.right))
    return KernelMask(False, left, right)


# --------------------------------------------------------------------------------------------- sm90: tiles and shared memory
SM90_SHARED_MEMORY = 227 * 1024


class Sm90BackwardTiles(NamedTuple):
    """interface.py ``_tile_size_bwd_sm90``, as far as sizes go.

    ``swap``: dK and dV are computed transposed, with the width on the MMA's 64-row side. ``shared``: the warp groups on it.
    """

    m: int
    n: int
    stages_q: int
    stages_do: int
    stages_pds: int
    swap: bool
    shared: int = 1

    def width(self, head_dim: int) -> int:
        """Columns of a tile in the main kernel (flash_bwd_sm90.py:80)."""
        return round_up(head_dim, 64 if self.swap else 16)

    def accumulator_width(self, head_dim: int) -> int:
        """Columns that the pre- and postprocess and the allocations count with (interface.py:2609)."""
        return round_up(head_dim, 64 if self.swap else 32)

    def step_v(self, head_dim: int) -> int:
        """What the columns of a dO and dV tile must be a multiple of.

        dO's layout in shared memory is built from atoms of up to 64 columns that fit head_dim_qk, not head_dim_v
        (flash_bwd_sm90.py:217). Seen, also in (128, 96): else the DSL reports "expected top-level shape equivalence". Swapped,
        dV has 64 columns on the MMA per warp group of that side. Seen: (256, 192) reports "failed to partition".
        """
        return 64 * self.shared if self.swap else math.gcd(self.width(head_dim), 64)


@functools.cache
def sm90_backward_tiles(head_dim: int, head_dim_v: int, full: bool) -> Sm90BackwardTiles:
    if head_dim <= 64:
        return Sm90BackwardTiles(128, 128, 2, 2, 2, False)
    if head_dim <= 96:
        return Sm90BackwardTiles(64, 128, 2, 2, 2, False)
    if head_dim <= 128:
        return Sm90BackwardTiles(80 if full else 64, 128, 2, 2, 2, False)
    if head_dim <= 192:
        return Sm90BackwardTiles(64, 96, 2, 2 if head_dim_v <= 128 else 1, 1, True)
    return Sm90BackwardTiles(64, 48, 2, 1, 1, True, shared=2)


def sm90_forward_tiles(head_dim: int, head_dim_v: int, mask: KernelMask) -> tuple[int, int, bool]:
    """interface.py ``_tile_size_fwd_sm90``: rows, keys, and whether P passes through shared memory."""
    if head_dim <= 64:
        return 192, 128, False
    if head_dim <= 96:
        return 192, 128 if mask.causal or mask.local else 144, True
    if head_dim <= 128:
        return 128, 128, False
    if head_dim <= 192:
        return 128, 96 if mask.local else (128 if head_dim_v <= 128 else 112), False
    return 128, 64 if mask.local else 80, False


def sm90_backward_shared_memory(head_dim: int, head_dim_v: int, full: bool) -> int:
    """Bytes that the backward's main kernel asks for: the sum of its tiles, each rounded up to 1 KiB.

    ``1 KiB of barriers, + lse and dpsum + 2 m d Sq + 2 n dv + 2 n d + 2 m dv Sdo + P + 2 m n Sp + 4 m d``: barriers, Q, V, K,
    dO, P (only where P passes through shared memory), dS and the dQ accumulator, with d and dv rounded up to 16, or to 64
    where swapped (flash_bwd_sm90.py:302-340). Equal, to the byte, to what the DSL compiled in 106 configurations.
    """
    tiles = sm90_backward_tiles(head_dim, head_dim_v, full)
    d, dv = tiles.width(head_dim), tiles.width(head_dim_v)
    statistics = 4 * round_up(tiles.m, 64) * (tiles.stages_q + tiles.stages_do)
    p_or_ds = 2 * tiles.m * tiles.n * tiles.stages_pds
    parts = (
        128 + statistics,
        2 * tiles.m * d * tiles.stages_q,
        2 * tiles.n * dv,
        2 * tiles.n * d,
        2 * tiles.m * dv * tiles.stages_do,
        p_or_ds if tiles.swap else 0,
        p_or_ds,
        4 * tiles.m * d,
    )
    return sum(round_up(part, 1024) for part in parts)


def sm90_forward_shared_memory(head_dim: int, head_dim_v: int, mask: KernelMask) -> tuple[int, int]:
    """Bytes that the forward asks for, and bytes that it uses: O is written over Q, K and P (flash_fwd_sm90.py:114-154, 540).

    The first is, to the byte, what the DSL compiled in 287 configurations.
    """
    m, n, through_shared = sm90_forward_tiles(head_dim, head_dim_v, mask)
    d, dv = round_up(head_dim, 16), round_up(head_dim_v, 16)
    before_q = 1024 + round_up(4 * n * dv, 1024)
    behind_q = (2 * m * d, 4 * n * d, 2 * m * n if through_shared else 0)
    return before_q + sum(round_up(part, 1024) for part in behind_q), before_q + 2 * m * dv


# ------------------------------------------------------------------------------------------------------------------- refusals
_NEEDS = (("nvidia-cutlass-dsl", (4, 6, 2)), ("apache-tvm-ffi", (0, 1, 11)), ("quack-kernels", (0, 5, 3)))


def _release(version: str) -> tuple[float, ...]:
    """Sorts ``4.0.0b36`` after ``4.0.0b4`` and before ``4.0.0``; a version that reads otherwise counts as new."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(?:b(\d+))?", version)
    if match is None:
        return (math.inf,)
    return tuple(math.inf if part is None else float(part) for part in match.groups())


def _package_refusals(version: str) -> Iterator[str]:
    """What flash-attn-4 b36 declares to need, and how old it may be: older entries dropped seqused in the sm90 backward."""
    if _release(version) < _release(VERSION_READ):
        yield f"needs {DISTRIBUTION} {VERSION_READ} or newer, found {version}"
    for name, oldest in _NEEDS:
        found = package_version(name)
        if version_tuple(found) < oldest:
            yield f"needs {name} {'.'.join(map(str, oldest))} or newer, found {found or 'none'}"


def _newer_entry_refusals(p: AttentionParams) -> Iterator[str]:
    """A version that was not read is asked: whether its private entries still take our arguments, and for its width limits."""
    try:
        interface = _interface()
        for name, arguments in _ENTRY_ARGUMENTS.items():
            missing = arguments - set(inspect.signature(getattr(interface, name)).parameters)
            if missing:
                yield f"needs {name} to take {', '.join(sorted(missing))}, which this version does not"
        interface._validate_head_dims(p.head_dim_qk, p.head_dim_v, p.sm // 10, 16 // p.dtype.itemsize)
    except AssertionError as error:
        yield f"is refused by its own validator at head_dim_qk {p.head_dim_qk}, head_dim_v {p.head_dim_v}: {error}"
    except Exception as error:  # an import of a compiler stack can fail in any way
        yield f"cannot be loaded ({type(error).__name__}: {error})"


def _sm90_refusals(p: AttentionParams) -> Iterator[str]:
    d, dv = p.head_dim_qk, p.head_dim_v
    widths = f"head_dim_qk {d}, head_dim_v {dv}"
    for mask in dict.fromkeys(map(kernel_mask, p.bands)):
        asked, used = sm90_forward_shared_memory(d, dv, mask)
        if asked > SM90_SHARED_MEMORY:
            yield f"asks for {asked} bytes of shared memory in the forward at {widths}; sm90 has {SM90_SHARED_MEMORY}"
        elif used > asked:
            # It compiles, for nothing in the library compares the two (read only).
            yield f"writes O over {used} bytes of shared memory in the forward at {widths}, of which it asks for {asked}"
    if not p.is_training:
        return
    if p.num_heads != p.num_gqa_groups and d != dv:
        # flash_bwd_sm90.py:116
        yield f"needs head_dim_qk == head_dim_v to train with fewer key/value heads, found {d} and {dv}"
    tiles = sm90_backward_tiles(d, dv, False)
    if tiles.width(d) != tiles.accumulator_width(d):
        # It compiles and runs; dQ is silently wrong (read; reported upstream as Dao-AILab/flash-attention#2896).
        yield (
            f"computes dQ {tiles.width(d)} and reads it back {tiles.accumulator_width(d)} columns wide at head_dim_qk {d}: "
            "up to 128, head_dim_qk modulo 32 must be 0 or 24"
        )
    step = tiles.step_v(d)
    if tiles.width(dv) % step:
        unit = tiles.width(1)
        yield f"needs head_dim_v, rounded up to {unit}, to be a multiple of {step} to train at head_dim_qk {d}, found {dv}"
    for full in dict.fromkeys(band.is_full for band in p.bands):
        asked = sm90_backward_shared_memory(d, dv, full)
        if asked > SM90_SHARED_MEMORY:
            # Seen: (64, 128) asks for 248832 bytes and does not launch.
            yield f"asks for {asked} bytes of shared memory in the backward at {widths}; sm90 has {SM90_SHARED_MEMORY}"
            return


def _sm100_refusals(p: AttentionParams) -> Iterator[str]:
    """interface.py:121-139, flash_bwd_sm100.py:101-130. Compiled, never run. sm103 and sm110 follow sm100."""
    d, dv = p.head_dim_qk, p.head_dim_v
    if not (max(d, dv) <= 128 or (d, dv) in ((192, 128), (256, 256))):
        yield f"needs head_dim_qk and head_dim_v <= 128, or (192, 128), or (256, 256) on sm{p.sm}, found ({d}, {dv})"
        return
    if (d, dv) == (256, 256) and any(kernel_mask(band).local for band in p.bands):
        # sm100_hd256_2cta_fmha_backward.py:60; TransformerEngine refuses the forward too.
        yield f"takes no window at head_dim 256 on sm{p.sm}"
    if not p.is_training:
        return
    for name, width in (("head_dim_qk", d), ("head_dim_v", dv)):
        if width % 32:
            # The packed dK and dV stores write whole 32-column steps: into the next row (Dao-AILab/flash-attention#2698).
            yield f"needs {name} to be a multiple of 32 to train on sm{p.sm}, found {width}"
    if 128 <= d < 256 and (dv // 2) % 32:
        # TransformerEngine's rule; b36 compiles (128, 96).
        yield f"needs head_dim_v to be a multiple of 64 to train at head_dim_qk {d} on sm{p.sm}, found {dv}"


SM120_SHARED_MEMORY = 99 * 1024


def _sm120_refusals(p: AttentionParams) -> Iterator[str]:
    """The sm80-type kernels (flash_fwd.py, flash_bwd.py) with the tiles of interface.py:360 and 2327. Compiled, never run."""
    d, dv = round_up(p.head_dim_qk, 16), round_up(p.head_dim_v, 16)
    widths = f"head_dim_qk {p.head_dim_qk}, head_dim_v {p.head_dim_v}"
    keys = 128 if p.head_dim_qk <= 64 else 64
    asked = 2 * (128 * d + keys * d + keys * dv)
    used = 2 * (keys * dv + 128 * dv)
    if asked > SM120_SHARED_MEMORY:
        yield f"asks for {asked} bytes of shared memory in the forward at {widths}; sm{p.sm} has {SM120_SHARED_MEMORY}"
    elif used > asked:
        yield f"writes O over {used} bytes of shared memory in the forward at {widths}, of which it asks for {asked}"
    if not p.is_training:
        return
    if p.deterministic:
        yield f"has no deterministic backward on sm{p.sm}"
    if p.num_heads != p.num_gqa_groups:
        # flash_bwd.py:1182 adds dK at offset + i * tile, the postprocess reads that rounded down to a tile.
        yield f"misplaces packed dK and dV with fewer key/value heads on sm{p.sm}, found {p.num_heads} and {p.num_gqa_groups}"
    stages = 2 if p.head_dim_qk <= 64 else 1
    # K and V, Q and dO by stages, P and dS, lse and dpsum.
    asked = 2 * 64 * (round_up(d, 32) + round_up(dv, 32)) * (1 + stages) + 2 * (2 * 64 * 64) + 1024
    if asked > SM120_SHARED_MEMORY:
        yield f"asks for {asked} bytes of shared memory in the backward at {widths}; sm{p.sm} has {SM120_SHARED_MEMORY}"


_FAMILIES = {9: _sm90_refusals, 10: _sm100_refusals, 11: _sm100_refusals, 12: _sm120_refusals}


# ------------------------------------------------------------------------------------------------------------------ the import
def _cache_folder() -> str | None:
    """Our folder for compiled kernels; None where it cannot be made or locked (the library locks every entry with flock).

    One per architecture: the keys of the library's preprocess do not name it (interface.py:2117).
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    arch = f"sm{compute_capability(torch.cuda.current_device())}" if torch.cuda.is_available() else "any"
    folder = os.path.join(root, "te_attn_ops", "flash4", arch)
    try:
        import fcntl  # POSIX only, as the library

        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, ".probe"), "w") as probe:
            fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        _log.info("flash4 keeps its compiled kernels in memory only: %s", error)
        return None
    return folder


@functools.cache
def _interface() -> Any:
    """``flash_attn.cute.interface``, imported when first needed. Its disk cache is off unless asked for; we ask."""
    folder = _cache_folder()
    if folder is not None:
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", folder)
    return importlib.import_module("flash_attn.cute.interface")


# ------------------------------------------------------------------------------------------------------- the official entries
_COMMON_ARGUMENTS = frozenset(
    {"q", "k", "v", "out", "lse", "softmax_scale", "causal", "window_size_left", "window_size_right", "cu_seqlens_q"}
    | {"cu_seqlens_k", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k"}
)
_ENTRY_ARGUMENTS = {
    "_flash_attn_fwd": _COMMON_ARGUMENTS | {"num_splits", "return_lse"},
    "_flash_attn_bwd": _COMMON_ARGUMENTS | {"dout", "deterministic", "dq", "dk", "dv"},
}
_Used = tuple[Tensor, Tensor] | tuple[None, None]


def _used_lengths(call: Call) -> _Used:
    return (None, None) if call.plain_cu_seqlens else (call.seqused_q, call.seqused_kv)


def _on_sm90(x: Tensor) -> bool:
    return compute_capability(x.get_device()) == 90


def _official_forward(call: ForwardCall, mask: KernelMask, used: _Used) -> None:
    # On sm90 the maxima change nothing but the compile key (is_static_persistent), so they would only compile twice.
    max_q, max_kv = (None, None) if _on_sm90(call.q) else (call.max_seqlen_q, call.max_seqlen_kv)
    _interface()._flash_attn_fwd(
        call.q,
        call.k,
        call.v,
        cu_seqlens_q=call.starts_q,
        cu_seqlens_k=call.starts_kv,
        seqused_q=used[0],
        seqused_k=used[1],
        max_seqlen_q=max_q,
        max_seqlen_k=max_kv,
        softmax_scale=call.scale,
        causal=mask.causal,
        window_size_left=mask.left,
        window_size_right=mask.right,
        num_splits=1,
        return_lse=True,
        out=call.out,
        lse=call.lse,
    )


def _official_backward(call: BackwardCall, mask: KernelMask, used: _Used) -> None:
    # On sm90 only the semaphores of the deterministic kernel are sized by the maxima; else they change the compile key only.
    sizes = call.deterministic or not _on_sm90(call.q)
    dq, dk, dv = call.grads
    _interface()._flash_attn_bwd(
        call.q,
        call.k,
        call.v,
        call.out,
        call.grad_out,
        call.lse,
        softmax_scale=call.scale,
        causal=mask.causal,
        window_size_left=mask.left,
        window_size_right=mask.right,
        cu_seqlens_q=call.starts_q,
        cu_seqlens_k=call.starts_kv,
        seqused_q=used[0],
        seqused_k=used[1],
        max_seqlen_q=call.max_seqlen_q if sizes else None,
        max_seqlen_k=call.max_seqlen_kv if sizes else None,
        deterministic=call.deterministic,
        dq=dq,
        dk=dk,
        dv=dv,
    )


# ------------------------------------------------------------------------------------------- the direct way: keys and arguments
_NO_AUX = (None, None)  # AuxData(tensors, scalars)
_MANY = 256  # BIN_BATCH_SEARCH_THRESH: with more sequences the kernels are given the running sum of their tiles
_Launches = tuple[tuple[Any, ...], ...]


def _forward_key(call: ForwardCall, mask: KernelMask) -> tuple[Any, ...]:
    """At least as fine as the library's key on sm90 (interface.py:1452-1521), given the call's promises on strides."""
    q = call.q
    _, heads, d = q.shape
    _, groups, dv = call.v.shape
    many = call.starts_q.shape[0] > _MANY + 1
    return (q.get_device(), q.dtype, heads, groups, d, dv, mask.kind, call.plain_cu_seqlens, many)


def _backward_key(call: BackwardCall, mask: KernelMask) -> tuple[Any, ...]:
    """Likewise (interface.py:2787-2831). The library compiles apart what has one tile at most, on either side."""
    q = call.q
    total_q, heads, d = q.shape
    total_kv, groups, dv = call.v.shape
    tiles = sm90_backward_tiles(d, dv, mask.kind == 0)
    bound_q, bound_kv = (call.max_seqlen_q, call.max_seqlen_kv) if call.deterministic else (total_q, total_kv)
    counts = (call.deterministic, bound_q <= tiles.m, bound_kv <= tiles.n, call.starts_q.shape[0] > _MANY + 1)
    return (q.get_device(), q.dtype, heads, groups, d, dv, mask.kind, call.plain_cu_seqlens, *counts)


def _tile_sums(starts: Tensor, used: Tensor | None, tile: int, heads_per_row: int = 1) -> Tensor | None:
    if starts.shape[0] <= _MANY + 1:
        return None
    packed = heads_per_row > 1
    sums, _ = _interface()._compute_tile_cumsum(
        cu_seqlens=starts, seqused=used, tile_size=tile, qhead_per_kvhead=heads_per_row, pack_gqa=packed
    )
    return sums


def _forward_launches(call: ForwardCall, mask: KernelMask, used: _Used) -> _Launches:
    """The arguments of FlashAttentionForwardSm90.__call__ (flash_fwd_sm90.py:158). The stream is torch's current one."""
    heads, groups = call.q.shape[1], call.k.shape[1]
    sums = None
    if call.starts_q.shape[0] > _MANY + 1:
        rows = sm90_forward_tiles(call.q.shape[2], call.v.shape[2], mask)[0]
        sums = _tile_sums(call.starts_q, used[0], rows, heads // groups)
    main = (
        call.q, call.k, call.v, call.out, call.lse, call.scale, call.starts_q, call.starts_kv, *used,
        None, mask.left, mask.right, None, None, _NO_AUX, sums, None,
    )  # fmt: skip
    return (main,)


def _padded_rows(total: int, starts: Tensor, tile: int) -> int:
    """Room for each sequence to begin at a tile of its own (interface.py:2631, 2672)."""
    return (total + starts.shape[0] * tile - 1) // tile * tile


def _check_accumulators(call: BackwardCall) -> None:
    rows = max(call.q.shape[0], call.k.shape[0]) + call.starts_q.shape[0] * 128
    width = round_up(max(call.q.shape[2], call.v.shape[2]), 64)
    if rows * width >= 1 << 31:
        raise OverflowError(f"flash4's backward counts in int32: {rows} rows of {width} columns are too many for one call")


def _semaphore(call: BackwardCall, heads: int, bound: int, tile: int, last: int) -> Tensor:
    batch = call.starts_q.shape[0] - 1
    return call.q.new_zeros((batch, heads, (bound + tile - 1) // tile, last), dtype=torch.int32)


def _backward_launches(call: BackwardCall, mask: KernelMask, used: _Used) -> _Launches:
    """The arguments of preprocess, main kernel and postprocess (flash_bwd_preprocess.py:135, flash_bwd_sm90.py:344,
    flash_bwd_postprocess.py:374), with the scratch that they share (interface.py:2609-2702)."""
    q, k, v, starts_q, starts_kv = call.q, call.k, call.v, call.starts_q, call.starts_kv
    total_q, heads, d = q.shape
    total_kv, groups, dv = v.shape
    tiles = sm90_backward_tiles(d, dv, mask.kind == 0)
    width, gqa = tiles.accumulator_width(d), heads != groups
    dq, dk, dv_out = call.grads
    rows = _padded_rows(total_q, starts_q, tiles.m)
    dq_sum = q.new_empty((heads, rows * width), dtype=torch.float32)
    dpsum = q.new_empty((heads, rows), dtype=torch.float32)
    lse_log2 = q.new_empty((heads, rows), dtype=torch.float32)
    sums_q, sums_kv = _tile_sums(starts_q, used[0], tiles.m), _tile_sums(starts_kv, used[1], tiles.n)
    turn_q = turn_k = turn_v = None
    if call.deterministic:
        turn_q = _semaphore(call, heads, call.max_seqlen_q, tiles.m, 1)
        if gqa:
            turn_k, turn_v = (_semaphore(call, groups, call.max_seqlen_kv, tiles.n, 2) for _ in "kv")
    dk_sum, dv_sum = dk, dv_out
    if gqa:  # one width, by refusal, hence one buffer and one memset
        rows = _padded_rows(total_kv, starts_kv, tiles.n)
        dk_sum, dv_sum = q.new_zeros((2, groups, rows * width), dtype=torch.float32).unbind(0)
    scale, seqs = call.scale, (starts_q, starts_kv, *used)
    before = (
        call.out, call.grad_out, dpsum, call.lse, lse_log2, dq_sum, starts_q, used[0], None, None, None, 1.0, sums_q, None,
    )  # fmt: skip
    main = (
        q, k, v, call.grad_out, lse_log2, dpsum, dq_sum, dk_sum, dv_sum, scale, *seqs,
        mask.left, mask.right, turn_q, turn_k, turn_v, _NO_AUX, None, sums_kv,
    )  # fmt: skip
    after_dq = (dq_sum, dq, scale, starts_q, used[0], None, sums_q)
    if not gqa:
        return before, main, after_dq
    after_dk = (dk_sum, dk, scale, starts_kv, used[1], None, sums_kv)
    after_dv = (dv_sum, dv_out, 1.0, starts_kv, used[1], None, sums_kv)
    return before, main, after_dq, after_dk, after_dv


# ---------------------------------------------------------------------------------------- the direct way: how it is learnt
_Kernel = Callable[..., Any]
_Launched = list[tuple[_Kernel, tuple[Any, ...]]]


class _Recorder:
    """Stands in for a cache of compiled kernels and notes each launch that this thread makes through it."""

    def __init__(self, cache: Any, launched: _Launched) -> None:
        self._cache = cache
        self._launched = launched
        self._thread = threading.get_ident()

    def __contains__(self, key: Any) -> bool:
        return key in self._cache

    def __setitem__(self, key: Any, kernel: _Kernel) -> None:
        self._cache[key] = kernel

    def __getitem__(self, key: Any) -> _Kernel:
        kernel: _Kernel = self._cache[key]
        if threading.get_ident() != self._thread:
            return kernel

        def launch(*args: Any) -> Any:
            self._launched.append((kernel, args))
            return kernel(*args)

        return launch


@contextlib.contextmanager
def _recording(interface: Any, names: tuple[str, ...]) -> Iterator[_Launched]:
    """What the named entries launch, in order. An entry finds its cache as an attribute of itself, at every call."""
    launched: _Launched = []
    caches = [(getattr(interface, name), getattr(interface, name).compile_cache) for name in names]
    try:
        for entry, cache in caches:
            entry.compile_cache = _Recorder(cache, launched)
        yield launched
    finally:
        for entry, cache in caches:
            entry.compile_cache = cache


def _place(x: Tensor) -> tuple[int, int]:
    return x.untyped_storage()._cdata, int(x.storage_offset())


def _difference(expected: _Launches, launched: _Launched, ours: tuple[Tensor, ...]) -> str | None:
    """The first argument in which the entry's launches differ from those that we would make; None if there is none.

    A tensor of the call must be that very memory. Scratch is allocated afresh by both: it must agree in shape, strides and
    dtype, and each piece of ours must stand for one and the same piece of theirs.
    """
    if len(launched) != len(expected):
        return f"{len(launched)} launches instead of {len(expected)}"
    counterpart = {_place(x): _place(x) for x in ours}
    for number, (want, (_, got)) in enumerate(zip(expected, launched)):
        if len(got) != len(want):
            return f"launch {number} has {len(got)} arguments instead of {len(want)}"
        for position, (a, b) in enumerate(zip(want, got)):
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                same = (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
                same = same and counterpart.setdefault(_place(a), _place(b)) == _place(b)
            else:
                same = not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b
            if not same:
                return f"argument {position} of launch {number} differs"
    return None


def _bare(kernel: _Kernel) -> _Kernel:
    """The tvm-ffi function inside a kernel that this process compiled, without its Python wrapper for keyword arguments
    (cutlass tvm_ffi_provider.py:1031). A kernel from the disk cache is that function already (cache_utils.py:223)."""
    arguments = getattr(kernel, "execution_args", None)
    if getattr(arguments, "has_pointer_address_arg_specs", True):
        return kernel
    inner: _Kernel | None = getattr(kernel, "_tvm_ffi_function", None)
    return kernel if inner is None else inner


def _aligned(x: Tensor | None) -> Tensor | None:
    """The backward's entry copies tensors that are not 16-byte aligned (row p of lens); a copy of ours is told from theirs."""
    return x if x is None or x.storage_offset() * x.element_size() % 16 == 0 else x.clone()


class _Way(NamedTuple):
    """One direction: the entries whose launches are noted, the official call, and the launches that stand for it."""

    entries: tuple[str, ...]
    official: Callable[[Any, KernelMask, _Used], None]
    launches: Callable[[Any, KernelMask, _Used], _Launches]


_FORWARD = _Way(("_flash_attn_fwd",), _official_forward, _forward_launches)
_BACKWARD = _Way(("_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert"), _official_backward, _backward_launches)


def _tensors(call: Any, used: _Used) -> tuple[Tensor, ...]:
    """The call's own tensors, buffers included."""
    results = (*call.grads, call.grad_out) if isinstance(call, BackwardCall) else ()
    seqs = tuple(x for x in (call.starts_q, call.starts_kv, *used) if x is not None)
    return (call.q, call.k, call.v, call.out, call.lse, *results, *seqs)


# ---------------------------------------------------------------------------------------------------------------- the backend
class Flash4(Backend):
    """See the module's text.

    Attributes:
        fallbacks: keys whose calls stay with the official entry, and why.
    """

    name = "flash4"
    switches = ("NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V4")
    width_multiple = 32  # most widths between are refused in training: see _sm90_refusals and _sm100_refusals
    loads_whole_tiles = True
    reads_lens = False

    def __init__(self) -> None:
        self.fallbacks: dict[tuple[Any, ...], str] = {}
        self._kernels: dict[tuple[Any, ...], tuple[_Kernel, ...]] = {}  # () means: the official entry, for good
        self._owners: list[_Kernel] = []
        self._lock = threading.Lock()

    def version(self) -> str | None:
        return package_version(DISTRIBUTION)

    def refusals(self, p: AttentionParams) -> Iterator[str]:
        version = self.version()
        if version is None:
            yield f"needs the package {DISTRIBUTION}, found none"
            return
        yield from _package_refusals(version)
        yield from common_fused_refusals(p, max_head_dim=256, min_sm=90)
        yield from bottom_right_only_refusals(p)
        if p.return_max_logit:
            yield "returns no max_logit"
        if p.device_type != "cuda" or p.sm < 90:
            return
        family = _FAMILIES.get(p.sm // 10)
        if family is None:
            yield f"knows sm90 to sm121, found sm{p.sm}"
            return
        yield from family(p)
        if _release(version) > _release(VERSION_READ):
            yield from _newer_entry_refusals(p)

    def forward(self, call: ForwardCall) -> None:
        mask = kernel_mask(call.band)
        self._run(_FORWARD, _forward_key(call, mask), call, mask)

    def backward(self, call: BackwardCall) -> None:
        mask = kernel_mask(call.band)
        _check_accumulators(call)
        self._run(_BACKWARD, _backward_key(call, mask), call, mask)

    def _run(self, way: _Way, key: tuple[Any, ...], call: Any, mask: KernelMask) -> None:
        kernels = self._kernels.get(key)
        if kernels is None:
            self._learn(way, key, call, mask)
            return
        used = _used_lengths(call)
        if kernels:
            try:
                for kernel, args in zip(kernels, way.launches(call, mask, used)):
                    kernel(*args)
                return
            except (TypeError, ValueError) as error:  # a kernel's check of its arguments, before it is launched
                self._give_up(key, f"{type(error).__name__}: {error}")
        way.official(call, mask, used)

    def _learn(self, way: _Way, key: tuple[Any, ...], call: Any, mask: KernelMask) -> None:
        """Runs ``call`` by the official entry and finds out whether the next one of this key can do without."""
        version, used = self.version(), _used_lengths(call)
        if version != VERSION_READ or not _on_sm90(call.q):
            self._give_up(key, f"the direct way is for version {VERSION_READ} on sm90, found {version}")
            way.official(call, mask, used)
            return
        used = (_aligned(used[0]), _aligned(used[1]))  # type: ignore[assignment]
        with self._lock, _recording(_interface(), way.entries) as launched:
            way.official(call, mask, used)
        release_frames()
        if not launched:
            return  # no tokens: this call says nothing about the next
        difference = _difference(way.launches(call, mask, used), launched, _tensors(call, used))
        if difference is not None:
            self._give_up(key, difference)
            return
        self._owners += [kernel for kernel, _ in launched]
        self._kernels[key] = tuple(_bare(kernel) for kernel, _ in launched)

    def _give_up(self, key: tuple[Any, ...], reason: str) -> None:
        _log.info("flash4 stays with the official entry for %s: %s", key, reason)
        self.fallbacks[key] = reason
        self._kernels[key] = ()
