"""What the adapters of FlashAttention-2-style kernels share: a subset told as cu_seqlens, windows, results into buffers.

Facts from flash-attn 2.8.3's sources (csrc/flash_attn), which PyTorch's bundled copy shares:

* A kernel takes cu_seqlens only: entry e is rows [cu[e], cu[e + 1]) of q and of k. cu need not start at 0 nor end at the last
  row (block_info.h), and rows outside [cu[0], cu[-1]) are neither read nor written, except that the backward with fewer
  key/value than query heads overwrites every row of dk and dv (``at::sum_out`` at the end of mha_varlen_bwd).
* An entry with query rows and no keys writes out 0 and lse +inf (flash_fwd_kernel.h, the early exit), and dq 0; one with keys
  and no query rows writes dk and dv 0 (flash_bwd_kernel.h, ``m_block < m_block_min``). Two empty sides write nothing.
* Rows beyond max_seqlen of an entry are never visited; a larger max_seqlen costs idle thread blocks only.
* max_seqlen_q == 1 with fewer key/value heads reshapes q by the batch (``seqlenq_ngroups_swapped``), which breaks empty
  sequences: at least 2 is always passed.
* A row that sees no key has out 0 and lse +inf (softmax.h: normalize_softmax_lse). The backward takes -inf there just as
  well: ``scale_apply_exp2`` counts a maximum of -inf as 0, and all scores of such a row are masked to -inf, so P = 0.
* The number of entries is a grid's y dimension: at most 65,535 (flash_fwd_launch_template.h), which a launch error tells.
* Rows outside an entry are loaded as zeros (predicated copies), so a NaN next to a sequence cannot reach it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .. import rows
from ..environment import compute_capability, on_forget
from ..masks import Band
from ..params import AttentionParams
from .base import Backend, BackwardCall, Call, ForwardCall, bottom_right_only_refusals, common_fused_refusals

Grads = tuple[Tensor, Tensor, Tensor]


# ------------------------------------------------------------------------------------------------------------------ windows
def kernel_window(band: Band, max_seqlen_q: int, max_seqlen_kv: int) -> tuple[int, int]:
    """(left, right) as FlashAttention spells them, -1 for unbounded; a side that hides no key of any row becomes -1.

    Exact for a bottom-right band: the last row's diagonal is key L_k - 1, so ``left >= L_k - 1`` hides nothing; the first
    row's is key L_k - L_q, so ``right >= L_q - 1`` hides nothing. FlashAttention 3 clamps by the same two rules.
    """
    left = -1 if band.left is None or band.left >= max_seqlen_kv - 1 else band.left
    right = -1 if band.right is None or band.right >= max_seqlen_q - 1 else band.right
    return left, right


def max_seqlen_kv_to_pass(left: int, right: int, max_seqlen_q: int, max_seqlen_kv: int) -> int:
    """The max_seqlen_k under which FlashAttention 2 computes exactly the window of :func:`kernel_window`.

    It reads a side >= max_seqlen_k as unbounded, and an unbounded right side next to a bounded left one as max_seqlen_k
    (flash_api.cpp: mha_varlen_fwd, set_params_fprop). Both are wrong for the right side where a sequence has more query than
    key tokens, unless max_seqlen_k is raised: at the cost of idle thread blocks in the backward, in such calls alone.
    """
    if right >= 0:
        return max(max_seqlen_kv, right + 1, 1)
    if left >= 0:
        return max(max_seqlen_kv, max_seqlen_q - 1, 1)
    return max(max_seqlen_kv, 1)


# ------------------------------------------------------------------------------------------------------- subset as cu_seqlens
def gap_entries(starts_q: Tensor, lens_q: Tensor, starts_kv: Tensor, lens_kv: Tensor, gaps: bool) -> tuple[Tensor, Tensor]:
    """cu_seqlens for q and kv in which every row outside the subset lies in an entry that attends to nothing.

    With ``gaps``, three entries per sequence: (its query rows, its keys), (the query rows up to the next slot, none), (none,
    the keys up to the next slot). The last two cannot be one: an entry with both sides is computed. Where each sequence fills
    its slot or is not of the subset, the first two never occur together, and two entries do: (query rows of the slot, own
    keys), (none, the other keys).

    starts_* [N + 1], lens_* [N], int32. Returns two int32 tensors [3 N + 1] or [2 N + 1].
    """
    per_sequence, num_seqs = (3 if gaps else 2), lens_q.shape[0]
    if rows.uses_triton(starts_q):
        from ..kernels import fa2_entries as kernels

        cu = torch.empty(2, per_sequence * num_seqs + 1, dtype=torch.int32, device=starts_q.device)
        args = (starts_q, lens_q, starts_kv, lens_kv, cu[0], cu[1], num_seqs)
        kernels.gap_entries((-(-num_seqs // 128), 1, 1), args, (per_sequence, 128), starts_q.device)
        return cu[0], cu[1]
    own_q, end_q = starts_q[:-1] + lens_q, starts_q[1:]
    own_kv, end_kv = starts_kv[:-1] + lens_kv, starts_kv[1:]
    bounds_q = [own_q, end_q, end_q] if gaps else [end_q, end_q]
    bounds_kv = [own_kv, own_kv, end_kv] if gaps else [own_kv, end_kv]
    return _join(starts_q, bounds_q), _join(starts_kv, bounds_kv)


def _join(starts: Tensor, bounds: list[Tensor]) -> Tensor:
    return torch.cat([starts[:1], torch.stack(bounds, 1).flatten()])


def run_entries(starts_q: Tensor, lens_q: Tensor, starts_kv: Tensor, lens_kv: Tensor) -> tuple[Tensor, Tensor]:
    """cu_seqlens [N + 1] of a subset that is one run of neighbours without gaps: every start, clamped to the run.

    Sequences before and after it become empty entries, so that no row of theirs is touched.
    """
    num_seqs = lens_q.shape[0]
    if rows.uses_triton(starts_q):
        from ..kernels import fa2_entries as kernels

        cu = torch.empty(2, num_seqs + 1, dtype=torch.int32, device=starts_q.device)
        args = (starts_q, lens_q, starts_kv, lens_kv, cu[0], cu[1], num_seqs)
        kernels.run_entries((2, 1, 1), args, (256,), starts_q.device)
        return cu[0], cu[1]
    return _clamp_to_run(starts_q, lens_q), _clamp_to_run(starts_kv, lens_kv)


def _clamp_to_run(starts: Tensor, lens: Tensor) -> Tensor:
    # Without a member the bounds cross, and every entry becomes the last start: length 0 throughout.
    low = torch.where(lens > 0, starts[:-1], starts[-1]).amin()
    high = torch.where(lens > 0, starts[:-1] + lens, starts[0]).amax()
    return torch.maximum(torch.minimum(starts, high), low)


class Launch(NamedTuple):
    """What a FlashAttention 2 kernel is told beyond the tensors.

    ``own_rows_only``: no entry touches a row outside the subset (in a backward: with as many key/value as query heads).
    """

    cu_q: Tensor
    cu_kv: Tensor
    max_q: int
    max_kv: int
    left: int
    right: int
    own_rows_only: bool

    @property
    def causal(self) -> bool:
        return self.left < 0 and self.right == 0


def make_launch(call: Call) -> Launch:
    """The cheapest spelling of a call's subset. A run told by its ends would take the rows of a gap for tokens."""
    own_rows_only = True
    if call.plain_cu_seqlens:
        cu_q, cu_kv = call.starts_q, call.starts_kv
    elif call.run is not None and not call.has_gaps:
        first, count = call.run
        cu_q, cu_kv = (starts[first : first + count + 1] for starts in (call.starts_q, call.starts_kv))
    elif call.contiguous_run and not call.has_gaps:
        cu_q, cu_kv = run_entries(call.starts_q, call.seqused_q, call.starts_kv, call.seqused_kv)
    else:
        own_rows_only = False
        cu_q, cu_kv = gap_entries(call.starts_q, call.seqused_q, call.starts_kv, call.seqused_kv, call.has_gaps)
    left, right = kernel_window(call.band, call.max_seqlen_q, call.max_seqlen_kv)
    max_kv = max_seqlen_kv_to_pass(left, right, call.max_seqlen_q, call.max_seqlen_kv)
    return Launch(cu_q, cu_kv, max(call.max_seqlen_q, 2), max_kv, left, right, own_rows_only)


