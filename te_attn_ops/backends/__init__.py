"""The registry: one line per backend. The number is part of compiled graphs and never changes its meaning."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from .base import Backend


class _Entry(NamedTuple):
    number: int
    module: str
    class_name: str


_REGISTRY = {
    "unfused": _Entry(0, "unfused", "Unfused"),
    "torch_flash": _Entry(1, "torch_flash", "TorchFlash"),
    "flash2": _Entry(2, "flash2", "Flash2"),
    "flash3": _Entry(3, "flash3", "Flash3"),
    "flash4": _Entry(4, "flash4", "Flash4"),
    "cudnn": _Entry(5, "cudnn", "Cudnn"),
    "cudnn_flex": _Entry(6, "cudnn_flex", "CudnnFlex"),
}
BACKEND_NAMES = tuple(_REGISTRY)
_NAME_BY_NUMBER = {entry.number: name for name, entry in _REGISTRY.items()}
_instances: dict[str, Backend] = {}


def get_backend(name: str) -> Backend:
    """The one instance of a backend.

    Raises:
        ValueError: for a name that is not in the registry.
    """
    backend = _instances.get(name)
    if backend is None:
        entry = _REGISTRY.get(name)
        if entry is None:
            raise ValueError(f"backend={name!r} is unknown; use one of {', '.join(BACKEND_NAMES)}")
        module = importlib.import_module(f".{entry.module}", __name__)
        backend = _instances[name] = getattr(module, entry.class_name)()
    return backend


def backend_number(name: str) -> int:
    return _REGISTRY[name].number


def backend_name(number: int) -> str:
    return _NAME_BY_NUMBER[number]


_by_number: dict[int, Backend] = {}


def backend_by_number(number: int) -> Backend:
    """:func:`get_backend` of a plan's number, on the hot path."""
    backend = _by_number.get(number)
    if backend is None:
        backend = _by_number[number] = get_backend(backend_name(number))
    return backend
