"""Truncated, corrupt and hostile GGUF files: one clear error, no other exception, no allocation to speak of."""

from __future__ import annotations

import re
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpsmith.checkpoint.gguf import GGUFFile, open_gguf
from warpsmith.checkpoint.gguf_writer import Typed, write_gguf
from warpsmith.errors import BadFile

U8, U32, STRING, ARRAY = 0, 4, 8, 9
F32, Q4_0, Q4_K, IQ2_XXS, NVFP4 = 0, 2, 12, 16, 40
HUGE = [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: bytes, length: int | None = None) -> bytes:
    return u64(len(value) if length is None else length) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def tensor(
    name: bytes = b"w", ne: tuple[int, ...] = (32, 2), kind: int = F32, offset: int = 0, n_dims: int | None = None
) -> bytes:
    return text(name) + u32(len(ne) if n_dims is None else n_dims) + b"".join(map(u64, ne)) + u32(kind) + u64(offset)


def build(
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = bytes(4096),
    start: bytes = b"GGUF" + u32(3),
    n_tensors: int | None = None,
    n_pairs: int | None = None,
) -> bytes:
    counts = (len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_pairs is None else n_pairs)
    header = start + b"".join(map(u64, counts)) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


def use(file: GGUFFile) -> None:
    """Touch everything a loader would."""
    assert len([file.metadata[key] for key in file.metadata]) == len(file.metadata)
    for item in file.tensors.values():
        assert int(item.raw().sum(dtype=np.int64)) >= 0


