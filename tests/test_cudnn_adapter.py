"""The cudnn adapter without a GPU and without the frontend: limits, buckets, the layout of what a graph reads, and a stand-in
for a built graph that computes what the graph's own parameters say and writes no row that cuDNN does not write."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from te_attn_ops.backends import cudnn as adapter
from te_attn_ops.backends.base import BackwardCall, ForwardCall
from te_attn_ops.backends.cudnn import Cudnn, GraphSpec
from te_attn_ops.masks import Band, iter_rows
from te_attn_ops.params import SEQLEN_BUCKETS, AttentionParams
from tests.stubs import replace_cudnn

FULL, CAUSAL, CAUSAL_TL = Band(), Band(None, 0, True), Band(None, 0, False)
BANDS = [
    FULL,
    CAUSAL,
    CAUSAL_TL,
    Band(2, 0, True),
    Band(1, 2, False),
    Band(1, 2, True),
    Band(0, None, True),
    Band(None, 1, False),
]


def spec(**changes: Any) -> GraphSpec:
    strides = ((256, 64, 1), (128, 64, 1), (128, 64, 1), (256, 64, 1))
    base = GraphSpec(
        False, 0, torch.bfloat16, 6, 4, 2, 64, 64, 256, 384, strides, None, 0, False, 0.125,
        adapter.LSE_TOKEN_MAJOR, 0, 0, 0, False, False,
    )  # fmt: skip
    return base._replace(**changes)


BACKWARD = spec(backward=True, strides=(*spec().strides, (512, 128, 1)), total_q=1024, total_kv=2048)


# -------------------------------------------------------------------------------------------------------------------- limits
TRAIN, INFER = AttentionParams(), AttentionParams(is_training=False)
SM100 = AttentionParams(sm=100)
UNEQUAL = TRAIN.replace(equal_lengths=False)


@pytest.mark.parametrize(
    ("params", "version", "reason"),
    [
        (TRAIN, 91900, None),
        (TRAIN, 91002, None),
        (TRAIN, 90500, "9.6.0"),
        (TRAIN, 0, "found none"),
        (TRAIN, 91001, "known bugs"),
        (TRAIN.replace(sm=80), 91900, "sm90"),
        (TRAIN.replace(device_type="cpu"), 91900, "CUDA"),
        (TRAIN.replace(head_dim_qk=192), 91900, None),
        (TRAIN.replace(head_dim_qk=256, head_dim_v=256), 91900, None),
        (TRAIN.replace(head_dim_qk=264), 91900, "<= 256"),
        (TRAIN.replace(head_dim_qk=100), 91900, "multiple of 8"),
        (TRAIN.replace(head_dim_qk=256), 91900, "equal head dims"),
        (TRAIN.replace(head_dim_qk=256), 91002, None),
        (INFER.replace(head_dim_qk=256), 91900, None),
        (TRAIN.replace(head_dim_v=64), 91900, None),
        (TRAIN.replace(head_dim_qk=160, head_dim_v=96), 91200, "9.13.0"),
        (SM100, 90600, "9.7.0"),
        (SM100.replace(head_dim_qk=192), 91900, None),
        (SM100.replace(head_dim_qk=192, head_dim_v=192), 91900, "192 and 128"),
        (SM100.replace(head_dim_qk=256, head_dim_v=256), 92500, None),
        (SM100.replace(head_dim_qk=256, head_dim_v=256, bands=(Band(8, 8, True),)), 92500, "causal window"),
        (SM100.replace(is_training=False, head_dim_qk=192, head_dim_v=192), 91900, None),
        (SM100.replace(is_training=False, head_dim_qk=192, head_dim_v=192), 90800, "9.9.0"),
        (SM100.replace(deterministic=True), 91800, "9.18.1"),
        (TRAIN.replace(sm=120), 91900, "sm119"),
        (INFER.replace(sm=120), 91900, None),
        (INFER.replace(sm=120), 91700, "9.18.1"),
        (INFER.replace(return_max_logit=True), 91800, "9.19.0"),
        (INFER.replace(return_max_logit=True), 91900, None),
        (UNEQUAL.replace(max_seqlen_kv=1024, bands=(Band(64, 0, True),)), 91800, "4096 and 1024"),
        (UNEQUAL.replace(max_seqlen_kv=1024, bands=(Band(64, 0, True),)), 91900, None),
        (UNEQUAL.replace(max_seqlen_kv=1024), 90600, "9.7.0"),
        (TRAIN.replace(bands=(Band(64, None, True),)), 90900, "causal window"),
        (UNEQUAL.replace(bands=(Band(64, 0, True),)), 90900, "9.10.2"),
        (TRAIN.replace(bands=(CAUSAL, Band(64, 64, True))), 91400, "9.14.0"),
        (TRAIN.replace(bands=(Band(64, 0, True),)), 91400, None),
        (TRAIN.replace(bands=(Band(8192, 8192, True),)), 91400, None),  # reaches beyond every sequence
        (TRAIN.replace(deterministic=True), 91900, None),
        (TRAIN.replace(deterministic=True, max_seqlen_q=32768, max_seqlen_kv=32768), 91900, "32.0 GiB"),
        (INFER.replace(deterministic=True, max_seqlen_q=32768, max_seqlen_kv=32768), 91900, None),
    ],
)
def test_static_limits(params: AttentionParams, version: int, reason: str | None) -> None:
    reasons = list(adapter.static_refusals(params, version))
    if reason is None:
        assert not reasons
    else:
        assert any(reason in text for text in reasons), reasons


def test_policies_that_share_a_reason_give_it_once() -> None:
    window = Band(64, 0, True)
    params = UNEQUAL.replace(max_seqlen_kv=1024, bands=(window, window, FULL))
    assert len(list(adapter.static_refusals(params, 91800))) == 1


def test_nothing_is_asked_of_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "cudnn_version", lambda: 91900)
    monkeypatch.setattr(adapter, "package_version", lambda *_, module: "3.6.0" if module == "triton" else None)
    assert Cudnn().version() is None
    assert list(Cudnn().refusals(TRAIN)) == []
    monkeypatch.setattr(adapter, "package_version", lambda *_, module: None if module == "triton" else "1.32.0")
    assert Cudnn().version() == "1.32.0 (cuDNN 9.19.0)"
    assert "Triton" in " ".join(Cudnn().refusals(TRAIN))


# ------------------------------------------------------------------------------------------------------------------- buckets
def test_buckets_bound_their_value_closely() -> None:
    assert [adapter.batch_bucket(n) for n in (1, 2, 3, 4, 5, 7, 13, 33, 513)] == [1, 2, 3, 4, 6, 8, 16, 48, 768]
    assert [adapter.seqlen_bucket(n) for n in (0, 128, 129, 4096, 4097)] == [128, 128, 256, 4096, 6144]
    assert adapter.seqlen_bucket(SEQLEN_BUCKETS[-1] + 1) == 2 * SEQLEN_BUCKETS[-1]
    for total in (1, 63, 64, 65, 1000, 1025, 33408, 33409, 1 << 20):
        bound = adapter.total_bucket(total)
        assert total <= bound <= total + max(63, total // 8) and bound % 64 == 0
    assert len({adapter.total_bucket(total) for total in range(16384, 32768)}) <= 9


def test_bounds_of_a_band() -> None:
    assert adapter.band_bounds(FULL, False, 128, 256) == (None, None, False)
    assert adapter.band_bounds(CAUSAL, False, 128, 256) == (None, 0, True)
    assert adapter.band_bounds(CAUSAL, True, 128, 256) == (None, 0, False)
    assert adapter.band_bounds(Band(5, 7, True), False, 128, 256) == (6, 7, True)
    assert adapter.band_bounds(Band(256, 0, True), False, 128, 256) == (None, 0, True)
    assert adapter.band_bounds(Band(256, 300, True), False, 128, 256) == (None, None, False)


def test_offsets_are_wide_only_where_they_must_be() -> None:
    assert not adapter.needs_wide_offsets(1 << 20, 1 << 10, [2047, 64], [4096])
    assert adapter.needs_wide_offsets(1 << 10, 1 << 20, [64], [2048, 64])


# ------------------------------------------------------------------------------------------------- what a graph reads and is
@pytest.mark.parametrize("one", [spec(), spec(stats=adapter.MAX_AND_SUM), BACKWARD, BACKWARD._replace(wide=True, batch=7)])
def test_metadata_rows_are_aligned_and_apart(one: GraphSpec) -> None:
    layout, tensors = adapter.metadata_layout(one), adapter.operands(one)
    assert layout.rows == len(tensors)
    assert [operand.over_kv for operand in tensors] == [False] * layout.rows_q + [True] * (layout.rows - layout.rows_q)
    assert layout.pitch > one.batch
    lens, offsets = layout.byte_offsets[:2], layout.byte_offsets[2:]
    rows = [(at, layout.pitch * (8 if one.wide else 4)) for at in offsets] + [(at, layout.pitch * 4) for at in lens]
    assert all(at % 16 == 0 for at, _ in rows)
    covered = sorted(rows)
    assert all(at + size == after for (at, size), (after, _) in itertools.pairwise(covered))
    assert sum(covered[-1]) == layout.words * 4


class _Node:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        def set_attribute(value: Any) -> _Node:
            self.__dict__[name.removeprefix("set_")] = value
            return self

        return set_attribute


class _Recorder:
    """As much of the frontend as :func:`describe_graph` touches."""

    class data_type:
        HALF, BFLOAT16, FLOAT, INT32, INT64 = "half", "bf16", "f32", "i32", "i64"

    class diagonal_alignment:
        TOP_LEFT, BOTTOM_RIGHT = "tl", "br"

    def pygraph(self, **_: Any) -> _Recorder:
        self.nodes: dict[int, _Node] = {}
        self.made: list[_Node] = []
        return self

    def tensor(self, **attributes: Any) -> _Node:
        return self.nodes.setdefault(attributes["uid"], _Node(**attributes))

    def sdpa(self, **options: Any) -> list[_Node | None]:
        self.options = options
        self.made = [_Node(), _Node()]
        return [self.made[0], self.made[1] if options["generate_stats"] else None]

    def sdpa_backward(self, **options: Any) -> list[_Node]:
        self.options = options
        self.made = [_Node(), _Node(), _Node()]
        return self.made

    def by_uid(self) -> dict[int, _Node]:
        return {**self.nodes, **{node.uid: node for node in self.made if "uid" in node.__dict__}}


@pytest.mark.parametrize(
    "one",
    [
        spec(left=4, right=3, bottom_right=True),
        spec(stats=adapter.LSE_IN_PLACE, pitch=2048),
        spec(stats=adapter.MAX_AND_SUM),
        BACKWARD._replace(deterministic=True, wide=True),
    ],
)
def test_described_graph(one: GraphSpec) -> None:
    graph = _Recorder()
    adapter.describe_graph(graph, None, one)
    nodes, tensors = graph.by_uid(), adapter.operands(one)
    assert sorted(nodes) == list(range(1, 2 * len(tensors) + 3))
    for index, operand in enumerate(tensors):
        node, seqlen = nodes[index + 1], one.seqlen_kv if operand.over_kv else one.seqlen_q
        assert node.dim == [one.batch, operand.heads, seqlen, operand.width]
        assert node.stride[1:] == [operand.head, operand.row, 1]
        assert node.ragged_offset is nodes[len(tensors) + 3 + index]
        assert node.data_type == ("f32" if operand.is_float32 else "bf16")
        assert node.__dict__.get("output", False) == operand.is_output
        assert node.ragged_offset.data_type == ("i64" if one.wide else "i32")
        assert node.ragged_offset.dim == [one.batch + 1, 1, 1, 1]
    options = graph.options
    assert options["use_padding_mask"] and options["seq_len_q"] is nodes[len(tensors) + 1]
    assert options.get("diagonal_band_left_bound") == one.left and options.get("diagonal_band_right_bound") == one.right
    assert options["diagonal_alignment"] == ("br" if one.bottom_right else "tl")
    if one.backward:
        assert options["use_deterministic_algorithm"] and options["max_total_seq_len_kv"] == one.total_kv
    else:
        assert options["generate_stats"] == (one.stats != adapter.MAX_AND_SUM)
    if one.stats == adapter.LSE_IN_PLACE:
        assert nodes[3].stride == [one.seqlen_q * one.heads, 2048, 1, 1]


def test_graphs_are_dropped_in_order_of_use_except_pinned_ones() -> None:
    cache = adapter.GraphCache(capacity=3)
    graphs = {name: _Node(pinned=name == "a") for name in "abcde"}
    for name in "abc":
        cache.put(name, graphs[name])  # type: ignore[arg-type]
    cache.get("b")  # type: ignore[arg-type]
    cache.put("d", graphs["d"])  # type: ignore[arg-type]
    cache.put("e", graphs["e"])  # type: ignore[arg-type]
    assert [name for name in "abcde" if cache.get(name)] == ["a", "d", "e"]  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- a stand-in graph
def _bound_band(one: GraphSpec) -> Band:
    """What the bounds of a graph mean: the left one counts the diagonal."""
    return Band(None if one.left is None else one.left - 1, one.right, one.bottom_right)


def _sequences(call: Any, band: Band) -> list[tuple[slice, slice, Tensor]]:
    found = []
    for n, (length, other) in enumerate(zip(call.seqused_q.tolist(), call.seqused_kv.tolist())):
        visible = torch.zeros(length, other, dtype=torch.bool)
        for row, (low, high) in enumerate(iter_rows(band, length, other)):
            visible[row, low:high] = True
        at, at_kv = int(call.starts_q[n]), int(call.starts_kv[n])
        found.append((slice(at, at + length), slice(at_kv, at_kv + other), visible))
    return found


def _attend(call: Any, rows: slice, keys: slice, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    group = call.q.shape[1] // call.k.shape[1]
    k, v = (x[keys].repeat_interleave(group, 1) for x in (call.k, call.v))
    scores = (torch.einsum("qhd,khd->hqk", call.q[rows], k) * call.scale).masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
    return scores, lse, torch.einsum("hqk,khd->qhd", weights, v)


class _StandIn:
    """Rows of a sequence without keys stay unwritten, as on cuDNN 9.19; rows that see no key get anything."""

    def __init__(self, _frontend: Any, _handle: Any, one: GraphSpec) -> None:
        self.spec, self.pinned = one, False

    def run(self, call: Any, tensors: list[Tensor], _handle: Any) -> None:
        assert [tuple(t.stride()[:2]) for t in tensors] == [(o.row, o.head)[: t.dim()] for t, o in zip(tensors, self._views())]
        (self._backward if self.spec.backward else self._forward)(call, tensors)

    def _views(self) -> list[Any]:
        # lse in place is [heads, tokens]: its first stride is the heads'.
        return [
            o._replace(row=o.head, head=o.row) if o.name == "stats" and self.spec.stats == adapter.LSE_IN_PLACE else o
            for o in adapter.operands(self.spec)
        ]

    def _forward(self, call: Any, tensors: list[Tensor]) -> None:
        for rows, keys, visible in _sequences(call, _bound_band(self.spec)):
            if visible.shape[1] == 0:
                continue
            scores, lse, out = _attend(call, rows, keys, visible)
            tensors[1][rows] = torch.where(visible.any(1)[:, None, None], out, torch.full_like(out, 7.0))
            if self.spec.stats == adapter.MAX_AND_SUM:
                highest = scores.amax(-1)
                tensors[2][rows], tensors[3][rows] = highest.t(), torch.exp(scores - highest[..., None]).sum(-1).t()
            elif self.spec.stats == adapter.LSE_IN_PLACE:
                tensors[2][:, rows] = lse
            else:
                tensors[2][rows] = lse.t()

    def _backward(self, call: Any, tensors: list[Tensor]) -> None:
        _, out, grad_out, stats, dq, _, _, dk, dv = tensors
        group = call.q.shape[1] // call.k.shape[1]
        for rows, keys, visible in _sequences(call, _bound_band(self.spec)):
            if 0 in visible.shape:
                continue
            k, v = (x[keys].repeat_interleave(group, 1) for x in (call.k, call.v))
            scores = torch.einsum("qhd,khd->hqk", call.q[rows], k) * call.scale
            # Unmasked on purpose: what a keyless row's statistics leave of it would show in dk and dv.
            weights = torch.exp(scores - stats[rows].t()[..., None]).masked_fill(~visible & visible.any(1)[:, None], 0)
            delta = (grad_out[rows] * out[rows]).sum(-1).t()[..., None]
            inner = weights * (torch.einsum("qhd,khd->hqk", grad_out[rows], v) - delta) * call.scale
            dq[rows] = torch.einsum("hqk,khd->qhd", inner, k)
            dk[keys] = torch.einsum("hqk,qhd->khd", inner, call.q[rows]).unflatten(1, (-1, group)).sum(2)
            dv[keys] = torch.einsum("hqk,qhd->khd", weights, grad_out[rows]).unflatten(1, (-1, group)).sum(2)


def _spread_stats(call: ForwardCall, first: Tensor, second: Tensor) -> None:
    """The kernel ``spread_stats``, in torch."""
    for rows, _, visible in _sequences(call, call.band):
        seen = visible.any(1)[:, None]
        value = torch.where(seen, first[rows], -math.inf)
        if call.max_logit is not None and len(value):
            torch.maximum(call.max_logit, value.amax(0), out=call.max_logit)
            value = torch.where(seen, value + torch.log(second[rows]), -math.inf)
        call.lse[:, rows] = value.t()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Cudnn:
    replace_cudnn(monkeypatch, _StandIn, _spread_stats, lambda lse: torch.where(lse == -math.inf, math.inf, lse).t().contiguous())
    return Cudnn()


def _batch(lens_q: list[int], lens_kv: list[int], mine: list[bool], gap: int = 2) -> dict[str, Any]:
    def starts(lens: list[int]) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(length + gap for length in lens)], dtype=torch.int32)

    def used(lens: list[int]) -> Tensor:
        return torch.tensor([[length if own else 0 for length, own in zip(lens, mine)]], dtype=torch.int32)

    starts_q, starts_kv = starts(lens_q), starts(lens_kv)
    torch.manual_seed(0)
    total_q, total_kv = int(starts_q[-1]), int(starts_kv[-1])
    packed = torch.randn(total_kv, 3, 2, 8)
    return {
        "q": torch.randn(total_q, 4, 8), "k": packed[:, 0], "v": packed[:, 1], "starts_q": starts_q, "lens_q": used(lens_q),
        "starts_kv": starts_kv, "lens_kv": used(lens_kv), "max_seqlen_q": max(lens_q), "max_seqlen_kv": max(lens_kv),
        "scale": 0.3, "plain_cu_seqlens": False, "deterministic": False, "single_launch_plan": [], "contiguous_run": False,
    }  # fmt: skip


@pytest.mark.parametrize("want_max", [False, True])
@pytest.mark.parametrize("band", BANDS, ids=Band.describe)
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_stand_in_against_dense(backend: Cudnn, band: Band, equal: bool, want_max: bool, plain: bool) -> None:
    lens_q, mine = [5, 4, 0, 3, 9, 1], [True, plain, True, True, True, True]
    batch = _batch(lens_q, lens_q if equal else [3, 6, 4, 0, 2, 7], mine, gap=0 if plain else 2)
    lens = {"q": batch["lens_q"][0].tolist(), "kv": batch["lens_kv"][0].tolist()}
    if plain:
        batch |= {"lens_q": torch.empty(0, dtype=torch.int32), "lens_kv": torch.empty(0, dtype=torch.int32), "plain_cu_seqlens": True}
    batch |= {"bands": (band,), "equal_lengths": equal}
    heads, total = 4, batch["q"].shape[0]
    poison = torch.full((total, heads, 8), math.nan)
    max_logit = torch.full((heads,), -math.inf) if want_max else None
    call = ForwardCall(
        **batch, is_training=True, first=False, max_logit=max_logit, _out=poison, _lse=torch.full((heads, total), math.nan)
    )
    backend.forward(call)
    grad_out = torch.randn(total, heads, 8)
    q, k, v = (batch[name].detach().clone().requires_grad_() for name in "qkv")
    dense = ForwardCall(**{**batch, "q": q, "k": k, "v": v}, is_training=True, first=False)
    inside, highest = torch.zeros(total, dtype=torch.bool), torch.full((heads,), -math.inf)
    loss = q.sum() * 0 + k.sum() * 0 + v.sum() * 0
    for rows, keys, visible in _sequences(call, band):
        inside[rows] = True
        seen = visible.any(1) if visible.shape[1] else torch.zeros(visible.shape[0], dtype=torch.bool)
        assert (call.out[rows][~seen] == 0).all() and (call.lse[:, rows][:, ~seen] == -math.inf).all()
        if not seen.any():
            continue
        kept = torch.arange(rows.start, rows.stop)[seen]
        scores, lse, out = _attend(dense, kept, keys, visible[seen])  # type: ignore[arg-type]
        torch.testing.assert_close(call.out[kept], out.detach())
        torch.testing.assert_close(call.lse[:, kept], lse.detach())
        highest = torch.maximum(highest, scores.detach().amax(dim=(1, 2)))
        loss = loss + (out * grad_out[kept]).sum()
    assert call.out[~inside].isnan().all() and call.lse[:, ~inside].isnan().all()
    if max_logit is not None:
        torch.testing.assert_close(max_logit, highest)
    loss.backward()
    grads = tuple(torch.full(batch[name].shape, math.nan) for name in "qkv")
    saved = torch.where(inside[:, None, None], call.out, 0)
    backend.backward(BackwardCall(**batch, grad_out=grad_out, out=saved, lse=call.lse, first=False, _grads=grads))
    for grad, leaf, side in zip(grads, (q, k, v), ("q", "kv", "kv")):
        mask = torch.zeros(leaf.shape[0], dtype=torch.bool)
        for start, length in zip(batch[f"starts_{side}"].tolist(), lens[side]):
            mask[start : start + length] = True
        torch.testing.assert_close(grad[mask], leaf.grad[mask])  # type: ignore[index]
        assert grad[~mask].isnan().all()


def test_totals_that_write_in_place_are_few(backend: Cudnn) -> None:
    def stats(total: int) -> int:
        batch = _batch([128, 128], [128, 128], [True, True], gap=total // 2 - 128)
        batch |= {"bands": (CAUSAL,), "equal_lengths": True}
        call = ForwardCall(**batch, is_training=False, first=True)
        graph = backend._forward_graph(call)
        backend.forward(call)
        assert call.lse[:, :128].isfinite().all()
        return graph.spec.stats

    assert [stats(total) for total in (1024, 1000, 2048, 3072, 1024, 3072)] == [
        adapter.LSE_IN_PLACE, adapter.LSE_TOKEN_MAJOR, adapter.LSE_IN_PLACE, adapter.LSE_TOKEN_MAJOR,
        adapter.LSE_IN_PLACE, adapter.LSE_TOKEN_MAJOR,
    ]  # fmt: skip
    assert len(backend._graphs) == 3


def test_capture_needs_a_graph_built_before(backend: Cudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(total: int) -> ForwardCall:
        batch = _batch([128], [128], [True], gap=total - 128)
        return ForwardCall(**batch, bands=(FULL,), equal_lengths=True, is_training=False, first=True)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"run one warm-up call .* before capturing"):
        backend.forward(call(1024))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    backend.forward(call(1000))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    graph = backend._forward_graph(call(1024))
    assert graph.spec.stats == adapter.LSE_TOKEN_MAJOR and graph.pinned
