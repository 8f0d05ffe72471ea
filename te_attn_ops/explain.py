"""Why this backend: every candidate of one call with its refusals or its rank, the winner, and what would be faster."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import environment, ranks, selection
from .attention import thd_attention
from .backends import BACKEND_NAMES, get_backend
from .backends.base import common_fused_refusals
from .checks import check_bool, check_selection
from .masks import Band
from .params import AttentionParams
from .policies import DISPATCHES
from .selection import Candidate, NoBackendError, Request, Selection

# In the order of environment.snapshot.
_SWITCHES = (*environment.SWITCHES, "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
_DEFAULTS = {**dict.fromkeys(_SWITCHES, b"1"), "TE_ATTN_OPS_SELECTION": b"static"}


class _Install(NamedTuple):
    """How to get a backend, and where it is worth the effort."""

    how: str
    least_sm: int
    beyond_sm: int
    unequal_widths: bool


_INSTALL = {
    "flash2": _Install("pip install 'te_attn_ops[flash2]'", 80, 1000, False),
    "flash3": _Install("build FlashAttention 3 from the hopper folder of its repository", 90, 100, True),
    "flash4": _Install("pip install 'te_attn_ops[flash4]'", 90, 1000, True),
    "cudnn": _Install("pip install 'te_attn_ops[cudnn]'", 90, 1000, True),
}


@dataclass(frozen=True)
class Explanation:
    """One call's choice.

    ``str()`` is a table for people, :meth:`to_dict` the same for programs, :meth:`print` a coloured table where rich is there.

    Attributes:
        request: the shape class, the overrides and the environment that the choice was made for.
        candidates: every backend, native and padded, that was asked; refused or ranked.
        selection: the choice; None where nothing can run the call.
        environment: the variables that a choice depends on, as they were.
        advice: what to install or to set for a faster kernel, or for one at all.
        further: the explanations of a module's other attention calls, if it makes several that differ.
    """

    request: Request
    candidates: tuple[Candidate, ...]
    selection: Selection | None
    environment: dict[str, str]
    advice: tuple[str, ...]
    further: tuple[Explanation, ...] = ()

    # --------------------------------------------------------------------------------------------------------- for programs
    @property
    def params(self) -> AttentionParams:
        return self.request.params

    @property
    def winners(self) -> tuple[Candidate, ...]:
        """The winning candidate of each policy; empty where nothing can run."""
        if self.selection is None:
            return ()
        return tuple(_winner(self.selection, policy) for policy in range(len(self.params.bands)))

    @property
    def winner(self) -> dict[str, Any] | None:
        """``backend`` (joined by "/" where policies differ), ``backends`` (one per policy), ``head_dim_padded`` (0: native),
        ``dispatch``, ``rank`` and ``ms`` (means over the policies; ms None where it was not measured)."""
        if self.selection is None:
            return None
        winners = self.winners
        ranked = [c.rank for c in winners if c.rank is not None]
        timed = [c.ms for c in winners if c.ms is not None]
        return {
            "backend": "/".join(dict.fromkeys(self.selection.backends)),
            "backends": list(self.selection.backends),
            "head_dim_padded": self.selection.head_dim_padded,
            "dispatch": self.selection.dispatch,
            "rank": sum(ranked) / len(ranked) if ranked else None,
            "ms": sum(timed) / len(timed) if len(timed) == len(winners) else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON.

        ``candidates`` holds {backend, version, head_dim_padded, dispatch, policies, refusals, rank, ms} each; ``rank`` is an
        expected duration in arbitrary units (lower is better, None if refused), ``ms`` a measured one (None if not measured).
        """
        p = self.params
        params = {name: getattr(p, name) for name in p.__dataclass_fields__}
        params |= {"dtype": _dtype_name(p.dtype), "bands": [_band_dict(band) for band in p.bands]}
        result = {
            "winner": self.winner,
            "candidates": [_candidate_dict(candidate) for candidate in self.candidates],
            "params": params,
            "overrides": {name: getattr(self.request, name) for name in ("backend", "pad_head_dim", "dispatch", "selection")},
            "environment": dict(self.environment),
            "advice": list(self.advice),
        }
        if self.further:
            result["further"] = [other.to_dict() for other in self.further]
        return result

    # ----------------------------------------------------------------------------------------------------------- for people
    def headline(self) -> str:
        """One line: the shape class and what runs it."""
        return f"{_describe(self.params)}: {self.verdict()}"

    def verdict(self) -> str:
        winner = self.winner
        if winner is None:
            return "no backend can run this call"
        width = selection.describe_width(winner["head_dim_padded"])
        how = "measured" if self.request.selection == "measured" else "static rank"
        return f"{winner['backend']}, {width}, {winner['dispatch']} dispatch ({how})"

    def footnotes(self) -> list[str]:
        lines = [f"override: {name}={value!r}" for name, value in self._overrides()]
        changed = [f"{name}={value}" for name, value in self.environment.items() if value.encode() != _DEFAULTS.get(name, b"")]
        lines.append(f"environment: {', '.join(changed) if changed else 'all variables at their defaults'}")
        lines += self._ways_to_address()
        return lines + [f"{'instead' if self.selection is None else 'faster'}: {line}" for line in self.advice]

    def _ways_to_address(self) -> Iterator[str]:
        """How kernels that know cu_seqlens alone are told of one policy's sequences (see backends/_fa2.py)."""
        chosen = self.selection
        if chosen is None or chosen.dispatch != "padded" or len(self.params.bands) == 1:
            return
        how = "one run of neighbours" if self.params.contiguous else "entries that attend to nothing for the rows between, then copies"
        for name in dict.fromkeys(chosen.backends):
            if not get_backend(name).in_place:
                yield f"each policy's sequences on {name}: {how}"

    def _overrides(self) -> Iterator[tuple[str, Any]]:
        request = self.request
        if request.backend is not None:
            yield "backend", request.backend
        if request.pad_head_dim is not None:
            yield "pad_head_dim", request.pad_head_dim
        if request.dispatch != "auto":
            yield "thd_attention_policy_dispatch", request.dispatch

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: the probes of both widths side by side, a row per backend and dispatch, and per policy where its
        policies' answers differ."""
        widths = list(dict.fromkeys(c.head_dim_padded for c in self.candidates))
        asked: dict[tuple[Any, ...], dict[int, Candidate]] = {}
        for candidate in sorted(self.candidates, key=_order):
            row = asked.setdefault((candidate.backend, candidate.dispatch, candidate.policies), {})
            row[candidate.head_dim_padded] = candidate
        merged: dict[tuple[str, ...], set[int]] = {}
        for (backend, dispatch, policies), cells in asked.items():
            texts = [self._cell(cells[width]) if width in cells else "" for width in widths]
            if len(set(texts)) == 1 and not any(cell.accepted for cell in cells.values()):
                texts[1:] = ["the same"] * (len(texts) - 1)
            merged.setdefault((backend, dispatch, *texts), set()).update(policies)
        mixed = len(self.params.bands) > 1
        header = ["backend", "dispatch", *(["policies"] if mixed else []), *map(self._width_title, widths)]
        return header, [[*row[:2], *([self._policies_title(used)] if mixed else []), *row[2:]] for row, used in merged.items()]

    def _width_title(self, width: int) -> str:
        p = self.params
        return selection.describe_width(width) if width else f"native {p.head_dim_qk}/{p.head_dim_v}"

    def _policies_title(self, policies: set[int]) -> str:
        bands = self.params.bands
        if len(policies) == len(bands):
            return "all"
        return "; ".join(f"{index}: {_describe_band(self.params, bands[index])}" for index in sorted(policies))

    def _cell(self, candidate: Candidate) -> str:
        if not candidate.accepted:
            return "; ".join(candidate.refusals)
        text = f"{candidate.ms:.3f} ms" if candidate.ms is not None else f"rank {self._relative(candidate):.2f}"
        chosen = any(candidate == winner for winner in self.winners)
        return f"{text}  <- chosen" if chosen else text

    def _relative(self, candidate: Candidate) -> float:
        """The static rank as a multiple of the best one of the same policies."""
        peers = [c.rank for c in self.candidates if c.rank is not None and set(c.policies) & set(candidate.policies)]
        assert candidate.rank is not None
        return candidate.rank / min(peers) if min(peers) > 0 else candidate.rank

    def __str__(self) -> str:
        header, body = self.table()
        lines = [self.headline(), "", *_text_table(header, body), "", *self.footnotes()]
        if any(c.accepted and c.ms is None for c in self.candidates):
            lines.append("rank: expected duration, as a multiple of the best")
        return "\n\n".join(["\n".join(lines), *map(str, self.further)])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table

        header, body = self.table()
        table = Table(title=escape(self.headline()), title_justify="left", title_style="bold")
        for title in header:
            table.add_column(escape(title))
        for row in body:
            style = "green" if any("<- chosen" in cell for cell in row) else None
            table.add_row(*map(escape, row), style=style)
        return Group(table, *map(escape, self.footnotes()), *self.further)

    def print(self) -> None:
        """To stdout: a coloured table where rich is installed, plain text elsewhere."""
        try:
            import rich
        except ImportError:
            print(self)
        else:
            rich.print(self)


