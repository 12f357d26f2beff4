"""Model directories as Hugging Face stores them: config.json and safetensors files, read into canonical tensors.

The container is read by hand because numpy has no bfloat16 for the safetensors package to return: a length, a JSON
header {name: {dtype, shape, data_offsets}}, then the data, row-major and little endian.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from warpsmith.checkpoint.blocks import TYPES, dequantize
from warpsmith.checkpoint.canonical import Checkpoint, Tensor, brief
from warpsmith.checkpoint.finite import finite
from warpsmith.checkpoint.hf import (
    MATRIX_KINDS,
    Heads,
    canonical_name,
    changes_a_layer,
    metadata_from_config,
    reorder_heads,
)
from warpsmith.checkpoint.mapped import MappedFile
from warpsmith.errors import BadFile

MAX_JSON = 16 << 20  # the header of the largest model of the family has a fiftieth of this
INDEX = "model.safetensors.index.json"
ELEMENTS = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}  # dtypes that are read, as numpy moves them about
QUANTISED = (".scales", ".biases", ".weight_scale", ".weight_scale_inv", ".weight_packed", ".qweight")

_SHARD = re.compile(r"[\w.+-]{1,240}\.safetensors", re.ASCII)
_AGAIN = "Download the model again."
_ORIGINAL = "Use the original (bf16) repository or a GGUF of the model."


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file describes it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    file: MappedFile = field(repr=False)
    begin: int
    end: int

    @property
    def bytes(self) -> np.ndarray:
        """uint8, a view of the mapped file."""
        return self.file.view(self.begin, self.end)


def open_directory(path: Path) -> Checkpoint:
    """Read a directory: its configuration, all its safetensors files, and where its tokenizer is."""
    config_path = path / "config.json"
    config = read_json(config_path)
    metadata = metadata_from_config(config, str(config_path))
    refuse_quantised(config, config_path)
    layers = metadata["qwen35.block_count"]
    tensors = _canonical_tensors(read_tensors(path), layers, Heads.of(metadata))
    if any(name.startswith(f"blk.{layers}.") for name in tensors):
        metadata["qwen35.block_count"] = layers + 1
        metadata["qwen35.nextn_predict_layers"] = 1
        if recurrent := metadata.get("qwen35.attention.recurrent_layers"):
            recurrent.append(False)
    if next((part["tie_word_embeddings"] for part in _parts(config) if "tie_word_embeddings" in part), False):
        _drop_copied_head(tensors)
    has_tokenizer = (path / "tokenizer.json").exists()
    return Checkpoint(path, metadata, tensors, path if has_tokenizer else None, _chat_template(path))


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Where a setting of the whole model may stand."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]


def refuse_quantised(config: dict[str, Any], path: Path) -> None:
    """Only float weights are read from safetensors; config.json says what they are."""
    for key in ("quantization_config", "quantization"):  # the latter is MLX's
        if quantised := next((part[key] for part in _parts(config) if part.get(key)), None):
            method = quantised.get("quant_method", "MLX") if isinstance(quantised, dict) else quantised
            raise BadFile(
                f"{path}: {key} says that the weights are quantised, by {brief(method)}, which is not read.", _ORIGINAL
            )


def _drop_copied_head(tensors: dict[str, Tensor]) -> None:
    """Tied weights are sometimes stored twice. If they differ it is the flag that lies, as transformers has it too."""
    head, embedding = tensors.get("output.weight"), tensors.get("token_embd.weight")
    if head and embedding and head.type == embedding.type and np.array_equal(head.raw(), embedding.raw()):
        del tensors["output.weight"]


# -- files ----------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or an error that names the file."""
    return _json_object(_read_small(path), f"{path}")


