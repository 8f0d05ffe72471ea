"""Several threads, several processes: first probes, compilation at once, data loader workers, one disk cache for all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from compile_tests.harness import TORCH_MINOR, assert_same, counted, run_script
from te_attn_ops import PreparedPolicies, invalidate, prepare_thd_policies, thd_attention
from te_attn_ops.selection import probe_count
from te_attn_ops.testing import CAUSAL, FULL, PackedCase, build, policy_list
from tests.stubs import Stub, forget_choices, install

CASE = PackedCase((5, 9, 3), masks=(CAUSAL, FULL), owner=(0, 1, 0))


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """``work(0)`` to ``work(count - 1)``, each in a thread, all starting together; the first error is raised."""
    barrier = threading.Barrier(count)

    def run(n: int) -> Any:
        barrier.wait()
        return work(n)

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(run, n) for n in range(count)]]


def patient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls again where torch takes another thread's tracing for a nested one: its check is a flag of the whole process."""

    def call(*args: Any, **kwargs: Any) -> Any:
        for _ in range(1000):
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                if "using FX to symbolically trace" not in str(error):
                    raise
                time.sleep(0.05)
        raise AssertionError("another thread traces for ever")

    return call


# -------------------------------------------------------------------------------------------------------------------- threads
def test_first_probes_from_many_threads() -> None:
    """Sixteen threads meet a shape class that nobody has seen: it is probed once, and all get the right answer."""
    inputs = build(PackedCase((5, 9, 3)))
    want = inputs.attend().detach()
    forget_choices()
    before = probe_count()
    results = at_once(16, lambda n: inputs.attend().detach())
    assert probe_count() == before + 1
    assert all(torch.equal(result, want) for result in results)


def test_first_probes_of_many_shapes_from_many_threads() -> None:
    """Each thread its own shape class, and every other thread's after it."""
    batches = [build(PackedCase((5, 9, 3), head_dim_qk=8 * (n + 1))) for n in range(6)]
    before = probe_count()
    results = at_once(6, lambda n: [batches[(n + m) % 6].attend().detach() for m in range(6)])
    assert probe_count() == before + 6
    wants = [inputs.attend().detach() for inputs in batches]
    for n, thread in enumerate(results):
        assert all(torch.equal(result, wants[(n + m) % 6]) for m, result in enumerate(thread))


def test_invalidate_beside_running_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that change while others call: no call fails, and afterwards all see the new one."""
    used: list[str] = []
    stubs = {name: Stub(name, before_forward=lambda call, name=name: used.append(name)) for name in ("flash4", "unfused")}
    install(monkeypatch, *stubs.values())
    inputs = build(PackedCase((5, 9, 3)))
    want = inputs.attend().detach()

    def work(n: int) -> None:
        for m in range(30):
            if n == 0 and m % 5 == 0:
                stubs["flash4"]._refuse = (lambda p: iter(["gone"])) if m % 10 == 0 else None
                invalidate()
            assert torch.equal(inputs.attend().detach(), want)

    at_once(6, work)
    stubs["flash4"]._refuse = lambda p: iter(["gone"])
    invalidate()
    inputs.attend()
    assert used[-1] == "unfused"


@pytest.mark.skipif(
    TORCH_MINOR < (2, 11), reason="torch before 2.11 shares its compile metrics between threads: two at once raise in torch"
)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_two_threads_compile_and_run_at_once(backend: str) -> None:
    """Two functions of their own, forward and backward, while the other compiles or runs."""
    cases = [CASE, PackedCase((7, 2, 2, 1), head_dim_qk=24, head_dim_v=16, gaps_q=(1, 0, 0, 2))]
    wants = [build(case).run() for case in cases]

    def work(n: int) -> None:
        inputs = build(cases[n])
        function, counter = counted(lambda *args, **kwargs: thd_attention(*args, **kwargs), backend=backend)
        for _ in range(10):
            assert_same(inputs.run(patient(function)), wants[n], 1e-5)
        assert counter.frame_count == 1

    at_once(2, work)


def test_threads_share_one_compiled_function() -> None:
    function, counter = counted(dynamic=True)
    batches = [build(CASE.replace(lengths_q=(5 + n, 9, 3))) for n in range(4)]
    wants = [inputs.attend().detach() for inputs in batches]
    results = at_once(4, lambda n: [batches[n].attend(patient(function)).detach() for _ in range(10)])
    for thread, want in zip(results, wants):
        assert all(torch.equal(result, want) for result in thread)
    assert counter.frame_count <= 4


def test_backward_in_another_thread() -> None:
    inputs = build(CASE)
    want = inputs.run()
    out = inputs.attend()
    thread = threading.Thread(target=lambda: out.backward(inputs.grad_out))
    thread.start()
    thread.join()
    assert torch.equal(inputs.q.grad, want.dq) and torch.equal(inputs.v.grad, want.dv)


def test_eager_threads_share_routings_and_policies() -> None:
    """The caches of eager calls are by identity: threads over the same and over other batches never see each other's."""
    shared = build(CASE)
    prepared = shared.prepared

    def work(n: int) -> bool:
        own = build(CASE.replace(lengths_q=(5, 9, 3 + n)), seed=n)
        want = own.attend().detach()
        good = True
        for _ in range(40):
            good &= torch.equal(own.attend().detach(), want)
            good &= torch.equal(shared.attend(thd_attention_policies=prepared).detach(), expected)
        return good

    expected = shared.attend().detach()
    assert all(at_once(8, work))


