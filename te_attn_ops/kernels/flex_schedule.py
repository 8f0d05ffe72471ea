"""The order in which the single-launch backend's forward takes its tasks: a replacement for the library's sort.

A task is a tile of query rows of one head; any order is right. The library's is a good one: sections (heads of one sequence whose
K and V fit the L2 cache together) by falling cost, tiles of a section by falling cost, tiles that see nothing last. Its sort of
the sections runs in one thread: 2.5 ms for 64 sequences of 16 heads, of 4 ms for the whole plan (frontend 1.32, seen on an
H200). All heads of a tile cost the same here, so the same order follows from sums over sequences, in two small launches. (With a
number of key/value heads that is no power of two, a sequence's last section is a narrower one. Here it stays with the others.)

Imported only where a plan is made, with Triton installed.
"""

# Triton reads the kernels as its own language.
# mypy: ignore-errors
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launcher

# What the library takes for the part of the L2 cache that a section's K and V may fill.
_SECTION_BYTES = 50 * 1024 * 1024
_BLOCK = 256
_MOST_DOUBLINGS = 10  # of heads per section

_SUMS_RUNTIME = [
    "partial", "full", "cu_q", "cu_k", "cu_tiles", "sequences", "weights", "busy", "widths",
    "heads_kv", "heads_per_kv", "pack", "tile_q", "tile_kv", "row_bytes", "section_bytes",
]  # fmt: skip


