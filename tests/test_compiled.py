"""torch.compile(fullgraph=True): the same numbers as eager, few compilations, the environment noticed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from te_attn_ops import NoBackendError, PreparedPolicies, invalidate, prepare_thd_policies, testing, thd_attention, validate_packed
from te_attn_ops.testing import BOTTOM_RIGHT, CAUSAL, CONFIGURATIONS, EXAMPLES, FULL, Mask, PackedCase, PackedInputs, build
from tests.stubs import Stub, install

pytestmark = pytest.mark.usefixtures("fresh_caches")


def compiled(
    function: Callable[..., Any] = thd_attention, backend: str = "aot_eager", **options: Any
) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def run(function: Any, inputs: PackedInputs, **changes: Any) -> testing.Results:
    """As ``PackedInputs.run``, with ``function`` in place of :func:`thd_attention`."""
    out, lse = function(inputs.q, inputs.k, inputs.v, **inputs.arguments(**changes), return_lse=True)
    grads = torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.grad_out)
    return testing.Results(out.detach(), lse, None, *grads)


def assert_equal(got: testing.Results, want: testing.Results, exact: bool = True) -> None:
    for name in ("out", "lse", "dq", "dk", "dv"):
        tolerance = 0 if exact else 1e-5
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=tolerance, atol=tolerance, msg=f"{name} differs")


# --------------------------------------------------------------------------------------------------------------- same as eager
_NAMES = {
    "layout_0_1",
    "layout_2_2",
    "layout_3_2_top_left",
    "swa_5_2",
    "mla_1_0",
    "mla_2_2",
    "zero_length",
    "gaps_cross",
    "self_thd_shared_cu_seqlens",
}


@pytest.mark.parametrize("case", [case for case in CONFIGURATIONS if case.name in _NAMES], ids=str)
def test_training_equals_eager(case: PackedCase) -> None:
    inputs = build(case.replace(dtype=torch.bfloat16))
    assert_equal(run(compiled()[0], inputs), inputs.run())


@pytest.mark.parametrize("dispatch", ["auto", "padded", "grouped"])
@pytest.mark.parametrize("name", ["policies", "policies_cross"])
def test_policies_in_training_equal_eager(name: str, dispatch: str) -> None:
    inputs = build(next(case for case in CONFIGURATIONS if case.name == name))
    assert_equal(
        run(compiled()[0], inputs, thd_attention_policy_dispatch=dispatch), inputs.run(thd_attention_policy_dispatch=dispatch)
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_closed_form_in_inference(name: str) -> None:
    case, rows = EXAMPLES[name]
    inputs = testing.closed_form_inputs(case)
    with torch.no_grad():
        out = compiled()[0](inputs.q, inputs.k, inputs.v, **inputs.arguments())
    assert out[:, 0, 0].tolist() == pytest.approx(rows)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(mode: Any) -> None:
    inputs = build(PackedCase((5, 9)))
    function, counter = compiled()
    with mode():
        out = function(inputs.q, inputs.k, inputs.v, **inputs.arguments())
        assert torch.equal(out, inputs.attend()) and not out.requires_grad
    assert counter.frame_count == 1


@pytest.mark.parametrize("pad_head_dim", [False, True])
@pytest.mark.parametrize(("head_dim_qk", "head_dim_v"), [(24, 16), (16, 24)])
def test_padded_widths_equal_eager(head_dim_qk: int, head_dim_v: int, pad_head_dim: bool) -> None:
    inputs = build(PackedCase((5, 9), head_dim_qk=head_dim_qk, head_dim_v=head_dim_v))
    got = run(compiled()[0], inputs, pad_head_dim=pad_head_dim)
    assert got.out.shape == (14, 2, head_dim_v) and got.dv.shape == inputs.v.shape
    assert_equal(got, inputs.run(pad_head_dim=pad_head_dim), exact=False)


def test_all_outputs_and_sanitized_padding() -> None:
    inputs = build(PackedCase((5, 9), gaps_q=(2, 0), tail=3)).poison()
    options = {"sanitize_padding": True, "return_lse": True, "return_max_logit": True}
    got = compiled()[0](inputs.q, inputs.k, inputs.v, **inputs.arguments(**options))
    want = inputs.attend(**options)
    assert all(torch.equal(a, b) for a, b in zip(got, want)) and len(got) == 3
    for a, b in zip(*[torch.autograd.grad(x[0], (inputs.q, inputs.k, inputs.v), inputs.grad_out) for x in (got, want)]):
        assert torch.equal(a, b) and a.isfinite().all()


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_inductor_training_equals_eager(layout: str) -> None:
    """A projection in front and a gate behind, so that there is something to fuse with."""
    case = PackedCase((33, 64), num_heads=4, num_gqa_groups=4, layout=layout, masks=(CAUSAL, FULL), owner=(0, 1))

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
        out, lse = thd_attention(q * 1.5, k.cos(), v + 1, **arguments)
        return out * out.sigmoid(), lse

    inputs = build(case)
    assert_equal(run(compiled(block, "inductor")[0], inputs), run(block, inputs), exact=False)


def test_inductor_pads_and_trims_like_eager() -> None:
    inputs = build(PackedCase((33, 64), head_dim_qk=24, head_dim_v=16))
    got = run(compiled(backend="inductor")[0], inputs, pad_head_dim=True)
    assert_equal(got, inputs.run(pad_head_dim=True), exact=False)


@pytest.mark.parametrize("source", ["arange", "cumsum"])
def test_offsets_made_inside_the_graph(source: str) -> None:
    def attend(q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if source == "arange":
            cu = torch.arange(0, q.shape[0] + 1, q.shape[0] // lengths.shape[0])
        else:
            cu = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))
        return thd_attention(q, q, q, cu, max_seqlen_q=256)

    function, _ = compiled(attend, dynamic=True)
    for length in (64, 128, 128) if source == "arange" else (64, 128, 128, 0):
        q, lengths = torch.randn(2 * length, 2, 8), torch.full((2,), length)
        assert torch.equal(function(q, lengths), attend(q, lengths))


def test_int64_offsets() -> None:
    inputs = build(PackedCase((5, 9), index_dtype=torch.int64, masks=(CAUSAL, FULL), owner=(0, 1)))
    assert_equal(run(compiled()[0], inputs), inputs.run())


def test_equal_valued_offsets_in_separate_tensors() -> None:
    """What stands for gaps in eager stands for gaps in compiled code: it goes by the arguments, not by their values."""
    inputs = build(PackedCase((5, 9), masks=(FULL,)))
    separate = {"cu_seqlens_q_padded": inputs.cu_seqlens_q.clone()}
    function, _ = compiled()
    for changes in ({}, separate, {"cu_seqlens_q_padded": inputs.cu_seqlens_q}):
        assert_equal(run(function, inputs, **changes), inputs.run(**changes))


# ------------------------------------------------------------------------------------------------------------ few compilations
def _mixed(case: PackedCase) -> PackedCase:
    return case.replace(masks=(CAUSAL, FULL), owner=tuple(n % 2 for n in range(len(case.lengths_q))))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["scalar", "policies", "gaps"])
def test_twelve_batches_of_varying_geometry_in_three_compilations(kind: str, training: bool) -> None:
    function, counter = compiled(dynamic=True)
    for case in testing.varying_cases():
        case = _mixed(case) if kind == "policies" else case
        if kind == "gaps":
            case = case.replace(gaps_q=tuple(n % 3 for n in range(len(case.lengths_q))))
        inputs = build(case)
        if training:
            assert_equal(run(function, inputs), inputs.run())
        else:
            with torch.no_grad():
                assert torch.equal(function(inputs.q, inputs.k, inputs.v, **inputs.arguments()), inputs.attend())
    assert counter.frame_count <= 3


def test_varying_geometry_with_inductor() -> None:
    function, counter = compiled(backend="inductor", dynamic=True)
    cases = [_mixed(case) for case in testing.varying_cases()]
    for case in cases:
        inputs = build(case)
        assert_equal(run(function, inputs), inputs.run(), exact=False)
    assert counter.frame_count <= 3
    with torch.compiler.set_stance("fail_on_recompile"):
        for case in cases:
            inputs = build(case)
            run(function, inputs)


def test_membership_changes_without_compiling_again() -> None:
    function, counter = compiled()
    for owner in ((0, 1, 0, 1), (1, 1, 0, 1), (0, 0, 1, 1), (1, 0, 0, 0)):
        inputs = build(PackedCase((5, 9, 3, 7), masks=(CAUSAL, FULL), owner=owner))
        prepared = inputs.prepare(mutable=True)
        assert_equal(run(function, inputs, thd_attention_policies=prepared), inputs.run(thd_attention_policies=prepared))
    assert counter.frame_count == 1


def test_policies_may_be_held_by_a_module_or_returned() -> None:
    class Holder(torch.nn.Module):
        policies: PreparedPolicies

        def forward(self, q: torch.Tensor, cu: torch.Tensor) -> tuple[torch.Tensor, PreparedPolicies]:
            return thd_attention(q, q, q, cu, max_seqlen_q=9, thd_attention_policies=self.policies), self.policies

    inputs = build(PackedCase((5, 9), masks=(CAUSAL, FULL), owner=(0, 1)))
    holder = Holder()
    holder.policies = inputs.prepared
    out, returned = compiled(holder)[0](inputs.q, inputs.cu_seqlens_q)
    assert torch.equal(out, holder(inputs.q, inputs.cu_seqlens_q)[0]) and returned is holder.policies


# ------------------------------------------------------------------------------------------------------- what cannot be traced
def test_a_list_of_policies_is_refused_with_the_remedy() -> None:
    inputs = build(PackedCase((5, 9), masks=(CAUSAL, FULL), owner=(0, 1)))
    with pytest.raises(Exception, match=r"must be what prepare_thd_policies returns under torch\.compile"):
        run(compiled()[0], inputs, thd_attention_policies=inputs.policies())


def test_a_missing_max_seqlen_is_refused_with_the_remedy() -> None:
    inputs = build(PackedCase((5, 9)))
    with pytest.raises(Exception, match=r"max_seqlen_q is needed under torch\.compile"):
        run(compiled()[0], inputs, max_seqlen_q=None)


@pytest.mark.parametrize("what", ["prepare_thd_policies", "validate_packed"])
def test_what_reads_on_the_host_is_refused(what: str) -> None:
    functions = {"prepare_thd_policies": lambda cu: prepare_thd_policies([], cu), "validate_packed": lambda cu: validate_packed(cu)}
    with pytest.raises(Exception, match=f"{what} reads tensors on the host: call it "):
        compiled(functions[what])[0](torch.tensor([0, 3]))


def test_wrong_arguments_are_named_under_compile_too() -> None:
    inputs = build(PackedCase((5, 9)))
    function, _ = compiled()
    for changes, message in (
        ({"attn_mask_type": "causal"}, "attn_mask_type='causal' does not fit the packed"),
        ({"thd_attention_policy_dispatch": "fast"}, "thd_attention_policy_dispatch='fast' is unknown"),
        ({"backend": "flash3"}, "with backend='flash3'"),
    ):
        with pytest.raises(Exception, match=message):
            run(function, inputs, **changes)


# ----------------------------------------------------------------------------------------------------------------- environment
def _noting_stubs(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, Stub]]:
    used: list[str] = []
    names = ("flash4", "cudnn", "unfused")
    stubs = {name: Stub(name, before_forward=lambda call, name=name: used.append(name)) for name in names}
    install(monkeypatch, *stubs.values())
    return used, stubs


@pytest.mark.parametrize("start", [None, "1", "0"], ids=["unset", "one", "zero"])
def test_a_variable_set_changed_and_unset_is_noticed(monkeypatch: pytest.MonkeyPatch, start: str | None) -> None:
    """Also one that was unset when the code was compiled, which ``os.environ.get`` would not guard."""
    used, _ = _noting_stubs(monkeypatch)
    inputs = build(PackedCase((5, 9)))
    function, counter = compiled()
    expected = []
    for value in (start, "0", None, "1", "0", None, start):
        if value is None:
            monkeypatch.delenv("NVTE_FLASH_ATTN", raising=False)
        else:
            monkeypatch.setenv("NVTE_FLASH_ATTN", value)
        run(function, inputs)
        expected.append("cudnn" if value == "0" else "flash4")
    assert used == expected
    assert counter.frame_count <= 3


def test_an_unrelated_variable_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(PackedCase((5, 9)))
    function, counter = compiled()
    for value in ("1", "2"):
        run(function, inputs)
        monkeypatch.setenv("NVTE_UNRELATED", value)
    run(function, inputs)
    assert counter.frame_count == 1


def test_no_backend_under_compile_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(Exception, match="disabled by NVTE_UNFUSED_ATTN=0") as caught:
        run(compiled()[0], build(PackedCase((5, 9))))
    chain, error = [], caught.value
    while error is not None:
        chain.append(type(error))
        error = error.__cause__ or error.__context__
    assert NoBackendError in chain


def test_invalidate_compiles_again_only_where_an_answer_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    used, stubs = _noting_stubs(monkeypatch)
    inputs = build(PackedCase((5, 9)))
    function, counter = compiled()
    for _ in range(20):
        run(function, inputs)
        assert invalidate() is False
    assert counter.frame_count == 1 and set(used) == {"flash4"}
    stubs["flash4"]._refuse = lambda p: iter(["gone"])
    assert invalidate() is True
    run(function, inputs)
    assert counter.frame_count == 2 and used[-1] == "cudnn"


_SCRIPT = """
    import sys, torch
    sys.path.insert(0, {root!r})
    from te_attn_ops import backends, selection, thd_attention
    from te_attn_ops.backends.unfused import Unfused
    used = []
    class Noting(Unfused):
        def version(self): return "1.0"
        def refusals(self, p): return iter(())
        def forward(self, call):
            used.append(self.name)
            super().forward(call)
    for name in backends.BACKEND_NAMES:
        stub = Noting()
        stub.name, stub.switches = name, backends.get_backend(name).switches
        if name not in ("flash4", "cudnn"):
            stub.version = lambda: None
        backends._instances[name] = stub
    q = torch.randn(14, 2, 16, requires_grad=True)
    cu = torch.tensor([0, 5, 14], dtype=torch.int32)
    out = torch.compile(thd_attention, fullgraph=True)(q, q, q, cu, max_seqlen_q=9)
    out.sum().backward()
    torch.testing.assert_close(out, thd_attention(q, q, q, cu, max_seqlen_q=9))
    counters = torch._dynamo.utils.counters["aot_autograd"]
    print(used[0], used[-1], counters["autograd_cache_hit"], counters["autograd_cache_miss"])
