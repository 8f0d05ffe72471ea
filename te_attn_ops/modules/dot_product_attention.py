"""``DotProductAttention``: TransformerEngine's module of that name over :func:`te_attn_ops.thd_attention`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..attention import thd_attention
from ..backends import BACKEND_NAMES
from ..checks import check_bool, check_int, check_selection
from ..masks import PADDING_MASK_TYPES, normalize_mask_type, normalize_window, resolve_mask
from ..policies import PlanSpec, PreparedPolicies
from .layers import drop_extra_state
from .layouts import PackedInputs, batch_joins_heads, check_qkv_format, pack_dense, unpack_dense, unpack_projection
from .unsupported import refuse_context_parallel, refuse_unsupported

_AS_PADDING = {"no_mask": "padding", "causal": "padding_causal", "causal_bottom_right": "padding_causal_bottom_right"}


class DotProductAttention(torch.nn.Module):
    """Scaled dot-product attention with TransformerEngine's constructor and forward arguments. It has no parameters.

    Arguments keep TransformerEngine's names, order, meaning and defaults; what is not implemented raises NotImplementedError.
    Differences are listed in ``docs/te_mapping.md``.

    Args:
        num_attention_heads: query heads, over all tensor-parallel ranks.
        kv_channels: width of a head, or (head_dim_qk, head_dim_v) where they differ (MLA).
        num_gqa_groups: key and value heads; default num_attention_heads.
        qkv_format: "thd" (packed, [tokens, heads, width]), "sbhd" or "bshd".
        attn_mask_type, window_size, bottom_right_diagonal: what the forward uses where it is given none. "thd" needs a padding
            mask type. See :func:`te_attn_ops.masks.resolve_mask`.
        tp_size, tp_group: heads are divided by the size; this module communicates nothing.
        softmax_scale: default head_dim_qk ** -0.5, of the width given, padded or not.
        return_max_logit: also return the largest scaled score of each head.
        backend, pad_head_dim, sanitize_padding, selection: defaults of the forward's arguments of these names, which are those
            of :func:`te_attn_ops.thd_attention`.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Sequence[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
        *,
        backend: str | None = None,
        pad_head_dim: bool | None = None,
        sanitize_padding: bool = False,
        selection: str | None = None,
    ) -> None:
        super().__init__()
        refuse_unsupported(attention_dropout=attention_dropout, softcap=softcap, cp_group=cp_group, softmax_type=softmax_type)
        num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        check_overrides(backend=backend, pad_head_dim=pad_head_dim, sanitize_padding=sanitize_padding, selection=selection)
        tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        check_heads(num_attention_heads, num_gqa_groups, tp_size)
        self.head_dim_qk, self.head_dim_v = _head_dims(kv_channels)
        if attention_type not in ("self", "cross"):
            raise ValueError(f"attention_type={attention_type!r} is unknown; use 'self' or 'cross'")
        self.num_attention_heads = int(num_attention_heads) // int(tp_size)
        self.num_gqa_groups = int(num_gqa_groups) // int(tp_size)
        self.qkv_format = check_qkv_format(qkv_format)
        self.attn_mask_type, self.window_size = check_mask_arguments(attn_mask_type, window_size, bottom_right_diagonal)
        self.bottom_right_diagonal = bottom_right_diagonal
        self.attention_type = attention_type
        self.layer_number = 1 if layer_number is None else layer_number
        # None stays None: a float attribute would be symbolic under torch.compile(dynamic=True), and cost a second trace.
        self.softmax_scale = _checked_scale(softmax_scale)
        self.return_max_logit = bool(return_max_logit)
        self.name = name
        self.backend = backend
        self.pad_head_dim = pad_head_dim
        self.sanitize_padding = sanitize_padding
        self.selection = selection
        self.register_load_state_dict_pre_hook(drop_extra_state)

    def set_context_parallel_group(self, cp_group: Any, *args: Any, **kwargs: Any) -> None:
        refuse_context_parallel(self, cp_group)

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        score_mod_tensors: Mapping[str, Tensor] | None = None,
        score_mod_bprop_tensors: Mapping[str, Tensor] | None = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: PreparedPolicies | Sequence[Mapping[str, Any]] | None = None,
        thd_attention_policy_dispatch: str = "auto",
        *,
        backend: str | None = None,
        pad_head_dim: bool | None = None,
        sanitize_padding: bool | None = None,
        selection: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention over one batch. None for an argument that the constructor has too means the constructor's value.

        Args:
            query_layer: thd [total_q, heads, head_dim_qk], sbhd [s_q, b, heads, head_dim_qk], bshd [b, s_q, heads,
                head_dim_qk].
            key_layer, value_layer: alike, with num_gqa_groups heads; value_layer has head_dim_v.
            qkv_layer, kv_layer: instead of the separate tensors, one that holds 3 (or 2) of them at ``qkv_interleave_dim``: -3
                for [..., 3, heads, width], -2 for [..., heads, 3, width]. Read as views.
            cu_seqlens_q, cu_seqlens_kv: [N + 1] int32 or int64. thd: token offsets of the sequences; kv None means q's. sbhd
                and bshd: with a padding mask type, the samples' lengths (the first rows of each sample count); else unread.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: thd with gaps, where each sequence's slot starts; kv None means q's where
                both sides share cu_seqlens.
            max_seqlen_q, max_seqlen_kv: bounds in tokens. thd: where missing, one device-to-host sync in eager, an error under
                compile and capture.
            pad_between_seqs: None: there are gaps iff cu_seqlens_*_padded are given and not the plain tensors themselves. True
                says no more than that, at no cost. False with such tensors is an error.
            checkpoint_core_attention: keep q, k and v only and compute attention again in the backward.
            thd_attention_policies, thd_attention_policy_dispatch: a mask of its own for each sequence (thd only); exclusive
                with this call's attn_mask_type and window_size. See :func:`te_attn_ops.thd_attention`.
            backend, pad_head_dim, sanitize_padding, selection: see :func:`te_attn_ops.thd_attention`.
            fast_zero_fill: accepted and without effect.

        Returns:
            thd [total_q, heads * head_dim_v], sbhd [s_q, b, heads * head_dim_v], bshd [b, s_q, heads * head_dim_v]; with
            return_max_logit the tuple (out, max_logit [heads] float32).

        Raises:
            NotImplementedError: an argument asks for what is not implemented.
            TypeError, ValueError: an argument is wrong.
        """
        refuse_unsupported(
            attention_mask=attention_mask,
            softcap=softcap,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            inference_params=inference_params,
            fp8_output=fp8_output,
            bf16_backward=bf16_backward,
            num_splits=num_splits,
            score_mod=score_mod,
            score_mod_bprop=score_mod_bprop,
            score_mod_tensors=score_mod_tensors,
            score_mod_bprop_tensors=score_mod_bprop_tensors,
        )
        check_bool("checkpoint_core_attention", checkpoint_core_attention)
        check_bool("pad_between_seqs", pad_between_seqs, or_none=True)
        qkv_format = self.qkv_format if qkv_format is None else check_qkv_format(qkv_format)
        q, k, v = unpack_projection(query_layer, key_layer, value_layer, qkv_layer, kv_layer, qkv_interleave_dim, qkv_format)
        self._check_shapes(q, k, v, qkv_format)
        q, k, v = _autocast(q, k, v)
        if thd_attention_policies is None:
            attn_mask_type = self.attn_mask_type if attn_mask_type is None else normalize_mask_type(attn_mask_type)
            window_size = self.window_size if window_size is None else window_size
            refuse_arbitrary(attn_mask_type)
        else:
            self._check_policy_call(qkv_format)
        if bottom_right_diagonal is None:
            bottom_right_diagonal = self.bottom_right_diagonal
        options: dict[str, Any] = {
            "window_size": window_size,
            "bottom_right_diagonal": bottom_right_diagonal,
            "thd_attention_policies": thd_attention_policies,
            "thd_attention_policy_dispatch": thd_attention_policy_dispatch,
            "softmax_scale": self.softmax_scale,
            "sanitize_padding": self.sanitize_padding if sanitize_padding is None else sanitize_padding,
            "backend": self.backend if backend is None else backend,
            "pad_head_dim": self.pad_head_dim if pad_head_dim is None else pad_head_dim,
            "selection": self.selection if selection is None else selection,
        }
        offsets = (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        if qkv_format == "thd":
            packed = self._packed_inputs(q, k, v, offsets, max_seqlen_q, max_seqlen_kv, pad_between_seqs)
            options["attn_mask_type"] = attn_mask_type
            out, max_logit = self._attend(packed, options, checkpoint_core_attention)
            out = out.flatten(1, 2)
        else:
            out, max_logit = self._attend_dense(
                q, k, v, qkv_format, offsets, max_seqlen_q, max_seqlen_kv, attn_mask_type, options, checkpoint_core_attention
            )
        return out if max_logit is None else (out, max_logit)

    def plan_spec(self, dtype: torch.dtype | None = None) -> PlanSpec:
        """What :func:`te_attn_ops.prepare_thd_policies` needs to know of this attention to plan a single launch.

        dtype: of q, k and v; default CUDA's autocast dtype where that is on, else torch's default dtype, bfloat16 if that is no
        16-bit one.
        """
        if dtype is None:
            dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.get_default_dtype()
            dtype = dtype if dtype.itemsize == 2 else torch.bfloat16
        return PlanSpec(
            dtype, self.num_attention_heads, self.num_gqa_groups, self.head_dim_qk, self.head_dim_v, training=self.training
        )

    # ----------------------------------------------------------------------------------------------------------- the layouts
    def _attend_dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qkv_format: str,
        offsets: tuple[Tensor | None, ...],
        max_seqlen_q: int | None,
        max_seqlen_kv: int | None,
        attn_mask_type: str | None,
        options: dict[str, Any],
        checkpointed: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if offsets[2] is not None or offsets[3] is not None:
            raise ValueError(f"cu_seqlens_q_padded and cu_seqlens_kv_padded describe gaps in thd, not in {qkv_format}")
        assert attn_mask_type is not None
        padding = attn_mask_type in PADDING_MASK_TYPES
        options["attn_mask_type"] = attn_mask_type if padding else _AS_PADDING[attn_mask_type]
        len_q, batch = q.shape[:2] if qkv_format == "sbhd" else (q.shape[1], q.shape[0])
        joined = batch_joins_heads(qkv_format, padding, batch)
        packed = pack_dense(q, k, v, qkv_format, padding, joined, offsets[0], offsets[1], max_seqlen_q, max_seqlen_kv)
        out, max_logit = self._attend(packed, options, checkpointed)
        if max_logit is not None and max_logit.shape[0] != self.num_attention_heads:
            max_logit = max_logit.unflatten(0, (batch, -1)).amax(0)
        return unpack_dense(out, qkv_format, joined, batch, len_q), max_logit

    def _packed_inputs(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offsets: tuple[Tensor | None, ...],
        max_seqlen_q: int | None,
        max_seqlen_kv: int | None,
        pad_between_seqs: bool | None,
    ) -> PackedInputs:
        cu_q, cu_kv, slots_q, slots_kv = offsets
        if cu_q is None:
            raise ValueError("cu_seqlens_q is needed in qkv_format 'thd', got None")
        if cu_kv is None:
            if self.attention_type == "cross":
                raise ValueError("cu_seqlens_kv is needed in qkv_format 'thd' with attention_type 'cross', got None")
            cu_kv = cu_q
        if slots_kv is None and cu_kv is cu_q:
            slots_kv = slots_q
        if (slots_q is None) != (slots_kv is None):
            raise ValueError(
                "cu_seqlens_q_padded and cu_seqlens_kv_padded must be given together; pass the plain cu_seqlens for a side "
                "without gaps"
            )
        has_gaps = slots_q is not None and (slots_q is not cu_q or slots_kv is not cu_kv)
        if pad_between_seqs is False and has_gaps:
            raise ValueError(
                "pad_between_seqs=False contradicts cu_seqlens_q_padded and cu_seqlens_kv_padded: leave them out, or pass None "
                "or True (gaps are addressed in place and cost nothing where there are none)"
            )
        return PackedInputs(q, k, v, cu_q, cu_kv, slots_q, slots_kv, max_seqlen_q, max_seqlen_kv)

    def _attend(self, packed: PackedInputs, options: dict[str, Any], checkpointed: bool) -> tuple[Tensor, Tensor | None]:
        """out [rows, heads, head_dim_v], and max_logit where wanted."""

        q, k, v, cu_q, cu_kv, slots_q, slots_kv, max_q, max_kv = packed

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return thd_attention(
                q,
                k,
                v,
                cu_q,
                cu_kv,
                max_seqlen_q=max_q,
                max_seqlen_kv=max_kv,
                cu_seqlens_q_padded=slots_q,
                cu_seqlens_kv_padded=slots_kv,
                return_max_logit=self.return_max_logit,
                **options,
            )

        if checkpointed:
            result = checkpoint(attend, q, k, v, use_reentrant=False, preserve_rng_state=False)
        else:
            result = attend(q, k, v)
        return result if self.return_max_logit else (result, None)

    # ------------------------------------------------------------------------------------------------------------ the checks
    def _check_shapes(self, q: Tensor, k: Tensor, v: Tensor, qkv_format: str) -> None:
        rank = 3 if qkv_format == "thd" else 4
        for name, x, heads, width in (
            ("query_layer", q, self.num_attention_heads, self.head_dim_qk),
            ("key_layer", k, self.num_gqa_groups, self.head_dim_qk),
            ("value_layer", v, self.num_gqa_groups, self.head_dim_v),
        ):
            shape = x.shape
            if len(shape) != rank:
                raise ValueError(f"{name} must have {rank} dimensions in {qkv_format}, got shape {tuple(shape)}")
            if shape[-2] != heads or shape[-1] != width:
                raise ValueError(
                    f"{name} must end in [heads, width] = [{heads}, {width}], as constructed; got shape {tuple(shape)}"
                )
        if qkv_format != "thd":
            batch_dim = 1 if qkv_format == "sbhd" else 0
            if not q.shape[batch_dim] == k.shape[batch_dim] == v.shape[batch_dim]:
                raise ValueError(
                    f"query_layer, key_layer and value_layer must have one batch size in {qkv_format}, "
                    f"got {q.shape[batch_dim]}, {k.shape[batch_dim]} and {v.shape[batch_dim]}"
                )

    def _check_policy_call(self, qkv_format: str) -> None:
        if qkv_format != "thd":
            raise ValueError(f"thd_attention_policies needs qkv_format 'thd', got {qkv_format!r}")
        if self.return_max_logit:
            raise NotImplementedError("return_max_logit=True is not supported together with thd_attention_policies")

    def extra_repr(self) -> str:
        parts = [
            f"num_attention_heads={self.num_attention_heads}",
            f"num_gqa_groups={self.num_gqa_groups}",
            f"head_dim_qk={self.head_dim_qk}",
            f"head_dim_v={self.head_dim_v}",
            f"qkv_format={self.qkv_format!r}",
            f"attn_mask_type={self.attn_mask_type!r}",
        ]
        for name in ("window_size", "bottom_right_diagonal", "softmax_scale", "backend", "pad_head_dim", "selection"):
            if getattr(self, name) is not None:
                parts.append(f"{name}={getattr(self, name)!r}")
        parts += [f"{name}=True" for name in ("return_max_logit", "sanitize_padding") if getattr(self, name)]
        return ", ".join(parts)


def check_heads(num_attention_heads: int, num_gqa_groups: int, tp_size: int = 1) -> None:
    """Raises TypeError and ValueError where these are no ints, or query heads, groups and tensor-parallel ranks do not divide."""
    for name, value in (("num_attention_heads", num_attention_heads), ("num_gqa_groups", num_gqa_groups), ("tp_size", tp_size)):
        check_int(name, value)
    if num_attention_heads < 1 or num_gqa_groups < 1 or num_attention_heads % num_gqa_groups:
        raise ValueError(
            f"num_attention_heads must be a positive multiple of num_gqa_groups, got {num_attention_heads} and {num_gqa_groups}"
        )
    if tp_size < 1 or num_gqa_groups % tp_size:
        raise ValueError(f"num_gqa_groups must be a multiple of tp_size, got {num_gqa_groups} and {tp_size}")


def _head_dims(kv_channels: Any) -> tuple[int, int]:
    try:
        pair = [kv_channels] * 2 if isinstance(kv_channels, numbers.Integral) else list(kv_channels)
        widths = [check_int("kv_channels", width) for width in pair]
    except TypeError:
        widths = []
    if len(widths) != 2 or min(widths) < 1:
        raise TypeError(f"kv_channels must be a positive int or a pair (head_dim_qk, head_dim_v) of them, got {kv_channels!r}")
    return widths[0], widths[1]


def check_overrides(*, backend: object, pad_head_dim: object, sanitize_padding: object, selection: object) -> None:
    """A constructor's choices for all its calls, as :func:`te_attn_ops.thd_attention` takes them."""
    if backend is not None and backend not in BACKEND_NAMES:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(BACKEND_NAMES)}, or None")
    check_bool("pad_head_dim", pad_head_dim, or_none=True)
    check_bool("sanitize_padding", sanitize_padding)
    check_selection(selection)


