"""The single-launch adapter without its library: the intervals, the plan's tensors, the reasons for a refusal."""

from __future__ import annotations

import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from te_attn_ops import environment
from te_attn_ops.backends import cudnn_flex
from te_attn_ops.backends.base import BackwardCall, ForwardCall
from te_attn_ops.backends.cudnn_flex import CudnnFlex
from te_attn_ops.kernels.intervals import band_table, intervals, slot_bounds
from te_attn_ops.masks import Band, visible_interval
from te_attn_ops.params import AttentionParams

BANDS = (
    Band(None, None),
    Band(None, 0),
    Band(None, 0, False),
    Band(3, 0),
    Band(0, 0, False),
    Band(2, 1),
    Band(2, 1, False),
    Band(None, 2),
    Band(1, None, False),
    Band(10**6, 10**6),
    Band(1 << 40, 0),
)
Geometry = dict[str, Any]


def make_geometry(
    lens: list[tuple[int, int]],
    policy: list[int],
    bands: tuple[Band, ...],
    gaps: tuple[int, ...] = (0,),
    lead: int = 0,
    tail: int = 0,
) -> Geometry:
    """Sequences of (query, key) tokens, each with the gap behind it; a policy of -1 makes its sequence one."""
    starts_q, starts_kv = [lead], [lead]
    for n, (len_q, len_kv) in enumerate(lens):
        starts_q.append(starts_q[-1] + len_q + gaps[n % len(gaps)])
        starts_kv.append(starts_kv[-1] + len_kv + gaps[(n + 1) % len(gaps)])
    shape = (len(bands), len(lens))
    lens_q, lens_kv = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.int32)
    for n, p in enumerate(policy):
        if p >= 0:
            lens_q[p, n], lens_kv[p, n] = lens[n]
    return {
        "starts_q": torch.tensor(starts_q, dtype=torch.int32),
        "lens_q": lens_q,
        "starts_kv": torch.tensor(starts_kv, dtype=torch.int32),
        "lens_kv": lens_kv,
        "bands": bands,
        "total_q": starts_q[-1] + tail,
        "total_kv": starts_kv[-1] + tail,
    }


def visible_of(geometry: Geometry) -> Tensor:
    """bool [T_q, T_kv], by the one Python definition of a band."""
    visible = torch.zeros(geometry["total_q"], geometry["total_kv"], dtype=torch.bool)
    for p, band in enumerate(geometry["bands"]):
        for n, (len_q, len_kv) in enumerate(zip(geometry["lens_q"][p].tolist(), geometry["lens_kv"][p].tolist())):
            for row in range(len_q):
                low, high = visible_interval(band, row, len_q, len_kv)
                start = int(geometry["starts_kv"][n])
                visible[int(geometry["starts_q"][n]) + row, start + low : start + high] = True
    return visible


