"""What compiles again and what does not: counted.

A batch differs from the next in its tokens, its number of sequences, their longest and their policies' members. None of these may
cost a compilation once a graph with symbolic sizes is there. What belongs to the model or to the data's layout may.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from compile_tests.harness import assert_same, counted
from te_attn_ops import (
    PreparedPolicies,
    attention,
    packing,
    pad_packed_batch,
    plan as plans,
    refresh_thd_policies,
    testing,
    thd_attention,
)
from te_attn_ops.modules import DotProductAttention
from te_attn_ops.params import SEQLEN_BUCKETS, seqlen_bucket
from te_attn_ops.testing import BOTTOM_RIGHT, CAUSAL, FULL, Mask, PackedCase, PackedInputs, build, varying_cases
from tests.stubs import OneLaunch, Stub, install

MASKS = (CAUSAL, FULL, Mask("padding_causal", (3, 0)))
BASE = PackedCase((5, 9, 3))


def counts(batches: Iterable[tuple[PackedInputs, dict[str, Any]]], **options: Any) -> list[int]:
    """How many graphs there are after each call; every call's output equals eager's, bit for bit."""
    function, counter = counted(backend="eager", **options)
    after = []
    for inputs, changes in batches:
        assert torch.equal(inputs.attend(function, **changes), inputs.attend(**changes))
        after.append(counter.frame_count)
    return after


def of_cases(cases: Iterable[PackedCase], **changes: Any) -> list[tuple[PackedInputs, dict[str, Any]]]:
    return [(build(case), changes) for case in cases]


def with_policies(case: PackedCase) -> PackedCase:
    return case.replace(masks=MASKS, owner=tuple(n % len(MASKS) for n in range(len(case.lengths_q))))


# ---------------------------------------------------------------------------------------------------------- sizes of the batch
def test_tokens_compile_a_second_time_at_most() -> None:
    cases = [PackedCase((5, 9, 3 + n), tail=n) for n in range(6)]
    assert counts(of_cases(cases, max_seqlen_q=64, max_seqlen_kv=64)) == [1, 2, 2, 2, 2, 2]


def test_tokens_compile_once_where_shapes_are_declared_dynamic() -> None:
    cases = [PackedCase((5, 9, 3 + n), tail=n) for n in range(6)]
    assert counts(of_cases(cases), dynamic=True) == [1] * 6


def test_number_of_sequences() -> None:
    """Without a sequence cu_seqlens has one entry, which is special to torch (0/1 specialisation); all others share a graph."""
    cases = [PackedCase((3,) * n, tail=2) for n in (2, 3, 17, 64, 1, 0, 5, 1, 0)]
    assert counts(of_cases(cases, max_seqlen_q=8, max_seqlen_kv=8), dynamic=True) == [1, 1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [((3, 5, 17, 63, 1, 4, 1), [1, 1, 1, 1, 2, 2, 2]), ((2, 5, 17, 2, 63, 2), [1, 2, 2, 2, 2, 2])],
    ids=["any", "first_equals_heads"],
)
def test_number_of_sequences_with_policies(numbers: tuple[int, ...], expected: list[int]) -> None:
    """Here one sequence is special: policy_index has one entry then. And torch takes sizes that are equal at first for the same
    size: where the first batch has as many sequences as there are heads, which are a constant, one more graph is made."""
    function, counter = counted(backend="eager", dynamic=True)
    after = []
    for n in numbers:
        inputs = build(PackedCase((3,) * n, masks=(CAUSAL, FULL), owner=tuple(p % 2 for p in range(n))))
        prepared = inputs.prepare(mutable=True)
        got = inputs.attend(function, thd_attention_policies=prepared)
        assert torch.equal(got, inputs.attend(thd_attention_policies=prepared))
        after.append(counter.frame_count)
    assert after == expected


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("kind", ["scalar", "policies", "gaps", "cross"])
def test_twelve_batches_then_no_recompile_is_an_error(kind: str, training: bool) -> None:
    """3 to 8 documents, longest 17 to 129, 200 to 700 tokens, into two graphs (one per bucket of max_seqlen; where the policies
    of three documents happen to lie in runs, one more); then a recompile would raise."""

    def inputs_of(case: PackedCase) -> PackedInputs:
        if kind == "policies":
            case = with_policies(case).replace(gaps_q=tuple(n % 2 for n in range(len(case.lengths_q))))
        if kind == "gaps":
            case = case.replace(gaps_q=tuple(n % 3 for n in range(len(case.lengths_q))))
        if kind == "cross":
            case = case.replace(lengths_kv=tuple(reversed(case.lengths_q)))
        return build(case, requires_grad=training)

    function, counter = counted(dynamic=True)
    batches = [inputs_of(case) for case in varying_cases()]

    def check(inputs: PackedInputs) -> None:
        if training:
            assert_same(inputs.run(function), inputs.run())
        else:
            assert torch.equal(inputs.attend(function), inputs.attend())

    for inputs in batches:
        check(inputs)
    assert {seqlen_bucket(max(case.lengths_q)) for case in varying_cases()} == {128, 256}
    assert counter.frame_count <= (3 if kind == "policies" else 2)
    with torch.compiler.set_stance("fail_on_recompile"):
        for inputs in batches:
            check(inputs)


@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
def test_max_seqlen_compiles_once_per_bucket(dynamic: bool | None) -> None:
    """Sixteen values, three buckets; without dynamic=True, one more for the first value, taken for a constant."""
    values = [9, 100, 128, 17, 129, 192, 150, 64, 193, 256, 300, 128, 130, 12, 384, 77]
    assert {seqlen_bucket(value) for value in values} == {128, 256, 384}
    inputs = build(BASE)
    after = counts([(inputs, {"max_seqlen_q": value, "max_seqlen_kv": value}) for value in values], dynamic=dynamic)
    assert after[-1] <= (3 if dynamic else 4)


def test_a_bound_beyond_the_largest_bucket_compiles() -> None:
    inputs = build(BASE)
    function, _ = counted(dynamic=True)
    for value in (SEQLEN_BUCKETS[-1] + 1, 10**9):
        assert torch.equal(inputs.attend(function, max_seqlen_q=value, max_seqlen_kv=value), inputs.attend())


def test_a_graph_gets_the_buckets_bound_not_the_value() -> None:
    """Or a batch inside a bucket would record another CUDA graph."""
    bounds: list[Any] = []

    def note(graph: torch.fx.GraphModule, example: Any) -> Any:
        (node,) = [node for node in graph.graph.nodes if "attention" in str(node.target)]
        bounds.append(node.args[8])
        return graph.forward

    function = torch.compile(thd_attention, fullgraph=True, backend=note, dynamic=True)
    inputs = build(BASE)
    for value in (9, 100, 150, 130):
        inputs.attend(function, max_seqlen_q=value, max_seqlen_kv=value)
    assert bounds == [128, 256]


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 384, 385, SEQLEN_BUCKETS[-1], SEQLEN_BUCKETS[-1] + 1])
def test_buckets_are_the_same_traced_and_eager(length: int) -> None:
    assert attention._traced_bucket(length) == seqlen_bucket(length)


def test_max_seqlen_read_from_the_batch_inside_the_graph() -> None:
    """An unbacked int goes into the widest bucket: one graph, no data-dependent error."""

    def attend(q: Tensor, cu: Tensor) -> Tensor:
        return thd_attention(q, q, q, cu, max_seqlen_q=cu.diff().max().item())

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        function, counter = counted(attend, backend="eager", dynamic=True)
        for lengths in ((5, 9), (140, 3), (300, 20)):
            inputs = build(PackedCase(lengths))
            assert torch.equal(function(inputs.q, inputs.cu_seqlens_q), attend(inputs.q, inputs.cu_seqlens_q))
    assert counter.frame_count == 1


@pytest.mark.parametrize("source", ["arange", "cumsum", "cumsum_int32"])
def test_offsets_made_inside_the_graph(source: str) -> None:
    """Also of zero tokens, and of documents of one length by arange."""

    def attend(q: Tensor, lengths: Tensor) -> Tensor:
        if source == "arange":
            cu = torch.arange(lengths.shape[0] + 1) * (q.shape[0] // lengths.shape[0])
        else:
            cu = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))
        return thd_attention(q, q, q, cu.int() if source == "cumsum_int32" else cu, max_seqlen_q=256)

    function, counter = counted(attend, backend="inductor", dynamic=True)
    for length in (64, 128, 128, 0):
        q, lengths = torch.randn(2 * length, 2, 8), torch.full((2,), length)
        torch.testing.assert_close(function(q, lengths), attend(q, lengths))
    assert counter.frame_count <= 2, "zero tokens are special to torch"


# ------------------------------------------------------------------------------------------------------------------- policies
def test_membership_never_compiles_again() -> None:
    """Every partition of four sequences into two policies that leaves both of them something."""
    partitions = [owner for owner in itertools.product((0, 1), repeat=4) if len(set(owner)) == 2]
    function, counter = counted(backend="eager")
    for owner in partitions:
        inputs = build(PackedCase((5, 9, 3, 7), masks=(CAUSAL, FULL), owner=owner))
        prepared = inputs.prepare(mutable=True)
        got = inputs.attend(function, thd_attention_policies=prepared)
        assert torch.equal(got, inputs.attend(thd_attention_policies=prepared))
    assert counter.frame_count == 1


def test_a_policy_without_members_stays_where_membership_may_change() -> None:
    function, counter = counted(backend="eager")
    for owner in ((0, 1, 0), (0, 0, 0), (1, 1, 1)):
        inputs = build(PackedCase((5, 9, 3), masks=(CAUSAL, FULL), owner=owner))
        prepared = inputs.prepare(mutable=True)
        got = inputs.attend(function, thd_attention_policies=prepared)
        assert torch.equal(got, inputs.attend(thd_attention_policies=prepared))
    assert counter.frame_count == 1


def test_contents_of_a_policy_index_are_read_at_each_call() -> None:
    """The index is an input: the compiled function follows what is written into it."""
    inputs = build(PackedCase((5, 9, 3), masks=(CAUSAL, FULL), owner=(0, 1, 0)))
    prepared = inputs.prepare(mutable=True)
    function, counter = counted()
    for owner in ((0, 1, 0), (1, 0, 1), (0, 0, 1)):
        prepared.policy_index.copy_(torch.tensor(owner))
        want = build(PackedCase((5, 9, 3), masks=(CAUSAL, FULL), owner=owner)).attend()
        assert torch.equal(inputs.attend(function, thd_attention_policies=prepared), want)
    assert counter.frame_count == 1


@pytest.mark.parametrize(("in_place", "expected"), [(True, [1, 1, 1, 1]), (False, [1, 1, 2, 2])])
def test_runs_of_neighbours_matter_where_kernels_rely_on_them(
    in_place: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a partition into runs and one without differ; two of either kind do not."""
    stub = Stub("torch_flash")
    stub.in_place = in_place
    install(monkeypatch, stub)
    owners = ((0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 0, 1), (1, 0, 0, 1))
    cases = [PackedCase((5, 9, 3, 7), masks=(CAUSAL, FULL), owner=owner) for owner in owners]
    assert counts(of_cases(cases, thd_attention_policy_dispatch="padded")) == expected


