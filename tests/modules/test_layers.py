"""MultiheadAttention and TransformerLayer against a plain float64 model that takes one document at a time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import te_attn_ops
from te_attn_ops.modules import (
    DotProductAttention,
    LayerNormMLP,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
)
from te_attn_ops.modules.layers import Linear, Norm
from te_attn_ops.modules.mlp import ACTIVATIONS
from te_attn_ops.testing import CAUSAL, FULL, Mask, policy_list
from tests.modules.reference import Reference, activation, norm, parameters_of

HIDDEN, FFN, HEADS = 32, 24, 4
LENGTHS, GAPS = (5, 1, 8, 0, 3), (0, 2, 1, 0, 3)
MASKS, OWNER = (CAUSAL, FULL, Mask("padding", (2, 1))), (0, 1, 2, 0, 1)
MLA = {"kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


class Packed:
    """Documents with gaps between them, and where their rows are."""

    def __init__(self, lengths: Sequence[int], gaps: Sequence[int] | None = None, seed: int = 0) -> None:
        self.lengths = lengths
        starts = [0]
        for length, gap in zip(lengths, gaps or (0,) * len(lengths)):
            starts.append(starts[-1] + length + gap)
        self.rows = [slice(start, start + length) for start, length in zip(starts, lengths)]
        self.cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        self.padded = None if gaps is None else torch.tensor(starts, dtype=torch.int32)
        generator = torch.Generator().manual_seed(seed)
        self.x, self.weight = (torch.randn(starts[-1], HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
        self.x.requires_grad_()

    def arguments(self, side: str = "q") -> dict[str, Any]:
        return {
            f"cu_seqlens_{side}": self.cu_seqlens,
            f"cu_seqlens_{side}_padded": self.padded,
            f"max_seqlen_{side}": max(self.lengths),
        }

    def policies(self, masks: Sequence[Mask] = MASKS, owner: Sequence[int] = OWNER) -> list[dict[str, Any]]:
        return policy_list(masks, owner, "cpu")

    def prepared(self) -> te_attn_ops.PreparedPolicies:
        return te_attn_ops.prepare_thd_policies(self.policies(), self.cu_seqlens, cu_seqlens_q_padded=self.padded)


def angles(width: int, interleaved: bool = False) -> Tensor:
    return RotaryPositionEmbedding(width, interleaved=interleaved, device="cpu")(16).double()


def make_layer(**config: Any) -> TransformerLayer:
    """A float64 layer whose every parameter, also norms and biases, is random."""
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attn_input_format": "thd", "params_dtype": torch.float64, "device": "cpu", **config}
    return randomized(TransformerLayer(HIDDEN, FFN, HEADS, **options))


def randomized(module: Any) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


def assert_matches(module: torch.nn.Module, out: Tensor, expected: Tensor, inputs: Sequence[Tensor], params: dict[str, Tensor],
                   reference_inputs: Sequence[Tensor], weight: Tensor) -> None:  # fmt: skip
    """Outputs, and the gradients of every parameter and input."""
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    names = [name for name, _ in module.named_parameters()]
    grads = torch.autograd.grad((out * weight).sum(), [*module.parameters(), *inputs])
    wanted = torch.autograd.grad((expected * weight).sum(), [*[params[name] for name in names], *reference_inputs])
    for name, got, want in zip([*names, *[f"input {i}" for i in range(len(inputs))]], grads, wanted):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def check_layer(layer: TransformerLayer, config: dict[str, Any], rope: Tensor | None, encoded: Packed | None = None) -> None:
    """A mixed batch with gaps: out, and all gradients, of each document as of that document alone."""
    packed = Packed(LENGTHS, GAPS)
    params = parameters_of(layer)
    reference = Reference(HIDDEN, HEADS, config, params)
    call: dict[str, Any] = {"thd_attention_policies": packed.prepared(), "rotary_pos_emb": rope, **packed.arguments()}
    inputs = [packed.x]
    if encoded is not None:
        call.update(encoder_output=encoded.x, **encoded.arguments("kv"))
        inputs.append(encoded.x)
    out = layer(packed.x, **call)
    copies = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    cross = Mask("padding_causal_bottom_right")
    expected = torch.cat([
        reference.layer(
            copies[0][rows], MASKS[OWNER[n]], rope,
            None if encoded is None else copies[1][encoded.rows[n]], cross,
        )
        for n, rows in enumerate(packed.rows)
    ])  # fmt: skip
    real = torch.cat([out[rows] for rows in packed.rows])
    weight = torch.cat([packed.weight[rows] for rows in packed.rows])
    assert_matches(layer, real, expected, inputs, params, copies, weight)


LAYERS: dict[str, tuple[dict[str, Any], int]] = {
    # name: (constructor arguments, width of the rotary angles or 0)
    "default": ({}, 0),
    "rmsnorm_swiglu_no_bias": ({"normalization": "RMSNorm", "activation": "swiglu", "bias": False}, 0),
    "fused_interleaved": ({"fuse_qkv_params": True}, 0),
    "fused_in_order": ({"fuse_qkv_params": True, "qkv_weight_interleaved": False}, 0),
    "gqa": ({"num_gqa_groups": 2}, 0),
    "gqa_fused_interleaved": ({"num_gqa_groups": 2, "fuse_qkv_params": True}, 0),
    "mqa_kv_channels": ({"num_gqa_groups": 1, "kv_channels": 6}, 0),
    "layernorm_1p": ({"zero_centered_gamma": True}, 0),
    "rmsnorm_1p": ({"zero_centered_gamma": True, "normalization": "RMSNorm", "layernorm_epsilon": 1e-2}, 0),
    "rope": ({}, 8),
    "rope_interleaved": ({"rotary_pos_interleaved": True}, 8),
    "rope_half_of_the_head": ({"rotary_pos_interleaved": True}, 4),
    "rope_gqa_fused": ({"num_gqa_groups": 2, "fuse_qkv_params": True}, 8),
    "qk_l2": ({"qk_norm_type": "L2Normalization"}, 0),
    "qk_rms_after_rope": ({"qk_norm_type": "RMSNorm", "qk_norm_eps": 1e-3}, 8),
    "qk_layernorm_before_rope": ({"qk_norm_type": "LayerNorm", "qk_norm_before_rope": True, "num_gqa_groups": 2}, 8),
    "output_layernorm": ({"output_layernorm": True}, 0),
    "residual_after_norm": ({"apply_residual_connection_post_layernorm": True}, 0),
    "residual_after_norm_output_norm": ({"apply_residual_connection_post_layernorm": True, "output_layernorm": True}, 0),
    "parallel": ({"parallel_attention_mlp": True, "activation": "geglu"}, 8),
    "mla": ({**MLA, "normalization": "RMSNorm", "activation": "swiglu", "bias": False}, 4),
    "mla_interleaved_bias": ({**MLA, "rotary_pos_interleaved": True, "softmax_scale": 0.2}, 4),
    "mla_direct_queries": ({**MLA, "q_lora_rank": None, "normalization": "RMSNorm", "zero_centered_gamma": True}, 4),
    "mla_without_rope": ({**MLA, "output_layernorm": True}, 0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_each_document_alone(name: str) -> None:
    config, width = LAYERS[name]
    rope = angles(width, config.get("rotary_pos_interleaved", False)) if width else None
    check_layer(make_layer(**config), config, rope)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"fuse_qkv_params": True, "num_gqa_groups": 2, "qk_norm_type": "RMSNorm"},
        {"fuse_qkv_params": True, "apply_residual_connection_post_layernorm": True},
        {"output_layernorm": True, "num_gqa_groups": 1},
    ],
    ids=["plain", "gqa_qk_norm", "residual_after_norm", "output_layernorm"],
)
@pytest.mark.parametrize("width", [0, 8], ids=["", "rope"])
def test_decoder_cross_attention_keeps_its_own_mask(config: dict[str, Any], width: int) -> None:
    rope = angles(width) if width else None
    layer = make_layer(layer_type="decoder", enc_dec_attn_mask_type="padding_causal_bottom_right", **config)
    check_layer(layer, config, rope, Packed((7, 4, 2, 3, 9), (1, 0, 0, 2, 0), seed=1))


# ------------------------------------------------------------------------- TransformerEngine's own layer tests, at small lengths
_TE_LAYERS = {
    "te_2_0": ((6, 6), (6, 6), "causal"),
    "te_2_1": ((6, 6), (6, 6), "no_mask"),
    "te_2_2": ((6,), (6,), "padding"),
    "te_2_3": ((5,), (9,), "padding_causal_bottom_right"),
}


@pytest.mark.parametrize("name", _TE_LAYERS)
@pytest.mark.parametrize("layout", ["thd", "sbhd", "bshd"])
@pytest.mark.parametrize("fused_qkv_rope", [False, True], ids=["split", "fused_rope"])
def test_layer_configurations_of_transformer_engine(name: str, layout: str, fused_qkv_rope: bool) -> None:
    lengths, lengths_kv, mask_type = _TE_LAYERS[name]
    decoder = lengths != lengths_kv
    own_mask = "causal" if decoder else mask_type
    as_packed = {"causal": "padding_causal", "no_mask": "padding"}
    config: dict[str, Any] = {"fuse_qkv_params": fused_qkv_rope, "rotary_pos_interleaved": fused_qkv_rope}
    rope = angles(8, True) if fused_qkv_rope else None
    own_type = as_packed.get(own_mask, own_mask) if layout == "thd" else own_mask
    layer = make_layer(
        **config,
        attn_input_format=layout,
        self_attn_mask_type=own_type,
        enc_dec_attn_mask_type=mask_type if decoder else "no_mask",
        layer_type="decoder" if decoder else "encoder",
    )
    packed, encoded = Packed(lengths), Packed(lengths_kv, seed=1)
    params = parameters_of(layer)
    reference = Reference(HIDDEN, HEADS, config, params)

    def arranged(x: Tensor, count: int) -> Tensor:
        """[t, hidden] in the layer's layout."""
        if layout == "thd":
            return x
        dense = x.unflatten(0, (count, -1))
        return dense.transpose(0, 1).contiguous() if layout == "sbhd" else dense

    call: dict[str, Any] = {"rotary_pos_emb": rope, **packed.arguments()}
    inputs = [packed.x]
    if decoder:
        call.update(encoder_output=arranged(encoded.x, len(lengths_kv)), **encoded.arguments("kv"))
        inputs.append(encoded.x)
    out = layer(arranged(packed.x, len(lengths)), **call)
    copies = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    masks = [Mask(as_packed.get(kind, kind)) for kind in (own_mask, mask_type)]
    expected = [
        reference.layer(copies[0][rows], masks[0], rope, copies[1][encoded.rows[n]] if decoder else None, masks[1])
        for n, rows in enumerate(packed.rows)
    ]
    assert_matches(
        layer, out, arranged(torch.cat(expected), len(lengths)), inputs, params, copies, arranged(packed.weight, len(lengths))
    )


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_dense_padding_counts_the_first_rows_of_each_sample(layout: str) -> None:
    """Samples of unequal lengths, padded to equal ones: real rows as alone, and gradients that do not see the padding."""
    layer = make_layer(attn_input_format=layout, self_attn_mask_type="padding_causal", num_gqa_groups=2)
    lengths, longest = (4, 7, 1), 7
    packed = Packed((longest,) * 3)
    mask = torch.zeros(3, longest, dtype=torch.bool)
    for n, length in enumerate(lengths):
        mask[n, :length] = True
    dense = packed.x.unflatten(0, (3, longest))
    cu_seqlens = torch.tensor([0, 4, 11, 12])
    rope = angles(8)
    out = layer(dense.transpose(0, 1) if layout == "sbhd" else dense, cu_seqlens_q=cu_seqlens, rotary_pos_emb=rope)
    out = (out.transpose(0, 1) if layout == "sbhd" else out)[mask]
    params = parameters_of(layer)
    copy = packed.x.detach().clone().requires_grad_()
    reference = Reference(HIDDEN, HEADS, {"num_gqa_groups": 2}, params)
    expected = torch.cat(
        [reference.layer(copy[rows][:length], CAUSAL, rope) for rows, length in zip(packed.rows, lengths)]
    )
    assert_matches(layer, out, expected, [packed.x], params, [copy], packed.weight[mask.flatten()])


