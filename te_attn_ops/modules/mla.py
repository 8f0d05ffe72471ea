"""The projections of multi-head latent attention, as DeepSeek-V2 and V3 define them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layers import InitMethod, Linear, Norm, reset_children
from .rope import RotaryTable, rotate


class LatentSizes(NamedTuple):
    """Widths of multi-head latent attention; ``q_lora_rank`` None projects queries directly."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def head_dims(self) -> tuple[int, int]:
        """(head_dim_qk, head_dim_v)."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim


def latent_sizes(**sizes: int | None) -> LatentSizes | None:
    """The sizes, checked to be complete; None where none of them is given.

    Raises:
        ValueError: some are given and others missing, or one is below 1 (qk_nope_head_dim: below 0).
    """
    if all(size is None for size in sizes.values()):
        return None
    missing = [name for name, size in sizes.items() if size is None and name != "q_lora_rank"]
    if missing:
        raise ValueError(f"multi-head latent attention needs {', '.join(missing)} too, got None")
    for name, size in sizes.items():
        if size is not None and size < (0 if name == "qk_nope_head_dim" else 1):
            raise ValueError(f"{name} must be at least {0 if name == 'qk_nope_head_dim' else 1}, got {size}")
    if sizes["qk_rope_head_dim"] % 2:  # type: ignore[operator]
        raise ValueError(f"qk_rope_head_dim must be even, got {sizes['qk_rope_head_dim']}")
    return LatentSizes(**sizes)  # type: ignore[arg-type]


class LatentProjection(torch.nn.Module):
    """hidden [..., hidden] to q, k [..., heads, nope + rope] and v [..., heads, v_head_dim].

    Parameters carry DeepSeek's names: ``q_a_proj``, ``q_a_layernorm``, ``q_b_proj`` (or ``q_proj``), ``kv_a_proj_with_mqa``,
    ``kv_a_layernorm``, ``kv_b_proj``. The rotary part of the key is one for all heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        sizes: LatentSizes,
        init_method: InitMethod,
        eps: float,
        bias: bool,
        normalization: str,
        zero_centered_gamma: bool,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.sizes = sizes
        head_dim_qk, head_dim_v = sizes.head_dims

        def norm(width: int) -> Norm:
            return Norm(width, eps, normalization, zero_centered_gamma, **factory)

        if sizes.q_lora_rank is None:
            self.q_proj = Linear(hidden_size, num_heads * head_dim_qk, init_method, bias=False, **factory)
        else:
            self.q_a_proj = Linear(hidden_size, sizes.q_lora_rank, init_method, bias=bias, **factory)
            self.q_a_layernorm = norm(sizes.q_lora_rank)
            self.q_b_proj = Linear(sizes.q_lora_rank, num_heads * head_dim_qk, init_method, bias=False, **factory)
        latent = sizes.kv_lora_rank + sizes.qk_rope_head_dim
        self.kv_a_proj_with_mqa = Linear(hidden_size, latent, init_method, bias=bias, **factory)
        self.kv_a_layernorm = norm(sizes.kv_lora_rank)
        expanded = num_heads * (sizes.qk_nope_head_dim + head_dim_v)
        self.kv_b_proj = Linear(sizes.kv_lora_rank, expanded, init_method, bias=False, **factory)

    def reset_parameters(self) -> None:
        reset_children(self)

    def forward(
        self, hidden_states: Tensor, tables: tuple[RotaryTable, RotaryTable] | None, interleaved: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``tables``: for q and k, each qk_rope_head_dim wide."""
        sizes = self.sizes
        if tables is not None and tables[0].cos.shape[-1] != sizes.qk_rope_head_dim:
            raise ValueError(
                f"rotary_pos_emb must be as wide as qk_rope_head_dim, {sizes.qk_rope_head_dim}, got {tables[0].cos.shape[-1]}"
            )
        if sizes.q_lora_rank is None:
            q = self.q_proj(hidden_states)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = q.unflatten(-1, (self.num_heads, -1))
        compressed, k_rope = self.kv_a_proj_with_mqa(hidden_states).split((sizes.kv_lora_rank, sizes.qk_rope_head_dim), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(compressed)).unflatten(-1, (self.num_heads, -1))
        k_nope, v = kv.split((sizes.qk_nope_head_dim, sizes.v_head_dim), dim=-1)
        k_rope = k_rope.unsqueeze(-2)
        if tables is not None:
            q_nope, q_rope = q.split((sizes.qk_nope_head_dim, sizes.qk_rope_head_dim), dim=-1)
            q = torch.cat((q_nope, rotate(q_rope, tables[0], interleaved)), dim=-1)
            k_rope = rotate(k_rope, tables[1], interleaved)
        k = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], -1)), dim=-1)
        return q, k, v

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.sizes._asdict().items())
