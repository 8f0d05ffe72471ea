"""``MultiheadAttention``: norm, fused QKV projection, rotary positions, QK-norm, attention, output projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_positive_int
from ..packing import make_packing
from ..policies import PlanSpec, PreparedPolicies
from .checkpointing import check_mode, run_checkpointed
from .dot_product_attention import DotProductAttention, check_heads, check_mask_arguments
from .layers import (
    QK_NORM_TYPES,
    InitMethod,
    L2Normalization,
    LayerNormLinear,
    Linear,
    Norm,
    check_normalization,
    default_init_method,
    drop_extra_state,
    factory_arguments,
    reset_children,
)
from .mla import LatentProjection, latent_sizes
from .rope import RotaryTable, rotary_table, rotate
from .unsupported import refuse_context_parallel, refuse_unsupported

RotaryAngles = Tensor | tuple[Tensor, Tensor]


class _Projected(NamedTuple):
    """DotProductAttention's inputs, by its names, and the input norm's output."""

    query_layer: Tensor | None = None
    key_layer: Tensor | None = None
    value_layer: Tensor | None = None
    qkv_layer: Tensor | None = None
    kv_layer: Tensor | None = None
    layernorm_output: Tensor | None = None


def _row_order(module: Any) -> str:
    return "grouped by key/value head" if module.qkv_weight_interleaved else "queries, keys, values"


def _note_row_order(module: Any, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    """Into the state dict's metadata, which torch.save keeps: names and shapes of both orders are the same."""
    local_metadata["qkv_row_order"] = _row_order(module)


def _check_row_order(
    module: Any, state_dict: Any, prefix: str, local_metadata: dict[str, Any], strict: bool, missing: Any, unexpected: Any,
    error_msgs: list[str],
) -> None:  # fmt: skip
    found = local_metadata.get("qkv_row_order", _row_order(module))
    if found != _row_order(module):
        error_msgs.append(
            f"the rows of {prefix}'s QKV weight stand as {found!r}, this module has {_row_order(module)!r}: construct it with the "
            "fuse_qkv_params and qkv_weight_interleaved that the state dict was saved with"
        )


def check_hidden_states(name: str, x: object, qkv_format: str, hidden_size: int) -> None:
    """Raises TypeError and ValueError unless x is [tokens, hidden_size] (thd), [s, b, hidden_size] or [b, s, hidden_size]."""
    layout = {"thd": "[tokens, hidden_size]", "sbhd": "[s, b, hidden_size]", "bshd": "[b, s, hidden_size]"}[qkv_format]
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor {layout}, got {type(x).__name__}")
    if x.dim() != (2 if qkv_format == "thd" else 3) or x.shape[-1] != hidden_size:
        raise ValueError(f"{name} must be {layout} in {qkv_format}, with hidden_size {hidden_size}, got shape {tuple(x.shape)}")


def check_unread_encoder_output(encoder_output: object) -> None:
    """Self-attention does not read it."""
    if encoder_output is not None and not isinstance(encoder_output, Tensor):
        raise TypeError(f"encoder_output must be a tensor or None, got {type(encoder_output).__name__}")


