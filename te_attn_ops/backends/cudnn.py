"""cuDNN's fused attention on packed tensors, through graphs of its Python frontend (``nvidia-cudnn-frontend``).

A subset needs no gather: the graph's ragged offsets are the token starts times the row stride, its sequence lengths the
subset's (0 for sequences of other policies), and it writes only rows within those lengths. cuDNN 9.19 was seen to do so on
sm90, backward and grouped heads included.

Built graphs are cached by shape class. Building takes 40 to 1100 ms, so nothing that varies from batch to batch is part of a
class: the number of sequences and max_seqlen are brought up to a bucket's bound (entries of length 0 fill it), and the number
of tokens enters only

* forward, where it is a multiple of 1024 (a static capacity): cuDNN then writes ``lse`` [heads, tokens] in place. Otherwise
  it writes token-major statistics, whose strides know no total, and a small kernel spreads them over ``lse``;
* backward, in steps of at most an eighth: it bounds the workspace. Its statistics are always a token-major copy.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import logging
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..environment import compute_capability, on_forget, package_version, version_tuple
from ..masks import Band
from ..params import AttentionParams, round_up, seqlen_bucket
from ..rows import band_sides, fill_keyless_rows, fill_unseen_grads
from .base import Backend, BackwardCall, Call, ForwardCall, common_fused_refusals, release_frames

# Sequences per graph: powers of two and the middle between them. Idle entries cost an early exit per thread block.
BATCH_BUCKETS = tuple(sorted({1 << e for e in range(17)} | {3 << e for e in range(15)}))
MAX_GRAPHS = 256
IN_PLACE_MULTIPLE = 1024
# Totals of one shape class that get a graph of their own; a batch whose total keeps changing must not rebuild each step.
MAX_IN_PLACE_TOTALS = 2
MAX_DETERMINISTIC_BYTES = 8 << 30
MAX_OPERANDS = 9  # ragged tensors of a graph: a backward's
# cuDNN versions on which sm90 was seen to give right gradients for unequal widths of 128 or more, head_dim_qk up to 192: on an
# H200, 160/128, 128/192, 192/160, 192/256 and 128/256, with and without fewer key/value heads. 256/128 was seen to be wrong there
# (NaN in dk and dv). TransformerEngine refuses all of them from 9.11 on (read).
UNEQUAL_WIDTHS_TRAIN: frozenset[int] = frozenset({91900})
# Parts of the names of the frontend's own engines (written in a Python DSL). They are barred: what is known of zero lengths,
# gaps and statistics' layouts is known of the backend's engines.
FRONTEND_ENGINES = ["sdpa_fwd", "sdpa_bwd"]

# What a forward graph writes besides the output.
LSE_IN_PLACE, LSE_TOKEN_MAJOR, MAX_AND_SUM = 0, 1, 2


class GraphSpec(NamedTuple):
    """Everything that a graph is built from: the key of the cache. Sizes are buckets' bounds, strides and widths elements.

    ``strides``: of q, k, v and out, and in the backward grad_out: (row, head, 1). ``left`` and ``right`` are cuDNN's bounds:
    its left one counts the diagonal itself. ``pitch``: the number of tokens, where ``stats`` is LSE_IN_PLACE.
    """

    backward: bool
    device: int
    dtype: torch.dtype
    batch: int
    heads: int
    heads_kv: int
    width_qk: int
    width_v: int
    seqlen_q: int
    seqlen_kv: int
    strides: tuple[tuple[int, ...], ...]
    left: int | None
    right: int | None
    bottom_right: bool
    scale: float
    stats: int
    pitch: int
    total_q: int
    total_kv: int
    deterministic: bool
    wide: bool


class Operand(NamedTuple):
    """One tensor of a graph, in the order in which pointers are handed over: those over q's rows first."""

    name: str
    over_kv: bool
    heads: int
    width: int
    row: int
    head: int
    is_output: bool = False
    is_float32: bool = False


class MetadataLayout(NamedTuple):
    """Where the offsets and lengths of a graph stand in one int32 buffer; every row starts 16-byte aligned.

    ``rows`` rows of ragged offsets, the first ``rows_q`` over q, then the lengths of q and of kv; ``pitch`` entries each.
    """

    rows: int
    rows_q: int
    pitch: int
    wide: bool

    @property
    def words(self) -> int:
        """int32 words of the whole buffer."""
        return self.rows * self.pitch * (2 if self.wide else 1) + 2 * self.pitch

    @property
    def byte_offsets(self) -> list[int]:
        """Of the lengths of q, of kv, then of each row of offsets."""
        row = self.pitch * (8 if self.wide else 4)
        lens = self.rows * row
        return [lens, lens + self.pitch * 4, *[index * row for index in range(self.rows)]]


