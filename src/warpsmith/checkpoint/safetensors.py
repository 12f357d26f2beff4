"""Model directories as Hugging Face stores them: config.json and safetensors files, read into canonical tensors.

The container is read by hand because numpy has no bfloat16 for the safetensors package to return: a length, a JSON
header {name: {dtype, shape, data_offsets}}, then the data, row-major and little endian.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from warpsmith.checkpoint.blocks import TYPES, BlockType, dequantize
from warpsmith.checkpoint.canonical import Checkpoint, Tensor
from warpsmith.checkpoint.hf import MATRIX_KINDS, Heads, canonical_name, metadata_from_config, reorder_heads
from warpsmith.errors import BadFile

MAX_JSON = 64 << 20  # no header or index of a real model comes near this
DTYPES = {"F32": ("F32", 4), "F16": ("F16", 2), "BF16": ("BF16", 2)}
ELEMENTS = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file describes it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    bytes: np.ndarray = field(repr=False)  # uint8, a view of the mapped file


def open_directory(path: Path) -> Checkpoint:
    """Read a directory: its configuration, all its safetensors files, and where its tokenizer is."""
    config_path = path / "config.json"
    config = read_json(config_path)
    if quantised := config.get("quantization_config") or config.get("quantization"):
        method = quantised.get("quant_method", "MLX") if isinstance(quantised, dict) else quantised
        raise BadFile(
            f"{config_path}: the weights are quantised by {method!s:.40}, which warpsmith does not read.", _FIX
        )
    metadata = metadata_from_config(config, str(config_path))
    stored = read_tensors(path)

    layers = metadata["qwen35.block_count"]
    if isinstance(layers, bool) or not isinstance(layers, int) or not 0 < layers <= 1024:
        raise BadFile(f"{config_path}: num_hidden_layers is {layers!r:.60}, not a number of layers.")
    heads = _heads(metadata, config_path)
    names = {name: found for name in stored if (found := canonical_name(name, layers))}
    if scales := next((name for name in stored if name.endswith((".scales", ".weight_scale_inv"))), None):
        raise BadFile(f"{stored[scales].path}: tensor {scales} says the weights are quantised by MLX or FP8.", _FIX)
    folded = _norms_are_folded(stored, names)
    tensors: dict[str, Tensor] = {}
    for hf_name, (name, kind) in names.items():
        if name in tensors:
            raise BadFile(f"{stored[hf_name].path}: tensor {hf_name} is there twice under different names.")
        tensors[name] = _canonical(name, hf_name, stored[hf_name], kind, heads, folded)
    if any(name.startswith(f"blk.{layers}.nextn.") for name in tensors):
        metadata["qwen35.nextn_predict_layers"] = 1
        metadata["qwen35.block_count"] = layers + 1
    if config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings")):
        tensors.pop("output.weight", None)
    has_tokenizer = (path / "tokenizer.json").exists()
    return Checkpoint(path, metadata, tensors, path if has_tokenizer else None, _chat_template(path))


_FIX = "Use the original (bf16) repository or a GGUF of the model."


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or an error that names the file."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise BadFile(f"{path} is too large to be a configuration file.")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}.", "Download the model again.") from None
    except (ValueError, RecursionError):
        raise BadFile(f"{path} is not valid JSON.", "Download the model again.") from None
    if not isinstance(value, dict):
        raise BadFile(f"{path} is not a JSON object.", "Download the model again.")
    return value


def read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a directory's safetensors files, through the index where there is one."""
    index_path = directory / "model.safetensors.index.json"
    if not index_path.exists():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise BadFile(f"{directory} has a config.json but no safetensors files.", "Download the model again.")
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            tensors |= read_file(file)
        return tensors
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise BadFile(f"{index_path}: weight_map is missing or not a map of file names.")
    shards: dict[str, dict[str, StoredTensor]] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise BadFile(f"{index_path}: weight_map names {name!r:.60}, which is not a file of this directory.")
        if not (directory / name).exists():
            raise BadFile(
                f"{directory / name} is missing, and {index_path.name} needs it.", "Download the model again."
            )
        shards[name] = read_file(directory / name)
    for tensor, shard in weight_map.items():
        if tensor not in shards[shard]:
            raise BadFile(f"{index_path}: weight_map places {tensor!r:.80} in {shard}, which does not hold it.")
    return {tensor: shards[shard][tensor] for tensor, shard in weight_map.items()}


def read_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, checked against the file's size before anything is touched."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < 8:
            raise BadFile(f"{path} is too short to be a safetensors file.", "Download the model again.")
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > min(size - 8, MAX_JSON):
        raise BadFile(
            f"{path}: the header says it is {length} bytes long, more than there are.", "Download the model again."
        )
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
    except (ValueError, RecursionError):
        raise BadFile(f"{path}: the header is not valid JSON.", "Download the model again.") from None
    if not isinstance(header, dict):
        raise BadFile(f"{path}: the header is not a JSON object.")
    header.pop("__metadata__", None)
    body = data[8 + length :]
    tensors: dict[str, StoredTensor] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: _offset(path, *item)):
        begin, stop, shape = _checked(path, name, entry, len(body))
        if begin < end:
            raise BadFile(f"{path}: data_offsets of {name!r:.80} overlap another tensor's.")
        end = stop
        tensors[name] = StoredTensor(path, entry["dtype"], shape, body[begin:stop])
    return tensors


