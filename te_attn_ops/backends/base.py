"""The protocol that every backend follows: a band on a subset, computed in place.

A *subset* is the sequences that share a band, over the packed storage: ``starts[N + 1]`` and ``lens[N]`` (int32) for q and
for kv. All N sequences of the batch are there; a sequence of another policy has length 0. ``starts`` never descends and its
last entry is the physical end of the last slot, so it doubles as ``cu_seqlens``.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..masks import Band
from ..params import AttentionParams


@dataclass
class Call:
    """What forward and backward have in common.

    Shapes: q [T_q, H, D_qk], k [T_k, H_kv, D_qk], v [T_k, H_kv, D_v]; the last stride is 1, the others are free (views of a
    packed projection), and rows and base are 16-byte aligned. starts_* [N + 1] and lens_* [P, N] are int32 on the same device.
    One band, and P = 1, except for a single-launch backend, which gets all P of them at once. A backend that says so gets plain
    cu_seqlens without lens_* ([0]).

    ``plain_cu_seqlens``: one policy and no gaps, so ``starts`` are the cu_seqlens of the very sequences to compute (a tail
    beyond the last one may still exist). ``equal_lengths``: each sequence has as many query as key tokens.
    ``contiguous_run``: the subset's sequences are one run of neighbours; ``run``: its first sequence and how many they are, where
    the host knows. ``has_gaps``: a sequence may be shorter than its slot.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    starts_q: Tensor
    lens_q: Tensor
    starts_kv: Tensor
    lens_kv: Tensor
    bands: tuple[Band, ...]
    max_seqlen_q: int
    max_seqlen_kv: int
    scale: float
    plain_cu_seqlens: bool
    equal_lengths: bool
    deterministic: bool
    single_launch_plan: list[Tensor]
    contiguous_run: bool
    has_gaps: bool = dataclasses.field(kw_only=True, default=True)
    run: tuple[int, int] | None = dataclasses.field(kw_only=True, default=None)

    @property
    def band(self) -> Band:
        return self.bands[0]

    @property
    def num_seqs(self) -> int:
        return self.starts_q.shape[0] - 1

    @property
    def has_lens(self) -> bool:
        return self.lens_q.dim() == 2

    @property
    def seqused_q(self) -> Tensor:
        """[N] query tokens of each sequence in this subset."""
        return self.lens_q[0] if self.has_lens else self.starts_q.diff()

    @property
    def seqused_kv(self) -> Tensor:
        return self.lens_kv[0] if self.has_lens else self.starts_kv.diff()


@dataclass
class ForwardCall(Call):
    """Fill ``out`` [T_q, H, D_v] and ``lse`` [H, T_q] (float32, natural log; both contiguous) at the subset's rows: every row
    of its sequences, 0 and -inf where a row sees no key. Rows outside the subset must not be touched: they belong to another
    policy, or to no sequence (those are filled elsewhere). ``max_logit`` [H] float32, where wanted, is raised to at least the
    largest scaled score that a row of the subset sees.

    The buffers are allocated when first asked for: a kernel that can only return fresh full-size tensors calls :meth:`adopt`
    with them where ``first`` is true, and selects its rows into the buffers otherwise.

    ``is_training``: a backward with this backend will follow. ``first``: nothing stands in the outputs yet, so a
    kernel may leave anything in the rows of others.
    """

    is_training: bool = dataclasses.field(kw_only=True)
    first: bool = dataclasses.field(kw_only=True)
    max_logit: Tensor | None = dataclasses.field(kw_only=True, default=None)
    _out: Tensor | None = dataclasses.field(kw_only=True, default=None)
    _lse: Tensor | None = dataclasses.field(kw_only=True, default=None)

    @property
    def out(self) -> Tensor:
        if self._out is None:
            self._out = self.q.new_empty(self.q.shape[0], self.q.shape[1], self.v.shape[2])
        return self._out

    @property
    def lse(self) -> Tensor:
        if self._lse is None:
            self._lse = self.q.new_empty(self.q.shape[1], self.q.shape[0], dtype=torch.float32)
        return self._lse

    def adopt(self, out: Tensor, lse: Tensor) -> None:
        """Takes full-size, contiguous results as this call's buffers. Only where ``first``."""
        self._out, self._lse = out, lse