# ------------------------------------------------------------------------------------------------------------------- buckets
def batch_bucket(value: int) -> int:
    at = bisect.bisect_left(BATCH_BUCKETS, value)
    return BATCH_BUCKETS[at] if at < len(BATCH_BUCKETS) else round_up(value, BATCH_BUCKETS[-1])


def total_bucket(value: int) -> int:
    """A bound of the number of tokens, at most an eighth above it and a multiple of 64."""
    return round_up(value, max(64, 1 << max(0, value.bit_length() - 4)))


def band_bounds(band: Band, equal_lengths: bool, seqlen_q: int, seqlen_kv: int) -> tuple[int | None, int | None, bool]:
    """cuDNN's left bound (window + 1), right bound, and whether the diagonal ends bottom-right.

    A side that reaches beyond every sequence is unbounded. Where the alignment makes no difference it is top-left, which cuDNN
    restricts least.
    """
    reach = max(seqlen_q, seqlen_kv)
    left = None if band.left is None or band.left >= reach else band.left + 1
    right = None if band.right is None or band.right >= reach else band.right
    bounded = left is not None or right is not None
    return left, right, band.bottom_right and bounded and not equal_lengths


@functools.lru_cache(maxsize=4096)
def call_class(
    num_seqs: int, max_seqlen_q: int, max_seqlen_kv: int, band: Band, equal_lengths: bool
) -> tuple[int, int, int, int | None, int | None, bool]:
    """The buckets' bounds of a call's sizes, and its :func:`band_bounds`."""
    seqlen_q, seqlen_kv = seqlen_bucket(max_seqlen_q), seqlen_bucket(max_seqlen_kv)
    return batch_bucket(num_seqs), seqlen_q, seqlen_kv, *band_bounds(band, equal_lengths, seqlen_q, seqlen_kv)


def needs_wide_offsets(total_q: int, total_kv: int, rows_q: list[int], rows_kv: list[int]) -> bool:
    """Whether an offset may pass 2^31 elements, given the row strides over each side."""
    return total_q * max(rows_q) >= 1 << 31 or total_kv * max(rows_kv) >= 1 << 31


def forward_spec(call: ForwardCall, in_place: bool = False) -> GraphSpec:
    """The spec of a call: for its number of tokens alone where cuDNN is to write lse in place, else for any number."""
    q = call.q
    total_q, heads, width_qk = q.shape
    total_kv, heads_kv, width_v = call.v.shape
    strides = (q.stride(), call.k.stride(), call.v.stride(), (heads * width_v, width_v, 1))
    batch, seqlen_q, seqlen_kv, left, right, bottom_right = call_class(
        call.num_seqs, call.max_seqlen_q, call.max_seqlen_kv, call.band, call.equal_lengths
    )
    stats = LSE_IN_PLACE if in_place else LSE_TOKEN_MAJOR if call.max_logit is None else MAX_AND_SUM
    return GraphSpec(
        False, q.device.index, q.dtype, batch, heads, heads_kv, width_qk, width_v, seqlen_q, seqlen_kv, strides,
        left, right, bottom_right, call.scale, stats, total_q if in_place else 0, 0, 0, False,
        needs_wide_offsets(total_q, total_kv, [strides[0][0], strides[3][0]], [strides[1][0], strides[2][0]]),
    )  # fmt: skip


def backward_spec(call: BackwardCall) -> GraphSpec:
    q = call.q
    total_q, heads, width_qk = q.shape
    total_kv, heads_kv, width_v = call.v.shape
    strides = (q.stride(), call.k.stride(), call.v.stride(), call.out.stride(), call.grad_out.stride())
    num_seqs = call.num_seqs
    batch, seqlen_q, seqlen_kv, left, right, bottom_right = call_class(
        num_seqs, call.max_seqlen_q, call.max_seqlen_kv, call.band, call.equal_lengths
    )
    # The deterministic workspace holds scores of every entry, so there an idle one costs memory.
    batch = num_seqs if call.deterministic else batch
    rows_q = [strides[0][0], strides[3][0], strides[4][0], heads * width_qk]
    rows_kv = [strides[1][0], strides[2][0], heads_kv * max(width_qk, width_v)]
    return GraphSpec(
        True, q.device.index, q.dtype, batch, heads, heads_kv, width_qk, width_v, seqlen_q, seqlen_kv, strides,
        left, right, bottom_right, call.scale, LSE_TOKEN_MAJOR, 0, total_bucket(total_q), total_bucket(total_kv),
        call.deterministic, needs_wide_offsets(total_q, total_kv, rows_q, rows_kv),
    )  # fmt: skip


