"""What is not implemented, and what contradicts itself, is refused by name through each of the three modules; and no module
reads a tensor on the host."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from te_attn_ops import NoBackendError, prepare_thd_policies
from te_attn_ops.modules import DotProductAttention, MultiheadAttention, RotaryPositionEmbedding, TransformerLayer
from te_attn_ops.testing import CAUSAL, FULL, policy_list, trace_without_sync

MODULES = ("dpa", "mha", "layer")
CU = torch.tensor([0, 3, 8], dtype=torch.int32)
POLICIES = policy_list((CAUSAL, FULL), (0, 1), "cpu")


def make(kind: str, **options: Any) -> torch.nn.Module:
    if kind == "dpa":
        return DotProductAttention(2, 8, **{"qkv_format": "thd", "attn_mask_type": "padding", **options})
    if kind == "mha":
        defaults = {"qkv_format": "thd", "attn_mask_type": "padding", "device": "cpu"}
        return MultiheadAttention(**{"hidden_size": 16, "num_attention_heads": 2, **defaults, **options})
    options = {name.replace("qkv_format", "attn_input_format"): value for name, value in options.items()}
    if "attn_mask_type" in options:
        options["self_attn_mask_type"] = options.pop("attn_mask_type")
    defaults = {"attn_input_format": "thd", "self_attn_mask_type": "padding", "device": "cpu", "hidden_dropout": 0.0}
    return TransformerLayer(**{"hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2, **defaults, **options})


def call(kind: str, module: torch.nn.Module | None = None, **changes: Any) -> Any:
    module = make(kind) if module is None else module
    if kind == "layer" and "attn_mask_type" in changes:
        changes["self_attn_mask_type"] = changes.pop("attn_mask_type")
    arguments = {"cu_seqlens_q": CU, "max_seqlen_q": 5, **changes}
    if kind == "dpa":
        q, k, v = (torch.randn(8, 2, 8) for _ in range(3))
        return module(q, k, v, **arguments)
    return module(torch.randn(8, 16), **arguments)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize(
    "argument", [{"attention_dropout": 0.1}, {"softcap": 30.0}, {"softmax_type": "learnable"}, {"softmax_type": "off-by-one"}]
)
def test_constructor_refusals(kind: str, argument: dict[str, Any]) -> None:
    name = next(iter(argument))
    with pytest.raises(NotImplementedError, match=f"{name}={argument[name]!r} is not supported: "):
        make(kind, **argument)


_REFUSED_CALLS: dict[str, Any] = {
    "attention_mask": torch.ones(2, 1, 1, 5, dtype=torch.bool),
    "core_attention_bias_type": "alibi",
    "core_attention_bias": torch.zeros(1, 2, 5, 5),
    "alibi_slopes": torch.zeros(2),
    "inference_params": object(),
    "softcap": 5.0,
}
_DPA_ONLY: dict[str, Any] = {
    "fp8_output": True,
    "bf16_backward": True,
    "num_splits": 2,
    "score_mod": lambda *args: args[0],
    "score_mod_bprop": lambda *args: args[0],
    "score_mod_tensors": {"x": torch.zeros(1)},
    "score_mod_bprop_tensors": {"x": torch.zeros(1)},
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("name", _REFUSED_CALLS)
@pytest.mark.parametrize("policies", [None, POLICIES], ids=["scalar", "policies"])
def test_call_refusals(kind: str, name: str, policies: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"{name}=.* is not supported: "):
        call(kind, **{name: _REFUSED_CALLS[name]}, thd_attention_policies=policies)


@pytest.mark.parametrize("name", _DPA_ONLY)
def test_call_refusals_of_dot_product_attention(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{name}=.* is not supported: "):
        call("dpa", **{name: _DPA_ONLY[name]})


@pytest.mark.parametrize("kind", MODULES)
def test_explicit_mask_type_is_refused(kind: str) -> None:
    with pytest.raises(NotImplementedError, match="attn_mask_type='arbitrary'"):
        make(kind, attn_mask_type="arbitrary")
    with pytest.raises(NotImplementedError, match="attn_mask_type='arbitrary'"):
        call(kind, attn_mask_type="arbitrary")
    if kind == "layer":
        with pytest.raises(NotImplementedError, match="enc_dec_attn_mask=Tensor"):
            call(kind, enc_dec_attn_mask=torch.zeros(1))
        with pytest.raises(NotImplementedError, match="enc_dec_attn_mask_type='arbitrary'"):
            make(kind, enc_dec_attn_mask_type="arbitrary")


@pytest.mark.parametrize("kind", ["mha", "layer"])
@pytest.mark.parametrize("argument", [{"tp_size": 2}, {"tp_group": object()}, {"fuse_wgrad_accumulation": True}])
def test_communication_is_refused(kind: str, argument: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"{next(iter(argument))}=.* is not supported: ") as error:
        make(kind, **argument)
    assert ("replicate them (DDP) or shard their parameters with FSDP2" in str(error.value)) == ("tp_" in str(argument))


@pytest.mark.parametrize("argument", [{"drop_path_rate": 0.1}, {"ub_tp_comm_overlap": True}])
def test_layer_only_refusals(argument: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"{next(iter(argument))}=.* is not supported: "):
        make("layer", **argument)
    with pytest.raises(NotImplementedError, match="ub_overlap_ag=True"):
        make("mha", ub_overlap_ag=True)


@pytest.mark.parametrize("kind", MODULES)
def test_context_parallelism_is_refused(kind: str) -> None:
    module: Any = make(kind)
    with pytest.raises(NotImplementedError, match="context parallelism"):
        module.set_context_parallel_group(object(), [0], None, "p2p")
    module.set_context_parallel_group(None, None, None)
    if kind == "dpa":
        with pytest.raises(NotImplementedError, match="cp_group=object is not supported: context parallelism"):
            make(kind, cp_group=object())
    else:
        with pytest.raises(NotImplementedError, match="tp_group=object is not supported"):
            module.set_tensor_parallel_group(object())
        module.set_tensor_parallel_group(None)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"thd_attention_policies": POLICIES, "attn_mask_type": "padding"}, "attn_mask_type='padding' cannot stand beside"),
        ({"thd_attention_policies": POLICIES, "window_size": (1, 1)}, r"window_size=\(1, 1\) cannot stand beside"),
        ({"thd_attention_policy_dispatch": "grouped"}, "thd_attention_policy_dispatch='grouped' needs thd_attention_policies"),
        ({"thd_attention_policies": POLICIES, "thd_attention_policy_dispatch": "fast"}, "='fast' is unknown"),
        ({"thd_attention_policies": POLICIES[:1]}, "must cover every sequence: sequence 1"),
        ({"thd_attention_policies": []}, "at least one policy"),
        ({"attn_mask_type": "causal"}, "attn_mask_type='causal' does not fit the packed"),
        ({"attn_mask_type": "padding_causal", "window_size": (-1, 2)}, "window_size"),
        ({"attn_mask_type": "sideways"}, "attn_mask_type='sideways' is no mask type"),
        ({"cu_seqlens_q": None}, "cu_seqlens_q is needed"),
        ({"pad_between_seqs": False, "cu_seqlens_q_padded": CU.clone()}, "pad_between_seqs=False contradicts"),
        ({"backend": "nonesuch"}, "backend='nonesuch' is unknown"),
        ({"selection": "guessed"}, "selection='guessed' is unknown"),
        ({"pad_between_seqs": "no"}, "pad_between_seqs must be a bool or None"),
        ({"checkpoint_core_attention": 1}, "checkpoint_core_attention must be a bool"),
        ({"thd_attention_policies": POLICIES, "bottom_right_diagonal": "x"}, "bottom_right_diagonal must be a bool"),
    ],
)
def test_contradictions_are_named(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(kind, **changes)


@pytest.mark.parametrize("kind", MODULES)
def test_policies_need_the_packed_layout(kind: str) -> None:
    module = make(kind, qkv_format="bshd", attn_mask_type="causal")
    x = torch.randn(2, 5, 16)
    inputs = [x.unflatten(2, (2, 8))] * 3 if kind == "dpa" else [x]
    with pytest.raises(ValueError, match="thd_attention_policies needs qkv_format 'thd', got 'bshd'"):
        module(*inputs, thd_attention_policies=POLICIES)
    with pytest.raises(ValueError, match="thd_attention_policy_dispatch='grouped' needs thd_attention_policies"):
        module(*inputs, thd_attention_policy_dispatch="grouped")


def test_max_logit_with_policies_is_refused() -> None:
    module = make("dpa", return_max_logit=True)
    with pytest.raises(NotImplementedError, match="return_max_logit=True is not supported together with"):
        call("dpa", module, thd_attention_policies=POLICIES)


@pytest.mark.parametrize("kind", MODULES)
def test_an_override_that_cannot_run_gives_the_reasons(kind: str) -> None:
    with pytest.raises(NoBackendError, match=r"flash2 .*: "):
        call(kind, backend="flash2")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kv_lora_rank": 4}, ValueError, "needs qk_nope_head_dim, qk_rope_head_dim, v_head_dim too"),
        ({"kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 3, "v_head_dim": 4}, ValueError, "must be even, got 3"),
        ({"q_lora_rank": 4}, ValueError, "needs kv_lora_rank"),
        ({"kv_lora_rank": 0}, ValueError, "kv_lora_rank must be at least 1, got 0"),
        ({"kv_channels": 8}, ValueError, "kv_channels=8 does not fit"),
        ({"qk_norm_type": "RMSNorm"}, ValueError, "qk_norm_type='RMSNorm' does not fit"),
        ({"num_gqa_groups": 1}, ValueError, "num_gqa_groups=1 does not fit"),
        ({"attention_type": "cross"}, NotImplementedError, "attention_type='cross'"),
        ({"normalization": "BatchNorm"}, ValueError, "normalization='BatchNorm' is unknown"),
    ],
)
def test_latent_attention_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    complete = {"kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    alone = "too" in message or "needs" in message
    with pytest.raises(error, match=message):
        make("mha", **(options if alone else {**complete, **options}))
    with pytest.raises(ValueError, match="one tensor"):
        call("mha", make("mha", **complete), rotary_pos_emb=(torch.zeros(8, 1, 1, 4),) * 2)
    for width in (2, 6):
        with pytest.raises(ValueError, match=f"rotary_pos_emb must be as wide as qk_rope_head_dim, 4, got {width}"):
            call("mha", make("mha", **complete), rotary_pos_emb=torch.zeros(8, 1, 1, width))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("mha", {"qk_norm_type": "BatchNorm"}, "qk_norm_type='BatchNorm' is unknown"),
        ("mha", {"normalization": "BatchNorm", "input_layernorm": True}, "normalization='BatchNorm' is unknown"),
        ("mha", {"activation_checkpointing": "some"}, "activation_checkpointing='some' is unknown"),
        ("layer", {"activation": "tanh"}, "activation='tanh' is unknown"),
        ("layer", {"activation_params": {"limit": 1.0}}, "activation_params has unknown keys limit for activation 'gelu'"),
        ("layer", {"layer_type": "both"}, "layer_type='both' is unknown"),
        ("layer", {"parallel_attention_mlp": True, "output_layernorm": True}, "parallel_attention_mlp=True needs"),
        ("layer", {"qkv_format": "bhsd"}, "attn_input_format='bhsd' is unknown"),
        ("mha", {"num_attention_heads": 3}, "hidden_size must be a multiple of num_attention_heads where .* got 16 and 3"),
        ("layer", {"num_attention_heads": 32}, "hidden_size must be a multiple of num_attention_heads where .* got 16 and 32"),
        ("mha", {"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ("layer", {"ffn_hidden_size": 0}, "ffn_hidden_size must be at least 1, got 0"),
        ("layer", {"enc_dec_attn_mask_type": "sideways"}, "enc_dec_attn_mask_type='sideways' is no mask type"),
        ("layer", {"enc_dec_window_size": (1,)}, r"enc_dec_window_size must be a pair .* got \(1,\)"),
    ],
)
def test_wrong_constructor_arguments_are_named(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(kind, **options)


@pytest.mark.parametrize("kind", ["mha", "layer"])
@pytest.mark.parametrize("dtype", ["bfloat16", torch.int32])
def test_params_dtype_must_be_a_floating_point_dtype(kind: str, dtype: Any) -> None:
    with pytest.raises(TypeError, match=f"params_dtype must be a floating-point torch.dtype or None, got {dtype!r}"):
        make(kind, params_dtype=dtype)


@pytest.mark.parametrize(
    ("layout", "right", "wrong"),
    [
        ("thd", r"\[tokens, hidden_size\]", [(8, 1, 16), (8,), (8, 12)]),
        ("sbhd", r"\[s, b, hidden_size\]", [(8, 16), (8, 1, 12)]),
        ("bshd", r"\[b, s, hidden_size\]", [(8, 16), (1, 8, 12)]),
    ],
)
@pytest.mark.parametrize("kind", ["mha", "layer", "mla"])
def test_hidden_states_of_another_shape_are_named(kind: str, layout: str, right: str, wrong: list[tuple[int, ...]]) -> None:
    options = {"kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4} if kind == "mla" else {}
    module = make("layer" if kind == "layer" else "mha", qkv_format=layout, **options)
    for shape in wrong:
        seen = str(shape).replace("(", r"\(").replace(")", r"\)")
        with pytest.raises(ValueError, match=f"hidden_states must be {right} in {layout}, with hidden_size 16, got shape {seen}"):
            module(torch.randn(shape), cu_seqlens_q=CU, max_seqlen_q=5)
    with pytest.raises(TypeError, match=f"hidden_states must be a tensor {right}, got list"):
        module([1.0], cu_seqlens_q=CU, max_seqlen_q=5)


@pytest.mark.parametrize("kind", ["mha", "layer"])
def test_encoder_outputs_of_another_shape_are_named_before_anything_runs(kind: str) -> None:
    options = {"attention_type": "cross"} if kind == "mha" else {"layer_type": "decoder", "enc_dec_attn_mask_type": "padding"}
    module: Any = make(kind, **options)
    first = module.query_layer if kind == "mha" else module.self_attention
    message = r"encoder_output must be \[tokens, hidden_size\] in thd.* got shape \(4, 12\)"
    with mock.patch.object(first, "forward", side_effect=AssertionError("ran")), pytest.raises(ValueError, match=message):
        call(kind, module, encoder_output=torch.randn(4, 12), cu_seqlens_kv=CU)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"enc_dec_attn_mask_type": "sideways"}, ValueError, "enc_dec_attn_mask_type='sideways' is no mask type"),
        ({"enc_dec_attn_mask_type": 3}, TypeError, "enc_dec_attn_mask_type must be a string, got int"),
        ({"enc_dec_attn_mask_type": "arbitrary"}, NotImplementedError, "enc_dec_attn_mask_type='arbitrary'"),
        ({"enc_dec_window_size": (1, 2, 3)}, ValueError, "enc_dec_window_size must be a pair"),
        ({"enc_dec_window_size": (-2, 0)}, ValueError, r"enc_dec_window_size=\(-2, 0\)"),
        ({"enc_dec_bottom_right_diagonal": 1}, TypeError, "enc_dec_bottom_right_diagonal must be a bool or None"),
        ({"encoder_output": [1.0]}, TypeError, "encoder_output must be a tensor or None, got list"),
        ({"cu_seqlens_kv": [0, 3, 8]}, TypeError, "cu_seqlens_kv must be a tensor"),
        ({"cu_seqlens_kv": CU[:2]}, ValueError, "cu_seqlens_kv must have as many entries as cu_seqlens_q"),
        ({"cu_seqlens_kv": torch.tensor([0, 3, 99])}, ValueError, "cu_seqlens_kv: the last entry is 99, beyond the 8 rows"),
        ({"cu_seqlens_kv_padded": CU.clone()}, ValueError, "must be given together"),
        ({"max_seqlen_kv": 2}, ValueError, "max_seqlen_kv=2 is below the longest sequence"),
        ({"max_seqlen_kv": "x"}, TypeError, "max_seqlen_kv must be an int"),
    ],
)
def test_an_encoder_checks_what_only_a_decoder_reads(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call("layer", **changes)
    # TransformerEngine's callers give an encoder these, right ones.
    right = {"encoder_output": torch.randn(3, 4), "enc_dec_attn_mask_type": "no_mask", "enc_dec_window_size": (1, 1)}
    assert call("layer", **right).shape == (8, 16)


def test_cross_attention_needs_an_encoder_output() -> None:
    with pytest.raises(ValueError, match="encoder_output is needed by layer_type 'decoder'"):
        call("layer", make("layer", layer_type="decoder", enc_dec_attn_mask_type="padding"))


def test_argument_order_is_transformer_engines() -> None:
    """Positional calls written for TransformerEngine 2.20 mean the same here."""

    def positional(function: Any) -> list[str]:
        kinds = inspect.signature(function).parameters.items()
        return [name for name, parameter in kinds if parameter.kind is parameter.POSITIONAL_OR_KEYWORD][1:]

    assert positional(DotProductAttention.__init__)[:8] == [
        "num_attention_heads", "kv_channels", "num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type", "window_size",
        "bottom_right_diagonal",
    ]  # fmt: skip
    forward = positional(DotProductAttention.forward)
    assert forward[:13] == [
        "query_layer", "key_layer", "value_layer", "attention_mask", "qkv_format", "cu_seqlens_q", "cu_seqlens_kv",
        "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv", "attn_mask_type", "window_size",
    ]  # fmt: skip
    assert forward[-5:] == [
        "qkv_layer", "kv_layer", "qkv_interleave_dim", "thd_attention_policies", "thd_attention_policy_dispatch",
    ]  # fmt: skip
    for module in (MultiheadAttention, TransformerLayer):
        assert positional(module.forward)[-3:] == ["thd_attention_policies", "thd_attention_policy_dispatch", "softcap"]
    assert positional(TransformerLayer.__init__)[:7] == [
        "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_gqa_groups", "layernorm_epsilon", "hidden_dropout",
        "attention_dropout",
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- no host sync
@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm_type": "RMSNorm", "num_gqa_groups": 1},
        {"fuse_qkv_params": True},
        {"kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 8, "v_head_dim": 6},
        {"layer_type": "decoder", "enc_dec_attn_mask_type": "padding"},
        {"attn_input_format": "sbhd", "self_attn_mask_type": "padding_causal"},
    ],
    ids=["gqa_qk_norm", "fused", "mla", "decoder", "sbhd"],
)
def test_a_training_step_reads_nothing_on_the_host(options: dict[str, Any]) -> None:
    layer = make("layer", **options)
    padded = torch.tensor([0, 4, 10], dtype=torch.int32)
    rope = RotaryPositionEmbedding(8, device="cpu")(6)
    dense = "attn_input_format" in options
    prepared = None if dense else prepare_thd_policies(POLICIES, CU, cu_seqlens_q_padded=padded)

    def step(params: Any, x: Any, rope: Any, cu: Any, padded: Any, policies: Any) -> Any:
        call: dict[str, Any] = {"cu_seqlens_q": cu, "max_seqlen_q": 5, "rotary_pos_emb": rope, "thd_attention_policies": policies}
        if not dense:
            call["cu_seqlens_q_padded"] = padded
        if "layer_type" in options:
            call.update(encoder_output=x, cu_seqlens_kv=cu, cu_seqlens_kv_padded=padded, max_seqlen_kv=5)
        out = torch.func.functional_call(layer, params, (x,), call)
        return torch.autograd.grad(out.sum(), list(params.values()))

    x = torch.randn(5, 2, 16) if dense else torch.randn(12, 16)
    grads = trace_without_sync(step, dict(layer.named_parameters()), x, rope, CU, padded, prepared)
    assert [grad.shape for grad in grads] == [p.shape for p in layer.parameters()]


# ------------------------------------------------------------------------------------------------- under the names that the user has
def test_a_decoders_masks_are_named_before_anything_runs() -> None:
    options = {"attn_input_format": "thd", "self_attn_mask_type": "padding_causal", "layer_type": "decoder", "device": "cpu"}
    layer, x = TransformerLayer(16, 24, 2, **options), torch.randn(8, 16)
    arguments = {"cu_seqlens_q": CU, "max_seqlen_q": 5, "cu_seqlens_kv": CU, "max_seqlen_kv": 5}
    with mock.patch.object(layer.self_attention, "forward", side_effect=AssertionError("ran")):
        with pytest.raises(ValueError, match="enc_dec_attn_mask_type='no_mask' does not fit the packed"):
            layer(x, encoder_output=x, **arguments)
        with pytest.raises(ValueError, match="self_attn_mask_type='foo' is no mask type; use one of padding, "):
            layer(x, encoder_output=x, self_attn_mask_type="foo", enc_dec_attn_mask_type="padding", **arguments)
        with pytest.raises(ValueError, match="encoder_output is needed by layer_type 'decoder', got None"):
            layer(x, enc_dec_attn_mask_type="padding", **arguments)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((4, "64"), {}, TypeError, "kv_channels must be a positive int or a pair .* got '64'"),
        ((4, 8.0), {}, TypeError, "kv_channels must be a positive int or a pair .* got 8.0"),
        ((4, 0), {}, TypeError, "kv_channels must be a positive int or a pair .* got 0"),
        ((4.0, 8), {}, TypeError, "num_attention_heads must be an int, got float 4.0"),
        ((4, 8), {"backend": "flash9"}, ValueError, "backend='flash9' is unknown; use one of unfused"),
        ((4, 8), {"pad_head_dim": "yes"}, TypeError, "pad_head_dim must be a bool or None, got str 'yes'"),
        ((4, 8), {"selection": "x"}, ValueError, "selection='x' is unknown"),
        ((4, 8), {"softmax_scale": "x"}, TypeError, "softmax_scale must be a number or None, got str 'x'"),
        ((4, 8), {"softmax_scale": -1.0}, ValueError, "softmax_scale must be positive and finite, got -1.0"),
    ],
)
def test_a_constructor_checks_what_its_calls_would_meet(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        DotProductAttention(*arguments, **options)


def test_inputs_that_are_no_tensors_are_named() -> None:
    module = DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding")
    x = torch.randn(5, 2, 8)
    with pytest.raises(TypeError, match="key_layer must be a tensor, got list"):
        module(x, [1.0], x, cu_seqlens_q=CU, max_seqlen_q=3)
    layer = MultiheadAttention(16, 2, attention_dropout=0.0, attn_mask_type="padding", qkv_format="thd", device="cpu")
    hidden = torch.randn(8, 16)
    with pytest.raises(TypeError, match="rotary_pos_emb must be a tensor, got list"):
        layer(hidden, rotary_pos_emb=[1.0], cu_seqlens_q=CU, max_seqlen_q=5)
    with pytest.raises(TypeError, match=r"cu_seqlens_q must be a tensor .* got list"):
        layer(hidden, rotary_pos_emb=RotaryPositionEmbedding(8, device="cpu")(8), cu_seqlens_q=[0, 3, 8], max_seqlen_q=5)
    with pytest.raises(ValueError, match="rotary_pos_emb must be a tensor or a pair of them, got 3"):
        layer(hidden, rotary_pos_emb=(hidden,) * 3, cu_seqlens_q=CU, max_seqlen_q=5)
    dense, x = DotProductAttention(2, 8, qkv_format="bshd", attn_mask_type="padding"), torch.randn(2, 4, 2, 8)
    with pytest.raises(ValueError, match="cu_seqlens_q must have 3 entries for a batch of 2, got 4"):
        dense(x, x, x, cu_seqlens_q=torch.tensor([0, 1, 2, 3]))
    with pytest.raises(TypeError, match=r"kv_channels must be an int, got \(8, 4\)"):
        MultiheadAttention(16, 2, (8, 4), device="cpu")
    with pytest.raises(ValueError, match="hidden_dropout must be a probability, from 0 to 1, got 'a'"):
        TransformerLayer(16, 24, 2, hidden_dropout="a", device="cpu")


def test_numbers_of_other_libraries_are_numbers() -> None:
    options = {"qkv_format": "thd", "attn_mask_type": "padding", "softmax_scale": np.float64(0.5)}
    module = DotProductAttention(np.int64(2), np.int64(8), np.int64(2), **options)
    x = torch.randn(8, 2, 8)
    assert module(x, x, x, cu_seqlens_q=CU, max_seqlen_q=5).shape == (8, 16) and type(module.softmax_scale) is float
    assert DotProductAttention(2, np.array([16, 8])).head_dim_v == 8
    assert TransformerLayer(16, 24, 2, hidden_dropout=np.float32(0.5), device="cpu").hidden_dropout == 0.5
    assert MultiheadAttention(16, 2, 0, device="cpu").head_dim == 8  # 0 is the default width
    assert MultiheadAttention(3, 4, np.int64(2), device="cpu").proj.weight.shape == (3, 8)


@pytest.mark.parametrize("kind", MODULES)
def test_meta_tensors_reach_what_can_be_said_about_them(kind: str) -> None:
    """Autocast has nothing to look up for them."""
    module = make(kind).to("meta")
    x = torch.randn(8, 2, 8, device="meta") if kind == "dpa" else torch.randn(8, 16, device="meta")
    with torch.autocast("cpu", torch.bfloat16):
        out = module(*[x] * (3 if kind == "dpa" else 1), cu_seqlens_q=CU.to("meta"), max_seqlen_q=5)
    assert out.is_meta and out.shape == (8, 16)