# --------------------------------------------------------------------------------------------------------------- the function
def explain(subject: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Why a call runs the way it does, or why it cannot.

    Takes one of:

    * the arguments of :func:`te_attn_ops.thd_attention`: ``explain(q, k, v, cu_seqlens_q, ...)``. Nothing is computed.
    * an :class:`AttentionParams`, with the keywords ``backend``, ``pad_head_dim``, ``thd_attention_policy_dispatch`` and
      ``selection`` of that function.
    * a module (also a compiled one) and the arguments of its forward, which runs once, eagerly: :attr:`Explanation.further`
      holds its other attention calls, where they differ from the first.

    Whether a backward will follow is read from the grad mode and from ``requires_grad``, as the call itself does.

    Raises:
        TypeError, ValueError: what the call itself would raise for wrong arguments. A call that no backend can run is no error.
        RuntimeError: under torch.compile, or for a module whose forward makes no attention call.
    """
    if environment.is_tracing():
        raise RuntimeError("explain looks at packages and the device: call it outside the compiled function")
    if isinstance(subject, AttentionParams):
        return _explain_request(_request_of(subject, *args, **kwargs))
    if isinstance(subject, torch.nn.Module):
        return _explain_module(subject, args, kwargs)
    if isinstance(subject, Tensor):
        with selection.recording(stop=True) as requests, contextlib.suppress(selection.Recorded):
            thd_attention(subject, *args, **kwargs)
        return _explain_request(requests[0])
    raise TypeError(f"explain takes q, k, v, ..., an AttentionParams or a module and its inputs; got {type(subject).__name__}")


def _request_of(
    params: AttentionParams,
    *,
    backend: str | None = None,
    pad_head_dim: bool | None = None,
    thd_attention_policy_dispatch: str = "auto",
    selection: str | None = None,
) -> Request:
    if backend is not None:
        get_backend(backend)
    if thd_attention_policy_dispatch not in DISPATCHES:
        raise ValueError(
            f"thd_attention_policy_dispatch={thd_attention_policy_dispatch!r} is unknown; use one of {', '.join(DISPATCHES)}"
        )
    check_bool("pad_head_dim", pad_head_dim, or_none=True)
    check_selection(selection)
    if selection is None:
        selection = "measured" if environment.Environment(*environment.snapshot()).selection == b"measured" else "static"
    return Request(params, backend, pad_head_dim, thd_attention_policy_dispatch, selection)


def _explain_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
    failure: NoBackendError | None = None
    with selection.recording(stop=False) as requests, torch.compiler.set_stance("force_eager"):
        try:
            module(*args, **kwargs)
        except NoBackendError as error:
            failure = error
    if not requests:
        if failure is not None:
            raise failure
        raise RuntimeError(f"{type(module).__name__}'s forward made no attention call with these inputs")
    first, *others = [_explain_request(request) for request in dict.fromkeys(requests)]
    return Explanation(first.request, first.candidates, first.selection, first.environment, first.advice, tuple(others))


def _explain_request(request: Request) -> Explanation:
    try:
        chosen = selection.select(request)
        candidates = chosen.candidates
    except NoBackendError:
        chosen, candidates = None, selection.probe(request)
    return Explanation(request, candidates, chosen, _environment_dict(request.env), tuple(_advice(request, chosen)))


# ------------------------------------------------------------------------------------------------------------------- advice
def _advice(request: Request, chosen: Selection | None) -> Iterator[str]:
    yield from _advice_to_install(request, chosen)
    yield from _advice_to_set(request, chosen)


def _cost_to_beat(chosen: Selection | None) -> float:
    cost = None if chosen is None else _winner(chosen, 0).rank
    return float("inf") if cost is None else cost


def _advice_to_install(request: Request, chosen: Selection | None) -> Iterator[str]:
    """Backends that are not there, may take the call as far as documented limits tell, and rank before the winner."""
    p = request.params
    cost = _cost_to_beat(chosen)
    for name in BACKEND_NAMES if request.backend is None else (request.backend,):
        found = _INSTALL.get(name)
        if found is None or get_backend(name).version() is not None or p.sm >= found.beyond_sm:
            continue
        padded_width = 0 if found.unequal_widths or p.head_dim_qk == p.head_dim_v else p.padded_width
        seen = p.padded_to(padded_width) if padded_width else p
        if any(common_fused_refusals(seen, min_sm=found.least_sm)) or (padded_width and request.pad_head_dim is False):
            continue
        expected = ranks.static_cost(name, seen, bool(padded_width), (p.head_dim_qk, p.head_dim_v))
        if expected < cost:
            yield f"{name} is not installed ({_gain(chosen, expected)}): {found.how}"


def _gain(chosen: Selection | None, rank: float) -> str:
    if chosen is None:
        return "may run it"
    winner = _winner(chosen, 0)
    if winner.backend == "unfused" or winner.rank is None:
        return "a fused kernel"  # unfused's rank is a last place, not an expectation
    return f"expected {winner.rank / rank:.1f}x as fast"


def _advice_to_set(request: Request, chosen: Selection | None) -> Iterator[str]:
    """Overrides and variables without which a better backend would have won."""
    snapshot = environment.Environment(*request.env)
    overridden = request.backend is not None or request.pad_head_dim is not None
    if not overridden and not any(map(snapshot.disabled, environment.SWITCHES)):
        return
    cost = _cost_to_beat(chosen)
    free = dataclasses.replace(request, backend=None, pad_head_dim=None, env=tuple(_DEFAULTS.values()))
    ranked = [c for c in selection.probe(free) if c.rank is not None and 0 in c.policies]
    best = min(ranked, key=lambda c: c.rank or 0.0, default=None)
    if best is None or best.rank is None or best.rank >= cost * 0.99:
        return
    in_the_way = ["backend"] if request.backend not in (None, best.backend) else []
    if request.pad_head_dim not in (None, best.head_dim_padded > 0):
        in_the_way.append("pad_head_dim")
    remedies = [f"leave {' and '.join(in_the_way)} open"] if in_the_way else []
    off = [switch for switch in get_backend(best.backend).switches if snapshot.disabled(switch)]
    if off and request.backend != best.backend:  # a named backend ignores the switches
        remedies.append(f"unset {', '.join(off)}")
    if remedies:
        width = f" padded to {best.head_dim_padded}" if best.head_dim_padded else ""
        gain = "can run it" if chosen is None else _gain(chosen, best.rank)
        yield f"{best.backend}{width} ({gain}): {', '.join(remedies)}"


# -------------------------------------------------------------------------------------------------------------------- pieces
def _winner(chosen: Selection, policy: int) -> Candidate:
    wanted = (chosen.backends[policy], chosen.head_dim_padded, chosen.dispatch)
    return next(c for c in chosen.candidates if (c.backend, c.head_dim_padded, c.dispatch) == wanted and policy in c.policies)


def _order(candidate: Candidate) -> tuple[float, float]:
    """Accepted ones first, by time or rank; refused ones in the order they were asked."""
    if not candidate.accepted:
        return (2.0, 0.0)
    if candidate.ms is not None:
        return (0.0, candidate.ms)
    return (1.0, candidate.rank or 0.0)


def _environment_dict(env: tuple[bytes, ...]) -> dict[str, str]:
    found = {name: value.decode(errors="replace") for name, value in zip(_DEFAULTS, env)}
    return found | {name: os.environ[name] for name in ("NVTE_DEBUG", "NVTE_DEBUG_LEVEL") if name in os.environ}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _band_dict(band: Band) -> dict[str, Any]:
    return {"left": band.left, "right": band.right, "bottom_right": band.bottom_right}


def _candidate_dict(candidate: Candidate) -> dict[str, Any]:
    return {
        "backend": candidate.backend,
        "version": get_backend(candidate.backend).version(),
        "head_dim_padded": candidate.head_dim_padded,
        "dispatch": candidate.dispatch,
        "policies": list(candidate.policies),
        "refusals": list(candidate.refusals),
        "rank": candidate.rank,
        "ms": candidate.ms,
    }


def _describe(p: AttentionParams) -> str:
    device = p.device_type if p.device_type != "cuda" else f"cuda sm{p.sm}"
    heads = f"{p.num_heads} heads" if p.num_heads == p.num_gqa_groups else f"{p.num_heads} heads over {p.num_gqa_groups}"
    bands = " + ".join(dict.fromkeys(_describe_band(p, band) for band in p.bands))
    flags = [name for name in ("deterministic", "return_max_logit", "has_gaps", "contiguous") if getattr(p, name)]
    flags += [] if p.equal_lengths else ["unequal lengths"]
    mode = "training" if p.is_training else "inference"
    lengths = f"max_seqlen {'/'.join(dict.fromkeys(map(str, (p.max_seqlen_q, p.max_seqlen_kv))))}"
    words = [f"head_dim {p.head_dim_qk}/{p.head_dim_v}", _dtype_name(p.dtype), heads, lengths, bands, mode, *flags, device]
    return ", ".join(words)


def _describe_band(p: AttentionParams, band: Band) -> str:
    """With equal lengths both alignments are the same band, which params spell bottom-right whatever the mask's name says."""
    return band.describe(aligned=not p.equal_lengths)


def _text_table(header: list[str], body: list[list[str]], widest: int = 48) -> list[str]:
    """Columns padded with spaces; long cells wrap."""
    wrapped = [[textwrap.wrap(cell, widest) or [""] for cell in row] for row in (header, *body)]
    widths = [max(len(line) for row in wrapped for line in row[column]) for column in range(len(header))]
    lines = []
    for number, row in enumerate(wrapped):
        for line in range(max(map(len, row))):
            cells = [cell[line] if line < len(cell) else "" for cell in row]
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return lines
