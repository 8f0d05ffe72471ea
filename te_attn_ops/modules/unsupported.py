"""Arguments that TransformerEngine has and this package does not implement: refused by name, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NONE = (None,)
_OFF = (None, False)
_TENSOR_PARALLEL = "the layers do no tensor-parallel communication; replicate them (DDP) or shard their parameters with FSDP2"
_OVERLAP = "there is no communication to overlap"
_CONTEXT_PARALLEL = "context parallelism is not implemented"
_SCORE_MOD = "attention scores cannot be modified"
_BIAS = "attention bias is not implemented"
_FP8 = "FP8 is not implemented"

# Argument: the values that ask for nothing (None and False always do), and why any other is refused.
_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "attention_dropout": ((0.0,), "dropout inside attention is not implemented; use 0.0, the default here"),
    "softcap": ((None, 0.0), "soft-capped scores are not implemented"),
    "softmax_type": (("vanilla",), "attention sinks are not implemented; use 'vanilla'"),
    "cp_group": (_NONE, _CONTEXT_PARALLEL),
    "attention_mask": (
        _NONE,
        "explicit masks are not implemented; say it with attn_mask_type, window_size, cu_seqlens or thd_attention_policies",
    ),
    "enc_dec_attn_mask": (_NONE, "explicit masks are not implemented; say it with enc_dec_attn_mask_type and cu_seqlens"),
    "core_attention_bias_type": (("no_bias",), f"{_BIAS}, nor is ALiBi; use 'no_bias'"),
    "core_attention_bias": (_NONE, _BIAS),
    "alibi_slopes": (_NONE, "ALiBi is not implemented"),
    "inference_params": (_NONE, "KV caching is not implemented"),
    "fp8_output": (_OFF, _FP8),
    "bf16_backward": (_OFF, f"{_FP8}, so every backward has the inputs' dtype"),
    "num_splits": ((None, 1), "the number of KV splits is the kernel's own choice"),
    "score_mod": (_NONE, _SCORE_MOD),
    "score_mod_bprop": (_NONE, _SCORE_MOD),
    "score_mod_tensors": (_NONE, _SCORE_MOD),
    "score_mod_bprop_tensors": (_NONE, _SCORE_MOD),
    "tp_group": (_NONE, _TENSOR_PARALLEL),
    "tp_size": ((1,), _TENSOR_PARALLEL),
    "fuse_wgrad_accumulation": (_OFF, "gradients accumulate in .grad, by autograd"),
    "drop_path_rate": ((0.0,), "stochastic depth is not implemented"),
    "ub_tp_comm_overlap": (_OFF, _OVERLAP),
    "ub_overlap_ag": (_OFF, _OVERLAP),
    "ub_overlap_rs": (_OFF, _OVERLAP),
    "ub_overlap_rs_dgrad": (_OFF, _OVERLAP),
    "ub_bulk_dgrad": (_OFF, _OVERLAP),
    "ub_bulk_wgrad": (_OFF, _OVERLAP),
}


def refuse_unsupported(**arguments: Any) -> None:
    """Raises NotImplementedError for the first argument whose value asks for something that is not there."""
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        neutral, reason = _UNSUPPORTED[name]
        if not isinstance(value, (bool, int, float, str)):
            raise NotImplementedError(f"{name}={_describe(value)} is not supported: {reason}")
        if value not in neutral:
            raise NotImplementedError(f"{name}={value!r} is not supported: {reason}")


def refuse_context_parallel(module: torch.nn.Module, cp_group: object, *rest: object) -> None:
    """What ``set_context_parallel_group`` does on every module here."""
    if cp_group is not None:
        raise NotImplementedError(f"{type(module).__name__}.set_context_parallel_group: {_CONTEXT_PARALLEL}")


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"Tensor{list(value.shape)}"
    return f"<{type(value).__name__}>" if isinstance(value, Callable) else type(value).__name__  # type: ignore[arg-type]
