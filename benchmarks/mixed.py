"""Mixed batches: each policy in place, in one launch and grouped, against the kernels on compacted data, FlexAttention and other peers.

    python -m benchmarks.mixed [--works A 33k-p2 ...] [--backends flash4 cudnn ...] [--no-flex] [--no-peers] [--out FILE]

Writes JSON (rows as documented in docs/benchmarks.md), a Markdown table and a plot beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_attn_ops import NoBackendError, prepare_thd_policies, thd_attention
from te_attn_ops.masks import resolve_mask
from te_attn_ops.measure import sample_times
from te_attn_ops.policies import PreparedPolicies
from te_attn_ops.testing import Work, benchmark_work

from . import common, flex, peers
from .raw import Compact, ideal_runner, raw_runner

WORKS = ("A", "33k-p2", "33k-p4", "32k-p8", "8k-p4", "4k-p2")
EXTRA_WORKS = ("A-contiguous", "33k-p2-contiguous", "A-gqa", "A-mla", "8k-p4-mla")
BACKENDS = ("flash4", "cudnn", "torch_flash", "flash2")


class Subset(NamedTuple):
    """One policy's sequences: their rows in the batch (int64), and the cu_seqlens they have once gathered."""

    rows: Tensor
    cu_seqlens: Tensor
    max_seqlen: int


@dataclass
class Setup:
    """One work's tensors on the device."""

    name: str
    work: Work
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    cu_seqlens: Tensor
    policies: PreparedPolicies
    bands: list[Any]
    owner: list[int]
    description: dict[str, Any] = field(default_factory=dict)

    def subset(self, policy: int) -> Subset:
        device, bounds = self.q.device, self.cu_seqlens.tolist()
        members = [n for n, owner in enumerate(self.owner) if owner == policy]
        lengths = [self.work.lengths[n] for n in members]
        rows = torch.cat([torch.arange(bounds[n], bounds[n + 1], device=device) for n in members])
        return Subset(rows, torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32), max(lengths))


def set_up(name: str) -> Setup:
    work = benchmark_work(name)
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    total = sum(work.lengths)

    def random(heads: int, width: int) -> Tensor:
        return torch.randn(total, heads, width, generator=generator, device=device, dtype=torch.bfloat16)

    q, k = random(work.num_heads, work.head_dim_qk), random(work.num_gqa_groups, work.head_dim_qk)
    v, grad_out = random(work.num_gqa_groups, work.head_dim_v), random(work.num_heads, work.head_dim_v)
    cu_seqlens = torch.tensor([0, *work.lengths], device=device).cumsum(0).to(torch.int32)
    policies = work.policies(device)
    prepared = _prepare(policies, cu_seqlens, q, k, v, work)
    bands = [resolve_mask(p["mask_type"], p["window_size"]).band.canonical(True) for p in policies]
    owner = [0] * len(work.lengths)
    for index, policy in enumerate(policies):
        for n in policy["sequence_ids"].tolist():
            owner[n] = index
    description = {
        "work": name,
        "pattern": work.pattern,
        "tokens": total,
        "sequences": len(work.lengths),
        "policies": len(policies),
        "num_heads": work.num_heads,
        "num_gqa_groups": work.num_gqa_groups,
        "head_dim_qk": work.head_dim_qk,
        "head_dim_v": work.head_dim_v,
    }
    return Setup(name, work, q, k, v, grad_out, cu_seqlens, prepared, bands, owner, description)


def _prepare(policies: list[dict[str, Any]], cu_seqlens: Tensor, q: Tensor, k: Tensor, v: Tensor, work: Work) -> PreparedPolicies:
    from te_attn_ops.policies import PlanSpec

    spec = PlanSpec(q.dtype, q.shape[1], k.shape[1], q.shape[2], v.shape[2], training=True)
    longest = max(work.lengths)
    return prepare_thd_policies(policies, cu_seqlens, attention=spec, total_q=q.shape[0], max_seqlen_q=longest)


