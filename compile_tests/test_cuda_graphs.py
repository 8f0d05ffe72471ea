"""CUDA graphs, on a GPU: Inductor's, captured by hand, by make_graphed_callables; other contents at replay; no sync, no growth.

Batches have a fixed number of rows and sequences (a tail, and empty sequences at the end), so one graph serves them all.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from compile_tests.harness import TORCH_MINOR, counted, inductor_programs
from te_attn_ops import (
    NoBackendError,
    PreparedPolicies,
    execution,
    invalidate,
    ops,
    plan as plans,
    refresh_thd_policies,
    testing,
    thd_attention,
)
from te_attn_ops.backends import BACKEND_NAMES, backend_name, get_backend
from te_attn_ops.testing import BOTTOM_RIGHT, CAUSAL, FULL, Mask, OpSample, PackedCase, PackedInputs, build

pytestmark = pytest.mark.gpu

# The shape that the backends' own GPU tests use: a kernel compiled for one serves the other.
SHAPE: dict[str, Any] = {"num_heads": 4, "num_gqa_groups": 2, "head_dim_qk": 128, "dtype": torch.bfloat16}
ROWS, SEQUENCES, LONGEST = 512, 6, 128
MASKS = (CAUSAL, FULL, Mask("padding_causal", (32, 0)))
BOUNDS = {"max_seqlen_q": LONGEST, "max_seqlen_kv": LONGEST}


def batch(seed: int, policies: bool) -> PackedInputs:
    """3 to 6 sequences of 1 to 128 tokens in 512 rows."""
    generator = random.Random(seed)
    lengths = [generator.randint(1, LONGEST) for _ in range(generator.randint(3, SEQUENCES))]
    while sum(lengths) > ROWS:
        lengths.pop()
    tail = ROWS - sum(lengths)
    lengths += [0] * (SEQUENCES - len(lengths))
    case = PackedCase(tuple(lengths), tail=tail, **SHAPE)
    if policies:
        case = case.replace(masks=MASKS, owner=tuple(generator.randrange(len(MASKS)) for _ in lengths))
    return build(case, "cuda", seed=seed)


def prepared(inputs: PackedInputs) -> PreparedPolicies | None:
    return inputs.prepare(mutable=True)


def assert_close(got: Tensor, want: Tensor) -> None:
    """bfloat16 results whose kernels may differ: an error relative to the largest value."""
    assert got.isfinite().all()
    assert float((got.float() - want.float()).abs().max()) <= 0.03 * float(want.float().abs().max()) + 1e-3


class Model(torch.nn.Module):
    """A projection, attention over views of it, a projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.projection = torch.nn.Linear(64, 8 * 128, **options)
        self.head = torch.nn.Linear(4 * 128, 64, **options)

    def forward(self, x: Tensor, cu_seqlens: Tensor, policies: PreparedPolicies | None) -> Tensor:
        q, k, v = self.projection(x).unflatten(1, (8, 128)).split((4, 2, 2), dim=1)
        dispatch = "single_launch" if policies is not None and policies.plans else "auto"
        options = {"thd_attention_policies": policies, "thd_attention_policy_dispatch": dispatch}
        out = thd_attention(q, k, v, cu_seqlens, max_seqlen_q=LONGEST, **options)
        return self.head(out.flatten(1))


def step(
    function: Callable[..., Tensor],
    model: Model,
    x: Tensor,
    inputs: PackedInputs,
    cu_seqlens: Tensor | None = None,
    policies: PreparedPolicies | None = None,
) -> list[Tensor]:
    """The loss's gradients and the output, as copies: a CUDA graph's own memory is written again at the next replay."""
    model.zero_grad(set_to_none=True)
    cu_seqlens = inputs.cu_seqlens_q if cu_seqlens is None else cu_seqlens
    out = function(x, cu_seqlens, prepared(inputs) if policies is None else policies)
    out.float().pow(2).mean().backward()
    return [out.detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]]


