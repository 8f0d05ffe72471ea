"""A new batch geometry every step: what preparing it costs, shared by the layers of a model.

Per layer: the attention itself (graphed, forward+backward) plus the preparation divided by the number of layers. The preparation is
wall time from the call to the end of its last kernel: FlexAttention's compiled create_block_mask, our prepare_thd_policies with
the single-launch plan, and without it for the padded dispatch.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from te_attn_ops import prepare_thd_policies
from te_attn_ops.measure import sample_times
from te_attn_ops.policies import PlanSpec

from . import common, flex
from .mixed import Setup, _public

LAYERS = (1, 32)


def _wall(make: Callable[[int], Any], rounds: int = 8) -> float:
    """Median milliseconds of preparing one geometry after another; the first two only warm up."""
    samples = []
    for step in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        kept = make(step)
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e3)
        del kept
    return statistics.median(samples[2:])


def _geometries(s: Setup, count: int) -> list[Setup]:
    """The work's lengths in other orders: as many tokens, sequences and policies, other places."""
    shuffled = []
    for seed in range(count):
        lengths = list(s.work.lengths)
        random.Random(seed).shuffle(lengths)
        work = dataclasses.replace(s.work, lengths=tuple(lengths))
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
        shuffled.append(dataclasses.replace(s, work=work, cu_seqlens=cu_seqlens))
    return shuffled


def run(s: Setup) -> list[dict[str, Any]]:
    geometries = _geometries(s, 8)
    policies = s.work.policies(torch.device("cuda"))
    spec = PlanSpec(s.q.dtype, s.q.shape[1], s.k.shape[1], s.q.shape[2], s.v.shape[2], training=True)
    rows: list[dict[str, Any]] = []

    def prepare(step: int, attention: Any) -> Any:
        return prepare_thd_policies(policies, geometries[step].cu_seqlens, attention=attention, total_q=s.q.shape[0])

    def flex_mask(step: int) -> Any:
        return flex.block_mask(geometries[step], flex.mask_tensors(geometries[step]))

    ours = {"thd_attention_policies": s.policies}
    works: list[tuple[dict[str, Any], str, Callable[[int], Any], Callable[[], Any]]] = []
    if s.policies.plans:
        call = _public(s, True, True, thd_attention_policy_dispatch="single_launch", **ours)
        label = {"backend": "cudnn_flex", "dispatch": "single_launch"}
        works.append((label, "plan_ms", lambda step: prepare(step, spec), call))
    call = _public(s, True, True, thd_attention_policy_dispatch="padded", **ours)
    works.append(({"backend": "auto", "dispatch": "padded"}, "plan_ms", lambda step: prepare(step, None), call))
    for label, make in flex.variants(s):
        plain = {key: value for key, value in label.items() if key != "mask_ms"}
        works.append((plain, "mask_ms", flex_mask, make(True, True)))
    replays: dict[int, Callable[[], Any]] = {}
    preparations: dict[int, float] = {}
    described = [{**s.description, "selection": None, **work[0], "graphed": True, "backward": True, "new_geometry": True} for work in works]
    for number, (_, _, make_geometry, call) in enumerate(works):
        try:
            call()
            replays[number] = common.capture(call)
            preparations[number] = _wall(make_geometry)
        except Exception as error:  # one broken kernel must not cost the other rows
            replays.pop(number, None)
            rows.append({**described[number], "ms": None, "error": f"{type(error).__name__}: {error}"[:500]})
    for number, samples in sample_times(replays, s.q.device, 500.0, (11, 31)).items():
        attention, key, preparation = common.Timing(samples), works[number][1], preparations[number]
        for layers in LAYERS:
            ms = attention.ms + preparation / layers
            rows.append({**described[number], "layers": layers, key: preparation, "ms": ms, "ms_spread": attention.spread})
    return rows
