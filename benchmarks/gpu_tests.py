"""Runs ``pytest -m gpu`` and writes its outcome: ``python -m benchmarks.gpu_tests [--commit HASH] [--out FILE] [pytest arguments]``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from . import common


class _Outcome:
    """Counts what pytest reports, and keeps why tests were skipped or failed."""

    def __init__(self) -> None:
        self.passed = self.failed = self.skipped = 0
        self.skips: dict[str, int] = {}
        self.failures: list[str] = []
        self.slowest: list[tuple[float, str]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call":
            self.slowest.append((round(report.duration, 2), report.nodeid))
        if report.passed and report.when == "call":
            self.passed += 1
        elif report.failed:
            self.failed += 1
            self.failures.append(report.nodeid)
        elif report.skipped:
            self.skipped += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skips[reason] = self.skips.get(reason, 0) + 1


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_tests", description=__doc__)
    parser.add_argument("--commit", default=None, help="default: HEAD of this checkout")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "gpu_tests.json")
    arguments, rest = parser.parse_known_args()
    if importlib.util.find_spec("xdist") is not None and not any(argument.startswith(("-n", "--numprocesses")) for argument in rest):
        rest = ["-n", str(max(1, min(8, (os.cpu_count() or 2) // 2))), *rest]  # most of the time goes into compiling kernels
    outcome, start = _Outcome(), time.time()
    code = pytest.main(["-m", "gpu", "-q", "-p", "no:cacheprovider", *rest], plugins=[outcome])
    common.write_json(
        arguments.out,
        {
            "commit": arguments.commit or _commit(),
            "device": common.device_name(),
            "versions": common.versions(),
            "command": common.command_line(),
            "passed": outcome.passed,
            "failed": outcome.failed,
            "skipped": outcome.skipped,
            "seconds": round(time.time() - start, 1),
            "skips": outcome.skips,
            "failures": outcome.failures,
            "slowest": sorted(outcome.slowest, reverse=True)[:15],
        },
    )
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
