"""Checks of single arguments that several entry points share: a clear error, with the name, the value seen and what would be right."""

from __future__ import annotations

import operator

import torch
from torch import Tensor


def check_bool(name: str, value: object, or_none: bool = False) -> None:
    if not isinstance(value, bool) and not (or_none and value is None):
        raise TypeError(f"{name} must be a bool{' or None' if or_none else ''}, got {type(value).__name__} {value!r}")


def check_int(name: str, value: object) -> int:
    """An int of any library's making, as a plain one."""
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    return operator.index(value)


def check_positive_int(name: str, value: object) -> int:
    """:func:`check_int` of at least 1."""
    number = check_int(name, value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return number


def check_dtype(name: str, value: object) -> None:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype, got {type(value).__name__} {value!r}")


def check_selection(selection: object) -> None:
    if selection not in (None, "static", "measured"):
        raise ValueError(f"selection={selection!r} is unknown; use 'static' or 'measured'")
