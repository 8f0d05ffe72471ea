"""Tensors of 2^31 elements or more: which kernels were seen to fail there, and that a call's size reaches the choice."""

from __future__ import annotations

import pytest
import torch

from te_attn_ops import AttentionParams, attention
from te_attn_ops.backends import get_backend
from te_attn_ops.backends.cudnn import static_refusals

WIDE = AttentionParams(num_heads=128, num_gqa_groups=128, wide_offsets=True)


@pytest.mark.parametrize("training", [True, False])
def test_torch_flash_refuses(training: bool) -> None:
    reasons = list(get_backend("torch_flash").refusals(WIDE.replace(is_training=training)))
    assert any("2^31" in reason for reason in reasons)
    assert not any("2^31" in reason for reason in get_backend("torch_flash").refusals(WIDE.replace(wide_offsets=False)))


@pytest.mark.parametrize("training", [True, False])
def test_cudnn_refuses_training_alone(training: bool) -> None:
    reasons = list(static_refusals(WIDE.replace(is_training=training), 91900))
    assert any("2^31" in reason for reason in reasons) == training


@pytest.mark.parametrize(("tokens", "wide"), [(131_071, False), (131_072, True), (140_000, True)])
def test_a_call_tells_its_size(tokens: int, wide: bool) -> None:
    q = torch.empty(tokens, 128, 128, dtype=torch.bfloat16, device="meta")
    assert attention._is_wide(q, q[:1], q[:1]) == wide
    assert attention._is_wide(q[:1], q, q) == wide


def test_widths_count_as_kernels_pad_them() -> None:
    """165,000 rows of 128 heads of 100 are below 2^31 elements, of 104 above."""
    q = torch.empty(165_000, 128, 100, dtype=torch.bfloat16, device="meta")
    assert q.numel() < 1 << 31 and attention._is_wide(q, q, q)
