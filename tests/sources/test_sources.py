"""Sources read files of other programs by random access, and name a damaged shard."""

import json
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.shards import MAKERS, NUM_SHARDS, PER_SHARD, SAMPLES, make_mds, make_parquet, make_tars, read_x, write_mds

from samestep.data.lanes import Lanes
from samestep.data.loader import Loader, Task
from samestep.data.source import mark_shards, parse_shards, read_shards
from samestep.data.spec import understand
from samestep.errors import InvalidType, InvalidValue, RunDirectoryError
from samestep.plan.schedule import EndlessSchedule
from samestep.sources import MDS, Parquet, WebDataset, open_tokens
from samestep.train.batches import Batches


@pytest.mark.parametrize("kind", MAKERS)
def test_any_sample_in_any_order(kind: str, tmp_path: Path) -> None:
    source = MAKERS[kind](tmp_path / "data")
    assert len(source) == SAMPLES
    shards, _, _ = read_shards(source)
    assert [shard.num_samples for shard in shards] == ([SAMPLES] if kind == "tokens" else [PER_SHARD] * NUM_SHARDS)
    indices = np.random.default_rng(0).permutation(SAMPLES)
    for each in (source, pickle.loads(pickle.dumps(source))):
        for spec in (understand(each), understand(each, num_workers=2)):
            tasks = [Task(indices[at : at + 7], 0) for at in range(0, SAMPLES, 7)]
            with Loader(spec, tasks, device=torch.device("cpu")) as loader:
                assert [x for loaded in loader for x in read_x(loaded.batch)] == indices.tolist()
    with pytest.raises(IndexError):
        source.__getitems__([SAMPLES])


@pytest.mark.parametrize("kind", MAKERS)
def test_a_shard_with_other_content_of_the_same_size(kind: str, tmp_path: Path) -> None:
    source, run_dir = MAKERS[kind](tmp_path / "data"), tmp_path / "run"
    run_dir.mkdir()

    def start(*, overrides: bool = False) -> None:
        batches = Batches(source, seed=0, batch_size=4, micro_batch_size=2, endless=True, sampler=None, start=(0, 0))
        marks = batches.check_marks(run_dir, overrides=overrides)
        assert len(marks) == len(source.shards)
        assert batches.keep_shards(run_dir, marks) == ""

    start()
    (record,) = (run_dir / "orders").iterdir()
    record.write_text(json.dumps([row[:3] for row in json.loads(record.read_text())]))  # as earlier versions wrote it
    start()
    file = source.shard_files[-1]
    os.utime(file, ns=(1, 1))  # as a copy of it
    start()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        RunDirectoryError, match=r"not those that the run began with: .* has other content.*; restore them; to"
    ):
        start()
    start(overrides=True)
    start()


def test_files_of_shards_are_checked(tmp_path: Path) -> None:
    source = make_tars(tmp_path)
    source.shard_files[2].unlink()
    with pytest.raises(
        InvalidValue, match=r"the shard .*2\.tar cannot be read \(No such file or directory\): restore it"
    ):
        mark_shards(source, [])
    os.mkfifo(source.shard_files[2])
    with pytest.raises(InvalidValue, match=r"the shard .*2\.tar cannot be read \(it is a FIFO\): restore it"):
        mark_shards(source, [])
    source.shard_files[2] = Path("a\0.tar")
    with pytest.raises(InvalidValue, match=r"the shard a\0\.tar cannot be read \(embedded null byte\): restore it"):
        mark_shards(source, [])
    source.shard_files = source.shard_files[:2]
    with pytest.raises(InvalidValue, match=r"WebDataset has 6 shards and 2 shard_files: give the file of each shard"):
        mark_shards(source, [])
    for wrong in (None, 3, "a.tar", [None, "a.tar"]):
        source.shard_files = wrong
        with pytest.raises(InvalidType, match=r"WebDataset.shard_files must be a list with the path of each"):
            mark_shards(source, [])


def test_a_damaged_list_of_shards() -> None:
    for text in (b"null", b'[["a", 1, 1, Infinity, "x"]]', b'{"a": 1}'):
        with pytest.raises(ValueError, match=r"not iterable|infinity|unpack"):
            parse_shards(text)


def test_values_of_columns(tmp_path: Path) -> None:
    sample = make_mds(tmp_path)[7]
    assert (sample["x"], sample["name"], sample["row"].tolist(), sample["number"]) == (7.0, "sample 7", [7, -7], -7)
    assert sample["any"].tolist() == [[7.0] * 3] and sample["any"].dtype == np.float32  # noqa: PT018


def test_columns_of_parquet(tmp_path: Path) -> None:
    batch = make_parquet(tmp_path).__getitems__([29, 3, 2])
    assert batch["row"].tolist() == [[29, 29], [3, 3], [2, 2]]
    assert [tokens.tolist() for tokens in batch["tokens"]] == [[0], [0, 1, 2], [0, 1]]
    assert batch["name"] == ["sample 29", "sample 3", "sample 2"]
    with pytest.raises(InvalidValue, match=r"has no column y: its columns are x, row"):
        Parquet(tmp_path, columns=["y"])


