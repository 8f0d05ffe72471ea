"""``python -m benchmarks``: arguments, processes, comparison; and the peers of the mixed benchmark, without a GPU."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import __main__ as command, common, mixed, peers
from te_attn_ops import Band, thd_attention
from te_attn_ops.masks import resolve_mask
from te_attn_ops.testing import CAUSAL, FULL, Mask, PackedInputs, Work, assert_close, build, reference, visible

ROW = {
    "work": "A",
    "tokens": 512,
    "backend": "flash4",
    "dispatch": "padded",
    "graphed": True,
    "backward": True,
    "selection": None,
}


def mixed_file(*rows: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"device": "X", "versions": {"torch": "1"}, "rows": [{**ROW, **row} for row in rows], **fields}


def write(path: Path, data: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


def run_wrong(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        command.main(argv)
    assert stop.value.code == 2
    return capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------------ comparison
def test_rows_match_on_every_identifying_field() -> None:
    old = mixed_file(
        {"ms": 2.0},
        {"ms": 7.0, "graphed": False},
        {"ms": 4.0, "new_geometry": True, "layers": 1, "plan_ms": 3.0},
        {"ms": 9.0, "new_geometry": True, "layers": 32, "plan_ms": 3.0},
        {"ms": None, "error": "no kernel", "backend": "flash2"},
        {"ms": 5.0, "work": "B"},
    )
    new = mixed_file(
        {"ms": 9.9, "new_geometry": True, "layers": 32, "plan_ms": 1.0},
        {"ms": 4.0, "new_geometry": True, "layers": 1, "plan_ms": 1.0, "host_us": 8.0},
        {"ms": 1.0, "ms_spread": 0.5, "peak_bytes": 3},
        {"ms": 7.1, "graphed": False},
        {"ms": 1.0, "backend": "flash2"},
        {"ms": 1.0, "num_heads": 4},
    )
    found = command.compare(old, new)
    seen = [(c.row.get("layers"), c.row["graphed"], c.old_ms, c.new_ms, c.flag) for c in found.changes]
    assert seen == [
        (32, True, 9.0, 9.9, "slower"),
        (1, True, 4.0, 4.0, ""),
        (None, True, 2.0, 1.0, "faster"),
        (None, False, 7.0, 7.1, ""),
    ]
    assert (found.only_old, found.only_new, found.differences) == (1, 2, [])


@pytest.mark.parametrize(("new_ms", "flag"), [(104.9, ""), (105.1, "slower"), (95.1, ""), (94.9, "faster")])
def test_changes_of_more_than_five_percent_are_flagged(new_ms: float, flag: str) -> None:
    assert command.Change({}, 100.0, new_ms).flag == flag


def test_an_absent_field_is_a_null_one() -> None:
    row = {name: value for name, value in ROW.items() if name != "selection"}
    found = command.compare(mixed_file({"ms": 1.0}), {"rows": [{**row, "ms": 1.0}]})
    assert len(found.changes) == 1
    assert found.differences == ["device: X before, None now", "torch: 1 before, None now"]


def test_padding_results_are_compared_with_their_work() -> None:
    row = {"head_dim_qk": 192, "head_dim_v": 128, "training": True, "backend": "cudnn", "padded": False, "ms": 1.0}
    cost = {"compiled": True, "head_dim_qk": 192, "head_dim_v": 128, "backend": "cudnn", "ms": 3.0, "ms_extra": 0.1}
    choice = {**row, "selection": "static", "of_best": 1.0}
    old = {"benchmark": "padding", "work": {"tokens": 9}, "rows": [row], "pad_cost": [cost], "choices": [choice]}
    new = {**old, "pad_cost": [{**cost, "ms": 6.0, "ms_extra": 0.2}]}
    found = command.compare(old, new)
    assert [(c.row["table"], c.ratio) for c in found.changes] == [("rows", 1.0), ("pad_cost", 2.0)]
    assert not command.compare(old, {**new, "work": {"tokens": 10}}).changes


def test_layers_results_are_compared_with_their_sizes() -> None:
    old = {"sizes": {"layers": 8}, "variants": {"mha": {"step_ms": {"causal": 10.0, "full": 12.0}}}}
    new = {"sizes": {"layers": 8}, "variants": {"mha": {"step_ms": {"causal": 11.0}}, "mla": {"step_ms": {"causal": 1.0}}}}
    found = command.compare(old, new)
    assert [(c.row["variant"], c.row["batch"], c.ratio) for c in found.changes] == [("mha", "causal", 1.1)]
    assert (found.only_old, found.only_new) == (1, 1)
    assert not command.compare(old, {**new, "sizes": {"layers": 9}}).changes


def test_report_names_what_varies_and_counts() -> None:
    old = mixed_file({"ms": 1.0}, {"ms": 2.0, "backend": "cudnn"}, {"ms": 1.0, "work": "B"})
    new = mixed_file({"ms": 1.2}, {"ms": 2.0, "backend": "cudnn"}, versions={"torch": "2"})
    text = command.report("mixed.json", command.compare(old, new))
    assert "torch: 1 before, 2 now" in text
    assert "In all rows: work A, tokens 512, dispatch padded" in text
    assert "| backend | old ms | new ms | new / old | change |" in text
    assert "| flash4 | 1.000 | 1.200 | 1.200 | slower |" in text and "| cudnn | 2.000 | 2.000 | 1.000 |  |" in text
    assert "1 of 2 rows changed by more than 5%: 1 slower, 0 faster; median of new / old 1.100." in text
    assert "Without a partner: 1 old rows, 0 new rows." in text
    nothing = command.report("mixed.json", command.compare(old, mixed_file({"ms": 1.0, "work": "C"})))
    assert "0 of 0 rows" in nothing and "|" not in nothing


def test_the_committed_results_are_understood() -> None:
    """A field that nobody told ``MEASURED`` of would make rows of two runs strangers: times vary, so none may identify."""
    for path in common.RESULTS.glob("*.json"):
        data = json.loads(path.read_text())
        if command.kind_of(data) in (None, "gpu_tests"):
            continue
        rows = command.timed_rows(data)
        assert len(rows) == sum(bool(row.get("ms")) for row in command._rows(data)), (
            f"{path.name}: rows that cannot be told apart"
        )
        floats = {name for row in rows.values() for name, value in command.identity(row).items() if isinstance(value, float)}
        assert not floats, f"{path.name}: {floats} identify rows"


# -------------------------------------------------------------------------------------------------------------- only comparing
def test_only_compare_of_files_and_folders(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    old = write(tmp_path / "old" / "mixed_h200.json", mixed_file({"ms": 2.0}))
    new = write(tmp_path / "new" / "mixed_h200.json", mixed_file({"ms": 3.0}))
    write(tmp_path / "old" / "gpu_tests.json", {"passed": 1, "failed": 0, "skipped": 0})
    write(tmp_path / "new" / "gpu_tests.json", {"passed": 1, "failed": 0, "skipped": 0})
    write(tmp_path / "new" / "layers_h200.json", {"variants": {}})
    (tmp_path / "old" / "broken.json").write_text("[")
    write(tmp_path / "new" / "broken.json", [1])
    for sides in ((old, new), (old.parent, new.parent), (old, new.parent), (old.parent, new)):
        assert command.main(["--only-compare", *map(str, sides)]) == 0
        out = capsys.readouterr().out
        assert "## mixed_h200.json: 1 rows of both runs" in out and "1 slower, 0 faster" in out and out.count("##") == 1


def test_only_compare_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    good = str(write(tmp_path / "a" / "mixed_x.json", mixed_file({"ms": 2.0})))
    layers = str(write(tmp_path / "layers_x.json", {"variants": {"mha": {"step_ms": {"full": 1.0}}}}))
    tests = str(write(tmp_path / "gpu_tests.json", {"passed": 1, "failed": 0, "skipped": 0}))
    other = str(write(tmp_path / "other.json", {"loss": 1.0}))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "there is no such file" in run_wrong(capsys, "--only-compare", good, str(tmp_path / "none.json"))
    assert "there is no such file" in run_wrong(capsys, "--only-compare", good, str(empty))
    assert "no readable JSON of a benchmark" in run_wrong(capsys, "--only-compare", other, good)
    assert "has no times to compare (gpu_tests)" in run_wrong(capsys, "--only-compare", good, tests)
    assert "the old file is of benchmarks.mixed, the new one of benchmarks.layers" in run_wrong(
        capsys, "--only-compare", good, layers
    )
    assert "share no results file with times" in run_wrong(capsys, "--only-compare", str(empty), str(tmp_path / "a"))
    assert "without --compare and --only" in run_wrong(capsys, "--only-compare", good, good, "--only", "mixed")
    assert "expected 2 arguments" in run_wrong(capsys, "--only-compare", good)


# --------------------------------------------------------------------------------------------------------------------- running
@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(common, "device_name", lambda: "NVIDIA H200 NVL")


def stand_in(results: Mapping[str, tuple[Any, int]]) -> Callable[[str, Path], list[str]]:
    """In place of each benchmark: a process that tells its name, writes these results and ends with this exit code."""

    def command_of(name: str, path: Path) -> list[str]:
        data, code = results[name]
        script = f"import sys; print('told by {name}'); print('and its errors', file=sys.stderr)\n"
        if data is not None:
            script += f"open({str(path)!r}, 'w').write({json.dumps(data)!r})\n"
        return [sys.executable, "-c", script + f"sys.exit({code})"]

    return command_of


TESTS_PASSED = {"passed": 3, "failed": 0, "skipped": 1}
LAYERS = {"variants": {"mha": {"step_ms": {"full": 2.0}, "mixed_over_mean_uniform": 1.02}}}


@pytest.mark.usefixtures("device")
def test_runs_all_and_sums_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    padding = {"benchmark": "padding", "rows": [{"ms": 1.0}], "failures": [], "summary": {"static_of_best_worst": 1.25}}
    results = {
        "mixed": (mixed_file({"ms": 1.0}, {"ms": None, "error": "no"}), 0),
        "padding": (padding, 0),
        "layers": (LAYERS, 0),
        "gpu_tests": (TESTS_PASSED, 0),
    }
    monkeypatch.setattr(command, "command_of", stand_in(results))
    assert command.main(["--out-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("told by")] == [
        f"told by {name}" for name in command.BENCHMARKS
    ]
    assert out.count("and its errors") == 4
    assert "[4/4] benchmarks.gpu_tests" in out
    assert "1 rows timed, 1 that cannot run" in out
    assert "1 rows, 0 failures; the static choice takes at most 1.25x the best row's time" in out
    assert "mha: mixed is 1.020x the mean of uniform" in out
    assert "3 passed, 0 failed, 1 skipped" in out
    names = {"mixed_h200_nvl.json", "padding_h200_nvl.json", "layers_h200_nvl.json", "gpu_tests.json"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_works_measured_again_replace_their_rows_and_both_commands_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mixed.json"

    def write(command: str, *works: tuple[str, float]) -> None:
        named, rows = mixed.merge(path, command, [{"work": work, "ms": ms} for work, ms in works])
        common.write_json(path, {"command": named, "rows": rows})

    write("all", ("A", 1.0))
    write("all", ("A", 1.0), ("B", 2.0))
    write("B again", ("B", 3.0))
    write("B again", ("B", 4.0))
    assert common.read_json(path) == {"command": "all; B again", "rows": [{"work": "A", "ms": 1.0}, {"work": "B", "ms": 4.0}]}
    write("all", ("A", 5.0), ("B", 6.0))
    assert common.read_json(path) == {"command": "all", "rows": [{"work": "A", "ms": 5.0}, {"work": "B", "ms": 6.0}]}


@pytest.mark.usefixtures("device")
def test_a_failure_is_told_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The file that a failed benchmark did not write anew is not taken for its result."""
    write(tmp_path / "layers_h200_nvl.json", LAYERS)
    monkeypatch.setattr(command, "command_of", stand_in({"layers": (None, 3), "gpu_tests": (TESTS_PASSED, 0)}))
    arguments = ["--only", "layers", "gpu_tests", "layers", "--out-dir", str(tmp_path), "--compare", str(tmp_path)]
    assert command.main(arguments) == 1
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("| layers "))
    assert "exit code 3" in row and "wrote no results" in row
    assert "3 passed, 0 failed, 1 skipped" in out and "rows of both runs" not in out and out.count("told by layers") == 1


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("folder", [False, True])
def test_compares_with_what_it_overwrites(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: bool
) -> None:
    path = write(tmp_path / "mixed_h200_nvl.json", mixed_file({"ms": 2.0}))
    results = {"mixed": (mixed_file({"ms": 1.0}), 0), "gpu_tests": (TESTS_PASSED, 0)}
    monkeypatch.setattr(command, "command_of", stand_in(results))
    source = str(tmp_path if folder else path)
    assert command.main(["--only", "mixed", "gpu_tests", "--out-dir", str(tmp_path), "--compare", source]) == 0
    assert "| 2.000 | 1.000 | 0.500 | faster |" in capsys.readouterr().out


