"""Triton kernels over the rows of packed sequences: fill those that a contract fixes, copy those of one subset.

Imported only where a kernel is launched: Triton may not be installed on a machine without a GPU.
"""

# Triton reads these functions as its own language.
# mypy: ignore-errors
import triton
import triton.language as tl

from .launch import Launcher

UNBOUNDED = 1 << 30

@triton.jit
def outside(starts, lens, n, num_seqs, num_policies, rows):
    """Rows of slot n that belong to no sequence; slot num_seqs is what lies before the first start."""
    hi = tl.load(starts)
    lo = hi * 0
    if n < num_seqs:
        lo = tl.load(starts + n)
        if num_policies == 0:
            # Plain cu_seqlens: no slot but the last has rows beyond its sequence.
            lo = tl.load(starts + n + 1)
        for p in range(num_policies):
            lo += tl.load(lens + p * num_seqs + n)
        hi = rows
        if n < num_seqs - 1:
            hi = tl.load(starts + n + 1)
    return lo, hi

@triton.jit
def zero(ptr, width, lo, hi, split, splits, BLOCK: tl.constexpr):
    begin = lo.to(tl.int64) * width + split * BLOCK
    end = hi.to(tl.int64) * width
    lane = tl.arange(0, BLOCK)
    for offset in range(begin, end, splits * BLOCK):
        tl.store(ptr + offset + lane, tl.zeros([BLOCK], ptr.dtype.element_ty), mask=offset + lane < end)

