"""The shape of a dense Qwen3.5: read from canonical metadata, or one of the family's named sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

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
            f"{source}: the architecture is {architecture!r}, and warpsmith runs only dense Qwen3.5 models (qwen35).",
            "Choose a Qwen3.5, Qwen3.6 or Qwen3.8 dense model.",
        )
    read = _Reader(metadata, source)
    mtp = read.count("nextn_predict_layers", 0, low=0, high=8)
    layers = read.count("block_count", high=1024) - mtp
    if layers < 1:
        raise BadFile(f"{source}: qwen35.block_count leaves no layers once {mtp} MTP blocks are taken off.")
    if read.optional("rope.scaling.type") not in (None, "none"):
        raise BadFile(f"{source}: qwen35.rope.scaling.type asks for scaled RoPE, which warpsmith does not compute.")
    head_dim = read.count("attention.key_length", 256, high=4096)
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
    heads, kv_heads = read.count("attention.head_count", high=4096), read.kv_heads(layers)
    rotary = read.count("rope.dimension_count", 64, high=head_dim)
    if heads % kv_heads or rotary % 2:
        raise BadFile(
            f"{source}: {heads} query heads, {kv_heads} key/value heads and {rotary} rotary dimensions do not fit."
        )
    return Config(
        name=str(metadata.get("general.name", "")),
        layers=layers,
        hidden=read.count("embedding_length", high=1 << 20),
        ffn=read.count("feed_forward_length", high=1 << 22),
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
        key_heads=key_heads,
        value_heads=value_heads,
        recurrent=read.recurrent(layers),
        head_dim=head_dim,
        rotary_dim=rotary,
        rope_theta=read.positive_float("rope.freq_base", 1e7),
        key_head_dim=read.count("ssm.state_size", high=4096),
        value_head_dim=inner // value_heads,
        conv_kernel=read.count("ssm.conv_kernel", high=16, low=2),
        eps=read.positive_float("attention.layer_norm_rms_epsilon", 1e-6),
        context=read.count("context_length", high=1 << 40),
        tied=tied,
        mtp_layers=mtp,
    )


def config_to_metadata(config: Config) -> dict[str, Any]:
    """The inverse of `config_from_metadata`: the keys llama.cpp's converter writes for this family."""
    half = config.rotary_dim // 2
    third = -(-half // 3)
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
        "rope.dimension_sections": [third, third, half - 2 * third, 0],
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
        values["attention.recurrent_layers"] = list(config.recurrent)
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

    def count(self, key: str, default: int | None = None, *, low: int = 1, high: int) -> int:
        value = self.optional(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise BadFile(
                f"{self.source}: {ARCHITECTURE}.{key} is {_brief(value)}, expected a number in [{low}, {high}]."
            )
        return value

    def positive_float(self, key: str, default: float) -> float:
        value = self.optional(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise BadFile(f"{self.source}: {ARCHITECTURE}.{key} is {_brief(value)}, expected a positive number.")
        return float(value)

    def kv_heads(self, layers: int) -> int:
        """Some converters store one count a layer, with 0 for DeltaNet layers."""
        key = "attention.head_count_kv"
        value = self.optional(key)
        if isinstance(value, list):
            counts = {v for v in value[:layers] if v}
            if len(counts) != 1:
                raise BadFile(f"{self.source}: {ARCHITECTURE}.{key} differs between attention layers.")
            value = counts.pop()
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 4096:
                raise BadFile(f"{self.source}: {ARCHITECTURE}.{key} holds {_brief(value)}, expected head counts.")
            return value
        return self.count(key, high=4096)

    def recurrent(self, layers: int) -> tuple[bool, ...]:
        flags = self.optional("attention.recurrent_layers")
        if flags is None:
            return every_fourth_is_attention(layers, self.count("full_attention_interval", 4, high=1024))
        if not isinstance(flags, list) or len(flags) < layers or not all(isinstance(f, bool | int) for f in flags):
            raise BadFile(f"{self.source}: {ARCHITECTURE}.attention.recurrent_layers does not name {layers} layers.")
        return tuple(bool(f) for f in flags[:layers])


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
