"""flash4 without a GPU: what it refuses, how a band reaches the kernels, and the direct way with stand-ins for the kernels."""

from __future__ import annotations

import itertools
import re
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from te_attn_ops.backends import flash4
from te_attn_ops.backends.base import BackwardCall, ForwardCall
from te_attn_ops.backends.flash4 import Flash4, KernelMask, kernel_mask
from te_attn_ops.environment import package_version
from te_attn_ops.masks import Band
from te_attn_ops.params import AttentionParams

CAUSAL, FULL, WINDOW = Band(None, 0), Band(None, None), Band(128, 0)
VERSIONS = {
    "flash-attn-4": flash4.VERSION_READ,
    "nvidia-cutlass-dsl": "4.8.1",
    "apache-tvm-ffi": "0.1.15.post2",
    "quack-kernels": "0.6.5",
}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    installed: dict[str, str | None] = dict(VERSIONS)
    monkeypatch.setattr(flash4, "package_version", lambda name: installed.get(name))
    return installed


def refusals(**changes: Any) -> list[str]:
    return list(Flash4().refusals(AttentionParams(bands=(CAUSAL,)).replace(**changes)))


# ------------------------------------------------------------------------------------------------------------------- the mask
@pytest.mark.parametrize(
    ("band", "mask"),
    [
        (FULL, KernelMask(False, None, None)),
        (Band(None, None, False), KernelMask(False, None, None)),
        (CAUSAL, KernelMask(True, None, None)),
        (Band(0, 0), KernelMask(False, 0, 0)),
        (WINDOW, KernelMask(False, 128, 0)),
        (Band(None, 5), KernelMask(False, None, 5)),
        (Band(7, None), KernelMask(False, 7, None)),
        (Band(1 << 40, 3), KernelMask(False, 1 << 30, 3)),
    ],
)
def test_band_becomes_the_kernels_mask(band: Band, mask: KernelMask) -> None:
    assert kernel_mask(band) == mask


def test_kinds_tell_apart_what_is_compiled_apart() -> None:
    bands = (FULL, CAUSAL, WINDOW, Band(None, 5), Band(7, None))
    assert len({kernel_mask(band).kind for band in bands}) == len(bands)
    assert kernel_mask(WINDOW).kind == kernel_mask(Band(3, 4)).kind
    assert kernel_mask(FULL).kind == 0


# --------------------------------------------------------------------------------------------------------------- shared memory
# As compiled by nvidia-cutlass-dsl 4.8.1 from flash-attn-4 4.0.0b36 for sm_90a.
@pytest.mark.parametrize(
    ("widths", "full", "size"),
    [
        ((64, 64), False, 199680),
        ((64, 128), False, 248832),
        ((96, 64), True, 141312),
        ((128, 128), False, 198656),
        ((128, 128), True, 232448),
        ((192, 128), False, 219136),
        ((192, 192), True, 222208),
        ((256, 128), False, 197632),
        ((256, 256), True, 226304),
    ],
)
def test_backward_shared_memory(widths: tuple[int, int], full: bool, size: int) -> None:
    assert flash4.sm90_backward_shared_memory(*widths, full) == size


@pytest.mark.parametrize(
    ("widths", "band", "size"),
    [((64, 128), CAUSAL, 123904), ((128, 128), FULL, 164864), ((128, 96), CAUSAL, 148480), ((128, 96), FULL, 148480)],
)
def test_forward_shared_memory(widths: tuple[int, int], band: Band, size: int) -> None:
    asked, used = flash4.sm90_forward_shared_memory(*widths, kernel_mask(band))
    assert asked == size
    assert used <= size


