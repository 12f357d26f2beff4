"""Random DFlash drafts for tests, written in each of the formats that drafts come in."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from random_models import SMALL
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.dflash import DFlashConfig, DraftFile, expected_shapes, open_draft
from warpsmith.checkpoint.gguf_writer import GGUFWriter, Typed, write_gguf
from warpsmith.model.config import Config

FORMATS = ("safetensors", "lucebox", "llama.cpp")

_TOP = {
    "lucebox": {"fc": "dflash.fc", "hidden_norm": "dflash.hidden_norm", "norm": "output_norm"},
    "llama.cpp": {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"},
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def draft_config(target: Config, **changes: Any) -> DFlashConfig:
    layers = changes.get("layers", 2)
    settings: dict[str, Any] = {
        "source": "random",
        "layers": layers,
        "hidden": target.hidden,
        "ffn": 80,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "rope_theta": 10_000.0,
        "block": 6,
        "mask_token": target.vocab - 1,
        "target_layers": (0, 2, 3),
        "windows": (None,) * layers,
        "causal": (False,) * layers,
        "vocab": target.vocab,
        "target_depth": target.layers,
    }
    return DFlashConfig(**(settings | changes))


FULL = draft_config(SMALL)  # attends to everything before it
SLIDING = draft_config(SMALL, layers=3, windows=(7, None, 7), causal=(True, False, True))


def random_weights(config: DFlashConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Values large enough that a mistake anywhere shows, and exact in bf16 so that no format rounds them."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        values = rng.standard_normal(shape) * 1.5 / np.sqrt(shape[-1])
        if "norm" in name:
            values = 1 + 0.3 * rng.standard_normal(shape)
        bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        weights[name] = bits.view(np.float32)
    return weights


def draft_in_memory(config: DFlashConfig, seed: int = 0) -> DraftFile:
    return DraftFile(config, {name: _tensor(name, values) for name, values in random_weights(config, seed).items()})


def _tensor(name: str, values: np.ndarray) -> Tensor:
    raw = np.ascontiguousarray(values).reshape(-1, values.shape[-1]).view(np.uint8)
    return Tensor(name, TYPES["F32"], values.shape, lambda: raw)


def config_json(config: DFlashConfig, said_causal: bool | None = None) -> dict[str, Any]:
    c = config
    window = next((w for w in c.windows if w is not None), None)
    data: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": c.hidden,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
        "sliding_window": window,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in c.windows],
        "block_size": c.block,
        "num_target_layers": c.target_depth,
        "dflash_config": {"mask_token_id": c.mask_token, "target_layer_ids": list(c.target_layers)},
        "vocab_size": c.vocab,
    }
    if said_causal is not None:
        data["is_causal"] = said_causal
    return data


def gguf_metadata(config: DFlashConfig, dialect: str, said_causal: bool | None = None) -> dict[str, Any]:
    c = config
    arch = "dflash" if dialect == "llama.cpp" else "qwen35-dflash-draft"
    window = next((w for w in c.windows if w is not None), None)
    values: dict[str, Any] = {
        "embedding_length": c.hidden,
        "block_count": c.layers,
        "feed_forward_length": c.ffn,
        "attention.head_count": c.heads,
        "attention.head_count_kv": c.kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.eps,
        "rope.freq_base": c.rope_theta,
    }
    if window is not None:
        values["attention.sliding_window"] = window
        values["attention.sliding_window_pattern"] = Typed("bool", [w is not None for w in c.windows])
    if said_causal is not None:
        values["attention.causal"] = said_causal
    rest: dict[str, Any] = {}
    if dialect == "llama.cpp":
        values |= {"block_size": c.block, "target_layers": [i + 1 for i in c.target_layers]}
        rest["tokenizer.ggml.mask_token_id"] = c.mask_token
    else:
        values |= {
            "dflash.block_size": c.block,
            "dflash.mask_token_id": c.mask_token,
            "dflash.n_target_layers": len(c.target_layers),
            "dflash.target_layer_ids": list(c.target_layers),
        }
    return {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in values.items()} | rest


def write_draft(
    path: Path,
    format: str,
    config: DFlashConfig,
    weights: Mapping[str, np.ndarray],
    *,
    said_causal: bool | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a draft; `metadata` replaces what the configuration would say (None removes a key). Returns its path."""
    if format == "safetensors":
        path.mkdir(parents=True)
        data = _changed(config_json(config, said_causal), metadata)
        (path / "config.json").write_text(json.dumps(data))
        _write_bf16(path / "model.safetensors", weights)
        return path
    tensors = {}
    for name, values in weights.items():
        tensors[gguf_name(name, format)] = ("BF16" if values.ndim > 1 else "F32", values)
    file = path.with_suffix(".gguf")
    write_gguf(file, _changed(gguf_metadata(config, format, said_causal), metadata), tensors)
    return file


def write_holes(path: Path, format: str, config: DFlashConfig) -> Path:
    """A draft of any size whose weights are holes in the file, which read as zeros."""
    shapes = expected_shapes(config)
    if format == "safetensors":
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config_json(config)))
        header, end = {}, 0
        for name, shape in shapes.items():
            size = 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        file = path / "model.safetensors"
        file.write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(file, 8 + len(text) + end)
        return path
    file = path.with_suffix(".gguf")
    writer = GGUFWriter(file, gguf_metadata(config, format))
    for name, shape in shapes.items():
        writer.declare(gguf_name(name, format), TYPES["BF16" if len(shape) > 1 else "F32"], shape)
    part = writer._open()
    part.truncate(part.tell() + writer._offset)
    part.close()
    os.replace(part.name, file)
    return file


def fill_holes(path: Path, rows: int, seed: int = 0) -> None:
    """Write random numbers into the first rows of every tensor of a draft in bf16 (norms, if a GGUF file's, in f32)."""
    rng = np.random.default_rng(seed)
    for name, tensor in open_draft(path).tensors.items():
        values = rng.standard_normal((min(rows, tensor.elements // tensor.shape[-1]), tensor.shape[-1])) * 0.02
        if "norm" in name:
            values += 1
        bits = values.astype(np.float32).view(np.uint32)
        stored = bits & np.uint32(0xFFFF0000) if tensor.type.name == "F32" else (bits >> 16).astype(np.uint16)
        view = whole = tensor.raw()
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        start = view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        file = path if path.is_file() else path / "model.safetensors"
        with file.open("r+b") as out:
            out.seek(start)
            out.write(stored.tobytes())


def gguf_name(name: str, dialect: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("layers."):
        _, layer, rest = stem.split(".", 2)
        return f"blk.{layer}.{_LAYER[rest]}.weight"
    return f"{_TOP[dialect].get(stem, stem)}.weight"


def _changed(values: dict[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
    return {k: v for k, v in (values | dict(changes or {})).items() if v is not None}


def _write_bf16(path: Path, weights: Mapping[str, np.ndarray]) -> None:
    header, body = {}, b""
    for name, values in weights.items():
        data = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype("<u2").tobytes()
        span = [len(body), len(body) + len(data)]
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": span}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