# ------------------------------------------------------------------------------------------------------------ feed-forward block
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_mlp_activations(name: str) -> None:
    torch.manual_seed(0)
    mlp = randomized(LayerNormMLP(HIDDEN, FFN, activation=name, params_dtype=torch.float64, device="cpu", normalization="RMSNorm"))
    x = torch.randn(7, HIDDEN, dtype=torch.float64) * 4
    normed = norm(x, mlp.layer_norm_weight, None, "RMSNorm", 1e-5)
    inner = activation(normed @ mlp.fc1_weight.T + mlp.fc1_bias, name)
    torch.testing.assert_close(mlp(x), inner @ mlp.fc2_weight.T + mlp.fc2_bias, rtol=1e-9, atol=1e-9)


def test_clamped_swiglu_takes_its_parameters() -> None:
    mlp = LayerNormMLP(4, 3, activation="clamped_swiglu", activation_params={"limit": 1.0, "alpha": 2.0}, device="cpu")
    gate, linear = torch.tensor([-3.0, 0.5, 9.0]), torch.tensor([-3.0, 0.5, 9.0])
    got = mlp._activate(torch.cat((gate, linear)))
    clamped = torch.tensor([-3.0, 0.5, 1.0])
    torch.testing.assert_close(got, clamped * torch.sigmoid(2 * clamped) * (torch.tensor([-1.0, 0.5, 1.0]) + 1))


