"""Rotary positions: the angles, where positions start in a packed batch, and that nothing is read on the host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from te_attn_ops.modules import MultiheadAttention, RotaryPositionEmbedding, apply_rotary_pos_emb
from te_attn_ops.modules.rope import packed_positions, rotary_table
from te_attn_ops.testing import trace_without_sync
from tests.modules.reference import rotate

CU, PADDED = torch.tensor([0, 3, 3, 5, 9], dtype=torch.int32), torch.tensor([0, 4, 6, 8, 13], dtype=torch.int32)


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles(interleaved: bool) -> None:
    angles = RotaryPositionEmbedding(8, rotary_base=100.0, interleaved=interleaved, device="cpu")(5, offset=2)
    assert angles.shape == (5, 1, 1, 8)
    for row in range(5):
        for pair in range(4):
            columns = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 4)
            for column in columns:
                assert math.isclose(angles[row, 0, 0, column], (row + 2) * 100.0 ** (-2 * pair / 8), rel_tol=1e-6)


def test_partial_rotation_and_interpolation() -> None:
    assert RotaryPositionEmbedding(16, rotary_percent=0.5, device="cpu")(3).shape == (3, 1, 1, 8)
    whole = RotaryPositionEmbedding(8, device="cpu")(64)
    stretched = RotaryPositionEmbedding(8, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=16, device="cpu")
    torch.testing.assert_close(stretched(20), whole[:20] / 2)
    # Beyond 2 * 16 positions the factor grows with the length.
    torch.testing.assert_close(stretched(48), whole[:48] / 3)
    with pytest.raises(ValueError, match="even and at least 2, got 7"):
        RotaryPositionEmbedding(7, device="cpu")


def test_packed_positions() -> None:
    assert packed_positions(CU, None, 11).tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 0]
    # With gaps each slot starts at 0; rows of no sequence read position 0.
    assert packed_positions(CU, PADDED, 15).tolist() == [0, 1, 2, 0, 0, 0, 0, 1, 0, 1, 2, 3, 0, 0, 0]
    assert packed_positions(CU[:1], None, 3).tolist() == [0, 0, 0]
    assert packed_positions(CU, None, 0).tolist() == []
    assert packed_positions(CU.long(), PADDED.long(), 13).tolist() == packed_positions(CU, PADDED, 13).tolist()


@pytest.mark.parametrize("cast", [torch.nn.Module.bfloat16, torch.nn.Module.half, lambda module: module.to(torch.bfloat16)])
@pytest.mark.parametrize("deferred", [False, True])
def test_angles_keep_their_precision_where_a_model_is_cast(cast: Any, deferred: bool) -> None:
    with torch.device("meta" if deferred else "cpu"):
        model = cast(torch.nn.ModuleDict({"rope": RotaryPositionEmbedding(8), "linear": torch.nn.Linear(2, 2)}))
    if deferred:
        model.to_empty(device="cpu")
        model["rope"].reset_parameters()
    assert model["linear"].weight.dtype.itemsize == 2 and set(model["rope"].state_dict()) == {"inv_freq"}

    def check() -> None:
        angles = model["rope"](5000)
        assert angles.dtype == torch.float32
        for row in (1, 257, 4999):
            for pair in range(4):
                assert math.isclose(angles[row, 0, 0, pair], row * 10000.0 ** (-2 * pair / 8), rel_tol=1e-6)

    check()
    # A checkpoint that was cast as a whole holds rounded frequencies, other ones are taken.
    for assign in (False, True):
        model.load_state_dict({name: tensor.bfloat16() for name, tensor in model.state_dict().items()}, assign=assign)
        check()
    model["rope"].load_state_dict({"inv_freq": torch.full((4,), 0.5)})
    assert model["rope"](3)[2, 0, 0].tolist() == [1.0] * 8
    model["rope"].inv_freq = model["rope"].inv_freq.bfloat16()
    with pytest.raises(TypeError, match=r"inv_freq must be float32, got torch.bfloat16.* MixedPrecision\(buffer_dtype=torch.float32\)"):
        model["rope"](3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["thd", "sbhd"])
def test_angles_in_16_bit_are_refused(dtype: torch.dtype, layout: str) -> None:
    angles, cu = RotaryPositionEmbedding(8, device="cpu")(8), torch.tensor([0, 5])
    module = MultiheadAttention(16, 2, qkv_format=layout, device="cpu")
    x = torch.randn(5, 16) if layout == "thd" else torch.randn(5, 1, 16)
    call = {"cu_seqlens_q": cu, "max_seqlen_q": 5, "attn_mask_type": "padding"}
    for given in (angles.to(dtype), (angles, angles.to(dtype))):
        with pytest.raises(TypeError, match=f"rotary_pos_emb must be float32 or float64, got {dtype}.*cast_forward_inputs=False"):
            module(x, rotary_pos_emb=given, **call)


def test_rows_in_front_of_the_first_slot_need_no_longer_table() -> None:
    """A front gap, and a table of as many positions as the longest sequence has tokens: alone and in a layer."""
    cu, padded = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([6, 10, 15], dtype=torch.int32)
    assert packed_positions(cu, padded, 17).tolist() == [0] * 6 + [0, 1, 2, 0, 0, 1, 2, 3, 0, 0, 0]
    angles = RotaryPositionEmbedding(8, device="cpu")(4).double()
    t = torch.randn(17, 2, 8, dtype=torch.float64)
    out = apply_rotary_pos_emb(t, angles, "thd", cu_seqlens=cu, cu_seqlens_padded=padded)
    module = MultiheadAttention(16, 2, qkv_format="thd", params_dtype=torch.float64, device="cpu")
    call: dict[str, Any] = {"rotary_pos_emb": angles, "attn_mask_type": "padding_causal", "max_seqlen_q": 4}
    whole = module(t.flatten(1), cu_seqlens_q=cu, cu_seqlens_q_padded=padded, **call)
    for rows in (slice(6, 9), slice(10, 14)):
        torch.testing.assert_close(out[rows], rotate(t[rows], angles, False))
        alone = module(t[rows].flatten(1), cu_seqlens_q=torch.tensor([0, rows.stop - rows.start]), **call)
        torch.testing.assert_close(whole[rows], alone)
    with pytest.raises(ValueError, match="rotary_pos_emb holds 3 positions, but the longest sequence has 4 tokens"):
        module(t.flatten(1), cu_seqlens_q=cu, cu_seqlens_q_padded=padded, **{**call, "rotary_pos_emb": angles[:3]})


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("gaps", [False, True])
def test_packed_rotation_equals_each_document_alone(interleaved: bool, width: int, gaps: bool) -> None:
    angles = RotaryPositionEmbedding(width, interleaved=interleaved, device="cpu")(6).double()
    starts = PADDED if gaps else CU
    t = torch.randn(int(starts[-1]), 3, 8, dtype=torch.float64)
    out = apply_rotary_pos_emb(t, angles, "thd", interleaved=interleaved, cu_seqlens=CU, cu_seqlens_padded=PADDED if gaps else None)
    for n in range(len(CU) - 1):
        rows = slice(int(starts[n]), int(starts[n] + CU[n + 1] - CU[n]))
        torch.testing.assert_close(out[rows], rotate(t[rows], angles, interleaved))


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_dense_rotation(layout: str) -> None:
    angles = RotaryPositionEmbedding(8, device="cpu")(9).double()
    dense = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    want = torch.stack([rotate(sample, angles, False) for sample in dense])
    out = apply_rotary_pos_emb(dense.transpose(0, 1) if layout == "sbhd" else dense, angles, layout)
    torch.testing.assert_close(out.transpose(0, 1) if layout == "sbhd" else out, want)


def test_half_precision_is_rotated_in_float32() -> None:
    angles = RotaryPositionEmbedding(8, device="cpu")(4096)
    t = torch.randn(4096, 1, 8).bfloat16()
    out = apply_rotary_pos_emb(t, angles, "thd", cu_seqlens=torch.tensor([0, 4096]))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, rotate(t.float(), angles, False).bfloat16())


def test_errors_name_the_argument() -> None:
    angles, t = RotaryPositionEmbedding(8, device="cpu")(4), torch.zeros(5, 1, 8)
    with pytest.raises(ValueError, match="cu_seqlens is needed"):
        apply_rotary_pos_emb(t, angles, "thd")
    with pytest.raises(ValueError, match=r"angles \[positions, 1, 1, width\], width even, got shape \(4, 8\)"):
        apply_rotary_pos_emb(t, angles[:, 0, 0], "thd", cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="holds 4 positions, but a sample has 5 tokens"):
        apply_rotary_pos_emb(t[:, None], angles, "sbhd")
    with pytest.raises(ValueError, match="8 wide, more than the heads' 6"):
        apply_rotary_pos_emb(t[..., :6], angles, "thd", cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="rotary_pos_emb holds 4 positions, but the longest sequence has 5 tokens"):
        apply_rotary_pos_emb(t, angles, "thd", cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"t must have 4 dimensions in tensor_format 'sbhd', got shape \(5, 1, 8\)"):
        apply_rotary_pos_emb(t, angles)
    with pytest.raises(ValueError, match=r"width even, got shape \(4, 1, 1, 7\)"):
        apply_rotary_pos_emb(t, angles[..., :7], "thd", cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"cu_seqlens must be one-dimensional .* got shape \(1, 2\)"):
        apply_rotary_pos_emb(t, angles, "thd", cu_seqlens=torch.tensor([[0, 4]]))
    with pytest.raises(ValueError, match="cu_seqlens_padded must have as many entries as cu_seqlens"):
        apply_rotary_pos_emb(t, angles, "thd", cu_seqlens=torch.tensor([0, 4]), cu_seqlens_padded=torch.tensor([0, 2, 4]))
    with pytest.raises(NotImplementedError, match="start_positions"):
        apply_rotary_pos_emb(t, angles, "thd", start_positions=t, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(NotImplementedError, match="cp_size=2"):
        apply_rotary_pos_emb(t, angles, "thd", cp_size=2, cu_seqlens=torch.tensor([0, 4]))


def test_a_batch_without_a_token_needs_no_angles() -> None:
    t, angles = torch.randn(3, 1, 8), RotaryPositionEmbedding(8, device="cpu")(0)
    torch.testing.assert_close(apply_rotary_pos_emb(t, angles, "thd", cu_seqlens=torch.zeros(4, dtype=torch.int32)), t)


def test_queries_and_keys_may_have_their_own_angles() -> None:
    torch.manual_seed(0)
    module = MultiheadAttention(16, 2, qkv_format="thd", params_dtype=torch.float64, device="cpu")
    x, cu = torch.randn(5, 16, dtype=torch.float64), torch.tensor([0, 5])
    first, second = (RotaryPositionEmbedding(8, rotary_base=base, device="cpu")(8).double() for base in (1e4, 9.0))
    call: dict[str, Any] = {"cu_seqlens_q": cu, "max_seqlen_q": 5, "attn_mask_type": "padding"}
    out = module(x, rotary_pos_emb=(first, second), **call)
    assert torch.equal(module(x, rotary_pos_emb=(first, first), **call), module(x, rotary_pos_emb=first, **call))
    q, k, v = (part.unflatten(1, (2, 8)) for part in (x @ module.qkv.weight.T + module.qkv.bias).chunk(3, 1))
    scores = torch.einsum("ihd,jhd->hij", rotate(q, first, False), rotate(k, second, False)) * 8**-0.5
    context = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
    torch.testing.assert_close(out, context @ module.proj.weight.T + module.proj.bias)


def test_positions_read_nothing_on_the_host() -> None:
    angles = RotaryPositionEmbedding(8, device="cpu")(6)
    table = trace_without_sync(lambda a, cu, padded: rotary_table(a, "thd", 15, cu, padded), angles, CU, PADDED)
    assert all(isinstance(t, Tensor) and t.shape == (15, 1, 8) for t in table)


def test_a_rounded_checkpoint_ends_deferred_initialisation() -> None:
    """Assigned to a module on meta, it gives the module's own frequencies, where the checkpoint stands; of another size it is refused."""
    saved = {name: tensor.bfloat16() for name, tensor in RotaryPositionEmbedding(16, device="cpu").state_dict().items()}
    with torch.device("meta"):
        module = RotaryPositionEmbedding(16)
    module.load_state_dict(saved, assign=True)
    assert module.inv_freq.device.type == "cpu" and torch.equal(module(300), RotaryPositionEmbedding(16, device="cpu")(300))
    with pytest.raises(RuntimeError, match="size mismatch for inv_freq"):
        RotaryPositionEmbedding(8).load_state_dict(saved)
