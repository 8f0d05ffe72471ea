"""DotProductAttention: layouts, packed projections, masks, and what the constructor and the call say to each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from te_attn_ops import thd_attention
from te_attn_ops.modules import DotProductAttention
from te_attn_ops.modules.layouts import batch_joins_heads, pack_dense, unpack_projection
from te_attn_ops.testing import BOTTOM_RIGHT, CAUSAL, CONFIGURATIONS, FULL, Mask, PackedCase, build, reference, visible

BATCH, LEN_Q, LEN_KV = 3, 6, 9


def module_for(case: PackedCase, **options: Any) -> DotProductAttention:
    widths = (case.head_dim_qk, case.width_v)
    return DotProductAttention(
        case.num_heads, widths if widths[0] != widths[1] else widths[0], case.num_gqa_groups, qkv_format="thd", **options
    )


# What the module adds to the function: one of each kind of mask, grouping, width pair and geometry.
_NAMES = ("layout_1_2", "layout_5_2", "swa_1_2", "mla_1_2", "gaps_and_tail", "gaps_cross", "zero_length", "gqa_mla")


@pytest.mark.parametrize("case", [case for case in CONFIGURATIONS if str(case) in _NAMES], ids=str)
def test_thd_equals_the_reference(case: PackedCase) -> None:
    inputs = build(case.replace(dtype=torch.float64))
    module = module_for(case)
    assert not module.state_dict()
    out = module(inputs.q, inputs.k, inputs.v, **inputs.arguments())
    truth = reference(inputs)
    assert out.shape == (case.total("q"), case.num_heads * case.width_v)
    torch.testing.assert_close(out.unflatten(1, (case.num_heads, -1)), truth.out)
    grads = torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.grad_out.flatten(1))
    for got, want in zip(grads, (truth.dq, truth.dk, truth.dv)):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("case", [case for case in CONFIGURATIONS if "policies" in str(case)], ids=str)
@pytest.mark.parametrize("dispatch", ["auto", "padded", "grouped"])
def test_policies_equal_the_reference(case: PackedCase, dispatch: str) -> None:
    inputs = build(case.replace(dtype=torch.float64))
    out = module_for(case)(inputs.q, inputs.k, inputs.v, **inputs.arguments(thd_attention_policy_dispatch=dispatch))
    torch.testing.assert_close(out.unflatten(1, (case.num_heads, -1)), reference(inputs).out)


# --------------------------------------------------------------------------------------------------------------- sbhd and bshd
def dense_inputs(layout: str, len_kv: int = LEN_KV, heads: int = 4, groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def new(length: int, count: int, width: int) -> Tensor:
        dense = torch.randn(BATCH, length, count, width, generator=generator, dtype=torch.float64)
        return (dense.transpose(0, 1).contiguous() if layout == "sbhd" else dense).requires_grad_()

    return new(LEN_Q, heads, 8), new(len_kv, groups, 8), new(len_kv, groups, 5)


def dense_truth(q: Tensor, k: Tensor, v: Tensor, layout: str, masks: list[Tensor]) -> tuple[Tensor, Tensor]:
    """out in the layout, and max_logit, with one bool [s_q, s_kv] mask per sample."""
    if layout == "sbhd":
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    seen = torch.stack(masks)[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.where(seen, torch.softmax(scores.masked_fill(~seen.any(-1, keepdim=True), 0), -1), 0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
    return out.transpose(0, 1) if layout == "sbhd" else out, scores.amax((0, 2, 3))


DENSE_MASKS = {
    "no_mask": ({"attn_mask_type": "no_mask"}, FULL),
    "causal": ({"attn_mask_type": "causal"}, CAUSAL),
    "causal_bottom_right": ({"attn_mask_type": "causal_bottom_right"}, BOTTOM_RIGHT),
    "window": ({"attn_mask_type": "no_mask", "window_size": (2, 1)}, Mask("padding", (2, 1))),
    "window_top_left": (
        {"attn_mask_type": "no_mask", "window_size": (2, 1), "bottom_right_diagonal": False},
        Mask("padding", (2, 1), False),
    ),
    "causal_window": ({"attn_mask_type": "causal", "window_size": (2, 0)}, Mask("padding_causal", (2, 0))),
}


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("name", DENSE_MASKS)
@pytest.mark.parametrize("len_kv", [LEN_Q, LEN_KV], ids=["self", "cross"])
def test_dense_equals_a_dense_reference(layout: str, name: str, len_kv: int) -> None:
    arguments, mask = DENSE_MASKS[name]
    q, k, v = dense_inputs(layout, len_kv)
    module = DotProductAttention(4, (8, 5), 2, qkv_format=layout, return_max_logit=True)
    out, max_logit = module(q, k, v, **arguments)
    want, want_max = dense_truth(q, k, v, layout, [visible(mask, LEN_Q, len_kv)] * BATCH)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(max_logit.double(), want_max, rtol=1e-6, atol=1e-6)
    grad = torch.randn_like(out)
    for got, expected in zip(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad)):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, BOTTOM_RIGHT], ids=lambda mask: mask.attn_mask_type)
def test_dense_padding_equals_a_dense_reference(layout: str, mask: Mask) -> None:
    """cu_seqlens hold the samples' lengths; queries beyond them come out as 0."""
    q, k, v = dense_inputs(layout)
    lens_q, lens_kv = (6, 2, 0), (4, 9, 7)
    cu_q, cu_kv = (torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32) for lens in (lens_q, lens_kv))
    masks = []
    for len_q, len_kv in zip(lens_q, lens_kv):
        full = torch.zeros(LEN_Q, LEN_KV, dtype=torch.bool)
        full[:len_q, :len_kv] = visible(mask, len_q, len_kv)
        masks.append(full)
    module = DotProductAttention(4, (8, 5), 2, qkv_format=layout, attn_mask_type=mask.attn_mask_type)
    out = module(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    want, _ = dense_truth(q, k, v, layout, masks)
    torch.testing.assert_close(out, want)
    assert out.is_contiguous()
    grad = torch.randn_like(out)
    for got, expected in zip(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad)):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("layout", "padding"), [("bshd", False), ("bshd", True), ("sbhd", False)])
