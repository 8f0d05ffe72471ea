"""The measured rank: the candidates of one shape class, timed on this device when the choice is made.

Each candidate runs through the package's own ops with an explicit plan on synthetic tensors (what padding adds is in the time, as
eager calls pay it), forward and, in training, backward. Results are kept in memory and in a private file per device and package
versions, and the ranks of a job take one answer, that of the first to write it into the process group's store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import environment, ops, packing, plan as plans, selection
from .backends import BACKEND_NAMES, backend_number, get_backend
from .logs import ProgressLine, logger
from .masks import Band
from .params import AttentionParams
from .selection import Candidate, Option, Request

try:
    import fcntl
except ImportError:  # no POSIX: two writers at the same moment may lose one's figures
    fcntl = None  # type: ignore[assignment]

# A challenger has to be this much faster than the static favourite: less is noise.
WINNING_MARGIN = 0.02
_FORMAT = 1
_TOKENS = {"cuda": 16384, "cpu": 256}
# tokens * keys * heads * (head_dim_qk + head_dim_v): a forward and backward of some 5 ms on an H200.
_WORK = {"cuda": 6e11, "cpu": 1e9}
_GAP = 8
_ROUNDS = (3, 11)
_BUDGET_MS = 250.0
# The device spins while the host submits, so that what is timed is the device's time. About 1 ms.
_SPIN_CYCLES = 2_000_000


# ---------------------------------------------------------------------------------------------------------------- one answer
def rank(request: Request, candidates: tuple[Candidate, ...]) -> tuple[tuple[Candidate, ...], tuple[Option, ...]]:
    """Times what ``candidates`` leaves open.

    Returns the candidates, with ``ms`` where timed and a refusal where one could not be launched, and the winner as the only
    option (none if nothing is left). A challenger wins if it is 2% faster than the static favourite; native wins ties.
    """
    runnable = _worth_timing(candidates)
    if len(runnable) < 2:
        return candidates, _static_options(request, candidates)
    agreement = _Agreement.of(request, candidates)
    winner = agreement.known()
    if winner is None:
        candidates, winner = _contest(request, candidates, runnable)
        winner = winner if winner is None else agreement.settle(winner, candidates)
    else:
        candidates = _apply(candidates, {c: _CACHE.get(request.params, _job(request.params, c)) for c in runnable})
    return candidates, _static_options(request, candidates) if winner is None else (winner,)


def _static_options(request: Request, candidates: tuple[Candidate, ...]) -> tuple[Option, ...]:
    return selection.options_of(candidates, len(request.params.bands), lambda candidate: candidate.rank)


def _worth_timing(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Accepted ones; unfused, which is slow and large, only for policies that nothing else takes, and never padded, which it has
    no use for."""
    accepted = [c for c in candidates if c.accepted]
    covered = {policy for c in accepted if c.backend != "unfused" for policy in c.policies}
    return tuple(c for c in accepted if c.backend != "unfused" or not (c.head_dim_padded or covered.issuperset(c.policies)))


def _contest(
    request: Request, candidates: tuple[Candidate, ...], runnable: tuple[Candidate, ...]
) -> tuple[tuple[Candidate, ...], Option | None]:
    p = request.params
    jobs = {c: _job(p, c) for c in runnable}
    outcomes = _outcomes(p, list(jobs.values()))
    candidates = _apply(candidates, {c: outcomes.get(job) for c, job in jobs.items()})
    if len(p.bands) == 1:
        finalists = [Option(c.ms, c.head_dim_padded, c.dispatch, (c.backend,)) for c in candidates if c.ms is not None]
    else:
        finalists = _timed_options(p, candidates)
    favourite = selection.choose(_static_options(request, tuple(c for c in candidates if c.ms is not None)))
    return candidates, _winner(tuple(finalists), favourite)


