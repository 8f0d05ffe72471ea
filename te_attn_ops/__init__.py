"""Attention for packed (THD) batches under torch.compile and CUDA graphs. Importing this package imports torch alone.

The submodules ``modules``, ``measure`` and ``testing`` are imported when they are first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .attention import thd_attention
from .explain import Explanation, explain
from .logs import configure_from_environment as _configure_logging
from .masks import Band
from .packing import PackedCapacity, pad_packed_batch, validate_packed
from .params import AttentionParams
from .policies import AttentionPolicy, PlanSpec, PreparedPolicies, prepare_thd_policies, refresh_thd_policies
from .selection import NoBackendError, Selection, invalidate, should_pad_qkv_head_dim

__version__ = "0.1.0"
__all__ = [
    "AttentionParams",
    "AttentionPolicy",
    "Band",
    "Explanation",
    "NoBackendError",
    "PackedCapacity",
    "PlanSpec",
    "PreparedPolicies",
    "Selection",
    "explain",
    "invalidate",
    "pad_packed_batch",
    "prepare_thd_policies",
    "refresh_thd_policies",
    "should_pad_qkv_head_dim",
    "thd_attention",
    "validate_packed",
]

if TYPE_CHECKING:
    from . import measure as measure, modules as modules, testing as testing
else:

    def __getattr__(name: str) -> Any:
        if name in ("measure", "modules", "testing"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_configure_logging()
