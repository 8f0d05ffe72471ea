"""What a mixed batch costs a training step: transformer layers, forward + backward + Adam, compiled.

    python -m benchmarks.layers [--variants mha mla] [--out FILE]

Half of the documents are causal and half full, against the mean of all causal and all full. Writes JSON: under ``variants``, per
model, ``step_ms`` of each way to run, the ratios ``mixed_over_mean_uniform`` (one plan, reused), ``mixed_with_plan_over_mean_uniform``
(membership changes every step; the next step's plan is prepared on a side stream while this one runs) and
``grouped_over_mean_uniform``, their spread over the rounds, and which backend ran. A Markdown table stands beside it.

All ways to run share one model and take turns, round by round, so that clocks and temperature meet all of them; a ratio is the
median over the rounds. A step lasts from the end of the one before to its own end, idle time of the device included.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from te_attn_ops import NoBackendError, PreparedPolicies, explain, prepare_thd_policies
from te_attn_ops.modules import RotaryPositionEmbedding, TransformerLayer

from . import common

MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DISPATCHES = ("auto", "padded", "single_launch", "grouped")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and the batch, and how long to measure."""

    device: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    tokens: int
    documents: int
    rounds: int
    steps: int


# ------------------------------------------------------------------------------------------------------------------ the model
class Model:
    """Layers compiled one by one (they share their graphs), their optimiser and one batch of documents of equal length."""

    def __init__(self, variant: str, sizes: Sizes) -> None:
        torch.manual_seed(0)
        self.sizes = sizes
        self.device = torch.device(sizes.device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        latent: dict[str, Any] = MLA if variant == "mla" else {}
        self.layers = torch.nn.ModuleList(
            TransformerLayer(
                sizes.hidden, sizes.ffn, sizes.heads, hidden_dropout=0.0, layer_number=n + 1, params_dtype=dtype,
                device=self.device, attn_input_format="thd", normalization="RMSNorm", activation="swiglu", bias=False, **latent,
            )
            for n in range(sizes.layers)
        )  # fmt: skip
        for layer in self.layers:
            layer.compile(fullgraph=True)
        self.optimizer = torch.optim.Adam(self.layers.parameters(), lr=1e-5, fused=self.device.type == "cuda")
        length = sizes.tokens // sizes.documents
        head_dim = latent.get("qk_rope_head_dim", sizes.hidden // sizes.heads)
        self.x = torch.randn(sizes.tokens, sizes.hidden, device=self.device, dtype=dtype, requires_grad=True)
        self.cu_seqlens = torch.arange(sizes.documents + 1, device=self.device, dtype=torch.int32) * length
        self.call: dict[str, Any] = {
            "cu_seqlens_q": self.cu_seqlens,
            "max_seqlen_q": length,
            "rotary_pos_emb": RotaryPositionEmbedding(head_dim, device=self.device)(length),
        }

    def step(self, **mask: Any) -> None:
        hidden = self.x
        for layer in self.layers:
            hidden = layer(hidden, **self.call, **mask)
        hidden.float().square().mean().backward()
        self.x.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def prepare(self, parity: int) -> PreparedPolicies:
        """Causal and full documents in turn; ``parity`` says which come first."""
        ids = torch.arange(self.sizes.documents, device=self.device)
        policies = [
            {"sequence_ids": ids[parity::2], "mask_type": "padding_causal", "window_size": (-1, 0)},
            {"sequence_ids": ids[1 - parity :: 2], "mask_type": "padding", "window_size": (-1, -1)},
        ]
        return prepare_thd_policies(
            policies, self.cu_seqlens, attention=self.layers[0], total_q=self.sizes.tokens, max_seqlen_q=self.call["max_seqlen_q"]
        )


class PlanAhead:
    """The next step's policies, prepared on a side stream while the device runs the present step."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.on_cuda = model.device.type == "cuda"
        self.stream = torch.cuda.Stream(priority=-1) if self.on_cuda else None
        self.count = 0
        self.host_ms: list[float] = []
        self.ahead()

    def ahead(self) -> None:
        start = time.perf_counter()
        with torch.cuda.stream(self.stream):
            self.prepared = self.model.prepare(self.count % 2)
            self.ready = torch.cuda.Event() if self.on_cuda else None
            if self.ready is not None:
                self.ready.record()
        self.count += 1
        self.host_ms.append((time.perf_counter() - start) * 1e3)

    def step(self) -> None:
        prepared = self.prepared
        if self.ready is not None:
            main = torch.cuda.current_stream()
            main.wait_event(self.ready)
            prepared.record_stream(main)
        self.model.step(thd_attention_policies=prepared)
        self.ahead()


# -------------------------------------------------------------------------------------------------------------------- timing
class Clock:
    """Marks on the device's time line: CUDA events, or the host's clock on a CPU."""

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Milliseconds between marks."""
        if self.on_cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:])]
        return [(b - a) * 1e3 for a, b in zip(self.marks, self.marks[1:])]


