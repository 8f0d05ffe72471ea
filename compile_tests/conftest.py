"""Every test starts as a process does after import: nothing chosen, nothing compiled, no variable of ours set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import fresh_caches, pytest_collection_modifyitems

__all__ = ["fresh_caches", "pytest_collection_modifyitems"]


@pytest.fixture(autouse=True)
def fresh_process(fresh_caches: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in list(os.environ):
        if variable.startswith(("NVTE_", "TE_ATTN_OPS_")):
            monkeypatch.delenv(variable)
    yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests measured and do not judge, or judge by a wide ceiling: compile times in seconds, host times as ratios."""
    lines = [
        f"{report.nodeid.split('::')[1]}: {', '.join(f'{name} {value}' for name, value in report.user_properties)}"
        for report in terminalreporter.stats.get("passed", ())
        if report.when == "call" and report.nodeid.startswith("compile_tests/") and report.user_properties
    ]
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.line(line)