def _timed_options(p: AttentionParams, candidates: tuple[Candidate, ...]) -> list[Option]:
    """With several policies: the best backend of each from the times of its mask alone, then whole calls against each other."""
    favourites: dict[tuple[int, tuple[int, ...]], Candidate] = {}
    for c in candidates:
        if c.ms is not None and c.rank is not None:
            best = favourites.setdefault((c.head_dim_padded, c.policies), c)
            if best.rank is None or c.rank < best.rank:
                favourites[c.head_dim_padded, c.policies] = c

    def cost(c: Candidate) -> float | None:
        favoured = favourites.get((c.head_dim_padded, c.policies)) is c
        return None if c.ms is None else c.ms * (1 - WINNING_MARGIN if favoured else 1)

    options = selection.options_of(candidates, len(p.bands), cost)
    jobs = {option: Job(p.bands, option.backends, option.head_dim_padded, option.dispatch) for option in options}
    outcomes = _outcomes(p, list(jobs.values()))
    timed = ((option, outcomes.get(job)) for option, job in jobs.items())
    return [dataclasses.replace(option, cost=found.ms) for option, found in timed if found is not None and found.ms is not None]


def _winner(finalists: tuple[Option, ...], favourite: Option | None) -> Option | None:
    def is_favourite(option: Option) -> bool:
        return favourite is not None and dataclasses.replace(option, cost=favourite.cost) == favourite

    margin = {True: 1 - WINNING_MARGIN, False: 1.0}
    handicapped = tuple(dataclasses.replace(option, cost=option.cost * margin[is_favourite(option)]) for option in finalists)
    best = selection.choose(handicapped)
    return None if best is None else finalists[handicapped.index(best)]


def _apply(candidates: tuple[Candidate, ...], found: Mapping[Candidate, Outcome | None]) -> tuple[Candidate, ...]:
    result = []
    for candidate in candidates:
        outcome = found.get(candidate)
        if outcome is not None and outcome.refusal is not None:
            candidate = dataclasses.replace(candidate, refusals=(outcome.refusal,), rank=None)
        elif outcome is not None:
            candidate = dataclasses.replace(candidate, ms=outcome.ms)
        result.append(candidate)
    return tuple(result)


# ------------------------------------------------------------------------------------------------------------------ the times
@dataclass(frozen=True)
class Job:
    """One thing to time: bands, and how to run them."""

    bands: tuple[Band, ...]
    backends: tuple[str, ...]
    head_dim_padded: int
    dispatch: str

    @property
    def key(self) -> str:
        bands = ", ".join(band.describe() for band in self.bands)
        return f"{'/'.join(self.backends)} | {self.head_dim_padded} | {self.dispatch} | {bands}"

    def describe(self) -> str:
        return f"{'/'.join(dict.fromkeys(self.backends))}, {selection.describe_width(self.head_dim_padded)}"


class Outcome(NamedTuple):
    """Milliseconds and the tokens they were measured with, or why it cannot be launched."""

    ms: float | None
    tokens: int
    refusal: str | None = None


def _job(p: AttentionParams, candidate: Candidate) -> Job:
    bands = p.bands if candidate.dispatch == "single_launch" else (p.bands[candidate.policies[0]],)
    return Job(bands, (candidate.backend,) * len(bands), candidate.head_dim_padded, candidate.dispatch)


def _outcomes(p: AttentionParams, jobs: list[Job]) -> dict[Job, Outcome]:
    """From the cache where that has all of them, from one measurement otherwise: times are compared within a run only."""
    known = {job: _CACHE.get(p, job) for job in jobs}
    complete = {job: outcome for job, outcome in known.items() if outcome is not None}
    if len(complete) == len(jobs) and len({o.tokens for o in complete.values() if o.refusal is None}) <= 1:
        return complete
    refused = {job: outcome for job, outcome in complete.items() if outcome.refusal is not None}
    measured = measure(p, [job for job in jobs if job not in refused])
    _CACHE.put(p, measured)
    return refused | measured


