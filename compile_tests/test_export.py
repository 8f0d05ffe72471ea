"""torch.export, strict and not, with dynamic tokens and sequences; decompositions; saved programs; AOTInductor packages."""

from __future__ import annotations

import functools
import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram, ShapesCollection, export
from torch.utils import _pytree as pytree

from compile_tests.harness import count_calls, graph_text
from te_attn_ops import PlanSpec, PreparedPolicies, invalidate, plan as plans, thd_attention
from te_attn_ops.masks import Band
from te_attn_ops.modules import TransformerLayer
from te_attn_ops.policies import SingleLaunchPlan
from te_attn_ops.testing import CAUSAL, FULL, Mask, PackedCase, PackedInputs, build
from tests.stubs import Stub, install

KINDS = {
    "scalar": PackedCase((5, 9, 3)),
    "policies": PackedCase((5, 9, 3), masks=(CAUSAL, FULL, Mask("padding", (2, 1))), owner=(0, 1, 2)),
    "gaps": PackedCase((5, 9, 3), gaps_q=(1, 0, 2)),
    "padded": PackedCase((5, 9, 3), head_dim_qk=24, head_dim_v=16),
}
OTHER_LENGTHS = ((2, 30, 7, 11, 4), (3, 3), (64, 1, 1, 17))


class Attend(torch.nn.Module):
    def __init__(self, pad_head_dim: bool | None) -> None:
        super().__init__()
        self.pad_head_dim = pad_head_dim

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, padded: Tensor | None, policies: PreparedPolicies | None
    ) -> Tensor:
        return thd_attention(
            q.sin(),
            k,
            v,
            cu,
            cu_seqlens_q_padded=padded,
            max_seqlen_q=64,
            thd_attention_policies=policies,
            pad_head_dim=self.pad_head_dim,
        ).relu()


def module(kind: str) -> Attend:
    return Attend(True if kind == "padded" else None)


def inputs_of(kind: str, lengths: tuple[int, ...] | None = None, requires_grad: bool = False) -> PackedInputs:
    """Of the kind's sample, or of another batch with as many policies."""
    case = KINDS[kind]
    if lengths is not None:
        case = case.replace(lengths_q=lengths)
        if case.owner is not None:
            case = case.replace(owner=tuple((2 * n) % 3 for n in range(len(lengths))))
        if case.gaps_q is not None:
            case = case.replace(gaps_q=tuple(n % 2 for n in range(len(lengths))))
    return build(case, requires_grad=requires_grad)


def arguments(inputs: PackedInputs) -> tuple[Any, ...]:
    # mutable: the partition is a matter of the batch, and three sequences are runs of neighbours by accident.
    policies = inputs.prepare(mutable=True)
    return (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_q_padded, policies)


def dynamic(arguments: tuple[Any, ...]) -> ShapesCollection:
    shapes = ShapesCollection()
    policies = arguments[5]
    for tensor in (*arguments[:5], None if policies is None else policies.policy_index):
        if tensor is not None:
            shapes[tensor] = {0: Dim.AUTO}
    return shapes


def exported(kind: str, strict: bool, requires_grad: bool = False) -> ExportedProgram:
    args = arguments(inputs_of(kind, requires_grad=requires_grad))
    return export(module(kind), args, dynamic_shapes=dynamic(args), strict=strict)


