"""What tests, compile_tests and benchmarks share: sample generators, two truths, tolerances, the no-sync trace mode.

Neither truth uses the package's mask arithmetic. The *closed form* needs no kernel at all: with Q = 0 and V[j] = j + 1 a row's
output is the mean of V over the keys it sees and its lse is ln(their number). The *reference* is float64 attention of one
sequence at a time, its gradients by torch's autograd.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from . import ops, plan as plans
from .attention import thd_attention
from .backends import backend_number
from .masks import resolve_mask
from .policies import PlanSpec, PreparedPolicies, prepare_thd_policies

LAYOUTS = ("contiguous", "transposed", "interleaved", "offset")


# ------------------------------------------------------------------------------------------------------------------- masks
class Mask(NamedTuple):
    """A mask as a user states it."""

    attn_mask_type: str = "padding_causal"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None

    def __str__(self) -> str:
        window = [] if self.window_size is None else [f"window{self.window_size[0]},{self.window_size[1]}"]
        align = {None: [], True: ["bottom_right"], False: ["top_left"]}[self.bottom_right_diagonal]
        return "-".join([self.attn_mask_type, *window, *align])


FULL = Mask("padding")
CAUSAL = Mask("padding_causal")
BOTTOM_RIGHT = Mask("padding_causal_bottom_right")


def visible(mask: Mask, len_q: int, len_kv: int) -> Tensor:
    """bool [len_q, len_kv]: the documented rule, written down a second time so that the package's own can be held against it.

    Row i sees key j iff ``i + off - left <= j <= i + off + right``; -1 is unbounded, off is len_kv - len_q for bottom-right.
    """
    left, right = (-1, -1) if mask.window_size is None else mask.window_size
    if "causal" in mask.attn_mask_type:
        bottom_right = mask.attn_mask_type.endswith("bottom_right")
        right = 0
    else:
        bottom_right = mask.bottom_right_diagonal is not False
        if (left, right) == (-1, 0):
            right = -1
    row = torch.arange(len_q)[:, None] + (len_kv - len_q if bottom_right else 0)
    key = torch.arange(len_kv)[None, :]
    seen = torch.ones(len_q, len_kv, dtype=torch.bool)
    if left >= 0:
        seen &= key >= row - left
    if right >= 0:
        seen &= key <= row + right
    return seen


def policy_list(
    masks: Sequence[Mask], owner: Sequence[int], device: Any, dtype: torch.dtype = torch.int64
) -> list[dict[str, Any]]:
    """``thd_attention_policies`` for sequences of which number n is under ``masks[owner[n]]``."""
    policies: list[dict[str, Any]] = []
    for p, mask in enumerate(masks):
        ids = torch.tensor([n for n, own in enumerate(owner) if own == p], dtype=dtype, device=device)
        policies.append({"sequence_ids": ids, "mask_type": mask.attn_mask_type, "window_size": mask.window_size})
        if mask.bottom_right_diagonal is not None:
            policies[-1]["bottom_right_diagonal"] = mask.bottom_right_diagonal
    return policies


# ------------------------------------------------------------------------------------------------------------- packed samples
@dataclass(frozen=True)
class PackedCase:
    """One packed attention call, without its numbers.

    Attributes:
        lengths_q, lengths_kv: tokens per sequence; lengths_kv None is self-attention with one cu_seqlens object.
        gaps_q, gaps_kv: rows after each sequence that belong to none; both None for no padded cu_seqlens at all. gaps_kv None
            takes q's.
        tail: rows after the last slot, on both sides.
        layout: "contiguous"; "transposed" ([H, T, D] storage); "interleaved" (views of one [T, 3, H, D] projection; of
            [T, 2, H, D] where q cannot share it; of [T, H, D_qk + D_v] where the widths differ); "offset" (a base address that
            is not 16-byte aligned).
        masks: one, or with ``owner`` one per policy.
        owner: the policy of each sequence; None for a scalar mask.
        expanded_grad: grad_out is one value, expanded.
    """

    lengths_q: tuple[int, ...]
    lengths_kv: tuple[int, ...] | None = None
    gaps_q: tuple[int, ...] | None = None
    gaps_kv: tuple[int, ...] | None = None
    tail: int = 0
    num_heads: int = 2
    num_gqa_groups: int | None = None
    head_dim_qk: int = 16
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int32
    layout: str = "contiguous"
    masks: tuple[Mask, ...] = (CAUSAL,)
    owner: tuple[int, ...] | None = None
    expanded_grad: bool = False
    name: str = ""

    def __str__(self) -> str:
        return self.name or "-".join(map(str, self.lengths_q)) or "no_sequences"

    def replace(self, **changes: Any) -> PackedCase:
        return dataclasses.replace(self, **changes)

    @property
    def groups(self) -> int:
        return self.num_heads if self.num_gqa_groups is None else self.num_gqa_groups

    @property
    def width_v(self) -> int:
        return self.head_dim_qk if self.head_dim_v is None else self.head_dim_v

    @property
    def keys(self) -> tuple[int, ...]:
        """kv tokens per sequence."""
        return self.lengths_q if self.lengths_kv is None else self.lengths_kv

    @property
    def has_gaps(self) -> bool:
        return self.gaps_q is not None or self.gaps_kv is not None

    @property
    def max_seqlens(self) -> tuple[int, int]:
        return max(self.lengths_q, default=0), max(self.keys, default=0)

    def slots(self, side: str) -> tuple[int, ...]:
        """Where each sequence's rows begin, and the end of the last slot: N + 1 row numbers."""
        lengths = self.lengths_q if side == "q" else self.keys
        gaps = self.gaps_q if side == "q" or self.gaps_kv is None else self.gaps_kv
        return _offsets([length + gap for length, gap in zip(lengths, gaps or (0,) * len(lengths))])

    def total(self, side: str) -> int:
        return self.slots(side)[-1] + self.tail

    def rows(self, side: str) -> list[slice]:
        """The rows of each sequence."""
        lengths = self.lengths_q if side == "q" else self.keys
        return [slice(start, start + length) for start, length in zip(self.slots(side), lengths)]

    def outside(self, side: str) -> Tensor:
        """bool [total]: rows that belong to no sequence."""
        mask = torch.ones(self.total(side), dtype=torch.bool)
        for rows in self.rows(side):
            mask[rows] = False
        return mask

    def mask_of(self, sequence: int) -> Mask:
        return self.masks[0 if self.owner is None else self.owner[sequence]]