def time_block(step: Callable[[], None], steps: int, on_cuda: bool) -> float:
    """The median step of a block; one step more comes first and is left out."""
    step()
    clock = Clock(on_cuda)
    clock.mark()
    for _ in range(steps):
        step()
        clock.mark()
    return statistics.median(clock.intervals())


def ways_to_run(model: Model) -> tuple[dict[str, Callable[[], None]], dict[str, str | None], PlanAhead]:
    """Steps by name, what each chose, and the planner of the one that plans every step."""
    prepared, planner = model.prepare(0), PlanAhead(model)
    arguments: dict[str, dict[str, Any]] = {
        "causal": {"self_attn_mask_type": "padding_causal"},
        "full": {"self_attn_mask_type": "padding"},
    }
    for dispatch in DISPATCHES:
        arguments[f"mixed_{dispatch}"] = {"thd_attention_policies": prepared, "thd_attention_policy_dispatch": dispatch}
    steps: dict[str, Callable[[], None]] = {}
    chosen: dict[str, str | None] = {}
    for name, mask in arguments.items():
        found = explain(model.layers[0], model.x, **model.call, **mask).winner
        chosen[name] = None if found is None else f"{found['backend']}, {found['dispatch']}, width {found['head_dim_padded'] or 'native'}"
        if found is not None:
            steps[name] = lambda mask=mask: model.step(**mask)
    steps["mixed_with_plan"] = planner.step
    chosen["mixed_with_plan"] = chosen["mixed_auto"]
    return steps, chosen, planner


def run(variant: str, sizes: Sizes) -> dict[str, Any]:
    model = Model(variant, sizes)
    on_cuda = model.device.type == "cuda"
    steps, chosen, planner = ways_to_run(model)
    start = time.perf_counter()
    for name in list(steps):
        try:
            for _ in range(3):
                steps[name]()
        except NoBackendError as error:
            del steps[name]
            chosen[name] = str(error)[:300]
    warm_up_s = time.perf_counter() - start
    planner.host_ms.clear()
    graphs = _graphs()
    rounds: list[dict[str, float]] = []
    for number in common.progress(range(sizes.rounds), variant):
        # Another order each time: what ran just before leaves its mark on the clock (seen: 1% after the hottest).
        order = random.Random(number).sample(list(steps), len(steps))
        rounds.append({name: time_block(steps[name], sizes.steps, on_cuda) for name in order})
    result: dict[str, Any] = {}
    for key, name in (
        ("mixed_over_mean_uniform", "mixed_auto"),
        ("mixed_with_plan_over_mean_uniform", "mixed_with_plan"),
        ("grouped_over_mean_uniform", "mixed_grouped"),
    ):
        ratios = [r[name] / (0.5 * (r["causal"] + r["full"])) for r in rounds if name in r]
        result[key] = round(statistics.median(ratios), 4) if ratios else None
        result[f"{key}_spread"] = [round(min(ratios), 4), round(max(ratios), 4)] if ratios else None
    result["step_ms"] = {name: round(statistics.median(r[name] for r in rounds), 3) for name in steps}
    result["chosen"] = chosen
    result["plan_host_ms"] = round(statistics.median(planner.host_ms), 3)
    result["parameters"] = sum(p.numel() for p in model.layers.parameters())
    result["warm_up_s"] = round(warm_up_s, 1)
    result["compilations_while_timed"] = _graphs() - graphs
    return result


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


# ------------------------------------------------------------------------------------------------------------------- reports
def table(variants: dict[str, Any]) -> str:
    rows = []
    for variant, result in variants.items():
        ms = result["step_ms"]
        uniform = 0.5 * (ms["causal"] + ms["full"])
        for name, value in ms.items():
            rows.append([variant, name, result["chosen"].get(name), value, value / uniform])
    return common.markdown_table(("model", "batch", "ran on", "step ms", "over mean uniform"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["mha", "mla"], choices=("mha", "mla"))
    parser.add_argument("--device", default="cuda", help="cpu to try it out, with small sizes")
    for name, default in (("layers", 8), ("hidden", 2048), ("ffn", 5632), ("heads", 16), ("tokens", 16384), ("documents", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each way to run, per round")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "layers_h200.json")
    arguments = vars(parser.parse_args())
    variants, out = arguments.pop("variants"), arguments.pop("out")
    sizes = Sizes(**arguments)
    if sizes.device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    # Every way to run is a graph of the same code.
    torch._dynamo.config.recompile_limit = 64
    results: dict[str, Any] = {}
    for variant in variants:
        results[variant] = run(variant, sizes)
        gc.collect()
    data = {
        "device": common.device_name(),
        "versions": common.versions(),
        "command": common.command_line(),
        "sizes": arguments,
        "variants": results,
    }
    common.write_json(out, data)
    out.with_suffix(".md").write_text(table(results))
    print(table(results))
    for variant, result in results.items():
        print(variant, {key: value for key, value in result.items() if "over_mean" in key and "spread" not in key})


if __name__ == "__main__":
    main()
