"""Parquet: a row for each step, read and written one row group at a time.

A column of numbers is a column of them. An array of bytes (uint8, int8) is a fixed-size binary, which Parquet copies
where it would encode each element of a list as four bytes; other arrays are fixed-size lists. The file's metadata have
dtypes and shapes under `innet_drl`. A `Ragged` is a column of lists, and of bytes one of binaries. Other files may have
lists, binaries and tensors of any of Arrow's kinds.

Each page has a checksum, which a reader compares. It leaves out headers and the footer, as Parquet's format does.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Container, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from innet_drl.datasets import rows
from innet_drl.errors import SchemaError
from innet_drl.ragged import Ragged

_KEY = b"innet_drl"
_GROUP_ROWS = 65_536
_GROUP_BYTES = 16 << 20
"""Unpacked bytes of a row group, and of what is held in memory."""
_READ_ROWS = 4096


def write(path: str, blocks: Iterator[rows.Block]) -> None:
    """Writes the rows, at least one block, and replaces the file once they are complete."""
    part = Path(f"{path}.part")
    first = next(blocks)
    row_bytes = sum(map(_bytes, first.values())) // len(first["final"])
    most = max(1, min(_GROUP_ROWS, _GROUP_BYTES // max(1, row_bytes)))
    held: list[rows.Block] = []
    count = 0
    try:
        with part.open("wb") as file, _writer(file, first) as writer:
            for block in itertools.chain([first], blocks):
                for piece in rows.pieces(block, most):
                    held.append(piece)
                    count += len(piece["final"])
                    if count >= most:
                        _write_group(writer, held)
                        count = 0
            if held:
                _write_group(writer, held)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _writer(file: IO[bytes], block: rows.Block) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        file,
        _schema(block),
        compression="zstd",
        compression_level=1,
        use_dictionary=[name for name, array in block.items() if rows.kind_of(array)[1] == ()],
        write_page_checksum=True,
    )


def _write_group(writer: pq.ParquetWriter, held: list[rows.Block]) -> None:
    arrays = [_to_arrow(rows.joined([block[name] for block in held])) for name in held[0]]
    held.clear()
    writer.write_table(pa.Table.from_arrays(arrays, schema=writer.schema))


def read(path: str, wanted: Container[str] | None) -> Iterator[rows.Block]:
    """The rows of a file, some thousand at a time. `wanted` has the columns to read, `None` all."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        known: dict[str, Any] = json.loads((file.schema_arrow.metadata or {}).get(_KEY, b"{}"))
        groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
        # Of other files the size before compression, which dictionaries may have made smaller.
        encoded = sum(group.total_byte_size for group in groups) // max(1, file.metadata.num_rows)
        fixed = [one for one in known.values() if one["shape"][:1] != [None]]
        decoded = sum(np.dtype(one["dtype"]).itemsize * math.prod(one["shape"]) for one in fixed)
        most = max(1, min(_READ_ROWS, _GROUP_BYTES // max(1, encoded, decoded)))
        names: list[str] = file.schema_arrow.names
        read = [name for name in names if wanted is None or name in wanted]
        unread = dict.fromkeys(names, rows.UNREAD)
        begin = 0
        # One group at a time: a reader of several holds on to those that it has read.
        for number, group in enumerate(groups):
            count = 0
            for batch in file.iter_batches(batch_size=most, row_groups=[number], columns=read):
                yield unread | {
                    name: _to_numpy(path, name, begin + count, batch.column(name), known.get(name)) for name in read
                }
                count += len(batch)
            if count != group.num_rows:
                raise ValueError(f"row group {number} has {count} of its {group.num_rows} rows")
            begin += count
        if begin != file.metadata.num_rows:
            raise ValueError(f"it has {begin} of its {file.metadata.num_rows} rows")


def _schema(block: rows.Block) -> pa.Schema:
    fields = [pa.field(name, _to_arrow(array[:1]).type, nullable=False) for name, array in block.items()]
    kinds = {name: rows.kind_of(array) for name, array in block.items()}
    known = {name: {"dtype": dtype.name, "shape": shape} for name, (dtype, shape) in kinds.items()}
    return pa.schema(fields, metadata={_KEY: json.dumps(known).encode()})


def _bytes(array: Any) -> int:
    return _bytes(array.values) + array.offsets.nbytes if isinstance(array, Ragged) else int(array.nbytes)


def _to_arrow(array: Any) -> pa.Array:
    if isinstance(array, Ragged):
        values = np.ascontiguousarray(array.values)
        size = math.prod(values.shape[1:])
        if values.dtype in (np.uint8, np.int8):
            offsets = pa.py_buffer(array.offsets * size)
            return pa.Array.from_buffers(pa.large_binary(), len(array), [None, offsets, pa.py_buffer(values)])
        numbers = pa.array(values.reshape(-1))
        lists = numbers if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(numbers, size)
        return pa.LargeListArray.from_arrays(pa.array(array.offsets), lists)
    array = np.ascontiguousarray(array)
    if array.ndim == 1:
        return pa.array(array)
    size = array[0].size
    if array.dtype in (np.uint8, np.int8):
        return pa.Array.from_buffers(pa.binary(size), len(array), [None, pa.py_buffer(array)])
    return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), size)


