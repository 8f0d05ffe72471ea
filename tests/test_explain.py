"""``explain``: what it says of tensors, params and modules, and that it says what the call does."""

from __future__ import annotations

import builtins
import json
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import te_attn_ops
from te_attn_ops import AttentionParams, Explanation, attention, environment, explain, selection, thd_attention
from te_attn_ops.backends import BACKEND_NAMES
from te_attn_ops.masks import Band
from te_attn_ops.modules.dot_product_attention import DotProductAttention
from te_attn_ops.params import seqlen_bucket
from te_attn_ops.testing import CAUSAL, FULL, PackedCase, build
from tests.stubs import Stub, fresh_choices, install, refuse_all, refuse_native, refuse_padded  # noqa: F401


def tensors(head_dim_qk: int = 24, head_dim_v: int = 16, heads: int = 2, requires_grad: bool = False) -> tuple[Tensor, ...]:
    q, k = (torch.randn(9, heads, head_dim_qk, requires_grad=requires_grad) for _ in range(2))
    return q, k, torch.randn(9, heads, head_dim_v), torch.tensor([0, 4, 9], dtype=torch.int32)


def mixed() -> list[dict[str, Any]]:
    return [
        {"sequence_ids": torch.tensor([0]), "mask_type": "padding_causal", "window_size": None},
        {"sequence_ids": torch.tensor([1]), "mask_type": "padding", "window_size": (2, 1)},
    ]


# ------------------------------------------------------------------------------------------------------------- three subjects
def test_tensors_are_explained_by_the_very_request_of_the_call() -> None:
    q, k, v, cu = tensors(requires_grad=True)
    found = explain(q, k, v, cu, max_seqlen_q=5, return_max_logit=True, deterministic=True)
    with selection.recording(stop=False) as requests:
        thd_attention(q, k, v, cu, max_seqlen_q=5, return_max_logit=True, deterministic=True)
    assert [found.request] == requests
    p = found.params
    assert (p.head_dim_qk, p.head_dim_v, p.num_heads, p.is_training) == (24, 16, 2, True)
    assert p.deterministic and p.return_max_logit and p.equal_lengths
    assert p.max_seqlen_q == seqlen_bucket(5) == 128


def test_nothing_is_computed_or_chosen_for_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    install(monkeypatch, Stub("flash4", before_forward=calls.append), Stub("unfused", before_forward=calls.append))
    q, k, v, cu = tensors()
    assert explain(q, k, v, cu, max_seqlen_q=5).winner["backend"] == "flash4"  # type: ignore[index]
    assert not calls


def test_a_call_that_was_chosen_before_is_explained_too() -> None:
    q, k, v, cu = tensors()
    thd_attention(q, k, v, cu, max_seqlen_q=5)
    probes = selection.probe_count()
    assert explain(q, k, v, cu, max_seqlen_q=5).winner is not None
    assert selection.probe_count() == probes, "explaining a known choice probed again"


def test_grad_mode_decides_training_as_in_the_call() -> None:
    q, k, v, cu = tensors(requires_grad=True)
    assert explain(q, k, v, cu, max_seqlen_q=5).params.is_training
    with torch.no_grad():
        assert not explain(q, k, v, cu, max_seqlen_q=5).params.is_training


def test_wrong_arguments_raise_what_the_call_raises() -> None:
    q, k, v, cu = tensors()
    with pytest.raises(ValueError, match="unknown"):
        explain(q, k, v, cu, max_seqlen_q=5, backend="flash5")
    with pytest.raises(ValueError, match="thd_attention_policy_dispatch"):
        explain(q, k, v, cu, max_seqlen_q=5, thd_attention_policy_dispatch="fast")
    with pytest.raises(TypeError, match="cu_seqlens_q must be a tensor"):
        explain(q, k, v, [0, 4, 9], max_seqlen_q=5)
    assert not selection.is_recording()


@pytest.mark.parametrize("options", [{"backend": "nope"}, {"selection": "fast"}, {"thd_attention_policy_dispatch": "x"}])
def test_wrong_overrides_of_params(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="unknown"):
        explain(AttentionParams(), **options)


def test_another_subject_is_an_error() -> None:
    with pytest.raises(TypeError, match="got dict"):
        explain({})


