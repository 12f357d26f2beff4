"""Reads GGUF files (v2 and v3): maps them, checks every field before trusting it, hands out views.

Opening costs one walk over the header. Long arrays (a vocabulary) are only stepped over, and decoded when
somebody asks for them; tensor data is never touched.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpsmith.checkpoint.blocks import BY_ID, BlockType
from warpsmith.checkpoint.mapped import MappedFile
from warpsmith.errors import BadFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_KEY_BYTES = 1024
MAX_NAME_BYTES = 64
MAX_DIMS = 4
MAX_COPIED_HEADER = 64 << 20  # five times what the family's largest vocabulary takes

# Metadata value types: number in the file -> numpy type of a scalar. Strings and arrays have rules of their own.
SCALARS: dict[int, np.dtype] = {
    number: np.dtype(code)
    for number, code in {
        0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
    }.items()
}  # fmt: skip
STRING = 8
ARRAY = 9

# Types that exist and that we do not read: only for saying so by name.
_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")

_AGAIN = "Download the file again: it is truncated or corrupt."
_CONVERT = "Convert the model again with a current llama.cpp."
_SUPPORTED = "Use a file whose tensors are " + ", ".join(t.name for t in BY_ID.values()) + "."


@dataclass(frozen=True, eq=False, slots=True)
class GGUFTensor:
    """One tensor of a file. `shape` is row-major: (rows, row length) for a matrix."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    _file: MappedFile
    _start: int

    def raw(self) -> NDArray[np.uint8]:
        """The stored bytes [rows, row bytes], a read-only view of the mapped file."""
        rows, row_bytes = math.prod(self.shape[:-1]), self.type.row_bytes(self.shape[-1])
        return self._file.view(self._start, self._start + rows * row_bytes).reshape(rows, row_bytes)


@dataclass(frozen=True)
class _LazyArray:
    """An array of metadata left in the file until it is asked for."""

    element: int
    count: int
    start: int


