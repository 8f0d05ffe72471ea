"""The policies' list: what is accepted, what is routed where, and the error of everything else."""

from __future__ import annotations

import copy
import dataclasses
import io

import pytest
import torch

from te_attn_ops import (
    AttentionPolicy,
    PlanSpec,
    PreparedPolicies,
    attention,
    explain,
    pad_packed_batch,
    prepare_thd_policies,
    refresh_thd_policies,
    testing,
    thd_attention,
)
from te_attn_ops.masks import Band
from te_attn_ops.modules import DotProductAttention
from te_attn_ops.policies import note_capture
from te_attn_ops.testing import BOTTOM_RIGHT, CAUSAL, FULL, Mask, PackedCase, build
from tests.stubs import Stub, fresh_choices, install  # noqa: F401

CU = torch.tensor([0, 4, 8, 12, 16], dtype=torch.int32)


def ids(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def policy(*values: int, mask_type: str = "padding", window: object = None, **extra: object) -> dict[str, object]:
    return {"sequence_ids": ids(*values), "mask_type": mask_type, "window_size": window, **extra}


# ------------------------------------------------------------------------------------------------------------------- accepted
def test_routes_every_sequence_to_its_policy() -> None:
    prepared = prepare_thd_policies([policy(1, 3), policy(0, 2, mask_type="padding_causal", window=(1, 0))], CU)
    assert prepared.policy_index.tolist() == [1, 0, 1, 0] and prepared.policy_index.dtype == torch.int32
    assert prepared.policies == (AttentionPolicy("padding", None, None), AttentionPolicy("padding_causal", (1, 0), None))
    assert prepared.num_policies == 2 and not prepared.contiguous and not prepared.mutable


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_of_either_integer_type(dtype: torch.dtype) -> None:
    policies = [{**policy(), "sequence_ids": ids(0, 1, dtype=dtype)}, {**policy(), "sequence_ids": ids(2, 3, dtype=dtype)}]
    assert prepare_thd_policies(policies, CU.to(dtype)).policy_index.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("owner", "contiguous"),
    [((0, 0, 1, 1), True), ((1, 1, 0, 0), True), ((0, 1, 0, 1), False), ((0, 0, 0, 0), True), ((0, 1, 1, 0), False)],
)
def test_contiguous_means_one_run_for_each_policy(owner: tuple[int, ...], contiguous: bool) -> None:
    prepared = prepare_thd_policies(testing.policy_list((FULL, CAUSAL), owner, "cpu"), CU)
    assert prepared.contiguous is contiguous


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
def test_the_order_of_the_list_means_nothing(order: tuple[int, ...], dispatch: str) -> None:
    inputs = build(PackedCase((5, 9, 3, 7), masks=(FULL, CAUSAL, Mask("padding", (1, 1))), owner=(2, 0, 1, 0)))
    policies = inputs.policies()
    expected = inputs.run(thd_attention_policies=policies, thd_attention_policy_dispatch=dispatch)
    shuffled = inputs.run(thd_attention_policies=[policies[p] for p in order], thd_attention_policy_dispatch=dispatch)
    for got, want in zip(shuffled, expected):
        assert got is want is None or torch.equal(got, want)


def test_a_policy_without_sequences_is_dropped_unless_members_may_change() -> None:
    policies = [policy(), policy(0, 1, 2, 3, mask_type="padding_causal"), policy(window=(2, 2))]
    static = prepare_thd_policies(policies, CU)
    assert static.num_policies == 1 and static.policy_index.tolist() == [0] * 4 and static.policies[0].mask_type == "padding_causal"
    mutable = prepare_thd_policies(policies, CU, mutable=True)
    assert mutable.num_policies == 3 and mutable.policy_index.tolist() == [1] * 4 and mutable.mutable and not mutable.contiguous


