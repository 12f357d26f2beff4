"""Hugging Face's names and conventions for this family, and the way between them and the canonical ones.

What differs: norm weights are stored without their +1, `A_log` is not yet -exp'ed, the convolution has a middle axis,
and value heads are grouped by key head (value head h pairs with key head h div r) where canonical order is tiled
(h mod nk). Head order touches rows of some matrices, columns of the output projection, and every per-head vector.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from warpsmith.checkpoint.canonical import brief, rope_sections
from warpsmith.errors import BadFile, BadRequest

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
_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.(.+)", re.DOTALL)
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.(.+)")
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

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Heads:
        values = metadata["qwen35.ssm.time_step_rank"]
        key_dim, inner = metadata["qwen35.ssm.state_size"], metadata["qwen35.ssm.inner_size"]
        return cls(metadata["qwen35.ssm.group_count"], values, key_dim, inner // values)

    @property
    def ratio(self) -> int:
        return self.value_heads // self.key_heads


def canonical_name(hf_name: str, layers: int) -> tuple[str, str] | None:
    """(canonical name, kind) of a Hugging Face tensor; None if a text model of so many layers has no such tensor."""
    name = _PREFIX.sub("", hf_name)
    if found := _TO_MODEL.get(name):
        return found
    if is_mtp := name.startswith("mtp."):
        name = name.removeprefix("mtp.")
        if found := _TO_MTP.get(name):
            return f"blk.{layers}.{found[0]}", found[1]
    if (match := _LAYER.fullmatch(name)) and (found := _TO_LAYER.get(match[2])):
        layer = int(match[1])
        if layer < (1 if is_mtp else layers):
            return f"blk.{layers if is_mtp else layer}.{found[0]}", found[1]
    return None


def changes_a_layer(hf_name: str) -> bool:
    """Whether a tensor belongs to a layer of the text model, so that leaving it out would change what is computed."""
    name = _PREFIX.sub("", hf_name)
    return _LAYER.fullmatch(name) is not None and not name.endswith(".rotary_emb.inv_freq")


def hf_name(name: str, layers: int) -> tuple[str, str]:
    """(Hugging Face name, kind) of a canonical tensor."""
    if name in MODEL_NAMES:
        hf, kind = MODEL_NAMES[name]
        return (hf if hf.startswith("lm_head") else "model." + hf), kind
    if block := _BLOCK.fullmatch(name):
        layer, rest = int(block[1]), block[2]
        if layer == layers and rest in MTP_NAMES:
            return "mtp." + MTP_NAMES[rest][0], MTP_NAMES[rest][1]
        if layer <= layers and rest in LAYER_NAMES:
            hf, kind = LAYER_NAMES[rest]
            return (f"model.layers.{layer}." if layer < layers else "mtp.layers.0.") + hf, kind
    raise BadRequest(f"Tensor {brief(name)} has no name in a Hugging Face model.", "Write a GGUF file instead.")


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
    """Canonical metadata from a `config.json`, its text part if it has one. MTP blocks are not counted yet."""
    root = _Fields(config, source)
    text = _Fields(root.mapping("text_config") or config, source)
    kind = text.get("model_type", root.get("model_type"))
    if kind not in ("qwen3_5", "qwen3_5_text"):
        raise BadFile(
            f"{source}: model_type is {brief(kind)}, and warpsmith runs only dense Qwen3.5 models (qwen3_5).",
            "Choose a Qwen3.5, Qwen3.6 or Qwen3.8 dense model.",
        )
    for key, only in (("hidden_act", "silu"), ("attention_bias", False), ("attn_output_gate", True)):
        if (value := text.get(key, only)) != only:
            raise BadFile(f"{source}: {key} is {brief(value)}, and warpsmith computes only {only!r}.")

    # older files keep RoPE's settings beside the others, newer ones in an object of their own
    beside = {key: text.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    rope = _Fields({**beside, **text.mapping("rope_parameters"), **text.mapping("rope_scaling")}, source)
    for key in ("rope_type", "type"):
        if (scaling := rope.get(key, "default")) not in ("default", "mrope"):
            raise BadFile(f"{source}: {key} asks for {brief(scaling)} RoPE, which warpsmith does not compute.")

    layers = text.count("num_hidden_layers", high=1024)
    head_dim = text.count("head_dim", 256)
    rotary_dim = int(head_dim * rope.number("partial_rotary_factor", 0.25, high=1))
    key_heads, value_heads = text.count("linear_num_key_heads"), text.count("linear_num_value_heads")
    if value_heads % key_heads:
        raise BadFile(
            f"{source}: linear_num_value_heads is {value_heads}, which {key_heads} key heads cannot share evenly."
        )
    values: dict[str, Any] = {
        "block_count": layers,
        "context_length": text.count("max_position_embeddings", 262_144, high=1 << 40),
        "embedding_length": text.count("hidden_size", high=1 << 20),
        "feed_forward_length": text.count("intermediate_size", high=1 << 22),
        "attention.head_count": text.count("num_attention_heads"),
        "attention.head_count_kv": text.count("num_key_value_heads"),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": text.number("rms_norm_eps", 1e-6),
        "rope.dimension_count": rotary_dim,
        "rope.dimension_sections": rope_sections(rotary_dim),
        "rope.freq_base": rope.number("rope_theta"),
        "ssm.conv_kernel": text.count("linear_conv_kernel_dim", 4, high=16),
        "ssm.inner_size": value_heads * text.count("linear_value_head_dim", 128),
        "ssm.state_size": text.count("linear_key_head_dim", 128),
        "ssm.time_step_rank": value_heads,
        "ssm.group_count": key_heads,
        "full_attention_interval": text.count("full_attention_interval", 4, high=1024),
    }
    if (types := text.get("layer_types")) is not None:
        known = ("linear_attention", "full_attention")
        if not isinstance(types, list) or len(types) != layers or not all(t in known for t in types):
            raise BadFile(
                f"{source}: layer_types does not say linear_attention or full_attention for each of {layers} layers."
            )
        recurrent = [t == "linear_attention" for t in types]
        if recurrent != [(i + 1) % values["full_attention_interval"] != 0 for i in range(layers)]:
            del values["full_attention_interval"]
            values["attention.recurrent_layers"] = recurrent
    return {"general.architecture": "qwen35"} | {f"qwen35.{key}": value for key, value in values.items()}


class _Fields:
    """The fields of a configuration; one that is missing or makes no sense is an error that names it."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise BadFile(f"{self.source}: {key} is {brief(value)}, expected an object.")
        return value

    def count(self, key: str, default: int | None = None, high: int = 4096) -> int:
        value = self._needed(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise BadFile(f"{self.source}: {key} is {brief(value)}, expected a whole number from 1 to {high}.")
        return value

    def number(self, key: str, default: float | None = None, high: float = 1e30) -> float:
        value = self._needed(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
            raise BadFile(f"{self.source}: {key} is {brief(value)}, expected a number from 0 to {high:g}.")
        return value

    def _needed(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise BadFile(f"{self.source}: {key} is missing.")
        return value


def config_from_metadata(metadata: Mapping[str, Any], vocab: int, tied: bool) -> dict[str, Any]:
    """A `config.json` for canonical metadata: the inverse of `metadata_from_config`."""
    values = {key.removeprefix("qwen35."): value for key, value in metadata.items() if key.startswith("qwen35.")}
    mtp = values.get("nextn_predict_layers", 0)
    layers = values["block_count"] - mtp
    interval = values.get("full_attention_interval", 4)
    recurrent = values.get("attention.recurrent_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    head_dim, rotary_dim = values["attention.key_length"], values["rope.dimension_count"]
    share = rotary_dim / head_dim
    if int(head_dim * share) != rotary_dim:  # readers multiply and round down
        share = math.nextafter(share, 1)

    def one(key: str) -> int:
        """A count that some files give for each layer, with 0 for layers that have none of it."""
        value = values[key]
        return max(value) if isinstance(value, list) else value

    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "num_hidden_layers": layers,
        "mtp_num_hidden_layers": mtp,
        "max_position_embeddings": values["context_length"],
        "hidden_size": values["embedding_length"],
        "intermediate_size": one("feed_forward_length"),
        "num_attention_heads": one("attention.head_count"),
        "num_key_value_heads": one("attention.head_count_kv"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": values["attention.layer_norm_rms_epsilon"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": values["rope.freq_base"],
            "partial_rotary_factor": share,
            "mrope_section": rope_sections(rotary_dim)[:3],
            "mrope_interleaved": True,
        },
        "linear_conv_kernel_dim": values["ssm.conv_kernel"],
        "linear_key_head_dim": values["ssm.state_size"],
        "linear_value_head_dim": values["ssm.inner_size"] // values["ssm.time_step_rank"],
        "linear_num_key_heads": values["ssm.group_count"],
        "linear_num_value_heads": values["ssm.time_step_rank"],
        "layer_types": ["linear_attention" if r else "full_attention" for r in recurrent[:layers]],
    }
