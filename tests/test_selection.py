"""When a choice is made, and when it is made anew."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
import torch

from te_attn_ops import AttentionParams, NoBackendError, environment, invalidate, prepare_thd_policies, selection, thd_attention
from te_attn_ops.masks import Band
from te_attn_ops.testing import CAUSAL, FULL, Mask, PackedCase, assert_matches_reference, build
from tests.stubs import Stub, fresh_choices, install, refuse_native  # noqa: F401


@pytest.fixture
def probes() -> Iterator[object]:
    start = selection.probe_count()
    yield lambda: selection.probe_count() - start


def test_no_selector_call_in_the_steady_state(probes: object) -> None:
    for case in (PackedCase((5, 9)), PackedCase((5, 9, 2), gaps_q=(1, 0, 2), masks=(CAUSAL, FULL), owner=(0, 1, 0))):
        build(case).run()
    warm = probes()
    for step in range(1, 12):
        for case in (PackedCase((step, 9)), PackedCase((5, step, 2), gaps_q=(1, 0, 2), masks=(CAUSAL, FULL), owner=(1, 1, 0))):
            build(case).run()
    assert probes() == warm == 2


def test_a_b_a_b_probes_twice(probes: object) -> None:
    a, b = build(PackedCase((5, 9))), build(PackedCase((5, 9), head_dim_qk=24, head_dim_v=8))
    for inputs in (a, b, a, b):
        inputs.attend()
    assert probes() == 2


@pytest.mark.parametrize(
    "other",
    [
        {"head_dim_qk": 32},
        {"head_dim_v": 8},
        {"num_heads": 4},
        {"num_gqa_groups": 1},
        {"dtype": torch.bfloat16},
        {"masks": (FULL,)},
        {"masks": (Mask("padding_causal", (3, 0)),)},
        {"gaps_q": (1, 1)},
        {"lengths_kv": (9, 5)},
        {"lengths_q": (5, 200)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_is_chosen_apart(probes: object, other: dict[str, object]) -> None:
    base = PackedCase((5, 9))
    for case in (base, base.replace(**other), base, base.replace(**other)):
        build(case).attend()
    assert probes() == 2


@pytest.mark.parametrize(
    "options",
    [{"deterministic": True}, {"return_max_logit": True}, {"backend": "unfused"}, {"pad_head_dim": False}],
    ids=lambda options: next(iter(options)),
)
def test_options_are_chosen_apart(probes: object, options: dict[str, object]) -> None:
    inputs = build(PackedCase((5, 9)))
    for changes in ({}, options, {}, options):
        inputs.attend(**changes)
    assert probes() == 2


def test_what_is_not_chosen_apart(probes: object) -> None:
    """Tokens, sequences, lengths within a bucket, layouts, scales, what else is returned."""
    base = PackedCase((5, 9))
    for case in (base, PackedCase((128,)), PackedCase((1, 1, 1, 100), tail=9), base.replace(layout="transposed")):
        build(case).attend(softmax_scale=case.lengths_q[0] / 3, return_lse=len(case.lengths_q) > 1)
    assert probes() == 1


def test_training_is_decided_outside_the_op(monkeypatch: pytest.MonkeyPatch, probes: object) -> None:
    """Grad mode reads False inside an operator: each mode must still pick its own kernel."""
    seen: list[bool] = []
    install(monkeypatch, Stub("unfused", before_forward=lambda call: seen.append(call.is_training)))
    inputs = build(PackedCase((5, 9)))
    out = inputs.attend()
    with torch.no_grad():
        assert not inputs.attend().requires_grad
    with torch.inference_mode():
        inputs.attend()
    frozen = [x.detach() for x in (inputs.q, inputs.k)]
    only_v = thd_attention(*frozen, inputs.v, inputs.cu_seqlens_q, max_seqlen_q=9)
    thd_attention(*frozen, inputs.v.detach(), inputs.cu_seqlens_q, max_seqlen_q=9)
    assert seen == [True, False, False, True, False] and probes() == 2
    torch.testing.assert_close(torch.autograd.grad(only_v.sum(), inputs.v)[0], torch.autograd.grad(out.sum(), inputs.v)[0])


def test_training_and_inference_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded kernel without a backward must not be chosen for training."""

    def no_backward_when_padded(p: AttentionParams) -> Iterator[str]:
        if p.head_dim_qk == p.head_dim_v and p.is_training:
            yield "has no backward at equal widths"
        yield from refuse_native(p) if not p.is_training else ()

    used: list[int] = []
    install(monkeypatch, Stub("flash4", no_backward_when_padded, before_forward=lambda call: used.append(call.v.shape[2])))
    inputs = build(PackedCase((5, 9), head_dim_qk=24, head_dim_v=16))
    for _ in range(2):
        inputs.attend()
        with torch.no_grad():
            inputs.attend()
    assert used == [16, 24, 16, 24]