@triton.jit
def minus_infinity(lse, heads, rows, lo, hi, split, splits, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    value = tl.full([BLOCK], float("-inf"), tl.float32)
    for head in range(split, heads, splits):
        base = lse + rows.to(tl.int64) * head
        for row in range(lo, hi, BLOCK):
            tl.store(base + row + lane, value, mask=row + lane < hi)

@triton.jit
def clear_forward(out, width, lse, heads, rows, lo, hi, BLOCK: tl.constexpr):
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    if lo < hi:
        zero(out, width, lo, hi, split, splits, BLOCK)
        minus_infinity(lse, heads, rows, lo, hi, split, splits, 128)


@triton.jit
def clear_backward(a, a_width, b, b_width, lo, hi, HAS_B: tl.constexpr, BLOCK: tl.constexpr):
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    if lo < hi:
        zero(a, a_width, lo, hi, split, splits, BLOCK)
        if HAS_B:
            zero(b, b_width, lo, hi, split, splits, BLOCK)


@triton.jit
def unseen(length, other, off, left, right):
    """[0, first) and [second, length): rows of a sequence that pair with nothing on the other side."""
    first = tl.minimum(tl.maximum(-(off + right), 0), length)
    second = tl.minimum(tl.maximum(other - off + left, 0), length)
    if other == 0:
        first = length
    return first, tl.maximum(first, second)

_OUTSIDE_FORWARD = ["out", "lse", "starts", "lens", "width", "heads", "rows", "num_seqs", "num_policies"]


@triton.jit(do_not_specialize=_OUTSIDE_FORWARD, do_not_specialize_on_alignment=_OUTSIDE_FORWARD)
def outside_forward_kernel(out, lse, starts, lens, width, heads, rows, num_seqs, num_policies, BLOCK: tl.constexpr):
    lo, hi = outside(starts, lens, tl.program_id(0), num_seqs, num_policies, rows)
    clear_forward(out, width, lse, heads, rows, lo, hi, BLOCK)


_OUTSIDE_BACKWARD = [
    "dq", "dk", "dv", "starts_q", "lens_q", "starts_kv", "lens_kv",
    "q_width", "k_width", "v_width", "rows_q", "rows_kv", "num_seqs", "num_policies",
]  # fmt: skip


@triton.jit(do_not_specialize=_OUTSIDE_BACKWARD, do_not_specialize_on_alignment=_OUTSIDE_BACKWARD)
def outside_backward_kernel(
    dq, dk, dv, starts_q, lens_q, starts_kv, lens_kv, q_width, k_width, v_width, rows_q, rows_kv, num_seqs, num_policies,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.program_id(2) == 0:
        lo, hi = outside(starts_q, lens_q, tl.program_id(0), num_seqs, num_policies, rows_q)
        clear_backward(dq, q_width, dq, q_width, lo, hi, False, BLOCK)
    else:
        lo, hi = outside(starts_kv, lens_kv, tl.program_id(0), num_seqs, num_policies, rows_kv)
        clear_backward(dk, k_width, dv, v_width, lo, hi, True, BLOCK)


_KEYLESS = ["out", "lse", "starts", "lens", "others", "width", "heads", "rows", "left", "right"]


@triton.jit(do_not_specialize=_KEYLESS, do_not_specialize_on_alignment=_KEYLESS)
def keyless_kernel(
    out, lse, starts, lens, others, width, heads, rows, left, right, BOTTOM_RIGHT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0)
    length, other, start = tl.load(lens + n), tl.load(others + n), tl.load(starts + n)
    off = other - length if BOTTOM_RIGHT else 0
    first, second = unseen(length, other, off, left, right)
    clear_forward(out, width, lse, heads, rows, start, start + first, BLOCK)
    clear_forward(out, width, lse, heads, rows, start + second, start + length, BLOCK)


_UNSEEN = [
    "dq", "dk", "dv", "starts_q", "lens_q", "starts_kv", "lens_kv", "q_width", "k_width", "v_width", "left", "right",
]  # fmt: skip


@triton.jit(do_not_specialize=_UNSEEN, do_not_specialize_on_alignment=_UNSEEN)
def unseen_kernel(
    dq, dk, dv, starts_q, lens_q, starts_kv, lens_kv, q_width, k_width, v_width, left, right,
    BOTTOM_RIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    len_q, len_kv = tl.load(lens_q + n), tl.load(lens_kv + n)
    off = len_kv - len_q if BOTTOM_RIGHT else 0
    if tl.program_id(2) == 0:
        start = tl.load(starts_q + n)
        first, second = unseen(len_q, len_kv, off, left, right)
        clear_backward(dq, q_width, dq, q_width, start, start + first, False, BLOCK)
        clear_backward(dq, q_width, dq, q_width, start + second, start + len_q, False, BLOCK)
    else:
        # Seen from the keys, the band is mirrored: left and right change places, and the offset its sign.
        start = tl.load(starts_kv + n)
        first, second = unseen(len_kv, len_q, -off, right, left)
        clear_backward(dk, k_width, dv, v_width, start, start + first, True, BLOCK)
        clear_backward(dk, k_width, dv, v_width, start + second, start + len_kv, True, BLOCK)


@triton.jit
def copy_lse_rows(dst, src, lo, length, BLOCK: tl.constexpr):
    """One head's ``length`` values from ``lo`` on; +inf becomes -inf."""
    lane = tl.arange(0, BLOCK)
    for offset in range(0, length, BLOCK):
        mask = offset + lane < length
        value = tl.load(src + lo + offset + lane, mask=mask)
        tl.store(dst + lo + offset + lane, tl.where(value == float("inf"), float("-inf"), value), mask=mask)


# The tensors' own alignment is specialised: all of them are whole allocations.
@triton.jit(do_not_specialize=["rows"])
def copy_kernel(
    dst0, src0, dst1, src1, dst2, src2, lse_dst, lse_src, starts, lens, rows,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr, LSE_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    length = tl.load(lens + n).to(tl.int64)
    start = tl.load(starts + n).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    if tl.program_id(2) == 0:
        for pair in tl.static_range(3):
            dst, src, width = dst0, src0, WIDTH0
            if pair == 1:
                dst, src, width = dst1, src1, WIDTH1
            if pair == 2:
                dst, src, width = dst2, src2, WIDTH2
            if width > 0:
                base = start * width
                for offset in range(split.to(tl.int64) * BLOCK, length * width, splits * BLOCK):
                    mask = offset + lane < length * width
                    tl.store(dst + base + offset + lane, tl.load(src + base + offset + lane, mask=mask), mask=mask)
    elif LSE_HEADS > 0:
        for head in range(split, LSE_HEADS, splits):
            base = rows.to(tl.int64) * head
            copy_lse_rows(lse_dst + base, lse_src + base, start, length, 1024)


_COPY_LSE_RUNTIME = ["dst", "src", "starts", "lens", "rows"]

@triton.jit(do_not_specialize=_COPY_LSE_RUNTIME, do_not_specialize_on_alignment=_COPY_LSE_RUNTIME)
def copy_lse_kernel(dst, src, starts, lens, rows, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    base = tl.program_id(1).to(tl.int64) * rows
    copy_lse_rows(dst + base, src + base, tl.load(starts + n), tl.load(lens + n), BLOCK)


@triton.jit(do_not_specialize=["lse", "count"], do_not_specialize_on_alignment=["lse", "count"])
def normalize_kernel(lse, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(lse + at, mask=at < count)
    tl.store(lse + at, float("-inf"), mask=(at < count) & (value == float("inf")))


_SUBSETS_RUNTIME = [
    "cu_q", "cu_kv", "slots_q", "slots_kv", "policy_index",
    "starts_q", "lens_q", "starts_kv", "lens_kv", "num_seqs", "num_policies",
]  # fmt: skip

@triton.jit(do_not_specialize=_SUBSETS_RUNTIME, do_not_specialize_on_alignment=_SUBSETS_RUNTIME)
def subsets_kernel(
    cu_q, cu_kv, slots_q, slots_kv, policy_index, starts_q, lens_q, starts_kv, lens_kv, num_seqs, num_policies,
    HAS_INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    edge = n <= num_seqs
    tl.store(starts_q + n, tl.load(slots_q + n, mask=edge).to(tl.int32), mask=edge)
    tl.store(starts_kv + n, tl.load(slots_kv + n, mask=edge).to(tl.int32), mask=edge)
    inside = n < num_seqs
    length_q = (tl.load(cu_q + n + 1, mask=inside) - tl.load(cu_q + n, mask=inside)).to(tl.int32)
    length_kv = (tl.load(cu_kv + n + 1, mask=inside) - tl.load(cu_kv + n, mask=inside)).to(tl.int32)
    for p in range(num_policies):
        own_q, own_kv = length_q, length_kv
        if HAS_INDEX:
            mine = tl.load(policy_index + n, mask=inside, other=-1) == p
            own_q, own_kv = tl.where(mine, length_q, 0), tl.where(mine, length_kv, 0)
        tl.store(lens_q + p * num_seqs + n, own_q, mask=inside)
        tl.store(lens_kv + p * num_seqs + n, own_kv, mask=inside)



outside_forward = Launcher(outside_forward_kernel)
outside_backward = Launcher(outside_backward_kernel)
keyless = Launcher(keyless_kernel)
unseen_grads = Launcher(unseen_kernel)
copy = Launcher(copy_kernel, num_warps=8)
copy_lse = Launcher(copy_lse_kernel)
normalize = Launcher(normalize_kernel)
subsets = Launcher(subsets_kernel)
