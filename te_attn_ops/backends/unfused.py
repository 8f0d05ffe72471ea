"""Plain PyTorch: any device and dtype, every band; the truth that the others are tested against, and the last resort.

Scores stand in float32 (float64 for float64 inputs). On the CPU each sequence is computed by itself at its own length. On
CUDA the lengths stay on the device: sequences are gathered into dense blocks of max_seqlen rows, as many at a time as a fixed
budget of scores allows, so that nothing syncs and a capture works; that is slow and meant for what no kernel takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import Band
from ..params import AttentionParams
from .base import Backend, BackwardCall, Call, ForwardCall

# Scores held at a time on CUDA, over all heads: 2^27 float32 are 512 MiB.
_SCORE_BUDGET = 1 << 27


class _Tile(NamedTuple):
    """Some query rows of B sequences with all their keys: index tensors [B, rows], which of them are real, visibility."""

    rows_q: Tensor  # [B, M] row numbers in q, clamped
    real_q: Tensor  # bool [B, M]
    rows_kv: Tensor  # [B, S]
    real_kv: Tensor  # bool [B, S]
    visible: Tensor  # bool [B, M, S]


class Unfused(Backend):
    name = "unfused"
    switches = ("NVTE_UNFUSED_ATTN",)

    def version(self) -> str | None:
        return torch.__version__

    def refusals(self, p: AttentionParams) -> Iterator[str]:
        if not p.dtype.is_floating_point or p.dtype.itemsize < 2:
            yield f"needs a floating dtype of 16 bits or more, found {str(p.dtype).removeprefix('torch.')}"
        if p.num_heads % p.num_gqa_groups:
            yield f"needs num_heads to be a multiple of num_gqa_groups, found {p.num_heads} and {p.num_gqa_groups}"

    # Autocast reaches into an op's Python kernel and would compute the products in its low precision; in compiled code it does not.
    def forward(self, call: ForwardCall) -> None:
        with torch.autocast(call.q.device.type, enabled=False):
            for tile in _tiles(call):
                _forward_tile(call, tile)

    def backward(self, call: BackwardCall) -> None:
        _, dk, dv = call.grads
        accumulate = torch.promote_types(call.q.dtype, torch.float32)
        sum_dk = torch.zeros(dk.shape, dtype=accumulate, device=dk.device)
        sum_dv = torch.zeros(dv.shape, dtype=accumulate, device=dv.device)
        with torch.autocast(call.q.device.type, enabled=False):
            for tile in _tiles(call):
                _backward_tile(call, tile, sum_dk, sum_dv)
        _put_subset(dk, sum_dk, call.starts_kv, call.seqused_kv)
        _put_subset(dv, sum_dv, call.starts_kv, call.seqused_kv)


# ------------------------------------------------------------------------------------------------------------------- tiles
def _tiles(call: Call) -> Iterator[_Tile]:
    if call.lens_q.shape[1] == 0 or call.q.shape[0] == 0:
        return
    if call.q.is_cuda:
        yield from _device_tiles(call)
    else:
        yield from _host_tiles(call)


def _host_tiles(call: Call) -> Iterator[_Tile]:
    device = call.q.device  # a default device may be another
    geometry = zip(call.starts_q.tolist(), call.seqused_q.tolist(), call.starts_kv.tolist(), call.seqused_kv.tolist())
    for start_q, len_q, start_kv, len_kv in geometry:
        if len_q == 0:
            continue
        heads = call.q.shape[1]
        step = max(1, _SCORE_BUDGET // max(1, heads * len_kv))
        keys = torch.arange(len_kv, device=device)
        for first in range(0, len_q, step):
            rows = torch.arange(first, min(first + step, len_q), device=device)
            visible = _visible(call.band, rows, keys, *torch.tensor([len_q, len_kv], device=device).unbind())
            yield _Tile(
                (start_q + rows)[None],
                torch.ones(1, len(rows), dtype=torch.bool, device=device),
                (start_kv + keys)[None],
                torch.ones(1, len_kv, dtype=torch.bool, device=device),
                visible[None],
            )


def _device_tiles(call: Call) -> Iterator[_Tile]:
    device, heads = call.q.device, call.q.shape[1]
    num_seqs = call.lens_q.shape[1]
    rows_q, rows_kv = max(1, call.max_seqlen_q), max(1, call.max_seqlen_kv)
    row_step = min(rows_q, max(1, _SCORE_BUDGET // (heads * rows_kv)))
    seq_step = max(1, _SCORE_BUDGET // (heads * rows_kv * row_step))
    keys = torch.arange(rows_kv, device=device)
    for n in range(0, num_seqs, seq_step):
        part = slice(n, min(n + seq_step, num_seqs))
        len_q, len_kv = call.seqused_q[part].long()[:, None], call.seqused_kv[part].long()[:, None]
        start_q, start_kv = call.starts_q[part.start : part.stop].long()[:, None], call.starts_kv[part.start : part.stop].long()[:, None]
        real_kv = keys < len_kv
        index_kv = (start_kv + keys).clamp(max=max(0, call.k.shape[0] - 1))
        for first in range(0, rows_q, row_step):
            rows = torch.arange(first, min(first + row_step, rows_q), device=device)
            real_q = rows < len_q
            visible = _visible(call.band, rows, keys, len_q[:, :, None], len_kv[:, :, None])
            index_q = (start_q + rows).clamp(max=call.q.shape[0] - 1)
            yield _Tile(index_q, real_q, index_kv, real_kv, visible & real_q[:, :, None] & real_kv[:, None, :])


def _visible(band: Band, rows: Tensor, keys: Tensor, len_q: Tensor, len_kv: Tensor) -> Tensor:
    """bool [..., rows, keys]. len_* broadcast in front."""
    diagonal = rows[:, None] + (len_kv - len_q if band.bottom_right else torch.zeros_like(len_q))
    visible = (keys[None, :] < len_kv) & (rows[:, None] < len_q)
    if band.left is not None:
        visible = visible & (keys[None, :] >= diagonal - band.left)
    if band.right is not None:
        visible = visible & (keys[None, :] <= diagonal + band.right)
    return visible


# ----------------------------------------------------------------------------------------------------------------- forward
def _gather(x: Tensor, rows: Tensor, real: Tensor, groups: int) -> Tensor:
    """[B, groups, heads / groups, M, D] in the accumulation dtype, 0 at rows that are not real (a NaN there stays out)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    taken = x[rows].to(wide)
    taken = torch.where(real[:, :, None, None], taken, torch.zeros((), dtype=wide, device=x.device))
    return taken.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)