def _offsets(lengths: Sequence[int]) -> tuple[int, ...]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return tuple(offsets)


class Results(NamedTuple):
    """out [T_q, H, D_v], lse [H, T_q], max_logit [H] (or None), and the gradients (or None)."""

    out: Tensor
    lse: Tensor
    max_logit: Tensor | None
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


@dataclass(frozen=True)
class PackedInputs:
    """A :class:`PackedCase` with its tensors; q, k and v are leaves that require grad."""

    case: PackedCase
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor | None
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None

    @property
    def device(self) -> torch.device:
        return self.q.device

    @functools.cached_property
    def prepared(self) -> PreparedPolicies | None:
        return self.prepare()

    def policies(self) -> list[dict[str, Any]] | None:
        """The case's policies as the list of dicts that a user writes."""
        if self.case.owner is None:
            return None
        return policy_list(self.case.masks, self.case.owner, self.device)

    def prepare(self, **options: Any) -> PreparedPolicies | None:
        policies = self.policies()
        if policies is None:
            return None
        return prepare_thd_policies(policies, **self.geometry(), **options)

    def plan_spec(self, training: bool = True) -> PlanSpec:
        """What a single-launch plan for these tensors is made for."""
        case = self.case
        return PlanSpec(case.dtype, case.num_heads, case.groups, case.head_dim_qk, case.width_v, training)

    def geometry(self) -> dict[str, Any]:
        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        return {name: getattr(self, name) for name in names}

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """The keyword arguments of :func:`thd_attention` beside q, k and v. ``changes`` replace or add some."""
        max_q, max_kv = self.case.max_seqlens
        arguments: dict[str, Any] = {**self.geometry(), "max_seqlen_q": max_q, "max_seqlen_kv": max_kv}
        if self.case.owner is None:
            arguments.update(self.case.masks[0]._asdict())
        elif "thd_attention_policies" not in changes:
            arguments["thd_attention_policies"] = self.prepared
        return {**arguments, **changes}

    def attend(self, function: Any = thd_attention, /, **changes: Any) -> Any:
        """``function``: :func:`thd_attention`, compiled for example, or one with its signature."""
        return function(self.q, self.k, self.v, **self.arguments(**changes))

    def run(self, function: Any = thd_attention, /, **changes: Any) -> Results:
        """Forward and backward; max_logit only where ``return_max_logit=True`` is among the changes."""
        out, lse, *rest = self.attend(function, return_lse=True, **changes)
        dq, dk, dv = torch.autograd.grad(out, (self.q, self.k, self.v), self.grad_out)
        return Results(out.detach(), lse, rest[0] if rest else None, dq, dk, dv)

    def poison(self, value: float = math.nan) -> PackedInputs:
        """Fills q, k, v and grad_out at rows of no sequence, in place."""
        with torch.no_grad():
            for tensor, side in ((self.q, "q"), (self.grad_out, "q"), (self.k, "kv"), (self.v, "kv")):
                tensor[self.case.outside(side).to(self.device)] = value
        return self


def build(case: PackedCase, device: Any = "cpu", *, seed: int = 0, requires_grad: bool = True) -> PackedInputs:
    """A case's tensors: standard normal values from a generator on the CPU, so that every device gets the same."""
    generator = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(device=device, dtype=case.dtype)

    q, k, v = (tensor.detach().requires_grad_(requires_grad) for tensor in _qkv(case, new))
    grad_out = new(1, 1, 1).expand(case.total("q"), case.num_heads, case.width_v)
    if not case.expanded_grad:
        grad_out = new(case.total("q"), case.num_heads, case.width_v)

    def offsets(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=case.index_dtype, device=device)

    shared = case.lengths_kv is None
    return PackedInputs(
        case,
        q,
        k,
        v,
        grad_out,
        offsets(_offsets(case.lengths_q)),
        None if shared else offsets(_offsets(case.keys)),
        offsets(case.slots("q")) if case.has_gaps else None,
        offsets(case.slots("kv")) if case.has_gaps and not (shared and case.gaps_kv is None) else None,
    )