# ------------------------------------------------------------------------------------------------------------ what is timed
def _public(s: Setup, backward: bool, grad: bool, **kwargs: Any) -> Callable[[], Any]:
    """The public function; with ``backward`` its gradients too; ``grad``: inputs that require grad."""
    q, k, v = (x.detach().requires_grad_(grad or backward) for x in (s.q, s.k, s.v))
    longest = max(s.work.lengths)

    def run() -> Any:
        out = thd_attention(q, k, v, s.cu_seqlens, max_seqlen_q=longest, **kwargs)
        return torch.autograd.grad(out, (q, k, v), s.grad_out) if backward else out

    return run


def _ideal(s: Setup, backend: str, backward: bool) -> Callable[[], Any]:
    runner = ideal_runner(backend)
    parts = []
    for p, band in enumerate(s.bands):
        subset = s.subset(p)
        tensors = [x.index_select(0, subset.rows) for x in (s.q, s.k, s.v, s.grad_out)]
        parts.append(runner(Compact(*tensors, subset.cu_seqlens, subset.max_seqlen, band), backward))

    def run() -> Any:
        return [part() for part in parts]

    return run


def _by_hand(s: Setup, backend: str, backward: bool) -> Callable[[], Any]:
    """What is written without this package: per policy, its rows gathered, the kernel, the results put back. The buffers are made
    before, and the backward puts only gradients back, so that this is the least that it can cost."""
    runner = ideal_runner(backend)
    sources = [s.q, s.k, s.v, s.grad_out][: 4 if backward else 3]
    results = [torch.empty_like(x) for x in ((s.q, s.k, s.v) if backward else (s.grad_out,))]
    parts = []
    for p, band in enumerate(s.bands):
        subset = s.subset(p)
        buffers = [x.index_select(0, subset.rows) for x in (s.q, s.k, s.v, s.grad_out)]
        part = runner(Compact(*buffers, subset.cu_seqlens, subset.max_seqlen, band), backward)
        parts.append((subset.rows, buffers, part))

    def run() -> Any:
        for rows, buffers, part in parts:
            for source, buffer in zip(sources, buffers):
                torch.index_select(source, 0, rows, out=buffer)
            for result, found in zip(results, part()):
                result.index_copy_(0, rows, found)
        return results

    return run


def _raw_uniform(s: Setup, backend: str, backward: bool) -> Callable[[], Any]:
    band = resolve_mask("padding_causal").band.canonical(True)
    return raw_runner(backend)(Compact(s.q, s.k, s.v, s.grad_out, s.cu_seqlens, max(s.work.lengths), band), backward)


Maker = Callable[[bool, bool], Callable[[], Any]]


def variants(s: Setup, backend: str) -> Iterator[tuple[dict[str, Any], Maker]]:
    """Labels and a maker (backward, grad) -> call, for everything that one backend is timed at."""
    policies = s.policies
    single = backend == "cudnn_flex"
    if single:
        yield {"dispatch": "single_launch"}, lambda backward, grad: _public(
            s, backward, grad, thd_attention_policies=policies, thd_attention_policy_dispatch="single_launch", backend=backend
        )
        return
    equal_widths = s.work.head_dim_qk == s.work.head_dim_v
    if equal_widths or backend in ("flash4", "cudnn"):
        yield {"dispatch": "raw"}, lambda backward, grad: _raw_uniform(s, backend, backward)
        yield {"dispatch": "ideal"}, lambda backward, grad: _ideal(s, backend, backward)
        yield {"dispatch": "grouped_by_hand"}, lambda backward, grad: _by_hand(s, backend, backward)
    for dispatch in ("padded", "grouped"):
        yield {"dispatch": dispatch}, lambda backward, grad, dispatch=dispatch: _public(
            s, backward, grad, thd_attention_policies=policies, thd_attention_policy_dispatch=dispatch, backend=backend
        )
    for label, mask in (("uniform_causal", "padding_causal"), ("uniform_full", "padding")):
        yield {"dispatch": label}, lambda backward, grad, mask=mask: _public(s, backward, grad, attn_mask_type=mask, backend=backend)


