"""A transformer layer written down a second time, for one document at a time: no packing, no cu_seqlens, float64.

It reads our parameters by name and the constructor's arguments, and shares no code with the modules but the mask rule of
``te_attn_ops.testing``, which is itself a second writing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from te_attn_ops.testing import Mask, visible

Parameters = Mapping[str, Tensor]


def parameters_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """float64 leaves of the module's parameters."""
    return {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}


def _under(params: Parameters, prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) + 1 :]: p for name, p in params.items() if name.startswith(prefix + ".")}


# ---------------------------------------------------------------------------------------------------------------- small parts
def norm(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, eps: float, zero_centered: bool = False) -> Tensor:
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    x = x * (1 + weight if zero_centered else weight)
    return x if bias is None else x + bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


def rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [L, heads, d], angles [positions, 1, 1, w]: each pair of columns turned by its angle at the row's position."""
    width = angles.shape[-1]
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + width // 2) for i in range(width // 2)]
    columns = list(x.unbind(-1))
    for a, b in pairs:
        angle = angles[: x.shape[0], 0, :, a].to(x.dtype)
        first, second = columns[a], columns[b]
        columns[a] = first * angle.cos() - second * angle.sin()
        columns[b] = second * angle.cos() + first * angle.sin()
    return torch.stack(columns, -1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """[L_q, heads * d_v] of q [L_q, heads, d], k and v [L_k, groups, d]."""
    seen = visible(mask, q.shape[0], k.shape[0])
    outputs = []
    for head in range(q.shape[1]):
        group = head // (q.shape[1] // k.shape[1])
        scores = (q[:, head] @ k[:, group].T * scale).masked_fill(~seen, -math.inf)
        weights = torch.where(seen.any(1, keepdim=True), torch.softmax(scores, -1), 0.0)
        outputs.append(torch.where(seen, weights, 0.0) @ v[:, group])
    return torch.cat(outputs, -1)


def activation(x: Tensor, name: str) -> Tensor:
    def gelu(y: Tensor) -> Tensor:
        return 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))

    plain = {
        "gelu": gelu,
        "qgelu": lambda y: y / (1 + torch.exp(-1.702 * y)),
        "relu": lambda y: y.clamp(min=0),
        "srelu": lambda y: y.clamp(min=0) ** 2,
        "silu": lambda y: y / (1 + torch.exp(-y)),
        "sigmoid": lambda y: 1 / (1 + torch.exp(-y)),
    }
    if name in plain:
        return plain[name](x)
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    if name == "clamped_swiglu":
        first, second = torch.minimum(first, torch.tensor(7.0)), second.clamp(-7.0, 7.0)
        return first / (1 + torch.exp(-1.702 * first)) * (second + 1)
    inner = {"glu": "sigmoid", "geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
    return plain[inner[name]](first) * second


# --------------------------------------------------------------------------------------------------------------------- blocks
class Reference:
    """One layer's arithmetic. ``config``: the constructor's keyword arguments, of which those that matter here are read."""

    def __init__(self, hidden_size: int, heads: int, config: Mapping[str, Any], params: Parameters) -> None:
        self.hidden_size, self.heads, self.config, self.params = hidden_size, heads, config, params
        self.groups = config.get("num_gqa_groups") or heads
        self.head_dim = config.get("kv_channels") or hidden_size // heads

    def _get(self, name: str, default: Any = None) -> Any:
        return self.config.get(name, default)

    def _norm(self, x: Tensor, params: Parameters, prefix: str = "") -> Tensor:
        return norm(
            x,
            params[f"{prefix}weight"],
            params.get(f"{prefix}bias"),
            self._get("normalization", "LayerNorm"),
            self._get("layernorm_epsilon", 1e-5),
            self._get("zero_centered_gamma", False),
        )

    def _normed(self, x: Tensor, params: Parameters) -> Tensor:
        return self._norm(x, params, "layer_norm_") if "layer_norm_weight" in params else x

    def _split_heads(self, mixed: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """[L, sum of counts * d] into [L, count, d] each; with the fused interleaved layout each KV head's rows stand together."""
        heads = mixed.unflatten(-1, (-1, self.head_dim))
        if not (self._get("fuse_qkv_params") and self._get("qkv_weight_interleaved", True)):
            return list(heads.split(list(counts), dim=1))
        per_group = [count // self.groups for count in counts]
        parts: list[list[Tensor]] = [[] for _ in counts]
        at = 0
        for _ in range(self.groups):
            for part, count in zip(parts, per_group):
                part.append(heads[:, at : at + count])
                at += count
        return [torch.cat(part, 1) for part in parts]

    def _qk_norm(self, x: Tensor, name: str, params: Parameters) -> Tensor:
        kind, eps = self._get("qk_norm_type"), self._get("qk_norm_eps", 1e-6)
        if kind is None:
            return x
        if kind == "L2Normalization":
            return x / (x.pow(2).sum(-1, keepdim=True) + eps).sqrt()
        return norm(x, params[f"{name}.weight"], params.get(f"{name}.bias"), kind, eps)

    def _positioned(self, x: Tensor, name: str, params: Parameters, angles: Tensor | None) -> Tensor:
        before = self._get("qk_norm_before_rope", False)
        x = self._qk_norm(x, name, params) if before else x
        x = x if angles is None else rotate(x, angles, self._get("rotary_pos_interleaved", False))
        return x if before else self._qk_norm(x, name, params)

    def _latent(self, x: Tensor, params: Parameters, angles: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        nope, rope, rank = (self._get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
        interleaved = self._get("rotary_pos_interleaved", False)
        if self._get("q_lora_rank") is None:
            q = linear(x, params["q_proj.weight"], None)
        else:
            q = linear(x, params["q_a_proj.weight"], params.get("q_a_proj.bias"))
            q = linear(self._norm(q, params, "q_a_layernorm."), params["q_b_proj.weight"], None)
        q = q.unflatten(-1, (self.heads, -1))
        latent = linear(x, params["kv_a_proj_with_mqa.weight"], params.get("kv_a_proj_with_mqa.bias"))
        kv = linear(self._norm(latent[:, :rank], params, "kv_a_layernorm."), params["kv_b_proj.weight"], None)
        kv = kv.unflatten(-1, (self.heads, -1))
        q_rope, k_rope = q[..., nope:], latent[:, None, rank:]
        if angles is not None:
            q_rope, k_rope = rotate(q_rope, angles, interleaved), rotate(k_rope, angles, interleaved)
        k = torch.cat([torch.cat([kv[:, head : head + 1, :nope], k_rope], -1) for head in range(self.heads)], 1)
        assert rope == q_rope.shape[-1]
        return torch.cat([q[..., :nope], q_rope], -1), k, kv[..., nope:]

    def multihead(
        self, x: Tensor, params: Parameters, mask: Mask, angles: Tensor | None, encoded: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(out, the input norm's output)."""
        if self._get("kv_lora_rank") and encoded is None:
            own = _under(params, "layernorm")
            normed = self._norm(x, own) if own else x
            q, k, v = self._latent(normed, _under(params, "mla"), angles)
        elif encoded is None:
            own = _under(params, "layernorm_qkv") or _under(params, "qkv")
            normed = self._normed(x, own)
            mixed = linear(normed, own["weight"], own.get("bias"))
            q, k, v = self._split_heads(mixed, (self.heads, self.groups, self.groups))
        else:
            own, other = _under(params, "layernorm_query") or _under(params, "query_layer"), _under(params, "key_value")
            normed = self._normed(x, own)
            q = linear(normed, own["weight"], own.get("bias")).unflatten(-1, (self.heads, -1))
            k, v = self._split_heads(linear(encoded, other["weight"], other.get("bias")), (self.groups, self.groups))
        if not self._get("kv_lora_rank") or encoded is not None:
            q, k = self._positioned(q, "q_norm", params, angles), self._positioned(k, "k_norm", params, angles)
        scale = self._get("softmax_scale") or q.shape[-1] ** -0.5
        context = attention(q, k, v, mask, scale)
        return linear(context, params["proj.weight"], params.get("proj.bias")), normed

    def feed_forward(self, x: Tensor, params: Parameters) -> tuple[Tensor, Tensor]:
        normed = self._normed(x, params)
        inner = activation(linear(normed, params["fc1_weight"], params.get("fc1_bias")), self._get("activation", "gelu"))
        return linear(inner, params["fc2_weight"], params.get("fc2_bias")), normed

    def layer(
        self,
        x: Tensor,
        mask: Mask,
        angles: Tensor | None = None,
        encoded: Tensor | None = None,
        cross_mask: Mask | None = None,
    ) -> Tensor:
        """A whole TransformerLayer over one document [L, hidden]."""
        params, post = self.params, self._get("apply_residual_connection_post_layernorm", False)
        out, normed = self.multihead(x, _under(params, "self_attention"), mask, angles)
        if self._get("parallel_attention_mlp"):
            return x + out + self.feed_forward(x, _under(params, "layernorm_mlp"))[0]
        x = (normed if post and not self._get("output_layernorm") else x) + out
        if encoded is not None:
            assert cross_mask is not None
            out, normed = self.multihead(x, _under(params, "inter_attention"), cross_mask, angles, encoded)
            x = (normed if post else x) + out
        out, normed = self.feed_forward(x, _under(params, "layernorm_mlp"))
        x = (normed if post else x) + out
        return self._norm(x, _under(params, "layernorm")) if self._get("output_layernorm") else x