@pytest.fixture
def cuda_graphs_or_error() -> Iterator[None]:
    """A graph that Inductor would leave uncaptured is an error; the counters start at 0."""
    if TORCH_MINOR < (2, 11):
        pytest.skip("torch 2.11 or newer turns a skipped CUDA graph into an error")
    counters.clear()
    with inductor_config.patch({"triton.cudagraph_or_error": True}):
        yield


def assert_captured_whole() -> None:
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["inductor"]["cudagraph_partitions"] == 0, "the graph was split around something that cannot be captured"


# ---------------------------------------------------------------------------------------------------------------- Inductor's graphs
@pytest.mark.parametrize("policies", [False, True], ids=["scalar", "policies"])
def test_reduce_overhead_training(policies: bool, cuda_graphs_or_error: None) -> None:
    """Other lengths and other members at each step: one compilation, captured whole; from the fourth step on no kernel is launched
    from Python."""
    model = Model()
    function = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    x = torch.randn(ROWS, 64, device="cuda", dtype=torch.bfloat16)
    wants = [step(model, model, x, batch(seed, policies)) for seed in range(6)]
    with mock.patch.object(execution, "forward", wraps=execution.forward) as launches:
        for seed, want in enumerate(wants):
            before = launches.call_count
            torch.compiler.cudagraph_mark_step_begin()
            for got, expected in zip(step(function, model, x, batch(seed, policies)), want):
                assert_close(got, expected)
            assert seed < 3 or launches.call_count == before
    assert counters["stats"]["unique_graphs"] == 1
    assert_captured_whole()


def rotated(n: int) -> PackedInputs:
    """The same documents in another order, each under its own mask."""
    lengths, owner = (128, 100, 60, 90, 30, 0), (0, 1, 2, 0, 1, 2)
    case = PackedCase(lengths[n:] + lengths[:n], tail=ROWS - sum(lengths), masks=MASKS, owner=owner[n:] + owner[:n], **SHAPE)
    return build(case, "cuda", seed=n)


def planned(inputs: PackedInputs) -> PreparedPolicies:
    """Policies with the plan of one launch for all of them."""
    policies = inputs.prepare(attention=inputs.plan_spec(), total_q=ROWS, total_kv=ROWS, **BOUNDS)
    if policies is None or not policies.plans:
        pytest.skip("no backend here runs all policies in one launch")
    return policies


def follow(policies: PreparedPolicies, inputs: PackedInputs) -> None:
    """Another batch into the tensors of a plan."""
    refresh_thd_policies(policies, inputs.policies(), inputs.cu_seqlens_q, total_q=ROWS, total_kv=ROWS, **BOUNDS)


def test_reduce_overhead_training_with_a_plan(cuda_graphs_or_error: None) -> None:
    """One launch for all policies inside Inductor's CUDA graph; the plan is refreshed between the steps."""
    model = Model()
    batches = [rotated(n) for n in (0, 2, 4, 1, 3, 5)]
    policies, cu_seqlens = planned(batches[0]), batches[0].cu_seqlens_q.clone()
    function = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    x = torch.randn(ROWS, 64, device="cuda", dtype=torch.bfloat16)
    with mock.patch.object(execution, "forward", wraps=execution.forward) as launches:
        for n, inputs in enumerate(batches):
            want = step(model, model, x, inputs)
            follow(policies, inputs)
            cu_seqlens.copy_(inputs.cu_seqlens_q)
            before = launches.call_count
            torch.compiler.cudagraph_mark_step_begin()
            for got, expected in zip(step(function, model, x, inputs, cu_seqlens, policies), want):
                assert_close(got, expected)
            assert n < 3 or launches.call_count == before
    assert counters["stats"]["unique_graphs"] == 1
    assert_captured_whole()