def auto_variants(s: Setup, selections: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], Maker]]:
    for selection in selections:
        yield {"dispatch": "auto", "selection": selection}, lambda backward, grad, selection=selection: _public(
            s, backward, grad, thd_attention_policies=s.policies, selection=selection
        )


# ----------------------------------------------------------------------------------------------------------------- measuring
class Variant(NamedTuple):
    """Something to time: how its rows are labelled, and a maker of its calls."""

    label: dict[str, Any]
    make: Maker
    peak: bool = True  # whether its peak memory is of interest
    graph: bool = True  # whether a CUDA graph can hold it


_ENTRIES = ("raw", "ideal", "grouped_by_hand")  # no public function: nothing changes there for inputs that require grad
_GRAPHED_BUDGET_MS, _GRAPHED_ROUNDS = 2500.0, (11, 31)
_HOST_ROUNDS, _QUIET_ROUNDS = 50, 8


def measure(s: Setup, timed: list[Variant]) -> list[dict[str, Any]]:
    """Rows for all variants of one work: eager and graphed, forward and forward+backward; host time with and without gradients.

    What is compared takes turns, in rounds: the graphs of all variants, and the host times of one backend. A clock that drifts, or
    another process on the host, then slows both sides of a ratio or neither.
    """
    rows: list[tuple[int, dict[str, Any]]] = []
    for backward in (False, True):
        replays: dict[int, Callable[[], Any]] = {}
        for number, variant in enumerate(timed):
            row = _row(s, variant, False, backward)
            rows.append((number, row))
            try:
                call = variant.make(backward, False)
                call()
                eager = common.time_device(call)
                row |= {"ms": eager.ms, "ms_spread": eager.spread}
                if backward:  # forward calls: _time_host
                    row["host_us"] = common.time_host(call, rounds=2)
                row["peak_bytes"] = common.peak_bytes(call, _result_bytes) if variant.peak else None
                if variant.graph:
                    row = _row(s, variant, True, backward)
                    replays[number] = common.capture(call)
                del call
            except Exception as error:  # one broken kernel must not cost the other rows
                row |= {"ms": None, "error": _describe(error)}
                if row["graphed"]:
                    rows.append((number, row))
        rows += [(number, _row(s, timed[number], True, backward) | found) for number, found in _time_graphs(replays, s.q.device).items()]
        replays.clear()
        gc.collect()
    rows.sort(key=lambda item: (item[0], item[1]["backward"], item[1]["graphed"]))
    found = [row for _, row in rows]
    for backend in dict.fromkeys(variant.label["backend"] for variant in timed):
        _time_host([v for v in timed if v.label["backend"] == backend], [row for row in found if row["backend"] == backend])
    _report(found)
    return found


def _row(s: Setup, variant: Variant, graphed: bool, backward: bool) -> dict[str, Any]:
    return {**s.description, "selection": None, **variant.label, "graphed": graphed, "backward": backward}


def _time_graphs(replays: dict[int, Callable[[], Any]], device: torch.device) -> dict[int, dict[str, Any]]:
    """What the row of each graph says beside what it is."""
    try:
        samples = sample_times(replays, device, _GRAPHED_BUDGET_MS, _GRAPHED_ROUNDS)
    except Exception as error:  # as above
        return {number: {"ms": None, "error": _describe(error)} for number in replays}
    times = {number: common.Timing(sampled) for number, sampled in samples.items()}
    return {number: {"ms": timing.ms, "ms_spread": timing.spread} for number, timing in times.items()}


def _describe(error: Exception) -> str:
    known = isinstance(error, (NoBackendError, NotImplementedError))
    return (str(error) if known else f"{type(error).__name__}: {error}")[:500]


