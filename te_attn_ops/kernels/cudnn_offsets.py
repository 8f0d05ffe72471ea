"""Triton kernels around cuDNN's packed attention: the metadata that its graphs read, and its statistics' layouts.

Imported only where a kernel is launched: Triton may not be installed on a machine without a GPU.
"""

# Triton reads these functions as its own language.
# mypy: ignore-errors
import triton
import triton.language as tl

from .launch import Launcher

# Rows per program of the two statistics kernels, and the most heads at a time.
BLOCK_ROWS = 64
MAX_BLOCK_HEADS = 32

_METADATA_RUNTIME = ["starts_q", "starts_kv", "lens_q", "lens_kv", "out", "num_seqs", "pitch", *[f"m{n}" for n in range(9)]]


@triton.jit(do_not_specialize=_METADATA_RUNTIME, do_not_specialize_on_alignment=_METADATA_RUNTIME)
def metadata_kernel(
    starts_q, starts_kv, lens_q, lens_kv, out, num_seqs, pitch, m0, m1, m2, m3, m4, m5, m6, m7, m8,
    ROWS_Q: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, PLAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of ragged offsets (token start * m0, m1, ...; the first ROWS_Q over q, the others over kv), int64 if WIDE, else
    int32; then the lengths of q and of kv, int32. Each row has pitch entries: those after the last sequence repeat the end,
    and have length 0. PLAIN: there are no lens, they are the differences of starts."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pitch
    if row < ROWS:
        entry = tl.minimum(at, num_seqs)
        start = tl.where(row < ROWS_Q, tl.load(starts_q + entry), tl.load(starts_kv + entry))
        low = tl.where(row == 0, m0, tl.where(row == 1, m1, tl.where(row == 2, m2, m3)))
        high = tl.where(row == 4, m4, tl.where(row == 5, m5, tl.where(row == 6, m6, tl.where(row == 7, m7, m8))))
        offset = start.to(tl.int64) * tl.where(row < 4, low, high)
        if WIDE:
            tl.store(out.to(tl.pointer_type(tl.int64)) + row * pitch + at, offset, mask=inside)
        else:
            tl.store(out + row * pitch + at, offset.to(tl.int32), mask=inside)
    else:
        real = at < num_seqs
        if PLAIN:
            of_q = tl.load(starts_q + at + 1, mask=real, other=0) - tl.load(starts_q + at, mask=real, other=0)
            of_kv = tl.load(starts_kv + at + 1, mask=real, other=0) - tl.load(starts_kv + at, mask=real, other=0)
        else:
            of_q = tl.load(lens_q + at, mask=real, other=0)
            of_kv = tl.load(lens_kv + at, mask=real, other=0)
        words: tl.constexpr = 2 if WIDE else 1
        base = out + ROWS * pitch * words + (row - ROWS) * pitch
        tl.store(base + at, tl.where(row == ROWS, of_q, of_kv), mask=inside)


_SPREAD_RUNTIME = [
    "lse", "max_logit", "first", "second", "starts", "other_starts", "lens", "others", "rows", "heads", "left", "right",
]  # fmt: skip


@triton.jit(do_not_specialize=_SPREAD_RUNTIME, do_not_specialize_on_alignment=_SPREAD_RUNTIME)
def spread_stats_kernel(
    lse, max_logit, first, second, starts, other_starts, lens, others, rows, heads, left, right,
    HAS_MAX: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, PLAIN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """lse [heads, rows] at the rows of a subset, -inf where a row sees no key, from token-major statistics [rows, heads]: the
    log-sum-exp itself, or the maximum and the sum of exponentials; then max_logit [heads] is raised to the maximum too.
    PLAIN: as in the metadata."""
    n = tl.program_id(0)
    begin = tl.program_id(1) * BLOCK_ROWS
    if PLAIN:
        length = tl.load(starts + n + 1) - tl.load(starts + n)
        other = tl.load(other_starts + n + 1) - tl.load(other_starts + n)
    else:
        length = tl.load(lens + n)
        other = tl.load(others + n)
    if begin < length:
        row = begin + tl.arange(0, BLOCK_ROWS)
        head = tl.program_id(2) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        diagonal = row
        if BOTTOM_RIGHT:
            diagonal = row + (other - length)
        low = tl.maximum(diagonal - left, 0)
        high = tl.minimum(diagonal + right, other - 1)
        inside = (row < length)[:, None] & (head < heads)[None, :]
        seen = inside & (low <= high)[:, None]
        at = (tl.load(starts + n) + row).to(tl.int64)
        source = at[:, None] * heads + head[None, :]
        value = tl.load(first + source, mask=seen, other=float("-inf"))
        if HAS_MAX:
            tl.atomic_max(max_logit + head, tl.max(value, axis=0), mask=head < heads)
            value += tl.log(tl.load(second + source, mask=seen, other=1.0))
        tl.store(lse + head.to(tl.int64)[None, :] * rows + at[:, None], value, mask=inside)


_TOKEN_MAJOR_RUNTIME = ["dst", "lse", "rows", "heads"]


@triton.jit(do_not_specialize=_TOKEN_MAJOR_RUNTIME, do_not_specialize_on_alignment=_TOKEN_MAJOR_RUNTIME)
def token_major_stats_kernel(dst, lse, rows, heads, BLOCK_ROWS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """dst [rows, heads] = lse [heads, rows], with +inf for -inf: exp(score - inf) is 0 whatever the score, where -inf would
    give inf, or NaN."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    inside = (row < rows)[:, None] & (head < heads)[None, :]
    value = tl.load(lse + head.to(tl.int64)[None, :] * rows + row[:, None], mask=inside)
    value = tl.where(value == float("-inf"), float("inf"), value)
    tl.store(dst + row.to(tl.int64)[:, None] * heads + head[None, :], value, mask=inside)


metadata = Launcher(metadata_kernel)
spread_stats = Launcher(spread_stats_kernel)
token_major_stats = Launcher(token_major_stats_kernel)


def block_heads(heads: int) -> int:
    return min(MAX_BLOCK_HEADS, triton.next_power_of_2(heads))