def _to_numpy(path: str, name: str, begin: int, column: pa.Array, known: dict[str, Any] | None) -> Any:
    """The values of a column, whose first row is row `begin` of the file."""
    count = len(column)
    shape: list[int] = []

    def refuse_nulls() -> None:
        if column.null_count:
            row = begin + column.is_null().index(True).as_py() // math.prod(shape)
            raise SchemaError(f"{path}: column {name!r} has a null in row {row}")

    refuse_nulls()
    tensor = column.type if isinstance(column.type, pa.FixedShapeTensorType) else None
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    kind = column.type
    if known is not None and known["shape"][:1] == [None]:
        return _to_ragged(column, np.dtype(known["dtype"]), known["shape"][1:])
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.asarray(column.to_pylist())
    if pa.types.is_fixed_size_binary(kind):
        size = kind.byte_width
        start = column.offset * size
        shape.append(size)
        values = np.frombuffer(column.buffers()[1], np.uint8)[start : start + count * size]
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        shape.append(_length(name, pc.binary_length(column)))
        values = np.frombuffer(b"".join(column.to_pylist()), np.uint8)
    else:
        if _is_list(kind) and not _equal_lengths(column):
            inner = kind.value_type
            if _is_list(inner) and not pa.types.is_fixed_size_list(inner):
                raise ValueError(f"the values of column {name!r} have lists of several lengths in lists")
            sizes = [inner.list_size] if _is_list(inner) else []
            numbers = inner.value_type if _is_list(inner) else inner
            return _to_ragged(column, np.dtype(numbers.to_pandas_dtype()), sizes)
        while _is_list(column.type):
            shape.append(_length(name, pc.list_value_length(column)))
            column = column.flatten()
            refuse_nulls()
        values = column.to_numpy(zero_copy_only=False)
    order: list[int] = []
    if tensor is not None:
        shape, order = tensor.shape, tensor.permutation or []
    # Not where a column was edited: it is read as it is.
    elif known is not None and shape == [math.prod(known["shape"])]:
        shape = known["shape"]
        if known["dtype"] == "int8" and values.dtype == np.uint8:
            # Binaries have no sign.
            values = values.view(np.int8)
    shaped: NDArray[Any] = values.reshape(count, *shape)
    return shaped.transpose(0, *[1 + axis for axis in order]) if order else shaped


def _to_ragged(column: pa.Array, dtype: np.dtype[Any], inner: list[int]) -> Ragged:
    binary = pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)
    if binary:
        lengths = pc.binary_length(column).to_numpy(zero_copy_only=False)
        values = np.frombuffer(b"".join(column.to_pylist()), np.uint8).view(dtype)
        lengths = lengths // (math.prod(inner) * dtype.itemsize)
    else:
        lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
        column = column.flatten()
        if inner:
            column = column.flatten()
        if column.null_count:
            raise ValueError("a list has a null")
        values = column.to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return Ragged(values.reshape(-1, *inner), offsets)


def _length(name: str, lengths: pa.Array) -> int:
    """The elements that each value has."""
    least, most = pc.min_max(lengths).as_py().values()
    if least != most:
        raise ValueError(f"the values of column {name!r} have {least} to {most} elements")
    return least or 0


def _equal_lengths(column: pa.Array) -> bool:
    least, most = pc.min_max(pc.list_value_length(column)).as_py().values()
    return bool(least == most)


def _is_list(kind: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(of_kind(kind) for of_kind in kinds)
