"""Tables of the documentation and of the README, from docs/results/*.json and from the backends' own refusals.

    python docs/make_tables.py            bring the blocks of the pages and of the README up to date
    python docs/make_tables.py --check    exit code 1 if one is not what the results and the backends say

A block stands between two comments that name it, in the page itself: it can be read without building anything. A result that is
not there gives a sentence that says how to make it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

if importlib.util.find_spec("te_attn_ops") is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from te_attn_ops import AttentionParams, Band
from te_attn_ops.backends import BACKEND_NAMES, cudnn, flash4, get_backend
from te_attn_ops.modules.unsupported import _UNSUPPORTED

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
RESULTS = DOCS / "results"
README = ROOT / "README.md"

Row = dict[str, Any]
NO = "-"


# ---------------------------------------------------------------------------------------------------------------------- pieces
def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; numbers to the right, None empty. Columns without an entry are left out."""
    body = [[_cell(value) for value in row] for row in rows]
    used = [c for c in range(len(header)) if c == 0 or any(row[c] for row in body)]
    right = [bool(body) and all(re.fullmatch(r"[\d.,x%]*", row[c]) for row in body) for c in range(len(header))]
    lines = [[header[c] for c in used], ["---:" if right[c] else "---" for c in used], *[[row[c] for c in used] for row in body]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def read(name: str) -> Row | None:
    """A results file; None where it is missing."""
    path = RESULTS / name
    if not path.is_file():
        return None
    data: Row = json.loads(path.read_text())
    return data


def provenance(data: Row, name: str) -> str:
    """Where the figures come from, as one sentence."""
    versions = {key: value for key, value in (data.get("versions") or {}).items() if value}
    listed = ", ".join(f"{key} {value}" for key, value in versions.items())
    command = f", by `{data['command']}`" if data.get("command") else ""
    work = data.get("work") or data.get("sizes")
    sizes = f" Sizes: {', '.join(f'{key} {value}' for key, value in work.items())}." if isinstance(work, dict) else ""
    return f"Measured on one {data.get('device', 'unknown device')}{command} (`docs/results/{name}`; {listed}).{sizes}"


def missing(name: str, command: str) -> str:
    return f"*`docs/results/{name}` is not in this checkout; `{command}` on a GPU writes it.*\n"


def plot(name: str, text: str) -> str:
    return f"![{text}](results/{name})\n" if (RESULTS / name).is_file() else ""


def paragraphs(*parts: str) -> str:
    """The parts that say something, a blank line between them."""
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _best(rows: Iterable[Row], key: str = "ms") -> Row | None:
    timed = [row for row in rows if row.get(key)]
    return min(timed, key=lambda row: row[key], default=None)


def _ms(row: Row | None) -> float | None:
    return None if row is None else row["ms"]


def _ratio(a: float | None, b: float | None) -> str | None:
    return f"{a / b:.2f}x" if a and b else None


# ------------------------------------------------------------------------------------------------------------ benchmarks: mixed
MIXED = "mixed_h200.json"
_MIXED_KINDS = ("ideal", "padded", "single_launch", "grouped", "flex_flash", "flex_triton")
_OURS = ("padded", "single_launch", "grouped")



class Mixed:
    """The rows of one run of benchmarks.mixed."""

    def __init__(self, data: Row) -> None:
        self.rows: list[Row] = data["rows"]
        self.works = list(dict.fromkeys(row["work"] for row in self.rows))

    def of(self, work: str, *dispatches: str, backward: bool, graphed: bool = True, **equal: Any) -> list[Row]:
        return [
            row
            for row in self.rows
            if row["work"] == work
            and row["dispatch"] in dispatches
            and row["backward"] is backward
            and row["graphed"] is graphed
            and "new_geometry" not in row
            and all(row.get(key) == value for key, value in equal.items())
        ]

    def best(self, work: str, *dispatches: str, backward: bool) -> Row | None:
        return _best(self.of(work, *dispatches, backward=backward))

    def describe(self, work: str) -> Row:
        return next(row for row in self.rows if row["work"] == work)


def mixed_times(mixed: Mixed) -> str:
    """Per work, forward and forward + backward, graphed: the fastest backend of each kind."""
    header = ("work", "tokens", "sequences", "policies", "pass", *_MIXED_KINDS, "best of ours / ideal")
    body = []
    for work in mixed.works:
        for backward in (False, True):
            found = {kind: _ms(mixed.best(work, kind, backward=backward)) for kind in _MIXED_KINDS}
            ours = _ms(mixed.best(work, *_OURS, backward=backward))
            d = mixed.describe(work)
            what = "forward + backward" if backward else "forward"
            body.append((work, d["tokens"], d["sequences"], d["policies"], what, *found.values(), _ratio(ours, found["ideal"])))
    return table(header, body)


def mixed_backends(mixed: Mixed) -> str:
    """Per work and backend: its padded dispatch against its own ideal, its grouped dispatch, and the same kernel on rows gathered
    per policy by hand, forward + backward."""
    body = []
    for work in mixed.works:
        for backend in dict.fromkeys(row["backend"] for row in mixed.rows if row["work"] == work):
            padded, ideal, grouped, by_hand = (
                _ms(_best(mixed.of(work, kind, backward=True, backend=backend)))
                for kind in ("padded", "ideal", "grouped", "grouped_by_hand")
            )
            if padded is not None:
                ratios = (_ratio(padded, ideal), _ratio(grouped, padded), _ratio(by_hand, padded))
                body.append((work, backend, padded, ideal, grouped, by_hand, *ratios))
    times = ("padded ms", "ideal ms", "grouped ms", "by hand ms")
    return table(("work", "backend", *times, "padded / ideal", "grouped / padded", "by hand / padded"), body)


def mixed_auto(mixed: Mixed) -> str:
    """What "auto" took, against the best dispatch."""
    body = []
    for work in mixed.works:
        best = mixed.best(work, *_OURS, backward=True)
        if best is None:
            continue
        static, measured = (_best(mixed.of(work, "auto", backward=True, selection=how)) for how in ("static", "measured"))
        ratios = (_ratio(_ms(static), best["ms"]), _ratio(_ms(measured), best["ms"]))
        body.append((work, f"{best['dispatch']} ({best['backend']})", best["ms"], *ratios))
    return table(("work", "best", "ms", "auto, static / best", "auto, measured / best"), body)


def mixed_geometry(mixed: Mixed) -> str:
    """A new batch geometry every step: the preparation, and its share of a layer."""
    body = []
    for row in mixed.rows:
        if row.get("new_geometry") and row.get("ms"):
            preparation = row.get("plan_ms") if row.get("plan_ms") is not None else row.get("mask_ms")
            body.append((row["work"], row["dispatch"], row["backend"], row["layers"], preparation, row["ms"]))
    return table(("work", "dispatch", "backend", "layers", "preparation ms", "forward + backward ms per layer"), body) if body else ""


def mixed_host(mixed: Mixed) -> str:
    """Host time of an eager forward call beside that of the library's own entry."""
    body = []
    for work in mixed.works:
        for row in mixed.of(work, "padded", backward=False, graphed=False):
            of_backend = {"backward": False, "graphed": False, "backend": row["backend"]}
            raw, uniform = (next(iter(mixed.of(work, kind, **of_backend)), {}) for kind in ("raw", "uniform_causal"))
            one = (raw.get("host_us"), uniform.get("host_us"), uniform.get("host_us_grad"))
            body.append((work, row["backend"], *one, row["policies"], row.get("host_us"), row.get("host_us_grad")))
    header = ("work", "backend", "its own entry (us)", "ours", "with gradients", "policies", "ours", "with gradients")
    return table(header, body) if body else ""


def _mixed_page(parts_of: Callable[[Mixed], list[str]]) -> str:
    data = read(MIXED)
    if data is None:
        return missing(MIXED, "python -m benchmarks.mixed")
    return paragraphs(provenance(data, MIXED), *parts_of(Mixed(data)))


def mixed_page() -> str:
    """For the page on dispatches."""
    return _mixed_page(
        lambda mixed: [
            plot("mixed_h200.png", "Forward and backward of mixed batches, as a multiple of the fastest ideal"),
            "Milliseconds under CUDA graphs, the fastest backend of each kind. *ideal* is the same kernel on data that was compacted for "
            "free, with nothing restored afterwards; the FlexAttention columns have their block mask prebuilt.",
            mixed_times(mixed),
            'What `"auto"` took, forward and backward:',
            mixed_auto(mixed),
        ]
    )


def mixed_details_page() -> str:
    """For the page on benchmarks."""

    def parts_of(mixed: Mixed) -> list[str]:
        geometry, host = mixed_geometry(mixed), mixed_host(mixed)
        return [
            "Forward and backward of each backend, graphed, against its own ideal:",
            mixed_backends(mixed),
            "A new geometry every step, its preparation shared by the layers of a model:" if geometry else "",
            geometry,
            "Host time of an eager forward call:" if host else "",
            host,
        ]

    return _mixed_page(parts_of)


# ---------------------------------------------------------------------------------------------------------- benchmarks: padding
PADDING = "padding_h200.json"


def padding_times(data: Row) -> str:
    rows = data["rows"]
    backends = list(dict.fromkeys((row["backend"], bool(row["padded"])) for row in rows))
    titles = [f"{backend} {'padded' if padded else 'native'}" for backend, padded in backends]
    body = []
    for widths, training in dict.fromkeys(((r["head_dim_qk"], r["head_dim_v"]), bool(r["training"])) for r in rows):
        here = [r for r in rows if (r["head_dim_qk"], r["head_dim_v"]) == widths and bool(r["training"]) is training]
        times = {(r["backend"], bool(r["padded"])): r.get("ms") for r in here}
        body.append((f"{widths[0]}/{widths[1]}", "training" if training else "inference", *[times.get(key) for key in backends]))
    return table(("head_dim qk/v", "", *titles), body)


def padding_choices(data: Row) -> str:
    body = []
    for choice in data.get("choices", ()):
        key = (choice["head_dim_qk"], choice["head_dim_v"], bool(choice["training"]))
        here = [r for r in data["rows"] if (r["head_dim_qk"], r["head_dim_v"], bool(r["training"])) == key]
        best = _best(here)
        chosen = _best(r for r in here if r["backend"] == choice["backend"] and bool(r["padded"]) is bool(choice["padded"]))
        how = f"{choice['backend']} {'padded' if choice['padded'] else 'native'}"
        mode = "training" if key[2] else "inference"
        body.append((f"{key[0]}/{key[1]}", mode, choice["selection"], how, _ms(chosen), _ratio(_ms(chosen), _ms(best))))
    return table(("head_dim qk/v", "", "selection", "choice", "ms", "choice / best"), body)


def padding_cost(data: Row) -> str:
    cost = data.get("pad_cost") or []
    body = [
        (f"{c['head_dim_qk']}/{c['head_dim_v']}", c.get("backend"), "compiled" if c["compiled"] else "eager", c.get("ms"), c["ms_extra"])
        for c in cost
    ]
    return table(("head_dim qk/v", "backend", "", "step ms", "of it padding ms"), body) if body else ""


def padding_page() -> str:
    data = read(PADDING)
    if data is None:
        return missing(PADDING, "python -m benchmarks.padding")
    cost = padding_cost(data)
    return paragraphs(
        provenance(data, PADDING),
        plot("padding_h200.png", "Time of each backend, native and padded, by head widths"),
        "Milliseconds: the forward in inference, forward and backward in training, pad and trim included. Empty: the backend refuses.",
        padding_times(data),
        "What the selection took:",
        padding_choices(data),
        "What padding adds to a training step whose values come from a projection:" if cost else "",
        cost,
    )


# ----------------------------------------------------------------------------------------------- benchmarks: layers, demo, tests
LAYERS, DEMO, GPU_TESTS = "layers_h200.json", "demo_h200.json", "gpu_tests.json"


RATIOS = {
    "mixed_over_mean_uniform": "half causal, half full",
    "mixed_with_plan_over_mean_uniform": "the same, another partition each step",
    "grouped_over_mean_uniform": "the same, grouped",
}


def layers_ratios(data: Row) -> str:
    """A step with a mixed batch, over the mean of an all-causal and an all-full one."""
    body = [(variant, *[_with_spread(result, ratio) for ratio in RATIOS]) for variant, result in data["variants"].items()]
    return table(("model", *RATIOS.values()), body)


def _with_spread(result: Row, key: str) -> str | None:
    value, spread = result.get(key), result.get(f"{key}_spread")
    if value is None:
        return None
    return f"{value:.3f}" + (f" ({spread[0]:.3f} to {spread[1]:.3f})" if spread else "")


def layers_steps(data: Row) -> str:
    body = []
    for variant, result in data["variants"].items():
        chosen = result.get("chosen", {})
        body += [(variant, name, chosen.get(name), ms) for name, ms in result["step_ms"].items()]
    return table(("model", "batch", "ran on", "step ms"), body)


def layers_page() -> str:
    data = read(LAYERS)
    if data is None:
        return missing(LAYERS, "python -m benchmarks.layers")
    return paragraphs(
        provenance(data, LAYERS),
        "A step with a mixed batch, as a multiple of the mean of an all-causal and an all-full one; least and largest over the rounds:",
        layers_ratios(data),
        "The steps themselves:",
        layers_steps(data),
    )


def demo_page() -> str:
    data = read(DEMO)
    if data is None:
        return missing(DEMO, "python examples/train_packed.py --report docs/results/demo_h200.json")
    counts = ("graph_breaks", "compilations", "compilations_after_warmup")
    keys = ("loss_first", "loss_last", *counts, "backend", "dispatch", "head_dim_padded", "tokens_per_second")
    body = [(f"`{key}`", data[key]) for key in keys if key in data]
    return f"{provenance(data, DEMO)}\n\n{table(('figure', 'value'), body)}"


def gpu_tests_page() -> str:
    data = read(GPU_TESTS)
    if data is None:
        return missing(GPU_TESTS, "python -m benchmarks.gpu_tests")
    counts = ", ".join(f"{data[key]} {key}" for key in ("passed", "failed", "skipped") if key in data)
    outcome = f"The GPU tests' last committed outcome: {counts}, at commit `{str(data.get('commit', 'unknown'))[:12]}`."
    return f"{outcome} {provenance(data, GPU_TESTS).replace('Measured', 'Run')}\n"


# -------------------------------------------------------------------------------------------------- what the backends refuse
PRESUMED = {
    "flash-attn": "2.8.3",
    "flash-attn-3": "3.0.0",
    "flash-attn-4": flash4.VERSION_READ,
    "nvidia-cutlass-dsl": "4.8.0",
    "apache-tvm-ffi": "0.1.12",
    "quack-kernels": "0.6.0",
    "nvidia-cudnn-frontend": "1.32.0",
    "triton": "3.6.0",
}
PRESUMED_CUDNN = 91900
ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120)
WIDTHS = (
    *[(width, width) for width in (64, 96, 128, 192, 256, 512)],
    *[(96, 64), (128, 64), (128, 96), (160, 128), (192, 64), (192, 128), (256, 128)],
    *[(64, 128), (128, 192)],
)
_CAUSAL, _TOP_LEFT, _WINDOW = Band(None, 0, True), Band(None, 0, False), Band(128, 0, True)
# What a call asks for beyond a causal training step of equal lengths in bfloat16 at 128/128.
FEATURES: dict[str, Row] = {
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
    "fewer key/value heads (4 of 16)": {"num_gqa_groups": 4},
    "fewer key/value heads, 192/128": {"num_gqa_groups": 4, "head_dim_qk": 192},
    "a window": {"bands": (_WINDOW,)},
    "a window that is bounded on the left alone": {"bands": (Band(128, None, True),)},
    "bottom-right, unequal lengths": {"equal_lengths": False},
    "top-left, unequal lengths": {"bands": (_TOP_LEFT,), "equal_lengths": False},
    "more query than key tokens": {"equal_lengths": False, "max_seqlen_kv": 2048},
    "gaps between sequences": {"has_gaps": True},
    "deterministic": {"deterministic": True},
    "deterministic, head_dim 256": {"deterministic": True, "head_dim_qk": 256, "head_dim_v": 256},
    "return_max_logit": {"return_max_logit": True},
    "return_max_logit, inference": {"return_max_logit": True, "is_training": False},
    "mutable=True policies": {"static_membership": False},
}


