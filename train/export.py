"""A trained draft as a GGUF file, in llama.cpp's dialect: its layer ids count from the layer that reads a feature."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from warpsmith.checkpoint.dflash import LLAMA_CPP
from warpsmith.checkpoint.gguf_writer import write_gguf

if TYPE_CHECKING:
    from train.draft import DraftConfig

LAYER_NAMES = {
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
TOP_NAMES = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.weight"
    _, layer, rest = stem.split(".", 2)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.weight"


def metadata(config: DraftConfig, name: str) -> dict[str, object]:
    values = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
        "block_size": config.block_size,
        "target_layers": [layer + 1 for layer in config.target_layer_ids],
        "vocab_size": config.vocab_size,
    }
    return {
        "general.architecture": LLAMA_CPP,
        "general.name": name,
        **{f"{LLAMA_CPP}.{key}": value for key, value in values.items()},
        "tokenizer.ggml.mask_token_id": config.mask_token_id,
    }


def write_draft(path: Path, name: str, config: DraftConfig, tensors: Mapping[str, Tensor]) -> None:
    """Matrices as Q8_0, norms as they are."""
    weights = {gguf_name(n): t.detach().float().cpu().numpy() for n, t in tensors.items()}
    write_gguf(path, metadata(config, name), {n: ("Q8_0" if w.ndim == 2 else "F32", w) for n, w in weights.items()})
