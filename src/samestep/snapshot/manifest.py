"""The manifest of a snapshot: written last, read first, with checksums of every byte of the other files."""

import json
import os
import platform
import re
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

from samestep.files import fits, is_count, is_object, is_text, is_time, open_regular, parse_json, read_bytes
from samestep.hashing import hash_bytes, hash_pieces
from samestep.version import __version__

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\.(json|safetensors)")  # in the manifest's directory
NAME = re.compile(r"(?!\d+$|latest$|never$|step-)[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")  # excludes values of `resume`
_BUFFER_BYTES = 1 << 20
_NUM_READERS = 4

_HASH = re.compile(r"[0-9a-f]{64}")

# The consecutive pieces of a file: lengths in bytes and sha256. A piece is one tensor, so that one pass over a tensor's
# bytes serves the file's check and the digest of the state, and a reader of a few tensors can skip the others.
Pieces = list[tuple[int, str]]


def build_manifest(
    *, step: int, name: str | None, digest: str, files: Mapping[str, Pieces], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest of a snapshot whose other files are complete."""
    import torch

    written = {
        "format": FORMAT,
        "step": step,
        "name": name,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "digest": digest,
        "versions": {"samestep": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "files": {
            file: {"size": sum(length for length, _ in pieces), "pieces": [list(piece) for piece in pieces]}
            for file, pieces in files.items()
        },
        "meta": meta,
    }
    manifest: dict[str, Any] = parse_json(json.dumps(written, allow_nan=False))  # as a reader parses it
    return seal(manifest)


def seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with its own checksum, as it is in the file. Inverse of `parse_manifest`."""
    return {**manifest, "sha256": _checksum(manifest)}


def read_manifest(directory: Path) -> tuple[dict[str, Any], str | None]:
    """Return the manifest of a directory ({} if it cannot be read), and a problem with it or with file sizes."""
    try:
        manifest, problem = parse_manifest(read_bytes(directory / MANIFEST))
    except FileNotFoundError:
        return {}, f"{MANIFEST} is missing"
    except OSError as error:
        return {}, f"{MANIFEST} cannot be read ({error.strerror})"
    sizes = {}
    for file in manifest.get("files", {}):
        try:
            status = os.lstat(directory / file)
        except FileNotFoundError:
            continue
        except OSError as error:
            return manifest, f"{file} cannot be read ({error.strerror})"
        if not stat.S_ISREG(status.st_mode):
            return manifest, f"{file} is not a regular file"
        sizes[file] = status.st_size
    return manifest, problem or find_wrong_size(manifest["files"], sizes)


def parse_manifest(text: bytes) -> tuple[dict[str, Any], str | None]:
    """Return the manifest in a file ({} if it cannot be read), and a problem with it.

    All checks of manifests are here, because a file from an untrusted source can have the right checksum, too.
    """
    try:
        manifest = parse_json(text)
    except ValueError:
        return {}, f"{MANIFEST} is damaged"
    if not fits(manifest, {"format": is_count}):
        return {}, f"{MANIFEST} is damaged"
    if manifest["format"] > FORMAT:
        found = manifest["format"]
        known = FORMAT
        return {}, f"{MANIFEST} has format {found} of a newer samestep, this one reads up to {known}"
    checksum = manifest.pop("sha256", None)
    if checksum != _checksum(manifest) or set(manifest) != set(_SHAPE) or not fits(manifest, _SHAPE):
        return {}, f"{MANIFEST} is damaged"
    return manifest, None


def _is_hash(value: Any) -> bool:
    return is_text(value) and _HASH.fullmatch(value) is not None


def _is_file(file: str, entry: Any) -> bool:
    if file == MANIFEST or not FILE.fullmatch(file) or not fits(entry, {"size": is_count, "pieces": [_is_piece]}):
        return False
    return set(entry) == {"size", "pieces"} and entry["size"] == sum(length for length, _ in entry["pieces"])


def _is_piece(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and is_count(value[0]) and _is_hash(value[1])


_SHAPE = {
    "format": lambda value: value == FORMAT,
    "step": is_count,
    "name": lambda value: value is None or (is_text(value) and NAME.fullmatch(value) is not None),
    "time": is_time,
    "digest": _is_hash,
    "versions": lambda value: is_object(value) and all(map(is_text, value.values())),
    "files": lambda value: is_object(value) and STATE in value and all(_is_file(*item) for item in value.items()),
    "meta": {
        "epoch?": is_count,
        "metrics_bytes?": is_count,
        "world_size?": is_count,
        "rewinds?": is_count,
        "numbers?": is_object,
        "stopped?": is_text,
    },
}


def find_damage(directory: Path, manifest: Mapping[str, Any]) -> str | None:
    """Read every byte of all files. Return a description of damage according to the manifest's checksums, or None."""
    with ThreadPoolExecutor(_NUM_READERS) as pool:  # hashing takes the time, and releases the GIL
        for file, expected in manifest["files"].items():
            lengths = [length for length, _ in expected["pieces"]]
            checksums = [each for _, each in expected["pieces"]]
            starts = [0, *accumulate(lengths)]
            try:
                with open(directory / file, "rb", buffering=0, opener=open_regular) as opened:
                    found = [*pool.map(hash_range, repeat(opened.fileno()), starts, lengths)]
            except OSError as error:
                return f"{file} cannot be read ({error.strerror})"
            for k, (checksum, right) in enumerate(zip(found, checksums, strict=True)):
                if checksum != right:
                    return f"{file} is damaged (somewhere in bytes {starts[k]} to {starts[k + 1]})"
    return None


def hash_range(file: int, start: int, length: int) -> str:
    """Return the sha256 of a range of bytes of a file, which may end within the range. Any thread may call it."""

    def read() -> Iterator[bytes]:
        at = start
        end = start + length
        while data := os.pread(file, min(end - at, _BUFFER_BYTES), at):
            yield data
            at += len(data)

    return hash_pieces(read())


def find_wrong_size(files: Mapping[str, Any], sizes: Mapping[str, int]) -> str | None:
    """Return a description of wrong sizes (in bytes) of a manifest's files, or None."""
    for file, expected in files.items():
        if file not in sizes:
            return f"{file} is missing"
        if sizes[file] != expected["size"]:
            return f"{file} has {sizes[file]} bytes, not {expected['size']}"
    return None


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hash_bytes(json.dumps(manifest, sort_keys=True, allow_nan=False).encode())
