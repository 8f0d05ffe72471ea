"""``python -m te_attn_ops``: what it prints, its exit codes, and TransformerEngine's logging switches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import te_attn_ops
from te_attn_ops.__main__ import main
from te_attn_ops.backends import BACKEND_NAMES
from te_attn_ops.backends.base import ForwardCall
from tests.stubs import Stub, fresh_choices, install, refuse_all, refuse_native  # noqa: F401

EXPLAIN = ["explain", "--head-dim-qk", "192", "--head-dim-v", "128", "--num-heads", "16", "--device", "cpu"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(argv)
    return code, capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code, out = run(capsys, *argv, "--json")
    return code, json.loads(out)


def run_wrong(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    return capsys.readouterr().err


def in_process(argv: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    root = Path(te_attn_ops.__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": str(root), **environment}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=env, timeout=300, check=False)


# -------------------------------------------------------------------------------------------------------------------- explain
def test_explain_as_a_process() -> None:
    done = in_process(["-m", "te_attn_ops", *EXPLAIN, "--training", "--json"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["winner"]["backend"] == "unfused" and found["winner"]["head_dim_padded"] == 0
    assert {c["backend"] for c in found["candidates"]} == set(BACKEND_NAMES)
    assert found["params"]["is_training"] and found["params"]["head_dim_qk"] == 192


def test_explain_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, *EXPLAIN)
    assert code == 0
    assert "native 192/128" in out and "padded to 192" in out and "<- chosen" in out


def test_every_option_reaches_the_params(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--num-gqa-groups", "4", "--max-seqlen-q", "1000", "--max-seqlen-kv", "2000", "--dtype", "float16", "--gaps"]
    options += ["--attn-mask-type", "padding", "--window-size", "5", "7", "--no-bottom-right-diagonal"]
    options += ["--training", "--deterministic", "--return-max-logit"]
    _, found = run_json(capsys, *EXPLAIN, *options)
    p = found["params"]
    assert (p["num_heads"], p["num_gqa_groups"], p["dtype"]) == (16, 4, "float16")
    assert (p["max_seqlen_q"], p["max_seqlen_kv"], p["equal_lengths"]) == (1024, 2048, False), "bounds of the buckets"
    assert p["bands"] == [{"left": 5, "right": 7, "bottom_right": False}]
    assert p["has_gaps"] and p["is_training"] and p["deterministic"] and p["return_max_logit"]


def test_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = run_json(capsys, "explain", "--device", "cpu")
    p = found["params"]
    assert (p["head_dim_qk"], p["head_dim_v"], p["num_heads"], p["num_gqa_groups"]) == (128, 128, 16, 16)
    assert p["bands"] == [{"left": None, "right": 0, "bottom_right": True}]
    assert p["equal_lengths"] and not p["is_training"]
    assert (p["device_type"], p["dtype"]) == ("cpu", "bfloat16")


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("fp64", "float64")])
def test_short_names_of_dtypes(capsys: pytest.CaptureFixture[str], short: str, name: str) -> None:
    _, found = run_json(capsys, "explain", "--device", "cpu", "--dtype", short)
    assert found["params"]["dtype"] == name


def test_a_backend_that_cannot_run_is_told_what_can(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, Stub("unfused"))
    code, out = run(capsys, *EXPLAIN, "--backend", "flash4")
    assert code == 1
    assert "instead: unfused (can run it): leave backend open" in out and "faster" not in out


def test_unequal_lengths_keep_the_alignment(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = run_json(capsys, "explain", "--device", "cpu", "--unequal-lengths")
    assert found["params"]["bands"] == [{"left": None, "right": 0, "bottom_right": False}]


def test_policies_and_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    policies = ["--policy", "padding_causal", "--policy", "padding:5,0", "--policy", "padding"]
    overrides = ["--dispatch", "grouped", "--backend", "unfused", "--pad-head-dim", "--selection", "static"]
    code, found = run_json(capsys, *EXPLAIN, *policies, *overrides)
    assert code == 0
    assert [(b["left"], b["right"]) for b in found["params"]["bands"]] == [(None, 0), (5, 0), (None, None)]
    assert found["winner"]["backends"] == ["unfused"] * 3
    assert (found["winner"]["dispatch"], found["winner"]["head_dim_padded"]) == ("grouped", 192)
    assert found["overrides"] == {"backend": "unfused", "pad_head_dim": True, "dispatch": "grouped", "selection": "static"}


def test_exit_code_where_nothing_can_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, Stub("flash2", refuse_native))
    code, found = run_json(capsys, *EXPLAIN, "--no-pad-head-dim")
    assert (code, found["winner"]) == (1, None)


def test_what_a_mask_means_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", "--attn-mask-type", "padding", "--window-size", "-1", "0", "--json"]) == 0
    captured = capsys.readouterr()
    assert "means full attention" in captured.err
    assert json.loads(captured.out)["params"]["bands"] == [{"left": None, "right": None, "bottom_right": True}]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-heads", "5", "--num-gqa-groups", "2"], "--num-heads must be a multiple of --num-gqa-groups, got 5 and 2"),
        (["--head-dim-qk", "0"], "argument --head-dim-qk: must be a positive integer, got 0"),
        (["--head-dim-qk", "wide"], "argument --head-dim-qk: must be a positive integer, got wide"),
        (["--max-seqlen-q", "1.5"], "argument --max-seqlen-q: must be a positive integer, got 1.5"),
        (["--window-size", "-1", "5"], "window_size=(-1, 5)"),
        (["--window-size", "-2", "0"], "-1 (unbounded) or a number of tokens"),
        (["--attn-mask-type", "causal"], "invalid choice: 'causal'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--device", "tpu9"], "--device tpu9"),
        (["--device", "cuda:99"], "CUDA devices"),
        (["--dispatch", "grouped"], "needs --policy"),
        (["--policy", "padding:5"], "--policy padding:5: window_size must be a pair"),
        (["--policy", "padding:a,b"], "a window is two numbers of tokens"),
        (["--policy", "causal"], "does not fit the packed (thd) layout"),
        (["--policy", "padding", "--window-size", "1", "1"], "--policy cannot stand beside"),
        (["--backend", "flash5"], "invalid choice: 'flash5'"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_wrong_arguments_of_explain(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert message in run_wrong(capsys, "explain", *argv)


@pytest.mark.parametrize("argv", [[], ["frob"], ["doctor", "--frob"], ["doctor", "extra"]])
def test_wrong_commands(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert "usage: python -m te_attn_ops" in run_wrong(capsys, *argv)


@pytest.mark.parametrize("argv", [["--help"], ["doctor", "--help"], ["explain", "--help"]])
def test_help(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m te_attn_ops")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert te_attn_ops.__version__ in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------------------- doctor
@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("on_cpu")
def test_doctor_passes_what_is_right(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, Stub("unfused"), Stub("flash2"), Stub("cudnn"))
    code, found = run_json(capsys, "doctor")
    assert (code, found["passed"]) == (0, True)
    states = {b["name"]: b["state"] for b in found["backends"]}
    assert [name for name in BACKEND_NAMES if states[name] == "passed"] == ["unfused", "flash2", "cudnn"]
    assert {states[name] for name in BACKEND_NAMES if name not in ("unfused", "flash2", "cudnn")} == {"not_installed"}
    assert found["versions"]["te_attn_ops"] == te_attn_ops.__version__ and found["versions"]["torch"] == torch.__version__
    assert "no CUDA device" in found["device"]["device"]


class Wrong(Stub):
    """Its outputs are off by 5%."""

    def forward(self, call: ForwardCall) -> None:
        super().forward(call)
        call.out.mul_(1.05)


@pytest.mark.usefixtures("on_cpu")
def test_doctor_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def crash(call: ForwardCall) -> None:
        raise RuntimeError("no kernel image is available")

    install(monkeypatch, Stub("unfused"), Wrong("flash2"), Stub("flash4", before_forward=crash))
    code, found = run_json(capsys, "doctor")
    assert (code, found["passed"]) == (1, False)
    states = {b["name"]: (b["state"], b["detail"]) for b in found["backends"]}
    assert states["unfused"] == ("passed", "")
    assert states["flash2"][0] == "failed" and states["flash2"][1].startswith("AssertionError: out: ")
    assert states["flash4"] == ("failed", "RuntimeError: no kernel image is available")
    code, text = run(capsys, "doctor")
    assert code == 1 and "1 of 3 installed backends passed their self-test" in text


@pytest.mark.usefixtures("on_cpu")
def test_doctor_finds_wrong_gradients(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class WrongBackward(Stub):
        def backward(self, call: Any) -> None:
            super().backward(call)
            call.grads[1].mul_(1.05)

    install(monkeypatch, Stub("unfused"), WrongBackward("flash2"))
    states = {b["name"]: b for b in run_json(capsys, "doctor")[1]["backends"]}
    assert states["flash2"]["state"] == "failed" and "dk: " in states["flash2"]["detail"]


@pytest.mark.usefixtures("on_cpu")
def test_doctor_does_not_trust_unfused_blindly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, Wrong("unfused"))
    code, found = run_json(capsys, "doctor")
    assert code == 1 and found["backends"][0]["state"] == "failed"


def doctor_states(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and state and detail by backend."""
    code, found = run_json(capsys, "doctor")
    return code, {b["name"]: (b["state"], b["detail"]) for b in found["backends"]}


