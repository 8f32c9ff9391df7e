"""Sources read files of other programs by random access, and name a damaged shard."""

import json
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.shards import MAKERS, NUM_SHARDS, PER_SHARD, SAMPLES, make_tars, read_x

from samestep.data.lanes import Lanes
from samestep.data.loader import Loader
from samestep.data.source import ORDERS, read_shard_sizes, read_shards, shards_file
from samestep.data.spec import read_data_arguments
from samestep.errors import InvalidValue
from samestep.plan.loop_plan import Task
from samestep.sources import WebDataset, open_tokens


@pytest.mark.parametrize("kind", MAKERS)
def test_any_sample_in_any_order(kind: str, tmp_path: Path) -> None:
    source = MAKERS[kind](tmp_path / "data")
    assert len(source) == SAMPLES
    shards, _, _ = read_shards(source)
    assert [shard.num_samples for shard in shards] == ([SAMPLES] if kind == "tokens" else [PER_SHARD] * NUM_SHARDS)
    indices = np.random.default_rng(0).permutation(SAMPLES)
    for each in (source, pickle.loads(pickle.dumps(source))):
        for spec in (read_data_arguments(each), read_data_arguments(each, num_workers=2)):
            tasks = [Task(indices[at : at + 7], 0) for at in range(0, SAMPLES, 7)]
            with Loader(spec, tasks, device=torch.device("cpu")) as loader:
                assert [x for loaded in loader for x in read_x(loaded.batch)] == indices.tolist()
    with pytest.raises(IndexError):
        source.__getitems__([SAMPLES])


def test_a_damaged_list_of_shards(tmp_path: Path) -> None:
    (tmp_path / ORDERS).mkdir()
    for text in ("null", '[["a", 1, 1, Infinity, "x"]]', '{"a": 1}', '[["a", -1, 1]]'):
        (tmp_path / shards_file("0")).write_text(text)
        with pytest.raises(ValueError, match=r"expected array, got|not finite|expected int >= 0"):
            read_shard_sizes(tmp_path, "0")


def test_samples_of_tars(tmp_path: Path) -> None:
    make_tars(tmp_path)
    assert WebDataset(tmp_path)[12]["__key__"] == "train/0012"
    indices = sorted(tmp_path.glob("*.index.json"))
    assert len(indices) == NUM_SHARDS
    before = indices[0].stat().st_mtime_ns
    with tarfile.open(tmp_path / "1.tar", "w"):
        pass
    source = WebDataset(tmp_path)
    assert len(source) == SAMPLES - PER_SHARD, "the index of a tar that has changed is built again"
    assert indices[0].stat().st_mtime_ns == before
    assert [shard.num_samples for shard in source.shards][1] == 0


@pytest.mark.parametrize("damage", [b"", b"\xff" * 700])
def test_a_bad_file_is_named(damage: bytes, tmp_path: Path) -> None:
    make_tars(tmp_path)
    for index in tmp_path.glob("*.index.json"):
        index.unlink()
    content = (tmp_path / "1.tar").read_bytes()
    (tmp_path / "1.tar").write_bytes(damage or content[:700])
    with pytest.raises(InvalidValue, match=r"the shard .*1\.tar is truncated, compressed or no tar file"):
        WebDataset(tmp_path)
    (tmp_path / "train.bin").write_bytes(b"x")
    with pytest.raises(InvalidValue, match=r"train\.bin"):
        open_tokens(tmp_path / "train.bin", 1)
    (tmp_path / "1.tar").write_bytes(content)
    source = WebDataset(tmp_path)
    os.truncate(tmp_path / "1.tar", 700)
    with pytest.raises(InvalidValue, match=r"the shard .*1\.tar is truncated at byte"):
        source.__getitems__([*range(SAMPLES)])


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"there are no \.tar files in"):
        WebDataset(tmp_path)
    os.mkfifo(tmp_path / "fifo.tar")
    (tmp_path / "d.tar").mkdir()
    for name in ("b", "d", "fifo"):
        with pytest.raises(InvalidValue, match=rf"the shard .*{name}\.tar is missing or no regular file: restore it"):
            WebDataset([tmp_path / f"{name}.tar"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../etc/x.txt", r"\.\./etc/x\.txt is no name of a sample"),
        ("a/../../x.txt", r"a/\.\./\.\./x\.txt is no name of a sample"),
        ("a/x.__key__", r"a/x\.__key__ would replace the key of the sample"),
    ],
)
def test_hostile_names_in_a_tar(name: str, said: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(InvalidValue, match=said):
        WebDataset(tmp_path)


def test_an_absolute_name_in_a_tar_is_a_relative_key(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("//etc/x.txt"))
        tar.addfile(tarfile.TarInfo("./0001.txt"))
    assert [sample["__key__"] for sample in WebDataset(tmp_path).__getitems__([0, 1])] == ["etc/x", "./0001"]


def test_a_tar_with_a_negative_size(tmp_path: Path) -> None:
    """Which some versions of tarfile follow backwards, forever."""
    about = tarfile.TarInfo("x.txt")
    about.size = -1024
    (tmp_path / "x.tar").write_bytes(about.tobuf(tarfile.GNU_FORMAT) + bytes(9216))
    with pytest.raises(InvalidValue, match=r"x\.tar is truncated, compressed or no tar file"):
        WebDataset(tmp_path)


@pytest.mark.parametrize(
    ("key", "place"), [("x", [-512, 1]), ("x", [0, 1 << 62]), ("x", [0.5, 1]), ("x", [0]), ("../x", [0, 1])]
)
def test_hostile_indices_of_tars(key: str, place: list[float], tmp_path: Path) -> None:
    make_tars(tmp_path)
    at = tmp_path / "0.tar.index.json"
    mark = at.read_bytes().splitlines()[0]
    at.write_bytes(mark + b"\n" + json.dumps([[key, {"x": place}]] * PER_SHARD).encode())
    with pytest.raises(InvalidValue, match="remove it, and it is built again"):
        WebDataset(tmp_path)[0]


def test_an_index_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    make_tars(tmp_path)
    at = tmp_path / "0.tar.index.json"
    at.write_bytes(at.read_bytes() + b" " * 200_000)
    with pytest.raises(InvalidValue, match="File too large"):
        WebDataset(tmp_path)[0]
    at.write_bytes(b" " * 200_000)
    assert WebDataset(tmp_path)[0]["__key__"] == "train/0000", "without a mark, it is built again"


def test_arrow_data_sets_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": [float(i) for i in range(SAMPLES)]}).with_format("torch")
    with Loader(read_data_arguments(data), [Task(np.array([5, 2]), 0)], device=torch.device("cpu")) as loader:
        assert read_x(next(loader).batch) == [5, 2]
    lanes = Lanes(data.to_iterable_dataset(num_shards=3), 3, 2, 0, 0)
    assert [row["x"].item() for row in lanes.__getitems__([2, 3])] == [10, 11], "lane 1 has the second shard"
    assert [row["x"].item() for row in lanes.__getitems__([8, 9])] == [12, 13]