def measure(p: AttentionParams, jobs: list[Job]) -> dict[Job, Outcome]:
    """Milliseconds of each job, all of them in one run; a refusal for one that cannot be launched. One that is out of memory, on
    ever fewer tokens, is left out.

    Raises:
        RuntimeError: a launch broke the CUDA context, in which nothing more can run; the refusal is remembered for later processes.
    """
    device = _device_of(p)
    tokens = _TOKENS.get(p.device_type, _TOKENS["cpu"])
    done: dict[Job, Outcome] = {}
    # Selection may run while a compiler traces or under a user's mode: they must not see these tensors.
    with _disable_current_modes(), torch.no_grad(), _device_guard(device), ProgressLine() as progress:
        while True:
            timed, out_of_memory = _measure_once(p, [job for job in jobs if job not in done], device, tokens, progress)
            if not out_of_memory or tokens <= 1024:
                return done | timed
            done |= {job: outcome for job, outcome in timed.items() if outcome.refusal is not None}
            tokens //= 4
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _measure_once(
    p: AttentionParams, jobs: list[Job], device: torch.device, tokens: int, progress: ProgressLine
) -> tuple[dict[Job, Outcome], bool]:
    outcomes: dict[Job, Outcome] = {}
    calls: dict[Job, Callable[[], None]] = {}
    workloads: dict[int, Workload] = {}
    out_of_memory = False
    for number, job in enumerate(jobs):
        progress.show(f"timing attention: preparing {job.describe()} ({number + 1}/{len(jobs)})")
        try:
            count = len(job.bands)
            workload = workloads[count] if count in workloads else Workload.of(p, count, device, tokens)
            call = workloads.setdefault(count, workload).call(job)
            call()
            _synchronize(device)
            calls[job] = call
        except Exception as error:
            if _is_out_of_memory(error):
                out_of_memory = True
                continue
            outcomes[job] = Outcome(None, tokens, _describe_error(error))
            _check_context(p, job, outcomes[job], device, error)
    progress.show(f"timing attention: {len(calls)} candidates")
    try:
        times = median_times(calls, device)
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        return outcomes, True
    for job, ms in times.items():
        logger.debug("timed %s, %s: %.4f ms with %d tokens", job.describe(), job.dispatch, ms, tokens)
    return outcomes | {job: Outcome(ms, tokens) for job, ms in times.items()}, out_of_memory


def median_times(calls: Mapping[Any, Callable[[], Any]], device: torch.device) -> dict[Any, float]:
    """Median milliseconds of each call."""
    return {name: statistics.median(times) for name, times in sample_times(calls, device, _BUDGET_MS, _ROUNDS).items()}


def sample_times(
    calls: Mapping[Any, Callable[[], Any]], device: torch.device, budget_ms: float, rounds: tuple[int, int]
) -> dict[Any, list[float]]:
    """Milliseconds of each call in rounds of one run of each, so that a drifting clock favours none, after a warm-up.

    As many rounds as fit ``budget_ms``, within ``rounds`` (least, most).
    """
    first = {name: _time_once(call, device) for name, call in calls.items()}
    count = int(budget_ms / max(sum(first.values()), 1e-3))
    samples: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(max(rounds[0], min(rounds[1], count))):
        for name, call in calls.items():
            samples[name].append(_time_once(call, device))
    return samples


