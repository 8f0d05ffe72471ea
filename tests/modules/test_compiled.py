"""The modules compiled as one graph, against themselves in eager. More stands in ``compile_tests``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from te_attn_ops import prepare_thd_policies
from te_attn_ops.environment import version_tuple
from te_attn_ops.modules import DotProductAttention, MultiheadAttention, RotaryPositionEmbedding, TransformerLayer
from te_attn_ops.testing import CAUSAL, FULL, Mask, policy_list

MASKS = (CAUSAL, FULL, Mask("padding", (2, 1)))
MLA = {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 6}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Batch:
    """Documents with gaps, a policy each in turn; no dimension is marked, so the number of tokens becomes dynamic by itself."""

    def __init__(self, lengths: Sequence[int], width: int = 32) -> None:
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        padded = cu + torch.arange(len(lengths) + 1, dtype=torch.int32)
        policies = policy_list(MASKS, [n % len(MASKS) for n in range(len(lengths))], "cpu")
        self.call: dict[str, Any] = {
            "cu_seqlens_q": cu,
            "cu_seqlens_q_padded": padded,
            "max_seqlen_q": max(lengths),
            "thd_attention_policies": prepare_thd_policies(policies, cu, cu_seqlens_q_padded=padded),
        }
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(int(padded[-1]), width, generator=generator).requires_grad_()


BATCHES = ((5, 9, 3, 4), (4, 4, 4, 8, 2), (3, 3, 3, 3, 3, 30))


def gradients(out: Tensor, x: Tensor, module: torch.nn.Module) -> list[Tensor]:
    return [out, *torch.autograd.grad((out * torch.linspace(-1, 1, out.shape[-1])).sum(), [x, *module.parameters()])]


def assert_compiles_once_for_all_batches(module: torch.nn.Module, call: Any, backend: str = "aot_eager") -> None:
    """Outputs and gradients equal eager for every batch; after the first one nothing is compiled any more."""
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for number, lengths in enumerate(BATCHES):
        batch = Batch(lengths)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            results = gradients(call(compiled, batch), batch.x, module)
        for got, want in zip(results, gradients(call(module, batch), batch.x, module)):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_dot_product_attention() -> None:
    module = DotProductAttention(2, 16, qkv_format="thd")

    def call(function: Any, batch: Batch) -> Tensor:
        packed = torch.stack((batch.x, batch.x.sin(), batch.x.cos()), 1).unflatten(2, (2, 16))
        return function(qkv_layer=packed, **batch.call)

    assert_compiles_once_for_all_batches(module, call, "inductor")


def test_multihead_attention() -> None:
    module = MultiheadAttention(32, 2, num_gqa_groups=1, qkv_format="thd", qk_norm_type="RMSNorm", device="cpu")
    rope = RotaryPositionEmbedding(16, device="cpu")(64)
    assert_compiles_once_for_all_batches(module, lambda function, batch: function(batch.x, rotary_pos_emb=rope, **batch.call))


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({"normalization": "RMSNorm", "activation": "swiglu", "fuse_qkv_params": True}, "inductor"),
        ({**MLA, "rotary_pos_interleaved": True}, "aot_eager"),
        ({"activation_checkpointing": "full"}, "aot_eager"),
        ({"activation_checkpointing": "selective"}, "aot_eager"),
    ],
    ids=["mha", "mla", "full_checkpointing", "selective_checkpointing"],
)
def test_transformer_layer(options: dict[str, Any], backend: str) -> None:
    torch.manual_seed(0)
    layer = TransformerLayer(32, 24, 2, hidden_dropout=0.0, attn_input_format="thd", device="cpu", **options)
    rope = RotaryPositionEmbedding(8 if "kv_lora_rank" in options else 16, device="cpu")(64)
    assert_compiles_once_for_all_batches(
        layer, lambda function, batch: function(batch.x, rotary_pos_emb=rope, **batch.call), backend
    )


def test_decoder_with_cross_attention() -> None:
    torch.manual_seed(0)
    layer = TransformerLayer(
        32, 24, 2, hidden_dropout=0.0, attn_input_format="thd", layer_type="decoder", enc_dec_attn_mask_type="padding", device="cpu"
    )

    def call(function: Any, batch: Batch) -> Tensor:
        plain, padded = batch.call["cu_seqlens_q"], batch.call["cu_seqlens_q_padded"]
        return function(
            batch.x, encoder_output=batch.x.sin(), cu_seqlens_kv=plain, cu_seqlens_kv_padded=padded,
            max_seqlen_kv=batch.call["max_seqlen_q"], **batch.call,
        )  # fmt: skip

    assert_compiles_once_for_all_batches(layer, call)


@pytest.mark.parametrize(("layout", "mask"), [("sbhd", "causal"), ("bshd", "padding_causal")])
def test_dense_layouts(layout: str, mask: str) -> None:
    torch.manual_seed(0)
    layer = TransformerLayer(32, 24, 2, hidden_dropout=0.0, attn_input_format=layout, self_attn_mask_type=mask, device="cpu")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    cu = torch.tensor([0, 3, 7, 8], dtype=torch.int32)
    for length in (6, 9):
        x = torch.randn(length, 3, 32) if layout == "sbhd" else torch.randn(3, length, 32)
        x.requires_grad_()
        call = {"cu_seqlens_q": cu} if mask == "padding_causal" else {}
        with torch.compiler.set_stance("default" if length == 6 else "fail_on_recompile"):
            results = gradients(compiled(x, **call), x, layer)
        for got, want in zip(results, gradients(layer(x, **call), x, layer)):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("dynamic", [True, None])
def test_dense_batch_sizes(layout: str, dynamic: bool | None) -> None:
    """A symbolic number of samples is one graph. Dynamo takes the first one, and 1, for constants where it is not told otherwise."""
    torch.manual_seed(0)
    layer = TransformerLayer(32, 24, 2, hidden_dropout=0.0, attn_input_format=layout, self_attn_mask_type="causal", device="cpu")
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)
    for batch in range(2, 14):
        x = torch.randn(5, batch, 32) if layout == "sbhd" else torch.randn(batch, 5, 32)
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)
    assert len(graphs) == (1 if dynamic else 2)


def test_layers_compiled_one_by_one_share_a_graph() -> None:
    """Regional compilation: more layers than Dynamo's recompile limit, each compiled by itself, with a number and a name."""
    layers = torch.nn.ModuleList(
        TransformerLayer(32, 24, 2, hidden_dropout=0.0, attn_input_format="thd", layer_number=n + 1, name=f"l{n}", device="cpu")
        for n in range(10)
    )
    batch = Batch(BATCHES[0])
    want = got = batch.x
    for layer in layers:
        want = layer(want, **batch.call)
    for n, layer in enumerate(layers):
        layer.compile(fullgraph=True, dynamic=True, backend="aot_eager")
        # The second layer's input is the first one that another layer made.
        with torch.compiler.set_stance("fail_on_recompile" if n > 1 else "default"):
            got = layer(got, **batch.call)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_compiled_under_autocast() -> None:
    torch.manual_seed(0)
    layer = TransformerLayer(32, 24, 2, hidden_dropout=0.0, attn_input_format="thd", qk_norm_type="LayerNorm", device="cpu")
    batch = Batch(BATCHES[0])
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        got, want = compiled(batch.x, **batch.call), layer(batch.x, **batch.call)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_missing_max_seqlen_and_raw_lists_are_refused_with_the_remedy() -> None:
    layer = TransformerLayer(32, 24, 2, hidden_dropout=0.0, attn_input_format="thd", device="cpu")
    batch = Batch(BATCHES[0])
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    # Dynamo of torch 2.8 says only that an exception was raised, and where.
    tells = version_tuple(torch.__version__) >= (2, 11)
    with pytest.raises(Exception, match="max_seqlen_q is needed under" if tells else "exception"):
        compiled(batch.x, **{**batch.call, "max_seqlen_q": None})
    raw = policy_list((FULL,), (0,) * 4, "cpu")
    with pytest.raises(Exception, match="must be what prepare_thd_policies returns" if tells else "exception"):
        compiled(batch.x, **{**batch.call, "thd_attention_policies": raw})


