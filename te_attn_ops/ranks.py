"""The static rank: how long a candidate is expected to take, from measurements where there are some.

``sm90``: measured on an H200 (docs/results/padding_h200.json: 16,384 tokens in 4 sequences, 16 heads, causal, bf16; pad and trim
included). Elsewhere TransformerEngine's order of preference stands in, its flash generations newest first.
"""

from __future__ import annotations

from .params import AttentionParams

# Milliseconds of the measured work per (head_dim_qk + head_dim_v) and 1000, by backend, native or padded, inference or training.
# The widths are classes: a pair takes the first one that holds its larger width.
_WIDTH_CLASSES = (64, 128, 192, 256)
_SM90: dict[tuple[str, bool], tuple[tuple[float, ...], tuple[float, ...]]] = {
    ("flash4", False): ((2.2, 2.2, 1.8, 1.8), (8.0, 8.2, 8.1, 11.2)),
    ("flash4", True): ((2.5, 2.3, 2.2, 1.95), (8.0, 7.6, 7.9, 9.9)),
    ("flash3", False): ((2.3, 2.3, 1.9, 1.9), (8.3, 8.5, 8.4, 11.5)),
    ("flash3", True): ((2.6, 2.4, 2.3, 2.0), (8.3, 7.9, 8.2, 10.2)),
    ("cudnn", False): ((2.7, 2.5, 2.3, 2.2), (10.0, 10.1, 9.9, 9.4)),
    ("cudnn", True): ((2.6, 2.5, 2.4, 2.1), (8.6, 8.5, 12.0, 10.4)),
    ("flash2", False): ((4.0, 4.0, 4.2, 4.2), (14.0, 14.5, 15.5, 15.7)),
    ("flash2", True): ((4.1, 4.1, 4.3, 4.0), (14.5, 14.5, 15.6, 15.7)),
    ("torch_flash", False): ((4.05, 4.05, 4.25, 4.25), (14.1, 14.6, 15.6, 15.8)),
    ("torch_flash", True): ((4.1, 4.1, 4.3, 4.0), (14.5, 14.5, 15.6, 15.8)),
}
_PREFERENCE = {
    "old": ("flash4", "flash3", "flash2", "torch_flash", "cudnn"),
    "new": ("cudnn", "flash4", "flash3", "flash2", "torch_flash"),
}
_UNFUSED = 1000.0
_PAD_FACTOR = 1.1


def static_cost(backend: str, p: AttentionParams, padded: bool, native_widths: tuple[int, int]) -> float:
    """An expected duration, in arbitrary units that compare within one device and one ``is_training``.

    ``p`` has the widths that the backend will see; ``native_widths`` are the caller's.
    """
    width_sum = p.head_dim_qk + p.head_dim_v
    if backend == "unfused":
        return _UNFUSED * sum(native_widths) * (1.01 if padded else 1.0)
    if 90 <= p.sm < 100 and (backend, padded) in _SM90:
        index = next((i for i, width in enumerate(_WIDTH_CLASSES) if max(p.head_dim_qk, p.head_dim_v) <= width), -1)
        return _SM90[backend, padded][int(p.is_training)][index] * width_sum
    order = _PREFERENCE["new" if p.sm >= 90 else "old"]
    position = order.index(backend) if backend in order else len(order)
    # A preference, not a measurement: a better kernel wins even where it has to pad.
    return (10.0 + 5.0 * position) * sum(native_widths) * (_PAD_FACTOR if padded else 1.0)


def single_launch_cost(p: AttentionParams, padded_dispatch_cost: float) -> float:
    """One launch for all policies against one per policy: 0.69 to 0.97 of it on an H200 (docs/results/mixed_h200.json)."""
    return 0.9 * padded_dispatch_cost