@pytest.mark.usefixtures("on_cpu")
def test_doctor_tells_another_device_from_a_bad_build(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong_device(p: Any) -> Any:
        yield "needs sm90 or newer, found sm80"

    def forward_only(p: Any) -> Any:
        if p.is_training:
            yield "has no backward"

    install(monkeypatch, Stub("unfused"), Stub("flash4", wrong_device), Stub("flash2", forward_only))
    code, states = doctor_states(capsys)
    assert code == 0
    assert states["flash4"] == ("wrong_device", "needs sm90 or newer, found sm80")
    assert states["flash2"] == ("passed", "inference only")
    install(monkeypatch, Stub("unfused"), Stub("flash4", refuse_all))
    code, states = doctor_states(capsys)
    assert (code, states["flash4"]) == (1, ("refused", "refuses everything"))


@pytest.mark.usefixtures("on_cpu")
def test_doctor_tests_a_backend_on_the_masks_that_it_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full_only(p: Any) -> Any:
        if not all(band.is_full for band in p.bands):
            yield "takes full attention only"

    install(monkeypatch, Stub("unfused"), Stub("flash4", full_only), Stub("flash2", refuse_all))
    code, states = doctor_states(capsys)
    assert code == 1
    assert states["flash4"] == ("passed", "takes not: one mask, two policies")
    assert states["flash2"] == ("refused", "refuses everything")


@pytest.mark.usefixtures("on_cpu")
def test_doctor_is_not_misled_by_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, Stub("unfused"), Stub("flash2"))
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    code, found = run_json(capsys, "doctor")
    assert code == 0 and found["environment"]["NVTE_FLASH_ATTN"] == "0"
    assert {b["name"]: b["state"] for b in found["backends"]}["flash2"] == "passed"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_doctor_on_this_device(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "doctor")
    assert code == 0, found["backends"]


