"""The path that unfused takes on CUDA, where lengths stay on the device, run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from te_attn_ops import execution, testing
from te_attn_ops.backends import unfused
from te_attn_ops.backends.base import Call
from te_attn_ops.testing import CONFIGURATIONS, NoHostSync, PackedCase, build, random_case
from tests.stubs import fresh_choices  # noqa: F401


class _OnDevice(torch.Tensor):
    """A CPU tensor that says it is on CUDA."""

    is_cuda = True


@pytest.fixture
def device_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """unfused takes its device path, and every read on the host is an error there."""
    original = unfused._device_tiles

    def tiles(call: Call) -> Iterator[unfused._Tile]:
        with NoHostSync():
            yield from original(call)

    monkeypatch.setattr(unfused, "_host_tiles", tiles)
    for name in ("_put", "_collect"):
        function = getattr(unfused, name)
        monkeypatch.setattr(unfused, name, _with_device_target(function))
    yield


def _with_device_target(function: object) -> object:
    def wrapped(target: torch.Tensor, value: torch.Tensor, tile: object) -> None:
        with NoHostSync():
            function(target.as_subclass(_OnDevice), value, tile)  # type: ignore[operator]

    return wrapped


NAMES = ("layout_0_1", "layout_2_2", "swa_1_2", "mla_1_0", "zero_length", "equal_maxima", "gaps_cross", "policies_cross")


@pytest.mark.usefixtures("device_path")
@pytest.mark.parametrize("case", [case for case in CONFIGURATIONS if case.name in NAMES], ids=str)
def test_device_path(case: PackedCase) -> None:
    testing.assert_matches_reference(build(case).poison(1e4), return_max_logit=True)


@pytest.mark.usefixtures("device_path")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("budget", [1 << 27, 4 * 48 * 5, 64])
def test_device_path_in_parts(monkeypatch: pytest.MonkeyPatch, seed: int, budget: int) -> None:
    """Blocks of sequences, blocks of rows: every score budget gives the same."""
    monkeypatch.setattr(unfused, "_SCORE_BUDGET", budget)
    testing.assert_matches_reference(build(random_case(seed, num_heads=4, num_gqa_groups=2), seed=seed))


@pytest.mark.usefixtures("device_path")
def test_device_path_leaves_nan_of_gaps_and_neighbours_out() -> None:
    case = PackedCase((6, 5, 7), gaps_q=(2, 0, 1), tail=3)
    clean, inputs = build(case).run(), build(case).poison()
    with torch.no_grad():
        inputs.v[8:13] = torch.nan
    dirty = inputs.run()
    others = torch.cat([torch.arange(0, 8), torch.arange(13, case.total("q"))])
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(clean, name)[others], getattr(dirty, name)[others]), name


# ------------------------------------------------------------------------------------------------------- what kernels may read
@pytest.mark.parametrize(
    ("tensor", "copied"),
    [
        (torch.zeros(5, 2, 16, dtype=torch.bfloat16), False),
        (torch.zeros(5, 3, 2, 16, dtype=torch.bfloat16)[:, 1], False),
        (torch.zeros(2, 5, 16, dtype=torch.bfloat16).transpose(0, 1), False),
        (torch.zeros(5, 2, 24, dtype=torch.bfloat16)[..., :16], False),
        (torch.zeros(5, 16, 2, dtype=torch.bfloat16).transpose(1, 2), True),
        (torch.zeros(161, dtype=torch.bfloat16)[1:].view(5, 2, 16), True),
        (torch.zeros(5, 2, 20, dtype=torch.bfloat16)[..., :16], True),
        (torch.zeros(1, 1, 16, dtype=torch.bfloat16).expand(5, 2, 16), True),
        (torch.zeros((), dtype=torch.bfloat16).expand(5, 2, 16), True),
    ],
    ids=["contiguous", "interleaved", "transposed", "wide_rows", "last_stride", "misaligned", "odd_rows", "one_row", "one_value"],
)
def test_kernel_ready_copies_what_kernels_cannot_read(tensor: torch.Tensor, copied: bool) -> None:
    ready = execution.kernel_ready(tensor)
    assert torch.equal(ready, tensor) and (ready is not tensor) is copied
    assert ready.stride(2) == 1 and ready.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in ready.stride()[:2])


def test_the_stride_of_a_lone_head_is_its_width() -> None:
    """A kernel built per layout would else be built for every number of tokens; PyTorch counts either as contiguous."""
    base = torch.randn(1, 5, 16).bfloat16()
    view = base.transpose(0, 1)
    assert view.is_contiguous() and view.stride(1) == 80
    ready = execution.kernel_ready(view)
    assert ready.stride() == (16, 16, 1) and ready.data_ptr() == base.data_ptr() and torch.equal(ready, view)
