"""From mask types, windows and alignments to bands: TransformerEngine's rules, and an error for everything else."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

from te_attn_ops import masks, testing, thd_attention
from te_attn_ops.masks import Band, normalize_mask_type, normalize_window, require_padding_mask_type, resolve_mask
from te_attn_ops.testing import Mask

PADDING, CAUSAL, BOTTOM_RIGHT = "padding", "padding_causal", "padding_causal_bottom_right"


@pytest.mark.parametrize(
    ("mask_type", "window", "aligned", "band"),
    [
        (PADDING, None, None, Band(None, None, True)),
        (PADDING, (-1, -1), None, Band(None, None, True)),
        (PADDING, None, False, Band(None, None, False)),
        (PADDING, (3, 2), None, Band(3, 2, True)),
        (PADDING, (3, 2), True, Band(3, 2, True)),
        (PADDING, (3, 2), False, Band(3, 2, False)),
        (PADDING, (0, 0), None, Band(0, 0, True)),
        (PADDING, (5, -1), None, Band(5, None, True)),  # TransformerEngine refuses these two
        (PADDING, (-1, 5), False, Band(None, 5, False)),
        (PADDING, [3, 2], None, Band(3, 2, True)),  # a list, which TransformerEngine misreads
        (CAUSAL, None, None, Band(None, 0, False)),
        (CAUSAL, (-1, 0), None, Band(None, 0, False)),
        (CAUSAL, None, True, Band(None, 0, False)),  # the type decides, whatever the flag says
        (CAUSAL, (4, 0), True, Band(4, 0, False)),
        (BOTTOM_RIGHT, None, None, Band(None, 0, True)),
        (BOTTOM_RIGHT, None, False, Band(None, 0, True)),
        (BOTTOM_RIGHT, (4, 0), False, Band(4, 0, True)),
        ("padding,causal", None, None, Band(None, 0, False)),
        ("causal,padding", (2, 0), None, Band(2, 0, False)),
        ("padding, causal", None, None, Band(None, 0, False)),
    ],
)
def test_resolves_without_warning(mask_type: str, window: object, aligned: bool | None, band: Band) -> None:
    assert resolve_mask(mask_type, window, aligned) == (band, ())


@pytest.mark.parametrize(
    ("mask_type", "window", "band"),
    [
        (PADDING, (-1, 0), Band(None, None, True)),
        (CAUSAL, (-1, -1), Band(None, 0, False)),
        (CAUSAL, (4, -1), Band(4, 0, False)),
        (CAUSAL, (4, 7), Band(4, 0, False)),
        (BOTTOM_RIGHT, (-1, -1), Band(None, 0, True)),
        (BOTTOM_RIGHT, (4, 7), Band(4, 0, True)),
    ],
)
def test_resolves_with_a_warning_that_names_the_window(mask_type: str, window: tuple[int, int], band: Band) -> None:
    resolved = resolve_mask(mask_type, window)
    assert resolved.band == band and len(resolved.warnings) == 1
    assert str(window) in resolved.warnings[0] and repr(mask_type) in resolved.warnings[0]


@pytest.mark.parametrize("mask_type", [CAUSAL, BOTTOM_RIGHT])
def test_causal_with_an_open_left_and_a_bounded_right_is_an_error(mask_type: str) -> None:
    with pytest.raises(ValueError, match=rf"window_size=\(-1, 3\): attn_mask_type '{mask_type}' .*use \(-1, 0\) or \(left, 0\)"):
        resolve_mask(mask_type, (-1, 3))


@pytest.mark.parametrize("name", ["no_mask", "causal", "causal_bottom_right", "arbitrary"])
def test_types_without_padding_do_not_fit_the_packed_layout(name: str) -> None:
    assert normalize_mask_type(name) == name
    with pytest.raises(ValueError, match=rf"attn_mask_type='{name}' does not fit the packed \(thd\) layout; use one of padding, "):
        require_padding_mask_type(name)


@pytest.mark.parametrize("name", ["Padding", "", "padding causal", "sliding_window", "padding_bottom_right"])
def test_unknown_type(name: str) -> None:
    with pytest.raises(ValueError, match=f"attn_mask_type='{name}' is no mask type; use one of padding, padding_causal"):
        resolve_mask(name)


@pytest.mark.parametrize("value", [None, 3, ("padding",)])
def test_type_that_is_no_string(value: object) -> None:
    with pytest.raises(TypeError, match=f"attn_mask_type must be a string, got {type(value).__name__}"):
        resolve_mask(value)


@pytest.mark.parametrize("window", [3, (1,), (1, 2, 3), "ab", {1, 2}])
def test_window_that_is_no_pair(window: object) -> None:
    with pytest.raises(ValueError, match=r"window_size must be a pair \(left, right\) of ints, got"):
        normalize_window(window)


@pytest.mark.parametrize("window", [(1.0, 2), ("1", 0), (None, 0), (True, 0)])
def test_window_of_other_things_than_ints(window: object) -> None:
    with pytest.raises(TypeError, match="window_size must hold ints, got"):
        normalize_window(window)


def test_a_window_beyond_every_sequence_can_be_added_to_a_position() -> None:
    assert normalize_window((2**64, 2**63 - 1)) == (2**30, 2**30)
    q, cu = torch.randn(9, 1, 8), torch.tensor([0, 4, 9])
    full = thd_attention(q, q, q, cu, attn_mask_type="padding")
    for window in ((2**63 - 1, 2**63 - 1), (-1, 2**64)):
        assert torch.equal(thd_attention(q, q, q, cu, attn_mask_type="padding", window_size=window), full)


@pytest.mark.parametrize("window", [(-2, 0), (0, -2), (-5, -5)])
def test_window_below_minus_one(window: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"each side must be -1 \(unbounded\) or a number of tokens >= 0"):
        normalize_window(window)


@pytest.mark.parametrize("value", [1, 0, "true"])
def test_alignment_that_is_no_bool(value: object) -> None:
    with pytest.raises(TypeError, match=f"bottom_right_diagonal must be a bool or None, got {type(value).__name__}"):
        resolve_mask(PADDING, (1, 1), value)  # type: ignore[arg-type]


def test_errors_carry_the_prefix_of_the_argument() -> None:
    prefix = "thd_attention_policies[1]."
    for arguments in (("nothing",), (PADDING, (1,)), (CAUSAL, (-1, 1)), (PADDING, None, 1)):
        with pytest.raises((TypeError, ValueError), match=r"^thd_attention_policies\[1\]\."):
            resolve_mask(*arguments, argument_prefix=prefix)  # type: ignore[arg-type]


def test_canonical_band_is_bottom_right_where_it_makes_no_difference() -> None:
    assert Band(3, 2, False).canonical(equal_lengths=True) == Band(3, 2, True)
    assert Band(3, 2, False).canonical(equal_lengths=False) == Band(3, 2, False)
    assert Band(None, None, False).canonical(equal_lengths=False) == Band(None, None, True)


@pytest.mark.parametrize(
    ("band", "text"),
    [
        (Band(), "full"),
        (Band(None, 0, True), "causal bottom_right"),
        (Band(None, 0, False), "causal top_left"),
        (Band(4, 0, False), "window (4, 0) top_left"),
        (Band(None, 2, True), "window (inf, 2) bottom_right"),
    ],
)
def test_describe(band: Band, text: str) -> None:
    assert band.describe() == text


@pytest.mark.parametrize("mask_type", [PADDING, CAUSAL, BOTTOM_RIGHT])
@pytest.mark.parametrize(("len_q", "len_kv"), [(1, 1), (4, 4), (3, 7), (7, 3), (1, 6), (6, 1), (0, 3), (3, 0)])
def test_visible_interval_is_the_documented_rule(mask_type: str, len_q: int, len_kv: int) -> None:
    windows = [(left, right) for left, right in itertools.product((-1, 0, 1, 2, 9), (-1, 0, 1, 9))]
    for window, aligned in itertools.product(windows, (True, False)):
        if mask_type != PADDING and (window[0] < 0 < window[1]):
            continue
        band = resolve_mask(mask_type, window, aligned).band
        expected = testing.visible(Mask(mask_type, window, aligned), len_q, len_kv)
        for row, (low, high) in enumerate(masks.iter_rows(band, len_q, len_kv)):
            assert expected[row].nonzero().flatten().tolist() == list(range(low, high)), (window, aligned, row)


def test_warn_once_gives_each_text_once() -> None:
    text = "a warning of test_warn_once_gives_each_text_once"
    with pytest.warns(UserWarning, match=text):
        masks.warn_once((text,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        masks.warn_once((text,))