# ---------------------------------------------------------------------------------------------------------------------- bench
def test_bench_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(te_attn_ops, "__file__", str(tmp_path / "site-packages" / "te_attn_ops" / "__init__.py"))
    assert "run this in a checkout of the repository" in run_wrong(capsys, "bench")


def test_bench_runs_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "te_attn_ops").mkdir()
    (tmp_path / "benchmarks").mkdir()
    script = "import json, pathlib, sys; pathlib.Path('seen.json').write_text(json.dumps(sys.argv[1:])); sys.exit(5)"
    (tmp_path / "benchmarks" / "__init__.py").write_text("")
    (tmp_path / "benchmarks" / "__main__.py").write_text(script)
    monkeypatch.setattr(te_attn_ops, "__file__", str(tmp_path / "te_attn_ops" / "__init__.py"))
    assert main(["bench", "--out", "x", "padding", "--help"]) == 5
    assert json.loads((tmp_path / "seen.json").read_text()) == ["--out", "x", "padding", "--help"]


# -------------------------------------------------------------------------------------------------------------------- logging
_CHOOSE = """
import torch, te_attn_ops
te_attn_ops.thd_attention(*torch.zeros(3, 4, 2, 8).unbind(), torch.tensor([0, 4]), max_seqlen_q=4)
"""


@pytest.mark.parametrize(
    ("debug", "level", "shown", "hidden"),
    [
        ("1", "1", ["INFO", "head_dim_qk=8"], ["DEBUG"]),
        ("1", "2", ["INFO", "DEBUG", "not flash4"], []),
        ("1", "0", [], ["INFO", "DEBUG"]),
        ("0", "2", [], ["INFO", "DEBUG"]),
    ],
)
def test_debug_switches(debug: str, level: str, shown: list[str], hidden: list[str]) -> None:
    done = in_process(["-c", _CHOOSE], NVTE_DEBUG=debug, NVTE_DEBUG_LEVEL=level)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stderr for text in shown), done.stderr
    assert not any(text in done.stderr for text in hidden), done.stderr


def test_unknown_debug_level_is_said() -> None:
    done = in_process(["-c", "import te_attn_ops"], NVTE_DEBUG="1", NVTE_DEBUG_LEVEL="9")
    assert done.returncode == 0 and "NVTE_DEBUG_LEVEL=9 is unknown" in done.stderr