# -------------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.float16},
        {"bands": (FULL, CAUSAL, WINDOW)},
        {"num_gqa_groups": 4},
        {"head_dim_qk": 192},
        {"head_dim_qk": 192, "bands": (FULL, WINDOW)},
        {"head_dim_qk": 160},
        {"head_dim_qk": 256},
        {"head_dim_qk": 256, "head_dim_v": 256},
        {"head_dim_v": 64},
        {"head_dim_qk": 96, "head_dim_v": 64},
        {"head_dim_qk": 64, "head_dim_v": 64},
        {"head_dim_qk": 120, "head_dim_v": 120},
        {"head_dim_qk": 64, "is_training": False},
        {"head_dim_qk": 72, "head_dim_v": 72, "is_training": False},
        {"head_dim_v": 96, "is_training": False},
        {"head_dim_qk": 192, "num_gqa_groups": 4, "is_training": False},
        {"deterministic": True},
        {"has_gaps": True},
        {"equal_lengths": False, "bands": (CAUSAL, FULL, Band(None, None, False))},
        {"sm": 100},
        {"sm": 103, "head_dim_qk": 192},
        {"sm": 100, "head_dim_qk": 256, "head_dim_v": 256},
        {"sm": 120},
    ],
)
def test_accepts(changes: dict[str, Any]) -> None:
    assert refusals(**changes) == []


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu", "sm": 0}, "needs a CUDA device, found cpu"),
        ({"sm": 89}, "needs sm90 or newer, found sm89"),
        ({"sm": 130}, "knows sm90 to sm121, found sm130"),
        ({"dtype": torch.float32}, "found float32"),
        ({"head_dim_qk": 100}, "needs head_dim_qk to be a multiple of 8, found 100"),
        ({"head_dim_v": 264}, "needs head_dim_v <= 256, found 264"),
        ({"num_gqa_groups": 5}, "multiple of num_gqa_groups, found 16 and 5"),
        ({"return_max_logit": True}, "returns no max_logit"),
        ({"equal_lengths": False, "bands": (Band(None, 0, False),)}, "causal top_left"),
        # sm90
        ({"head_dim_qk": 192, "num_gqa_groups": 4}, "needs head_dim_qk == head_dim_v to train .*, found 192 and 128"),
        ({"head_dim_qk": 64}, "asks for 248832 bytes of shared memory in the backward at head_dim_qk 64, head_dim_v 128"),
        ({"head_dim_v": 96}, "to be a multiple of 64 to train at head_dim_qk 128, found 96"),
        ({"head_dim_qk": 256, "head_dim_v": 192}, "to be a multiple of 128 to train at head_dim_qk 256, found 192"),
        ({"head_dim_qk": 72, "head_dim_v": 72}, "computes dQ 80 and reads it back 96 columns wide at head_dim_qk 72"),
        ({"head_dim_qk": 192, "head_dim_v": 256}, "in the forward at head_dim_qk 192, head_dim_v 256; sm90 has 232448"),
        ({"head_dim_qk": 32, "is_training": False}, "writes O over .* bytes"),
        # others
        ({"sm": 100, "head_dim_qk": 160}, r"or \(192, 128\), or \(256, 256\) on sm100, found \(160, 128\)"),
        ({"sm": 100, "head_dim_qk": 256, "head_dim_v": 256, "bands": (WINDOW,)}, "takes no window at head_dim 256"),
        ({"sm": 100, "head_dim_qk": 72, "head_dim_v": 72}, "multiple of 32 to train on sm100, found 72"),
        ({"sm": 100, "head_dim_v": 96}, "multiple of 64 to train at head_dim_qk 128 on sm100, found 96"),
        ({"sm": 120, "deterministic": True}, "no deterministic backward on sm120"),
        ({"sm": 120, "num_gqa_groups": 4}, "fewer key/value heads on sm120, found 16 and 4"),
        ({"sm": 121, "head_dim_qk": 192, "head_dim_v": 192}, "bytes of shared memory in the backward"),
    ],
)
def test_refuses(changes: dict[str, Any], reason: str) -> None:
    found = refusals(**changes)
    assert any(re.search(reason, text) for text in found), found


