"""Packed geometry: cu_seqlens, with or without gaps, as starts and lengths; the eager validator; capacity for static shapes."""

from __future__ import annotations

import operator
import os
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from .checks import check_int
from .environment import is_tracing


class Subsets(NamedTuple):
    """Where each policy's sequences lie: starts [N + 1] and lens [P, N], int32, for q and for kv.

    Plain cu_seqlens may come without lens ([0]): they are the differences of starts.
    """

    starts_q: Tensor
    lens_q: Tensor
    starts_kv: Tensor
    lens_kv: Tensor

    @property
    def num_seqs(self) -> int:
        return self.starts_q.shape[0] - 1

    def with_lens(self) -> Subsets:
        if self.lens_q.dim() == 2:
            return self
        lens_q = self.starts_q.diff()[None]
        lens_kv = lens_q if self.starts_kv is self.starts_q else self.starts_kv.diff()[None]
        return Subsets(self.starts_q, lens_q, self.starts_kv, lens_kv)


def _int32(x: Tensor, copy: bool) -> Tensor:
    if x.dtype != torch.int32:
        return x.to(torch.int32)
    return x.clone() if copy else x  # half the host time of to(copy=True)


def plain_subsets(cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, copy: bool) -> Subsets:
    """One policy over plain cu_seqlens, without a kernel of its own. ``copy``: the caller may refill cu_seqlens before what is
    made of them here is read for the last time, in the backward."""
    starts_q = _int32(cu_seqlens_q, copy)
    starts_kv = starts_q if cu_seqlens_kv is cu_seqlens_q else _int32(cu_seqlens_kv, copy)
    no_lens = starts_q.new_empty(0)
    return Subsets(starts_q.contiguous(), no_lens, starts_kv.contiguous(), no_lens)


class Packing(NamedTuple):
    """The four offset tensors of one packed batch. The padded ones are the plain ones where there are no gaps."""

    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    slots_q: Tensor
    slots_kv: Tensor
    has_gaps: bool
    # Whether q and kv are known to have the same lengths: they share one tensor object. No property: the Dynamo of torch 2.8 does
    # not trace those of a named tuple.
    equal_lengths: bool