def test_reduce_overhead_inference_after_an_environment_change(
    cuda_graphs_or_error: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another backend is another graph, captured as whole; going back replays the first one."""
    model, inputs = Model(), batch(0, True)
    function = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    x = torch.randn(ROWS, 64, device="cuda", dtype=torch.bfloat16)
    policies = prepared(inputs)
    with torch.no_grad():
        for value in (None, "0", None):
            if value is None:
                monkeypatch.delenv("NVTE_FLASH_ATTN", raising=False)
            else:
                monkeypatch.setenv("NVTE_FLASH_ATTN", value)
            for _ in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                got = function(x, inputs.cu_seqlens_q, policies).clone()
            assert_close(got, model(x, inputs.cu_seqlens_q, policies))
    assert counters["stats"]["unique_graphs"] == 2
    assert_captured_whole()


def test_reduce_overhead_does_not_grow(cuda_graphs_or_error: None) -> None:
    """300 replays over random lengths: not one byte more, allocated or reserved."""
    model = Model()
    function = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    x = torch.randn(ROWS, 64, device="cuda", dtype=torch.bfloat16)
    offsets = [batch(seed, False).cu_seqlens_q for seed in range(20)]

    def run(n: int) -> None:
        model.zero_grad(set_to_none=True)
        torch.compiler.cudagraph_mark_step_begin()
        function(x, offsets[n % 20], None).float().pow(2).mean().backward()

    for n in range(20):
        run(n)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for n in range(300):
        run(n)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert_captured_whole()


# ----------------------------------------------------------------------------------------------------------------- captured by hand
def refill(static: PackedInputs, policies: PreparedPolicies | None, other: PackedInputs) -> None:
    """Another batch's contents into the tensors that a graph reads."""
    with torch.no_grad():
        for name in ("q", "k", "v", "grad_out", "cu_seqlens_q"):
            getattr(static, name).copy_(getattr(other, name))
        if policies is not None:
            policies.policy_index.copy_(torch.tensor(other.case.owner, dtype=torch.int32))


def warm_up(run: Callable[[], Any]) -> None:
    """On a side stream, as a capture wants: choices are made and kernels built here."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)


def training_step(inputs: PackedInputs, **arguments: Any) -> tuple[Tensor, ...]:
    out = thd_attention(inputs.q, inputs.k, inputs.v, **arguments)
    return (out, *torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.grad_out))


@pytest.mark.parametrize("kind", ["scalar", "padded", "grouped", "unfused", "sanitize"])
def test_capture_and_replay_with_other_contents(kind: str) -> None:
    """Forward and backward of the eager function in one graph; lengths and members are read at each replay."""
    policies = kind not in ("scalar", "sanitize")
    static = batch(0, policies)
    index = prepared(static)
    changes: dict[str, Any] = dict(BOUNDS)
    if kind in ("padded", "grouped"):
        changes["thd_attention_policy_dispatch"] = kind
    changes |= {"unfused": {"backend": "unfused"}, "sanitize": {"sanitize_padding": True}}.get(kind, {})
    arguments = static.arguments(**changes, **({"thd_attention_policies": index} if policies else {}))
    warm_up(lambda: training_step(static, **arguments))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = training_step(static, **arguments)
    for seed in (1, 2, 0):
        other = batch(seed, policies)
        refill(static, index, other)
        graph.replay()
        own = {"thd_attention_policies": prepared(other)} if policies else {}
        for got, want in zip(results, training_step(other, **other.arguments(**changes, **own))):
            assert_close(got, want)


@pytest.mark.parametrize("with_plan", [False, True])
def test_make_graphed_callables(with_plan: bool) -> None:
    """Tensors are its only arguments: offsets and policies belong to the module, and their contents may change."""

    class Core(torch.nn.Module):
        def __init__(self, inputs: PackedInputs, policies: PreparedPolicies) -> None:
            super().__init__()
            dispatch = "single_launch" if policies.plans else "auto"
            self.arguments = inputs.arguments(thd_attention_policies=policies, thd_attention_policy_dispatch=dispatch, **BOUNDS)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return thd_attention(q, k, v, **self.arguments)

    static = rotated(0)
    index = planned(static) if with_plan else prepared(static)
    assert index is not None
    samples = tuple(x.detach().clone().requires_grad_() for x in (static.q, static.k, static.v))
    graphed = torch.cuda.make_graphed_callables(Core(static, index), samples)
    for n in (2, 5, 1):
        other = rotated(n)
        refill(static, None if with_plan else index, other)
        if with_plan:
            follow(index, other)
        out = graphed(other.q, other.k, other.v)
        got = (out, *torch.autograd.grad(out, (other.q, other.k, other.v), other.grad_out))
        arguments = other.arguments(thd_attention_policies=prepared(other), **BOUNDS)
        for a, b in zip(got, training_step(other, **arguments)):
            assert_close(a, b)


def test_a_shape_first_seen_during_capture_is_an_error() -> None:
    """Probing and building kernels are not possible there; the message says to warm up."""
    inputs = build(PackedCase((5, 9), num_heads=3, head_dim_qk=72, dtype=torch.bfloat16), "cuda")
    with pytest.raises(RuntimeError, match="was not seen before the CUDA graph capture began"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        inputs.attend()


def test_a_raw_list_first_seen_during_capture_is_an_error() -> None:
    inputs = batch(0, True)
    policies = inputs.policies()
    with pytest.raises(RuntimeError, match="call it before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        inputs.attend(thd_attention_policies=policies, **BOUNDS)


def test_a_captured_raw_list_lives_as_long_as_its_graph() -> None:
    """The index made of it belongs to nobody else: neither other lists nor a new choice may free what replays read."""
    inputs = batch(0, True)
    policies = inputs.policies()

    def step() -> Tensor:
        out: Tensor = inputs.attend(thd_attention_policies=policies, **BOUNDS)
        return out

    expected = step().detach().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(80):
        other = batch(seed, True)
        other.attend(thd_attention_policies=other.policies(), **BOUNDS)
    invalidate()
    testing.poison_allocator("cuda")
    small = [torch.full((SEQUENCES,), 2, dtype=torch.int32, device="cuda") for _ in range(4096)]  # where an index would have been
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected) and len(small) == 4096


# ------------------------------------------------------------------------------------------------------------------ no sync, no growth
_QUIET: dict[str, tuple[bool, dict[str, Any]]] = {
    "scalar": (False, {}),
    "statistics": (False, {"return_lse": True, "return_max_logit": True}),
    "sanitize": (False, {"sanitize_padding": True}),
    "deterministic": (False, {"deterministic": True}),
    "unfused": (False, {"backend": "unfused"}),
    "padded": (True, {"thd_attention_policy_dispatch": "padded"}),
    "grouped": (True, {"thd_attention_policy_dispatch": "grouped"}),
}


@pytest.mark.parametrize("name", _QUIET)
def test_no_host_sync(name: str) -> None:
    """CUDA's own check, over forward and backward of calls whose shape was seen before."""
    policies, changes = _QUIET[name]
    seen, fresh = batch(0, policies), batch(1, policies)
    runs = []
    for inputs in (seen, fresh):
        own = {"thd_attention_policies": prepared(inputs)} if policies else {}
        runs.append((inputs, inputs.arguments(**BOUNDS, **changes, **own)))

    def run(inputs: PackedInputs, arguments: dict[str, Any]) -> None:
        out = thd_attention(inputs.q, inputs.k, inputs.v, **arguments)
        out = out[0] if isinstance(out, tuple) else out
        torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.grad_out)

    run(*runs[0])
    torch.cuda.synchronize()
    with testing.no_cuda_sync():
        run(*runs[0])
        run(*runs[1])


