"""Rotary position embedding for packed and dense batches. Positions come from cu_seqlens on the device, without a host sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..packing import check_cu_seqlens, derive_max_seqlen, may_read_contents, require_same_length
from ..rows import row_coordinates
from .layers import factory_arguments
from .layouts import check_qkv_format


class RotaryTable(NamedTuple):
    """cos and sin of the angles, float32 or wider, broadcastable against [..., heads, rotated width]."""

    cos: Tensor
    sin: Tensor


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles of rotary position embedding (https://arxiv.org/abs/2104.09864), with TransformerEngine's arguments.

    The buffer ``inv_freq`` stays float32 where a model is cast as a whole (``model.bfloat16()``), and where a checkpoint was:
    bfloat16 does not tell position 257 from 256.

    Args:
        dim: width of a head.
        rotary_percent: part of ``dim`` that is rotated, the first one.
        seq_len_interpolation_factor: positions are divided by it; beyond pretrained_max_position_embeddings times it, by
            max_seq_len / pretrained_max_position_embeddings.
        rotary_base: base of the frequencies.
        interleaved: the pairs that rotate together are neighbours, (0, 1), (2, 3), ..., instead of halves. The layers must be
            told the same by ``rotary_pos_interleaved``.
        device: None is what it is for the layers' parameters.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        if dim < 2 or dim % 2:
            raise ValueError(f"the rotated width must be even and at least 2, got {dim}")
        device = factory_arguments(device, None)["device"]
        self.register_buffer("inv_freq", torch.empty(dim // 2, dtype=torch.float32, device=device))
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base = rotary_base
        self.interleaved = interleaved
        self.register_load_state_dict_pre_hook(_leave_rounded_out)
        self.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        inv_freq = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype.itemsize < 4:
            self.inv_freq = inv_freq.to(self.inv_freq.device)
        return self

    def reset_parameters(self) -> None:
        """Fills the buffer of frequencies again; after ``to_empty`` it ends deferred (meta) initialisation."""
        with torch.no_grad():
            self.inv_freq.copy_(self._frequencies(self.inv_freq.device))

    def _frequencies(self, device: torch.device) -> Tensor:
        dim = 2 * self.inv_freq.shape[0]
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        return 1.0 / self.rotary_base**exponents

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles [max_seq_len, 1, 1, rotated width] of the positions offset, offset + 1, ...

        Raises:
            TypeError: the buffer ``inv_freq`` was set to a 16-bit dtype all the same.
        """
        if self.inv_freq.dtype.itemsize < 4:
            raise TypeError(
                f"RotaryPositionEmbedding.inv_freq must be float32, got {self.inv_freq.dtype}, which does not tell far positions "
                "apart. Where FSDP1 cast it: MixedPrecision(buffer_dtype=torch.float32)"
            )
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=self.inv_freq.dtype) + offset
        pretrained, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if pretrained is not None and factor is not None:
            positions = positions / (max_seq_len / pretrained if max_seq_len > pretrained * factor else factor)
        angles = torch.outer(positions, self.inv_freq)
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return angles[:, None, None, :]

    def extra_repr(self) -> str:
        return f"dim={2 * self.inv_freq.shape[0]}, rotary_base={self.rotary_base}, interleaved={self.interleaved}"