@contextlib.contextmanager
def presumed_installed() -> Iterator[None]:
    """Every backend's library counts as installed in the version it was written against, and none is there to be asked: what is left
    are the limits that the adapters know by themselves."""
    version = PRESUMED.get
    versions = {
        "torch_flash": torch.__version__,
        "flash2": PRESUMED["flash-attn"],
        "flash3": PRESUMED["flash-attn-3"],
        "cudnn_flex": PRESUMED["nvidia-cudnn-frontend"],
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: False))
        stack.enter_context(mock.patch.object(flash4, "package_version", lambda name, **_: version(name)))
        stack.enter_context(mock.patch.object(cudnn, "package_version", lambda name, **_: version(name)))
        stack.enter_context(mock.patch.object(cudnn, "cudnn_version", lambda: PRESUMED_CUDNN))
        for name, found in versions.items():
            stack.enter_context(mock.patch.object(type(get_backend(name)), "version", lambda self, found=found: found))
        yield


def _params(sm: int, **changes: Any) -> AttentionParams:
    return AttentionParams(sm=sm, single_launch_plan=True, **changes)


def _refusals(name: str, p: AttentionParams) -> list[str]:
    return list(get_backend(name).refusals(p))


def _width_cell(name: str, sm: int, widths: tuple[int, int]) -> str:
    trains, runs = (not _refusals(name, _params(sm, head_dim_qk=widths[0], head_dim_v=widths[1], is_training=t)) for t in (True, False))
    return "trains" if trains else "forward" if runs else NO


