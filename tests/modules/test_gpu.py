"""The layers on CUDA: half precision against the float64 model of each document, no host sync, captured graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from te_attn_ops import NoBackendError, prepare_thd_policies, refresh_thd_policies
from te_attn_ops.modules import RotaryPositionEmbedding, TransformerLayer
from te_attn_ops.testing import CAUSAL, FULL, Mask, no_cuda_sync, policy_list
from tests.modules.reference import Reference, parameters_of

pytestmark = pytest.mark.gpu

HIDDEN, FFN, HEADS = 256, 192, 4
LENGTHS, GAPS = (130, 77, 200, 0, 33), (0, 3, 9, 0, 2)
MASKS, OWNER = (CAUSAL, FULL, Mask("padding", (40, 9))), (0, 1, 2, 0, 1)
LAYERS: dict[str, dict[str, Any]] = {
    "mha": {"fuse_qkv_params": True, "normalization": "RMSNorm", "activation": "swiglu", "bias": False},
    "gqa_qk_norm": {"num_gqa_groups": 2, "qk_norm_type": "RMSNorm"},
    "mla": {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}


def offsets(lengths: tuple[int, ...], gaps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    plain = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    return plain, plain + torch.tensor([0, *gaps], device="cuda").cumsum(0).to(torch.int32)


class Setup:
    """A bfloat16 layer, a batch and its arguments."""

    def __init__(self, name: str, **changes: Any) -> None:
        torch.manual_seed(0)
        self.config = {**LAYERS[name], **changes}
        self.layer = TransformerLayer(
            HIDDEN, FFN, HEADS, hidden_dropout=0.0, attn_input_format="thd", params_dtype=torch.bfloat16, **self.config
        )
        assert next(self.layer.parameters()).is_cuda
        self.cu_seqlens, self.padded = offsets(LENGTHS, GAPS)
        self.rope = RotaryPositionEmbedding(64, device="cuda")(max(LENGTHS))
        self.x = torch.randn(int(self.padded[-1]), HIDDEN, device="cuda").bfloat16().requires_grad_()
        self.prepared = prepare_thd_policies(
            policy_list(MASKS, OWNER, "cuda"),
            self.cu_seqlens,
            cu_seqlens_q_padded=self.padded,
            attention=self.layer,
            total_q=self.x.shape[0],
        )
        self.call: dict[str, Any] = {
            "cu_seqlens_q": self.cu_seqlens,
            "cu_seqlens_q_padded": self.padded,
            "max_seqlen_q": max(LENGTHS),
            "rotary_pos_emb": self.rope,
            "thd_attention_policies": self.prepared,
        }

    def gradients(self, out: Tensor, layer: torch.nn.Module | None = None) -> list[Tensor]:
        """of the real rows' sum of squares, in the parameters' order"""
        rows = torch.cat([out[start : start + length] for start, length in zip(self.padded.tolist(), LENGTHS)])
        return list(torch.autograd.grad(rows.float().square().sum(), [self.x, *(layer or self.layer).parameters()]))


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double().cpu() - want.double().cpu()).norm() / want.double().norm().clamp(min=1e-12))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dispatch", ["auto", "padded", "single_launch", "grouped"])
def test_layer_equals_each_document_alone(name: str, dispatch: str) -> None:
    setup = Setup(name)
    try:
        out = setup.layer(setup.x, thd_attention_policy_dispatch=dispatch, **setup.call)
    except NoBackendError as error:
        pytest.skip(str(error).splitlines()[-1].strip())
    grads = setup.gradients(out)
    params = parameters_of(copy.deepcopy(setup.layer).cpu())
    reference = Reference(HIDDEN, HEADS, setup.config, params)
    x, rope = setup.x.detach().double().cpu().requires_grad_(), setup.rope.double().cpu()
    starts = setup.padded.tolist()
    parts = [
        reference.layer(x[start : start + length], MASKS[owner], rope) for start, length, owner in zip(starts, LENGTHS, OWNER)
    ]
    for start, part in zip(starts, parts):
        # TransformerEngine's tolerance for a layer.
        torch.testing.assert_close(out[start : start + len(part)].double().cpu(), part.detach(), rtol=5e-2, atol=5e-2)
    wanted = torch.autograd.grad(torch.cat(parts).square().sum(), [x, *params.values()])
    for label, got, want in zip(["x", *params], grads, wanted):
        assert relative_error(got, want) < 5e-2, label


@pytest.mark.parametrize("name", LAYERS)
def test_a_training_step_does_not_sync(name: str) -> None:
    setup = Setup(name)
    upstream = torch.randn_like(setup.x)

    def step() -> None:
        torch.autograd.backward(setup.layer(setup.x, **setup.call), upstream)

    step()
    torch.cuda.synchronize()
    with no_cuda_sync():
        step()


OTHER_LENGTHS, OTHER_OWNER = (90, 110, 41, 180, 5), (1, 0, 0, 2, 2)


@pytest.mark.parametrize("name", LAYERS)
def test_make_graphed_callables_follows_the_contents(name: str) -> None:
    """One captured layer, forward and backward, replayed with another geometry and another partition of as many sequences."""
    setup = Setup(name)
    prepared = prepare_thd_policies(
        policy_list(MASKS, OWNER, "cuda"), setup.cu_seqlens, cu_seqlens_q_padded=setup.padded, mutable=True
    )
    call = {**setup.call, "thd_attention_policies": prepared}
    eager = copy.deepcopy(setup.layer)

    class Closed(torch.nn.Module):
        def __init__(self, layer: torch.nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, **call)

    graphed = torch.cuda.make_graphed_callables(Closed(setup.layer), (setup.x.detach().clone().requires_grad_(),))
    for lengths, owner in ((LENGTHS, OWNER), (OTHER_LENGTHS, OTHER_OWNER)):
        plain, padded = offsets(lengths, GAPS)
        refresh_thd_policies(prepared, policy_list(MASKS, owner, "cuda"), plain, cu_seqlens_q_padded=padded)
        setup.cu_seqlens.copy_(plain)
        setup.padded.copy_(padded)
        x = torch.randn_like(setup.x).requires_grad_()
        upstream = torch.randn_like(x)
        got, want = graphed(x), eager(x, **call)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        got_grads = torch.autograd.grad(got, [x, *setup.layer.parameters()], upstream)
        for a, b in zip(got_grads, torch.autograd.grad(want, [x, *eager.parameters()], upstream)):
            assert relative_error(a, b) < 2e-2


@pytest.mark.parametrize("name", ["mha", "mla"])
def test_reduce_overhead_follows_the_contents(name: str) -> None:
    """Inductor's CUDA graphs, in which a skip is an error; after the warm-up nothing is compiled."""
    setup = Setup(name)
    prepared = prepare_thd_policies(
        policy_list(MASKS, OWNER, "cuda"), setup.cu_seqlens, cu_seqlens_q_padded=setup.padded, mutable=True
    )
    call = {**setup.call, "thd_attention_policies": prepared}
    torch._dynamo.reset()
    compiled = torch.compile(setup.layer, fullgraph=True, mode="reduce-overhead")
    upstream = torch.randn_like(setup.x)
    batches = [(LENGTHS, OWNER), (OTHER_LENGTHS, OTHER_OWNER)] * 3
    with torch._inductor.config.patch({"triton.cudagraph_or_error": True}):
        for number, (lengths, owner) in enumerate(batches):
            plain, padded = offsets(lengths, GAPS)
            refresh_thd_policies(prepared, policy_list(MASKS, owner, "cuda"), plain, cu_seqlens_q_padded=padded)
            setup.cu_seqlens.copy_(plain)
            setup.padded.copy_(padded)
            torch.compiler.cudagraph_mark_step_begin()
            with torch.compiler.set_stance("fail_on_recompile" if number > 2 else "default"):
                got = compiled(setup.x, **call)
                grads = [g.clone() for g in torch.autograd.grad(got, [setup.x, *setup.layer.parameters()], upstream)]
            got = got.clone()
            want = setup.layer(setup.x, **call)
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
            for a, b in zip(grads, torch.autograd.grad(want, [setup.x, *setup.layer.parameters()], upstream)):
                assert relative_error(a, b) < 2e-2