def test_params() -> None:
    found = explain(AttentionParams(device_type="cpu", sm=0, head_dim_qk=192, head_dim_v=128), pad_head_dim=True)
    assert found.winner is not None
    assert (found.winner["backend"], found.winner["head_dim_padded"]) == ("unfused", 192)
    assert found.request.pad_head_dim is True


def test_module_compiled_or_not() -> None:
    module = DotProductAttention(2, (24, 16), qkv_format="thd", attn_mask_type="padding_causal")
    q, k, v, cu = tensors()
    arguments = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 5, "max_seqlen_kv": 5}
    found = explain(module, q, k, v, **arguments)
    assert (found.params.head_dim_qk, found.params.head_dim_v, found.further) == (24, 16, ())
    compiled = torch.compile(module, backend="eager")
    compiled(q, k, v, **arguments)
    assert explain(compiled, q, k, v, **arguments).request == found.request


def test_module_with_several_attention_calls() -> None:
    class Two(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
            first = thd_attention(q, k, v, cu, max_seqlen_q=5)
            again = thd_attention(q, k, v, cu, max_seqlen_q=5)
            return first + again + thd_attention(q, k, v, cu, max_seqlen_q=5, attn_mask_type="padding")

    found = explain(Two(), *tensors())
    assert [e.params.bands[0].describe() for e in (found, *found.further)] == ["causal bottom_right", "full"]
    assert str(found).count("environment:") == 2
    assert [d["winner"]["backend"] for d in found.to_dict()["further"]] == ["unfused"]


def test_module_that_nothing_can_run_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Stub("flash2", refuse_all))
    module = DotProductAttention(2, (24, 16), qkv_format="thd", attn_mask_type="padding_causal")
    q, k, v, cu = tensors()
    found = explain(module, q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=5, max_seqlen_kv=5)
    assert found.winner is None
    assert "no backend can run this call" in str(found)


def test_module_without_attention() -> None:
    with pytest.raises(RuntimeError, match="no attention call"):
        explain(torch.nn.Linear(2, 2), torch.zeros(1, 2))


def test_not_under_compile() -> None:
    def call(x: Tensor) -> Tensor:
        explain(AttentionParams(device_type="cpu", sm=0))
        return x

    with pytest.raises(Exception, match="outside the compiled function"):
        torch.compile(call, backend="eager", fullgraph=True)(torch.zeros(1))


# --------------------------------------------------------------------------------------------------------------- what it says
def test_dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Stub("flash4", refuse_padded), Stub("flash2", refuse_native), Stub("unfused"))
    q, k, v, cu = tensors()
    found = json.loads(json.dumps(explain(q, k, v, cu, max_seqlen_q=5).to_dict()))
    assert {"candidates", "winner", "params", "environment", "advice", "overrides"} <= found.keys()
    for candidate in found["candidates"]:
        assert candidate.keys() >= {"backend", "head_dim_padded", "dispatch", "refusals", "rank", "ms"}
        assert (candidate["rank"] is None) == bool(candidate["refusals"])
        assert candidate["ms"] is None
    asked = {(c["backend"], c["head_dim_padded"]) for c in found["candidates"]}
    assert asked == {(name, width) for name in BACKEND_NAMES for width in (0, 24)}, "both probes of every backend"
    reasons = {(c["backend"], c["head_dim_padded"]): c["refusals"] for c in found["candidates"]}
    assert reasons["flash2", 0] == ["needs equal head dims, found 24 and 16"] and reasons["flash2", 24] == []
    assert reasons["flash4", 24] == ["refuses equal head dims, found 24"] and reasons["flash4", 0] == []
    assert reasons["cudnn", 0] == ["not installed"]
    winner = found["winner"]
    assert (winner["backend"], winner["backends"], winner["head_dim_padded"]) == ("flash4", ["flash4"], 0)
    assert (winner["dispatch"], winner["ms"]) == ("padded", None)
    assert winner["rank"] == min(c["rank"] for c in found["candidates"] if c["rank"] is not None)
    assert found["params"]["dtype"] == "float32" and found["params"]["bands"] == [{"left": None, "right": 0, "bottom_right": True}]