# ------------------------------------------------------------------------------------------------------------------- backend
class Fa2Backend(Backend):
    """Forward and backward over :class:`Launch`; a subclass calls its library.

    Attributes:
        fills_given_buffers: the library writes into tensors that it is given; else it returns fresh ones.
        build_may_lack_kernels: an installed build may have fewer kernels than its version promises: see :func:`probe`.
    """

    switches = ("NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V2")
    in_place = False
    reads_lens = False
    fills_given_buffers = False
    build_may_lack_kernels = False

    def launch_forward(self, call: ForwardCall, launch: Launch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """out (the given one, or a fresh one) and a fresh lse [H, T_q]."""
        raise NotImplementedError

    def launch_backward(self, call: BackwardCall, launch: Launch, grads: Grads | None) -> Grads:
        """dq, dk, dv: the given ones, or fresh ones."""
        raise NotImplementedError

    def library_refusals(self, p: AttentionParams) -> Iterator[str]:
        """What this library refuses beyond :meth:`refusals`."""
        yield from ()

    def refusals(self, p: AttentionParams) -> Iterator[str]:
        reasons = [*_kernel_refusals(p), *self.library_refusals(p)]
        if not reasons and self.build_may_lack_kernels:
            reason = probe(self, p)
            reasons = [] if reason is None else [reason]
        yield from reasons

    def forward(self, call: ForwardCall) -> None:
        launch = make_launch(call)
        in_place = self.fills_given_buffers and (launch.own_rows_only or call.first)
        out, lse = self.launch_forward(call, launch, call.out if in_place else None)
        if lse.shape != (call.q.shape[1], call.q.shape[0]):
            raise RuntimeError(f"{self.name} returned a log-sum-exp of shape {tuple(lse.shape)}, not [heads, total_q]")
        if call.first:
            rows.normalize_lse(lse)
            # A fresh out has the strides of q, which may be a transposed view.
            call.adopt(out.contiguous(), lse)
            return
        if in_place:
            rows.select_lse(call.lse, lse, call.starts_q, call.seqused_q)
            return
        rows.select_rows([(call.out, out.contiguous())], call.starts_q, call.seqused_q, (call.lse, lse))

    def backward(self, call: BackwardCall) -> None:
        launch = make_launch(call)
        own_rows_only = launch.own_rows_only and call.q.shape[1] == call.k.shape[1]
        if self.fills_given_buffers and (own_rows_only or call.first):
            self.launch_backward(call, launch, call.grads)
            return
        fresh = [grad.contiguous() for grad in self.launch_backward(call, launch, None)]
        if call.first:
            call.adopt(*fresh)
            return
        pairs = list(zip(call.grads, fresh))
        rows.select_rows(pairs[:1], call.starts_q, call.seqused_q)
        rows.select_rows(pairs[1:], call.starts_kv, call.seqused_kv)


def _kernel_refusals(p: AttentionParams) -> Iterator[str]:
    """Widths up to 256 in steps of 8, the same for v, on every sm80 or newer: no list of architectures for widths above 192
    (flash_bwd_launch_template.h has a kernel of 96 KiB for those with less shared memory)."""
    yield from common_fused_refusals(p)
    yield from bottom_right_only_refusals(p)
    if p.device_type == "cuda" and torch.version.hip is not None:
        yield f"is known on NVIDIA GPUs only, found ROCm {torch.version.hip}"
    if p.head_dim_qk != p.head_dim_v:
        yield f"needs head_dim_v equal to head_dim_qk, found {p.head_dim_v} and {p.head_dim_qk}"
    if p.return_max_logit:
        yield "does not return max_logit"


# --------------------------------------------------------------------------------------------------------------------- probe
_PROBED: dict[tuple[object, ...], str | None] = {}
_PROBE_TOKENS = 8


def forget_probes() -> None:
    """Makes :func:`probe` ask the libraries again."""
    _PROBED.clear()


on_forget(forget_probes)


def probe(backend: Backend, p: AttentionParams) -> str | None:
    """Why the installed build of a library cannot run ``p``: it is run once on one sequence of a few tokens, and what it raises
    is the reason. None means that it ran, or that it cannot be tried now (no such device, or a capture is under way)."""
    if p.device_type != "cuda" or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return None
    index = torch.cuda.current_device() if p.device_index < 0 else p.device_index
    if compute_capability(index) != p.sm:
        return None
    gqa = p.num_heads != p.num_gqa_groups
    for band in sorted({_representative(band) for band in p.bands}, key=repr):
        widths = (p.head_dim_qk, p.head_dim_v)
        key = (backend.name, backend.version(), index, p.dtype, widths, gqa, band, p.is_training, p.deterministic)
        if key not in _PROBED:
            try:
                _PROBED[key] = _try_once(backend, p, band, gqa, index)
            except torch.cuda.OutOfMemoryError:
                return None  # says nothing about the build: ask again next time
        if _PROBED[key] is not None:
            return _PROBED[key]
    return None


def _representative(band: Band) -> Band:
    """Full, causal or a window: those are compiled apart. One sequence of equal lengths, so the alignment does not matter."""
    if band.is_full or band.is_causal:
        return Band(band.left, band.right, True)
    return Band(1, 1, True)


def _try_once(backend: Backend, p: AttentionParams, band: Band, gqa: bool, index: int) -> str | None:
    device = torch.device("cuda", index)
    # Selection may run while a compiler traces: its modes must not see these tensors.
    with torch.no_grad(), torch.cuda.device(index), _disable_current_modes():
        try:
            forward, backward = probe_calls(p, band, gqa, device)
            backend.forward(forward)
            if p.is_training:
                backward.out, backward.lse = forward.out, forward.lse
                backend.backward(backward)
            torch.cuda.current_stream(device).synchronize()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a foreign library raises: it cannot run this
            message = (str(error).strip().splitlines() or [type(error).__name__])[0]
            tried = f"{band.describe()}, {str(p.dtype).removeprefix('torch.')}, width {p.head_dim_qk}"
            return f"its installed build failed on a trial of {tried}: {message[:200]}"
    return None


def probe_calls(p: AttentionParams, band: Band, gqa: bool, device: torch.device) -> tuple[ForwardCall, BackwardCall]:
    """One sequence of a few zero tokens, one head (two over one with ``gqa``). The backward's out and lse are q's and empty."""
    heads = 2 if gqa else 1
    q = torch.zeros(_PROBE_TOKENS, heads, p.head_dim_qk, dtype=p.dtype, device=device)
    v = torch.zeros(_PROBE_TOKENS, 1, p.head_dim_v, dtype=p.dtype, device=device)
    starts = torch.tensor([0, _PROBE_TOKENS], dtype=torch.int32, device=device)
    lens = starts[1:].reshape(1, 1)
    common: dict[str, object] = {
        "q": q,
        "k": q[:, :1].contiguous(),
        "v": v,
        "starts_q": starts,
        "lens_q": lens,
        "starts_kv": starts,
        "lens_kv": lens,
        "bands": (band,),
        "max_seqlen_q": _PROBE_TOKENS,
        "max_seqlen_kv": _PROBE_TOKENS,
        "scale": 1.0,
        "plain_cu_seqlens": True,
        "equal_lengths": True,
        "deterministic": p.deterministic,
        "single_launch_plan": [],
        "contiguous_run": True,
        "first": True,
    }
    grad_out = torch.zeros(_PROBE_TOKENS, heads, p.head_dim_v, dtype=p.dtype, device=device)
    lse = torch.zeros(heads, _PROBE_TOKENS, dtype=torch.float32, device=device)
    forward = ForwardCall(**common, is_training=p.is_training)  # type: ignore[arg-type]
    return forward, BackwardCall(**common, grad_out=grad_out, out=grad_out, lse=lse)  # type: ignore[arg-type]