@triton.jit(do_not_specialize=_SUMS_RUNTIME, do_not_specialize_on_alignment=_SUMS_RUNTIME)
def sums_kernel(
    partial, full, cu_q, cu_k, cu_tiles, sequences, weights, busy, widths,
    heads_kv, heads_per_kv, pack, tile_q, tile_kv, row_bytes, section_bytes,
    DOUBLINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence: its row of the library's table; the cost of one of its sections; tiles that see a key; heads per section."""
    n = tl.program_id(0)
    start_q = tl.load(cu_q + n)
    start_k = tl.load(cu_k + n)
    len_q = tl.load(cu_q + n + 1) - start_q
    len_k = tl.load(cu_k + n + 1) - start_k
    begin = tl.load(cu_tiles + n)
    end = tl.load(cu_tiles + n + 1)
    row = sequences + n * 8
    tl.store(row, start_q)
    tl.store(row + 1, start_k)
    tl.store(row + 2, len_q)
    tl.store(row + 3, len_k)
    tl.store(row + 4, begin)
    tl.store(row + 5, (len_q * pack + tile_q - 1) // tile_q)
    tl.store(row + 6, (len_k + tile_kv - 1) // tile_kv)
    tl.store(row + 7, begin * 0)
    head_bytes = len_k.to(tl.int64) * row_bytes
    width = begin * 0 + 1
    for _ in range(DOUBLINGS):
        fits = (width * 2 <= heads_kv) & (head_bytes * (width * 2) <= section_bytes)
        width = tl.where(fits, width * 2, width)
    width = width * heads_per_kv
    cost = tl.zeros((BLOCK,), dtype=tl.int64)
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        own = tl.load(partial + at, mask=at < end, other=0) + tl.load(full + at, mask=at < end, other=0)
        cost += own.to(tl.int64)
        count += (own > 0).to(tl.int32)
    tl.store(weights + n, tl.sum(cost, axis=0) * width)
    tl.store(busy + n, tl.sum(count, axis=0))
    tl.store(widths + n, width)


_TASKS_RUNTIME = [
    "partial", "full", "cu_q", "cu_tiles", "weights", "busy", "widths", "tasks", "num_seqs", "tiles", "heads", "pack", "tile_q",
]  # fmt: skip


@triton.jit(do_not_specialize=_TASKS_RUNTIME, do_not_specialize_on_alignment=_TASKS_RUNTIME)
def tasks_kernel(
    partial, full, cu_q, cu_tiles, weights, busy, widths, tasks, num_seqs, tiles, heads, pack, tile_q,
    BLOCK: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """One tile: where its tasks, one per head, stand in the list."""
    tile = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    # Its sequence: as many as end at or before it.
    passed = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, num_seqs, BLOCK):
        at = first + lane
        passed += (tl.load(cu_tiles + at + 1, mask=at < num_seqs, other=2147483647) <= tile).to(tl.int32)
    n = tl.sum(passed, axis=0)
    weight = tl.load(weights + n)
    own_busy = tl.load(busy + n)
    width = tl.load(widths + n)
    # Tiles that see a key: of the sequences whose sections come first, and of all.
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    everywhere = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, num_seqs, BLOCK):
        at = first + lane
        other = tl.load(weights + at, mask=at < num_seqs, other=-1)
        count = tl.load(busy + at, mask=at < num_seqs, other=0)
        before += tl.where((other > weight) | ((other == weight) & (at < n)), count, 0)
        everywhere += count
    cost = tl.load(partial + tile) + tl.load(full + tile)
    # Its rank among its sequence's tiles by falling cost, or among all tiles that see nothing.
    begin = tl.load(cu_tiles + n)
    end = tl.load(cu_tiles + n + 1)
    idle = cost == 0
    begin = tl.where(idle, 0, begin)
    end = tl.where(idle, tile, end)
    rank = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(begin, end, BLOCK):
        at = first + lane
        own = tl.load(partial + at, mask=at < end, other=-1) + tl.load(full + at, mask=at < end, other=0)
        rank += ((own > cost) & (cost > 0) | (own == cost) & (at < tile)).to(tl.int32)
    place = tl.sum(rank, axis=0)
    base = tl.where(idle, tl.sum(everywhere, axis=0) + place, tl.sum(before, axis=0)) * heads
    head = tl.arange(0, BLOCK_HEADS)
    section = head // width
    here = tl.minimum(width, heads - section * width)
    at = base + tl.where(idle, head, section * width * own_busy + place * here + head % width)
    row = tasks + at.to(tl.int64) * 4
    # The rows of q that the tile has, heads of a group side by side where they are packed.
    block = tile - tl.load(cu_tiles + n)
    length = (tl.load(cu_q + n + 1) - tl.load(cu_q + n)) * pack
    valid = tl.minimum(tile_q, length - block * tile_q)
    tl.store(row, head * 0 + block, mask=head < heads)
    tl.store(row + 1, head, mask=head < heads)
    tl.store(row + 2, head * 0 + n, mask=head < heads)
    tl.store(row + 3, head * 0 + valid, mask=head < heads)


_sums = Launcher(sums_kernel)
_tasks = Launcher(tasks_kernel)


def forward_schedule(
    config: Any,
    partial_counts: Tensor,
    full_counts: Tensor,
    *,
    total_m_blocks: int,
    head_dim: int,
    head_dim_v: int,
    element_size: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_total_m_blocks: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """What the library's ``_build_forward_schedule`` returns: a table [N, 8] of the sequences, and the tasks [tiles * heads, 4].

    ``partial_counts`` and ``full_counts`` are [1, tiles] int32: one mask for all heads, on packed sequences.
    """
    device, num_seqs = partial_counts.device, cu_seqlens_q.shape[0] - 1
    pack = config.qhead_per_kvhead if config.pack_gqa else 1
    heads = config.num_q_heads // pack
    tile_q, tile_kv = config.block_size[0], config.tile_n
    sequences = torch.empty(num_seqs, 8, dtype=torch.int32, device=device)
    tasks = torch.empty(total_m_blocks * heads, 4, dtype=torch.int32, device=device)
    weights = torch.empty(num_seqs, dtype=torch.int64, device=device)
    busy = torch.empty(num_seqs, dtype=torch.int32, device=device)
    widths = torch.empty(num_seqs, dtype=torch.int32, device=device)
    row_bytes = (head_dim + head_dim_v) * element_size
    sums = (partial_counts, full_counts, cu_seqlens_q, cu_seqlens_k, cu_total_m_blocks, sequences, weights, busy, widths)
    numbers = (config.num_kv_heads, heads // config.num_kv_heads, pack, tile_q, tile_kv, row_bytes, _SECTION_BYTES)
    _sums((num_seqs, 1, 1), (*sums, *numbers), (_MOST_DOUBLINGS, _BLOCK), device)
    tensors = (partial_counts, full_counts, cu_seqlens_q, cu_total_m_blocks, weights, busy, widths, tasks)
    numbers = (num_seqs, total_m_blocks, heads, pack, tile_q)
    _tasks((total_m_blocks, 1, 1), (*tensors, *numbers), (_BLOCK, triton.next_power_of_2(heads)), device)
    return sequences, tasks
