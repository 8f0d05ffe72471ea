"""The padding decision against a second statement of its rule, over every availability of every backend.

The rule: the padded answer is taken iff it ranks strictly better than the native one; a call that only padding can run pads; a call
that nothing can run is one error with every reason of both probes.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from te_attn_ops import AttentionParams, NoBackendError, ranks, selection, should_pad_qkv_head_dim, thd_attention
from te_attn_ops.backends import BACKEND_NAMES
from te_attn_ops.backends.base import ForwardCall
from te_attn_ops.masks import Band
from te_attn_ops.selection import Request
from te_attn_ops.testing import PackedCase, build
from tests.stubs import Refuse, Stub, forget_choices, fresh_choices, install, refuse_native  # noqa: F401

IN_PLACE = tuple(name for name in BACKEND_NAMES if name != "cudnn_flex")
CPU = AttentionParams(device_type="cpu", sm=0, head_dim_qk=192, head_dim_v=128)
PAIRS = {"MLA": (192, 128), "reverse": (128, 192), "odd": (100, 96)}


def width_of(pair: tuple[int, int]) -> int:
    return math.ceil(max(pair) / 8) * 8


# -------------------------------------------------------------------------------------------------- every availability set
# What a backend can do at native and at padded widths.
NEVER, FORWARD_ONLY, ALWAYS = "never", "forward only", "always"
Abilities = Mapping[tuple[str, bool], str]


class Machine:
    """Stubs whose abilities change from one row of the table to the next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, costs: Mapping[tuple[str, bool], float]) -> None:
        self.abilities: Abilities = {}
        self.pair = (0, 0)
        self.costs = costs
        install(monkeypatch, *(Stub(name, self._refuse(name)) for name in IN_PLACE))
        monkeypatch.setattr(ranks, "static_cost", lambda backend, p, padded, widths: costs[backend, padded])

    def _refuse(self, name: str) -> Refuse:
        def refuse(p: AttentionParams) -> Iterator[str]:
            padded = (p.head_dim_qk, p.head_dim_v) != self.pair
            ability = self.abilities.get((name, padded), NEVER)
            if ability == NEVER or (ability == FORWARD_ONLY and p.is_training):
                yield f"{name} cannot, {'padded' if padded else 'native'}"

        return refuse

    def can(self, name: str, padded: bool, training: bool) -> bool:
        ability = self.abilities.get((name, padded), NEVER)
        return ability == ALWAYS or (ability == FORWARD_ONLY and not training)

    def best(self, padded: bool, training: bool) -> tuple[float, str] | None:
        costs = [(self.costs[name, padded], name) for name in IN_PLACE if self.can(name, padded, training)]
        return min(costs, key=lambda entry: entry[0], default=None)

    def check(self, pair: tuple[int, int], training: bool, abilities: Abilities) -> str:
        """One row: what was chosen against what should have been."""
        self.pair, self.abilities = pair, abilities
        request = Request(CPU.replace(head_dim_qk=pair[0], head_dim_v=pair[1], is_training=training))
        native, padded = self.best(False, training), self.best(True, training)
        if native is None and padded is None:
            with pytest.raises(NoBackendError) as error:
                selection._select(request)
            reasons = str(error.value)
            for name in IN_PLACE:
                assert f"{name} (native widths, padded): {name} cannot, native" in reasons
                assert f"{name} (padded to {width_of(pair)}, padded): {name} cannot, padded" in reasons
            return "error"
        pads = native is None or (padded is not None and padded[0] < native[0])
        expected = padded if pads else native
        assert expected is not None
        chosen = selection._select(request)
        assert chosen.head_dim_padded == (width_of(pair) if pads else 0), (abilities, training)
        assert chosen.backends == (expected[1],), (abilities, training)
        return "padded" if pads else "native"


