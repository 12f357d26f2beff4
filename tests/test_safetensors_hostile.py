"""Broken and hostile model directories: always one sentence that names the file, never a crash, a hang or a bomb."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_directories import encode, hf_values, prefixed, real_config, write_file, write_model
from random_models import small_config
from warpsmith.checkpoint.blocks import TYPES, dequantize
from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.checkpoint.safetensors import INDEX, MAX_JSON
from warpsmith.errors import BadFile
from warpsmith.model.weights import read_config

CONFIG = small_config(
    ratio=2, layers=2, recurrent=(True, False), hidden=8, ffn=4, vocab=6, heads=2, kv_heads=1, head_dim=4, rotary_dim=2,
    key_head_dim=2, value_head_dim=3, tied=False, mtp_layers=1, name="",
)  # fmt: skip
TENSORS = {name: encode(x, "BF16") for name, x in prefixed(hf_values(CONFIG)).items()}
CONFIG_JSON = real_config(CONFIG)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PLACES = {name: SHARDS[i % 2] for i, name in enumerate(TENSORS)}
QUICK = settings(max_examples=120, deadline=None)


def write_sharded(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG_JSON))
    for shard in SHARDS:
        write_file(path / shard, {name: TENSORS[name] for name in TENSORS if PLACES[name] == shard})
    (path / INDEX).write_text(json.dumps({"weight_map": PLACES}))


@contextmanager
def model(sharded: bool = False) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        if sharded:
            write_sharded(path)
        else:
            write_model(path, CONFIG_JSON, TENSORS)
        yield path


def survive(path: Path) -> str | None:
    """Open a directory and read all of it. Returns what was wrong with it, having checked how that was said."""
    size = sum(os.lstat(file).st_blocks * 512 for file in path.iterdir())  # what is really there; holes are nothing
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoint = open_checkpoint(path)
            config = read_config(checkpoint)
            for tensor in checkpoint.tensors.values():
                assert tensor.float32().shape == tensor.shape
            assert len(config.recurrent) == config.layers
        problem = None
    except BadFile as error:
        problem = error.problem
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 2_000_000 + 40 * size
    if problem is not None:
        assert str(path) in problem
        assert "\n" not in problem
        assert problem.endswith(".")
        assert len(problem) < 400 + len(str(path))
    return problem


def test_the_models_that_are_broken_below_are_whole() -> None:
    for sharded in (False, True):
        with model(sharded) as path:
            assert survive(path) is None


# -- bytes ------------------------------------------------------------------------------------------------------------

FILES = ["config.json", INDEX, SHARDS[0]]


@QUICK
@given(name=st.sampled_from(FILES), share=st.floats(0, 1, exclude_max=True))
def test_truncation_is_noticed(name: str, share: float) -> None:
    with model(sharded=True) as path:
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[: int(len(data) * share)])
        problem = survive(path)
        assert problem is not None
        assert name in problem


@QUICK
@given(name=st.sampled_from(FILES), share=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255))
def test_flipped_bits(name: str, share: float, bits: int) -> None:
    with model(sharded=True) as path:
        data = bytearray((path / name).read_bytes())
        # of a safetensors file, only the header: any data are weights
        end = 8 + int.from_bytes(data[:8], "little") if name == SHARDS[0] else len(data)
        data[int(end * share)] ^= bits
        (path / name).write_bytes(data)
        survive(path)


@QUICK
@given(name=st.sampled_from(FILES), data=st.binary(max_size=200))
def test_files_of_anything(name: str, data: bytes) -> None:
    with model(sharded=True) as path:
        (path / name).write_bytes(data)
        assert survive(path) is not None


@pytest.mark.parametrize("name", FILES)
def test_empty_files(name: str) -> None:
    with model(sharded=True) as path:
        (path / name).write_bytes(b"")
        problem = survive(path)
        assert problem is not None
        assert name in problem


@settings(max_examples=60, deadline=None)
@given(data=st.binary(min_size=4, max_size=4), dtype=st.sampled_from(["F32", "F16", "BF16"]))
def test_any_bits_are_weights(data: bytes, dtype: str) -> None:
    """Infinities, NaNs of both kinds and denormals in every tensor."""
    width = 4 if dtype == "F32" else 2
    tensors = {
        name: (dtype, shape, (data * int(np.prod(shape)))[: width * int(np.prod(shape))])
        for name, (_, shape, _) in TENSORS.items()
    }
    with model() as path:
        write_model(path, CONFIG_JSON, tensors)
        problem = survive(path)
    if np.isfinite(dequantize(TYPES[dtype], np.frombuffer(data, np.uint8))).all():
        # numbers, but the exponential of a large one is none
        assert problem is None or "ssm_a holds an infinity" in problem
    else:
        assert problem is not None
        assert "holds an infinity or a NaN" in problem


@pytest.mark.parametrize("length", [0, 1, 1 << 16, MAX_JSON + 1, (1 << 31) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_header_lengths(length: int) -> None:
    with model() as path:
        file = path / "model.safetensors"
        file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
        problem = survive(path)
        assert problem is not None
        assert "model.safetensors: the header" in problem


def test_large_files_of_nothing_are_not_read() -> None:
    """A gigabyte of zeros that takes no room on the disk must take none in memory."""
    for name in ("config.json", INDEX, "tokenizer_config.json", "chat_template.jinja"):
        with model(sharded=True) as path:
            with (path / name).open("ab") as file:
                file.truncate(1 << 30)
            problem = survive(path)
            assert problem is not None
            assert f"{name} has 1073741824 bytes" in problem
    with model() as path:
        (path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 29))
        with (path / "model.safetensors").open("ab") as file:
            file.truncate(1 << 30)
        problem = survive(path)
        assert problem is not None
        assert "header's length is 536870912" in problem


# -- JSON -------------------------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    SCALARS | st.sampled_from([2**31, 2**63, 2**64, -1, "F32", "..", "/", "model.safetensors"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, as a path of keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = value.copy()
    changed[path[0]] = replaced(value[path[0]], path[1:], new)
    return changed


CONFIG_PLACES = places(CONFIG_JSON)
INDEX_PLACES = places({"weight_map": PLACES})


@QUICK
@given(place=st.sampled_from(CONFIG_PLACES), value=JSON)
def test_any_json_anywhere_in_the_configuration(place: tuple[Any, ...], value: Any) -> None:
    with model() as path:
        (path / "config.json").write_text(json.dumps(replaced(CONFIG_JSON, place, value)))
        survive(path)


@QUICK
@given(place=st.sampled_from(INDEX_PLACES), value=JSON)
def test_any_json_anywhere_in_the_index(place: tuple[Any, ...], value: Any) -> None:
    with model(sharded=True) as path:
        (path / INDEX).write_text(json.dumps(replaced({"weight_map": PLACES}, place, value)))
        problem = survive(path)
        if value not in PLACES.values():
            assert problem is not None


def with_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = path / "model.safetensors"
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(change(json.loads(data[8:end]))).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + data[end:])


@settings(max_examples=250, deadline=None)
@given(data=st.data(), value=JSON)
def test_any_json_anywhere_in_a_header(data: st.DataObject, value: Any) -> None:
    with model() as path:
        with_header(path, lambda header: replaced(header, data.draw(st.sampled_from(places(header))), value))
        survive(path)


@pytest.mark.parametrize("name", ["config.json", INDEX, "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["[]", "7", '"x"', "null", "", "{", "NaN", '{"a": 1' + "0" * 5000 + "}"])
def test_files_that_are_no_objects(name: str, text: str) -> None:
    with model(sharded=True) as path:
        (path / name).write_text(text)
        problem = survive(path)
        assert problem is not None
        assert name in problem


@pytest.mark.parametrize("depth", [500, 900, 960, 100_000])
def test_deep_nesting(depth: int) -> None:
    """Whether it is too deep to parse, or only just not, and then has to be put into a message."""
    deep = "[" * depth + "]" * depth
    for name, text in {
        "config.json": json.dumps(CONFIG_JSON).replace('"hidden_size": 8', f'"hidden_size": {deep}'),
        INDEX: f'{{"weight_map": {deep}}}',
        "tokenizer_config.json": f'{{"chat_template": {deep}}}',
    }.items():
        with model(sharded=True) as path:
            (path / name).write_text(text)
            problem = survive(path)
            assert problem is None if name.startswith("tokenizer") and depth < 900 else name in (problem or name)
    for field in ("dtype", "shape", "data_offsets"):
        text = f'{{"x": {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "{field}": {deep}}}}}'
        with model() as path:
            (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(4))
            assert survive(path) is not None


# -- offsets and shapes -----------------------------------------------------------------------------------------------

NAME = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"
NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 8, 100, 1 << 31, 1 << 32, 1 << 62, 1 << 63, 1 << 64]) | st.integers(0, 3000)


@QUICK
@given(
    offsets=st.lists(NUMBERS, min_size=2, max_size=2),
    shape=st.lists(NUMBERS, max_size=4),
    dtype=st.sampled_from(["F32", "BF16", "I8"]),
)
def test_hostile_offsets_and_shapes(offsets: list[int], shape: list[int], dtype: str) -> None:
    with model() as path:
        entry = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        with_header(path, lambda header: header | {NAME: entry})
        problem = survive(path)
        assert problem is not None
        assert "model.safetensors: " in problem


@pytest.mark.parametrize("shift", [-2, 2, 100])
def test_tensors_on_the_same_bytes(shift: int) -> None:
    def moved(header: dict[str, Any]) -> dict[str, Any]:
        begin, end = header[NAME]["data_offsets"]
        return header | {NAME: header[NAME] | {"data_offsets": [begin + shift, end + shift]}}

    with model() as path:
        with_header(path, moved)
        problem = survive(path)
        assert problem is not None
        assert "data_offsets of" in problem
        assert "overlap" in problem


def test_dimensions_whose_product_overflows() -> None:
    """2^32 x 2^32 elements are 0 in 64 bits."""
    with model() as path:
        entry = {"dtype": "BF16", "shape": [1 << 32, 1 << 32], "data_offsets": [0, 0]}
        with_header(path, lambda header: header | {"x": entry})
        problem = survive(path)
        assert problem is not None
        assert "'x'" in problem


def test_tensors_without_elements() -> None:
    """Harmless in a part that is not read, an error in one that is."""
    empty = {"dtype": "BF16", "shape": [0, 4], "data_offsets": [0, 0]}
    with model() as path:
        with_header(path, lambda header: header | {"model.visual.nothing": empty})
        assert survive(path) is None
        with_header(path, lambda header: header | {NAME: empty})
        problem = survive(path)
        assert problem is not None
        assert NAME in problem
    with model() as path:
        write_file(path / "model.safetensors", {})
        assert survive(path) is not None


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("layers.0.line\nbreak", True),
        ("layers.0.\ud800", True),
        ("layers.0." + "x" * 100_000, True),
        ("model.layers.2.mlp.up_proj.weight", True),
        ("model.language_model.model.norm.weight", True),
        (f"model.layers.{'9' * 5000}.mlp.up_proj.weight", False),
        ("model.layers.\N{ARABIC-INDIC DIGIT ONE}.mlp.up_proj.weight", False),
        ("model.layers.00.mlp.up_proj.weight", False),
        ("model.layers.-1.mlp.up_proj.weight", False),
        ("mtp.layers.1.mlp.up_proj.weight", False),
        ("mtp.", False),
        ("", False),
    ],
    ids=range(12),
)
def test_hostile_names(name: str, refused: bool) -> None:
    """A tensor too many: refused where it would belong to a layer, ignored where it belongs to nothing."""
    with model() as path:
        write_file(path / "model.safetensors", {"extra": ("BF16", (1,), bytes(2)), **TENSORS})
        with_header(path, lambda header: {name if key == "extra" else key: value for key, value in header.items()})
        problem = survive(path)
        assert (problem is not None) == refused
        assert problem is None or "tensor" in problem


# -- the directory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        "x\0.safetensors",
        "x\n.safetensors",
        "n" * 5000 + ".safetensors",
        "missing.safetensors",
        "config.json",
    ],
    ids=["parent", "absolute", "below", "dots", "nothing", "zero byte", "line", "long", "missing", "another file"],
)
def test_an_index_that_points_elsewhere(name: str) -> None:
    with model(sharded=True) as path:
        write_file(path.parent / "outside.safetensors", TENSORS)
        try:
            (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, name)}))
            problem = survive(path)
        finally:
            (path.parent / "outside.safetensors").unlink()
        assert problem is not None
        assert "missing.safetensors" in problem if name == "missing.safetensors" else "weight_map names" in problem


def test_an_index_that_places_a_tensor_wrongly() -> None:
    with model(sharded=True) as path:
        name = next(iter(PLACES))
        (path / INDEX).write_text(json.dumps({"weight_map": PLACES | {name: SHARDS[1]}}))
        problem = survive(path)
        assert problem is not None
        assert f"{INDEX}: weight_map places '{name}' in {SHARDS[1]}" in problem


@pytest.mark.parametrize("name", ["config.json", INDEX, SHARDS[0], "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["loop", "directory", "pipe", "device", "nowhere"])
def test_things_that_are_not_files(name: str, kind: str) -> None:
    """None of them may be waited for: a pipe that nobody writes to, a device that never ends."""
    with model(sharded=True) as path:
        file = path / name
        file.unlink(missing_ok=True)
        match kind:
            case "loop":
                file.symlink_to(file)
            case "directory":
                file.mkdir()
            case "pipe":
                os.mkfifo(file)
            case "device":
                file.symlink_to("/dev/zero")
            case "nowhere":
                file.symlink_to(path / "nothing")
        problem = survive(path)
        absent = kind in ("loop", "nowhere")  # links to nothing: as if the file were not there
        if absent and name in (INDEX, "tokenizer_config.json", "chat_template.jinja"):
            assert problem is None
        else:
            assert problem is not None
            assert absent or name in problem


def test_a_loop_among_files_without_an_index() -> None:
    with model() as path:
        (path / "loop.safetensors").symlink_to(path / "loop.safetensors")
        problem = survive(path)
        assert problem is not None
        assert "loop.safetensors" in problem
