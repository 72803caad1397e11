"""weighin: how should I run this language model?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["compare"]

if TYPE_CHECKING:
    from weighin.compare import compare


def __getattr__(name: str) -> Any:
    """`weighin.compare` is imported when it is used: `weighin --help` stays quick, and workers stay light."""
    if name == "compare":
        import importlib

        return importlib.import_module("weighin.compare")  # it can be called; see the end of that file
    raise AttributeError(name)
