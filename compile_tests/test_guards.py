"""The outside world under compiled code: environment variables and invalidate().

What a choice depends on is guarded, whether a variable was set when the code was compiled or not; going back to a state that was
compiled before compiles nothing.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from compile_tests.harness import counted
from te_attn_ops import AttentionParams, NoBackendError, invalidate, measure, plan as plans, thd_attention
from te_attn_ops.backends import BACKEND_NAMES, backend_name, get_backend
from te_attn_ops.logs import logger
from te_attn_ops.selection import probe_count
from te_attn_ops.testing import CAUSAL, FULL, PackedCase, PackedInputs, build
from tests.stubs import Stub, install

INPUTS = PackedCase((5, 9))
NAMES = ("flash2", "flash3", "flash4", "cudnn", "unfused")


class Chosen:
    """Stub backends, and the one that the last call ran on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.used: list[str] = []
        self.stubs = {name: Stub(name, before_forward=lambda call, name=name: self.used.append(name)) for name in names}
        install(monkeypatch, *self.stubs.values())

    def run(self, function: Any, inputs: PackedInputs, **changes: Any) -> str:
        """Forward and backward; both in compiled code and in eager the same backend."""
        inputs.run(function, **changes)
        compiled = self.used[-1]
        inputs.run(**changes)
        assert self.used[-1] == compiled, "compiled code runs on another backend than eager"
        return compiled

    def refuse(self, name: str) -> None:
        self.stubs[name]._refuse = lambda p: iter(["gone"])


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Chosen:
    return Chosen(monkeypatch, *NAMES)


def set_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, value)


# ------------------------------------------------------------------------------------------------------------------ variables
_SWITCHES = {
    "NVTE_FLASH_ATTN": ("flash2", "flash3", "flash4"),
    "NVTE_FLASH_ATTN_V2": ("flash2",),
    "NVTE_FLASH_ATTN_V3": ("flash3",),
    "NVTE_FLASH_ATTN_V4": ("flash4",),
    "NVTE_FUSED_ATTN": ("cudnn",),
    "NVTE_UNFUSED_ATTN": ("unfused",),
}


@pytest.mark.parametrize("start", [None, "1", "0"], ids=["unset", "set", "off"])
@pytest.mark.parametrize("variable", _SWITCHES)
def test_every_switch_is_noticed_set_changed_and_unset(monkeypatch: pytest.MonkeyPatch, variable: str, start: str | None) -> None:
    """``os.environ.get`` in traced code would miss a variable that was unset when it was compiled."""
    target = _SWITCHES[variable][0]
    # The switched backend and another, so that turning it off leaves something to run.
    chosen = Chosen(monkeypatch, target, "cudnn" if target != "cudnn" else "flash4", "torch_flash")
    for name in chosen.stubs:
        if name != target:
            chosen.stubs[name]._refuse = _refuse_while_available(chosen, target)
    function, counter = counted()
    inputs = build(INPUTS)
    for value in (start, "0", None, "1", "0", None, "2", start):
        set_variable(monkeypatch, variable, value)
        off = value == "0"
        assert (chosen.run(function, inputs) == target) is not off
    assert counter.frame_count <= 4, "at most one graph each for unset, 0, 1 and 2"


def _refuse_while_available(chosen: Chosen, target: str) -> Any:
    """A backend that is there only as the second choice, whatever the static rank says."""

    def refuse(p: AttentionParams) -> Iterator[str]:
        switches = chosen.stubs[target].switches
        if not any(os.environ.get(switch) == "0" for switch in switches):
            yield f"stands behind {target}"

    return refuse


