"""Write canonical tensors as a Hugging Face model directory: config.json and one or more safetensors files."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from warpsmith.checkpoint.atomic import whole_file
from warpsmith.checkpoint.blocks import TYPES, dequantize
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.hf import MATRIX_KINDS, Heads, config_from_metadata, hf_name, reorder_heads
from warpsmith.checkpoint.quantize import quantize
from warpsmith.checkpoint.safetensors import ELEMENTS, INDEX

MAX_SHARD = 5 << 30


def write_directory(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: str = "BF16"
) -> None:
    """Write `tensors` as `dtype` (BF16, F16 or F32), in shards of at most 5 GB, one tensor in memory at a time.

    Vectors are stored as F32. The tokenizer's files are not written here. Read back, matrices of type `dtype` are the
    same to the bit, and so is every vector that came from such a directory; of others, a norm weight under a half or
    a decay may come back with its last bits rounded, for the numbers stored are weight - 1 and log(-decay).
    """
    layers = metadata["qwen35.block_count"] - metadata.get("qwen35.nextn_predict_layers", 0)
    heads = Heads.of(metadata)
    entries = [(tensor, *hf_name(name, layers)) for name, tensor in tensors.items()]
    shards = _shards(entries, dtype)
    path.mkdir(parents=True, exist_ok=True)
    (path / INDEX).unlink(missing_ok=True)  # one left by an earlier model would be believed
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        many = len(shards) > 1
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if many else "model.safetensors"
        weight_map |= {name: file for _, name, _ in shard}
        _write_shard(path / file, shard, heads, dtype)
    if len(shards) > 1:
        total = sum(_stored_bytes(t, kind, dtype) for t, _, kind in entries)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index, indent=2))
    config = config_from_metadata(metadata, tensors["token_embd.weight"].shape[0], "output.weight" not in tensors)
    config["dtype"] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype]
    (path / "config.json").write_text(json.dumps(config, indent=2))


Entry = tuple[Tensor, str, str]


def _shards(entries: list[Entry], dtype: str) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        nbytes = _stored_bytes(entry[0], entry[2], dtype)
        if shards[-1] and size + nbytes > MAX_SHARD:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += nbytes
    return shards


def _stored_type(kind: str, dtype: str) -> str:
    return dtype if kind in MATRIX_KINDS else "F32"


def _stored_bytes(tensor: Tensor, kind: str, dtype: str) -> int:
    return tensor.elements * TYPES[_stored_type(kind, dtype)].bytes


def _write_shard(path: Path, entries: list[Entry], heads: Heads, dtype: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor, name, kind in entries:
        end = offset + _stored_bytes(tensor, kind, dtype)
        shape = list(tensor.shape)
        if kind == "conv":
            shape.insert(1, 1)
        header[name] = {"dtype": _stored_type(kind, dtype), "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor, _, kind in entries:
            file.write(_stored(tensor, kind, heads, dtype).data)


def _stored(tensor: Tensor, kind: str, heads: Heads, dtype: str) -> np.ndarray:
    """The tensor's bytes as Hugging Face stores it: the inverse of what reading does."""
    if kind in MATRIX_KINDS:
        raw = tensor.raw()
        if tensor.type.name != dtype:
            raw = quantize(TYPES[dtype], dequantize(tensor.type, raw))
        elements = raw.view(ELEMENTS[dtype]).reshape(tensor.shape)
        return np.ascontiguousarray(reorder_heads(elements, kind, heads, to_canonical=False)).view(np.uint8)
    values = tensor.float32()
    with np.errstate(all="ignore"):
        if kind == "norm":
            values = values - 1
        elif kind == "decay":
            values = np.log(-values.astype(np.float64)).astype(np.float32)
    ordered = reorder_heads(values, kind, heads, to_canonical=False)
    return np.ascontiguousarray(ordered, dtype="<f4").reshape(-1).view(np.uint8)
