"""Backends without kernels: what a machine could have installed, on any machine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from te_attn_ops import AttentionParams, attention, backends, measure, selection
from te_attn_ops.backends import BACKEND_NAMES, backend_number, cudnn, get_backend
from te_attn_ops.backends.base import BackwardCall, ForwardCall
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


class OneLaunch(Stub):
    """All policies in one launch, on any device: its plan is the lengths of each policy's sequences, and it holds calls to it."""

    def __init__(self, name: str = "cudnn_flex") -> None:
        super().__init__(name)
        self.launches = 0

    def make_plan(self, *, lens_q: Tensor, lens_kv: Tensor, **_: Any) -> list[Tensor]:
        return [lens_q.clone(), lens_kv.clone()]

    def refresh_plan(self, plan: list[Tensor], *, lens_q: Tensor, lens_kv: Tensor, **_: Any) -> None:
        for tensor, lens in zip(plan, (lens_q, lens_kv)):
            tensor.copy_(lens)

    def forward(self, call: ForwardCall) -> None:
        self.launches += 1
        for part in self._parts(call, _out=call.out, _lse=call.lse, first=False):
            super().forward(part)

    def backward(self, call: BackwardCall) -> None:
        for part in self._parts(call, _grads=call.grads, first=False):
            super().backward(part)

    @staticmethod
    def _parts(call: Any, **changes: Any) -> Iterator[Any]:
        assert torch.equal(call.single_launch_plan[0], call.lens_q) and torch.equal(call.single_launch_plan[1], call.lens_kv)
        for p in range(len(call.bands)):
            own = {"bands": call.bands[p : p + 1], "lens_q": call.lens_q[p : p + 1], "lens_kv": call.lens_kv[p : p + 1]}
            yield dataclasses.replace(call, **own, **changes)


def install(monkeypatch: pytest.MonkeyPatch, *stubs: Stub) -> None:
    """Makes the stubs all that is installed, for one test."""
    present = {stub.name: stub for stub in stubs}
    for name in BACKEND_NAMES:
        stub = present.get(name) or Stub(name, installed=False)
        # Through monkeypatch one after the other: each restores what it found.
        monkeypatch.setitem(backends._instances, name, stub)
        monkeypatch.setitem(backends._by_number, backend_number(name), stub)
    forget_choices()


def replace_cudnn(
    monkeypatch: pytest.MonkeyPatch, graph: type, spread_stats: Callable[..., None], token_major: Callable[[Tensor], Tensor]
) -> None:
    """cuDNN's adapter over graphs of our own, without the library, a GPU or Triton, for one test."""
    monkeypatch.setattr(cudnn, "Graph", graph)
    monkeypatch.setattr(cudnn, "_frontend", lambda: None)
    monkeypatch.setattr(cudnn, "_apart", lambda device, work: work())
    monkeypatch.setattr(cudnn, "_spread_stats", spread_stats)
    monkeypatch.setattr(cudnn, "_token_major_stats", token_major)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cudnn.Cudnn, "_handle", lambda self, device: SimpleNamespace(lock=contextlib.nullcontext()))


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
