"""Hugging Face model directories made without the code under test, and what should be read from them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from warpsmith.checkpoint.canonical import Checkpoint
from warpsmith.model.config import Config

Stored = tuple[str, tuple[int, ...], bytes]  # dtype, shape, data


def real_config(config: Config) -> dict[str, Any]:
    """config.json as the repositories of the family have it: a multimodal model with the text model inside."""
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": 248044,
            "full_attention_interval": 4,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "hidden_size": config.hidden,
            "initializer_range": 0.02,
            "intermediate_size": config.ffn,
            "layer_types": ["linear_attention" if r else "full_attention" for r in config.recurrent],
            "linear_conv_kernel_dim": config.conv_kernel,
            "linear_key_head_dim": config.key_head_dim,
            "linear_num_key_heads": config.key_heads,
            "linear_num_value_heads": config.value_heads,
            "linear_value_head_dim": config.value_head_dim,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": config.context,
            "mlp_only_layers": [],
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": config.heads,
            "num_hidden_layers": config.layers,
            "num_key_value_heads": config.kv_heads,
            "rms_norm_eps": config.eps,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": config.rotary_dim / config.head_dim,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "tie_word_embeddings": config.tied,
            "use_cache": True,
            "vocab_size": config.vocab,
        },
        "tie_word_embeddings": config.tied,
        "transformers_version": "4.57.0.dev0",
        "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
        "vision_start_token_id": 248053,
    }


def hf_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names without a prefix, and shapes, of a checkpoint's tensors."""
    c, h = config, config.hidden
    values, channels = c.value_heads * c.value_head_dim, 2 * c.key_heads * c.key_head_dim
    channels += values
    common = {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "mlp.gate_proj.weight": (c.ffn, h),
        "mlp.up_proj.weight": (c.ffn, h),
        "mlp.down_proj.weight": (h, c.ffn),
    }
    attention = {
        "self_attn.q_proj.weight": (2 * c.heads * c.head_dim, h),
        "self_attn.k_proj.weight": (c.kv_heads * c.head_dim, h),
        "self_attn.v_proj.weight": (c.kv_heads * c.head_dim, h),
        "self_attn.o_proj.weight": (h, c.heads * c.head_dim),
        "self_attn.q_norm.weight": (c.head_dim,),
        "self_attn.k_norm.weight": (c.head_dim,),
    }
    delta = {
        "linear_attn.in_proj_qkv.weight": (channels, h),
        "linear_attn.in_proj_z.weight": (values, h),
        "linear_attn.in_proj_b.weight": (c.value_heads, h),
        "linear_attn.in_proj_a.weight": (c.value_heads, h),
        "linear_attn.conv1d.weight": (channels, 1, c.conv_kernel),
        "linear_attn.A_log": (c.value_heads,),
        "linear_attn.dt_bias": (c.value_heads,),
        "linear_attn.norm.weight": (c.value_head_dim,),
        "linear_attn.out_proj.weight": (h, values),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c.vocab, h), "norm.weight": (h,)}
    if not c.tied:
        shapes["lm_head.weight"] = (c.vocab, h)
    for layer, recurrent in enumerate(c.recurrent):
        shapes |= {f"layers.{layer}.{name}": s for name, s in (common | (delta if recurrent else attention)).items()}
    if c.mtp_layers:
        shapes |= {f"mtp.layers.0.{name}": shape for name, shape in (common | attention).items()}
        shapes |= {
            "mtp.fc.weight": (h, 2 * h),
            "mtp.pre_fc_norm_embedding.weight": (h,),
            "mtp.pre_fc_norm_hidden.weight": (h,),
            "mtp.norm.weight": (h,),
        }
    return shapes


