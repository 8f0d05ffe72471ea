"""Draws the pictures of docs/images: what each mask lets a query row see, a mixed batch, and what each dispatch launches.

    python docs/draw_masks.py [FOLDER]

Every mask comes from the package's own rules (``resolve_mask`` and ``visible_interval``), so a picture cannot say anything else.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

if importlib.util.find_spec("te_attn_ops") is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from te_attn_ops.masks import Band, resolve_mask, visible_interval

IMAGES = Path(__file__).resolve().parent / "images"
HIDDEN, GAP, LINE, INK = "#f4f4f2", "#d5d5d0", "#ffffff", "#333333"
POLICY_COLOURS = ("#3b6fb6", "#e08e2b", "#4f9d69", "#a0549d")
DPI = 110


class Mask(NamedTuple):
    """A mask as a user states it, and the line that names it in a picture."""

    title: str
    attn_mask_type: str
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None

    @property
    def band(self) -> Band:
        return resolve_mask(self.attn_mask_type, self.window_size, self.bottom_right_diagonal).band


# Query and key tokens of one sequence.
LENGTHS = ((7, 7), (4, 8), (8, 4))
TYPES = (
    Mask("padding", "padding"),
    Mask("padding_causal", "padding_causal"),
    Mask("padding_causal_bottom_right", "padding_causal_bottom_right"),
)
WINDOWS = (
    Mask("padding, window (2, 1)", "padding", (2, 1)),
    Mask("padding, window (2, 1)\nbottom_right_diagonal=False", "padding", (2, 1), False),
    Mask("padding, window (2, -1)", "padding", (2, -1)),
    Mask("padding_causal, window (2, 0)", "padding_causal", (2, 0)),
    Mask("padding_causal_bottom_right,\nwindow (2, 0)", "padding_causal_bottom_right", (2, 0)),
)


def visibility(band: Band, len_q: int, len_kv: int) -> Any:
    """uint8 [len_q, len_kv]: 1 where a query row sees a key."""
    picture = np.zeros((len_q, len_kv), dtype=np.uint8)
    for row in range(len_q):
        low, high = visible_interval(band, row, len_q, len_kv)
        picture[row, low:high] = 1
    return picture


def _grid(axes: Any, rows: int, columns: int) -> None:
    """Thin lines between the cells, no ticks."""
    axes.xaxis.remove_overlapping_locs = axes.yaxis.remove_overlapping_locs = False  # a label may stand on a line
    axes.set_xticks(np.arange(-0.5, columns), minor=True)
    axes.set_yticks(np.arange(-0.5, rows), minor=True)
    axes.grid(which="minor", color=LINE, linewidth=1.0)
    axes.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw_sequences(masks: tuple[Mask, ...], path: Path) -> None:
    """One row per mask; a column each for as many, fewer and more query than key tokens."""
    longest = max(max(pair) for pair in LENGTHS)
    figure, grid = plt.subplots(len(masks), len(LENGTHS), figsize=(8.2, 2.35 * len(masks) + 0.4), layout="constrained", squeeze=False)
    for row, mask in zip(grid, masks):
        for axes, (len_q, len_kv) in zip(row, LENGTHS):
            picture = visibility(mask.band, len_q, len_kv)
            axes.imshow(picture, cmap=ListedColormap((HIDDEN, POLICY_COLOURS[0])), vmin=0, vmax=1, interpolation="nearest")
            _grid(axes, len_q, len_kv)
            # One scale for all panels.
            axes.set_xlim(-0.5, longest - 0.5)
            axes.set_ylim(longest - 0.5, -0.5)
            for empty in np.flatnonzero(picture.sum(1) == 0):
                axes.annotate("sees no key", (len_kv - 0.2, empty), va="center", fontsize=7, color=INK)
        row[0].set_ylabel(mask.title, fontsize=9)
    for axes, (len_q, len_kv) in zip(grid[0], LENGTHS):
        sign = "=" if len_q == len_kv else "<" if len_q < len_kv else ">"
        axes.set_title(f"{len_q} query {sign} {len_kv} key tokens", fontsize=10, loc="left")
    figure.supxlabel("keys", fontsize=9)
    figure.supylabel("queries", fontsize=9)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


# A mixed batch: tokens and slot of each sequence, and its policy; behind the last slot a tail.
BATCH = ((9, 9, 0), (6, 8, 1), (8, 8, 2), (5, 5, 1), (7, 8, 0))
TAIL = 3
BATCH_POLICIES = (
    Mask("padding_causal: sequences 0, 4", "padding_causal"),
    Mask("padding: sequences 1, 3", "padding"),
    Mask("padding, window (2, 2): sequence 2", "padding", (2, 2)),
)


def batch_picture() -> tuple[Any, list[int]]:
    """uint8 [T, T] (0 hidden, 1 + policy visible, 255 a row or key of no sequence), and where each slot starts, and ends."""
    starts = [0]
    for _, slot, _ in BATCH:
        starts.append(starts[-1] + slot)
    total = starts[-1] + TAIL
    picture = np.zeros((total, total), dtype=np.uint8)
    outside = np.ones(total, dtype=bool)
    for start, (length, _, policy) in zip(starts, BATCH):
        outside[start : start + length] = False
        seen = visibility(BATCH_POLICIES[policy].band, length, length)
        picture[start : start + length, start : start + length] = seen * (1 + policy)
    picture[outside, :] = 255
    picture[:, outside] = 255
    return picture, starts


def draw_batch(path: Path) -> None:
    picture, starts = batch_picture()
    total = len(picture)
    colours = (HIDDEN, *POLICY_COLOURS[: len(BATCH_POLICIES)], GAP)
    shown = np.where(picture == 255, len(colours) - 1, picture)
    figure, axes = plt.subplots(figsize=(7.4, 6.4), layout="constrained")
    axes.imshow(shown, cmap=ListedColormap(colours), vmin=0, vmax=len(colours) - 1, interpolation="nearest")
    _grid(axes, total, total)
    middles = [start + length / 2 - 0.5 for start, (length, _, _) in zip(starts, BATCH)]
    names = [f"sequence {n}" for n in range(len(BATCH))]
    axes.set_yticks([*middles, starts[-1] + TAIL / 2 - 0.5], [*names, "tail"])
    axes.set_xticks(middles, [str(n) for n in range(len(BATCH))])
    axes.tick_params(which="major", labelbottom=True, labelleft=True)
    axes.set_xlabel("keys, by sequence")
    axes.set_ylabel("queries")
    handles = [Patch(color=colour, label=mask.title) for colour, mask in zip(POLICY_COLOURS, BATCH_POLICIES)]
    handles.append(Patch(color=GAP, label="gap or tail: of no sequence"))
    axes.legend(handles=handles, loc="upper right", fontsize=9, framealpha=1.0)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


# ----------------------------------------------------------------------------------------------------------------- dispatches
STRIP = ((5, 0), (3, 1), (4, 0), (6, 1), (3, 0))
_NEUTRAL = "#e7e7e3"


def _strip(axes: Any, y: float, order: list[int], shown: set[int], x: float = 0.0) -> None:
    """The packed rows as a bar: sequences in ``order``, coloured by policy where a launch computes them."""
    for n in order:
        length, policy = STRIP[n]
        colour = POLICY_COLOURS[policy] if policy in shown else _NEUTRAL
        axes.add_patch(Rectangle((x, y), length, 0.7, facecolor=colour, edgecolor="white", linewidth=1.5))
        axes.text(x + length / 2, y + 0.35, str(n), ha="center", va="center", fontsize=8, color="white" if policy in shown else INK)
        x += length


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=INK, linewidth=0.8))


def draw_dispatches(path: Path) -> None:
    natural = list(range(len(STRIP)))
    by_policy = sorted(natural, key=lambda n: STRIP[n][1])
    width = sum(length for length, _ in STRIP)
    figure, panels = plt.subplots(1, 3, figsize=(10.4, 3.5), layout="constrained")
    rows = {
        "padded": [(2.4, natural, {0}, "launch 1"), (1.4, natural, {1}, "launch 2")],
        "single_launch": [(1.9, natural, {0, 1}, "one launch")],
        "grouped": [
            (3.4, natural, {0, 1}, "as packed"),
            (2.4, by_policy, {0}, "launch 1"),
            (1.4, by_policy, {1}, "launch 2"),
            (0.4, natural, {0, 1}, "restored"),
        ],
    }
    for axes, (name, strips) in zip(panels, rows.items()):
        axes.set_title(name, fontsize=11, family="monospace")
        for y, order, shown, label in strips:
            _strip(axes, y, order, shown)
            axes.text(-0.5, y + 0.35, label, ha="right", va="center", fontsize=8, color=INK)
        axes.set_xlim(-6.5, width + 0.5)
        axes.set_ylim(-0.4, 4.4)
        axes.axis("off")
    for first, second in ((3.35, 3.15), (1.35, 1.15)):
        _arrow(panels[2], (width / 2, first + 0.05), (width / 2, second - 0.05))
    texts = (
        "in place: a launch fills its own rows\nof the shared buffers",
        "every row under its own key interval",
        "sort, run each policy, sort back",
    )
    for axes, text in zip(panels, texts):
        axes.text(width / 2, -0.35, text, ha="center", va="center", fontsize=8, color=INK)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def draw_all(folder: Path) -> list[Path]:
    """Writes every picture and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_sequences(TYPES, folder / "mask_types.png")
    draw_sequences(WINDOWS, folder / "mask_windows.png")
    draw_batch(folder / "mask_mixed_batch.png")
    draw_dispatches(folder / "dispatches.png")
    return [folder / name for name in ("mask_types.png", "mask_windows.png", "mask_mixed_batch.png", "dispatches.png")]


if __name__ == "__main__":
    for picture_path in draw_all(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES):
        print(picture_path)