@pytest.mark.parametrize("dispatch", ["auto", "padded", "grouped"])
@pytest.mark.parametrize("mutable", [False, True])
def test_a_policy_without_sequences_changes_nothing(dispatch: str, mutable: bool) -> None:
    inputs = build(PackedCase((4, 4, 4, 4), masks=(CAUSAL,), owner=(0, 0, 0, 0)))
    policies = [policy(), *inputs.policies(), policy(window=(1, 1))]
    prepared = prepare_thd_policies(policies, inputs.cu_seqlens_q, mutable=mutable)
    got = inputs.run(thd_attention_policies=prepared, thd_attention_policy_dispatch=dispatch)
    testing.assert_matches(got, testing.reference(inputs), inputs)


def test_no_sequences_at_all() -> None:
    prepared = prepare_thd_policies([policy()], torch.zeros(1, dtype=torch.int32))
    assert prepared.policy_index.shape == (0,) and prepared.num_policies == 1


@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
def test_members_may_change_where_that_was_announced(dispatch: str) -> None:
    inputs = build(PackedCase((4, 6, 5, 3), masks=(FULL, CAUSAL), owner=(0, 1, 0, 1)))
    prepared = inputs.prepare(mutable=True)
    for owner in ((0, 1, 0, 1), (1, 1, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0)):
        prepared.policy_index.copy_(torch.tensor(owner))
        moved = build(inputs.case.replace(owner=owner))
        result = inputs.run(thd_attention_policies=prepared, thd_attention_policy_dispatch=dispatch)
        testing.assert_matches(result, testing.reference(moved), inputs)


def test_alignment_falls_back_to_the_call() -> None:
    """A policy's own bottom_right_diagonal, else the forward's argument, else True; a causal type's alignment is its own."""
    masks = (Mask("padding", (2, 1)), Mask("padding", (2, 1), True), Mask("padding", (2, 1), False), CAUSAL, BOTTOM_RIGHT)
    inputs = build(PackedCase((5,) * 5, (8,) * 5, masks=masks, owner=(0, 1, 2, 3, 4)))
    for default in (None, True, False):
        resolved = tuple(mask._replace(bottom_right_diagonal=default) if mask[2] is None else mask for mask in masks)
        expected = testing.closed_form(inputs.case.replace(masks=resolved))[1]
        lse = testing.closed_form_inputs(inputs.case).attend(bottom_right_diagonal=default, return_lse=True)[1]
        torch.testing.assert_close(lse[0].double(), expected, rtol=1e-6, atol=1e-6)


def test_equal_lengths_is_a_promise_that_is_checked() -> None:
    cu_kv = CU.clone()
    assert prepare_thd_policies([policy(0, 1, 2, 3)], CU, cu_kv, equal_lengths=True).equal_lengths
    cu_kv[1] = 3
    with pytest.raises(ValueError, match="equal_lengths=True, but sequence 0 has 4 query and 3 key tokens"):
        prepare_thd_policies([policy(0, 1, 2, 3)], CU, cu_kv, equal_lengths=True)


def test_contents_of_cu_seqlens_are_checked_unless_told_not_to() -> None:
    bad = torch.tensor([0, 8, 4, 12, 16])
    with pytest.raises(ValueError, match="cu_seqlens_q must not descend: entry 2 is 4 after 8"):
        prepare_thd_policies([policy(0, 1, 2, 3)], bad)
    prepare_thd_policies([policy(0, 1, 2, 3)], bad, validate=False)


def test_windows_are_normalised_as_for_scalar_masks() -> None:
    with pytest.warns(UserWarning, match=r"window_size \(7, 3\) with attn_mask_type 'padding_causal' is used as \(7, 0\)"):
        prepared = prepare_thd_policies([policy(0, 1, 2, 3, mask_type="padding,causal", window=[7, 3])], CU)
    assert prepared.policies == (AttentionPolicy("padding_causal", (7, 3), None),)
    assert prepared.policies[0].band(None) == Band(7, 0, False)


def test_prepared_policies_are_a_pytree_of_tensors() -> None:
    prepared = prepare_thd_policies([policy(1, 3), policy(0, 2, window=(1, 0))], CU)
    leaves, spec = torch.utils._pytree.tree_flatten(prepared)
    assert [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] == [prepared.policy_index]
    assert torch.utils._pytree.tree_unflatten(leaves, spec).policies == prepared.policies