def _by_architecture(rows_of: Callable[[int], list[tuple[str, ...]]]) -> dict[tuple[tuple[str, ...], ...], list[int]]:
    """Architectures with equal rows share a table."""
    groups: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for sm in ARCHITECTURES:
        groups.setdefault(tuple(rows_of(sm)), []).append(sm)
    return groups


def _title(architectures: list[int]) -> str:
    return ", ".join(f"sm{sm}" for sm in architectures)


def widths_page() -> str:
    def rows_of(sm: int) -> list[tuple[str, ...]]:
        return [(f"{w[0]}/{w[1]}", *[_width_cell(name, sm, w) for name in BACKEND_NAMES]) for w in WIDTHS]

    with presumed_installed():
        groups = _by_architecture(rows_of)
    parts = [f"### {_title(sms)}\n\n{table(('head_dim qk/v', *BACKEND_NAMES), rows)}" for rows, sms in groups.items()]
    return "\n".join(parts)


def features_page() -> str:
    def rows_of(sm: int) -> list[tuple[str, ...]]:
        return [
            (text, *["yes" if not _refusals(name, _params(sm, **changes)) else NO for name in BACKEND_NAMES])
            for text, changes in FEATURES.items()
        ]

    with presumed_installed():
        groups = _by_architecture(rows_of)
    parts = [f"### {_title(sms)}\n\n{table(('', *BACKEND_NAMES), rows)}" for rows, sms in groups.items()]
    return "\n".join(parts)