def operands(spec: GraphSpec) -> list[Operand]:
    """The tensors of a graph; each has a ragged offset of its own, in units of its row stride."""
    strides = spec.strides
    qk, dv, heads, heads_kv = spec.width_qk, spec.width_v, spec.heads, spec.heads_kv
    q = Operand("q", False, heads, qk, strides[0][0], strides[0][1])
    k = Operand("k", True, heads_kv, qk, strides[1][0], strides[1][1])
    v = Operand("v", True, heads_kv, dv, strides[2][0], strides[2][1])
    out = Operand("out", False, heads, dv, strides[3][0], strides[3][1], not spec.backward)
    if spec.backward:
        grad_out = Operand("grad_out", False, heads, dv, strides[4][0], strides[4][1])
        stats = Operand("stats", False, heads, 1, heads, 1, False, True)
        grad_q = Operand("dq", False, heads, qk, heads * qk, qk, True)
        grad_k = Operand("dk", True, heads_kv, qk, heads_kv * qk, qk, True)
        grad_v = Operand("dv", True, heads_kv, dv, heads_kv * dv, dv, True)
        return [q, out, grad_out, stats, grad_q, k, v, grad_k, grad_v]
    if spec.stats == MAX_AND_SUM:
        names = ["score_max", "score_sum_exp"]
        return [q, out, *[Operand(name, False, heads, 1, heads, 1, True, True) for name in names], k, v]
    row, head = (1, spec.pitch) if spec.stats == LSE_IN_PLACE else (heads, 1)
    return [q, out, Operand("stats", False, heads, 1, row, head, True, True), k, v]


def metadata_layout(spec: GraphSpec) -> MetadataLayout:
    tensors = operands(spec)
    rows_q = sum(not operand.over_kv for operand in tensors)
    return MetadataLayout(len(tensors), rows_q, round_up(spec.batch + 1, 4), spec.wide)


# ------------------------------------------------------------------------------------------------------------------- refusals
def cudnn_version() -> int:
    """Of the library that torch loads: 91900 for 9.19.0; 0 where there is none."""
    return torch.backends.cudnn.version() or 0


