"""Reading GGUF files: against the `gguf` package's writer, and against our own."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpsmith.checkpoint.blocks import TYPES, dequantize
from warpsmith.checkpoint.gguf import open_gguf
from warpsmith.checkpoint.gguf_writer import GGUFWriter, Typed, write_gguf
from warpsmith.checkpoint.quantize import quantize
from warpsmith.errors import BadFile

RNG = np.random.default_rng(7)


def package_writer(path: Path, **options: Any) -> gguf.GGUFWriter:
    return gguf.GGUFWriter(path, "qwen35", **options)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_every_metadata_type_written_by_the_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = package_writer(path)
    scalars = {
        "u8": (200, writer.add_uint8), "i8": (-100, writer.add_int8), "u16": (60000, writer.add_uint16),
        "i16": (-30000, writer.add_int16), "u32": (2**32 - 1, writer.add_uint32), "i32": (-(2**31), writer.add_int32),
        "u64": (2**64 - 1, writer.add_uint64), "i64": (-(2**63), writer.add_int64), "f32": (0.5, writer.add_float32),
        "f64": (0.1, writer.add_float64), "yes": (True, writer.add_bool), "no": (False, writer.add_bool),
        "text": ("grüße 漢字\n", writer.add_string),
    }  # fmt: skip
    for key, (value, add) in scalars.items():
        add(key, value)
    arrays = {"ints": [1, -2, 3], "floats": [0.5, -1.5], "bools": [True, False], "words": ["a", "", "ü", "Ġthe"]}
    for key, array in arrays.items():
        writer.add_array(key, array)
    finish(writer)

    metadata = open_gguf(path).metadata
    assert metadata["general.architecture"] == "qwen35"
    for key, (value, _) in scalars.items():
        assert metadata[key] == value
        assert type(metadata[key]) is type(value)
    for key, array in arrays.items():
        assert metadata[key] == array
        assert [type(x) for x in metadata[key]] == [type(x) for x in array]
        assert metadata[key] is metadata[key], "decoded once"
    assert set(metadata) == {"general.architecture", *scalars, *arrays}
    assert len(metadata) == 1 + len(scalars) + len(arrays)
    assert "absent" not in metadata
    assert metadata.get("absent", 5) == 5


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_tensors_written_by_the_package(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "t.gguf"
    writer = package_writer(path)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    expected = {}
    for i, block_type in enumerate(TYPES.values()):
        raw = RNG.integers(0, 256, size=(i + 1, block_type.row_bytes(512)), dtype=np.uint8)
        expected[f"w.{block_type.name}"] = (block_type, (i + 1, 512), raw)
        writer.add_tensor(f"w.{block_type.name}", raw, raw_dtype=gguf.GGMLQuantizationType(block_type.ggml_id))
    vector = RNG.standard_normal(5).astype(np.float32)
    cube = RNG.standard_normal((2, 3, 4)).astype(np.float32)
    writer.add_tensor("vector", vector)
    writer.add_tensor("cube", cube)
    finish(writer)

    file = open_gguf(str(path))
    assert file.path == path
    assert list(file.tensors) == [*expected, "vector", "cube"]
    for name, (block_type, shape, raw) in expected.items():
        tensor = file.tensors[name]
        assert (tensor.name, tensor.type, tensor.shape) == (name, block_type, shape)
        np.testing.assert_array_equal(tensor.raw(), raw)
    assert file.tensors["vector"].shape == (5,)
    assert file.tensors["vector"].raw().shape == (1, 20)
    np.testing.assert_array_equal(dequantize(TYPES["F32"], file.tensors["vector"].raw())[0], vector)
    assert file.tensors["cube"].shape == (2, 3, 4)
    assert file.tensors["cube"].raw().shape == (6, 16)
    np.testing.assert_array_equal(file.tensors["cube"].raw().view(np.float32).reshape(2, 3, 4), cube)


def test_views_are_read_only_and_outlive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    writer = package_writer(path)
    writer.add_tensor("w", np.arange(8, dtype=np.float32))
    finish(writer)
    raw = open_gguf(path).tensors["w"].raw()
    path.unlink()
    assert not raw.flags.owndata
    assert not raw.flags.writeable
    np.testing.assert_array_equal(raw.view(np.float32)[0], np.arange(8, dtype=np.float32))


def test_big_endian_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    writer = package_writer(path, endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("w", np.arange(8, dtype=np.float32))
    finish(writer)
    with pytest.raises(BadFile, match="big-endian"):
        open_gguf(path)


def test_a_path_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"absent\.gguf cannot be opened: No such file"):
        open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(BadFile, match="cannot be opened"):
        open_gguf("a\0b.gguf")
    with pytest.raises(BadFile, match="is not a file"):
        open_gguf(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in the file system")
def test_a_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(BadFile, match="is not a file"):
        open_gguf(tmp_path / "pipe.gguf")


# ---- our writer

METADATA = {
    "general.architecture": "qwen35",
    "qwen35.block_count": 24,
    "qwen35.rope.freq_base": 1e7,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": ["!", "", "Ġthe", "漢"],
    "tokenizer.ggml.token_type": [1, 1, 3, 6],
    "qwen35.rope.dimension_sections": [11, 11, 10, 0],
    "scores": [0.5, -1.0],
    "recurrent": [True, False],
}


def test_our_files_are_read_by_the_package(tmp_path: Path) -> None:
    path = tmp_path / "w.gguf"
    tensors = {
        f"w.{name}": (name, RNG.standard_normal((3, 512)).astype(np.float32)) for name in TYPES if name[0] in "FBQ"
    }
    tensors["bias"] = ("F32", RNG.standard_normal(7).astype(np.float32))
    tensors["cube"] = ("F16", RNG.standard_normal((2, 3, 4)).astype(np.float32))
    write_gguf(path, METADATA, tensors)

    reader = gguf.GGUFReader(path)
    for key, value in METADATA.items():
        assert reader.get_field(key).contents() == value
    assert reader.get_field("qwen35.block_count").types == [gguf.GGUFValueType.UINT32]
    assert reader.get_field("qwen35.rope.freq_base").types == [gguf.GGUFValueType.FLOAT32]
    assert reader.get_field("scores").types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.FLOAT32]
    assert reader.get_field("tokenizer.ggml.token_type").types[1] == gguf.GGUFValueType.INT32
    assert [t.name for t in reader.tensors] == list(tensors)

    ours = open_gguf(path)
    assert dict(ours.metadata) == METADATA
    for theirs in reader.tensors:
        type_name, x = tensors[theirs.name]
        stored = quantize(TYPES[type_name], x)
        assert theirs.tensor_type.name == type_name
        assert tuple(theirs.shape.tolist())[::-1] == x.shape == ours.tensors[theirs.name].shape
        np.testing.assert_array_equal(np.asarray(theirs.data).view(np.uint8).reshape(-1), stored.reshape(-1))
        np.testing.assert_array_equal(ours.tensors[theirs.name].raw().reshape(-1), stored.reshape(-1))
    assert list(tmp_path.iterdir()) == [path]


scalars = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(width=32, allow_nan=False) | st.text(max_size=20)
arrays = st.one_of(
    st.lists(st.booleans(), min_size=1),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1),
    st.lists(st.integers(0, 2**64 - 1), min_size=1),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1),
    st.lists(st.text(max_size=20), min_size=1),
)
keys = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).filter(lambda key: key != "general.alignment")


@settings(max_examples=60, deadline=None)
@given(
    metadata=st.dictionaries(keys, scalars | arrays, max_size=8),
    shapes=st.dictionaries(
        st.text("abc.", min_size=1, max_size=10), st.lists(st.integers(1, 5), min_size=1, max_size=4), max_size=5
    ),
    alignment=st.sampled_from([8, 32, 256]),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, metadata: dict[str, Any], shapes: dict[str, list[int]], alignment: int
) -> None:
    path = tmp_path_factory.mktemp("g") / "x.gguf"
    data = {
        name: RNG.integers(0, 256, size=(*shape[:-1], 4 * shape[-1])).astype(np.uint8) for name, shape in shapes.items()
    }
    with GGUFWriter(path, metadata, alignment) as writer:
        for name, shape in shapes.items():
            writer.declare(name, TYPES["F32"], tuple(shape))
        for name, stored in data.items():
            writer.write(name, iter(stored))  # row by row
    file = open_gguf(path)
    told = {} if alignment == 32 else {"general.alignment": alignment}
    assert dict(file.metadata) == {**metadata, **told}
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {n: tuple(s) for n, s in shapes.items()}
    for name, stored in data.items():
        assert file.tensors[name].raw().ctypes.data % 8 == 0
        np.testing.assert_array_equal(file.tensors[name].raw().reshape(-1), stored.reshape(-1))


def test_types_can_be_spelled_out(tmp_path: Path) -> None:
    path = tmp_path / "typed.gguf"
    metadata = {
        "split.count": Typed("u16", 1),
        "third": Typed("f64", 1 / 3),
        "none": Typed("str", []),
        "few": Typed("u8", [1, 2]),
        "from numpy": np.int64(5),
        "array": np.array([1.5, 2.5], np.float32),
    }
    write_gguf(path, metadata, {})
    reader = gguf.GGUFReader(path)
    assert reader.get_field("split.count").types == [gguf.GGUFValueType.UINT16]
    assert reader.get_field("third").contents() == 1 / 3
    assert reader.get_field("few").types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8]
    ours = open_gguf(path).metadata
    assert (ours["none"], ours["few"], ours["from numpy"], ours["array"]) == ([], [1, 2], 5, [1.5, 2.5])


@pytest.mark.parametrize(
    ("value", "error"),
    [([], ValueError), ([1, "a"], TypeError), (None, TypeError), ({}, TypeError), (Typed("u8", 256), ValueError)],
)
def test_values_without_a_type_are_refused(tmp_path: Path, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"the\.key"):
        GGUFWriter(tmp_path / "x.gguf", {"the.key": value})


def test_a_failure_leaves_no_file_and_spares_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"the old one")

    def breaks() -> Iterator[np.ndarray]:
        yield np.zeros(8, np.uint8)
        raise RuntimeError("no more data")

    def write(*data: Iterator[np.ndarray]) -> None:
        with GGUFWriter(path, {}) as writer:
            writer.declare("w", TYPES["F32"], (4,))
            for chunks in data:
                writer.write("w", chunks)

    with pytest.raises(RuntimeError, match="no more data"):
        write(breaks())
    with pytest.raises(ValueError, match="'w' was declared and not written"):
        write()
    assert path.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_the_writer_holds_the_caller_to_the_declarations(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    sixteen = np.zeros(16, np.uint8)

    def attempt(*steps: tuple[Any, ...]) -> None:
        with GGUFWriter(path, {}) as writer:
            writer.declare("a", TYPES["F32"], (4,))
            writer.declare("b", TYPES["F32"], (2, 2))
            for name, *step in steps:
                if len(step) == 1:
                    writer.write(name, step[0])
                else:
                    writer.declare(name, TYPES[step[0]], step[1])

    for steps, match in [
        ([("b", sixteen)], "'b' is written where 'a'"),
        ([("a", sixteen[:15])], "16 bytes and written with 15"),
        ([("a", np.zeros(4, np.float32))], "float32"),
        ([("a", sixteen), ("c", "F32", (4,))], "after data"),
        ([("a", sixteen), ("b", sixteen), ("c", sixteen)], "where None"),
        ([("a", "F32", (4,))], "twice"),
        ([("x" * 64, "F32", (4,))], "64 bytes"),
        ([("", "F32", (4,))], "0 bytes"),
        ([("c", "F32", ())], "shape"),
        ([("c", "F32", (1, 1, 1, 1, 1))], "shape"),
        ([("c", "F32", (0, 4))], "shape"),
        ([("c", "Q4_K", (2, 128))], "Q4_K blocks"),
    ]:
        with pytest.raises(ValueError, match=match):
            attempt(*steps)
    for alignment in (0, 4, 24):
        with pytest.raises(ValueError, match="power of two"):
            GGUFWriter(path, {}, alignment)
    assert list(tmp_path.iterdir()) == []


def test_writing_needs_the_memory_of_a_chunk(tmp_path: Path) -> None:
    chunk = np.zeros(1 << 16, np.uint8)
    tracemalloc.start()
    with GGUFWriter(tmp_path / "x.gguf", {}) as writer:
        writer.declare("w", TYPES["F32"], (1 << 8, 1 << 14))
        writer.write("w", (chunk for _ in range(1 << 8)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert open_gguf(tmp_path / "x.gguf").tensors["w"].raw().nbytes == 1 << 24


# ---- split files


def write_split(folder: Path, count: int = 3, **changes: Any) -> list[Path]:
    """Parts of a model, one tensor in each but the first; `changes` (key, part) -> value spoil a field."""
    paths = []
    for i in range(count):
        fields: dict[str, Any] = {
            "split.no": Typed("u16", i),
            "split.count": Typed("u16", count),
            "split.tensors.count": Typed("i32", count - 1),
        }
        if i == 0:
            fields |= {"general.architecture": "qwen35"}
        if i == changes.get("part"):
            fields |= changes["fields"]
        paths.append(folder / f"m-{i + 1:05}-of-{count:05}.gguf")
        name = changes.get("name", f"w{i}")
        write_gguf(paths[-1], fields, {name: ("F32", np.full(4, i, np.float32))} if i else {})
    return paths


def test_any_part_opens_the_whole(tmp_path: Path) -> None:
    for path in write_split(tmp_path):
        file = open_gguf(path)
        assert file.path.name == "m-00001-of-00003.gguf"
        assert file.metadata["general.architecture"] == "qwen35"
        assert list(file.tensors) == ["w1", "w2"]
        np.testing.assert_array_equal(file.tensors["w2"].raw().view(np.float32), np.full((1, 4), 2, np.float32))


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[1].unlink()
    for path in (paths[0], paths[2]):
        with pytest.raises(BadFile, match=r"m-00002-of-00003\.gguf is missing"):
            open_gguf(path)


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    for name in ("model.gguf", "m-00002-of-00004.gguf"):
        renamed = paths[1].rename(tmp_path / name)
        with pytest.raises(BadFile, match="part 2 of 3"):
            open_gguf(renamed)
        renamed.rename(paths[1])
    paths[1].rename(tmp_path / "other")
    paths[2].rename(paths[1])
    (tmp_path / "other").rename(paths[2])
    with pytest.raises(BadFile, match=r"split\.no = 2 where 1 belongs"):
        open_gguf(paths[0])


@pytest.mark.parametrize(
    ("part", "fields", "match"),
    [
        (2, {"split.count": Typed("u16", 4)}, "split.count = 4 where 3 belongs"),
        (0, {"split.tensors.count": Typed("i32", 7)}, "split.tensors.count = 7"),
        (0, {"split.tensors.count": Typed("i32", -1)}, "no usable split.tensors.count"),
        (0, {"split.no": "first"}, "no usable split.no"),
        (0, {"split.count": 0}, "no usable split.count"),
        (0, {"split.count": True}, "no usable split.count"),
    ],
)
def test_parts_that_disagree_are_refused(tmp_path: Path, part: int, fields: dict[str, Any], match: str) -> None:
    with pytest.raises(BadFile, match=match):
        open_gguf(write_split(tmp_path, part=part, fields=fields)[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="'same'"):
        open_gguf(write_split(tmp_path, name="same")[0])


def test_a_split_of_one_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "any name.gguf"
    write_gguf(path, {"split.count": Typed("u16", 1)}, {"w": ("F32", np.zeros(4, np.float32))})
    assert list(open_gguf(path).tensors) == ["w"]
