"""Trains a small decoder on packed text, every document under a mask of its own, compiled without a graph break.

Half of the documents of each batch are causal and learn to predict the next byte; the other half are bidirectional with a
window and learn to fill in masked bytes. Attention has MLA widths: 48 for queries and keys, 32 for values. Writes the loss curve
and a picture of the batch's mask, and says which attention backend ran and why.

    python examples/train_packed.py --text FOLDER --report report.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from tqdm import tqdm

if importlib.util.find_spec("te_attn_ops") is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import te_attn_ops
from te_attn_ops import Explanation, PreparedPolicies, explain, prepare_thd_policies, thd_attention
from te_attn_ops.masks import iter_rows

MASK = 256  # the token after the 256 bytes
VOCABULARY = 257
IGNORED = -100  # a target that takes no part in the loss
MASKED_SHARE = 0.3
WINDOW = (64, 64)  # tokens to the left and right that a bidirectional document's token sees
WARM_UP_STEPS = 8  # of the learning rate, and of the compiler
TEXT_LIMIT = 8 << 20  # bytes


# ----------------------------------------------------------------------------------------------------------------------- data
@dataclass(frozen=True)
class PackedBatch:
    """Documents one after the other, without padding.

    Attributes:
        tokens: [T] int64, what the model reads: bytes, and MASK where a bidirectional document is to be filled in.
        targets: [T] int64, the byte to predict at each position; IGNORED where there is none.
        positions: [T] int64, counted from the start of each document.
        cu_seqlens: [N + 1] int32, where each document starts, and the end.
        policies: which documents are causal and which bidirectional, checked and on the device.
        bidirectional: the same for people, one bool per document.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    policies: PreparedPolicies
    bidirectional: tuple[bool, ...]

    @property
    def lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist()


