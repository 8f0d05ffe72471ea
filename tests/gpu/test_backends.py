"""Every installed backend, forced, against the closed form and the float64 reference, over memory that holds NaN.

A configuration that a backend refuses is skipped with its reason; :func:`test_core_configuration` says what must not be. Heads,
widths and masks are shared between tests: each new combination costs some backends seconds of compilation.
"""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from te_attn_ops import (
    AttentionParams,
    NoBackendError,
    environment,
    refresh_thd_policies,
    selection,
    testing,
    thd_attention,
)
from te_attn_ops.backends import get_backend
from te_attn_ops.testing import BOTTOM_RIGHT, CAUSAL, EXAMPLES, FULL, Mask, PackedCase, PackedInputs, build

pytestmark = pytest.mark.gpu

BACKENDS = ("torch_flash", "flash2", "flash3", "flash4", "cudnn", "cudnn_flex", "unfused")
SHAPE: dict[str, Any] = {"num_heads": 4, "num_gqa_groups": 2, "head_dim_qk": 128, "dtype": torch.bfloat16}
WINDOW = Mask("padding", (64, 16))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if get_backend(request.param).version() is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


def is_single_launch(backend: str) -> bool:
    return get_backend(backend).single_launch


def sample(case: PackedCase, backend: str, **options: Any) -> PackedInputs:
    """A case's tensors, rows of no sequence filled with large finite values. A single-launch backend takes policies only."""
    if is_single_launch(backend) and case.owner is None:
        case = case.replace(owner=(0,) * len(case.lengths_q))
    return build(case, "cuda", **options).poison(1e3)


def forced(inputs: PackedInputs, backend: str, dispatch: str | None = None, training: bool = True) -> dict[str, Any]:
    """What makes a call use the backend."""
    case = inputs.case
    if case.owner is None:
        return {"backend": backend}
    if not is_single_launch(backend):
        options = {"thd_attention_policies": inputs.prepared, "thd_attention_policy_dispatch": dispatch or "padded"}
        return {"backend": backend, **options}
    prepared = inputs.prepare(attention=inputs.plan_spec(training), total_q=case.total("q"), total_kv=case.total("kv"))
    return {"backend": backend, "thd_attention_policies": prepared, "thd_attention_policy_dispatch": "single_launch"}


def or_skip(function: Callable[..., Any], **options: Any) -> Any:
    """What a function returns; a skip with the backend's own reason where it refuses."""
    testing.poison_allocator("cuda")
    try:
        return function(**options)
    except NoBackendError as error:
        pytest.skip(str(error).splitlines()[-1].strip())


def check(inputs: PackedInputs, backend: str, dispatch: str | None = None, **options: Any) -> None:
    actual = or_skip(inputs.run, **forced(inputs, backend, dispatch), **options)
    testing.assert_matches(actual, testing.reference(inputs, options.get("softmax_scale")), inputs)


# ---------------------------------------------------------------------------------------------------------------------- values
OLDEST_SM = {"torch_flash": 80, "flash2": 80, "flash3": 90, "flash4": 90, "cudnn": 90, "cudnn_flex": 90, "unfused": 0}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=lambda mask: mask.attn_mask_type)
def test_core_configuration(backend: str, mask: Mask, training: bool) -> None:
    """Width 128, bfloat16, self-attention: an installed backend must take it on the architectures that it is made for."""
    sm = environment.compute_capability(0)
    if sm < OLDEST_SM[backend] or (backend in ("flash3", "cudnn_flex") and sm >= 100):
        pytest.skip(f"{backend} is not made for sm{sm}")
    inputs = sample(PackedCase((200, 77), masks=(mask,), **SHAPE), backend)
    options = forced(inputs, backend)
    testing.poison_allocator("cuda")
    if training:
        testing.assert_matches(inputs.run(**options), testing.reference(inputs), inputs)
    else:
        with torch.no_grad():
            out = inputs.attend(**options)
        torch.testing.assert_close(out.double(), testing.reference(inputs).out, rtol=1.5e-2, atol=1.5e-2)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(backend: str, name: str) -> None:
    case = EXAMPLES[name][0].replace(**SHAPE)
    _check_closed_form(case, backend)


