"""Every test starts as a process does after import: nothing chosen, nothing compiled, no variable of ours set."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.conftest import fresh_caches, pytest_collection_modifyitems

__all__ = ["fresh_caches", "pytest_collection_modifyitems"]


@pytest.fixture(autouse=True)
def fresh_process(fresh_caches: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in list(os.environ):
        if variable.startswith(("NVTE_", "TE_ATTN_OPS_")):
            monkeypatch.delenv(variable)
    yield