# --------------------------------------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize(
    ("policies", "error", "message"),
    [
        ({"sequence_ids": ids(0)}, TypeError, "thd_attention_policies must be a list of dicts, got dict"),
        ("padding", TypeError, "thd_attention_policies must be a list of dicts, got str"),
        (ids(0), TypeError, "thd_attention_policies must be a list of dicts, got Tensor"),
        ([], ValueError, "thd_attention_policies must hold at least one policy, got an empty list"),
        ([["padding"]], TypeError, r"thd_attention_policies\[0\] must be a dict, got list"),
        ([policy(0, 1, 2, 3), None], TypeError, r"thd_attention_policies\[1\] must be a dict, got NoneType"),
        (
            [{"sequence_ids": ids(0), "mask_type": "padding"}],
            ValueError,
            r"thd_attention_policies\[0\] lacks window_size; it needs mask_type, sequence_ids, window_size",
        ),
        ([{}], ValueError, r"thd_attention_policies\[0\] lacks mask_type, sequence_ids, window_size"),
        (
            [policy(0, 1, 2, 3, window_sise=(1, 1), dropout=0.1)],
            ValueError,
            r"thd_attention_policies\[0\] has unknown keys dropout, window_sise; it takes bottom_right_diagonal, mask_type",
        ),
    ],
)
def test_what_is_no_list_of_complete_dicts(policies: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prepare_thd_policies(policies, CU)  # type: ignore[arg-type]


NAME = r"thd_attention_policies\[0\]\.sequence_ids"


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([0, 1, 2, 3], TypeError, f"{NAME} must be a 1-D int32 or int64 tensor, got list"),
        (torch.tensor([0.0, 1.0]), TypeError, f"{NAME} must be int32 or int64, got torch.float32"),
        (torch.tensor([True, False]), TypeError, f"{NAME} must be int32 or int64, got torch.bool"),
        (ids(0, 1, dtype=torch.int16), TypeError, f"{NAME} must be int32 or int64, got torch.int16"),
        (ids(0, 1, 2, 3).view(2, 2), ValueError, rf"{NAME} must be one-dimensional, got shape \(2, 2\)"),
        (torch.tensor(0), ValueError, rf"{NAME} must be one-dimensional, got shape \(\)"),
        (ids(0, 1, 2, 3).to("meta"), ValueError, f"{NAME} must be on cpu, as cu_seqlens_q is; got meta"),
        (ids(0, 2, 1, 3), ValueError, f"{NAME} must be strictly ascending, but is not ascending: 1 after 2"),
        (ids(0, 1, 1, 2), ValueError, f"{NAME} must be strictly ascending, but holds a duplicate: 1 after 1"),
        (ids(0, 1, 2, 4), ValueError, f"{NAME} holds 4, out of range for 4 sequences"),
        (ids(-1, 0, 1, 2), ValueError, f"{NAME} holds -1, out of range for 4 sequences"),
        (ids(0, 1, 3), ValueError, "thd_attention_policies must cover every sequence: sequence 2 of 4 is in no policy"),
        (ids(), ValueError, "thd_attention_policies must cover every sequence: sequence 0 of 4 is in no policy"),
    ],
)
def test_malformed_ids(values: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prepare_thd_policies([{**policy(), "sequence_ids": values}], CU)


def test_overlapping_ids() -> None:
    with pytest.raises(ValueError, match=r"thd_attention_policies\[1\]\.sequence_ids overlaps policy 0: both hold sequence 2"):
        prepare_thd_policies([policy(0, 2), policy(1, 2, 3)], CU)


PREFIX = r"thd_attention_policies\[1\]\."


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mask_type": "causal"}, ValueError, f"{PREFIX}mask_type='causal' does not fit the packed"),
        ({"mask_type": "no_mask"}, ValueError, f"{PREFIX}mask_type='no_mask' does not fit the packed"),
        ({"mask_type": "arbitrary"}, ValueError, f"{PREFIX}mask_type='arbitrary' does not fit"),
        ({"mask_type": "causual"}, ValueError, f"{PREFIX}mask_type='causual' is no mask type; use one of"),
        ({"mask_type": 3}, TypeError, f"{PREFIX}mask_type must be a string, got int"),
        ({"window_size": (-2, 0)}, ValueError, rf"{PREFIX}window_size=\(-2, 0\): each side must be -1"),
        ({"window_size": (1, 2, 3)}, ValueError, f"{PREFIX}window_size must be a pair"),
        ({"window_size": 4}, ValueError, f"{PREFIX}window_size must be a pair"),
        ({"window_size": (1.5, 0)}, TypeError, f"{PREFIX}window_size must hold ints"),
        ({"mask_type": "padding_causal", "window_size": (-1, 2)}, ValueError, rf"{PREFIX}window_size=\(-1, 2\): .*use \(-1, 0\)"),
        ({"bottom_right_diagonal": 1}, TypeError, f"{PREFIX}bottom_right_diagonal must be a bool or None, got int"),
    ],
)
def test_malformed_masks(changes: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prepare_thd_policies([policy(0, 1), {**policy(2, 3), **changes}], CU)


def test_a_list_in_a_call_is_checked_like_one_that_is_prepared() -> None:
    inputs = build(PackedCase((4, 4, 4, 4), owner=(0, 0, 0, 0)))
    for malformed in ([policy(0, 1)], [policy(0, 1, 1)], [{"mask_type": "padding"}], policy(0, 1, 2, 3), 7):
        with pytest.raises((TypeError, ValueError), match="thd_attention_policies"):
            inputs.attend(thd_attention_policies=malformed)


def test_a_list_is_prepared_once_and_again_when_its_ids_change(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_attn_ops import attention

    calls = []
    original = attention.prepare_thd_policies
    monkeypatch.setattr(attention, "prepare_thd_policies", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    inputs = build(PackedCase((4, 4, 4, 4), masks=(FULL, CAUSAL), owner=(0, 1, 0, 1)))
    policies = inputs.policies()
    first = [inputs.attend(thd_attention_policies=policies) for _ in range(3)]
    assert len(calls) == 1 and torch.equal(first[0], first[2])
    policies[0]["sequence_ids"].copy_(ids(0, 1))
    policies[1]["sequence_ids"].copy_(ids(2, 3))
    moved = inputs.attend(thd_attention_policies=policies)
    assert len(calls) == 2
    assert torch.equal(moved, build(inputs.case.replace(owner=(0, 0, 1, 1))).attend())
    policies[1]["window_size"] = (1, 0)
    inputs.attend(thd_attention_policies=policies)
    assert len(calls) == 3


def test_policies_of_another_batch() -> None:
    prepared = prepare_thd_policies([policy(0, 1, 2, 3)], CU)
    q = torch.zeros(12, 1, 4)
    with pytest.raises(ValueError, match="was prepared for 4 sequences, cu_seqlens_q has 2: prepare it again for this batch"):
        thd_attention(q, q, q, torch.tensor([0, 6, 12]), max_seqlen_q=6, thd_attention_policies=prepared)


# ------------------------------------------------------------------------------------------------------------- what belongs to a batch
def test_the_default_alignment_of_prepare_reaches_the_calls() -> None:
    case = PackedCase((4, 7), (9, 3), masks=(Mask("padding", (3, 2)),))
    inputs = build(case)
    both = policy(0, 1, window=(3, 2))
    offsets = (inputs.cu_seqlens_q, inputs.cu_seqlens_kv)
    for default in (False, True):
        prepared = prepare_thd_policies([both], *offsets, bottom_right_diagonal=default)
        want = inputs.attend(bottom_right_diagonal=default)
        assert torch.equal(inputs.attend(thd_attention_policies=prepared, attn_mask_type=None, window_size=None), want)
        refresh_thd_policies(prepared, [both], *offsets, bottom_right_diagonal=default)  # names none either
    with pytest.raises(ValueError, match="must hold the masks that were prepared"):
        refresh_thd_policies(prepared, [both], *offsets)
    # A policy's own word stands.
    named = prepare_thd_policies([{**both, "bottom_right_diagonal": True}], *offsets, bottom_right_diagonal=False)
    assert named.policies[0].bottom_right_diagonal is True


def test_policies_follow_a_batch_to_its_capacity() -> None:
    inputs = build(PackedCase((3, 5, 2), masks=(CAUSAL, FULL), owner=(0, 1, 0)), requires_grad=False)
    padded = pad_packed_batch((inputs.q, inputs.k, inputs.v), inputs.cu_seqlens_q, num_tokens=16, num_sequences=5)
    policies = inputs.prepared.pad_to(5, fill_policy=1)
    assert policies.policy_index.tolist() == [0, 1, 0, 1, 1]
    out = thd_attention(*padded.tensors, padded.cu_seqlens, max_seqlen_q=5, thd_attention_policies=policies)
    assert torch.allclose(out[:10], inputs.attend()) and not out[10:].any()
    assert inputs.prepared.pad_to(3).contiguous == inputs.prepared.contiguous
    with pytest.raises(ValueError, match="fill_policy=2 is out of range: there are 2 policies"):
        inputs.prepared.pad_to(5, fill_policy=2)
    with pytest.raises(ValueError, match="num_sequences=2 is below the 3 sequences"):
        inputs.prepared.pad_to(2)
    with pytest.raises(TypeError, match=r"num_sequences must be an int, got float 5\.0"):
        inputs.prepared.pad_to(5.0)
    with torch.inference_mode():
        assert not inputs.prepared.pad_to(5).policy_index.is_inference()
        assert not inputs.prepared.to("meta").policy_index.is_inference()


def test_an_index_that_may_change_has_no_runs() -> None:
    prepared = prepare_thd_policies(testing.policy_list((FULL, CAUSAL), (0, 0, 1, 1), "cpu"), CU)
    assert prepared.runs == ((0, 2), (2, 2))
    assert dataclasses.replace(prepared, mutable=True).runs is None
    assert dataclasses.replace(prepared, contiguous=False).runs is None


def test_a_list_in_use_stays_known_beside_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(PackedCase((4, 5), masks=(CAUSAL, FULL), owner=(0, 1)))
    mine, others = inputs.policies(), [inputs.policies() for _ in range(100)]
    seen: list[object] = []
    monkeypatch.setattr(attention, "prepare_thd_policies", lambda *args, **kw: (seen.append(args[0]), prepare_thd_policies(*args, **kw))[1])
    for other in others:
        inputs.attend(thd_attention_policies=mine)
        inputs.attend(thd_attention_policies=other)
    assert sum(policies is mine for policies in seen) == 1


def test_an_empty_policy_is_kept_on_request() -> None:
    policies = [policy(), policy(0, 1, 2, 3, mask_type="padding_causal")]
    assert prepare_thd_policies(policies, CU).num_policies == 1
    kept = prepare_thd_policies(policies, CU, keep_empty=True)
    assert kept.num_policies == 2 and kept.policy_index.tolist() == [1, 1, 1, 1] and kept.contiguous


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mutable": "no"}, TypeError, "mutable must be a bool, got str 'no'"),
        ({"equal_lengths": 1}, TypeError, "equal_lengths must be a bool, got int 1"),
        ({"keep_empty": None}, TypeError, "keep_empty must be a bool, got NoneType None"),
        ({"bottom_right_diagonal": "x"}, TypeError, "bottom_right_diagonal must be a bool, got str 'x'"),
        ({"total_q": 3}, ValueError, "cu_seqlens_q: the last entry is 16, beyond the 3 rows of q"),
        ({"max_seqlen_q": 2}, ValueError, "max_seqlen_q=2 is below the longest sequence, which has 4 tokens"),
        ({"max_seqlen_q": torch.tensor(4)}, TypeError, "max_seqlen_q must be an int"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prepare_thd_policies([policy(0, 1, 2, 3)], CU, **options)


def test_what_is_no_prepared_policies_is_named() -> None:
    with pytest.raises(TypeError, match="prepared must be what prepare_thd_policies returned, got NoneType"):
        refresh_thd_policies(None, [policy(0, 1, 2, 3)], CU)
    x = torch.randn(16, 2, 8)
    with pytest.raises(TypeError, match="thd_attention_policies must be a list of dicts, got Tensor"):
        thd_attention(x, x, x, CU, max_seqlen_q=4, thd_attention_policies=torch.tensor([0, 0, 0, 0]))


# -------------------------------------------------------------------------------------------------------------------- refreshing
def two_policies(owner: tuple[int, ...]) -> list[dict[str, object]]:
    return testing.policy_list((FULL, CAUSAL), owner, "cpu")


@pytest.mark.parametrize(
    ("cu", "bounds", "message"),
    [
        ((0, 1, 2, 9), {"max_seqlen_q": 4}, "max_seqlen_q=4 is below the longest sequence, which has 7 tokens"),
        ((0, 3, 5, 99), {"total_q": 9}, "the last entry is 99, beyond the 9 rows"),
    ],
)
def test_a_refresh_beyond_what_was_captured_is_refused(cu: tuple[int, ...], bounds: dict[str, int], message: str) -> None:
    owner, fresh = (0, 1, 0), torch.tensor(cu)
    prepared = prepare_thd_policies(two_policies(owner), torch.tensor([0, 3, 5, 9]), mutable=True, **bounds)
    before = prepared.policy_index.clone()
    for policies in (two_policies((1, 1, 0)), prepare_thd_policies(two_policies((1, 1, 0)), fresh)):
        with pytest.raises(ValueError, match=message):
            refresh_thd_policies(prepared, policies, fresh, **bounds)
    assert torch.equal(prepared.policy_index, before)


@pytest.mark.parametrize("keep_empty", [False, True])
def test_a_refresh_takes_the_list_that_was_prepared_with_an_empty_policy(keep_empty: bool) -> None:
    cu, policies = torch.tensor([0, 3, 5]), two_policies((1, 1))
    policies[0]["sequence_ids"] = torch.tensor([], dtype=torch.int64)
    prepared = prepare_thd_policies(policies, cu, keep_empty=keep_empty)
    refresh_thd_policies(prepared, policies, cu)
    assert prepared.policy_index.tolist() == ([1, 1] if keep_empty else [0, 0])
    other = two_policies((0, 1))
    if keep_empty:
        refresh_thd_policies(prepared, other, cu)
        assert prepared.policy_index.tolist() == [0, 1]
    else:
        with pytest.raises(ValueError, match="prepare all with keep_empty=True"):
            refresh_thd_policies(prepared, other, cu)


def test_a_refresh_takes_what_a_loader_prepared_and_padded() -> None:
    capacity = torch.tensor([0, 3, 5, 5, 5])
    captured = prepare_thd_policies(two_policies((0, 1, 0, 0)), capacity, mutable=True)
    batch = torch.tensor([0, 2, 6])
    ready = prepare_thd_policies(two_policies((1, 0)), batch, keep_empty=True).pad_to(4, fill_policy=1)
    padded = torch.tensor([0, 2, 6, 6, 6])
    refresh_thd_policies(captured, ready, padded)
    assert captured.policy_index.tolist() == [1, 0, 1, 1]
    with pytest.raises(ValueError, match="prepared for 4 sequences, got 2: see pad_packed_batch, and pad_to"):
        refresh_thd_policies(captured, prepare_thd_policies(two_policies((1, 0)), batch), batch)
    with pytest.raises(ValueError, match="prepared for 4 sequences, cu_seqlens_q has 2"):
        refresh_thd_policies(captured, ready, batch)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"dtype": "bf16"}, TypeError, "dtype must be a torch.dtype, got str 'bf16'"),
        ({"num_gqa_groups": 3}, ValueError, "num_heads must be a multiple of num_gqa_groups, got 4 and 3"),
        ({"head_dim_v": 0}, ValueError, "head_dim_v must be at least 1, got 0"),
        ({"num_heads": 4.0}, TypeError, "num_heads must be an int, got float 4.0"),
        ({"training": 1}, TypeError, "training must be a bool, got int 1"),
    ],
)
def test_a_spec_says_what_is_wrong(fields: dict[str, object], error: type[Exception], message: str) -> None:
    good: dict[str, object] = {
        "dtype": torch.bfloat16, "num_heads": 4, "num_gqa_groups": 2, "head_dim_qk": 16, "head_dim_v": 16, "training": True,
    }  # fmt: skip
    PlanSpec(**good)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        PlanSpec(**{**good, **fields})  # type: ignore[arg-type]