class Metadata(Mapping[str, Any]):
    """A file's key-value pairs. Scalars are Python values; arrays are lists, decoded on first use."""

    def __init__(self, header: _Header) -> None:
        self._header = header
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _LazyArray):
            value = self._values[key] = self._header.decode(value, key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values  # the inherited one would decode


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """An open model: all parts of it, where it is split. The mapping lives as long as any view of it."""

    path: Path
    metadata: Metadata
    tensors: dict[str, GGUFTensor]


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file; of a split one, name any part."""
    path = Path(path)
    opened = _open_part(path)
    count = _split_field(opened, "split.count", 1)
    return opened if count == 1 else _open_split(opened, count)


def _open_split(given: GGUFFile, count: int) -> GGUFFile:
    path = given.path
    number = _split_field(given, "split.no")
    name = _SPLIT_NAME.fullmatch(path.name)
    if not name or int(name["part"]) != number + 1 or int(name["count"]) != count:
        raise BadFile(
            f"{path} is part {number + 1} of {count} by its split.no and split.count, but not by its name.",
            f"Give the parts names that end in -{number + 1:05}-of-{count:05}.gguf and so on.",
        )
    parts = []
    for i in range(count):
        part_path = path.with_name(f"{name['stem']}-{i + 1:05}-of-{count:05}.gguf")
        if not part_path.exists():
            raise BadFile(f"{part_path} is missing: {path.name} is part {number + 1} of {count}.", "Fetch every part.")
        part = given if i == number else _open_part(part_path)
        for key, expected in (("split.no", i), ("split.count", count)):
            if (found := _split_field(part, key)) != expected:
                raise BadFile(f"{part_path} has {key} = {found} where {expected} belongs.", _AGAIN)
        parts.append(part)

    tensors: dict[str, GGUFTensor] = {}
    for part in parts:
        if twice := tensors.keys() & part.tensors.keys():
            raise BadFile(f"{part.path} repeats tensor {min(twice)!r} of an earlier part.", _AGAIN)
        tensors.update(part.tensors)
    expected = _split_field(parts[0], "split.tensors.count")
    if len(tensors) != expected:
        raise BadFile(f"{parts[0].path} has split.tensors.count = {expected}, its parts hold {len(tensors)}.", _AGAIN)
    # The first part describes the model; the others repeat no more than their own place.
    return GGUFFile(parts[0].path, parts[0].metadata, tensors)


def _split_field(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < (key == "split.count"):
        raise BadFile(f"{file.path} has no usable {key}.", _AGAIN)
    return value


def _open_part(path: Path) -> GGUFFile:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe could wait for ever
            raise BadFile(f"{path} is not a file.", "Name a .gguf model file.")
        if found.st_size < 24:  # magic, version and two counts; an empty file cannot even be mapped
            raise BadFile(f"{path} has {found.st_size} bytes, too few for a GGUF header.", _AGAIN)
        file = MappedFile(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadFile(f"{path} cannot be opened: {reason}.", "Check the path and its permissions.") from error
    header = _Header(file)
    n_tensors, n_pairs = header.counts()
    metadata = header.metadata(n_pairs)
    tensors = header.tensors(n_tensors, _alignment(path, metadata))
    if header.position <= MAX_COPIED_HEADER:  # what is decoded later then no longer needs the file
        header.mapped = file.mapped[: header.position]
    return GGUFFile(path, metadata, tensors)


def _alignment(path: Path, metadata: Metadata) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or not 8 <= value <= 65536 or value & (value - 1):
        raise BadFile(f"{path} has a general.alignment that is not a power of two from 8 to 65536.", _AGAIN)
    return value


class _Header:
    """A cursor over a mapped file's header. Nothing is read, stepped over or allocated beyond the file's end."""

    def __init__(self, file: MappedFile) -> None:
        self.file, self.path = file, file.path
        self.mapped: mmap.mmap | bytes = file.mapped
        self.size = len(file)
        self.position = 0

    def counts(self) -> tuple[int, int]:
        """Magic and version checked; how many tensors and key-value pairs follow."""
        if (magic := self.take(4, "the magic")) != MAGIC:
            raise BadFile(f"{self.path} is not a GGUF file: it starts with {magic!r}.", "Use a .gguf model file.")
        version = self.integer(4, "the version")
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise BadFile(f"{self.path} is a big-endian GGUF file.", "Use the little-endian file of this model.")
            raise BadFile(f"{self.path} has GGUF version {version}; versions 2 and 3 are read.", _CONVERT)
        # The shortest tensor: a one-letter name and one dimension. The shortest pair: a one-letter key and a byte.
        n_tensors = self.count("the tensor count", 8 + 1 + 4 + 8 + 4 + 8)
        n_pairs = self.count("the metadata count", 8 + 1 + 4 + 1)
        return n_tensors, n_pairs

    def metadata(self, n_pairs: int) -> Metadata:
        metadata = Metadata(self)
        for i in range(n_pairs):
            key = self.string(f"metadata key {i}", MAX_KEY_BYTES)
            if key in metadata:
                raise BadFile(f"{self.path} has the metadata key {key!r} twice.", _AGAIN)
            metadata._values[key] = self.value(key)
        return metadata

    def value(self, key: str) -> Any:
        kind = self.integer(4, f"the type of {key!r}")
        if kind == STRING:
            return self.string(f"the value of {key!r}")
        if kind in SCALARS:
            dtype = SCALARS[kind]
            return np.frombuffer(self.take(dtype.itemsize, f"the value of {key!r}"), dtype)[0].item()
        if kind != ARRAY:
            raise BadFile(f"{self.path} has a value of unknown type {kind} under {key!r}.", _AGAIN)
        element = self.integer(4, f"the element type of {key!r}")
        if element == ARRAY:
            raise BadFile(f"{self.path} has an array of arrays under {key!r}, which no model needs.", _CONVERT)
        if element != STRING and element not in SCALARS:
            raise BadFile(f"{self.path} has an array of unknown type {element} under {key!r}.", _AGAIN)
        count = self.count(f"the length of {key!r}", 8 if element == STRING else SCALARS[element].itemsize)
        array = _LazyArray(element, count, self.position)
        if element == STRING:
            self.skip_strings(count, key)
        else:
            self.position += count * SCALARS[element].itemsize
        return array

    def tensors(self, n_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
        """Tensor descriptions, and then, once it is known where the data begins, the tensors."""
        described: dict[str, tuple[BlockType, tuple[int, ...], int, int]] = {}
        for i in range(n_tensors):
            name = self.string(f"the name of tensor {i}", MAX_NAME_BYTES)
            if name in described:
                raise BadFile(f"{self.path} has the tensor {name!r} twice.", _AGAIN)
            described[name] = self.describe(name, alignment)

        base = -(-self.position // alignment) * alignment
        tensors = {}
        for name, (block_type, shape, offset, nbytes) in described.items():
            start = base + offset
            if start + nbytes > self.size:
                raise BadFile(
                    f"{self.path} ends at byte {self.size}, before the end of tensor {name!r} at {start + nbytes}.",
                    _AGAIN,
                )
            tensors[name] = GGUFTensor(name, block_type, shape, self.file, start)

        end, before = 0, ""
        for name, (_, _, offset, nbytes) in sorted(described.items(), key=lambda item: item[1][2]):
            if offset < end:
                raise BadFile(f"{self.path} has tensors {before!r} and {name!r} on the same bytes.", _AGAIN)
            end, before = offset + nbytes, name
        return tensors

    def describe(self, name: str, alignment: int) -> tuple[BlockType, tuple[int, ...], int, int]:
        """Type, shape, offset and size of the tensor `name`, as far as they make sense by themselves."""
        n_dims = self.integer(4, f"the dimension count of tensor {name!r}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise BadFile(f"{self.path} gives tensor {name!r} {n_dims} dimensions, not 1 to {MAX_DIMS}.", _AGAIN)
        shape = tuple(self.integer(8, f"the shape of tensor {name!r}") for _ in range(n_dims))[::-1]
        type_id = self.integer(4, f"the type of tensor {name!r}")
        if type_id not in BY_ID:
            type_name = _OTHER_TYPES.get(type_id, f"unknown type {type_id}")
            raise BadFile(f"{self.path} stores tensor {name!r} as {type_name}, which is not read.", _SUPPORTED)
        block_type = BY_ID[type_id]
        offset = self.integer(8, f"the offset of tensor {name!r}")

        # Python integers do not overflow; a product too large for the file is caught here.
        if 0 in shape or math.prod(shape) // block_type.elems * block_type.bytes > self.size:
            raise BadFile(f"{self.path} gives tensor {name!r} the shape {shape}, which does not fit the file.", _AGAIN)
        if shape[-1] % block_type.elems:
            raise BadFile(
                f"{self.path} stores tensor {name!r} as {block_type.name} in rows of {shape[-1]}, "
                f"not a multiple of {block_type.elems}.",
                _AGAIN,
            )
        if offset % alignment:
            raise BadFile(f"{self.path} puts tensor {name!r} at offset {offset}, not aligned to {alignment}.", _AGAIN)
        return block_type, shape, offset, math.prod(shape) // block_type.elems * block_type.bytes

    def take(self, n: int, field: str) -> bytes:
        if n > self.size - self.position:
            raise BadFile(
                f"{self.path} ends inside {field} ({n} bytes at byte {self.position} of {self.size}).", _AGAIN
            )
        self.position += n
        return self.mapped[self.position - n : self.position]

    def integer(self, n_bytes: int, field: str) -> int:
        # Read unsigned: a negative number becomes a huge one, which no check lets pass.
        return int.from_bytes(self.take(n_bytes, field), "little")

    def count(self, field: str, item_bytes: int) -> int:
        """A number of things to follow, each of at least `item_bytes`: believed only if they fit in the file."""
        count = self.integer(8, field)
        if count * item_bytes > self.size - self.position:
            raise BadFile(f"{self.path} has {count} as {field}, more than the rest of the file can hold.", _AGAIN)
        return count

    def string(self, field: str, max_bytes: int | None = None) -> str:
        length = self.integer(8, f"the length of {field}")
        if max_bytes is not None and not 1 <= length <= max_bytes:
            raise BadFile(f"{self.path} has {length} bytes as {field}; 1 to {max_bytes} are allowed.", _AGAIN)
        try:
            return self.take(length, field).decode()
        except UnicodeDecodeError as error:
            raise BadFile(f"{self.path} holds bytes that are not UTF-8 as {field}.", _AGAIN) from error

    def skip_strings(self, count: int, key: str) -> None:
        """Step over `count` strings. The hot loop of opening a file: a vocabulary has half a million of them."""
        read_length = struct.Struct("<Q").unpack_from
        mapped, last, position = self.mapped, self.size - 8, self.position
        for i in range(count):
            if position > last:
                raise BadFile(f"{self.path} ends inside element {i - 1} of {key!r}, of {count}.", _AGAIN)
            position += read_length(mapped, position)[0] + 8
        if position > self.size:
            raise BadFile(f"{self.path} ends inside element {count - 1} of {key!r}, of {count}.", _AGAIN)
        self.position = position

    def decode(self, array: _LazyArray, key: str) -> list[Any]:
        """The elements of an array whose extent has been checked."""
        if self.mapped is self.file.mapped:
            self.file.check()
        if array.element != STRING:
            return np.frombuffer(self.mapped, SCALARS[array.element], array.count, array.start).tolist()
        read_length = struct.Struct("<Q").unpack_from
        mapped, end = self.mapped, array.start
        strings = []
        try:
            for _ in range(array.count):
                start = end + 8
                end = start + read_length(mapped, end)[0]
                strings.append(mapped[start:end].decode())
        except UnicodeDecodeError as error:
            raise BadFile(
                f"{self.path} holds bytes that are not UTF-8 as element {len(strings)} of {key!r}.", _AGAIN
            ) from error
        return strings