# ----------------------------------------------------------------------------------------------------------------- environment
@pytest.mark.parametrize(
    ("variable", "installed", "winner", "without"),
    [
        ("NVTE_FLASH_ATTN", ("flash4", "flash2", "cudnn"), "flash4", "cudnn"),
        ("NVTE_FLASH_ATTN_V4", ("flash4", "flash3", "cudnn"), "flash4", "flash3"),
        ("NVTE_FLASH_ATTN_V3", ("flash3", "flash2"), "flash3", "flash2"),
        ("NVTE_FLASH_ATTN_V2", ("flash2", "torch_flash", "cudnn"), "flash2", "cudnn"),
        ("NVTE_FUSED_ATTN", ("cudnn", "unfused"), "cudnn", "unfused"),
    ],
)
def test_a_switch_that_is_set_changed_and_unset_is_noticed(
    monkeypatch: pytest.MonkeyPatch, probes: object, variable: str, installed: tuple[str, ...], winner: str, without: str
) -> None:
    used: list[str] = []
    install(monkeypatch, *[Stub(name, before_forward=lambda call, name=name: used.append(name)) for name in installed])
    inputs = build(PackedCase((5, 9)))
    monkeypatch.delenv(variable, raising=False)
    for value in (None, "0", "1", "0", None):
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
        inputs.attend()
    assert used == [winner, without, winner, without, winner]
    assert probes() == 2  # "1" is what an unset variable stands for


def test_every_switch_turns_off_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_attn_ops.backends import BACKEND_NAMES, get_backend

    expected = {
        "NVTE_FLASH_ATTN": {"torch_flash", "flash2", "flash3", "flash4"},
        "NVTE_FLASH_ATTN_V2": {"torch_flash", "flash2"},
        "NVTE_FLASH_ATTN_V3": {"flash3"},
        "NVTE_FLASH_ATTN_V4": {"flash4"},
        "NVTE_FUSED_ATTN": {"cudnn", "cudnn_flex"},
        "NVTE_UNFUSED_ATTN": {"unfused"},
    }
    assert set(environment.SWITCHES) == set(expected)
    for variable, names in expected.items():
        assert {name for name in BACKEND_NAMES if variable in get_backend(name).switches} == names


def test_an_unrelated_variable_changes_nothing(monkeypatch: pytest.MonkeyPatch, probes: object) -> None:
    inputs = build(PackedCase((5, 9)))
    inputs.attend()
    monkeypatch.setenv("NVTE_SOMETHING_ELSE", "0")
    inputs.attend()
    assert probes() == 1


@pytest.mark.parametrize("how", ["argument", "environment", "torch"])
def test_deterministic_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    seen: list[bool] = []
    install(monkeypatch, Stub("unfused", before_forward=lambda call: seen.append(call.deterministic)))
    inputs = build(PackedCase((5, 9)))
    inputs.attend()
    if how == "argument":
        inputs.attend(deterministic=True)
    elif how == "environment":
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        inputs.attend()
        monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    else:
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            inputs.attend()
        finally:
            torch.use_deterministic_algorithms(False)
    inputs.attend()
    assert seen == [False, True, False]


def test_deterministic_false_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    install(monkeypatch, Stub("unfused", before_forward=lambda call: seen.append(call.deterministic)))
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    build(PackedCase((5, 9))).attend(deterministic=False)
    assert seen == [False]


# -------------------------------------------------------------------------------------------------------------------- failures
def test_no_backend_gives_one_error_with_the_reasons_of_both_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    inputs = build(PackedCase((5, 9), head_dim_qk=24, head_dim_v=16))
    with pytest.raises(NoBackendError) as caught:
        inputs.attend()
    text = str(caught.value)
    assert text.startswith("no attention backend can run head_dim_qk=24, head_dim_v=16, torch.float32:\n")
    for width in ("native widths", "padded to 24"):
        assert f"  unfused ({width}, padded): disabled by NVTE_UNFUSED_ATTN=0" in text
        for name in ("torch_flash", "flash2", "flash3", "flash4", "cudnn"):
            assert f"\n  {name} ({width}, padded): " in text
    assert isinstance(caught.value, ValueError)


def test_a_failure_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(PackedCase((5, 9)))
    install(monkeypatch, Stub("unfused", lambda p: iter(["not today"])))
    for _ in range(2):
        with pytest.raises(NoBackendError, match="not today"):
            inputs.attend()
    install(monkeypatch, Stub("unfused"))
    inputs.attend()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("width", [128, 256])
