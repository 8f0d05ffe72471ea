"""The flash-attn package, version 2, through its C++ module: unlike its Python functions that takes ``out`` and the gradients.

A build may have been made with fewer kernels than its version has (one that knows a single architecture or a few head
dimensions, say), and nothing in it says so. So the last step of a refusal is a trial of the kernel in question.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..environment import package_version, version_tuple
from ..params import AttentionParams
from ._fa2 import Fa2Backend, Grads, Launch
from .base import BackwardCall, ForwardCall

_MODULE = "flash_attn_2_cuda"
# 2.6 brought the log-sum-exp as [heads, total_q]; before, it was padded to [batch, heads, max_seqlen_q].
_OLDEST, _BEYOND = (2, 6), (3,)
_BACKWARD_ARGUMENTS = 24


@functools.cache
def _library() -> Any:
    return importlib.import_module(_MODULE)


def _argument_count(function: Any) -> int:
    """How many arguments a pybind11 function takes, all of them required: its docstring lists them as arg0, arg1, ..."""
    return len(re.findall(r"\barg\d+:", function.__doc__ or ""))


@functools.cache
def _forward_extras() -> tuple[bool, tuple[int, ...]]:
    """Whether varlen_fwd has the argument leftpad_k, and what follows its last known one.

    21 arguments from 2.6.2 or so to 2.8.3; 20 without leftpad_k before; 22 with a trailing num_splits (0: not split) since.

    Raises:
        RuntimeError: for a number that is not known.
    """
    count = _argument_count(_library().varlen_fwd)
    known = {0: (True, ()), 20: (False, ()), 21: (True, ()), 22: (True, (0,))}
    if count not in known:
        raise RuntimeError(f"{_MODULE}.varlen_fwd takes {count} arguments, known are 20, 21 and 22")
    count_backward = _argument_count(_library().varlen_bwd)
    if count_backward not in (0, _BACKWARD_ARGUMENTS):
        raise RuntimeError(f"{_MODULE}.varlen_bwd takes {count_backward} arguments, known are {_BACKWARD_ARGUMENTS}")
    return known[count]


class Flash2(Fa2Backend):
    name = "flash2"
    fills_given_buffers = True
    build_may_lack_kernels = True

    def version(self) -> str | None:
        return package_version("flash-attn", module=_MODULE)

    def library_refusals(self, p: AttentionParams) -> Iterator[str]:
        version = self.version()
        if version is None:
            yield "flash-attn 2 is not installed"
        elif version != "unknown" and not _OLDEST <= version_tuple(version) < _BEYOND:
            yield f"needs flash-attn >= 2.6 and < 3, found {version}"

    def launch_forward(self, call: ForwardCall, launch: Launch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        if out is None:
            out = torch.empty_like(call.q, memory_format=torch.contiguous_format)
        has_leftpad, trailing = _forward_extras()
        result = _library().varlen_fwd(
            call.q,
            call.k,
            call.v,
            out,
            launch.cu_q,
            launch.cu_kv,
            None,  # seqused_k
            *((None,) if has_leftpad else ()),  # leftpad_k
            None,  # block_table
            None,  # alibi_slopes
            launch.max_q,
            launch.max_kv,
            0.0,  # p_dropout
            call.scale,
            False,  # zero_tensors
            launch.causal,
            launch.left,
            launch.right,
            0.0,  # softcap
            False,  # return_softmax
            None,  # generator
            *trailing,
        )
        # 2.6 returns (out, q, k, v, out_padded, lse, p, rng_state), later versions (out, lse, p, rng_state).
        return out, result[-3]

    def launch_backward(self, call: BackwardCall, launch: Launch, grads: Grads | None) -> Grads:
        if grads is None:
            dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.q, call.k, call.v))
        else:
            dq, dk, dv = grads
        _library().varlen_bwd(
            call.grad_out,
            call.q,
            call.k,
            call.v,
            call.out,
            call.lse,
            dq,
            dk,
            dv,
            launch.cu_q,
            launch.cu_kv,
            None,  # alibi_slopes
            launch.max_q,
            launch.max_kv,
            0.0,  # p_dropout
            call.scale,
            False,  # zero_tensors
            launch.causal,
            launch.left,
            launch.right,
            0.0,  # softcap
            call.deterministic,
            None,  # generator
            None,  # rng_state
        )
        return dq, dk, dv