def test_attention_may_be_a_list_of_modules() -> None:
    layers = torch.nn.ModuleList(DotProductAttention(4, 16) for _ in range(3))
    assert prepare_thd_policies(two_policies((0, 1, 0, 1)), CU, attention=layers).plans == []  # no GPU, no plan
    with pytest.raises(TypeError, match="or a list of these; got Linear"):
        prepare_thd_policies(two_policies((0, 1, 0, 1)), CU, attention=torch.nn.Linear(2, 2))


def test_policies_have_no_floating_dtype() -> None:
    prepared = prepare_thd_policies(two_policies((0, 1, 0, 1)), CU)
    for wrong in (torch.float16, torch.zeros(2)):
        with pytest.raises(TypeError, match="policies have no floating dtype"):
            prepared.to(wrong)  # type: ignore[arg-type]


def test_a_refresh_says_which_policy_differs() -> None:
    prepared = prepare_thd_policies(two_policies((0, 1, 0, 1)), CU)
    other = two_policies((0, 1, 0, 1))
    other[1]["window_size"] = (2, 0)
    with pytest.raises(ValueError, match=r"policy 1 was AttentionPolicy\(.*None.*\), now it is AttentionPolicy\(.*\(2, 0\)"):
        refresh_thd_policies(prepared, other, CU)


