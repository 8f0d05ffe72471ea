"""``TransformerLayer``: self-attention, optional cross-attention and a feed-forward block with residuals."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_bool
from ..masks import normalize_mask_type, normalize_window, require_padding_mask_type
from ..policies import PlanSpec, PreparedPolicies
from .checkpointing import check_mode, run_checkpointed
from .dot_product_attention import check_mask_arguments, refuse_arbitrary
from .layers import InitMethod, Norm, drop_extra_state, factory_arguments, reset_children
from .layouts import check_qkv_format
from .mlp import LayerNormMLP
from .multihead_attention import MultiheadAttention, RotaryAngles, check_hidden_states, check_unread_encoder_output
from .unsupported import refuse_context_parallel, refuse_unsupported


def _probability(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0.0 <= float(value) <= 1.0:
        raise ValueError(f"{name} must be a probability, from 0 to 1, got {value!r}")
    return float(value)


class TransformerLayer(torch.nn.Module):
    """A transformer layer with TransformerEngine's constructor and forward arguments: pre-norm unless ``output_layernorm``.

    Plain PyTorch but for attention itself; compiles as one graph. Differences from TransformerEngine, and how its state dict
    maps, are listed in ``docs/te_mapping.md``.

    Args:
        hidden_size, ffn_hidden_size: widths of the residual stream and of the feed-forward block.
        num_attention_heads, num_gqa_groups, kv_channels: see :class:`MultiheadAttention`.
        hidden_dropout: after each block, before the residual is added.
        self_attn_mask_type, window_size, bottom_right_diagonal: of self-attention, where the forward is given none;
            enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal: of cross-attention.
        layer_type: "encoder", or "decoder" with cross-attention over ``encoder_output`` after self-attention.
        apply_residual_connection_post_layernorm: residuals start from the norms' outputs.
        output_layernorm: norm the output instead of self-attention's input.
        parallel_attention_mlp: attention and feed-forward block over the same input, summed.
        activation, activation_params: see :class:`LayerNormMLP`.
        attn_input_format: "thd" (hidden states [tokens, hidden]), "sbhd" or "bshd".
        q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, softmax_scale: of self-attention, see
            :class:`MultiheadAttention`.
        activation_checkpointing: "full": keep the layer's inputs and compute it again in the backward; "selective": keep
            attention's results too and compute the rest again.
        backend, pad_head_dim, sanitize_padding, selection: of every attention here, see :func:`te_attn_ops.thd_attention`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.0,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
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
        refuse_unsupported(ub_tp_comm_overlap=ub_tp_comm_overlap, drop_path_rate=drop_path_rate)
        _check_structure(layer_type, parallel_attention_mlp, apply_residual_connection_post_layernorm, output_layernorm)
        self.attn_input_format = check_qkv_format(attn_input_format, "attn_input_format")
        self.self_attn_mask_type, self.window_size = check_mask_arguments(
            self_attn_mask_type, window_size, bottom_right_diagonal, ("self_attn_mask_type", "window_size")
        )
        self.bottom_right_diagonal = bottom_right_diagonal
        self.enc_dec_attn_mask_type, self.enc_dec_window_size = check_mask_arguments(
            enc_dec_attn_mask_type,
            enc_dec_window_size,
            enc_dec_bottom_right_diagonal,
            ("enc_dec_attn_mask_type", "enc_dec_window_size"),
        )
        self.enc_dec_bottom_right_diagonal = enc_dec_bottom_right_diagonal
        self.layer_type = layer_type
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.output_layernorm = output_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        self.hidden_dropout = _probability("hidden_dropout", hidden_dropout)
        self.layer_number = layer_number
        self.activation_checkpointing = check_mode(activation_checkpointing)
        self.name = name

        placement: dict[str, Any] = {"params_dtype": params_dtype, "device": device}
        norm: dict[str, Any] = {"normalization": normalization, "zero_centered_gamma": zero_centered_gamma}
        inits: dict[str, Any] = {"init_method": init_method, "output_layer_init_method": output_layer_init_method}
        shared: dict[str, Any] = {**placement, **norm, **inits, "bias": bias}
        attention: dict[str, Any] = dict(
            shared, attention_dropout=attention_dropout, layernorm_epsilon=layernorm_epsilon, layer_number=layer_number,
            softcap=softcap, tp_group=tp_group, tp_size=tp_size, num_gqa_groups=num_gqa_groups, kv_channels=kv_channels,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, fuse_qkv_params=fuse_qkv_params,
            qkv_weight_interleaved=qkv_weight_interleaved, rotary_pos_interleaved=rotary_pos_interleaved,
            qkv_format=attn_input_format, qk_norm_type=qk_norm_type, qk_norm_eps=qk_norm_eps,
            qk_norm_before_rope=qk_norm_before_rope, softmax_type=softmax_type, backend=backend, pad_head_dim=pad_head_dim,
            sanitize_padding=sanitize_padding, selection=selection,
            return_layernorm_output=apply_residual_connection_post_layernorm,
        )  # fmt: skip
        latent: dict[str, Any] = {
            "q_lora_rank": q_lora_rank, "kv_lora_rank": kv_lora_rank, "qk_nope_head_dim": qk_nope_head_dim,
            "qk_rope_head_dim": qk_rope_head_dim, "v_head_dim": v_head_dim, "softmax_scale": softmax_scale,
        }  # fmt: skip
        self._make_attention(hidden_size, num_attention_heads, attention, latent)
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            activation=activation,
            activation_params=activation_params,
            return_layernorm_output=apply_residual_connection_post_layernorm,
            **shared,
        )
        if output_layernorm:
            self.layernorm = Norm(hidden_size, layernorm_epsilon, **norm, **factory_arguments(device, params_dtype))
        self.register_load_state_dict_pre_hook(drop_extra_state)

    def _make_attention(self, hidden_size: int, heads: int, attention: dict[str, Any], latent: dict[str, Any]) -> None:
        name = "" if self.name is None else f"{self.name}."
        self.self_attention = MultiheadAttention(
            hidden_size,
            heads,
            **attention,
            **latent,
            attn_mask_type=self.self_attn_mask_type,
            input_layernorm=not self.output_layernorm,
            name=f"{name}self_attention",
        )
        if self.layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size,
                heads,
                **attention,
                attn_mask_type=self.enc_dec_attn_mask_type,
                input_layernorm=True,
                attention_type="cross",
                name=f"{name}inter_attention",
            )

    def reset_parameters(self) -> None:
        """Initialises every parameter again; after ``to_empty`` it ends deferred (meta) initialisation."""
        reset_children(self)

    def plan_spec(self, dtype: torch.dtype | None = None) -> PlanSpec:
        """Self-attention's :meth:`MultiheadAttention.plan_spec`."""
        return self.self_attention.plan_spec(dtype)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        refuse_unsupported(tp_group=tp_group)

    def set_context_parallel_group(self, cp_group: Any, *args: Any, **kwargs: Any) -> None:
        refuse_context_parallel(self, cp_group)

    # ---------------------------------------------------------------------------------------------------------------- forward
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
    ) -> Tensor:
        """One layer over hidden states; the arguments not named here are those of :class:`MultiheadAttention`'s forward.

        Args:
            hidden_states: thd [tokens, hidden], sbhd [s, b, hidden], bshd [b, s, hidden].
            self_attn_mask_type, window_size, bottom_right_diagonal, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q: of
                self-attention; of its keys too where kv's are None, and always in a decoder.
            cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv: of a decoder's cross-attention; of an encoder's self-attention. Where
                cu_seqlens_kv is another tensor than q's, max_seqlen_kv is needed under compile and capture.
            encoder_output, enc_dec_*: of a decoder's cross-attention. An encoder checks them and does not read them.
            thd_attention_policies, thd_attention_policy_dispatch: of self-attention; cross-attention keeps
                enc_dec_attn_mask_type. Exclusive with this call's self_attn_mask_type and window_size.

        Returns:
            The layer's output, in the layout of hidden_states.
        """
        refuse_unsupported(enc_dec_attn_mask=enc_dec_attn_mask)
        decoder = self.layer_type == "decoder"
        if thd_attention_policies is None:
            self_attn_mask_type = self.self_attn_mask_type if self_attn_mask_type is None else self_attn_mask_type
            window_size = self.window_size if window_size is None else window_size
        elif self_attn_mask_type is not None:
            raise ValueError(
                f"self_attn_mask_type={self_attn_mask_type!r} cannot stand beside thd_attention_policies: each policy names "
                "its own"
            )
        common: dict[str, Any] = {
            "checkpoint_core_attention": checkpoint_core_attention,
            "inference_params": inference_params,
            "rotary_pos_emb": rotary_pos_emb,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "max_seqlen_q": max_seqlen_q,
            "pad_between_seqs": pad_between_seqs,
            "softcap": softcap,
            "backend": backend,
            "pad_head_dim": pad_head_dim,
            "sanitize_padding": sanitize_padding,
            "selection": selection,
        }
        kv_as_q = cu_seqlens_kv is None or cu_seqlens_kv is cu_seqlens_q
        own: dict[str, Any] = {
            **common,
            "attention_mask": attention_mask,
            "attn_mask_type": self_attn_mask_type,
            "window_size": window_size,
            "bottom_right_diagonal": self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal,
            "cu_seqlens_kv": None if decoder else cu_seqlens_kv,
            "cu_seqlens_kv_padded": None if decoder else cu_seqlens_kv_padded,
            "max_seqlen_kv": max_seqlen_q if decoder or (max_seqlen_kv is None and kv_as_q) else max_seqlen_kv,
            "thd_attention_policies": thd_attention_policies,
            "thd_attention_policy_dispatch": thd_attention_policy_dispatch,
        }
        enc_dec_attn_mask_type = self.enc_dec_attn_mask_type if enc_dec_attn_mask_type is None else enc_dec_attn_mask_type
        self._check_masks(self_attn_mask_type, enc_dec_attn_mask_type)
        normalize_window(enc_dec_window_size, "enc_dec_window_size")
        check_bool("enc_dec_bottom_right_diagonal", enc_dec_bottom_right_diagonal, or_none=True)
        if not decoder:
            check_unread_encoder_output(encoder_output)
        elif encoder_output is None:
            raise ValueError("encoder_output is needed by layer_type 'decoder', got None")
        else:
            check_hidden_states("encoder_output", encoder_output, self.attn_input_format, self.self_attention.hidden_size)
        if enc_dec_bottom_right_diagonal is None:
            enc_dec_bottom_right_diagonal = self.enc_dec_bottom_right_diagonal
        cross: dict[str, Any] = {
            **common,
            "attn_mask_type": enc_dec_attn_mask_type,
            "window_size": self.enc_dec_window_size if enc_dec_window_size is None else enc_dec_window_size,
            "bottom_right_diagonal": enc_dec_bottom_right_diagonal,
            "cu_seqlens_kv": cu_seqlens_kv,
            "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
            "max_seqlen_kv": max_seqlen_kv,
        }

        def layer(hidden_states: Tensor, encoder_output: Tensor | None) -> Tensor:
            return self._layer(hidden_states, encoder_output, own, cross)

        dropout = self.training and self.hidden_dropout > 0
        return run_checkpointed(self.activation_checkpointing, layer, hidden_states, encoder_output, preserve_rng_state=dropout)

    def _check_masks(self, self_attn_mask_type: str | None, enc_dec_attn_mask_type: str) -> None:
        """Under the names that this layer's arguments have, and before anything runs."""
        decoder = self.layer_type == "decoder"
        given = (("self_attn_mask_type", self_attn_mask_type, True), ("enc_dec_attn_mask_type", enc_dec_attn_mask_type, decoder))
        for name, mask_type, read in given:
            if mask_type is None:
                continue
            refuse_arbitrary(mask_type, name)
            if read and self.attn_input_format == "thd":
                require_padding_mask_type(mask_type, name)
            else:
                normalize_mask_type(mask_type, name)

    def _layer(
        self, hidden_states: Tensor, encoder_output: Tensor | None, own: dict[str, Any], cross: dict[str, Any]
    ) -> Tensor:
        attended = self.self_attention(hidden_states, **own)
        if self.parallel_attention_mlp:
            return self._add(hidden_states, attended + self.layernorm_mlp(hidden_states))
        hidden_states = self._add(*self._residual(hidden_states, attended, not self.output_layernorm))
        if self.layer_type == "decoder":
            attended = self.inter_attention(hidden_states, encoder_output=encoder_output, **cross)
            hidden_states = self._add(*self._residual(hidden_states, attended, True))
        out = self._add(*self._residual(hidden_states, self.layernorm_mlp(hidden_states), True))
        return self.layernorm(out) if self.output_layernorm else out

    def _residual(self, block_input: Tensor, block_output: Any, block_has_norm: bool) -> tuple[Tensor, Tensor]:
        """(residual, the block's output): the residual is the block's input or, if asked for, its norm's output."""
        if self.apply_residual_connection_post_layernorm and block_has_norm:
            out, normed = block_output
            return normed, out
        return block_input, block_output

    def _add(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + F.dropout(x, p=self.hidden_dropout, training=self.training)

    def extra_repr(self) -> str:
        text = (
            f"layer_type={self.layer_type!r}, attn_input_format={self.attn_input_format!r}, "
            f"hidden_dropout={self.hidden_dropout}"
        )
        for name in (
            "window_size",
            "bottom_right_diagonal",
            "enc_dec_window_size",
            "enc_dec_bottom_right_diagonal",
            "apply_residual_connection_post_layernorm",
            "output_layernorm",
            "parallel_attention_mlp",
            "activation_checkpointing",
        ):
            if getattr(self, name):
                text += f", {name}={getattr(self, name)!r}"
        return text


def _check_structure(layer_type: str, parallel: bool, post_layernorm: bool, output_layernorm: bool) -> None:
    if layer_type not in ("encoder", "decoder"):
        raise ValueError(f"layer_type={layer_type!r} is unknown; use 'encoder' or 'decoder'")
    if parallel and (layer_type != "encoder" or post_layernorm or output_layernorm):
        raise ValueError(
            "parallel_attention_mlp=True needs layer_type 'encoder' without apply_residual_connection_post_layernorm and "
            f"output_layernorm, got layer_type={layer_type!r}, {post_layernorm} and {output_layernorm}"
        )
