"""The ops as torch sees them: schemas, fakes, autograd, aliasing, FLOPs."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from te_attn_ops import execution, ops, plan as plans, testing, thd_attention
from te_attn_ops.backends.unfused import Unfused
from te_attn_ops.masks import Band
from te_attn_ops.testing import BOTTOM_RIGHT, CAUSAL, FULL, Mask, OpSample, PackedCase, build, op_samples


@pytest.mark.parametrize("sample", list(op_samples()), ids=str)
def test_opcheck(sample: OpSample) -> None:
    """Schema, fake (shapes, strides, dtypes, aliasing), autograd registration, and AOT dispatch with dynamic shapes."""
    torch.library.opcheck(sample.op, sample.arguments())


def test_names_and_overloads_are_public() -> None:
    for name in ("policy_subsets", "attention_forward", "attention_backward", "attention"):
        packet = getattr(torch.ops.te_attn_ops, name)
        assert packet.overloads() == ["default"] and packet.default is getattr(ops, name)
        assert not packet.default._schema.is_mutable and torch.Tag.pt2_compliant_tag in packet.default.tags


@pytest.mark.parametrize("max_logit", [False, True])
@pytest.mark.parametrize("name", ["contiguous", "no_sequences", "no_tokens", "one_token"])
def test_outputs_share_no_memory_with_anything(name: str, max_logit: bool) -> None:
    """Also where nothing is padded, and where an output is absent: two absent ones are two tensors."""
    case = next(case for case in testing.OP_CASES if case.name == name)
    arguments = OpSample(ops.attention_forward, case, max_logit=max_logit).arguments()
    backward = OpSample(ops.attention_backward, case).arguments()
    outputs = [*ops.attention_forward(*arguments), *ops.attention_backward(*backward)]
    inputs = [x for x in (*arguments, *backward) if isinstance(x, torch.Tensor)]
    storages = [x.untyped_storage()._cdata for x in outputs]
    assert len(set(storages)) == len(outputs)
    assert not set(storages) & {x.untyped_storage()._cdata for x in inputs}
    assert outputs[2].shape == ((2,) if max_logit else (0,)) and outputs[2].dtype == torch.float32


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_outputs_are_contiguous_whatever_the_inputs(layout: str) -> None:
    for width_v in (16, 8):
        case = PackedCase((5, 9), layout=layout, head_dim_v=width_v)
        inputs = build(case)
        out, lse = inputs.attend(return_lse=True, pad_head_dim=True)
        grads = torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.grad_out)
        assert all(x.is_contiguous() for x in (out, lse, *grads))


# -------------------------------------------------------------------------------------------------------------------- autograd
GRADCHECK_CASES = (
    PackedCase((3, 4), num_heads=2, head_dim_qk=3, dtype=torch.float64, name="causal"),
    PackedCase((3, 4), (5, 2), head_dim_qk=4, head_dim_v=2, masks=(BOTTOM_RIGHT,), dtype=torch.float64, name="cross_mla"),
    PackedCase((3, 4), num_heads=4, num_gqa_groups=2, head_dim_qk=2, masks=(FULL,), dtype=torch.float64, name="gqa_full"),
    PackedCase(
        (3, 2, 2),
        gaps_q=(1, 0, 2),
        head_dim_qk=2,
        masks=(Mask("padding", (1, 1)), CAUSAL),
        owner=(0, 1, 0),
        dtype=torch.float64,
        name="policies",
    ),
)


# ------------------------------------------------------------------------------------------------------ with and without the dispatcher
class Seen(TorchDispatchMode):
    """The names of this package's ops that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "te_attn_ops":
            self.names.append(function.__name__.removesuffix(".default"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
def test_plain_eager_calls_do_without_the_dispatcher_and_give_the_same(dispatch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = PackedCase((5, 9, 3), masks=(CAUSAL, FULL), owner=(0, 1, 0), gaps_q=(1, 0, 2), head_dim_qk=24, head_dim_v=16)
    inputs, seen = build(case), Seen()
    with seen:
        dispatched = inputs.run(thd_attention_policy_dispatch=dispatch)
    assert [name for name in seen.names if "attention" in name] == ["attention_forward", "attention_backward"]
    for name in ("attention", "attention_forward", "attention_backward"):
        monkeypatch.setattr(ops, name, None)
    plain = inputs.run(thd_attention_policy_dispatch=dispatch)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(plain, name), getattr(dispatched, name)), name
    with torch.no_grad():
        assert torch.equal(inputs.attend(thd_attention_policy_dispatch=dispatch), dispatched.out)


def dispatched_names(inputs: testing.PackedInputs, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[list[str], Any]:
    """The ops that a call without gradients sends through the dispatcher, and its result."""
    names: list[str] = []
    real = ops.attention_forward
    monkeypatch.setattr(ops, "attention_forward", lambda *args: names.append("attention_forward") or real(*args))
    with torch.no_grad():
        return names, inputs.attend(**changes)


def test_offsets_of_a_subclass_are_unwrapped_before_a_kernel_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a collective returns is a subclass without storage. Its int32 offsets would go to the kernel as they are."""
    inputs = build(PackedCase((5, 9, 3)))
    with torch.no_grad():
        want = inputs.attend()
    seen: list[type] = []
    real = execution.forward
    monkeypatch.setattr(execution, "forward", lambda batch, plan: seen.append(type(batch.subsets.starts_q)) or real(batch, plan))
    cu = inputs.cu_seqlens_q.to(torch.int32)
    names, out = dispatched_names(inputs, monkeypatch, cu_seqlens_q=TwoTensor(cu, cu.clone()), cu_seqlens_kv=None)
    assert names == ["attention_forward"] and set(seen) == {torch.Tensor}
    assert torch.equal(out.a, want) and torch.equal(out.b, want)


@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
def test_a_default_device_is_not_taken_for_the_tensors(dispatch: str) -> None:
    inputs = build(PackedCase((5, 9, 3), masks=(CAUSAL, FULL), owner=(0, 1, 0), gaps_q=(1, 0, 2), tail=3))
    options = {"thd_attention_policy_dispatch": dispatch, "sanitize_padding": True}
    want = inputs.run(**options)
    prepared = inputs.prepared
    with torch.device("meta"):
        got = inputs.run(**options, thd_attention_policies=prepared)
        with torch.no_grad():
            assert torch.equal(inputs.attend(**options), want.out)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_a_default_device_keeps_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(PackedCase((5, 9, 3)))
    with torch.device("cpu"):
        assert dispatched_names(inputs, monkeypatch)[0] == []
        with torch.device("cpu"), torch.overrides.BaseTorchFunctionMode():
            assert dispatched_names(inputs, monkeypatch)[0] == ["attention_forward"]


@pytest.mark.parametrize("view", [torch._neg_view, torch._to_functional_tensor], ids=["negative", "functional"])
def test_views_that_the_dispatcher_resolves(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(PackedCase((5, 9, 3)))
    names: list[str] = []
    real = ops.attention_forward
    monkeypatch.setattr(ops, "attention_forward", lambda *args: names.append("attention_forward") or real(*args))
    with torch.no_grad():
        inputs.attend(lambda q, k, v, **options: thd_attention(view(q), k, v, **options))
    assert names == ["attention_forward"]


def test_the_dispatcher_can_be_asked_for() -> None:
    script = """
import torch
from te_attn_ops import ops
from te_attn_ops.testing import PackedCase, build
names, real = [], ops.attention_forward
ops.attention_forward = lambda *args: names.append("forward") or real(*args)
build(PackedCase((5, 9))).run()
print(names)
"""
    for value, expected in (("1", "['forward']"), ("0", "[]")):
        environment = {**os.environ, "TE_ATTN_OPS_DISPATCHER": value}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize("mode", ["fake", "real"])
def test_a_trace_neither_takes_nor_leaves_a_remembered_routing(mode: str) -> None:
    """The routing of prepared policies is computed in the graph, from its own cu_seqlens, and a later call from real tensors."""
    case = PackedCase((5, 9, 3), masks=(CAUSAL, FULL), owner=(0, 1, 0))
    inputs, other = build(case), build(case.replace(lengths_q=(9, 5, 3)))

    def call(q: torch.Tensor, cu_seqlens_q: torch.Tensor) -> Any:
        with torch.no_grad():
            options = inputs.arguments(cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=None)
            return thd_attention(q, inputs.k, inputs.v, **options)

    want = call(inputs.q, inputs.cu_seqlens_q)
    graph = make_fx(call, tracing_mode=mode, _allow_non_fake_inputs=True)(inputs.q, inputs.cu_seqlens_q)
    assert "policy_subsets" in str(graph.graph)
    assert torch.equal(call(inputs.q, inputs.cu_seqlens_q), want)
    if mode == "real":
        assert torch.equal(graph(inputs.q, other.cu_seqlens_q), call(inputs.q, other.cu_seqlens_q))


def test_torchscript_is_refused() -> None:
    inputs = build(PackedCase((5, 9, 3)))
    with pytest.raises(NotImplementedError, match=r"cannot be traced by torch\.jit\.trace: use torch\.compile or torch\.export"):
        torch.jit.trace(lambda q: inputs.attend(lambda q_, k, v, **options: thd_attention(q, k, v, **options)), (inputs.q.detach(),))


@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
def test_kernels_get_no_bound_far_beyond_the_rows(dispatch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[int, int]] = set()
    for name in ("forward", "backward"):
        real = getattr(Unfused, name)

        def note(self: Any, call: Any, real: Any = real) -> None:
            seen.add((call.max_seqlen_q, call.max_seqlen_kv))
            real(self, call)

        monkeypatch.setattr(Unfused, name, note)
    inputs = build(PackedCase((5, 9, 3), (400, 1, 2), masks=(CAUSAL, FULL), owner=(0, 1, 0)))
    loose = inputs.run(max_seqlen_q=1 << 24, max_seqlen_kv=1 << 24, thd_attention_policy_dispatch=dispatch)
    # One cap for both sides: which of them is larger stays.
    assert seen == {(512, 512)}
    testing.assert_matches(loose, testing.reference(inputs), inputs)
    seen.clear()
    inputs.run(max_seqlen_q=16, max_seqlen_kv=1 << 24, thd_attention_policy_dispatch=dispatch)
    assert seen == {(16, 512)}


@pytest.mark.parametrize("name", ["k", "v"])
def test_grouped_brings_no_sequence_beside_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands behind the last compact sequence, where a kernel that loads whole tiles reads on, is that sequence's own."""
    case = PackedCase((9, 14, 6), gaps_q=(2, 1, 1), gaps_kv=(2, 1, 1), tail=4, masks=(CAUSAL, FULL), owner=(0, 1, 0))
    inputs, tails = build(case), []
    with torch.no_grad():
        getattr(inputs, name)[0] = math.nan
    real = Unfused.forward

    def look(self: Any, call: Any) -> None:
        tails.append(getattr(call, name)[int(call.starts_kv[-1]) :])
        real(self, call)

    monkeypatch.setattr(Unfused, "forward", look)
    with torch.no_grad():
        inputs.attend(thd_attention_policy_dispatch="grouped")
    assert all(tail.isfinite().all() for tail in tails) and tails[-1].shape[0] == 8


def test_a_profiler_sees_the_ops() -> None:
    inputs = build(PackedCase((5, 9, 3)))
    with torch.profiler.profile() as profile:
        inputs.run()
        with torch.no_grad():
            inputs.attend()
    names = {event.key for event in profile.key_averages()}
    assert {"te_attn_ops::attention", "te_attn_ops::attention_forward", "te_attn_ops::attention_backward"} <= names


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_a_trace_of_a_training_step_holds_the_ops(pre_dispatch: bool) -> None:
    inputs = build(PackedCase((5, 9, 3)))

    def step(q: torch.Tensor) -> torch.Tensor:
        q = q.detach().requires_grad_()
        out = inputs.attend(lambda q_, k, v, **options: thd_attention(q, k.detach(), v.detach(), **options))
        return torch.autograd.grad(out.sum(), q)[0]

    graph = make_fx(step, pre_dispatch=pre_dispatch, tracing_mode="real")(inputs.q).graph
    names = [str(node.target).removeprefix("te_attn_ops.") for node in graph.nodes if "te_attn_ops" in str(node.target)]
    names = [name.removesuffix(".default") for name in names if "attention" in name]
    assert names == ["attention" if pre_dispatch else "attention_forward", "attention_backward"]


class Tagged(torch.Tensor):
    """A subclass that counts what is dispatched on it."""

    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_tensor_subclass_sees_the_op() -> None:
    inputs = build(PackedCase((5, 9, 3)))
    want = inputs.attend().detach()
    Tagged.calls.clear()
    q = inputs.q.detach().as_subclass(Tagged)
    out = inputs.attend(lambda q_, k, v, **options: thd_attention(q, k.detach(), v.detach(), **options))
    assert any("attention_forward" in name for name in Tagged.calls)
    assert torch.equal(out.as_subclass(torch.Tensor), want)


@pytest.mark.parametrize("pad_head_dim", [False, True])
@pytest.mark.parametrize("case", GRADCHECK_CASES, ids=str)
def test_gradcheck(case: PackedCase, pad_head_dim: bool) -> None:
    inputs = build(case)
    arguments = inputs.arguments(pad_head_dim=pad_head_dim)
    assert torch.autograd.gradcheck(
        lambda q, k, v: testing.thd_attention(q, k, v, **arguments), (inputs.q, inputs.k, inputs.v), nondet_tol=0.0
    )


@pytest.mark.parametrize("needed", [names for n in (1, 2, 3) for names in itertools.combinations("qkv", n)], ids="".join)
def test_every_subset_of_needed_gradients(needed: tuple[str, ...]) -> None:
    inputs = build(PackedCase((5, 9), head_dim_v=8))
    expected = dict(zip("qkv", inputs.run()[3:]))
    tensors = {name: getattr(inputs, name).detach().requires_grad_(name in needed) for name in "qkv"}
    out = testing.thd_attention(**tensors, **inputs.arguments())
    out.backward(inputs.grad_out)
    for name, tensor in tensors.items():
        assert (tensor.grad is not None) is (name in needed)
        if name in needed:
            assert torch.equal(tensor.grad, expected[name])


def test_gradients_accumulate_and_the_graph_can_be_kept() -> None:
    inputs = build(PackedCase((5, 9)))
    out = inputs.attend()
    out.backward(inputs.grad_out, retain_graph=True)
    once = inputs.q.grad.clone()
    out.backward(inputs.grad_out)
    torch.testing.assert_close(inputs.q.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(inputs.grad_out)


def test_lse_and_max_logit_carry_no_gradient() -> None:
    out, lse, max_logit = build(PackedCase((5, 9))).attend(return_lse=True, return_max_logit=True)
    assert out.requires_grad and not lse.requires_grad and not max_logit.requires_grad


def _first_gradients(inputs: testing.PackedInputs) -> tuple[torch.Tensor, ...]:
    out = inputs.attend()
    return (out, *torch.autograd.grad(out.sin().sum(), (inputs.q, inputs.k, inputs.v), create_graph=True))


@pytest.mark.parametrize("which", [1, 2, 3], ids=["dq", "dk", "dv"])
@pytest.mark.parametrize(
    "form",
    [
        lambda out, grad, q: torch.autograd.grad(grad.sum(), q),
        lambda out, grad, q: grad.pow(2).sum().backward(),
        lambda out, grad, q: (out.sum() + grad.pow(2).sum()).backward(),
        lambda out, grad, q: (out.pow(2).sum() * grad.sum()).backward(),
    ],
    ids=["grad_of_grad", "penalty", "loss_plus_penalty", "product"],
)
def test_second_derivative_is_refused(form: Any, which: int) -> None:
    inputs = build(PackedCase((5, 9)))
    results = _first_gradients(inputs)
    with pytest.raises(NotImplementedError, match="te_attn_ops attention has no second derivative"):
        form(results[0], results[which], inputs.q)


def test_second_derivative_is_refused_by_gradgradcheck_and_double_backward_through_grad_out() -> None:
    inputs = build(PackedCase((3, 2), head_dim_qk=2, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        torch.autograd.gradgradcheck(lambda q: testing.thd_attention(q, inputs.k, inputs.v, **inputs.arguments()), (inputs.q,))
    out = inputs.attend()
    grad_out = inputs.grad_out.clone().requires_grad_()
    (dv,) = torch.autograd.grad(out, inputs.v, grad_out, create_graph=True)
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        dv.sum().backward()


@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
def test_thirty_backward_runs_are_bitwise_equal(dispatch: str) -> None:
    case = PackedCase((40, 61, 17), num_heads=4, num_gqa_groups=2, masks=(CAUSAL, FULL), owner=(0, 1, 0), dtype=torch.bfloat16)
    inputs = build(case)
    first = inputs.run(deterministic=True, thd_attention_policy_dispatch=dispatch)
    for _ in range(29):
        again = inputs.run(deterministic=True, thd_attention_policy_dispatch=dispatch)
        assert all(torch.equal(getattr(again, name), getattr(first, name)) for name in ("out", "lse", "dq", "dk", "dv"))


@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
def test_one_policys_sequences_do_not_depend_on_the_others(dispatch: str) -> None:
    """Bitwise, outputs and gradients, whatever stands in the other policy's rows and however they are masked."""
    case = PackedCase((9, 14, 6, 3), masks=(CAUSAL, FULL), owner=(0, 1, 0, 1))
    base, changed = build(case), build(case.replace(masks=(CAUSAL, Mask("padding", (1, 2)))))
    rows = torch.cat([torch.arange(r.start, r.stop) for n, r in enumerate(case.rows("q")) if case.owner[n] == 0])
    with torch.no_grad():
        for name in ("q", "k", "v", "grad_out"):
            values = getattr(base, name).detach().clone()
            getattr(changed, name).copy_(3 * torch.randn_like(values))
            getattr(changed, name)[rows] = values[rows]
    options = {"deterministic": True, "thd_attention_policy_dispatch": dispatch}
    for name, got, want in zip(testing.Results._fields, changed.run(**options), base.run(**options)):
        if name in ("out", "dq", "dk", "dv"):
            assert torch.equal(got[rows], want[rows]), name
        elif name == "lse":
            assert torch.equal(got[:, rows], want[:, rows])


# ------------------------------------------------------------------------------------------------------------- plans and FLOPs
@pytest.mark.parametrize(
    ("bands", "backends"),
    [
        ((Band(),), (0,)),
        ((Band(None, 0, False), Band(3, 2, True), Band(None, 7, False), Band(0, None, True)), (4, 5, 0, 1)),
    ],
)
def test_a_plan_says_what_was_put_in(bands: tuple[Band, ...], backends: tuple[int, ...]) -> None:
    plan = plans.encode(plans.MAX_LOGIT | plans.TRAINING, plans.GROUPED, 192, bands, backends)
    assert all(type(number) is int for number in plan)
    decoded = plans.decode(tuple(plan))
    assert (decoded.dispatch, decoded.width, decoded.bands, decoded.backends) == (plans.GROUPED, 192, bands, backends)
    assert decoded.has(plans.MAX_LOGIT) and decoded.has(plans.TRAINING) and not decoded.has(plans.DETERMINISTIC)
    runs = tuple((7 * p, p + 1) for p in range(len(bands)))
    assert plans.decode(tuple(plans.with_runs(plan, runs))) == decoded._replace(flags=decoded.flags | plans.RUNS, runs=runs)
    assert decoded.runs == ()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([plans.ABI + 1, 0, 0, 0, -1, 0, 1, 0], f"has version {plans.ABI + 1}; .* writes version {plans.ABI}: compile"),
        ([], "has version none"),
        ([plans.ABI, 0, 0, 0], "at least one policy; got 4"),
        ([plans.ABI, 0, 0, 0, -1, 0, 1], "4 ints per policy, at least one policy; got 7"),
    ],
)
def test_a_plan_of_another_version_is_an_error(plan: list[int], message: str) -> None:
    *arguments, _ = OpSample(ops.attention_forward, PackedCase((3, 4))).arguments()
    with pytest.raises(ValueError, match=message):
        ops.attention_forward(*arguments, plan)


def test_flops_of_forward_and_backward() -> None:
    inputs = build(PackedCase((6, 6), num_heads=4, num_gqa_groups=2, head_dim_qk=8, head_dim_v=16, masks=(FULL,)))
    with FlopCounterMode(display=False) as counter:
        out = inputs.attend()
    per_width = 2 * 4 * 12 * 6  # two FLOPs per head, query and key
    assert counter.get_total_flops() == per_width * (8 + 16)
    with FlopCounterMode(display=False) as counter:
        out.backward(inputs.grad_out)
    assert counter.get_total_flops() == per_width * (3 * 8 + 2 * 16)