def read_texts(folder: Path, min_bytes: int) -> list[Tensor]:
    """The text files below a folder as bytes, [length] uint8 each; files that are no UTF-8 or shorter than min_bytes are left out.

    Raises:
        ValueError: there is no such folder, or no such file in it.
    """
    if not folder.is_dir():
        raise ValueError(f"--text must be a folder with text files, got {folder}")
    texts, total = [], 0
    for path in sorted(folder.rglob("*")):
        if "site-packages" in path.parts or "__pycache__" in path.parts or not path.is_file():
            continue
        content = path.read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError:
            continue
        if len(content) >= min_bytes and b"\0" not in content:
            texts.append(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            total += len(content)
        if total >= TEXT_LIMIT:
            break
    if not texts:
        raise ValueError(f"--text: no UTF-8 file of at least {min_bytes} bytes below {folder}")
    return texts


def causal_document(text: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and targets [L] for next-byte prediction from L + 1 bytes."""
    return text[:-1].clone(), text[1:].clone()


def masked_document(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and targets [L] for filling in: a target only where the token is MASK, since the model sees every other byte."""
    chosen = torch.rand(len(text), generator=generator) < MASKED_SHARE
    chosen[int(torch.randint(len(text), (), generator=generator))] = True  # at least one
    return text.masked_fill(chosen, MASK), text.masked_fill(~chosen, IGNORED)


def make_batch(
    texts: list[Tensor],
    generator: torch.Generator,
    step: int,
    documents: tuple[int, int],
    lengths: tuple[int, int],
    device: torch.device,
) -> PackedBatch:
    """Random pieces of random files; every other document is bidirectional, beginning with another one at every step.

    Args:
        texts: byte tensors, each of at least ``lengths[0] + 1`` bytes.
        documents, lengths: smallest and largest number of documents, and of tokens in one.
    """

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    tokens, targets, positions, kinds = [], [], [], []
    for n in range(draw(*documents)):
        text = texts[draw(0, len(texts) - 1)].long()
        length = min(draw(*lengths), len(text) - 1)
        start = draw(0, len(text) - 1 - length)
        bidirectional = (n + step) % 2 == 1
        if bidirectional:
            document = masked_document(text[start : start + length], generator)
        else:
            document = causal_document(text[start : start + length + 1])
        tokens.append(document[0])
        targets.append(document[1])
        positions.append(torch.arange(length))
        kinds.append(bidirectional)
    sizes = torch.tensor([0] + [len(t) for t in tokens])
    cu_seqlens = sizes.cumsum(0).to(device, torch.int32)
    is_bidirectional = torch.tensor(kinds)
    policies = prepare_thd_policies(
        [
            {
                "sequence_ids": (~is_bidirectional).nonzero().flatten().to(device),
                "mask_type": "padding_causal",
                "window_size": None,
            },
            {"sequence_ids": is_bidirectional.nonzero().flatten().to(device), "mask_type": "padding", "window_size": WINDOW},
        ],
        cu_seqlens,
    )
    packed = (torch.cat(parts).to(device) for parts in (tokens, targets, positions))
    return PackedBatch(*packed, cu_seqlens, policies, tuple(kinds))


# ---------------------------------------------------------------------------------------------------------------------- model
@dataclass(frozen=True)
class ModelConfig:
    """``head_dim_qk`` is the sum of a part without and a part with a rotary embedding, as in multi-head latent attention."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    head_dim_plain: int = 32
    head_dim_rotary: int = 16
    head_dim_v: int = 32
    latent: int = 64

    @property
    def head_dim_qk(self) -> int:
        return self.head_dim_plain + self.head_dim_rotary


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, d] by angles [T, d / 2]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values come from one narrow latent, and all heads share the rotary part of the key."""

    def __init__(self, config: ModelConfig, max_length: int) -> None:
        super().__init__()
        self.config = config
        self.max_length = max_length
        self.query = nn.Linear(config.hidden, config.heads * config.head_dim_qk, bias=False)
        self.down = nn.Linear(config.hidden, config.latent + config.head_dim_rotary, bias=False)
        self.norm = nn.RMSNorm(config.latent)
        self.up = nn.Linear(config.latent, config.heads * (config.head_dim_plain + config.head_dim_v), bias=False)
        self.out = nn.Linear(config.heads * config.head_dim_v, config.hidden, bias=False)

    def project(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [T, heads, 48] and v [T, heads, 32], in bfloat16 on a GPU, whose attention kernels want it."""
        c = self.config
        q = self.query(x).unflatten(-1, (c.heads, c.head_dim_qk))
        q_plain, q_rotary = q.split([c.head_dim_plain, c.head_dim_rotary], dim=-1)
        latent, k_rotary = self.down(x).split([c.latent, c.head_dim_rotary], dim=-1)
        k_plain, v = self.up(self.norm(latent)).unflatten(-1, (c.heads, -1)).split([c.head_dim_plain, c.head_dim_v], dim=-1)
        q = torch.cat([q_plain, rotate(q_rotary, angles)], dim=-1)
        k = torch.cat([k_plain, rotate(k_rotary[:, None], angles).expand(-1, c.heads, -1)], dim=-1)
        dtype = torch.bfloat16 if x.is_cuda else x.dtype
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def forward(self, x: Tensor, angles: Tensor, cu_seqlens: Tensor, policies: PreparedPolicies) -> Tensor:
        q, k, v = self.project(x, angles)
        attended = thd_attention(q, k, v, cu_seqlens, max_seqlen_q=self.max_length, thd_attention_policies=policies)
        return self.out(attended.flatten(1).to(x.dtype))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, max_length: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = LatentAttention(config, max_length)
        self.mlp = nn.Sequential(
            nn.RMSNorm(config.hidden),
            nn.Linear(config.hidden, 4 * config.hidden, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.hidden, config.hidden, bias=False),
        )

    def forward(self, x: Tensor, angles: Tensor, cu_seqlens: Tensor, policies: PreparedPolicies) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles, cu_seqlens, policies)
        return x + self.mlp(x)


class Decoder(nn.Module):
    """Bytes in, the loss of one packed batch out. ``max_length``: the longest document that will ever come, in tokens."""

    def __init__(self, config: ModelConfig, max_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.hidden)
        self.blocks = nn.ModuleList([Block(config, max_length) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, VOCABULARY, bias=False)
        half = config.head_dim_rotary // 2
        self.register_buffer("frequencies", 1e4 ** (-torch.arange(half) / half), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor, cu_seqlens: Tensor, policies: PreparedPolicies) -> Tensor:
        x, angles = self.embed(tokens, positions)
        for block in self.blocks:
            x = block(x, angles, cu_seqlens, policies)
        return F.cross_entropy(self.head(self.norm(x)), targets, ignore_index=IGNORED)

    def embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.embedding(tokens), positions[:, None] * self.frequencies


# ------------------------------------------------------------------------------------------------------------------- training
@dataclass
class Run:
    """What a training run showed.

    ``compilations`` counts the graphs that Dynamo handed to Inductor; each comprises a forward and its backward pass.
    """

    losses: list[float] = field(default_factory=list)
    compilations_by_step: list[int] = field(default_factory=list)
    graph_breaks: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def compilations(self) -> int:
        return self.compilations_by_step[-1]

    @property
    def compilations_after_warmup(self) -> int:
        return self.compilations - self.compilations_by_step[min(WARM_UP_STEPS, len(self.compilations_by_step)) - 1]

    def mean_loss(self, steps: slice) -> float:
        part = self.losses[steps]
        return sum(part) / len(part)

    @property
    def loss_first(self) -> float:
        """Mean of the first five steps."""
        return self.mean_loss(slice(None, 5))

    @property
    def loss_last(self) -> float:
        """Mean of the last five steps."""
        return self.mean_loss(slice(-5, None))


def train(model: Decoder, batches: list[PackedBatch], device: torch.device, learning_rate: float) -> Run:
    """One step per batch. Speed is counted after the warm-up, or over all steps where there are no more than that."""
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
    run = Run()
    first_timed = WARM_UP_STEPS if len(batches) > WARM_UP_STEPS else 0
    started = time.perf_counter()
    with tqdm(batches, desc="training", unit="step") as bar:
        for step, batch in enumerate(bar):
            if step == first_timed:
                started = time.perf_counter()
            loss = compiled(batch.tokens, batch.targets, batch.positions, batch.cu_seqlens, batch.policies)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            run.losses.append(loss.item())
            run.compilations_by_step.append(counters["stats"]["unique_graphs"])
            run.tokens += len(batch.tokens) if step >= first_timed else 0
            bar.set_postfix(loss=f"{run.losses[-1]:.3f}", compilations=run.compilations)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    run.seconds = time.perf_counter() - started
    run.graph_breaks = sum(counters["graph_break"].values())
    return run


def explain_choice(model: Decoder, batch: PackedBatch) -> Explanation:
    """Why the first layer's attention runs as it does: asked with the tensors that the layer has for this batch."""
    x, angles = model.embed(batch.tokens, batch.positions)
    attention = model.blocks[0].attention
    q, k, v = attention.project(x, angles)
    return explain(q, k, v, batch.cu_seqlens, max_seqlen_q=attention.max_length, thd_attention_policies=batch.policies)


# ------------------------------------------------------------------------------------------------------------------- pictures
def draw_mask(batch: PackedBatch, path: Path) -> None:
    """Queries downwards, keys to the right; a document is a block on the diagonal, its colour its policy."""
    from matplotlib import pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    starts, lengths = batch.cu_seqlens.tolist(), batch.lengths
    picture = torch.zeros(starts[-1], starts[-1], dtype=torch.uint8)
    for start, length, bidirectional in zip(starts, lengths, batch.bidirectional):
        policy = batch.policies.policies[int(bidirectional)]
        for row, (low, high) in enumerate(iter_rows(policy.band(None), length, length)):
            picture[start + row, start + low : start + high] = 1 + int(bidirectional)
    colours = ("#f4f4f2", "#3b6fb6", "#e08e2b")
    figure, axes = plt.subplots(figsize=(6.4, 6.4), layout="constrained")
    axes.imshow(picture.numpy(), cmap=ListedColormap(colours), vmin=0, vmax=2, interpolation="nearest")
    for boundary in starts[1:-1]:
        axes.axhline(boundary - 0.5, color="#b8b8b4", linewidth=0.6)
        axes.axvline(boundary - 0.5, color="#b8b8b4", linewidth=0.6)
    middles = [start + length / 2 for start, length in zip(starts, lengths)]
    axes.set_xticks(middles, [f"{length}" for length in lengths])
    axes.set_yticks(middles, [f"document {n}" for n in range(len(lengths))])
    axes.tick_params(length=0)
    axes.set_xlabel("keys (tokens of each document)")
    axes.set_ylabel("queries")
    axes.set_title(f"The mask of one packed batch: {len(lengths)} documents, {starts[-1]:,} tokens, one call", fontsize=11)
    names = ("causal: next byte", f"bidirectional, window {WINDOW}: masked bytes")
    axes.legend(handles=[Patch(color=c, label=n) for c, n in zip(colours[1:], names)], loc="upper right", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_loss(run: Run, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.plot(range(1, len(run.losses) + 1), run.losses, color="#3b6fb6")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.set_title(f"Both losses together: {run.loss_first:.2f} at the start, {run.loss_last:.2f} at the end", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ----------------------------------------------------------------------------------------------------------------------- main
def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    standard_library = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--text", type=Path, default=None, help="folder of text files (default: the sources of Python's library)")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for loss.png and mask.png (default: demo_out)")
    parser.add_argument("--report", type=Path, default=None, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--documents", type=int, nargs=2, default=(3, 8), metavar=("MIN", "MAX"), help="per batch")
    parser.add_argument("--lengths", type=int, nargs=2, default=(32, 400), metavar=("MIN", "MAX"), help="tokens of a document")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: cuda where there is one")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.layers < 1:
        parser.error("--steps and --layers must be at least 1")
    for name, least in (("documents", 2), ("lengths", 1)):
        low, high = getattr(options, name)
        if not least <= low <= high:
            parser.error(f"--{name} must be two numbers, {least} <= MIN <= MAX, got {low} {high}")
    try:
        options.texts = read_texts(options.text or standard_library, options.lengths[0] + 1)
    except ValueError as error:
        parser.error(str(error))
    return options


def make_report(run: Run, explanation: Explanation, config: ModelConfig, device: torch.device) -> dict[str, Any]:
    winner = explanation.winner
    assert winner is not None, "something has run"
    return {
        "loss_first": run.loss_first,
        "loss_last": run.loss_last,
        "steps": len(run.losses),
        "graph_breaks": run.graph_breaks,
        "compilations": run.compilations,
        "compilations_after_warmup": run.compilations_after_warmup,
        "backend": winner["backend"],
        "dispatch": winner["dispatch"],
        "head_dim_qk": config.head_dim_qk,
        "head_dim_v": config.head_dim_v,
        "head_dim_padded": winner["head_dim_padded"],
        "tokens_per_second": run.tokens / run.seconds,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "versions": {"te_attn_ops": te_attn_ops.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "command": "python examples/train_packed.py " + " ".join(sys.argv[1:]),
        "losses": run.losses,
    }


def main() -> None:
    options = parse_arguments()
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    geometry = (tuple(options.documents), tuple(options.lengths))
    batches = [make_batch(options.texts, generator, step, *geometry, device) for step in range(options.steps)]
    config = ModelConfig(layers=options.layers)
    model = Decoder(config, max_length=options.lengths[1]).to(device)
    parameters, size = sum(p.numel() for p in model.parameters()), sum(map(len, options.texts))
    print(f"{parameters:,} parameters on {device}, {size:,} bytes of text in {len(options.texts)} files")

    run = train(model, batches, device, options.learning_rate)
    explanation = explain_choice(model, batches[0])
    report = make_report(run, explanation, config, device)

    options.out.mkdir(parents=True, exist_ok=True)
    draw_mask(batches[0], options.out / "mask.png")
    draw_loss(run, options.out / "loss.png")
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{explanation}\n")
    print(f"loss               {run.loss_first:.3f} -> {run.loss_last:.3f} (means of the first and the last five steps)")
    print(f"graph breaks       {run.graph_breaks}")
    later = f"{run.compilations_after_warmup} after step {WARM_UP_STEPS}"
    print(f"compilations       {run.compilations} (a forward and its backward are one), {later}")
    print(f"tokens per second  {report['tokens_per_second']:,.0f} (after the warm-up)")
    print(f"pictures           {options.out / 'loss.png'}, {options.out / 'mask.png'}")


if __name__ == "__main__":
    main()
