"""What the files here share: counted compilation, graphs and Inductor's programs as short texts, scripts in a process of their
own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from te_attn_ops import environment, testing, thd_attention

ROOT = Path(__file__).resolve().parents[1]
TORCH_MINOR = environment.version_tuple(torch.__version__)[:2]
TEXTS_WRITTEN_WITH = (2, 13)


def counted(
    function: Callable[..., Any] = thd_attention, backend: str = "aot_eager", **options: Any
) -> tuple[Any, CompileCounterWithBackend]:
    """``function`` compiled without graph breaks, and how often that happened (``frame_count``)."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def assert_same(got: testing.Results, want: testing.Results, tolerance: float = 0.0) -> None:
    """Outputs and gradients, bit for bit unless there is a tolerance (absolute and relative)."""
    for name in testing.Results._fields:
        a, b = getattr(got, name), getattr(want, name)
        if a is not None or b is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=False, msg=lambda m, n=name: f"{n}: {m}")


# --------------------------------------------------------------------------------------------------------------------- graphs
def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def graph_text(graph: torch.fx.GraphModule, containing: str = "") -> str:
    """One line per call that something uses, ``name = target(arguments)``; ``containing`` keeps the lines that hold it.

    An element of a tuple is written as ``name[0]``, a routing's four as ``*name``, and a detach as what it detaches: how many of
    them there are differs between versions of torch.
    """
    names: dict[torch.fx.Node, str] = {}
    lines = []
    for node in graph.graph.nodes:
        names[node] = node.name
        if node.op not in ("call_function", "call_method") or not node.users:
            continue
        target = _target_name(node.target)
        if target == "getitem" and isinstance(node.args[1], int):
            names[node] = f"{names[node.args[0]]}[{node.args[1]}]"
        elif target in ("aten.detach", "aten.alias"):
            names[node] = names[node.args[0]]
        else:
            written = [_written(x, names) for x in node.args] + [f"{k}={_written(x, names)}" for k, x in node.kwargs.items()]
            line = f"{node.name} = {target}({_FOUR.sub(_ALL, ', '.join(written))})"
            if containing in line:
                lines.append(line)
    return "\n".join(lines)


_FOUR = re.compile(r"\b(\w+)\[0\], \1\[1\], \1\[2\], \1\[3\]")
_ALL = r"*\1"


def _written(argument: Any, names: dict[torch.fx.Node, str]) -> str:
    if isinstance(argument, (list, tuple)):
        inside = ", ".join(_written(x, names) for x in argument)
        return f"[{inside}]" if isinstance(argument, list) else f"({inside})"
    if isinstance(argument, float):
        return f"{argument:.4g}"
    return names[argument] if isinstance(argument, torch.fx.Node) else str(argument)


def count_calls(graph: torch.fx.GraphModule, target: str) -> int:
    """Calls whose target's name, as :func:`graph_text` writes it, is or starts with ``target``."""
    return sum(
        node.op in ("call_function", "call_method") and _target_name(node.target).startswith(target) for node in graph.graph.nodes
    )


def dynamo_graphs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[torch.fx.GraphModule]:
    """Calls ``function`` compiled and returns what Dynamo made of it."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(function, fullgraph=True, backend=keep)(*args, **kwargs)
    return graphs


class AotGraphs:
    """A backend that keeps what AOTAutograd makes: joint, forward and backward graphs, and the inference graph."""

    def __init__(self) -> None:
        self.joint: list[torch.fx.GraphModule] = []
        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []
        self.inference: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        def keep(where: list[torch.fx.GraphModule]) -> Callable[..., Any]:
            def compiler(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
                where.append(graph)
                return make_boxed_func(graph.forward)

            return compiler

        def partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            self.joint.append(joint)
            return min_cut_rematerialization_partition(joint, *args, **kwargs)

        return aot_autograd(
            fw_compiler=keep(self.forward),
            bw_compiler=keep(self.backward),
            inference_compiler=keep(self.inference),
            partition_fn=partition,
        )(graph, example_inputs)


# ------------------------------------------------------------------------------------------------------------------- Inductor
_KERNEL = re.compile(r"^\s+(?:cpp|triton_\w{3})_fused_(\w+?)_?\d*(?:\.run)?\(")
_CALL = re.compile(r"(?:torch\.ops\.|\b)((?:te_attn_ops|aten|extern_kernels)\.\w+)")


def inductor_steps(code: str) -> list[str]:
    """What Inductor's program does, in order: ``kernel(what was fused)`` and the ops it calls as they are."""
    steps = []
    body = code.split("def call(", 1)[-1].split("def benchmark_compiled_module", 1)[0].split("def get_args", 1)[0]
    for line in body.splitlines():
        line = line.split("#", 1)[0]
        kernel = _KERNEL.match(line)
        if kernel is not None:
            steps.append(f"kernel({kernel[1]})")
        elif (call := _CALL.search(line)) is not None and "assert_" not in line:
            steps.append(call[1])
    return steps


def inductor_programs(run: Callable[[], Any]) -> list[list[str]]:
    """The steps of each program that Inductor makes while ``run`` runs: of a training step the forward's and the backward's."""
    _, codes = run_and_get_code(run)
    return [inductor_steps(code) for code in codes]


def expect(actual: str, expected: str, skip: int = 0) -> None:
    """Compares texts; ``EXPECTTEST_ACCEPT=1`` rewrites the one in the source."""
    # Here: a machine may lack it, and only these comparisons need it.
    expecttest = pytest.importorskip("expecttest", reason="expecttest is not installed (it is in the extra 'test')")
    expecttest.assert_expected_inline(actual.strip() + "\n", expected, skip=1 + skip, assert_eq=_assert_texts_equal)


def _assert_texts_equal(expected: str, actual: str, **kwargs: Any) -> None:
    assert actual == expected


def expect_programs(programs: list[list[str]], expected: str) -> None:
    """:func:`expect` for :func:`inductor_programs`, on the version of torch that the texts were written with. How Inductor groups
    and names its kernels differs between versions: elsewhere the ops must be called in the same order, and there may be no more
    kernels than here, so that a pad that is not fused or a clone still shows."""
    actual = "\n\n".join("\n".join(steps) for steps in programs)
    if TORCH_MINOR == TEXTS_WRITTEN_WITH:
        expect(actual, expected, skip=1)
        return

    def ops_and_kernels(text: str) -> tuple[list[str], int]:
        lines = [line for line in text.split("\n") if line]
        kernels = [line for line in lines if line.startswith("kernel(")]
        # A matrix product may stand anywhere between the ops that it does not depend on.
        products = [line for line in lines if line.startswith("extern_kernels.")]
        return [line for line in lines if line not in kernels and line not in products] + sorted(products), len(kernels)

    (ops, kernels), (expected_ops, expected_kernels) = ops_and_kernels(actual), ops_and_kernels(expected)
    assert ops == expected_ops
    assert kernels <= expected_kernels, actual


# ------------------------------------------------------------------------------------------------------------------ processes
def run_script(script: str, **variables: str | None) -> str:
    """Runs Python source in a new process from the repository's root and returns what it printed. A variable given as None is
    unset there."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name, value in variables.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


