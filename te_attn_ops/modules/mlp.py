"""The feed-forward block: norm, projection, activation, projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from ..checks import check_positive_int
from .layers import (
    InitMethod,
    check_normalization,
    default_init_method,
    drop_extra_state,
    factory_arguments,
    normalize,
    reset_norm,
)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "qgelu": _qgelu,
    "relu": F.relu,
    "srelu": _srelu,
    "silu": F.silu,
}
# Gated: the function goes over the first half of the projection, the second half multiplies.
_GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": torch.sigmoid,
    "geglu": _gelu,
    "qgeglu": _qgelu,
    "reglu": F.relu,
    "sreglu": _srelu,
    "swiglu": F.silu,
}
ACTIVATIONS = (*_PLAIN, *_GATED, "clamped_swiglu")
_CLAMPED_SWIGLU = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}


def _clamped_swiglu(gate: Tensor, linear: Tensor, limit: float, alpha: float, glu_linear_offset: float) -> Tensor:
    gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + glu_linear_offset)


class LayerNormMLP(torch.nn.Module):
    """LayerNorm or RMSNorm, then activation(x W1 + b1) W2 + b2.

    Parameters, as TransformerEngine names them: ``layer_norm_weight``, ``layer_norm_bias``, ``fc1_weight`` [ffn, hidden] (gated
    activations: [2 ffn, hidden], first the half that goes through the function), ``fc1_bias``, ``fc2_weight`` [hidden, ffn],
    ``fc2_bias``.

    Args:
        activation: gelu (tanh approximation), qgelu, relu, srelu, silu, and gated: glu, geglu, qgeglu, reglu, sreglu, swiglu,
            clamped_swiglu (``activation_params``: limit, alpha, glu_linear_offset).
        return_layernorm_output: return (out, the norm's output).
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
        unknown = set(activation_params or ()) - (set(_CLAMPED_SWIGLU) if activation == "clamped_swiglu" else set())
        if unknown:
            raise ValueError(f"activation_params has unknown keys {', '.join(sorted(unknown))} for activation {activation!r}")
        for name, size in (("hidden_size", hidden_size), ("ffn_hidden_size", ffn_hidden_size)):
            check_positive_int(name, size)
        self.activation = activation
        self.activation_params = {**_CLAMPED_SWIGLU, **(activation_params or {})}
        self.normalization = check_normalization(normalization)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.init_method = init_method or default_init_method
        self.output_layer_init_method = output_layer_init_method or default_init_method
        factory = factory_arguments(device, params_dtype)
        fc1_size = ffn_hidden_size if activation in _PLAIN else 2 * ffn_hidden_size
        self.layer_norm_weight = Parameter(torch.empty(hidden_size, **factory))
        self.layer_norm_bias = Parameter(torch.empty(hidden_size, **factory)) if normalization == "LayerNorm" else None
        self.fc1_weight = Parameter(torch.empty(fc1_size, hidden_size, **factory))
        self.fc1_bias = Parameter(torch.empty(fc1_size, **factory)) if bias else None
        self.fc2_weight = Parameter(torch.empty(hidden_size, ffn_hidden_size, **factory))
        self.fc2_bias = Parameter(torch.empty(hidden_size, **factory)) if bias else None
        self.register_load_state_dict_pre_hook(drop_extra_state)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_norm(self.layer_norm_weight, self.layer_norm_bias, self.zero_centered_gamma)
        with torch.no_grad():
            self.init_method(self.fc1_weight)
            self.output_layer_init_method(self.fc2_weight)
        for bias in (self.fc1_bias, self.fc2_bias):
            if bias is not None:
                torch.nn.init.zeros_(bias)

    def forward(self, hidden_states: Tensor) -> Any:
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        normed = normalize(hidden_states, weight, bias, self.normalization, self.eps, self.zero_centered_gamma)
        inner = self._activate(F.linear(normed, self.fc1_weight, self.fc1_bias))
        out = F.linear(inner, self.fc2_weight, self.fc2_bias)
        return (out, normed) if self.return_layernorm_output else out

    def _activate(self, x: Tensor) -> Tensor:
        if self.activation in _PLAIN:
            return _PLAIN[self.activation](x)
        gate, linear = x.chunk(2, dim=-1)
        if self.activation == "clamped_swiglu":
            return _clamped_swiglu(gate, linear, **self.activation_params)
        return _GATED[self.activation](gate) * linear

    def extra_repr(self) -> str:
        hidden, ffn = self.fc2_weight.shape
        return (
            f"{hidden}, {ffn}, activation={self.activation!r}, normalization={self.normalization!r}, "
            f"bias={self.fc1_bias is not None}, eps={self.eps}"
        )
