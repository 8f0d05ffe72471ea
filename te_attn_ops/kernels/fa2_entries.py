"""Triton kernels that build the cu_seqlens by which FlashAttention 2 is told of a subset.

Imported only where a kernel is launched: Triton may not be installed on a machine without a GPU. The same arithmetic in
torch, and what it is for, stands in :mod:`te_attn_ops.backends._fa2`.
"""

# Triton reads these functions as its own language.
# mypy: ignore-errors
import triton
import triton.language as tl

from .launch import Launcher

_RUNTIME = ["starts_q", "lens_q", "starts_kv", "lens_kv", "cu_q", "cu_kv", "num_seqs"]


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_RUNTIME)
def gap_entries_kernel(
    starts_q, lens_q, starts_kv, lens_kv, cu_q, cu_kv, num_seqs, ENTRIES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_seqs
    begin_q, end_q = tl.load(starts_q + n, mask=inside), tl.load(starts_q + n + 1, mask=inside)
    begin_kv, end_kv = tl.load(starts_kv + n, mask=inside), tl.load(starts_kv + n + 1, mask=inside)
    own_q = begin_q + tl.load(lens_q + n, mask=inside)
    own_kv = begin_kv + tl.load(lens_kv + n, mask=inside)
    at = n * ENTRIES
    tl.store(cu_q + at, begin_q, mask=n == 0)
    tl.store(cu_kv + at, begin_kv, mask=n == 0)
    if ENTRIES == 3:
        tl.store(cu_q + at + 1, own_q, mask=inside)
        tl.store(cu_q + at + 2, end_q, mask=inside)
        tl.store(cu_kv + at + 1, own_kv, mask=inside)
        tl.store(cu_kv + at + 2, own_kv, mask=inside)
    else:
        tl.store(cu_q + at + 1, end_q, mask=inside)
        tl.store(cu_kv + at + 1, own_kv, mask=inside)
    tl.store(cu_q + at + ENTRIES, end_q, mask=inside)
    tl.store(cu_kv + at + ENTRIES, end_kv, mask=inside)


@triton.jit
def clamp_to_run(starts, lens, cu, num_seqs, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    # Without a member the bounds cross, and every entry becomes the last start: length 0 throughout.
    last = tl.load(starts + num_seqs)
    low = last
    high = tl.load(starts)
    for offset in range(0, num_seqs, BLOCK):
        n = offset + lane
        inside = n < num_seqs
        begin = tl.load(starts + n, mask=inside, other=0)
        length = tl.load(lens + n, mask=inside, other=0)
        low = tl.minimum(low, tl.min(tl.where(length > 0, begin, last), 0))
        high = tl.maximum(high, tl.max(tl.where(length > 0, begin + length, 0), 0))
    for offset in range(0, num_seqs + 1, BLOCK):
        n = offset + lane
        inside = n <= num_seqs
        begin = tl.load(starts + n, mask=inside, other=0)
        tl.store(cu + n, tl.maximum(tl.minimum(begin, high), low), mask=inside)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_RUNTIME)
def run_entries_kernel(starts_q, lens_q, starts_kv, lens_kv, cu_q, cu_kv, num_seqs, BLOCK: tl.constexpr):
    if tl.program_id(0) == 0:
        clamp_to_run(starts_q, lens_q, cu_q, num_seqs, BLOCK)
    else:
        clamp_to_run(starts_kv, lens_kv, cu_kv, num_seqs, BLOCK)


gap_entries = Launcher(gap_entries_kernel)
run_entries = Launcher(run_entries_kernel)