# ---------------------------------------------------------------------------------------------------------------------- runs
@pytest.mark.parametrize(
    ("owner", "runs"),
    [((0, 0, 1, 1), ((0, 2), (2, 2))), ((1, 0, 0, 0), ((1, 3), (0, 1))), ((0, 1, 0, 1), None), ((0, 0, 0, 0), ((0, 4),))],
)
def test_runs_are_known_to_the_host(owner: tuple[int, ...], runs: object) -> None:
    prepared = prepare_thd_policies(two_policies(owner), CU)
    assert prepared.runs == runs
    assert prepared.to("cpu").runs == prepared.runs and prepared.pad_to(5).runs is None
    assert prepare_thd_policies(two_policies(owner), CU, mutable=True).runs is None
    if runs is not None and len(set(owner)) == 1:
        assert prepare_thd_policies(two_policies(owner), CU, keep_empty=True).runs is None, "a policy has no sequence"


def test_a_refresh_moves_the_runs_unless_a_graph_was_captured_with_them() -> None:
    prepared = prepare_thd_policies(two_policies((0, 0, 1, 1)), CU)
    refresh_thd_policies(prepared, two_policies((0, 1, 1, 1)), CU)
    assert prepared.runs == ((0, 1), (1, 3)) and prepared.policy_index.tolist() == [0, 1, 1, 1]
    note_capture(prepared)
    refresh_thd_policies(prepared, two_policies((0, 1, 1, 1)), torch.tensor([0, 1, 2, 3, 16], dtype=torch.int32))
    with pytest.raises(ValueError, match="in one run, which kernels and captured graphs rely on; the new partition has others"):
        refresh_thd_policies(prepared, two_policies((0, 0, 1, 1)), CU)
    assert prepared.runs == ((0, 1), (1, 3))


