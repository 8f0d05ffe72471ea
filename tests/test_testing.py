"""The two truths agree with each other and with numbers worked out by hand, and the no-sync trace mode sees a sync."""

from __future__ import annotations

import math

import pytest
import torch

from te_attn_ops import prepare_thd_policies, testing, thd_attention, validate_packed
from te_attn_ops.testing import BENCHMARK_WORKS, EXAMPLES, FULL, HostSyncError, Mask, PackedCase, benchmark_work


@pytest.mark.parametrize("name", EXAMPLES)
def test_closed_form_equals_the_hand_written_rows(name: str) -> None:
    case, rows = EXAMPLES[name]
    torch.testing.assert_close(testing.closed_form(case)[0], torch.tensor(rows, dtype=torch.float64))


@pytest.mark.parametrize("name", EXAMPLES)
def test_reference_equals_the_closed_form(name: str) -> None:
    case = EXAMPLES[name][0]
    result = testing.reference(testing.closed_form_inputs(case))
    out, lse = testing.closed_form(case)
    torch.testing.assert_close(result.out, out[:, None, None].expand(result.out.shape))
    torch.testing.assert_close(result.lse, lse.expand(result.lse.shape))


def test_reference_gradient_of_a_full_row_by_hand() -> None:
    # One query, two keys, q = 0: P = 1/2 each, so dV = grad / 2 and dS = P (dP - mean dP).
    case = PackedCase((1,), (2,), num_heads=1, head_dim_qk=2, masks=(FULL,), dtype=torch.float64)
    inputs = testing.build(case)
    with torch.no_grad():
        inputs.q.zero_()
        inputs.k.copy_(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        inputs.v.copy_(torch.tensor([[[4.0, 0.0]], [[0.0, 2.0]]]))
        inputs.grad_out.fill_(1.0)
    result = testing.reference(inputs, softmax_scale=1.0)
    assert result.dv.tolist() == [[[0.5, 0.5]], [[0.5, 0.5]]]
    assert result.dq.tolist() == [[[0.5, -0.5]]]  # dP = (4, 2), mean 3: dS = (0.5, -0.5)
    assert result.dk.abs().max() == 0
    assert result.lse.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_layouts_are_what_they_say(layout: str) -> None:
    inputs = testing.build(PackedCase((5, 9), num_heads=3, head_dim_qk=8, layout=layout))
    q, k, v = inputs.q, inputs.k, inputs.v
    assert q.is_leaf and q.requires_grad and q.shape == (14, 3, 8)
    assert q.is_contiguous() is (layout in ("contiguous", "offset"))
    if layout == "interleaved":
        assert q.stride() == (72, 8, 1) and k.data_ptr() - q.data_ptr() == v.data_ptr() - k.data_ptr() == 24 * 4
    if layout == "offset":
        assert q.data_ptr() % 16


def test_poison_reaches_rows_of_no_sequence_only() -> None:
    inputs = testing.build(PackedCase((2, 3), gaps_q=(1, 0), tail=2)).poison()
    nan_rows = inputs.q.isnan().all(2).all(1)
    assert nan_rows.tolist() == [False, False, True, False, False, False, True, True]
    for tensor in (inputs.k, inputs.v, inputs.grad_out):
        assert torch.equal(tensor.isnan().any(2).any(1), nan_rows)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: torch.nonzero(x),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.ops.aten.index_put(x, [x > 0], x.new_zeros(())),
    ],
    ids=["item", "tolist", "bool", "mask_index", "nonzero", "repeat_interleave", "masked_select", "mask_index_put"],
)
def test_trace_without_sync_sees_a_read(read: object) -> None:
    with pytest.raises((HostSyncError, torch._subclasses.fake_tensor.DynamicOutputShapeException, RuntimeError)):
        testing.trace_without_sync(read, torch.ones(4))


def test_trace_without_sync_lets_device_work_pass() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        y = torch.where(x > 0, x, x.new_zeros(()))
        return y.repeat_interleave(torch.ones(4, dtype=torch.long), output_size=4)[torch.arange(3)]

    assert testing.trace_without_sync(work, torch.ones(4)).shape == (3,)


