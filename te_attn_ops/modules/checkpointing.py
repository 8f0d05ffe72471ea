"""Activation checkpointing of a layer: everything computed again, or everything but attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .. import ops

MODES = ("full", "selective")


def check_mode(activation_checkpointing: str | None) -> str | None:
    if activation_checkpointing not in (None, *MODES):
        raise ValueError(f"activation_checkpointing={activation_checkpointing!r} is unknown; use None, 'full' or 'selective'")
    return activation_checkpointing


def _save_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is ops.attention_forward else CheckpointPolicy.PREFER_RECOMPUTE


save_attention = functools.partial(create_selective_checkpoint_contexts, _save_attention)
"""A ``context_fn`` for :func:`torch.utils.checkpoint.checkpoint` that keeps attention's results and recomputes the rest."""


def run_checkpointed(mode: str | None, function: Callable[..., Any], *args: Any, preserve_rng_state: bool) -> Any:
    """function(*args), its activations kept (mode None), computed again ("full"), or again but for attention ("selective")."""
    if mode is None or not torch.is_grad_enabled():
        return function(*args)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if mode == "selective":
        options["context_fn"] = save_attention
    return checkpoint(function, *args, **options)
