"""Backends without kernels: what a machine could have installed, on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from te_attn_ops import AttentionParams, attention, backends, measure, selection
from te_attn_ops.backends import BACKEND_NAMES, backend_number, get_backend
from te_attn_ops.backends.base import ForwardCall
from te_attn_ops.backends.unfused import Unfused

Refuse = Callable[[AttentionParams], Iterator[str]]


class Stub(Unfused):
    """A backend under a real one's name, with limits of our own; it computes by way of unfused.

    ``before_forward`` is called with each forward call (to fail, or to note it).
    """

    def __init__(
        self,
        name: str,
        refuse: Refuse | None = None,
        *,
        installed: bool = True,
        before_forward: Callable[[ForwardCall], None] | None = None,
    ) -> None:
        self.name = name
        self.switches = getattr(get_backend(name), "switches", ())
        self.single_launch = get_backend(name).single_launch
        self.asked: list[AttentionParams] = []
        self._refuse, self._installed, self._before_forward = refuse, installed, before_forward

    def version(self) -> str | None:
        return "1.0" if self._installed else None

    def refusals(self, p: AttentionParams) -> Iterator[str]:
        self.asked.append(p)
        if self._refuse is not None:
            yield from self._refuse(p)

    def forward(self, call: ForwardCall) -> None:
        if self._before_forward is not None:
            self._before_forward(call)
        super().forward(call)


def install(monkeypatch: pytest.MonkeyPatch, *stubs: Stub) -> None:
    """Makes the stubs all that is installed, for one test."""
    present = {stub.name: stub for stub in stubs}
    for name in BACKEND_NAMES:
        stub = present.get(name) or Stub(name, installed=False)
        # Through monkeypatch one after the other: each restores what it found.
        monkeypatch.setitem(backends._instances, name, stub)
        monkeypatch.setitem(backends._by_number, backend_number(name), stub)
    forget_choices()


def forget_choices() -> None:
    selection._MEMO.clear()
    selection._fast.clear()
    attention._DECISIONS.clear()
    measure._CACHE.forget()


@pytest.fixture(autouse=True)
def fresh_choices(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No choice or measurement outlives a test; none is read from the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    for variable in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN", "TE_ATTN_OPS_SELECTION"):
        monkeypatch.delenv(variable, raising=False)
    forget_choices()
    yield
    forget_choices()


def refuse_native(p: AttentionParams) -> Iterator[str]:
    if p.head_dim_qk != p.head_dim_v:
        yield f"needs equal head dims, found {p.head_dim_qk} and {p.head_dim_v}"


def refuse_padded(p: AttentionParams) -> Iterator[str]:
    if p.head_dim_qk == p.head_dim_v:
        yield f"refuses equal head dims, found {p.head_dim_qk}"


def refuse_all(p: AttentionParams) -> Iterator[str]:
    yield "refuses everything"
