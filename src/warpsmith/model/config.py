"""The shape of a dense Qwen3.5: read from canonical metadata, or one of the family's named sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from warpsmith.checkpoint.canonical import brief, rope_sections
from warpsmith.errors import BadFile

ARCHITECTURE = "qwen35"


@dataclass(frozen=True)
class Config:
    """Everything a forward pass needs to know besides the weights."""

    layers: int  # executed layers; MTP blocks are not among them
    hidden: int
    ffn: int
    vocab: int  # rows of the embedding, of which the tokenizer may use fewer
    # gated attention
    heads: int
    kv_heads: int
    # gated DeltaNet
    key_heads: int
    value_heads: int
    recurrent: tuple[bool, ...]  # per layer: True = DeltaNet, False = attention
    head_dim: int = 256
    rotary_dim: int = 64
    rope_theta: float = 1e7
    key_head_dim: int = 128
    value_head_dim: int = 128
    conv_kernel: int = 4
    eps: float = 1e-6
    context: int = 262_144
    tied: bool = False
    mtp_layers: int = 0
    name: str = ""

    @property
    def key_dim(self) -> int:
        return self.key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        return self.value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution, in the order q | k | v."""
        return 2 * self.key_dim + self.value_dim

    @property
    def head_tensor(self) -> str:
        """The LM head: the embeddings, if these are tied to it."""
        return "token_embd.weight" if self.tied else "output.weight"

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, r in enumerate(self.recurrent) if not r)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        return tuple(i for i, r in enumerate(self.recurrent) if r)


def every_fourth_is_attention(layers: int, interval: int = 4) -> tuple[bool, ...]:
    return tuple((i + 1) % interval != 0 for i in range(layers))


def _size(name: str, layers: int, hidden: int, ffn: int, heads: int, kv: int, values: int, tied: bool) -> Config:
    return Config(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        vocab=248_320,
        heads=heads,
        kv_heads=kv,
        key_heads=16,
        value_heads=values,
        recurrent=every_fourth_is_attention(layers),
        tied=tied,
    )


SIZES: dict[str, Config] = {
    c.name: c
    for c in (
        _size("0.8B", 24, 1024, 3584, 8, 2, 16, tied=True),
        _size("2B", 24, 2048, 6144, 8, 2, 16, tied=True),
        _size("4B", 32, 2560, 9216, 16, 4, 32, tied=True),
        _size("9B", 32, 4096, 12288, 16, 4, 32, tied=False),
        _size("27B", 64, 5120, 17408, 24, 4, 48, tied=False),
        # small enough for a test or a first run anywhere; random weights only
        replace(
            _size("tiny", 4, 256, 512, 2, 1, 4, tied=True),
            key_heads=2,
            vocab=512,
            context=4096,
        ),
    )
}


def config_from_metadata(metadata: Mapping[str, Any], vocab: int, tied: bool, source: str) -> Config:
    """Read a `Config` from canonical metadata. `source` names the file in errors."""
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise BadFile(
            f"{source}: general.architecture is {brief(architecture)}, and warpsmith runs only dense Qwen3.5 models "
            "(qwen35).",
            "Choose a Qwen3.5, Qwen3.6 or Qwen3.8 dense model.",
        )
    read = _Reader(metadata, source)
    mtp = read.count("nextn_predict_layers", 0, low=0, high=8)
    layers = read.count("block_count", high=1024) - mtp
    if layers < 1:
        raise BadFile(f"{source}: qwen35.block_count leaves no layers once {mtp} MTP blocks are taken off.")
    if read.optional("rope.scaling.type") not in (None, "none"):
        raise BadFile(f"{source}: qwen35.rope.scaling.type asks for scaled RoPE, which warpsmith does not compute.")
    head_dim = read.count("attention.key_length", high=4096)
    if read.count("attention.value_length", head_dim, high=4096) != head_dim:
        raise BadFile(f"{source}: qwen35.attention.value_length differs from key_length, which no Qwen3.5 does.")
    value_heads = read.count("ssm.time_step_rank", high=4096)
    key_heads = read.count("ssm.group_count", high=4096)
    inner = read.count("ssm.inner_size", high=1 << 24)
    if value_heads % key_heads or inner % value_heads:
        raise BadFile(
            f"{source}: qwen35.ssm head counts do not divide ({key_heads} key heads, {value_heads} value heads, "
            f"inner size {inner})."
        )
    recurrent = read.recurrent(layers)
    attention = [i for i, r in enumerate(recurrent) if not r]
    heads = read.count_of("attention.head_count", attention, high=4096)
    kv_heads = read.count_of("attention.head_count_kv", attention, high=4096)
    if heads % kv_heads:
        raise BadFile(f"{source}: qwen35.attention.head_count_kv is {kv_heads}, which does not divide {heads} heads.")
    rotary = read.count("rope.dimension_count", high=head_dim)
    if rotary % 2:
        raise BadFile(f"{source}: qwen35.rope.dimension_count is {rotary}, expected an even number.")
    name = metadata.get("general.name")
    return Config(
        name=name if isinstance(name, str) else "",
        layers=layers,
        hidden=read.count("embedding_length", high=1 << 20),
        ffn=read.count_of("feed_forward_length", range(layers), high=1 << 22),
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
        key_heads=key_heads,
        value_heads=value_heads,
        recurrent=recurrent,
        head_dim=head_dim,
        rotary_dim=rotary,
        rope_theta=read.positive_float("rope.freq_base"),
        key_head_dim=read.count("ssm.state_size", high=4096),
        value_head_dim=inner // value_heads,
        conv_kernel=read.count("ssm.conv_kernel", high=16, low=2),
        eps=read.positive_float("attention.layer_norm_rms_epsilon"),
        context=read.count("context_length", high=1 << 40),
        tied=tied,
        mtp_layers=mtp,
    )