def _time_host(variants: list[Variant], rows: list[dict[str, Any]]) -> None:
    """Puts host times of eager forward calls into ``rows``: call after call in short rounds, the fastest of each, until rounds bring
    nothing new: another process on the host may slow many of them."""
    calls: dict[tuple[Any, ...], Callable[[], Any]] = {}
    for variant in variants:
        for key, grad in (("host_us", False), ("host_us_grad", True)):
            if variant.label["dispatch"] in _ENTRIES and grad:
                continue
            with contextlib.suppress(Exception):  # measure() has written down why
                call = variant.make(False, grad)
                call()
                calls[variant.label["dispatch"], variant.label.get("selection"), key] = call
    best = dict.fromkeys(calls, float("inf"))
    quiet = 0
    for _ in range(_HOST_ROUNDS):
        times = {name: common.time_host(call, repeats=4, rounds=1) for name, call in calls.items()}
        quiet = quiet + 1 if all(us > 0.99 * best[name] for name, us in times.items()) else 0
        best = {name: min(us, best[name]) for name, us in times.items()}
        if quiet == _QUIET_ROUNDS:
            break
    for row in rows:
        if row["ms"] is not None and not row["graphed"] and not row["backward"]:
            row.update({key: us for (*name, key), us in best.items() if name == [row["dispatch"], row["selection"]]})


def warm(s: Setup, timed: list[Variant]) -> None:
    """Only compiles what :func:`measure` will time, into the caches on disk."""
    for variant in timed:
        for backward in (False, True):
            with contextlib.suppress(Exception):
                variant.make(backward, False)()


def _report(rows: list[dict[str, Any]]) -> None:
    by_variant: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        if row["graphed"] or row.get("error"):
            told = f"{row['ms']:.3f}" if row["ms"] is not None else row["error"][:90]
            by_variant.setdefault((row["work"], row["backend"], row["dispatch"], row["selection"] or ""), []).append(told)
    for name, told_of in by_variant.items():
        print(time.strftime("%H:%M:%S"), *name, *told_of, file=sys.stderr, flush=True)


def _result_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_result_bytes(item) for item in value if item is not None) if isinstance(value, (tuple, list)) else 0


def all_variants(s: Setup, backends: list[str], selections: tuple[str, ...], with_flex: bool, with_peers: bool) -> list[Variant]:
    timed = [
        # The buffers of grouped_by_hand stand before: its peak would say nothing.
        Variant({"backend": backend, **label}, make, peak=label["dispatch"] != "grouped_by_hand")
        for backend in backends
        for label, make in variants(s, backend)
    ]
    timed += [Variant({"backend": "auto", **label}, make) for label, make in auto_variants(s, selections)]
    if with_flex:
        timed += [Variant(label, make, peak=False) for label, make in flex.variants(s)]
    if with_peers:
        timed += [Variant(label, make, graph=graph) for label, make, graph in peers.variants(s)]
    return timed