def test_needs_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "run", lambda outputs: pytest.fail("ran something"))
    assert "needs a CUDA device" in run_wrong(capsys, "--out-dir", str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        mixed.main(["--no-peers", "--no-flex", "--out", str(tmp_path / "x.json")])
    assert stop.value.code == 2 and "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.usefixtures("device")
def test_argument_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(command, "run", lambda outputs: pytest.fail("ran something"))
    layers = str(write(tmp_path / "layers_x.json", LAYERS))
    assert "invalid choice: 'speed'" in run_wrong(capsys, "--only", "speed")
    assert "is not a folder" in run_wrong(capsys, "--out-dir", layers)
    assert "there is no such file" in run_wrong(capsys, "--compare", str(tmp_path / "none"))
    assert "is of benchmarks.layers, which does not run (--only mixed)" in run_wrong(
        capsys, "--only", "mixed", "--compare", layers
    )
    assert "holds none of mixed_h200_nvl.json" in run_wrong(capsys, "--only", "mixed", "--compare", str(tmp_path))


def test_a_results_file_names_no_machine_path() -> None:
    """Each benchmark writes its command into its results."""
    assert command.command_of("mixed", common.RESULTS / "mixed_x.json")[2:] == [
        "benchmarks.mixed",
        "--out",
        "docs/results/mixed_x.json",
    ]
    assert command.command_of("mixed", Path("/elsewhere/x.json"))[-1] == "/elsewhere/x.json"


# ------------------------------------------------------------------------------------------------------------- peers: masks
MASKS = (
    CAUSAL,
    FULL,
    Mask("padding_causal", (3, 0)),
    Mask("padding", (2, 4)),
    Mask("padding", (0, 0)),
    Mask("padding_causal", (0, 0)),
)


def band_of(mask: Mask) -> Band:
    return resolve_mask(*mask).band.canonical(True)


def window_visible(causal: bool, window_size: tuple[int, int], length: int) -> Tensor:
    """FlashAttention's documented rule for equal lengths: row i sees keys [i - left, i + right], -1 is unbounded."""
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    left, right = window_size
    seen = ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))
    return seen & (j <= i) if causal else seen


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks_of_the_peers_mean_the_same(mask: Mask) -> None:
    expected = visible(mask, 9, 9)
    flash = {"window_size": (-1, -1), **peers.flash_attn_mask(band_of(mask))}
    assert torch.equal(window_visible(flash["causal"], flash["window_size"], 9), expected)
    windows = peers.varlen_attn_mask(band_of(mask), {"window_size": None, "scale": None})
    assert windows.keys() == {"window_size"} and isinstance(windows["window_size"], tuple)
    assert torch.equal(window_visible(False, windows["window_size"], 9), expected)