def allocated_when_idle() -> int:
    """Bytes, once autograd's own thread has let go of the last graph: on a busy host that is after backward() has returned."""
    torch.cuda.synchronize()
    found, since = torch.cuda.memory_allocated(), time.monotonic()
    while time.monotonic() - since < 0.5:
        time.sleep(0.05)
        if torch.cuda.memory_allocated() != found:
            found, since = torch.cuda.memory_allocated(), time.monotonic()
    return found


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_allocated_bytes_are_flat_over_300_steps(compiled: bool) -> None:
    """Random lengths, so other sizes at each step: what a step allocates it gives back."""
    function = counted(backend="inductor", dynamic=True)[0] if compiled else thd_attention
    batches = []
    for seed in range(10):
        lengths = tuple(random.Random(seed).randint(1, LONGEST) for _ in range(4))
        batches.append(build(PackedCase(lengths, **SHAPE), "cuda"))

    def run(n: int) -> None:
        inputs = batches[n % 10]
        torch.autograd.grad(inputs.attend(function, **BOUNDS), (inputs.q, inputs.k, inputs.v), inputs.grad_out)

    for n in range(20):
        run(n)
    gc.collect()  # what other tests left in cycles
    before = allocated_when_idle()
    for n in range(300):
        run(n)
    assert allocated_when_idle() == before


