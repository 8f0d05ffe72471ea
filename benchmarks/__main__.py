"""Runs the benchmarks, each in a process of its own, and compares their times with those of an earlier run.

    python -m benchmarks [--only mixed padding layers gpu_tests] [--out-dir DIR] [--compare FILE_OR_DIR]
    python -m benchmarks --only-compare OLD NEW

A comparison matches the rows whose identifying fields (work, backend, dispatch, widths and the like) are all equal, prints
the ratio new over old of their ``ms``, and flags changes of more than 5%. Its two sides are two runs: it shows a
regression, not which of two ways is faster. Exit code 0 if every benchmark succeeded, 1 if one did not, 2 for wrong
arguments or without a CUDA device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import common

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ("mixed", "padding", "layers", "gpu_tests")
# A change of less is not flagged: medians of two runs differ by as much.
THRESHOLD = 0.05
# What a row tells beside what it is: everything else identifies it.
MEASURED = frozenset(("ms", "ms_spread", "ms_extra", "host_us", "host_us_grad", "peak_bytes", "mask_ms", "plan_ms", "error"))

Data = dict[str, Any]
Key = tuple[tuple[str, str], ...]


# ------------------------------------------------------------------------------------------------------------ what a file holds
def kind_of(data: Data) -> str | None:
    """The benchmark that wrote a results file; None for another file."""
    if "variants" in data:
        return "layers"
    if {"passed", "failed", "skipped"} <= data.keys():
        return "gpu_tests"
    if "rows" in data:
        return "padding" if data.get("benchmark") == "padding" else "mixed"
    return None


def _rows(data: Data) -> Iterator[Data]:
    kind = kind_of(data)
    if kind == "mixed":
        yield from data["rows"]
    elif kind == "padding":
        for table in ("rows", "pad_cost"):
            for row in data.get(table, ()):
                yield {"table": table, **data.get("work", {}), **row}
    elif kind == "layers":
        for variant, result in data["variants"].items():
            for batch, ms in result["step_ms"].items():
                yield {**data.get("sizes", {}), "variant": variant, "batch": batch, "ms": ms}


def identity(row: Data) -> Data:
    """A row's identifying fields. One that is null says no more than one that is absent."""
    return {name: value for name, value in row.items() if name not in MEASURED and value is not None}


def timed_rows(data: Data) -> dict[Key, Data]:
    """The rows that have a time, by their identifying fields."""
    found: dict[Key, Data] = {}
    for row in _rows(data):
        if row.get("ms"):
            found.setdefault(tuple(sorted((name, str(value)) for name, value in identity(row).items())), row)
    return found


def headline(data: Data) -> str:
    """One line on a benchmark's results."""
    kind = kind_of(data)
    if kind == "mixed":
        timed = sum(bool(row.get("ms")) for row in data["rows"])
        return f"{timed} rows timed, {len(data['rows']) - timed} that cannot run"
    if kind == "padding":
        worst = (data.get("summary") or {}).get("static_of_best_worst")
        told = f"{len(data['rows'])} rows, {len(data.get('failures', ()))} failures"
        return told if worst is None else f"{told}; the static choice takes at most {worst:.2f}x the best row's time"
    if kind == "layers":
        ratios = [(name, result.get("mixed_over_mean_uniform")) for name, result in data["variants"].items()]
        return "; ".join(f"{name}: mixed is {ratio:.3f}x the mean of uniform" for name, ratio in ratios if ratio is not None)
    return ", ".join(f"{data[name]} {name}" for name in ("passed", "failed", "skipped"))


# ------------------------------------------------------------------------------------------------------------------ comparison
class Change(NamedTuple):
    """A row of both runs."""

    row: Data
    old_ms: float
    new_ms: float

    @property
    def ratio(self) -> float:
        return self.new_ms / self.old_ms

    @property
    def flag(self) -> str:
        if abs(self.ratio - 1.0) <= THRESHOLD:
            return ""
        return "slower" if self.ratio > 1.0 else "faster"


class Comparison(NamedTuple):
    """The rows of both runs, how many rows only one of them has, and how device and versions differ."""

    changes: list[Change]
    only_old: int
    only_new: int
    differences: list[str]


