"""Sources of common formats, read from local or mounted disks by random access. See docs/streaming.md."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Public name -> the module that defines it. Loaded on first use: no source needs another one.
_EXPORTS = {
    "TokenWindows": "samestep.sources.token_windows",
    "WebDataset": "samestep.sources.webdataset",
    "open_tokens": "samestep.sources.token_windows",
}

__all__ = ["TokenWindows", "WebDataset", "open_tokens"]

if TYPE_CHECKING:
    from samestep.sources.token_windows import TokenWindows, open_tokens
    from samestep.sources.webdataset import WebDataset


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'samestep.sources' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
