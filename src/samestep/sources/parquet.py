"""Parquet files through pyarrow. A row group is a shard, because it is decoded as a whole."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.data.source import Shard
from samestep.errors import InvalidValue, needing
from samestep.plan.order import WINDOW_SHARDS
from samestep.sources.shard_files import Kept, Places, list_files, name_files

MAX_OPEN = 64  # files
MAX_ROWS = 1 << 40  # of a row group


class Parquet:
    """Parquet files, as a source of micro-batches: a dict of columns.

    A column of numbers, or of lists of numbers with a fixed size, is an array with one row per sample. A column of
    lists of different lengths is a list of arrays, and any other column is a list of Python objects. Without a
    `collate_fn`, the arrays become tensors; a `collate_fn` gets the dict.

    Each process keeps `WINDOW_SHARDS` decoded row groups in memory, so row groups of 10 to 100 MB are best.

    Args:
        files: the files in their order, or a directory of `*.parquet`.
        columns: names of the columns to read. None: all.

    Attributes:
        shards: the row groups, for the order and the record of a run.
        shard_files: the file of each row group.

    Raises:
        InvalidValue: a file is missing or damaged, or there is no such column.
        Error: pyarrow is not installed.

    Example::

        >>> import pyarrow, pyarrow.parquet
        >>> from samestep.sources import Parquet
        >>> pyarrow.parquet.write_table(pyarrow.table({"x": [0.5, 1.5], "name": ["a", "b"]}), "rows.parquet")
        >>> rows = Parquet("rows.parquet", columns=["x"])
        >>> len(rows), float(rows[1]["x"])
        (2, 1.5)
    """

    def __init__(self, files: str | Path | Iterable[str | Path], columns: Sequence[str] | None = None) -> None:
        self._files = list_files(files, ".parquet")
        self._columns = None if columns is None else [*columns]
        self._groups: list[tuple[int, int]] = []  # file, row group in it
        counts = list[int]()
        self.shards = list[Shard]()
        for number, (file, name) in enumerate(zip(self._files, name_files(self._files), strict=True)):
            opened = _open(file)
            known = opened.schema_arrow.names
            if missing := [column for column in self._columns or () if column not in known]:
                raise InvalidValue(
                    f"{file} has no column {missing[0]}: its columns are {', '.join(known)}", code="SS311"
                )
            for group in range(opened.metadata.num_row_groups):
                about = opened.metadata.row_group(group)
                self._groups.append((number, group))
                if not 0 <= about.num_rows < MAX_ROWS:
                    raise InvalidValue(
                        f"the shard {file} says that it has {about.num_rows} rows: restore it", code="SS310"
                    )
                counts.append(about.num_rows)
                self.shards.append(Shard(f"{name}:{group}", about.num_rows, about.total_byte_size))
        self.shard_files = [self._files[number] for number, _ in self._groups]
        self._places = Places(counts)
        self._open_file = Kept(self._open_number, MAX_OPEN)
        self._read_group = Kept(self._decode_group, WINDOW_SHARDS)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[0] for name, column in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        shards, rows = self._places.find(indices)
        wanted = [(shard, np.flatnonzero(shards == shard)) for shard in np.unique(shards).tolist()]
        groups = [(self._read_group(shard), at) for shard, at in wanted]
        batch: dict[str, Any] = {}
        for name, first in groups[0][0].items():
            if any(isinstance(group.get(name), np.ndarray) != isinstance(first, np.ndarray) for group, _ in groups):
                raise InvalidValue(
                    f"column {name} is of numbers in some of the files only: write them with one schema", code="SS311"
                )
            if isinstance(first, np.ndarray):
                column = np.empty((len(indices), *first.shape[1:]), first.dtype)
                for group, at in groups:
                    column[at] = group[name][rows[at]]
                batch[name] = column
            else:
                values: list[Any] = [None] * len(indices)
                for group, at in groups:
                    for position, row in zip(at.tolist(), rows[at].tolist(), strict=True):
                        values[position] = _read_value(group[name][row])
                batch[name] = values
        return batch

    def _open_number(self, number: int) -> Any:
        return _open(self._files[number])

    def _decode_group(self, shard: int) -> dict[str, Any]:
        import pyarrow

        number, group = self._groups[shard]
        try:
            table = self._open_file(number).read_row_group(group, columns=self._columns, use_threads=False)
        except (pyarrow.ArrowException, OSError) as error:
            why = " ".join(str(error).split())
            where = f"row group {group} of the shard {self._files[number]}"
            raise InvalidValue(f"{where} is damaged ({why}): restore it", code="SS310") from None
        if table.num_rows != (expected := self.shards[shard].num_samples):
            raise InvalidValue(
                f"the shard {self._files[number]} has {table.num_rows} rows, not {expected}: restore it", code="SS310"
            )
        return {name: _convert(table.column(name), name, self._files[number]) for name in table.column_names}


def _open(file: Path) -> Any:
    with needing("Parquet files need pyarrow", "'samestep[parquet]'"):
        import pyarrow
        from pyarrow import parquet
    try:
        return parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        why = " ".join(str(error).split())
        raise InvalidValue(
            f"the shard {file} is truncated, or no Parquet file ({why}): restore it", code="SS310"
        ) from None


def _convert(column: Any, name: str, file: Path) -> Any:
    """Return a column of numbers as an array with one row per sample, and any other column as an Arrow array."""
    from pyarrow import types

    column = column.combine_chunks()
    kind = column.type
    values = column
    size = None
    if types.is_fixed_size_list(kind):
        kind, values, size = kind.value_type, column.flatten(), kind.list_size
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    if not is_number:
        return column
    if column.null_count or values.null_count:
        raise InvalidValue(
            f"column {name} of the shard {file} lacks numbers: add them, or leave it out by columns=", code="SS311"
        )
    array: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array if size is None else array.reshape(-1, size)


def _read_value(value: Any) -> Any:
    from pyarrow import types

    if types.is_list(value.type) or types.is_large_list(value.type):
        inner = value.type.value_type
        if value.is_valid and (types.is_integer(inner) or types.is_floating(inner)):
            return value.values.to_numpy(zero_copy_only=False).copy()  # writable, as torch wants it
    return value.as_py()