def reasons_page() -> str:
    """Every kind of refusal in these grids once, with the first call that met it."""
    parts = []
    with presumed_installed():
        for name in BACKEND_NAMES:
            found: dict[str, tuple[str, str]] = {}
            for what, p in _grid():
                for reason in _refusals(name, p):
                    # Reasons that differ in their numbers alone are of one kind.
                    found.setdefault(re.sub(r"[\d.]+", "#", reason), (reason, what))
            lines = [f"* {reason} (sm{what})" for reason, what in found.values()]
            parts.append(f"`{name}`\n\n" + ("\n".join(lines) if lines else "* refuses none of these calls") + "\n")
    return "\n".join(parts)


def _grid() -> Iterator[tuple[str, AttentionParams]]:
    for sm in (90, *[other for other in ARCHITECTURES if other != 90]):
        for widths in WIDTHS:
            for training in (False, True):
                what = f"{sm}, {widths[0]}/{widths[1]}, {'training' if training else 'inference'}"
                yield what, _params(sm, head_dim_qk=widths[0], head_dim_v=widths[1], is_training=training)
        for text, changes in FEATURES.items():
            yield f"{sm}, {text}", _params(sm, **changes)


def tiles_page() -> str:
    body = [(f"`{name}`", "reaches neighbours" if get_backend(name).loads_whole_tiles else "is not read") for name in BACKEND_NAMES]
    return table(("backend", "a non-finite row of no sequence"), body)


