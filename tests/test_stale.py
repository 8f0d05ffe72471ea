"""Offsets that change without a trace, and what is noticed of a batch that no longer fits its policies."""

from __future__ import annotations

import pytest
import torch

from te_attn_ops import NoBackendError, prepare_thd_policies, refresh_thd_policies, testing, thd_attention

LENGTHS = ([3, 5, 8], [6, 2, 8])


def _offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("training", [False, True])
def test_offsets_refilled_without_a_version_bump(training: bool) -> None:
    """As a broadcast into a reused buffer does."""
    q, k, v = (torch.randn(16, 2, 8, requires_grad=training) for _ in range(3))
    buffer = _offsets(LENGTHS[0])
    thd_attention(q, k, v, buffer, max_seqlen_q=8)
    version = buffer._version
    buffer.data.copy_(_offsets(LENGTHS[1]))
    assert buffer._version == version
    expected = thd_attention(q, k, v, _offsets(LENGTHS[1]), max_seqlen_q=8)
    torch.testing.assert_close(thd_attention(q, k, v, buffer, max_seqlen_q=8), expected)


def test_offsets_refilled_between_forward_and_backward() -> None:
    """Pipelines refill one buffer for the next micro-batch before the backward of the last."""
    q, k, v = (torch.randn(16, 2, 8, requires_grad=True) for _ in range(3))
    buffer = _offsets(LENGTHS[0])
    out = thd_attention(q, k, v, buffer, max_seqlen_q=8)
    buffer.copy_(_offsets(LENGTHS[1]))
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    out = thd_attention(q, k, v, _offsets(LENGTHS[0]), max_seqlen_q=8)
    for got, want in zip(grads, torch.autograd.grad(out.square().sum(), (q, k, v))):
        torch.testing.assert_close(got, want)


def test_refresh_keeps_the_promise_of_equal_lengths() -> None:
    cu = _offsets(LENGTHS[0])
    policies = [{"sequence_ids": torch.arange(3), "mask_type": "padding_causal", "window_size": None}]
    prepared = prepare_thd_policies(policies, cu, cu.clone(), equal_lengths=True)
    with pytest.raises(ValueError, match="equal_lengths=True, but sequence 0 has 3 query and 6 key tokens"):
        refresh_thd_policies(prepared, policies, cu, _offsets(LENGTHS[1]))


def test_self_attention_needs_as_many_keys() -> None:
    q, k = torch.randn(16, 2, 8), torch.randn(12, 2, 8)
    with pytest.raises(ValueError, match="q has 16 tokens and k 12"):
        thd_attention(q, k, k, _offsets(LENGTHS[0]), max_seqlen_q=8)


@pytest.mark.parametrize(
    ("scale", "error"),
    [(torch.tensor(0.2), TypeError), ("x", TypeError), (0.0, ValueError), (-1.0, ValueError), (float("nan"), ValueError)],
)
def test_softmax_scale(scale: object, error: type[Exception]) -> None:
    q = torch.randn(16, 2, 8)
    with pytest.raises(error, match="softmax_scale must be"):
        thd_attention(q, q, q, _offsets(LENGTHS[0]), max_seqlen_q=8, softmax_scale=scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("flags", [{"pad_head_dim": 64}, {"sanitize_padding": "no"}, {"deterministic": "no"}], ids=str)
def test_flags_are_bools(flags: dict[str, object]) -> None:
    q = torch.randn(16, 2, 8)
    with pytest.raises(TypeError, match=f"{next(iter(flags))} must be a bool"):
        thd_attention(q, q, q, _offsets(LENGTHS[0]), max_seqlen_q=8, **flags)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [([10, 25, 5], "must start with 0, got 10. Lengths"), ([0, 9, 5], "must not descend"), ([0, 9, 40], "beyond the 16 rows")],
)
def test_contents_are_checked_on_the_cpu(offsets: list[int], message: str) -> None:
    q = torch.randn(16, 2, 8)
    cu_seqlens = torch.tensor(offsets)
    for _ in range(2):  # what was refused once is not taken for checked
        with pytest.raises(ValueError, match=message):
            thd_attention(q, q, q, cu_seqlens, max_seqlen_q=40)


def test_a_max_seqlen_below_the_truth_is_noticed_on_the_cpu() -> None:
    q = torch.randn(16, 2, 8)
    with pytest.raises(ValueError, match="max_seqlen_q=5 is below the longest sequence, which has 8 tokens"):
        thd_attention(q, q, q, _offsets(LENGTHS[0]), max_seqlen_q=5)


def test_policies_move_between_devices() -> None:
    policies = [{"sequence_ids": torch.arange(3), "mask_type": "padding", "window_size": None}]
    prepared = prepare_thd_policies(policies, _offsets(LENGTHS[0]))
    moved = prepared.to("meta")
    assert moved.policy_index.device.type == "meta" and moved.policies == prepared.policies
    assert prepared.to("cpu").policy_index is prepared.policy_index


def test_an_oversized_window_is_full() -> None:
    case = testing.PackedCase((10, 4), (6, 9), masks=(testing.Mask("padding_causal_bottom_right", (2**31 - 1, 0)),), name="wide")
    inputs = testing.build(case, "cpu")
    testing.assert_matches(inputs.run(), testing.reference(inputs), inputs)
    with pytest.raises(NoBackendError):
        inputs.run(backend="flash4")
