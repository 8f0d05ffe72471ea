"""Which backend, whether to pad, which dispatch: refusals, then a rank. The answer is plain ints and, for people, reasons."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from . import environment, masks, plan as plans, ranks
from .backends import BACKEND_NAMES, backend_by_number, backend_number, get_backend
from .logs import logger
from .masks import Band
from .params import AttentionParams

_MEMO_CAPACITY = 1024


class NoBackendError(ValueError):
    """No backend can run the call, native or padded. The message holds every reason."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a call.

    Attributes:
        backend: its name.
        head_dim_padded: the common width that q, k and v are padded to; 0 if they are not.
        dispatch: padded (in place), single_launch or grouped.
        policies: which of the call's policies it was asked for.
        refusals: why it cannot; empty if it can.
        rank: expected duration, lower is better (static, arbitrary units); None if refused.
        ms: measured duration, where selection is measured.
    """

    backend: str
    head_dim_padded: int
    dispatch: str
    policies: tuple[int, ...]
    refusals: tuple[str, ...] = ()
    rank: float | None = None
    ms: float | None = None

    @property
    def accepted(self) -> bool:
        return not self.refusals


@dataclass(frozen=True)
class Request:
    """What a choice is made for: one shape class, the caller's overrides and the environment."""

    params: AttentionParams
    backend: str | None = None
    pad_head_dim: bool | None = None
    dispatch: str = "auto"
    selection: str = "static"
    env: tuple[bytes, ...] = field(default_factory=environment.snapshot)


@dataclass(frozen=True)
class Selection:
    """The choice. ``backends`` holds one name per policy."""

    request: Request
    dispatch: str
    head_dim_padded: int
    backends: tuple[str, ...]
    candidates: tuple[Candidate, ...] = field(compare=False)

    @property
    def numbers(self) -> tuple[int, ...]:
        """What the traced code gets: dispatch, width, then a backend number per policy."""
        return (plans.DISPATCH_NUMBERS[self.dispatch], self.head_dim_padded, *[backend_number(name) for name in self.backends])


# ------------------------------------------------------------------------------------------------------------------ probing
@dataclass(frozen=True)
class Option:
    """A complete way to run all policies: one width, one dispatch, a backend for each. ``cost`` is a rank or milliseconds."""

    cost: float
    head_dim_padded: int
    dispatch: str
    backends: tuple[str, ...]


def _environment_refusals(name: str, env: tuple[bytes, ...]) -> tuple[str, ...]:
    snapshot = environment.Environment(*env)
    return tuple(f"disabled by {switch}=0" for switch in get_backend(name).switches if snapshot.disabled(switch))


def _refusals(name: str, p: AttentionParams, request: Request) -> tuple[str, ...]:
    backend = get_backend(name)
    if backend.version() is None:
        return ("not installed",)
    if request.backend is None:
        reasons = _environment_refusals(name, request.env)
        if reasons:
            return reasons
    return tuple(backend.refusals(p))


def _probe_widths(request: Request) -> dict[int, tuple[str, ...]]:
    """The backends to ask at each width: 0 for native, the common padded width where padding would change anything, and for a
    backend whose kernels want wider steps the next of those. pad_head_dim=True leaves native out where there is another."""
    p = request.params
    names = BACKEND_NAMES if request.backend is None else (request.backend,)
    changes = p.padded_width != min(p.head_dim_qk, p.head_dim_v)
    widths = {0: names}
    if request.pad_head_dim is False:
        return widths
    if changes:
        widths[p.padded_width] = names
    for name in names:
        width = p.padded_to_multiple_of(get_backend(name).width_multiple)
        if width != p.padded_width and get_backend(name).version() is not None:
            widths[width] = (*widths.get(width, ()), name)
    if request.pad_head_dim is True and len(widths) > 1:
        widths.pop(0, None)
    return widths


def probe(request: Request) -> tuple[Candidate, ...]:
    """Asks every backend, native and padded. Pure but for what the backends' libraries do."""
    return tuple(c for width, names in _probe_widths(request).items() for c in _probe_width(request, width, names))


