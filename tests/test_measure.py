"""Measured selection with stub backends and stub times: who wins, what is remembered, what ranks agree on. No real time counts."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import te_attn_ops
from te_attn_ops import AttentionParams, NoBackendError, explain, invalidate, measure, selection, thd_attention
from te_attn_ops.backends.base import ForwardCall
from te_attn_ops.masks import Band
from te_attn_ops.selection import Candidate, Option, Request
from tests.stubs import Stub, forget_choices, fresh_choices, install, refuse_native, refuse_padded  # noqa: F401

CAUSAL, FULL = Band(None, 0), Band(None, None)
# Small enough for a trial run on a CPU.
PARAMS = AttentionParams(
    dtype=torch.float32,
    device_type="cpu",
    sm=0,
    num_heads=1,
    num_gqa_groups=1,
    head_dim_qk=16,
    head_dim_v=8,
    max_seqlen_q=128,
    max_seqlen_kv=128,
    is_training=False,
)
Times = Mapping[tuple[str, int], float]


def choose(params: AttentionParams = PARAMS, **overrides: Any) -> selection.Selection:
    return selection.select(Request(params, selection="measured", **overrides))


class Clock:
    """Stands in for :func:`measure.median_times`: times by (backends, width), and a log of what was timed."""

    def __init__(self, times: Times) -> None:
        self.times = dict(times)
        self.timed: list[tuple[str, int]] = []

    def __call__(self, calls: Mapping[Any, Callable[[], None]], device: torch.device) -> dict[Any, float]:
        for job in calls:
            self.timed.append(("/".join(job.backends), job.head_dim_padded))
        return {job: self.times["/".join(job.backends), job.head_dim_padded] for job in calls}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stub = Clock({})
    monkeypatch.setattr(measure, "median_times", stub)
    return stub


def files() -> list[Path]:
    directory = measure.cache_directory()
    assert directory is not None
    return sorted(directory.glob("measured-*.json"))


def ms_of(chosen: selection.Selection) -> dict[tuple[str, int], float]:
    return {(c.backend, c.head_dim_padded): c.ms for c in chosen.candidates if c.ms is not None}


# ------------------------------------------------------------------------------------------------------------------- who wins
def test_the_fastest_wins_whatever_its_rank(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    install(monkeypatch, Stub("flash4"), Stub("flash2"), Stub("unfused"))
    clock.times = {("flash4", 0): 4.0, ("flash4", 16): 3.0, ("flash2", 0): 2.0, ("flash2", 16): 1.0}
    assert selection.select(Request(PARAMS)).backends == ("flash4",), "the static favourite"
    chosen = choose()
    assert (chosen.backends, chosen.head_dim_padded, chosen.dispatch) == (("flash2",), 16, "padded")
    assert ms_of(chosen) == clock.times
    assert all(c.ms is None and c.rank is not None for c in chosen.candidates if c.backend == "unfused"), "not timed beside kernels"


@pytest.mark.parametrize(("challenger_ms", "winner"), [(0.999, "flash4"), (0.981, "flash4"), (0.979, "flash2"), (1.5, "flash4")])
def test_a_challenger_must_win_by_two_percent(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, challenger_ms: float, winner: str
) -> None:
    install(monkeypatch, Stub("flash4"), Stub("flash2"))
    clock.times = {("flash4", 0): 1.0, ("flash2", 0): challenger_ms}
    assert choose(PARAMS.replace(head_dim_v=16)).backends == (winner,)


@pytest.mark.parametrize(("padded_ms", "width"), [(0.999, 0), (0.99, 0), (0.97, 16), (1.0, 0)])
def test_padding_must_win_by_two_percent_too(monkeypatch: pytest.MonkeyPatch, clock: Clock, padded_ms: float, width: int) -> None:
    install(monkeypatch, Stub("flash4"))
    clock.times = {("flash4", 0): 1.0, ("flash4", 16): padded_ms}
    assert choose().head_dim_padded == width


def test_native_wins_a_tie_of_two_challengers(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    install(monkeypatch, Stub("flash4", refuse_padded), Stub("flash2"))
    clock.times = {("flash4", 0): 9.0, ("flash2", 16): 1.0, ("flash2", 0): 1.0}
    chosen = choose()
    assert (chosen.backends, chosen.head_dim_padded) == (("flash2",), 0)


def test_a_lone_candidate_is_not_timed(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    install(monkeypatch, Stub("flash4", refuse_padded), Stub("unfused"))
    chosen = choose()
    assert (chosen.backends, clock.timed, files()) == (("flash4",), [], [])


def test_unfused_alone_is_not_timed_padded(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    install(monkeypatch, Stub("unfused"))
    assert (choose().head_dim_padded, clock.timed) == (0, [])


@pytest.mark.parametrize("overrides", [{"backend": "flash2"}, {"pad_head_dim": True}, {"pad_head_dim": False}])
def test_overrides_hold(monkeypatch: pytest.MonkeyPatch, clock: Clock, overrides: dict[str, Any]) -> None:
    install(monkeypatch, Stub("flash4"), Stub("flash2"))
    clock.times = {("flash4", 0): 4.0, ("flash4", 16): 3.0, ("flash2", 0): 2.5, ("flash2", 16): 2.6}
    chosen = choose(**overrides)
    if "backend" in overrides:
        assert (chosen.backends, chosen.head_dim_padded) == (("flash2",), 0)
        assert set(clock.timed) == {("flash2", 0), ("flash2", 16)}
    else:
        assert bool(chosen.head_dim_padded) is overrides["pad_head_dim"]
        assert {bool(width) for _, width in clock.timed} == {overrides["pad_head_dim"]}


def test_nothing_can_run(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    install(monkeypatch, Stub("flash2", refuse_native))
    with pytest.raises(NoBackendError, match="needs equal head dims"):
        choose(pad_head_dim=False)


# -------------------------------------------------------------------------------------------------------------------- policies
class SingleLaunch(Stub):
    """Takes all policies at once; computes nothing."""

    def make_plan(self, **arguments: Any) -> list[Tensor]:
        self.plan_arguments = arguments
        return [torch.zeros(1, dtype=torch.int32)]

    def forward(self, call: ForwardCall) -> None:
        assert len(call.bands) == 2 and len(call.single_launch_plan) == 1
        call.out.zero_()
        call.lse.zero_()


def refuse_full(p: AttentionParams) -> Iterator[str]:
    if any(band.is_full for band in p.bands):
        yield "takes no full mask"


@pytest.mark.parametrize("single_launch_ms", [5.0, 0.5])
def test_each_policy_gets_its_own_and_whole_calls_decide(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, single_launch_ms: float
) -> None:
    flex = SingleLaunch("cudnn_flex")
    install(monkeypatch, Stub("flash4", refuse_full), Stub("flash2"), flex)
    clock.times = {
        ("flash4", 0): 1.0,
        ("flash2", 0): 2.0,
        ("flash4/flash2", 0): 3.0,
        ("cudnn_flex/cudnn_flex", 0): single_launch_ms,
    }
    chosen = choose(PARAMS.replace(head_dim_v=16, bands=(CAUSAL, FULL), single_launch_plan=True))
    if single_launch_ms > 3:
        assert (chosen.backends, chosen.dispatch) == (("flash4", "flash2"), "padded")
    else:
        assert (chosen.backends, chosen.dispatch) == (("cudnn_flex", "cudnn_flex"), "single_launch")
    assert flex.plan_arguments["bands"] == (CAUSAL, FULL)
    assert flex.plan_arguments["lens_q"].shape[0] == 2


def test_a_policy_that_only_unfused_takes(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    install(monkeypatch, Stub("flash4", refuse_full), Stub("flash2", refuse_full), Stub("unfused"))
    clock.times = {("flash4", 0): 2.0, ("flash2", 0): 1.0, ("unfused", 0): 9.0, ("flash2/unfused", 0): 10.0}
    chosen = choose(PARAMS.replace(head_dim_v=16, bands=(CAUSAL, FULL)))
    assert chosen.backends == ("flash2", "unfused")


def test_grouped_is_timed_as_grouped(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    seen: list[bool] = []
    install(monkeypatch, Stub("flash4", before_forward=lambda call: seen.append(call.plain_cu_seqlens)), Stub("flash2"))
    clock.times = {("flash4", 0): 2.0, ("flash2", 0): 1.0, ("flash2/flash2", 0): 2.0}
    chosen = choose(PARAMS.replace(head_dim_v=16, bands=(CAUSAL, FULL)), dispatch="grouped")
    assert (chosen.dispatch, chosen.backends) == ("grouped", ("flash2", "flash2"))
    assert seen and all(seen), "a compacted subset is plain cu_seqlens"


# ------------------------------------------------------------------------------------------------------------ what cannot run
def failing(message: str = "invalid configuration argument") -> Callable[[ForwardCall], None]:
    def fail(call: ForwardCall) -> None:
        fail.calls += 1  # type: ignore[attr-defined]
        raise RuntimeError(message)

    fail.calls = 0  # type: ignore[attr-defined]
    return fail


def test_a_failed_launch_is_a_refusal_that_is_remembered(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    fail = failing()
    install(monkeypatch, Stub("flash4", before_forward=fail), Stub("flash2"), Stub("torch_flash"))
    clock.times = {("flash2", 0): 2.0, ("torch_flash", 0): 1.0}
    params = PARAMS.replace(head_dim_v=16)
    for _ in range(2):
        chosen = choose(params)
        (flash4,) = [c for c in chosen.candidates if c.backend == "flash4"]
        assert flash4.refusals == ("failed when it was tried: RuntimeError: invalid configuration argument",)
        assert (flash4.rank, flash4.ms) == (None, None)
        assert chosen.backends == ("torch_flash",)
        forget_choices()  # as in another process: only the file is left
    assert fail.calls == 1, "tried again although the file remembers"  # type: ignore[attr-defined]
    assert "failed when it was tried" in str(explain(params, selection="measured"))


def test_a_failed_launch_leaves_its_reason_where_nothing_else_runs(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    install(monkeypatch, Stub("flash4", before_forward=failing("a")), Stub("flash2", before_forward=failing("b")))
    with pytest.raises(NoBackendError) as error:
        choose()
    assert "RuntimeError: a" in str(error.value) and "RuntimeError: b" in str(error.value)


def test_unfused_steps_in_where_every_kernel_fails(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    install(monkeypatch, Stub("flash4", before_forward=failing()), Stub("flash2", before_forward=failing()), Stub("unfused"))
    chosen = choose()
    assert (chosen.backends, chosen.head_dim_padded) == (("unfused",), 0)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_out_of_memory_is_no_refusal(monkeypatch: pytest.MonkeyPatch, clock: Clock, error: Exception) -> None:
    def full(call: ForwardCall) -> None:
        raise error

    install(monkeypatch, Stub("flash4", before_forward=full), Stub("flash2"), Stub("torch_flash"))
    clock.times = {("flash2", 0): 2.0, ("torch_flash", 0): 1.0}
    chosen = choose(PARAMS.replace(head_dim_v=16))
    assert chosen.backends == ("torch_flash",)
    (flash4,) = [c for c in chosen.candidates if c.backend == "flash4"]
    assert flash4.accepted and flash4.ms is None
    (entries,) = json.loads(files()[0].read_text())["entries"].values()
    assert sorted(key.split()[0] for key in entries) == ["flash2", "torch_flash"]


def test_out_of_memory_is_tried_with_fewer_tokens(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    def small_only(call: ForwardCall) -> None:
        seen.append(call.q.shape[0])
        if call.q.shape[0] > 512:
            raise torch.OutOfMemoryError("CUDA out of memory")

    seen: list[int] = []
    monkeypatch.setitem(measure._TOKENS, "cpu", 2048)
    install(monkeypatch, Stub("flash4", before_forward=small_only), Stub("flash2"))
    clock.times = {("flash4", 0): 1.0, ("flash2", 0): 2.0}
    chosen = choose(PARAMS.replace(head_dim_v=16))
    assert seen == [2048, 512]
    assert ms_of(chosen) == clock.times, "all were timed, and with the same tokens"
    assert json.loads(files()[0].read_text())["entries"].popitem()[1].popitem()[1]["tokens"] == 512


def test_everything_out_of_memory_is_the_static_choice(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    def full(call: ForwardCall) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    install(monkeypatch, Stub("flash4", before_forward=full), Stub("flash2", before_forward=full))
    assert choose().backends == ("flash4",)


def test_a_broken_context_ends_the_process_but_is_remembered(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    fail = failing("an illegal memory access was encountered")
    install(monkeypatch, Stub("flash4", before_forward=fail), Stub("flash2"), Stub("torch_flash"))
    clock.times = {("flash2", 0): 1.0, ("torch_flash", 0): 2.0}
    params = PARAMS.replace(head_dim_v=16)

    def broken(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(measure, "_synchronize", broken)
        with pytest.raises(RuntimeError, match="broke the CUDA context"):
            choose(params)
    forget_choices()
    assert choose(params).backends == ("flash2",)
    assert fail.calls == 1  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------------------ the cache
@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Clock:
    install(monkeypatch, Stub("flash4"), Stub("flash2"))
    clock.times = {("flash4", 0): 2.0, ("flash4", 16): 3.0, ("flash2", 0): 1.0, ("flash2", 16): 4.0}
    return clock


def test_measured_once_per_process(two: Clock) -> None:
    choose()
    choose()
    selection._MEMO.clear()
    choose()
    assert len(two.timed) == 4


def test_measured_once_per_machine(two: Clock) -> None:
    assert choose().backends == ("flash2",)
    forget_choices()
    assert choose().backends == ("flash2",)
    assert len(two.timed) == 4, "another process measured again"
    assert ms_of(choose()) == two.times


def test_neither_environment_nor_overrides_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch, two: Clock) -> None:
    choose()
    forget_choices()
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    assert choose(backend="flash4").head_dim_padded == 0
    assert choose(PARAMS.replace(device_index=0, single_launch_plan=True)).backends == ("flash2",)
    assert len(two.timed) == 4


@pytest.mark.parametrize("change", [{"head_dim_v": 12}, {"is_training": True}, {"max_seqlen_kv": 256}, {"bands": (FULL,)}])
def test_another_shape_class_is_measured(two: Clock, change: dict[str, Any]) -> None:
    choose()
    choose(PARAMS.replace(**change))
    assert len(two.timed) == 8


def test_what_is_missing_is_measured_together_with_the_rest(monkeypatch: pytest.MonkeyPatch, two: Clock) -> None:
    choose(backend="flash4")
    assert set(two.timed) == {("flash4", 0), ("flash4", 16)}
    choose()
    assert len(two.timed) == 2 + 4, "times of different runs were compared"


def test_other_versions_are_another_file(monkeypatch: pytest.MonkeyPatch, two: Clock) -> None:
    choose()
    forget_choices()
    monkeypatch.setattr(Stub, "version", lambda self: "2.0" if self._installed else None)
    choose()
    assert len(two.timed) == 8 and len(files()) == 2


def test_the_file_is_private_and_complete(two: Clock) -> None:
    choose()
    (path,) = files()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    data = json.loads(path.read_text())
    assert data["fingerprint"]["backends"]["flash4"] == "1.0"
    (entries,) = data["entries"].values()
    assert sorted(entry["ms"] for entry in entries.values()) == [1.0, 2.0, 3.0, 4.0]
    assert not list(path.parent.glob("*.tmp"))


_DAMAGED = ["", "{", "[]", "null", '{"entries": {}}', '{"fingerprint": {}, "entries": 3}', "\x00\xff"]


@pytest.mark.parametrize("text", _DAMAGED)
def test_a_damaged_file_is_replaced(two: Clock, text: str) -> None:
    choose()
    (path,) = files()
    path.write_text(text)
    forget_choices()
    assert choose().backends == ("flash2",)
    assert len(two.timed) == 8
    assert len(json.loads(path.read_text())["entries"]) == 1


_WRONG_ENTRIES = [3, {}, {"ms": "fast", "tokens": 1}, {"ms": -1.0, "tokens": 1}, {"ms": 1.0}, {"ms": None, "tokens": 1}]


@pytest.mark.parametrize("entry", _WRONG_ENTRIES)
def test_a_wrong_entry_is_measured_again(two: Clock, entry: Any) -> None:
    choose()
    (path,) = files()
    data = json.loads(path.read_text())
    entries = next(iter(data["entries"].values()))
    entries[next(iter(entries))] = entry
    path.write_text(json.dumps(data))
    forget_choices()
    assert choose().backends == ("flash2",)
    assert len(two.timed) == 8


def test_no_place_to_write_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, two: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, logger="te_attn_ops"):
        assert choose().backends == ("flash2",)
    assert "not kept on disk" in caplog.text
    selection._MEMO.clear()
    assert choose().backends == ("flash2",) and len(two.timed) == 4, "the memory still holds it"


def test_no_home_directory(monkeypatch: pytest.MonkeyPatch, two: Clock) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert choose().backends == ("flash2",)
    assert measure.cache_directory() is None


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    assert measure.cache_directory() == Path.home() / ".cache" / "te_attn_ops"


def _write_entries(path: str, writer: int, count: int) -> None:
    for n in range(count):
        fresh = {f"shape {writer}.{n}": {"job": {"ms": 1.0, "tokens": 1, "refusal": None}}}
        measure._update_file(Path(path), {"format": 1}, fresh)


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "measured-x.json"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_entries, args=(str(path), writer, 12)) for writer in range(4)]
    for process in writers:
        process.start()
    while any(process.is_alive() for process in writers):
        if path.exists():
            json.loads(path.read_text())  # a reader never sees half a file
        for process in writers:
            process.join(0.01)
    assert [process.exitcode for process in writers] == [0] * 4
    assert len(measure._read_file(path, {"format": 1})) == 48


def test_a_lock_that_is_held_for_ever_is_passed_by(tmp_path: Path) -> None:
    path = tmp_path / "measured-x.lock"
    with measure._locked(path), measure._locked(path, patience_s=0.05):
        pass


def test_forgetting(two: Clock) -> None:
    choose()
    measure.forget_measurements()
    assert files() == []
    forget_choices()
    choose()
    assert len(two.timed) == 8


def test_invalidate_reads_the_file_again(two: Clock) -> None:
    choose()
    assert selection.invalidate() is False
    assert len(two.timed) == 4, "nothing changed, so nothing was to be measured"
    measure.forget_measurements()
    two.times["flash4", 0] = 0.5
    assert selection.invalidate() is True
    assert choose().backends == ("flash4",)


# --------------------------------------------------------------------------------------------------------------- where it runs
def test_as_an_argument_and_as_a_variable(monkeypatch: pytest.MonkeyPatch, two: Clock) -> None:
    q, k, v = torch.randn(9, 1, 16), torch.randn(9, 1, 16), torch.randn(9, 1, 8)
    cu = torch.tensor([0, 4, 9])
    expected = thd_attention(q, k, v, cu, max_seqlen_q=5)
    assert explain(q, k, v, cu, max_seqlen_q=5).winner["backend"] == "flash4"  # type: ignore[index]
    torch.testing.assert_close(thd_attention(q, k, v, cu, max_seqlen_q=5, selection="measured"), expected)
    monkeypatch.setenv("TE_ATTN_OPS_SELECTION", "measured")
    found = explain(q, k, v, cu, max_seqlen_q=5)
    assert found.winner is not None and (found.winner["backend"], found.winner["ms"]) == ("flash2", 1.0)
    assert "1.000 ms  <- chosen" in str(found) and "(measured)" in str(found)


def test_outside_of_fake_tensors_and_compilers(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    seen: list[type] = []
    stubs = [Stub(name, before_forward=lambda call: seen.append(type(call.q))) for name in ("flash4", "flash2")]
    clock.times = {("flash4", 0): 2.0, ("flash2", 0): 1.0}

    def attend(q: Tensor, cu: Tensor) -> Tensor:
        return thd_attention(q, q, q, cu, max_seqlen_q=5, selection="measured")

    install(monkeypatch, *stubs)
    with FakeTensorMode():
        assert attend(torch.empty(9, 1, 16), torch.empty(3, dtype=torch.int32)).shape == (9, 1, 16)
    assert seen and set(seen) == {Tensor}
    trials = len(seen)
    measure.forget_measurements()
    forget_choices()
    q, cu = torch.randn(9, 1, 16), torch.tensor([0, 4, 9])
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, cu)
    assert len(seen) > trials and set(seen) == {Tensor}
    torch.testing.assert_close(compiled, attend(q, cu))


def test_the_random_state_is_left_alone(two: Clock) -> None:
    before = torch.get_rng_state()
    choose()
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_are_not_recorded_and_training_runs_the_backward(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    backwards: list[bool] = []

    class Noting(Stub):
        def backward(self, call: Any) -> None:
            backwards.append(torch.is_grad_enabled())
            super().backward(call)

    install(monkeypatch, Noting("flash4"), Noting("flash2"))
    clock.times = {("flash4", 0): 2.0, ("flash2", 0): 1.0}
    choose(PARAMS.replace(head_dim_v=16))
    assert backwards == []
    choose(PARAMS.replace(head_dim_v=16, is_training=True))
    assert backwards == [False, False]


# ------------------------------------------------------------------------------------------------------- timing and workload
def test_rounds_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    times = {"a": iter([50.0, 3.0, 1.0, 2.0]), "b": iter([50.0, 5.0, 6.0, 70.0])}

    def once(call: Callable[[], str], device: torch.device) -> float:
        order.append(call())
        return next(times[order[-1]])

    monkeypatch.setattr(measure, "_time_once", once)
    found = measure.median_times({"a": lambda: "a", "b": lambda: "b"}, torch.device("cpu"))
    assert order == ["a", "b"] * 4, "a warm-up and three rounds"
    assert found == {"a": 2.0, "b": 6.0}, "medians without the warm-up"


def test_the_real_clock() -> None:
    found = measure.median_times({"none": lambda: None}, torch.device("cpu"))
    assert found["none"] >= 0


@pytest.mark.parametrize("has_gaps", [False, True])
@pytest.mark.parametrize(("max_q", "max_kv", "equal"), [(128, 128, True), (128, 256, False), (1 << 20, 1 << 20, True)])
@pytest.mark.parametrize("policies", [1, 3])
def test_workload(has_gaps: bool, max_q: int, max_kv: int, equal: bool, policies: int) -> None:
    p = PARAMS.replace(has_gaps=has_gaps, max_seqlen_q=max_q, max_seqlen_kv=max_kv, equal_lengths=equal)
    work = measure.Workload.of(p, policies, torch.device("cpu"), 512)
    starts_q, lens_q, starts_kv, lens_kv = work.subsets
    assert lens_q.shape[0] == policies
    assert starts_q[-1] == work.q.shape[0] and starts_kv[-1] == work.k.shape[0] == work.v.shape[0]
    assert (lens_q.sum(1) > 0).all(), "every policy has a sequence"
    assert lens_q.max() <= min(max_q, 512) and lens_kv.max() <= min(max_kv, 512)
    assert (starts_q.diff() - lens_q.sum(0) == (measure._GAP if has_gaps else 0)).all()
    if equal:
        assert torch.equal(lens_q, lens_kv)
    else:
        assert lens_kv.max() == 2 * lens_q.max()


def test_long_sequences_are_cut_to_a_bounded_work() -> None:
    p = AttentionParams(num_heads=128, head_dim_qk=192, head_dim_v=128, max_seqlen_q=1 << 20, max_seqlen_kv=1 << 20)
    count, length_q, length_kv = measure._lengths(p, 1, "cuda", 16384)
    assert count * length_q * length_kv * 128 * 320 <= 2 * measure._WORK["cuda"]
    assert length_q == length_kv >= 1024
    count, length_q, _ = measure._lengths(p.replace(num_heads=16, max_seqlen_q=4096, max_seqlen_kv=4096), 1, "cuda", 16384)
    assert (count, length_q) == (4, 4096), "the work that the static rank was measured with"


class _Terminal:
    def __init__(self, terminal: bool) -> None:
        self.text, self.terminal = "", terminal

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_line(monkeypatch: pytest.MonkeyPatch, two: Clock, terminal: bool) -> None:
    stderr = _Terminal(terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    choose()
    if terminal:
        assert "preparing flash4, native widths (2/4)" in stderr.text
        assert stderr.text.endswith("\r\x1b[K"), "the line is gone when done"
    else:
        assert stderr.text == ""


# ------------------------------------------------------------------------------------------------------------- ranks of one job
@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> torch.distributed.Store:
    shared = torch.distributed.HashStore()
    monkeypatch.setattr(measure, "_default_store", lambda: shared)
    return shared


def other_rank() -> None:
    """This process as another rank: it shares the store and nothing else."""
    forgotten = measure._CACHE.forgotten
    measure.forget_measurements()
    measure._CACHE.forgotten = forgotten
    forget_choices()


@pytest.mark.usefixtures("store")
def test_forgotten_measurements_are_decided_anew(two: Clock) -> None:
    assert choose().backends == ("flash2",)
    two.times = {("flash4", 0): 1.0, ("flash4", 16): 1.0, ("flash2", 0): 9.0, ("flash2", 16): 9.0}
    measure.forget_measurements()
    invalidate()
    assert choose().backends == ("flash4",)


@pytest.mark.usefixtures("store")
def test_the_first_rank_decides_for_all(two: Clock) -> None:
    assert choose().backends == ("flash2",)
    other_rank()
    two.times = {("flash4", 0): 1.0, ("flash4", 16): 1.0, ("flash2", 0): 9.0, ("flash2", 16): 9.0}
    two.timed.clear()
    assert choose().backends == ("flash2",), "this rank alone would have chosen flash4"
    assert two.timed == [], "what is decided needs no measurement"


@pytest.mark.usefixtures("store")
def test_two_ranks_that_measure_at_the_same_time_agree(monkeypatch: pytest.MonkeyPatch, two: Clock) -> None:
    # The other rank writes between this one's look and its own write.
    real = measure._Agreement.known

    def too_early(self: Any) -> Option | None:
        found = real(self)
        self._store.compare_set(self._key, "", json.dumps({"backends": ["flash4"], "head_dim_padded": 16, "dispatch": "padded"}))
        return found

    monkeypatch.setattr(measure._Agreement, "known", too_early)
    chosen = choose()
    assert (chosen.backends, chosen.head_dim_padded) == (("flash4",), 16)
    assert len(two.timed) == 4


@pytest.mark.usefixtures("store")
def test_ranks_with_other_backends_decide_for_themselves(monkeypatch: pytest.MonkeyPatch, two: Clock) -> None:
    assert choose().backends == ("flash2",)
    other_rank()
    install(monkeypatch, Stub("flash4"), Stub("torch_flash"))
    two.times |= {("torch_flash", 0): 9.0, ("torch_flash", 16): 9.0}
    assert choose().backends == ("flash4",)


def test_an_answer_that_cannot_run_here_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, Stub("flash4"), Stub("flash2"), Stub("torch_flash"))
    clock.times = {("flash4", 0): 1.0, ("flash2", 0): 2.0, ("torch_flash", 0): 3.0}
    params = PARAMS.replace(head_dim_v=16)
    assert choose(params).backends == ("flash4",)
    other_rank()
    monkeypatch.setattr(measure._Agreement, "known", lambda self: None)
    install(monkeypatch, Stub("flash4", before_forward=failing()), Stub("flash2"), Stub("torch_flash"))
    with caplog.at_level(logging.WARNING, logger="te_attn_ops"):
        assert choose(params).backends == ("flash2",)
    assert "another rank chose flash4" in caplog.text


@pytest.mark.parametrize("answer", ["", "{", '{"backends": ["nope"], "head_dim_padded": 0, "dispatch": "padded"}', "{}"])
def test_a_foreign_answer_in_the_store(
    monkeypatch: pytest.MonkeyPatch, two: Clock, caplog: pytest.LogCaptureFixture, answer: str
) -> None:
    class Foreign:
        def check(self, keys: list[str]) -> bool:
            return True

        def get(self, key: str) -> bytes:
            return answer.encode()

        def compare_set(self, *args: str) -> bytes:
            return answer.encode()

    monkeypatch.setattr(measure, "_default_store", Foreign)
    with caplog.at_level(logging.WARNING, logger="te_attn_ops"):
        assert choose().backends == ("flash2",)
    assert "ranks may choose different attention kernels" in caplog.text


def test_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch, two: Clock, caplog: pytest.LogCaptureFixture) -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise ConnectionError("reset by peer")

    monkeypatch.setattr(measure, "_default_store", Gone)
    with caplog.at_level(logging.WARNING, logger="te_attn_ops"):
        assert choose().backends == ("flash2",)
    assert "ConnectionError" in caplog.text


def test_no_store_outside_a_job() -> None:
    assert measure._default_store() is None


_RANK = """
import sys
import torch.distributed as dist
rank, rendezvous = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
import pytest
from te_attn_ops import measure
from tests.stubs import Stub, install
from tests.test_measure import Clock, choose
patch = pytest.MonkeyPatch()
install(patch, Stub("flash4"), Stub("flash2"))
# Each rank would choose a backend of its own.
mine, other = ("flash4", "flash2") if rank == 0 else ("flash2", "flash4")
patch.setattr(measure, "median_times", Clock({(n, w): (1.0 if n == mine else 2.0) for n in (mine, other) for w in (0, 16)}))
print("chose", *choose().backends)
dist.barrier()
dist.destroy_process_group()
"""


def test_two_processes_agree(tmp_path: Path) -> None:
    root = str(Path(te_attn_ops.__file__).parent.parent)
    processes = []
    for rank in range(2):
        # A cache each: it is the store that makes them agree.
        env = {**os.environ, "PYTHONPATH": root, "XDG_CACHE_HOME": str(tmp_path / str(rank))}
        command = [sys.executable, "-c", _RANK, str(rank), str(tmp_path / "rendezvous")]
        processes.append(subprocess.Popen(command, env=env, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    answers = [next(line for line in out.splitlines() if line.startswith("chose")) for out, _ in outputs]
    assert answers[0] == answers[1], "ranks chose different kernels"


# -------------------------------------------------------------------------------------------------------------- the benchmark
def test_the_padding_benchmark_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import padding

    install(monkeypatch, Stub("unfused"), Stub("flash4"), Stub("flash2", refuse_native), Stub("cudnn", before_forward=failing("no")))
    data = padding.run(padding.SMOKE._replace(pad_cost_pairs=((24, 16),), compiler="eager"))
    cells = {(r["head_dim_qk"], r["head_dim_v"], r["training"], r["backend"], r["padded"]) for r in data["rows"]}
    backends = [("unfused", False), ("unfused", True), ("flash4", False), ("flash4", True), ("flash2", True)]
    assert cells == {(*pair, training, *b) for pair in padding.SMOKE.pairs for training in (False, True) for b in backends}
    assert all(r["ms"] > 0 for r in data["rows"])
    assert {(f["backend"], f["padded"]) for f in data["failures"]} == {("cudnn", False), ("cudnn", True)}
    choices = [(c["head_dim_qk"], c["head_dim_v"], c["training"], c["selection"]) for c in data["choices"]]
    assert len(set(choices)) == len(choices) == 8 and all(c["of_best"] >= 1 for c in data["choices"])
    assert [(c["compiled"], c["head_dim_qk"], c["head_dim_v"]) for c in data["pad_cost"]] == [(False, 24, 16), (True, 24, 16)]
    out = tmp_path / "padding.json"
    out.write_text(json.dumps(data))
    assert padding.main(["--from", str(out), "--print-ranks"]) == 0
    assert "| 24/16 |" in out.with_suffix(".md").read_text()


# ----------------------------------------------------------------------------------------------------------------- on a device
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("training", [False, True])
def test_on_this_device(training: bool) -> None:
    q = torch.randn(600, 4, 192, device="cuda", dtype=torch.bfloat16, requires_grad=training)
    k, v = torch.randn_like(q), torch.randn(600, 4, 128, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, 200, 600], device="cuda", dtype=torch.int32)
    found = explain(q, k, v, cu, max_seqlen_q=400, selection="measured")
    timed = {c.backend: c for c in found.candidates if c.ms is not None}
    runnable: list[Candidate] = [c for c in found.candidates if c.accepted and c.backend != "unfused"]
    assert all(c.ms is not None for c in runnable) or len(runnable) < 2
    assert found.winner is not None
    assert not timed or found.winner["backend"] in timed
    out = thd_attention(q, k, v, cu, max_seqlen_q=400, selection="measured")
    expected = thd_attention(q, k, v, cu, max_seqlen_q=400, backend="unfused")
    torch.testing.assert_close(out, expected, rtol=1.5e-2, atol=1.5e-2)