def test_kept_empty_policies_make_one_graph_of_all_batches() -> None:
    function, counter = counted(backend="eager", dynamic=True)
    for owner in itertools.product((0, 1, 2), repeat=3):
        inputs = build(PackedCase((5, 9, 3), masks=MASKS, owner=owner))
        prepared = inputs.prepare(keep_empty=True)
        got = inputs.attend(function, thd_attention_policies=prepared)
        assert torch.equal(got, inputs.attend(thd_attention_policies=prepared)) and torch.allclose(got, inputs.attend())
    assert counter.frame_count == 1


def test_masks_and_windows_are_part_of_the_graph() -> None:
    windows = [Mask("padding_causal", (left, 0)) for left in (3, 4, 3, 5, 4)]
    cases = [PackedCase((5, 9, 3), masks=(FULL, window), owner=(0, 1, 0)) for window in windows]
    assert counts(of_cases(cases)) == [1, 2, 2, 3, 3]


def test_number_of_policies_is_part_of_the_graph() -> None:
    cases = [PackedCase((5, 9, 3, 7), masks=MASKS[:n], owner=tuple(p % n for p in range(4))) for n in (2, 3, 2, 3)]
    assert counts(of_cases(cases)) == [1, 2, 2, 2]


def test_one_policy_for_all_is_the_scalar_graph_of_its_own() -> None:
    cases = [PackedCase((5, 9, 3), masks=(mask,), owner=(0, 0, 0)) for mask in (CAUSAL, CAUSAL, BOTTOM_RIGHT)]
    assert counts(of_cases(cases)) == [1, 1, 2]


