"""No call waits for the device: every path traced on fake tensors, where reading a value cannot succeed.

Two layers: what runs before the ops (the public function and the modules; fakes stand in for the ops), and what runs inside them
(the ops' own code, as on a GPU, over tensors that claim to be on one).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from compile_tests.harness import assert_same
from te_attn_ops import execution, ops, plan as plans, rows, thd_attention
from te_attn_ops.backends import cudnn, flash2, get_backend
from te_attn_ops.inplace import BackwardBatch, Batch
from te_attn_ops.modules import DotProductAttention, MultiheadAttention, RotaryPositionEmbedding, TransformerLayer
from te_attn_ops.packing import Subsets
from te_attn_ops.testing import (
    BOTTOM_RIGHT,
    CAUSAL,
    FULL,
    OP_CASES,
    OP_CASES_EXTENDED,
    HostSyncError,
    Mask,
    NoHostSync,
    OpSample,
    PackedCase,
    build,
    trace_without_sync,
)
from tests.stubs import replace_cudnn

SCALAR = PackedCase((6, 3, 8))
POLICIES = PackedCase((6, 3, 8), gaps_q=(1, 0, 2), tail=3, masks=(FULL, CAUSAL, Mask("padding", (2, 1))), owner=(0, 2, 1))
CALLS: dict[str, tuple[PackedCase, dict[str, Any]]] = {
    "scalar": (SCALAR, {}),
    "bottom_right_cross": (PackedCase((6, 3), (2, 9), masks=(BOTTOM_RIGHT,)), {}),
    "window": (SCALAR.replace(masks=(Mask("padding", (2, 1)),)), {}),
    "gaps": (SCALAR.replace(gaps_q=(1, 0, 2), tail=4), {}),
    "gaps_cross": (PackedCase((6, 3), (2, 9), gaps_q=(0, 1), gaps_kv=(2, 0)), {}),
    "all_outputs": (SCALAR, {"return_lse": True, "return_max_logit": True}),
    "sanitize": (SCALAR.replace(gaps_q=(1, 0, 2)), {"sanitize_padding": True}),
    "deterministic": (SCALAR, {"deterministic": True}),
    "padded": (SCALAR.replace(head_dim_qk=24, head_dim_v=16), {"pad_head_dim": True}),
    "native": (SCALAR.replace(head_dim_qk=24, head_dim_v=16), {"pad_head_dim": False}),
    "gqa_int64": (SCALAR.replace(num_heads=4, num_gqa_groups=2, index_dtype=torch.int64), {}),
    "interleaved": (SCALAR.replace(layout="interleaved"), {}),
    "transposed": (SCALAR.replace(layout="transposed"), {}),
    "policies_padded": (POLICIES, {"thd_attention_policy_dispatch": "padded"}),
    "policies_grouped": (POLICIES, {"thd_attention_policy_dispatch": "grouped"}),
    "policies_auto_sanitize": (POLICIES, {"sanitize_padding": True}),
    "one_policy": (SCALAR.replace(masks=(CAUSAL,), owner=(0, 0, 0)), {}),
    "no_sequences": (PackedCase((), tail=4), {}),
    "no_tokens": (PackedCase((0, 0)), {}),
}


# --------------------------------------------------------------------------------------------------------------- before the ops
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", CALLS)
def test_the_public_function(name: str, training: bool) -> None:
    case, changes = CALLS[name]
    inputs = build(case)

    def call(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, arguments: dict[str, Any]) -> Tensor:
        out = thd_attention(q, k, v, **arguments)
        out = out[0] if isinstance(out, tuple) else out
        if training:
            torch.autograd.grad(out, (q, k, v), grad_out)
        return out

    with torch.set_grad_enabled(training):
        out = trace_without_sync(call, inputs.q, inputs.k, inputs.v, inputs.grad_out, inputs.arguments(**changes))
    assert out.shape == (case.total("q"), case.num_heads, case.width_v)


@pytest.mark.parametrize("how", ["refilled", "twice"])
def test_policies_that_were_prepared_once(how: str) -> None:
    """Refilling a mutable index on the device, and using one preparation again, read nothing."""
    inputs = build(POLICIES)
    prepared = inputs.prepare(mutable=True)

    def call(q: Tensor, prepared: Any, arguments: dict[str, Any]) -> Tensor:
        if how == "refilled":
            prepared.policy_index.copy_((prepared.policy_index + 1) % 3)
        for _ in range(2):
            q = thd_attention(q, q, q, thd_attention_policies=prepared, **arguments)
        return q

    arguments = {**inputs.geometry(), "max_seqlen_q": 8}
    assert trace_without_sync(call, inputs.q, prepared, arguments).shape == inputs.q.shape


def _modules() -> dict[str, tuple[torch.nn.Module, tuple[int, ...]]]:
    options: dict[str, Any] = {"hidden_dropout": 0.0, "device": "cpu"}
    packed = {"attn_input_format": "thd", "self_attn_mask_type": "padding_causal"}
    latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    return {
        "attention_thd": (DotProductAttention(2, 16, qkv_format="thd", attn_mask_type="padding_causal"), (17, 2, 16)),
        "attention_bshd": (DotProductAttention(2, 16, qkv_format="bshd", attn_mask_type="causal"), (3, 5, 2, 16)),
        "attention_sbhd": (DotProductAttention(2, 16, qkv_format="sbhd", attn_mask_type="no_mask"), (5, 3, 2, 16)),
        "multihead": (MultiheadAttention(32, 2, qkv_format="thd", attn_mask_type="padding_causal", device="cpu"), (17, 32)),
        "layer": (TransformerLayer(32, 24, 2, **packed, **options), (17, 32)),
        "layer_policies": (TransformerLayer(32, 24, 2, **packed, **options), (17, 32)),
        "layer_mla": (TransformerLayer(32, 24, 2, **packed, **options, **latent), (17, 32)),
    }


@pytest.mark.parametrize("name", list(_modules()))
def test_the_modules(name: str) -> None:
    module, shape = _modules()[name]
    packed: dict[str, Any] = {"cu_seqlens_q": build(SCALAR).cu_seqlens_q, "max_seqlen_q": 8} if shape[0] == 17 else {}
    if name == "layer_policies":
        packed["thd_attention_policies"] = build(SCALAR.replace(masks=(FULL, CAUSAL), owner=(0, 1, 0))).prepared
    if name.startswith("layer_"):
        packed["rotary_pos_emb"] = RotaryPositionEmbedding(8, device="cpu")(8)

    def call(x: Tensor, parameters: dict[str, Tensor], packed: dict[str, Any]) -> Tensor:
        args = (x,) if x.dim() == 2 else (x, x, x)
        out = torch.func.functional_call(module, parameters, args, packed)
        return torch.autograd.grad(out.sum(), x)[0]

    x = torch.randn(shape, requires_grad=True)
    assert trace_without_sync(call, x, dict(module.named_parameters()), packed).shape == shape


# ----------------------------------------------------------------------------------------------------------------- inside the ops
@contextlib.contextmanager
def as_if_on_cuda() -> Iterator[None]:
    """Tensors say that they are on a GPU, so that the code for one runs, with torch in place of Triton. A fake tensor has no
    address, so what is misaligned cannot be told; every layout is copied instead."""
    with (
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: True), create=True),
        mock.patch.object(rows, "_triton_installed", lambda: False),
        mock.patch.object(torch.cuda, "current_device", lambda: None),  # as the index of a CPU tensor's device
        mock.patch.object(execution, "kernel_ready", lambda x: x.contiguous()),
    ):
        yield


def _samples(op: Any) -> list[OpSample]:
    samples = []
    for case in (*OP_CASES, *OP_CASES_EXTENDED):
        samples.append(OpSample(op, case))
        if case.owner is not None:
            samples.append(OpSample(op, case, dispatch=plans.GROUPED))
        if case.head_dim_qk != case.width_v:
            samples.append(OpSample(op, case, padded_width=max(case.head_dim_qk, case.width_v)))
    return samples


def _run(op: Any, *arguments: Any) -> tuple[Tensor, ...]:
    """The op's kernel itself: calling the op on a fake tensor would call its fake."""
    if op is ops.policy_subsets:
        return ops._policy_subsets(*arguments)
    *tensors, single_launch, max_q, max_kv, scale, plan = arguments
    subsets = Subsets(*tensors[-4:])
    if op is ops.attention_forward:
        return execution.forward(Batch(*tensors[:3], subsets, single_launch, max_q, max_kv, scale), plan)
    grad_out, q, k, v, out, lse = tensors[:6]
    batch = BackwardBatch(q, k, v, subsets, single_launch, max_q, max_kv, scale, grad_out, out, lse)
    return execution.backward(batch, plan)