def test_dense_rows_stay_in_place(layout: str, padding: bool) -> None:
    q, k, v = dense_inputs(layout)
    cu = torch.tensor([0, 1, 2, 3])
    packed = pack_dense(q, k, v, layout, padding, batch_joins_heads(layout, padding, 3), cu, cu.clone(), None, None)
    for before, after in zip((q, k, v), packed[:3]):
        assert after.data_ptr() == before.data_ptr()


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("mask", ["causal", "no_mask", "padding_causal"])
@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0), (0, 0)])
def test_dense_without_tokens_is_empty_and_connected(layout: str, mask: str, batch: int, length: int) -> None:
    shape = (length, batch, 4, 8) if layout == "sbhd" else (batch, length, 4, 8)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in "qkv")
    lengths = {"cu_seqlens_q": torch.arange(batch + 1) * length} if mask == "padding_causal" else {}
    out = DotProductAttention(4, 8, qkv_format=layout, attn_mask_type=mask)(q, k, v, **lengths)
    assert out.shape == (*shape[:2], 32)
    for grad, x in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v)):
        assert torch.equal(grad, torch.zeros_like(x))


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_dense_ignores_cu_seqlens_without_padding(layout: str) -> None:
    q, k, v = dense_inputs(layout)
    module = DotProductAttention(4, (8, 5), 2, qkv_format=layout, attn_mask_type="no_mask")
    assert torch.equal(module(q, k, v, cu_seqlens_q=torch.tensor([0, 1, 2, 3])), module(q, k, v))


# --------------------------------------------------------------------------------------------------------- packed projections
@pytest.mark.parametrize("layout", ["thd", "sbhd", "bshd"])
@pytest.mark.parametrize("dim", [-3, -2])
@pytest.mark.parametrize("what", ["qkv_layer", "kv_layer"])
def test_packed_projection_equals_separate_tensors(layout: str, dim: int, what: str) -> None:
    count = 3 if what == "qkv_layer" else 2
    rows = (12,) if layout == "thd" else (4, 3)
    generator = torch.Generator().manual_seed(0)
    shape = (count, 2, 8) if dim == -3 else (2, count, 8)
    packed = torch.randn(*rows, *shape, generator=generator, requires_grad=True)
    query = torch.randn(*rows, 2, 8, generator=generator, requires_grad=True)
    module = DotProductAttention(2, 8, qkv_format=layout, attn_mask_type="padding" if layout == "thd" else "causal")
    call = {"cu_seqlens_q": torch.tensor([0, 5, 12]), "max_seqlen_q": 7} if layout == "thd" else {}
    parts = packed.unbind(dim)
    q, k, v = parts if count == 3 else (query, *parts)
    own = {what: packed, "qkv_interleave_dim": dim} if count == 3 else {"query_layer": q, what: packed, "qkv_interleave_dim": dim}
    out, want = module(**own, **call), module(q, k, v, **call)
    assert torch.equal(out, want)
    grad = torch.randn_like(out)
    assert torch.equal(torch.autograd.grad(out, packed, grad)[0], torch.autograd.grad(want, packed, grad)[0])
    views = unpack_projection(own.get("query_layer"), None, None, own.get("qkv_layer"), own.get("kv_layer"), dim, layout)
    assert {view.untyped_storage().data_ptr() for view in views[-2:]} == {packed.untyped_storage().data_ptr()}


