"""The row contract, on the device and without a sync: which rows belong to a sequence, which see a key, and what stands in
those that do not.

Each function is one small Triton launch on CUDA that touches only the rows in question, and plain torch elsewhere (and where
Triton is missing).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .backends.base import BackwardCall, ForwardCall
from .masks import Band

_NULL = contextlib.nullcontext()


def device_guard(x: Tensor) -> Any:
    """Makes x's device the current one: a kernel in Python gets no guard from the dispatcher."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return _NULL


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def uses_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda and _triton_installed()


_BLOCK = 2048


def _splits(rows: int) -> int:
    """Programs per sequence: enough to clear one long tail quickly, few enough that idle ones cost nothing."""
    return min(64, max(1, rows // 256))


# ---------------------------------------------------------------------------------------------------- masks of rows, in torch
def row_coordinates(starts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """For each of ``rows`` packed rows the sequence in whose slot it lies (0..N-1, also for rows outside) and its offset there.

    starts: [N + 1]. Returns two int64 tensors [rows]. N must be at least 1.
    """
    row = torch.arange(rows, device=starts.device)
    # A zero-length slot shares its start with the next one: right=True finds the last slot that starts at or before the row.
    sequence = torch.searchsorted(starts[:-1].long(), row, right=True) - 1
    sequence = sequence.clamp_(min=0)
    return sequence, row - starts.long()[sequence]


def subset_row_mask(starts: Tensor, lens: Tensor, rows: int) -> Tensor:
    """bool [rows]: the rows of the sequences with these starts [N + 1] and lengths [N]."""
    if lens.numel() == 0:
        return torch.zeros(rows, dtype=torch.bool, device=starts.device)
    sequence, offset = row_coordinates(starts, rows)
    return (offset >= 0) & (offset < lens.long()[sequence])


def _seen_mask(
    starts: Tensor, lens: Tensor, others: Tensor, left: int | None, right: int | None, bottom_right: bool, rows: int
) -> Tensor:
    """bool [rows]: rows of the subset that pair with at least one position on the other side of the band."""
    if lens.numel() == 0:
        return torch.zeros(rows, dtype=torch.bool, device=starts.device)
    sequence, offset = row_coordinates(starts, rows)
    length, other = lens.long()[sequence], others.long()[sequence]
    shifted = offset + (other - length if bottom_right else 0)
    low = torch.zeros_like(shifted) if left is None else (shifted - left).clamp(min=0)
    high = other - 1 if right is None else torch.minimum(shifted + right, other - 1)
    return (offset >= 0) & (offset < length) & (low <= high)


def _zero_where(keep: Tensor, *tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.masked_fill_(~keep.view(-1, *[1] * (tensor.dim() - 1)), 0)


# ------------------------------------------------------------------------------------------------------------- what is fixed
def fill_outside_forward(out: Tensor, lse: Tensor, starts: Tensor, lens: Tensor) -> None:
    """out = 0 and lse = -inf at rows that belong to no sequence. out [T, H, D], lse [H, T], starts [N + 1], lens [P, N] or, for
    plain cu_seqlens, [0]."""
    rows, num_seqs = out.shape[0], starts.shape[0] - 1
    if uses_triton(out):
        from .kernels import rows as kernels

        heads, device = out.shape[1], out.get_device()
        args = (out, lse, starts, lens, heads * out.shape[2], heads, rows, num_seqs, lens.shape[0])  # no lens: 0 policies
        kernels.outside_forward.launch((out.dtype, device), (num_seqs + 1, _splits(rows), 1), args, (_BLOCK,), device)
        return
    inside = subset_row_mask(starts, _slot_lens(starts, lens), rows)
    _zero_where(inside, out)
    lse.masked_fill_(~inside, float("-inf"))


def fill_outside_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, starts_q: Tensor, lens_q: Tensor, starts_kv: Tensor, lens_kv: Tensor
) -> None:
    """dq, dk and dv = 0 at rows that belong to no sequence. lens [P, N] or [0]."""
    if uses_triton(dq):
        from .kernels import rows as kernels

        rows, num_seqs, device = max(dq.shape[0], dk.shape[0]), starts_q.shape[0] - 1, dq.get_device()
        sizes = (*_widths(dq, dk, dv), dq.shape[0], dk.shape[0], num_seqs, lens_q.shape[0])
        args = (dq, dk, dv, starts_q, lens_q, starts_kv, lens_kv, *sizes)
        kernels.outside_backward.launch((dq.dtype, device), (num_seqs + 1, _splits(rows), 2), args, (_BLOCK,), device)
        return
    _zero_where(subset_row_mask(starts_q, _slot_lens(starts_q, lens_q), dq.shape[0]), dq)
    _zero_where(subset_row_mask(starts_kv, _slot_lens(starts_kv, lens_kv), dk.shape[0]), dk, dv)


def _slot_lens(starts: Tensor, lens: Tensor) -> Tensor:
    """[N] rows of each slot that belong to a sequence of any policy."""
    return lens.sum(0) if lens.dim() == 2 else starts.diff()


def fill_keyless_rows(call: ForwardCall) -> None:
    """out = 0 and lse = -inf at rows of the call's subset that see no key. For kernels that leave them unwritten or wrong."""
    out, lse, band = call.out, call.lse, call.band
    if uses_triton(out):
        from .kernels import rows as kernels

        (rows, heads, width), num_seqs, device = out.shape, call.num_seqs, out.get_device()
        args = (out, lse, call.starts_q, call.seqused_q, call.seqused_kv, heads * width, heads, rows, *band_sides(band))
        kind = (out.dtype, device, band.bottom_right)
        kernels.keyless.launch(kind, (num_seqs, _splits(rows), 1), args, (band.bottom_right, _BLOCK), device)
        return
    seen = _seen_mask(call.starts_q, call.seqused_q, call.seqused_kv, band.left, band.right, band.bottom_right, out.shape[0])
    keep = seen | ~subset_row_mask(call.starts_q, call.seqused_q, out.shape[0])
    _zero_where(keep, out)
    lse.masked_fill_(~keep, float("-inf"))


def fill_unseen_grads(call: BackwardCall) -> None:
    """dq = 0 at rows of the subset that see no key, dk = dv = 0 at keys that no row sees."""
    (dq, dk, dv), band = call.grads, call.band
    if uses_triton(dq):
        from .kernels import rows as kernels

        rows, num_seqs, device = max(dq.shape[0], dk.shape[0]), call.num_seqs, dq.get_device()
        geometry = (call.starts_q, call.seqused_q, call.starts_kv, call.seqused_kv)
        args = (dq, dk, dv, *geometry, *_widths(dq, dk, dv), *band_sides(band))
        kind = (dq.dtype, device, band.bottom_right)
        kernels.unseen_grads.launch(kind, (num_seqs, _splits(rows), 2), args, (band.bottom_right, _BLOCK), device)
        return
    for tensors, starts, lens, others, left, right in (
        ((dq,), call.starts_q, call.seqused_q, call.seqused_kv, band.left, band.right),
        ((dk, dv), call.starts_kv, call.seqused_kv, call.seqused_q, band.right, band.left),
    ):
        rows = tensors[0].shape[0]
        seen = _seen_mask(starts, lens, others, left, right, band.bottom_right, rows)
        _zero_where(seen | ~subset_row_mask(starts, lens, rows), *tensors)


def band_sides(band: Band) -> tuple[int, int]:
    from .kernels.rows import UNBOUNDED

    # Capped: the kernels add a side to lengths in int32.
    left, right = (UNBOUNDED if side is None else min(side, UNBOUNDED) for side in (band.left, band.right))
    return left, right


def _widths(*tensors: Tensor) -> tuple[int, ...]:
    return tuple([tensor.shape[1] * tensor.shape[2] for tensor in tensors])


# ------------------------------------------------------------------------------------------------------- one subset's rows
def select_rows(
    pairs: Sequence[tuple[Tensor, Tensor]], starts: Tensor, lens: Tensor, lse: tuple[Tensor, Tensor] | None = None
) -> None:
    """Copies the rows of the sequences (starts [N + 1], lens [N]) of each (dst, src) pair of contiguous [T, ...] tensors.

    At most three pairs, all over the same rows. ``lse``: a pair for :func:`select_lse`, which costs no launch of its own here.
    """
    rows = pairs[0][0].shape[0]
    if rows == 0 or lens.numel() == 0:
        return
    if uses_triton(pairs[0][0]):
        from .kernels import rows as kernels

        filled = [*pairs, *[pairs[0]] * (3 - len(pairs))]
        widths = [dst[0].numel() for dst, _ in pairs] + [0] * (3 - len(pairs))
        lse_dst, lse_src = pairs[0] if lse is None else lse
        heads = 0 if lse is None else lse_dst.shape[0]
        args = (*[tensor for pair in filled for tensor in pair], lse_dst, lse_src, starts, lens, rows)
        grid = (lens.numel(), min(256, max(1, rows // 16)), 1 if lse is None else 2)
        kernels.copy(grid, args, (*widths, heads, 4096), starts.device)
        return
    mask = subset_row_mask(starts, lens, rows)
    for dst, src in pairs:
        dst.copy_(torch.where(mask.view(-1, *[1] * (dst.dim() - 1)), src, dst))
    if lse is not None:
        select_lse(*lse, starts, lens)


def select_lse(dst: Tensor, src: Tensor, starts: Tensor, lens: Tensor) -> None:
    """:func:`select_rows` for [H, T] log-sum-exps; +inf, FlashAttention 2's mark of a keyless row, becomes -inf."""
    if dst.numel() == 0 or lens.numel() == 0:
        return
    if uses_triton(dst):
        from .kernels import rows as kernels

        kernels.copy_lse((lens.numel(), dst.shape[0], 1), (dst, src, starts, lens, dst.shape[1]), (1024,), dst.device)
        return
    mask = subset_row_mask(starts, lens, dst.shape[1])
    dst.copy_(torch.where(mask, torch.where(src == float("inf"), float("-inf"), src), dst))


def normalize_lse(lse: Tensor) -> None:
    """+inf becomes -inf, in place. lse: contiguous."""
    if lse.numel() and uses_triton(lse):
        from .kernels import rows as kernels

        kernels.normalize((-(-lse.numel() // 2048), 1, 1), (lse, lse.numel()), (2048,), lse.device)
        return
    lse.masked_fill_(lse == float("inf"), float("-inf"))