def presumed_page() -> str:
    packages = ", ".join(f"{name} {version}" for name, version in PRESUMED.items())
    return f"These tables presume cuDNN {cudnn.version_text(PRESUMED_CUDNN)}, {packages}, and builds that lack no kernel.\n"


def refused_page() -> str:
    """What the modules refuse by name."""

    def neutral(values: tuple[object, ...]) -> str:
        return ", ".join(f"`{value!r}`" for value in values)

    body = [(f"`{name}`", neutral(values), reason) for name, (values, reason) in _UNSUPPORTED.items()]
    return table(("argument", "accepted", "why no other value"), body)


README_WORKS = ("33k-p2", "33k-p4", "32k-p8", "8k-p4", "4k-p2")


def readme_block() -> str:
    """The README's results: mixed batches, the padding decision, a model's step. Only what is there."""
    parts = []
    data = read(MIXED)
    if data is not None:
        mixed = Mixed(data)
        body = []
        for work in (name for name in README_WORKS if name in mixed.works):
            d, ours = mixed.describe(work), mixed.best(work, *_OURS, backward=True)
            ideal, flash, triton = (_ms(mixed.best(work, kind, backward=True)) for kind in ("ideal", "flex_flash", "flex_triton"))
            what = f"{d['tokens']:,} tokens, {d['sequences']} sequences, {d['policies']} masks"
            body.append((what, _ms(ours), ideal, _ratio(_ms(ours), ideal), flash, triton))
        peers = ("ideal: compacted for free", "ours / ideal", "FlexAttention FLASH", "FlexAttention Triton")
        header = ("forward + backward, ms", "te_attn_ops", *peers)
        title = (
            "Mixed masks in one batch, 16 heads of 128, bfloat16, under CUDA graphs. The ideal is one launch per mask, by the fastest "
            "library here, on sequences sorted by mask for free; all masks in one launch can beat it:"
        )
        parts += [title, table(header, body), provenance(data, MIXED)]
    data = read(LAYERS)
    if data is not None:
        text = "A training step with a mixed batch, as a multiple of the mean of an all-causal and an all-full one:"
        parts += [text, layers_ratios(data), provenance(data, LAYERS)]
    if not parts:
        parts = ["No results in this checkout: `python -m benchmarks` on a GPU writes them to `docs/results/`."]
    return "\n\n".join(part.strip() for part in parts)