@pytest.mark.parametrize("refreshed", [False, True])
def test_kernels_that_use_runs_are_told_of_them(monkeypatch: pytest.MonkeyPatch, refreshed: bool) -> None:
    """In eager calls, forward and backward; a compiled graph, which other batches will use, holds none."""
    seen: list[object] = []
    copying = Stub("flash2", before_forward=lambda call: seen.append(call.run))
    copying.in_place = False
    install(monkeypatch, copying)
    owner, runs = ((0, 1, 1), [(0, 1), (1, 2)]) if refreshed else ((0, 0, 1), [(0, 2), (2, 1)])
    inputs = build(PackedCase((4, 5, 6), masks=(FULL, CAUSAL), owner=owner))
    start = prepare_thd_policies(two_policies((0, 0, 1)), inputs.cu_seqlens_q)
    if refreshed:
        inputs.attend(thd_attention_policies=start)
        seen.clear()
        refresh_thd_policies(start, two_policies(owner), inputs.cu_seqlens_q)
    testing.assert_matches(inputs.run(thd_attention_policies=start), testing.reference(inputs), inputs)
    assert seen == runs
    seen.clear()
    inputs.attend(torch.compile(thd_attention, fullgraph=True, backend="aot_eager"), thd_attention_policies=start)
    assert seen == [None, None]