@pytest.mark.parametrize("how", ["argument", "attribute", "closure"])
def test_prepared_policies_may_come_from_anywhere(how: str) -> None:
    class Holder(torch.nn.Module):
        policies: PreparedPolicies

        def forward(self, q: Tensor, cu: Tensor, policies: PreparedPolicies | None) -> Tensor:
            policies = self.policies if how == "attribute" else current[0] if how == "closure" else policies
            return thd_attention(q, q, q, cu, max_seqlen_q=9, thd_attention_policies=policies)

    holder, current = Holder(), []
    function, counter = counted(holder, backend="eager", dynamic=True)
    for lengths in ((5, 9, 3), (4, 4, 9), (1, 2, 3)):
        inputs = build(PackedCase(lengths, masks=(CAUSAL, FULL), owner=(0, 1, 0)))
        prepared = holder.policies = inputs.prepare(mutable=True)
        current[:] = [prepared]
        assert torch.equal(
            function(inputs.q, inputs.cu_seqlens_q, prepared), holder(inputs.q, inputs.cu_seqlens_q, prepared)
        )
    assert counter.frame_count == 1


# ------------------------------------------------------------------------------------------------------ the model and the layout
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"num_heads": 4}, 2),
        ({"head_dim_qk": 8, "head_dim_v": 8}, 2),
        ({"dtype": torch.float64}, 2),
        ({"index_dtype": torch.int64}, 2),
        ({"gaps_q": (1, 0, 2)}, 2),
        ({"lengths_kv": (5, 9, 3)}, 2),
        ({"masks": (FULL,)}, 2),
        ({"lengths_q": (9, 5, 3)}, 1),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_a_graph_is_made_for(changed: dict[str, Any], expected: int) -> None:
    """One compilation for the change, none for going back and forth."""
    cases = [BASE, BASE.replace(**changed), BASE, BASE.replace(**changed)]
    assert counts(of_cases(cases)) == [1, expected, expected, expected]


