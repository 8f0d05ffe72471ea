"""The ``gpu`` marker, and a fixture for tests that count what the package remembers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from te_attn_ops import attention, environment, masks
from tests.stubs import forget_choices


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture
def fresh_caches() -> Iterator[None]:
    """A process as it is after import: no choice, routing, checked list, warning or compiled graph is remembered."""
    _forget_everything()
    yield
    _forget_everything()


def _forget_everything() -> None:
    forget_choices()
    environment.forget()
    attention._ROUTINGS._entries.clear()
    attention._RAW_LISTS._entries.clear()
    masks._WARNED.clear()
    torch._dynamo.reset()