# ----------------------------------------------------------------------------------------------------------- MultiheadAttention
def test_multihead_returns_bias_and_norm_output() -> None:
    packed = Packed(LENGTHS, GAPS)
    options: dict[str, Any] = {"qkv_format": "thd", "params_dtype": torch.float64, "device": "cpu", "input_layernorm": True}
    torch.manual_seed(0)
    plain = randomized(MultiheadAttention(HIDDEN, HEADS, **options))
    split = MultiheadAttention(HIDDEN, HEADS, return_bias=True, return_layernorm_output=True, **options)
    split.load_state_dict(plain.state_dict())
    call = {"thd_attention_policies": packed.prepared(), **packed.arguments()}
    out, bias, normed = split(packed.x, **call)
    torch.testing.assert_close(out + bias, plain(packed.x, **call))
    weight, shift = plain.layernorm_qkv.layer_norm_weight, plain.layernorm_qkv.layer_norm_bias
    torch.testing.assert_close(normed, norm(packed.x, weight, shift, "LayerNorm", 1e-5))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("groups", [2, 4])
def test_multihead_cross_attention_without_norm(fused: bool, groups: int) -> None:
    queries, keys = Packed((4, 6)), Packed((9, 2), seed=1)
    config = {"fuse_qkv_params": fused, "num_gqa_groups": groups}
    module = randomized(
        MultiheadAttention(
            HIDDEN, HEADS, attention_type="cross", qkv_format="thd", params_dtype=torch.float64, device="cpu", **config
        )
    )
    call = {**queries.arguments(), **keys.arguments("kv"), "encoder_output": keys.x, "attn_mask_type": "padding"}
    out = module(queries.x, **call)
    params = parameters_of(module)
    reference = Reference(HIDDEN, HEADS, config, params)
    copies = [queries.x.detach().clone().requires_grad_(), keys.x.detach().clone().requires_grad_()]
    expected = torch.cat([
        reference.multihead(copies[0][rows], params, FULL, None, copies[1][rows_kv])[0]
        for rows, rows_kv in zip(queries.rows, keys.rows)
    ])  # fmt: skip
    assert_matches(module, out, expected, [queries.x, keys.x], params, copies, queries.weight)


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("latent", [False, True])
def test_self_attention_takes_key_lengths_of_their_own(rope: bool, latent: bool) -> None:
    """More keys than queries in one document, fewer in the other, in the same slots: MultiheadAttention, and an encoder around it."""
    cu_q, cu_kv, slots = torch.tensor([0, 3, 8]), torch.tensor([0, 6, 10]), torch.tensor([0, 6, 12])
    x = Packed((6, 6)).x
    config: dict[str, Any] = MLA if latent else {}
    layer = make_layer(self_attn_mask_type="padding", **config)
    module = layer.self_attention
    table = angles(MLA["qk_rope_head_dim"] if latent else 8) if rope else None
    call: dict[str, Any] = {
        "cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv, "cu_seqlens_q_padded": slots, "cu_seqlens_kv_padded": slots,
        "max_seqlen_q": 5, "max_seqlen_kv": 6, "rotary_pos_emb": table,
    }  # fmt: skip
    attended, out = module(x, attn_mask_type="padding", **call), layer(x, **call)
    params = {name: p.double() for name, p in module.named_parameters()}
    for n, (length, length_kv) in enumerate(zip((3, 5), (6, 4))):
        alone = Reference(HIDDEN, HEADS, config, {}).multihead(x[6 * n : 6 * n + length_kv], params, FULL, table)[0]
        count = min(length, length_kv)  # a query without a key of its own is in no such document
        torch.testing.assert_close(attended[6 * n : 6 * n + count], alone[:count], rtol=1e-9, atol=1e-9)
    hidden = x + attended
    torch.testing.assert_close(out, hidden + layer.layernorm_mlp(hidden))


