"""Count the values of Parquet pages from their headers, before pyarrow decodes them.

A few bytes can stand for any number of values. The footer also says how many values a column has,
but pyarrow decodes as many as the headers of the pages say. It has no function that returns these
headers, which are structs in Thrift's compact protocol.
"""

import os
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from pyarrow.parquet import ColumnChunkMetaData

# Numbers of fields, in parquet.thrift. Data pages of version 1 and 2 have different headers.
COMPRESSED_SIZE = 3
DATA_PAGE_HEADERS = (5, 8)
NUM_VALUES = 1
MAX_DEPTH = 8


def count_values(file: BinaryIO, column: "ColumnChunkMetaData") -> tuple[int, int]:
    """Return how many values the data pages of a column in a row group have, and their compressed
    bytes.

    Raises:
        ValueError: the pages are not as the footer says.
    """
    # Some writers give 0 for no dictionary.
    position = min(
        column.dictionary_page_offset or column.data_page_offset, column.data_page_offset
    )
    end = position + column.total_compressed_size
    values = size = 0
    while position < end:
        file.seek(position)
        header = _read_struct(file)
        counts = [header[n].get(NUM_VALUES) for n in DATA_PAGE_HEADERS if n in header]
        page_bytes = header.get(COMPRESSED_SIZE)
        if not all(isinstance(number, int) and number >= 0 for number in [page_bytes, *counts]):
            raise ValueError("a page header has no size or no number of values")
        values += sum(counts)
        size += page_bytes
        position = file.tell() + page_bytes
    return values, size


def _read_struct(file: BinaryIO, depth: int = 0) -> dict[int, Any]:
    """Return the fields of a struct by their numbers. Texts are skipped."""
    if depth > MAX_DEPTH:
        raise ValueError("a page header is nested too deeply")
    fields = {}
    number = 0
    while head := _byte(file):
        # The upper half is the distance to the last number; 0 if the number follows.
        number = number + (head >> 4) if head >> 4 else _integer(file)
        match head & 15:
            case 1 | 2:  # the value of a Boolean is its type
                fields[number] = head & 15 == 1
            case 4 | 5 | 6:
                fields[number] = _integer(file)
            case 8:
                file.seek(_varint(file), os.SEEK_CUR)
            case 12:
                fields[number] = _read_struct(file, depth + 1)
            case kind:
                raise ValueError(f"a page header has a field of type {kind}")
    return fields


def _integer(file: BinaryIO) -> int:
    """Return a signed integer. The lowest bit is its sign."""
    value = _varint(file)
    return value >> 1 ^ -(value & 1)


def _varint(file: BinaryIO) -> int:
    """Return an integer of at most 64 bits, 7 bits a byte, the lowest first."""
    value = 0
    for shift in range(0, 70, 7):
        byte = _byte(file)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise ValueError("a page header has a number of over 64 bits")


def _byte(file: BinaryIO) -> int:
    if not (byte := file.read(1)):
        raise ValueError("a page header is cut")
    return byte[0]