def config_to_metadata(config: Config) -> dict[str, Any]:
    """The inverse of `config_from_metadata`: the keys llama.cpp's converter writes for this family."""
    values: dict[str, Any] = {
        "block_count": config.layers + config.mtp_layers,
        "context_length": config.context,
        "embedding_length": config.hidden,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.eps,
        "rope.dimension_count": config.rotary_dim,
        "rope.dimension_sections": rope_sections(config.rotary_dim),
        "rope.freq_base": config.rope_theta,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.value_dim,
        "ssm.state_size": config.key_head_dim,
        "ssm.time_step_rank": config.value_heads,
        "ssm.group_count": config.key_heads,
    }
    interval = 4
    if config.recurrent == every_fourth_is_attention(config.layers, interval):
        values["full_attention_interval"] = interval
    else:
        values["attention.recurrent_layers"] = [*config.recurrent, *[False] * config.mtp_layers]
    if config.mtp_layers:
        values["nextn_predict_layers"] = config.mtp_layers
    metadata: dict[str, Any] = {"general.architecture": ARCHITECTURE}
    if config.name:
        metadata["general.name"] = config.name
    return metadata | {f"{ARCHITECTURE}.{key}": value for key, value in values.items()}


class _Reader:
    """Metadata fields with their bounds; a field that is missing or absurd is an error that names it."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata, self.source = metadata, source

    def optional(self, key: str) -> Any:
        return self.metadata.get(f"{ARCHITECTURE}.{key}")

    def error(self, key: str, value: object, expected: str) -> BadFile:
        found = "missing" if value is None else brief(value)
        return BadFile(f"{self.source}: {ARCHITECTURE}.{key} is {found}, expected {expected}.")

    def count(self, key: str, default: int | None = None, *, low: int = 1, high: int) -> int:
        value = self.optional(key)
        return self._bounded(key, default if value is None else value, low, high)

    def count_of(self, key: str, layers: Sequence[int], high: int) -> int:
        """A count that some converters store for each layer, with 0 for layers that have none of it."""
        value = self.optional(key)
        if not isinstance(value, list):
            return self._bounded(key, value, 1, high)
        if not layers or len(value) <= max(layers) or any(value[i] != value[layers[0]] for i in layers):
            raise self.error(key, value, "one number for all layers that have it")
        return self._bounded(key, value[layers[0]], 1, high)

    def _bounded(self, key: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, value, f"a whole number from {low} to {high}")
        return value

    def positive_float(self, key: str) -> float:
        """A number of float32 precision, which is all that GGUF keeps: its shortest decimal is what was meant."""
        value = self.optional(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 <= value <= 1e30:
            raise self.error(key, value, "a positive number")
        return float(str(np.float32(value)))

    def recurrent(self, layers: int) -> tuple[bool, ...]:
        key = "attention.recurrent_layers"
        flags = self.optional(key)
        if flags is None:
            return every_fourth_is_attention(layers, self.count("full_attention_interval", 4, high=1024))
        if not isinstance(flags, list) or len(flags) < layers or not all(f in (0, 1) for f in flags):
            raise self.error(key, flags, f"a flag for each of {layers} layers")
        return tuple(bool(f) for f in flags[:layers])
