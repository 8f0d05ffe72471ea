"""Wrong answers that attention libraries once gave, with the right ones worked out by hand: Q = 0 and V[j] = j + 1, so that a
row's output is the mean of j + 1 over the keys it sees."""

from __future__ import annotations

import math

import pytest
import torch

from te_attn_ops import testing, thd_attention
from te_attn_ops.testing import BOTTOM_RIGHT, CAUSAL, EXAMPLES, FULL, PackedCase, build

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, dtype: torch.dtype) -> None:
    case, rows = EXAMPLES[name]
    inputs = testing.closed_form_inputs(case.replace(dtype=dtype))
    out, lse = inputs.attend(return_lse=True)
    # Every number here is a small multiple of 1/2: exact in float16 and bfloat16 too.
    assert out.detach().double().amax((1, 2)).tolist() == pytest.approx(rows, abs=1e-6)
    assert out.detach().double().amin((1, 2)).tolist() == pytest.approx(rows, abs=1e-6)
    torch.testing.assert_close(lse.double(), testing.closed_form(case)[1].expand(lse.shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, (case, _) in EXAMPLES.items() if case.owner is not None])
@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_example_in_each_dispatch(name: str, dispatch: str, index_dtype: torch.dtype) -> None:
    case = EXAMPLES[name][0].replace(index_dtype=index_dtype)
    testing.assert_closed_form(case, thd_attention_policy_dispatch=dispatch)


def test_mla_widths_in_packed_training_are_never_an_error() -> None:
    case = PackedCase((2208, 2112), num_heads=1, head_dim_qk=192, head_dim_v=128, dtype=torch.bfloat16)
    inputs = build(case)
    result = inputs.run()
    assert result.out.shape == (4320, 1, 128) and result.dv.shape == (4320, 1, 128) and result.dq.shape == (4320, 1, 192)
    testing.assert_matches(result, testing.reference(inputs, softmax_scale=1 / math.sqrt(192)), inputs)


@pytest.mark.parametrize("pad_head_dim", [None, False, True])
@pytest.mark.parametrize(("head_dim_qk", "head_dim_v"), [(192, 128), (128, 192), (24, 20), (20, 20)])
def test_padding_changes_no_result_and_no_shape(head_dim_qk: int, head_dim_v: int, pad_head_dim: bool | None) -> None:
    inputs = build(PackedCase((7, 12), head_dim_qk=head_dim_qk, head_dim_v=head_dim_v))
    result = inputs.run(pad_head_dim=pad_head_dim, return_max_logit=True)
    assert result.out.shape == (19, 2, head_dim_v) and result.max_logit.shape == (2,)
    assert result.out.is_contiguous() and result.dq.shape == inputs.q.shape and result.dk.shape == inputs.k.shape
    testing.assert_matches(result, testing.reference(inputs, softmax_scale=head_dim_qk**-0.5), inputs)


@pytest.mark.parametrize("head_dim", [16, 256])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, BOTTOM_RIGHT], ids=lambda mask: mask.attn_mask_type)
def test_equal_valued_offsets_in_separate_tensors(head_dim: int, mask: testing.Mask) -> None:
    """A blanket pad_between_seqs: padded offsets that are a copy of the plain ones change no number."""
    inputs = build(PackedCase((64, 64), head_dim_qk=head_dim, masks=(mask,)))
    cu = inputs.cu_seqlens_q
    plain = inputs.attend()
    for padded_q, padded_kv in ((cu, cu), (cu.clone(), None), (cu.clone(), cu.clone())):
        out = inputs.attend(cu_seqlens_q_padded=padded_q, cu_seqlens_kv_padded=padded_kv)
        torch.testing.assert_close(out, plain, rtol=0, atol=1e-6)
    separate = inputs.attend(cu_seqlens_kv=cu.clone(), cu_seqlens_q_padded=cu.clone(), cu_seqlens_kv_padded=cu.clone())
    torch.testing.assert_close(separate, plain, rtol=0, atol=1e-6)


def test_scale_is_of_the_width_given_and_can_be_set() -> None:
    inputs = build(PackedCase((9, 5), head_dim_qk=24, head_dim_v=8))
    default = inputs.attend(pad_head_dim=True)
    torch.testing.assert_close(default, inputs.attend(softmax_scale=24**-0.5))
    testing.assert_matches_reference(inputs, softmax_scale=0.5)
    assert not torch.allclose(default, inputs.attend(softmax_scale=0.5))


@pytest.mark.parametrize("bound", [12, 13, 100, 5000])
def test_a_larger_max_seqlen_changes_nothing(bound: int) -> None:
    inputs = build(PackedCase((12, 3), (7, 12), masks=(BOTTOM_RIGHT,)))
    expected = inputs.run()
    for got, want in zip(inputs.run(max_seqlen_q=bound, max_seqlen_kv=bound), expected):
        assert got is want is None or torch.equal(got, want)


def test_missing_max_seqlen_is_derived_in_eager() -> None:
    inputs = build(PackedCase((12, 3), (7, 20), masks=(BOTTOM_RIGHT,)))
    assert torch.equal(inputs.attend(max_seqlen_q=None, max_seqlen_kv=None), inputs.attend())


def test_self_attention_is_cu_seqlens_kv_none_or_the_same_tensor() -> None:
    inputs = build(PackedCase((12, 3)))
    cu = inputs.cu_seqlens_q
    for cu_seqlens_kv in (cu, cu.clone()):
        assert torch.equal(inputs.attend(cu_seqlens_kv=cu_seqlens_kv), inputs.attend())
    assert torch.equal(thd_attention(inputs.q, inputs.k, inputs.v, cu), inputs.attend())