def _probe_width(request: Request, width: int, names: tuple[str, ...]) -> Iterator[Candidate]:
    native = request.params
    p = native.padded_to(width) if width else native
    widths = (native.head_dim_qk, native.head_dim_v)
    dispatches, num_policies = _dispatches(request), len(p.bands)
    for name in names:
        if get_backend(name).single_launch:
            if "single_launch" in dispatches:
                reasons = _refusals(name, p, request)
                cost = ranks.single_launch_cost(p, ranks.static_cost("flash4", p, bool(width), widths))
                policies = tuple(range(len(p.bands)))
                yield Candidate(name, width, "single_launch", policies, reasons, None if reasons else cost)
            continue
        for dispatch in dispatches:
            if dispatch == "single_launch" or (dispatch == "grouped" and len(dispatches) > 1 and get_backend(name).in_place):
                continue
            factor = ranks.dispatch_factor(name, dispatch, p.is_training, num_policies, p.contiguous)
            for index, policies in _distinct_bands(p.bands).items():
                reasons = _refusals(name, _in_place_params(p, p.bands[index], dispatch), request)
                cost = ranks.static_cost(name, p, bool(width), widths) * factor
                yield Candidate(name, width, dispatch, policies, reasons, None if reasons else cost)


def options_of(
    candidates: tuple[Candidate, ...], num_policies: int, cost_of: Callable[[Candidate], float | None]
) -> tuple[Option, ...]:
    """The complete ways to run a call: per width, the cheapest backend of each policy, and each single-launch backend.

    ``cost_of`` gives a candidate's cost, None where it cannot run.
    """
    best: dict[tuple[int, str], list[tuple[float, str] | None]] = {}
    options = []
    for candidate in candidates:
        cost, width, dispatch = cost_of(candidate), candidate.head_dim_padded, candidate.dispatch
        if cost is None:
            continue
        if dispatch == "single_launch":
            options.append(Option(cost, width, dispatch, (candidate.backend,) * num_policies))
            continue
        chosen = best.setdefault((width, dispatch), [None] * num_policies)
        for policy in candidate.policies:
            before = chosen[policy]
            if before is None or cost < before[0]:
                chosen[policy] = (cost, candidate.backend)
    for (width, dispatch), chosen in best.items():
        entries = [entry for entry in chosen if entry is not None]
        if len(entries) == num_policies:
            cost = sum(entry[0] for entry in entries) / num_policies
            options.append(Option(cost, width, dispatch, tuple(entry[1] for entry in entries)))
    return tuple(options)


def _dispatches(request: Request) -> tuple[str, ...]:
    if request.dispatch == "auto":
        return ("padded", "single_launch") if len(request.params.bands) == 1 else ("padded", "grouped", "single_launch")
    return (request.dispatch,)


def _distinct_bands(bands: tuple[Band, ...]) -> dict[int, tuple[int, ...]]:
    """First index of each band and every policy that has it: equal bands are asked once."""
    groups: dict[Band, list[int]] = {}
    for index, band in enumerate(bands):
        groups.setdefault(band, []).append(index)
    return {indices[0]: tuple(indices) for indices in groups.values()}


def _in_place_params(p: AttentionParams, band: Band, dispatch: str) -> AttentionParams:
    changes: dict[str, Any] = {"bands": (band,)}
    if dispatch == "grouped":
        # A compacted subset has no gaps.
        changes["has_gaps"] = False
    return p.replace(**changes)


def choose(options: tuple[Option, ...]) -> Option | None:
    """The cheapest; native wins ties, since padding must be strictly better."""
    # Sums of floats: what differs in the last digits is a tie.
    return min(options, key=lambda option: option.cost * (1 + 1e-9 * (option.head_dim_padded != 0)), default=None)


def _select(request: Request) -> Selection:
    candidates = probe(request)
    options = options_of(candidates, len(request.params.bands), lambda candidate: candidate.rank)
    if request.selection == "measured" and options:
        from . import measure

        candidates, options = measure.rank(request, candidates)
    best = choose(options)
    if best is None:
        raise NoBackendError(describe_failure(request, candidates))
    return Selection(request, best.dispatch, best.head_dim_padded, best.backends, candidates)


def describe_width(head_dim_padded: int) -> str:
    return f"padded to {head_dim_padded}" if head_dim_padded else "native widths"


