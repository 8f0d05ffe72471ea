"""Activation checkpointing: plain, and selective with the forward op as what must be saved. Kernel calls are counted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compile_tests.harness import AotGraphs, count_calls, counted
from te_attn_ops import ops, thd_attention
from te_attn_ops.modules import TransformerLayer, save_attention
from te_attn_ops.testing import CAUSAL, FULL, PackedCase, PackedInputs, build
from tests.stubs import Stub, install

CASES = {
    "scalar": PackedCase((5, 9)),
    "policies": PackedCase((5, 9), masks=(CAUSAL, FULL), owner=(0, 1)),
    "padded": PackedCase((5, 9), head_dim_qk=24, head_dim_v=16),
}


class Counting(Stub):
    """unfused, counting its calls."""

    def __init__(self) -> None:
        super().__init__("unfused", before_forward=lambda call: self.calls.append("forward"))
        self.calls: list[str] = []

    def backward(self, call: Any) -> None:
        self.calls.append("backward")
        super().backward(call)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Counting:
    stub = Counting()
    install(monkeypatch, stub)
    return stub


def must_save(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What a user writes: the op by its public name."""
    if op == torch.ops.te_attn_ops.attention_forward.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def block(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
    return thd_attention(q.sin(), k.cos(), v * 2, **arguments).tanh()


def checkpointed(how: str) -> Callable[..., Tensor]:
    options: dict[str, Any] = {"use_reentrant": how == "reentrant"}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, must_save)
    if how == "save_attention":
        options["context_fn"] = save_attention

    def function(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        return checkpoint(functools.partial(block, **arguments), q, k, v, **options)

    return function


def gradients(function: Callable[..., Tensor], inputs: PackedInputs, **changes: Any) -> tuple[Tensor, ...]:
    inputs.q.grad = inputs.k.grad = inputs.v.grad = None
    out = inputs.attend(function, **changes)
    out.backward(inputs.grad_out)
    return out.detach(), inputs.q.grad, inputs.k.grad, inputs.v.grad


def assert_gradients(function: Callable[..., Tensor], inputs: PackedInputs, **changes: Any) -> None:
    for got, want in zip(gradients(function, inputs, **changes), gradients(block, inputs, **changes)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["none", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", ["plain", "selective", "save_attention"])
def test_gradients(how: str, name: str, backend: str) -> None:
    inputs, function = build(CASES[name]), checkpointed(how)
    compiled = function if backend == "none" else counted(function, backend=backend)[0]
    assert_gradients(compiled, inputs, **({"pad_head_dim": True} if name == "padded" else {}))


@pytest.mark.parametrize("name", ["scalar", "policies"])
def test_reentrant_gradients(name: str) -> None:
    assert_gradients(checkpointed("reentrant"), build(CASES[name]))


@pytest.mark.parametrize("backend", ["none", "eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("how", ["selective", "save_attention"])
def test_selective_runs_the_forward_once_and_never_again(how: str, backend: str, kernel: Counting) -> None:
    inputs, function = build(CASES["scalar"]), checkpointed(how)
    if backend != "none":
        function = counted(function, backend=backend)[0]
    out = inputs.attend(function)
    assert kernel.calls == ["forward"]
    out.backward(inputs.grad_out)
    assert kernel.calls == ["forward", "backward"]


def test_plain_computes_attention_again(kernel: Counting) -> None:
    """The contrast: without the policy the forward runs twice."""
    inputs = build(CASES["scalar"])
    inputs.attend(checkpointed("plain")).backward(inputs.grad_out)
    assert kernel.calls == ["forward", "forward", "backward"]


@pytest.mark.parametrize(("how", "again"), [("plain", 1), ("selective", 0)])
def test_the_backward_graph(how: str, again: int) -> None:
    """What the partitioner makes of it: with the policy no attention forward in the backward graph; what is in front of attention
    is computed again either way."""
    inputs, graphs = build(CASES["scalar"]), AotGraphs()
    inputs.attend(torch.compile(checkpointed(how), fullgraph=True, backend=graphs)).backward(inputs.grad_out)
    assert count_calls(graphs.forward[0], "te_attn_ops.attention_forward") == 1
    assert count_calls(graphs.backward[0], "te_attn_ops.attention_forward") == again
    assert count_calls(graphs.backward[0], "aten.sin") >= 1


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
@pytest.mark.parametrize(("mode", "forwards"), [(None, 2), ("selective", 2), ("full", 4)])
def test_two_transformer_layers(mode: str | None, forwards: int, backend: str, kernel: Counting) -> None:
    torch.manual_seed(0)
    options = {"attn_input_format": "thd", "self_attn_mask_type": "padding_causal", "activation_checkpointing": mode}
    layers = [TransformerLayer(32, 24, 2, hidden_dropout=0.0, device="cpu", **options) for _ in range(2)]
    inputs, x = build(PackedCase((5, 9))), torch.randn(14, 32, requires_grad=True)

    def model(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x, cu_seqlens_q=inputs.cu_seqlens_q, max_seqlen_q=9)
        return x

    function = model if backend == "none" else counted(model, backend=backend)[0]
    function(x).sum().backward()
    assert kernel.calls.count("forward") == forwards and kernel.calls.count("backward") == 2


def test_the_name_to_save_is_the_raw_forward() -> None:
    """In a checkpoint's policy modes see what is below autograd: the raw op, not the differentiable one."""
    seen: set[Any] = set()

    def note(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.add(op)
        return CheckpointPolicy.PREFER_RECOMPUTE

    inputs = build(CASES["scalar"])
    context = functools.partial(create_selective_checkpoint_contexts, note)
    checkpoint(functools.partial(block, **inputs.arguments()), inputs.q, inputs.k, inputs.v, use_reentrant=False, context_fn=context)
    assert ops.attention_forward in seen and ops.attention not in seen


def test_a_checkpoint_around_a_compiled_block() -> None:
    """The other way round: compiled code inside an eager checkpoint."""
    inputs = build(CASES["policies"])
    compiled, counter = counted(block)
    assert_gradients(
        lambda q, k, v, **arguments: checkpoint(functools.partial(compiled, **arguments), q, k, v, use_reentrant=False), inputs
    )
    assert counter.frame_count == 1
