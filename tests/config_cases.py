"""Configurations as files of the family have them, and reading them."""

from __future__ import annotations

from typing import Any

from warpsmith.checkpoint import hf
from warpsmith.model.config import SIZES, Config, config_from_metadata


def real_metadata(config: Config) -> dict[str, Any]:
    """What llama.cpp's converter writes, spelled out here and not taken from our writer."""
    return {
        "general.architecture": "qwen35",
        "general.name": config.name,
        "qwen35.block_count": config.layers + config.mtp_layers,
        "qwen35.context_length": 262144,
        "qwen35.embedding_length": config.hidden,
        "qwen35.feed_forward_length": config.ffn,
        "qwen35.attention.head_count": config.heads,
        "qwen35.attention.head_count_kv": config.kv_heads,
        "qwen35.attention.key_length": 256,
        "qwen35.attention.value_length": 256,
        "qwen35.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,  # 1e-6 as float32 has it
        "qwen35.rope.dimension_sections": [11, 11, 10, 0],
        "qwen35.rope.dimension_count": 64,
        "qwen35.rope.freq_base": 10000000.0,
        "qwen35.ssm.conv_kernel": 4,
        "qwen35.ssm.inner_size": config.value_heads * 128,
        "qwen35.ssm.state_size": 128,
        "qwen35.ssm.time_step_rank": config.value_heads,
        "qwen35.ssm.group_count": 16,
        "qwen35.full_attention_interval": 4,
        **({"qwen35.nextn_predict_layers": config.mtp_layers} if config.mtp_layers else {}),
    }


def from_metadata(metadata: dict[str, Any], config: Config = SIZES["9B"]) -> Config:
    return config_from_metadata(metadata, config.vocab, config.tied, "model.gguf")


def from_config(config_json: dict[str, Any], config: Config = SIZES["9B"]) -> Config:
    return from_metadata(hf.metadata_from_config(config_json, "config.json"), config)
