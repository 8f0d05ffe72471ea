"""Padding head dims or not: every backend native and padded, what the static and the measured selection choose, what padding adds.

    python -m benchmarks.padding [--out FILE] [--from FILE] [--print-ranks] [--smoke]

Writes JSON, a Markdown table and, where matplotlib is installed, a plot beside it. ``--from`` makes the last two from the JSON of an
earlier run.

* ``rows``: {head_dim_qk, head_dim_v, training, backend, padded, ms}, through ``thd_attention`` in eager, pad and trim included.
* ``choices``: {head_dim_qk, head_dim_v, training, selection, backend, padded, ms, of_best}; ``of_best`` is the chosen row's ms over the
  best row's.
* ``pad_cost``: {compiled, head_dim_qk, head_dim_v, backend, ms, ms_extra}: a training step (forward and backward) whose V comes from a
  projection; ``ms_extra`` is what it takes above the same step with the kernel given tensors that have its width already.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from te_attn_ops import explain, measure, thd_attention
from te_attn_ops.explain import Explanation

from . import common

# The widths of the static rank's table.
PAIRS = ((192, 128), (128, 64), (96, 64), (160, 128), (256, 128), (192, 64), (64, 128), (128, 96))
PAD_COST_PAIRS = ((192, 128), (64, 128))


class Size(NamedTuple):
    """The batch, and how long to look at it."""

    pairs: tuple[tuple[int, int], ...]
    pad_cost_pairs: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    num_heads: int
    hidden: int
    dtype: torch.dtype
    device: str
    budget_ms: float
    rounds: tuple[int, int]
    compiler: str


FULL = Size(PAIRS, PAD_COST_PAIRS, (4096,) * 4, 16, 2048, torch.bfloat16, "cuda", 150.0, (5, 25), "inductor")
SMOKE = Size(((24, 16), (16, 24)), ((24, 16),), (40, 24), 2, 32, torch.float32, "cpu", 1.0, (2, 2), "aot_eager")


@dataclass
class Work:
    """One pair of widths on the device."""

    size: Size
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    cu_seqlens: Tensor

    @classmethod
    def of(cls, size: Size, pair: tuple[int, int]) -> Work:
        device, total = torch.device(size.device), sum(size.lengths)
        generator = torch.Generator(device).manual_seed(0)

        def new(width: int) -> Tensor:
            shape = (total, size.num_heads, width)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(size.dtype).requires_grad_()

        cu_seqlens = torch.tensor([0, *size.lengths], device=device).cumsum(0).to(torch.int32)
        return cls(size, new(pair[0]), new(pair[0]), new(pair[1]), new(pair[1]).detach(), cu_seqlens)

    @property
    def pair(self) -> tuple[int, int]:
        return self.q.shape[2], self.v.shape[2]

    @property
    def geometry(self) -> dict[str, Any]:
        return {"cu_seqlens_q": self.cu_seqlens, "max_seqlen_q": max(self.size.lengths)}

    def call(self, training: bool, **overrides: Any) -> Callable[[], Any]:
        """One forward or, in training, one forward and backward."""

        def forward() -> Tensor:
            out: Tensor = thd_attention(self.q, self.k, self.v, **self.geometry, **overrides)
            return out

        def run() -> Any:
            if training:
                return torch.autograd.grad(forward(), (self.q, self.k, self.v), self.grad_out)
            with torch.no_grad():
                return forward()

        return run

    def explain(self, training: bool, selection: str) -> Explanation:
        with torch.set_grad_enabled(training):
            return explain(self.q, self.k, self.v, **self.geometry, selection=selection)

    @property
    def keys(self) -> dict[str, int]:
        return {"head_dim_qk": self.pair[0], "head_dim_v": self.pair[1]}


# -------------------------------------------------------------------------------------------------------------- rows, choices
def measure_work(work: Work, training: bool, result: dict[str, list[Any]]) -> None:
    keys = {**work.keys, "training": training}
    static = work.explain(training, "static")
    calls: dict[tuple[str, bool], Callable[[], Any]] = {}
    slow: dict[tuple[str, bool], Callable[[], Any]] = {}
    for candidate in static.candidates:
        name, width = candidate.backend, candidate.head_dim_padded
        is_slow = name == "unfused" and work.size.device == "cuda"
        if not candidate.accepted or (is_slow and width):
            continue
        call = work.call(training, backend=name, pad_head_dim=bool(width))
        try:
            call()
            _synchronize()
        except Exception as error:
            result["failures"].append({**keys, "backend": name, "padded": bool(width), "error": f"{type(error).__name__}: {error}"[:300]})
            continue
        (slow if is_slow else calls)[name, bool(width)] = call
    device, size = torch.device(work.size.device), work.size
    samples = measure.sample_times(calls, device, size.budget_ms, size.rounds)
    samples |= measure.sample_times(slow, device, 0.0, (2, 2))
    cells = {cell: statistics.median(times) for cell, times in samples.items()}
    for (name, padded), ms in cells.items():
        result["rows"].append({**keys, "backend": name, "padded": padded, "ms": round(ms, 4)})
    for selection, explanation in (("static", static), ("measured", work.explain(training, "measured"))):
        winner = explanation.winner
        assert winner is not None
        cell = (winner["backend"], bool(winner["head_dim_padded"]))
        ms = cells.get(cell)
        of_best = None if ms is None else round(ms / min(cells.values()), 4)
        choice = {"selection": selection, "backend": cell[0], "padded": cell[1], "ms": None if ms is None else round(ms, 4)}
        result["choices"].append({**keys, **choice, "of_best": of_best})


# ------------------------------------------------------------------------------------------------------------------- pad cost
def measure_pad_cost(size: Size, pair: tuple[int, int], result: dict[str, list[Any]]) -> None:
    """A step with padding against the same step with the kernel's tensors at its width already; both project V."""
    work = Work.of(size, pair)
    backend = next((c.backend for c in _by_rank(work.explain(True, "static")) if c.head_dim_padded), "unfused")
    width, scale = max(pair), pair[0] ** -0.5
    total, device = work.q.shape[0], work.q.device
    hidden = torch.randn(total, size.hidden, device=device).to(size.dtype)
    weight = torch.randn(size.hidden, size.num_heads * pair[1], device=device).to(size.dtype).requires_grad_()
    wide = [F.pad(x.detach(), (0, width - x.shape[2])).requires_grad_() for x in (work.q, work.k, work.v)]
    grad_v, grad_wide = work.grad_out.flatten(1), F.pad(work.grad_out, (0, width - pair[1])).flatten(1)
    options = {**work.geometry, "backend": backend, "softmax_scale": scale}

    def padded(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
        v = (hidden @ weight).view(total, size.num_heads, pair[1])
        return thd_attention(q, k, v, pad_head_dim=True, **options).flatten(1)

    def bare(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return thd_attention(q, k, v, pad_head_dim=False, **options).flatten(1), hidden @ weight

    for compiled in (False, True):
        # dynamic=False: one shape is measured, and nothing else may be paid.
        f, g = [torch.compile(x, backend=size.compiler, fullgraph=True, dynamic=False) if compiled else x for x in (padded, bare)]

        def with_padding(f: Callable[..., Tensor] = f) -> Any:
            return torch.autograd.grad(f(work.q, work.k, weight), (work.q, work.k, weight), grad_v)

        def without(g: Callable[..., Any] = g) -> Any:
            return torch.autograd.grad(g(*wide, weight), (*wide, weight), (grad_wide, grad_v))

        for call in (with_padding, without):
            call()
        samples = measure.sample_times({True: with_padding, False: without}, device, 2 * size.budget_ms, (size.rounds[0], 41))
        extra = statistics.median(a - b for a, b in zip(samples[True], samples[False]))
        ms = statistics.median(samples[True])
        entry = {"compiled": compiled, **work.keys, "backend": backend, "ms": round(ms, 4), "ms_extra": round(extra, 4)}
        result["pad_cost"].append(entry)


def _by_rank(explanation: Explanation) -> list[Any]:
    return sorted((c for c in explanation.candidates if c.rank is not None), key=lambda c: c.rank)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------------------------------------ run
def run(size: Size) -> dict[str, Any]:
    result: dict[str, Any] = {"rows": [], "choices": [], "pad_cost": [], "failures": []}
    with tempfile.TemporaryDirectory() as cache:
        # The measured choice is made here and now, not remembered from an earlier run.
        before = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = cache
        measure.forget_measurements()
        try:
            for number, pair in enumerate(size.pairs):
                print(f"{pair[0]}/{pair[1]} ({number + 1}/{len(size.pairs)})", file=sys.stderr, flush=True)
                work = Work.of(size, pair)
                for training in (False, True):
                    measure_work(work, training, result)
                del work
        finally:
            measure.forget_measurements()
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before
    for pair in size.pad_cost_pairs:
        print(f"what padding adds: {pair[0]}/{pair[1]}", file=sys.stderr, flush=True)
        measure_pad_cost(size, pair, result)
    return {
        "benchmark": "padding",
        "command": common.command_line(),
        "device": common.device_name() if size.device == "cuda" else "cpu",
        "versions": common.versions(),
        "work": {
            "tokens": sum(size.lengths),
            "sequences": len(size.lengths),
            "num_heads": size.num_heads,
            "hidden": size.hidden,
            "mask": "causal",
            "dtype": str(size.dtype).removeprefix("torch."),
        },
        **result,
        "summary": summary(result),
    }


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """The worst ratio of each selection to the best row, and compiled to eager pad cost by widths."""
    worst = {}
    for selection in ("static", "measured"):
        ratios = [c["of_best"] for c in result["choices"] if c["selection"] == selection and c["of_best"] is not None]
        worst[f"{selection}_of_best_worst"] = max(ratios, default=None)
    extra = {(c["head_dim_qk"], c["head_dim_v"], c["compiled"]): c["ms_extra"] for c in result["pad_cost"]}
    ratios = {
        f"{qk}/{v}": round(ms / extra[qk, v, False], 3) for (qk, v, compiled), ms in extra.items() if compiled and extra[qk, v, False] > 0
    }
    return {**worst, "compiled_of_eager_pad_cost": ratios}


# --------------------------------------------------------------------------------------------------------------------- tables
def _columns(data: dict[str, Any]) -> list[tuple[str, bool]]:
    return list(dict.fromkeys((row["backend"], row["padded"]) for row in sorted(data["rows"], key=lambda r: (r["backend"], r["padded"]))))


def _works(data: dict[str, Any], training: bool) -> list[tuple[int, int]]:
    return list(dict.fromkeys((r["head_dim_qk"], r["head_dim_v"]) for r in data["rows"] if r["training"] == training))


def _label(backend: str, padded: bool) -> str:
    return f"{backend} {'padded' if padded else 'native'}"


def _cells(data: dict[str, Any], training: bool) -> dict[tuple[int, int, str, bool], float]:
    return {
        (r["head_dim_qk"], r["head_dim_v"], r["backend"], r["padded"]): r["ms"] for r in data["rows"] if r["training"] == training
    }


def markdown(data: dict[str, Any]) -> str:
    work, columns = data["work"], _columns(data)
    text = [
        f"# Padding head dims on {data['device']}",
        "",
        f"`{data['command']}`: {work['tokens']} tokens in {work['sequences']} sequences, {work['num_heads']} heads, {work['mask']}, "
        f"{work['dtype']}; median ms through `thd_attention` in eager, pad and trim included. "
        f"torch {data['versions']['torch']}, cuDNN {data['versions'].get('cudnn')}.",
        "",
    ]
    for training in (False, True):
        text += [f"## {'Training: forward and backward' if training else 'Inference: forward'}", ""]
        cells, rows = _cells(data, training), []
        for pair in _works(data, training):
            chosen = {
                c["selection"]: f"{_label(c['backend'], c['padded'])} ({c['of_best']:.2f}x)" if c["of_best"] else "not timed"
                for c in data["choices"]
                if (c["head_dim_qk"], c["head_dim_v"], c["training"]) == (*pair, training)
            }
            times = [cells.get((*pair, *column)) for column in columns]
            rows.append([f"{pair[0]}/{pair[1]}", *times, chosen["static"], chosen["measured"]])
        header = ["head_dim_qk/v", *(_label(*column) for column in columns), "static choice (of best)", "measured choice (of best)"]
        text += [common.markdown_table(header, rows)]
    text += ["## What padding adds to a training step whose V comes from a projection", ""]
    header = ["head_dim_qk/v", "backend", "", "step ms", "of it padding ms"]
    text += [
        common.markdown_table(
            header,
            [
                [f"{c['head_dim_qk']}/{c['head_dim_v']}", c["backend"], "compiled" if c["compiled"] else "eager", c["ms"], c["ms_extra"]]
                for c in data["pad_cost"]
            ],
        )
    ]
    for failure in data["failures"]:
        what = f"{failure['head_dim_qk']}/{failure['head_dim_v']}, training {failure['training']}"
        text.append(f"Failed: {_label(failure['backend'], failure['padded'])} at {what}: {failure['error']}")
    return "\n".join(text).rstrip() + "\n"


def plot(data: dict[str, Any], path: Path) -> bool:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    columns = [column for column in _columns(data) if column[0] != "unfused"] or _columns(data)
    figure, axes = plt.subplots(2, 1, figsize=(12, 8), layout="constrained")
    colours = {name: f"C{n}" for n, name in enumerate(dict.fromkeys(name for name, _ in columns))}
    for axis, training in zip(axes, (False, True)):
        cells, works = _cells(data, training), _works(data, training)
        width = 0.85 / len(columns)
        for place, (name, padded) in enumerate(columns):
            heights = [cells.get((*pair, name, padded), 0.0) for pair in works]
            where = [n + (place - (len(columns) - 1) / 2) * width for n in range(len(works))]
            style = {"color": colours[name], "hatch": "//" if padded else None, "alpha": 0.55 if padded else 1.0}
            axis.bar(where, heights, width, label=_label(name, padded), edgecolor="white", **style)
        axis.set_xticks(range(len(works)), [f"{qk}/{v}" for qk, v in works])
        axis.set_ylabel("ms")
        axis.set_title("forward + backward" if training else "forward")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize="small", ncols=3)
    axes[1].set_xlabel("head_dim_qk / head_dim_v")
    figure.suptitle(f"Packed attention by head dims, {data['device']} ({data['work']['tokens']} tokens, {data['work']['num_heads']} heads)")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def ranks_table(data: dict[str, Any]) -> str:
    """The rows in the form of ``te_attn_ops.ranks.SM90_MS``."""
    tables: dict[tuple[str, bool], dict[tuple[int, int], list[float | None]]] = {}
    for row in data["rows"]:
        pairs = tables.setdefault((row["backend"], row["padded"]), {})
        pairs.setdefault((row["head_dim_qk"], row["head_dim_v"]), [None, None])[row["training"]] = round(row["ms"], 3)
    lines = []
    for column, pairs in tables.items():
        lines += [f"    {column!r}: {{", *(f"        {pair}: ({times[0]}, {times[1]})," for pair, times in pairs.items()), "    },"]
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------- main
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.padding", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="the JSON (default docs/results/padding_<device>.json)")
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE", help="table and plot of this JSON, without a run")
    parser.add_argument("--print-ranks", action="store_true", help="also print the rows in the form of te_attn_ops/ranks.py")
    parser.add_argument("--smoke", action="store_true", help="a tiny run on the CPU, to see that it runs; written only with --out")
    arguments = parser.parse_args(argv)
    if arguments.source is not None:
        found = common.read_json(arguments.source)
        if found is None or found.get("benchmark") != "padding":
            parser.error(f"--from {arguments.source}: no JSON of this benchmark")
        data, out = found, arguments.out or arguments.source
    else:
        if not arguments.smoke and not torch.cuda.is_available():
            parser.error("needs a CUDA device; --smoke runs a tiny version on the CPU")
        data = run(SMOKE if arguments.smoke else FULL)
        slug = data["device"].removeprefix("NVIDIA ").lower().replace(" ", "_")
        out = arguments.out or (None if arguments.smoke else common.RESULTS / f"padding_{slug}.json")
    if out is not None:
        common.write_json(out, data)
        out.with_suffix(".md").write_text(markdown(data))
        if not plot(data, out.with_suffix(".png")):
            print(f"no plot: matplotlib is not installed; run --from {out} where it is", file=sys.stderr)
    print(markdown(data))
    print(data["summary"])
    if arguments.print_ranks:
        print(ranks_table(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
