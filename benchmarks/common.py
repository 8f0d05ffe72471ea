"""Timing, versions, results files, tables and plots that the benchmarks share."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from te_attn_ops.backends import BACKEND_NAMES, get_backend

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"


def device_slug() -> str:
    """The device's name as part of a file name: ``NVIDIA H200`` is ``h200``."""
    return device_name().removeprefix("NVIDIA ").lower().replace(" ", "_")


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if torch.cuda.is_available() else None,
    }
    for name in BACKEND_NAMES:
        try:
            found[name] = get_backend(name).version()
        except ImportError:
            found[name] = None
    return found


def installed_backends() -> list[str]:
    return [name for name in BACKEND_NAMES if get_backend(name).version() is not None]


# ------------------------------------------------------------------------------------------------------------------- timing
class Timing:
    """Median and spread (interquartile range) in milliseconds."""

    def __init__(self, samples: Sequence[float]) -> None:
        ordered = sorted(samples)
        self.ms = statistics.median(ordered)
        quarter = max(0, len(ordered) // 4)
        self.spread = ordered[len(ordered) - 1 - quarter] - ordered[quarter]


def time_device(call: Callable[[], Any], budget_ms: float = 60.0, least: int = 7, most: int = 60) -> Timing:
    """Times a call with CUDA events, one pair around each repeat."""
    call()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    once = max(start.elapsed_time(end), 1e-3)
    repeats = int(min(most, max(least, budget_ms / once)))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for first, last in events:
        first.record()
        call()
        last.record()
    torch.cuda.synchronize()
    return Timing([first.elapsed_time(last) for first, last in events])


def time_host(call: Callable[[], Any], repeats: int = 8, rounds: int = 5) -> float:
    """Microseconds of host time per call: submission only, the queue never full. The fastest round."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, time.perf_counter() - start)
    torch.cuda.synchronize()
    return best / repeats * 1e6


def capture(call: Callable[[], Any]) -> Callable[[], Any]:
    """A CUDA graph of the call, as a function that replays it. The call has run at least once before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    # What it writes, and what it reads: tensors that the call alone owns.
    graph.kept = (kept, call)  # type: ignore[attr-defined]
    return graph.replay


def peak_bytes(call: Callable[[], Any], results: Callable[[Any], int]) -> int:
    """Peak allocation during a call above what stood before it and above its results."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    value = call()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated() - before - results(value))


# ------------------------------------------------------------------------------------------------------------------ results
def command_line() -> str:
    module = Path(sys.argv[0]).stem
    return " ".join(["python -m", f"benchmarks.{module}" if module != "__main__" else "benchmarks", *sys.argv[1:]])


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps(data, indent=1) + "\n")
    scratch.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except (OSError, ValueError):
        return None


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join("" if cell is None else f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"

    return "\n".join([line(header), "|" + "---|" * len(header), *[line(row) for row in rows]]) + "\n"


def progress(items: Sequence[Any], label: str) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=label, file=sys.stderr, disable=not sys.stderr.isatty())
