"""Gradients of compiled code: every set of inputs that need them, hooks, kept graphs, autocast, compiled autograd; and what is
refused: second derivatives, torch.func, forward mode."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as functorch_config
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from compile_tests.harness import AotGraphs, assert_same, count_calls, counted, dynamo_graphs
from te_attn_ops import ops, plan as plans, testing, thd_attention
from te_attn_ops.modules import TransformerLayer
from te_attn_ops.testing import BOTTOM_RIGHT, CAUSAL, CONFIGURATIONS, FULL, Mask, OpSample, PackedCase, PackedInputs, build

CASE = PackedCase((5, 9), head_dim_v=8)
SUBSETS = ["".join(names) for n in (1, 2, 3) for names in itertools.combinations("qkv", n)]
BACKENDS = ["eager", "aot_eager", "inductor"]


def needing(names: str, case: PackedCase = CASE) -> PackedInputs:
    """Inputs of which only some need a gradient."""
    inputs = build(case)
    for name in "qkv":
        getattr(inputs, name).requires_grad_(name in names)
    return inputs


# --------------------------------------------------------------------------------------------------------------- needed gradients
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("names", SUBSETS)
def test_every_subset_of_needed_gradients(names: str, backend: str) -> None:
    expected = dict(zip("qkv", build(CASE).run()[3:]))
    inputs = needing(names)
    inputs.attend(counted(backend=backend)[0]).backward(inputs.grad_out)
    for name in "qkv":
        gradient = getattr(inputs, name).grad
        assert (gradient is not None) is (name in names)
        if gradient is not None:
            assert torch.equal(gradient, expected[name])


@pytest.mark.parametrize("names", ["", *SUBSETS])
def test_training_is_decided_outside_the_op(names: str) -> None:
    """A frozen q with a trainable v is training: the plan says so, since inside an op grad mode reads False."""
    inputs = needing(names)
    (graph,) = dynamo_graphs(thd_attention, inputs.q, inputs.k, inputs.v, **inputs.arguments())
    (node,) = [node for node in graph.graph.nodes if node.target in (ops.attention, ops.attention_forward)]
    assert (node.target is ops.attention) is bool(names)
    assert plans.decode(tuple(node.args[-1])).has(plans.TRAINING) is bool(names)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_without_gradients_the_raw_op_is_called(mode: Any) -> None:
    inputs = build(CASE)
    with mode():
        (graph,) = dynamo_graphs(thd_attention, inputs.q, inputs.k, inputs.v, **inputs.arguments())
        assert count_calls(graph, "te_attn_ops.attention_forward") == 1
        assert not inputs.attend().requires_grad


def test_a_frozen_layer_under_a_trainable_one() -> None:
    """q, k and v come from frozen weights; only what is behind attention is trained: the graph has no attention backward."""
    frozen, head = torch.nn.Linear(8, 96).requires_grad_(False), torch.nn.Linear(32, 4)
    inputs, graphs = build(PackedCase((5, 9))), AotGraphs()

    def model(x: Tensor, **arguments: Any) -> Tensor:
        q, k, v = frozen(x).unflatten(1, (3, 2, 16)).unbind(1)
        return head(thd_attention(q, k, v, **arguments).flatten(1))

    torch.compile(model, fullgraph=True, backend=graphs)(torch.randn(14, 8), **inputs.arguments()).sum().backward()
    assert count_calls(graphs.joint[0], "te_attn_ops.attention_backward") == 0
    assert head.weight.grad is not None


@pytest.mark.parametrize("name", ["layout_0_1", "mla_2_2", "gaps_cross", "zero_length", "policies_cross", "gqa_mla", "swa_5_2"])
def test_gradients_equal_eager(name: str) -> None:
    inputs = build(next(case for case in CONFIGURATIONS if case.name == name))
    assert_same(inputs.run(counted()[0]), inputs.run())


@pytest.mark.parametrize("seed", range(8))
def test_gradients_of_random_batches_match_the_reference(seed: int) -> None:
    """Through Inductor, against float64 attention of one sequence at a time."""
    inputs = build(testing.random_case(100 + seed))
    got = inputs.run(counted(backend="inductor", dynamic=True)[0], return_max_logit=True)
    testing.assert_matches(got, testing.reference(inputs), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_carry_no_gradient(backend: str) -> None:
    inputs = build(CASE)
    out, lse, max_logit = inputs.attend(counted(backend=backend)[0], return_lse=True, return_max_logit=True)
    assert out.requires_grad and not lse.requires_grad and not max_logit.requires_grad


def test_an_unused_output_costs_no_backward() -> None:
    """Only lse is used: nothing to differentiate, in eager and compiled."""
    inputs = build(CASE)

    def statistics(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        return thd_attention(q, k, v, return_lse=True, **arguments)[1].sum() + q.sum()

    for function in (statistics, counted(statistics)[0]):
        inputs.q.grad = None
        inputs.attend(function).backward()
        assert torch.equal(inputs.q.grad, torch.ones_like(inputs.q)) and inputs.k.grad is None


# ------------------------------------------------------------------------------------------------------------- second derivatives
_SECOND: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "grad_of_grad": lambda out, grad, q: torch.autograd.grad(grad.sum(), q),
    "penalty": lambda out, grad, q: grad.pow(2).sum().backward(),
    "loss_plus_penalty": lambda out, grad, q: (out.sum() + grad.pow(2).sum()).backward(),
    "product": lambda out, grad, q: (out.pow(2).sum() * grad.sum()).backward(),
}


@pytest.mark.parametrize("backend", ["none", *BACKENDS])
@pytest.mark.parametrize("needed", ["q", "v", "qkv"])
@pytest.mark.parametrize("form", _SECOND)
@functorch_config.patch(donated_buffer=False)  # else Inductor refuses create_graph=True before we are asked
def test_second_derivative_is_refused(form: str, needed: str, backend: str) -> None:
    """Never a silent zero, also where the loss mixes the output and its gradient; AOTAutograd refuses in its own words."""
    inputs = needing(needed)
    function = thd_attention if backend == "none" else counted(backend=backend)[0]
    out = inputs.attend(function)
    leaf = getattr(inputs, needed[0])
    with pytest.raises(
        (NotImplementedError, RuntimeError), match=r"has no second derivative|does not currently support double backward"
    ):
        (grad,) = torch.autograd.grad(out.sin().sum(), leaf, create_graph=True)
        _SECOND[form](out, grad, leaf)


def test_second_derivative_through_grad_out_is_refused() -> None:
    inputs = build(CASE)
    out = inputs.attend()
    grad_out = inputs.grad_out.clone().requires_grad_()
    (dv,) = torch.autograd.grad(out, inputs.v, grad_out, create_graph=True)
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        dv.sum().backward()


def test_the_backward_op_itself_refuses() -> None:
    arguments = list(OpSample(ops.attention_backward, CASE).arguments())
    for index in range(4):  # grad_out, q, k, v
        changed = [x.detach().requires_grad_(n == index) if isinstance(x, Tensor) else x for n, x in enumerate(arguments)]
        dq, _, _ = ops.attention_backward(*changed)
        with pytest.raises(NotImplementedError, match="has no second derivative"):
            dq.sum().backward()


# ------------------------------------------------------------------------------------------------------------ torch.func, dual mode
def _of_q(inputs: PackedInputs) -> Callable[[Tensor], Tensor]:
    k, v, arguments = inputs.k.detach(), inputs.v.detach(), inputs.arguments()
    return lambda q: thd_attention(q, k, v, **arguments).sum()


_TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, q: torch.func.grad(f)(q),
    "vjp": lambda f, q: torch.func.vjp(f, q),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (q,)),
    "jacrev": lambda f, q: torch.func.jacrev(f)(q),
    "vmap": lambda f, q: torch.func.vmap(f)(q[None]),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("transform", _TRANSFORMS)
def test_torch_func_is_refused(transform: str, compiled: bool) -> None:
    """In compiled code requires_grad reads False inside a transform: without the refusal the gradient would be a silent zero."""
    inputs = build(PackedCase((5, 9)))
    of_q = _of_q(inputs)

    def run(q: Tensor) -> Any:
        return _TRANSFORMS[transform](of_q, q)

    function = counted(run, backend="eager")[0] if compiled else run
    # torch 2.8 leaves the message of an error out that a trace met.
    with pytest.raises(Exception, match=r"does not work inside a torch\.func transform|Observed exception"):
        function(inputs.q.detach())


@pytest.mark.parametrize("needs_grad", [False, True])
def test_forward_mode_is_refused(needs_grad: bool) -> None:
    inputs = build(PackedCase((5, 9)))
    q = inputs.q if needs_grad else inputs.q.detach()
    with forward_ad.dual_level():
        inputs.attend()  # no dual tensor among them: nothing to refuse
        with pytest.raises(NotImplementedError, match="no forward-mode derivative, but q is a dual tensor"):
            _of_q(inputs)(forward_ad.make_dual(q, torch.ones_like(q)))


# ------------------------------------------------------------------------------------------------------------------ hooks, graphs
@pytest.mark.parametrize("backend", BACKENDS)
def test_tensor_hooks(backend: str) -> None:
    """On a leaf, and on the output: each sees the gradient, may replace it, and is called once."""
    inputs, want = build(CASE), build(CASE)
    calls: list[str] = []

    def double(name: str) -> Callable[[Tensor], Tensor]:
        return lambda grad: (calls.append(name), 2 * grad)[1]

    out = inputs.attend(counted(backend=backend)[0])
    out.register_hook(double("out"))
    inputs.v.register_hook(double("v"))
    out.backward(inputs.grad_out)
    want.attend().backward(2 * want.grad_out)
    assert sorted(calls) == ["out", "v"]
    torch.testing.assert_close(inputs.q.grad, want.q.grad)
    torch.testing.assert_close(inputs.v.grad, 2 * want.v.grad)


@pytest.mark.parametrize("backend", BACKENDS)
@functorch_config.patch(donated_buffer=False)  # else Inductor frees saved buffers early, and says so
def test_retained_graphs_and_accumulation(backend: str) -> None:
    inputs = build(CASE)
    out = inputs.attend(counted(backend=backend)[0])
    out.backward(inputs.grad_out, retain_graph=True)
    once = inputs.q.grad.clone()
    out.backward(inputs.grad_out)
    torch.testing.assert_close(inputs.q.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(inputs.grad_out)


def test_saved_tensors_hooks_see_the_unpadded_tensors() -> None:
    """In eager a padded call saves q, k, v and out at their own widths."""
    inputs, saved = build(PackedCase((5, 9), head_dim_qk=24, head_dim_v=16)), []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = inputs.attend(pad_head_dim=True)
    out.backward(inputs.grad_out)
    assert sorted(shape[2] for shape in saved if len(shape) == 3) == [16, 16, 24, 24]


def test_changing_a_saved_tensor_is_an_error() -> None:
    inputs = build(CASE)
    q = inputs.q * 1
    out = thd_attention(q, inputs.k, inputs.v, **inputs.arguments())
    with torch.no_grad():
        q.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(inputs.grad_out)


def test_anomaly_mode() -> None:
    inputs = build(CASE)
    with torch.autograd.detect_anomaly(check_nan=True):
        assert_same(inputs.run(counted()[0]), inputs.run())


# ---------------------------------------------------------------------------------------------------------------------- autocast
@pytest.mark.parametrize("backend", ["none", *BACKENDS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@functorch_config.patch(enable_autograd_cache=False)  # torch 2.8 finds one autocast dtype's graph for another there
def test_autocast_of_a_layer(dtype: torch.dtype, backend: str) -> None:
    """Projections in the low precision, attention in what they give; the same numbers compiled, parameters' gradients float32."""
    torch.manual_seed(0)
    projection = torch.nn.Linear(16, 96)
    inputs, x = build(PackedCase((5, 9), masks=(CAUSAL, FULL), owner=(0, 1))), torch.randn(14, 16)

    def layer(x: Tensor, **arguments: Any) -> Tensor:
        q, k, v = projection(x).unflatten(1, (3, 2, 16)).unbind(1)
        return thd_attention(q, k, v, **arguments)

    function = layer if backend == "none" else counted(layer, backend=backend)[0]
    with torch.autocast("cpu", dtype):
        out = function(x, **inputs.arguments())
    assert out.dtype == dtype
    (grad,) = torch.autograd.grad(out.float().sum(), projection.weight)
    assert grad.dtype == torch.float32
    reference = layer(x, **inputs.arguments())
    torch.testing.assert_close(out.float(), reference, rtol=3e-2, atol=3e-2)