# ------------------------------------------------------------------------------------------------------------------- reports
def summary(rows: list[dict[str, Any]]) -> str:
    """Graphed milliseconds, forward and forward+backward, and the ratio to the same backend's ideal."""
    best: dict[tuple[str, str, str, str | None], dict[bool, float]] = {}
    for row in rows:
        if row.get("graphed") and row.get("ms") and "new_geometry" not in row:
            best.setdefault((row["work"], row["backend"], row["dispatch"], row["selection"]), {})[row["backward"]] = row["ms"]
    table = []
    for (work, backend, dispatch, selection), ms in best.items():
        ideal = best.get((work, backend, "ideal", None), {})
        ratios = [ms[b] / ideal[b] if b in ms and b in ideal and dispatch in ("padded", "grouped") else None for b in (False, True)]
        table.append([work, backend, dispatch, selection, ms.get(False), ms.get(True), *ratios])
    header = ("work", "backend", "dispatch", "selection", "fwd ms", "fwd+bwd ms", "fwd / ideal", "fwd+bwd / ideal")
    return common.markdown_table(header, table)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = [r for r in rows if r.get("graphed") and r.get("backward") and r.get("ms") and "new_geometry" not in r]
    works = list(dict.fromkeys(r["work"] for r in chosen))
    kinds = ("ideal", "padded", "single_launch", "grouped", "flex_flash", "flex_triton")
    kinds += tuple(peer for peer in peers.DISPATCHES if any(r["dispatch"] == peer for r in chosen))
    figure, axes = plt.subplots(figsize=(1.6 * len(works) + 3, 4.2))
    width = 0.8 / len(kinds)
    for index, kind in enumerate(kinds):
        heights = []
        for work in works:
            reference = min((r["ms"] for r in chosen if r["work"] == work and r["dispatch"] == "ideal"), default=None)
            found = min((r["ms"] for r in chosen if r["work"] == work and r["dispatch"] == kind), default=None)
            heights.append(found / reference if found and reference else 0.0)
        axes.bar([x + index * width for x in range(len(works))], heights, width, label=kind)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(works))], works, rotation=20)
    axes.set_ylabel("forward+backward / fastest ideal (graphed)")
    axes.set_title("Mixed packed batches")
    axes.legend(ncols=3, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write_reports(rows: list[dict[str, Any]], path: Path) -> None:
    path.with_suffix(".md").write_text(summary(rows))
    plot(rows, path.with_suffix(".png"))


def merge(path: Path, command: str, rows: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """New rows replace those of the same works in an earlier file; its command stays named beside the new one. What is compared
    is of one work, and so of one run."""
    before = common.read_json(path)
    works = {row["work"] for row in rows}
    kept = [row for row in before["rows"] if row["work"] not in works] if before else []
    if before and kept:
        command = "; ".join(dict.fromkeys([*before["command"].split("; "), command]))
    return command, kept + rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixed", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--works", nargs="+", default=list(WORKS + EXTRA_WORKS))
    parser.add_argument("--backends", nargs="+", default=None, help="default: every installed one")
    parser.add_argument("--no-flex", action="store_true", help="without FlexAttention")
    parser.add_argument("--no-peers", action="store_true", help="without varlen_attn, flash-attn by hand and TransformerEngine")
    parser.add_argument("--no-measured", action="store_true", help="without the measured selection")
    parser.add_argument("--warm", action="store_true", help="compile only, into the caches on disk; writes nothing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the JSON (default docs/results/mixed_<device>.json)")
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE", help="only the table and the plot, from the JSON of a run")
    arguments = parser.parse_args(argv)
    if arguments.source is not None:
        data = common.read_json(arguments.source)
        if data is None:
            parser.error(f"{arguments.source} cannot be read")
        write_reports(data["rows"], arguments.source)
        return
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    out = arguments.out or common.RESULTS / f"mixed_{common.device_slug()}.json"
    versions = {**common.versions(), **({} if arguments.no_peers else peers.versions())}
    installed = common.installed_backends()
    backends = arguments.backends or [name for name in (*BACKENDS, "cudnn_flex") if name in installed]
    selections = ("static",) if arguments.no_measured else ("static", "measured")
    rows: list[dict[str, Any]] = []
    for name in common.progress(arguments.works, "works"):
        setup = set_up(name)
        gc.collect()
        gc.freeze()  # what stands now is never garbage: collecting after each variant, for its graph's memory, is quick then
        with_flex = not arguments.no_flex and name in WORKS
        timed = all_variants(setup, backends, selections, with_flex, not arguments.no_peers)
        if arguments.warm:
            warm(setup, timed)
            continue
        rows += measure(setup, timed)
        if not arguments.no_flex and name in WORKS:
            from . import geometry

            rows += geometry.run(setup)
        command, merged = merge(out, common.command_line(), rows)
        data = {"device": common.device_name(), "versions": versions, "command": command, "rows": merged}
        common.write_json(out, data)
    if not arguments.warm:
        write_reports(data["rows"], out)
        print(summary(rows))


if __name__ == "__main__":
    main()