def copies(prepared: PreparedPolicies) -> dict[str, PreparedPolicies]:
    file = io.BytesIO()
    torch.save(prepared, file)
    file.seek(0)
    return {
        "to": prepared.to("cpu"),
        "copy": copy.copy(prepared),
        "deepcopy": copy.deepcopy(prepared),
        "replace": dataclasses.replace(prepared),
        "saved": torch.load(file),
    }


@pytest.mark.parametrize("name", ["to", "copy", "deepcopy", "replace", "saved"])
def test_copies_never_rely_on_runs_that_are_no_more(name: str) -> None:
    """Runs belong to the index: who shares it follows a refresh, who does not keeps its own or knows none."""
    prepared = prepare_thd_policies(two_policies((0, 0, 1, 1)), CU)
    other = copies(prepared)[name]
    assert other.runs in (None, ((0, 2), (2, 2)))
    refresh_thd_policies(prepared, two_policies((0, 1, 1, 1)), CU)
    shared = other.policy_index is prepared.policy_index
    assert other.runs in ([prepared.runs] if shared else [None, ((0, 2), (2, 2))])
    note_capture(prepared)
    if shared:
        with pytest.raises(ValueError, match="captured graphs rely on"):
            refresh_thd_policies(other, two_policies((0, 0, 1, 1)), CU)
    else:
        refresh_thd_policies(other, two_policies((0, 0, 0, 1)), CU)