# --------------------------------------------------------------------------------------------------------------- data loaders
class Batches(Dataset[Any]):
    """Prepares policies where the data is made, as a user would: in a worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor, PreparedPolicies]:
        lengths = (5 + n, 9, 3)
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        prepared = prepare_thd_policies(policy_list((CAUSAL, FULL), (0, 1, 0), "cpu"), cu)
        q = torch.arange(sum(lengths) * 16, dtype=torch.float32).view(-1, 2, 8).sin()
        return q, thd_attention(q, q, q, cu, max_seqlen_q=20, thd_attention_policies=prepared), prepared


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loader_workers_prepare_and_attend(context: str) -> None:
    """The package is imported, asked and run in a worker; prepared policies come back whole."""
    loader = DataLoader(Batches(), batch_size=None, num_workers=1, multiprocessing_context=context)
    for n, (q, out, prepared) in enumerate(loader):
        _, want, expected = Batches()[n]
        assert torch.equal(out, want) and torch.equal(prepared.policy_index, expected.policy_index)
        assert prepared.kind == expected.kind
        cu = torch.tensor([0, *torch.tensor((5 + n, 9, 3)).cumsum(0)], dtype=torch.int32)
        assert torch.equal(thd_attention(q, q, q, cu, max_seqlen_q=20, thd_attention_policies=prepared), want)


def test_importing_imports_torch_alone() -> None:
    """A worker pays for torch: no kernel library, no CUDA context."""
    out = run_script("""
        import sys, torch
        before = set(sys.modules)
        import te_attn_ops
        heavy = {"flash_attn", "flash_attn_interface", "cudnn", "cutlass", "transformer_engine"}
        print(*sorted((set(sys.modules) - before) & heavy))
        print(torch.cuda.is_initialized())
    """)
    assert out.split() == ["False"]


def test_importing_twice_is_importing_once() -> None:
    """Ops are registered once in a process; a reload of the public module is no error."""
    out = run_script("""
        import importlib, te_attn_ops
        importlib.reload(te_attn_ops)
        from te_attn_ops import ops
        print(ops.attention)
    """)
    assert out.strip() == "te_attn_ops.attention.default"


# ----------------------------------------------------------------------------------------------------------------- disk caches
_PREAMBLE = """
    import sys, torch
    from te_attn_ops import backends, plan, thd_attention
    from te_attn_ops.backends.unfused import Unfused
    used = []
    class Noting(Unfused):
        def version(self): return "1.0"
        def refusals(self, p): return iter(())
        def forward(self, call):
            used.append(self.name)
            super().forward(call)
    for name in backends.BACKEND_NAMES:
        stub = Noting()
        stub.name, stub.switches = name, backends.get_backend(name).switches
        if name not in INSTALLED:
            stub.version = lambda: None
        backends._instances[name] = stub