def test_autocast_does_not_reach_into_the_op() -> None:
    """float32 inputs stay float32: attention casts nothing by itself."""
    inputs = build(CASE)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(inputs.run(counted()[0]), inputs.run())
        assert inputs.attend().dtype == torch.float32


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_mixed_dtypes_are_refused(compiled: bool) -> None:
    inputs = build(CASE)
    function = counted(backend="eager")[0] if compiled else thd_attention
    # torch 2.8 leaves the message of an error out that a trace met.
    with pytest.raises(Exception, match=r"v must have the dtype of q, torch\.float32; got torch\.bfloat16|Observed exception"):
        function(inputs.q, inputs.k, inputs.v.bfloat16(), **inputs.arguments())


# -------------------------------------------------------------------------------------------------------------- compiled autograd
@pytest.mark.parametrize("backend", ["none", "aot_eager", "inductor"])
def test_compiled_autograd(backend: str) -> None:
    """The backward pass as a graph of its own: eager attention's backward op is in it, and the numbers are the same."""
    torch.manual_seed(0)
    masks = {"attn_input_format": "thd", "self_attn_mask_type": "padding_causal"}
    layer = TransformerLayer(32, 24, 2, hidden_dropout=0.0, device="cpu", **masks)
    inputs = build(PackedCase((5, 9)))
    arguments = {"cu_seqlens_q": inputs.cu_seqlens_q, "max_seqlen_q": 9}
    x = torch.randn(14, 32)
    layer(x, **arguments).sum().backward()
    want = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    function = layer if backend == "none" else counted(layer, backend=backend)[0]
    counter = CompileCounterWithBackend("aot_eager")
    out = function(x, **arguments).sum()
    with compiled_autograd._enable(torch.compile(backend=counter, fullgraph=True)):
        out.backward()
    for parameter, grad in zip(layer.parameters(), want):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    called = [node.target for node in counter.graphs[0].graph.nodes if node.op == "call_function"]
    # A compiled forward brings its backward as a compiled function, which compiled autograd inlines as well.
    assert called.count(ops.attention_backward) == 1


