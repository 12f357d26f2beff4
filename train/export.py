"""A trained draft as a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from warpsmith.checkpoint.dflash import DFlashConfig
from warpsmith.checkpoint.dflash_writer import to_gguf_metadata, to_gguf_name
from warpsmith.checkpoint.gguf_writer import write_gguf

if TYPE_CHECKING:
    from train.draft import DraftConfig


def shape_of(config: DraftConfig, name: str) -> DFlashConfig:
    """All layers see all the way, and the whole block."""
    c, layers = config, config.num_hidden_layers
    return DFlashConfig(
        source=name, layers=layers, hidden=c.hidden_size, ffn=c.intermediate_size, heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads, head_dim=c.head_dim, rope_theta=c.rope_theta, block=c.block_size,
        mask_token=c.mask_token_id, target_layers=c.target_layer_ids, windows=(None,) * layers,
        causal=(False,) * layers, eps=c.rms_norm_eps, vocab=c.vocab_size,
    )  # fmt: skip


def write_draft(path: Path, name: str, config: DraftConfig, tensors: Mapping[str, Tensor]) -> None:
    """Matrices as Q8_0, norms as they are."""
    weights = {to_gguf_name(n): t.detach().float().cpu().numpy() for n, t in tensors.items()}
    metadata = to_gguf_metadata(shape_of(config, name)) | {"general.name": name}
    write_gguf(path, metadata, {n: ("Q8_0" if w.ndim == 2 else "F32", w) for n, w in weights.items()})
