"""The adapters of FlashAttention 2 and 3 without a GPU.

Their kernels are emulated as the sources read: what is clamped, which rows are visited, what is written, and NaN wherever
nothing is. So a wrong cu_seqlens entry, a wrong window or a row that nobody fills shows.
"""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from te_attn_ops import environment
from te_attn_ops.backends import _fa2, flash2, flash3, torch_flash
from te_attn_ops.backends.base import Backend, BackwardCall, Call, ForwardCall
from te_attn_ops.masks import Band, visible_interval
from te_attn_ops.params import AttentionParams
from te_attn_ops.rows import fill_outside_backward, fill_outside_forward

NAN, INF = float("nan"), float("inf")
FULL, CAUSAL = Band(None, None, True), Band(None, 0, True)


# ------------------------------------------------------------------------------------------------------- emulated kernels
def _scores(q: Tensor, k: Tensor, scale: float, left: int, right: int) -> Tensor:
    """[H, L_q, L_k], -inf where masked: bottom-right, -1 unbounded."""
    len_q, len_k = q.shape[0], k.shape[0]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    row, key = torch.arange(len_q)[:, None] + len_k - len_q, torch.arange(len_k)[None, :]
    hidden = torch.zeros(len_q, len_k, dtype=torch.bool)
    if left >= 0:
        hidden |= key < row - left
    if right >= 0:
        hidden |= key > row + right
    return scores.masked_fill(hidden, -INF)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int, keyless: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, scale, left, right)
    lse = torch.logsumexp(scores, -1) if k.shape[0] else torch.full(scores.shape[:2], -INF)
    probs = torch.exp(scores - lse.masked_fill(lse == -INF, 0.0)[..., None])
    out = torch.einsum("hqk,khd->qhd", probs, v.repeat_interleave(q.shape[1] // v.shape[1], 1))
    return out, lse.masked_fill(lse == -INF, keyless)


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, left: int, right: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dk and dv per query head. A stored -inf counts as 0, as in scale_apply_exp2."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    probs = torch.exp(_scores(q, k, scale, left, right) - lse.masked_fill(lse == -INF, 0.0)[..., None])
    delta = (grad * out).sum(-1).T
    d_scores = probs * (torch.einsum("qhd,khd->hqk", grad, v) - delta[..., None])
    dq = torch.einsum("hqk,khd->qhd", d_scores, k) * scale
    dk = torch.einsum("hqk,qhd->khd", d_scores, q) * scale
    return dq, dk, torch.einsum("hqk,qhd->khd", probs, grad)


def _fa2_window(causal: bool, left: int, right: int, max_k: int) -> tuple[int, int]:
    """flash_api.cpp: mha_varlen_fwd and set_params_fprop."""
    right = 0 if causal else right
    left, right = (-1 if side >= max_k else side for side in (left, right))
    if left < 0 and right == 0:
        return left, right
    return (max_k if left < 0 <= right else left), (max_k if right < 0 <= left else right)


class Fa2Emulator:
    """varlen_fwd and varlen_bwd of flash-attn 2 in terms of tensors; ``calls`` holds what was passed beyond them."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **args: Any
    ) -> Tensor:
        self.calls.append({"max_q": max_q, "max_k": max_k, "entries": cu_q.numel() - 1, **args})
        assert max_q > 1 and max_k > 0 and cu_q.shape == cu_k.shape and cu_q.is_contiguous() and cu_k.is_contiguous()
        assert cu_q.dtype == cu_k.dtype == torch.int32 and q.shape[2] == v.shape[2]
        lse = torch.full((q.shape[1], q.shape[0]), NAN)
        left, right = _fa2_window(args["causal"], args["left"], args["right"], max_k)
        edges_q, edges_k = cu_q.tolist(), cu_k.tolist()
        for b, e, s, t in zip(edges_q, edges_q[1:], edges_k, edges_k[1:]):
            assert e >= b and t >= s
            if e == b:
                continue
            visited = slice(b, min(e, b + max_q))
            part, part_lse = _attend(q[b:e], k[s:t], v[s:t], args["scale"], left, right, INF)
            out[visited], lse[:, visited] = part[: visited.stop - b], part_lse[:, : visited.stop - b]
        return lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        grads: tuple[Tensor, Tensor, Tensor],
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        **args: Any,
    ) -> None:
        self.calls.append({"max_q": max_q, "max_k": max_k, "entries": cu_q.numel() - 1, **args})
        assert max_q > 1 and max_k > 0 and grad.stride(-1) == 1
        dq, dk, dv = grads
        gqa = q.shape[1] != k.shape[1]
        wide_k, wide_v = (torch.full((x.shape[0], q.shape[1], x.shape[2]), NAN) if gqa else g for x, g in ((k, dk), (v, dv)))
        left, right = _fa2_window(args["causal"], args["left"], args["right"], max_k)
        edges_q, edges_k = cu_q.tolist(), cu_k.tolist()
        for b, e, s, t in zip(edges_q, edges_q[1:], edges_k, edges_k[1:]):
            rows_q, rows_k = slice(b, min(e, b + max_q)), slice(s, min(t, s + max_k))
            gq, gk, gv = _attend_backward(grad[b:e], q[b:e], k[s:t], v[s:t], out[b:e], lse[:, b:e], args["scale"], left, right)
            dq[rows_q], wide_k[rows_k], wide_v[rows_k] = (
                gq[: rows_q.stop - b],
                gk[: rows_k.stop - s],
                gv[: rows_k.stop - s],
            )
        if gqa:  # at::sum_out over every row, whoever's it is
            shape = (k.shape[0], k.shape[1], q.shape[1] // k.shape[1], -1)
            dk.copy_(wide_k.view(shape).sum(2))
            dv.copy_(wide_v.view(shape).sum(2))


class FakeFlash2:
    """The module flash_attn_2_cuda, with varlen_fwd of 20, 21 or 22 arguments."""

    def __init__(self, arguments: int = 21, padded_return: bool = False) -> None:
        self.emulator = Fa2Emulator()
        self.recorded: list[tuple[Any, ...]] = []
        fake = self

        def varlen_fwd(*args: Any) -> list[Any]:
            assert len(args) == arguments
            fake.recorded.append(args)
            q, k, v, out, cu_q, cu_k, *rest = args
            rest = rest[2 if arguments == 20 else 3 :]
            (alibi, max_q, max_k, dropout, scale, zero, causal, left, right, softcap, softmax, generator), tail = (
                rest[:12],
                rest[12:],
            )
            assert alibi is None and generator is None and not zero and not softmax and dropout == softcap == 0.0
            assert tail == ([0] if arguments == 22 else [])
            lse = fake.emulator.forward(
                q, k, v, out, cu_q, cu_k, max_q, max_k, scale=scale, causal=causal, left=left, right=right
            )
            empty = torch.empty(0)
            return [out, q, k, v, out, lse, empty, empty] if padded_return else [out, lse, empty, empty]

        def varlen_bwd(*args: Any) -> list[Any]:
            assert len(args) == 24
            fake.recorded.append(args)
            grad, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, alibi, max_q, max_k, dropout, scale, zero, *rest = args
            causal, left, right, softcap, deterministic, generator, rng_state = rest
            assert alibi is None and generator is None and rng_state is None and not zero and dropout == softcap == 0.0
            window = {"scale": scale, "causal": causal, "left": left, "right": right, "deterministic": deterministic}
            fake.emulator.backward(grad, q, k, v, out, lse, (dq, dk, dv), cu_q, cu_k, max_q, max_k, **window)
            return [dq, dk, dv, torch.empty(0)]

        varlen_fwd.__doc__ = f"varlen_fwd({', '.join(f'arg{i}: torch.Tensor' for i in range(arguments))}) -> list"
        varlen_bwd.__doc__ = f"varlen_bwd({', '.join(f'arg{i}: torch.Tensor' for i in range(24))}) -> list"
        self.varlen_fwd, self.varlen_bwd = varlen_fwd, varlen_bwd


@pytest.fixture
def fake_flash2(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFlash2]:
    yield from _install_flash2(monkeypatch, FakeFlash2())


def _install_flash2(monkeypatch: pytest.MonkeyPatch, fake: Any) -> Iterator[Any]:
    flash2._forward_extras.cache_clear()
    monkeypatch.setattr(flash2, "_library", lambda: fake)
    yield fake
    flash2._forward_extras.cache_clear()


class FakeAten:
    """torch.ops.aten with the two flash ops emulated: fresh NaN tensors, strided like the inputs."""

    def __init__(self) -> None:
        self.emulator = Fa2Emulator()
        self._flash_attention_forward = types.SimpleNamespace(default=self._forward)
        self._flash_attention_backward = types.SimpleNamespace(default=self._backward)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *args: Any, **kw: Any
    ) -> Any:
        dropout, causal, debug = args
        assert dropout == 0.0 and debug is False
        out = torch.full_like(q, NAN)
        window = {"left": kw["window_size_left"], "right": kw["window_size_right"]}
        lse = self.emulator.forward(q, k, v, out, cu_q, cu_k, max_q, max_k, scale=kw["scale"], causal=causal, **window)
        return out, lse, torch.empty(2), torch.empty(0), torch.empty(0)

    def _backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        *args: Any,
        **kw: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = (torch.full_like(q, NAN), torch.full_like(k, NAN), torch.full_like(v, NAN))
        window = {"causal": args[1], "left": kw["window_size_left"], "right": kw["window_size_right"]}
        self.emulator.backward(grad, q, k, v, out, lse, grads, cu_q, cu_k, max_q, max_k, scale=kw["scale"], **window)
        return grads


@pytest.fixture
def fake_aten(monkeypatch: pytest.MonkeyPatch) -> FakeAten:
    fake = FakeAten()
    monkeypatch.setattr(torch_flash.torch.ops, "aten", fake)
    return fake


# FlashAttention 3's schemas (hopper/flash_api_stable.cpp, TORCH_LIBRARY): names, order and defaults.
FA3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None, "
    "Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, Tensor? k_descale = None, "
    "Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, "
    "Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
FA3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "float softcap = 0.0, bool deterministic = False, int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class Fa3Emulator:
    """The two ops, registered under their real schemas in a namespace of their own."""

    def __init__(self, namespace: str) -> None:
        self.library = torch.library.Library(namespace, "DEF")
        self.calls: list[tuple[Any, ...]] = []
        for schema in (FA3_FORWARD, FA3_BACKWARD):
            self.library.define(schema)
        self.library.impl("fwd", self._forward, "CPU")
        self.library.impl("bwd", self._backward, "CPU")
        self.ops = getattr(torch.ops, namespace)

    @staticmethod
    def _spans(cu: Tensor, used: Tensor | None) -> Iterator[tuple[int, int]]:
        edges = cu.tolist()
        lens = used.tolist() if used is not None else [b - a for a, b in itertools.pairwise(edges)]
        return ((a, a + n) for a, n in zip(edges, lens))

    @staticmethod
    def _all(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The dispatcher drops trailing arguments that equal their defaults."""
        return (*args, *[argument.default_value for argument in op.default._schema.arguments[len(args) :]])

    def _forward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        args = self._all(self.ops.fwd, args)
        self.calls.append(args)
        q, k, v, out, cu_q, cu_k, used_q, used_k = (*args[:3], args[6], *args[7:9], *args[10:12])
        max_q, max_k, scale, causal, left, right = (*args[12:14], *args[23:27])
        assert args[27] == 0 and args[28] == 0.0 and args[31] == 1 and args[33] == 0
        left, right = (-1 if left >= max_k - 1 else left), (-1 if right >= max_q - 1 else right)
        right = 0 if causal else right
        lse = torch.full((q.shape[1], q.shape[0]), NAN)
        for (b, e), (s, t) in zip(self._spans(cu_q, used_q), self._spans(cu_k, used_k)):
            assert e - b <= max_q and t - s <= max_k
            if e > b:
                out[b:e], lse[:, b:e] = _attend(q[b:e], k[s:t], v[s:t], scale, left, right, -INF)
        return out, lse, torch.empty(0), torch.empty(0)

    def _backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        args = self._all(self.ops.bwd, args)
        self.calls.append(args)
        grad, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, used_q, used_k = args[:13]
        max_q, max_k, scale, causal, left, right = args[13:19]
        left, right = (-1 if left >= max_k - 1 else left), (-1 if right >= max_q - 1 else right)
        right = 0 if causal else right
        for (b, e), (s, t) in zip(self._spans(cu_q, used_q), self._spans(cu_k, used_k)):
            gq, gk, gv = _attend_backward(grad[b:e], q[b:e], k[s:t], v[s:t], out[b:e], lse[:, b:e], scale, left, right)
            dq[b:e] = gq
            dk[s:t], dv[s:t] = (g.view(t - s, k.shape[1], q.shape[1] // k.shape[1], g.shape[2]).sum(2) for g in (gk, gv))
        return tuple(torch.empty(0) for _ in range(5))  # type: ignore[return-value]


_FA3 = Fa3Emulator("te_attn_ops_test_fa3")


@pytest.fixture
def fake_fa3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fa3Emulator]:
    flash3._forward_op.cache_clear()
    flash3._backward_op.cache_clear()
    _FA3.calls.clear()
    monkeypatch.setattr(flash3, "_load", lambda: _FA3.ops)
    yield _FA3
    flash3._forward_op.cache_clear()
    flash3._backward_op.cache_clear()


# ----------------------------------------------------------------------------------------------------------------- a batch
class Batch:
    """A packed batch with policies, its reference results and a runner that does what the op does around a backend.

    lens: (query, key) tokens per sequence. members: the policy of each sequence, or -1 for none. slack: rows between a
    sequence's end and the next start. A tail of two rows follows.
    """

    def __init__(
        self,
        lens: list[tuple[int, int]],
        members: list[int],
        bands: list[Band],
        *,
        slack: int = 0,
        heads: tuple[int, int] = (2, 2),
    ) -> None:
        torch.manual_seed(len(lens) * 17 + slack)
        self.lens, self.members, self.bands, self.slack = lens, members, bands, slack
        self.starts = [np.cumsum([0] + [n[side] + slack for n in lens]).tolist() for side in (0, 1)]
        rows_q, rows_k = (starts[-1] + 2 for starts in self.starts)
        self.q, self.k = torch.randn(rows_q, heads[0], 4), torch.randn(rows_k, heads[1], 4)
        self.v, self.grad = torch.randn(rows_k, heads[1], 4), torch.randn(rows_q, heads[0], 4)
        for side, tensors in ((0, (self.q, self.grad)), (1, (self.k, self.v))):
            inside = torch.zeros(tensors[0].shape[0], dtype=torch.bool)
            for start, n, member in zip(self.starts[side], lens, members):
                inside[start : start + n[side]] = member >= 0
            for tensor in tensors:
                tensor[~inside] = 7.0
        self.scale = 0.7

    def reference(self) -> dict[str, Tensor]:
        leaves = [x.double().requires_grad_() for x in (self.q, self.k, self.v)]
        q, k, v = leaves
        group = q.shape[1] // k.shape[1]
        out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), -INF, dtype=torch.float64)
        pieces = []
        for n, ((len_q, len_k), member) in enumerate(zip(self.lens, self.members)):
            if member < 0:
                continue
            a, b = self.starts[0][n], self.starts[1][n]
            for i in range(len_q):
                lo, hi = visible_interval(self.bands[member], i, len_q, len_k)
                if hi <= lo:
                    continue
                keys = k[b + lo : b + hi].repeat_interleave(group, 1)
                scores = torch.einsum("hd,khd->hk", q[a + i], keys) * self.scale
                row = torch.einsum("hk,khd->hd", scores.softmax(-1), v[b + lo : b + hi].repeat_interleave(group, 1))
                pieces.append((a + i, row, scores.logsumexp(-1)))
        total = q.sum() * 0 + k.sum() * 0 + v.sum() * 0
        for i, row, row_lse in pieces:
            out[i], lse[:, i] = row.detach(), row_lse.detach()
            total = total + (row * self.grad[i]).sum()
        dq, dk, dv = torch.autograd.grad(total, leaves)
        return {"out": out.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    def _geometry(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sides = []
        for side in (0, 1):
            sides.append(torch.tensor(self.starts[side], dtype=torch.int32))
            own = [[n[side] * (member == p) for n, member in zip(self.lens, self.members)] for p in range(len(self.bands))]
            sides.append(torch.tensor(own, dtype=torch.int32))
        return tuple(sides)  # type: ignore[return-value]

    def run(
        self, backend: Backend, *, first: bool | None = None, has_gaps: bool | None = None, runs: bool = False, **flags: Any
    ) -> dict[str, Tensor]:
        """Each policy's launch into one set of buffers, poisoned by NaN, then the rows of no sequence. ``runs``: the host knows them."""
        starts_q, lens_q, starts_kv, lens_kv = self._geometry()
        first = len(self.bands) == 1 if first is None else first
        buffers = [torch.full_like(x, NAN) for x in (self.q, self.q, self.k, self.v)]
        out, lse, grads = buffers[0], torch.full((self.q.shape[1], self.q.shape[0]), NAN), tuple(buffers[1:])

        def common(p: int) -> dict[str, Any]:
            call = {
                "q": self.q,
                "k": self.k,
                "v": self.v,
                "starts_q": starts_q,
                "lens_q": lens_q[p : p + 1],
                "starts_kv": starts_kv,
                "lens_kv": lens_kv[p : p + 1],
                "bands": (self.bands[p],),
                "max_seqlen_q": max(n[0] for n in self.lens),
                "max_seqlen_kv": max(n[1] for n in self.lens),
                "scale": self.scale,
                "plain_cu_seqlens": len(self.bands) == 1 and self.slack == 0 and min(self.members) >= 0,
                "equal_lengths": all(a == b for a, b in self.lens),
                "deterministic": False,
                "single_launch_plan": [],
                "contiguous_run": False,
                "first": first,
                "run": (self.members.index(p), self.members.count(p)) if runs else None,
            }
            return {**call, **flags}

        for p in range(len(self.bands)):
            forward = ForwardCall(**common(p), is_training=True, _out=out, _lse=lse)
            _tell_gaps(forward, has_gaps)
            backend.forward(forward)
            out, lse = forward.out, forward.lse
        fill_outside_forward(out, lse, starts_q, lens_q)
        for p in range(len(self.bands)):
            backward = BackwardCall(**common(p), grad_out=self.grad, out=out, lse=lse, _grads=grads)
            _tell_gaps(backward, has_gaps)
            backend.backward(backward)
            grads = backward.grads
        fill_outside_backward(*grads, starts_q, lens_q, starts_kv, lens_kv)
        return {"out": out, "lse": lse, "dq": grads[0], "dk": grads[1], "dv": grads[2]}

    def check(self, backend: Backend, **options: Any) -> dict[str, Tensor]:
        got, want = self.run(backend, **options), self.reference()
        for name, tensor in got.items():
            assert tensor.is_contiguous(), name
            torch.testing.assert_close(tensor.double(), want[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        return got


def _tell_gaps(call: Call, has_gaps: bool | None) -> None:
    if has_gaps is not None:
        call.has_gaps = has_gaps  # type: ignore[attr-defined]


CASES: dict[str, Callable[[], Batch]] = {
    "plain causal": lambda: Batch([(5, 5), (3, 3), (0, 0), (4, 4)], [0, 0, 0, 0], [CAUSAL]),
    "plain, keyless rows and sequences": lambda: Batch([(3, 0), (2, 4), (0, 3), (7, 2)], [0, 0, 0, 0], [CAUSAL]),
    "case 20": lambda: Batch([(0, 0), (1, 3), (0, 0), (1, 5)], [0, 0, 0, 0], [CAUSAL], heads=(6, 2)),
    "case 22": lambda: Batch([(3, 0), (2, 4)], [0, 0], [FULL]),
    "case 23": lambda: Batch([(2, 5), (5, 2)], [0, 0], [CAUSAL]),
    "two policies": lambda: Batch([(4, 4), (3, 5), (5, 5), (2, 1)], [0, 1, 0, 1], [CAUSAL, FULL]),
    "four policies": lambda: Batch(
        [(6, 6), (5, 5), (6, 4), (4, 7), (0, 2), (3, 3)], [0, 1, 2, 3, 2, 0], [CAUSAL, FULL, Band(1, 2), Band(2, None)]
    ),
    "two policies, gqa": lambda: Batch([(4, 4), (3, 3), (5, 2)], [0, 1, 0], [CAUSAL, FULL], heads=(4, 2)),
    "gaps, one policy": lambda: Batch([(4, 4), (3, 5), (1, 1)], [0, 0, 0], [CAUSAL], slack=3),
    "gaps, one policy, gqa": lambda: Batch([(4, 4), (3, 5), (1, 1)], [0, 0, 0], [Band(1, 0)], slack=3, heads=(4, 1)),
    "gaps longer than any sequence": lambda: Batch([(2, 2), (1, 2), (2, 1)], [0, 1, 0], [CAUSAL, FULL], slack=9),
    "a sequence of no policy": lambda: Batch([(4, 4), (3, 3), (5, 5)], [0, -1, 1], [CAUSAL, FULL]),
    "one policy and a sequence of none": lambda: Batch([(4, 4), (3, 3), (2, 5)], [0, -1, 0], [CAUSAL], heads=(4, 2)),
    "a policy without sequences": lambda: Batch([(4, 4), (3, 3)], [0, 0], [CAUSAL, FULL]),
    "right window, more queries than keys": lambda: Batch([(9, 3), (8, 2)], [0, 0], [Band(None, 4)]),
    "left window, more queries than keys": lambda: Batch([(9, 3), (8, 2)], [0, 0], [Band(1, None)]),
    "both sides, more queries than keys": lambda: Batch([(9, 3), (2, 2), (8, 4)], [0, 1, 0], [Band(1, 5), Band(0, 0)]),
}


@pytest.mark.parametrize("case", CASES)
def test_flash2_against_the_reference(case: str, fake_flash2: FakeFlash2) -> None:
    CASES[case]().check(flash2.Flash2())


@pytest.mark.parametrize("case", CASES)
def test_torch_flash_against_the_reference(case: str, fake_aten: FakeAten) -> None:
    CASES[case]().check(torch_flash.TorchFlash())


@pytest.mark.parametrize("case", CASES)
def test_flash3_against_the_reference(case: str, fake_fa3: Fa3Emulator) -> None:
    CASES[case]().check(flash3.Flash3())


def _runs(heads: tuple[int, int] = (2, 2)) -> Batch:
    return Batch([(4, 4), (2, 3), (0, 0), (5, 5), (3, 1)], [0, 0, 1, 1, 2], [CAUSAL, FULL, Band(1, 1)], heads=heads)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("flags", [{"contiguous_run": True, "has_gaps": False}, {}], ids=["run", "entries"])
def test_contiguous_runs(heads: tuple[int, int], flags: dict[str, Any], fake_flash2: FakeFlash2, fake_aten: FakeAten) -> None:
    batch = _runs(heads)
    for backend, emulator in ((flash2.Flash2(), fake_flash2.emulator), (torch_flash.TorchFlash(), fake_aten.emulator)):
        batch.check(backend, **flags)
        assert {call["entries"] for call in emulator.calls} == {5 if flags else 15}


@pytest.mark.parametrize("has_gaps", [None, True])
def test_a_run_that_may_have_gaps_takes_entries(has_gaps: bool | None, fake_flash2: FakeFlash2) -> None:
    batch = Batch([(4, 4), (2, 3), (5, 5)], [0, 0, 1], [CAUSAL, FULL], slack=2)
    batch.check(flash2.Flash2(), contiguous_run=True, has_gaps=has_gaps)
    assert {call["entries"] for call in fake_flash2.emulator.calls} == {9}


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("has_gaps", [False, True])
def test_a_run_known_to_the_host_is_a_slice(
    heads: tuple[int, int], has_gaps: bool, fake_flash2: FakeFlash2, fake_aten: FakeAten
) -> None:
    """As many entries as the policy has sequences; with gaps, where neighbours do not touch, it says nothing."""
    batch = _runs(heads)
    for backend, emulator in ((flash2.Flash2(), fake_flash2.emulator), (torch_flash.TorchFlash(), fake_aten.emulator)):
        batch.check(backend, contiguous_run=True, runs=True, has_gaps=has_gaps)
        assert [call["entries"] for call in emulator.calls] == ([15] * 6 if has_gaps else [2, 2, 1] * 2)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=["mha", "gqa"])
def test_without_gaps_two_entries_a_sequence_do(heads: tuple[int, int], fake_flash2: FakeFlash2) -> None:
    batch = Batch([(4, 4), (3, 0), (0, 5), (5, 2), (2, 6)], [0, 1, 0, 1, -1], [CAUSAL, FULL], heads=heads)
    batch.check(flash2.Flash2(), has_gaps=False)
    assert {call["entries"] for call in fake_flash2.emulator.calls} == {10}


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=["mha", "gqa"])
def test_plain_but_shared_touches_own_rows_only(heads: tuple[int, int], fake_flash2: FakeFlash2, fake_aten: FakeAten) -> None:
    """The dispatch "grouped": plain (clamped) cu_seqlens into buffers that other policies share."""
    batch = Batch([(4, 4), (3, 2)], [0, 0], [CAUSAL], heads=heads)
    inside = torch.arange(batch.q.shape[0]) < batch.starts[0][-1]
    for backend in (flash2.Flash2(), torch_flash.TorchFlash()):
        batch.check(backend, first=False)
        marked = batch.run(backend, first=False)
        assert torch.equal(marked["out"][~inside], torch.zeros_like(marked["out"][~inside]))


def test_flash2_writes_straight_into_the_buffers(fake_flash2: FakeFlash2) -> None:
    _runs().check(flash2.Flash2(), contiguous_run=True, has_gaps=False)
    outs = {args[3].data_ptr() for args in fake_flash2.recorded if len(args) == 21}
    dks = {args[7].data_ptr() for args in fake_flash2.recorded if len(args) == 24}
    assert len(outs) == len(dks) == 1  # one buffer for all three policies


def test_flash2_gqa_gradients_of_a_shared_buffer_go_through_a_copy(fake_flash2: FakeFlash2) -> None:
    batch = _runs((4, 2))
    got = batch.run(flash2.Flash2(), contiguous_run=True, has_gaps=False)
    assert all(args[7].data_ptr() != got["dk"].data_ptr() for args in fake_flash2.recorded if len(args) == 24)


def test_transposed_inputs_give_contiguous_results(fake_aten: FakeAten) -> None:
    batch = CASES["plain causal"]()
    for name in ("q", "k", "v"):
        dense = getattr(batch, name)
        setattr(batch, name, dense.transpose(0, 1).contiguous().transpose(0, 1))
    assert not batch.q.is_contiguous()
    batch.check(torch_flash.TorchFlash())


def test_nan_beside_a_sequence_stays_there(fake_flash2: FakeFlash2, fake_fa3: Fa3Emulator) -> None:
    for case in ("two policies, gqa", "gaps, one policy", "four policies"):
        batch = CASES[case]()
        clean = batch.run(flash2.Flash2())
        n = 0
        a, b = batch.starts[0][n], batch.starts[1][n]
        batch.v[b : b + batch.lens[n][1]] = NAN
        dirty = batch.run(flash2.Flash2())
        after_q, after_k = batch.starts[0][n + 1], batch.starts[1][n + 1]
        for name, after in (("out", after_q), ("dq", after_q), ("dk", after_k), ("dv", after_k)):
            assert torch.equal(clean[name][after:], dirty[name][after:]), name
        assert dirty["out"][a : a + 1].isnan().any()


# ------------------------------------------------------------------------------------------------------------------ entries
def _random_geometry(seed: int, gaps: bool, run: bool = False) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    num_seqs = int(rng.integers(1, 9))
    member = rng.random(num_seqs) < 0.5
    if run:
        edges = np.sort(rng.integers(0, num_seqs + 1, 2))
        member = (np.arange(num_seqs) >= edges[0]) & (np.arange(num_seqs) < edges[1])
    arrays = []
    for _ in range(2):
        slots = rng.integers(0, 6, num_seqs)
        lens = np.where(member, slots - (rng.integers(0, 6, num_seqs).clip(max=slots) if gaps else 0), 0)
        first = int(rng.integers(0, 3))
        arrays += [np.concatenate([[first], first + np.cumsum(slots)]), lens]
    return (*arrays, member)


def _tensors(arrays: tuple[np.ndarray, ...]) -> list[Tensor]:
    return [torch.tensor(array, dtype=torch.int32) for array in arrays[:4]]


def _numpy_gap_entries(starts_q: np.ndarray, lens_q: np.ndarray, starts_kv: np.ndarray, lens_kv: np.ndarray, gaps: bool) -> Any:
    cu_q, cu_kv = [starts_q[0]], [starts_kv[0]]
    for n in range(len(lens_q)):
        if gaps:
            lengths = [(lens_q[n], lens_kv[n])]
            lengths += [(starts_q[n + 1] - starts_q[n] - lens_q[n], 0), (0, starts_kv[n + 1] - starts_kv[n] - lens_kv[n])]
        else:
            lengths = [(starts_q[n + 1] - starts_q[n], lens_kv[n]), (0, starts_kv[n + 1] - starts_kv[n] - lens_kv[n])]
        for length_q, length_kv in lengths:
            cu_q.append(cu_q[-1] + length_q)
            cu_kv.append(cu_kv[-1] + length_kv)
    return np.array(cu_q), np.array(cu_kv)


@pytest.mark.parametrize("gaps", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_gap_entries(seed: int, gaps: bool) -> None:
    arrays = _random_geometry(seed, gaps)
    got = _fa2.gap_entries(*_tensors(arrays), gaps)
    for tensor, want in zip(got, _numpy_gap_entries(*arrays[:4], gaps)):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
        np.testing.assert_array_equal(tensor.numpy(), want)
    # Every entry with both sides is one member, whole; every row lies in exactly one entry.
    starts_q, lens_q, starts_kv, lens_kv = (array.tolist() for array in arrays[:4])
    spans = [list(zip(cu.tolist(), cu.tolist()[1:])) for cu in got]
    both = [(q, kv) for q, kv in zip(*spans) if q[0] < q[1] and kv[0] < kv[1]]
    want = [((a, a + n), (b, b + m)) for a, n, b, m in zip(starts_q, lens_q, starts_kv, lens_kv) if n > 0 and m > 0]
    assert both == want
    assert got[0][-1] == starts_q[-1] and got[1][-1] == starts_kv[-1]


@pytest.mark.parametrize("seed", range(20))
def test_run_entries(seed: int) -> None:
    *arrays, member = _random_geometry(seed, gaps=False, run=True)
    got = _fa2.run_entries(*_tensors(tuple(arrays)))
    for cu, starts, lens in ((got[0], *arrays[:2]), (got[1], *arrays[2:])):
        assert cu.dtype == torch.int32 and cu.is_contiguous()
        np.testing.assert_array_equal(np.diff(cu.numpy()), np.where(member, np.diff(starts), 0))
        begin = cu.numpy()[:-1]
        np.testing.assert_array_equal(begin[lens > 0], starts[:-1][lens > 0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(8))
def test_entry_kernels_equal_their_torch_twins(seed: int) -> None:
    for gaps in (True, False):
        arrays = _tensors(_random_geometry(seed, gaps))
        got = _fa2.gap_entries(*(array.cuda() for array in arrays), gaps)
        assert all(torch.equal(g.cpu(), w) for g, w in zip(got, _fa2.gap_entries(*arrays, gaps)))
    arrays = _tensors(_random_geometry(seed, gaps=False, run=True))
    got = _fa2.run_entries(*(array.cuda() for array in arrays))
    assert all(torch.equal(g.cpu(), w) for g, w in zip(got, _fa2.run_entries(*arrays)))


# ------------------------------------------------------------------------------------------------------------------ windows
def _seen(left: int, right: int, len_q: int, len_k: int) -> list[list[bool]]:
    off = len_k - len_q
    return [
        [(left < 0 or j >= i + off - left) and (right < 0 or j <= i + off + right) for j in range(len_k)] for i in range(len_q)
    ]


@pytest.mark.parametrize("bounds", [(1, 1), (2, 5), (5, 2), (4, 4), (6, 7), (7, 3)])
def test_windows_are_exact_under_the_clamps(bounds: tuple[int, int]) -> None:
    """All windows on all lengths up to the bounds: what FlashAttention 2 makes of the passed values is the band itself."""
    max_q, max_kv = bounds
    sides: list[int | None] = [None, *range(9)]
    for band in (Band(left, right, True) for left in sides for right in sides):
        left, right = _fa2.kernel_window(band, max_q, max_kv)
        max_k = _fa2.max_seqlen_kv_to_pass(left, right, max_q, max_kv)
        effective = _fa2_window(left < 0 and right == 0, left, right, max_k)
        # FlashAttention 3: hopper/flash_api.cpp.
        third = (-1 if left >= max_kv - 1 else left, -1 if right >= max_q - 1 else right)
        for len_q in range(1, max_q + 1):
            for len_k in range(1, max_kv + 1):
                own = _seen(-1 if band.left is None else band.left, -1 if band.right is None else band.right, len_q, len_k)
                assert _seen(*effective, len_q, len_k) == own, (band, len_q, len_k)
                assert _seen(*third, len_q, len_k) == own, (band, len_q, len_k)


def test_max_seqlen_is_raised_only_where_it_must_be() -> None:
    assert _fa2.max_seqlen_kv_to_pass(-1, -1, 4096, 128) == 128
    assert _fa2.max_seqlen_kv_to_pass(-1, 0, 4096, 128) == 128
    assert _fa2.max_seqlen_kv_to_pass(64, 64, 4096, 4096) == 4096
    assert _fa2.max_seqlen_kv_to_pass(-1, 300, 4096, 128) == 301
    assert _fa2.max_seqlen_kv_to_pass(16, -1, 4096, 128) == 4095
    assert _fa2.max_seqlen_kv_to_pass(-1, -1, 4, 0) == 1


# ---------------------------------------------------------------------------------------------------------- argument lists
@pytest.mark.parametrize("arguments", [20, 21, 22])
@pytest.mark.parametrize("padded_return", [False, True])
def test_flash2_argument_lists(arguments: int, padded_return: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFlash2(arguments, padded_return)
    for _ in _install_flash2(monkeypatch, fake):
        CASES["two policies"]().check(flash2.Flash2())
        assert [len(args) for args in fake.recorded] == [arguments] * 2 + [24] * 2


@pytest.mark.parametrize("arguments", [19, 23])
def test_flash2_unknown_argument_lists_are_named(arguments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in _install_flash2(monkeypatch, FakeFlash2(arguments)):
        with pytest.raises(RuntimeError, match=f"takes {arguments} arguments"):
            CASES["plain causal"]().run(flash2.Flash2())


def test_flash2_passes_deterministic(fake_flash2: FakeFlash2) -> None:
    batch = CASES["plain causal"]()
    batch.run(flash2.Flash2(), deterministic=True)
    assert [call["deterministic"] for call in fake_flash2.emulator.calls if "deterministic" in call] == [True]


@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(3, 0)], ids=Band.describe)
def test_torch_flash_arguments_bind_to_the_real_ops(band: Band) -> None:
    """Meta tensors go through the installed torch's own schema and shape functions."""
    p = AttentionParams(dtype=torch.float16, head_dim_qk=32, head_dim_v=32)
    forward, backward = _fa2.probe_calls(p, band, gqa=False, device=torch.device("meta"))
    launch = _fa2.make_launch(forward)
    backend = torch_flash.TorchFlash()
    out, lse = backend.launch_forward(forward, launch, None)
    assert out.shape == forward.q.shape and lse.shape == (1, forward.q.shape[0]) and lse.dtype == torch.float32
    backward.lse = lse
    grads = backend.launch_backward(backward, launch, None)
    assert [grad.shape for grad in grads] == [x.shape for x in (forward.q, forward.k, forward.v)]


def test_fa3_arguments_bind_and_keep_their_meaning(fake_fa3: Fa3Emulator) -> None:
    p = AttentionParams(dtype=torch.float32, head_dim_qk=64, head_dim_v=32, deterministic=True)
    forward, backward = _fa2.probe_calls(p, Band(2, 0), gqa=True, device=torch.device("cpu"))
    forward.scale = backward.scale = 0.25
    forward.plain_cu_seqlens = backward.plain_cu_seqlens = False
    backend = flash3.Flash3()
    backend.forward(forward)
    backward.out, backward.lse = forward.out, forward.lse
    backend.backward(backward)
    ours = [
        dict(zip([argument.name for argument in op.default._schema.arguments], args))
        for op, args in zip((fake_fa3.ops.fwd, fake_fa3.ops.bwd), fake_fa3.calls)
    ]
    for got in ours:
        assert got["cu_seqlens_q"].tolist() == got["cu_seqlens_k"].tolist() == [0, 8]
        assert got["seqused_q"].tolist() == got["seqused_k"].tolist() == [8]
        assert (got["max_seqlen_q"], got["max_seqlen_k"], got["softmax_scale"]) == (8, 8, 0.25)
        assert (got["is_causal"], got["window_size_left"], got["window_size_right"]) == (False, 2, 0)
        assert (got["softcap"], got["sm_margin"]) == (0.0, 0)
    assert ours[0]["num_splits"] == 1 and ours[0]["pack_gqa"] is None and ours[0]["attention_chunk"] == 0
    assert ours[0]["out"].data_ptr() == forward.out.data_ptr()
    assert ours[1]["deterministic"] is True
    assert [ours[1][name].data_ptr() for name in ("dq", "dk", "dv")] == [grad.data_ptr() for grad in backward.grads]


def test_fa3_plain_cu_seqlens_need_no_seqused(fake_fa3: Fa3Emulator) -> None:
    CASES["plain causal"]().run(flash3.Flash3())
    assert all(args[10] is None and args[11] is None for args in fake_fa3.calls if len(args) == 34)
    assert all(args[11] is None and args[12] is None for args in fake_fa3.calls if len(args) == 22)


def test_fa3_builds_with_other_schemas() -> None:
    """Optional arguments without defaults, fewer or more of them: bound by name. What cannot be bound is named."""
    library = torch.library.Library("te_attn_ops_test_fa3_other", "DEF")
    required, defaults = FA3_FORWARD.split("bool is_causal")
    library.define(required.replace(" = None", "").replace("Tensor? seqlens_rotary, ", "") + "bool is_causal" + defaults)
    library.define(FA3_FORWARD.replace("fwd(", "without_out(").replace("Tensor(out!)? out = None, ", "").replace("(out!)", ""))
    library.define(FA3_FORWARD.replace("fwd(Tensor q,", "novel(Tensor novelty, Tensor q,"))
    ops = torch.ops.te_attn_ops_test_fa3_other
    seen: list[tuple[Any, ...]] = []

    def record(*args: Any) -> tuple[Tensor, ...]:
        seen.append(args)
        return args[6], torch.empty(0), torch.empty(0), torch.empty(0)

    library.impl("fwd", record, "CPU")
    values = dict.fromkeys(flash3.FORWARD_ARGUMENTS) | {name: torch.ones(1) for name in ("q", "k", "v", "out")}
    values |= {"is_causal": True, "window_size_left": 5, "window_size_right": -1, "num_splits": 1}
    flash3.BoundOp(ops.fwd.default, flash3.FORWARD_ARGUMENTS)(values)
    assert seen[0][23] is True and seen[0][24] == 5 and seen[0][30] == 1
    with pytest.raises(RuntimeError, match="has no argument out"):
        flash3.BoundOp(ops.without_out.default, flash3.FORWARD_ARGUMENTS)
    with pytest.raises(RuntimeError, match="needs an argument novelty"):
        flash3.BoundOp(ops.novel.default, flash3.FORWARD_ARGUMENTS)


# ----------------------------------------------------------------------------------------------------------------- refusals
@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """All three present, nothing to probe."""
    monkeypatch.setattr(torch_flash.TorchFlash, "version", lambda self: "2.11.0")
    monkeypatch.setattr(flash2.Flash2, "version", lambda self: "2.8.3.post2")
    monkeypatch.setattr(flash3.Flash3, "version", lambda self: "3.0.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(flash3, "build_flags", dict)
    return monkeypatch


def _reasons(backend: Backend, **changes: Any) -> list[str]:
    return list(backend.refusals(AttentionParams().replace(**changes)))


def _widths(d: int, dv: int | None = None) -> dict[str, int]:
    return {"head_dim_qk": d, "head_dim_v": d if dv is None else dv}


TOP_LEFT = {"bands": (Band(None, 0, False),), "equal_lengths": False}
FA2_TABLE: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    *[({"sm": sm, **_widths(256)}, None) for sm in (80, 86, 89, 90, 103, 120)],
    ({"dtype": torch.float16, "num_gqa_groups": 4, **_widths(8)}, None),
    ({"bands": (Band(128, 0, True), Band(5, 7, True)), "equal_lengths": False}, None),
    ({"bands": (Band(None, 0, False),), "equal_lengths": True}, None),
    ({"bands": (Band(None, None, False),), "equal_lengths": False}, None),
    (TOP_LEFT, "bottom-right only"),
    ({"sm": 75}, "sm80"),
    ({"device_type": "cpu"}, "CUDA"),
    ({"dtype": torch.float32}, "float32"),
    (_widths(100), "multiple of 8"),
    (_widths(264), "256"),
    (_widths(192, 128), "head_dim_v equal"),
    ({"num_gqa_groups": 3}, "num_gqa_groups"),
    ({"return_max_logit": True}, "max_logit"),
]


@pytest.mark.parametrize("backend", [torch_flash.TorchFlash(), flash2.Flash2()], ids=lambda b: b.name)
@pytest.mark.parametrize("changes, expected", FA2_TABLE)
def test_fa2_refusals(backend: Backend, changes: dict[str, Any], expected: str | None, installed: Any) -> None:
    reasons = _reasons(backend, **changes)
    assert reasons == [] if expected is None else any(expected in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    "version, refused", [("2.5.9", True), ("2.6.3", False), ("2.8.3.post2", False), ("3.0.0", True), (None, True)]
)
def test_flash2_versions(version: str | None, refused: bool, installed: pytest.MonkeyPatch) -> None:
    installed.setattr(flash2.Flash2, "version", lambda self: version)
    reasons = _reasons(flash2.Flash2())
    assert bool(reasons) is refused, reasons


def test_torch_flash_is_refused_where_another_kernel_is_active(installed: pytest.MonkeyPatch) -> None:
    installed.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    assert any("FA4" in reason for reason in _reasons(torch_flash.TorchFlash()))
    installed.delattr(torch.nn.attention, "current_flash_attention_impl")
    assert _reasons(torch_flash.TorchFlash()) == []


@pytest.mark.parametrize("mode, warn_only, refused", [(False, False, True), (True, True, True), (True, False, False)])
def test_torch_flash_is_deterministic_by_the_global_flag_only(
    mode: bool, warn_only: bool, refused: bool, installed: Any, fake_aten: FakeAten
) -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    batch = CASES["plain causal"]()
    try:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        params = {"deterministic": True, "deterministic_algorithms": environment.deterministic_algorithms()}
        assert bool(_reasons(torch_flash.TorchFlash(), **params)) is refused
        assert _reasons(torch_flash.TorchFlash(), deterministic=True, is_training=False) == []
        if refused:
            with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
                batch.run(torch_flash.TorchFlash(), deterministic=True)
        else:
            batch.check(torch_flash.TorchFlash(), deterministic=True)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


FA3_TABLE: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"bands": (Band(128, 0, True),), "equal_lengths": False, "num_gqa_groups": 4}, None),
    (_widths(192, 128), None),
    (_widths(136, 104), None),
    (_widths(64, 256), None),
    ({"is_training": False, **_widths(64, 512)}, None),
    ({**_widths(192, 128), "deterministic": True}, None),
    (_widths(256), None),
    ({**_widths(256), "deterministic": True, "is_training": False}, None),
    ({**_widths(256), "deterministic": True}, "deterministic"),
    ({**_widths(200), "deterministic": True}, "deterministic"),
    ({**_widths(64, 256), "deterministic": True}, "deterministic"),
    (_widths(64, 512), "backward needs"),
    (_widths(128, 64), "head_dim_qk != head_dim_v"),
    (_widths(192, 96), "head_dim_qk != head_dim_v"),
    (_widths(264), "<= 256"),
    (_widths(100), "multiple of 8"),
    ({"sm": 80}, "sm90 only"),
    ({"sm": 100}, "sm90 only"),
    ({"device_type": "cpu"}, "CUDA"),
    ({"dtype": torch.float32}, "float32"),
    ({"return_max_logit": True}, "max_logit"),
    (TOP_LEFT, "bottom-right only"),
]


@pytest.mark.parametrize("changes, expected", FA3_TABLE)
def test_fa3_refusals(changes: dict[str, Any], expected: str | None, installed: Any) -> None:
    reasons = _reasons(flash3.Flash3(), **changes)
    assert reasons == [] if expected is None else any(expected in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    "disabled, changes, expected",
    [
        ({"BACKWARD"}, {}, "backward"),
        ({"BACKWARD"}, {"is_training": False}, None),
        ({"VARLEN"}, {}, "packed"),
        ({"LOCAL"}, {}, None),
        ({"LOCAL"}, {"bands": (CAUSAL, Band(5, 0, True))}, "windows"),
        ({"FP16"}, {}, None),
        ({"FP16"}, {"dtype": torch.float16}, "float16"),
        ({"HDIM128"}, {}, None),  # served by the next wider kernel
        ({"HDIM128", "HDIM192", "HDIM256"}, {}, "no kernel"),
        ({"HDIM192"}, {**_widths(192), "deterministic": True}, "deterministic"),
        ({"HDIMDIFF192"}, _widths(192, 128), "HDIMDIFF192"),
        ({"HDIMDIFF192"}, _widths(192), None),
        ({"HDIMDIFF64"}, _widths(64, 128), "HDIMDIFF64"),
    ],
)
def test_fa3_builds_that_lack_something(
    disabled: set[str], changes: dict[str, Any], expected: str | None, installed: pytest.MonkeyPatch
) -> None:
    installed.setattr(flash3, "build_flags", lambda: {f"FLASHATTENTION_DISABLE_{flag}": True for flag in disabled})
    reasons = _reasons(flash3.Flash3(), **changes)
    assert reasons == [] if expected is None else any(expected in reason for reason in reasons), reasons


def test_not_installed_is_a_reason_of_its_own() -> None:
    for backend in (flash2.Flash2(), flash3.Flash3()):
        if backend.version() is None:
            assert any("not installed" in reason for reason in _reasons(backend))


def test_fa3_build_flags_are_read_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dict(flash3.build_flags()) == {}
    config = types.SimpleNamespace(CONFIG={"build_flags": {"FLASHATTENTION_DISABLE_FP16": True}})
    monkeypatch.setitem(__import__("sys").modules, "flash_attn_config", config)
    assert flash3.build_flags()["FLASHATTENTION_DISABLE_FP16"] is True


# -------------------------------------------------------------------------------------------------------------------- probe
@pytest.fixture
def pretend_cuda(installed: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with an sm90 device, whose tensors are on the CPU."""
    _fa2.forget_probes()
    installed.setattr(torch.cuda, "is_available", lambda: True)
    installed.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    installed.setattr(torch.cuda, "current_device", lambda: 0)
    installed.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(synchronize=lambda: None))
    installed.setattr(_fa2, "compute_capability", lambda index: 90)
    installed.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    calls = _fa2.probe_calls
    installed.setattr(_fa2, "probe_calls", lambda p, band, gqa, device: calls(p, band, gqa, torch.device("cpu")))
    yield installed
    _fa2.forget_probes()


class Partial(FakeFlash2):
    """A build with the kernels of head dimension 128 only."""

    def __init__(self) -> None:
        super().__init__()
        self.trials = 0
        varlen_fwd = self.varlen_fwd

        def partial(*args: Any) -> Any:
            self.trials += 1
            if args[0].shape[2] != 128:
                raise RuntimeError("no such kernel\nand a long trace")
            args = tuple(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
            return varlen_fwd(*args)

        partial.__doc__ = varlen_fwd.__doc__
        self.varlen_fwd = partial


def test_a_build_without_the_kernel_is_refused_after_one_trial(pretend_cuda: pytest.MonkeyPatch) -> None:
    fake = Partial()
    for _ in _install_flash2(pretend_cuda, fake):
        backend = flash2.Flash2()
        same: dict[str, Any] = {"dtype": torch.float16, "is_training": False}
        assert _reasons(backend, **same) == []
        assert _reasons(backend, **same, max_seqlen_q=77) == []
        assert fake.trials == 1
        (reason,) = _reasons(backend, **same, **_widths(64))
        assert "no such kernel" in reason and "long trace" not in reason and "width 64" in reason
        assert _reasons(backend, **same, **_widths(64)) == [reason] and fake.trials == 2
        assert _reasons(backend, **same, bands=(CAUSAL, FULL, Band(3, 0), Band(9, 9))) == []
        assert fake.trials == 4  # full and a window; causal was tried


@pytest.mark.parametrize("situation", ["capture", "another architecture", "no device"])
def test_no_trial_where_none_can_be(situation: str, pretend_cuda: pytest.MonkeyPatch) -> None:
    fake = Partial()
    if situation == "capture":
        pretend_cuda.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    elif situation == "another architecture":
        pretend_cuda.setattr(_fa2, "compute_capability", lambda index: 80)
    else:
        pretend_cuda.setattr(torch.cuda, "is_available", lambda: False)
    for _ in _install_flash2(pretend_cuda, fake):
        assert _reasons(flash2.Flash2(), **_widths(64)) == [] and fake.trials == 0


def test_out_of_memory_says_nothing_about_a_build(pretend_cuda: pytest.MonkeyPatch) -> None:
    fake = Partial()

    def full(*args: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("full")

    full.__doc__ = fake.varlen_fwd.__doc__
    fake.varlen_fwd = full
    for _ in _install_flash2(pretend_cuda, fake):
        assert _reasons(flash2.Flash2()) == [] and not _fa2._PROBED


def test_a_broken_flash3_is_refused(pretend_cuda: pytest.MonkeyPatch) -> None:
    flash3._forward_op.cache_clear()
    (reason,) = _reasons(flash3.Flash3())
    assert "no module registers" in reason


def test_the_reference_itself() -> None:
    """Case 23 in closed form, so that the oracle of this file stands on its own."""
    batch = Batch([(2, 5), (5, 2)], [0, 0], [CAUSAL], heads=(1, 1))
    batch.q.zero_()
    batch.v[:] = torch.arange(1.0, batch.v.shape[0] + 1)[:, None, None]
    want = batch.reference()
    assert want["out"][:7, 0, 0].tolist() == pytest.approx([2.5, 3, 0, 0, 0, 6, 6.5])
    assert want["lse"][0, :2].tolist() == pytest.approx([math.log(4), math.log(5)])
    assert want["lse"][0, 2:5].tolist() == [-INF] * 3
