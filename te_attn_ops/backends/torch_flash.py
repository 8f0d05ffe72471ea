"""PyTorch's own copy of FlashAttention 2, through aten::_flash_attention_forward and _flash_attention_backward.

It is there wherever torch was built with CUDA, and returns fresh full-size tensors only. Since torch 2.11
``torch.nn.attention.activate_flash_attention_impl`` can replace the kernels behind these ops for the whole process; what is
stated here (NaN next to a sequence, windows, empty entries) would no longer hold, so the backend refuses as long as another
one is active. A change is seen at the next choice: call :func:`te_attn_ops.invalidate` after it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.attention
from torch import Tensor

from ..environment import deterministic_algorithms
from ..params import AttentionParams
from ._fa2 import Fa2Backend, Grads, Launch
from .base import BackwardCall, ForwardCall


def _replacement() -> str | None:
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()


class TorchFlash(Fa2Backend):
    name = "torch_flash"

    def version(self) -> str | None:
        return str(torch.__version__) if torch.backends.cuda.is_flash_attention_available() else None

    def library_refusals(self, p: AttentionParams) -> Iterator[str]:
        replacement = _replacement()
        if replacement is not None:
            yield f"torch's flash kernel is replaced by {replacement} (see torch.nn.attention.restore_flash_attention_impl)"
        if p.wide_offsets:
            # Seen on an H200 (torch 2.11): 140,000 rows of 128 heads of 128 end in an illegal memory access.
            yield "needs tensors of fewer than 2^31 elements, found larger ones"
        if p.is_training and p.deterministic and not p.deterministic_algorithms:
            yield "is deterministic only under torch.use_deterministic_algorithms(True, warn_only=False), which is off"

    def launch_forward(self, call: ForwardCall, launch: Launch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        fresh, lse, *_ = torch.ops.aten._flash_attention_forward.default(
            call.q,
            call.k,
            call.v,
            launch.cu_q,
            launch.cu_kv,
            launch.max_q,
            launch.max_kv,
            0.0,  # dropout_p
            launch.causal,
            False,  # return_debug_mask
            scale=call.scale,
            window_size_left=launch.left,
            window_size_right=launch.right,
        )
        return fresh, lse

    def launch_backward(self, call: BackwardCall, launch: Launch, grads: Grads | None) -> Grads:
        # The op asks torch's global flag and nothing else, and reads warn_only as no (attention_backward.cu).
        if call.deterministic and not deterministic_algorithms():
            # The flag was on when the backend was chosen. Setting it here would reach other threads' operations.
            raise RuntimeError(
                "torch_flash was chosen for a deterministic backward, but torch.use_deterministic_algorithms(True) is off now; "
                "turn it on, or call te_attn_ops.invalidate() so that another backend is chosen"
            )
        unused = call.lse.new_empty(0)  # random state: read with dropout only
        dq, dk, dv = torch.ops.aten._flash_attention_backward.default(
            call.grad_out,
            call.q,
            call.k,
            call.v,
            call.out,
            call.lse,
            launch.cu_q,
            launch.cu_kv,
            launch.max_q,
            launch.max_kv,
            0.0,  # dropout_p
            launch.causal,
            unused,
            unused,
            scale=call.scale,
            window_size_left=launch.left,
            window_size_right=launch.right,
        )
        return dq, dk, dv