def assert_runs(program: Any, kind: str, tolerance: float = 0.0) -> None:
    """On the sample's shapes and on others, as eager does."""
    for lengths in (None, *OTHER_LENGTHS):
        args = arguments(inputs_of(kind, lengths))
        torch.testing.assert_close(program(*args), module(kind)(*args), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non_strict"])
@pytest.mark.parametrize("kind", KINDS)
def test_dynamic_tokens_and_sequences(kind: str, strict: bool) -> None:
    """One program for every batch; the op stands in it under its public name."""
    program = exported(kind, strict)
    assert count_calls(program.graph_module, "te_attn_ops.attention_forward") == 1
    assert count_calls(program.graph_module, "te_attn_ops.policy_subsets") == 1
    assert_runs(program.module(), kind)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non_strict"])
@pytest.mark.parametrize("kind", KINDS)
def test_decompositions_leave_the_ops(kind: str, strict: bool) -> None:
    program = exported(kind, strict).run_decompositions()
    assert count_calls(program.graph_module, "te_attn_ops.attention_forward") == 1
    assert_runs(program.module(), kind, 1e-6)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non_strict"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_export(kind: str, strict: bool) -> None:
    """With inputs that require grad the differentiable op is exported, and the program can be trained."""
    program = exported(kind, strict, requires_grad=True)
    assert count_calls(program.graph_module, "te_attn_ops.attention") == 1
    assert "te_attn_ops.attention_forward" not in graph_text(program.graph_module)
    for lengths in (None, OTHER_LENGTHS[0]):
        inputs = inputs_of(kind, lengths, requires_grad=True)
        args = arguments(inputs)
        got, want = program.module()(*args), module(kind)(*args)
        leaves = (inputs.q, inputs.k, inputs.v)
        for a, b in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves)):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    raw = program.run_decompositions()
    assert count_calls(raw.graph_module, "te_attn_ops.attention_forward") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(kind: str) -> None:
    """Also with policies among the inputs: their masks are part of the saved structure."""
    file = io.BytesIO()
    torch.export.save(exported(kind, strict=False), file)
    file.seek(0)
    assert_runs(torch.export.load(file).module(), kind)


def test_a_program_refuses_policies_of_other_masks() -> None:
    """The masks are in the plan: other ones must not run under it."""
    program = exported("policies", strict=False).module()
    inputs = build(KINDS["policies"].replace(masks=(CAUSAL, FULL, Mask("padding", (3, 1)))), requires_grad=False)
    with pytest.raises(Exception, match=r"(?i)treespec|structure|mismatch|pytree"):
        program(*arguments(inputs))


def test_a_program_for_runs_of_neighbours_refuses_another_partition() -> None:
    """Unless mutable, a partition into runs is a fact that kernels rely on."""
    inputs = build(KINDS["policies"], requires_grad=False)
    runs = (*arguments(inputs)[:5], inputs.prepare())
    shapes = ShapesCollection()
    for tensor in (*runs[:4], runs[5].policy_index):
        shapes[tensor] = {0: Dim.AUTO}
    program = export(module("policies"), runs, dynamic_shapes=shapes, strict=False).module()
    assert torch.equal(program(*runs), module("policies")(*runs))
    other = build(KINDS["policies"].replace(lengths_q=(5, 9, 2, 1), owner=(0, 1, 0, 2)), requires_grad=False)
    with pytest.raises(Exception, match=r"contiguous|(?i:guard failed)|(?i:expected)"):
        program(*arguments(other)[:5], other.prepare())


_PLAIN_PACKAGE = """
import sys, torch
program = torch.export.export(torch.nn.Linear(4, 4), (torch.ones(2, 4),))
path = torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
torch._inductor.aoti_load_package(path)(torch.ones(2, 4))
"""


@functools.cache
def torch_loads_aot_inductor_packages() -> bool:
    """A CUDA build of torch 2.11 was seen to crash in the loader on a package for the CPU, so there it is tried first, elsewhere."""
    if torch.version.cuda is None:
        return True
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _PLAIN_PACKAGE, str(Path(folder) / "plain.pt2")]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("kind", ["scalar", "policies"])
def test_aot_inductor_package(kind: str, tmp_path: Path) -> None:
    """Compiled ahead of time into a package, loaded again, run on other shapes. The ops are this package's: import it first."""
    if not torch_loads_aot_inductor_packages():
        pytest.skip("this torch cannot load an AOTInductor package of a plain Linear")
    path = torch._inductor.aoti_compile_and_package(exported(kind, strict=False), package_path=str(tmp_path / "model.pt2"))
    assert_runs(torch._inductor.aoti_load_package(path), kind, 1e-5)