# Distinct costs in an order of no meaning, native and padded interleaved, and two ties of native and padded.
COSTS = {
    (name, padded): float(cost)
    for (name, padded), cost in zip(itertools.product(IN_PLACE, (False, True)), (11, 12, 7, 3, 5, 5, 8, 2, 4, 6, 1, 1))
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_every_availability_set(monkeypatch: pytest.MonkeyPatch, pair: tuple[int, int], training: bool) -> None:
    """Each of the 6 backends that run in place: nothing, native alone, padded alone, both. 4096 machines."""
    machine = Machine(monkeypatch, COSTS)
    seen: dict[str, int] = {}
    for held in itertools.product(range(4), repeat=len(IN_PLACE)):
        abilities = {
            (name, padded): ALWAYS for name, bits in zip(IN_PLACE, held) for padded in (False, True) if bits & (1 << padded)
        }
        answer = machine.check(pair, training, abilities)
        seen[answer] = seen.get(answer, 0) + 1
    assert sum(seen.values()) == 4096 and seen["error"] == 1
    assert min(seen["native"], seen["padded"]) > 1000


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("names", list(itertools.combinations(IN_PLACE, 2)), ids="-".join)
def test_every_pair_with_forward_only_kernels(monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], training: bool) -> None:
    """Each of two backends, native and padded: never, forward only, always. 81 machines, in training and not."""
    machine = Machine(monkeypatch, COSTS)
    slots = list(itertools.product(names, (False, True)))
    for abilities in itertools.product((NEVER, FORWARD_ONLY, ALWAYS), repeat=4):
        machine.check(PAIRS["MLA"], training, dict(zip(slots, abilities)))


@pytest.mark.parametrize("cheap", list(itertools.permutations(range(4))), ids=str)
def test_every_order_of_ranks(monkeypatch: pytest.MonkeyPatch, cheap: tuple[int, ...]) -> None:
    """Two backends, native and padded, in all 24 orders, on all 16 machines."""
    slots = list(itertools.product(("flash4", "cudnn"), (False, True)))
    machine = Machine(monkeypatch, COSTS | {slot: float(cost) for slot, cost in zip(slots, cheap)})
    for held in itertools.product((NEVER, ALWAYS), repeat=4):
        machine.check(PAIRS["MLA"], True, dict(zip(slots, held)))


def test_native_wins_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, dict.fromkeys(COSTS, 1.0))
    for name, other in itertools.product(IN_PLACE, repeat=2):
        assert machine.check(PAIRS["MLA"], True, {(name, False): ALWAYS, (other, True): ALWAYS}) == "native"
        # Of two equals the first in the registry, on every rank and in every run.
        assert machine.check(PAIRS["MLA"], True, {(name, False): ALWAYS, (other, False): ALWAYS}) == "native"


@pytest.mark.parametrize("pair", [(128, 128), (64, 64), (256, 256)])
def test_equal_widths_are_never_padded(monkeypatch: pytest.MonkeyPatch, pair: tuple[int, int]) -> None:
    install(monkeypatch, *map(Stub, IN_PLACE))
    chosen = selection.select(Request(CPU.replace(head_dim_qk=pair[0], head_dim_v=pair[1])))
    assert chosen.head_dim_padded == 0 and {c.head_dim_padded for c in chosen.candidates} == {0}


def test_widths_of_no_multiple_of_8_round_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiples_of_8(p: AttentionParams) -> Iterator[str]:
        if p.head_dim_qk % 8 or p.head_dim_v % 8:
            yield f"needs multiples of 8, found {p.head_dim_qk} and {p.head_dim_v}"

    for pair, width in (((100, 96), 104), ((100, 100), 104), ((97, 1), 104), ((96, 100), 104)):
        install(monkeypatch, Stub("flash4", multiples_of_8))
        assert selection.select(Request(CPU.replace(head_dim_qk=pair[0], head_dim_v=pair[1]))).head_dim_padded == width