def test_packages(versions: dict[str, str | None]) -> None:
    versions["nvidia-cutlass-dsl"] = "4.5.0"
    versions["quack-kernels"] = None
    assert refusals() == [
        "needs nvidia-cutlass-dsl 4.6.2 or newer, found 4.5.0",
        "needs quack-kernels 0.5.3 or newer, found none",
    ]
    versions.update(VERSIONS)
    versions["flash-attn-4"] = "4.0.0b9"
    assert refusals() == ["needs flash-attn-4 4.0.0b36 or newer, found 4.0.0b9"]
    versions["flash-attn-4"] = None
    assert refusals() == ["needs the package flash-attn-4, found none"]


def test_a_newer_version_is_asked(versions: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    def validate(head_dim: int, head_dim_v: int, capability: int, alignment: int) -> None:
        assert head_dim != 64, f"no {head_dim} on {capability} by {alignment}"

    names = flash4._ENTRY_ARGUMENTS["_flash_attn_fwd"]
    forward = eval(f"lambda {', '.join(sorted(names))}: None")  # an entry is known by its parameters
    backward = eval("lambda q, k, v: None")
    interface = types.SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward, _validate_head_dims=validate)
    monkeypatch.setattr(flash4, "_interface", lambda: interface)
    versions["flash-attn-4"] = "4.0.0b40"
    found = refusals(head_dim_qk=64, head_dim_v=64)
    assert len(found) == 2
    assert "needs _flash_attn_bwd to take causal, cu_seqlens_k" in found[0]
    assert "its own validator at head_dim_qk 64, head_dim_v 64: no 64 on 9 by 8" in found[1]