# ------------------------------------------------------------------------------------------------------------- the ops on a GPU
@pytest.mark.parametrize("name", BACKEND_NAMES)
@pytest.mark.parametrize("op", [ops.attention, ops.attention_backward], ids=str)
def test_opcheck_of_a_backend(op: torch._ops.OpOverload, name: str) -> None:
    """Fakes against the kernels of each installed backend: shapes, strides, dtypes; nothing aliased or mutated."""
    if get_backend(name).version() is None:
        pytest.skip(f"{name} is not installed")
    case = PackedCase((70, 33, 9), layout="interleaved", masks=(FULL, BOTTOM_RIGHT), owner=(0, 1, 0), **SHAPE)
    dispatch = plans.SINGLE_LAUNCH if get_backend(name).single_launch else plans.PADDED
    inputs = build(case, "cuda")
    options: dict[str, Any] = {"backend": name}
    if dispatch == plans.SINGLE_LAUNCH:
        options["thd_attention_policies"] = inputs.prepare(attention=inputs.plan_spec())
    try:
        inputs.attend(**options)
    except NoBackendError as error:
        pytest.skip(str(error).splitlines()[-1].strip())
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    # The order of a backward's additions may change from run to run.
    arguments = OpSample(op, case, name, dispatch).arguments("cuda")
    results = torch.library.opcheck(op, arguments, test_utils=checks, rtol=2e-2, atol=1e-2)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("layout", ["contiguous", "interleaved"])
def test_attention_alone_costs_no_kernel_of_inductors(layout: str) -> None:
    """q, k and v go to the op as they lie in memory, its outputs and gradients leave as they are."""
    inputs = build(PackedCase((70, 33), layout=layout, **SHAPE), "cuda")
    function = torch.compile(thd_attention, fullgraph=True)
    programs = inductor_programs(lambda: inputs.attend(function).backward(inputs.grad_out))
    assert list(itertools.chain(*programs)) == [
        "te_attn_ops.policy_subsets",
        "te_attn_ops.attention_forward",
        "te_attn_ops.attention_backward",
    ]


def test_compiled_equals_eager_on_the_chosen_backend() -> None:
    """Mixed policies, padded widths: the same kernels run, so the outputs are equal bit for bit; gradients where those are."""
    for case, changes in (
        (PackedCase((70, 33, 9), masks=MASKS, owner=(0, 1, 2), **SHAPE), {}),
        (PackedCase((70, 33), **{**SHAPE, "head_dim_qk": 128, "head_dim_v": 64, "num_gqa_groups": 4}), {"pad_head_dim": True}),
    ):
        inputs = build(case, "cuda")
        got, want = inputs.run(counted()[0], **changes), inputs.run(**changes)
        torch.testing.assert_close(got.out, want.out, rtol=0, atol=0)
        torch.testing.assert_close(got.lse, want.lse, rtol=0, atol=0)
        for a, b in zip(got[3:], want[3:]):
            assert_close(a, b)


def test_the_plan_names_the_backend_that_runs() -> None:
    """What explain and a graph's text say is what is launched."""
    inputs = build(PackedCase((70, 33), **SHAPE), "cuda")
    chosen: list[int] = []

    def note(graph: torch.fx.GraphModule, example: Any) -> Any:
        (node,) = [node for node in graph.graph.nodes if node.target is ops.attention]
        chosen.extend(plans.decode(tuple(node.args[-1])).backends)
        return graph.forward

    function = torch.compile(thd_attention, fullgraph=True, backend=note)
    inputs.attend(function)
    backend = type(get_backend(backend_name(chosen[0])))
    failing = mock.patch.object(backend, "forward", autospec=True, side_effect=RuntimeError("it is this one"))
    with failing, pytest.raises(RuntimeError, match="it is this one"):
        inputs.attend(function)