def _qkv(case: PackedCase, new: Any) -> tuple[Tensor, Tensor, Tensor]:
    total_q, total_kv, heads, groups = case.total("q"), case.total("kv"), case.num_heads, case.groups
    width, width_v = case.head_dim_qk, case.width_v
    shapes = ((total_q, heads, width), (total_kv, groups, width), (total_kv, groups, width_v))
    if case.layout == "contiguous":
        q, k, v = (new(*shape) for shape in shapes)
    elif case.layout == "transposed":
        q, k, v = (new(shape[1], shape[0], shape[2]).transpose(0, 1) for shape in shapes)
    elif case.layout == "offset":
        q, k, v = (new(math.prod(shape) + 1)[1:].view(shape) for shape in shapes)
    elif case.layout != "interleaved":
        raise ValueError(f"layout={case.layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
    elif shapes[0] == shapes[1] == shapes[2]:
        q, k, v = new(total_q, 3, heads, width).unbind(1)
    elif width == width_v:
        q = new(*shapes[0])
        k, v = new(total_kv, 2, groups, width).unbind(1)
    else:
        q = new(*shapes[0])
        k, v = new(total_kv, groups, width + width_v).split((width, width_v), dim=2)
    return q, k, v


# ----------------------------------------------------------------------------------------------------- lists of cases to run
def _cross(lengths_q: tuple[int, ...], lengths_kv: tuple[int, ...], **fields: Any) -> PackedCase:
    return PackedCase(lengths_q, lengths_kv, **fields)


# TransformerEngine's test configurations for packed batches: its head counts, widths and masks at small lengths. Those with
# independent lengths on the two sides have L_q > L_k among them.
_SELF, _LONG = (37, 64), (150, 90)
_CROSS_Q, _CROSS_KV = (41, 30), (60, 17)
_LEFT = Mask("padding_causal", (4, 0))
CONFIGURATIONS = tuple(
    case.replace(name=name)
    for name, case in {
        "layout_0_0": PackedCase(_SELF, num_heads=16, head_dim_qk=64, masks=(FULL,)),
        "layout_0_1": PackedCase(_SELF, num_heads=24, num_gqa_groups=1, head_dim_qk=128, masks=(FULL,)),
        "layout_0_2": _cross(_CROSS_Q, _CROSS_KV, num_heads=24, head_dim_qk=128, masks=(FULL,)),
        "layout_1_0": PackedCase(_SELF, num_heads=16, head_dim_qk=64),
        "layout_1_1": PackedCase(_SELF, num_heads=24, num_gqa_groups=1, head_dim_qk=128),
        "layout_1_2": _cross(_CROSS_Q, _CROSS_KV, num_heads=24, head_dim_qk=128),
        "layout_2_0": PackedCase(_SELF, num_heads=16, head_dim_qk=64, masks=(BOTTOM_RIGHT,)),
        "layout_2_2": _cross(_CROSS_Q, _CROSS_KV, num_heads=24, head_dim_qk=128, masks=(BOTTOM_RIGHT,)),
        "layout_3_0": PackedCase(_SELF, num_heads=16, head_dim_qk=64, masks=(Mask("padding", (4, 4)),)),
        "layout_3_2_bottom_right": _cross(
            _CROSS_Q, _CROSS_KV, num_heads=24, head_dim_qk=128, masks=(Mask("padding", (4, 4), True),)
        ),
        "layout_3_2_top_left": _cross(
            _CROSS_Q, _CROSS_KV, num_heads=24, head_dim_qk=128, masks=(Mask("padding", (4, 4), False),)
        ),
        "layout_4_1": PackedCase(_SELF, num_heads=24, num_gqa_groups=1, head_dim_qk=128, masks=(_LEFT,)),
        "layout_5_2": _cross(
            _CROSS_Q, _CROSS_KV, num_heads=24, head_dim_qk=128, masks=(Mask("padding_causal_bottom_right", (4, 0)),)
        ),
        "swa_1_2": PackedCase(_SELF, num_heads=24, num_gqa_groups=4, head_dim_qk=128, masks=(Mask("padding", (2, 2)),)),
        "swa_5_2": PackedCase(_SELF, num_heads=24, num_gqa_groups=4, head_dim_qk=128, masks=(Mask("padding_causal", (2, 0)),)),
        "softmax_5_0": PackedCase(
            _LONG, num_heads=64, num_gqa_groups=8, head_dim_qk=64, masks=(Mask("padding_causal", (128, 0)),)
        ),
        "mla_1_0": PackedCase((12, 9, 16, 1, 7, 5, 3, 11), num_heads=16, head_dim_qk=64, head_dim_v=128, masks=(FULL,)),
        "mla_1_2": _cross((12, 9, 16, 1), (20, 31, 5, 2), num_heads=16, head_dim_qk=192, head_dim_v=128, masks=(FULL,)),
        "mla_2_0": PackedCase(_SELF, num_heads=24, head_dim_qk=128, head_dim_v=64),
        "mla_2_2": _cross((41,), (60,), num_heads=24, head_dim_qk=192, head_dim_v=128),
        "mla_3_1": _cross((1,) * 8, (3, 40, 17, 1, 22, 9, 30, 5), num_heads=16, head_dim_qk=256, head_dim_v=128, masks=(FULL,)),
        "mla_3_3": _cross((1,) * 8, (3, 40, 17, 1, 22, 9, 30, 5), num_heads=16, head_dim_qk=160, head_dim_v=128, masks=(FULL,)),
        "fa4_mla_4": PackedCase(_SELF, num_heads=16, head_dim_qk=128, head_dim_v=96),
        "fa4_mla_3": PackedCase(_SELF, num_heads=16, head_dim_qk=96, head_dim_v=64),
        "max_logit_2": PackedCase(_SELF, num_heads=24, head_dim_qk=128),
        "max_logit_2_mla": PackedCase(_SELF, num_heads=24, head_dim_qk=128, head_dim_v=64),
        "mask_10_0": _cross((1, 1), (40, 23), num_heads=24, head_dim_qk=128, masks=(BOTTOM_RIGHT,)),
        "mask_9_0": _cross((1, 1), (40, 23), num_heads=24, head_dim_qk=128),
        "te_2_2": PackedCase((64,), num_heads=16, head_dim_qk=64, masks=(FULL,)),
        "te_2_3": _cross((41,), (60,), num_heads=16, head_dim_qk=64, masks=(BOTTOM_RIGHT,)),
        "self_thd_shared_cu_seqlens": PackedCase((64, 64), num_heads=4, head_dim_qk=64),
        # Beyond TransformerEngine's list.
        "gaps_and_tail": PackedCase(_SELF, gaps_q=(3, 1), tail=5, num_heads=16, head_dim_qk=64),
        "gaps_cross": _cross(
            _CROSS_Q, _CROSS_KV, gaps_q=(0, 3), gaps_kv=(2, 0), tail=4, num_heads=4, head_dim_qk=64, masks=(BOTTOM_RIGHT,)
        ),
        "zero_length": _cross((0, 5, 7, 0, 9), (6, 0, 8, 0, 4), num_heads=4, head_dim_qk=64, masks=(BOTTOM_RIGHT,)),
        "equal_maxima": _cross((2, 40, 33), (40, 2, 35), num_heads=4, head_dim_qk=64),
        "gqa_mla": PackedCase(_SELF, num_heads=8, num_gqa_groups=2, head_dim_qk=192, head_dim_v=128),
        "one_sided_window": PackedCase(_SELF, num_heads=4, head_dim_qk=64, masks=(Mask("padding", (5, -1)),)),
        "policies": PackedCase(
            (20, 33, 9, 17, 1),
            gaps_q=(0, 2, 0, 1, 0),
            num_heads=4,
            head_dim_qk=64,
            masks=(CAUSAL, FULL, Mask("padding", (3, 2))),
            owner=(2, 0, 1, 0, 1),
        ),
        "policies_cross": _cross(
            (20, 33, 9, 17, 0),
            (25, 14, 9, 40, 6),
            num_heads=8,
            num_gqa_groups=2,
            head_dim_qk=64,
            masks=(CAUSAL, BOTTOM_RIGHT, Mask("padding", (6, 6), False), CAUSAL),
            owner=(0, 1, 2, 3, 1),
        ),
    }.items()
)

# What a row's output must be, worked out by hand: (case, out of each row). Each was a wrong answer of some
# attention library once.
EXAMPLES: dict[str, tuple[PackedCase, tuple[float, ...]]] = {
    "gaps_full": (
        PackedCase((3, 2, 4), gaps_q=(1, 2, 1), masks=(FULL,)),
        (2, 2, 2, 0, 5.5, 5.5, 0, 0, 10.5, 10.5, 10.5, 10.5, 0),
    ),
    "gaps_causal": (PackedCase((3, 2, 4), gaps_q=(1, 2, 1)), (1, 1.5, 2, 0, 5, 5.5, 0, 0, 9, 9.5, 10, 10.5, 0)),
    "gaps_policies": (
        PackedCase((3, 2, 4), gaps_q=(1, 2, 1), masks=(FULL, CAUSAL, Mask("padding_causal", (1, 0))), owner=(0, 1, 2)),
        (2, 2, 2, 0, 5, 5.5, 0, 0, 9, 9.5, 10.5, 11.5, 0),
    ),
    "gap_and_tail": (PackedCase((3, 5), gaps_q=(1, 3), tail=4), (1, 1.5, 2, 0, 5, 5.5, 6, 6.5, 7, *[0] * 7)),
    "decode_with_empty_full": (PackedCase((0, 1, 0, 1), (0, 3, 0, 5), num_heads=9, num_gqa_groups=3, masks=(FULL,)), (2, 6)),
    "decode_with_empty_bottom_right": (
        PackedCase((0, 1, 0, 1), (0, 3, 0, 5), num_heads=9, num_gqa_groups=3, masks=(BOTTOM_RIGHT,)),
        (2, 6),
    ),
    "decode_with_empty_causal": (PackedCase((0, 1, 0, 1), (0, 3, 0, 5), num_heads=9, num_gqa_groups=3), (1, 4)),
    "one_token_after_empty": (PackedCase((0, 0, 0, 1), num_heads=21, num_gqa_groups=7), (1,)),
    "no_keys_full": (PackedCase((3, 2), (0, 4), masks=(FULL,)), (0, 0, 0, 2.5, 2.5)),
    "no_keys_bottom_right": (PackedCase((3, 2), (0, 4), masks=(BOTTOM_RIGHT,)), (0, 0, 0, 2, 2.5)),
    "equal_maxima_causal": (PackedCase((2, 5), (5, 2)), (1, 1.5, 6, 6.5, 6.5, 6.5, 6.5)),
    "equal_maxima_bottom_right": (PackedCase((2, 5), (5, 2), masks=(BOTTOM_RIGHT,)), (2.5, 3, 0, 0, 0, 6, 6.5)),
    "longer_kv_bottom_right": (PackedCase((5, 2), (6, 5), masks=(BOTTOM_RIGHT,)), (1.5, 2, 2.5, 3, 3.5, 8.5, 9)),
    "longer_kv_causal": (PackedCase((5, 2), (6, 5)), (1, 1.5, 2, 2.5, 3, 7, 7.5)),
    "longer_kv_policies": (PackedCase((5, 2), (6, 5), masks=(CAUSAL, BOTTOM_RIGHT), owner=(0, 1)), (1, 1.5, 2, 2.5, 3, 8.5, 9)),
    "window_causal": (PackedCase((5,), masks=(Mask("padding_causal", (1, 0)),)), (1, 1.5, 2.5, 3.5, 4.5)),
    "window_left": (PackedCase((5,), masks=(Mask("padding", (1, 0)),)), (1, 1.5, 2.5, 3.5, 4.5)),
    "window_both": (PackedCase((5,), masks=(Mask("padding", (1, 1)),)), (1.5, 2, 3, 4, 4.5)),
    "window_as_wide_as_the_sequence": (PackedCase((5,), masks=(Mask("padding_causal", (4, 0)),)), (1, 1.5, 2, 2.5, 3)),
    "window_bottom_right": (
        PackedCase((3,), (6,), masks=(Mask("padding_causal_bottom_right", (1, 0)),)),
        (3.5, 4.5, 5.5),
    ),
    "window_top_left": (PackedCase((3,), (6,), masks=(Mask("padding_causal", (1, 0)),)), (1, 1.5, 2.5)),
    "four_policies": (
        PackedCase((4, 4, 4, 4), masks=(FULL, CAUSAL, Mask("padding_causal", (1, 0)), FULL), owner=(0, 1, 2, 3)),
        (2.5, 2.5, 2.5, 2.5, 5, 5.5, 6, 6.5, 9, 9.5, 10.5, 11.5, 14.5, 14.5, 14.5, 14.5),
    ),
}


def random_case(seed: int, **fields: Any) -> PackedCase:
    """Random lengths (also 0), gaps, groups, widths, layouts, masks and policies. ``fields`` override."""
    generator = random.Random(seed)
    num_seqs = generator.randint(1, 6)

    def lengths(most: int) -> tuple[int, ...]:
        return tuple(0 if generator.random() < 0.15 else generator.randint(1, most) for _ in range(num_seqs))

    def gaps() -> tuple[int, ...]:
        return tuple(generator.choice((0, 0, 1, 3)) for _ in range(num_seqs))

    def mask() -> Mask:
        kind = generator.choice(("padding", "padding_causal", "padding_causal_bottom_right"))
        left, right = generator.choice((-1, 0, 3, 17)), generator.choice((-1, 1, 5))
        return Mask(kind, (left, right if kind == "padding" else 0), generator.choice((None, True, False)))

    cross, gapped, num_policies = generator.random() < 0.5, generator.random() < 0.5, generator.choice((0, 1, 2, 3))
    groups = generator.choice((1, 2, 4))
    case = PackedCase(
        lengths(48),
        lengths(48) if cross else None,
        gaps_q=gaps() if gapped else None,
        gaps_kv=gaps() if gapped and cross else None,
        tail=generator.choice((0, 0, 7)),
        num_heads=groups * generator.choice((1, 2)),
        num_gqa_groups=groups,
        head_dim_qk=generator.choice((16, 32, 64)),
        head_dim_v=generator.choice((None, 16, 64)),
        layout=generator.choice(LAYOUTS),
        index_dtype=generator.choice((torch.int32, torch.int64)),
        masks=tuple(mask() for _ in range(max(1, num_policies))),
        owner=tuple(generator.randrange(num_policies) for _ in range(num_seqs)) if num_policies else None,
        name=f"random{seed}",
    )
    return case.replace(**fields)


# -------------------------------------------------------------------------------------------------------- the closed form
def closed_form_inputs(case: PackedCase, device: Any = "cpu") -> PackedInputs:
    """Q = 0, V[j] = j + 1 for the physical row j, K random."""
    inputs = build(case, device)
    with torch.no_grad():
        inputs.q.zero_()
        inputs.v.copy_((torch.arange(case.total("kv")) + 1.0)[:, None, None].expand(inputs.v.shape))
    return inputs


def closed_form(case: PackedCase) -> tuple[Tensor, Tensor]:
    """out [T_q] (the value of every column of every head) and lse [T_q], float64 on the CPU."""
    out = torch.zeros(case.total("q"), dtype=torch.float64)
    lse = torch.full((case.total("q"),), -math.inf, dtype=torch.float64)
    for n, (rows_q, rows_kv) in enumerate(zip(case.rows("q"), case.rows("kv"))):
        seen = visible(case.mask_of(n), rows_q.stop - rows_q.start, rows_kv.stop - rows_kv.start)
        values = torch.arange(rows_kv.start, rows_kv.stop, dtype=torch.float64) + 1
        count = seen.sum(1)
        out[rows_q] = (seen.double() @ values) / count.clamp(min=1)
        lse[rows_q] = count.double().log()
    return out, lse


def assert_closed_form(case: PackedCase, device: Any = "cpu", **changes: Any) -> None:
    """Runs :func:`thd_attention` on the closed form's inputs and compares every element of out and lse."""
    inputs = closed_form_inputs(case, device)
    out, lse = inputs.attend(return_lse=True, **changes)
    expected_out, expected_lse = (tensor.to(device) for tensor in closed_form(case))
    # Each output is a mean of numbers as large as itself: an error relative to it, whatever the dtype.
    assert_close("out", out, expected_out[:, None, None].expand(out.shape), _TOLERANCE[case.dtype], 1e-6)
    # Off by one key in n is ln(1 + 1 / n): seen up to some thousand keys.
    tolerance = 1e-4 if case.dtype in (torch.float16, torch.bfloat16) else 1e-5
    assert_close("lse", lse, expected_lse.expand(lse.shape), 0.0, tolerance)
    assert_outside_is_zero(case, out=out, lse=lse)


# ------------------------------------------------------------------------------------------------------------ the reference
def reference(inputs: PackedInputs, softmax_scale: float | None = None) -> Results:
    """float64, one sequence at a time, gradients by autograd. Rows of no sequence are 0, their lse -inf."""
    case = inputs.case
    scale = case.head_dim_qk**-0.5 if softmax_scale is None else softmax_scale
    with torch.enable_grad():
        q, k, v = (tensor.detach().double().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
        out = q.new_zeros(case.total("q"), case.num_heads, case.width_v)
        lse = q.new_full((case.num_heads, case.total("q")), -math.inf)
        max_logit = q.new_full((case.num_heads,), -math.inf)
        total = q.new_zeros(())
        for n, (rows_q, rows_kv) in enumerate(zip(case.rows("q"), case.rows("kv"))):
            part = _reference_sequence(q[rows_q], k[rows_kv], v[rows_kv], case.mask_of(n), scale)
            with torch.no_grad():
                out[rows_q], lse[:, rows_q] = part[0], part[1]
                max_logit = torch.maximum(max_logit, part[2])
            total = total + (part[0] * inputs.grad_out[rows_q].double()).sum()
        total = total + 0 * (q.sum() + k.sum() + v.sum()) if not case.lengths_q else total
        grads = torch.autograd.grad(total, (q, k, v), allow_unused=True)
    dq, dk, dv = (torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, (q, k, v)))
    return Results(out.detach(), lse.detach(), max_logit.detach(), dq, dk, dv)


def _reference_sequence(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    heads, len_q, len_kv = q.shape[1], q.shape[0], k.shape[0]
    seen = visible(mask, len_q, len_kv).to(q.device)
    rows = seen.any(1).nonzero()[:, 0]  # rows without a key have no softmax
    repeats = heads // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", q[rows], k) * scale
    scores = scores.masked_fill(~seen[rows], -math.inf)
    out = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v)
    lse = q.new_full((heads, len_q), -math.inf).index_copy(1, rows, torch.logsumexp(scores, -1))
    max_logit = scores.amax((1, 2)) if scores.numel() else q.new_full((heads,), -math.inf)
    return q.new_zeros(len_q, heads, v.shape[2]).index_copy(0, rows, out), lse, max_logit


# --------------------------------------------------------------------------------------------------------------- comparison
# TransformerEngine's tolerances: of its DotProductAttention tests (float16, bfloat16) and its dtype_tols (float32).
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1.5e-2}