def test_a_newer_version_that_cannot_be_loaded(versions: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise ImportError("gone")

    monkeypatch.setattr(flash4, "_interface", gone)
    versions["flash-attn-4"] = "4.0.0"
    assert refusals() == ["cannot be loaded (ImportError: gone)"]


# -------------------------------------------------------------------------------------------------------------- the direct way
def forward_call(tokens: int = 40, heads: int = 4, groups: int = 2, plain: bool = False, band: Band = WINDOW) -> ForwardCall:
    return ForwardCall(**_common(tokens, heads, groups, plain, band, False), is_training=True, first=True)


def backward_call(groups: int = 2, plain: bool = False, deterministic: bool = False, band: Band = CAUSAL) -> BackwardCall:
    common = _common(40, 4, groups, plain, band, deterministic)
    out, lse = torch.zeros(40, 4, 64, dtype=torch.bfloat16), torch.zeros(4, 40)
    return BackwardCall(**common, grad_out=torch.zeros_like(out), out=out, lse=lse, first=True)


def _common(tokens: int, heads: int, groups: int, plain: bool, band: Band, deterministic: bool) -> dict[str, Any]:
    """Two sequences, of which the second is in the subset; its lens are a row that is not 16-byte aligned."""
    q, k, v = (torch.zeros(tokens, n, 64, dtype=torch.bfloat16) for n in (heads, groups, groups))
    starts = torch.tensor([0, 10, tokens], dtype=torch.int32)
    lens = torch.tensor([[10, 0], [0, 30]], dtype=torch.int32)[1:]
    return _fields(q, k, v, starts, lens, band, (30, 30), plain, deterministic)


def _fields(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lens: Tensor, band: Band, longest: tuple[int, int], plain: bool, det: bool
) -> dict[str, Any]:
    return {
        "q": q,
        "k": k,
        "v": v,
        "starts_q": starts,
        "lens_q": lens,
        "starts_kv": starts,
        "lens_kv": lens,
        "bands": (band,),
        "max_seqlen_q": longest[0],
        "max_seqlen_kv": longest[1],
        "scale": 0.125,
        "plain_cu_seqlens": plain,
        "equal_lengths": False,
        "deterministic": det,
        "single_launch_plan": [],
        "contiguous_run": True,
    }


class Library:
    """Stands in for flash_attn.cute.interface: entries with caches, whose kernels note their arguments in ``ran``."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, tuple[Any, ...]]] = []
        self.entered: list[str] = []
        self.extra: tuple[Any, ...] = ()  # put behind the forward kernel's arguments

        def entry(name: str, body: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> None:
                self.entered.append(name)
                body(*args, **kwargs)

            run.compile_cache = {"key": lambda *args: self.ran.append((name, args))}  # type: ignore[attr-defined]
            setattr(self, name, run)
            return run

        forward = entry("_flash_attn_fwd", lambda *a, **k: self._forward(*a, **k))
        before = entry("_bwd_preprocess", lambda *a: before.compile_cache["key"](*a))
        after = entry("_bwd_postprocess_convert", lambda *a: after.compile_cache["key"](*a))
        main = entry("_flash_attn_bwd", lambda *a, **k: self._backward(*a, **k))
        self.forward, self.before, self.main, self.after = forward, before, main, after

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, **kw: Any) -> None:
        if q.shape[0] == 0:
            return
        args = (q.detach(), k.detach(), v.detach(), kw["out"].detach(), kw["lse"], kw["softmax_scale"])
        args += (kw["cu_seqlens_q"], kw["cu_seqlens_k"], kw["seqused_q"], kw["seqused_k"], None)
        args += (kw["window_size_left"], kw["window_size_right"], None, None, (None, None), None, None)
        self.forward.compile_cache["key"](*args, *self.extra)

    def _backward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **kw: Any) -> None:
        total, heads, _ = q.shape
        rows, seqs = (total + 3 * 128 - 1) // 128 * 128, (kw["cu_seqlens_q"], kw["cu_seqlens_k"])
        used, gqa = (kw["seqused_q"], kw["seqused_k"]), k.shape[1] != heads
        dpsum, lse2, dqa = torch.zeros(heads, rows), torch.zeros(heads, rows), torch.zeros(heads, rows * 64)
        sums = [torch.zeros(k.shape[1], rows * 64) for _ in "kv"] if gqa else [kw["dk"], kw["dv"]]
        turns: list[Tensor | None] = [None] * 3
        if kw["deterministic"]:
            turns[0] = torch.zeros(2, heads, 1, 1, dtype=torch.int32)
            if gqa:
                turns[1:] = [torch.zeros(2, k.shape[1], 1, 2, dtype=torch.int32) for _ in "kv"]
        scale = kw["softmax_scale"]
        self.before(out, dout, dpsum, lse, lse2, dqa, seqs[0], used[0], None, None, None, 1.0, None, None)
        window = (kw["window_size_left"], kw["window_size_right"])
        main = (q, k, v, dout, lse2, dpsum, dqa, *sums, scale, *seqs, *used, *window, *turns, (None, None), None, None)
        self.main.compile_cache["key"](*main)
        self.after(dqa, kw["dq"], scale, seqs[0], used[0], None, None)
        if gqa:
            self.after(sums[0], kw["dk"], scale, seqs[1], used[1], None, None)
            self.after(sums[1], kw["dv"], 1.0, seqs[1], used[1], None, None)


@pytest.fixture
def library(versions: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> Library:
    stand_in = Library()
    monkeypatch.setattr(flash4, "_interface", lambda: stand_in)
    monkeypatch.setattr(flash4, "compute_capability", lambda index: 90)
    return stand_in


def test_the_first_call_enters_and_later_ones_do_not(library: Library) -> None:
    backend = Flash4()
    caches = library.forward.compile_cache
    backend.forward(forward_call(band=Band(128, 0)))
    assert library.entered == ["_flash_attn_fwd"]
    assert library.forward.compile_cache is caches
    call = forward_call(band=Band(5, 6), tokens=50)
    backend.forward(call)
    assert library.entered == ["_flash_attn_fwd"]
    args = library.ran[1][1]
    assert args[:6] == (call.q, call.k, call.v, call.out, call.lse, call.scale)
    assert [x.tolist() for x in args[6:10]] == [[0, 10, 50], [0, 10, 50], [0, 30], [0, 30]]
    assert args[10:] == (None, 5, 6, None, None, (None, None), None, None)
    assert not backend.fallbacks


@pytest.mark.parametrize(
    "changes", [{"band": CAUSAL}, {"band": FULL}, {"band": Band(None, 3)}, {"heads": 8}, {"groups": 4}, {"plain": True}]
)
def test_what_is_compiled_apart_is_learnt_apart(library: Library, changes: dict[str, Any]) -> None:
    backend = Flash4()
    backend.forward(forward_call())
    backend.forward(forward_call(**changes))
    assert len(library.entered) == 2
    assert len(backend._kernels) == 2
    assert not backend.fallbacks


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward(library: Library, groups: int, plain: bool, deterministic: bool) -> None:
    backend = Flash4()
    backend.backward(backward_call(groups, plain, deterministic))
    assert not backend.fallbacks
    entered, ran = len(library.entered), len(library.ran)
    call = backward_call(groups, plain, deterministic)
    backend.backward(call)
    assert len(library.entered) == entered
    names = [name for name, _ in library.ran[ran:]]
    assert names == ["_bwd_preprocess", "_flash_attn_bwd"] + ["_bwd_postprocess_convert"] * (1 if groups == 4 else 3)
    main = library.ran[ran + 1][1]
    dq, dk, dv = call.grads
    assert library.ran[ran + 2][1][1] is dq
    if groups == 4:
        assert main[7] is dk
        assert main[8] is dv
    else:
        assert not main[7].any()
        assert library.ran[ran + 3][1][:2] == (main[7], dk)
        assert library.ran[ran + 4][1][:2] == (main[8], dv)
    assert (main[16] is None) == (not deterministic)


def test_an_unexpected_launch_stays_with_the_entry(library: Library) -> None:
    backend = Flash4()
    library.extra = (None,)
    for _ in range(2):
        backend.forward(forward_call())
    assert library.entered == ["_flash_attn_fwd"] * 2
    assert list(backend.fallbacks.values()) == ["launch 0 has 19 arguments instead of 18"]


def test_a_copied_tensor_stays_with_the_entry(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Flash4()
    monkeypatch.setattr(library, "_forward", lambda q, *rest, **kw: Library._forward(library, q.clone(), *rest, **kw))
    backend.forward(forward_call())
    assert list(backend.fallbacks.values()) == ["argument 0 of launch 0 differs"]


def test_a_kernel_that_rejects_its_arguments_is_given_up(library: Library) -> None:
    backend = Flash4()
    backend.forward(forward_call())
    (key,) = backend._kernels

    def reject(*args: Any) -> None:
        raise TypeError("Mismatched type on argument #0")

    backend._kernels[key] = (reject,)
    backend.forward(forward_call())
    assert library.entered == ["_flash_attn_fwd"] * 2
    assert backend.fallbacks[key].startswith("TypeError: Mismatched")


def test_only_what_was_read_goes_direct(library: Library, versions: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    versions["flash-attn-4"] = "4.0.0b37"
    backend = Flash4()
    for _ in range(2):
        backend.forward(forward_call())
    assert library.entered == ["_flash_attn_fwd"] * 2
    versions["flash-attn-4"] = flash4.VERSION_READ
    monkeypatch.setattr(flash4, "compute_capability", lambda index: 100)
    backend = Flash4()
    for _ in range(2):
        backend.backward(backward_call())
    assert library.entered.count("_flash_attn_bwd") == 2
    assert len(backend.fallbacks) == 1


def test_no_tokens_teach_nothing(library: Library) -> None:
    backend = Flash4()
    backend.forward(forward_call(tokens=0))
    assert not backend._kernels
    backend.forward(forward_call())
    assert len(backend._kernels) == 1
    assert not backend.fallbacks


def test_a_failing_entry_leaves_the_caches_alone(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = library.forward.compile_cache

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(library, "_forward", fail)
    backend = Flash4()
    with pytest.raises(RuntimeError, match="out of memory"):
        backend.forward(forward_call())
    assert library.forward.compile_cache is cache
    assert not backend._kernels


def test_a_kernel_compiled_here_is_called_without_its_wrapper() -> None:
    inner = object()
    arguments = types.SimpleNamespace(has_pointer_address_arg_specs=False)
    wrapped: Any = types.SimpleNamespace(execution_args=arguments, _tvm_ffi_function=inner)
    assert flash4._bare(wrapped) is inner
    arguments.has_pointer_address_arg_specs = True
    assert flash4._bare(wrapped) is wrapped
    loaded: Any = types.SimpleNamespace()
    assert flash4._bare(loaded) is loaded


def test_too_many_rows_for_int32() -> None:
    call = backward_call()
    call.q = call.q[:1].expand(1 << 26, -1, -1)
    with pytest.raises(OverflowError, match="too many for one call"):
        Flash4().backward(call)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = flash4._cache_folder()
    assert folder is not None
    assert folder.startswith(str(tmp_path / "te_attn_ops" / "flash4"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert flash4._cache_folder() is None


# ---------------------------------------------------------------------------- against the library itself, where it is installed
class AnyKernel(dict[Any, Any]):
    """A cache in which every kernel is found, and does nothing."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: Any) -> Any:
        return lambda *args: None


@pytest.fixture
def real_library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The real entries, on fake tensors and for sm90, with nothing compiled and nothing launched."""
    if package_version("flash-attn-4") != flash4.VERSION_READ:
        pytest.skip(f"needs flash-attn-4 {flash4.VERSION_READ}")
    interface = flash4._interface()
    monkeypatch.setenv("FLASH_ATTENTION_NUM_SMS", "132")
    monkeypatch.setattr(interface, "_get_device_arch", lambda: 90)
    monkeypatch.setattr(interface, "is_fake_mode", lambda: False)
    monkeypatch.setattr(flash4, "compute_capability", lambda index: 90)
    for name in (*flash4._FORWARD.entries, *flash4._BACKWARD.entries, "_compute_tile_cumsum", "_compute_blocks_to_batch"):
        monkeypatch.setattr(getattr(interface, name), "compile_cache", AnyKernel())
    return interface


@pytest.mark.usefixtures("real_library")
@pytest.mark.parametrize("widths", [(64, 64), (96, 64), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("num_seqs", [3, 300])
def test_launches_are_those_of_the_library(widths: tuple[int, int], groups: int, num_seqs: int) -> None:
    (d, dv), kind = widths, {"dtype": torch.bfloat16, "device": "cuda"}
    if groups != 4 and d != dv:
        pytest.skip("refused")
    for band, plain, deterministic in itertools.product((FULL, CAUSAL, WINDOW, Band(None, 5)), (False, True), (False, True)):
        with FakeTensorMode():
            q, k = torch.empty(900, 4, d, **kind, requires_grad=True), torch.empty(700, groups, d, **kind)
            v, out = torch.empty(700, groups, dv, **kind), torch.empty(900, 4, dv, **kind)
            starts = torch.empty(num_seqs + 1, dtype=torch.int32, device="cuda")
            lens = torch.empty(3, num_seqs, dtype=torch.int32, device="cuda")[1:2]
            common = _fields(q, k, v, starts, lens, band, (500, 600), plain, deterministic)
            lse = torch.empty(4, 900, dtype=torch.float32, device="cuda")
            backend = Flash4()
            backend.forward(ForwardCall(**common, is_training=True, first=True))
            backend.backward(BackwardCall(**common, grad_out=torch.empty_like(out), out=out, lse=lse, first=True))
        assert not backend.fallbacks
        assert [len(kernels) for kernels in backend._kernels.values()] == [1, 3 if groups == 4 else 5]
