"""What opcheck does not see: fakes that branch on a size, symbolic ints among the arguments, strides at every layout, outputs that
share memory, elements that no kernel wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from compile_tests.harness import counted
from te_attn_ops import ops, plan as plans, testing, thd_attention
from te_attn_ops.testing import CAUSAL, FULL, OP_CASES, OP_CASES_EXTENDED, OpSample, PackedCase, op_samples

ALL_OPS = (ops.policy_subsets, ops.attention_forward, ops.attention_backward, ops.attention)
CASES = {case.name: case for case in (*OP_CASES, *OP_CASES_EXTENDED)}


def _raw(sample: OpSample) -> tuple[Any, ...]:
    """Arguments without gradients: the raw kernel, whatever the op."""
    return tuple(x.detach() if isinstance(x, Tensor) else x for x in sample.arguments())


def _is_token_or_sequence_dim(tensor: Tensor, dim: int) -> bool:
    """Whether a size varies from batch to batch: tokens and sequences do, heads, widths and policies do not."""
    if tensor.dim() == 3 or tensor.dim() == 1:
        return dim == 0
    return dim == 1  # lse [heads, tokens], lens [policies, sequences]


def _symbolic(mode: FakeTensorMode, arguments: Sequence[Any]) -> list[Any]:
    def fake(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        sizes = [DimDynamic.DYNAMIC if _is_token_or_sequence_dim(x, d) else DimDynamic.STATIC for d in range(x.dim())]
        return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(sizes))

    return [fake(x) for x in arguments]


# ------------------------------------------------------------------------------------------------------------ symbolic shapes
@pytest.mark.parametrize("name", ["contiguous", "t2hd_gqa", "gaps_and_tail", "policies", "mla_split", "int64_mqa"])
@pytest.mark.parametrize("op", ALL_OPS, ids=str)
def test_fakes_guard_no_token_or_sequence_count(op: torch._ops.OpOverload, name: str) -> None:
    """A fake that branches on such a size, or turns it into an int, leaves a guard: one compilation per value."""
    sample = OpSample(op, CASES[name], max_logit=True)
    environment = ShapeEnv()
    results = op(*_symbolic(FakeTensorMode(shape_env=environment), _raw(sample)))
    assert not environment.guards
    varying = [size for result in results for size in result.shape if isinstance(size, torch.SymInt)]
    assert varying, "no output carries the symbolic size on"


def test_bounds_may_be_symbolic_ints() -> None:
    """max_seqlen as a SymInt stays one in the graph: nothing specialises it."""
    sample = OpSample(ops.attention_forward, CASES["contiguous"])
    *tensors, _, _, scale, plan = _raw(sample)

    def call(*tensors: Any) -> Any:
        bound = tensors[0].shape[0]
        return ops.attention_forward(*tensors[:7], [], bound, 2 * bound, scale, plan)

    graph = make_fx(call, tracing_mode="symbolic")(*tensors[:7])
    (node,) = [node for node in graph.graph.nodes if node.target is ops.attention_forward]
    assert isinstance(node.args[8], torch.fx.Node) and isinstance(node.args[9], torch.fx.Node)
    assert not [guard for guard in graph.shape_env.guards if "Eq" in str(guard.expr)]


@pytest.mark.parametrize("op", [ops.attention_forward, ops.attention], ids=str)
def test_marked_dynamic_dimensions_compile_once(op: torch._ops.OpOverload) -> None:
    """mark_dynamic raises where a size is specialised, and the count shows a branch."""
    function, counter = counted(lambda *args: op(*args[:7], [], args[7], args[7], 0.25, args[8]))
    for lengths in ((5, 9), (4, 4, 4), (12, 2, 7, 1), (30, 2)):
        sample = OpSample(op, PackedCase(lengths))
        *tensors, _, bound, _, _, plan = sample.arguments()
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        for x in leaves:
            for d in range(x.dim()):
                if _is_token_or_sequence_dim(x, d):
                    torch._dynamo.mark_dynamic(x, d)
        got, want = function(*leaves, bound, plan), op(*leaves, [], bound, bound, 0.25, plan)
        assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert counter.frame_count <= 2, "once for the ints, which become dynamic by themselves"


def test_marked_dynamic_sequences_compile_once_in_the_routing() -> None:
    function, counter = counted(lambda cu, index: ops.policy_subsets(cu, cu, None, None, index, 3))
    for count in (2, 3, 8, 21):
        cu, index = torch.arange(count + 1, dtype=torch.int32), torch.arange(count, dtype=torch.int32) % 3
        torch._dynamo.mark_dynamic(cu, 0)
        torch._dynamo.mark_dynamic(index, 0)
        assert all(torch.equal(a, b) for a, b in zip(function(cu, index), ops.policy_subsets(cu, cu, None, None, index, 3)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["scalar", "policies", "gaps"])
def test_marked_dynamic_tokens_and_sequences_of_the_public_function(kind: str) -> None:
    function, counter = counted()
    for lengths in ((5, 9, 3), (4, 4, 4, 4), (12, 2, 7, 1, 1), (30, 2, 6)):
        case = PackedCase(lengths, gaps_q=(1,) * len(lengths) if kind == "gaps" else None)
        if kind == "policies":
            case = case.replace(masks=(CAUSAL, FULL), owner=tuple(n % 2 for n in range(len(lengths))))
        inputs = testing.build(case)
        arguments = inputs.arguments(max_seqlen_q=64, max_seqlen_kv=64)
        marked = [inputs.q, inputs.k, inputs.v, *[x for x in arguments.values() if isinstance(x, Tensor)]]
        for x in marked + ([inputs.prepared.policy_index] if inputs.prepared is not None else []):
            torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(function(inputs.q, inputs.k, inputs.v, **arguments), inputs.attend())
    assert counter.frame_count == 1


# ----------------------------------------------------------------------------------------- fakes against kernels, every layout
_LAYOUT_SAMPLES = [
    OpSample(op, PackedCase((6, 11), layout=layout, head_dim_v=width_v, dtype=dtype, name=f"{layout}-v{width_v}-{dtype}"))
    for op in ALL_OPS[1:]
    for layout in testing.LAYOUTS
    for width_v, dtype in ((16, torch.float32), (8, torch.bfloat16))
]


@pytest.mark.parametrize("sample", _LAYOUT_SAMPLES, ids=str)
def test_fake_shapes_strides_and_dtypes_are_the_kernels(sample: OpSample) -> None:
    """Of two tokens and more: below that a wrong stride looks right."""
    arguments = _raw(sample)
    real = sample.op(*arguments)
    with FakeTensorMode() as mode:
        fake = sample.op(*[mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments])
    for name, a, b in zip(("first", "second", "third"), real, fake):
        seen, promised = [(x.shape, x.stride(), x.dtype, x.device, x.storage_offset()) for x in (a, b)]
        assert seen == promised, f"{name} output"


@pytest.mark.parametrize("op", ALL_OPS[1:], ids=str)
def test_the_meta_device_gives_shapes_without_memory(op: torch._ops.OpOverload) -> None:
    sample = OpSample(op, CASES["policies"])
    arguments = _raw(sample)
    meta = op(*[x.to("meta") if isinstance(x, Tensor) else x for x in arguments])
    assert [(x.shape, x.dtype, x.device.type) for x in meta] == [(x.shape, x.dtype, "meta") for x in op(*arguments)]


# ------------------------------------------------------------------------------------------------------------ aliases and holes
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("name", ["contiguous", "no_sequences", "rows_but_no_sequences", "one_token", "policies"])
def test_no_output_shares_memory_with_an_input_or_another_output(name: str, mode: Any) -> None:
    """Nothing to pad, one policy, no token: the cases in which returning what came in would be right by value."""
    for op in ALL_OPS:
        arguments = _raw(OpSample(op, CASES[name]))
        with mode():
            outputs = op(*arguments)
        storages = {x.untyped_storage()._cdata for x in outputs}
        assert len(storages) == len(outputs)
        assert not storages & {x.untyped_storage()._cdata for x in arguments if isinstance(x, Tensor)}


@pytest.mark.parametrize("name", ["contiguous", "no_sequences", "one_token"])
def test_compiled_outputs_share_no_memory(name: str) -> None:
    inputs = testing.build(CASES[name], requires_grad=False)
    function, _ = counted(lambda *args, **kwargs: (thd_attention(*args, return_lse=True, return_max_logit=True, **kwargs), args))
    outputs, returned = function(inputs.q, inputs.k, inputs.v, **inputs.arguments())
    storages = [x.untyped_storage()._cdata for x in (*outputs, *returned)]
    assert len(set(storages)) == 6


@pytest.mark.parametrize("sample", [s for s in op_samples((*OP_CASES, *OP_CASES_EXTENDED)) if s.op is not ops.attention], ids=str)
def test_every_element_is_written(sample: OpSample) -> None:
    """Fresh memory holds NaN: none may come out, nor anything else that differs from a run on ordinary memory."""
    arguments = sample.arguments()
    want = sample.op(*arguments)
    with testing.poisoned_memory():
        got = sample.op(*arguments)
    assert all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(got, want))


# --------------------------------------------------------------------------------------------------------------------- the plan
@pytest.mark.parametrize("op", [ops.attention_forward, ops.attention], ids=str)
def test_a_plan_of_another_version_fails_while_tracing(op: torch._ops.OpOverload) -> None:
    *arguments, plan = _raw(OpSample(op, CASES["contiguous"]))
    function, _ = counted(lambda *args: op(*args))
    with pytest.raises(Exception, match=f"has version {plans.ABI + 1}; te_attn_ops here writes version {plans.ABI}"):
        function(*arguments, [plans.ABI + 1, *plan[1:]])
