"""cu_seqlens, with and without gaps, as starts and lengths; the checks with and without a look at the contents; capacity."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
import torch

from te_attn_ops import PackedCapacity, PreparedPolicies, ops, pad_packed_batch, testing, thd_attention, validate_packed
from te_attn_ops.testing import BOTTOM_RIGHT, CAUSAL, FULL, PackedCase, build


def cu(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


# ------------------------------------------------------------------------------------------------------------------- routing
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_subsets_of_a_scalar_mask(dtype: torch.dtype) -> None:
    q, kv = cu(0, 3, 5, 9, dtype=dtype), cu(0, 1, 1, 6, dtype=dtype)
    starts_q, lens_q, starts_kv, lens_kv = ops.policy_subsets(q, kv, None, None, None, 1)
    assert all(tensor.dtype == torch.int32 for tensor in (starts_q, lens_q, starts_kv, lens_kv))
    assert starts_q.tolist() == [0, 3, 5, 9] and lens_q.tolist() == [[3, 2, 4]]
    assert starts_kv.tolist() == [0, 1, 1, 6] and lens_kv.tolist() == [[1, 0, 5]]


def test_subsets_of_policies_keep_every_sequence() -> None:
    q, padded = cu(0, 3, 5, 9), cu(0, 4, 8, 13)
    starts, lens, _, lens_kv = ops.policy_subsets(q, q, padded, padded, cu(1, 0, 1), 2)
    assert starts.tolist() == [0, 4, 8, 13] and lens.tolist() == [[0, 2, 0], [3, 0, 4]] == lens_kv.tolist()


def test_an_index_outside_the_policies_makes_a_gap() -> None:
    q = cu(0, 3, 5, 9)
    _, lens, _, _ = ops.policy_subsets(q, q, None, None, cu(1, 7, -1), 2)
    assert lens.tolist() == [[0, 0, 0], [3, 0, 0]]


def test_starts_do_not_alias_their_inputs() -> None:
    q = cu(0, 3, 5)
    starts, _, starts_kv, _ = ops.policy_subsets(q, q, None, None, None, 1)
    q.zero_()
    assert starts.tolist() == starts_kv.tolist() == [0, 3, 5] and starts.data_ptr() != starts_kv.data_ptr()


def test_subsets_follow_contents_that_change_in_place() -> None:
    """A data loader may refill one tensor: the cache of an eager call must see it."""
    inputs = build(PackedCase((4, 8), masks=(CAUSAL, FULL), owner=(0, 1)))
    inputs.attend()
    inputs.cu_seqlens_q.copy_(cu(0, 8, 12))
    moved = build(PackedCase((8, 4), masks=(CAUSAL, FULL), owner=(0, 1)))
    assert torch.equal(inputs.attend(max_seqlen_q=8, max_seqlen_kv=8), moved.attend())
    inputs.prepared.policy_index.copy_(cu(1, 0))
    swapped = build(PackedCase((8, 4), masks=(FULL, CAUSAL), owner=(0, 1)))
    assert torch.equal(inputs.attend(max_seqlen_q=8, max_seqlen_kv=8), swapped.attend())


def test_an_evaluation_in_inference_mode_does_not_spoil_training_on_the_same_batch() -> None:
    inputs = build(PackedCase((4, 8), masks=(CAUSAL, FULL), owner=(0, 1)))
    assert not inputs.prepared.policy_index.is_inference()
    with torch.inference_mode():
        expected = inputs.attend()
        listed = thd_attention(inputs.q, inputs.k, inputs.v, **inputs.arguments(thd_attention_policies=inputs.policies()))
    assert torch.equal(inputs.run().out, expected) and torch.equal(listed, expected)


@pytest.mark.parametrize("as_list", [False, True])
def test_what_is_remembered_keeps_no_tensor_of_the_caller_alive(as_list: bool) -> None:
    inputs = build(PackedCase((4, 8), gaps_q=(1, 0), masks=(CAUSAL, FULL), owner=(0, 1)))
    policies = inputs.policies() if as_list else inputs.prepared
    arguments = inputs.arguments(thd_attention_policies=policies)
    tensors = [inputs.q, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_q_padded]
    tensors.append(policies[0]["sequence_ids"] if as_list else policies.policy_index)
    thd_attention(inputs.q, inputs.k, inputs.v, **arguments)
    watched = [weakref.ref(tensor) for tensor in tensors]
    del inputs, policies, arguments, tensors
    gc.collect()
    assert [reference() for reference in watched] == [None] * 5


def test_a_tensor_that_takes_the_place_of_a_dead_one_is_looked_at_anew() -> None:
    """Ids are used again: whatever is remembered by identity must notice."""
    inputs = build(PackedCase((4, 8)))
    for _ in range(50):
        for first in (4, 8, 1):
            offsets = cu(0, first, 12)
            out = thd_attention(inputs.q, inputs.k, inputs.v, offsets, max_seqlen_q=12)
            assert torch.equal(out[first], inputs.v[first]), "a sequence's first row sees its own key alone"
            del offsets


# -------------------------------------------------------------------------------------------------------------- static checks
@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([0, 3], TypeError, "cu_seqlens_q must be a tensor .*got list"),
        (torch.tensor([0.0, 3.0]), TypeError, "cu_seqlens_q must be int32 or int64, got torch.float32"),
        (torch.tensor([0, 3], dtype=torch.int16), TypeError, "cu_seqlens_q must be int32 or int64, got torch.int16"),
        (torch.tensor([[0, 3]]), ValueError, r"cu_seqlens_q must be one-dimensional .*got shape \(1, 2\)"),
        (torch.empty(0, dtype=torch.int32), ValueError, "cu_seqlens_q must have num_sequences \\+ 1 entries"),
        (torch.tensor([0, 3], device="meta"), ValueError, "cu_seqlens_q must be on cpu, as q is; got meta"),
    ],
)
def test_malformed_cu_seqlens(values: object, error: type[Exception], message: str) -> None:
    q = torch.zeros(3, 1, 4)
    with pytest.raises(error, match=message):
        thd_attention(q, q, q, values, max_seqlen_q=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"])
def test_offsets_that_disagree_about_the_number_of_sequences(name: str) -> None:
    q = torch.zeros(3, 1, 4)
    arguments = {"cu_seqlens_q": cu(0, 3), "cu_seqlens_kv": cu(0, 3)}
    if name.endswith("padded"):
        arguments.update(cu_seqlens_q_padded=cu(0, 3), cu_seqlens_kv_padded=cu(0, 3))
    arguments[name] = cu(0, 1, 3)
    with pytest.raises(ValueError, match=rf"{name} must have as many entries as cu_seqlens_\w+, .*got 3 and 2"):
        thd_attention(q, q, q, max_seqlen_q=3, max_seqlen_kv=3, **arguments)


@pytest.mark.parametrize(("given", "missing"), [("q", "kv"), ("kv", "q")])
def test_padded_offsets_of_one_side_alone(given: str, missing: str) -> None:
    q = torch.zeros(3, 1, 4)
    arguments = {"cu_seqlens_q": cu(0, 3), "cu_seqlens_kv": cu(0, 3), f"cu_seqlens_{given}_padded": cu(0, 3)}
    message = f"cu_seqlens_{given}_padded was given without cu_seqlens_{missing}_padded; .*pass its plain cu_seqlens_{missing} "
    with pytest.raises(ValueError, match=message):
        thd_attention(q, q, q, max_seqlen_q=3, max_seqlen_kv=3, **arguments)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (torch.tensor(4), TypeError, "max_seqlen_q must be an int: .*got a tensor"),
        (4.0, TypeError, r"max_seqlen_q must be an int \(tokens\), got float"),
        (True, TypeError, r"max_seqlen_q must be an int \(tokens\), got bool"),
        (-1, ValueError, "max_seqlen_q must be >= 0, got -1"),
    ],
)
def test_malformed_max_seqlen(value: object, error: type[Exception], message: str) -> None:
    q = torch.zeros(3, 1, 4)
    with pytest.raises(error, match=message):
        thd_attention(q, q, q, cu(0, 3), max_seqlen_q=value)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------------------- contents
@pytest.mark.parametrize(
    "arguments",
    [
        {"cu_seqlens_q": cu(0, 3, 5)},
        {"cu_seqlens_q": cu(0, 3, 5, dtype=torch.int64), "total_q": 5, "max_seqlen_q": 3},
        {"cu_seqlens_q": cu(0, 3, 3), "cu_seqlens_kv": cu(0, 0, 8), "total_q": 9, "total_kv": 8},
        {"cu_seqlens_q": cu(0, 3, 5), "cu_seqlens_q_padded": cu(0, 4, 8), "total_q": 8},
        {"cu_seqlens_q": cu(0)},
    ],
)
def test_validate_accepts(arguments: dict[str, object]) -> None:
    validate_packed(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seqlens_q": cu(1, 3)}, "cu_seqlens_q must start with 0, got 1"),
        ({"cu_seqlens_q": cu(0, 5, 3)}, "cu_seqlens_q must not descend: entry 2 is 3 after 5"),
        ({"cu_seqlens_q": cu(0, 3), "total_q": 2}, "cu_seqlens_q: the last entry is 3, beyond the 2 rows of q"),
        ({"cu_seqlens_q": cu(0, 3, 9), "max_seqlen_q": 5}, "max_seqlen_q=5 is below the longest sequence, which has 6 tokens"),
        (
            {"cu_seqlens_q": cu(0, 3, 5), "cu_seqlens_q_padded": cu(0, 2, 9)},
            "cu_seqlens_q: sequence 0 has 3 tokens, but cu_seqlens_q_padded gives it a slot of 2",
        ),
        ({"cu_seqlens_q": cu(0, 3), "cu_seqlens_q_padded": cu(-1, 5)}, "cu_seqlens_q_padded must start with 0, got -1"),
        (
            {"cu_seqlens_q": cu(0, 3), "cu_seqlens_q_padded": cu(0, 5), "total_q": 4},
            "cu_seqlens_q_padded: the last entry is 5, beyond the 4 rows of q",
        ),
        ({"cu_seqlens_q": cu(0, 3), "cu_seqlens_kv": cu(0, -1)}, "cu_seqlens_kv must not descend: entry 1 is -1 after 0"),
        ({"cu_seqlens_q": cu(0, 3), "cu_seqlens_kv": cu(0, 7), "total_kv": 6}, "the last entry is 7, beyond the 6 rows of k and v"),
        ({"cu_seqlens_q": cu(0, 3), "cu_seqlens_kv": cu(0, 7), "max_seqlen_kv": 6}, "max_seqlen_kv=6 is below the longest"),
        (
            {"cu_seqlens_q": cu(0, 3), "cu_seqlens_q_padded": cu(0, 3), "cu_seqlens_kv_padded": cu(0, 2)},
            "cu_seqlens_kv: sequence 0 has 3 tokens, but cu_seqlens_kv_padded gives it a slot of 2",
        ),
        ({"cu_seqlens_q": cu(0, 3), "cu_seqlens_kv": cu(0, 3, 5)}, "cu_seqlens_kv must have as many entries as cu_seqlens_q"),
    ],
)
def test_validate_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_packed(**arguments)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------------------- capacity
def test_pad_packed_batch_fills_rows_sequences_and_policies() -> None:
    tokens, labels = torch.arange(9), torch.ones(9, 2)
    capacity = {"num_tokens": 12, "num_sequences": 5}
    padded = pad_packed_batch((tokens, labels), cu(0, 3, 5, 9), **capacity, policy_index=cu(1, 0, 1), fill_policy=1)
    assert [tuple(tensor.shape) for tensor in padded.tensors] == [(12,), (12, 2)]
    assert padded.tensors[0].tolist() == [*range(9), 0, 0, 0] and not padded.tensors[1][9:].any()
    assert padded.cu_seqlens.tolist() == [0, 3, 5, 9, 9, 9] and padded.cu_seqlens_padded is None
    assert padded.policy_index is not None and padded.policy_index.tolist() == [1, 0, 1, 1, 1]


def test_pad_packed_batch_keeps_gaps() -> None:
    padded = pad_packed_batch((torch.zeros(9, 1),), cu(0, 3, 5), num_tokens=11, num_sequences=3, cu_seqlens_padded=cu(0, 4, 9))
    assert padded.cu_seqlens.tolist() == [0, 3, 5, 5] and padded.cu_seqlens_padded is not None
    assert padded.cu_seqlens_padded.tolist() == [0, 4, 9, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_sequences": 2}, "num_sequences=2 is below the batch's 3 sequences"),
        ({"num_tokens": 8}, "num_tokens=8 is below the batch's 9 rows"),
        ({"max_seqlen": 3}, "max_seqlen=3 is below the longest sequence, which has 4 tokens"),
        ({"cu_seqlens": cu(0, 5, 3, 9)}, "cu_seqlens must not descend"),
        ({"cu_seqlens": cu(0, 5, 10)}, "cu_seqlens: the last entry is 10, beyond the 9 rows of tensors"),
        ({"cu_seqlens": cu(0, 5, 13), "tensors": ()}, "cu_seqlens: the last entry is 13, beyond num_tokens=12"),
        ({"cu_seqlens_padded": cu(0, 4, 6, 10)}, "cu_seqlens_padded: the last entry is 10, beyond the 9 rows of tensors"),
        ({"cu_seqlens_padded": cu(0, 2, 5, 9)}, "cu_seqlens: sequence 0 has 3 tokens, but cu_seqlens_padded gives it a slot of 2"),
        ({"cu_seqlens_padded": cu(0, 9)}, "cu_seqlens_padded must have as many entries as cu_seqlens, .*got 2 and 4"),
        ({"cu_seqlens_padded": cu(0, 3, 5, 9).to("meta")}, "cu_seqlens_padded must be on cpu, as cu_seqlens is; got meta"),
        ({"cu_seqlens": cu(0, 3)[None]}, "cu_seqlens must be one-dimensional"),
        ({"tensors": (torch.zeros(9), torch.zeros(8))}, "tensors must share their first dimension: got 8 and 9"),
        ({"tensors": (torch.zeros(()),)}, "tensors must have the packed rows as their first dimension"),
        ({"policy_index": cu(0, 1)}, r"policy_index must have one entry for each of the 3 sequences, got shape \(2,\)"),
    ],
)
def test_pad_packed_batch_refuses(changes: dict[str, object], message: str) -> None:
    arguments = {"tensors": (torch.zeros(9),), "cu_seqlens": cu(0, 3, 5, 9), "num_tokens": 12, "num_sequences": 5, **changes}
    with pytest.raises(ValueError, match=f"^{message}") as raised:
        pad_packed_batch(**arguments)  # type: ignore[arg-type]
    assert "_q" not in str(raised.value) and " of q" not in str(raised.value), "it has no such argument"


@pytest.mark.parametrize("gaps", [False, True])
def test_a_padded_batch_is_loaded_without_arbitrary_pickles(gaps: bool) -> None:
    offsets = {"cu_seqlens_padded": cu(0, 4, 6, 9)} if gaps else {}
    made = pad_packed_batch((torch.arange(9),), cu(0, 3, 5, 8), num_tokens=12, num_sequences=5, policy_index=cu(1, 0, 1), **offsets)
    torch.save({"batch": made}, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["batch"]
    assert type(loaded) is PackedCapacity
    assert torch.equal(loaded.tensors[0], made.tensors[0]) and torch.equal(loaded.cu_seqlens, made.cu_seqlens)
    assert (loaded.cu_seqlens_padded is not None) == gaps and torch.equal(loaded.policy_index, made.policy_index)


def _prepared() -> PreparedPolicies:
    prepared = build(PackedCase((3, 2, 4), masks=(CAUSAL, FULL), owner=(0, 1, 0))).prepared
    assert prepared is not None
    return prepared


def test_what_pad_packed_batch_says_about_prepared_policies_works() -> None:
    prepared = _prepared()
    arguments = {"num_tokens": 12, "num_sequences": 5}
    assert prepared.pad_to(5).policy_index.tolist() == [0, 1, 0, 0, 0]
    by_index = pad_packed_batch((), cu(0, 3, 5, 9), policy_index=prepared.policy_index, **arguments)
    assert by_index.policy_index is not None and torch.equal(by_index.policy_index, prepared.pad_to(5).policy_index)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, BOTTOM_RIGHT], ids=lambda mask: mask.attn_mask_type)
def test_a_batch_brought_to_capacity_gives_the_same_rows(mask: testing.Mask) -> None:
    inputs = build(PackedCase((3, 2, 4), masks=(mask,)))
    plain = inputs.attend()
    padded = pad_packed_batch(
        (inputs.q.detach(), inputs.k.detach(), inputs.v.detach()), inputs.cu_seqlens_q, num_tokens=16, num_sequences=6, max_seqlen=8
    )
    out = thd_attention(*padded.tensors, padded.cu_seqlens, max_seqlen_q=8, attn_mask_type=mask.attn_mask_type)
    assert torch.equal(out[:9], plain) and not out[9:].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": 64.0}, "num_tokens must be an int, got float 64.0"),
        ({"num_sequences": None}, "num_sequences must be an int, got NoneType None"),
        ({"tensors": ([1, 2],)}, "tensors must be a tuple of tensors over the packed rows, got tuple of list"),
        ({"tensors": {"q": torch.zeros(9)}}, "tensors must be a tuple of tensors over the packed rows, got dict$"),
        ({"tensors": (x for x in [torch.zeros(9)])}, "tensors must be a tuple of tensors over the packed rows, got generator$"),
        ({"tensors": torch.zeros(9)}, r"tensors must be a tuple .*, got one tensor: pass \(tensor,\)$"),
        ({"cu_seqlens": [0, 3, 5, 9]}, r"cu_seqlens must be a tensor \[num_sequences \+ 1\], got list"),
        ({"cu_seqlens_padded": [0, 3, 5, 9]}, r"cu_seqlens_padded must be a tensor \[num_sequences \+ 1\], got list"),
        ({"policy_index": [0, 1, 0]}, r"policy_index must be a tensor \[num_sequences\], got list$"),
        ({"policy_index": torch.zeros(3)}, "policy_index must be int32 or int64, got torch.float32"),
        ({"policy_index": _prepared()}, r"policy_index must be a tensor .*got PreparedPolicies: its pad_to\("),
        ({"max_seqlen": 2.5}, r"max_seqlen must be an int \(tokens\), got float"),
    ],
)
def test_pad_packed_batch_names_wrong_types(changes: dict[str, object], message: str) -> None:
    arguments = {"tensors": (torch.zeros(9),), "cu_seqlens": cu(0, 3, 5, 9), "num_tokens": 12, "num_sequences": 5, **changes}
    with pytest.raises(TypeError, match=message):
        pad_packed_batch(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"total_kv": 8}, ValueError, "the last entry is 9, beyond the 8 rows of k and v"),
        ({"total_q": "9"}, TypeError, "total_q must be an int, got str '9'"),
        ({"max_seqlen_q": 2.5}, TypeError, r"max_seqlen_q must be an int \(tokens\), got float"),
    ],
)
def test_validate_packed_names_wrong_bounds(changes: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        validate_packed(cu(0, 3, 5, 9), **changes)