def endpoints_of(geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    slots_q, slots_kv = slot_bounds(geometry["starts_q"]), slot_bounds(geometry["starts_kv"])
    table = band_table(geometry["bands"], geometry["total_q"] + geometry["total_kv"], slots_q.device)
    lens_q, lens_kv = geometry["lens_q"], geometry["lens_kv"]
    rows = int(slots_q[-1])
    endpoints = intervals(slots_q, geometry["starts_q"], lens_q, geometry["starts_kv"], lens_kv, table, rows, rows)
    return endpoints, slots_q, slots_kv


def visible_of_endpoints(geometry: Geometry) -> Tensor:
    """What the library reads from the intervals; checks what it demands of them."""
    endpoints, slots_q, slots_kv = endpoints_of(geometry)
    assert endpoints.shape == (1, 3, int(slots_q[-1])) and endpoints.dtype == torch.int32 and endpoints.is_contiguous()
    assert slots_q[0] == 0 and slots_kv[0] == 0 and (slots_q.diff() >= 0).all() and (slots_kv.diff() >= 0).all()
    visible = torch.zeros(geometry["total_q"], geometry["total_kv"], dtype=torch.bool)
    for n in range(len(slots_q) - 1):
        for row in range(int(slots_q[n]), int(slots_q[n + 1])):
            f0, f1, f2 = endpoints[0, :, row].tolist()
            start, length = int(slots_kv[n]), int(slots_kv[n + 1] - slots_kv[n])
            assert 0 <= f0 <= f1 <= f2 <= length
            visible[row, start : start + f0] = True
            visible[row, start + f1 : start + f2] = True
    return visible


LENGTHS = [(5, 5), (0, 0), (3, 7), (7, 3), (1, 1), (0, 4), (4, 0), (9, 9)]


@pytest.mark.parametrize("band", BANDS, ids=Band.describe)
@pytest.mark.parametrize("gaps, lead, tail", [((0,), 0, 0), ((2, 0, 3), 0, 4), ((1,), 3, 0)])
def test_intervals_of_one_band(band: Band, gaps: tuple[int, ...], lead: int, tail: int) -> None:
    geometry = make_geometry(LENGTHS, [0] * len(LENGTHS), (band,), gaps, lead, tail)
    assert torch.equal(visible_of_endpoints(geometry), visible_of(geometry))


@pytest.mark.parametrize("seed", range(20))
def test_intervals_of_mixed_policies(seed: int) -> None:
    rng = random.Random(seed)
    lens = [(rng.randrange(12), rng.randrange(12)) for _ in range(rng.randrange(1, 9))]
    bands = tuple(rng.choice(BANDS) for _ in range(rng.randrange(1, 5)))
    policy = [rng.randrange(-1, len(bands)) for _ in lens]
    gaps = tuple(rng.randrange(3) for _ in range(3))
    geometry = make_geometry(lens, policy, bands, gaps, rng.choice((0, 2)), rng.choice((0, 5)) + 1)
    assert torch.equal(visible_of_endpoints(geometry), visible_of(geometry))


def test_batch_without_rows_in_any_slot_still_has_one_row_for_the_planner() -> None:
    geometry = make_geometry([(0, 0), (0, 0)], [0, 0], (Band(None, 0),), tail=4)
    assert slot_bounds(geometry["starts_q"]).tolist() == [0, 0, 1]
    assert not visible_of_endpoints(geometry).any()


# ------------------------------------------------------------------------------------------------------------------- the plan
TILE_Q, TILE_KV, HEADS = 4, 3, 2
SPEC: Geometry = {"dtype": torch.bfloat16, "num_heads": HEADS, "num_gqa_groups": HEADS, "head_dim_qk": 16, "head_dim_v": 8}


def _lists(partial: list[list[int]], full: list[list[int]]) -> dict[str, Tensor]:
    def pack(prefix: str, lists: list[list[int]]) -> dict[str, Tensor]:
        counts = torch.tensor([len(x) for x in lists], dtype=torch.int32)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
        flat = torch.tensor([b for x in lists for b in x], dtype=torch.int32)
        return {f"{prefix}_block_cnt": counts[None], f"{prefix}_block_offset": offsets, f"{prefix}_block_idx": flat}

    return pack("mask", partial) | pack("full", full)


def fake_pack(mask: Tensor, spec: Any, rows: Any, cu: tuple[Tensor, Tensor], longest: Any, training: bool) -> Any:
    """A planner in plain Python with the library's names, shapes and order, one mask word of 2 per partial block."""
    cu_q, cu_kv = cu
    assert cu_q[-1] == rows[0] and cu_kv[-1] == rows[1] and (cu_q.diff().max(), cu_kv.diff().max()) == longest
    num_seqs = len(cu_q) - 1
    rows_q, rows_kv = [0], [0]
    by_q: tuple[list[list[int]], list[list[int]]] = ([], [])
    by_kv: tuple[list[list[int]], list[list[int]]] = ([], [])
    tasks = []
    for n in range(num_seqs):
        len_q, len_kv = int(cu_q[n + 1] - cu_q[n]), int(cu_kv[n + 1] - cu_kv[n])
        blocks_q, blocks_kv = -(-len_q // TILE_Q), -(-len_kv // TILE_KV)
        seen = torch.zeros(blocks_q * TILE_Q, blocks_kv * TILE_KV, dtype=torch.bool)
        for row in range(len_q):
            f0, f1, f2 = mask[0, :, int(cu_q[n]) + row].tolist()
            seen[row, :f0] = seen[row, f1:f2] = True
        seen = seen.view(blocks_q, TILE_Q, blocks_kv, TILE_KV)
        some, whole = seen.any(3).any(1), seen.all(3).all(1)
        for lists, axis in ((by_q, 0), (by_kv, 1)):
            lists[0].extend((some & ~whole).select(axis, i).nonzero()[:, 0].tolist() for i in range(some.shape[axis]))
            lists[1].extend(whole.select(axis, i).nonzero()[:, 0].tolist() for i in range(some.shape[axis]))
        tasks += [[m, h, n, 0] for m in range(blocks_q) for h in range(HEADS)]
        rows_q.append(rows_q[-1] + blocks_q)
        rows_kv.append(rows_kv[-1] + blocks_kv)

    def direction(lists: tuple[list[list[int]], ...], cu_rows: list[int], words: tuple[int, int, int]) -> dict[str, Any]:
        arrays: dict[str, Any] = _lists(*lists)
        partial, full = arrays["mask_block_idx"], arrays["full_block_idx"]
        masks = torch.arange(partial.numel() * words[1] * words[2], dtype=torch.int32).view(-1, *words).view(torch.uint32)
        return arrays | {
            "cu_total_m_blocks": torch.tensor(cu_rows, dtype=torch.int32),
            "mask_block_masks": masks,
            "dq_write_order": partial + 100,
            "dq_write_order_full": full + 100,
        }

    return SimpleNamespace(
        **direction(by_q, rows_q, (1, 2, 1)),
        sequence_desc=torch.zeros(num_seqs, 8, dtype=torch.int32),
        fwd_work_desc=torch.tensor(tasks, dtype=torch.int32).view(-1, 4),
        bwd_tensors=SimpleNamespace(**direction(by_kv, rows_kv, (1, 2, 2))) if training else None,
    )


class Recorder:
    """Stands for the compiled kernels."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[Any, ...]]] = []

    def kernel(self, name: str) -> Any:
        return lambda *args: self.launches.append((name, args))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    layout = cudnn_flex._Layout((1, 2, 1), HEADS, None)

    def forward(spec: Any, max_logit: bool, training: bool) -> Any:
        own = layout._replace(backward_mask=(1, 2, 2)) if training else layout
        return cudnn_flex._ForwardKernel(recorder.kernel("forward"), own, 132)

    def backward(spec: Any, deterministic: bool) -> Any:
        grouped = spec.num_heads != spec.num_gqa_groups
        names = ("preprocess", "main", "post_dq", *(("post_dk", "post_dv") if grouped else ()))
        kernels = [recorder.kernel(name) for name in names] + [None] * (5 - len(names))
        own = layout._replace(backward_mask=(1, 2, 2))
        return cudnn_flex._BackwardKernel._make([*kernels, own, TILE_Q, TILE_KV])

    monkeypatch.setattr(cudnn_flex, "_pack", fake_pack)
    monkeypatch.setattr(cudnn_flex, "_forward_kernel", forward)
    monkeypatch.setattr(cudnn_flex, "_backward_kernel", backward)
    return recorder


def common_call(geometry: Geometry, plan: list[Tensor], **changes: Any) -> dict[str, Any]:
    new = {"dtype": SPEC["dtype"]}
    return {
        "q": torch.zeros(geometry["total_q"], HEADS, 16, **new),
        "k": torch.zeros(geometry["total_kv"], HEADS, 16, **new),
        "v": torch.zeros(geometry["total_kv"], HEADS, 8, **new),
        **{name: geometry[name] for name in ("starts_q", "lens_q", "starts_kv", "lens_kv", "bands")},
        "max_seqlen_q": 16,
        "max_seqlen_kv": 16,
        "scale": 0.25,
        "plain_cu_seqlens": False,
        "equal_lengths": False,
        "deterministic": False,
        "single_launch_plan": plan,
        "contiguous_run": False,
        "first": True,
    } | changes


def blocks_of_forward(args: tuple[Any, ...]) -> Tensor:
    """bool [T_q, T_kv]: what the forward kernel's walk over its tasks reaches, in whole blocks; each (row, head) once."""
    q, k, cu_q, cu_kv = args[0], args[1], args[7], args[8]
    partial_count, partial, full_count, full, cu_rows, *nothing, partial_offset, full_offset, masks, sequences, tasks = args[9]
    assert nothing == [None, None] and masks.dtype == torch.uint32 and sequences.shape == (len(cu_q) - 1, 8)
    reached = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    visits = torch.zeros(q.shape[0], HEADS, dtype=torch.int32)
    for block, head, n, _ in tasks.tolist():
        row = int(cu_rows[n]) + block
        first, last = int(cu_q[n]) + block * TILE_Q, min(int(cu_q[n]) + (block + 1) * TILE_Q, int(cu_q[n + 1]))
        counts = int(partial_count[0, row]), int(full_count[0, row])
        if first >= last:
            assert counts == (0, 0), "a spare task found something to see"
            continue
        visits[first:last, head] += 1
        for offset, count, blocks in ((partial_offset, counts[0], partial), (full_offset, counts[1], full)):
            for b in blocks[int(offset[row]) : int(offset[row]) + count].tolist():
                begin = int(cu_kv[n]) + b * TILE_KV
                reached[first:last, begin : min(begin + TILE_KV, int(cu_kv[n + 1]))] = True
    assert (visits[: int(cu_q[-1])] == 1).all() and (visits[int(cu_q[-1]) :] == 0).all()
    return reached


def blocks_of_backward(cu_q: Tensor, cu_kv: Tensor, arrays: tuple[Any, ...], shape: tuple[int, int]) -> Tensor:
    partial_count, partial, full_count, full, cu_rows, order, full_order, partial_offset, full_offset, masks, *rest = arrays
    assert rest == [None, None] and masks.dtype == torch.uint32
    reached = torch.zeros(shape, dtype=torch.bool)
    for n in range(len(cu_q) - 1):
        for block in range(-(-int(cu_kv[n + 1] - cu_kv[n]) // TILE_KV)):
            row = int(cu_rows[n]) + block
            begin, end = int(cu_kv[n]) + block * TILE_KV, min(int(cu_kv[n]) + (block + 1) * TILE_KV, int(cu_kv[n + 1]))
            for offset, count, blocks, ranks in (
                (partial_offset, partial_count, partial, order),
                (full_offset, full_count, full, full_order),
            ):
                at = slice(int(offset[row]), int(offset[row]) + int(count[0, row]))
                assert torch.equal(ranks[at], blocks[at] + 100)
                for b in blocks[at].tolist():
                    first = int(cu_q[n]) + b * TILE_Q
                    reached[first : min(first + TILE_Q, int(cu_q[n + 1])), begin:end] = True
    return reached


def covers(reached: Tensor, geometry: Geometry) -> bool:
    """Every visible pair is reached, and only blocks that hold one are."""
    visible = visible_of(geometry)
    return bool((reached | ~visible).all()) and bool(reached.any()) == bool(visible.any())


def random_geometry(rng: random.Random, num_seqs: int, total: int | None = None) -> Geometry:
    bands = (Band(None, 0), Band(None, None), Band(3, 1, False))
    lens = [(rng.randrange(12), rng.randrange(12)) for _ in range(num_seqs)]
    geometry = make_geometry(lens, [rng.randrange(3) for _ in lens], bands, (0, 1), tail=2)
    if total is not None:
        geometry["total_q"] = geometry["total_kv"] = total
    return geometry


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_plan_reaches_what_is_visible(recorder: Recorder, training: bool, seed: int) -> None:
    geometry = random_geometry(random.Random(seed), 6)
    backend = CudnnFlex()
    plan = backend.make_plan(**geometry, **SPEC, max_seqlen_q=16, max_seqlen_kv=16, training=training)
    assert len(plan) == (6 if training else 5) and plan[0].dtype == torch.int32
    assert all(tensor.numel() == 0 for tensor in plan[1:])
    call = ForwardCall(**common_call(geometry, plan), is_training=training)
    backend.forward(call)
    [(name, args)] = recorder.launches
    assert name == "forward" and args[3] is call.out and args[4] is call.lse and args[5] is None and args[6] == 0.25
    assert covers(blocks_of_forward(args), geometry)
    if not training:
        return
    out, lse = torch.zeros_like(call.out), torch.zeros_like(call.lse)
    backend.backward(BackwardCall(**common_call(geometry, plan), grad_out=torch.ones_like(out), out=out, lse=lse))
    names = [name for name, _ in recorder.launches[1:]]
    assert names == ["preprocess", "main", "post_dq"]
    main = recorder.launches[2][1]
    assert covers(blocks_of_backward(main[10], main[11], main[15], (args[0].shape[0], args[1].shape[0])), geometry)


def test_refreshed_plan_is_seen_through_the_same_views(recorder: Recorder) -> None:
    rng = random.Random(7)
    backend = CudnnFlex()
    geometry = random_geometry(rng, 6, total=96)
    options: Geometry = {"max_seqlen_q": 16, "max_seqlen_kv": 16, "training": True, "reserve": 4.0}
    plan = backend.make_plan(**geometry, **SPEC, **options)
    backend.forward(ForwardCall(**common_call(geometry, plan), is_training=True))
    captured = recorder.launches[0][1]
    for _ in range(5):
        other = random_geometry(rng, 6, total=96)
        backend.refresh_plan(plan, **other, dtype=torch.bfloat16)
        assert covers(blocks_of_forward(captured), other)


def test_refresh_refuses_what_has_no_room_and_leaves_the_plan(recorder: Recorder) -> None:
    backend = CudnnFlex()
    bands = (Band(0, 0), Band(None, None))
    small = make_geometry([(8, 8)] * 4, [0] * 4, bands)
    plan = backend.make_plan(**small, **SPEC, max_seqlen_q=8, max_seqlen_kv=8, training=True, reserve=0.0)
    before = plan[0].clone()
    with pytest.raises(ValueError, match=r"forward full blocks where there is room for.*capture again"):
        backend.refresh_plan(plan, **make_geometry([(8, 8)] * 4, [1] * 4, bands), dtype=torch.bfloat16)
    long = make_geometry([(32, 32), (0, 0), (0, 0), (0, 0)], [0] * 4, bands)
    with pytest.raises(ValueError, match="32 query rows in the longest slot where there is room for 8"):
        backend.refresh_plan(plan, **long, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="is for 4 sequences, the new geometry has 5"):
        backend.refresh_plan(plan, **make_geometry([(8, 8)] * 5, [0] * 5, bands), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"is for \(32, 32\) rows"):
        backend.refresh_plan(plan, **make_geometry([(8, 8)] * 4, [0] * 4, bands, tail=1), dtype=torch.bfloat16)
    assert torch.equal(plan[0], before)


def test_plan_of_another_call_is_refused(recorder: Recorder) -> None:
    geometry = random_geometry(random.Random(0), 3)
    backend = CudnnFlex()
    plan = backend.make_plan(**geometry, **SPEC, max_seqlen_q=16, max_seqlen_kv=16, training=False)
    call = common_call(geometry, plan)
    with pytest.raises(ValueError, match=r"\(2, 2, 16, 8\); the call has .* and \(2, 2, 16, 16\)"):
        wide = torch.zeros(geometry["total_kv"], HEADS, 16, dtype=torch.bfloat16)
        backend.forward(ForwardCall(**call | {"v": wide}, is_training=False))
    with pytest.raises(ValueError, match="training=False"):
        out, lse = torch.zeros(geometry["total_q"], HEADS, 8), torch.zeros(HEADS, geometry["total_q"])
        backend.backward(BackwardCall(**call, grad_out=out, out=out, lse=lse))
    assert not recorder.launches


def test_views_of_a_plan_go_with_it(recorder: Recorder) -> None:
    geometry = random_geometry(random.Random(0), 3)
    backend = CudnnFlex()
    plan = backend.make_plan(**geometry, **SPEC, max_seqlen_q=16, max_seqlen_kv=16, training=False)
    for _ in range(2):
        backend.forward(ForwardCall(**common_call(geometry, plan), is_training=False))
    assert len(backend._views) == 1
    assert recorder.launches[0][1][9] is recorder.launches[1][1][9]
    recorder.launches.clear()
    del plan
    assert len(backend._views) == 0


def test_empty_batches_have_a_plan(recorder: Recorder) -> None:
    geometry = make_geometry([], [], (Band(None, 0),), tail=3)
    plan = CudnnFlex().make_plan(**geometry, **SPEC, max_seqlen_q=16, max_seqlen_kv=16, training=True)
    assert len(plan) == 6
    CudnnFlex().refresh_plan(plan, **geometry, dtype=torch.bfloat16)


def test_make_plan_checks_its_arguments(recorder: Recorder) -> None:
    geometry = make_geometry([(8, 8)], [0], (Band(None, 0),))
    options = {**SPEC, "max_seqlen_q": 8, "max_seqlen_kv": 8, "training": False}
    with pytest.raises(ValueError, match="one entry per policy: got 2 for 1"):
        CudnnFlex().make_plan(**geometry | {"bands": BANDS[:2]}, **options)
    with pytest.raises(ValueError, match="starts_kv: the last slot ends at 8, beyond the 7 rows"):
        CudnnFlex().make_plan(**geometry | {"total_kv": 7}, **options)


def test_bounds_follow_the_slots() -> None:
    assert cudnn_flex._bound(512, 400) == 512
    assert cudnn_flex._bound(512, 600) == 768  # a gap made a slot longer than any sequence
    assert cudnn_flex._bound(1, 1) == 2


def test_grouped_and_deterministic_backward_get_cleared_accumulators(recorder: Recorder) -> None:
    geometry = random_geometry(random.Random(3), 4)
    spec = SPEC | {"num_gqa_groups": 1, "head_dim_v": 16}
    backend = CudnnFlex()
    plan = backend.make_plan(**geometry, **spec, max_seqlen_q=16, max_seqlen_kv=16, training=True)
    common = common_call(geometry, plan, deterministic=True)
    common["k"] = common["v"] = common["k"][:, :1]
    out, lse = torch.zeros_like(common["q"]), torch.zeros(HEADS, geometry["total_q"])
    backend.backward(BackwardCall(**common, grad_out=out, out=out, lse=lse))
    assert [name for name, _ in recorder.launches] == ["preprocess", "main", "post_dq", "post_dk", "post_dv"]
    main = recorder.launches[1][1]
    turns_q, turns_k, turns_v = main[12:15]
    assert turns_q.shape == (4, HEADS, 16 // TILE_Q, 1) and turns_k.shape == turns_v.shape == (4, 1, -(-16 // TILE_KV), 2)
    assert not any(tensor.any() for tensor in (main[7], main[8], turns_q, turns_k, turns_v))
    assert main[7].dtype == torch.float32 and main[7].shape[0] == 1


# -------------------------------------------------------------------------------------------------------------- refusals
def refusals(monkeypatch: pytest.MonkeyPatch, version: str | None = "1.32.0", **changes: Any) -> list[str]:
    monkeypatch.setattr(environment, "package_version", lambda *names, **options: version)
    params = AttentionParams(single_launch_plan=True).replace(**changes)
    return list(CudnnFlex().refusals(params))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.float16},
        {"head_dim_qk": 192},
        {"head_dim_qk": 256, "head_dim_v": 256},
        {"head_dim_qk": 256, "head_dim_v": 256, "num_gqa_groups": 4, "deterministic": True},
        {"head_dim_qk": 64, "head_dim_v": 128, "is_training": False},
        {"head_dim_qk": 64, "head_dim_v": 96},
        {"head_dim_qk": 8, "head_dim_v": 8},
        {"num_gqa_groups": 4},
        {"num_heads": 12, "num_gqa_groups": 4},
        {"num_gqa_groups": 4, "head_dim_qk": 192, "is_training": False},
        {"deterministic": True, "return_max_logit": True},
        {"has_gaps": True, "equal_lengths": False, "bands": (Band(None, 0, False), Band(5, 2))},
    ],
)
def test_accepts(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    assert refusals(monkeypatch, **changes) == []


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"device_type": "cpu"}, "found cpu"),
        ({"sm": 80}, "found sm80"),
        ({"sm": 100}, "sm90 kernels of cudnn.flex_attention, found sm100"),
        ({"dtype": torch.float32}, "found float32"),
        ({"single_launch_plan": False}, r"needs a plan made by prepare_thd_policies\(..., attention=...\)"),
        ({"static_membership": False}, "mutable=True"),
        ({"head_dim_qk": 160}, r"found \(160, 128\)"),
        ({"head_dim_qk": 192, "head_dim_v": 192}, r"found \(192, 192\)"),
        ({"head_dim_qk": 100}, "multiple of 8, found 100"),
        ({"head_dim_qk": 64}, r"shared memory to train .* found \(64, 128\)"),
        ({"head_dim_qk": 56, "head_dim_v": 104}, r"shared memory to train .* found \(56, 104\)"),
        ({"head_dim_qk": 192, "num_gqa_groups": 4}, "to train with grouped heads"),
        ({"head_dim_qk": 256, "head_dim_v": 256, "deterministic": True}, "no deterministic backward"),
        ({"num_gqa_groups": 5}, "multiple of num_gqa_groups"),
        ({"version": "1.33.0"}, "frontend 1.32, found 1.33.0"),
        ({"version": "unknown"}, "frontend 1.32, found unknown"),
    ],
)
def test_refuses(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str) -> None:
    found = refusals(monkeypatch, **changes)
    assert len(found) == 1
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found[0])


def test_version_does_not_import_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(environment, "package_version", lambda *names, **options: asked.update(names=names, **options))
    assert CudnnFlex().version() is None
    assert asked == {"names": ("nvidia-cudnn-frontend",), "module": "cudnn"}
    # Not Triton: torch.utils.flop_counter imports it where it is installed.
    code = "import sys, te_attn_ops.backends.cudnn_flex; print({'cudnn', 'cutlass'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