def test_a_scale_is_part_of_the_graph_and_never_stale() -> None:
    inputs = build(BASE)
    after = counts([(inputs, {"softmax_scale": scale}) for scale in (0.1, 0.2, 0.1, 0.2, 0.1)])
    assert after[0] == 1 and after[1:] == [after[1]] * 4


def test_options_of_the_call() -> None:
    inputs = build(BASE)
    options = ({}, {"return_lse": True}, {"deterministic": True}, {"backend": "unfused"}, {"sanitize_padding": True})
    function, counter = counted(backend="eager")
    for _ in range(2):
        for changes in options:
            got, want = inputs.attend(function, **changes), inputs.attend(**changes)
            assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert counter.frame_count == len(options)


def test_a_padded_batch_keeps_every_shape() -> None:
    """pad_packed_batch: static shapes, so not even the automatic second compilation."""
    function, counter = counted(backend="eager", dynamic=False)
    for lengths in ((5, 9), (4, 4, 4), (12, 2, 7, 1), (30,), ()):
        inputs = build(PackedCase(lengths), requires_grad=False)
        batch = pad_packed_batch((inputs.q,), inputs.cu_seqlens_q, num_tokens=40, num_sequences=6, max_seqlen=32)
        q, cu = batch.tensors[0], batch.cu_seqlens
        assert torch.equal(function(q, q, q, cu, max_seqlen_q=32), thd_attention(q, q, q, cu, max_seqlen_q=32))
    assert counter.frame_count == 1


# ----------------------------------------------------------------------------------------------------------------------- modes
def test_modes_without_gradients_share_what_they_can() -> None:
    """Training, then evaluation and back: a graph each, made once."""
    inputs = build(BASE)
    function, counter = counted()
    seen = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode) * 3:
        with mode():
            assert torch.equal(inputs.attend(function), inputs.attend())
        seen.append(counter.frame_count)
    assert seen == [1, 2, 3, 3, 3, 3, 3, 3, 3]


def test_train_and_eval_of_a_module() -> None:
    module = DotProductAttention(2, 16, qkv_format="thd", attn_mask_type="padding_causal")
    inputs = build(BASE)
    function, counter = counted(module, backend="eager")
    for training in (True, False) * 4:
        module.train(training)
        function(inputs.q, inputs.k, inputs.v, cu_seqlens_q=inputs.cu_seqlens_q, max_seqlen_q=9)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("frozen", ["q", "qk", "qkv"])
def test_freezing_inputs(frozen: str) -> None:
    """One graph for each set of inputs that need a gradient."""
    plain, some = build(BASE), build(BASE)
    for name in frozen:
        getattr(some, name).requires_grad_(False)
    assert counts([(x, {}) for x in (plain, some, plain, some)]) == [1, 2, 2, 2]


def test_the_deterministic_switch_is_noticed(deterministic_switch: Callable[[bool], None]) -> None:
    flags: list[bool] = []

    def note(graph: torch.fx.GraphModule, example: Any) -> Any:
        (node,) = [node for node in graph.graph.nodes if "attention" in str(node.target)]
        flags.append(bool(node.args[-1][1] & plans.DETERMINISTIC))
        return graph.forward

    function, inputs = torch.compile(thd_attention, fullgraph=True, backend=note), build(BASE)
    for value in (False, True, False, True):
        deterministic_switch(value)
        inputs.attend(function)
    assert flags == [False, True]


@pytest.fixture
def deterministic_switch() -> Any:
    before = torch.are_deterministic_algorithms_enabled()
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(before)