def test_causal_is_spelled_as_the_libraries_do() -> None:
    """varlen_attn takes exactly (-1, 0) for its causal kernel."""
    assert peers.varlen_attn_mask(Band(None, 0), {"window_size": None}) == {"window_size": (-1, 0)}
    assert peers.varlen_attn_mask(Band(), {"window_size": None}) == {"window_size": (-1, -1)}
    assert peers.flash_attn_mask(Band(None, 0)) == {"causal": True}
    assert peers.flash_attn_mask(Band(256, 0)) == {"causal": False, "window_size": (256, 0)}
    assert peers.window_of(Band(None, 5)) == (-1, 5)


def test_varlen_attn_without_windows() -> None:
    assert peers.varlen_attn_mask(Band(None, 0), {"is_causal": None}) == {"is_causal": True}
    assert peers.varlen_attn_mask(Band(), {"is_causal": None}) == {"is_causal": False}
    with pytest.raises(NotImplementedError, match=r"has no windows, found window \(3, 0\)"):
        peers.varlen_attn_mask(Band(3, 0), {"is_causal": None})


def test_a_diagonal_at_the_top_left_is_refused() -> None:
    with pytest.raises(ValueError, match="causal top_left: FlashAttention's windows are aligned bottom-right"):
        peers.flash_attn_mask(Band(None, 0, bottom_right=False))
    assert peers.window_of(Band(bottom_right=False)) == (-1, -1)