_X, _QKV, _KV = torch.zeros(4, 2, 8), torch.zeros(4, 3, 2, 8), torch.zeros(4, 2, 2, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({}, "query_layer, key_layer and value_layer are needed"),
        ({"query_layer": _X, "key_layer": _X}, "got query_layer, key_layer"),
        ({"qkv_layer": _QKV, "query_layer": _X}, "qkv_layer holds queries, keys and values .* got also query_layer"),
        ({"qkv_layer": _QKV, "kv_layer": _KV}, "got also kv_layer"),
        ({"kv_layer": _KV}, "kv_layer holds keys and values and needs query_layer"),
        ({"kv_layer": _KV, "query_layer": _X, "key_layer": _X}, "got query_layer, key_layer"),
        ({"qkv_layer": _QKV, "qkv_interleave_dim": -2}, r"with 3 at dimension -2 .* got shape \(4, 3, 2, 8\)"),
        ({"qkv_layer": _QKV, "qkv_interleave_dim": 1}, "qkv_interleave_dim must be -3 .* got 1"),
        ({"qkv_layer": torch.zeros(4, 3, 2, 16)[..., ::2]}, "stride 1"),
        ({"query_layer": _X, "key_layer": _X[:, :1], "value_layer": _X}, r"key_layer must end in .* \[2, 8\]"),
        ({"query_layer": _X[0], "key_layer": _X, "value_layer": _X}, "query_layer must have 3 dimensions in thd"),
        ({"query_layer": _X, "key_layer": _X, "value_layer": _X[..., :4]}, r"value_layer must end in .* \[2, 8\]"),
    ],
)
def test_wrong_inputs_are_named(call: dict[str, Any], message: str) -> None:
    module = DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding")
    with pytest.raises(ValueError, match=message):
        module(cu_seqlens_q=torch.tensor([0, 4]), max_seqlen_q=4, **call)


# ------------------------------------------------------------------------------------------------- what constructor and call say
def _thd(**options: Any) -> tuple[DotProductAttention, Any, dict[str, Any]]:
    case = PackedCase((4, 7), num_heads=2, head_dim_qk=8, dtype=torch.float64, gaps_q=options.pop("gaps_q", None))
    inputs = build(case)
    return module_for(case, **options), inputs, {**inputs.geometry(), "max_seqlen_q": 7, "max_seqlen_kv": 7}


def test_the_call_overrides_the_constructor() -> None:
    module, inputs, call = _thd(attn_mask_type="padding", window_size=(1, 0))
    window = Mask("padding", (1, 0))
    for changes, mask in (
        ({}, window),
        ({"window_size": (-1, -1)}, FULL),
        ({"attn_mask_type": "padding_causal"}, Mask("padding_causal", (1, 0))),
        ({"attn_mask_type": "padding,causal", "window_size": (-1, 0)}, CAUSAL),
    ):
        got = module(inputs.q, inputs.k, inputs.v, **call, **changes)
        want = thd_attention(inputs.q, inputs.k, inputs.v, **call, **mask._asdict())
        assert torch.equal(got, want.flatten(1)), changes


@pytest.mark.parametrize("policies", [False, True])
def test_alignment_falls_back_to_the_module(policies: bool) -> None:
    """A window (1, 1) over more keys than queries, its alignment named by the constructor, the call, or nobody."""
    mask = Mask("padding", (1, 1))
    inputs = build(PackedCase((3, 4), (6, 9), dtype=torch.float64, masks=(mask,), owner=(0, 0) if policies else None))
    for constructor, call, aligned in ((None, None, True), (False, None, False), (False, True, True), (True, False, False)):
        module = module_for(inputs.case, bottom_right_diagonal=constructor)
        got = module(inputs.q, inputs.k, inputs.v, **inputs.arguments(bottom_right_diagonal=call))
        truth = reference(build(inputs.case.replace(masks=(mask._replace(bottom_right_diagonal=aligned),))))
        torch.testing.assert_close(got, truth.out.flatten(1))


