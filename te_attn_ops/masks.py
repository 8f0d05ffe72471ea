"""From a mask type, a window and a diagonal alignment to a :class:`Band`.

The rules are TransformerEngine's (``dot_product_attention/utils.py: check_set_window_size`` and
``DotProductAttention.forward``). Everything behind this module speaks of bands and knows no mask names.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from typing import NamedTuple

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
PADDING_MASK_TYPES = tuple(name for name in MASK_TYPES if "padding" in name)
_SPELLINGS = {"padding,causal": "padding_causal", "causal,padding": "padding_causal"}


class Band(NamedTuple):
    """The keys that a query row sees, as one diagonal band per sequence.

    Row ``i`` of a sequence with ``L_q`` query and ``L_k`` key tokens sees key ``j`` iff
    ``i + off - left <= j <= i + off + right`` where ``off = L_k - L_q`` if ``bottom_right`` else 0.
    ``None`` is unbounded on that side.
    """

    left: int | None = None
    right: int | None = None
    bottom_right: bool = True

    @property
    def is_full(self) -> bool:
        return self.left is None and self.right is None

    @property
    def is_causal(self) -> bool:
        return self.left is None and self.right == 0

    def canonical(self, equal_lengths: bool) -> Band:
        """The spelling that every backend takes: bottom-right wherever the alignment makes no difference."""
        if self.is_full or equal_lengths:
            return Band(self.left, self.right, True)
        return self

    def as_ints(self) -> tuple[int, int, int]:
        """(left, right, bottom_right), -1 for unbounded: the form in plans and in what Dynamo takes for a constant."""
        return (-1 if self.left is None else self.left, -1 if self.right is None else self.right, int(self.bottom_right))

    @classmethod
    def from_ints(cls, left: int, right: int, bottom_right: int) -> Band:
        """:meth:`as_ints` backwards."""
        return cls(None if left < 0 else left, None if right < 0 else right, bool(bottom_right))

    def describe(self, aligned: bool = True) -> str:
        """In a few words; without the alignment where that makes no difference."""
        if self.is_full:
            return "full"
        align = "" if not aligned else " bottom_right" if self.bottom_right else " top_left"
        if self.is_causal:
            return f"causal{align}"
        left = "inf" if self.left is None else self.left
        right = "inf" if self.right is None else self.right
        return f"window ({left}, {right}){align}"


class ResolvedMask(NamedTuple):
    """A band and what TransformerEngine would have warned about on the way to it."""

    band: Band
    warnings: tuple[str, ...]


def normalize_mask_type(attn_mask_type: object, argument: str = "attn_mask_type", known: tuple[str, ...] = ()) -> str:
    """The canonical spelling of a mask type.

    Args:
        known: what the error names as possible; default all of :data:`MASK_TYPES`.

    Raises:
        TypeError: if it is no string.
        ValueError: if it is none of :data:`MASK_TYPES`.
    """
    if not isinstance(attn_mask_type, str):
        raise TypeError(f"{argument} must be a string, got {type(attn_mask_type).__name__}")
    name = _SPELLINGS.get(attn_mask_type.replace(" ", ""), attn_mask_type)
    if name not in MASK_TYPES:
        raise ValueError(f"{argument}={attn_mask_type!r} is no mask type; use one of {', '.join(known or MASK_TYPES)}")
    return name


def require_padding_mask_type(attn_mask_type: object, argument: str = "attn_mask_type") -> str:
    """:func:`normalize_mask_type`, for the packed layout, whose mask types all contain ``padding``."""
    name = normalize_mask_type(attn_mask_type, argument, PADDING_MASK_TYPES)
    if name not in PADDING_MASK_TYPES:
        raise ValueError(
            f"{argument}={attn_mask_type!r} does not fit the packed (thd) layout; use one of {', '.join(PADDING_MASK_TYPES)}"
        )
    return name


_WIDEST = 1 << 30  # beyond every sequence, and small enough to add to a position


def normalize_window(window_size: object, argument: str = "window_size") -> tuple[int, int] | None:
    """``(left, right)`` as plain ints, -1 for unbounded; None stays None."""
    if window_size is None:
        return None
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"{argument} must be a pair (left, right) of ints, got {window_size!r}")
    if isinstance(window_size[0], bool) or isinstance(window_size[1], bool):
        raise TypeError(f"{argument} must hold ints, got {window_size!r}")
    try:
        left, right = operator.index(window_size[0]), operator.index(window_size[1])
    except TypeError:
        raise TypeError(f"{argument} must hold ints, got {window_size!r}") from None
    if left < -1 or right < -1:
        raise ValueError(f"{argument}={window_size!r}: each side must be -1 (unbounded) or a number of tokens >= 0")
    return min(left, _WIDEST), min(right, _WIDEST)


def resolve_mask(
    attn_mask_type: object,
    window_size: object = None,
    bottom_right_diagonal: bool | None = None,
    argument_prefix: str = "",
) -> ResolvedMask:
    """TransformerEngine's normalisation of a packed mask.

    * ``padding``: window None or (-1, -1) is full; (-1, 0) is full too, with a warning (as there; FlashAttention would
      read it as causal). A one-sided window such as (5, -1), which TransformerEngine refuses, is taken.
    * ``padding_causal``: always top-left; window None or (-1, -1) is causal; (left, right != 0) becomes (left, 0), both
      with a warning; (-1, right > 0) is an error.
    * ``padding_causal_bottom_right``: the same, always bottom-right.
    * ``bottom_right_diagonal`` counts for ``padding`` with a window only; None is True there.

    Args:
        argument_prefix: put before the argument's name in errors, for example ``"thd_attention_policies[1]."``.
    """
    mask_type = require_padding_mask_type(attn_mask_type, f"{argument_prefix}attn_mask_type")
    window = normalize_window(window_size, f"{argument_prefix}window_size")
    if bottom_right_diagonal is not None and not isinstance(bottom_right_diagonal, bool):
        raise TypeError(
            f"{argument_prefix}bottom_right_diagonal must be a bool or None, got {type(bottom_right_diagonal).__name__}"
        )
    if mask_type == "padding":
        return _resolve_padding(window, bottom_right_diagonal is not False)
    return _resolve_causal(mask_type, window, f"{argument_prefix}window_size")


def _resolve_padding(window: tuple[int, int] | None, bottom_right: bool) -> ResolvedMask:
    if window is None or window == (-1, -1):
        return ResolvedMask(Band(None, None, bottom_right), ())
    if window == (-1, 0):
        message = "window_size (-1, 0) with attn_mask_type 'padding' means full attention, as (-1, -1) does"
        return ResolvedMask(Band(None, None, bottom_right), (message,))
    left, right = (None if side < 0 else side for side in window)
    return ResolvedMask(Band(left, right, bottom_right), ())


def _resolve_causal(mask_type: str, window: tuple[int, int] | None, argument: str) -> ResolvedMask:
    bottom_right = mask_type == "padding_causal_bottom_right"
    if window is None or window == (-1, 0):
        return ResolvedMask(Band(None, 0, bottom_right), ())
    left, right = window
    if left < 0 and right > 0:
        raise ValueError(f"{argument}={window}: attn_mask_type {mask_type!r} sees no key to the right; use (-1, 0) or (left, 0)")
    if right == 0:
        return ResolvedMask(Band(left, 0, bottom_right), ())
    message = f"window_size {window} with attn_mask_type {mask_type!r} is used as {(left, 0)}"
    return ResolvedMask(Band(None if left < 0 else left, 0, bottom_right), (message,))


_WARNED: set[str] = set()


def warn_once(messages: tuple[str, ...], stacklevel: int = 3) -> None:
    """Each text once in a process. Never called from traced code."""
    for message in messages:
        if message not in _WARNED:
            _WARNED.add(message)
            warnings.warn(message, UserWarning, stacklevel=stacklevel)


def visible_interval(band: Band, row: int, len_q: int, len_kv: int) -> tuple[int, int]:
    """Keys [lo, hi) that a row sees. The conversion from a band to per-row key intervals stands here and nowhere else
    in Python; the device-side twin is ``te_attn_ops.backends.cudnn_flex``."""
    off = len_kv - len_q if band.bottom_right else 0
    lo = 0 if band.left is None else max(0, row + off - band.left)
    hi = len_kv if band.right is None else min(len_kv, row + off + band.right + 1)
    return (lo, hi) if lo < hi else (0, 0)


def iter_rows(band: Band, len_q: int, len_kv: int) -> Iterator[tuple[int, int]]:
    """:func:`visible_interval` of every row of one sequence."""
    for row in range(len_q):
        yield visible_interval(band, row, len_q, len_kv)