"""


def test_a_second_process_with_another_environment_is_right(tmp_path: Path) -> None:
    """One disk cache for all processes: what is chosen is part of the graph, so no process gets another one's choice."""
    root = str(Path(__file__).resolve().parents[1])
    script = textwrap.dedent(_SCRIPT.format(root=root))
    results = []
    for value in (None, "0", None):
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        env.pop("NVTE_FLASH_ATTN", None)
        if value is not None:
            env["NVTE_FLASH_ATTN"] = value
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        results.append(done.stdout.split())
    assert [result[:2] for result in results] == [["flash4", "flash4"], ["cudnn", "cudnn"], ["flash4", "flash4"]]
    assert [result[2:] for result in results] == [["0", "1"], ["0", "1"], ["1", "0"]], "the third may use what the first compiled"


def test_second_derivative_is_refused_in_compiled_code() -> None:
    inputs = build(PackedCase((5, 9)))
    function, _ = compiled()
    out = function(inputs.q, inputs.k, inputs.v, **inputs.arguments())
    with pytest.raises((NotImplementedError, RuntimeError)):
        (grad,) = torch.autograd.grad(out.sin().sum(), inputs.q, create_graph=True)
        (out.sum() + grad.pow(2).sum()).backward()


@pytest.mark.parametrize("mask", [FULL, BOTTOM_RIGHT, Mask("padding_causal", (3, 0))], ids=str)
def test_one_op_per_call_whatever_the_number_of_policies(mask: Mask) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    masks = (CAUSAL, mask, FULL, Mask("padding", (1, 1)))
    inputs = build(PackedCase((5, 9, 3, 7), masks=masks, owner=(0, 1, 2, 3)))
    torch.compile(thd_attention, fullgraph=True, backend=record)(inputs.q, inputs.k, inputs.v, **inputs.arguments())
    targets = [node.target for node in graphs[0].graph.nodes if node.op == "call_function" and "te_attn_ops" in str(node.target)]
    assert [str(target) for target in targets] == ["te_attn_ops.policy_subsets.default", "te_attn_ops.attention.default"]