def test_availability_by_environment_is_availability(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is switched off counts as absent in both probes, and its reason is told."""
    install(monkeypatch, Stub("flash2", refuse_native), Stub("cudnn"))
    params = CPU.replace(sm=100)
    assert selection.select(Request(params)).backends == ("cudnn",)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    chosen = selection.select(Request(params))
    assert (chosen.backends, chosen.head_dim_padded) == (("flash2",), 192)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    with pytest.raises(NoBackendError) as error:
        selection.select(Request(params))
    for name, switch in (("flash2", "NVTE_FLASH_ATTN"), ("cudnn", "NVTE_FUSED_ATTN")):
        for width in ("native widths", "padded to 192"):
            assert f"{name} ({width}, padded): disabled by {switch}=0" in str(error.value)


# ------------------------------------------------------------------------------------------------------------------- policies
CAUSAL, FULL = Band(None, 0), Band(None, None)


@pytest.mark.parametrize("flex", [None, 0.5, 3.25, 50.0])
def test_policies_pad_together_or_not_at_all(monkeypatch: pytest.MonkeyPatch, flex: float | None) -> None:
    """Two masks, two backends, each able or not at each mask and width (256 machines), with and without one launch for all."""
    names = ("flash4", "flash2")
    costs = {("flash4", False): 4.0, ("flash4", True): 2.0, ("flash2", False): 3.0, ("flash2", True): 5.0}
    slots = list(itertools.product(names, (False, True), (CAUSAL, FULL)))
    able: dict[tuple[str, bool, Band], bool] = {}

    def refuse_for(name: str) -> Refuse:
        def refuse(p: AttentionParams) -> Iterator[str]:
            if not able[name, p.head_dim_qk == p.head_dim_v, p.bands[0]]:
                yield "cannot"

        return refuse

    stubs = [Stub(name, refuse_for(name)) for name in names]
    if flex is not None:
        stubs.append(Stub("cudnn_flex", refuse_equal_widths))
    install(monkeypatch, *stubs)
    monkeypatch.setattr(ranks, "static_cost", lambda backend, p, padded, widths: costs.get((backend, padded), math.nan))
    monkeypatch.setattr(ranks, "single_launch_cost", lambda p, padded_dispatch_cost: flex)
    monkeypatch.setattr(ranks, "dispatch_factor", lambda *args: 1.02)
    request = Request(CPU.replace(bands=(CAUSAL, FULL), single_launch_plan=True))
    for held in itertools.product((False, True), repeat=len(slots)):
        able.clear()
        able.update(zip(slots, held))
        ways: list[tuple[float, bool, str, tuple[str, ...]]] = []
        for padded in (False, True):
            best = [min(((costs[n, padded], n) for n in names if able[n, padded, band]), default=None) for band in (CAUSAL, FULL)]
            if None not in best:
                both = [entry for entry in best if entry is not None]
                ways.append((1.02 * sum(c for c, _ in both) / 2, padded, "padded", tuple(n for _, n in both)))
        if flex is not None:
            ways.append((flex, False, "single_launch", ("cudnn_flex", "cudnn_flex")))
        if not ways:
            with pytest.raises(NoBackendError):
                selection._select(request)
            continue
        chosen = selection._select(request)
        _, padded, dispatch, backends = min(ways)
        assert (chosen.head_dim_padded != 0, chosen.dispatch, chosen.backends) == (padded, dispatch, backends), able


def refuse_equal_widths(p: AttentionParams) -> Iterator[str]:
    if p.head_dim_qk == p.head_dim_v:
        yield "its plan is for the native widths"


# ------------------------------------------------------------------------------------------------------ the measured table
# One H200, raw kernels: ms (forward, forward + backward), pad and trim included; None where the kernel cannot run.
_H200 = {
    # widths: torch_flash padded, flash4 native, flash4 padded, cudnn native, cudnn padded
    (192, 128): ((1.61, 5.90), (0.57, 2.56), (0.80, 2.99), (0.67, 3.06), (0.92, 4.62)),
    (128, 64): ((1.02, 3.65), (0.42, 1.61), (0.54, 1.87), (0.46, 1.91), (0.61, 2.15)),
    (96, 64): ((0.79, 3.03), (0.37, 1.31), (0.49, 1.60), (0.45, 1.90), (0.61, 2.14)),
    (160, 128): ((1.77, 6.43), (0.53, 2.36), (0.75, 3.01), (0.67, 2.91), (0.93, 4.65)),
    (256, 128): ((2.03, 8.00), (0.69, 4.31), (0.96, 5.04), (0.84, 3.59), (1.08, 5.30)),
    (192, 64): ((1.56, 5.79), (0.49, 2.19), (0.75, 3.03), (0.74, 4.32), (0.85, 4.52)),
    (64, 128): ((1.04, 3.69), (0.64, None), (0.57, 1.92), (0.51, 1.94), (0.64, 2.20)),
    (128, 96): ((1.05, 3.68), (0.43, None), (0.59, 1.99), (0.52, 2.13), (0.69, 2.26)),
}
_COLUMNS = (("torch_flash", True), ("flash4", False), ("flash4", True), ("cudnn", False), ("cudnn", True))
_INSTALLED = [c for n in (1, 2, 3) for c in itertools.combinations(("torch_flash", "flash4", "cudnn"), n)]


@pytest.mark.parametrize("installed", _INSTALLED, ids="-".join)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("pair", _H200, ids=str)
def test_the_static_choice_is_near_the_best_cell(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[int, int], training: bool, installed: tuple[str, ...]
) -> None:
    """Within 10% of the best of what is installed, for every set of installed backends."""
    cells = {column: times[training] for column, times in zip(_COLUMNS, _H200[pair]) if column[0] in installed}

    def refuse_for(name: str) -> Refuse:
        def refuse(p: AttentionParams) -> Iterator[str]:
            if cells.get((name, p.head_dim_qk == p.head_dim_v)) is None:
                yield "cannot run this"

        return refuse

    install(monkeypatch, *(Stub(name, refuse_for(name)) for name in installed), Stub("unfused"))
    params = AttentionParams(head_dim_qk=pair[0], head_dim_v=pair[1], is_training=training)
    chosen = selection.select(Request(params))
    ms = cells[chosen.backends[0], chosen.head_dim_padded != 0]
    best = min(t for t in cells.values() if t is not None)
    assert ms is not None and ms <= 1.10 * best, (chosen.backends, chosen.head_dim_padded)


@pytest.mark.parametrize("pair", [(64, 64), (128, 128), (72, 64), (112, 128), (176, 128), (240, 128), (100, 96), (256, 192)], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_widths_between_the_measured_ones(pair: tuple[int, int], training: bool) -> None:
    """An interpolated cost is positive, grows with the width and keeps the order of the backends."""
    p = AttentionParams(head_dim_qk=pair[0], head_dim_v=pair[1], is_training=training)
    padded = p.padded_to(p.padded_width)
    cost = {name: ranks.static_cost(name, padded, True, pair) for name in BACKEND_NAMES if name != "cudnn_flex"}
    assert 0 < cost["flash4"] < cost["flash3"] < cost["cudnn"] < cost["flash2"] < cost["torch_flash"] < cost["unfused"]
    wider = ranks.static_cost("flash4", padded.padded_to(2 * p.padded_width), True, (2 * pair[0], 2 * pair[1]))
    assert wider > cost["flash4"]


# ----------------------------------------------------------------------------------- machines from their documented limits
def _equal_to_256(p: AttentionParams) -> Iterator[str]:
    """FlashAttention 2, in its package and in torch: sm80 and newer."""
    if p.sm < 80:
        yield f"needs sm80, found sm{p.sm}"
    if p.head_dim_qk != p.head_dim_v or p.head_dim_qk % 8 or p.head_dim_qk > 256:
        yield f"needs equal widths up to 256 in multiples of 8, found {p.head_dim_qk} and {p.head_dim_v}"


def _flash3(p: AttentionParams) -> Iterator[str]:
    """FlashAttention 3: sm90 alone."""
    qk, v = p.head_dim_qk, p.head_dim_v
    if p.sm != 90:
        yield f"needs sm90, found sm{p.sm}"
    if qk != v and not (128 < qk <= 192 and 96 < v <= 128) and not (qk <= 64 and v <= 512):
        yield "does not take these unequal widths"
    if max(qk, v) > 256:
        yield "widths above 256"
    if p.deterministic and p.is_training and max(qk, v) >= 256:
        yield "no deterministic backward from 256 on"


def _flash4(p: AttentionParams) -> Iterator[str]:
    """FlashAttention 4: its validator, and the backward's alignment fault on sm100."""
    qk, v = p.head_dim_qk, p.head_dim_v
    if p.sm < 90:
        yield f"needs sm90, found sm{p.sm}"
    elif p.sm < 100:
        if qk % 8 or v % 8 or max(qk, v) > 256:
            yield "needs multiples of 8 up to 256"
        if p.is_training and (qk, v) in ((64, 128), (128, 96)):
            yield "its backward asks for more shared memory than there is"
    else:
        small = qk % 8 == 0 and v % 8 == 0 and max(qk, v) <= 128
        if not small and (qk, v) not in ((192, 128), (64, 512), (256, 256)):
            yield "needs widths up to 128, or 192 and 128"
        aligned = (math.ceil(v / 16) * 16 // 2) % math.gcd(32, math.ceil(qk / 16) * 16 // 2) == 0
        if p.is_training and qk >= 128 and not aligned:
            yield "its backward is misaligned"


def _cudnn(p: AttentionParams) -> Iterator[str]:
    """cuDNN 9.19, packed layouts: TransformerEngine's rules."""
    qk, v = p.head_dim_qk, p.head_dim_v
    if p.sm < 90:
        yield f"needs sm90 for packed layouts, found sm{p.sm}"
    if qk % 8 or v % 8:
        yield "needs multiples of 8"
    if p.sm < 100:
        if max(qk, v) > 256:
            yield "widths above 256"
        if p.is_training and min(qk, v) >= 128 and qk != v and (qk, v) != (192, 128):
            yield "no right backward for these widths"
    elif p.is_training and max(qk, v) > 128 and (qk, v) != (192, 128):
        yield "its backward takes widths up to 128, or 192 and 128"


def _anything(p: AttentionParams) -> Iterator[str]:
    return iter(())


_LIMITS: dict[str, Refuse] = {
    "flash2": _equal_to_256,
    "torch_flash": _equal_to_256,
    "flash3": _flash3,
    "flash4": _flash4,
    "cudnn": _cudnn,
    "unfused": _anything,
}
_ALL = tuple(_LIMITS)


def on_machine(
    monkeypatch: pytest.MonkeyPatch, sm: int, installed: Sequence[str], pair: tuple[int, int], training: bool
) -> tuple[str, int]:
    install(monkeypatch, *(Stub(name, _LIMITS[name]) for name in {*installed, "unfused"}))
    chosen = selection.select(Request(AttentionParams(sm=sm, head_dim_qk=pair[0], head_dim_v=pair[1], is_training=training)))
    return chosen.backends[0], chosen.head_dim_padded


# sm, installed beside unfused, widths, training: the backend and the width it is padded to.
_MACHINES = [
    # A100: only FlashAttention 2 is packed there, and it needs equal widths. Native would be unfused, 118 times slower.
    (80, ("flash2",), (192, 128), True, ("flash2", 192)),
    (80, ("flash2",), (192, 128), False, ("flash2", 192)),
    (80, ("torch_flash",), (192, 128), True, ("torch_flash", 192)),
    (80, ("flash2", "torch_flash"), (192, 128), True, ("flash2", 192)),
    (80, ("cudnn",), (192, 128), True, ("unfused", 0)),
    (80, ("cudnn", "flash2"), (192, 128), True, ("flash2", 192)),
    (80, ("flash3", "flash4", "cudnn"), (192, 128), True, ("unfused", 0)),
    (80, _ALL, (128, 192), True, ("flash2", 192)),
    (80, _ALL, (128, 64), True, ("flash2", 128)),
    (80, _ALL, (256, 128), True, ("flash2", 256)),
    (80, _ALL, (100, 96), True, ("flash2", 104)),
    (80, _ALL, (100, 100), True, ("flash2", 104)),
    (80, _ALL, (128, 128), True, ("flash2", 0)),
    (80, _ALL, (256, 256), True, ("flash2", 0)),
    (80, _ALL, (264, 256), True, ("unfused", 0)),
    (80, _ALL, (576, 512), False, ("unfused", 0)),
    (80, (), (192, 128), True, ("unfused", 0)),
    # H200: native where a kernel has both passes.
    (90, ("flash2",), (192, 128), True, ("flash2", 192)),
    (90, ("flash2", "cudnn"), (192, 128), True, ("cudnn", 0)),
    (90, ("flash2", "flash3"), (192, 128), True, ("flash3", 0)),
    (90, ("flash2", "flash3"), (128, 64), True, ("flash3", 128)),
    (90, ("flash2", "flash4"), (192, 128), True, ("flash4", 0)),
    (90, ("flash4",), (64, 128), True, ("flash4", 128)),
    (90, ("flash4",), (64, 128), False, ("flash4", 128)),
    (90, ("flash4",), (128, 96), True, ("flash4", 128)),
    (90, ("flash4",), (128, 96), False, ("flash4", 0)),
    (90, ("cudnn",), (256, 128), True, ("cudnn", 256)),
    (90, ("cudnn",), (256, 128), False, ("cudnn", 0)),
    (90, ("flash2", "cudnn"), (160, 128), True, ("cudnn", 160)),
    (90, _ALL, (256, 128), True, ("flash4", 0)),
    (90, _ALL, (264, 256), True, ("unfused", 0)),
    # B200: cuDNN and FlashAttention 4 train 192/128 natively and 192/192 not at all.
    (100, _ALL, (192, 128), True, ("cudnn", 0)),
    (100, _ALL, (192, 128), False, ("cudnn", 0)),
    (100, ("cudnn",), (192, 128), True, ("cudnn", 0)),
    (100, ("flash4",), (192, 128), True, ("flash4", 0)),
    (100, ("flash2",), (192, 128), True, ("flash2", 192)),
    (100, ("flash4", "flash2"), (192, 128), True, ("flash4", 0)),
    (100, ("cudnn",), (192, 192), True, ("unfused", 0)),
    (100, ("cudnn",), (192, 192), False, ("cudnn", 0)),
    (100, ("cudnn", "flash2"), (192, 192), True, ("flash2", 0)),
    (100, ("cudnn", "flash4"), (128, 96), True, ("cudnn", 0)),
    (100, ("flash4",), (128, 96), True, ("flash4", 128)),
    (100, ("flash4",), (128, 96), False, ("flash4", 0)),
    (100, ("flash4",), (64, 128), True, ("flash4", 0)),
    (100, ("cudnn", "flash4"), (256, 128), True, ("flash4", 256)),
    (100, ("cudnn",), (256, 128), False, ("cudnn", 0)),
    (100, ("cudnn", "flash2"), (256, 128), True, ("flash2", 256)),
    (100, ("flash3",), (192, 128), True, ("unfused", 0)),
    # Case 6: no list of exact architectures.
    *[(sm, ("flash2",), (256, 256), True, ("flash2", 0)) for sm in (86, 89, 90, 103, 120)],
    *[(sm, ("flash2",), (256, 192), True, ("flash2", 256)) for sm in (86, 89, 90, 103, 120)],
    (75, _ALL, (192, 128), True, ("unfused", 0)),
]


@pytest.mark.filterwarnings("ignore:attention runs unfused on a GPU")
@pytest.mark.parametrize(("sm", "installed", "pair", "training", "expected"), _MACHINES, ids=str)
def test_documented_machines(
    monkeypatch: pytest.MonkeyPatch,
    sm: int,
    installed: tuple[str, ...],
    pair: tuple[int, int],
    training: bool,
    expected: tuple[str, int],
) -> None:
    assert on_machine(monkeypatch, sm, installed, pair, training) == expected


@pytest.mark.filterwarnings("ignore:attention runs unfused on a GPU")
@pytest.mark.parametrize("sm", [80, 86, 90, 100, 103, 120])
@pytest.mark.parametrize("training", [False, True])
def test_never_an_error_and_never_unfused_beside_a_kernel(monkeypatch: pytest.MonkeyPatch, sm: int, training: bool) -> None:
    """Over every set of installed backends and a grid of widths: what is chosen accepts the call, and it is a kernel if any is."""
    pairs = [(192, 128), (128, 192), (128, 64), (128, 96), (64, 128), (256, 128), (160, 128), (100, 96), (64, 64), (288, 256)]
    kernels = [name for name in _ALL if name != "unfused"]
    for installed in itertools.chain.from_iterable(itertools.combinations(kernels, n) for n in range(len(kernels) + 1)):
        install(monkeypatch, *(Stub(name, _LIMITS[name]) for name in (*installed, "unfused")))
        for pair in pairs:
            p = AttentionParams(sm=sm, head_dim_qk=pair[0], head_dim_v=pair[1], is_training=training)
            padded = p.padded_to(width_of(pair))
            chosen = selection._select(Request(p))
            seen = padded if chosen.head_dim_padded else p
            assert not list(_LIMITS[chosen.backends[0]](seen))
            can = [name for name in installed if not list(_LIMITS[name](p)) or not list(_LIMITS[name](padded))]
            assert (chosen.backends[0] == "unfused") == (not can), (installed, pair)


def test_training_and_inference_are_cached_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 3: padded has no backward there. The order of the questions must not matter."""
    for first in (True, False):
        forget_choices()
        answers = {
            training: on_machine(monkeypatch, 100, ("flash4",), (128, 96), training) for training in (first, not first)
        }
        assert answers == {True: ("flash4", 128), False: ("flash4", 0)}


# ---------------------------------------------------------------------------------------------------- should_pad_qkv_head_dim
def test_should_pad_says_what_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Stub("flash2", refuse_native), Stub("unfused"))
    assert should_pad_qkv_head_dim(CPU) is True
    assert should_pad_qkv_head_dim(CPU.replace(head_dim_v=192)) is False
    install(monkeypatch, Stub("flash2", refuse_native), Stub("flash4"), Stub("unfused"))
    assert should_pad_qkv_head_dim(CPU) is False
    install(monkeypatch)
    with pytest.raises(NoBackendError):
        should_pad_qkv_head_dim(CPU)


def test_should_pad_a_b_a_b_probes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Stub("flash2", refuse_native))
    start = selection.probe_count()
    assert [should_pad_qkv_head_dim(p) for p in (CPU, CPU.replace(head_dim_qk=128)) * 2] == [True, False] * 2
    assert selection.probe_count() - start == 2


def test_should_pad_probes_again_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub("flash2", refuse_native)
    install(monkeypatch, stub, Stub("unfused"))
    assert should_pad_qkv_head_dim(CPU)
    stub._installed = False
    assert should_pad_qkv_head_dim(CPU), "a memo that forgets by itself"
    assert not should_pad_qkv_head_dim(CPU, invalidate_cache=True)
    stub._installed = True
    assert not should_pad_qkv_head_dim(CPU)
    assert should_pad_qkv_head_dim(CPU, invalidate_cache=True)


def test_should_pad_from_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub("flash2", refuse_native)
    install(monkeypatch, stub)
    start, barrier = selection.probe_count(), threading.Barrier(8)
    answers: list[bool] = []

    def ask() -> None:
        barrier.wait()
        for n in range(20):
            answers.append(should_pad_qkv_head_dim(CPU.replace(num_heads=1 + n % 5, num_gqa_groups=1)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 160 and selection.probe_count() - start == 5


# --------------------------------------------------------------------------------------------------------------- what padding does
def padded_case(head_dim_qk: int, head_dim_v: int) -> PackedCase:
    return PackedCase((5, 9), head_dim_qk=head_dim_qk, head_dim_v=head_dim_v)


@pytest.mark.parametrize("pair", [(24, 16), (16, 24), (12, 9)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_tuples_are_trimmed_and_fakes_have_the_same_structure(pair: tuple[int, int], masked: bool) -> None:
    """Case 7: only out is trimmed; lse and max_logit are what they are without padding."""
    inputs = build(padded_case(*pair), requires_grad=masked)
    results = [inputs.attend(pad_head_dim=pad, return_lse=True, return_max_logit=True) for pad in (False, True)]
    with FakeTensorMode() as mode:
        case = inputs.case
        q, k, v = (mode.from_tensor(x) for x in (inputs.q, inputs.k, inputs.v))
        cu = mode.from_tensor(inputs.cu_seqlens_q)
        for pad in (False, True):
            options: dict[str, Any] = {"pad_head_dim": pad, "return_lse": True, "return_max_logit": True}
            results.append(thd_attention(q, k, v, cu, max_seqlen_q=case.max_seqlens[0], **options))
    for result in results:
        assert isinstance(result, tuple)
        assert [tuple(x.shape) for x in result] == [(14, 2, pair[1]), (2, 14), (2,)]
        assert [x.stride() for x in result] == [x.stride() for x in results[0]]
        assert [x.dtype for x in result] == [torch.float32] * 3
        assert all(x.requires_grad == (masked and i == 0) for i, x in enumerate(result))
    for native, padded in zip(results[0], results[1]):
        torch.testing.assert_close(native, padded)


def test_reverse_widths_pad_q_and_k_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 9: the scale stays that of the width given, the output needs no trim, the gradients have the widths given."""
    seen: list[ForwardCall] = []
    install(monkeypatch, Stub("flash2", refuse_native, before_forward=seen.append))
    inputs = build(padded_case(16, 24))
    found = inputs.run()
    (call,) = seen
    assert call.q.shape[2] == call.k.shape[2] == 24 and call.scale == 16**-0.5
    assert not call.q[..., 16:].any() and not call.k[..., 16:].any()
    assert call.v.data_ptr() == inputs.v.data_ptr(), "V was copied for nothing"
    assert found.out.shape[2] == 24 and found.dq is not None and found.dk is not None
    assert found.dq.shape[2] == found.dk.shape[2] == 16
    install(monkeypatch, Stub("unfused"))
    native = inputs.run(pad_head_dim=False)
    for name, value in native._asdict().items():
        torch.testing.assert_close(getattr(found, name), value, msg=f"{name} differs from the native call")


def test_an_override_holds_for_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 5: the next call without it is as before, and no variable was written."""
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Any:
        return lambda call: seen.append((name, call.v.shape[2]))

    install(monkeypatch, *(Stub(name, before_forward=note(name)) for name in ("flash4", "flash2")))
    import os

    before = dict(os.environ)
    inputs = build(padded_case(24, 16))
    for overrides in ({}, {"backend": "flash2"}, {"pad_head_dim": True}, {"backend": "flash2", "pad_head_dim": True}, {}):
        inputs.attend(**overrides)
    assert seen == [("flash4", 16), ("flash2", 16), ("flash4", 24), ("flash2", 24), ("flash4", 16)]
    assert dict(os.environ) == before


def test_an_override_that_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Stub("flash2", refuse_native), Stub("unfused"))
    inputs = build(padded_case(24, 16))
    with pytest.raises(NoBackendError, match="with backend='flash2', pad_head_dim=False") as error:
        inputs.attend(backend="flash2", pad_head_dim=False)
    assert "needs equal head dims, found 24 and 16" in str(error.value) and "unfused" not in str(error.value)


def test_a_packed_projection_is_padded_by_its_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V out of one buffer [T, H, 24 + 16]: padding makes tensors of its own, and the gradients still reach the buffer."""
    install(monkeypatch, Stub("flash2", refuse_native))
    inputs = build(padded_case(24, 16).replace(layout="interleaved"))
    assert inputs.v.stride(0) == 2 * (24 + 16)
    padded = inputs.run()
    install(monkeypatch, Stub("unfused"))
    native = inputs.run()
    for name, value in native._asdict().items():
        torch.testing.assert_close(getattr(padded, name), value, msg=f"{name} differs from the native call")


def test_cu_seqlens_clones_do_not_shrink_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases 17 and 18: padded cu_seqlens of equal values are gaps that may be empty; width 256 keeps its kernel."""
    install(monkeypatch, Stub("flash2", _equal_to_256_cpu), Stub("unfused"))
    inputs = build(PackedCase((64, 64), head_dim_qk=256))
    cu = inputs.cu_seqlens_q
    options: dict[str, Any] = {"max_seqlen_q": 64, "return_lse": True}
    plain = thd_attention(inputs.q, inputs.k, inputs.v, cu, **options)
    cloned = thd_attention(inputs.q, inputs.k, inputs.v, cu, cu_seqlens_q_padded=cu.clone(), **options)
    torch.testing.assert_close(cloned, plain, rtol=0, atol=0)


def _equal_to_256_cpu(p: AttentionParams) -> Iterator[str]:
    yield from _equal_to_256(p.replace(sm=80))
