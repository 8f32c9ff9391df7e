"""Small data in the format of every source, as other programs write it. Sample i holds the number i."""

import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samestep.sources import MDS, Parquet, WebDataset, open_tokens

NUM_SHARDS, PER_SHARD = 6, 5
SAMPLES = NUM_SHARDS * PER_SHARD


def write_mds(
    root: Path, columns: dict[str, str], rows: Sequence[dict[str, bytes]], sizes: Sequence[int | None]
) -> None:
    """Write shards of `PER_SHARD` rows by the format's definition. `rows`: encoded values."""
    root.mkdir(parents=True, exist_ok=True)
    shards = []
    for number in range(0, len(rows), PER_SHARD):
        bodies = []
        for row in rows[number : number + PER_SHARD]:
            lengths = [len(row[name]) for name, size in zip(columns, sizes, strict=True) if size is None]
            bodies.append(np.array(lengths, "<u4").tobytes() + b"".join(row[name] for name in columns))
        header = 4 * (len(bodies) + 2)
        offsets = np.cumsum([header, *map(len, bodies)])
        name = f"shard.{number // PER_SHARD:05d}.mds"
        content = np.array([len(bodies), *offsets], "<u4").tobytes() + b"".join(bodies)
        (root / name).write_bytes(content)
        shards.append({
            "column_encodings": [*columns.values()], "column_names": [*columns], "column_sizes": [*sizes],
            "compression": None, "format": "mds", "hashes": [], "samples": len(bodies), "size_limit": 1 << 26,
            "raw_data": {"basename": name, "bytes": len(content), "hashes": {}}, "version": 2, "zip_data": None,
        })  # fmt: skip
    (root / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def make_mds(root: Path) -> MDS:
    columns = {"x": "float32", "name": "str", "row": "ndarray:int16:2", "any": "ndarray", "number": "int"}
    rows = [
        {
            "x": np.float32(i).tobytes(),
            "name": f"sample {i}".encode(),
            "row": np.array([i, -i], "<i2").tobytes(),
            "any": bytes([34, 2 << 2, 1, 3]) + np.full(3, i, "<f4").tobytes(),
            "number": (-i).to_bytes(8, "little", signed=True),
        }
        for i in range(SAMPLES)
    ]
    write_mds(root, columns, rows, [4, None, 4, None, 8])
    return MDS(root)


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


def make_parquet(root: Path) -> Parquet:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    root.mkdir(parents=True, exist_ok=True)
    for number in range(NUM_SHARDS // 2):
        ids = [*range(number * 2 * PER_SHARD, (number + 1) * 2 * PER_SHARD)]
        table = arrow.table({
            "x": arrow.array(ids, arrow.float32()),
            "row": arrow.FixedSizeListArray.from_arrays(arrow.array(np.repeat(ids, 2)), 2),
            "tokens": [[*range(i % 4)] for i in ids],
            "name": [f"sample {i}" for i in ids],
        })  # fmt: skip
        parquet.write_table(table, root / f"{number}.parquet", row_group_size=PER_SHARD)
    return Parquet(root)


def make_tokens(root: Path) -> Any:
    root.mkdir(parents=True, exist_ok=True)
    np.arange(SAMPLES + 1, dtype="<u2").tofile(root / "train.bin")
    return open_tokens(root / "train.bin", 1)


MAKERS: dict[str, Callable[[Path], Any]] = {
    "mds": make_mds,
    "webdataset": make_tars,
    "parquet": make_parquet,
    "tokens": make_tokens,
}


def read_x(batch: Any) -> list[float]:
    return (batch["x"] if isinstance(batch, dict) else batch[:, 0]).tolist()  # type: ignore[no-any-return]