def test_a_transformer_layer() -> None:
    torch.manual_seed(0)
    options = {"attn_input_format": "thd", "self_attn_mask_type": "padding_causal"}
    layer = TransformerLayer(32, 24, 2, num_gqa_groups=1, hidden_dropout=0.0, device="cpu", **options).eval()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, cu: Tensor) -> Tensor:
            return self.layer(x, cu_seqlens_q=cu, max_seqlen_q=64)

    def batch(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return torch.randn(sum(lengths), 32), build(PackedCase(lengths)).cu_seqlens_q

    with torch.no_grad():
        program = export(Model(), batch((5, 9, 3)), dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}), strict=False)
        for lengths in OTHER_LENGTHS:
            x, cu = batch(lengths)
            torch.testing.assert_close(program.module()(x, cu), Model()(x, cu))


def test_a_program_keeps_the_backend_it_was_exported_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program runs was decided at export: a variable or invalidate() does not reach it. Export again after a change."""
    used: list[str] = []
    stubs = {name: Stub(name, before_forward=lambda call, name=name: used.append(name)) for name in ("flash4", "unfused")}
    install(monkeypatch, *stubs.values())
    program = exported("scalar", strict=False).module()
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    invalidate()
    args = arguments(inputs_of("scalar"))
    program(*args)
    module("scalar")(*args)
    assert used[-2:] == ["flash4", "unfused"]


def test_a_program_of_another_version_refuses_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan made by another version of the package is an error that says what to do, never run under the new meaning."""
    program = exported("scalar", strict=False).module()
    monkeypatch.setattr(plans, "ABI", plans.ABI + 1)
    plans.decode.cache_clear()
    with pytest.raises(ValueError, match=f"has version {plans.ABI - 1}; te_attn_ops here writes version {plans.ABI}: compile or export"):
        program(*arguments(inputs_of("scalar")))
    plans.decode.cache_clear()


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non_strict"])
def test_max_seqlen_as_an_input(strict: bool) -> None:
    """A number of the batch: its bucket is in the program, and a value of another bucket is refused, not run under a wrong bound."""

    class Bounded(torch.nn.Module):
        def forward(self, q: Tensor, cu: Tensor, max_seqlen: int) -> Tensor:
            return thd_attention(q, q, q, cu, max_seqlen_q=max_seqlen)

    inputs = inputs_of("scalar")
    shapes = {"q": {0: Dim.AUTO}, "cu": {0: Dim.AUTO}, "max_seqlen": Dim.AUTO}
    program = export(Bounded(), (inputs.q, inputs.cu_seqlens_q, 20), dynamic_shapes=shapes, strict=strict).module()
    assert torch.equal(program(inputs.q, inputs.cu_seqlens_q, 77), Bounded()(inputs.q, inputs.cu_seqlens_q, 77))
    with pytest.raises(Exception, match=r"128|Guard failed|expected"):
        program(inputs.q, inputs.cu_seqlens_q, 500)


def test_prepared_policies_survive_torch_save() -> None:
    """With weights_only=True, torch.load's default: a data pipeline may keep them on disk."""
    prepared = inputs_of("policies").prepared
    assert prepared is not None
    spec = PlanSpec(torch.bfloat16, 4, 2, 16, 8, True, (Band(None, 0, True), Band(2, None, False)))
    prepared.plans.append(SingleLaunchPlan([torch.ones(3)], spec))
    file = io.BytesIO()
    torch.save(prepared, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded.policy_index, prepared.policy_index) and loaded.kind == prepared.kind
    assert loaded.plans[0].spec == spec


@pytest.mark.parametrize("with_plan", [False, True])
def test_prepared_policies_as_a_pytree(with_plan: bool) -> None:
    """Tensors are the leaves; everything else is structure, which survives being written as text."""
    prepared = inputs_of("policies").prepared
    assert prepared is not None
    if with_plan:
        spec = PlanSpec(torch.bfloat16, 4, 2, 16, 8, True, (Band(None, 0, True), Band(2, None, False)))
        prepared.plans.append(SingleLaunchPlan([torch.ones(3), torch.zeros(2)], spec))
    leaves, structure = pytree.tree_flatten(prepared)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    assert len(tensors) == (3 if with_plan else 1)
    rebuilt = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(structure)))
    assert rebuilt.policy_index is prepared.policy_index and rebuilt.kind == prepared.kind
    assert [plan.spec for plan in rebuilt.plans] == [plan.spec for plan in prepared.plans]
