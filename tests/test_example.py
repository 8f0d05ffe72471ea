"""The example: how it packs text, what its model may see, and that a short run reports what it should."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_packed.py"
CPU = torch.device("cpu")
REPORT_KEYS = {
    "backend", "command", "compilations", "compilations_after_warmup", "device", "dispatch", "graph_breaks", "head_dim_padded",
    "head_dim_qk", "head_dim_v", "loss_first", "loss_last", "losses", "steps", "tokens_per_second", "versions",
}  # fmt: skip


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_packed", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["train_packed"] = importlib.util.module_from_spec(spec)  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def texts() -> list[Tensor]:
    """Three files whose bytes tell the file and, modulo 64, the place."""
    return [(torch.arange(size) % 64 + 64 * n).to(torch.uint8) for n, size in enumerate((90, 400, 1000))]


def batch_of(example: ModuleType, texts: list[Tensor], step: int = 0, seed: int = 0):  # type: ignore[no-untyped-def]
    return example.make_batch(texts, torch.Generator().manual_seed(seed), step, (3, 8), (32, 100), CPU)


# ----------------------------------------------------------------------------------------------------------------------- data
@pytest.mark.parametrize("seed", range(4))
def test_a_bidirectional_document_does_not_see_what_it_predicts(example: ModuleType, texts: list[Tensor], seed: int) -> None:
    batch = batch_of(example, texts, step=seed, seed=seed)
    starts = batch.cu_seqlens.tolist()
    for start, end, bidirectional in zip(starts, starts[1:], batch.bidirectional):
        tokens, targets = batch.tokens[start:end], batch.targets[start:end]
        if bidirectional:
            predicted = targets != example.IGNORED
            assert predicted.any()
            assert torch.equal(predicted, tokens == example.MASK)
            # Bytes count upwards in these texts, so that every hidden byte is known from the ones that are left.
            whole = torch.where(predicted, targets, tokens)
            assert torch.equal(whole[1:] % 64, (whole[:-1] + 1) % 64)
        else:
            assert not (tokens == example.MASK).any()
            assert torch.equal(targets[:-1], tokens[1:])
            assert int(targets[-1]) % 64 == (int(tokens[-1]) + 1) % 64


def test_geometry_and_membership_vary_within_their_bounds(example: ModuleType, texts: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [example.make_batch(texts, generator, step, (3, 8), (32, 100), CPU) for step in range(30)]
    counts = {len(batch.lengths) for batch in batches}
    assert counts == set(range(3, 9))
    lengths = [length for batch in batches for length in batch.lengths]
    assert min(lengths) >= 32 and max(lengths) <= 100
    assert len({len(batch.tokens) for batch in batches}) > 20
    for step, batch in enumerate(batches):
        assert batch.cu_seqlens.dtype == torch.int32 and int(batch.cu_seqlens[-1]) == len(batch.tokens)
        assert batch.bidirectional == tuple((n + step) % 2 == 1 for n in range(len(batch.lengths)))
        assert batch.policies.policy_index.tolist() == [int(b) for b in batch.bidirectional]
        assert torch.equal(batch.positions, torch.cat([torch.arange(length) for length in batch.lengths]))


def test_the_same_seed_gives_the_same_batch(example: ModuleType, texts: list[Tensor]) -> None:
    first, again, other = (batch_of(example, texts, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.targets, again.targets)
    assert not torch.equal(first.tokens, other.tokens)


def test_reads_text_and_nothing_else(example: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("größer " * 20, encoding="utf-8")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "latin.txt").write_bytes("größer ".encode("latin-1") * 20)
    (tmp_path / "binary").write_bytes(bytes(200))
    (text,) = example.read_texts(tmp_path, 33)
    assert bytes(text.tolist()).decode() == "größer " * 20


@pytest.mark.parametrize("missing", [True, False])
def test_a_folder_without_text_is_an_error_that_names_it(example: ModuleType, tmp_path: Path, missing: bool) -> None:
    folder = tmp_path / "nothing" if missing else tmp_path
    with pytest.raises(ValueError, match=f"--text.*{folder.name}"):
        example.read_texts(folder, 33)


# ---------------------------------------------------------------------------------------------------------------------- model
def logits(example: ModuleType, model: torch.nn.Module, batch, tokens: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    x, angles = model.embed(tokens, batch.positions)
    for block in model.blocks:
        x = block(x, angles, batch.cu_seqlens, batch.policies)
    return model.head(model.norm(x))


def test_the_model_keeps_documents_apart_and_causal_ones_causal(example: ModuleType, texts: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = example.Decoder(example.ModelConfig(layers=1), max_length=100)
    batch = batch_of(example, texts)
    start, end = batch.cu_seqlens.tolist()[:2]
    assert not batch.bidirectional[0] and batch.bidirectional[1]
    middle = (start + end) // 2
    changed_tokens = batch.tokens.clone()
    changed_tokens[middle] = (changed_tokens[middle] + 7) % 256
    with torch.no_grad():
        before, after = (logits(example, model, batch, tokens) for tokens in (batch.tokens, changed_tokens))
    changed = (before != after).any(-1)
    assert not changed[:middle].any() and changed[middle:end].all() and not changed[end:].any()


def test_a_bidirectional_document_sees_its_window_and_no_more(example: ModuleType) -> None:
    torch.manual_seed(0)
    model = example.Decoder(example.ModelConfig(layers=1), max_length=400)
    texts = [torch.arange(1000).remainder(256).to(torch.uint8)]
    batch = example.make_batch(texts, torch.Generator().manual_seed(0), 1, (3, 3), (300, 400), CPU)
    assert batch.bidirectional[0]
    end, at = int(batch.cu_seqlens[1]), 150
    changed_tokens = batch.tokens.clone()
    changed_tokens[at] = (changed_tokens[at] + 7) % 256
    with torch.no_grad():
        before, after = (logits(example, model, batch, tokens) for tokens in (batch.tokens, changed_tokens))
    rows = (before != after).any(-1).nonzero().flatten().tolist()
    left, right = example.WINDOW
    assert end > at + left and rows == list(range(at - right, at + left + 1))


# ------------------------------------------------------------------------------------------------------------------------ run
def run_example(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(EXAMPLE), *arguments], capture_output=True, text=True, timeout=600)


def test_a_short_run_reports_and_draws(tmp_path: Path) -> None:
    report_file = tmp_path / "deep" / "report.json"
    sizes = ("--steps", "10", "--layers", "1", "--documents", "3", "4", "--lengths", "32", "48")
    done = run_example(*sizes, "--device", "cpu", "--out", str(tmp_path / "out"), "--report", str(report_file))
    assert done.returncode == 0, done.stderr
    report = json.loads(report_file.read_text())
    assert set(report) == REPORT_KEYS
    assert report["graph_breaks"] == 0
    assert report["compilations"] == 1 and report["compilations_after_warmup"] == 0
    assert (report["backend"], report["head_dim_padded"]) == ("unfused", 0)
    assert report["steps"] == len(report["losses"]) == 10
    assert report["loss_first"] == pytest.approx(sum(report["losses"][:5]) / 5)
    assert report["loss_last"] == pytest.approx(sum(report["losses"][-5:]) / 5)
    assert report["tokens_per_second"] > 0
    for name in ("mask.png", "loss.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    for word in ("unfused", "graph breaks       0", "compilations       1", "<- chosen"):
        assert word in done.stdout
    assert "10/10" in done.stderr  # the progress bar


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "no/such/folder"), "--text must be a folder with text files, got no/such/folder"),
        (("--documents", "4", "3"), "--documents must be two numbers, 2 <= MIN <= MAX, got 4 3"),
        (("--lengths", "0", "3"), "--lengths must be two numbers, 1 <= MIN <= MAX, got 0 3"),
        (("--steps", "0"), "--steps and --layers must be at least 1"),
    ],
)
def test_bad_arguments_are_named(
    example: ModuleType, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        example.parse_arguments(list(arguments))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