def test_module_wide_overrides_reach_the_call_and_yield_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import te_attn_ops.modules.dot_product_attention as source

    seen: dict[str, Any] = {}

    def record(*args: Any, **kwargs: Any) -> Tensor:
        seen.update(kwargs)
        return args[0]

    monkeypatch.setattr(source, "thd_attention", record)
    names = ("backend", "pad_head_dim", "sanitize_padding", "selection")
    module, inputs, call = _thd(backend="unfused", pad_head_dim=False, sanitize_padding=True, selection="static")
    module(inputs.q, inputs.k, inputs.v, **call)
    assert [seen[name] for name in names] == ["unfused", False, True, "static"]
    module(inputs.q, inputs.k, inputs.v, **call, backend="flash4", pad_head_dim=True, sanitize_padding=False, selection="measured")
    assert [seen[name] for name in names] == ["flash4", True, False, "measured"]


def test_softmax_scale() -> None:
    module, inputs, call = _thd(attn_mask_type="padding", softmax_scale=0.5)
    got = module(inputs.q, inputs.k, inputs.v, **call)
    # The case's own mask is the causal one.
    want = reference(build(inputs.case.replace(masks=(FULL,))), 0.5).out.flatten(1)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        _thd(attn_mask_type="padding")[0](inputs.q, inputs.k, inputs.v, **call),
        reference(build(inputs.case.replace(masks=(FULL,))), 8**-0.5).out.flatten(1),
    )


def test_missing_max_seqlen_is_derived() -> None:
    module, inputs, call = _thd(attn_mask_type="padding")
    want = module(inputs.q, inputs.k, inputs.v, **call)
    del call["max_seqlen_q"], call["max_seqlen_kv"]
    assert torch.equal(module(inputs.q, inputs.k, inputs.v, **call), want)


@pytest.mark.parametrize("pad_between_seqs", [None, True])
def test_gaps_are_taken_from_the_padded_tensors(pad_between_seqs: bool | None) -> None:
    module, inputs, call = _thd(attn_mask_type="padding", gaps_q=(2, 1))
    out = module(inputs.q, inputs.k, inputs.v, **call, pad_between_seqs=pad_between_seqs)
    want = thd_attention(inputs.q, inputs.k, inputs.v, **call, attn_mask_type="padding")
    assert torch.equal(out, want.flatten(1))
    assert not out[4:6].any()


def test_pad_between_seqs_without_gaps() -> None:
    """True says nothing new; False agrees with no padded tensors, or the plain ones themselves, and contradicts others."""
    module, inputs, call = _thd(attn_mask_type="padding")
    want = module(inputs.q, inputs.k, inputs.v, **call)
    plain = call["cu_seqlens_q"]
    call["cu_seqlens_q_padded"] = call["cu_seqlens_kv_padded"] = None
    for pad_between_seqs in (True, False):
        assert torch.equal(module(inputs.q, inputs.k, inputs.v, **call, pad_between_seqs=pad_between_seqs), want)
    call["cu_seqlens_q_padded"] = plain
    assert torch.equal(module(inputs.q, inputs.k, inputs.v, **call, pad_between_seqs=False), want)
    # Equal values in another tensor, as loaders make them: gaps of no rows.
    call["cu_seqlens_q_padded"] = plain.clone()
    assert torch.equal(module(inputs.q, inputs.k, inputs.v, **call), want)
    with pytest.raises(ValueError, match="pad_between_seqs=False contradicts cu_seqlens_q_padded"):
        module(inputs.q, inputs.k, inputs.v, **call, pad_between_seqs=False)


def test_one_sided_padded_tensors_of_cross_attention_are_refused() -> None:
    module, inputs, call = _thd(attn_mask_type="padding")
    call.update(cu_seqlens_kv=call["cu_seqlens_q"].clone(), cu_seqlens_q_padded=call["cu_seqlens_q"].clone())
    with pytest.raises(ValueError, match="must be given together"):
        module(inputs.q, inputs.k, inputs.v, **call)


