"""Graphs as expectations: what Dynamo sees of a call, what AOTAutograd makes of it, what Inductor runs.

A change that stops a pad from being fused, adds a copy or a second op shows as a change of these texts.
"""
# ruff: noqa: E501 - a call of a graph is one line

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.harness import (
    AotGraphs,
    count_calls,
    dynamo_graphs,
    expect,
    expect_programs,
    graph_text,
    inductor_programs,
)
from te_attn_ops import testing, thd_attention
from te_attn_ops.testing import BOTTOM_RIGHT, CAUSAL, FULL, Mask, PackedCase, build

SCALAR = PackedCase((33, 64))
POLICIES = SCALAR.replace(masks=(CAUSAL, FULL), owner=(0, 1))
UNEQUAL = SCALAR.replace(head_dim_qk=24, head_dim_v=16)


def block(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
    """Something in front of attention and behind it, with which a pad and a trim can fuse."""
    return thd_attention(q * 1.5, k.cos(), v + 1, **arguments).relu()


def projected(x: Tensor, weights: Tensor, output_weight: Tensor, **arguments: Any) -> Tensor:
    """Attention between matrix products, with which nothing fuses."""
    heads, widths = UNEQUAL.num_heads, (24, 24, 16)
    split = torch.nn.functional.linear(x, weights).split([heads * width for width in widths], dim=1)
    q, k, v = (part.view(-1, heads, width) for part, width in zip(split, widths))
    return thd_attention(q, k, v, **arguments).flatten(1) @ output_weight


def run_projected(backend: Any, pad_head_dim: bool) -> None:
    inputs = build(UNEQUAL)
    heads, tokens = UNEQUAL.num_heads, sum(UNEQUAL.lengths_q)
    torch.manual_seed(0)
    x, weights, output_weight = (
        torch.randn(shape, requires_grad=True) for shape in ((tokens, 32), (heads * 64, 32), (heads * 16, 32))
    )
    function = torch.compile(projected, fullgraph=True, backend=backend)
    function(x, weights, output_weight, **inputs.arguments(pad_head_dim=pad_head_dim)).sum().backward()


# --------------------------------------------------------------------------------------------------------------- Dynamo's graph
def dynamo_text(case: PackedCase, **changes: Any) -> str:
    inputs = build(case)
    (graph,) = dynamo_graphs(thd_attention, inputs.q, inputs.k, inputs.v, **inputs.arguments(**changes))
    return graph_text(graph)


def test_dynamo_scalar() -> None:
    expect(dynamo_text(SCALAR), """\
policy_subsets_default = te_attn_ops.policy_subsets(l_cu_seqlens_q_, l_cu_seqlens_q_, None, None, None, 1)
attention_default = te_attn_ops.attention(l_q_, l_k_, l_v_, *policy_subsets_default, [], 128, 128, 0.25, [1, 28, 0, 0, -1, 0, 1, 0])
""")


def test_dynamo_policies() -> None:
    expect(dynamo_text(POLICIES), """\
policy_subsets_default = te_attn_ops.policy_subsets(l_cu_seqlens_q_, l_cu_seqlens_q_, None, None, l_thd_attention_policies_policy_index, 2)
attention_default = te_attn_ops.attention(l_q_, l_k_, l_v_, *policy_subsets_default, [], 128, 128, 0.25, [1, 24, 0, 0, -1, 0, 1, 0, -1, -1, 1, 0])
""")


def test_dynamo_gaps_and_cross_attention() -> None:
    case = PackedCase((33, 64), (40, 50), gaps_q=(1, 0), gaps_kv=(0, 2), masks=(BOTTOM_RIGHT,))
    expect(dynamo_text(case, return_max_logit=True), """\
policy_subsets_default = te_attn_ops.policy_subsets(l_cu_seqlens_q_, l_cu_seqlens_kv_, l_cu_seqlens_q_padded_, l_cu_seqlens_kv_padded_, None, 1)
attention_default = te_attn_ops.attention(l_q_, l_k_, l_v_, *policy_subsets_default, [], 128, 128, 0.25, [1, 82, 0, 0, -1, 0, 1, 0])
""")


def test_dynamo_native_widths() -> None:
    expect(dynamo_text(UNEQUAL, pad_head_dim=False), """\
policy_subsets_default = te_attn_ops.policy_subsets(l_cu_seqlens_q_, l_cu_seqlens_q_, None, None, None, 1)
attention_default = te_attn_ops.attention(l_q_, l_k_, l_v_, *policy_subsets_default, [], 128, 128, 0.2041, [1, 28, 0, 0, -1, 0, 1, 0])
""")


def test_dynamo_padded_widths() -> None:
    """V alone is narrower, so V alone is padded."""
    expect(dynamo_text(UNEQUAL, pad_head_dim=True), """\
policy_subsets_default = te_attn_ops.policy_subsets(l_cu_seqlens_q_, l_cu_seqlens_q_, None, None, None, 1)
attention_default = te_attn_ops.attention(l_q_, l_k_, l_v_, *policy_subsets_default, [], 128, 128, 0.2041, [1, 28, 0, 24, -1, 0, 1, 0])
""")


def test_dynamo_inference() -> None:
    with torch.no_grad():
        expect(dynamo_text(POLICIES), """\
policy_subsets_default = te_attn_ops.policy_subsets(l_cu_seqlens_q_, l_cu_seqlens_q_, None, None, l_thd_attention_policies_policy_index, 2)
attention_forward_default = te_attn_ops.attention_forward(l_q_, l_k_, l_v_, *policy_subsets_default, [], 128, 128, 0.25, [1, 8, 0, 0, -1, 0, 1, 0, -1, -1, 1, 0])
""")


@pytest.mark.parametrize("num_policies", [1, 2, 5, 16])
def test_one_op_whatever_the_number_of_policies(num_policies: int) -> None:
    masks = tuple((CAUSAL, FULL, BOTTOM_RIGHT, Mask("padding", (n, 1)))[n % 4] for n in range(num_policies))
    inputs = build(PackedCase((3,) * num_policies, masks=masks, owner=tuple(range(num_policies))))
    (graph,) = dynamo_graphs(thd_attention, inputs.q, inputs.k, inputs.v, **inputs.arguments())
    assert count_calls(graph, "te_attn_ops.attention") == count_calls(graph, "te_attn_ops.policy_subsets") == 1


# ----------------------------------------------------------------------------------------------------------- AOTAutograd's graphs
def aot_graphs(case: PackedCase, training: bool = True, **changes: Any) -> AotGraphs:
    inputs, graphs = build(case), AotGraphs()
    function = torch.compile(block, fullgraph=True, backend=graphs)
    with torch.set_grad_enabled(training):
        out = inputs.attend(function, **changes)
    if training:
        out.backward(inputs.grad_out)
    return graphs


def test_joint_scalar() -> None:
    expect(graph_text(aot_graphs(SCALAR).joint[0], "te_attn_ops"), """\
policy_subsets = te_attn_ops.policy_subsets(primals_4, primals_4, None, None, None, 1)
attention_forward = te_attn_ops.attention_forward(mul, cos, add, *policy_subsets, [], 128, 128, 0.25, [1, 28, 0, 0, -1, 0, 1, 0])
attention_backward = te_attn_ops.attention_backward(threshold_backward, mul, cos, add, attention_forward[0], attention_forward[1], *policy_subsets, [], 128, 128, 0.25, [1, 28, 0, 0, -1, 0, 1, 0])
""")


def test_joint_policies() -> None:
    expect(graph_text(aot_graphs(POLICIES).joint[0], "te_attn_ops"), """\
policy_subsets = te_attn_ops.policy_subsets(primals_4, primals_4, None, None, primals_5, 2)
attention_forward = te_attn_ops.attention_forward(mul, cos, add, *policy_subsets, [], 128, 128, 0.25, [1, 24, 0, 0, -1, 0, 1, 0, -1, -1, 1, 0])
attention_backward = te_attn_ops.attention_backward(threshold_backward, mul, cos, add, attention_forward[0], attention_forward[1], *policy_subsets, [], 128, 128, 0.25, [1, 24, 0, 0, -1, 0, 1, 0, -1, -1, 1, 0])
""")


def test_joint_native_widths() -> None:
    expect(graph_text(aot_graphs(UNEQUAL, pad_head_dim=False).joint[0], "te_attn_ops"), """\
policy_subsets = te_attn_ops.policy_subsets(primals_4, primals_4, None, None, None, 1)
attention_forward = te_attn_ops.attention_forward(mul, cos, add, *policy_subsets, [], 128, 128, 0.2041, [1, 28, 0, 0, -1, 0, 1, 0])
attention_backward = te_attn_ops.attention_backward(threshold_backward, mul, cos, add, attention_forward[0], attention_forward[1], *policy_subsets, [], 128, 128, 0.2041, [1, 28, 0, 0, -1, 0, 1, 0])
""")


def test_joint_padded_widths() -> None:
    joint = aot_graphs(UNEQUAL, pad_head_dim=True).joint[0]
    expect(graph_text(joint, "te_attn_ops") + "\n" + graph_text(joint, "constant_pad_nd("), """\
policy_subsets = te_attn_ops.policy_subsets(primals_4, primals_4, None, None, None, 1)
attention_forward = te_attn_ops.attention_forward(mul, cos, constant_pad_nd, *policy_subsets, [], 128, 128, 0.2041, [1, 28, 0, 24, -1, 0, 1, 0])
attention_backward = te_attn_ops.attention_backward(constant_pad_nd_1, mul, cos, constant_pad_nd, clone, attention_forward[1], *policy_subsets, [], 128, 128, 0.2041, [1, 28, 0, 24, -1, 0, 1, 0])
constant_pad_nd = aten.constant_pad_nd(add, [0, 8], 0)
constant_pad_nd_1 = aten.constant_pad_nd(threshold_backward, [0, 8], 0)
constant_pad_nd_2 = aten.constant_pad_nd(attention_backward[2], [0, -8])
""")


def test_inference_graph() -> None:
    expect(graph_text(aot_graphs(POLICIES, training=False).inference[0], "te_attn_ops"), """\
policy_subsets = te_attn_ops.policy_subsets(arg3_1, arg3_1, None, None, arg4_1, 2)
attention_forward = te_attn_ops.attention_forward(mul, cos, add, *policy_subsets, [], 128, 128, 0.25, [1, 8, 0, 0, -1, 0, 1, 0, -1, -1, 1, 0])
""")


def test_the_backward_computes_no_forward_and_no_routing_again() -> None:
    graphs = aot_graphs(POLICIES)
    names = ("te_attn_ops.policy_subsets", "te_attn_ops.attention_forward", "te_attn_ops.attention_backward")
    assert [count_calls(graphs.forward[0], name) for name in names] == [1, 1, 0]
    assert [count_calls(graphs.backward[0], name) for name in names] == [0, 0, 1]


def saved_shapes(graph: torch.fx.GraphModule) -> list[tuple[int, ...]]:
    """Of the tensors that a forward graph keeps for its backward."""
    (result,) = (node for node in graph.graph.nodes if node.op == "output")
    kept = [node.meta["val"] for node in result.args[0][1:]]
    return [tuple(value.shape) for value in kept if isinstance(value, Tensor)]


def test_padding_saves_as_many_tensors_and_v_alone_wider() -> None:
    """The output is kept once, as the next layer reads it. (q and k have the padded width already.)"""

    def saved_widths(pad_head_dim: bool) -> list[int]:
        (forward,) = aot_graphs(UNEQUAL, pad_head_dim=pad_head_dim).forward
        return sorted(shape[2] for shape in saved_shapes(forward) if len(shape) == 3)

    q, k, k_before_cos, v, out, out_of_relu = UNEQUAL.head_dim_qk, 24, 24, 16, 16, 16
    assert saved_widths(False) == sorted([q, k, k_before_cos, v, out, out_of_relu])
    assert saved_widths(True) == sorted([q, k, k_before_cos, 24, out, out_of_relu])


def test_padding_between_projections_keeps_one_output() -> None:
    """The same where matrix products stand around attention: the backward of the one behind it reads the trimmed output too."""

    def saved_elements(pad_head_dim: bool) -> int:
        graphs = AotGraphs()
        run_projected(graphs, pad_head_dim)
        return sum(math.prod(shape) for shape in saved_shapes(graphs.forward[0]) if len(shape) > 1)

    tokens, heads = sum(UNEQUAL.lengths_q), UNEQUAL.num_heads
    assert saved_elements(True) - saved_elements(False) == tokens * heads * (24 - 16)


def test_layers_share_one_routing() -> None:
    """Four layers over one batch: AOTAutograd finds that the routing is the same."""

    def layers(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        for _ in range(4):
            q = thd_attention(q, k, v, **arguments)
        return q

    inputs, graphs = build(POLICIES), AotGraphs()
    inputs.attend(torch.compile(layers, fullgraph=True, backend=graphs)).backward(inputs.grad_out)
    names = ("te_attn_ops.policy_subsets", "te_attn_ops.attention_forward", "te_attn_ops.attention_backward")
    assert [count_calls(graphs.forward[0], name) for name in names] == [1, 4, 0]
    assert count_calls(graphs.backward[0], names[2]) == 4


# ------------------------------------------------------------------------------------------------------------ Inductor's programs
def training_programs(case: PackedCase, **changes: Any) -> list[list[str]]:
    inputs = build(case)
    function = torch.compile(block, fullgraph=True)
    return inductor_programs(lambda: inputs.attend(function, **changes).backward(inputs.grad_out))


def inference_programs(case: PackedCase, **changes: Any) -> list[list[str]]:
    inputs = build(case)
    function = torch.compile(block, fullgraph=True)
    with torch.no_grad():
        return inductor_programs(lambda: inputs.attend(function, **changes))


def test_inductor_scalar() -> None:
    expect_programs(training_programs(SCALAR), """\
kernel(add_cos_mul)
te_attn_ops.policy_subsets
te_attn_ops.attention_forward
kernel(relu_threshold_backward)

kernel(attention_backward_threshold_backward)
te_attn_ops.attention_backward
kernel(mul_neg_sin)
""")


def test_inductor_policies() -> None:
    expect_programs(training_programs(POLICIES), """\
kernel(add_cos_mul)
te_attn_ops.policy_subsets
te_attn_ops.attention_forward
kernel(relu_threshold_backward)

kernel(attention_backward_threshold_backward)
te_attn_ops.attention_backward
kernel(mul_neg_sin)
""")


def test_inductor_native_widths() -> None:
    expect_programs(training_programs(UNEQUAL, pad_head_dim=False), """\
kernel(add_cos_mul)
te_attn_ops.policy_subsets
te_attn_ops.attention_forward
kernel(relu_threshold_backward)

kernel(attention_backward_threshold_backward)
te_attn_ops.attention_backward
kernel(mul_neg_sin)
""")


def test_inductor_padded_widths() -> None:
    """No pad or trim is a kernel of its own: each is part of one that computes q, k, v, the output or a gradient anyway."""
    expect_programs(training_programs(UNEQUAL, pad_head_dim=True), """\
kernel(cos_mul)
te_attn_ops.policy_subsets
kernel(add_constant_pad_nd)
te_attn_ops.attention_forward
kernel(clone_relu_slice_threshold_backward)

kernel(attention_backward_constant_pad_nd_threshold_backward)
te_attn_ops.attention_backward
kernel(constant_pad_nd_mul_neg_sin)
""")


def test_inductor_inference() -> None:
    expect_programs(inference_programs(POLICIES), """\
te_attn_ops.policy_subsets
kernel(add_attention_forward_cos_mul)
te_attn_ops.attention_forward
kernel(relu)
""")


@pytest.mark.parametrize("pad_head_dim", [False, True])
def test_inductor_between_projections(pad_head_dim: bool) -> None:
    """Behind a product one kernel pads V, and one trims the output for the next product."""
    programs = inductor_programs(lambda: run_projected("inductor", pad_head_dim))
    if pad_head_dim:
        expect_programs(programs, """\
extern_kernels.mm
te_attn_ops.policy_subsets
kernel(constant_pad_nd_split_with_sizes_view)
te_attn_ops.attention_forward
kernel(clone_slice)
extern_kernels.mm

extern_kernels.mm
kernel(attention_backward_constant_pad_nd_view)
te_attn_ops.attention_backward
extern_kernels.mm
kernel(cat_constant_pad_nd_view)
extern_kernels.mm
extern_kernels.mm
""")
    else:
        expect_programs(programs, """\
extern_kernels.mm
te_attn_ops.policy_subsets
te_attn_ops.attention_forward
extern_kernels.mm

extern_kernels.mm
te_attn_ops.attention_backward
extern_kernels.mm
kernel(cat_view)
extern_kernels.mm
extern_kernels.mm
""")


def test_inductor_inference_padded_widths() -> None:
    expect_programs(inference_programs(UNEQUAL, pad_head_dim=True), """\
te_attn_ops.policy_subsets
kernel(add_attention_forward_constant_pad_nd_cos_mul)
te_attn_ops.attention_forward
kernel(clone_relu_slice)
""")


@pytest.mark.parametrize("layout", testing.LAYOUTS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_attention_alone_costs_no_kernel(layout: str, training: bool) -> None:
    """q, k and v go to the op as they lie in memory, its outputs and gradients leave as they are: no clone, no copy."""
    inputs = build(SCALAR.replace(layout=layout))
    function = torch.compile(thd_attention, fullgraph=True)

    def run() -> None:
        out = inputs.attend(function)
        if training:
            out.backward(inputs.grad_out)

    with torch.set_grad_enabled(training):
        programs = inductor_programs(run)
    ops = ["te_attn_ops.policy_subsets", "te_attn_ops.attention_forward"]
    assert programs == ([ops, ["te_attn_ops.attention_backward"]] if training else [ops])


def test_views_of_a_projection_are_not_copied() -> None:
    """q, k and v as views of one [T, 3 H D] projection: the op reads them in place."""

    def projected(x: Tensor, weight: Tensor, **arguments: Any) -> Tensor:
        q, k, v = (x @ weight).unflatten(1, (3, 2, 16)).unbind(1)
        return thd_attention(q, k, v, **arguments)

    inputs = build(SCALAR)
    x, weight = torch.randn(97, 8), torch.randn(8, 96, requires_grad=True)
    function = torch.compile(projected, fullgraph=True)
    forward, backward = inductor_programs(lambda: function(x, weight, **inputs.arguments()).backward(inputs.grad_out))
    assert [step for step in forward if step.startswith("kernel")] == []
    assert len([step for step in backward if step.startswith("kernel")]) <= 1, "dq, dk and dv are put together by one kernel"


def test_sanitize_fuses_with_what_is_in_front() -> None:
    """The selection of q, k and v is in the kernel that makes them."""
    programs = training_programs(SCALAR.replace(gaps_q=(2, 1), tail=3), sanitize_padding=True)
    (before,) = [step for step in programs[0] if "where" in step and "mul" in step]
    assert "cos" in before and "add" in before