@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
def test_public_function_reads_nothing_on_the_host(dispatch: str) -> None:
    inputs = testing.build(PackedCase((6, 3, 8), gaps_q=(1, 0, 2), masks=(FULL, Mask()), owner=(0, 1, 0)))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, object]) -> torch.Tensor:
        return thd_attention(q, k, v, thd_attention_policy_dispatch=dispatch, sanitize_padding=True, **arguments)

    out = testing.trace_without_sync(call, inputs.q, inputs.k, inputs.v, inputs.arguments())
    assert out.shape == (20, 2, 16)


@pytest.mark.parametrize("without", ["max_seqlen", "prepare", "validate"])
def test_what_must_sync_is_seen_to(without: str) -> None:
    inputs = testing.build(PackedCase((6, 3), masks=(FULL, Mask()), owner=(0, 1)))
    functions = {
        "max_seqlen": lambda q, cu: thd_attention(q, q, q, cu),
        "prepare": lambda q, cu: prepare_thd_policies(testing.policy_list((FULL,), (0, 0), "cpu"), cu),
        "validate": lambda q, cu: validate_packed(cu),
    }
    with pytest.raises((HostSyncError, RuntimeError)):
        testing.trace_without_sync(functions[without], inputs.q, inputs.cu_seqlens_q)


def test_poisoned_memory_fills_what_is_not_written() -> None:
    with testing.poisoned_memory():
        assert torch.empty(3).isnan().all() and torch.ones(2).new_empty(3).isnan().all()
        assert torch.empty_like(torch.ones(2, 3)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("pattern", ["interleaved", "contiguous"])
@pytest.mark.parametrize(
    ("name", "tokens", "sequences", "policies"),
    [
        ("A", 33408, 16, 2),
        ("33k-p2", 33408, 16, 2),
        ("33k-p4", 33408, 16, 4),
        ("32k-p8", 32768, 32, 8),
        ("8k-p4", 8192, 64, 4),
        ("4k-p2", 4096, 8, 2),
    ],
)
def test_benchmark_works(name: str, tokens: int, sequences: int, policies: int, pattern: str) -> None:
    work = benchmark_work(name, pattern)
    assert (work.tokens, len(work.lengths), len(work.masks)) == (tokens, sequences, policies)
    assert min(work.lengths) > 0 and set(work.owner) == set(range(policies))
    runs = 1 + sum(a != b for a, b in zip(work.owner, work.owner[1:]))
    assert runs == (sequences if pattern == "interleaved" else policies)
    prepared = prepare_thd_policies(work.policies("cpu"), work.cu_seqlens("cpu"))
    assert prepared.policy_index.tolist() == list(work.owner) and prepared.contiguous is (pattern == "contiguous")


def test_benchmark_work_as_a_sample() -> None:
    case = benchmark_work("4k-p2-mla").case(dtype=torch.float16)
    assert (case.head_dim_qk, case.width_v, case.groups, case.dtype) == (192, 128, 16, torch.float16)
    case = benchmark_work("A-gqa").case()
    assert (case.num_heads, case.groups, case.dtype, case.total("q")) == (16, 4, torch.bfloat16, 33408)
    work = benchmark_work("A-contiguous")
    assert work.pattern == "contiguous" and sorted(work.lengths) == sorted(benchmark_work("A").lengths)


def test_benchmark_works_are_seeded_and_named() -> None:
    assert benchmark_work("33k-p4") == benchmark_work("33k-p4")
    assert benchmark_work("33k-p2").lengths == benchmark_work("33k-p4").lengths
    assert set(BENCHMARK_WORKS) == {"A", "33k-p2", "33k-p4", "32k-p8", "8k-p4", "4k-p2"}
    with pytest.raises(ValueError, match="work '9k' is unknown; use one of A, 33k-p2"):
        benchmark_work("9k")
    with pytest.raises(ValueError, match="pattern='mixed' is unknown"):
        benchmark_work("A", "mixed")
