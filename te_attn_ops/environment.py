"""What the outside says: environment variables as one guarded snapshot, device capabilities, the generation counter.

Dynamo guards ``os.environ.get("X")`` only where X is set at trace time, so a variable that is set later would go unnoticed
by compiled code (TransformerEngine has that fault). A read of the mapping behind ``os.environ`` with a literal bytes key is
guarded whether the key is there or not (seen on torch 2.8 to 2.14). That mapping is private to CPython and POSIX; elsewhere
the snapshot is empty strings for Dynamo and a change needs :func:`te_attn_ops.invalidate`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_ENVIRON: dict[bytes, bytes] = getattr(os.environ, "_data", {})


class Environment(NamedTuple):
    """One snapshot. ``"0"`` disables; everything else, also unset, enables, as in TransformerEngine."""

    flash_attn: bytes
    flash_attn_v2: bytes
    flash_attn_v3: bytes
    flash_attn_v4: bytes
    fused_attn: bytes
    unfused_attn: bytes
    allow_nondeterministic: bytes
    selection: bytes

    def disabled(self, switch: str) -> bool:
        """Whether an ``NVTE_*`` switch, given by its name, is off."""
        return getattr(self, SWITCHES[switch]) == b"0"


SWITCHES = {
    "NVTE_FLASH_ATTN": "flash_attn",
    "NVTE_FLASH_ATTN_V2": "flash_attn_v2",
    "NVTE_FLASH_ATTN_V3": "flash_attn_v3",
    "NVTE_FLASH_ATTN_V4": "flash_attn_v4",
    "NVTE_FUSED_ATTN": "fused_attn",
    "NVTE_UNFUSED_ATTN": "unfused_attn",
}


def snapshot() -> tuple[bytes, ...]:
    """The values that a choice may depend on. Literal keys: that is what makes Dynamo guard them."""
    return (
        _ENVIRON.get(b"NVTE_FLASH_ATTN", b"1"),
        _ENVIRON.get(b"NVTE_FLASH_ATTN_V2", b"1"),
        _ENVIRON.get(b"NVTE_FLASH_ATTN_V3", b"1"),
        _ENVIRON.get(b"NVTE_FLASH_ATTN_V4", b"1"),
        _ENVIRON.get(b"NVTE_FUSED_ATTN", b"1"),
        _ENVIRON.get(b"NVTE_UNFUSED_ATTN", b"1"),
        _ENVIRON.get(b"NVTE_ALLOW_NONDETERMINISTIC_ALGO", b"1"),
        _ENVIRON.get(b"TE_ATTN_OPS_SELECTION", b"static"),
    )


def is_tracing() -> bool:
    """Whether this call is being traced: by Dynamo, or on fake tensors by a non-strict export.

    ``torch.compiler.is_compiling`` is one flag for the whole process: it also reads True in a thread that prepares a batch or
    runs eagerly while another one compiles, and in code that a trace runs for its result.
    """
    return torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0)


@torch.compiler.assume_constant_result
def deterministic_algorithms() -> bool:
    """Whether torch.use_deterministic_algorithms(True, warn_only=False) is on. Dynamo guards that state of torch by itself."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


class _State:
    """``generation`` is a string: Dynamo never makes a string symbolic."""

    generation: str = "0"


STATE = _State()


def raise_generation() -> None:
    """Makes every compiled call choose again."""
    STATE.generation = str(int(STATE.generation) + 1)


@functools.cache
def compute_capability(device_index: int) -> int:
    """10 * major + minor of a CUDA device, for example 90."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


@functools.cache
def package_version(*distributions: str, module: str | None = None) -> str | None:
    """The version of the first installed one of some distribution names; None where ``module`` cannot be found."""
    if module is not None and not _module_exists(module):
        return None
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown" if module is not None else None


def _module_exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def version_tuple(version: str | None) -> tuple[int, ...]:
    """Leading integers of a version: ``"4.0.0b36"`` is (4, 0, 0)."""
    parts: list[int] = []
    for piece in (version or "").split("."):
        digits = ""
        for char in piece:
            if not char.isdigit():
                break
            digits += char
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


_ON_FORGET: list[Callable[[], None]] = []


def on_forget(action: Callable[[], None]) -> None:
    """Registers what a backend remembers of its library's answers, to be dropped by :func:`forget`."""
    _ON_FORGET.append(action)


def forget() -> None:
    """Drops what is remembered of packages, devices and libraries, so that the next probe looks again."""
    compute_capability.cache_clear()
    package_version.cache_clear()
    for action in _ON_FORGET:
        action()


def fingerprint(device_index: int | None) -> dict[str, Any]:
    """What a measurement is valid for: device name, torch, CUDA and cuDNN."""
    if device_index is None:
        return {"device": "cpu", "torch": torch.__version__}
    return {
        "device": torch.cuda.get_device_name(device_index),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