# -------------------------------------------------------------------------------------------------------------------------- FLOPs
@pytest.mark.parametrize(
    ("mask", "policies"), [(FULL, False), (CAUSAL, False), (BOTTOM_RIGHT, False), (Mask("padding", (2, 1)), True)], ids=str
)
def test_flops_are_counted(mask: Mask, policies: bool) -> None:
    """2 FLOPs per head, row, key and column: forward q k^T and p v; backward q k^T again, dq, dk over one width, dp, dv over the
    other. Every row counts as if it saw max_seqlen_kv keys: an upper bound, the lengths stand on the device."""
    case = PackedCase((6, 6), num_heads=4, num_gqa_groups=2, head_dim_qk=8, head_dim_v=16, masks=(mask,))
    if policies:
        case = case.replace(masks=(mask, FULL), owner=(0, 1))
    inputs, unit = build(case), 2 * 4 * 12 * 6
    with FlopCounterMode(display=False) as counter:
        out = inputs.attend()
    assert counter.get_total_flops() == unit * (8 + 16)
    with FlopCounterMode(display=False) as counter:
        out.backward(inputs.grad_out)
    assert counter.get_total_flops() == unit * (3 * 8 + 2 * 16)


def test_flops_of_a_compiled_graph() -> None:
    """Counted on the graph itself: Dynamo compiles nothing under a counter's dispatch mode."""
    inputs, graphs = build(PackedCase((6, 6), masks=(FULL,))), AotGraphs()
    inputs.attend(torch.compile(thd_attention, fullgraph=True, backend=graphs)).backward(inputs.grad_out)
    unit = 2 * 2 * 12 * 12 * 16  # the bound is the bucket's, of which 12 rows of keys are there
    flops = []
    for graph in (graphs.forward[0], graphs.backward[0]):
        with FlopCounterMode(display=False) as counter:
            graph(*[node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"])
        flops.append(counter.get_total_flops())
    assert flops == [2 * unit, 5 * unit]


@pytest.mark.parametrize("observed", ["nothing", "flops", "dispatcher"])
def test_an_observed_call_saves_what_a_plain_one_saves(observed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In eager mode, unpadded tensors: a checkpoint whose backward alone is observed compares the two."""
    inputs = build(PackedCase((5, 9), head_dim_qk=24, head_dim_v=16))
    monkeypatch.setattr(ops, "_FAST_EAGER", observed != "dispatcher")
    shapes: list[tuple[int, ...]] = []

    def note(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return x

    observer = FlopCounterMode(display=False) if observed == "flops" else contextlib.nullcontext()
    with observer, torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        inputs.attend(pad_head_dim=True)
    assert [shape[2] for shape in shapes if len(shape) == 3] == [24, 24, 16, 16]