def check_cu_seqlens(name: str, cu_seqlens: object, like: Tensor, like_name: str = "q") -> Tensor:
    """The static part of the check: what shapes, dtypes and devices tell, without a sync.

    Raises:
        TypeError, ValueError: naming the argument, what was seen and what would be right.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            f"{name} must be a tensor [num_sequences + 1], got {type(cu_seqlens).__name__}; torch.tensor(..., dtype=torch.int32, "
            "device=q.device) makes one of a list"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1:
        raise ValueError(f"{name} must be one-dimensional [num_sequences + 1], got shape {tuple(cu_seqlens.shape)}")
    if cu_seqlens.shape[0] == 0:
        raise ValueError(f"{name} must have num_sequences + 1 entries (at least the leading 0), got none")
    if cu_seqlens.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, as {like_name} is; got {cu_seqlens.device}")
    return cu_seqlens


def make_packing(
    like: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
) -> Packing:
    """Checks the four arguments against each other. A padded tensor that is the plain one (the same object) means no gaps.

    cu_seqlens_kv None means self-attention: the tensors of q. One padded tensor of two is an error: it would leave open
    whether the other side has gaps.
    """
    if cu_seqlens_kv is None:
        cu_seqlens_kv = cu_seqlens_q
        if cu_seqlens_kv_padded is None:
            cu_seqlens_kv_padded = cu_seqlens_q_padded
    if (cu_seqlens_q_padded is None) != (cu_seqlens_kv_padded is None):
        given, other = ("q", "kv") if cu_seqlens_kv_padded is None else ("kv", "q")
        raise ValueError(
            f"cu_seqlens_{given}_padded was given without cu_seqlens_{other}_padded; for a side without gaps pass its plain "
            f"cu_seqlens_{other} again"
        )
    packing = trusted_packing(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, like)
    if cu_seqlens_kv is not cu_seqlens_q:
        check_cu_seqlens("cu_seqlens_kv", cu_seqlens_kv, like)
        require_same_length("cu_seqlens_kv", cu_seqlens_kv, "cu_seqlens_q", cu_seqlens_q)
    for side, plain, slots in (("q", cu_seqlens_q, packing.slots_q), ("kv", cu_seqlens_kv, packing.slots_kv)):
        if slots is not plain:
            check_cu_seqlens(f"cu_seqlens_{side}_padded", slots, like)
            require_same_length(f"cu_seqlens_{side}_padded", slots, f"cu_seqlens_{side}", plain)
    return packing


def trusted_packing(
    cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor | None, cu_seqlens_q_padded: Tensor | None, cu_seqlens_kv_padded: Tensor | None
) -> Packing:
    """:func:`make_packing` of tensors that it has checked before."""
    if cu_seqlens_kv is None:
        cu_seqlens_kv = cu_seqlens_q
        if cu_seqlens_kv_padded is None:
            cu_seqlens_kv_padded = cu_seqlens_q_padded
    slots_q = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
    slots_kv = cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded
    has_gaps = slots_q is not cu_seqlens_q or slots_kv is not cu_seqlens_kv
    return Packing(cu_seqlens_q, cu_seqlens_kv, slots_q, slots_kv, has_gaps, cu_seqlens_kv is cu_seqlens_q)


def require_same_length(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.shape[0] != other.shape[0]:
        raise ValueError(
            f"{name} must have as many entries as {other_name}, one per sequence and one more: got {tensor.shape[0]} and {other.shape[0]}"
        )


# --------------------------------------------------------------------------------------------------------- the routing itself
def build_subsets(
    cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, slots_q: Tensor, slots_kv: Tensor, policy_index: Tensor | None, num_policies: int
) -> Subsets:
    """What the op ``policy_subsets`` computes. A policy_index outside 0..num_policies-1 makes its sequence a gap."""
    from .rows import device_guard, uses_triton

    num_seqs = cu_seqlens_q.shape[0] - 1
    if uses_triton(cu_seqlens_q):
        from .kernels import rows as kernels

        starts_q, starts_kv = (cu_seqlens_q.new_empty(num_seqs + 1, dtype=torch.int32) for _ in "qk")
        lens_q, lens_kv = (cu_seqlens_q.new_empty(num_policies, num_seqs, dtype=torch.int32) for _ in "qk")
        inputs = [t.contiguous() for t in (cu_seqlens_q, cu_seqlens_kv, slots_q, slots_kv)]
        index = inputs[0] if policy_index is None else policy_index.contiguous()
        args = (*inputs, index, starts_q, lens_q, starts_kv, lens_kv, num_seqs, num_policies)
        with device_guard(cu_seqlens_q):
            kernels.subsets((-(-(num_seqs + 1) // 128), 1, 1), args, (policy_index is not None, 128), cu_seqlens_q.device)
        return Subsets(starts_q, lens_q, starts_kv, lens_kv)
    lens_q = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).to(torch.int32)
    lens_kv = (cu_seqlens_kv[1:] - cu_seqlens_kv[:-1]).to(torch.int32)
    if policy_index is None:
        per_policy = [lens.expand(num_policies, num_seqs).contiguous() for lens in (lens_q, lens_kv)]
    else:
        mine = policy_index == torch.arange(num_policies, device=policy_index.device, dtype=policy_index.dtype)[:, None]
        per_policy = [torch.where(mine, lens, torch.zeros_like(lens)) for lens in (lens_q, lens_kv)]
    starts = [slots.to(torch.int32, copy=True) for slots in (slots_q, slots_kv)]
    return Subsets(starts[0], per_policy[0], starts[1], per_policy[1])


# ------------------------------------------------------------------------------------------------------------------ max_seqlen
def check_max_seqlen(name: str, max_seqlen: object) -> int:
    """A max_seqlen as an int (or SymInt) of at least 0."""
    if isinstance(max_seqlen, Tensor):
        raise TypeError(
            f"{name} must be an int: a tensor would have to be read on the host at each call; got a tensor. Compute it in the loader"
        )
    if isinstance(max_seqlen, (bool, float)) or not isinstance(max_seqlen, (int, torch.SymInt)):
        # Not asked of a symbolic number: Dynamo cannot tell.
        if isinstance(max_seqlen, (bool, float)) or not hasattr(max_seqlen, "__index__"):
            raise TypeError(f"{name} must be an int (tokens), got {type(max_seqlen).__name__}")
        max_seqlen = operator.index(max_seqlen)  # numpy's integers, as a collate function makes them
    if guard_or_false(max_seqlen < 0):
        raise ValueError(f"{name} must be >= 0, got {max_seqlen}")
    return max_seqlen  # type: ignore[return-value]


def derive_max_seqlen(name: str, cu_seqlens: Tensor) -> int:
    """The longest sequence. One device-to-host sync; refused where that cannot be."""
    if is_tracing():
        raise ValueError(f"{name} is needed under torch.compile: without it the lengths would have to be read on the host. Pass an int")
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(f"{name} is needed during CUDA graph capture: the lengths cannot be read on the host there. Pass an int")
    if cu_seqlens.shape[0] < 2:
        return 0
    return int((cu_seqlens[1:] - cu_seqlens[:-1]).max())


# ---------------------------------------------------------------------------------------------------------- eager validation
def may_read_contents(cu_seqlens: Tensor) -> bool | None:
    """Whether an eager call checks what only the contents tell: True where reading them is free (on the CPU) or asked for
    (TE_ATTN_OPS_VALIDATE=1), False where it is not, None where they cannot be read now."""
    if is_tracing() or type(cu_seqlens) is not Tensor or torch._C._len_torch_dispatch_stack():
        return None
    if cu_seqlens.device.type == "cpu":
        return True
    if os.environ.get("TE_ATTN_OPS_VALIDATE") != "1" or cu_seqlens.is_meta:
        return False
    return None if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing() else True


def validate_packed(
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None = None,
    *,
    total_q: int | None = None,
    total_kv: int | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
) -> None:
    """Checks what only the contents of cu_seqlens can tell. Syncs once per tensor; the hot path never does this.

    Args:
        cu_seqlens_q, cu_seqlens_kv: [N + 1] int32 or int64.
        total_q, total_kv: rows of q and of k/v; None skips that check.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: [N + 1], where each sequence's slot starts.
        max_seqlen_q, max_seqlen_kv: bounds in tokens that no sequence may exceed.

    Raises:
        ValueError: first entry not 0, an entry below its predecessor, more tokens than rows, a sequence longer than its slot
            or than max_seqlen.
    """
    if is_tracing():
        raise RuntimeError("validate_packed reads tensors on the host: call it outside the compiled function")
    total_q, total_kv = _check_count("total_q", total_q), _check_count("total_kv", total_kv)
    max_seqlen_q = None if max_seqlen_q is None else check_max_seqlen("max_seqlen_q", max_seqlen_q)
    max_seqlen_kv = None if max_seqlen_kv is None else check_max_seqlen("max_seqlen_kv", max_seqlen_kv)
    if cu_seqlens_kv is None and total_kv is None:
        total_kv = total_q
    packing = make_packing(cu_seqlens_q, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
    same = packing.equal_lengths and packing.slots_kv is packing.slots_q and (total_kv, max_seqlen_kv) in (
        (None, None),
        (total_q, max_seqlen_q),
    )
    sides = [("q", "q", packing.cu_seqlens_q, packing.slots_q, total_q, max_seqlen_q)]
    if not same:
        sides.append(("kv", "k and v", packing.cu_seqlens_kv, packing.slots_kv, total_kv, max_seqlen_kv))
    for side, tensors, plain, slots, total, max_seqlen in sides:
        _check_side(f"cu_seqlens_{side}", plain, slots, total, f"the {total} rows of {tensors}", f"max_seqlen_{side}", max_seqlen)


def _check_side(
    name: str, plain: Tensor, slots: Tensor, total: int | None, total_text: str, bound_name: str, max_seqlen: int | None
) -> None:
    values = _check_contents(name, plain)
    ends = values
    if slots is not plain:
        ends = _check_contents(f"{name}_padded", slots, rows_in_front=True)
        for n in range(len(values) - 1):
            length, slot = values[n + 1] - values[n], ends[n + 1] - ends[n]
            if length > slot:
                raise ValueError(f"{name}: sequence {n} has {length} tokens, but {name}_padded gives it a slot of {slot}")
    if total is not None and ends[-1] > total:
        holder = name if slots is plain else f"{name}_padded"
        raise ValueError(f"{holder}: the last entry is {ends[-1]}, beyond {total_text}")
    longest = max((b - a for a, b in zip(values, values[1:])), default=0)
    if max_seqlen is not None and longest > max_seqlen:
        raise ValueError(f"{bound_name}={max_seqlen} is below the longest sequence, which has {longest} tokens")


def _check_count(name: str, value: object) -> int | None:
    if value is None:
        return None
    count = check_int(name, value)
    if count < 0:
        raise ValueError(f"{name} must be >= 0, got {count}")
    return count


def _check_contents(name: str, cu_seqlens: Tensor, rows_in_front: bool = False) -> list[int]:
    values: list[int] = cu_seqlens.tolist()
    if values[0] < 0 or (values[0] and not rows_in_front):
        hint = "" if rows_in_front else ". Lengths? Pass their cumulative sum with a leading 0"
        raise ValueError(f"{name} must start with 0, got {values[0]}{hint}")
    for n, (before, after) in enumerate(zip(values, values[1:])):
        if after < before:
            raise ValueError(f"{name} must not descend: entry {n + 1} is {after} after {before}")
    return values


# ------------------------------------------------------------------------------------------------------------ static capacity
class PackedCapacity(NamedTuple):
    """A batch brought to fixed shapes: see :func:`pad_packed_batch`."""

    tensors: tuple[Tensor, ...]
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor | None
    policy_index: Tensor | None


torch.serialization.add_safe_globals([PackedCapacity])


def _check_capacity_tensors(tensors: object) -> None:
    if isinstance(tensors, Tensor):
        raise TypeError("tensors must be a tuple of tensors over the packed rows, got one tensor: pass (tensor,)")
    if not isinstance(tensors, (tuple, list)):
        raise TypeError(f"tensors must be a tuple of tensors over the packed rows, got {type(tensors).__name__}")
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        types = ", ".join(sorted({type(tensor).__name__ for tensor in tensors}))
        raise TypeError(f"tensors must be a tuple of tensors over the packed rows, got {type(tensors).__name__} of {types}")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("tensors must have the packed rows as their first dimension, got one without dimensions")


def _check_policy_index(policy_index: object, count: int) -> None:
    if not isinstance(policy_index, Tensor):
        hint = ": its pad_to(num_sequences) adds the empty sequences" if hasattr(policy_index, "pad_to") else ""
        raise TypeError(f"policy_index must be a tensor [num_sequences], got {type(policy_index).__name__}{hint}")
    if policy_index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"policy_index must be int32 or int64, got {policy_index.dtype}")
    if policy_index.shape != (count,):
        raise ValueError(
            f"policy_index must have one entry for each of the {count} sequences, got shape {tuple(policy_index.shape)}"
        )


def pad_packed_batch(
    tensors: tuple[Tensor, ...] | list[Tensor],
    cu_seqlens: Tensor,
    *,
    num_tokens: int,
    num_sequences: int,
    max_seqlen: int | None = None,
    cu_seqlens_padded: Tensor | None = None,
    policy_index: Tensor | None = None,
    fill_policy: int = 0,
) -> PackedCapacity:
    """Gives a packed batch a fixed number of tokens and sequences, so that one CUDA graph or one compiled shape serves every
    batch. Rows are added as a tail that belongs to no sequence, sequences as empty ones at the end of the real rows.

    Eager only: it reads cu_seqlens on the host (one sync), in a data loader for example.

    Args:
        tensors: [T, ...] each, over the packed rows (tokens, labels, positions); filled up with zeros.
        cu_seqlens: [N + 1].
        num_tokens, num_sequences: the capacity.
        max_seqlen: the bound that was captured or compiled; a longer sequence is refused.
        cu_seqlens_padded: [N + 1], where the batch has gaps.
        policy_index: [N] int32 or int64, a policy for each sequence in the caller's own counting; empty sequences get ``fill_policy``. For
            prepared policies see :meth:`PreparedPolicies.pad_to`.

    Raises:
        TypeError: an argument of another kind.
        ValueError: more tokens or sequences than the capacity, a sequence above max_seqlen, or wrong offsets.
    """
    _check_capacity_tensors(tensors)
    check_cu_seqlens("cu_seqlens", cu_seqlens, cu_seqlens)
    slots = cu_seqlens
    if cu_seqlens_padded is not None:
        slots = check_cu_seqlens("cu_seqlens_padded", cu_seqlens_padded, cu_seqlens, "cu_seqlens")
        require_same_length("cu_seqlens_padded", slots, "cu_seqlens", cu_seqlens)
    num_tokens, num_sequences = check_int("num_tokens", num_tokens), check_int("num_sequences", num_sequences)
    fill_policy = check_int("fill_policy", fill_policy)
    rows, count = (tensors[0].shape[0] if tensors else num_tokens), cu_seqlens.shape[0] - 1
    if count > num_sequences:
        raise ValueError(f"num_sequences={num_sequences} is below the batch's {count} sequences")
    if rows > num_tokens:
        raise ValueError(f"num_tokens={num_tokens} is below the batch's {rows} rows")
    bound = None if max_seqlen is None else check_max_seqlen("max_seqlen", max_seqlen)
    if policy_index is not None:
        _check_policy_index(policy_index, count)
    if is_tracing():
        raise RuntimeError("pad_packed_batch reads tensors on the host: call it outside the compiled function")
    rows_text = f"the {rows} rows of tensors" if tensors else f"num_tokens={num_tokens}"
    _check_side("cu_seqlens", cu_seqlens, slots, rows, rows_text, "max_seqlen", bound)
    padded = []
    for tensor in tensors:
        if tensor.shape[0] != rows:
            raise ValueError(f"tensors must share their first dimension: got {tensor.shape[0]} and {rows}")
        padded.append(torch.cat([tensor, tensor.new_zeros(num_tokens - rows, *tensor.shape[1:])]))

    def extend(cu: Tensor) -> Tensor:
        return torch.cat([cu, cu[-1:].expand(num_sequences - count)])

    index = policy_index
    if index is not None:
        index = torch.cat([index, index.new_full((num_sequences - count,), fill_policy)])
    return PackedCapacity(tuple(padded), extend(cu_seqlens), None if slots is cu_seqlens else extend(slots), index)