@pytest.mark.parametrize("sample", _samples(ops.attention_forward), ids=str)
def test_the_forward_kernel(sample: OpSample) -> None:
    """Without a read, and with the numbers of the kernel that the CPU runs."""
    arguments = sample.arguments()
    with as_if_on_cuda():
        trace_without_sync(lambda *arguments: _run(sample.op, *arguments), *arguments)
        with NoHostSync():
            got = _run(sample.op, *arguments)
    for a, b in zip(got, sample.op(*arguments)):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sample", _samples(ops.attention_backward), ids=str)
def test_the_backward_kernel(sample: OpSample) -> None:
    arguments = sample.arguments()
    with as_if_on_cuda():
        trace_without_sync(lambda *arguments: _run(sample.op, *arguments), *arguments)
        with NoHostSync():
            got = _run(sample.op, *arguments)
    for a, b in zip(got, sample.op(*arguments)):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("case", [*OP_CASES, *OP_CASES_EXTENDED], ids=str)
def test_the_routing_kernel(case: PackedCase) -> None:
    arguments = OpSample(ops.policy_subsets, case).arguments()
    with as_if_on_cuda():
        trace_without_sync(lambda *arguments: _run(ops.policy_subsets, *arguments), *arguments)


@pytest.mark.parametrize("dispatch", [plans.PADDED, plans.GROUPED], ids=["padded", "grouped"])
@pytest.mark.parametrize("case", [SCALAR.replace(masks=(CAUSAL,), owner=(0, 0, 0)), POLICIES], ids=["one_policy", "policies"])
def test_the_kernels_of_torch_flash(case: PackedCase, dispatch: int) -> None:
    """How a subset is told to a kernel that takes cu_seqlens only, and what it returns put into the call's buffers."""
    forward = OpSample(ops.attention_forward, case, "torch_flash", dispatch)
    backward = OpSample(ops.attention_backward, case, "unfused", dispatch)
    *arguments, _ = backward.arguments()
    with as_if_on_cuda():
        trace_without_sync(lambda *arguments: _run(ops.attention_forward, *arguments), *_half(forward))
        trace_without_sync(lambda *arguments: _run(ops.attention_backward, *arguments), *_to_half(arguments), forward.plan())