def describe_failure(request: Request, candidates: tuple[Candidate, ...]) -> str:
    p = request.params
    asked = []
    if request.backend is not None:
        asked.append(f"backend={request.backend!r}")
    if request.pad_head_dim is not None:
        asked.append(f"pad_head_dim={request.pad_head_dim}")
    if request.dispatch != "auto":
        asked.append(f"thd_attention_policy_dispatch={request.dispatch!r}")
    what = f" with {', '.join(asked)}" if asked else ""
    lines = [f"no attention backend can run head_dim_qk={p.head_dim_qk}, head_dim_v={p.head_dim_v}, {p.dtype}{what}:"]
    for candidate in candidates:
        for reason in candidate.refusals:
            lines.append(f"  {candidate.backend} ({describe_width(candidate.head_dim_padded)}, {candidate.dispatch}): {reason}")
    if not candidates:
        lines.append(f"  {request.backend or 'no backend'} does not offer this dispatch")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------------------- memo
class _Memo:
    """Choices by request: bounded, thread-safe. A request is probed once, whatever comes between two calls of it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: OrderedDict[Request, Selection] = OrderedDict()
        self.probes = 0

    def get(self, request: Request) -> Selection:
        found = self._entries.get(request)
        if found is not None:
            return found
        with self._lock:
            found = self._entries.get(request)
            if found is None:
                found = self._probe(request)
                self._entries[request] = found
                while len(self._entries) > _MEMO_CAPACITY:
                    self._entries.popitem(last=False)
            return found

    def _probe(self, request: Request) -> Selection:
        if request.params.device_type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "this attention shape was not seen before the CUDA graph capture began: probing and building kernels is not "
                "possible during capture. Run one warm-up step with the same shapes first"
            )
        self.probes += 1
        selection = _select(request)
        _announce(selection)
        return selection

    def refresh(self) -> bool:
        """Probes every known request again. True if an answer changed."""
        with self._lock:
            known = list(self._entries.items())
            self._entries.clear()
            changed = False
            for request, before in known:
                try:
                    self._entries[request] = self._probe(request)
                    changed |= self._entries[request] != before
                except Exception:  # the next call of this kind meets it again, and says so
                    changed = True
            return changed

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


_MEMO = _Memo()
_ON_INVALIDATE: list[Callable[[], None]] = []


def select(request: Request) -> Selection:
    """The choice for a request, from the memo or by probing.

    Raises:
        NoBackendError: with the reasons of both probes.
    """
    return _MEMO.get(request)


def probe_count() -> int:
    """How many requests have been probed in this process."""
    return _MEMO.probes


def invalidate() -> bool:
    """Looks again at the packages, the device and every choice made so far; call it after a driver or package change, or where
    TransformerEngine's code would set ``backend_selection_requires_update``. Environment variables need no call: they are part
    of each choice's key.

    Returns whether an answer changed; only then compiled functions choose (and compile) again. A captured CUDA graph is beyond
    its reach.
    """
    environment.forget()
    for action in _ON_INVALIDATE:
        action()
    _fast.clear()
    changed = _MEMO.refresh()
    if changed:
        environment.raise_generation()
    return changed


def on_invalidate(action: Callable[[], None]) -> None:
    """Registers a cache to be dropped by :func:`invalidate`."""
    _ON_INVALIDATE.append(action)


def _announce(selection: Selection) -> None:
    p = selection.request.params
    logger.info(
        "head_dim_qk=%d head_dim_v=%d %s training=%s: %s, %s, %s",
        p.head_dim_qk,
        p.head_dim_v,
        str(p.dtype).removeprefix("torch."),
        p.is_training,
        "/".join(dict.fromkeys(selection.backends)),
        describe_width(selection.head_dim_padded),
        selection.dispatch,
    )
    for candidate in selection.candidates if logger.isEnabledFor(logging.DEBUG) else ():
        if candidate.refusals:
            width, reasons = describe_width(candidate.head_dim_padded), "; ".join(candidate.refusals)
            logger.debug("not %s (%s, %s): %s", candidate.backend, width, candidate.dispatch, reasons)
    if p.device_type == "cuda" and "unfused" in selection.backends and selection.request.backend is None:
        reasons = "; ".join(dict.fromkeys(f"{c.backend}: {c.refusals[0]}" for c in selection.candidates if c.refusals))
        message = f"attention runs unfused on a GPU, which is slow, because no kernel takes it ({reasons})"
        masks.warn_once((message,), stacklevel=6)


# ------------------------------------------------------------------------------------------------- the form that is traced
_fast: dict[tuple[Any, ...], tuple[int, ...]] = {}


@torch.compiler.assume_constant_result
def uses_runs(backends: tuple[int, ...]) -> bool:
    """Whether one of these backends makes use of a policy's sequences being one run of neighbours."""
    return any(not backend_by_number(number).in_place for number in backends)