class _Adapted(torch.nn.Module):
    """A module around a projection, as LoRA puts one there: Tensor to Tensor, without the projection's attributes."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Parameter(torch.randn(2, base.weight.shape[1], dtype=torch.float64) * 0.1)
        self.up = torch.nn.Parameter(torch.randn(base.weight.shape[0], 2, dtype=torch.float64) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.base.weight, self.base.bias) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("config", [{}, {"num_gqa_groups": 2, "fuse_qkv_params": True}, MLA], ids=["plain", "gqa", "mla"])
def test_projections_may_be_wrapped(config: dict[str, Any]) -> None:
    """The same as with the adapters merged into the weights."""
    packed = Packed(LENGTHS, GAPS)
    layer, merged = (make_layer(self_attn_mask_type="padding_causal", output_layernorm=True, **config) for _ in range(2))
    wrapped = ["mla.kv_b_proj", "mla.q_a_proj"] if config is MLA else ["qkv"]
    for name in ("proj", *wrapped):
        adapted = _Adapted(layer.self_attention.get_submodule(name))
        layer.self_attention.set_submodule(name, adapted)
        with torch.no_grad():
            merged.self_attention.get_submodule(name).weight += adapted.up @ adapted.down
    torch.testing.assert_close(layer(packed.x, **packed.arguments()), merged(packed.x, **packed.arguments()))
    assert layer.plan_spec() == merged.plan_spec() and layer.plan_spec().dtype == torch.float64
    assert layer.bfloat16().plan_spec().dtype == torch.bfloat16


def test_a_wrapped_projection_with_return_bias() -> None:
    packed = Packed(LENGTHS)
    torch.manual_seed(0)
    module = MultiheadAttention(HIDDEN, HEADS, return_bias=True, qkv_format="thd", params_dtype=torch.float64, device="cpu")
    call = {"attn_mask_type": "padding", **packed.arguments()}
    out, bias = module(packed.x, **call)
    module.proj = _Adapted(module.proj)
    with torch.no_grad():
        module.proj.up.zero_()
    wrapped, none = module(packed.x, **call)
    assert none is None
    torch.testing.assert_close(wrapped, out + bias)


class _Recorder(DotProductAttention):
    """Keeps what it was called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = {**dict(zip(("query_layer", "key_layer", "value_layer"), args)), **kwargs}
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("config", "packed_as", "interleave_dim"),
    [
        ({}, "qkv_layer", -3),
        ({"fuse_qkv_params": True}, "qkv_layer", -2),
        ({"attention_type": "cross"}, "kv_layer", -3),
        ({"attention_type": "cross", "fuse_qkv_params": True, "num_gqa_groups": 2}, "kv_layer", -2),
    ],
)
def test_fused_projection_is_handed_on_packed(config: dict[str, Any], packed_as: str, interleave_dim: int) -> None:
    packed = Packed(LENGTHS)
    module = MultiheadAttention(HIDDEN, HEADS, qkv_format="thd", params_dtype=torch.float64, device="cpu", **config)
    module.core_attention.__class__ = _Recorder
    module(packed.x, encoder_output=packed.x, attn_mask_type="padding", cu_seqlens_kv=packed.cu_seqlens, **packed.arguments())
    seen = module.core_attention.seen
    assert seen["qkv_interleave_dim"] == interleave_dim
    assert seen[packed_as] is not None and seen["key_layer"] is None and seen["value_layer"] is None