class _NoKernels(dict):  # type: ignore[type-arg]
    """flash4's compiled kernels: launched with all that the adapter makes for them, and doing nothing."""

    def get(self, key: Any, default: Any = None) -> Any:
        return (lambda *arguments: None,) * 8


class _NoGraph:
    """A cuDNN graph that is built of nothing and does nothing."""

    def __init__(self, frontend: Any, handle: Any, spec: Any) -> None:
        self.spec, self.pinned = spec, False

    def run(self, *arguments: Any) -> None:
        pass


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters whose libraries are not here: everything of theirs runs but the kernels."""
    library = SimpleNamespace(
        varlen_fwd=lambda q, k, v, out, *rest: (out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32), None, None),
        varlen_bwd=lambda *arguments: None,
    )
    monkeypatch.setattr(flash2, "_library", lambda: library)
    monkeypatch.setattr(flash2, "_forward_extras", lambda: (True, ()))
    monkeypatch.setattr(get_backend("flash4"), "_kernels", _NoKernels())
    replace_cudnn(monkeypatch, _NoGraph, lambda *arguments: None, lambda lse: torch.empty_like(lse.t()))
    monkeypatch.setattr(get_backend("cudnn"), "_graphs", cudnn.GraphCache())


@pytest.mark.parametrize("dispatch", [plans.PADDED, plans.GROUPED], ids=["padded", "grouped"])
@pytest.mark.parametrize(
    "case",
    [SCALAR, SCALAR.replace(gaps_q=(1, 0, 2)), PackedCase((6, 3), (2, 9), masks=(BOTTOM_RIGHT,)), POLICIES],
    ids=["scalar", "gaps", "cross", "policies"],
)
@pytest.mark.parametrize("backend", ["flash2", "flash4", "cudnn"])
def test_the_adapters(backend: str, case: PackedCase, dispatch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host code around kernels that are not here: how a subset is told, scratch, statistics, rows that a contract fixes."""
    without_kernels(monkeypatch)
    forward = OpSample(ops.attention_forward, case, "unfused", dispatch)
    backward = OpSample(ops.attention_backward, case, "unfused", dispatch)
    plan = OpSample(ops.attention_forward, case, backend, dispatch).plan()
    *inputs, _ = forward.arguments()
    *saved, _ = backward.arguments()
    with as_if_on_cuda():
        trace_without_sync(lambda *arguments: _run(ops.attention_forward, *arguments), *_to_half(inputs), plan)
        trace_without_sync(lambda *arguments: _run(ops.attention_backward, *arguments), *_to_half(saved), plan)


def _half(sample: OpSample) -> tuple[Any, ...]:
    return _to_half(sample.arguments())


def _to_half(arguments: Any) -> tuple[Any, ...]:
    """q, k, v, out and grad_out in bfloat16; lse stays float32."""
    return tuple(x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3 else x for x in arguments)


def test_a_read_inside_a_kernel_is_seen() -> None:
    """The CPU's own path reads the lengths: the trace must not let that pass."""
    arguments = OpSample(ops.attention_forward, SCALAR).arguments()
    readable = mock.patch.object(execution, "kernel_ready", lambda x: x.contiguous())
    with readable, pytest.raises((HostSyncError, RuntimeError)):
        trace_without_sync(lambda *arguments: _run(ops.attention_forward, *arguments), *arguments)


def test_the_fake_gpu_is_taken_back() -> None:
    with as_if_on_cuda():
        assert torch.ones(1).is_cuda
    assert not torch.ones(1).is_cuda
    inputs = build(SCALAR)
    assert_same(inputs.run(), inputs.run())