"""
_STEP = """
    q = torch.linspace(-1, 1, 14 * 2 * 16).view(14, 2, 16).requires_grad_()
    cu = torch.tensor([0, 5, 14], dtype=torch.int32)
    out = torch.compile(lambda q: thd_attention(q * 2, q, q, cu, max_seqlen_q=9), fullgraph=True)(q)
    out.sum().backward()
    compiled = used[-1]
    torch.testing.assert_close(out, thd_attention(q * 2, q, q, cu, max_seqlen_q=9))
    counters = torch._dynamo.utils.counters["aot_autograd"]
    print(compiled, used[-1], counters["autograd_cache_hit"], counters["autograd_cache_miss"])
"""


def _process(cache: Path, installed: tuple[str, ...] = ("flash4", "cudnn"), abi: int | None = None, **variables: str) -> list[str]:
    """One process with a disk cache: the backend of compiled code, the one of eager, cache hits, cache misses."""
    script = _PREAMBLE.replace("INSTALLED", repr(installed))
    if abi is not None:
        script += f"\n    plan.ABI = {abi}\n"
    every = {"NVTE_FLASH_ATTN": None, **variables}
    return run_script(script + _STEP, TORCHINDUCTOR_CACHE_DIR=str(cache), **every).split()


def test_a_second_process_hits_the_cache(tmp_path: Path) -> None:
    assert _process(tmp_path) == ["flash4", "flash4", "0", "1"]
    assert _process(tmp_path) == ["flash4", "flash4", "1", "0"]


def test_a_second_process_after_an_environment_change(tmp_path: Path) -> None:
    """What was chosen is part of the graph and so of the cache's key: never another process's choice."""
    assert _process(tmp_path)[:2] == ["flash4"] * 2
    assert _process(tmp_path, NVTE_FLASH_ATTN="0") == ["cudnn", "cudnn", "0", "1"]
    assert _process(tmp_path, NVTE_FLASH_ATTN="0") == ["cudnn", "cudnn", "1", "0"]


def test_a_second_process_after_an_installation(tmp_path: Path) -> None:
    assert _process(tmp_path, installed=("cudnn",))[:2] == ["cudnn"] * 2
    assert _process(tmp_path, installed=("flash4", "cudnn")) == ["flash4", "flash4", "0", "1"]


def test_a_second_process_after_an_upgrade(tmp_path: Path) -> None:
    """Another plan version never runs what an older one cached."""
    assert _process(tmp_path)[:2] == ["flash4"] * 2
    assert _process(tmp_path, abi=1000) == ["flash4", "flash4", "0", "1"]
    assert _process(tmp_path, abi=1000)[2:] == ["1", "0"]


def test_two_processes_at_once_share_a_cache(tmp_path: Path) -> None:
    """Two ranks that start together with an empty cache, each with its own environment."""
    results = at_once(2, lambda n: _process(tmp_path, **({"NVTE_FLASH_ATTN": "0"} if n else {})))
    assert [result[:2] for result in results] == [["flash4", "flash4"], ["cudnn", "cudnn"]]


def test_another_threads_compilation_is_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.compiler.is_compiling`` is one flag for the process. While it is up for another thread, this one may prepare a batch
    on the host, leave max_seqlen out and pass a raw list."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    inputs = build(CASE)
    want = inputs.attend(thd_attention_policies=inputs.prepare())
    got = inputs.attend(thd_attention_policies=inputs.policies(), max_seqlen_q=None, max_seqlen_kv=None)
    assert torch.equal(got, want)


def test_a_forked_child_can_attend() -> None:
    """After the parent has chosen and run: what is remembered survives the fork, and locks are free."""
    inputs = build(PackedCase((5, 9, 3)), requires_grad=False)
    want = inputs.attend()
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(inputs.attend(), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_command_line_in_a_process_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-m", "te_attn_ops", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "usage" in done.stdout
