"""Sources of common formats, read from local or mounted disks by random access. See docs/streaming.md."""

from samestep.sources.mds import MDS
from samestep.sources.parquet import Parquet
from samestep.sources.token_windows import TokenWindows, open_tokens
from samestep.sources.webdataset import WebDataset

__all__ = ["MDS", "Parquet", "TokenWindows", "WebDataset", "open_tokens"]
