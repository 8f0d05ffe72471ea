"""A progress line, the logger ``te_attn_ops`` and TransformerEngine's switches for it.

``NVTE_DEBUG=1`` shows the library's records on stderr; ``NVTE_DEBUG_LEVEL`` (0, 1 or 2) says how many: warnings, each new
choice (INFO), every refusal behind it (DEBUG). Both are read when the package is imported. Without them the logger is the
application's to configure, like any other of the standard library.
"""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("te_attn_ops")
_LEVELS = {"0": logging.WARNING, "1": logging.INFO, "2": logging.DEBUG}
_FORMAT = "[%(levelname)-8s | %(name)s]: %(message)s"


def configure_from_environment() -> None:
    """Applies ``NVTE_DEBUG`` and ``NVTE_DEBUG_LEVEL``; without the first it does nothing."""
    if os.environ.get("NVTE_DEBUG", "0") in ("", "0"):
        return
    level = os.environ.get("NVTE_DEBUG_LEVEL", "0")
    logger.setLevel(_LEVELS.get(level, logging.WARNING))
    if level not in _LEVELS:
        logger.warning("NVTE_DEBUG_LEVEL=%s is unknown; use 0 (warnings), 1 (choices) or 2 (refusals too)", level)
    if logger.hasHandlers():
        return  # the application's handlers show the records
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)


class ProgressLine:
    """One line on stderr, where that is a terminal: each text replaces the one before, and the last is gone at the end."""

    def __init__(self) -> None:
        self._shown = False

    def __enter__(self) -> ProgressLine:
        return self

    def show(self, text: str) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            self._shown = True
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
