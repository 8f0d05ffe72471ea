"""docs/compile_promises.md: each promise names tests, and each name is a test that exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compile_promises.md"
LINK = re.compile(r"(GPU: )?\[`((?:compile_tests|tests)/[\w/]+\.py)::(\w+)`\]\(\.\./\2\)")
LIMIT = "This is no promise but a limit."


def promises() -> list[str]:
    """The page's list items, each with its lines joined."""
    text = PAGE.read_text()
    return [" ".join(item.split()) for item in re.findall(r"^\* (.*(?:\n  .*)*)", text, flags=re.M)]


@functools.cache
def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@functools.cache
def needs_gpu(path: Path) -> bool:
    return "pytestmark = pytest.mark.gpu" in path.read_text()


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise[:40])
def test_a_promise_names_tests_that_exist(promise: str) -> None:
    links = LINK.findall(promise)
    assert bool(links) is not promise.endswith(LIMIT), "a promise without a test is a claim"
    for marked, path, name in links:
        assert (ROOT / path).is_file(), f"{path} does not exist"
        assert name.startswith("test_") and name in functions_of(ROOT / path), f"{path} has no test {name}"
        assert bool(marked) is needs_gpu(ROOT / path), f"{path}::{name} is marked GPU where it is none, or not where it is"


def test_every_link_is_read() -> None:
    """Nothing that looks like a link escapes the pattern, and none stands outside of a promise."""
    text = PAGE.read_text()
    assert len(LINK.findall(text)) == text.count("::test_") == sum(len(LINK.findall(promise)) for promise in promises())


def test_every_file_of_compile_tests_holds_a_promise() -> None:
    linked = {Path(path) for _, path, _ in LINK.findall(PAGE.read_text())}
    files = {path.relative_to(ROOT) for path in (ROOT / "compile_tests").glob("test_*.py")}
    assert files <= linked
