"""The single-launch backend's own order of forward tasks, against the library's."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from te_attn_ops.backends import cudnn_flex, get_backend

pytestmark = pytest.mark.gpu


def planned(lengths: list[int], ends: list[int], heads: tuple[int, int], order: Any) -> Any:
    """The library's packed plan; row r of sequence n sees its first ``min(r, ends[n])`` keys."""
    from cudnn.flex_attention import create_mask_plan

    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    seen = torch.cat([torch.arange(length).clamp(max=end) for length, end in zip(lengths, ends)])
    mask = seen.to("cuda", torch.int32).expand(1, 3, -1).contiguous()
    q, k = (torch.empty(sum(lengths), h, 128, dtype=torch.bfloat16, device="cuda") for h in heads)
    bounds = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    with order, cudnn_flex._quiet():
        return create_mask_plan(mask, q, k, k, **bounds, build_backward=False)._packed_plan


@pytest.mark.parametrize(
    ("lengths", "heads"),
    [
        ([1024, 130, 0, 2000, 130], (16, 16)),
        ([1024, 130, 0, 2000, 130], (8, 2)),
        ([1024, 130, 0, 2000, 130], (4, 4)),
        ([70] * 300, (2, 2)),  # more sequences than one block of the kernels
        ([40, 0, 0], (4, 1)),
    ],
)
def test_same_tasks_in_the_same_order_of_sections(lengths: list[int], heads: tuple[int, int]) -> None:
    if get_backend("cudnn_flex").version() is None:
        pytest.skip("cudnn_flex is not installed")
    ends = [0 if n % 5 == 4 else length // (1 + n % 2) for n, length in enumerate(lengths)]
    ours, theirs = (planned(lengths, ends, heads, order) for order in (cudnn_flex._own_schedule(), contextlib.nullcontext()))
    torch.testing.assert_close(ours.sequence_desc, theirs.sequence_desc, rtol=0, atol=0)
    mine, wanted = ours.fwd_work_desc.tolist(), theirs.fwd_work_desc.tolist()
    assert sorted(mine) == sorted(wanted)
    costs = (ours.mask_block_cnt + ours.full_block_cnt)[0].tolist()
    begins = ours.cu_total_m_blocks.tolist()
    listed = [[(batch, costs[begins[batch] + tile]) for tile, _, batch, _ in tasks] for tasks in (mine, wanted)]
    busy = sum(cost > 0 for _, cost in listed[1])
    assert listed[0][:busy] == listed[1][:busy] and not any(cost for _, cost in listed[0][busy:])