def _softmax(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Masked scaled scores, their log-sum-exp over the keys, and the weights: 0 in a row that sees no key."""
    scores = (torch.matmul(q, k.transpose(-1, -2)) * scale).masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], float("-inf"))
    zero = torch.zeros((), dtype=scores.dtype, device=scores.device)
    return scores, lse, torch.where(visible, torch.exp(scores - lse[..., None]), zero)


def _forward_tile(call: ForwardCall, tile: _Tile) -> None:
    groups = call.k.shape[1]
    q = _gather(call.q, tile.rows_q, tile.real_q, groups)
    k = _gather(call.k, tile.rows_kv, tile.real_kv, groups)
    v = _gather(call.v, tile.rows_kv, tile.real_kv, groups)
    visible = tile.visible[:, None, None]
    scores, lse, weights = _softmax(q, k, visible, call.scale)
    out = torch.matmul(weights, v)
    _put(call.out, out.permute(0, 3, 1, 2, 4).flatten(2, 3), tile)
    _put(call.lse.t(), lse.permute(0, 3, 1, 2).flatten(2, 3), tile)
    if call.max_logit is not None and scores.shape[-1]:
        torch.maximum(call.max_logit, scores.amax(dim=(0, 3, 4)).flatten().float(), out=call.max_logit)


def _put(target: Tensor, value: Tensor, tile: _Tile) -> None:
    """target[rows of the tile that are real] = value, without a data-dependent shape. target [T, ...], value [B, M, ...]."""
    value = value.to(target.dtype)
    if not target.is_cuda:
        target[tile.rows_q[0]] = value[0]
        return
    # A row that is not real goes to an extra last row, which is cut off again.
    rows = target.shape[0]
    index = torch.where(tile.real_q, tile.rows_q, rows).flatten()
    extended = torch.cat([target, target[:1]])
    extended.index_copy_(0, index, value.flatten(0, 1))
    target.copy_(extended[:rows])


# ---------------------------------------------------------------------------------------------------------------- backward
def _backward_tile(call: BackwardCall, tile: _Tile, sum_dk: Tensor, sum_dv: Tensor) -> None:
    groups = call.k.shape[1]
    dq = call.grads[0]
    q = _gather(call.q, tile.rows_q, tile.real_q, groups)
    k = _gather(call.k, tile.rows_kv, tile.real_kv, groups)
    v = _gather(call.v, tile.rows_kv, tile.real_kv, groups)
    grad = _gather(call.grad_out, tile.rows_q, tile.real_q, groups)
    out = _gather(call.out, tile.rows_q, tile.real_q, groups)
    visible = tile.visible[:, None, None]
    zero = torch.zeros((), dtype=q.dtype, device=q.device)
    # The log-sum-exp is computed again: the saved one is float32, too coarse for a float64 gradient.
    _, _, weights = _softmax(q, k, visible, call.scale)
    delta = (grad * out).sum(-1, keepdim=True)
    grad_scores = torch.where(visible, weights * (torch.matmul(grad, v.transpose(-1, -2)) - delta), zero) * call.scale
    _put(dq, torch.matmul(grad_scores, k).permute(0, 3, 1, 2, 4).flatten(2, 3), tile)
    # Keys and values collect from every query head of their group.
    _collect(sum_dk, torch.matmul(grad_scores.transpose(-1, -2), q).sum(2).permute(0, 2, 1, 3), tile)
    _collect(sum_dv, torch.matmul(weights.transpose(-1, -2), grad).sum(2).permute(0, 2, 1, 3), tile)


def _collect(total: Tensor, value: Tensor, tile: _Tile) -> None:
    """total[rows of the keys] += value. A row occurs once among the real ones, so the order of the additions is fixed."""
    if total.is_cuda:
        rows = total.shape[0]
        index = torch.where(tile.real_kv, tile.rows_kv, rows).flatten()
        extended = torch.cat([total, total[:1]])
        # index_add_ is not deterministic for repeated rows; only the discarded last row repeats.
        extended.index_put_((index,), extended[index] + value.flatten(0, 1))
        total.copy_(extended[:rows])
        return
    total[tile.rows_kv[0]] += value[0]


def _put_subset(target: Tensor, value: Tensor, starts: Tensor, lens: Tensor) -> None:
    from ..rows import subset_row_mask

    mask = subset_row_mask(starts, lens, target.shape[0])
    target.copy_(torch.where(mask[:, None, None], value.to(target.dtype), target))