def tolerances(dtype: torch.dtype, expected: Tensor) -> dict[str, float]:
    """rtol and atol for a result of attention in ``dtype``; atol grows with the largest expected value."""
    tolerance = _TOLERANCE[dtype]
    largest = float(expected.detach().abs().nan_to_num(0, 0, 0).max()) if expected.numel() else 0.0
    return {"rtol": tolerance, "atol": tolerance * max(1.0, largest)}


def assert_close(name: str, actual: Tensor, expected: Tensor, rtol: float, atol: float) -> None:
    """With a message that names what is compared; whatever the dtype of ``actual``."""
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")


def assert_outside_is_zero(
    case: PackedCase, *, out: Tensor, lse: Tensor | None = None, grads: tuple[Tensor, Tensor, Tensor] | None = None
) -> None:
    """Rows of no sequence are exactly 0, their lse -inf."""
    outside_q, outside_kv = (case.outside(side).to(out.device) for side in ("q", "kv"))
    dq, dk, dv = grads if grads is not None else (None, None, None)
    for name, tensor, rows in (("out", out, outside_q), ("dq", dq, outside_q), ("dk", dk, outside_kv), ("dv", dv, outside_kv)):
        if tensor is not None:
            assert not tensor[rows].ne(0).any(), f"{name} is not exactly 0 at rows of no sequence"
    if lse is not None:
        assert bool((lse[:, outside_q] == -math.inf).all()), "lse is not -inf at rows of no sequence"


