"""Norms and linear layers in plain PyTorch, with TransformerEngine's parameter names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

InitMethod = Callable[[Tensor], Any]
NORMALIZATIONS = ("LayerNorm", "RMSNorm")
QK_NORM_TYPES = ("L2Normalization", *NORMALIZATIONS)


def default_init_method(weight: Tensor) -> Tensor:
    """TransformerEngine's default: normal, mean 0, standard deviation 0.023."""
    return torch.nn.init.normal_(weight, mean=0.0, std=0.023)


def factory_arguments(device: torch.device | str | None, params_dtype: torch.dtype | None) -> dict[str, Any]:
    """device and dtype of new parameters. No device given: torch's default device where one is set, else CUDA where there is a
    GPU (TransformerEngine's default), else the CPU.

    Raises:
        TypeError: params_dtype is no floating-point dtype.
    """
    if params_dtype is not None and not (isinstance(params_dtype, torch.dtype) and params_dtype.is_floating_point):
        raise TypeError(f"params_dtype must be a floating-point torch.dtype or None, got {params_dtype!r}")
    if device is None:
        device = torch.get_default_device()
        if device.type == "cpu" and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
    return {"device": device, "dtype": torch.get_default_dtype() if params_dtype is None else params_dtype}


def check_normalization(normalization: str) -> str:
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization={normalization!r} is unknown; use one of {', '.join(NORMALIZATIONS)}")
    return normalization


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, normalization: str, eps: float, zero_centered_gamma: bool
) -> Tensor:
    """LayerNorm or RMSNorm over the last dimension. ``zero_centered_gamma``: the scale is 1 + weight.

    That sum, and parameters of another dtype than x, are taken in float32 (TransformerEngine's compute type): in 16 bits 1 + weight
    would lose every weight below 2^-8.
    """
    dtype = x.dtype
    if zero_centered_gamma or weight.dtype != dtype or (bias is not None and bias.dtype != dtype):
        wide = torch.promote_types(dtype, torch.float32)
        x, weight, bias = x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
    if zero_centered_gamma:
        weight = weight + 1
    if normalization == "RMSNorm":
        return F.rms_norm(x, weight.shape, weight, eps).to(dtype)
    return F.layer_norm(x, weight.shape, weight, bias, eps).to(dtype)


def reset_children(module: torch.nn.Module) -> None:
    """``reset_parameters`` of every child that has parameters; after ``to_empty`` this ends deferred initialisation."""
    for child in module.children():
        if next(child.parameters(), None) is not None:
            child.reset_parameters()  # type: ignore[operator]


def drop_extra_state(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """A load_state_dict pre-hook: TransformerEngine's FP8 metadata has no place here."""
    for key in [key for key in state_dict if key.startswith(prefix) and key.endswith("_extra_state")]:
        del state_dict[key]


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm with parameters ``weight`` and, for LayerNorm, ``bias``."""

    def __init__(self, width: int, eps: float, normalization: str, zero_centered_gamma: bool = False, **factory: Any) -> None:
        super().__init__()
        self.normalization = check_normalization(normalization)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = Parameter(torch.empty(width, **factory))
        self.bias = Parameter(torch.empty(width, **factory)) if normalization == "LayerNorm" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_norm(self.weight, self.bias, self.zero_centered_gamma)

    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, self.weight, self.bias, self.normalization, self.eps, self.zero_centered_gamma)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, normalization={self.normalization!r}, eps={self.eps}"


def reset_norm(weight: Tensor, bias: Tensor | None, zero_centered_gamma: bool) -> None:
    torch.nn.init.constant_(weight, 0.0 if zero_centered_gamma else 1.0)
    if bias is not None:
        torch.nn.init.zeros_(bias)


class L2Normalization(torch.nn.Module):
    """x / sqrt(sum(x^2) + eps) over the last dimension, in float32 or wider; no parameters."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class Linear(torch.nn.Module):
    """A linear layer with parameters ``weight`` [out, in] and ``bias`` [out].

    Args:
        splits: rows of the weight by name, where TransformerEngine may hold them as parameters of their own ("query_weight",
            ...). Each part is initialised by itself, and a state dict with such parts is joined when loaded.
        return_bias: leave the bias out and return (out, bias).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        init_method: InitMethod,
        bias: bool = True,
        return_bias: bool = False,
        splits: dict[str, int] | None = None,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.init_method = init_method
        self.return_bias = return_bias
        self.splits = splits or {}
        self.weight = Parameter(torch.empty(out_features, in_features, **factory))
        self.bias = Parameter(torch.empty(out_features, **factory)) if bias else None
        if self.splits:
            self.register_load_state_dict_pre_hook(_join_splits)
        self.reset_linear()

    def reset_linear(self) -> None:
        with torch.no_grad():
            for part in self.weight.split(list(self.splits.values()) or [self.weight.shape[0]]):
                self.init_method(part)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def reset_parameters(self) -> None:
        self.reset_linear()

    def project(self, x: Tensor) -> Any:
        if self.return_bias:
            return F.linear(x, self.weight), self.bias
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Any:
        return self.project(x)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, bias={self.bias is not None}"


def _join_splits(
    module: Linear, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing_keys: list[str], *args: Any
) -> None:
    for kind in ("weight", "bias"):
        names = [f"{prefix}{part}_{kind}" for part in module.splits]
        absent = [name for name in names if name not in state_dict]
        if f"{prefix}{kind}" in state_dict or len(absent) == len(names):
            continue
        missing_keys.extend(absent)
        if not absent:
            state_dict[f"{prefix}{kind}"] = torch.cat([state_dict.pop(name) for name in names])


class LayerNormLinear(Linear):
    """A norm, then a linear layer: parameters ``layer_norm_weight``, ``layer_norm_bias``, ``weight``, ``bias``.

    ``return_layernorm_output``: return (out, the norm's output).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        init_method: InitMethod,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        *,
        bias: bool = True,
        splits: dict[str, int] | None = None,
        **factory: Any,
    ) -> None:
        super().__init__(in_features, out_features, init_method, bias=bias, splits=splits, **factory)
        self.normalization = check_normalization(normalization)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.layer_norm_weight = Parameter(torch.empty(in_features, **factory))
        self.layer_norm_bias = Parameter(torch.empty(in_features, **factory)) if normalization == "LayerNorm" else None
        reset_norm(self.layer_norm_weight, self.layer_norm_bias, zero_centered_gamma)

    def reset_parameters(self) -> None:
        self.reset_linear()
        reset_norm(self.layer_norm_weight, self.layer_norm_bias, self.zero_centered_gamma)

    def forward(self, x: Tensor) -> Any:
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        normed = normalize(x, weight, bias, self.normalization, self.eps, self.zero_centered_gamma)
        out = self.project(normed)
        return (out, normed) if self.return_layernorm_output else out

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, normalization={self.normalization!r}, eps={self.eps}"
