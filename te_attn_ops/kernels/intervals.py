"""From bands to per-row key intervals, on the device: the mask that the single-launch backend's plan is built from.

The mask is int32 [1, 3, T]: a query row sees the keys [0, F0) and [F1, F2) of its sequence's slot. A row whose interval starts
at 0 is (hi, hi, hi), another one (0, lo, hi), one that sees nothing (0, 0, 0): endpoints never descend, as the library wants.
Keys are counted from the start of the slot, which for the first sequence includes the rows before it.

Imported only where a plan is made. Triton may not be installed on a machine without a GPU; the reference needs none.
"""

# Triton reads the kernel as its own language.
# mypy: ignore-errors
from collections.abc import Sequence

import torch
from torch import Tensor

from ..masks import Band

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

ENDPOINTS = 3
_BLOCK = 256


def slot_bounds(starts: Tensor) -> Tensor:
    """[N + 1] cu_seqlens of the slots: those of ``starts``, with the rows before the first sequence added to its slot.

    Never empty as a whole: where every slot is, the last one takes a row of the tail (the planner takes no total of 0).
    """
    bounds = starts.to(torch.int32, copy=True)
    bounds[:1].zero_()
    bounds[-1:].clamp_(min=1)
    return bounds


def band_table(bands: Sequence[Band], longest: int, device: torch.device) -> Tensor:
    """int32 [P, 3]: left, right, bottom_right. A side of ``longest`` (all query and key rows together) or more is unbounded."""

    def side(width: int | None) -> int:
        return longest if width is None else min(width, longest)

    table = [[side(band.left), side(band.right), int(band.bottom_right)] for band in bands]
    return torch.tensor(table, dtype=torch.int32, device=device).view(-1, ENDPOINTS)


def intervals(
    slots_q: Tensor,
    starts_q: Tensor,
    lens_q: Tensor,
    starts_kv: Tensor,
    lens_kv: Tensor,
    table: Tensor,
    rows: int,
    longest_slot: int,
) -> Tensor:
    """int32 [1, 3, rows] endpoints of every row of the slots. One launch, no sync.

    Args:
        slots_q: [N + 1], :func:`slot_bounds` of ``starts_q``; ``rows`` is its last entry, ``longest_slot`` its largest step.
        starts_q, starts_kv: [N + 1] int32. lens_q, lens_kv: [P, N] int32; a sequence has its lengths in one policy's row.
        table: :func:`band_table`.
    """
    if not slots_q.is_cuda:
        return intervals_reference(slots_q, starts_q, lens_q, starts_kv, lens_kv, table, rows)
    if triton is None:
        raise RuntimeError("a single-launch plan needs Triton, which is not installed")
    endpoints = torch.empty(1, ENDPOINTS, rows, dtype=torch.int32, device=slots_q.device)
    num_policies, num_seqs = lens_q.shape
    grid = (num_seqs, -(-max(longest_slot, 1) // _BLOCK))
    tensors = (endpoints, slots_q, starts_q, lens_q.contiguous(), starts_kv, lens_kv.contiguous(), table)
    _intervals_kernel[grid](*tensors, rows, num_seqs, num_policies, BLOCK=_BLOCK)
    return endpoints


def intervals_reference(
    slots_q: Tensor, starts_q: Tensor, lens_q: Tensor, starts_kv: Tensor, lens_kv: Tensor, table: Tensor, rows: int
) -> Tensor:
    """:func:`intervals` in plain torch."""
    row = torch.arange(rows, device=slots_q.device)
    # A zero-length slot shares its start with the next one: right=True finds the last slot that starts at or before the row.
    slot = (torch.searchsorted(slots_q[:-1].long(), row, right=True) - 1).clamp(min=0)
    owner = ((lens_q + lens_kv) > 0).int().argmax(0)[slot]
    len_q, len_kv = lens_q.sum(0).long()[slot], lens_kv.sum(0).long()[slot]
    left, right, bottom_right = table.long()[owner].unbind(1)
    at = row - starts_q.long()[slot]
    diagonal = at + torch.where(bottom_right != 0, len_kv - len_q, 0)
    low = (diagonal - left).clamp(min=0)
    high = torch.minimum(diagonal + right + 1, len_kv)
    seen = (at >= 0) & (at < len_q) & (low < high)
    lead = torch.where(slot == 0, starts_kv[0].long(), 0)
    low, high = torch.where(seen, low + lead, 0), torch.where(seen, high + lead, 0)
    from_zero = low == 0
    endpoints = (torch.where(from_zero, high, 0), torch.where(from_zero, high, low), high)
    return torch.stack(endpoints).to(torch.int32)[None]


if triton is not None:
    _RUNTIME = [
        "endpoints", "slots_q", "starts_q", "lens_q", "starts_kv", "lens_kv", "table", "rows", "num_seqs", "num_policies",
    ]  # fmt: skip

    @triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_RUNTIME)
    def _intervals_kernel(
        endpoints, slots_q, starts_q, lens_q, starts_kv, lens_kv, table, rows, num_seqs, num_policies, BLOCK: tl.constexpr
    ):
        n = tl.program_id(0)
        first = tl.load(slots_q + n)
        row = first + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = row < tl.load(slots_q + n + 1)
        len_q = first * 0
        len_kv = first * 0
        left = first * 0
        right = first * 0
        bottom_right = first * 0
        for p in range(num_policies):
            own_q = tl.load(lens_q + p * num_seqs + n)
            own_kv = tl.load(lens_kv + p * num_seqs + n)
            own = own_q + own_kv > 0
            len_q += own_q
            len_kv += own_kv
            left = tl.where(own, tl.load(table + 3 * p), left)
            right = tl.where(own, tl.load(table + 3 * p + 1), right)
            bottom_right = tl.where(own, tl.load(table + 3 * p + 2), bottom_right)
        at = row - tl.load(starts_q + n)
        diagonal = at + tl.where(bottom_right != 0, len_kv - len_q, 0)
        low = tl.maximum(diagonal - left, 0)
        high = tl.minimum(diagonal + right + 1, len_kv)
        seen = (at >= 0) & (at < len_q) & (low < high)
        lead = tl.where(n == 0, tl.load(starts_kv), 0)
        low = tl.where(seen, low + lead, 0)
        high = tl.where(seen, high + lead, 0)
        from_zero = low == 0
        tl.store(endpoints + row, tl.where(from_zero, high, 0), mask=inside)
        tl.store(endpoints + rows + row, tl.where(from_zero, high, low), mask=inside)
        tl.store(endpoints + 2 * rows + row, high, mask=inside)
