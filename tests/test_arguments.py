"""``thd_attention``: errors before anything runs, and the overrides of one call."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from te_attn_ops import NoBackendError, prepare_thd_policies, selection, testing, thd_attention
from te_attn_ops.testing import CAUSAL, FULL, Mask, PackedCase, build
from tests.stubs import Stub, fresh_choices, install  # noqa: F401

CU = torch.tensor([0, 2, 5], dtype=torch.int32)


def qkv(**shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shapes.get(name, (5, 2, 8))) for name in ("q", "k", "v")]


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ([[1.0], *qkv()[1:]], TypeError, r"q must be a tensor \[tokens, heads, head_dim\], got list"),
        ([*qkv()[:2], None], TypeError, "v must be a tensor .*got NoneType"),
        (qkv(q=(1, 5, 2, 8)), ValueError, r"q must be .*packed thd layout\), got shape \(1, 5, 2, 8\)"),
        (qkv(v=(5, 16)), ValueError, r"v must be .*packed thd layout\), got shape \(5, 16\)"),
        ([qkv()[0], qkv()[1].half(), qkv()[2]], TypeError, "k must have the dtype of q, torch.float32; got torch.float16"),
        ([*qkv()[:2], qkv()[2].to("meta")], ValueError, "v must be on the device of q, cpu; got meta"),
        ([x.int() for x in qkv()], TypeError, "q must have a floating dtype, got torch.int32"),
        (qkv(v=(6, 2, 8)), ValueError, "k and v must have the same number of tokens, got 5 and 6"),
        (qkv(v=(5, 1, 8)), ValueError, "k and v must have the same number of heads, got 2 and 1"),
        (qkv(q=(5, 3, 8)), ValueError, "q's number of heads must be a multiple of k's, got 3 and 2"),
        (qkv(k=(5, 0, 8), v=(5, 0, 8)), ValueError, "q's number of heads must be a multiple of k's, got 2 and 0"),
        (qkv(q=(5, 2, 16)), ValueError, "q and k must have the same head_dim, got 16 and 8"),
        (qkv(v=(5, 2, 0)), ValueError, "head_dim must be at least 1, got q 8 and v 0"),
    ],
)
def test_malformed_tensors(tensors: list[torch.Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        thd_attention(*tensors, CU, max_seqlen_q=3)


POLICIES = [{"sequence_ids": torch.tensor([0, 1]), "mask_type": "padding", "window_size": None}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attn_mask_type": "causal"}, "attn_mask_type='causal' does not fit the packed"),
        ({"attn_mask_type": "padding_causal", "window_size": (-1, 4)}, r"window_size=\(-1, 4\)"),
        ({"window_size": (-3, 0)}, r"window_size=\(-3, 0\): each side must be"),
        (
            {"thd_attention_policies": POLICIES, "attn_mask_type": "padding"},
            "attn_mask_type='padding' cannot stand beside thd_attention_policies: each policy names its own",
        ),
        (
            {"thd_attention_policies": POLICIES, "window_size": (1, 0)},
            r"window_size=\(1, 0\) cannot stand beside thd_attention_policies",
        ),
        (
            {"thd_attention_policies": POLICIES, "thd_attention_policy_dispatch": "fastest"},
            "thd_attention_policy_dispatch='fastest' is unknown; use one of auto, padded, single_launch, grouped",
        ),
        ({"thd_attention_policy_dispatch": "fastest"}, "thd_attention_policy_dispatch='fastest' is unknown"),
        ({"thd_attention_policy_dispatch": "grouped"}, "dispatch='grouped' needs thd_attention_policies, got None"),
        ({"thd_attention_policy_dispatch": "padded"}, "thd_attention_policy_dispatch='padded' needs thd_attention_policies"),
        ({"selection": "fastest"}, "selection='fastest' is unknown; use 'static' or 'measured'"),
        ({"backend": "flash9"}, "backend='flash9' is unknown; use one of unfused, torch_flash"),
        ({"attn_mask_type": "caussal"}, "attn_mask_type='caussal' is no mask type; use one of padding, "),
    ],
)
def test_malformed_options(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        thd_attention(*qkv(), CU, max_seqlen_q=3, **arguments)  # type: ignore[arg-type]


def test_errors_are_the_same_where_a_good_call_came_first() -> None:
    """What is remembered of a good call must not wave a bad one through."""
    tensors = qkv()
    good = thd_attention(*tensors, CU, max_seqlen_q=3, window_size=(2, 0), bottom_right_diagonal=True)
    assert good.shape == (5, 2, 8)
    with pytest.raises(ValueError, match="q and k must have the same head_dim"):
        thd_attention(*qkv(q=(5, 2, 16)), CU, max_seqlen_q=3, window_size=(2, 0))
    with pytest.raises(ValueError, match="same number of tokens"):
        thd_attention(*qkv(v=(6, 2, 8)), CU, max_seqlen_q=3, window_size=(2, 0))
    with pytest.raises(ValueError, match="needs thd_attention_policies"):
        thd_attention(*tensors, CU, max_seqlen_q=3, window_size=(2, 0), thd_attention_policy_dispatch="padded")
    with pytest.raises(ValueError, match="max_seqlen_q must be >= 0"):
        thd_attention(*tensors, CU, max_seqlen_q=-3, window_size=(2, 0))


def test_nothing_has_run_where_an_argument_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    install(monkeypatch, Stub("unfused", before_forward=lambda call: ran.append(call)))
    for arguments in ({"window_size": (-3, 0)}, {"max_seqlen_q": -1}, {"thd_attention_policy_dispatch": "padded"}):
        with pytest.raises(ValueError):
            thd_attention(*qkv(), CU, **{"max_seqlen_q": 3, **arguments})
    assert not ran
    thd_attention(*qkv(), CU, max_seqlen_q=3)
    assert len(ran) == 1


# ------------------------------------------------------------------------------------------------------------------- overrides
def test_backend_override_holds_for_one_call_and_writes_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    stubs = [Stub(name, before_forward=lambda call, name=name: used.append(name)) for name in ("unfused", "torch_flash", "flash4")]
    install(monkeypatch, *stubs)
    before = dict(os.environ)
    for backend in (None, "unfused", None, "torch_flash", None):
        thd_attention(*qkv(), CU, max_seqlen_q=3, backend=backend)
    assert used == ["flash4", "unfused", "flash4", "torch_flash", "flash4"]
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"backend": "flash3"}, r"can run .* with backend='flash3':\n  flash3 \(native widths, padded\): not installed"),
        ({"backend": "torch_flash"}, r"torch_flash \(native widths, padded\): "),
        ({"backend": "cudnn", "pad_head_dim": True}, "with backend='cudnn', pad_head_dim=True"),
        (
            {"thd_attention_policies": POLICIES, "thd_attention_policy_dispatch": "single_launch"},
            "with thd_attention_policy_dispatch='single_launch'",
        ),
        (
            {"thd_attention_policies": POLICIES, "thd_attention_policy_dispatch": "single_launch", "backend": "unfused"},
            "  unfused does not offer this dispatch",
        ),
    ],
)
def test_an_override_that_cannot_run_is_an_error_with_the_reasons(arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(NoBackendError, match=reason):
        thd_attention(*qkv(), CU, max_seqlen_q=3, **arguments)  # type: ignore[arg-type]


def test_override_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(NoBackendError, match=r"unfused \(native widths, padded\): disabled by NVTE_UNFUSED_ATTN=0"):
        thd_attention(*qkv(), CU, max_seqlen_q=3)
    assert thd_attention(*qkv(), CU, max_seqlen_q=3, backend="unfused").shape == (5, 2, 8)


@pytest.mark.parametrize("option", ["pad_head_dim", "deterministic"])
def test_an_int_is_no_bool_also_after_a_good_call(option: str) -> None:
    """1 == True, so a remembered choice is found with either."""
    inputs = build(PackedCase((3, 4)))
    inputs.attend(**{option: True})
    with pytest.raises(TypeError, match=f"{option} must be .*got"):
        inputs.attend(**{option: 1})


@pytest.mark.parametrize(
    ("pad_head_dim", "widths"), [(None, [(24, 16)]), (False, [(24, 16)]), (True, [(24, 24)])], ids=["auto", "native", "padded"]
)
def test_pad_head_dim_decides_what_the_kernel_sees(
    monkeypatch: pytest.MonkeyPatch, pad_head_dim: bool | None, widths: list[tuple[int, int]]
) -> None:
    seen: list[tuple[int, int]] = []
    install(monkeypatch, Stub("unfused", before_forward=lambda call: seen.append((call.q.shape[2], call.v.shape[2]))))
    inputs = build(PackedCase((3, 4), head_dim_qk=24, head_dim_v=16))
    assert inputs.attend(pad_head_dim=pad_head_dim).shape == (7, 2, 16)
    assert seen == widths


def test_padding_rounds_up_to_a_multiple_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    install(monkeypatch, Stub("unfused", before_forward=lambda call: seen.append(call.q.shape[2])))
    build(PackedCase((3, 4), head_dim_qk=100, head_dim_v=96)).attend(pad_head_dim=True)
    build(PackedCase((3, 4), head_dim_qk=20)).attend(pad_head_dim=True)
    build(PackedCase((3, 4), head_dim_qk=16)).attend(pad_head_dim=True)
    assert seen == [104, 24, 16]


@pytest.mark.parametrize("dispatch", ["auto", "padded", "grouped"])
def test_dispatch_of_a_call(monkeypatch: pytest.MonkeyPatch, dispatch: str) -> None:
    """In place, each policy's launch gets all sequences with length 0 for the others'; grouped gives it a run of its own."""
    lens: list[list[int]] = []
    install(monkeypatch, Stub("unfused", before_forward=lambda call: lens.append(call.seqused_q.tolist())))
    inputs = build(PackedCase((3, 4, 5), masks=(CAUSAL, FULL), owner=(0, 1, 0)))
    inputs.attend(thd_attention_policy_dispatch=dispatch)
    grouped = [[3, 5, 0], [0, 0, 4]]
    assert lens == (grouped if dispatch == "grouped" else [[3, 0, 5], [0, 4, 0]])


def test_one_policy_over_everything_takes_the_scalar_path_but_not_when_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: list[bool] = []
    install(monkeypatch, Stub("unfused", before_forward=lambda call: plain.append((call.plain_cu_seqlens, call.first))))
    inputs = build(PackedCase((3, 4, 5), owner=(0, 0, 0)))
    before = selection.probe_count()
    inputs.attend()
    inputs.attend(thd_attention_policies=None, attn_mask_type="padding_causal")
    assert plain == [(True, True)] * 2 and selection.probe_count() == before + 1
    inputs.attend(thd_attention_policy_dispatch="grouped")
    assert selection.probe_count() == before + 2


# ------------------------------------------------------------------------------------------------------------------- what comes
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("return_max_logit", [False, True])
def test_returns_what_was_asked_for(return_lse: bool, return_max_logit: bool) -> None:
    result = build(PackedCase((3, 4))).attend(return_lse=return_lse, return_max_logit=return_max_logit)
    parts = result if isinstance(result, tuple) else (result,)
    expected = [(7, 2, 16), *([(2, 7)] if return_lse else []), *([(2,)] if return_max_logit else [])]
    assert [tuple(part.shape) for part in parts] == expected
    assert [part.dtype for part in parts] == [torch.float32] * len(parts)
    assert [part.requires_grad for part in parts] == [True] + [False] * (len(parts) - 1)


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_inputs_are_not_modified(layout: str) -> None:
    case = PackedCase((3, 4), gaps_q=(1, 2), tail=2, masks=(CAUSAL, FULL), owner=(0, 1), layout=layout)
    inputs = build(case)
    tensors = [getattr(inputs, name) for name in ("q", "k", "v", "grad_out", "cu_seqlens_q", "cu_seqlens_q_padded")]
    copies = [tensor.detach().clone() for tensor in tensors]
    for options in ({}, {"sanitize_padding": True}, {"thd_attention_policy_dispatch": "grouped"}, {"pad_head_dim": True}):
        inputs.run(**options)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_is_refused_by_name(dtype: torch.dtype) -> None:
    tensors = [x.to(dtype) for x in qkv()]
    with pytest.raises(NoBackendError, match="needs a floating dtype of 16 bits or more, found float8"):
        thd_attention(*tensors, CU, max_seqlen_q=3)


# ------------------------------------------------------------------------------------------- what is remembered does not excuse the next
def test_floats_are_no_ints_also_after_a_good_call() -> None:
    inputs = build(PackedCase((3, 4), masks=(Mask("padding", (3, 2)),)))
    inputs.attend()
    for window in ((3.0, 2.0), (3, True)):
        with pytest.raises(TypeError, match="window_size must hold ints"):
            inputs.attend(window_size=window)
    ids = torch.arange(2)
    policy = {"sequence_ids": ids, "mask_type": "padding", "window_size": (2, 2), "bottom_right_diagonal": True}
    inputs.attend(thd_attention_policies=[policy], attn_mask_type=None, window_size=None)
    for wrong in ({"window_size": (2.0, 2.0)}, {"bottom_right_diagonal": 1}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            inputs.attend(thd_attention_policies=[policy | wrong], attn_mask_type=None, window_size=None)


def test_offsets_are_checked_again_against_other_rows_and_bounds() -> None:
    cu = torch.tensor([0, 10, 30, 40], dtype=torch.int32)
    q = torch.randn(40, 2, 8)
    thd_attention(q, q, q, cu, max_seqlen_q=20)
    with pytest.raises(ValueError, match="max_seqlen_q=5 is below the longest sequence, which has 20 tokens"):
        thd_attention(q, q, q, cu, max_seqlen_q=5)
    with pytest.raises(ValueError, match="cu_seqlens_q: the last entry is 40, beyond the 25 rows of q"):
        thd_attention(q[:25], q[:25], q[:25], cu, max_seqlen_q=20)
    thd_attention(q, q, q, cu, max_seqlen_q=20)


def test_a_check_that_could_not_be_made_is_made_later() -> None:
    cu, q = torch.tensor([0, 4, 10], dtype=torch.int32), torch.randn(10, 2, 16)
    with FlopCounterMode(display=False):
        thd_attention(q, q, q, cu, max_seqlen_q=3)
    with pytest.raises(ValueError, match="max_seqlen_q=3 is below the longest sequence"):
        thd_attention(q, q, q, cu, max_seqlen_q=3)


def test_meta_tensors_have_a_result() -> None:
    q, cu = torch.randn(10, 2, 16, device="meta"), torch.zeros(3, dtype=torch.int32, device="meta")
    assert thd_attention(q, q, q, cu, max_seqlen_q=6).shape == (10, 2, 16)


def test_a_promise_of_equal_lengths_is_checked_against_each_batch() -> None:
    cu, other = torch.tensor([0, 10, 40], dtype=torch.int32), torch.tensor([0, 20, 40], dtype=torch.int32)
    q = torch.randn(40, 2, 8)
    policies = [{"sequence_ids": torch.arange(2), "mask_type": "padding_causal", "window_size": None}]
    prepared = prepare_thd_policies(policies, cu, cu.clone(), equal_lengths=True)
    thd_attention(q, q, q, cu, cu.clone(), max_seqlen_q=30, max_seqlen_kv=30, thd_attention_policies=prepared)
    with pytest.raises(ValueError, match="equal_lengths=True, but sequence 0 has 10 query and 20 key tokens"):
        thd_attention(q, q, q, cu, other, max_seqlen_q=30, max_seqlen_kv=30, thd_attention_policies=prepared)


def test_an_unknown_selection_variable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_ATTN_OPS_SELECTION", "fast")
    with pytest.warns(UserWarning, match="TE_ATTN_OPS_SELECTION='fast' is unknown and 'static' is used: it takes static or measured"):
        build(PackedCase((3, 4))).attend()


@pytest.mark.parametrize("scale", [float("nan"), -0.1, 0.0])
def test_a_wrong_scale_is_refused_under_compile_too(scale: float) -> None:
    inputs = build(PackedCase((3, 4)))
    compiled = torch.compile(thd_attention, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"softmax_scale must be positive|Observed exception|BUILD_STRING"):
        inputs.attend(compiled, softmax_scale=scale)