def assert_matches(actual: Results, expected: Results, inputs: PackedInputs) -> None:
    """Every output against a reference, and what the row contract fixes exactly: zeros, -inf, dtypes, contiguity."""
    case = inputs.case
    assert actual.out.dtype == case.dtype and actual.lse.dtype == torch.float32
    keyless = expected.lse == -math.inf
    assert torch.equal(actual.lse == -math.inf, keyless), "lse must be -inf exactly at rows that see no key"
    assert not actual.out[keyless.t()].ne(0).any(), "a row that sees no key must have out 0"
    for name in ("out", "dq", "dk", "dv"):
        got, want = getattr(actual, name), getattr(expected, name)
        if got is not None:
            assert_close(name, got, want, **tolerances(case.dtype, want))
    # float32 statistics of exact products: kernels work in base 2 and by tiles.
    tolerance = 1e-3 if case.dtype in (torch.float16, torch.bfloat16) else 1e-5
    assert_close("lse", actual.lse, expected.lse, tolerance, tolerance)
    if actual.max_logit is not None and expected.max_logit is not None:
        assert actual.max_logit.dtype == torch.float32
        assert_close("max_logit", actual.max_logit, expected.max_logit, tolerance, tolerance)
    if actual.dq is not None and actual.dk is not None and actual.dv is not None:
        assert not actual.dq[keyless.t()].ne(0).any(), "a row that sees no key must have dq 0"
        assert_outside_is_zero(case, out=actual.out, lse=actual.lse, grads=(actual.dq, actual.dk, actual.dv))