def test_text_shows_both_probes_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Stub("flash4", refuse_padded), Stub("flash2", refuse_native), Stub("unfused"))
    q, k, v, cu = tensors()
    lines = str(explain(q, k, v, cu, max_seqlen_q=5)).splitlines()
    assert lines[0] == (
        "head_dim 24/16, float32, 2 heads, max_seqlen 128, causal, inference, cpu: "
        "flash4, native widths, padded dispatch (static rank)"
    )
    assert lines[2].split("  ")[0] == "backend" and "native 24/16" in lines[2] and "padded to 24" in lines[2]
    rows = {line.split()[0]: line for line in lines[4:11]}
    assert "rank 1.00  <- chosen" in rows["flash4"] and "refuses equal head dims" in rows["flash4"]
    assert "needs equal head dims" in rows["flash2"] and "rank" in rows["flash2"]
    assert "not installed" in rows["cudnn"] and "the same" in rows["cudnn"]
    assert [line.split()[0] for line in lines[4:7]] == ["flash4", "flash2", "unfused"], "accepted ones first, best first"
    assert "environment: all variables at their defaults" in lines


def test_equal_widths_are_probed_once() -> None:
    q, k, v, cu = tensors(16, 16)
    found = explain(q, k, v, cu, max_seqlen_q=5)
    assert {c.head_dim_padded for c in found.candidates} == {0}
    assert "padded to" not in str(found)


def test_policies_with_backends_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_windows(p: AttentionParams) -> Any:
        if any(not band.is_full and not band.is_causal for band in p.bands):
            yield "takes no window"

    install(monkeypatch, Stub("flash4", refuse_windows), Stub("flash2"))
    q, k, v, cu = tensors(16, 16)
    found = explain(q, k, v, cu, max_seqlen_q=5, thd_attention_policies=mixed())
    assert found.winner is not None
    assert (found.winner["backend"], found.winner["backends"]) == ("flash4/flash2", ["flash4", "flash2"])
    assert [c.backend for c in found.winners] == ["flash4", "flash2"]
    text = str(found)
    assert "1: window (2, 1) " in text and "bottom_right" not in text and "takes no window" in text and text.count("<- chosen") == 2
    policies = {tuple(c["policies"]) for c in found.to_dict()["candidates"] if c["dispatch"] == "padded"}
    assert policies == {(0,), (1,)}


def test_equal_policies_are_one_row() -> None:
    q, k, v, cu = tensors(16, 16)
    header, body = explain(q, k, v, cu, max_seqlen_q=5, thd_attention_policies=mixed()).table()
    assert header[:3] == ["backend", "dispatch", "policies"]
    assert [row[2] for row in body if row[0] == "unfused"] == ["all"]
    assert [row[1] for row in body if row[0] == "flash2"] == ["padded", "grouped"]


@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
def test_dispatch_override_is_explained(dispatch: str) -> None:
    q, k, v, cu = tensors(16, 16)
    found = explain(q, k, v, cu, max_seqlen_q=5, thd_attention_policies=mixed(), thd_attention_policy_dispatch=dispatch)
    assert found.winner is not None and found.winner["dispatch"] == dispatch
    assert f"override: thd_attention_policy_dispatch='{dispatch}'" in str(found)


def test_why_single_launch_is_not_taken() -> None:
    q, k, v, cu = tensors(16, 16)
    found = explain(q, k, v, cu, max_seqlen_q=5, thd_attention_policies=mixed())
    single = [c for c in found.candidates if c.dispatch == "single_launch"]
    assert single and all(c.refusals for c in single)


def test_no_backend_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Stub("flash2", refuse_native), Stub("cudnn", refuse_all))
    q, k, v, cu = tensors()
    found = explain(q, k, v, cu, max_seqlen_q=5, pad_head_dim=False)
    assert (found.winner, found.winners, found.to_dict()["winner"]) == (None, (), None)
    assert "no backend can run this call" in str(found) and "needs equal head dims" in str(found)
    assert found.advice == ("flash2 padded to 24 (can run it): leave pad_head_dim open",)
    assert "instead: flash2 padded to 24" in str(found) and "faster:" not in str(found)


