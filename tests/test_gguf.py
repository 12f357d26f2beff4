"""Reading GGUF files: against the `gguf` package's writer, and against our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from warpsmith.checkpoint.blocks import TYPES, dequantize
from warpsmith.checkpoint.gguf import open_gguf
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