def _offset(path: Path, name: str, entry: Any) -> int:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(o) is int and o >= 0 for o in offsets):
        raise BadFile(f"{path}: data_offsets of {name!r:.80} are not two offsets.")
    return int(offsets[0])


def _checked(path: Path, name: str, entry: dict[str, Any], size: int) -> tuple[int, int, tuple[int, ...]]:
    (begin, end), shape, dtype = entry["data_offsets"], entry.get("shape"), entry.get("dtype")
    if not isinstance(shape, list) or len(shape) > 8 or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        raise BadFile(f"{path}: shape of {name!r:.80} is not a list of sizes.")
    if not isinstance(dtype, str):
        raise BadFile(f"{path}: dtype of {name!r:.80} is not a name.")
    if not begin <= end <= size:
        raise BadFile(f"{path}: data_offsets of {name!r:.80} lie outside the file.", "Download the model again.")
    elements = 1
    for n in shape:
        elements *= n
    if dtype in DTYPES and elements * DTYPES[dtype][1] != end - begin:
        raise BadFile(f"{path}: {name!r:.80} is {end - begin} bytes, which its shape {shape} does not need.")
    return begin, end, tuple(shape)


def _heads(metadata: dict[str, Any], source: Path) -> Heads:
    keys, values = metadata["qwen35.ssm.group_count"], metadata["qwen35.ssm.time_step_rank"]
    key_dim, inner = metadata["qwen35.ssm.state_size"], metadata["qwen35.ssm.inner_size"]
    for key, n in (("linear_num_key_heads", keys), ("linear_key_head_dim", key_dim)):
        if isinstance(n, bool) or not isinstance(n, int) or not 0 < n <= 4096:
            raise BadFile(f"{source}: {key} is {n!r:.60}, not a head size.")
    if values % keys:
        raise BadFile(f"{source}: {values} value heads cannot be shared by {keys} key heads.")
    return Heads(keys, values, key_dim, inner // values)


def _norms_are_folded(stored: dict[str, StoredTensor], names: dict[str, tuple[str, str]]) -> bool:
    """MLX converters fold the +1 into norms and move the convolution's taps: the latter gives them away."""
    shapes = [stored[hf].shape for hf, (_, kind) in names.items() if kind == "conv"]
    return any(len(shape) == 3 and shape[2] == 1 for shape in shapes)


def _canonical(name: str, hf_name: str, stored: StoredTensor, kind: str, heads: Heads, folded: bool) -> Tensor:
    """A lazily read canonical tensor; matrices keep their type, everything else becomes F32."""
    if stored.dtype not in DTYPES:
        raise BadFile(
            f"{stored.path}: tensor {hf_name} has dtype {stored.dtype!r:.20}, which warpsmith does not read.", _FIX
        )
    source_type = TYPES[DTYPES[stored.dtype][0]]
    shape = stored.shape
    if kind == "conv":
        if len(shape) != 3 or 1 not in shape[1:]:
            raise BadFile(f"{stored.path}: tensor {hf_name} has shape {list(shape)}, expected [channels, 1, taps].")
        shape = (shape[0], shape[1] * shape[2])
    ranks = 2 if kind in MATRIX_KINDS or kind == "conv" else 1
    if len(shape) != ranks or 0 in shape:
        raise BadFile(f"{stored.path}: tensor {hf_name} has shape {list(shape)}, expected {ranks} sizes.")
    _check_heads(stored, hf_name, shape, kind, heads)

    if kind in MATRIX_KINDS:

        def read_matrix() -> np.ndarray:
            elements = stored.bytes.view(ELEMENTS[stored.dtype]).reshape(shape)
            ordered = reorder_heads(elements, kind, heads, to_canonical=True)
            return np.ascontiguousarray(ordered).view(np.uint8)

        return Tensor(name, source_type, shape, read_matrix)

    def read_small() -> np.ndarray:
        values = _values(stored, source_type).reshape(shape)
        if kind == "norm" and not folded:
            values = values + 1
        elif kind == "decay":
            values = -np.exp(values)
        ordered = reorder_heads(values, kind, heads, to_canonical=True)
        return np.ascontiguousarray(ordered, dtype="<f4").reshape(-1, shape[-1]).view(np.uint8)

    return Tensor(name, TYPES["F32"], shape, read_small)


def _values(stored: StoredTensor, source_type: BlockType) -> np.ndarray:
    return dequantize(source_type, stored.bytes)


def _check_heads(stored: StoredTensor, hf_name: str, shape: tuple[int, ...], kind: str, heads: Heads) -> None:
    """Head reordering reshapes by head counts, so they must fit the tensor before it is read."""
    values = heads.value_heads * heads.value_head_dim
    keys = 2 * heads.key_heads * heads.key_head_dim
    expected = {
        "qkv rows": (0, keys + values),
        "conv": (0, keys + values),
        "value rows": (0, values),
        "value columns": (1, values),
        "head rows": (0, heads.value_heads),
        "head vector": (0, heads.value_heads),
        "decay": (0, heads.value_heads),
    }
    if kind in expected:
        axis, size = expected[kind]
        if shape[axis] != size:
            raise BadFile(
                f"{stored.path}: tensor {hf_name} has shape {list(shape)}, and the head counts ask for {size}."
            )


def _chat_template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8", errors="replace")
    if (path / "tokenizer_config.json").exists():
        template = read_json(path / "tokenizer_config.json").get("chat_template")
        return template if isinstance(template, str) else None
    return None