def test_going_back_compiles_and_probes_nothing(chosen: Chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    function, counter = counted()
    inputs = build(INPUTS)
    first = chosen.run(function, inputs)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    assert chosen.run(function, inputs) != first
    probes = probe_count()
    for value in (None, "0", None, "0"):
        set_variable(monkeypatch, "NVTE_FLASH_ATTN", value)
        chosen.run(function, inputs)
    assert counter.frame_count == 2 and probe_count() == probes


@pytest.mark.parametrize("name", ["NVTE_UNRELATED", "PATH_TO_SOMETHING", "NVTE_FLASH_ATTN_V5", "CUDA_VISIBLE_DEVICES_"])
def test_other_variables_compile_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    function, counter = counted(backend="eager")
    inputs = build(INPUTS)
    for value in (None, "1", "0", None):
        set_variable(monkeypatch, name, value)
        inputs.attend(function)
    assert counter.frame_count == 1


def test_ways_of_writing_a_variable(chosen: Chosen) -> None:
    """Assignment, update, pop and del: all are seen."""
    function, _ = counted(backend="eager")
    inputs = build(INPUTS)
    os.environ["NVTE_FLASH_ATTN"] = "0"
    try:
        assert chosen.run(function, inputs) == "cudnn"
        os.environ.pop("NVTE_FLASH_ATTN")
        assert chosen.run(function, inputs) == "flash4"
        os.environ.update({"NVTE_FLASH_ATTN": "0"})
        assert chosen.run(function, inputs) == "cudnn"
        del os.environ["NVTE_FLASH_ATTN"]
        assert chosen.run(function, inputs) == "flash4"
    finally:
        os.environ.pop("NVTE_FLASH_ATTN", None)


@pytest.mark.parametrize("start", [None, "1"])
def test_determinism_by_variable_is_noticed(monkeypatch: pytest.MonkeyPatch, start: str | None) -> None:
    seen: list[bool] = []

    def note(graph: torch.fx.GraphModule, example: Any) -> Any:
        (node,) = [node for node in graph.graph.nodes if "attention" in str(node.target)]
        seen.append(bool(node.args[-1][1] & plans.DETERMINISTIC))
        return graph.forward

    function, inputs = torch.compile(thd_attention, fullgraph=True, backend=note), build(INPUTS)
    for value in (start, "0", start, "0"):
        set_variable(monkeypatch, "NVTE_ALLOW_NONDETERMINISTIC_ALGO", value)
        inputs.attend(function)
    assert seen == [False, True]


def test_a_switch_of_torchs_determinism_is_noticed() -> None:
    """On, on but only warning, and off: torch's flash kernel is deterministic in the first alone."""
    seen: list[tuple[bool, bool]] = []

    def note(graph: torch.fx.GraphModule, example: Any) -> Any:
        (node,) = [node for node in graph.graph.nodes if "attention" in str(node.target)]
        flags = node.args[-1][1]
        seen.append((bool(flags & plans.DETERMINISTIC), bool(flags & plans.DETERMINISTIC_ALGORITHMS)))
        return graph.forward

    function, inputs = torch.compile(thd_attention, fullgraph=True, backend=note), build(INPUTS)
    try:
        for _ in range(2):
            for on, warn_only in ((False, False), (True, False), (True, True)):
                torch.use_deterministic_algorithms(on, warn_only=warn_only)
                inputs.attend(function)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [(False, False), (True, True), (True, False)]


def test_the_way_of_selecting_is_noticed(chosen: Chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    ranked: list[Any] = []

    def rank(request: Any, candidates: Any) -> Any:
        ranked.append(request)
        return candidates, ()

    monkeypatch.setattr(measure, "rank", rank)
    function, counter = counted(backend="eager")
    inputs = build(INPUTS)
    inputs.attend(function)
    assert not ranked
    monkeypatch.setenv("TE_ATTN_OPS_SELECTION", "measured")
    with pytest.raises(Exception, match="no attention backend can run"):
        inputs.attend(function)
    assert ranked, "the variable was not seen"
    monkeypatch.delenv("TE_ATTN_OPS_SELECTION")
    inputs.attend(function)
    assert counter.frame_count == 1


def test_a_variable_inside_a_larger_compiled_model(chosen: Chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guards lie in the caller's graph, whatever is around the call."""
    layer = torch.nn.Linear(16, 48)

    def model(x: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
        q, k, v = layer(x).unflatten(1, (3, 1, 16)).unbind(1)
        return thd_attention(q, k, v, cu, max_seqlen_q=9).flatten(1).relu()

    function, counter = counted(model, backend="inductor")
    inputs, x = build(INPUTS), torch.randn(14, 16)
    for value, name in ((None, "flash4"), ("0", "cudnn"), (None, "flash4")):
        set_variable(monkeypatch, "NVTE_FLASH_ATTN", value)
        function(x, inputs.cu_seqlens_q).sum().backward()
        assert chosen.used[-1] == name
    assert counter.frame_count == 2


def test_no_backend_left_is_an_error_with_the_reasons_and_can_be_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    function, _ = counted()
    inputs = build(INPUTS)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(Exception, match="disabled by NVTE_UNFUSED_ATTN=0") as caught:
        inputs.attend(function)
    chain, error = [], caught.value
    while error is not None:
        chain.append(type(error))
        error = error.__cause__ or error.__context__
    assert NoBackendError in chain
    monkeypatch.delenv("NVTE_UNFUSED_ATTN")
    assert torch.equal(inputs.attend(function), inputs.attend())


# ----------------------------------------------------------------------------------------------------------------- invalidate
def test_twenty_invalidations_without_a_change_compile_nothing(chosen: Chosen) -> None:
    function, counter = counted()
    inputs = build(INPUTS)
    for _ in range(20):
        chosen.run(function, inputs)
        assert invalidate() is False
    assert counter.frame_count == 1


def test_a_changed_answer_compiles_once(chosen: Chosen) -> None:
    function, counter = counted()
    inputs = build(INPUTS)
    assert chosen.run(function, inputs) == "flash4"
    chosen.refuse("flash4")
    assert chosen.run(function, inputs) == "flash4", "nothing looks again by itself"
    assert invalidate() is True
    for _ in range(3):
        assert chosen.run(function, inputs) != "flash4"
    assert counter.frame_count == 2
    assert invalidate() is False


def test_an_answer_may_change_more_often_than_the_recompile_limit(chosen: Chosen) -> None:
    """Each change is noticed, at one compilation each; beyond Dynamo's own limit of 8 graphs that limit has to be raised."""
    inputs = build(INPUTS)
    with torch._dynamo.config.patch(recompile_limit=32):
        function, counter = counted(backend="eager")
        for n in range(12):
            chosen.stubs["flash4"]._refuse = (lambda p: iter(["gone"])) if n % 2 else None
            changed = invalidate()
            assert changed is (n > 0)
            assert (chosen.run(function, inputs) == "flash4") is (n % 2 == 0)
    assert counter.frame_count == 12


def test_invalidate_reaches_every_compiled_function(chosen: Chosen) -> None:
    functions = [counted(lambda *args, n=n, **kwargs: thd_attention(*args, **kwargs) + n)[0] for n in range(3)]
    inputs = build(INPUTS)
    for function in functions:
        inputs.attend(function)
    assert chosen.used[-3:] == ["flash4"] * 3
    chosen.refuse("flash4")
    invalidate()
    for function in functions:
        inputs.attend(function)
    assert "flash4" not in chosen.used[-3:]


def test_only_the_shape_that_changed_pays_a_probe_again(chosen: Chosen) -> None:
    """invalidate looks at every shape class again; a later call of any of them probes nothing."""
    function, _ = counted(backend="eager")
    batches = [build(INPUTS), build(INPUTS.replace(head_dim_qk=8, head_dim_v=8))]
    for inputs in batches:
        inputs.attend(function)
    before = probe_count()
    invalidate()
    assert probe_count() == before + 2
    for inputs in batches:
        inputs.attend(function)
    assert probe_count() == before + 2


def test_a_choice_per_policy_is_looked_at_again(chosen: Chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that stops taking one policy's mask: that policy moves, the other stays."""
    inputs = build(PackedCase((5, 9), masks=(CAUSAL, FULL), owner=(0, 1)))
    numbers: list[list[str]] = []

    def note(graph: torch.fx.GraphModule, example: Any) -> Any:
        (node,) = [node for node in graph.graph.nodes if "te_attn_ops.attention" in str(node.target)]
        numbers.append([backend_name(number) for number in plans.decode(tuple(node.args[-1])).backends])
        return graph.forward

    function = torch.compile(thd_attention, fullgraph=True, backend=note)
    inputs.attend(function)
    chosen.stubs["flash4"]._refuse = lambda p: iter(["full masks are gone"] if p.bands[0].is_full else [])
    assert invalidate() is True
    inputs.attend(function)
    assert numbers[0] == ["flash4", "flash4"]
    assert numbers[1][0] == "flash4" and numbers[1][1] != "flash4"


def test_a_forced_backend_is_for_one_call(chosen: Chosen) -> None:
    function, _ = counted(backend="eager")
    inputs = build(INPUTS)
    assert [chosen.run(function, inputs, **changes) for changes in ({}, {"backend": "cudnn"}, {})] == ["flash4", "cudnn", "flash4"]


# ------------------------------------------------------------------------------------------------------------------------ probes
@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
@pytest.mark.parametrize("name", [name for name in BACKEND_NAMES if not get_backend(name).single_launch])
def test_each_backend_forced_is_one_graph_and_its_probe_sees_numbers(
    name: str, dispatch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With symbolic shapes: no graph break at a probe that Dynamo could not trace, no symbolic number inside of it."""
    chosen = Chosen(monkeypatch, name)
    function, counter = counted(dynamic=True)
    inputs = build(PackedCase((5, 9, 3), masks=(CAUSAL, FULL), owner=(0, 1, 0)))
    inputs.run(function, backend=name, thd_attention_policy_dispatch=dispatch)
    assert chosen.used == [name, name] and counter.frame_count == 1
    assert chosen.stubs[name].asked
    for params in chosen.stubs[name].asked:
        for field in dataclasses.fields(params):
            value = getattr(params, field.name)
            assert type(value) in (int, bool, str, tuple, torch.dtype), f"{field.name} is a {type(value).__name__}"


def test_a_probe_may_do_what_dynamo_cannot_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads, files, C extensions, torch operations on real tensors: it runs outside of the trace."""

    def refuse(p: AttentionParams) -> Iterator[str]:
        with open(os.devnull, "w") as file:
            print(torch.ones(3).sum().item(), threading.get_ident(), file=file)
        time.perf_counter()
        yield from ()

    stub = Stub("flash4", refuse)
    install(monkeypatch, stub)
    function, counter = counted(dynamic=True)
    inputs = build(INPUTS)
    assert torch.equal(inputs.attend(function), inputs.attend())
    assert counter.frame_count == 1 and stub.asked


def test_a_failing_probe_is_an_error_and_not_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a backend's library raises while it is asked reaches the caller, and the next call asks again."""

    def refuse(p: AttentionParams) -> Iterator[str]:
        if broken:
            raise OSError("the library is half installed")
        yield from ()

    broken = [True]
    install(monkeypatch, Stub("flash4", refuse))
    function, _ = counted(backend="eager")
    inputs = build(INPUTS)
    with pytest.raises(Exception, match="the library is half installed"):
        inputs.attend(function)
    broken.clear()
    assert torch.equal(inputs.attend(function), inputs.attend())


def test_logging_and_warnings_break_no_graph(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The choice is logged, once, from under the trace; a mask that warns in eager compiles without a break."""
    caplog.set_level("INFO", logger="te_attn_ops")
    monkeypatch.setattr(logger, "propagate", True)
    function, counter = counted(backend="eager")
    inputs = build(INPUTS)
    for _ in range(2):
        inputs.attend(function, attn_mask_type="padding", window_size=(-1, 0))
    assert counter.frame_count == 1
    assert sum("unfused" in record.getMessage() for record in caplog.records if record.name == logger.name) == 1
