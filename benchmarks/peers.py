"""Mixed batches without this package, as further rows of ``benchmarks.mixed``.

* ``varlen_attn``: ``torch.nn.attention.varlen.varlen_attn`` once per policy, on gathered rows.
* ``flash_attn_grouped``: ``flash_attn.flash_attn_varlen_func`` once per policy, on gathered rows.
* ``transformer_engine_auto``, ``transformer_engine_grouped``: TransformerEngine's ``DotProductAttention`` with
  ``thd_attention_policies``.

The first two gather each policy's rows with ``index_select``, call the library and put its result in place with
``index_copy_``; the rows' indices are made before. They take values of the queries' width alone, so narrower ones are
padded with zeros. Every peer's output is compared with the public function's before it is timed. A peer that is not there
has no rows; :func:`versions` says why.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from te_attn_ops import thd_attention
from te_attn_ops.environment import package_version
from te_attn_ops.masks import Band

DISPATCHES = ("varlen_attn", "flash_attn_grouped", "transformer_engine_auto", "transformer_engine_grouped")

# (q, k, v, cu_seqlens, max_seqlen, band) -> out; all sequences of one call are under one band.
OnePolicy = Callable[[Tensor, Tensor, Tensor, Tensor, int, Band], Tensor]
# (q, k, v) -> out, of a whole mixed batch.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Found(NamedTuple):
    """What an installed library offers: its version, and its entry or why that cannot be used."""

    version: str | None
    entry: Any = None
    refusal: str | None = None

    def note(self) -> str | None:
        """For ``versions`` of the results: None where the library is not installed."""
        return self.version if self.refusal is None or self.version is None else f"{self.version} (skipped: {self.refusal})"


def _find(version: str | None, module: str, name: str) -> Found:
    if version is None:
        return Found(None)
    try:
        return Found(version, getattr(importlib.import_module(module), name))
    except Exception as error:  # a build for another torch fails in ways of its own
        return Found(version, refusal=f"{module}.{name} cannot be imported: {type(error).__name__}")


# -------------------------------------------------------------------------------------------------------------------- libraries
@functools.cache
def find_varlen_attn() -> Found:
    return _find(torch.__version__, "torch.nn.attention.varlen", "varlen_attn")


@functools.cache
def find_flash_attn() -> Found:
    # FlashAttention 4 fills the namespace flash_attn too, so the compiled module tells version 2.
    return _find(package_version("flash-attn", module="flash_attn_2_cuda"), "flash_attn", "flash_attn_varlen_func")


@functools.cache
def find_transformer_engine() -> Found:
    version = package_version("transformer-engine", "transformer-engine-torch", module="transformer_engine")
    found = _find(version, "transformer_engine.pytorch", "DotProductAttention")
    if found.entry is not None and "thd_attention_policies" not in inspect.signature(found.entry.forward).parameters:
        return Found(version, refusal="DotProductAttention takes no thd_attention_policies")
    return found


def versions() -> dict[str, str | None]:
    finders = {"varlen_attn": find_varlen_attn, "flash_attn": find_flash_attn, "transformer_engine": find_transformer_engine}
    found = {name: find() for name, find in finders.items()}
    return {name: library.note() for name, library in found.items()}


# ------------------------------------------------------------------------------------------------------------------------ masks
def window_of(band: Band) -> tuple[int, int]:
    """A band as FlashAttention's window: (left, right) tokens, -1 for unbounded, diagonal at the bottom right.

    Raises:
        ValueError: the band's diagonal is at the top left.
    """
    if not (band.bottom_right or band.is_full):
        raise ValueError(f"band {band.describe()}: FlashAttention's windows are aligned bottom-right")
    return -1 if band.left is None else band.left, -1 if band.right is None else band.right


def flash_attn_mask(band: Band) -> dict[str, Any]:
    """The mask arguments of ``flash_attn_varlen_func``."""
    window = window_of(band)
    return {"causal": True} if band.is_causal else {"causal": False, "window_size": window}


def varlen_attn_mask(band: Band, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The mask arguments of ``varlen_attn`` with these parameters: torch 2.10 has ``is_causal``, 2.11 ``window_size``.

    Raises:
        NotImplementedError: it has no windows, and the band is one.
    """
    window = window_of(band)
    if "window_size" in parameters:
        return {"window_size": window}
    if not (band.is_causal or band.is_full):
        raise NotImplementedError(f"varlen_attn of torch {torch.__version__} has no windows, found {band.describe()}")
    return {"is_causal": band.is_causal}


