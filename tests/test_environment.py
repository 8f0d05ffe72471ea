"""The environment as one snapshot, and the small helpers beside it."""

from __future__ import annotations

import importlib.metadata
import os

import pytest

from te_attn_ops import environment
from te_attn_ops.environment import Environment


@pytest.mark.parametrize("variable", [*environment.SWITCHES, "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "TE_ATTN_OPS_SELECTION"])
def test_snapshot_sees_a_variable_set_changed_and_unset(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv(variable, raising=False)
    unset = environment.snapshot()
    monkeypatch.setenv(variable, "0")
    zero = environment.snapshot()
    os.environ[variable] = "2"
    two = environment.snapshot()
    del os.environ[variable]
    assert len({unset, zero, two}) == 3 and environment.snapshot() == unset


@pytest.mark.parametrize(("value", "off"), [("0", True), ("1", False), ("", False), ("false", False), ("00", False)])
def test_zero_and_nothing_else_disables(monkeypatch: pytest.MonkeyPatch, value: str, off: bool) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", value)
    snapshot = Environment(*environment.snapshot())
    assert snapshot.disabled("NVTE_FUSED_ATTN") is off
    assert not snapshot.disabled("NVTE_UNFUSED_ATTN")


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("4.0.0b36", (4, 0, 0)),
        ("2.8.3", (2, 8, 3)),
        ("1.32.0+cu13", (1, 32, 0)),
        ("2.11.0+cu130", (2, 11, 0)),
        ("unknown", ()),
        (None, ()),
    ],
)
def test_version_tuple(version: str | None, numbers: tuple[int, ...]) -> None:
    assert environment.version_tuple(version) == numbers


def test_package_version() -> None:
    assert environment.package_version("torch") == importlib.metadata.version("torch")
    assert environment.package_version("no-such-package", "torch") == importlib.metadata.version("torch")
    assert environment.package_version("no-such-package") is None
    assert environment.package_version("torch", module="no_such_module") is None
    assert environment.package_version("torch", module="no_such.module") is None
    assert environment.package_version("no-such-package", module="torch") == "unknown"


def test_generation_is_a_string_that_changes() -> None:
    before = environment.STATE.generation
    environment.raise_generation()
    assert isinstance(before, str) and environment.STATE.generation != before