# ----------------------------------------------------------------------------------------------------------------------- outputs
BLOCKS: dict[str, tuple[Path, Callable[[], str]]] = {
    "results": (README, readme_block),
    "mixed": (DOCS / "dispatch.md", mixed_page),
    "mixed_details": (DOCS / "benchmarks.md", mixed_details_page),
    "padding": (DOCS / "padding.md", padding_page),
    "layers": (DOCS / "benchmarks.md", layers_page),
    "demo": (DOCS / "benchmarks.md", demo_page),
    "gpu_tests": (DOCS / "backends.md", gpu_tests_page),
    "tiles": (DOCS / "backends.md", tiles_page),
    "presumed": (DOCS / "backends.md", presumed_page),
    "widths": (DOCS / "backends.md", widths_page),
    "features": (DOCS / "backends.md", features_page),
    "reasons": (DOCS / "backends.md", reasons_page),
    "refused": (DOCS / "refused.md", refused_page),
}


def with_block(text: str, name: str, block: str) -> str:
    """A page's text with the block between its markers.

    Raises:
        ValueError: it has no markers of that name.
    """
    begin, end = f"<!-- {name}: begin (python docs/make_tables.py) -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the lines {begin} and {end} are needed once each")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{block.strip()}\n{end}{rest.split(end)[1]}"


def stale_pages() -> dict[Path, str]:
    """The pages whose blocks are out of date, with what they should be."""
    fresh: dict[Path, str] = {}
    for name, (page, make) in BLOCKS.items():
        fresh[page] = with_block(fresh.get(page) or page.read_text(), name, make())
    return {page: text for page, text in fresh.items() if text != page.read_text()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a block is out of date")
    arguments = parser.parse_args()
    stale = stale_pages()
    for page, text in stale.items():
        if arguments.check:
            print(f"{page.relative_to(ROOT)} is out of date: run python docs/make_tables.py", file=sys.stderr)
        else:
            page.write_text(text)
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
