"""FlashAttention 3 (Hopper), through the torch ops that its extension registers: flash_attn_3::fwd and flash_attn_3::bwd.

A subset goes in as it is: cu_seqlens = starts and seqused = lens. With seqused a kernel takes only the beginning of a sequence
from cu_seqlens (hopper/seqlen.h), ascending starts are all that it asks for, and only rows below seqused are written, zeros
included where a row sees no key or a key is seen by no row; so everything but lse goes straight into the call's buffers.

There is no package on PyPI. A build is found under either name that it installs, and may lack features
(FLASH_ATTENTION_DISABLE_* at build time): ``flash_attn_config.CONFIG`` tells where there is one, and a trial run does in the
end. Never run by this project's own tests: they bind its arguments to the ops' schemas and emulate the ops.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from .. import rows
from ..environment import package_version
from ..params import AttentionParams
from ._fa2 import kernel_window, probe
from .base import Backend, BackwardCall, ForwardCall, bottom_right_only_refusals, common_fused_refusals

_MODULES = ("flash_attn_3._C", "flash_attn_interface", "flash_attn_3.flash_attn_interface")
_CONFIG_MODULES = ("flash_attn_config", "flash_attn_3.flash_attn_config")
_WIDTHS = (64, 96, 128, 192, 256)

FORWARD_ARGUMENTS = (
    "q",
    "k",
    "v",
    "out",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "is_causal",
    "window_size_left",
    "window_size_right",
    "num_splits",
)
BACKWARD_ARGUMENTS = (
    "dout",
    "q",
    "k",
    "v",
    "out",
    "softmax_lse",
    "dq",
    "dk",
    "dv",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "is_causal",
    "window_size_left",
    "window_size_right",
    "deterministic",
)


# ------------------------------------------------------------------------------------------------------------------- library
class BoundOp:
    """A torch op called by argument name. Its schema has grown over time, and not every build gives every optional argument a
    default: what this adapter does not name gets the schema's default, or None where it is optional.

    Raises:
        RuntimeError: an argument of ours that the op lacks, or one of the op's that must be given and is not known here.
    """

    def __init__(self, op: Any, given: Collection[str]) -> None:
        schema = op._schema
        missing = set(given) - {argument.name for argument in schema.arguments}
        if missing:
            raise RuntimeError(f"{schema.name} has no argument {', '.join(sorted(missing))}")
        self._op = op
        self._template: list[tuple[str, Any]] = []
        for argument in schema.arguments:
            default = argument.default_value if argument.has_default_value() else None
            optional = isinstance(argument.type, torch.OptionalType)
            if argument.name not in given and not argument.has_default_value() and not optional:
                raise RuntimeError(f"{schema.name} needs an argument {argument.name} that is not known here")
            self._template.append((argument.name, default))

    def __call__(self, values: Mapping[str, Any]) -> Any:
        return self._op(*[values.get(name, default) for name, default in self._template])


def _registered() -> bool:
    return hasattr(torch.ops.flash_attn_3, "fwd") and hasattr(torch.ops.flash_attn_3, "bwd")


def _load() -> Any:
    """torch.ops.flash_attn_3, registered by whichever of its modules is there."""
    failures = []
    for module in _MODULES:
        if _registered():
            break
        try:
            importlib.import_module(module)
        except ImportError as error:
            failures.append(f"{module}: {error}")
    if not _registered():
        raise RuntimeError(f"no module registers the ops flash_attn_3::fwd and bwd ({'; '.join(failures)})")
    return torch.ops.flash_attn_3


@functools.cache
def _forward_op() -> BoundOp:
    return BoundOp(_load().fwd.default, FORWARD_ARGUMENTS)


@functools.cache
def _backward_op() -> BoundOp:
    return BoundOp(_load().bwd.default, BACKWARD_ARGUMENTS)


def build_flags() -> Mapping[str, bool]:
    """FLASHATTENTION_DISABLE_* of the installed build; empty where it does not tell."""
    for module in _CONFIG_MODULES:
        try:
            flags = importlib.import_module(module).CONFIG["build_flags"]
        except (ImportError, AttributeError, KeyError):
            continue
        return flags
    return {}


# ------------------------------------------------------------------------------------------------------------------ refusals
def _kernel_width(width: int, flags: Mapping[str, bool]) -> int | None:
    """The head dimension of the kernel that serves a width: the next one that was built (flash_api.cpp: round_up_headdim)."""
    built = (w for w in _WIDTHS if not flags.get(f"FLASHATTENTION_DISABLE_HDIM{w}", False))
    return next((w for w in built if w >= width), None)


def _width_refusals(p: AttentionParams, flags: Mapping[str, bool]) -> Iterator[str]:
    """hopper/flash_api.cpp: mha_fwd and mha_bwd."""
    d, dv = p.head_dim_qk, p.head_dim_v
    if d > 256:
        yield f"needs head_dim_qk <= 256, found {d}"
        return
    narrow, mla = d <= 64 and dv <= 512, 128 < d <= 192 and 96 < dv <= 128
    if d != dv and not narrow and not mla:
        yield f"takes head_dim_qk != head_dim_v only for <= 64 with <= 512 and (128, 192] with (96, 128], found {d} and {dv}"
    for flag, used in (("HDIMDIFF64", d <= 64 < dv), ("HDIMDIFF192", mla)):
        if used and flags.get(f"FLASHATTENTION_DISABLE_{flag}", False):
            yield f"its build has no kernel for head_dim_qk {d} with head_dim_v {dv} ({flag} disabled)"
    if _kernel_width(d, flags) is None:
        yield f"its build has no kernel for head_dim_qk {d}"
    if not p.is_training:
        return
    widest = max(d, dv)
    kernel_width = _kernel_width(widest, flags) if widest <= 256 else None
    if widest > 256:
        yield f"its backward needs head_dim_qk and head_dim_v <= 256, found {d} and {dv}"
    elif kernel_width is None:
        yield f"its build has no backward kernel for head_dim {widest}"
    elif p.deterministic and kernel_width >= 256:
        yield f"has no deterministic backward in its head dimension 256 kernel, which serves {widest}"


def _build_refusals(p: AttentionParams, flags: Mapping[str, bool]) -> Iterator[str]:
    local = any(not band.is_full and not band.is_causal for band in p.bands)
    for flag, used, what in (
        ("VARLEN", True, "packed sequences"),
        ("BACKWARD", p.is_training, "the backward"),
        ("FP16", p.dtype == torch.float16, "float16"),
        ("LOCAL", local, "sliding windows"),
    ):
        if used and flags.get(f"FLASHATTENTION_DISABLE_{flag}", False):
            yield f"its build lacks {what} (FLASHATTENTION_DISABLE_{flag})"


class Flash3(Backend):
    name = "flash3"
    switches = ("NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V3")
    # TMA brings in whole tiles; the rows of a neighbour are masked only after P V, where 0 times NaN is NaN.
    loads_whole_tiles = True
    reads_lens = False

    def version(self) -> str | None:
        return package_version("flash-attn-3", module="flash_attn_3") or package_version(
            "flash-attn-3", module="flash_attn_interface"
        )

    def refusals(self, p: AttentionParams) -> Iterator[str]:
        reasons = list(self._static_refusals(p))
        if not reasons:
            reason = probe(self, p)
            reasons = [] if reason is None else [reason]
        yield from reasons

    def _static_refusals(self, p: AttentionParams) -> Iterator[str]:
        if self.version() is None:
            yield "flash-attn 3 is not installed"
        yield from common_fused_refusals(p, max_head_dim=512, min_sm=0)
        if p.device_type == "cuda" and p.sm != 90:
            yield f"runs on sm90 only, found sm{p.sm}"
        yield from bottom_right_only_refusals(p)
        if p.return_max_logit:
            yield "does not return max_logit"
        flags = build_flags()
        yield from _width_refusals(p, flags)
        yield from _build_refusals(p, flags)

    def forward(self, call: ForwardCall) -> None:
        left, right = kernel_window(call.band, call.max_seqlen_q, call.max_seqlen_kv)
        out = call.out
        whole = call.plain_cu_seqlens
        _, lse, *_ = _forward_op()(
            {
                "q": call.q,
                "k": call.k,
                "v": call.v,
                "out": out,
                "cu_seqlens_q": call.starts_q,
                "cu_seqlens_k": call.starts_kv,
                "seqused_q": None if whole else call.seqused_q,
                "seqused_k": None if whole else call.seqused_kv,
                "max_seqlen_q": max(call.max_seqlen_q, 1),
                "max_seqlen_k": max(call.max_seqlen_kv, 1),
                "softmax_scale": call.scale,
                "is_causal": left < 0 and right == 0,
                "window_size_left": left,
                "window_size_right": right,
                # 0 would let a heuristic split the keys, which needs buffers of its own and changes the order of sums.
                "num_splits": 1,
            }
        )
        if call.first:
            rows.normalize_lse(lse)
            call.adopt(out, lse)
        else:
            rows.select_lse(call.lse, lse, call.starts_q, call.seqused_q)

    def backward(self, call: BackwardCall) -> None:
        left, right = kernel_window(call.band, call.max_seqlen_q, call.max_seqlen_kv)
        dq, dk, dv = call.grads
        whole = call.plain_cu_seqlens
        _backward_op()(
            {
                "dout": call.grad_out,
                "q": call.q,
                "k": call.k,
                "v": call.v,
                "out": call.out,
                # A keyless row's -inf counts as 0 in its preprocess kernel.
                "softmax_lse": call.lse,
                "dq": dq,
                "dk": dk,
                "dv": dv,
                "cu_seqlens_q": call.starts_q,
                "cu_seqlens_k": call.starts_kv,
                "seqused_q": None if whole else call.seqused_q,
                "seqused_k": None if whole else call.seqused_kv,
                "max_seqlen_q": max(call.max_seqlen_q, 1),
                "max_seqlen_k": max(call.max_seqlen_kv, 1),
                "softmax_scale": call.scale,
                "is_causal": left < 0 and right == 0,
                "window_size_left": left,
                "window_size_right": right,
                "deterministic": call.deterministic,
            }
        )
