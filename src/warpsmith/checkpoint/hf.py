"""Hugging Face's names and conventions for this family, and the way between them and the canonical ones.

What differs: norm weights are stored without their +1, `A_log` is not yet -exp'ed, the convolution has a middle axis,
and value heads are grouped by key head (value head h pairs with key head h div r) where canonical order is tiled
(h mod nk). Head order touches rows of some matrices, columns of the output projection, and every per-head vector.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from warpsmith.errors import BadFile

# canonical name in a block -> (Hugging Face name in a layer, how it is stored)
LAYER_NAMES: dict[str, tuple[str, str]] = {
    "attn_norm.weight": ("input_layernorm.weight", "norm"),
    "post_attention_norm.weight": ("post_attention_layernorm.weight", "norm"),
    "ffn_gate.weight": ("mlp.gate_proj.weight", "matrix"),
    "ffn_up.weight": ("mlp.up_proj.weight", "matrix"),
    "ffn_down.weight": ("mlp.down_proj.weight", "matrix"),
    "attn_q.weight": ("self_attn.q_proj.weight", "matrix"),
    "attn_k.weight": ("self_attn.k_proj.weight", "matrix"),
    "attn_v.weight": ("self_attn.v_proj.weight", "matrix"),
    "attn_output.weight": ("self_attn.o_proj.weight", "matrix"),
    "attn_q_norm.weight": ("self_attn.q_norm.weight", "norm"),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", "norm"),
    "attn_qkv.weight": ("linear_attn.in_proj_qkv.weight", "qkv rows"),
    "attn_gate.weight": ("linear_attn.in_proj_z.weight", "value rows"),
    "ssm_beta.weight": ("linear_attn.in_proj_b.weight", "head rows"),
    "ssm_alpha.weight": ("linear_attn.in_proj_a.weight", "head rows"),
    "ssm_conv1d.weight": ("linear_attn.conv1d.weight", "conv"),
    "ssm_dt.bias": ("linear_attn.dt_bias", "head vector"),
    "ssm_a": ("linear_attn.A_log", "decay"),
    "ssm_norm.weight": ("linear_attn.norm.weight", "vector"),
    "ssm_out.weight": ("linear_attn.out_proj.weight", "value columns"),
}
MODEL_NAMES: dict[str, tuple[str, str]] = {
    "token_embd.weight": ("embed_tokens.weight", "matrix"),
    "output_norm.weight": ("norm.weight", "norm"),
    "output.weight": ("lm_head.weight", "matrix"),
}
MTP_NAMES: dict[str, tuple[str, str]] = {
    "nextn.eh_proj.weight": ("fc.weight", "matrix"),
    "nextn.enorm.weight": ("pre_fc_norm_embedding.weight", "norm"),
    "nextn.hnorm.weight": ("pre_fc_norm_hidden.weight", "norm"),
    "nextn.shared_head_norm.weight": ("norm.weight", "norm"),
}
MATRIX_KINDS = frozenset({"matrix", "qkv rows", "value rows", "head rows", "value columns"})

_PREFIX = re.compile(r"^(model\.)?(language_model\.)?(model\.)?")
_LAYER = re.compile(r"^layers\.(\d+)\.(.+)$")
_TO_LAYER = {hf: (name, kind) for name, (hf, kind) in LAYER_NAMES.items()}
_TO_MODEL = {hf: (name, kind) for name, (hf, kind) in MODEL_NAMES.items()}
_TO_MTP = {hf: (name, kind) for name, (hf, kind) in MTP_NAMES.items()}


@dataclass(frozen=True)
class Heads:
    """The DeltaNet's head counts, which is all a conversion needs to know of a model."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int

    @property
    def ratio(self) -> int:
        return self.value_heads // self.key_heads


def canonical_name(hf_name: str, layers: int) -> tuple[str, str] | None:
    """(canonical name, kind) of a Hugging Face tensor; None for tensors that are not part of the text model."""
    name = _PREFIX.sub("", hf_name)
    if name.startswith("mtp."):
        name = name.removeprefix("mtp.")
        if found := _TO_MTP.get(name):
            return f"blk.{layers}.{found[0]}", found[1]
        offset = layers
    elif found := _TO_MODEL.get(name):
        return found
    else:
        offset = 0
    if (match := _LAYER.match(name)) and (found := _TO_LAYER.get(match[2])):
        return f"blk.{offset + int(match[1])}.{found[0]}", found[1]
    return None


def hf_name(name: str, layers: int) -> tuple[str, str]:
    """(Hugging Face name, kind) of a canonical tensor."""
    if name in MODEL_NAMES:
        hf, kind = MODEL_NAMES[name]
        return (hf if hf.startswith("lm_head") else "model." + hf), kind
    _, block, rest = name.split(".", 2)
    prefix = f"model.layers.{block}." if int(block) < layers else f"mtp.layers.{int(block) - layers}."
    if rest in MTP_NAMES:
        return "mtp." + MTP_NAMES[rest][0], MTP_NAMES[rest][1]
    hf, kind = LAYER_NAMES[rest]
    return prefix + hf, kind