def version_text(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def static_refusals(p: AttentionParams, version: int) -> Iterator[str]:
    """What is known without asking the library. "read": from TransformerEngine's ``get_attention_backend`` (2026-08) or the
    frontend's C++ headers (1.32); "seen": run on an H200 with cuDNN 9.19 and frontend 1.32."""
    yield from common_fused_refusals(p, min_sm=90)  # packed tensors on sm80 to sm89: not in TransformerEngine (read)
    if p.device_type != "cuda":
        return
    # read: grouped heads, windows, bottom-right and max_total_seq_len on packed tensors came with 9.6, sm100 with 9.7.
    least = 91801 if p.sm >= 120 else 90700 if p.sm >= 100 else 90600
    if version < least:
        found = version_text(version) if version else "none"
        yield f"needs cuDNN {version_text(least)} or newer on sm{p.sm}, found {found}"
        return
    if version in (91000, 91001):  # read
        yield f"cuDNN 9.10.0 and 9.10.1 have known bugs in this attention, found {version_text(version)}"
    if p.return_max_logit and version < 91900:  # read: TransformerEngine from 9.21; seen: the two outputs on 9.19
        yield f"needs cuDNN 9.19.0 or newer for return_max_logit, found {version_text(version)}"
    yield from _head_dim_refusals(p, version)
    # Two policies may share a reason.
    yield from dict.fromkeys(reason for band in p.bands for reason in _band_refusals(p, band, version))
    if p.is_training and p.wide_offsets:
        # Seen on an H200 (cuDNN 9.19): dq is wrong there, with 64-bit offsets; the forward is right.
        yield "needs tensors of fewer than 2^31 elements for training, found larger ones"
    if p.is_training and p.deterministic:
        yield from _deterministic_refusals(p, version)


def _head_dim_refusals(p: AttentionParams, version: int) -> Iterator[str]:
    qk, v, text = p.head_dim_qk, p.head_dim_v, version_text(version)
    widths = f"found head_dim_qk {qk} and head_dim_v {v} on sm{p.sm} with cuDNN {text}"
    larger, is_192_128 = max(qk, v), (qk, v) == (192, 128)
    if 100 <= p.sm < 110 and larger > 128 and version < 90900:  # read
        yield f"needs head dims <= 128, or cuDNN 9.9.0 or newer, {widths}"
    if not p.is_training:
        return
    if p.sm < 100:
        seen_right = version in UNEQUAL_WIDTHS_TRAIN and qk <= 192
        if version >= 91100 and not seen_right and min(qk, v) >= 128 and qk != v and not is_192_128:
            yield f"needs equal head dims, one below 128, or 192 and 128 for training with cuDNN 9.11.0 or newer, {widths}"
        elif 91100 <= version < 91300 and 128 < qk <= 192 and 64 < v <= 128 and not is_192_128:  # read
            yield f"needs 192 and 128, or cuDNN 9.13.0 or newer, for training with widths in that class, {widths}"
    elif p.sm < 110:
        takes_256 = qk == v == 256 and version >= 92500
        if larger > 128 and not (is_192_128 and version >= 91100) and not takes_256:
            yield f"needs head dims <= 128, 192 and 128 (cuDNN 9.11.0) or 256 and 256 (9.25.0) for training, {widths}"  # read
        elif larger == 256 and any(band.right != 0 and not band.is_full for band in p.bands):
            yield f"needs a full or causal mask or a causal window for training with head dims of 256, found sm{p.sm}"  # read
    elif p.sm < 120:
        if larger > 128:
            yield f"needs head dims <= 128 for training, {widths}"  # read
    else:  # read: there the backward takes no packed statistics
        yield f"needs sm90 to sm119 for training with packed tensors, found sm{p.sm}"


def _band_refusals(p: AttentionParams, band: Band, version: int) -> Iterator[str]:
    """All read, except that 9.19 was seen right on windows and on more query than key tokens."""
    seqlen_q, seqlen_kv = seqlen_bucket(p.max_seqlen_q), seqlen_bucket(p.max_seqlen_kv)
    left, right, bottom_right = band_bounds(band, p.equal_lengths, seqlen_q, seqlen_kv)
    found = f"found {band.describe()} with max_seqlen {p.max_seqlen_q} and {p.max_seqlen_kv} on cuDNN {version_text(version)}"
    longer_q = p.max_seqlen_q > p.max_seqlen_kv and not p.equal_lengths
    is_window = left is not None or right not in (None, 0)
    if bottom_right and right is not None and longer_q and version < 90700:
        yield f"needs max_seqlen_q <= max_seqlen_kv, or cuDNN 9.7.0 or newer, for a bottom-right diagonal, {found}"
    if is_window and longer_q and version < 91900:
        yield f"needs max_seqlen_q <= max_seqlen_kv, or cuDNN 9.19.0 or newer, for a window, {found}"
    # Whatever the right side: one that reaches beyond a batch's longest sequence is unbounded there.
    if left is not None and right != 0 and version < 91002:
        yield f"needs a causal window, or cuDNN 9.10.2 or newer, {found}"
    # Known with equal max_seqlen alone, which a batch of fewer tokens makes of unequal ones.
    if left is not None and right == 0 and bottom_right and p.sm == 90 and version <= 90900:
        yield f"needs cuDNN 9.10.2 or newer for a bottom-right window on sm90, {found}"
    if left is not None and right != 0 and version == 91400 and p.max_seqlen_kv > 1024:
        yield f"cuDNN 9.14.0 has a known bug in windows that are not causal beyond 1024 keys, {found}"


def _deterministic_refusals(p: AttentionParams, version: int) -> Iterator[str]:
    if p.sm >= 100 and version < 91801:  # read
        yield f"needs cuDNN 9.18.1 or newer for a deterministic backward on sm{p.sm}, found {version_text(version)}"
    if p.sm < 100:
        # read: the workspace holds the scores' gradients in 16 bits; how many sequences there will be is not known here.
        needed = p.num_heads * seqlen_bucket(p.max_seqlen_q) * seqlen_bucket(p.max_seqlen_kv) * 2
        if needed > MAX_DETERMINISTIC_BYTES:
            yield (
                f"needs {needed / 2**30:.1f} GiB of workspace per sequence for a deterministic backward on sm{p.sm} "
                f"(num_heads * max_seqlen_q * max_seqlen_kv * 2 bytes), more than {MAX_DETERMINISTIC_BYTES >> 30} GiB"
            )


def probe_specs(p: AttentionParams, device: int) -> list[GraphSpec]:
    """The graphs to ask the library about: one forward and, in training, one backward per band, on contiguous tensors."""
    seqlen_q, seqlen_kv = seqlen_bucket(p.max_seqlen_q), seqlen_bucket(p.max_seqlen_kv)
    heads, heads_kv, qk, dv = p.num_heads, p.num_gqa_groups, p.head_dim_qk, p.head_dim_v
    strides = ((heads * qk, qk, 1), (heads_kv * qk, qk, 1), (heads_kv * dv, dv, 1), (heads * dv, dv, 1))
    specs = []
    for band in dict.fromkeys(p.bands):
        bounds = band_bounds(band, p.equal_lengths, seqlen_q, seqlen_kv)
        shape = (heads, heads_kv, qk, dv, seqlen_q, seqlen_kv)
        stats = MAX_AND_SUM if p.return_max_logit else LSE_TOKEN_MAJOR
        forward = GraphSpec(False, device, p.dtype, 2, *shape, strides, *bounds, 1.0, stats, 0, 0, 0, False, False)
        specs.append(forward)
        if p.is_training:
            backward = forward._replace(
                backward=True,
                strides=(*strides, strides[3]),
                stats=LSE_TOKEN_MAJOR,
                total_q=total_bucket(2 * seqlen_q),
                total_kv=total_bucket(2 * seqlen_kv),
                deterministic=p.deterministic,
            )
            specs.append(backward)
    return specs


# --------------------------------------------------------------------------------------------------------------------- graphs
def describe_graph(cudnn: Any, handle: Any, spec: GraphSpec) -> Any:
    """The frontend's graph of a spec, not yet built. Uids: 1.. for :func:`operands`, then the two lengths, then the offsets."""
    kinds = cudnn.data_type
    io = kinds.HALF if spec.dtype == torch.float16 else kinds.BFLOAT16
    graph = cudnn.pygraph(io_data_type=io, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=handle)
    tensors = operands(spec)
    count = len(tensors)
    flat = [1, 1, 1, 1]
    lens = [
        graph.tensor(name=name, dim=[spec.batch, 1, 1, 1], stride=flat, data_type=kinds.INT32, uid=count + 1 + index)
        for index, name in enumerate(("seq_len_q", "seq_len_kv"))
    ]
    offset_type = kinds.INT64 if spec.wide else kinds.INT32
    nodes: dict[str, Any] = {}
    layouts: dict[str, tuple[int, Any, list[int], list[int], Any]] = {}
    for index, operand in enumerate(tensors):
        seqlen = spec.seqlen_kv if operand.over_kv else spec.seqlen_q
        dim = [spec.batch, operand.heads, seqlen, operand.width]
        # The offsets say where a sequence starts; the batch stride is never followed.
        stride = [seqlen * max(operand.row, operand.heads * operand.width), operand.head, operand.row, 1]
        kind = kinds.FLOAT if operand.is_float32 else io
        offset = graph.tensor(
            name=f"{operand.name}_offset",
            dim=[spec.batch + 1, 1, 1, 1],
            stride=flat,
            data_type=offset_type,
            uid=count + 3 + index,
        )
        layouts[operand.name] = (index + 1, offset, dim, stride, kind)
        # The two score outputs are given to the node; other outputs come from it.
        if not operand.is_output or operand.name.startswith("score_"):
            node = graph.tensor(name=operand.name, dim=dim, stride=stride, data_type=kind, uid=index + 1)
            node.set_ragged_offset(offset)
            if operand.is_output:
                node.set_output(True)
            nodes[operand.name] = node
    for name, node in _attention_node(cudnn, graph, spec, nodes, lens).items():
        uid, offset, dim, stride, kind = layouts[name]
        node.set_uid(uid).set_output(True).set_dim(dim).set_stride(stride).set_data_type(kind)
        node.set_ragged_offset(offset)
    return graph


def _attention_node(cudnn: Any, graph: Any, spec: GraphSpec, nodes: dict[str, Any], lens: list[Any]) -> dict[str, Any]:
    """Adds the attention and returns the outputs that it made, by operand name."""
    alignment = cudnn.diagonal_alignment
    options: dict[str, Any] = {
        "attn_scale": spec.scale,
        "use_padding_mask": True,
        "seq_len_q": lens[0],
        "seq_len_kv": lens[1],
        "diagonal_alignment": alignment.BOTTOM_RIGHT if spec.bottom_right else alignment.TOP_LEFT,
    }
    if spec.left is not None:
        options["diagonal_band_left_bound"] = spec.left
    if spec.right is not None:
        options["diagonal_band_right_bound"] = spec.right
    q, k, v = nodes["q"], nodes["k"], nodes["v"]
    if spec.backward:
        grads = graph.sdpa_backward(
            q=q,
            k=k,
            v=v,
            o=nodes["out"],
            dO=nodes["grad_out"],
            stats=nodes["stats"],
            max_total_seq_len_q=spec.total_q,
            max_total_seq_len_kv=spec.total_kv,
            use_deterministic_algorithm=spec.deterministic,
            **options,
        )
        return dict(zip(("dq", "dk", "dv"), grads))
    if spec.stats == MAX_AND_SUM:
        # Not with Stats: the library takes one or the other. log-sum-exp = max + log(sum).
        scores = {name: nodes[name] for name in ("score_max", "score_sum_exp")}
        out, _ = graph.sdpa(q=q, k=k, v=v, generate_stats=False, **scores, **options)
        return {"out": out}
    out, stats = graph.sdpa(q=q, k=k, v=v, generate_stats=True, **options)
    return {"out": out, "stats": stats}


def plan_graph(cudnn: Any, graph: Any) -> None:
    """Everything short of building.

    Raises:
        cudnn.cudnnGraphNotSupportedError: no engine takes it.
    """
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.deselect_engines(FRONTEND_ENGINES)
    # Frontends with engines of their own rank them together with the backend's.
    entries = getattr(graph, "backend_plan_entries", None)
    if entries is not None and not entries():
        raise cudnn.cudnnGraphNotSupportedError("the cuDNN backend offers no plan for this graph")
    graph.check_support()


def raw_execute(graph: Any, num_pointers: int) -> Callable[[int, int, int], None] | None:
    """The frontend's shortest way in: (address of the pointers in the order of their uids, workspace, cudnnHandle_t).

    It is private (seen in 1.32), so everything it relies on is looked at; None means to go through ``graph.execute``.
    """
    try:
        if graph.selected_engine is not None:
            return None
        lowered = graph._lowered_graph
        index = graph._plans[graph._plan_index].cpp_index
        run = lowered._execute_with_raw_ptrs
        lowered._prepare_variant_pack_template()
        if list(lowered._get_variant_pack_uids_sorted()) != list(range(1, num_pointers + 1)):
            return None
    except (AttributeError, IndexError, TypeError, RuntimeError):
        return None
    index = -1 if index is None else index

    def execute(address: int, workspace: int, handle: int) -> None:
        run(address, num_pointers, workspace, handle, index)

    return execute


class Handle:
    """A cuDNN handle of one device, and the stream it was last given. One for all threads: the lock is held for launching and
    building alone, which the interpreter would not let happen side by side either."""

    def __init__(self, cudnn: Any) -> None:
        self.handle = cudnn.create_handle()
        self.pointer: int = getattr(self.handle, "backend_handle", self.handle)
        self._set_stream = cudnn.set_stream
        self._stream: int | None = None
        self.lock = threading.RLock()

    def follow(self, device: int) -> None:
        """Onto torch's current stream."""
        stream = torch._C._cuda_getCurrentRawStream(device)
        if stream != self._stream:
            self._set_stream(handle=self.handle, stream=stream)
            self._stream = stream


class Graph:
    """A built graph with what a call of it needs. Shared between threads: nothing here changes, except ``pinned``."""

    def __init__(self, cudnn: Any, handle: Handle, spec: GraphSpec) -> None:
        self.spec = spec
        self.pinned = False
        self._graph = describe_graph(cudnn, handle.handle, spec)
        plan_graph(cudnn, self._graph)
        self._graph.build_plans()
        self._workspace_bytes: int = self._graph.get_workspace_size()
        layout = metadata_layout(spec)
        self._words, self._pitch = layout.words, layout.pitch
        self._byte_offsets = layout.byte_offsets
        self._device = torch.device("cuda", spec.device)
        # The row strides are arguments of the kernel, not a tensor: a graph may be built while an allocation belongs to the
        # pool of a CUDA graph (torch.compile's reduce-overhead runs its first step so), where nothing may stay.
        strides = [operand.row for operand in operands(spec)]
        self._multipliers = (*strides, *[0] * (MAX_OPERANDS - len(strides)))
        block = min(1024, max(32, 1 << (layout.pitch - 1).bit_length()))
        self._grid = (layout.rows + 2, -(-layout.pitch // block), 1)
        # By whether the call has lens.
        self._constexprs = [(layout.rows_q, layout.rows, layout.wide, plain, block) for plain in (True, False)]
        self._uids = range(1, len(strides) + len(self._byte_offsets) + 1)
        self._execute = raw_execute(self._graph, len(self._uids))

    def run(self, call: Call, tensors: list[Tensor], handle: Handle) -> None:
        """``tensors`` in the order of :func:`operands`."""
        from ..kernels.cudnn_offsets import metadata

        buffer = torch.empty(self._words, dtype=torch.int32, device=self._device)
        tables = (call.starts_q, call.starts_kv, call.lens_q, call.lens_kv, buffer)
        sizes = (call.num_seqs, self._pitch, *self._multipliers)
        metadata(self._grid, (*tables, *sizes), self._constexprs[call.has_lens], self._device)
        base = buffer.data_ptr()
        pointers = [tensor.data_ptr() for tensor in tensors]
        pointers += [base + offset for offset in self._byte_offsets]
        # From the caching allocator on every call: policies and layers share it in turn.
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=self._device)
        with handle.lock:
            handle.follow(self.spec.device)
            if self._execute is not None:
                packed = array("Q", pointers)
                self._execute(packed.buffer_info()[0], workspace.data_ptr(), handle.pointer)
            else:
                self._graph.execute(dict(zip(self._uids, pointers)), workspace.data_ptr(), handle=handle.handle)


class GraphCache:
    """The last :data:`MAX_GRAPHS` graphs used. One that a CUDA graph holds the kernels of is never dropped."""

    def __init__(self, capacity: int = MAX_GRAPHS) -> None:
        self._capacity = capacity
        self._graphs: OrderedDict[GraphSpec, Graph] = OrderedDict()

    def get(self, spec: GraphSpec) -> Graph | None:
        graph = self._graphs.get(spec)
        if graph is not None:
            with contextlib.suppress(KeyError):  # another thread may just have dropped it
                self._graphs.move_to_end(spec)
        return graph

    def put(self, spec: GraphSpec, graph: Graph) -> None:
        excess = max(0, len(self._graphs) + 1 - self._capacity)
        for old in [key for key, value in list(self._graphs.items()) if not value.pinned][:excess]:
            self._graphs.pop(old, None)
        self._graphs[spec] = graph

    def __len__(self) -> int:
        return len(self._graphs)


# -------------------------------------------------------------------------------------------------------------------- backend
class Cudnn(Backend):
    name = "cudnn"
    switches = ("NVTE_FUSED_ATTN",)
    reads_lens = False
    loads_whole_tiles = True  # not measured; the kernels load through TMA

    def __init__(self) -> None:
        self._graphs = GraphCache()
        self._in_place_totals: dict[GraphSpec, list[int]] = {}
        self._probed: dict[tuple[GraphSpec, int], str] = {}
        on_forget(self._probed.clear)
        self._lock = threading.RLock()
        self._handles: dict[int, Handle] = {}

    def version(self) -> str | None:
        frontend = package_version("nvidia-cudnn-frontend", module="cudnn")
        library = cudnn_version()
        return f"{frontend} (cuDNN {version_text(library)})" if frontend and library else frontend

    def refusals(self, p: AttentionParams) -> Iterator[str]:
        version = cudnn_version()
        reasons = list(static_refusals(p, version))
        frontend = package_version("nvidia-cudnn-frontend", module="cudnn")
        if () < version_tuple(frontend) < (1, 12):  # read: diagonal bands came with 1.11 and 1.12
            reasons.append(f"needs nvidia-cudnn-frontend 1.12 or newer, found {frontend}")
        if p.device_type == "cuda" and package_version("triton", module="triton") is None:
            reasons.append("needs Triton for the offsets of each call, found none")
        yield from reasons
        if not reasons and frontend is not None and torch.cuda.is_available():
            yield from self._library_refusals(p, version)

    def forward(self, call: ForwardCall) -> None:
        call.q, call.k, call.v = (_heads_together(x) for x in (call.q, call.k, call.v))
        graph = self._forward_graph(call)
        q, out, lse = call.q, call.out, call.lse
        stats = graph.spec.stats
        if stats == LSE_IN_PLACE:
            written = [lse]
        else:
            count = 2 if stats == MAX_AND_SUM else 1
            written = [torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) for _ in range(count)]
        graph.run(call, [q, out, *written, call.k, call.v], self._handle(graph.spec.device))
        if stats != LSE_IN_PLACE:
            _spread_stats(call, written[0], written[-1])
        # Seen: rows of a sequence without keys are not written.
        if not call.equal_lengths:
            fill_keyless_rows(call)

    def backward(self, call: BackwardCall) -> None:
        # Seen on an H200 (cuDNN 9.19): with q in another layout than dq, dq was wrong, or the kernel crashed.
        call.q, call.k, call.v = call.q.contiguous(), call.k.contiguous(), call.v.contiguous()
        call.out, call.grad_out = call.out.contiguous(), call.grad_out.contiguous()
        spec = backward_spec(call)
        graph = self._graphs.get(spec) or self._build(spec)
        stats = _token_major_stats(call.lse)
        dq, dk, dv = call.grads
        tensors = [call.q, call.out, call.grad_out, stats, dq, call.k, call.v, dk, dv]
        self._pin_if_capturing(graph)
        graph.run(call, tensors, self._handle(spec.device))
        if not call.equal_lengths:
            fill_unseen_grads(call)

    # ------------------------------------------------------------------------------------------------------------- its graphs
    def _forward_graph(self, call: ForwardCall) -> Graph:
        graph = None
        if call.q.shape[0] % IN_PLACE_MULTIPLE == 0 and call.max_logit is None:
            in_place = forward_spec(call, in_place=True)
            graph = self._graphs.get(in_place)
            if graph is None and self._may_write_in_place(in_place, forward_spec(call)):
                graph = self._build(in_place)
        if graph is None:
            spec = forward_spec(call)
            graph = self._graphs.get(spec) or self._build(spec)
        self._pin_if_capturing(graph)
        return graph

    def _may_write_in_place(self, in_place: GraphSpec, spec: GraphSpec) -> bool:
        """Whether this total of the class gets a graph of its own. Under capture, where none can be built, the graph for any
        total will do."""
        if torch.cuda.is_current_stream_capturing() and self._graphs.get(spec) is not None:
            return False
        with self._lock:
            if len(self._in_place_totals) > 4 * MAX_GRAPHS:
                self._in_place_totals.clear()
            totals = self._in_place_totals.setdefault(spec, [])
            if in_place.pitch not in totals and len(totals) < MAX_IN_PLACE_TOTALS:
                totals.append(in_place.pitch)
            return in_place.pitch in totals

    def _build(self, spec: GraphSpec) -> Graph:
        if torch.cuda.is_current_stream_capturing():
            which = "backward" if spec.backward else "forward"
            raise RuntimeError(
                f"the cudnn backend has no {which} graph for these shapes yet, and none can be built during CUDA graph "
                "capture: run one warm-up call with the same shapes and strides before capturing"
            )
        with self._lock:
            graph = self._graphs.get(spec)
            if graph is None:
                handle = self._handle(spec.device)
                with handle.lock:
                    graph = _apart(spec.device, lambda: Graph(_frontend(), handle, spec))
                self._graphs.put(spec, graph)
        return graph

    @staticmethod
    def _pin_if_capturing(graph: Graph) -> None:
        if not graph.pinned and torch.cuda.is_current_stream_capturing():
            graph.pinned = True

    def _handle(self, device: int) -> Handle:
        handle = self._handles.get(device)
        if handle is None:
            with self._lock:
                handle = self._handles.get(device)
                if handle is None:
                    with torch.cuda.device(device):
                        handle = self._handles[device] = Handle(_frontend())
        return handle

    # ------------------------------------------------------------------------------------------------------ asking the library
    def _library_refusals(self, p: AttentionParams, version: int) -> Iterator[str]:
        device = p.device_index if p.device_index >= 0 else torch.cuda.current_device()
        if compute_capability(device) != p.sm:  # asked about another machine
            return
        for spec in probe_specs(p, device):
            reason = self._probed.get((spec, version))
            if reason is None:
                if torch.cuda.is_current_stream_capturing():
                    continue
                reason = self._probed[spec, version] = self._probe(spec)
            if reason:
                yield reason

    def _probe(self, spec: GraphSpec) -> str:
        """Empty if the library takes the graph."""
        # What it would log is in the reason.
        logger = logging.getLogger("cudnn.pygraph")
        level = logger.level
        try:
            with self._lock:
                logger.setLevel(logging.ERROR)
                handle = self._handle(spec.device)
                with handle.lock:
                    return _apart(spec.device, lambda: _reason_to_decline(handle, spec))
        finally:
            logger.setLevel(level)


def _reason_to_decline(handle: Handle, spec: GraphSpec) -> str:
    cudnn = _frontend()
    try:
        plan_graph(cudnn, describe_graph(cudnn, handle.handle, spec))
    except Exception as error:  # whatever goes wrong here would go wrong in the call
        which = "backward" if spec.backward else "forward"
        kind = type(error).__name__
        verb = "declines" if kind == "cudnnGraphNotSupportedError" else f"fails on ({kind})"
        text = " ".join(str(error).split())  # may run to pages: each engine says why not
        return f"cuDNN {verb} the {which} graph: {text[:400]}"
    return ""


_T = TypeVar("_T")


def _apart(device: int, work: Callable[[], _T]) -> _T:
    """What ``work`` returns or raises, done in a thread of its own.

    The frontend keeps an exception in a local variable of the frame that caught it. Here the frames that such a cycle holds end
    with the thread's; see :func:`te_attn_ops.backends.base.release_frames` for what happens else. A collection would do
    too, but probes are many.
    """

    def run() -> _T:
        with torch.cuda.device(device):
            return work()

    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(run).result()
        except Exception:
            release_frames()  # the exception passes through the callers' frames
            raise


def _heads_together(x: Tensor) -> Tensor:
    """Token-major, rows at any distance: a graph of another layout would be for its number of tokens alone."""
    return x if x.stride(1) == x.shape[2] else x.contiguous()


@functools.cache
def _frontend() -> Any:
    import cudnn  # a name of its own: this module is te_attn_ops.backends.cudnn

    return cudnn


def _spread_stats(call: ForwardCall, first: Tensor, second: Tensor) -> None:
    """lse, and max_logit where wanted, from what a forward graph wrote token-major."""
    from ..kernels import cudnn_offsets as kernels

    rows, heads = first.shape
    band, lse, max_logit = call.band, call.lse, call.max_logit
    geometry = (call.starts_q, call.starts_kv, call.lens_q, call.lens_kv)
    tensors = (lse, lse if max_logit is None else max_logit, first, second, *geometry)
    block = kernels.block_heads(heads)
    row_blocks = -(-max(1, min(call.max_seqlen_q, rows)) // kernels.BLOCK_ROWS)
    grid = (call.num_seqs, row_blocks, -(-heads // block))
    constexprs = (max_logit is not None, band.bottom_right, not call.has_lens, kernels.BLOCK_ROWS, block)
    kernels.spread_stats(grid, (*tensors, rows, heads, *band_sides(band)), constexprs, first.device)


def _token_major_stats(lse: Tensor) -> Tensor:
    """[tokens, heads] from [heads, tokens], +inf for rows that see no key, so that exp(score - lse) is 0 there."""
    from ..kernels import cudnn_offsets as kernels

    heads, rows = lse.shape
    stats = torch.empty(rows, heads, dtype=torch.float32, device=lse.device)
    block = kernels.block_heads(heads)
    grid = (-(-rows // kernels.BLOCK_ROWS), -(-heads // block), 1)
    kernels.token_major_stats(grid, (stats, lse, rows, heads), (kernels.BLOCK_ROWS, block), lse.device)
    return stats