def read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a directory's safetensors files, through the index where there is one."""
    index_path = directory / INDEX
    if not index_path.exists():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise BadFile(f"{directory} has a config.json but no safetensors files.", _AGAIN)
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            found = read_file(file)
            if twice := tensors.keys() & found.keys():
                name = min(twice)
                raise BadFile(
                    f"{file}: tensor {brief(name)} is in {tensors[name].path.name} too.",
                    f"Remove the file that does not belong, or add {INDEX}.",
                )
            tensors |= found
        return tensors
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise BadFile(f"{index_path}: weight_map is missing or not a map of file names.", _AGAIN)
    shards: dict[str, dict[str, StoredTensor]] = {}
    for name in sorted(set(weight_map.values())):
        if not _SHARD.fullmatch(name):
            raise BadFile(
                f"{index_path}: weight_map names {brief(name)}, which is no safetensors file of this directory."
            )
        shards[name] = read_file(directory / name)
    for tensor, shard in weight_map.items():
        if tensor not in shards[shard]:
            raise BadFile(
                f"{index_path}: weight_map places {brief(tensor)} in {shard}, which does not hold it.", _AGAIN
            )
    return {tensor: shards[shard][tensor] for tensor, shard in weight_map.items()}


def read_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, checked against the file's size before anything is touched."""
    file = _mapped(path)
    (length,) = struct.unpack("<Q", file.mapped[:8])
    if length > min(len(file) - 8, MAX_JSON):
        raise BadFile(f"{path}: the header's length is {length}, which the file cannot hold.", _AGAIN)
    body = 8 + length  # where it begins
    header = _json_object(file.mapped[8:body], f"{path}: the header")
    header.pop("__metadata__", None)
    entries = [(*_checked(path, name, entry, len(file) - body), name) for name, entry in header.items()]
    tensors: dict[str, StoredTensor] = {}
    end = 0
    for begin, stop, dtype, shape, name in sorted(entries):
        if begin < end:
            raise BadFile(f"{path}: data_offsets of {brief(name)} overlap another tensor's.", _AGAIN)
        end = stop
        tensors[name] = StoredTensor(path, dtype, shape, file, body + begin, body + stop)
    return tensors


def _checked(path: Path, name: str, entry: Any, size: int) -> tuple[int, int, str, tuple[int, ...]]:
    """(begin, end, dtype, shape) of a header's entry, if they make sense in a body of `size` bytes."""
    if not isinstance(entry, dict):
        raise BadFile(f"{path}: the header's {brief(name)} is {brief(entry)}, expected an object.", _AGAIN)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise BadFile(f"{path}: dtype of {brief(name)} is {brief(dtype)}, expected a name.", _AGAIN)
    if not _are_sizes(shape) or len(shape) > 8:
        raise BadFile(f"{path}: shape of {brief(name)} is not a list of sizes.", _AGAIN)
    if not _are_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
        raise BadFile(f"{path}: data_offsets of {brief(name)} are not a range of bytes in the file.", _AGAIN)
    begin, end = offsets
    if dtype in ELEMENTS and math.prod(shape) * TYPES[dtype].bytes != end - begin:
        raise BadFile(f"{path}: data_offsets of {brief(name)} span {end - begin} bytes, not what its shape needs.")
    return begin, end, dtype, tuple(shape)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _mapped(path: Path) -> MappedFile:
    """A file with at least the eight bytes that every safetensors file starts with."""
    try:
        if not path.is_file():  # a pipe or a device could be waited for without end
            raise BadFile(f"{path} is missing, or not a file.", _AGAIN)
        if path.stat().st_size < 8:
            raise BadFile(f"{path} is too short to be a safetensors file.", _AGAIN)
        return MappedFile(path)
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}.", _AGAIN) from None


def _read_small(path: Path) -> bytes:
    """A file that a model has beside its weights."""
    try:
        if not path.is_file():
            raise BadFile(f"{path} is missing, or not a file.", _AGAIN)
        if (size := path.stat().st_size) > MAX_JSON:
            raise BadFile(f"{path} has {size} bytes, too many for a configuration.", _AGAIN)
        return path.read_bytes()
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}.", _AGAIN) from None