def compare(old: Data, new: Data) -> Comparison:
    before, after = timed_rows(old), timed_rows(new)
    changes = [Change(identity(row), before[key]["ms"], row["ms"]) for key, row in after.items() if key in before]
    versions_old, versions_new = ({"device": data.get("device"), **(data.get("versions") or {})} for data in (old, new))
    differences = [
        f"{name}: {versions_old.get(name)} before, {versions_new.get(name)} now"
        for name in dict.fromkeys([*versions_old, *versions_new])
        if versions_old.get(name) != versions_new.get(name)
    ]
    return Comparison(changes, len(before.keys() - after.keys()), len(after.keys() - before.keys()), differences)


def report(name: str, found: Comparison) -> str:
    """The comparison as Markdown. Fields that are equal in all rows stand above the table."""
    changes = found.changes
    text = [f"## {name}: {len(changes)} rows of both runs", ""]
    if found.differences:
        text += ["Not the same in both runs: " + "; ".join(found.differences) + ".", ""]
    if changes:
        fields = list(dict.fromkeys(field for change in changes for field in change.row))
        values = {field: {str(change.row.get(field)) for change in changes} for field in fields}
        varying = [field for field in fields if len(values[field]) > 1]
        shared = [f"{field} {changes[0].row[field]}" for field in fields if len(values[field]) == 1]
        if shared:
            text += ["In all rows: " + ", ".join(shared) + ".", ""]
        body = [[*map(change.row.get, varying), change.old_ms, change.new_ms, change.ratio, change.flag] for change in changes]
        text += [common.markdown_table((*varying, "old ms", "new ms", "new / old", "change"), body)]
    slower, faster = (sum(change.flag == flag for change in changes) for flag in ("slower", "faster"))
    median = f"; median of new / old {statistics.median(change.ratio for change in changes):.3f}" if changes else ""
    text += [
        f"{slower + faster} of {len(changes)} rows changed by more than {THRESHOLD:.0%}: {slower} slower, {faster} faster{median}."
        f" Without a partner: {found.only_old} old rows, {found.only_new} new rows."
    ]
    return "\n".join(text) + "\n"


def _load(path: Path) -> Data:
    """A JSON object; an empty one where there is none."""
    data = common.read_json(path)
    return data if isinstance(data, dict) else {}


def _read(path: Path) -> Data:
    """A results file.

    Raises:
        ValueError: it cannot be read, or no benchmark wrote it.
    """
    data = _load(path)
    if kind_of(data) is None:
        raise ValueError(f"{path}: no readable JSON of a benchmark" if path.exists() else f"{path}: there is no such file")
    return data


def _read_timed(path: Path) -> Data:
    data = _read(path)
    if not timed_rows(data):
        raise ValueError(f"{path}: has no times to compare ({kind_of(data)})")
    return data


def earlier_results(source: Path, outputs: dict[str, Path]) -> dict[str, Data]:
    """What ``--compare`` names, by benchmark: a file, or a folder's files that are called as the new ones.

    Raises:
        ValueError: nothing there is of one of these benchmarks.
    """
    if not source.is_dir():
        data = _read_timed(source)
        kind = str(kind_of(data))
        if kind not in outputs:
            raise ValueError(f"{source}: is of benchmarks.{kind}, which does not run (--only {' '.join(outputs)})")
        return {kind: data}
    found = {name: _read(source / path.name) for name, path in outputs.items() if (source / path.name).is_file()}
    timed = {name: data for name, data in found.items() if kind_of(data) == name and timed_rows(data)}
    if not timed:
        raise ValueError(f"{source}: holds none of {', '.join(path.name for path in outputs.values())} with times to compare")
    return timed


def pairs_of(old: Path, new: Path) -> dict[str, tuple[Data, Data]]:
    """What ``--only-compare`` names, by file name; in a folder, the files that are called as the other side's.

    Raises:
        ValueError: a file is not of a benchmark, two are of different ones, or no name is in both folders.
    """
    if old.is_dir() and new.is_dir():
        names = sorted({path.name for path in old.glob("*.json")} & {path.name for path in new.glob("*.json")})
        found = {name: (_load(old / name), _load(new / name)) for name in names}
        timed = {name: pair for name, pair in found.items() if all(timed_rows(data) for data in pair)}
        if not timed:
            raise ValueError(f"{old} and {new} share no results file with times")
    else:
        files = (old / new.name if old.is_dir() else old, new / old.name if new.is_dir() else new)
        timed = {files[1].name: (_read_timed(files[0]), _read_timed(files[1]))}
    for name, (before, after) in timed.items():
        if kind_of(before) != kind_of(after):
            kinds = f"the old file is of benchmarks.{kind_of(before)}, the new one of benchmarks.{kind_of(after)}"
            raise ValueError(f"{name}: {kinds}")
    return timed