def _checked_scale(softmax_scale: Any) -> float | None:
    if softmax_scale is None:
        return None
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, numbers.Real):
        raise TypeError(f"softmax_scale must be a number or None, got {type(softmax_scale).__name__} {softmax_scale!r}")
    scale = float(softmax_scale)
    if not 0.0 < scale < math.inf:
        raise ValueError(f"softmax_scale must be positive and finite, got {softmax_scale}")
    return scale


def check_mask_arguments(
    attn_mask_type: str,
    window_size: tuple[int, int] | None,
    bottom_right_diagonal: bool | None,
    names: tuple[str, str] = ("attn_mask_type", "window_size"),
) -> tuple[str, tuple[int, int] | None]:
    """A constructor's mask arguments, normalised.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument.
    """
    mask_type = normalize_mask_type(attn_mask_type, names[0])
    window = normalize_window(window_size, names[1])
    refuse_arbitrary(mask_type, names[0])
    resolve_mask(_AS_PADDING.get(mask_type, mask_type), window, bottom_right_diagonal)
    return mask_type, window


def refuse_arbitrary(attn_mask_type: str, argument: str = "attn_mask_type") -> None:
    if attn_mask_type == "arbitrary":
        raise NotImplementedError(f"{argument}='arbitrary' is not supported: explicit masks are not implemented")


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the autocast dtype, where autocast is on. float64 stays, as in autocast itself."""
    device_type = q.device.type
    # "meta" has no autocast to ask for. torch.amp.is_autocast_available would break the graph on torch 2.8.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v