@pytest.mark.parametrize(
    "mask",
    [FULL, CAUSAL, BOTTOM_RIGHT, Mask("padding", (64, 16), True), Mask("padding", (64, 16), False), Mask("padding_causal", (40, 0))],
    ids=str,
)
def test_closed_form_over_many_tiles(backend: str, mask: Mask) -> None:
    """lse is the logarithm of the number of visible keys: a bound that is off by one shows, in a tile's middle or at its edge."""
    case = PackedCase((300, 129, 0, 200, 128), (257, 129, 64, 0, 400), gaps_q=(0, 7, 1, 0, 0), gaps_kv=(3, 0, 0, 2, 0), tail=5, **SHAPE)
    _check_closed_form(case.replace(masks=(mask,)), backend)


def _check_closed_form(case: PackedCase, backend: str) -> None:
    inputs = sample(case, backend)
    with torch.no_grad():
        or_skip(testing.assert_closed_form, case=inputs.case, device="cuda", **forced(inputs, backend))


CASES = {
    "causal": PackedCase((200, 77), layout="offset", **SHAPE),
    "full_gaps": PackedCase((200, 77, 0, 130), gaps_q=(3, 0, 5, 1), tail=9, masks=(FULL,), layout="transposed", **SHAPE),
    "window_cross": PackedCase(
        (150, 0, 90, 33),
        (60, 70, 0, 200),
        gaps_q=(1, 2, 0, 0),
        gaps_kv=(0, 3, 0, 2),
        masks=(Mask("padding_causal_bottom_right", (40, 0)),),
        layout="interleaved",
        **SHAPE,
    ),
    "top_left_cross": PackedCase((150, 40, 90), (60, 200, 90), masks=(Mask("padding", (40, 25), False),), **SHAPE),
    "policies": PackedCase(
        (130, 77, 201, 50, 64, 9),
        gaps_q=(0, 3, 0, 0, 1, 2),
        tail=11,
        masks=(CAUSAL, FULL, WINDOW),
        owner=(0, 1, 2, 0, 1, 2),
        layout="interleaved",
        **SHAPE,
    ),
    "policies_contiguous": PackedCase(
        (130, 77, 201, 50, 64, 9), masks=(CAUSAL, FULL, WINDOW), owner=(0, 0, 1, 1, 2, 2), **SHAPE
    ),
    "policies_cross": PackedCase(
        (130, 0, 60, 90), (50, 64, 201, 0), masks=(BOTTOM_RIGHT, FULL), owner=(0, 1, 0, 1), tail=3, **SHAPE
    ),
    "mha_fp16": PackedCase(
        (130, 77, 201),
        gaps_q=(1, 0, 2),
        masks=(CAUSAL, FULL),
        owner=(0, 1, 0),
        layout="interleaved",
        **{**SHAPE, "num_gqa_groups": 4, "dtype": torch.float16},
    ),
    "mqa": PackedCase((130, 77, 201), gaps_q=(1, 0, 2), **{**SHAPE, "num_gqa_groups": 1}),
    # Contiguous to PyTorch, although the stride of its head is not head_dim.
    "one_head": PackedCase((130, 77, 201), layout="transposed", **{**SHAPE, "num_heads": 1, "num_gqa_groups": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(backend: str, name: str) -> None:
    check(sample(CASES[name], backend), backend)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("policies")])
def test_grouped(backend: str, name: str) -> None:
    if is_single_launch(backend):
        pytest.skip(f"{backend} runs all policies in one launch")
    check(sample(CASES[name], backend), backend, "grouped")


@pytest.mark.parametrize("name", ["causal", "policies"])
def test_max_logit(backend: str, name: str) -> None:
    check(sample(CASES[name], backend), backend, return_max_logit=True)


@pytest.mark.parametrize("widths", [(192, 128), (128, 192), (100, 96)], ids=str)
def test_padded_widths(widths: tuple[int, int]) -> None:
    """Through a backend that needs equal widths in multiples of 8; the scale stays that of the width given."""
    shape = {**SHAPE, "head_dim_qk": widths[0], "head_dim_v": widths[1]}
    inputs = build(PackedCase((130, 77), gaps_q=(2, 0), masks=(CAUSAL, FULL), owner=(0, 1), **shape), "cuda").poison(1e3)
    options = {"backend": "torch_flash", "pad_head_dim": True}
    testing.assert_matches(or_skip(inputs.run, **options), testing.reference(inputs), inputs)


def test_sanitize_padding(backend: str) -> None:
    inputs = sample(CASES["policies"], backend).poison()
    check(inputs, backend, sanitize_padding=True)


def test_a_nan_stays_with_the_sequences_of_its_policy_on_unfused_and_flash2() -> None:
    for backend in ("unfused", "flash2", "torch_flash"):
        if get_backend(backend).version() is None:
            continue
        inputs = sample(CASES["policies_contiguous"], backend)
        rows = inputs.case.rows("q")[2]
        with torch.no_grad():
            inputs.v[rows] = torch.nan
        result = inputs.run(**forced(inputs, backend))
        others = torch.ones(inputs.q.shape[0], dtype=torch.bool, device="cuda")
        others[rows] = False
        for name in ("out", "dq", "dk", "dv"):
            assert getattr(result, name)[others].isfinite().all(), (backend, name)
        assert result.out[rows].isnan().all()


@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
def test_one_policys_sequences_do_not_depend_on_the_others(backend: str, dispatch: str) -> None:
    """Bitwise, outputs and gradients, whatever stands in the other policy's rows and however they are masked."""
    if dispatch == "grouped" and is_single_launch(backend):
        pytest.skip(f"{backend} runs all policies in one launch")
    case = PackedCase((300, 177, 201, 130), masks=(CAUSAL, FULL), owner=(0, 1, 0, 1), **SHAPE)
    base, changed = sample(case, backend), sample(case.replace(masks=(CAUSAL, WINDOW)), backend, seed=1)
    rows = torch.cat([torch.arange(r.start, r.stop) for n, r in enumerate(case.rows("q")) if case.owner[n] == 0]).cuda()
    with torch.no_grad():
        for name in ("q", "k", "v", "grad_out"):
            getattr(changed, name)[rows] = getattr(base, name)[rows]
    results = []
    for deterministic in (True, False):
        # torch_flash follows torch's own switch.
        torch.use_deterministic_algorithms(deterministic and backend == "torch_flash")
        try:
            results = [x.run(**forced(x, backend, dispatch), deterministic=deterministic) for x in (changed, base)]
            break
        except NoBackendError:
            continue  # no deterministic backward: outputs alone are compared
        finally:
            torch.use_deterministic_algorithms(False)
    got, want = results
    for name in ("out", "dq", "dk", "dv") if deterministic else ("out",):
        assert torch.equal(getattr(got, name)[rows], getattr(want, name)[rows]), name
    assert torch.equal(got.lse[:, rows], want.lse[:, rows])


def test_a_switch_of_torchs_determinism_is_noticed() -> None:
    """torch_flash is deterministic only where torch's own switch is on; the choice follows it both ways."""
    inputs = sample(CASES["causal"], "torch_flash")
    for on in (False, True, False):
        torch.use_deterministic_algorithms(on)
        try:
            if on:
                testing.assert_matches(inputs.run(backend="torch_flash", deterministic=True), testing.reference(inputs), inputs)
            else:
                with pytest.raises(NoBackendError, match=r"deterministic only under torch.use_deterministic_algorithms\(True"):
                    inputs.run(backend="torch_flash", deterministic=True)
        finally:
            torch.use_deterministic_algorithms(False)


def test_a_loose_bound_costs_the_unfused_path_nothing() -> None:
    inputs = build(PackedCase((5, 9), (7, 3), num_heads=16, head_dim_qk=32, dtype=torch.bfloat16), "cuda")
    loose = inputs.run(backend="unfused", max_seqlen_q=1 << 24, max_seqlen_kv=1 << 24)
    testing.assert_matches(loose, testing.reference(inputs), inputs)


@pytest.mark.parametrize("seed", range(8))
def test_random_case_by_the_default_choice(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Without flash4, which compiles for every combination of masks: policies may fall to different backends here."""
    monkeypatch.setenv("NVTE_FLASH_ATTN_V4", "0")
    case = testing.random_case(seed, **{**SHAPE, "head_dim_v": 128})
    inputs = build(case, "cuda", seed=seed).poison(1e3)
    testing.poison_allocator("cuda")
    testing.assert_matches(inputs.run(), testing.reference(inputs), inputs)


# ------------------------------------------------------------------------------------------------- the refusals against reality
WIDTHS = (
    *((64, 64), (128, 128), (192, 128), (128, 64), (64, 128), (128, 96), (96, 64), (160, 128), (256, 256), (72, 72)),
    *((256, 192), (64, 512), (576, 512)),
)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_what_is_accepted_runs(backend: str, widths: tuple[int, int]) -> None:
    """Asks :meth:`refusals` first: what it accepts must run, forward and, in training, backward, and be right. What it accepts in
    inference alone runs there."""
    shape = {**SHAPE, "num_gqa_groups": 4, "head_dim_qk": widths[0], "head_dim_v": widths[1]}
    inputs = sample(PackedCase((200, 77), **shape), backend)
    params = AttentionParams(
        sm=environment.compute_capability(0),
        num_heads=4,
        num_gqa_groups=4,
        head_dim_qk=widths[0],
        head_dim_v=widths[1],
        max_seqlen_q=256,
        max_seqlen_kv=256,
        single_launch_plan=is_single_launch(backend),
        device_index=0,
    )
    reasons = list(get_backend(backend).refusals(params))
    if not reasons:
        actual = inputs.run(**forced(inputs, backend), pad_head_dim=False)
        testing.assert_matches(actual, testing.reference(inputs), inputs)
        return
    if list(get_backend(backend).refusals(params.replace(is_training=False))):
        pytest.skip(reasons[0])
    with torch.no_grad():
        out = inputs.attend(**forced(inputs, backend, training=False), pad_head_dim=False)
    torch.testing.assert_close(out.double(), testing.reference(inputs).out, rtol=1.5e-2, atol=1.5e-2)


def test_width_256_with_padded_offsets_does_not_fall_to_unfused() -> None:
    inputs = build(PackedCase((64, 64), gaps_q=(0, 0), num_heads=2, head_dim_qk=256, dtype=torch.bfloat16), "cuda")
    with selection.recording(stop=False) as requests:
        testing.assert_matches(inputs.run(), testing.reference(inputs), inputs)
    chosen = selection.select(requests[0])
    assert "unfused" not in chosen.backends, chosen.candidates


# -------------------------------------------------------------------------------------------------- determinism, syncs, capture
@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
def test_thirty_deterministic_backward_runs_are_bitwise_equal(backend: str, dispatch: str) -> None:
    if dispatch == "grouped" and is_single_launch(backend):
        pytest.skip(f"{backend} runs all policies in one launch")
    case = PackedCase((700, 512, 300, 40), gaps_q=(1, 0, 3, 0), masks=(CAUSAL, CAUSAL), owner=(0, 1, 0, 1), **SHAPE)
    inputs = sample(case, backend)
    options = {**forced(inputs, backend, dispatch), "deterministic": True}
    expected = testing.reference(inputs)
    # torch_flash follows torch's own switch.
    torch.use_deterministic_algorithms(backend == "torch_flash")
    try:
        first = or_skip(inputs.run, **options)
        for _ in range(29):
            again = inputs.run(**options)
            assert all(torch.equal(getattr(again, name), getattr(first, name)) for name in ("out", "lse", "dq", "dk", "dv"))
    finally:
        torch.use_deterministic_algorithms(False)
    testing.assert_matches(first, expected, inputs)


@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
@pytest.mark.parametrize("name", ["full_gaps", "policies"])
def test_no_host_sync(backend: str, name: str, dispatch: str) -> None:
    """Forward and backward of a batch that was not seen before, with kernels that were."""
    if dispatch == "grouped" and (CASES[name].owner is None or is_single_launch(backend)):
        pytest.skip("there is nothing to group")
    warm, inputs = sample(CASES[name], backend), sample(CASES[name], backend, seed=1)
    or_skip(warm.run, **forced(warm, backend, dispatch))
    options = forced(inputs, backend, dispatch)
    torch.cuda.synchronize()
    with testing.no_cuda_sync():
        actual = inputs.run(**options)
    testing.assert_matches(actual, testing.reference(inputs), inputs)


# Lengths and policies of one capacity. The first needs the most room in a single-launch plan.
GEOMETRIES = (
    ((150, 80, 40, 30), (1, 1, 0, 1)),
    ((43, 30, 77, 150), (0, 1, 0, 1)),
    ((0, 150, 0, 150), (1, 0, 0, 0)),
    ((60, 90, 60, 90), (0, 0, 0, 0)),
)


def _captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


@pytest.mark.parametrize("dispatch", ["padded", "grouped"])
def test_capture_and_replay_with_other_contents(backend: str, dispatch: str) -> None:
    """Forward and backward, captured once, follow new lengths and a new partition; nothing may sync, or the capture fails."""
    if dispatch == "grouped" and is_single_launch(backend):
        pytest.skip(f"{backend} runs all policies in one launch")
    lengths, owner = GEOMETRIES[0]
    inputs = sample(PackedCase(lengths, tail=20, masks=(CAUSAL, FULL), owner=owner, **SHAPE), backend)
    options = forced(inputs, backend, dispatch)
    if not is_single_launch(backend):
        options["thd_attention_policies"] = inputs.prepare(mutable=True)
    prepared = options["thd_attention_policies"]
    or_skip(inputs.run, **options)
    graph, result = _captured(lambda: inputs.run(**options))
    followed = 0
    for lengths, owner in GEOMETRIES:
        moved = dataclasses.replace(inputs, case=inputs.case.replace(lengths_q=lengths, owner=owner))
        with torch.no_grad():
            for name in ("q", "k", "v", "grad_out"):
                getattr(inputs, name).normal_()
        offsets = build(moved.case, "cuda").cu_seqlens_q
        try:
            refresh_thd_policies(prepared, moved.policies(), offsets, total_q=inputs.q.shape[0], total_kv=inputs.k.shape[0])
        except ValueError as error:
            assert is_single_launch(backend) and "capture again" in str(error)
            continue
        followed += 1
        inputs.cu_seqlens_q.copy_(offsets)
        testing.poison_allocator("cuda")
        graph.replay()
        torch.cuda.synchronize()
        testing.assert_matches(result, testing.reference(moved), moved)
    assert followed >= (2 if is_single_launch(backend) else len(GEOMETRIES))


@pytest.mark.parametrize("backend", ["torch_flash", "flash2"])
def test_a_captured_graph_holds_the_runs_that_it_was_captured_with(backend: str) -> None:
    """Runs of neighbours are slices of cu_seqlens there: other lengths are followed, other runs are refused."""
    if get_backend(backend).version() is None:
        pytest.skip(f"{backend} is not installed")
    shape = {**SHAPE, "num_gqa_groups": 4}
    inputs = build(PackedCase((150, 80, 40, 30), tail=20, masks=(CAUSAL, FULL), owner=(0, 0, 0, 1), **shape), "cuda")
    options = {**forced(inputs, backend), "max_seqlen_q": 256, "max_seqlen_kv": 256}
    prepared = options["thd_attention_policies"]
    assert prepared.runs == ((0, 3), (3, 1))
    testing.assert_matches(inputs.run(**options), testing.reference(inputs), inputs)
    graph, result = _captured(lambda: inputs.run(**options))
    for lengths in ((20, 0, 130, 150), (150, 80, 40, 30)):
        moved = dataclasses.replace(inputs, case=inputs.case.replace(lengths_q=lengths))
        inputs.cu_seqlens_q.copy_(build(moved.case, "cuda").cu_seqlens_q)
        refresh_thd_policies(prepared, moved.policies(), inputs.cu_seqlens_q, total_q=inputs.q.shape[0], max_seqlen_q=256)
        testing.poison_allocator("cuda")
        graph.replay()
        torch.cuda.synchronize()
        testing.assert_matches(result, testing.reference(moved), moved)
    with pytest.raises(ValueError, match="captured graphs rely on"):
        refresh_thd_policies(prepared, testing.policy_list((CAUSAL, FULL), (0, 1, 1, 1), "cuda"), inputs.cu_seqlens_q)


def test_the_next_batch_is_prepared_on_a_side_stream(backend: str) -> None:
    """While one batch runs, the next one's policies, and its plan, are made on another stream and from memory freed by the last."""
    lengths, owner = GEOMETRIES[0]
    case = PackedCase(lengths, tail=20, masks=(CAUSAL, FULL), owner=owner, **SHAPE)
    cases = [case.replace(lengths_q=lengths, owner=owner) for lengths, owner in GEOMETRIES[:2] * 3]
    batches = [sample(case, backend, seed=n) for n, case in enumerate(cases)]
    or_skip(batches[0].run, **forced(batches[0], backend))
    expected = [testing.reference(inputs) for inputs in batches[:2]]
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    ready: dict[int, dict[str, Any]] = {}

    def prepare(n: int) -> None:
        side.wait_stream(main)  # its offsets were made there
        with torch.cuda.stream(side):
            ready[n] = forced(batches[n], backend)

    prepare(0)
    for n, inputs in enumerate(batches):
        main.wait_stream(side)
        options = ready.pop(n)
        options["thd_attention_policies"].record_stream(main)
        actual = inputs.run(**options)
        del options
        if n + 1 < len(batches):
            prepare(n + 1)
        if n < 2:
            testing.assert_matches(actual, expected[n], inputs)
        else:
            again = batches[n].run(**forced(batches[n], backend))
            torch.testing.assert_close(actual.out, again.out, rtol=0, atol=0)


def test_capture_of_a_shape_that_was_not_seen_before_says_what_to_do() -> None:
    inputs = build(PackedCase((20, 30), **{**SHAPE, "head_dim_qk": 88}), "cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="Run one warm-up step with the same shapes first"), torch.cuda.graph(graph):
        inputs.attend(backend="unfused")
    torch.cuda.synchronize()


def test_capture_without_max_seqlen_says_what_to_do() -> None:
    inputs = build(PackedCase((20, 30), **SHAPE), "cuda")
    inputs.attend()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="max_seqlen_q is needed during CUDA graph capture"), torch.cuda.graph(graph):
        thd_attention(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q)
    torch.cuda.synchronize()


def test_a_first_call_keeps_no_tensor_alive(backend: str) -> None:
    """Libraries build and compile under the first call of a kind, and may leave its frames in reference cycles. What they held
    would live until a collection, and a capture before that would fail (cuDNN's frontend did this)."""
    options: dict[str, Any] = {"num_heads": 6, "num_gqa_groups": 2, "head_dim_qk": 64, "dtype": torch.bfloat16}
    owner = (0, 0) if is_single_launch(backend) else None
    inputs = sample(PackedCase((70, 33), masks=(Mask("padding_causal", (48, 0)),), owner=owner, **options), backend)
    gc.collect()
    gc.disable()
    try:
        out = or_skip(inputs.attend, **forced(inputs, backend))
        torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.grad_out)
        kept = [weakref.ref(x) for x in (out, inputs.q, inputs.k, inputs.v)]
        del out, inputs
        assert [reference() for reference in kept] == [None] * 4
    finally:
        gc.enable()


# ----------------------------------------------------------------------------------------------------------------------- scale
@pytest.fixture
def alone_with_large_tensors() -> Iterator[None]:
    """One process at a time: several of these tests do not fit beside each other."""
    with (Path(tempfile.gettempdir()) / "te_attn_ops_large_tensors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


@pytest.mark.usefixtures("alone_with_large_tensors")
def test_offsets_beyond_two_to_the_31st(backend: str) -> None:
    """140,000 rows of 128 heads of 128: the last sequence's rows begin beyond 2^31 elements and must equal the same sequence alone."""
    tokens, heads, width, length = 140_000, 128, 128, 1024
    if torch.cuda.get_device_properties(0).total_memory < 90 << 30:
        pytest.skip("needs 90 GiB of device memory")
    if backend == "unfused":
        length = 64
    case = PackedCase(
        (16, length),
        gaps_q=(tokens - 16 - length, 0),
        num_heads=heads,
        head_dim_qk=width,
        dtype=torch.bfloat16,
        owner=(0, 0) if is_single_launch(backend) else None,
    )
    assert (tokens - length) * heads * width > 1 << 31
    torch.cuda.empty_cache()
    alone = build(case.replace(lengths_q=(length,), gaps_q=None, owner=(0,) if case.owner else None), "cuda")

    def wide(last: torch.Tensor) -> torch.Tensor:
        tensor = torch.zeros(tokens, heads, width, dtype=last.dtype, device="cuda")
        tensor[-length:] = last.detach()
        return tensor

    q, k, v = (wide(x).requires_grad_() for x in (alone.q, alone.k, alone.v))
    offsets = {
        "cu_seqlens_q": torch.tensor([0, 16, 16 + length], dtype=torch.int32, device="cuda"),
        "cu_seqlens_kv": None,
        "cu_seqlens_q_padded": torch.tensor([0, tokens - length, tokens], dtype=torch.int32, device="cuda"),
        "cu_seqlens_kv_padded": None,
    }
    inputs = PackedInputs(case, q, k, v, wide(alone.grad_out), **offsets)
    try:
        actual = inputs.run(**forced(inputs, backend))
    except NoBackendError as error:
        reason = str(error).splitlines()[-1].strip()
    else:
        reason = None
    if reason is not None:
        # A skip keeps its frames, and they would keep 60 GiB from the next test.
        del inputs, q, k, v
        pytest.skip(reason)
    expected = alone.run(**forced(alone, backend))
    for name in ("out", "dq", "dk", "dv"):
        got, want = getattr(actual, name)[-length:], getattr(expected, name)
        torch.testing.assert_close(got, want, rtol=1.5e-2, atol=1.5e-2, msg=lambda text, name=name: f"{name}: {text}")
        assert not getattr(actual, name)[16 : tokens - length].any(), name
    torch.testing.assert_close(actual.lse[:, -length:], expected.lse, rtol=1e-3, atol=1e-3)
    del actual, expected, inputs, q, k, v
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("alone_with_large_tensors")
@pytest.mark.parametrize("backend", ["torch_flash", "flash2"])
def test_views_that_reach_beyond_two_to_the_31st(backend: str) -> None:
    """q, k and v of fewer than 2^31 elements, but views of one projection of more."""
    tokens, heads, width, length = 45_000, 128, 128, 512
    if get_backend(backend).version() is None:
        pytest.skip(f"{backend} is not installed")
    assert tokens * heads * width < 1 << 31 < tokens * 3 * heads * width
    case = PackedCase((length,), num_heads=heads, head_dim_qk=width, dtype=torch.bfloat16)
    alone = build(case, "cuda")
    qkv = torch.zeros(tokens, 3, heads, width, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for n, x in enumerate((alone.q, alone.k, alone.v)):
            qkv[-length:, n] = x
    qkv.requires_grad_()
    cu = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    slots = torch.tensor([tokens - length, tokens], dtype=torch.int32, device="cuda")
    out = thd_attention(*qkv.unbind(1), cu, cu_seqlens_q_padded=slots, max_seqlen_q=length, backend=backend)
    (grad,) = torch.autograd.grad(out[-length:], qkv, alone.grad_out)
    expected = alone.run(backend=backend)
    torch.testing.assert_close(out[-length:], expected.out, rtol=1.5e-2, atol=1.5e-2)
    for n, name in enumerate(("dq", "dk", "dv")):
        torch.testing.assert_close(grad[-length:, n], getattr(expected, name), rtol=1.5e-2, atol=1.5e-2)
    assert not out[:-length].any() and not grad[:-length].any()