def test_gqa_projection_is_sliced_not_copied() -> None:
    packed = Packed(LENGTHS)
    module = MultiheadAttention(HIDDEN, HEADS, num_gqa_groups=2, qkv_format="thd", params_dtype=torch.float64, device="cpu")
    module.core_attention.__class__ = _Recorder
    module(packed.x, attn_mask_type="padding", **packed.arguments())
    seen = module.core_attention.seen
    buffers = {seen[name].untyped_storage().data_ptr() for name in ("query_layer", "key_layer", "value_layer")}
    assert len(buffers) == 1


# ---------------------------------------------------------------------------------------------------------------------- policies
@pytest.mark.parametrize("kind", ["dpa", "mha", "layer"])
def test_dispatches_and_raw_lists_agree(kind: str) -> None:
    packed = Packed(LENGTHS, GAPS)
    shape = {"num_gqa_groups": 2, "qkv_format": "thd", "attn_mask_type": "padding"}
    if kind == "layer":
        module = make_layer(num_gqa_groups=2)
    elif kind == "mha":
        module = randomized(MultiheadAttention(HIDDEN, HEADS, **shape, params_dtype=torch.float64, device="cpu"))
    else:
        module = DotProductAttention(HEADS, HIDDEN // HEADS, **shape)
    inputs = (packed.x,)
    if kind == "dpa":
        inputs = tuple(packed.x.detach().view(-1, HEADS, HIDDEN // HEADS)[:, :heads].requires_grad_() for heads in (HEADS, 2, 2))
    differentiated = [*inputs, *module.parameters()]

    def run(**changes: Any) -> tuple[Tensor, ...]:
        out = module(*inputs, **{**packed.arguments(), "thd_attention_policies": packed.prepared(), **changes})
        return out, *torch.autograd.grad((out * packed.weight).sum(), differentiated)

    auto = run()
    for changes in (
        {"thd_attention_policy_dispatch": "grouped"},
        {"thd_attention_policy_dispatch": "padded"},
        {"thd_attention_policies": packed.policies()},
        {"backend": "unfused"},
        {"sanitize_padding": True},
        {"pad_head_dim": True},
    ):
        for got, want in zip(run(**changes), auto):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


def test_policies_are_no_conflict_with_the_constructors_mask() -> None:
    packed = Packed(LENGTHS)
    layer = make_layer(self_attn_mask_type="padding_causal", window_size=(2, 0))
    plain = make_layer(self_attn_mask_type="padding")
    masks = (FULL,)
    policies = packed.policies(masks, (0,) * len(LENGTHS))
    torch.testing.assert_close(
        layer(packed.x, thd_attention_policies=policies, **packed.arguments()), plain(packed.x, **packed.arguments())
    )


@pytest.mark.parametrize("given", ["forward", "constructor"])
def test_alignment_of_policies_falls_back_to_the_call_then_the_module(given: str) -> None:
    """A policy of window (1, 1) that names no alignment, in attention with more keys than queries."""
    queries, keys = Packed((3, 4)), Packed((6, 9), seed=1)
    options: dict[str, Any] = {"attention_type": "cross", "qkv_format": "thd", "params_dtype": torch.float64, "device": "cpu"}
    call = {**queries.arguments(), **keys.arguments("kv"), "encoder_output": keys.x}
    torch.manual_seed(0)
    module = MultiheadAttention(HIDDEN, HEADS, bottom_right_diagonal=given != "constructor", **options)
    policies = policy_list((Mask("padding", (1, 1)),), (0, 0), "cpu")
    forward = {"bottom_right_diagonal": False} if given == "forward" else {}
    got = module(queries.x, thd_attention_policies=policies, **forward, **call)
    want = module(queries.x, attn_mask_type="padding", window_size=(1, 1), bottom_right_diagonal=False, **call)
    other = module(queries.x, attn_mask_type="padding", window_size=(1, 1), bottom_right_diagonal=True, **call)
    torch.testing.assert_close(got, want)
    assert not torch.allclose(got, other)


# --------------------------------------------------------------------------------------------- checkpointing, dropout, autocast
@pytest.mark.parametrize("mode", ["full", "selective", "core"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointing_equals_none(mode: str, dropout: float) -> None:
    packed = Packed(LENGTHS, GAPS)
    call: dict[str, Any] = {"thd_attention_policies": packed.prepared(), **packed.arguments()}
    results = []
    for checkpointing in (None, mode):
        layer = make_layer(
            hidden_dropout=dropout, activation_checkpointing=checkpointing if checkpointing != "core" else None
        )
        torch.manual_seed(1)
        out = layer(packed.x, checkpoint_core_attention=checkpointing == "core", **call)
        results.append([out, *torch.autograd.grad((out * packed.weight).sum(), [packed.x, *layer.parameters()])])
    for got, want in zip(*results):
        assert torch.equal(got, want)


def _attention_forwards(run: Any) -> int:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += func is torch.ops.te_attn_ops.attention_forward.default
            return func(*args, **(kwargs or {}))

    with Count() as count:
        run()
    return count.calls


@pytest.mark.parametrize(("mode", "forwards"), [(None, 1), ("selective", 1), ("full", 2)])
def test_selective_checkpointing_runs_attention_once(mode: str | None, forwards: int) -> None:
    packed = Packed(LENGTHS)
    layer = make_layer(activation_checkpointing=mode)
    call = {"thd_attention_policies": packed.prepared(), **packed.arguments()}
    assert _attention_forwards(lambda: layer(packed.x, **call).sum().backward()) == forwards


def test_hidden_dropout_only_in_training() -> None:
    packed = Packed(LENGTHS)
    layer = make_layer(hidden_dropout=0.5, self_attn_mask_type="padding")
    first, second = (layer(packed.x, **packed.arguments()) for _ in range(2))
    assert not torch.equal(first, second)
    layer.eval()
    assert torch.equal(layer(packed.x, **packed.arguments()), layer(packed.x, **packed.arguments()))


@pytest.mark.parametrize("config", [{"qk_norm_type": "RMSNorm", "normalization": "RMSNorm"}, MLA], ids=["qk_norm", "mla"])
def test_autocast(config: dict[str, Any]) -> None:
    """float32 parameters under autocast: attention in bfloat16, residuals and gradients in float32, near the float32 result."""
    packed = Packed(LENGTHS, GAPS)
    layer = make_layer(params_dtype=torch.float32, **config)
    layer.self_attention.core_attention.__class__ = _Recorder
    x = packed.x.detach().float().requires_grad_()
    call = {"thd_attention_policies": packed.prepared(), **packed.arguments()}
    exact = layer(x, **call)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, **call)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, exact, rtol=0.05, atol=0.05)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters(dtype: torch.dtype) -> None:
    packed = Packed(LENGTHS, GAPS)
    exact = make_layer(normalization="RMSNorm", activation="swiglu", qk_norm_type="L2Normalization")
    layer = make_layer(normalization="RMSNorm", activation="swiglu", qk_norm_type="L2Normalization", params_dtype=dtype)
    layer.load_state_dict(exact.state_dict())
    call = {"thd_attention_policies": packed.prepared(), **packed.arguments()}
    rope = angles(8)
    out = layer(packed.x.to(dtype), rotary_pos_emb=rope, **call)
    assert out.dtype == dtype
    real = torch.cat([torch.arange(rows.start, rows.stop) for rows in packed.rows])
    # TransformerEngine's tolerance for a layer.
    torch.testing.assert_close(out[real].double(), exact(packed.x, rotary_pos_emb=rope, **call)[real], rtol=5e-2, atol=5e-2)


# ------------------------------------------------------------------------------------------------------ state, names, placement
def test_parameter_names_are_transformer_engines() -> None:
    names = set(make_layer(layer_type="decoder", fuse_qkv_params=True, qk_norm_type="RMSNorm").state_dict())
    norms_and_linear = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
    expected = {f"self_attention.layernorm_qkv.{name}" for name in norms_and_linear}
    expected |= {f"inter_attention.layernorm_query.{name}" for name in norms_and_linear}
    expected |= {f"inter_attention.key_value.{name}" for name in ("weight", "bias")}
    for attention in ("self_attention", "inter_attention"):
        expected |= {f"{attention}.{name}" for name in ("proj.weight", "proj.bias", "q_norm.weight", "k_norm.weight")}
    mlp = ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    assert names == expected | {f"layernorm_mlp.{name}" for name in mlp}
    assert set(make_layer(output_layernorm=True, bias=False, normalization="RMSNorm").state_dict()) == {
        "self_attention.qkv.weight", "self_attention.proj.weight", "layernorm.weight",
        "layernorm_mlp.layer_norm_weight", "layernorm_mlp.fc1_weight", "layernorm_mlp.fc2_weight",
    }  # fmt: skip


def test_a_transformer_engine_checkpoint_loads() -> None:
    """Separate query, key and value parameters (fuse_qkv_params=False) and FP8 metadata, as TransformerEngine saves them."""
    packed = Packed(LENGTHS)
    layer = make_layer(num_gqa_groups=2, self_attn_mask_type="padding", layer_type="decoder", enc_dec_attn_mask_type="padding")
    state = layer.state_dict()
    for prefix, parts in (
        ("self_attention.layernorm_qkv.", {"query": 32, "key": 16, "value": 16}),
        ("inter_attention.layernorm_query.", {"query": 32}),
        ("inter_attention.key_value.", {"key": 16, "value": 16}),
    ):
        for kind in ("weight", "bias"):
            for part, rows in zip(parts, state.pop(f"{prefix}{kind}").split(list(parts.values()))):
                state[f"{prefix}{part}_{kind}"] = rows
    for name in ("self_attention.layernorm_qkv.", "self_attention.core_attention.", "layernorm_mlp."):
        state[f"{name}_extra_state"] = torch.zeros(0)
    other = make_layer(num_gqa_groups=2, self_attn_mask_type="padding", layer_type="decoder", enc_dec_attn_mask_type="padding")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert str(other.load_state_dict(state, strict=True)) == "<All keys matched successfully>"
    call = {**packed.arguments(), "encoder_output": packed.x, **packed.arguments("kv")}
    assert torch.equal(other(packed.x, **call), layer(packed.x, **call))


def test_a_split_projection_with_a_part_missing_says_which() -> None:
    state = make_layer().state_dict()
    prefix = "self_attention.layernorm_qkv."
    state[f"{prefix}query_weight"], state[f"{prefix}key_weight"], _ = state.pop(f"{prefix}weight").split(HIDDEN)
    with pytest.raises(RuntimeError, match=f'Missing key.*: "{prefix}value_weight", "{prefix}weight"'):
        make_layer().load_state_dict(state)
    missing = make_layer().load_state_dict(state, strict=False).missing_keys
    assert missing == [f"{prefix}value_weight", f"{prefix}weight"]


@pytest.mark.parametrize("config", [{"layer_type": "decoder", "qk_norm_type": "LayerNorm"}, MLA], ids=["decoder", "mla"])
def test_deferred_initialisation(config: dict[str, Any]) -> None:
    options: dict[str, Any] = {"zero_centered_gamma": True, "params_dtype": torch.float64, "output_layernorm": True, **config}
    torch.manual_seed(3)
    eager = TransformerLayer(HIDDEN, FFN, HEADS, device="cpu", **options)
    with torch.device("meta"):
        deferred = TransformerLayer(HIDDEN, FFN, HEADS, **options)
    assert all(p.is_meta for p in deferred.parameters())
    assert {name: p.shape for name, p in deferred.named_parameters()} == {name: p.shape for name, p in eager.named_parameters()}
    deferred.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in deferred.parameters():
            parameter.fill_(float("nan"))
    deferred.reset_parameters()
    eager.reset_parameters()
    for (name, got), want in zip(deferred.named_parameters(), eager.parameters()):
        assert got.dtype == torch.float64 and torch.isfinite(got).all(), name
        if want.dim() == 1:
            assert torch.equal(got, want), name
        else:
            assert 0.01 < float(got.detach().std()) < 0.04, name  # 0.023 by default


def test_init_methods_reach_the_weights_they_are_for() -> None:
    layer = make_layer_with_inits()
    assert all(float(p.detach().min()) == float(p.detach().max()) == 1.0 for p in (
        layer.self_attention.layernorm_qkv.weight, layer.layernorm_mlp.fc1_weight
    ))  # fmt: skip
    assert all(float(p.detach().max()) == 2.0 for p in (layer.self_attention.proj.weight, layer.layernorm_mlp.fc2_weight))


def make_layer_with_inits() -> TransformerLayer:
    return TransformerLayer(
        HIDDEN, FFN, HEADS, device="cpu", init_method=torch.nn.init.ones_,
        output_layer_init_method=lambda weight: torch.nn.init.constant_(weight, 2.0),
    )  # fmt: skip


def test_split_weights_are_initialised_part_by_part() -> None:
    shapes: list[tuple[int, ...]] = []
    Linear(8, 12, lambda weight: shapes.append(tuple(weight.shape)), splits={"query": 8, "key": 2, "value": 2})
    assert shapes == [(8, 8), (2, 8), (2, 8)]


def test_repr_tells_the_configuration() -> None:
    text = repr(make_layer(rotary_pos_interleaved=True, activation_checkpointing="full", **MLA))
    for part in ("attn_input_format='thd'", "activation_checkpointing='full'", "kv_lora_rank=10", "rotary_pos_interleaved=True",
                 "head_dim_qk=10, head_dim_v=5", "activation='gelu'"):  # fmt: skip
        assert part in text
    text = repr(make_layer(self_attn_mask_type="padding", window_size=(7, 7), bottom_right_diagonal=True))
    assert "attn_mask_type='padding'" in text and "window_size=(7, 7), bottom_right_diagonal=True" in text
    assert "attn_mask_type='causal'" not in text


@pytest.mark.parametrize("kind", ["dpa", "mha", "layer"])
def test_plan_spec(kind: str) -> None:
    core = DotProductAttention(8, (192, 128), 8)
    mla = {"kv_lora_rank": 10, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    options: dict[str, Any] = {"params_dtype": torch.float16, "device": "meta", **mla}
    module = {
        "dpa": lambda: core,
        "mha": lambda: MultiheadAttention(64, 8, **options),
        "layer": lambda: TransformerLayer(64, 64, 8, **options),
    }[kind]()
    spec = module.plan_spec()
    assert (spec.num_heads, spec.num_gqa_groups, spec.head_dim_qk, spec.head_dim_v, spec.training) == (8, 8, 192, 128, True)
    assert spec.dtype == (torch.bfloat16 if kind == "dpa" else torch.float16)
    assert module.eval().plan_spec(torch.bfloat16).training is False


# ------------------------------------------------------------------------------------------------- what a checkpoint must not mix up
def test_row_orders_of_fused_projections_are_told_apart() -> None:
    """Names and shapes are the same: only the state dict's metadata tells."""

    def layer(**options: Any) -> TransformerLayer:
        return TransformerLayer(32, 24, 4, num_gqa_groups=2, hidden_dropout=0.0, device="cpu", **options)

    for fused in (True, False):
        file = io.BytesIO()
        torch.save(layer(fuse_qkv_params=fused).state_dict(), file)
        file.seek(0)
        saved = torch.load(file)
        layer(fuse_qkv_params=fused).load_state_dict(saved)
        with pytest.raises(RuntimeError, match="construct it with the fuse_qkv_params and qkv_weight_interleaved"):
            layer(fuse_qkv_params=not fused).load_state_dict(saved)
    layer().load_state_dict(dict(saved))  # without the note, as from safetensors


def test_rotary_frequencies_come_back_after_deferred_initialisation() -> None:
    want = RotaryPositionEmbedding(16, device="cpu")
    with torch.device("meta"):
        rope = RotaryPositionEmbedding(16)
    rope.to_empty(device="cpu")
    rope.reset_parameters()
    assert torch.equal(rope.inv_freq, want.inv_freq) and torch.equal(rope(5), want(5))


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("params_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
def test_norms_lose_nothing_of_their_scale(normalization: str, params_dtype: torch.dtype, zero_centered_gamma: bool) -> None:
    """A result in bfloat16 is off by its own rounding and no more; a scale of 1 + 0.0035 is not 1."""
    torch.manual_seed(0)
    norm = Norm(64, 1e-5, normalization, zero_centered_gamma, device="cpu", dtype=params_dtype)
    with torch.no_grad():
        norm.weight.normal_(0.0035 if zero_centered_gamma else 1.0035, 0.1)
    x = torch.randn(500, 64, dtype=torch.bfloat16)
    scale = norm.weight.double() + zero_centered_gamma
    centered = x.double() - (x.double().mean(1, keepdim=True) if normalization == "LayerNorm" else 0)
    want = centered * (centered.square().mean(1, keepdim=True) + 1e-5).rsqrt() * scale
    torch.testing.assert_close(norm(x).double(), want, rtol=2**-8 * (1 if params_dtype != x.dtype or zero_centered_gamma else 2), atol=1e-6)


def test_a_bias_of_another_dtype() -> None:
    norm = Norm(8, 1e-5, "LayerNorm", device="cpu", dtype=torch.bfloat16)
    norm.bias = torch.nn.Parameter(torch.randn(8))
    x = torch.randn(5, 8, dtype=torch.bfloat16)
    want = torch.nn.functional.layer_norm(x.double(), (8,), norm.weight.double(), norm.bias.double(), 1e-5)
    torch.testing.assert_close(norm(x).double(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("with_rope", [False, True])
def test_keys_of_self_attention_take_the_slots_of_q(with_rope: bool) -> None:
    """Lengths of their own for keys, in q's slots: as if the slots were given twice."""
    torch.manual_seed(0)
    layer = TransformerLayer(32, 24, 2, hidden_dropout=0.0, attn_input_format="thd", self_attn_mask_type="padding", device="cpu")
    x, rope = torch.randn(12, 32), RotaryPositionEmbedding(16, device="cpu")(8) if with_rope else None
    cu_q, cu_kv, slots = torch.tensor([0, 4, 9]), torch.tensor([0, 3, 5]), torch.tensor([0, 6, 12])
    call = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv, "cu_seqlens_q_padded": slots, "max_seqlen_q": 5, "max_seqlen_kv": 3}
    out = layer(x, rotary_pos_emb=rope, **call)
    torch.testing.assert_close(out, layer(x, rotary_pos_emb=rope, **call, cu_seqlens_kv_padded=slots))


@pytest.mark.parametrize("with_rope", [False, True])
def test_keys_of_cross_attention_with_qs_offsets_take_its_slots_too(with_rope: bool) -> None:
    torch.manual_seed(0)
    options = {"attention_type": "cross", "qkv_format": "thd", "attn_mask_type": "padding", "device": "cpu"}
    module = randomized(MultiheadAttention(32, 2, **options))
    x, encoder_output, rope = torch.randn(12, 32), torch.randn(12, 32), RotaryPositionEmbedding(16, device="cpu")(8) if with_rope else None
    cu, slots = torch.tensor([0, 4, 9]), torch.tensor([0, 6, 12])
    call = {"encoder_output": encoder_output, "cu_seqlens_q": cu, "cu_seqlens_kv": cu, "cu_seqlens_q_padded": slots, "max_seqlen_q": 5}
    out = module(x, rotary_pos_emb=rope, **call)
    torch.testing.assert_close(out, module(x, rotary_pos_emb=rope, **call, cu_seqlens_kv_padded=slots))


def test_qs_bound_is_not_that_of_keys_with_lengths_of_their_own() -> None:
    layer = TransformerLayer(32, 24, 2, hidden_dropout=0.0, attn_input_format="thd", self_attn_mask_type="padding", device="cpu")
    call = {"cu_seqlens_q": torch.tensor([0, 2, 4]), "cu_seqlens_kv": torch.tensor([0, 5, 12])}
    x = torch.randn(12, 32)
    torch.testing.assert_close(layer(x, max_seqlen_q=2, **call), layer(x, max_seqlen_q=2, max_seqlen_kv=7, **call))