def test_gaps_cost_no_backend(width: int, training: bool) -> None:
    """A blanket pad_between_seqs must not leave a wide head without kernels: no backend refuses gaps."""
    from te_attn_ops.backends import BACKEND_NAMES, get_backend

    params = AttentionParams(head_dim_qk=width, head_dim_v=width, is_training=training)
    for name in BACKEND_NAMES:
        with_gaps, without = (list(get_backend(name).refusals(params.replace(has_gaps=gaps))) for gaps in (True, False))
        assert with_gaps == without, name


def test_policies_may_run_on_different_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[str, Band, list[int]]] = []

    def note(name: str) -> object:
        return lambda call: used.append((name, call.band, call.seqused_q.tolist()))

    def no_window(p: AttentionParams) -> Iterator[str]:
        if any(band.left is not None for band in p.bands):
            yield f"takes no window, found {p.bands[0].describe()}"

    install(monkeypatch, Stub("flash4", no_window, before_forward=note("flash4")), Stub("unfused", before_forward=note("unfused")))
    inputs = build(PackedCase((3, 4, 5), masks=(CAUSAL, Mask("padding", (2, 1)), FULL), owner=(0, 1, 2)))
    inputs.attend()
    assert used == [
        ("flash4", Band(None, 0, True), [3, 0, 0]),
        ("unfused", Band(2, 1, True), [0, 4, 0]),
        ("flash4", Band(None, None, True), [0, 0, 5]),
    ]


# ------------------------------------------------------------------------------------------------------------------ invalidate
def test_invalidate_without_a_changed_answer(probes: object) -> None:
    inputs = build(PackedCase((5, 9)))
    inputs.attend()
    generation = environment.STATE.generation
    assert invalidate() is False and environment.STATE.generation == generation
    assert probes() == 2
    inputs.attend()
    assert probes() == 2


def test_invalidate_with_a_changed_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    stubs = {name: Stub(name, before_forward=lambda call, name=name: used.append(name)) for name in ("flash4", "unfused")}
    install(monkeypatch, *stubs.values())
    inputs = build(PackedCase((5, 9)))
    inputs.attend()
    generation = environment.STATE.generation
    stubs["flash4"]._refuse = lambda p: iter(["its package was removed"])
    inputs.attend()
    assert invalidate() is True and environment.STATE.generation != generation
    inputs.attend()
    assert used == ["flash4", "flash4", "unfused"]