@dataclass
class BackwardCall(Call):
    """Fill ``dq`` [T_q, H, D_qk], ``dk`` [T_k, H_kv, D_qk] and ``dv`` [T_k, H_kv, D_v] (contiguous) at the subset's rows, 0 at
    rows that see no key and keys that no row sees. ``out`` and ``lse`` are the forward's; ``grad_out`` is [T_q, H, D_v].
    ``first`` and :meth:`adopt` as in :class:`ForwardCall`."""

    grad_out: Tensor = dataclasses.field(kw_only=True)
    out: Tensor = dataclasses.field(kw_only=True)
    lse: Tensor = dataclasses.field(kw_only=True)
    first: bool = dataclasses.field(kw_only=True)
    _grads: tuple[Tensor, Tensor, Tensor] | None = dataclasses.field(kw_only=True, default=None)

    @property
    def grads(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv."""
        if self._grads is None:
            contiguous = torch.contiguous_format
            self._grads = (
                torch.empty_like(self.q, memory_format=contiguous),
                torch.empty_like(self.k, memory_format=contiguous),
                torch.empty_like(self.v, memory_format=contiguous),
            )
        return self._grads

    def adopt(self, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        self._grads = (dq, dk, dv)


class Backend:
    """One attention implementation. A subclass is one file and one line in the registry.

    Attributes:
        name: as users write it, for example ``"flash4"``.
        switches: the NVTE_* variables of which any set to 0 turns it off.
        single_launch: whether it takes all policies in one call, through a plan made ahead.
        in_place: whether it addresses any subset without copies; others are offered the dispatch "grouped" by themselves.
        reads_lens: whether it reads lens_* although cu_seqlens are plain.
        width_multiple: padding to a multiple of this is tried too, beside the multiple of 8 that is tried for every backend.
        loads_whole_tiles: whether a non-finite value in rows outside a sequence can reach that sequence's results.
    """

    name: str
    switches: tuple[str, ...] = ()
    single_launch: bool = False
    in_place: bool = True
    reads_lens: bool = True
    width_multiple: int = 8
    loads_whole_tiles: bool = False

    def version(self) -> str | None:
        """The installed version; None if it is not installed. Must not import the backend's library."""
        raise NotImplementedError

    def refusals(self, p: AttentionParams) -> Iterator[str]:
        """Reasons why it cannot run ``p``, forward and, if ``p.is_training``, backward. Each names the value seen and the limit.
        Nothing yielded means that it accepts. Called at trace time, once per key; it may ask its library."""
        raise NotImplementedError

    def forward(self, call: ForwardCall) -> None:
        raise NotImplementedError

    def backward(self, call: BackwardCall) -> None:
        raise NotImplementedError


def release_frames() -> None:
    """After a library has built or compiled something for the first time.

    An exception or a frame that a library leaves in a reference cycle holds the frames of its callers too: the user's tensors and
    autograd graph would live until the next garbage collection. That is memory, and worse: a CUDA graph captured meanwhile fails
    ("operation would make the legacy stream depend on a capturing blocking stream"), since the leaves' accumulation nodes live
    on and belong to the stream of the first call (seen with cuDNN's frontend 1.32).
    """
    if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):  # where freeing other graphs is an error
        gc.collect()


def common_fused_refusals(p: AttentionParams, *, max_head_dim: int = 256, min_sm: int = 80) -> Iterator[str]:
    """Limits that every fused CUDA kernel shares."""
    if p.device_type != "cuda":
        yield f"needs a CUDA device, found {p.device_type}"
        return
    if p.sm < min_sm:
        yield f"needs sm{min_sm} or newer, found sm{p.sm}"
    if p.dtype not in (torch.float16, torch.bfloat16):
        yield f"needs float16 or bfloat16, found {str(p.dtype).removeprefix('torch.')}"
    if p.num_heads % p.num_gqa_groups:
        yield f"needs num_heads to be a multiple of num_gqa_groups, found {p.num_heads} and {p.num_gqa_groups}"
    for name, width in (("head_dim_qk", p.head_dim_qk), ("head_dim_v", p.head_dim_v)):
        if width % 8:
            yield f"needs {name} to be a multiple of 8, found {width}"
        if width > max_head_dim:
            yield f"needs {name} <= {max_head_dim}, found {width}"


def bottom_right_only_refusals(p: AttentionParams) -> Iterator[str]:
    """For kernels whose diagonal always ends in the last key: a top-left band needs equal lengths in every sequence."""
    if p.equal_lengths:
        return
    for band in p.bands:
        if not band.is_full and not band.bottom_right:
            yield (
                f"aligns the diagonal bottom-right only, found {band.describe()} with sequences of possibly unequal lengths (where they "
                "are equal, pass one cu_seqlens tensor for queries and keys)"
            )
            return