def hf_values(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights that F32, F16 and BF16 all hold exactly."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(-127, 128, shape).astype(np.float32) / 64 for name, shape in hf_shapes(config).items()}


def prefixed(values: Mapping[str, np.ndarray], prefix: str = "model.language_model.") -> dict[str, np.ndarray]:
    """Full names: the prefix goes on everything but the head and the MTP block."""
    return {(name if name.startswith(("lm_head", "mtp.")) else prefix + name): x for name, x in values.items()}


def as_mlx(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What MLX's converters make of a checkpoint: other names, taps before channels' axis, norms with their +1."""
    converted = {}
    for name, x in values.items():
        if name.startswith("mtp."):
            continue
        if name.endswith("conv1d.weight"):
            x = x.transpose(0, 2, 1)
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            x = x + 1
        converted["language_model." + ("" if name.startswith("lm_head") else "model.") + name] = x
    return converted


def encode(values: np.ndarray, dtype: str) -> Stored:
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, "<f4").view("<u4")
        assert not (bits & 0xFFFF).any()
        return dtype, values.shape, (bits >> 16).astype("<u2").tobytes()
    return dtype, values.shape, values.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def write_file(path: Path, tensors: Mapping[str, Stored]) -> None:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def write_model(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray | Stored], dtype: str = "F32"
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    stored = {name: encode(x, dtype) if isinstance(x, np.ndarray) else x for name, x in tensors.items()}
    write_file(path / "model.safetensors", stored)
    return path


def canonical_values(values: Mapping[str, np.ndarray], config: Config) -> dict[str, np.ndarray]:
    """What reading `values` should give, by the definitions: a slow and independent second opinion."""
    keys, ratio, width = config.key_heads, config.value_heads // config.key_heads, config.value_head_dim
    slots = [(slot % keys) * ratio + slot // keys for slot in range(config.value_heads)]  # slot -> Hugging Face's head
    rows = [head * width + i for head in slots for i in range(width)]
    first = 2 * keys * config.key_head_dim
    channels = [*range(first), *(first + row for row in rows)]
    rename = {
        "embed_tokens.weight": "token_embd.weight",
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "mtp.fc.weight": "nextn.eh_proj.weight",
        "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
        "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
        "mtp.norm.weight": "nextn.shared_head_norm.weight",
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "mlp.gate_proj.weight": "ffn_gate.weight",
        "mlp.up_proj.weight": "ffn_up.weight",
        "mlp.down_proj.weight": "ffn_down.weight",
        "self_attn.q_proj.weight": "attn_q.weight",
        "self_attn.k_proj.weight": "attn_k.weight",
        "self_attn.v_proj.weight": "attn_v.weight",
        "self_attn.o_proj.weight": "attn_output.weight",
        "self_attn.q_norm.weight": "attn_q_norm.weight",
        "self_attn.k_norm.weight": "attn_k_norm.weight",
        "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
        "linear_attn.in_proj_z.weight": "attn_gate.weight",
        "linear_attn.in_proj_b.weight": "ssm_beta.weight",
        "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
        "linear_attn.conv1d.weight": "ssm_conv1d.weight",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.norm.weight": "ssm_norm.weight",
        "linear_attn.out_proj.weight": "ssm_out.weight",
    }
    expected = {}
    for name, x in values.items():
        block, tail = "", name
        if name.startswith("layers."):
            _, layer, tail = name.split(".", 2)
            block = f"blk.{layer}."
        elif name.startswith("mtp."):
            block, tail = f"blk.{config.layers}.", name.removeprefix("mtp.layers.0.")
        match tail.removeprefix("linear_attn."):
            case "in_proj_qkv.weight":
                x = x[channels]
            case "conv1d.weight":
                x = x[channels][:, 0]
            case "in_proj_z.weight":
                x = x[rows]
            case "out_proj.weight":
                x = x[:, rows]
            case "in_proj_a.weight" | "in_proj_b.weight" | "dt_bias":
                x = x[slots]
            case "A_log":
                x = -np.exp(x[slots].astype(np.float64)).astype(np.float32)
            case _ if "norm" in tail and tail != "linear_attn.norm.weight":
                x = x + 1
        expected[block + rename[tail]] = x
    return expected


def same_values(checkpoint: Checkpoint, expected: dict[str, np.ndarray]) -> None:
    assert checkpoint.tensors.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].float32(), values, err_msg=name)
