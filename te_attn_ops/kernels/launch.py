"""A Triton launch for a few microseconds of host time.

``kernel[grid](...)`` binds and specialises every argument on each call. Here the first call of a kind goes that way and the
compiled kernel it returns is launched directly afterwards. The kernels launched so take no specialisation on integers or
alignment, so that the kind (dtypes and constexprs) is all that a compiled kernel depends on.
"""

from __future__ import annotations

from typing import Any

import torch

_Grid = tuple[int, int, int]


class Launcher:
    """Launches one ``@triton.jit`` function declared with ``do_not_specialize`` on all its run-time arguments."""

    def __init__(self, jit_function: Any, num_warps: int = 4) -> None:
        self._jit = jit_function
        self._num_warps = num_warps
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}

    def __call__(self, grid: _Grid, args: tuple[Any, ...], constexprs: tuple[Any, ...], device: torch.device) -> None:
        """``args`` are the run-time arguments in order (every int below 2^31), ``constexprs`` the trailing constexpr ones."""
        dtypes = tuple([a.dtype for a in args if isinstance(a, torch.Tensor)])
        self.launch((device.index, constexprs, dtypes), grid, args, constexprs, device.index)

    def launch(
        self, kind: tuple[Any, ...], grid: _Grid, args: tuple[Any, ...], constexprs: tuple[Any, ...], device_index: int
    ) -> None:
        """:meth:`__call__` for callers that know a shorter name for the dtypes, constexprs and device: ``kind``."""
        found = self._compiled.get(kind)
        if found is not None:
            run, function, metadata = found
            stream = torch._C._cuda_getCurrentRawStream(device_index)
            # The launcher takes addresses, for which it does not have to ask the driver.
            values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
            run(grid[0], grid[1], grid[2], stream, function, metadata, None, None, None, *values, *constexprs)
            return
        compiled = self._jit[grid](*args, *constexprs, num_warps=self._num_warps)
        # A private interface: where any of it is missing, every launch goes the documented way.
        if all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
            self._compiled[kind] = (compiled.run, compiled.function, compiled.packed_metadata)
