"""The contract for every row: what stands in gaps, tails, rows that see no key and keys that no row sees, whatever was in
memory before and whatever the caller left there."""

from __future__ import annotations

import math

import pytest
import torch

from te_attn_ops import testing
from te_attn_ops.backends.base import BackwardCall
from te_attn_ops.testing import BOTTOM_RIGHT, CAUSAL, EXAMPLES, FULL, Mask, PackedCase, build
from tests.stubs import Stub, fresh_choices, install  # noqa: F401


def _garbage_in_gap_and_tail(value: float) -> list[torch.Tensor]:
    case = PackedCase((200, 150, 47), tail=640 - 397)
    inputs = build(case).poison(value)
    result = inputs.run(sanitize_padding=True)
    testing.assert_outside_is_zero(case, out=result.out, lse=result.lse, grads=(result.dq, result.dk, result.dv))
    return [result.out, result.lse[:, :397], result.dq, result.dk, result.dv]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_uninitialised_tail_changes_nothing(value: float) -> None:
    for clean, poisoned in zip(_garbage_in_gap_and_tail(0.0), _garbage_in_gap_and_tail(value)):
        assert torch.equal(clean, poisoned)


@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
def test_nan_under_one_policy_reaches_no_other_sequence(dispatch: str) -> None:
    case = PackedCase((4, 4, 4, 4), masks=(FULL, CAUSAL), owner=(0, 1, 0, 1))
    clean = build(case).run(thd_attention_policy_dispatch=dispatch)
    inputs = build(case)
    with torch.no_grad():
        inputs.v[4:8] = math.nan
    poisoned = inputs.run(thd_attention_policy_dispatch=dispatch)
    others = torch.tensor([n for n in range(16) if not 4 <= n < 8])
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(clean, name)[others], getattr(poisoned, name)[others]), name
    assert poisoned.out[4:8].isnan().all()


def test_no_keys_gives_zero_gradients_and_no_nan() -> None:
    inputs = build(PackedCase((3, 2), (0, 4), masks=(FULL,)))
    result = inputs.run()
    assert (result.lse[:, :3] == -math.inf).all() and not result.dq[:3].any()
    assert all(grad.isfinite().all() for grad in (result.dq, result.dk, result.dv))


@pytest.mark.parametrize("mask", [CAUSAL, BOTTOM_RIGHT], ids=lambda mask: mask.attn_mask_type)
def test_keys_that_no_row_sees_have_zero_gradients(mask: testing.Mask) -> None:
    # Top-left with L_q < L_k: trailing keys are never seen. Bottom-right with a window: leading ones are not.
    window = (1, 0)
    inputs = build(PackedCase((3,), (8,), masks=(mask._replace(window_size=window),)))
    result = inputs.run()
    seen = testing.visible(inputs.case.masks[0], 3, 8).any(0)
    assert 0 < seen.sum() < 8
    assert not result.dk[~seen].any() and not result.dv[~seen].any() and result.dv[seen].any()


def test_max_logit_leaves_out_rows_and_keys_of_no_sequence() -> None:
    inputs = build(PackedCase((3, 2), gaps_q=(2, 0), tail=3, masks=(FULL,))).poison(100.0)
    _, max_logit = inputs.attend(return_max_logit=True)
    torch.testing.assert_close(max_logit.double(), testing.reference(inputs).max_logit, rtol=1e-5, atol=1e-5)
    nothing = build(PackedCase((0, 0), tail=3)).attend(return_max_logit=True)[1]
    assert (nothing == -math.inf).all()


def test_row_contract_holds_over_memory_that_holds_nan() -> None:
    """Rows that no kernel writes: the gap at 3, the gap and the tail at 9 to 15."""
    case = EXAMPLES["gap_and_tail"][0]
    inputs = testing.closed_form_inputs(case)
    with testing.poisoned_memory():
        result = inputs.run()
    testing.assert_outside_is_zero(case, out=result.out, lse=result.lse, grads=(result.dq, result.dk, result.dv))
    assert case.outside("q").nonzero().flatten().tolist() == [3, *range(9, 16)]
    assert result.out[:, 0, 0].tolist() == pytest.approx(list(EXAMPLES["gap_and_tail"][1]))


@pytest.mark.parametrize("name", ["no_keys_full", "equal_maxima_bottom_right", "gaps_policies", "decode_with_empty_causal"])
@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
def test_every_element_is_defined_over_memory_that_holds_nan(name: str, dispatch: str) -> None:
    case = EXAMPLES[name][0]
    if case.owner is None:
        case = case.replace(owner=(0,) * len(case.lengths_q))
    inputs = build(case)
    with testing.poisoned_memory():
        actual = inputs.run(thd_attention_policy_dispatch=dispatch, return_max_logit=True)
    testing.assert_matches(actual, testing.reference(inputs), inputs)


