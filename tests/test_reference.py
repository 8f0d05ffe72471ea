"""Outputs, lse, max_logit and every gradient against float64 attention of one sequence at a time."""

from __future__ import annotations

import pytest
import torch

from te_attn_ops import testing
from te_attn_ops.testing import CONFIGURATIONS, FULL, LAYOUTS, Mask, PackedCase, build, random_case

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_WITH_GAPS = {"layout_0_0", "layout_0_1", "layout_1_0", "layout_2_2", "layout_4_1", "mla_2_0"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CONFIGURATIONS, ids=str)
def test_configuration(case: PackedCase, dtype: torch.dtype) -> None:
    testing.assert_matches_reference(build(case.replace(dtype=dtype)), return_max_logit=True)


@pytest.mark.parametrize("case", [case for case in CONFIGURATIONS if case.name in _WITH_GAPS], ids=str)
def test_configuration_with_gaps(case: PackedCase) -> None:
    """pad_between_seqs of the same configurations."""
    case = case.replace(gaps_q=(3, 1), gaps_kv=None if case.lengths_kv is None else (0, 2), dtype=torch.bfloat16)
    testing.assert_matches_reference(build(case).poison(1e4))


@pytest.mark.parametrize("seed", range(40))
def test_random_case(seed: int) -> None:
    inputs = build(random_case(seed), seed=seed)
    testing.assert_matches_reference(inputs, return_max_logit=True)
    if inputs.case.owner is not None:
        testing.assert_matches_reference(inputs, thd_attention_policy_dispatch="grouped", return_max_logit=True)


@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["policies", "policies_cross"])
def test_policies_in_each_layout(name: str, layout: str, dispatch: str) -> None:
    case = next(case for case in CONFIGURATIONS if case.name == name).replace(layout=layout, tail=3)
    testing.assert_matches_reference(build(case).poison(1e4), thd_attention_policy_dispatch=dispatch)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("head_dim_qk", "head_dim_v"), [(24, 16), (16, 24), (10, 6)])
def test_layouts_of_unequal_widths(head_dim_qk: int, head_dim_v: int, layout: str) -> None:
    case = PackedCase((7, 12), num_heads=4, num_gqa_groups=2, head_dim_qk=head_dim_qk, head_dim_v=head_dim_v, layout=layout)
    for pad_head_dim in (False, True):
        testing.assert_matches_reference(build(case), pad_head_dim=pad_head_dim)


def test_grad_out_that_is_one_expanded_value() -> None:
    testing.assert_matches_reference(build(PackedCase((7, 12), expanded_grad=True)))


def test_policies_equal_independent_scalar_calls() -> None:
    """Bit for bit: a policy's sequences get what a call of their own gives them."""
    masks = (Mask(), FULL, Mask("padding", (3, 2)))
    mixed = build(PackedCase((20, 33, 9, 17), masks=masks, owner=(2, 0, 1, 0)))
    result = mixed.run()
    for n, rows in enumerate(mixed.case.rows("q")):
        alone = build(PackedCase((rows.stop - rows.start,), masks=(mixed.case.mask_of(n),)))
        with torch.no_grad():
            for name in ("q", "k", "v", "grad_out"):
                getattr(alone, name).copy_(getattr(mixed, name)[rows])
        expected = alone.run()
        assert torch.equal(result.out[rows], expected.out) and torch.equal(result.lse[:, rows], expected.lse)
        for name in ("dq", "dk", "dv"):
            assert torch.equal(getattr(result, name)[rows], getattr(expected, name)), name


@pytest.mark.parametrize("mask", [FULL, Mask(), Mask("padding_causal_bottom_right", (3, 0))], ids=str)
def test_one_policy_over_all_sequences_equals_the_scalar_call(mask: Mask) -> None:
    scalar = build(PackedCase((9, 14, 3), (12, 5, 3), masks=(mask,))).run()
    for dispatch in ("auto", "padded", "grouped"):
        policy = build(PackedCase((9, 14, 3), (12, 5, 3), masks=(mask,), owner=(0, 0, 0)))
        for got, want in zip(policy.run(thd_attention_policy_dispatch=dispatch), scalar):
            assert got is want is None or torch.equal(got, want)


def test_long_sequence_is_computed_in_parts() -> None:
    """More scores than the budget of one tile: unfused walks over blocks of rows, and the gradients of the keys add up."""
    from te_attn_ops.backends import unfused

    inputs = build(PackedCase((61, 30), num_heads=4, num_gqa_groups=2, masks=(FULL,)))
    whole = inputs.run()
    budget, unfused._SCORE_BUDGET = unfused._SCORE_BUDGET, 4 * 61 * 7
    try:
        parts = inputs.run()
        testing.assert_matches(parts, testing.reference(inputs), inputs)
    finally:
        unfused._SCORE_BUDGET = budget
    torch.testing.assert_close(parts.dk, whole.dk)
