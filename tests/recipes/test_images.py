"""The recipe `images`: folders, files, the model, and the same bits at any number of ranks."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.runs import check, digest, read_bits, read_rows, samestep_command
from support.selection import one_in

from samestep.errors import Error

Image = pytest.importorskip("PIL.Image")
from samestep.recipes import images  # noqa: E402 - it needs Pillow


def write_photos(folder: Path, num_train: int = 15, num_val: int = 5) -> Path:
    """Write images of two classes, in several shapes and pixel formats."""
    for part, num_images in (("train", num_train), ("val", num_val)):
        for label, shade in (("dark", 40), ("light", 200)):
            (folder / part / label).mkdir(parents=True)
            for number in range(num_images):
                mode, size = ("L", "RGB", "RGBA", "P")[number % 4], (9 + number % 3, 12 - number % 2)
                image = Image.new("L", size, shade + 2 * number).convert(mode)
                image.save(folder / part / label / f"{number:02d}.png")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty images."""
    return write_photos(tmp_path_factory.mktemp("images") / "photos")


def train(photos: Path, name: str, world_size: int, *flags: str) -> Path:
    run_dir = photos.parent / name
    done = samestep_command(
        "train", "images", "--nproc-per-node", str(world_size), "--data", photos, "--image-size", "8", "--epochs", "2",
        "--batch-size", "12", "--micro-batch-size", "4", "--run-dir", run_dir, *flags,
        cwd=photos.parent,
    )  # fmt: skip
    check(done)
    return run_dir


# Three starts of a recipe with loader workers, on one to three ranks: 20 s, and 24 s on a busy machine.
@pytest.mark.parametrize(("before", "after"), one_in(3, [("fsdp2", "optimizer"), ("none", "fsdp2"), ("none", "none")]))
def test_the_same_run_at_any_world_size_and_after_a_resume(photos: Path, before: str, after: str) -> None:
    names = [f"{name}-{before}-{after}" for name in ("alone", "resumed")]
    expected = train(photos, names[0], 1)
    stopped = train(photos, names[1], 3, "--max-steps", "4", "--shard", before)
    train(photos, names[1], 2, "--num-workers", "1", "--shard", after)
    assert digest(stopped, "best") == digest(expected, "best")
    assert read_bits(stopped) == read_bits(expected)
    rows = [row for row in read_rows(expected) if "validation/top1" in row]
    assert [row["validation/top5"] for row in rows] == [1.0, 1.0]


@pytest.mark.parametrize("content", [b"", b"not an image", b"cut"])
def test_a_corrupt_image_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.png"
    Image.new("L", (30, 30), 9).save(file)
    file.write_bytes(file.read_bytes()[:-30] if content == b"cut" else content)
    with pytest.raises(Error, match=rf"{file} cannot be decoded \(.*\): convert, repair or remove it"):
        images.decode(file)


def test_images_are_rgb_and_upright(tmp_path: Path) -> None:
    image = Image.new("L", (64, 32), 9)
    exif = Image.Exif()
    exif[0x0112] = 6  # the first row is to be shown at the right
    image.save(tmp_path / "x.jpg", exif=exif)
    shown = images.decode(tmp_path / "x.jpg")
    assert (shown.mode, shown.size) == ("RGB", (32, 64))


def test_formats_that_start_other_programs_are_refused(tmp_path: Path) -> None:
    Image.new("L", (4, 2), 9).save(tmp_path / "x.eps")
    (tmp_path / "x.eps").rename(tmp_path / "x.jpg")
    with pytest.raises(Error, match="cannot identify image file"):
        images.decode(tmp_path / "x.jpg")


@pytest.mark.soak
def test_digits_are_learned_from_files(tmp_path: Path) -> None:
    done = samestep_command("train", "images", "--nproc-per-node", "2", "--run-dir", tmp_path / "x", cwd=tmp_path)
    check(done)
    rows = [row for row in read_rows(tmp_path / "x") if "validation/top1" in row]
    assert rows[0]["validation/top1"] < rows[0]["validation/top5"] <= 1
    assert max(row["validation/top1"] for row in rows) >= 0.96, done.stdout
    assert len(list((tmp_path / "digits-png").rglob("*.png"))) == 1797


def test_digits_are_written_once(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    folder = tmp_path / "runs" / "digits-png"
    images.write_digits(folder)
    classes, entries, held_out = images.split_data(folder)
    assert classes == [str(digit) for digit in range(10)]
    assert (len(entries), len(held_out)) == (1437, 360)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["digits-png"]
    assert images.decode(entries[0][0]).size == (8, 8)
    before = folder.stat().st_mtime_ns
    images.write_digits(folder)
    assert folder.stat().st_mtime_ns == before


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: None, r"train has images \(.*\) in 0 folders: it needs"),
    "one class": (lambda folder: shutil.rmtree(write_photos(folder) / "train/dark"), "in 1 folder: it needs"),
    "other classes": (
        lambda folder: (write_photos(folder, 1, 1) / "val" / "dark").rename(folder / "val" / "grey"),
        r"have images of different classes \(dark, grey\): make them the same",
    ),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_bad_folders(name: str, tmp_path: Path) -> None:
    make, words = BAD_FOLDERS[name]
    make(tmp_path / "x")
    with pytest.raises(Error, match=words):
        images.split_data(tmp_path / "x")


def test_crops_and_flips(tmp_path: Path) -> None:
    picture = Image.new("RGB", (36, 18))
    picture.putdata([(x, y, 0) for y in range(18) for x in range(36)])
    picture.save(tmp_path / "x.png")
    entries = [(tmp_path / "x.png", 1)]
    torch.manual_seed(0)
    crops = [images.Images(entries, 16, is_training=True, has_flips=True)[0] for _ in range(40)]
    assert {(crop.dtype, tuple(crop.shape), label) for crop, label in crops} == {(torch.uint8, (3, 16, 16), 1)}
    assert {bool(crop[0, 0, 0] > crop[0, 0, 15]) for crop, _ in crops} == {True, False}
    assert len({tuple(crop[:, 0, 0].tolist()) for crop, _ in crops}) > 10
    middle = images.Images(entries, 16, is_training=False)
    assert middle[0][0][:, 0, 0].tolist() == [10, 1, 0]
    assert torch.equal(middle[0][0], middle[0][0])


@pytest.mark.parametrize(("name", "num_weights"), [("resnet18", 11_689_512), ("resnet34", 21_797_672)])
def test_models_have_the_published_sizes(name: str, num_weights: int) -> None:
    model = images.ResNet(images.ARCHITECTURES[name], 1000)
    assert sum(weight.numel() for weight in model.parameters()) == num_weights
    names = set(model.state_dict())
    assert {"conv1.weight", "bn1.running_mean", "layer2.0.downsample.0.weight", "layer4.1.bn2.bias", "fc.bias"} <= names
    assert "mean" not in names


def test_the_model_normalizes_bytes() -> None:
    model = images.ResNet(images.ARCHITECTURES["tiny"], 3).eval()
    pixels = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (images.MEAN, images.STD))
    torch.testing.assert_close(model(pixels), model((pixels / 255 - mean) / std), rtol=1e-4, atol=1e-4)