@pytest.mark.parametrize(
    ("lengths", "tail"),
    [((), 0), ((), 5), ((0, 0, 0), 0), ((0,), 4)],
    ids=["nothing", "rows_only", "no_tokens", "empty_and_tail"],
)
@pytest.mark.parametrize("policies", [False, True])
def test_empty_batch_has_connected_zero_gradients(lengths: tuple[int, ...], tail: int, policies: bool) -> None:
    owner = (0,) * len(lengths) if policies and lengths else None
    inputs = build(PackedCase(lengths, tail=tail, owner=owner, head_dim_v=8))
    out, lse, max_logit = inputs.attend(return_lse=True, return_max_logit=True)
    assert out.shape == (tail, 2, 8) and not out.any() and out.requires_grad
    assert lse.shape == (2, tail) and (lse == -math.inf).all() and max_logit.tolist() == [-math.inf] * 2
    for grad, tensor in zip(torch.autograd.grad(out.sum(), (inputs.q, inputs.k, inputs.v)), (inputs.q, inputs.k, inputs.v)):
        assert grad.shape == tensor.shape and not grad.any()


@pytest.mark.parametrize("value", [math.nan, -math.inf, 3e38])
@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_garbage_in_gaps_needs_no_sanitizing_on_unfused(layout: str, value: float) -> None:
    case = PackedCase((5, 8, 0, 3), gaps_q=(2, 0, 4, 1), tail=3, layout=layout, masks=(FULL, CAUSAL), owner=(0, 1, 0, 1))
    clean, dirty = build(case).run(), build(case).poison(value).run()
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(clean, name), getattr(dirty, name)), name


@pytest.mark.parametrize("sides", ["q", "kv", "both"])
def test_sanitize_padding_with_gaps_on_either_side(sides: str) -> None:
    gaps = {"q": ((2, 1), (0, 0)), "kv": ((0, 0), (1, 3)), "both": ((2, 1), (1, 3))}[sides]
    case = PackedCase((5, 8), (6, 4), gaps_q=gaps[0], gaps_kv=gaps[1], tail=2, masks=(BOTTOM_RIGHT,))
    clean, dirty = build(case).run(), build(case).poison().run(sanitize_padding=True)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(clean, name), getattr(dirty, name)), name


def test_no_kernel_sees_what_was_sanitized(monkeypatch: pytest.MonkeyPatch) -> None:
    """unfused would leave a NaN out by itself; a kernel that loads whole tiles would not."""

    class Looking(Stub):
        def backward(self, call: BackwardCall) -> None:
            seen.extend((call.q, call.k, call.v, call.grad_out))
            super().backward(call)

    seen: list[torch.Tensor] = []
    install(monkeypatch, Looking("unfused", before_forward=lambda call: seen.extend((call.q, call.k, call.v))))
    case = PackedCase((5, 8), (6, 4), gaps_q=(2, 1), gaps_kv=(1, 3), tail=2, masks=(BOTTOM_RIGHT,))
    build(case).poison().run(sanitize_padding=True)
    assert len(seen) == 7
    for tensor in seen:
        outside = case.outside("q" if tensor.shape[0] == case.total("q") else "kv")
        assert not tensor[outside].any()


def test_grouped_brings_no_row_of_a_gap_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    install(monkeypatch, Stub("unfused", before_forward=lambda call: seen.extend((call.q, call.k, call.v))))
    case = PackedCase((5, 8, 3), gaps_q=(2, 0, 4), tail=3, masks=(FULL, CAUSAL), owner=(1, 0, 1))
    build(case).poison().attend(thd_attention_policy_dispatch="grouped")
    assert len(seen) == 6 and all(tensor.isfinite().all() for tensor in seen)


def test_sanitize_padding_of_a_batch_without_sequences() -> None:
    inputs = build(PackedCase((), tail=4)).poison()
    result = inputs.run(sanitize_padding=True)
    assert not result.out.any() and not any(grad.any() for grad in (result.dq, result.dk, result.dv))


@pytest.mark.parametrize("which", ["q", "k", "v", "grad_out"])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, Mask("padding", (2, 1))], ids=str)
def test_nan_inside_a_sequence_stays_there(which: str, mask: Mask) -> None:
    case = PackedCase((6, 5, 7), masks=(mask,))
    clean, inputs = build(case).run(), build(case)
    with torch.no_grad():
        getattr(inputs, which)[8] = math.nan
    dirty = inputs.run()
    others = [n for n in range(18) if not 6 <= n < 11]
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(clean, name)[others], getattr(dirty, name)[others]), name
    assert dirty.dv[6:11].isnan().any() or which == "v"


def test_grad_out_at_rows_that_see_no_key_reaches_nothing() -> None:
    inputs = build(PackedCase((5, 2), (2, 4), masks=(BOTTOM_RIGHT,)))
    keyless = testing.reference(inputs).lse[0] == -math.inf
    assert keyless.tolist() == [True] * 3 + [False] * 4
    clean = inputs.run()
    with torch.no_grad():
        inputs.grad_out[keyless] = 1e30
    dirty = inputs.run()
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(clean, name), getattr(dirty, name)), name
