"""AttentionParams: everything that a choice of backend may depend on, hashable."""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass

import torch

from .checks import check_bool, check_dtype
from .masks import Band

# Bounds of max_seqlen that a choice (and a compiled graph) tells apart. Powers of two and the middle between them: a bound is
# at most 1.5 times the truth, and the kernels' idle thread blocks with it.
SEQLEN_BUCKETS = tuple(sorted({1 << e for e in range(7, 25)} | {3 << e for e in range(7, 24)}))


def seqlen_bucket(length: int) -> int:
    """The smallest bound that holds a length; beyond them all, multiples of the largest."""
    at = bisect.bisect_left(SEQLEN_BUCKETS, length)
    return SEQLEN_BUCKETS[at] if at < len(SEQLEN_BUCKETS) else round_up(length, SEQLEN_BUCKETS[-1])


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class AttentionParams:
    """One shape class of attention calls.

    Attributes:
        dtype: of q, k and v.
        device_type: ``"cuda"`` or ``"cpu"``.
        sm: compute capability times ten (90 for an H100 or H200); 0 where there is none.
        num_heads, num_gqa_groups: query heads and key/value heads.
        head_dim_qk, head_dim_v: widths in elements, as the backend will see them (padded ones in a padded probe).
        bands: one per policy.
        max_seqlen_q, max_seqlen_kv: upper bounds in tokens (a bucket's bound).
        equal_lengths: every sequence is known to have as many query as key tokens.
        has_gaps: cu_seqlens_*_padded were given.
        is_training: a backward pass will follow.
        deterministic: the backward must be bitwise reproducible.
        deterministic_algorithms: beside it, torch.use_deterministic_algorithms(True, warn_only=False) is on.
        return_max_logit: the maximum of the scaled scores per head is wanted.
        static_membership: the partition of the sequences into policies will not change under a captured graph.
        single_launch_plan: a plan of a single-launch backend is at hand for this call.
        wide_offsets: a tensor of the call has 2^31 elements or more.
        contiguous: each policy's sequences are one run of neighbours. Told only where that may make a difference.
        device_index: of the CUDA device, or -1.
    """

    dtype: torch.dtype = torch.bfloat16
    device_type: str = "cuda"
    sm: int = 90
    num_heads: int = 16
    num_gqa_groups: int = 16
    head_dim_qk: int = 128
    head_dim_v: int = 128
    bands: tuple[Band, ...] = (Band(None, 0, True),)
    max_seqlen_q: int = 4096
    max_seqlen_kv: int = 4096
    equal_lengths: bool = True
    has_gaps: bool = False
    is_training: bool = True
    deterministic: bool = False
    deterministic_algorithms: bool = False
    return_max_logit: bool = False
    static_membership: bool = True
    single_launch_plan: bool = False
    wide_offsets: bool = False
    contiguous: bool = False
    device_index: int = -1

    def __post_init__(self) -> None:
        """
        Raises:
            TypeError, ValueError: naming the field.
        """
        check_dtype("dtype", self.dtype)
        try:
            known = torch.device(self.device_type).type == self.device_type
        except (RuntimeError, TypeError):
            known = False
        if not known:
            raise ValueError(f"device_type must be a device's type, as 'cpu' or 'cuda', got {self.device_type!r}")
        for name in ("num_heads", "num_gqa_groups", "head_dim_qk", "head_dim_v"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}")

        for name in ("max_seqlen_q", "max_seqlen_kv"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an int >= 0, got {value!r}")
        if not isinstance(self.bands, tuple) or not self.bands or not all(isinstance(band, Band) for band in self.bands):
            raise TypeError(f"bands must be a non-empty tuple of Band, got {self.bands!r}")
        for name in (
            "equal_lengths", "has_gaps", "is_training", "deterministic", "deterministic_algorithms", "return_max_logit",
            "static_membership", "single_launch_plan", "wide_offsets", "contiguous",
        ):  # fmt: skip
            check_bool(name, getattr(self, name))

    def replace(self, **changes: object) -> AttentionParams:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def padded_to(self, width: int) -> AttentionParams:
        """The same call with q, k and v zero-padded to one width. A single-launch plan is for the widths it was made for."""
        return dataclasses.replace(self, head_dim_qk=width, head_dim_v=width, single_launch_plan=False)

    @property
    def padded_width(self) -> int:
        """The common width that padding would give: the larger one, rounded up to a multiple of 8."""
        return self.padded_to_multiple_of(8)

    def padded_to_multiple_of(self, unit: int) -> int:
        return round_up(max(self.head_dim_qk, self.head_dim_v), unit)
