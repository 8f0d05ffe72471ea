"""The static rank: how long a candidate is expected to take, from measurements where there are some.

sm90: :data:`SM90_MS`, measured on an H200. A pair of widths that was not measured takes the figures of the nearest one that
was, in proportion to its width; a backend that was not measured stands behind all that were. Elsewhere TransformerEngine's order
of preference stands in, its flash generations newest first. unfused is always last.
"""

from __future__ import annotations

from .params import AttentionParams

_Pair = tuple[int, int]
_Times = tuple[float, float | None]

# Milliseconds (forward, forward + backward) by backend, padded or not, and the caller's (head_dim_qk, head_dim_v): 16,384 tokens
# in 4 sequences, 16 heads, causal, bfloat16, pad and trim included. None: the kernel cannot run. `python -m benchmarks.padding
# --print-ranks` gives the rows of a run in this form.
SM90_MS: dict[tuple[str, bool], dict[_Pair, _Times]] = {
    ("flash4", False): {
        (192, 128): (0.57, 2.56), (128, 64): (0.42, 1.61), (96, 64): (0.37, 1.31), (160, 128): (0.53, 2.36),
        (256, 128): (0.69, 4.31), (192, 64): (0.49, 2.19), (64, 128): (0.64, None), (128, 96): (0.43, None),
    },
    ("flash4", True): {
        (192, 128): (0.80, 2.99), (128, 64): (0.54, 1.87), (96, 64): (0.49, 1.60), (160, 128): (0.75, 3.01),
        (256, 128): (0.96, 5.04), (192, 64): (0.75, 3.03), (64, 128): (0.57, 1.92), (128, 96): (0.59, 1.99),
    },
    ("cudnn", False): {
        (192, 128): (0.67, 3.06), (128, 64): (0.46, 1.91), (96, 64): (0.45, 1.90), (160, 128): (0.67, 2.91),
        (256, 128): (0.84, None), (192, 64): (0.74, 4.32), (64, 128): (0.51, 1.94), (128, 96): (0.52, 2.13),
    },
    ("cudnn", True): {
        (192, 128): (0.92, 4.62), (128, 64): (0.61, 2.15), (96, 64): (0.61, 2.14), (160, 128): (0.93, 4.65),
        (256, 128): (1.08, 5.30), (192, 64): (0.85, 4.52), (64, 128): (0.64, 2.20), (128, 96): (0.69, 2.26),
    },
    ("torch_flash", True): {
        (192, 128): (1.61, 5.90), (128, 64): (1.02, 3.65), (96, 64): (0.79, 3.03), (160, 128): (1.77, 6.43),
        (256, 128): (2.03, 8.00), (192, 64): (1.56, 5.79), (64, 128): (1.04, 3.69), (128, 96): (1.05, 3.68),
    },
}  # fmt: skip
# Backends without a table of their own: whose they take, and times what. flash3 was not measured; it stands behind flash4.
# flash2 is torch_flash's kernel, and writes into the call's buffers.
_LIKE = {"flash3": ("flash4", 1.04), "flash2": ("torch_flash", 0.99)}

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
    if backend == "unfused":
        return _UNFUSED * sum(native_widths) * (1.01 if padded else 1.0)
    if 90 <= p.sm < 100:
        measured = _sm90_ms(backend, p, padded, native_widths)
        if measured is not None:
            return measured
    order = _PREFERENCE["new" if p.sm >= 90 else "old"]
    position = order.index(backend) if backend in order else len(order)
    # A preference, not a measurement: a better kernel wins even where it has to pad.
    return (10.0 + 5.0 * position) * sum(native_widths) * (_PAD_FACTOR if padded else 1.0)


def _sm90_ms(backend: str, p: AttentionParams, padded: bool, native_widths: tuple[int, int]) -> float | None:
    name, factor = _LIKE.get(backend, (backend, 1.0))
    # Equal widths are what padding leads to: they take the padded figures, which are a little high for want of a pad.
    table = SM90_MS.get((name, padded or p.head_dim_qk == p.head_dim_v))
    if table is None:
        return None
    training = int(p.is_training)
    known = {pair: times[training] for pair, times in table.items() if times[training] is not None}
    ms = known.get(native_widths)
    if ms is None:
        seen = (p.head_dim_qk, p.head_dim_v)

        def kernel_widths(pair: _Pair) -> _Pair:
            return (max(pair), max(pair)) if seen[0] == seen[1] else pair

        def distance(pair: _Pair) -> tuple[int, int]:
            return _distance(kernel_widths(pair), seen), _distance(pair, native_widths)

        nearest = min(known, key=distance)
        nearest_ms = known[nearest]
        assert nearest_ms is not None
        ms = nearest_ms * sum(seen) / sum(kernel_widths(nearest))
    return ms * factor


def _distance(a: _Pair, b: _Pair) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


# What running several policies adds, as (base, per further policy) for inference and training, to a backend's time on the same
# sequences compacted for free: fitted to docs/results/mixed_h200.json.
_IN_PLACE = {False: (1.0, 0.02), True: (1.0, 0.02)}
_COPYING = {False: (1.0, 0.06), True: (1.0, 0.15)}
_GROUPED = {False: (1.27, 0.10), True: (1.18, 0.07)}


def dispatch_factor(backend: str, dispatch: str, is_training: bool, num_policies: int, contiguous: bool = False) -> float:
    """What a dispatch costs in proportion, for ``num_policies`` of them. flash2 and torch_flash have no way to address a subset but
    through buffers of its own, and each further policy passes over all rows again: from five policies on they train faster
    grouped. A run of neighbours (``contiguous``) they address as it is."""
    if num_policies == 1:
        return 1.0
    if dispatch == "grouped":
        table = _GROUPED
    else:
        table = _COPYING if backend in ("flash2", "torch_flash") and not contiguous else _IN_PLACE
    base, each = table[is_training]
    return base + each * (num_policies - 1)


def single_launch_cost(p: AttentionParams, padded_dispatch_cost: float) -> float:
    """One launch for all policies against one per policy: 0.69 to 0.97 of it on an H200 (docs/results/mixed_h200.json)."""
    return 0.9 * padded_dispatch_cost