# -------------------------------------------------------------------------------------------------- environment and advice
def test_environment_variables_are_named_in_the_order_of_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, cu = tensors()
    names = [*environment.SWITCHES, "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "TE_ATTN_OPS_SELECTION"]
    assert list(explain(q, k, v, cu, max_seqlen_q=5).environment) == names
    for name in names[:7]:
        with monkeypatch.context() as patch:
            patch.setenv(name, "0")
            found = explain(q, k, v, cu, max_seqlen_q=5)
            assert [key for key, value in found.environment.items() if value == "0"] == [name]
            assert f"environment: {name}=0" in str(found)


def test_what_the_environment_keeps_out(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Stub("flash4"), Stub("unfused"))
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    q, k, v, cu = tensors()
    found = explain(q, k, v, cu, max_seqlen_q=5)
    assert found.winner is not None and found.winner["backend"] == "unfused"
    assert "disabled by NVTE_FLASH_ATTN=0" in str(found)
    assert list(found.advice) == ["flash4 (a fused kernel): unset NVTE_FLASH_ATTN"]


def test_an_override_that_costs_speed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Stub("flash4"), Stub("flash2"))
    found = explain(AttentionParams(), backend="flash2")
    assert found.winner is not None and found.winner["backend"] == "flash2"
    (line,) = found.advice
    assert line.startswith("flash4 (expected ") and line.endswith(" as fast): leave backend open")
    assert explain(AttentionParams(), backend="flash4").advice == ()