def _leave_rounded_out(module: RotaryPositionEmbedding, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """A load_state_dict pre-hook: frequencies of a checkpoint that was cast to 16 bit are left out for the module's own."""
    saved = state_dict.get(f"{prefix}inv_freq")
    if isinstance(saved, Tensor) and saved.dtype.itemsize < 4 and saved.shape == module.inv_freq.shape:
        own = module.inv_freq
        state_dict[f"{prefix}inv_freq"] = module._frequencies(saved.device) if own.is_meta else own


def packed_positions(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, rows: int) -> Tensor:
    """[rows] int64: the position of each packed row in its sequence; 0 at rows of no sequence.

    cu_seqlens and, where there are gaps, cu_seqlens_padded: [N + 1].
    """
    starts = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    sequence, offset = row_coordinates(starts, rows)
    if cu_seqlens.shape[0] < 2:
        return torch.zeros_like(offset)
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(offset.dtype)
    # Rows before the first slot have a negative offset.
    return torch.where((offset >= 0) & (offset < lengths[sequence]), offset, 0)


def rotary_table(
    freqs: Tensor,
    qkv_format: str,
    rows: int,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
) -> RotaryTable:
    """The angles [s, 1, 1, width] as cos and sin for a tensor of ``rows`` tokens (thd) or tokens a sample (sbhd, bshd).

    A sequence longer than the table is an error: at once where shapes tell it or cu_seqlens may be read, else an index out of
    range on the device.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    for name, value in (("rotary_pos_emb", freqs), ("cu_seqlens_q or cu_seqlens_kv", cu_seqlens)):
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if freqs.dim() != 4 or freqs.shape[1] != 1 or freqs.shape[2] != 1 or freqs.shape[3] % 2:
        raise ValueError(f"rotary_pos_emb must be angles [positions, 1, 1, width], width even, got shape {tuple(freqs.shape)}")
    if freqs.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"rotary_pos_emb must be float32 or float64, got {freqs.dtype}, which does not tell far positions apart. Where FSDP2 cast "
            "it: MixedPrecisionPolicy(cast_forward_inputs=False) with hidden_states cast before the layer, or call "
            "RotaryPositionEmbedding inside the wrapped module"
        )
    if qkv_format == "thd":
        if cu_seqlens is None:
            raise ValueError("cu_seqlens is needed for rotary positions in qkv_format 'thd', got None")
        check_cu_seqlens("cu_seqlens", cu_seqlens, freqs, "rotary_pos_emb")
        if cu_seqlens_padded is not None:
            check_cu_seqlens("cu_seqlens_padded", cu_seqlens_padded, freqs, "rotary_pos_emb")
            require_same_length("cu_seqlens_padded", cu_seqlens_padded, "cu_seqlens", cu_seqlens)
        _check_longest(freqs, cu_seqlens)
        if freqs.shape[0] == 0:  # for sequences without a token; rows of none have position 0
            freqs = freqs.new_zeros(1, *freqs.shape[1:])
        table = freqs[:, 0]
        positions = packed_positions(cu_seqlens, cu_seqlens_padded, rows)
        return RotaryTable(table.cos()[positions], table.sin()[positions])
    if rows > freqs.shape[0]:
        raise ValueError(f"rotary_pos_emb holds {freqs.shape[0]} positions, but a sample has {rows} tokens")
    freqs = freqs[:rows]
    if qkv_format == "bshd":
        freqs = freqs.transpose(0, 1)
    return RotaryTable(freqs.cos(), freqs.sin())


def _check_longest(freqs: Tensor, cu_seqlens: Tensor) -> None:
    longest = derive_max_seqlen("max_seqlen", cu_seqlens) if may_read_contents(cu_seqlens) else 0
    if longest > freqs.shape[0]:
        raise ValueError(f"rotary_pos_emb holds {freqs.shape[0]} positions, but the longest sequence has {longest} tokens")


def rotate(t: Tensor, table: RotaryTable, interleaved: bool) -> Tensor:
    """t [..., heads, width] with its first columns rotated, as many as the table has; computed in float32 or wider."""
    width = table.cos.shape[-1]
    if width > t.shape[-1]:
        raise ValueError(f"rotary_pos_emb is {width} wide, more than the heads' {t.shape[-1]}")
    turned, rest = t[..., :width], t[..., width:]
    wide = turned.to(torch.promote_types(t.dtype, torch.float32))
    if interleaved:
        even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)
        half_turn = torch.stack((-odd, even), dim=-1).flatten(-2)
    else:
        first, second = wide.chunk(2, dim=-1)
        half_turn = torch.cat((-second, first), dim=-1)
    turned = (wide * table.cos.to(wide.dtype) + half_turn * table.sin.to(wide.dtype)).to(t.dtype)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    *,
    cu_seqlens_padded: Tensor | None = None,
) -> Tensor:
    """t rotated by the angles of its positions, with TransformerEngine's arguments.

    Args:
        t: [t, h, d] (thd), [s, b, h, d] (sbhd) or [b, s, h, d] (bshd).
        freqs: angles [positions, 1, 1, width], width <= d, float32 or float64.
        cu_seqlens, cu_seqlens_padded: thd: [N + 1]; positions start at 0 in each sequence's slot.
        fused: accepted and without effect.
    """
    check_qkv_format(tensor_format, "tensor_format")
    if start_positions is not None:
        raise NotImplementedError("start_positions is not supported: KV caching is not implemented")
    if cp_size != 1:
        raise NotImplementedError(f"cp_size={cp_size} is not supported: context parallelism is not implemented")
    dims = 3 if tensor_format == "thd" else 4
    if t.dim() != dims:
        raise ValueError(f"t must have {dims} dimensions in tensor_format {tensor_format!r}, got shape {tuple(t.shape)}")
    rows = t.shape[1] if tensor_format == "bshd" else t.shape[0]
    return rotate(t, rotary_table(freqs, tensor_format, rows, cu_seqlens, cu_seqlens_padded), interleaved)