# ------------------------------------------------------------------------------------------------------- peers: computations
def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """Dense attention of each sequence under FlashAttention's mask arguments."""
    assert q.shape[2] == v.shape[2], "these libraries take one width"
    bounds, outs = cu_seqlens.tolist(), []
    repeats = q.shape[1] // k.shape[1]
    for start, end in zip(bounds, bounds[1:]):
        part_k, part_v = (x[start:end].repeat_interleave(repeats, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start:end], part_k) * q.shape[2] ** -0.5
        scores = scores.masked_fill(~window_visible(causal, window_size, end - start), float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), part_v))
    return torch.cat(outs)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    assert max_q == max_k == int(cu_q.diff().max())
    return packed(q, k, v, cu_q, causal, window_size)


def varlen_attn_2_11(
    query: Any,
    key: Any,
    value: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: Any = None,
    window_size: Any = (-1, -1),
) -> Tensor:
    return packed(query, key, value, cu_q, False, window_size)


def varlen_attn_2_12(
    query: Any,
    key: Any,
    value: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: Any = None,
    window_size: Any = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return packed(query, key, value, cu_q, False, window_size)


class DotProductAttention:
    """TransformerEngine's signature; computes by way of the public function."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.1,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
    ) -> None:
        assert attention_dropout == 0.0 and "padding" in attn_mask_type
        self.channels = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.forward(*args, **kwargs)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        *,
        qkv_format: str,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        thd_attention_policies: list[dict[str, Any]],
        thd_attention_policy_dispatch: str,
    ) -> Tensor:
        assert qkv_format == "thd" and self.channels == (query_layer.shape[2], value_layer.shape[2])
        out: Tensor = thd_attention(
            query_layer,
            key_layer,
            value_layer,
            cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            thd_attention_policies=thd_attention_policies,
            thd_attention_policy_dispatch={"auto": "padded"}.get(thd_attention_policy_dispatch, "grouped"),
        )
        return out.flatten(1)


class OlderDotProductAttention:
    def forward(self, query_layer: Tensor, attn_mask_type: str = "causal") -> Tensor:
        raise AssertionError("called")


@pytest.fixture
def forget_peers() -> Iterator[None]:
    finders = (peers.find_varlen_attn, peers.find_flash_attn, peers.find_transformer_engine)
    for find in finders:
        find.cache_clear()
    yield
    for find in finders:
        find.cache_clear()


def offer(monkeypatch: pytest.MonkeyPatch, *, varlen: Any = None, flash: Any = None, te: Any = None) -> None:
    """These and no other peers are installed."""
    for module, name, entry in (
        ("torch.nn.attention.varlen", "varlen_attn", varlen),
        ("flash_attn", "flash_attn_varlen_func", flash),
        ("transformer_engine.pytorch", "DotProductAttention", te),
    ):
        stand_in = types.ModuleType(module)
        if entry is not None:
            setattr(stand_in, name, entry)
        monkeypatch.setitem(sys.modules, module, stand_in)
    installed = {"flash_attn_2_cuda": flash, "transformer_engine": te}
    monkeypatch.setattr(peers, "package_version", lambda *names, module: "2.9" if installed[module] is not None else None)


def set_up(**sizes: int) -> tuple[mixed.Setup, PackedInputs]:
    """A small work on the CPU, all masks interleaved, as benchmarks.mixed prepares one on a GPU."""
    lengths = (5, 17, 1, 9, 12, 8, 3, 20)
    masks = MASKS[:4]
    work = Work(
        "small", lengths, masks, tuple(n % 4 for n in range(8)), "interleaved", **{"num_heads": 4, "num_gqa_groups": 4, **sizes}
    )
    inputs = build(work.case(dtype=torch.float32))
    bands = [band_of(mask) for mask in masks]
    tensors = (inputs.q, inputs.k, inputs.v, inputs.grad_out, inputs.cu_seqlens_q)
    assert inputs.prepared is not None
    return mixed.Setup(
        "small", work, *tensors, inputs.prepared, bands, list(work.owner), {"work": "small", "tokens": sum(lengths)}
    ), inputs


SIZES = {"mha": {}, "gqa": {"num_gqa_groups": 2}, "mla": {"head_dim_qk": 24, "head_dim_v": 16}}


@pytest.mark.usefixtures("forget_peers")
@pytest.mark.parametrize("varlen", [varlen_attn_2_11, varlen_attn_2_12])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_peers_match_the_reference(monkeypatch: pytest.MonkeyPatch, varlen: Any, sizes: dict[str, int]) -> None:
    offer(monkeypatch, varlen=varlen, flash=flash_attn_varlen_func, te=DotProductAttention)
    s, inputs = set_up(**{"head_dim_qk": 16, "head_dim_v": 16, **sizes})
    expected = reference(inputs)
    seen = []
    for label, make, _ in peers.variants(s):
        seen.append(label["dispatch"])
        assert_close("out", make(False, False)(), expected.out, 1e-5, 1e-5)
        for name, grad in zip(("dq", "dk", "dv"), make(True, False)()):
            assert_close(name, grad, getattr(expected, name), 1e-4, 1e-5)
    assert tuple(seen) == peers.DISPATCHES


@pytest.mark.usefixtures("forget_peers")
def test_a_peer_that_computes_something_else_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_window(*args: Any, window_size: Any = (-1, -1)) -> Tensor:
        return varlen_attn_2_11(*args)

    offer(monkeypatch, varlen=without_window)
    s, _ = set_up(head_dim_qk=16, head_dim_v=16)
    rows = mixed.measure(s, mixed.all_variants(s, [], (), with_flex=False, with_peers=True))
    assert [(row["backward"], row["ms"]) for row in rows] == [(False, None), (True, None)]
    assert all("AssertionError: Tensor-likes are not close" in row["error"] for row in rows)


@pytest.mark.usefixtures("forget_peers")
def test_what_is_missing_has_no_rows_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, te=OlderDotProductAttention)
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    assert not peers.makers()
    assert peers.versions() == {
        "varlen_attn": "2.9.0 (skipped: torch.nn.attention.varlen.varlen_attn cannot be imported: AttributeError)",
        "flash_attn": None,
        "transformer_engine": "2.9 (skipped: DotProductAttention takes no thd_attention_policies)",
    }


@pytest.mark.usefixtures("forget_peers")
def test_versions_of_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, varlen=varlen_attn_2_12, flash=flash_attn_varlen_func, te=DotProductAttention)
    assert peers.versions() == {"varlen_attn": str(torch.__version__), "flash_attn": "2.9", "transformer_engine": "2.9"}
    assert tuple(peers.makers()) == peers.DISPATCHES


def test_wider_values_are_refused() -> None:
    s, _ = set_up(head_dim_qk=16, head_dim_v=24)
    with pytest.raises(NotImplementedError, match="needs head_dim_v up to head_dim_qk, found 16 and 24"):
        peers.grouped(s, lambda *args: args[0])


# ----------------------------------------------------------------------------------------------------------- peers: the rows
@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing that calls once and tells 1 ms."""

    def time_device(call: Callable[[], Any], **budget: Any) -> common.Timing:
        call()
        return common.Timing([1.0])

    monkeypatch.setattr(common, "time_device", time_device)
    def sample_times(calls: dict[int, Callable[[], Any]], *args: Any) -> dict[int, list[float]]:
        for call in calls.values():
            call()
        return {number: [1.0] for number in calls}

    monkeypatch.setattr(mixed, "sample_times", sample_times)
    monkeypatch.setattr(common, "time_host", lambda call, repeats=8, rounds=5: 5.0)
    monkeypatch.setattr(common, "capture", lambda call: call)
    monkeypatch.setattr(common, "peak_bytes", lambda call, results: results(call()))


@pytest.mark.usefixtures("forget_peers", "clock")
def test_rows_of_the_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offer(monkeypatch, varlen=varlen_attn_2_12, flash=flash_attn_varlen_func, te=DotProductAttention)
    s, _ = set_up(head_dim_qk=16, head_dim_v=16)
    rows = mixed.measure(s, mixed.all_variants(s, [], (), with_flex=False, with_peers=True))
    seen = [(row["dispatch"], row["graphed"], row["backward"]) for row in rows]
    passes = [(graphed, backward) for backward in (False, True) for graphed in (False, True)]
    assert seen == [
        (dispatch, *how)
        for dispatch in peers.DISPATCHES
        for how in passes
        if dispatch != "transformer_engine_grouped" or not how[0]
    ]
    for row in rows:
        assert row["ms"] == 1.0 and "error" not in row and row["backend"] == row["dispatch"] and row["selection"] is None
        assert {"work", "tokens", "ms_spread"} <= row.keys()
        assert ("host_us" in row, "peak_bytes" in row) == (not row["graphed"],) * 2
        assert ("host_us_grad" in row) == (not row["graphed"] and not row["backward"])
    assert len(command.timed_rows({"rows": rows})) == len(rows) == 14
    assert mixed.measure(s, mixed.all_variants(s, [], (), with_flex=False, with_peers=False)) == []
    assert "| small | varlen_attn | varlen_attn |" in mixed.summary(rows)
    pytest.importorskip("matplotlib")
    mixed.write_reports(rows, tmp_path / "mixed.json")
    assert (tmp_path / "mixed.png").is_file()


@pytest.mark.usefixtures("forget_peers", "clock")
def test_a_failed_capture_is_not_the_eager_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(call: Callable[[], Any]) -> None:
        raise RuntimeError("operation failed")

    monkeypatch.setattr(common, "capture", fail)
    offer(monkeypatch, flash=flash_attn_varlen_func)
    s, _ = set_up(head_dim_qk=16, head_dim_v=16)
    rows = mixed.measure(s, mixed.all_variants(s, [], (), with_flex=False, with_peers=True))
    seen = [(row["backward"], row["graphed"], row["ms"], row.get("error")) for row in rows]
    error = "RuntimeError: operation failed"
    assert seen == [(False, False, 1.0, None), (False, True, None, error), (True, False, 1.0, None), (True, True, None, error)]
