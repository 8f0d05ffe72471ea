"""The op's ``int[] plan``: every decision of a call as plain ints.

What an op decides by itself at trace time, AOTAutograd's disk cache gets wrong in the next process; so nothing is decided
there. When the meaning of a plan or what an op emits for it changes, :data:`ABI` changes, and a cached graph of an older
version no longer matches.

Layout: [ABI, flags, dispatch, padded width or 0, then per policy: left or -1, right or -1, bottom_right, backend number; then, with
the flag RUNS, per policy: the first sequence of its run and how many they are].
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from .masks import Band

ABI = 1
HEADER = 4
WIDTH = 3  # where the width to pad to stands
PER_POLICY = 4

DETERMINISTIC = 1
MAX_LOGIT = 2
PLAIN_CU_SEQLENS = 4
EQUAL_LENGTHS = 8
TRAINING = 16
CONTIGUOUS = 32
GAPS = 64
WIDE_OFFSETS = 128
DETERMINISTIC_ALGORITHMS = 256
RUNS = 512
PER_RUN = 2

PADDED, SINGLE_LAUNCH, GROUPED = 0, 1, 2
DISPATCH_NUMBERS = {"padded": PADDED, "single_launch": SINGLE_LAUNCH, "grouped": GROUPED}
DISPATCH_NAMES = {number: name for name, number in DISPATCH_NUMBERS.items()}


class Plan(NamedTuple):
    """A decoded plan."""

    flags: int
    dispatch: int
    width: int
    bands: tuple[Band, ...]
    backends: tuple[int, ...]
    runs: tuple[tuple[int, int], ...] = ()

    def has(self, flag: int) -> bool:
        return bool(self.flags & flag)


def encode(flags: int, dispatch: int, width: int, bands: tuple[Band, ...], backends: tuple[int, ...]) -> list[int]:
    plan = [ABI, flags, dispatch, width]
    for band, backend in zip(bands, backends):
        plan += [*band.as_ints(), backend]
    return plan


def with_runs(plan: list[int], runs: tuple[tuple[int, int], ...]) -> list[int]:
    """The plan of an eager call, with each policy's run of neighbours: facts of one batch, which no compiled graph may hold."""
    return [plan[0], plan[1] | RUNS, *plan[2:], *itertools.chain.from_iterable(runs)]


@functools.lru_cache(maxsize=4096)
def decode(plan: tuple[int, ...]) -> Plan:
    """Raises ValueError for a plan of another version: a graph that was exported or cached before an upgrade."""
    if len(plan) < HEADER or plan[0] != ABI:
        found = plan[0] if plan else "none"
        raise ValueError(f"this attention plan has version {found}; te_attn_ops here writes version {ABI}: compile or export again")
    per_policy = PER_POLICY + (PER_RUN if plan[1] & RUNS else 0)
    if (len(plan) - HEADER) % per_policy or len(plan) == HEADER:
        raise ValueError(f"an attention plan has {HEADER} + {per_policy} ints per policy, at least one policy; got {len(plan)}")
    end = HEADER + (len(plan) - HEADER) // per_policy * PER_POLICY
    bands, backends = [], []
    for at in range(HEADER, end, PER_POLICY):
        *band, backend = plan[at : at + PER_POLICY]
        bands.append(Band.from_ints(*band))
        backends.append(backend)
    return Plan(plan[1], plan[2], plan[3], tuple(bands), tuple(backends), tuple(zip(plan[end::PER_RUN], plan[end + 1 :: PER_RUN])))