def _time_once(call: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_SPIN_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(s in text for s in ("out of memory", "out_of_memory", "alloc_failed"))


def _describe_error(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"failed when it was tried: {type(error).__name__}: {lines[0][:200]}"


def _check_context(p: AttentionParams, job: Job, outcome: Outcome, device: torch.device, error: Exception) -> None:
    try:
        _synchronize(device)
    except Exception:
        _CACHE.put(p, {job: outcome})
        raise RuntimeError(
            f"{job.describe()} broke the CUDA context when it was timed: this process cannot go on. That is remembered, start again"
        ) from error


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_of(p: AttentionParams) -> torch.device:
    if p.device_type != "cuda":
        return torch.device(p.device_type)
    return torch.device("cuda", p.device_index if p.device_index >= 0 else torch.cuda.current_device())


def _device_guard(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


# --------------------------------------------------------------------------------------------------------------- the workload
@dataclass
class Workload:
    """A batch of a shape class: sequences as long as its bound, as many as ``tokens`` allows; with several policies they take
    turns."""

    p: AttentionParams
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    subsets: packing.Subsets
    lengths: tuple[int, int]

    @classmethod
    def of(cls, p: AttentionParams, num_policies: int, device: torch.device, tokens: int) -> Workload:
        count, length_q, length_kv = _lengths(p, num_policies, device.type, tokens)
        generator = torch.Generator(device).manual_seed(0)

        def new(length: int, heads: int, width: int) -> Tensor:
            rows = count * (length + (_GAP if p.has_gaps else 0))
            return torch.randn(rows, heads, width, generator=generator, device=device, dtype=torch.float32).to(p.dtype)

        def offsets(length: int) -> Tensor:
            return torch.arange(count + 1, device=device, dtype=torch.int32) * length

        plain = [offsets(length_q), offsets(length_kv)]
        slots = [offsets(length_q + _GAP), offsets(length_kv + _GAP)] if p.has_gaps else plain
        index = None
        if num_policies > 1:
            order = torch.arange(count, device=device, dtype=torch.int32)
            index = order * num_policies // count if p.contiguous else order % num_policies
        return cls(
            p,
            new(length_q, p.num_heads, p.head_dim_qk),
            new(length_kv, p.num_gqa_groups, p.head_dim_qk),
            new(length_kv, p.num_gqa_groups, p.head_dim_v),
            new(length_q, p.num_heads, p.head_dim_v),
            packing.Subsets(*ops.policy_subsets(*plain, *slots, index, num_policies)),
            (length_q, length_kv),
        )

    def call(self, job: Job) -> Callable[[], None]:
        """Runs the job once: forward and, in training, backward."""
        p, scale = self.p, self.p.head_dim_qk**-0.5
        tensors = self._single_launch_plan(job) if job.dispatch == "single_launch" else []
        numbers, dispatch = tuple(map(backend_number, job.backends)), plans.DISPATCH_NUMBERS[job.dispatch]
        plan = plans.encode(self._flags(job), dispatch, job.head_dim_padded, job.bands, numbers)
        rest = (*self.subsets, tensors, *self.lengths, scale, plan)

        def run() -> None:
            out, lse, _ = ops.attention_forward(self.q, self.k, self.v, *rest)
            if p.is_training:
                ops.attention_backward(self.grad_out, self.q, self.k, self.v, out, lse, *rest)

        return run

    def _flags(self, job: Job) -> int:
        p = self.p
        alone = len(job.bands) == 1 and job.dispatch == "padded" and not p.has_gaps
        wanted = {
            plans.TRAINING: p.is_training,
            plans.DETERMINISTIC: p.deterministic,
            plans.MAX_LOGIT: p.return_max_logit,
            plans.EQUAL_LENGTHS: p.equal_lengths,
            plans.CONTIGUOUS: p.contiguous,
            plans.GAPS: p.has_gaps,
            plans.PLAIN_CU_SEQLENS: alone,
        }
        return sum(flag for flag, wanted_here in wanted.items() if wanted_here)

    def _single_launch_plan(self, job: Job) -> list[Tensor]:
        p, width = self.p, job.head_dim_padded
        backend: Any = get_backend(job.backends[0])
        plan: list[Tensor] = backend.make_plan(
            **self.subsets._asdict(),
            bands=job.bands,
            total_q=self.q.shape[0],
            total_kv=self.k.shape[0],
            max_seqlen_q=self.lengths[0],
            max_seqlen_kv=self.lengths[1],
            dtype=p.dtype,
            num_heads=p.num_heads,
            num_gqa_groups=p.num_gqa_groups,
            head_dim_qk=width or p.head_dim_qk,
            head_dim_v=width or p.head_dim_v,
            training=p.is_training,
            deterministic=p.deterministic,
            return_max_logit=p.return_max_logit,
        )
        return plan


def _lengths(p: AttentionParams, num_policies: int, device_type: str, tokens: int) -> tuple[int, int, int]:
    """How many sequences, and their query and key tokens."""
    limit = _WORK.get(device_type, _WORK["cpu"]) / (p.num_heads * (p.head_dim_qk + p.head_dim_v))
    length_q, length_kv = min(p.max_seqlen_q, tokens), min(p.max_seqlen_kv, tokens)
    if p.equal_lengths:
        length_q = length_kv = min(length_q, length_kv)
    while length_q * length_kv > limit and max(length_q, length_kv) > 128:
        length_q, length_kv = max(1, length_q // 2), max(1, length_kv // 2)
    count = min(tokens // max(length_q, length_kv, 1), int(limit / max(length_q * length_kv, 1)))
    return max(count, num_policies, 1), length_q, length_kv


# ------------------------------------------------------------------------------------------------------------------ the cache
class _Cache:
    """Outcomes by shape class and job, in memory and in one file per fingerprint (device, versions)."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, dict[str, Any]]] = {}
        self._path: Path | None = None
        self.forgotten = 0  # how often by forget_measurements: what ranks agreed on before is another question
        self._fingerprint: dict[str, Any] | None = None

    def get(self, p: AttentionParams, job: Job) -> Outcome | None:
        self._open(p)
        return _outcome_of(self._entries.get(_params_key(p), {}).get(job.key))

    def put(self, p: AttentionParams, outcomes: Mapping[Job, Outcome]) -> None:
        self._open(p)
        fresh = {_params_key(p): {job.key: outcome._asdict() for job, outcome in outcomes.items()}}
        _merge(self._entries, fresh)
        if self._path is not None and outcomes:
            try:
                _update_file(self._path, self._fingerprint, fresh)
            except OSError as error:
                logger.warning("measured times are not kept on disk: %s", error)

    def forget(self) -> None:
        """Drops what is in memory; the file will be read again."""
        self._fingerprint = None

    def _open(self, p: AttentionParams) -> None:
        fingerprint = _fingerprint(p)
        if fingerprint != self._fingerprint:
            self._path = _cache_path(fingerprint)
            self._entries = _read_file(self._path, fingerprint) if self._path is not None else {}
            self._fingerprint = fingerprint


def _fingerprint(p: AttentionParams) -> dict[str, Any]:
    driver = getattr(torch._C, "_cuda_getDriverVersion", None)
    return {
        "format": _FORMAT,
        "plan": plans.ABI,
        **environment.fingerprint(_device_of(p).index),
        "driver": driver() if p.device_type == "cuda" and driver is not None else None,
        "backends": {name: get_backend(name).version() for name in BACKEND_NAMES},
    }


def cache_directory() -> Path | None:
    """``$XDG_CACHE_HOME/te_attn_ops`` or ``~/.cache/te_attn_ops``; None without a home directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "te_attn_ops"
    except RuntimeError:
        return None


def _cache_path(fingerprint: Mapping[str, Any]) -> Path | None:
    directory = cache_directory()
    return None if directory is None else directory / f"measured-{_digest(fingerprint)}.json"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:20]


def _params_key(p: AttentionParams) -> str:
    fields = dataclasses.asdict(p) | {"dtype": str(p.dtype), "bands": [list(band) for band in p.bands]}
    # Which device of a kind it is says nothing; whether the caller has a plan decides who may run, not how long it takes.
    del fields["device_index"], fields["single_launch_plan"], fields["static_membership"]
    return json.dumps(fields, sort_keys=True)


def _outcome_of(entry: Any) -> Outcome | None:
    """An entry as an outcome; None if it is missing or is not what this module writes."""
    if not isinstance(entry, dict):
        return None
    ms, tokens, refusal = entry.get("ms"), entry.get("tokens"), entry.get("refusal")
    if not isinstance(tokens, int):
        return None
    if isinstance(refusal, str):
        return Outcome(None, tokens, refusal)
    return Outcome(float(ms), tokens) if isinstance(ms, (int, float)) and ms > 0 else None


def _merge(into: dict[str, dict[str, dict[str, Any]]], fresh: Mapping[str, Mapping[str, Any]]) -> None:
    for key, entries in fresh.items():
        into.setdefault(key, {}).update(entries)


def _read_file(path: Path, fingerprint: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """The file's entries; none if it is missing, unreadable, damaged or of another fingerprint."""
    try:
        data = json.loads(path.read_text())
        if data["fingerprint"] != json.loads(json.dumps(fingerprint)):
            return {}
        return {str(key): dict(entries) for key, entries in dict(data["entries"]).items() if isinstance(entries, dict)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged and will be replaced (%s: %s)", path, type(error).__name__, error)
        return {}


def _update_file(path: Path, fingerprint: Mapping[str, Any] | None, fresh: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds entries to what other processes have written meanwhile. Readers see the old file or the new one."""
    assert fingerprint is not None
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        entries = _read_file(path, fingerprint)
        _merge(entries, fresh)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        with contextlib.suppress(FileNotFoundError):
            scratch.unlink()
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"fingerprint": fingerprint, "entries": entries}, file, indent=1)
            os.replace(scratch, path)
        except BaseException:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise


@contextlib.contextmanager
def _locked(path: Path, patience_s: float = 5.0) -> Iterator[None]:
    """Holds a lock file; goes on without it where the file system has no locks or someone holds it for too long."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + patience_s
        while fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


_CACHE = _Cache()
selection.on_invalidate(_CACHE.forget)


def forget_measurements() -> None:
    """Deletes what is remembered of times and failed launches on this machine, in memory and on disk. Calls choose again after
    :func:`te_attn_ops.invalidate`. In a job of several ranks, call both on all of them."""
    directory = cache_directory()
    for path in directory.glob("measured-*.json") if directory is not None else ():
        path.unlink(missing_ok=True)
    _CACHE.forget()
    _CACHE.forgotten += 1


# ------------------------------------------------------------------------------------------------------------ ranks of one job
class _Agreement:
    """One answer for all ranks that see the same candidates: the first to be written. No rank waits for another."""

    def __init__(self, store: Any, key: str, candidates: tuple[Candidate, ...]) -> None:
        self._store, self._key = store, key
        self._candidates = candidates  # what can run here

    @classmethod
    def of(cls, request: Request, candidates: tuple[Candidate, ...]) -> _Agreement:
        open_to = [(c.backend, c.head_dim_padded, c.dispatch, c.policies) for c in candidates if c.accepted]
        question = [_params_key(request.params), request.backend, request.pad_head_dim, request.dispatch, open_to, _CACHE.forgotten]
        return cls(_default_store(), f"te_attn_ops/measured/{_digest(question)}", candidates)

    def known(self) -> Option | None:
        """What another rank has already decided."""
        return self._ask(lambda store: store.get(self._key) if store.check([self._key]) else None)

    def settle(self, own: Option, candidates: tuple[Candidate, ...]) -> Option:
        """The common answer: ``own``, if this rank is the first. ``candidates`` are what the measurement left of them."""
        self._candidates = candidates
        fields = {"backends": list(own.backends), "head_dim_padded": own.head_dim_padded, "dispatch": own.dispatch}
        found = self._ask(lambda store: store.compare_set(self._key, "", json.dumps(fields)))
        return own if found is None else found

    def _ask(self, ask: Callable[[Any], bytes | None]) -> Option | None:
        if self._store is None:
            return None
        try:
            answer = ask(self._store)
            return None if answer is None else self._option(json.loads(answer))
        except Exception as error:  # a store that is gone must not take the job with it
            logger.warning("ranks may choose different attention kernels: %s: %s", type(error).__name__, error)
            return None

    def _option(self, fields: dict[str, Any]) -> Option:
        backends, width, dispatch = tuple(fields["backends"]), fields["head_dim_padded"], fields["dispatch"]
        for policy, backend in enumerate(backends):
            if not any(
                c.accepted and (c.backend, c.head_dim_padded, c.dispatch) == (backend, width, dispatch) and policy in c.policies
                for c in self._candidates
            ):
                raise ValueError(f"another rank chose {backend}, {selection.describe_width(width)}, which cannot run here")
        return Option(0.0, width, dispatch, backends)


def _default_store() -> Any:
    """The process group's store; None outside a job of several ranks."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return None
    return distributed.distributed_c10d._get_default_store()