# --------------------------------------------------------------------------------------------------------------------- running
class Outcome(NamedTuple):
    name: str
    exit_code: int
    seconds: float
    path: Path
    written: bool


def output_paths(names: Sequence[str], out_dir: Path) -> dict[str, Path]:
    slug = common.device_slug()
    return {name: out_dir / (f"{name}.json" if name == "gpu_tests" else f"{name}_{slug}.json") for name in names}


def _shown(path: Path) -> str:
    """Relative to the checkout where it is inside: a results file names its command."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def command_of(name: str, path: Path) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{name}", "--out", _shown(path)]


def _changed_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def run_one(name: str, path: Path, write: Callable[[str], Any]) -> Outcome:
    """Runs a benchmark in its own process and passes on its lines."""
    before, start = _changed_at(path), time.monotonic()
    process = subprocess.Popen(
        command_of(name, path),
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            write(line.rstrip("\n"))
    written = path.exists() and _changed_at(path) != before
    return Outcome(name, process.returncode, time.monotonic() - start, path, written)


def run(outputs: dict[str, Path]) -> list[Outcome]:
    """Runs the benchmarks one after another: a bar over them on a terminal with tqdm, a line for each elsewhere."""
    bar = common.progress(list(outputs), "benchmarks")
    write = getattr(bar, "write", lambda line: print(line, flush=True))
    outcomes = []
    for number, name in enumerate(bar):
        write(f"[{number + 1}/{len(outputs)}] benchmarks.{name} -> {_shown(outputs[name])}")
        outcomes.append(run_one(name, outputs[name], write))
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for outcome in outcomes:
        ended = "ok" if outcome.exit_code == 0 else f"exit code {outcome.exit_code}"
        told = headline(_read(outcome.path)) if outcome.written else "wrote no results"
        rows.append((outcome.name, ended, f"{outcome.seconds:.0f} s", _shown(outcome.path), told))
    return common.markdown_table(("benchmark", "outcome", "took", "results", ""), rows)


# ------------------------------------------------------------------------------------------------------------------------ main
def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=raw)
    names = ", ".join(BENCHMARKS)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=f"some of {names} (default all)")
    parser.add_argument("--out-dir", type=Path, default=common.RESULTS, metavar="DIR", help="default docs/results")
    parser.add_argument("--compare", type=Path, metavar="FILE_OR_DIR", help="earlier results to compare the new ones with")
    sides = ("OLD", "NEW")
    parser.add_argument("--only-compare", type=Path, nargs=2, metavar=sides, help="compare two files or folders, run nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 if a benchmark failed; wrong arguments and no CUDA device exit with 2 by SystemExit."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.only_compare is not None:
        if arguments.compare is not None or arguments.only is not None:
            parser.error("--only-compare runs nothing: give it without --compare and --only")
        try:
            pairs = pairs_of(*arguments.only_compare)
        except ValueError as error:
            parser.error(f"--only-compare {error}")
        for name, (old, new) in pairs.items():
            print(report(name, compare(old, new)))
        return 0
    out_dir = arguments.out_dir.resolve()
    if out_dir.exists() and not out_dir.is_dir():
        parser.error(f"--out-dir {arguments.out_dir}: is not a folder")
    outputs = output_paths(list(dict.fromkeys(arguments.only or BENCHMARKS)), out_dir)
    try:
        # Read before the run, which may write to the same place.
        earlier = earlier_results(arguments.compare, outputs) if arguments.compare is not None else {}
    except ValueError as error:
        parser.error(f"--compare {error}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, and torch finds none; --only-compare OLD NEW works without")
    outcomes = run(outputs)
    for outcome in outcomes:
        if outcome.written and outcome.name in earlier:
            print(report(outcome.path.name, compare(earlier[outcome.name], _read(outcome.path))))
    print(summary(outcomes))
    if out_dir == common.RESULTS:
        print("python docs/make_tables.py brings the README and the docs up to date with these results.")
    return int(any(outcome.exit_code for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
