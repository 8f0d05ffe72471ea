"""torch.library.opcheck over every op: all of its checks, static and dynamic shapes, no expected failures.

The checks are of the schema (nothing mutated, no output an alias), of the fake against the kernel (shapes, strides, dtypes), of
the autograd registration, and of AOTAutograd's graph against eager, outputs and gradients.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from te_attn_ops import ops, plan as plans, testing
from te_attn_ops.testing import BOTTOM_RIGHT, CAUSAL, FULL, OP_CASES, OP_CASES_EXTENDED, Mask, OpSample, PackedCase, op_samples

CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)
DIFFERENTIABLE = (ops.attention, ops.attention_backward)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check(sample: OpSample) -> None:
    assert set(torch.library.opcheck(sample.op, sample.arguments(), test_utils=CHECKS).values()) == {"SUCCESS"}


@pytest.mark.parametrize("sample", list(op_samples(OP_CASES)), ids=str)
def test_every_op_on_every_geometry(sample: OpSample) -> None:
    check(sample)


@pytest.mark.parametrize("sample", list(op_samples(OP_CASES_EXTENDED)), ids=str)
def test_every_op_on_widths_dtypes_and_more_policies(sample: OpSample) -> None:
    check(sample)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=str)
def test_dtypes(op: torch._ops.OpOverload, dtype: torch.dtype) -> None:
    check(OpSample(op, PackedCase((7, 4), num_heads=4, num_gqa_groups=2, dtype=dtype, layout="interleaved")))


@pytest.mark.parametrize(("layout", "expanded_grad"), list(itertools.product(testing.LAYOUTS, (False, True))))
def test_layouts_of_the_backward(layout: str, expanded_grad: bool) -> None:
    """Strided q, k, v and an expanded grad_out, at 196 and 257 tokens."""
    lengths = (196,) if expanded_grad else (200, 57)
    check(OpSample(ops.attention_backward, PackedCase(lengths, num_heads=1, layout=layout, expanded_grad=expanded_grad)))


@pytest.mark.parametrize("num_policies", [2, 3, 16])
@pytest.mark.parametrize("dispatch", [plans.PADDED, plans.GROUPED], ids=["padded", "grouped"])
def test_number_of_policies(num_policies: int, dispatch: int) -> None:
    masks = tuple((CAUSAL, FULL, BOTTOM_RIGHT, Mask("padding", (n, 1)))[n % 4] for n in range(num_policies))
    owner = tuple(range(num_policies))
    check(OpSample(ops.attention, PackedCase((3,) * num_policies, masks=masks, owner=owner), dispatch=dispatch, max_logit=True))


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int) -> None:
    check(OpSample(ops.attention, testing.random_case(seed), max_logit=bool(seed % 2)))
