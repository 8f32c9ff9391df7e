"""Sources of common formats, read from local or mounted disks by random access. See docs/streaming.md."""

from samestep.sources.token_windows import TokenWindows, open_tokens
from samestep.sources.webdataset import WebDataset

__all__ = ["TokenWindows", "WebDataset", "open_tokens"]
