"""Small data in the format of every source, as other programs write it. Sample i holds the number i."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from samestep.sources import WebDataset, open_tokens

NUM_SHARDS, PER_SHARD = 6, 5
SAMPLES = NUM_SHARDS * PER_SHARD


def make_tars(root: Path, spare: int = -1) -> WebDataset:
    """Write tars. `spare`: the number of a tar that lacks its first sample."""
    root.mkdir(parents=True, exist_ok=True)
    for number in range(NUM_SHARDS):
        with tarfile.open(root / f"{number}.tar", "w") as tar:
            for i in range(number * PER_SHARD + (number == spare), (number + 1) * PER_SHARD):
                for extension, content in (("x.npy", np.float32(i).tobytes()), ("txt", f"sample {i}".encode())):
                    about = tarfile.TarInfo(f"train/{i:04d}.{extension}")
                    about.size = len(content)
                    tar.addfile(about, io.BytesIO(content))
    return WebDataset(root, decode)


def decode(sample: dict[str, bytes]) -> dict[str, Any]:
    return {"x": np.frombuffer(sample["x.npy"], "<f4")[0], "name": sample["txt"].decode()}


def make_tokens(root: Path) -> Any:
    root.mkdir(parents=True, exist_ok=True)
    np.arange(SAMPLES + 1, dtype="<u2").tofile(root / "train.bin")
    return open_tokens(root / "train.bin", 1)


MAKERS: dict[str, Callable[[Path], Any]] = {
    "webdataset": make_tars,
    "tokens": make_tokens,
}


def read_x(batch: Any) -> list[float]:
    return (batch["x"] if isinstance(batch, dict) else batch[:, 0]).tolist()  # type: ignore[no-any-return]
