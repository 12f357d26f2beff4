"""Writes GGUF v3 files, one tensor after the other, in bounded memory.

    with GGUFWriter(path, metadata) as writer:
        writer.declare("token_embd.weight", TYPES["Q4_K"], (vocabulary, width))
        ...
        writer.write("token_embd.weight", chunks_of_bytes)

The file appears under its name when it is complete, and not before.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from warpsmith.checkpoint.atomic import whole_file
from warpsmith.checkpoint.blocks import TYPES, BlockType
from warpsmith.checkpoint.gguf import (
    ARRAY,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_DIMS,
    MAX_KEY_BYTES,
    MAX_NAME_BYTES,
    SCALARS,
    STRING,
)
from warpsmith.checkpoint.quantize import quantize

# Type names for `Typed`, by what the file calls them.
_KINDS = {
    "u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": STRING,
    "u64": 10, "i64": 11, "f64": 12,
}  # fmt: skip

# Weights quantised at a time by `write_gguf`.
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Typed:
    """A metadata value, or a list of them, with its type spelled out: Typed("u16", 3)."""

    kind: str
    value: Any


class GGUFWriter:
    """Declare every tensor, then write each in the same order. Metadata values are typed by what they are:
    u32 where an int fits, f32 for floats, i32 for the ints of a list; wrap in `Typed` for anything else."""

    def __init__(
        self, path: str | os.PathLike[str], metadata: Mapping[str, Any], alignment: int = DEFAULT_ALIGNMENT
    ) -> None:
        if alignment < 8 or alignment & (alignment - 1):
            raise ValueError(f"the alignment {alignment} is not a power of two from 8")
        if "general.alignment" in metadata:
            raise ValueError("general.alignment is written from the argument `alignment`")
        self._path = Path(path)
        self._alignment = alignment
        # Readers assume the default, and some refuse to be told it.
        told = {} if alignment == DEFAULT_ALIGNMENT else {"general.alignment": alignment}
        self._pairs = [_string(key, MAX_KEY_BYTES) + _value(key, value) for key, value in {**metadata, **told}.items()]
        self._sizes: dict[str, int] = {}
        self._infos: list[bytes] = []
        self._offset = 0
        self._written = 0
        self._file: BinaryIO | None = None
        self._open_file = ExitStack()

    def declare(self, name: str, block_type: BlockType, shape: tuple[int, ...]) -> None:
        """Announce a tensor of row-major `shape`."""
        if self._file:
            raise ValueError(f"tensor {name!r} is declared after data was written")
        if name in self._sizes:
            raise ValueError(f"tensor {name!r} is declared twice")
        if not 1 <= len(shape) <= MAX_DIMS or min(shape) < 1:
            raise ValueError(f"tensor {name!r} cannot have the shape {shape}")
        size = math.prod(shape[:-1]) * block_type.row_bytes(shape[-1])
        # llama.cpp keeps names in 64 bytes, the last of them a zero.
        info = _string(name, MAX_NAME_BYTES - 1) + struct.pack("<I", len(shape))
        info += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", block_type.ggml_id, self._offset)
        self._infos.append(info)
        self._sizes[name] = size
        self._offset += _padded(size, self._alignment)

    def write(self, name: str, data: NDArray[np.uint8] | Iterable[NDArray[np.uint8]]) -> None:
        """The stored bytes of the next tensor, whole or in chunks."""
        expected = list(self._sizes)[self._written] if self._written < len(self._sizes) else None
        if name != expected:
            raise ValueError(f"tensor {name!r} is written where {expected!r} was declared")
        file = self._open()
        size = 0
        for chunk in [data] if isinstance(data, np.ndarray) else data:
            if chunk.dtype != np.uint8:
                raise ValueError(f"tensor {name!r} is given as {chunk.dtype}, not as stored bytes (uint8)")
            size += file.write(np.ascontiguousarray(chunk).data)
        if size != self._sizes[name]:
            raise ValueError(f"tensor {name!r} was declared with {self._sizes[name]} bytes and written with {size}")
        file.write(bytes(_padded(size, self._alignment) - size))
        self._written += 1

    def __enter__(self) -> GGUFWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._open_file:
            if error is not None:
                raise error  # through the open file, which then does not get its name
            if self._written < len(self._sizes):
                missing = list(self._sizes)[self._written]
                raise ValueError(f"tensor {missing!r} was declared and not written")
            self._open()

    def _open(self) -> BinaryIO:
        """The file, past its header; it gets its name when the writer is left."""
        if self._file is None:
            header = MAGIC + struct.pack("<IQQ", 3, len(self._infos), len(self._pairs))
            header += b"".join(self._pairs) + b"".join(self._infos)
            self._file = self._open_file.enter_context(whole_file(self._path))
            self._file.write(header + bytes(_padded(len(header), self._alignment) - len(header)))
        return self._file


def write_gguf(
    path: str | os.PathLike[str], metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, NDArray[np.float32]]]
) -> None:
    """Write float32 tensors, each quantised to the type named beside it."""
    with GGUFWriter(path, metadata) as writer:
        for name, (type_name, x) in tensors.items():
            writer.declare(name, TYPES[type_name], x.shape)
        for name, (type_name, x) in tensors.items():
            rows = x.reshape(-1, x.shape[-1])
            step = max(1, _CHUNK // x.shape[-1])
            writer.write(name, (quantize(TYPES[type_name], rows[i : i + step]) for i in range(0, len(rows), step)))


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _string(text: str, max_bytes: int | None = None) -> bytes:
    encoded = text.encode()
    if max_bytes is not None and not 1 <= len(encoded) <= max_bytes:
        raise ValueError(f"the name {text[:80]!r} has {len(encoded)} bytes; 1 to {max_bytes} are allowed")
    return struct.pack("<Q", len(encoded)) + encoded


def _value(key: str, value: Any) -> bytes:
    """A metadata value as the file stores it, its type in front."""
    declared = value.kind if isinstance(value, Typed) else None
    value = value.value if isinstance(value, Typed) else value
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        kind = declared or _scalar_kind(key, value)
        return struct.pack("<I", _KINDS[kind]) + _elements(key, kind, [value])
    kind = declared or _element_kind(key, value)
    return struct.pack("<IIQ", ARRAY, _KINDS[kind], len(value)) + _elements(key, kind, value)


def _scalar_kind(key: str, value: Any) -> str:
    match value:
        case bool():
            return "bool"
        case str():
            return "str"
        case float():
            return "f32"
        case int():
            return next((kind for kind in ("u32", "i32", "i64") if _fits(kind, value, value)), "u64")
        case _:
            raise TypeError(f"the value of {key!r} is a {type(value).__name__}, which GGUF cannot hold")


def _element_kind(key: str, values: list[Any] | tuple[Any, ...]) -> str:
    if not values:
        raise ValueError(f"the list {key!r} is empty: say what its type is with Typed")
    if len({type(value) for value in values}) > 1:
        raise TypeError(f"the list {key!r} mixes types")
    if type(values[0]) is not int:
        return _scalar_kind(key, values[0])
    low, high = min(values), max(values)
    return next((kind for kind in ("i32", "u32", "i64") if _fits(kind, low, high)), "u64")


def _fits(kind: str, low: int, high: int) -> bool:
    limits = np.iinfo(SCALARS[_KINDS[kind]])
    return int(limits.min) <= low and high <= int(limits.max)


def _elements(key: str, kind: str, values: list[Any] | tuple[Any, ...]) -> bytes:
    if kind == "str":
        return b"".join(map(_string, values))
    dtype = SCALARS[_KINDS[kind]]
    if dtype.kind in "ui" and values and not _fits(kind, min(values), max(values)):
        raise ValueError(f"the value of {key!r} does not fit in {kind}")
    return np.array(values, dtype).tobytes()