def attempt(path: Path, content: bytes) -> BadFile | None:
    """Open and use a file: the error, or None where there was none. Any other exception is a failed test."""
    # A fresh inode, not a rewrite: earlier mappings of the old one must stay what they were.
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    error = None
    try:
        use(open_gguf(path))
    except BadFile as raised:
        error = raised
    if error is not None:
        assert str(path) in error.problem
        assert error.problem.endswith(".")
        assert "\n" not in error.problem
        assert error.fix
    return error


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file with a field of every kind."""
    path = tmp_path_factory.mktemp("sound") / "sound.gguf"
    metadata = {
        "general.architecture": "qwen35",
        "a": 5,
        "b": Typed("u8", 1),
        "c": Typed("f64", 0.5),
        "d": True,
        "tokens": ["a", "", "Ġthe"],
        "ids": [1, 2, 3],
        "split.count": Typed("u16", 1),
    }
    x = np.arange(64, dtype=np.float32).reshape(2, 32)
    write_gguf(path, metadata, {"one": ("F32", x), "two": ("Q8_0", x), "three": ("F32", x[0, :5])})
    return path.read_bytes()


def header_end(content: bytes) -> int:
    """Where the description of the last tensor, "three", ends: after one dimension, type and offset."""
    return content.index(text(b"three")) + len(text(b"three")) + 4 + 8 + 4 + 8


def test_the_sound_file_opens(tmp_path: Path, sound: bytes) -> None:
    assert attempt(tmp_path / "x.gguf", sound) is None
    assert attempt(tmp_path / "x.gguf", build()) is None


def test_every_truncation_is_an_error(tmp_path: Path, sound: bytes) -> None:
    data_end = len(sound) - (-20 % 32)  # the last tensor's five floats are padded, and may come without
    for length in range(len(sound)):
        error = attempt(tmp_path / "x.gguf", sound[:length])
        assert (error is None) == (length >= data_end), length


def test_every_flipped_bit_of_the_header(tmp_path: Path, sound: bytes) -> None:
    outcomes = []
    for position in range(header_end(sound)):
        for bit in range(8):
            content = bytearray(sound)
            content[position] ^= 1 << bit
            outcomes.append(attempt(tmp_path / "x.gguf", bytes(content)))
    # Letters of names and values may flip unnoticed; a good part of the rest is structure.
    assert sum(error is not None for error in outcomes) > len(outcomes) // 3


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_hostile_edits(tmp_path_factory: pytest.TempPathFactory, sound: bytes, data: st.DataObject) -> None:
    content = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, header_end(sound)))
        patch = data.draw(
            st.sampled_from(HUGE).map(u64)
            | st.integers(0, 2**64 - 1).map(u64)
            | st.integers(0, 50).map(u32)
            | st.binary(min_size=1, max_size=12)
        )
        if data.draw(st.booleans()):
            content[position : position + len(patch)] = patch
        else:
            content[position:position] = patch
    attempt(tmp_path_factory.mktemp("edit") / "x.gguf", bytes(content[: data.draw(st.integers(0, len(content)))]))
    attempt(tmp_path_factory.mktemp("edit") / "x.gguf", bytes(content))


@settings(max_examples=100, deadline=None)
@given(rest=st.binary(max_size=300), n_tensors=st.integers(0, 3), n_pairs=st.integers(0, 3))
def test_noise_after_a_sound_start(
    tmp_path_factory: pytest.TempPathFactory, rest: bytes, n_tensors: int, n_pairs: int
) -> None:
    start = b"GGUF" + u32(3) + u64(n_tensors) + u64(n_pairs)
    attempt(tmp_path_factory.mktemp("noise") / "x.gguf", start + rest)


def array(key: bytes, element: int, count: int, value: bytes = b"") -> bytes:
    return pair(key, ARRAY, u32(element) + u64(count) + value)


nested = b"".join([u32(ARRAY) + u64(1)] * 2000) + u32(U8) + u64(1) + b"\x01"
alignment = [pair(b"general.alignment", U32, u32(value)) for value in (0, 1, 24, 1 << 17, 2**32 - 1)]

CASES = {
    "empty file": (b"", "0 bytes"),
    "only magic": (b"GGUF", "4 bytes"),
    "zip": (b"PK\x03\x04" + bytes(100), r"not a GGUF file: it starts with b'PK"),
    "version 1": (build(start=b"GGUF" + u32(1)), "version 1"),
    "version 4": (build(start=b"GGUF" + u32(4)), "version 4"),
    "big endian": (build(start=b"GGUF" + struct.pack(">I", 3)), "big-endian"),
    **{f"{n} tensors": (build(n_tensors=n), f"{n} as the tensor count") for n in HUGE},
    **{f"{n} pairs": (build(n_pairs=n), f"{n} as the metadata count") for n in HUGE},
    "one tensor too many": (build(n_tensors=130), "130 as the tensor count"),
    **{f"key of {n}": (build((text(b"k", n),)), f"{n} bytes as metadata key 0") for n in [0, 1025, *HUGE]},
    "key not UTF-8": (build((pair(b"\xff\xfe", U8, b"\x01"),)), "not UTF-8 as metadata key 0"),
    "key twice": (build((pair(b"k", U8, b"\x01"), pair(b"k", U8, b"\x02"))), "'k' twice"),
    "unknown value type": (build((pair(b"k", 13, bytes(8)),)), "unknown type 13 under 'k'"),
    **{f"string of {n}": (build((pair(b"k", STRING, u64(n)),)), "ends inside the value of 'k'") for n in HUGE},
    "string not UTF-8": (build((pair(b"k", STRING, text(b"\xc3")),)), "not UTF-8 as the value of 'k'"),
    "unknown element type": (build((array(b"k", 99, 1),)), "array of unknown type 99 under 'k'"),
    "array of arrays": (build((array(b"k", ARRAY, 1, u32(U8) + u64(1) + b"\x01"),)), "array of arrays under 'k'"),
    "deep nesting": (build((pair(b"k", ARRAY, nested),)), "array of arrays under 'k'"),
    **{f"{n} bytes": (build((array(b"k", U8, n),)), f"{n} as the length of 'k'") for n in [5000, *HUGE]},
    **{f"{n} strings": (build((array(b"k", STRING, n),)), f"{n} as the length of 'k'") for n in [600, *HUGE]},
    **{
        f"array's string of {n}": (build((array(b"k", STRING, 2, u64(1) + b"x" + u64(n)),)), "inside element 1 of 'k'")
        for n in HUGE
    },
    **{
        f"array's first string of {n}": (build((array(b"k", STRING, 2, u64(n)),)), "inside element 0 of 'k'")
        for n in HUGE
    },
    "element not UTF-8": (build((array(b"k", STRING, 2, text(b"x") + text(b"\xff")),)), "element 1 of 'k'"),
    **{f"alignment {i}": (build((bad,)), "general.alignment") for i, bad in enumerate(alignment)},
    "alignment is text": (build((pair(b"general.alignment", STRING, text(b"32")),)), "general.alignment"),
    "alignment is a list": (build((array(b"general.alignment", U8, 1, b"\x20"),)), "general.alignment"),
    "split in 65535": (
        build((pair(b"split.count", U32, u32(65535)), pair(b"split.no", U32, u32(0)))),
        "part 1 of 65535",
    ),
    **{f"name of {n}": (build(tensors=(text(b"w", n) + bytes(50),)), "the name of tensor 0") for n in [0, 65, *HUGE]},
    "name not UTF-8": (build(tensors=(tensor(b"\xff"),)), "not UTF-8 as the name of tensor 0"),
    "name twice": (build(tensors=(tensor(), tensor(offset=256))), "tensor 'w' twice"),
    **{f"{n} dims": (build(tensors=(tensor(n_dims=n),)), f"'w' {n} dimensions") for n in (0, 5, 2**31, 2**32 - 1)},
    **{f"row of {n}": (build(tensors=(tensor(ne=(n, 1)),)), "the shape") for n in [0, *HUGE]},
    **{f"{n} rows": (build(tensors=(tensor(ne=(1, n)),)), "the shape") for n in [0, *HUGE]},
    "product wraps to 0": (build(tensors=(tensor(ne=(2**32, 2**32)),)), "the shape"),
    "product wraps to 32": (build(tensors=(tensor(ne=(2**59 + 1, 32)),)), "the shape"),
    "four huge dims": (build(tensors=(tensor(ne=(2**64 - 1,) * 4),)), "the shape"),
    "half a block": (build(tensors=(tensor(ne=(48, 2), kind=Q4_0),)), r"'w' as Q4_0 in rows of 48"),
    "row of a K type": (build(tensors=(tensor(ne=(128, 2), kind=Q4_K),)), r"'w' as Q4_K in rows of 128"),
    "row of an IQ type": (build(tensors=(tensor(ne=(128, 2), kind=IQ2_XXS),)), r"'w' as IQ2_XXS in rows of 128"),
    "NVFP4": (build(tensors=(tensor(kind=NVFP4),)), "'w' as NVFP4"),
    "type from the future": (build(tensors=(tensor(kind=2**31),)), "'w' as unknown type 2147483648"),
    "offset not aligned": (build(tensors=(tensor(offset=16),)), "'w' at offset 16, not aligned to 32"),
    "offset at the end": (build(tensors=(tensor(offset=4096),)), "before the end of tensor 'w'"),
    **{f"offset {n}": (build(tensors=(tensor(offset=n & ~31),)), "before the end of tensor 'w'") for n in HUGE},
    "same bytes": (build(tensors=(tensor(b"a"), tensor(b"b"))), "'a' and 'b' on the same bytes"),
    "bytes shared": (build(tensors=(tensor(b"a", offset=224), tensor(b"b"))), "'b' and 'a' on the same bytes"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_field_is_named(tmp_path: Path, case: str) -> None:
    content, sentence = CASES[case]
    tracemalloc.start()
    error = attempt(tmp_path / "x.gguf", content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error is not None
    assert re.search(sentence, error.problem), error.problem
    assert peak < 1 << 18


def test_gaps_and_any_order_of_data_are_fine(tmp_path: Path) -> None:
    assert attempt(tmp_path / "x.gguf", build(tensors=(tensor(b"a", offset=1024), tensor(b"b", offset=256)))) is None


def test_version_2_and_odd_booleans_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(build((pair(b"k", 7, b"\x02"), array(b"l", 7, 3, b"\x00\x01\x80")), start=b"GGUF" + u32(2)))
    metadata = open_gguf(path).metadata
    assert metadata["k"] is True
    assert metadata["l"] == [False, True, True]


SIZE = 1 << 17
LARGE = {
    "bytes": build((array(b"k", U8, SIZE, bytes(SIZE)),)),
    "empty strings": build((array(b"k", STRING, SIZE // 8, bytes(SIZE)),)),
    "short strings": build((array(b"k", STRING, SIZE // 9, text(b"x") * (SIZE // 9)),)),
    "one string": build((pair(b"k", STRING, text(bytes(SIZE))),)),
    "many pairs": build(tuple(pair(b"%06x" % i, U8, b"\x01") for i in range(SIZE // 19))),
    "many tensors": build(
        tensors=tuple(tensor(b"%06x" % i, (1,), offset=32 * i) for i in range(SIZE // 38)), data=bytes(SIZE)
    ),
    "a list where a number belongs": build((array(b"split.count", U8, SIZE, bytes(SIZE)),)),
}


@pytest.mark.parametrize("name", LARGE)
def test_memory_is_a_small_multiple_of_the_file(tmp_path: Path, name: str) -> None:
    """However the header is filled: to open it, and to decode all of it."""
    path = tmp_path / "x.gguf"
    path.write_bytes(LARGE[name])
    tracemalloc.start()
    try:
        file = open_gguf(path)
        opening = tracemalloc.get_traced_memory()[1]
        use(file)
    except BadFile:
        opening = 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if name in ("bytes", "empty strings", "short strings"):
        assert opening < len(LARGE[name]) + (1 << 16), "arrays are decoded when they are asked for"
    assert peak < 10 * len(LARGE[name])