def test_an_encoder_with_key_lengths_of_its_own_and_cross_attention_arguments() -> None:
    torch.manual_seed(0)
    layer = TransformerLayer(
        32, 24, 2, hidden_dropout=0.0, attn_input_format="thd", self_attn_mask_type="padding", device="cpu"
    )
    rope = RotaryPositionEmbedding(16, device="cpu")(64)

    def call(function: Any, batch: Batch) -> Tensor:
        plain, padded = batch.call["cu_seqlens_q"], batch.call["cu_seqlens_q_padded"]
        return function(
            batch.x, cu_seqlens_q=plain, cu_seqlens_kv=padded, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded, max_seqlen_q=30,
            max_seqlen_kv=31, rotary_pos_emb=rope, enc_dec_attn_mask_type="causal", enc_dec_window_size=(2, 0),
            encoder_output=batch.x.detach(),
        )  # fmt: skip

    assert_compiles_once_for_all_batches(layer, call)


def test_angles_made_inside_the_compiled_model_of_a_cast_model() -> None:
    """The remedy that an error names: RotaryPositionEmbedding inside the wrapped module."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope = RotaryPositionEmbedding(16, device="cpu")
            self.layer = TransformerLayer(32, 24, 2, hidden_dropout=0.0, attn_input_format="thd", device="cpu")

        def forward(self, x: Tensor, **call: Any) -> Tensor:
            return self.layer(x, rotary_pos_emb=self.rope(64), **call)

    torch.manual_seed(0)
    model = Model().bfloat16()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    batch = Batch(BATCHES[0])
    x = batch.x.bfloat16()
    torch.testing.assert_close(compiled(x, **batch.call), model(x, **batch.call), rtol=2e-2, atol=2e-2)