def test_invalidate_of_a_choice_that_is_gone_altogether(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub("unfused")
    install(monkeypatch, stub)
    inputs = build(PackedCase((5, 9)))
    inputs.attend()
    stub._refuse = lambda p: iter(["gone"])
    assert invalidate() is True
    with pytest.raises(NoBackendError, match="gone"):
        inputs.attend()


def test_first_probes_from_many_threads(probes: object) -> None:
    case, errors = PackedCase((5, 9)), []
    barrier = threading.Barrier(8)

    def work() -> None:
        try:
            inputs = build(case)
            barrier.wait()
            inputs.run()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and probes() == 1


def test_the_memo_is_bounded() -> None:
    params = AttentionParams(device_type="cpu", sm=0, dtype=torch.float32)
    for width in range(8, 8 * (selection._MEMO_CAPACITY + 8), 8):
        selection.select(selection.Request(params.padded_to(width), env=environment.snapshot()))
    assert len(selection._MEMO._entries) == selection._MEMO_CAPACITY


def test_a_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    inputs = build(PackedCase((5, 9), head_dim_qk=24, head_dim_v=16))
    with caplog.at_level(logging.INFO, logger="te_attn_ops"):
        for _ in range(3):
            inputs.attend()
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert messages == ["head_dim_qk=24 head_dim_v=16 float32 training=True: unfused, native widths, padded"]


@pytest.mark.parametrize(("mutable", "expected"), [(False, True), (True, False)])
def test_backends_hear_whether_members_may_change(monkeypatch: pytest.MonkeyPatch, mutable: bool, expected: bool) -> None:
    stub = Stub("unfused")
    install(monkeypatch, stub)
    inputs = build(PackedCase((5, 9), masks=(CAUSAL, FULL), owner=(0, 1)))
    inputs.attend(thd_attention_policies=inputs.prepare(mutable=mutable))
    assert {p.static_membership for p in stub.asked} == {expected}


def test_equal_lengths_come_from_one_tensor_or_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal maxima prove nothing: two tensors, whatever their contents, are unequal lengths."""
    stub = Stub("unfused")
    install(monkeypatch, stub)
    inputs = build(PackedCase((5, 9)))
    cu = inputs.cu_seqlens_q
    policies = [{"sequence_ids": torch.tensor([0, 1]), "mask_type": "padding_causal", "window_size": None}]
    promised = prepare_thd_policies(policies, cu, cu.clone(), equal_lengths=True)
    inputs.attend()
    inputs.attend(cu_seqlens_kv=cu)
    inputs.attend(cu_seqlens_kv=cu.clone())
    inputs.attend(cu_seqlens_kv=cu.clone(), thd_attention_policies=promised, attn_mask_type=None)
    assert [p.equal_lengths for p in stub.asked] == [True, False]
    assert stub.asked[0].bands == (Band(None, 0, True),) and stub.asked[1].bands == (Band(None, 0, False),)


def test_an_answer_found_before_an_invalidation_is_not_kept_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another thread called invalidate() between this one's look at the memo and its own note of the answer."""
    install(monkeypatch, Stub("flash4"), Stub("unfused"))
    inputs, real = build(PackedCase((5, 9))), selection.select

    def overtaken(request: selection.Request) -> selection.Selection:
        found = real(request)
        monkeypatch.setattr(selection, "select", real)
        install(monkeypatch, Stub("unfused"))
        environment.raise_generation()
        return found

    monkeypatch.setattr(selection, "select", overtaken)
    inputs.attend()
    asked: list[str] = []
    monkeypatch.setattr(selection, "select", lambda request: asked.append(request.params.device_type) or real(request))
    inputs.attend()
    assert asked == ["cpu"]


# --------------------------------------------------------------------------------------------------------- widths in wider steps
def refuse_80_to_train(p: AttentionParams) -> Iterator[str]:
    if p.head_dim_qk % 32 and p.is_training:
        yield f"needs a multiple of 32 to train, found {p.head_dim_qk}"


@pytest.mark.parametrize(("training", "width"), [(True, 96), (False, 0)])
def test_a_backend_with_wider_steps_is_padded_to_its_own(monkeypatch: pytest.MonkeyPatch, training: bool, width: int) -> None:
    wide = Stub("flash4", refuse_80_to_train)
    wide.width_multiple = 32
    install(monkeypatch, wide, Stub("torch_flash"), Stub("unfused"))
    params = AttentionParams(head_dim_qk=80, head_dim_v=80, is_training=training)
    found = selection.select(selection.Request(params))
    assert (found.backends, found.head_dim_padded) == (("flash4",), width)
    # No other backend is asked at that width, nor is this one where the caller forbids it.
    assert {c.backend for c in found.candidates if c.head_dim_padded} == {"flash4"}
    found = selection.select(selection.Request(params, pad_head_dim=False))
    assert (found.backends, found.head_dim_padded) == (("torch_flash" if training else "flash4",), 0)
    found = selection.select(selection.Request(params, pad_head_dim=True))
    assert (found.backends, found.head_dim_padded) == (("flash4",), 96)
    found = selection.select(selection.Request(params, backend="torch_flash", pad_head_dim=True))
    assert (found.backends, found.head_dim_padded) == (("torch_flash",), 0), "widths that are one have nothing to pad"


def test_a_width_padded_in_wider_steps_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Stub("flash4", refuse_80_to_train)
    wide.width_multiple = 32
    install(monkeypatch, wide)
    inputs = build(PackedCase((5, 9), head_dim_qk=8, head_dim_v=8))
    assert_matches_reference(inputs)
    assert {p.head_dim_qk for p in wide.asked} == {8, 32}


# ------------------------------------------------------------------------------------------------------------ runs of neighbours
@pytest.mark.parametrize("tracing", [False, True])
@pytest.mark.parametrize(("owner", "dispatch"), [((0, 1, 2, 3, 4, 5), "padded"), ((0, 1, 2, 3, 4, 5, 0), "grouped")])
def test_many_runs_of_neighbours_stay_in_place(
    monkeypatch: pytest.MonkeyPatch, owner: tuple[int, ...], dispatch: str, tracing: bool
) -> None:
    """flash2 passes over all rows for each policy, unless a policy's sequences are one run."""
    seen: list[bool] = []
    copying = Stub("flash2", before_forward=lambda call: seen.append(call.contiguous_run and len(call.bands) == 1))
    copying.in_place = False
    install(monkeypatch, copying)
    masks = tuple(Mask("padding", (n, 1)) for n in range(6))
    inputs = build(PackedCase(tuple(range(3, 3 + len(owner))), masks=masks, owner=owner))
    requests: list[selection.Request] = []
    real = selection.select
    monkeypatch.setattr(selection, "select", lambda request: requests.append(request) or real(request))
    function = torch.compile(thd_attention, fullgraph=True, backend="eager") if tracing else thd_attention
    inputs.attend(function)
    assert [real(request).dispatch for request in requests][-1] == dispatch
    assert requests[-1].params.contiguous is (dispatch == "padded")
    assert set(seen) == {True}