def test_cu_seqlens_that_are_needed() -> None:
    module, inputs, call = _thd(attn_mask_type="padding", attention_type="cross")
    with pytest.raises(ValueError, match="cu_seqlens_kv is needed in qkv_format 'thd' with attention_type 'cross'"):
        module(inputs.q, inputs.k, inputs.v, **{**call, "cu_seqlens_kv": None})
    with pytest.raises(ValueError, match="cu_seqlens_q is needed in qkv_format 'thd'"):
        module(inputs.q, inputs.k, inputs.v, **{**call, "cu_seqlens_q": None})
    dense = DotProductAttention(4, (8, 5), 2, qkv_format="bshd", attn_mask_type="padding")
    with pytest.raises(ValueError, match="cu_seqlens_q is needed by a padding attn_mask_type in bshd"):
        dense(*dense_inputs("bshd"))
    with pytest.raises(ValueError, match="cu_seqlens_kv is needed where queries and keys have 6 and 9 rows"):
        dense(*dense_inputs("bshd"), cu_seqlens_q=torch.tensor([0, 1, 2, 3]))
    cu = torch.tensor([0, 1, 2, 3])
    with pytest.raises(ValueError, match="describe gaps in thd, not in bshd"):
        dense(*dense_inputs("bshd"), cu_seqlens_q=cu, cu_seqlens_q_padded=cu)


@pytest.mark.parametrize("return_max_logit", [False, True])
def test_checkpointed_core_attention_equals_none(return_max_logit: bool) -> None:
    module, inputs, call = _thd(attn_mask_type="padding_causal", return_max_logit=return_max_logit)
    results = []
    for checkpointed in (False, True):
        out = module(inputs.q, inputs.k, inputs.v, **call, checkpoint_core_attention=checkpointed)
        out, *rest = out if return_max_logit else (out,)
        results.append([out, *rest, *torch.autograd.grad(out.square().sum(), (inputs.q, inputs.k, inputs.v))])
    assert all(torch.equal(got, want) for got, want in zip(*results))


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_autocast_casts_queries_keys_and_values(layout: str) -> None:
    q, k, v = (x.detach().float().requires_grad_() for x in dense_inputs("bshd", LEN_Q))
    module = DotProductAttention(4, (8, 5), 2, qkv_format=layout, attn_mask_type="padding")
    call: dict[str, Any] = {"cu_seqlens_q": torch.arange(BATCH + 1) * LEN_Q}
    if layout == "thd":
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        call["max_seqlen_q"] = LEN_Q
    with torch.autocast("cpu", torch.bfloat16):
        out = module(q, k.bfloat16(), v, **call)
        assert module(q.double(), k.double(), v.double(), **call).dtype == torch.float64
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), module(q, k, v, **call), rtol=0.02, atol=0.02)
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32


def test_tensor_parallel_size_divides_heads() -> None:
    module = DotProductAttention(8, 16, 4, qkv_format="thd", attn_mask_type="padding", tp_size=2)
    out = module(torch.zeros(3, 4, 16), *[torch.zeros(3, 2, 16)] * 2, cu_seqlens_q=torch.tensor([0, 3]), max_seqlen_q=3)
    assert out.shape == (3, 64)


def test_empty_batch_has_connected_zero_gradients() -> None:
    module = DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding")
    q, k, v = (torch.zeros(0, 2, 8, requires_grad=True) for _ in range(3))
    module(q, k, v, cu_seqlens_q=torch.tensor([0]), max_seqlen_q=0).sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape


def test_extra_state_of_a_checkpoint_is_dropped() -> None:
    module = DotProductAttention(2, 8)
    assert str(module.load_state_dict({"_extra_state": torch.zeros(0)})) == "<All keys matched successfully>"


def test_repr() -> None:
    module = DotProductAttention(4, (24, 16), 2, qkv_format="thd", attn_mask_type="padding", backend="unfused")
    assert repr(module) == (
        "DotProductAttention(num_attention_heads=4, num_gqa_groups=2, head_dim_qk=24, head_dim_v=16, qkv_format='thd', "
        "attn_mask_type='padding', backend='unfused')"
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_gqa_groups": 3}, ValueError, "multiple of num_gqa_groups, got 4 and 3"),
        ({"tp_size": 3}, ValueError, "num_gqa_groups must be a multiple of tp_size, got 4 and 3"),
        ({"qkv_format": "bhsd"}, ValueError, "qkv_format='bhsd' is unknown"),
        ({"attn_mask_type": "diagonal"}, ValueError, "attn_mask_type='diagonal' is no mask type"),
        ({"window_size": (1, 2, 3)}, ValueError, "window_size must be a pair"),
        ({"attn_mask_type": "causal", "window_size": (-1, 3)}, ValueError, "window_size"),
        ({"bottom_right_diagonal": 1}, TypeError, "bottom_right_diagonal must be a bool"),
        ({"attention_type": "both"}, ValueError, "attention_type='both' is unknown"),
    ],
)
def test_wrong_constructor_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DotProductAttention(4, 8, **arguments)