# -------------------------------------------------------------------------------------------------------------------- attention
def _varlen_attn(entry: Any) -> OnePolicy:
    parameters = inspect.signature(entry).parameters

    def run(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, band: Band) -> Tensor:
        # Where enable_gqa is not there to be asked for, the kernel may still take fewer key/value heads.
        gqa = {"enable_gqa": True} if q.shape[1] != k.shape[1] and "enable_gqa" in parameters else {}
        mask = varlen_attn_mask(band, parameters)
        out: Tensor = entry(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **mask, **gqa)
        return out

    return run


def _flash_attn(entry: Any) -> OnePolicy:
    def run(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, band: Band) -> Tensor:
        out: Tensor = entry(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **flash_attn_mask(band))
        return out

    return run


def grouped(s: Any, attention: OnePolicy) -> Attention:
    """Gather, attention and ``index_copy_`` per policy."""
    subsets = [(s.subset(p), band) for p, band in enumerate(s.bands)]
    padding = s.q.shape[2] - s.v.shape[2]
    if padding < 0:
        raise NotImplementedError(f"needs head_dim_v up to head_dim_qk, found {s.q.shape[2]} and {s.v.shape[2]}")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        for subset, band in subsets:
            part_q, part_k, part_v = (x.index_select(0, subset.rows) for x in (q, k, v))
            if padding:
                part_v = F.pad(part_v, (0, padding))
            part = attention(part_q, part_k, part_v, subset.cu_seqlens, subset.max_seqlen, band)
            out.index_copy_(0, subset.rows, part[..., : v.shape[2]])
        return out

    return run


def transformer_engine(s: Any, entry: Any, dispatch: str) -> Attention:
    """``DotProductAttention`` with the work's policies; it caches its checks of the ids by the tensors' identity."""
    width_qk, width_v = s.q.shape[2], s.v.shape[2]
    module = entry(
        s.q.shape[1],
        width_qk if width_qk == width_v else (width_qk, width_v),
        num_gqa_groups=s.k.shape[1],
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding",
    )
    longest = max(s.work.lengths)
    arguments = {
        "qkv_format": "thd",
        "cu_seqlens_q": s.cu_seqlens,
        "cu_seqlens_kv": s.cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "thd_attention_policies": s.work.policies(s.q.device),
        "thd_attention_policy_dispatch": dispatch,
    }

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = module(q, k, v, **arguments)
        return out.view(q.shape[0], q.shape[1], v.shape[2])

    return run


# --------------------------------------------------------------------------------------------------------------------- variants
def check(s: Any, attention: Attention) -> None:
    """Compares with the public function.

    Raises:
        AssertionError: the outputs differ by more than bfloat16 explains.
    """
    with torch.no_grad():
        found = attention(s.q, s.k, s.v)
        expected = thd_attention(
            s.q, s.k, s.v, s.cu_seqlens, max_seqlen_q=max(s.work.lengths), thd_attention_policies=s.policies
        )
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def caller(s: Any, attention: Attention, backward: bool, grad: bool) -> Callable[[], Any]:
    """A call on the work's tensors; with ``backward`` its gradients too; ``grad``: inputs that require grad."""
    q, k, v = (x.detach().requires_grad_(grad or backward) for x in (s.q, s.k, s.v))

    def run() -> Any:
        out = attention(q, k, v)
        return torch.autograd.grad(out, (q, k, v), s.grad_out) if backward else out

    return run


def makers() -> dict[str, Callable[[Any], Attention]]:
    """By dispatch name, for the peers that are there: from a work to its attention."""
    varlen, flash, te = find_varlen_attn().entry, find_flash_attn().entry, find_transformer_engine().entry
    found: dict[str, Callable[[Any], Attention]] = {}
    if varlen is not None:
        found["varlen_attn"] = lambda s: grouped(s, _varlen_attn(varlen))
    if flash is not None:
        found["flash_attn_grouped"] = lambda s: grouped(s, _flash_attn(flash))
    if te is not None:
        for dispatch in ("auto", "grouped"):
            found[f"transformer_engine_{dispatch}"] = functools.partial(transformer_engine, entry=te, dispatch=dispatch)
    return found


def variants(s: Any) -> Iterator[tuple[dict[str, Any], Callable[[bool, bool], Callable[[], Any]], bool]]:
    """Label, maker (backward, grad) -> call, and whether a CUDA graph can hold the call."""
    for dispatch, make in makers().items():
        checked: list[Attention] = []

        def call(backward: bool, grad: bool, make: Any = make, checked: list[Attention] = checked) -> Callable[[], Any]:
            if not checked:
                attention = make(s)
                check(s, attention)
                checked.append(attention)
            return caller(s, checked[0], backward, grad)

        # TransformerEngine's grouped dispatch waits for the device, to learn how many rows each policy has.
        yield {"backend": dispatch, "dispatch": dispatch}, call, dispatch != "transformer_engine_grouped"
