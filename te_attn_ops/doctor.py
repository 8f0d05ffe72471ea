"""``python -m te_attn_ops doctor``: what is installed, and whether it computes the right thing on this device."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import te_attn_ops

from . import environment, testing
from .backends import BACKEND_NAMES, get_backend
from .logs import ProgressLine
from .policies import PlanSpec
from .selection import NoBackendError

_PACKAGES = ("triton", "flash-attn", "flash-attn-4", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "transformer-engine")
# A refusal that no installation can change.
_WRONG_DEVICE = re.compile(r"found (sm\d+|cpu)\b")

_LENGTHS = (67, 1, 0, 130)
_MASKS = (testing.CAUSAL, testing.FULL)
_OWNER = (0, 1, 0, 1)


@dataclass(frozen=True)
class BackendState:
    """``state``: passed, failed, refused (installed, takes nothing here), wrong_device or not_installed."""

    name: str
    version: str | None
    state: str
    detail: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.state not in ("failed", "refused")


@dataclass(frozen=True)
class Report:
    versions: dict[str, str | None]
    device: dict[str, Any]
    environment: dict[str, str]
    backends: tuple[BackendState, ...]

    @property
    def passed(self) -> bool:
        return all(state.ok for state in self.backends)

    def to_dict(self) -> dict[str, Any]:
        backends = [{**state.__dict__, "seconds": round(state.seconds, 3)} for state in self.backends]
        return {**self.__dict__, "backends": backends, "passed": self.passed}

    def __str__(self) -> str:
        lines = [f"{name:<24}{version or 'not installed'}" for name, version in self.versions.items()]
        lines += [f"{name:<24}{value}" for name, value in self.device.items()]
        lines += [f"{name:<24}{value}" for name, value in self.environment.items()]
        lines.append("")
        for s in self.backends:
            took = f" ({s.seconds:.1f} s)" if s.state in ("passed", "failed") else ""
            detail = f": {s.detail}" if s.detail else ""
            lines.append(f"{s.name:<14}{s.version or '-':<16}{s.state.replace('_', ' ')}{took}{detail}")
        installed = [s for s in self.backends if s.state != "not_installed"]
        passed = sum(s.state == "passed" for s in installed)
        return "\n".join([*lines, "", f"{passed} of {len(installed)} installed backends passed their self-test"])


def examine() -> Report:
    """Runs every installed backend's self-test: forward and backward of a small packed batch, under one mask and under two
    policies, against the unfused backend; that one against the closed form. The first run compiles kernels (a minute or so)."""
    states = []
    with ProgressLine() as progress:
        for name in BACKEND_NAMES:
            progress.show(f"testing {name}")
            states.append(_examine_backend(name))
    return Report(_versions(), _device(), _environment(), tuple(states))


# ------------------------------------------------------------------------------------------------------------- the self-test
def _examine_backend(name: str) -> BackendState:
    version = get_backend(name).version()
    if version is None:
        return BackendState(name, None, "not_installed")
    begin = time.perf_counter()
    try:
        detail = "; ".join(dict.fromkeys(_self_test(name)))
        state = "passed"
    except NoBackendError as error:
        reasons = list(dict.fromkeys(line.split("): ", 1)[-1] for line in str(error).splitlines()[1:]))
        state = "wrong_device" if any(map(_WRONG_DEVICE.search, reasons)) else "refused"
        detail = "; ".join(reasons)
    except Exception as error:  # whatever a foreign library raises, it is the finding
        lines = str(error).strip().splitlines() or [""]
        state, detail = "failed", f"{type(error).__name__}: {' '.join(lines)[:300]}"
    return BackendState(name, version, state, detail, time.perf_counter() - begin)


def _self_test(name: str) -> Iterator[str]:
    """Notes on what was left out.

    Raises:
        NoBackendError: the backend takes no case.
        AssertionError: its results are wrong.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    one = testing.PackedCase(_LENGTHS, head_dim_qk=64, dtype=dtype, masks=_MASKS[:1])
    two = one.replace(masks=_MASKS, owner=_OWNER)
    if name == "unfused":
        for case in (one, two):
            testing.assert_closed_form(case, device, backend=name)
        return
    cases = {"one mask": one, "full attention": one.replace(masks=_MASKS[1:]), "two policies": two}
    if get_backend(name).single_launch:
        cases = {"two policies": two}
    refused: dict[str, NoBackendError] = {}
    for what, case in cases.items():
        try:
            yield from _compare(name, testing.build(case, device))
        except NoBackendError as error:
            refused[what] = error
    if len(refused) == len(cases):
        raise next(iter(refused.values()))
    if refused:
        yield f"takes not: {', '.join(refused)}"


def _compare(name: str, inputs: testing.PackedInputs) -> Iterator[str]:
    overrides: dict[str, Any] = {"backend": name}
    if get_backend(name).single_launch:
        case = inputs.case
        spec = PlanSpec(case.dtype, case.num_heads, case.groups, case.head_dim_qk, case.width_v, training=True)
        overrides["thd_attention_policies"] = inputs.prepare(attention=spec)
        overrides["thd_attention_policy_dispatch"] = "single_launch"
    expected = inputs.run(backend="unfused")
    try:
        found: Any = inputs.run(**overrides)
    except NoBackendError:
        with torch.no_grad():  # no backward here: the forward may still be of use
            out, lse = inputs.attend(return_lse=True, **overrides)
        found = testing.Results(out, lse, None, None, None, None)
        yield "inference only"
    for field, value in found._asdict().items():
        reference = getattr(expected, field)
        if value is None or reference is None:
            continue
        close = testing.tolerances(inputs.case.dtype, reference[reference.isfinite()])
        try:
            torch.testing.assert_close(value, reference, rtol=close["rtol"], atol=close["atol"])
        except AssertionError as error:
            raise AssertionError(f"{field}: {error}") from None


# ------------------------------------------------------------------------------------------------------------- surroundings
def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "te_attn_ops": te_attn_ops.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda (of torch)": torch.version.cuda,
        "cudnn (loaded)": str(torch.backends.cudnn.version() or "") or None,
    }
    return found | {name: environment.package_version(name) for name in _PACKAGES}


def _device() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"device": f"cpu ({platform.machine()}), no CUDA device"}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name,
        "compute capability": f"sm{10 * properties.major + properties.minor}",
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "devices": torch.cuda.device_count(),
    }


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("NVTE_", "TE_ATTN_OPS_"))}