@torch.compiler.assume_constant_result
def select_numbers(
    dtype: torch.dtype,
    device: torch.device,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    bands: tuple[tuple[int, int, int], ...],
    max_seqlen: tuple[int, int],
    flags: int,
    has_gaps: bool,
    static_membership: bool,
    single_launch_plan: bool,
    backend: str | None,
    pad_head_dim: bool | None,
    dispatch: str,
    selection: str,
    env: tuple[bytes, ...],
    generation: str,
) -> tuple[int, ...]:
    """:func:`select` from plain values to plain ints: what Dynamo can take for a constant. ``generation`` is there to be
    guarded."""
    key = (
        dtype, device, heads, head_dims, bands, max_seqlen, flags, has_gaps, static_membership, single_launch_plan, backend,
        pad_head_dim, dispatch, selection, env,
    )  # fmt: skip
    if is_recording():
        _RECORDER.add(_request(*key))
    # With the generation, so that an answer found before an invalidate() of another thread is not kept beyond it.
    numbers = _fast.get((key, generation))
    if numbers is None:
        numbers = select(_request(*key)).numbers
        if len(_fast) >= _MEMO_CAPACITY:
            _fast.clear()
        _fast[key, generation] = numbers
    return numbers


def _request(
    dtype: torch.dtype,
    device: torch.device,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    bands: tuple[tuple[int, int, int], ...],
    max_seqlen: tuple[int, int],
    flags: int,
    has_gaps: bool,
    static_membership: bool,
    single_launch_plan: bool,
    *overrides: Any,
) -> Request:
    """What the plain values of :func:`select_numbers` stand for."""
    params = AttentionParams(
        dtype=dtype,
        device_type=device.type,
        sm=environment.compute_capability(_index(device)) if device.type == "cuda" else 0,
        num_heads=heads[0],
        num_gqa_groups=heads[1],
        head_dim_qk=head_dims[0],
        head_dim_v=head_dims[1],
        bands=tuple(Band.from_ints(*band) for band in bands),
        max_seqlen_q=max_seqlen[0],
        max_seqlen_kv=max_seqlen[1],
        equal_lengths=bool(flags & plans.EQUAL_LENGTHS),
        has_gaps=has_gaps,
        is_training=bool(flags & plans.TRAINING),
        deterministic=bool(flags & plans.DETERMINISTIC),
        deterministic_algorithms=bool(flags & plans.DETERMINISTIC_ALGORITHMS),
        return_max_logit=bool(flags & plans.MAX_LOGIT),
        static_membership=static_membership,
        single_launch_plan=single_launch_plan,
        wide_offsets=bool(flags & plans.WIDE_OFFSETS),
        contiguous=bool(flags & plans.CONTIGUOUS),
        device_index=_index(device) if device.type == "cuda" else -1,
    )
    return Request(params, *overrides)


# ------------------------------------------------------------------------------------------- what a call would ask, for explain
class Recorded(BaseException):
    """Ends a call whose request was all that was wanted."""


class _Recorder(threading.local):
    requests: list[Request] | None = None
    stop: bool = False

    def add(self, request: Request) -> None:
        assert self.requests is not None
        self.requests.append(request)
        if self.stop:
            raise Recorded


_RECORDER = _Recorder()


def is_recording() -> bool:
    """Whether this thread's calls are inside :func:`recording`: no cache in front of :func:`select_numbers` may answer then."""
    return _RECORDER.requests is not None


@contextlib.contextmanager
def recording(*, stop: bool) -> Iterator[list[Request]]:
    """Collects the requests of this thread's eager calls. ``stop``: a call ends there, with :class:`Recorded`, before anything
    is chosen or computed."""
    before = _RECORDER.requests, _RECORDER.stop
    requests: list[Request] = []
    _RECORDER.requests, _RECORDER.stop = requests, stop
    try:
        yield requests
    finally:
        _RECORDER.requests, _RECORDER.stop = before


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


def should_pad_qkv_head_dim(params: AttentionParams, invalidate_cache: bool = False) -> bool:
    """Whether q, k and v should be padded to one width for ``params``: only where that selects a strictly better kernel.

    ``invalidate_cache`` looks at the packages and the device again first, as the flag of TransformerEngine's function does.
    """
    if not isinstance(params, AttentionParams):
        raise TypeError(f"params must be AttentionParams, got {type(params).__name__}")
    if invalidate_cache:
        invalidate()
    return select(Request(params)).head_dim_padded != 0