def reorder_heads(array: np.ndarray, kind: str, heads: Heads, *, to_canonical: bool) -> np.ndarray:
    """Move value heads between grouped (Hugging Face) and tiled (canonical) order, wherever `kind` has them."""
    if heads.ratio == 1:
        return array
    outer, inner = (heads.key_heads, heads.ratio) if to_canonical else (heads.ratio, heads.key_heads)

    def swap(a: np.ndarray, axis: int, width: int) -> np.ndarray:
        split = a.reshape(*a.shape[:axis], outer, inner, width, *a.shape[axis + 1 :])
        return split.swapaxes(axis, axis + 1).reshape(a.shape)

    if kind in ("qkv rows", "conv"):
        keys = 2 * heads.key_heads * heads.key_head_dim
        return np.concatenate([array[:keys], swap(array[keys:], 0, heads.value_head_dim)])
    if kind == "value rows":
        return swap(array, 0, heads.value_head_dim)
    if kind == "value columns":
        return swap(array, 1, heads.value_head_dim)
    if kind in ("head rows", "head vector", "decay"):
        return swap(array, 0, 1)
    return array


def metadata_from_config(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Canonical metadata from a `config.json`, its text part if it has one."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise BadFile(f"{source}: text_config is not an object.")
    kind = text.get("model_type", config.get("model_type"))
    if kind not in ("qwen3_5", "qwen3_5_text"):
        raise BadFile(
            f"{source}: model_type is {kind!r}, and warpsmith runs only dense Qwen3.5 models (qwen3_5).",
            "Choose a Qwen3.5, Qwen3.6 or Qwen3.8 dense model.",
        )
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise BadFile(f"{source}: rope_parameters is not an object.")

    def need(key: str, where: Mapping[str, Any] = text) -> Any:
        if key not in where:
            raise BadFile(f"{source}: {key} is missing.")
        return where[key]

    head_dim = text.get("head_dim", 256)
    rotary_share = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    value_heads, value_dim = need("linear_num_value_heads"), text.get("linear_value_head_dim", 128)
    for key, value in (
        ("head_dim", head_dim),
        ("linear_num_value_heads", value_heads),
        ("linear_value_head_dim", value_dim),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 4096:
            raise BadFile(f"{source}: {key} is {value!r:.60}, not a head size.")
    if isinstance(rotary_share, bool) or not isinstance(rotary_share, int | float) or not 0 < rotary_share <= 1:
        raise BadFile(f"{source}: partial_rotary_factor is {rotary_share!r:.60}, not a fraction.")
    values: dict[str, Any] = {
        "block_count": need("num_hidden_layers"),
        "context_length": text.get("max_position_embeddings", 262_144),
        "embedding_length": need("hidden_size"),
        "feed_forward_length": need("intermediate_size"),
        "attention.head_count": need("num_attention_heads"),
        "attention.head_count_kv": need("num_key_value_heads"),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": text.get("rms_norm_eps", 1e-6),
        "rope.dimension_count": int(head_dim * rotary_share),
        "rope.freq_base": rope.get("rope_theta", text.get("rope_theta", 1e7)),
        "ssm.conv_kernel": text.get("linear_conv_kernel_dim", 4),
        "ssm.inner_size": value_heads * value_dim,
        "ssm.state_size": text.get("linear_key_head_dim", 128),
        "ssm.time_step_rank": value_heads,
        "ssm.group_count": need("linear_num_key_heads"),
        "full_attention_interval": text.get("full_attention_interval", 4),
    }
    if (scaling := rope.get("rope_type", rope.get("type"))) not in (None, "default"):
        values["rope.scaling.type"] = scaling
    if (types := text.get("layer_types")) is not None:
        if not isinstance(types, list) or not set(map(str, types)) <= {"linear_attention", "full_attention"}:
            raise BadFile(f"{source}: layer_types holds something else than linear_attention and full_attention.")
        values["attention.recurrent_layers"] = [kind == "linear_attention" for kind in types]
    return {"general.architecture": "qwen35"} | {f"qwen35.{key}": value for key, value in values.items()}


def config_from_metadata(metadata: Mapping[str, Any], vocab: int, tied: bool) -> dict[str, Any]:
    """A `config.json` for canonical metadata: the inverse of `metadata_from_config`."""
    values = {key.removeprefix("qwen35."): value for key, value in metadata.items() if key.startswith("qwen35.")}
    mtp = values.get("nextn_predict_layers", 0)
    layers = values["block_count"] - mtp
    interval = values.get("full_attention_interval", 4)
    recurrent = values.get("attention.recurrent_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    head_dim = values["attention.key_length"]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "num_hidden_layers": layers,
        "mtp_num_hidden_layers": mtp,
        "max_position_embeddings": values["context_length"],
        "hidden_size": values["embedding_length"],
        "intermediate_size": values["feed_forward_length"],
        "num_attention_heads": values["attention.head_count"],
        "num_key_value_heads": values["attention.head_count_kv"],
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": values["attention.layer_norm_rms_epsilon"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": values["rope.freq_base"],
            "partial_rotary_factor": values["rope.dimension_count"] / head_dim,
            "mrope_section": values.get("rope.dimension_sections", [11, 11, 10])[:3],
            "mrope_interleaved": True,
        },
        "linear_conv_kernel_dim": values["ssm.conv_kernel"],
        "linear_key_head_dim": values["ssm.state_size"],
        "linear_value_head_dim": values["ssm.inner_size"] // values["ssm.time_step_rank"],
        "linear_num_key_heads": values["ssm.group_count"],
        "linear_num_value_heads": values["ssm.time_step_rank"],
        "layer_types": ["linear_attention" if r else "full_attention" for r in recurrent[:layers]],
    }