def test_a_refilled_index_is_checked_before_it_goes_where_none_is_refilled() -> None:
    fixed = prepare_thd_policies(two_policies((0, 0, 1, 1)), CU)
    refilled = prepare_thd_policies(two_policies((0, 0, 1, 1)), CU, mutable=True)
    refilled.policy_index.copy_(torch.tensor([0, 7, 1, 1]))
    with pytest.raises(ValueError, match=r"policy_index\[1\] is 7, out of range for 2 policies"):
        refresh_thd_policies(fixed, refilled, CU)
    assert fixed.policy_index.tolist() == [0, 0, 1, 1]


def test_gaps_make_no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours with a gap between them are entries, and are ranked and explained as such."""
    copying = Stub("flash2", before_forward=lambda call: seen.append((call.run, call.contiguous_run)))
    copying.in_place = False
    install(monkeypatch, copying)
    seen: list[object] = []
    masks = tuple(Mask("padding", (n, 1)) for n in range(6))
    inputs = build(PackedCase((3, 4, 5, 6, 7, 8), gaps_q=(1,) * 6, gaps_kv=(1,) * 6, masks=masks, owner=tuple(range(6))))
    inputs.attend(thd_attention_policy_dispatch="padded")
    assert set(seen) == {(None, False)}
    found = explain(inputs.q, inputs.k, inputs.v, **inputs.arguments())
    assert found.winner is not None and found.winner["dispatch"] == "grouped" and not found.params.contiguous