def assert_matches_reference(inputs: PackedInputs, **changes: Any) -> None:
    """Runs forward and backward of :func:`thd_attention` and compares with :func:`reference`."""
    actual = inputs.run(**changes)
    assert_matches(actual, reference(inputs, changes.get("softmax_scale")), inputs)


# ------------------------------------------------------------------------------------------------------- memory and host syncs
def poison_allocator(device: Any, copies: int = 8) -> None:
    """Leaves NaN in the blocks that the CUDA caching allocator will hand out next: what a kernel does not write shows."""
    sizes = [1 << exponent for exponent in (12, 16, 19, 21, 24) for _ in range(copies)]
    blocks = [torch.full((size // 2,), math.nan, dtype=torch.bfloat16, device=device) for size in sizes]
    torch.cuda.synchronize(device)
    del blocks


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty and its relatives return NaN: the fill of deterministic mode, which only warns of other things here."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class HostSyncError(AssertionError):
    """Something read a tensor's contents on the host."""


class NoHostSync(TorchDispatchMode):
    """Raises on every operator for which the host would wait for a CUDA stream: reading a value, a shape that depends on
    values, a boolean index, a copy between devices."""

    _INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tags = getattr(func, "tags", ())
        if func in self._INDEXING:
            if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
                raise HostSyncError(f"{func} with a boolean index has a shape that depends on contents")
        elif func is torch.ops.aten.repeat_interleave.Tensor:
            if kwargs.get("output_size") is None:
                raise HostSyncError(f"{func} without output_size reads a length on the host")
        elif torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            raise HostSyncError(f"{func} depends on a tensor's contents")
        result = func(*args, **kwargs)
        devices = {x.device.type for x in (*args, result) if isinstance(x, Tensor)}
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default) and len(devices) > 1:
            raise HostSyncError(f"{func} copies between {' and '.join(sorted(devices))}")
        return result


def trace_without_sync(function: Any, *args: Any) -> Any:
    """Calls ``function`` on fake tensors in place of the tensors in ``args`` (any pytree) and raises :class:`HostSyncError`, or
    torch's own error, where the host would read one. Needs no GPU."""
    with FakeTensorMode() as mode:
        fakes = tree_map_only(Tensor, mode.from_tensor, args)
        with NoHostSync():
            return function(*fakes)


@contextlib.contextmanager
def no_cuda_sync() -> Iterator[None]:
    """A host sync of the CUDA runtime is an error inside."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


# --------------------------------------------------------------------------------------------------------- samples for the ops
@dataclass(frozen=True)
class OpSample:
    """One call of one op: ``sample.op(*sample.arguments())``."""

    op: Any
    case: PackedCase
    backend: str = "unfused"
    dispatch: int = plans.PADDED
    max_logit: bool = False
    padded_width: int = 0

    def __str__(self) -> str:
        extras = [*(["max_logit"] if self.max_logit else []), *([f"pad{self.padded_width}"] if self.padded_width else [])]
        dispatch = [] if self.dispatch == plans.PADDED else [plans.DISPATCH_NAMES[self.dispatch]]
        return "-".join([self.op.__name__.split(".")[0], str(self.case), *dispatch, *extras])

    def plan(self) -> list[int]:
        case = self.case
        bands = tuple(resolve_mask(*mask).band.canonical(case.lengths_kv is None) for mask in case.masks)
        flags = plans.TRAINING | (plans.MAX_LOGIT if self.max_logit else 0)
        if case.lengths_kv is None:
            flags |= plans.EQUAL_LENGTHS
        if case.owner is None and not case.has_gaps and self.dispatch == plans.PADDED:
            flags |= plans.PLAIN_CU_SEQLENS
        return plans.encode(flags, self.dispatch, self.padded_width, bands, (backend_number(self.backend),) * len(bands))

    def arguments(self, device: Any = "cpu") -> tuple[Any, ...]:
        inputs = build(self.case, device, requires_grad=self.op is ops.attention)
        cu_seqlens_kv = inputs.cu_seqlens_q if inputs.cu_seqlens_kv is None else inputs.cu_seqlens_kv
        slots_q, slots_kv = inputs.cu_seqlens_q_padded, inputs.cu_seqlens_kv_padded
        slots_kv = slots_q if self.case.lengths_kv is None and slots_kv is None else slots_kv
        index = None
        if self.case.owner is not None:
            index = torch.tensor(self.case.owner, dtype=torch.int32, device=device)
        routing = (inputs.cu_seqlens_q, cu_seqlens_kv, slots_q, slots_kv, index, len(self.case.masks))
        if self.op is ops.policy_subsets:
            return routing
        scale = self.case.head_dim_qk**-0.5
        rest = (*ops.policy_subsets(*routing), self._single_launch_plan(inputs), *self.case.max_seqlens, scale, self.plan())
        if self.op is not ops.attention_backward:
            return (inputs.q, inputs.k, inputs.v, *rest)
        out, lse, _ = ops.attention_forward(inputs.q, inputs.k, inputs.v, *rest)
        return (inputs.grad_out, inputs.q, inputs.k, inputs.v, out, lse, *rest)

    def _single_launch_plan(self, inputs: PackedInputs) -> list[Tensor]:
        if self.dispatch != plans.SINGLE_LAUNCH:
            return []
        prepared = inputs.prepare(attention=inputs.plan_spec(), total_q=inputs.q.shape[0], total_kv=inputs.k.shape[0])
        assert prepared is not None
        return prepared.plans[0].tensors


# Each set has cases with two tokens or more: a wrong stride passes unseen below that.
OP_CASES = (
    PackedCase((5, 9, 10), name="contiguous"),
    PackedCase((5, 9, 10), layout="transposed", name="transposed"),
    PackedCase((5, 9, 10), layout="interleaved", name="interleaved_t3hd"),
    PackedCase((5, 9), (7, 3), masks=(BOTTOM_RIGHT,), layout="interleaved", num_heads=4, num_gqa_groups=2, name="t2hd_gqa"),
    PackedCase((5, 9, 0), gaps_q=(2, 0, 3), tail=4, name="gaps_and_tail"),
    PackedCase((3, 0, 4), (0, 5, 6), gaps_q=(0, 1, 0), gaps_kv=(2, 0, 1), masks=(FULL,), name="cross_zero_length"),
    PackedCase((), name="no_sequences"),
    PackedCase((), tail=5, name="rows_but_no_sequences"),
    PackedCase((0, 0, 0), name="no_tokens"),
    PackedCase((1,), name="one_token"),
    PackedCase((17,), name="one_sequence"),
    PackedCase((6, 3, 8, 2), masks=(CAUSAL, FULL, Mask("padding", (2, 1))), owner=(1, 0, 2, 0), name="policies"),
)
OP_CASES_EXTENDED = (
    PackedCase((5, 9, 10), layout="offset", dtype=torch.bfloat16, name="offset_bf16"),
    PackedCase((5, 9, 10), head_dim_qk=24, head_dim_v=16, layout="interleaved", name="mla_split"),
    PackedCase((5, 9, 10), head_dim_qk=16, head_dim_v=24, dtype=torch.float16, name="wide_v_fp16"),
    PackedCase((5, 9, 10), index_dtype=torch.int64, num_heads=6, num_gqa_groups=1, name="int64_mqa"),
    PackedCase((5, 9, 10), expanded_grad=True, dtype=torch.float64, name="expanded_grad_fp64"),
    PackedCase(
        (6, 3, 8, 2),
        gaps_q=(1, 0, 2, 0),
        tail=3,
        masks=(CAUSAL, FULL),
        owner=(1, 0, 1, 0),
        layout="transposed",
        name="policies_gaps",
    ),
    PackedCase(
        tuple(range(1, 9)),
        masks=tuple(Mask("padding_causal", (left, 0)) for left in range(8)),
        owner=tuple(range(8)),
        name="eight_policies",
    ),
)


def op_samples(cases: Sequence[PackedCase] = OP_CASES, backend: str = "unfused") -> Iterator[OpSample]:
    """Every op on every case; ``grouped``, max_logit and a padded width where the case gives them something to do."""
    for case in cases:
        yield OpSample(ops.policy_subsets, case)
        for op in (ops.attention_forward, ops.attention_backward, ops.attention):
            yield OpSample(op, case, backend)
            if case.owner is not None:
                yield OpSample(op, case, backend, dispatch=plans.GROUPED)
            if case.head_dim_qk != case.width_v:
                yield OpSample(op, case, backend, padded_width=max(case.head_dim_qk, case.width_v))
        yield OpSample(ops.attention_forward, case, backend, max_logit=True)


def varying_cases(count: int = 12, seed: int = 0, **fields: Any) -> list[PackedCase]:
    """Batches of 3 to 8 documents, max_seqlen 17 to 129, 200 to 700 tokens with the tail: what a compiled model must take
    without compiling each time. ``fields`` are set on every case."""
    generator = random.Random(seed)
    cases = []
    for number in range(count):
        documents = generator.randint(3, 8)
        longest = {0: 129, 1: 17}.get(number, generator.randint(17, 129))
        lengths = [longest] + [generator.randint(1, longest) for _ in range(documents - 1)]
        while sum(lengths) > 700:
            lengths.remove(min(lengths))
        generator.shuffle(lengths)
        tokens = generator.randint(max(200, sum(lengths)), 700)
        cases.append(PackedCase(tuple(lengths), tail=tokens - sum(lengths), name=f"batch{number}", **fields))
    return cases


# --------------------------------------------------------------------------------------------------------- the benchmarks' work
@dataclass(frozen=True)
class Work:
    """A packed batch that the benchmarks time: sequence n is under ``masks[owner[n]]``.

    Attributes:
        pattern: "interleaved" (the policies take turns) or "contiguous" (each policy's sequences are one run).
        num_heads, num_gqa_groups, head_dim_qk, head_dim_v: of the attention.
    """

    name: str
    lengths: tuple[int, ...]
    masks: tuple[Mask, ...]
    owner: tuple[int, ...]
    pattern: str
    num_heads: int = 16
    num_gqa_groups: int = 16
    head_dim_qk: int = 128
    head_dim_v: int = 128

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths)

    def cu_seqlens(self, device: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(_offsets(self.lengths), dtype=dtype, device=device)

    def policies(self, device: Any) -> list[dict[str, Any]]:
        """``thd_attention_policies`` as a list of dicts."""
        return policy_list(self.masks, self.owner, device)

    def case(self, **fields: Any) -> PackedCase:
        """The same batch as a sample, in bfloat16 unless ``fields`` say otherwise."""
        names = ("num_heads", "num_gqa_groups", "head_dim_qk", "head_dim_v", "masks", "owner", "name")
        defaults: dict[str, Any] = {name: getattr(self, name) for name in names}
        return PackedCase(self.lengths, **{"dtype": torch.bfloat16, **defaults, **fields})


_WORK_A: tuple[int, ...] = (1024, 4096, 512, 2048, 3072, 1536, 2560, 4096, 768, 1792, 4096, 640, 2304, 3328, 1024, 512)
_WORK_MASKS = (
    CAUSAL,
    FULL,
    Mask("padding_causal", (256, 0)),
    Mask("padding", (128, 128)),
    CAUSAL,
    FULL,
    Mask("padding_causal", (64, 0)),
    Mask("padding", (512, 512)),
)
# name: tokens, sequences, policies
_WORKS = {
    "33k-p2": (33408, 16, 2),
    "33k-p4": (33408, 16, 4),
    "32k-p8": (32768, 32, 8),
    "8k-p4": (8192, 64, 4),
    "4k-p2": (4096, 8, 2),
}
BENCHMARK_WORKS = ("A", *_WORKS)


def proportional_lengths(tokens: int, sequences: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths proportional to 0.3 + uniform(0, 1), seeded, that add up to ``tokens``."""
    generator = random.Random(seed)
    weights = [0.3 + generator.random() for _ in range(sequences)]
    bounds = [round(tokens * sum(weights[: n + 1]) / sum(weights)) for n in range(sequences)]
    return tuple(end - start for start, end in zip([0, *bounds], bounds))


# What a suffix of a work's name changes: A-gqa is A with fewer key/value heads.
_WORK_VARIANTS: dict[str, dict[str, Any]] = {"gqa": {"num_gqa_groups": 4}, "mla": {"head_dim_qk": 192}}


def benchmark_work(name: str, pattern: str = "interleaved") -> Work:
    """One of :data:`BENCHMARK_WORKS`, or a variant of it: ``A-contiguous``, ``A-gqa`` (16 heads, 4 groups), ``A-mla`` (192/128).

    Raises:
        ValueError: for another name or pattern.
    """
    base, _, suffix = name.rpartition("-")
    if base in BENCHMARK_WORKS and suffix == "contiguous":
        return dataclasses.replace(benchmark_work(base, "contiguous"), name=name)
    if base in BENCHMARK_WORKS and suffix in _WORK_VARIANTS:
        return dataclasses.replace(benchmark_work(base, pattern), name=name, **_WORK_VARIANTS[suffix])
    if name not in BENCHMARK_WORKS:
        raise ValueError(f"work {name!r} is unknown; use one of {', '.join(BENCHMARK_WORKS)}")
    if pattern not in ("interleaved", "contiguous"):
        raise ValueError(f"pattern={pattern!r} is unknown; use 'interleaved' or 'contiguous'")
    if name == "A":
        lengths, policies = _WORK_A, 2
    else:
        tokens, sequences, policies = _WORKS[name]
        lengths = proportional_lengths(tokens, sequences)
    owner = tuple(n % policies for n in range(len(lengths)))
    if pattern == "contiguous":
        # The same sequences under the same policies, sorted by policy.
        order = sorted(range(len(lengths)), key=lambda n: owner[n])
        lengths, owner = tuple(lengths[n] for n in order), tuple(owner[n] for n in order)
    return Work(name, lengths, _WORK_MASKS[:policies], owner, pattern)