def test_what_stands_in_the_way_is_named_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever follows the advice gets what it promises."""
    install(monkeypatch, Stub("flash4"), Stub("flash2", refuse_native), Stub("unfused"))
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    widths = AttentionParams(head_dim_qk=192, head_dim_v=128)
    (line,) = explain(widths, backend="unfused", pad_head_dim=True).advice
    assert line == "flash4 (a fused kernel): leave backend and pad_head_dim open, unset NVTE_FLASH_ATTN"
    (line,) = explain(widths, backend="unfused", pad_head_dim=False).advice
    assert line == "flash4 (a fused kernel): leave backend open, unset NVTE_FLASH_ATTN"
    assert explain(widths, backend="flash4").advice == (), "a named backend ignores the switches"
    monkeypatch.delenv("NVTE_FLASH_ATTN")
    (line,) = explain(widths, backend="unfused", pad_head_dim=False).advice
    assert line == "flash4 (a fused kernel): leave backend open"
    winner = explain(widths, pad_head_dim=False).winner
    assert winner is not None and winner["backend"] == "flash4"


def test_a_named_backend_that_cannot_run_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Stub("unfused"))
    on_cpu = explain(AttentionParams(device_type="cpu", sm=0), backend="flash4")
    assert on_cpu.winner is None and on_cpu.footnotes()[-1] == "instead: unfused (can run it): leave backend open"
    on_gpu = explain(AttentionParams(), backend="flash4")
    assert [line.split(":")[0] for line in on_gpu.advice] == ["flash4 is not installed (may run it)", "unfused (can run it)"]


@pytest.mark.filterwarnings("ignore:attention runs unfused on a GPU")
@pytest.mark.parametrize(
    ("sm", "installed", "advised"),
    [
        (90, (), ["flash2", "flash3", "flash4", "cudnn"]),
        (90, ("flash2",), ["flash3", "flash4", "cudnn"]),
        (90, ("flash4",), []),
        (80, (), ["flash2"]),
        (80, ("torch_flash",), ["flash2"]),
        (80, ("flash2",), []),
        (100, ("flash4",), ["cudnn"]),
        (100, ("cudnn",), []),
        (75, (), []),
    ],
)
def test_what_to_install(monkeypatch: pytest.MonkeyPatch, sm: int, installed: tuple[str, ...], advised: list[str]) -> None:
    install(monkeypatch, Stub("unfused"), *(Stub(name) for name in installed))
    found = explain(AttentionParams(sm=sm, head_dim_qk=128, head_dim_v=128))
    assert [line.split(" is not installed")[0] for line in found.advice] == advised
    assert all("pip install" in line or "build" in line for line in found.advice)


@pytest.mark.filterwarnings("ignore:attention runs unfused on a GPU")
def test_nothing_is_advised_that_cannot_take_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Stub("unfused"))
    assert explain(AttentionParams(device_type="cpu", sm=0)).advice == ()
    assert explain(AttentionParams(dtype=torch.float32)).advice == ()
    narrow = explain(AttentionParams(head_dim_qk=192, head_dim_v=128, sm=80), pad_head_dim=False)
    assert narrow.advice == (), "flash2 takes unequal widths only padded"


# ------------------------------------------------------------------------------------------------------------------ on screen
def test_print_with_rich(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    q, k, v, cu = tensors()
    explain(q, k, v, cu, max_seqlen_q=5).print()
    shown = capsys.readouterr().out
    assert "━" in shown and "unfused" in shown and "<- chosen" in shown


def test_print_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def no_rich(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "rich":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_rich)
    q, k, v, cu = tensors()
    found = explain(q, k, v, cu, max_seqlen_q=5)
    found.print()
    assert capsys.readouterr().out == f"{found}\n"


def test_markup_in_a_reason_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")

    def refuse(p: AttentionParams) -> Any:
        yield "[bold]x[/bold]"

    install(monkeypatch, Stub("flash4", refuse), Stub("unfused"))
    explain(AttentionParams(device_type="cpu", sm=0)).print()
    assert "[bold]x[/bold]" in capsys.readouterr().out


def test_public_names() -> None:
    assert te_attn_ops.explain is explain and te_attn_ops.Explanation is Explanation


def test_bands_in_a_headline() -> None:
    p = AttentionParams(device_type="cpu", sm=0, bands=(Band(None, 0), Band(3, 4, False)), equal_lengths=False, has_gaps=True)
    line = explain(p).headline()
    assert "causal bottom_right + window (3, 4) top_left" in line and "has_gaps, unequal lengths" in line


def test_no_alignment_is_named_where_both_are_the_same() -> None:
    """padding_causal is top-left, and params spell it bottom-right."""
    q, k, v, cu = tensors()
    for mask_type in ("padding_causal", "padding_causal_bottom_right"):
        line = explain(q, k, v, cu, max_seqlen_q=5, attn_mask_type=mask_type).headline()
        assert ", causal, " in line and "top_left" not in line and "bottom_right" not in line
    line = explain(q, k, v, cu, cu.clone(), max_seqlen_q=5, max_seqlen_kv=5).headline()
    assert ", causal top_left, " in line


# -------------------------------------------------------------------------------------------------------------------- logging
def test_one_info_line_per_new_choice(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v, cu = tensors()
    with caplog.at_level(logging.INFO, logger="te_attn_ops"):
        for _ in range(3):
            thd_attention(q, k, v, cu, max_seqlen_q=5)
    (record,) = [r for r in caplog.records if r.name == "te_attn_ops"]
    assert record.levelno == logging.INFO
    assert record.getMessage() == "head_dim_qk=24 head_dim_v=16 float32 training=False: unfused, native widths, padded"


def test_debug_names_each_refusal(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v, cu = tensors(16, 16)
    with caplog.at_level(logging.DEBUG, logger="te_attn_ops"):
        thd_attention(q, k, v, cu, max_seqlen_q=5)
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG and r.name == "te_attn_ops"]
    assert "not flash4 (native widths, padded): not installed" in messages


def test_a_recorded_call_is_not_kept_from_the_cache() -> None:
    q, k, v, cu = tensors()
    explain(q, k, v, cu, max_seqlen_q=5)
    assert not attention._DECISIONS, "a recorded call left a decision behind"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"head_dim_qk": -3}, ValueError, "head_dim_qk must be a positive int, got -3"),
        ({"device_type": "tpu"}, ValueError, "device_type must be a device's type, as 'cpu' or 'cuda', got 'tpu'"),
        ({"dtype": "bf16"}, TypeError, "dtype must be a torch.dtype, got str 'bf16'"),
    ],
)
def test_wrong_params_are_named(fields: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AttentionParams(**fields)
    with pytest.raises(TypeError, match="pad_head_dim must be a bool or None, got str 'x'"):
        explain(AttentionParams(device_type="cpu"), pad_head_dim="x")


@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        ((0, 0, 1), "each policy's sequences on flash2: one run of neighbours"),
        ((0, 1, 0), "each policy's sequences on flash2: entries that attend to nothing for the rows between, then copies"),
    ],
)
def test_how_cu_seqlens_tell_a_policys_sequences(monkeypatch: pytest.MonkeyPatch, owner: tuple[int, ...], expected: str) -> None:
    copying = Stub("flash2")
    copying.in_place = False
    install(monkeypatch, copying)
    inputs = build(PackedCase((3, 4, 5), masks=(CAUSAL, FULL), owner=owner))
    found = explain(inputs.q, inputs.k, inputs.v, **inputs.arguments())
    assert expected in str(found)
    assert found.params.contiguous is (owner == (0, 0, 1)) is ("contiguous" in found.headline())
    copying.in_place = True
    assert "each policy's sequences" not in str(explain(inputs.q, inputs.k, inputs.v, **inputs.arguments()))