def test_ten_modules_share_one_graph() -> None:
    """More than Dynamo's limit of recompilations, of modules that differ in name and number only."""
    inputs, counter = build(BASE), CompileCounterWithBackend("eager")
    for n in range(10):
        module = DotProductAttention(2, 16, qkv_format="thd", attn_mask_type="padding_causal", layer_number=n + 1, name=f"m{n}")
        function = torch.compile(module, fullgraph=True, backend=counter)
        got = function(inputs.q, inputs.k, inputs.v, cu_seqlens_q=inputs.cu_seqlens_q, max_seqlen_q=9)
        torch.testing.assert_close(got.view(17, 2, 16), inputs.attend())
    assert counter.frame_count == 1


def test_a_second_model_of_other_shape_leaves_the_first_alone() -> None:
    small, large = build(BASE), build(BASE.replace(num_heads=4, head_dim_qk=32))
    first, first_counter = counted(backend="eager")
    second, second_counter = counted(backend="eager")
    for _ in range(3):
        assert torch.equal(small.attend(first), small.attend())
        assert torch.equal(large.attend(second), large.attend())
    assert first_counter.frame_count + second_counter.frame_count == 2


def test_the_same_offsets_by_another_object_are_cross_attention() -> None:
    """Never taken for equal because their contents are: the graph made for it gives bottom-right's answer where lengths differ."""
    function, counter = counted(backend="eager")
    for lengths_kv in ((5, 9, 3), (9, 5, 3)):
        inputs = build(PackedCase((5, 9, 3), lengths_kv, masks=(BOTTOM_RIGHT,)))
        assert torch.equal(inputs.attend(function), inputs.attend())
    assert counter.frame_count == 1


def test_offsets_padded_by_a_clone_count_as_gaps_everywhere() -> None:
    """A clone of cu_seqlens as cu_seqlens_padded: the same numbers in eager and compiled, as with the very same object."""
    inputs = build(BASE)
    clone = inputs.cu_seqlens_q.clone()
    want = inputs.run()
    for padded in (clone, inputs.cu_seqlens_q):
        arguments = {"cu_seqlens_q_padded": padded}
        assert_same(inputs.run(counted()[0], **arguments), want)
        assert_same(inputs.run(**arguments), want)
    assert packing.make_packing(inputs.q, inputs.cu_seqlens_q, None, clone, None).has_gaps


# ------------------------------------------------------------------------------------------------------------ a plan for one launch
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("how", ["prepared", "refreshed"])
def test_single_launch_plans_of_other_batches_compile_nothing(how: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's tensors are inputs of the graph: of other sizes where each batch is prepared, of other contents where one plan is
    refreshed. Forward and backward."""
    flex = OneLaunch()
    install(monkeypatch, flex, Stub("flash4"))
    lengths, owners = (5, 9, 3, 7), ((0, 1, 0, 1), (1, 0, 0, 1), (1, 1, 0, 0))
    cases = [PackedCase(lengths[n:] + lengths[:n], masks=(CAUSAL, FULL), owner=owner) for n, owner in enumerate(owners)]
    if how == "prepared":
        cases += [PackedCase((4, 2, 11, 1, 6), masks=(CAUSAL, FULL), owner=(1, 0, 1, 1, 0))]
    function, counter = counted(backend=backend, dynamic=True)
    policies = None
    for n, case in enumerate(cases):
        inputs = build(case)
        if policies is None or how == "prepared":
            policies = inputs.prepare(attention=inputs.plan_spec())
        else:
            refresh_thd_policies(policies, inputs.policies(), inputs.cu_seqlens_q)
        assert len(policies.plans) == 1
        options = {"thd_attention_policies": policies, "thd_attention_policy_dispatch": "single_launch"}
        testing.assert_matches(inputs.run(function, **options), testing.reference(inputs), inputs)
        assert flex.launches == n + 1
    assert counter.frame_count == 1


def test_a_single_launch_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager calls look up what was decided, with the plan of their own batch."""
    flex = OneLaunch()
    install(monkeypatch, flex, Stub("flash4"))
    cases = [PackedCase(lengths, masks=(CAUSAL, FULL), owner=(0, 1, 0)) for lengths in ((5, 9, 3), (3, 5, 9))]
    batches = [build(case) for case in cases]
    decided = mock.Mock(wraps=attention._decide)
    monkeypatch.setattr(attention, "_decide", decided)
    for inputs in batches * 3:
        policies = inputs.prepare(attention=inputs.plan_spec())
        inputs.attend(thd_attention_policies=policies, thd_attention_policy_dispatch="single_launch")
    assert decided.call_count == 1 and flex.launches == 6