def _json_object(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise BadFile(f"{what} is not valid JSON.", _AGAIN) from None
    if not isinstance(value, dict):
        raise BadFile(f"{what} is {brief(value)}, not a JSON object.", _AGAIN)
    return value


def _chat_template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return _read_small(file).decode("utf-8", errors="replace")
    if (path / "tokenizer_config.json").exists():
        template = read_json(path / "tokenizer_config.json").get("chat_template")
        return template if isinstance(template, str) else None
    return None


# -- tensors --------------------------------------------------------------------------------------------------------


def _canonical_tensors(stored: dict[str, StoredTensor], layers: int, heads: Heads) -> dict[str, Tensor]:
    """The text model's tensors; those of a vision tower are left out."""
    names: dict[str, tuple[str, str]] = {}
    for hf_name, tensor in stored.items():
        if hf_name.endswith(QUANTISED):
            raise BadFile(f"{tensor.path}: tensor {brief(hf_name)} says the weights are quantised.", _ORIGINAL)
        if found := canonical_name(hf_name, layers):
            names[hf_name] = found
        elif changes_a_layer(hf_name):
            raise BadFile(f"{tensor.path}: tensor {brief(hf_name)} has no place in a Qwen3.5 of {layers} layers.")
    # MLX's converters fold the +1 into norms and move the convolution's taps: the latter gives them away
    folded = any(stored[hf_name].shape[2:] == (1,) for hf_name, (_, kind) in names.items() if kind == "conv")
    tensors: dict[str, Tensor] = {}
    for hf_name, (name, kind) in names.items():
        if name in tensors:
            raise BadFile(f"{stored[hf_name].path}: tensor {brief(hf_name)} is there under another name too.")
        tensors[name] = _canonical(name, hf_name, stored[hf_name], kind, heads, folded)
    return tensors


def _canonical(name: str, hf_name: str, stored: StoredTensor, kind: str, heads: Heads, folded: bool) -> Tensor:
    """A lazily read canonical tensor; matrices keep their type, everything else becomes F32."""
    where = f"{stored.path}: tensor {hf_name}"
    if stored.dtype not in ELEMENTS:
        raise BadFile(f"{where} has dtype {brief(stored.dtype)}, which warpsmith does not read.", _ORIGINAL)
    source_type, shape = TYPES[stored.dtype], stored.shape
    if kind == "conv":
        layout = "[channels, taps, 1]" if folded else "[channels, 1, taps]"
        if len(shape) != 3 or shape[2 if folded else 1] != 1:
            raise BadFile(f"{where} has shape {list(shape)}, expected {layout}.")
        shape = (shape[0], shape[1] * shape[2])
    ranks = 2 if kind in MATRIX_KINDS or kind == "conv" else 1
    if len(shape) != ranks or 0 in shape:
        raise BadFile(f"{where} has shape {list(shape)}, expected {ranks} sizes.")
    _check_heads(where, shape, kind, heads)

    if kind in MATRIX_KINDS:

        def read_matrix() -> np.ndarray:
            elements = stored.bytes.view(ELEMENTS[stored.dtype]).reshape(shape)
            ordered = reorder_heads(elements, kind, heads, to_canonical=True)
            return np.ascontiguousarray(ordered).view(np.uint8)

        return Tensor(name, source_type, shape, finite(stored.path, name, source_type, read_matrix))

    def read_small() -> np.ndarray:
        values = dequantize(source_type, stored.bytes).reshape(shape)
        with np.errstate(all="ignore"):  # infinities and NaNs are legal bytes
            if kind == "norm" and not folded:
                values = values + 1
            elif kind == "decay":  # in float64, so that writing it back gives the same number
                values = (-np.exp(values.astype(np.float64))).astype(np.float32)
        ordered = reorder_heads(values, kind, heads, to_canonical=True)
        return np.ascontiguousarray(ordered, dtype="<f4").reshape(-1, shape[-1]).view(np.uint8)

    return Tensor(name, TYPES["F32"], shape, finite(stored.path, name, TYPES["F32"], read_small))


def _check_heads(where: str, shape: tuple[int, ...], kind: str, heads: Heads) -> None:
    """Head reordering reshapes by head counts, so they must fit the tensor before it is read."""
    values = heads.value_heads * heads.value_head_dim
    channels = 2 * heads.key_heads * heads.key_head_dim + values
    expected = {
        "qkv rows": (0, channels),
        "conv": (0, channels),
        "value rows": (0, values),
        "value columns": (1, values),
        "head rows": (0, heads.value_heads),
        "head vector": (0, heads.value_heads),
        "decay": (0, heads.value_heads),
    }
    if kind in expected:
        axis, size = expected[kind]
        if shape[axis] != size:
            raise BadFile(f"{where} has shape {list(shape)}, and the configured heads need {size} along axis {axis}.")