def test_samples_of_tars(tmp_path: Path) -> None:
    make_tars(tmp_path)
    assert WebDataset(tmp_path)[12]["__key__"] == "train/0012"
    indices = sorted(tmp_path.glob("*.index.npz"))
    assert len(indices) == NUM_SHARDS
    before = indices[0].stat().st_mtime_ns
    with tarfile.open(tmp_path / "1.tar", "w"):
        pass
    source = WebDataset(tmp_path)
    assert len(source) == SAMPLES - PER_SHARD, "the index of a tar that has changed is built again"
    assert indices[0].stat().st_mtime_ns == before
    assert [shard.num_samples for shard in source.shards][1] == 0


def spoil(kind: str, root: Path, how: str) -> str:
    """Damage the second shard. Returns its name."""
    names = {"mds": "shard.00001.mds", "webdataset": "1.tar", "parquet": "1.parquet", "tokens": "train.bin"}
    file = root / names[kind]
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        with open(file, "r+b") as opened:
            opened.truncate(1 if kind == "tokens" else 700 if kind == "webdataset" else file.stat().st_size - 3)
    else:
        content = bytearray(file.read_bytes())
        content[: len(content) // 2] = b"\xff" * (len(content) // 2)
        file.write_bytes(content)
    return file.name


@pytest.mark.parametrize("how", ["missing", "truncated", "damaged"])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_bad_shard_is_named(kind: str, how: str, tmp_path: Path) -> None:
    if (kind, how) in {("webdataset", "missing"), ("parquet", "missing"), ("tokens", "damaged")}:
        pytest.skip("a directory has no list of its files, which the run's record has; any bytes are tokens")
    MAKERS[kind](tmp_path)
    for index in tmp_path.glob("*.npz"):
        index.unlink()
    name = spoil(kind, tmp_path, how)
    opener: Any = {"mds": MDS, "webdataset": WebDataset, "parquet": Parquet, "tokens": open_tokens}[kind]
    with pytest.raises(InvalidValue, match=name.replace(".", r"\.")) as error:
        source = opener(tmp_path / name, 1) if kind == "tokens" else opener(tmp_path)
        source.__getitems__([*range(SAMPLES)])
    assert "\n" not in str(error.value)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"there are no \.tar files in"):
        WebDataset(tmp_path)
    with pytest.raises(InvalidValue, match=r"no directory of MDS shards"):
        MDS(tmp_path)
    write_mds(tmp_path, {"x": "pkl"}, [{"x": b"."}], [None])
    with pytest.raises(InvalidValue, match=r"column x of .* has the encoding pkl, which is not supported"):
        MDS(tmp_path)
    os.mkfifo(tmp_path / "fifo.tar")
    (tmp_path / "d.tar").mkdir()
    for name, found in (("b", "missing"), ("d", "a directory"), ("fifo", "no regular file")):
        with pytest.raises(InvalidValue, match=rf"the shard .*{name}\.tar is {found}: restore it, or leave it out"):
            WebDataset([tmp_path / f"{name}.tar"])


def test_arrow_data_sets_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": [float(i) for i in range(SAMPLES)]}).with_format("torch")
    with Loader(understand(data), [Task(np.array([5, 2]), 0)], device=torch.device("cpu")) as loader:
        assert read_x(next(loader).batch) == [5, 2]
    stream = data.to_iterable_dataset(num_shards=3)
    lanes = Lanes(stream, EndlessSchedule(1 << 40, 6, 2), 0, 0)
    assert [row["x"].item() for row in lanes.__getitems__([2, 3])] == [10, 11], "lane 1 has the second shard"
    assert [row["x"].item() for row in lanes.__getitems__([8, 9])] == [12, 13]


def test_mds_reads_what_the_writer_of_streaming_writes(tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming", reason="needs mosaicml-streaming")
    generator = np.random.default_rng(0)
    columns = {
        "bytes": "bytes", "text": "str", "int": "int", "small": "uint8", "large": "int64", "half": "float16",
        "single": "float32", "double": "float64", "digits": "str_int", "decimal": "str_float", "tree": "json",
        "any": "ndarray", "typed": "ndarray:float32", "fixed": "ndarray:int16:2,3", "image": "png",
    }  # fmt: skip
    written = [
        {
            "bytes": bytes([k] * k), "text": "é" * k, "int": -k, "small": np.uint8(k), "large": np.int64(-k * 10**9),
            "half": np.float16(k / 3), "single": np.float32(k / 7), "double": np.float64(k / 9), "digits": 10**30 + k,
            "decimal": k / 11, "tree": {"a": [k, None]}, "any": generator.integers(0, 9, (k % 3 + 1, 2), np.int32),
            "typed": generator.random((k % 4 + 1, 3), np.float32), "fixed": np.full((2, 3), k, np.int16),
            "image": Image.fromarray(generator.integers(0, 256, (5, 4, 3), np.uint8)),
        }
        for k in range(1, 100)
    ]  # fmt: skip
    with streaming.MDSWriter(out=str(tmp_path / "mds"), columns=columns, size_limit=1 << 13) as writer:
        for sample in written:
            writer.write(sample)
    source = MDS(tmp_path / "mds")
    assert len(source.shards) > 3
    for sample, read in zip(written, source.__getitems__([*range(99)]), strict=True):
        for name, value in sample.items():
            assert np.array_equal(np.asarray(read[name]), np.asarray(value)), name
            assert getattr(read[name], "dtype", None) == getattr(value, "dtype", None), name
