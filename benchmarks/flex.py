"""FlexAttention on the same works: one sequence of all tokens, the document and the policy in the mask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


@functools.cache
def _compiled() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)


def mask_tensors(s: Any) -> tuple[Tensor, ...]:
    """Document, position and band of each token, as int32 tensors on the device."""
    lengths = torch.tensor(s.work.lengths, device="cuda")
    document = torch.repeat_interleave(torch.arange(len(s.work.lengths), device="cuda"), lengths, output_size=sum(s.work.lengths))
    position = torch.arange(document.numel(), device="cuda") - s.cu_seqlens[:-1].long()[document]
    far = 1 << 30
    left = torch.tensor([far if s.bands[p].left is None else s.bands[p].left for p in s.owner], device="cuda")
    right = torch.tensor([far if s.bands[p].right is None else s.bands[p].right for p in s.owner], device="cuda")
    return tuple(x.to(torch.int32) for x in (document, position, left, right))


def block_mask(s: Any, tensors: tuple[Tensor, ...], block: tuple[int, int] | int = 128) -> Any:
    document, position, left, right = tensors

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = document[i] == document[j]
        return same & (position[j] >= position[i] - left[document[i]]) & (position[j] <= position[i] + right[document[i]])

    total = document.numel()
    return _compiled()[1](visible, None, None, total, total, device="cuda", BLOCK_SIZE=block)


def caller(s: Any, mask: Any, backend: str, backward: bool) -> Callable[[], Any]:
    attention = _compiled()[0]
    q, k, v = (x.detach().transpose(0, 1)[None].requires_grad_(backward) for x in (s.q, s.k, s.v))
    grad_out = s.grad_out.transpose(0, 1)[None]
    options = {"BACKEND": backend}
    enable_gqa = s.q.shape[1] != s.k.shape[1]

    def run() -> Any:
        out = attention(q, k, v, block_mask=mask, kernel_options=options, enable_gqa=enable_gqa)
        return torch.autograd.grad(out, (q, k, v), grad_out) if backward else out

    return run


def variants(s: Any) -> Iterator[tuple[dict[str, Any], Callable[[bool, bool], Callable[[], Any]]]]:
    """FlexAttention's two backends with a prebuilt block mask; the mask's own creation stands in ``mask_ms``."""
    from . import common

    tensors = mask_tensors(s)
    for dispatch, backend in (("flex_triton", "TRITON"), ("flex_flash", "FLASH")):
        # The FLASH template's tiles on Hopper; Triton's default is 128 x 128.
        mask = block_mask(s, tensors)
        creation = common.time_device(lambda: block_mask(s, tensors), budget_ms=40)
        label = {"backend": dispatch, "dispatch": dispatch, "mask_ms": creation.ms}
        yield label, lambda backward, grad, mask=mask, backend=backend: caller(s, mask, backend, backward)
