"""The kernels as their own libraries hand them out: the floor that the public function is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_attn_ops.backends import get_backend
from te_attn_ops.backends.base import BackwardCall, ForwardCall
from te_attn_ops.masks import Band


@dataclass
class Compact:
    """One policy's sequences, compacted for free: plain cu_seqlens, no other sequence between them."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    band: Band


Runner = Callable[[Compact, bool], Callable[[], Any]]


def _flash4(c: Compact, backward: bool) -> Callable[[], Any]:
    from flash_attn.cute import interface

    causal = c.band.is_causal
    common = {
        "softmax_scale": c.q.shape[-1] ** -0.5,
        "causal": causal,
        "window_size_left": None if causal else c.band.left,
        "window_size_right": None if causal else c.band.right,
        "cu_seqlens_q": c.cu_seqlens,
        "cu_seqlens_k": c.cu_seqlens,
        "max_seqlen_q": c.max_seqlen,
        "max_seqlen_k": c.max_seqlen,
    }

    def run() -> Any:
        out, lse = interface._flash_attn_fwd(c.q, c.k, c.v, return_lse=True, **common)[:2]
        if backward:
            return interface._flash_attn_bwd(c.q, c.k, c.v, out, c.grad_out, lse, **common)
        return out, lse

    return run


def _torch_flash(c: Compact, backward: bool) -> Callable[[], Any]:
    ops = torch.ops.aten
    causal = c.band.is_causal
    window = {} if causal or c.band.is_full else {"window_size_left": c.band.left, "window_size_right": c.band.right}
    scale = c.q.shape[-1] ** -0.5
    lengths = (c.cu_seqlens, c.cu_seqlens, c.max_seqlen, c.max_seqlen, 0.0, causal)

    def run() -> Any:
        out, lse, seed, unused, _ = ops._flash_attention_forward(c.q, c.k, c.v, *lengths, False, scale=scale, **window)
        if backward:
            saved = (c.grad_out, c.q, c.k, c.v, out, lse)
            return ops._flash_attention_backward(*saved, *lengths, seed, unused, scale=scale, **window)
        return out, lse

    return run


def _adapter(name: str) -> Runner:
    """The package's adapter on compacted data: for libraries whose entry is a graph that somebody has to build."""

    def make(c: Compact, backward: bool) -> Callable[[], Any]:
        backend = get_backend(name)
        lens = c.cu_seqlens.diff()[None].contiguous()
        common: dict[str, Any] = {
            "q": c.q, "k": c.k, "v": c.v, "starts_q": c.cu_seqlens, "lens_q": lens, "starts_kv": c.cu_seqlens, "lens_kv": lens,
            "bands": (c.band,), "max_seqlen_q": c.max_seqlen, "max_seqlen_kv": c.max_seqlen, "scale": c.q.shape[-1] ** -0.5,
            "plain_cu_seqlens": True, "equal_lengths": True, "deterministic": False, "single_launch_plan": [],
            "contiguous_run": True, "first": True,
        }  # fmt: skip

        def run() -> Any:
            forward = ForwardCall(**common, is_training=backward)
            backend.forward(forward)
            if not backward:
                return forward.out, forward.lse
            call = BackwardCall(**common, grad_out=c.grad_out, out=forward.out, lse=forward.lse)
            backend.backward(call)
            return call.grads

        return run

    return make


def _cudnn_entry(c: Compact, backward: bool) -> Callable[[], Any]:
    """The frontend's Python entry for packed attention. Its graph takes other layouts than ours, so it stands for host time only."""
    if backward:
        return _adapter("cudnn")(c, backward)
    from cudnn.sdpa.fwd.torch_op import sdpa

    scale = c.q.shape[-1] ** -0.5
    lengths = {"cu_seqlens_q": c.cu_seqlens, "cu_seqlens_kv": c.cu_seqlens, "max_seqlen_q": c.max_seqlen, "max_seqlen_kv": c.max_seqlen}

    def run() -> Any:
        return sdpa(c.q, c.k, c.v, scale=scale, is_causal=c.band.is_causal, return_lse=True, **lengths)

    return run


def ideal_runner(backend: str) -> Runner:
    """The kernels on compacted data, nothing restored."""
    return {"flash4": _flash4, "torch_flash": _torch_flash}.get(backend) or _adapter(backend)


def raw_runner(backend: str) -> Runner:
    """The library's own entry: what a caller would write without this package."""
    return _cudnn_entry if backend == "cudnn" else ideal_runner(backend)