class MultiheadAttention(torch.nn.Module):
    """Multi-head attention with its projections, with TransformerEngine's constructor and forward arguments.

    Plain PyTorch but for attention itself; compiles as one graph. Differences from TransformerEngine, and how its state dict
    maps, are listed in ``docs/te_mapping.md``.

    Args:
        hidden_size: width of the input and the output.
        num_attention_heads, num_gqa_groups: query heads; key and value heads (default: as many).
        kv_channels: width of a head; default hidden_size / num_attention_heads.
        layernorm_epsilon, normalization, zero_centered_gamma: of the input norm, if ``input_layernorm``.
        attn_mask_type, window_size, bottom_right_diagonal: what the forward uses where it is given none.
        input_layernorm: norm the input first. return_layernorm_output: also return its output.
        return_bias: leave the output projection's bias out and return it (None where something put in ``proj``'s place gives a
            plain tensor).
        attention_type: "self", or "cross" with keys and values from ``encoder_output``.
        fuse_qkv_params, qkv_weight_interleaved: with both, the rows of the QKV weight are grouped by KV head (its queries, its
            key, its value), as in TransformerEngine; else all queries, all keys, all values. One parameter in either case.
        rotary_pos_interleaved: pairs that rotate together are neighbours instead of halves.
        qk_norm_type, qk_norm_eps, qk_norm_before_rope: None, "L2Normalization", "RMSNorm" or "LayerNorm" over each head of q
            and k.
        bias, params_dtype, device: of the parameters; device None is torch's default device if one is set, else CUDA where
            there is a GPU, else the CPU. "meta" defers initialisation to ``to_empty`` and ``reset_parameters``.
        qkv_format: "thd" (hidden states [tokens, hidden]), "sbhd" or "bshd" ([s, b, hidden] or [b, s, hidden]).
        q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: multi-head latent attention as DeepSeek-V2
            and V3 define it, instead of the fused projection. rotary_pos_emb is then qk_rope_head_dim wide.
        softmax_scale: default head_dim_qk ** -0.5.
        activation_checkpointing: "full": compute the whole block again in the backward; "selective": all but attention.
        backend, pad_head_dim, sanitize_padding, selection: see :func:`te_attn_ops.thd_attention`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
        *,
        q_lora_rank: int | None = None,
        kv_lora_rank: int | None = None,
        qk_nope_head_dim: int | None = None,
        qk_rope_head_dim: int | None = None,
        v_head_dim: int | None = None,
        softmax_scale: float | None = None,
        activation_checkpointing: str | None = None,
        backend: str | None = None,
        pad_head_dim: bool | None = None,
        sanitize_padding: bool = False,
        selection: str | None = None,
    ) -> None:
        super().__init__()
        refuse_unsupported(
            tp_group=tp_group,
            tp_size=tp_size,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
        )
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        check_heads(num_attention_heads, self.num_gqa_groups)
        self.latent = latent_sizes(
            q_lora_rank=q_lora_rank,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
        )
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.attn_mask_type, self.window_size = check_mask_arguments(attn_mask_type, window_size, bottom_right_diagonal)
        self.bottom_right_diagonal = bottom_right_diagonal
        self.attention_type = attention_type
        self.input_layernorm = input_layernorm
        self.return_layernorm_output = return_layernorm_output
        self.return_bias = return_bias
        self.qkv_format = qkv_format
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.qk_norm_before_rope = qk_norm_before_rope
        self.layer_number = 1 if layer_number is None else layer_number
        self.activation_checkpointing = check_mode(activation_checkpointing)
        self.name = name
        if kv_channels is not None and not hasattr(kv_channels, "__index__"):
            raise TypeError(f"kv_channels must be an int, got {kv_channels!r}; unequal widths come with the MLA arguments")
        check_positive_int("hidden_size", hidden_size)
        if not kv_channels and self.latent is None and hidden_size % num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads where kv_channels is not given, got {hidden_size} and "
                f"{num_attention_heads}"
            )
        self.head_dim = kv_channels if kv_channels else hidden_size // num_attention_heads
        if self.latent is not None:
            self._check_latent(kv_channels, qk_norm_type)

        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.head_dim if self.latent is None else self.latent.head_dims,
            self.num_gqa_groups,
            attention_dropout,
            qkv_format,
            self.attn_mask_type,
            softcap=softcap,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_scale=softmax_scale,
            softmax_type=softmax_type,
            name=None if name is None else f"{name}.core_attention",
            backend=backend,
            pad_head_dim=pad_head_dim,
            sanitize_padding=sanitize_padding,
            selection=selection,
        )
        factory = factory_arguments(device, params_dtype)
        init = init_method or default_init_method
        norm = {"eps": layernorm_epsilon, "normalization": normalization, "zero_centered_gamma": zero_centered_gamma}
        self._make_projections(init, norm, bias, fuse_qkv_params, factory)
        self.q_norm, self.k_norm = self._make_qk_norms(qk_norm_type, qk_norm_eps, factory)
        self.proj = Linear(
            num_attention_heads * self.core_attention.head_dim_v,
            hidden_size,
            output_layer_init_method or default_init_method,
            bias=bias,
            return_bias=return_bias,
            **factory,
        )
        self.register_load_state_dict_pre_hook(drop_extra_state)
        self.register_state_dict_post_hook(_note_row_order)
        self.register_load_state_dict_pre_hook(_check_row_order)

    # ----------------------------------------------------------------------------------------------------------- construction
    def _check_latent(self, kv_channels: int | None, qk_norm_type: str | None) -> None:
        if self.attention_type == "cross":
            raise NotImplementedError("attention_type='cross' is not supported with multi-head latent attention (kv_lora_rank)")
        if self.num_gqa_groups != self.num_attention_heads:
            raise ValueError(
                f"num_gqa_groups={self.num_gqa_groups} does not fit multi-head latent attention (kv_lora_rank), where each of "
                f"the {self.num_attention_heads} heads has keys and values of its own; leave it out"
            )
        for name, value in (("kv_channels", kv_channels), ("qk_norm_type", qk_norm_type)):
            if value is not None:
                raise ValueError(f"{name}={value!r} does not fit multi-head latent attention (kv_lora_rank); leave it out")

    def _make_projections(
        self, init: InitMethod, norm: dict[str, Any], bias: bool, fuse_qkv_params: bool, factory: dict[str, Any]
    ) -> None:
        hidden = self.hidden_size
        width_q, width_kv = self.num_attention_heads * self.head_dim, self.num_gqa_groups * self.head_dim
        normed_options: dict[str, Any] = {**norm, "return_layernorm_output": self.return_layernorm_output}

        def linear(out_features: int, splits: dict[str, int], normed: bool) -> Linear:
            parts = None if fuse_qkv_params else splits
            if normed:
                return LayerNormLinear(hidden, out_features, init, **normed_options, bias=bias, splits=parts, **factory)
            return Linear(hidden, out_features, init, bias=bias, splits=parts, **factory)

        if self.latent is not None:
            check_normalization(norm["normalization"])
            if self.input_layernorm:
                self.layernorm = Norm(hidden, **norm, **factory)
            self.mla = LatentProjection(hidden, self.num_attention_heads, self.latent, init, **norm, bias=bias, **factory)
        elif self.attention_type == "self":
            parts = {"query": width_q, "key": width_kv, "value": width_kv}
            qkv = linear(width_q + 2 * width_kv, parts, self.input_layernorm)
            self.add_module("layernorm_qkv" if self.input_layernorm else "qkv", qkv)
        else:
            query = linear(width_q, {"query": width_q}, self.input_layernorm)
            self.add_module("layernorm_query" if self.input_layernorm else "query_layer", query)
            self.key_value = linear(2 * width_kv, {"key": width_kv, "value": width_kv}, False)

    def _make_qk_norms(self, qk_norm_type: str | None, eps: float, factory: dict[str, Any]) -> tuple[Any, Any]:
        if qk_norm_type is None:
            return None, None
        if qk_norm_type not in QK_NORM_TYPES:
            raise ValueError(f"qk_norm_type={qk_norm_type!r} is unknown; use None or one of {', '.join(QK_NORM_TYPES)}")
        if qk_norm_type == "L2Normalization":
            return L2Normalization(eps), L2Normalization(eps)
        return Norm(self.head_dim, eps, qk_norm_type, **factory), Norm(self.head_dim, eps, qk_norm_type, **factory)

    def reset_parameters(self) -> None:
        """Initialises every parameter again; after ``to_empty`` it ends deferred (meta) initialisation."""
        reset_children(self)

    def plan_spec(self, dtype: torch.dtype | None = None) -> PlanSpec:
        """:meth:`DotProductAttention.plan_spec`; the default dtype is autocast's or the first parameter's."""
        if dtype is None and not torch.is_autocast_enabled("cuda"):
            dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), None)
        return self.core_attention.plan_spec(dtype)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        refuse_unsupported(tp_group=tp_group)

    def set_context_parallel_group(self, cp_group: Any, *args: Any, **kwargs: Any) -> None:
        refuse_context_parallel(self, cp_group)

    # ---------------------------------------------------------------------------------------------------------------- forward
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: RotaryAngles | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
        thd_attention_policies: PreparedPolicies | Sequence[Mapping[str, Any]] | None = None,
        thd_attention_policy_dispatch: str = "auto",
        softcap: float | None = None,
        *,
        backend: str | None = None,
        pad_head_dim: bool | None = None,
        sanitize_padding: bool | None = None,
        selection: str | None = None,
    ) -> Any:
        """Attention over hidden states; the arguments not named here are those of :class:`DotProductAttention`'s forward.

        Args:
            hidden_states: thd [tokens, hidden], sbhd [s, b, hidden], bshd [b, s, hidden].
            encoder_output: cross-attention: where keys and values come from, in the same layout. Self-attention does not read it.
            cu_seqlens_kv, cu_seqlens_kv_padded: in self-attention None means q's; what is given counts for keys and their rotary
                positions. max_seqlen_kv: of keys with lengths of their own.
            rotary_pos_emb: angles [positions, 1, 1, width] (:class:`RotaryPositionEmbedding`), or a pair for q and k. In thd,
                positions start at 0 in each sequence's slot, with gaps or without. float32 or float64.
            is_first_microbatch, fast_zero_fill: accepted and without effect.

        Returns:
            out in the layout of hidden_states, or a tuple (out[, bias][, the input norm's output]).
        """
        mask: dict[str, Any] = {"attn_mask_type": attn_mask_type, "window_size": window_size}
        if thd_attention_policies is None:
            mask = {
                "attn_mask_type": self.attn_mask_type if attn_mask_type is None else attn_mask_type,
                "window_size": self.window_size if window_size is None else window_size,
            }
        same_slots = self.attention_type == "self" or cu_seqlens_kv is cu_seqlens_q
        slots_kv = cu_seqlens_q_padded if cu_seqlens_kv_padded is None and same_slots else cu_seqlens_kv_padded
        core: dict[str, Any] = {
            **mask,
            "bottom_right_diagonal": self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal,
            "attention_mask": attention_mask,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "cu_seqlens_kv_padded": slots_kv,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_kv": max_seqlen_kv,
            "softcap": softcap,
            "checkpoint_core_attention": checkpoint_core_attention,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "inference_params": inference_params,
            "pad_between_seqs": pad_between_seqs,
            "thd_attention_policies": thd_attention_policies,
            "thd_attention_policy_dispatch": thd_attention_policy_dispatch,
            "backend": backend,
            "pad_head_dim": pad_head_dim,
            "sanitize_padding": sanitize_padding,
            "selection": selection,
        }
        check_hidden_states("hidden_states", hidden_states, self.qkv_format, self.hidden_size)
        if self.attention_type == "self":
            check_unread_encoder_output(encoder_output)
        elif encoder_output is None:
            raise ValueError("encoder_output is needed by attention_type 'cross', got None")
        else:
            check_hidden_states("encoder_output", encoder_output, self.qkv_format, self.hidden_size)

        def block(hidden_states: Tensor, encoder_output: Tensor | None) -> Any:
            return self._block(hidden_states, encoder_output, rotary_pos_emb, core)

        return run_checkpointed(self.activation_checkpointing, block, hidden_states, encoder_output, preserve_rng_state=False)

    def _block(
        self, hidden_states: Tensor, encoder_output: Tensor | None, rotary_pos_emb: RotaryAngles | None, core: dict[str, Any]
    ) -> Any:
        if self.latent is not None:
            projected = self._project_latent(hidden_states, rotary_pos_emb, core)
        elif self.attention_type == "self":
            projected = self._project_self(hidden_states, rotary_pos_emb, core)
        else:
            assert encoder_output is not None
            projected = self._project_cross(hidden_states, encoder_output, rotary_pos_emb, core)
        context = self.core_attention(
            projected.query_layer,
            projected.key_layer,
            projected.value_layer,
            qkv_layer=projected.qkv_layer,
            kv_layer=projected.kv_layer,
            qkv_interleave_dim=-2 if self.qkv_weight_interleaved else -3,
            **core,
        )
        out = self.proj(context)
        if self.return_bias:
            outputs = out if isinstance(out, tuple) else (out, None)
        else:
            outputs = (out,)
        if self.input_layernorm and self.return_layernorm_output:
            outputs = (*outputs, projected.layernorm_output)
        return outputs if len(outputs) > 1 else outputs[0]

    def _apply_norm_and_projection(self, hidden_states: Tensor, module: Linear) -> tuple[Tensor, Tensor | None]:
        out = module(hidden_states)
        return out if self.input_layernorm and self.return_layernorm_output else (out, None)

    def _project_self(self, hidden_states: Tensor, rotary_pos_emb: RotaryAngles | None, core: dict[str, Any]) -> _Projected:
        projection = self.layernorm_qkv if self.input_layernorm else self.qkv
        mixed, normed = self._apply_norm_and_projection(hidden_states, projection)  # type: ignore[arg-type]
        heads, groups = self.num_attention_heads, self.num_gqa_groups
        per_group = heads // groups
        separate = rotary_pos_emb is not None or self.q_norm is not None
        if self.qkv_weight_interleaved:
            mixed = mixed.unflatten(-1, (groups, per_group + 2, self.head_dim))
            if per_group == 1 and not separate:
                return _Projected(qkv_layer=mixed, layernorm_output=normed)
            q, k, v = mixed.split((per_group, 1, 1), dim=-2)
            q, k, v = q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)
        elif per_group == 1 and not separate:
            return _Projected(qkv_layer=mixed.unflatten(-1, (3, heads, self.head_dim)), layernorm_output=normed)
        else:
            q, k, v = mixed.unflatten(-1, (heads + 2 * groups, self.head_dim)).split((heads, groups, groups), dim=-2)
        q, k = self._position(q, k, rotary_pos_emb, core)
        return _Projected(q, k, v, layernorm_output=normed)

    def _project_cross(
        self, hidden_states: Tensor, encoder_output: Tensor, rotary_pos_emb: RotaryAngles | None, core: dict[str, Any]
    ) -> _Projected:
        projection = self.layernorm_query if self.input_layernorm else self.query_layer
        q, normed = self._apply_norm_and_projection(hidden_states, projection)  # type: ignore[arg-type]
        q = q.unflatten(-1, (self.num_attention_heads, self.head_dim))
        sizes = (self.num_gqa_groups, 2) if self.qkv_weight_interleaved else (2, self.num_gqa_groups)
        kv = self.key_value(encoder_output).unflatten(-1, (*sizes, self.head_dim))
        if rotary_pos_emb is None and self.q_norm is None:
            return _Projected(q, kv_layer=kv, layernorm_output=normed)
        k, v = kv.unbind(-2 if self.qkv_weight_interleaved else -3)
        q, k = self._position(q, k, rotary_pos_emb, core)
        return _Projected(q, k, v, layernorm_output=normed)

    def _project_latent(self, hidden_states: Tensor, rotary_pos_emb: RotaryAngles | None, core: dict[str, Any]) -> _Projected:
        normed = self.layernorm(hidden_states) if self.input_layernorm else hidden_states
        if isinstance(rotary_pos_emb, tuple):
            raise ValueError("rotary_pos_emb must be one tensor with multi-head latent attention, got a pair")
        tables = None if rotary_pos_emb is None else self._rotary_tables(rotary_pos_emb, hidden_states, hidden_states, core)
        q, k, v = self.mla(normed, tables, self.rotary_pos_interleaved)
        return _Projected(q, k, v, layernorm_output=normed)

    def _position(
        self, q: Tensor, k: Tensor, rotary_pos_emb: RotaryAngles | None, core: dict[str, Any]
    ) -> tuple[Any, Any]:
        """QK-norm and rotary positions, in the order that was asked for."""
        if self.q_norm is not None and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary_pos_emb is not None:
            table_q, table_k = self._rotary_tables(rotary_pos_emb, q, k, core)
            q, k = rotate(q, table_q, self.rotary_pos_interleaved), rotate(k, table_k, self.rotary_pos_interleaved)
        if self.q_norm is not None and not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k

    def _rotary_tables(
        self, rotary_pos_emb: RotaryAngles, q: Tensor, k: Tensor, core: dict[str, Any]
    ) -> tuple[RotaryTable, RotaryTable]:
        """For the rows of q and of k; one table where both are the same rows."""
        if isinstance(rotary_pos_emb, tuple) and len(rotary_pos_emb) != 2:
            raise ValueError(f"rotary_pos_emb must be a tensor or a pair of them, got {len(rotary_pos_emb)}")
        angles_q, angles_k = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
        cu_q, slots_q = core["cu_seqlens_q"], core["cu_seqlens_q_padded"]
        cu_kv, slots_kv = core["cu_seqlens_kv"], core["cu_seqlens_kv_padded"]
        if self.attention_type == "self":
            cu_kv = cu_q if cu_kv is None else cu_kv
        if self.qkv_format == "thd" and cu_q is not None and cu_kv is not None:
            make_packing(q, cu_q, cu_kv, slots_q, slots_kv)  # before positions are made of them
        rows_q, rows_k = (x.shape[1] if self.qkv_format == "bshd" else x.shape[0] for x in (q, k))
        table_q = rotary_table(angles_q, self.qkv_format, rows_q, cu_q, slots_q)
        if self.attention_type == "self" and angles_k is angles_q and cu_kv is cu_q and slots_kv is slots_q:
            return table_q, table_q
        return table_q, rotary_table(angles_k, self.qkv_format, rows_k, cu_kv, slots_kv)

    def extra_repr(self) -> str:
        text = (
            f"hidden_size={self.hidden_size}, num_attention_heads={self.num_attention_heads}, "
            f"num_gqa_groups={self.num_gqa_groups}, attention_type={self.attention_type!r}"
        )
        flags = ("qkv_weight_interleaved", "rotary_pos_interleaved", "qk_norm_before_rope", "activation_checkpointing")
        for name in ("window_size", "bottom_right_diagonal", *flags):
            if getattr(self, name):
                text += f", {name}={getattr(self, name)!r}"
        return text
