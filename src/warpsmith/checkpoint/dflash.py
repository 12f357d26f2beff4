"""Files of DFlash drafts: safetensors with z-lab's names, and GGUF in Lucebox's and in llama.cpp's dialect.

Everything about a draft's shape is read from its file, and nothing is assumed: the published drafts differ in layers,
features, windows, and a wrong guess would only show as a draft that is never right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import Tensor, brief
from warpsmith.errors import BadFile, BadRequest

LUCEBOX = ("qwen35-dflash-draft", "dflash-draft")
LLAMA_CPP = "dflash"
ARCHITECTURES = (*LUCEBOX, LLAMA_CPP)
EPS = 1e-6  # of every published draft; Lucebox's files do not say it
LEAST_SPOKEN = 64  # tokens: as many as kernels make together
HEAD = "head.weight"  # where a draft has an LM head of its own

_OTHER = "Use a DFlash draft made for this model."
_BORROWED = ("embed_tokens.weight", "lm_head.weight", "token_embd.weight", "output.weight")  # the target's are used


@dataclass(frozen=True)
class DFlashConfig:
    """The shape of a draft. Layers are counted from 0, and a feature is a target layer's output."""

    source: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    block: int  # positions filled at once, the root's included
    mask_token: int
    target_layers: tuple[int, ...]
    windows: tuple[int | None, ...]  # per layer: how far back it sees; None: all the way
    causal: tuple[bool, ...]  # per layer: a row of the block does not see the rows after it
    eps: float = EPS
    vocab: int | None = None  # of the target, where the file says it
    speaks: int | None = None  # it guesses none but so many first tokens of that; None: any
    own_head: bool = False  # it has an LM head of its own, of the tokens it speaks, and does not borrow its target's
    target_depth: int | None = None  # layers of the target, where the file says it


@dataclass(frozen=True)
class DraftFile:
    """A draft's configuration, its weights by their names in `expected_shapes`, and what a GGUF file says of itself."""

    config: DFlashConfig
    tensors: Mapping[str, Tensor] = field(repr=False)
    general: Mapping[str, Any] = field(default_factory=dict, repr=False)


def expected_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a draft, named as z-lab names them ([out, in])."""
    c, h = config, config.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(c.target_layers) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for i in range(c.layers):
        layer = f"layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (h,),
            layer + "post_attention_layernorm.weight": (h,),
            layer + "self_attn.q_proj.weight": (c.heads * c.head_dim, h),
            layer + "self_attn.k_proj.weight": (c.kv_heads * c.head_dim, h),
            layer + "self_attn.v_proj.weight": (c.kv_heads * c.head_dim, h),
            layer + "self_attn.o_proj.weight": (h, c.heads * c.head_dim),
            layer + "self_attn.q_norm.weight": (c.head_dim,),
            layer + "self_attn.k_norm.weight": (c.head_dim,),
            layer + "mlp.gate_proj.weight": (c.ffn, h),
            layer + "mlp.up_proj.weight": (c.ffn, h),
            layer + "mlp.down_proj.weight": (h, c.ffn),
        }
    if c.own_head:
        shapes[HEAD] = (_spoken(c), h)
    return shapes


def _spoken(config: DFlashConfig) -> int:
    """How many tokens a head of its own is for."""
    if not (spoken := config.speaks or config.vocab):
        raise BadFile(f"The draft {config.source} has an LM head, and does not say of how many tokens.", _OTHER)
    return spoken


def is_draft(path: Path) -> bool:
    """Whether a file or directory says that it is a DFlash draft, for telling it from a whole model."""
    if path.is_dir() and (path / "config.json").exists():
        from warpsmith.checkpoint.safetensors import read_json

        return "dflash_config" in read_json(path / "config.json")
    if path.suffix == ".gguf":
        from warpsmith.checkpoint.gguf import open_gguf

        return open_gguf(path).metadata.get("general.architecture") in ARCHITECTURES
    return False


def open_draft(path: str | Path) -> DraftFile:
    """Read a draft: a directory with config.json and safetensors (or one of its files), or a GGUF file."""
    path = Path(path)
    if path.suffix == ".safetensors" and path.is_file():
        path = path.parent
    if path.is_dir():
        if (path / "config.json").exists():
            return _open_directory(path)
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise BadFile(f"{path} has no config.json, and {len(files)} GGUF files.", "Name the draft's file.")
        path = files[0]
    return _open_gguf(path)


def speaking(file: DraftFile, tokens: int) -> DraftFile:
    """The same draft, which guesses none but so many first tokens of the vocabulary."""
    config, tensors = file.config, dict(file.tensors)
    known = _spoken(config) if config.own_head else config.vocab
    if tokens % LEAST_SPOKEN or (known is not None and tokens > known):
        most = "" if known is None else f", at most {known}"
        raise BadRequest(f"A draft can't speak {tokens} tokens.", f"Choose a multiple of {LEAST_SPOKEN}{most}.")
    if config.own_head:
        tensors[HEAD] = _first_rows(tensors[HEAD], tokens)
    return replace(file, config=replace(config, speaks=tokens), tensors=tensors)


def with_head(file: DraftFile, head: Tensor) -> DraftFile:
    """The same draft with a copy of its target's LM head, of the tokens that it speaks."""
    config = replace(file.config, vocab=head.shape[0], own_head=True)
    return replace(file, config=config, tensors={**file.tensors, HEAD: _first_rows(head, _spoken(config))})


def _first_rows(matrix: Tensor, rows: int) -> Tensor:
    return Tensor(HEAD, matrix.type, (rows, matrix.shape[1]), lambda: matrix.raw()[:rows])


# -- safetensors ----------------------------------------------------------------------------------------------------


def _open_directory(path: Path) -> DraftFile:
    from warpsmith.checkpoint.safetensors import ELEMENTS, StoredTensor, read_json, read_tensors

    config = _config_from_json(read_json(path / "config.json"), str(path / "config.json"))
    stored = read_tensors(path)
    config = replace(config, own_head=HEAD in stored)
    _check_tensors(config, {name: t.shape for name, t in stored.items()}, lambda name: name)

    def canonical(name: str, tensor: StoredTensor) -> Tensor:
        if tensor.dtype not in ELEMENTS:
            raise BadFile(f"{tensor.path} stores a draft as {brief(tensor.dtype)}.", "Use a bf16, f16 or f32 draft.")
        rows = tensor.bytes.reshape(int(np.prod(tensor.shape[:-1])), -1)
        return Tensor(name, TYPES[tensor.dtype], tensor.shape, lambda: rows)

    return DraftFile(config, {name: canonical(name, stored[name]) for name in expected_shapes(config)})


def _config_from_json(data: Mapping[str, Any], source: str) -> DFlashConfig:
    read = _Reader(data, source)
    inner = _Reader(read.mapping("dflash_config"), source, "dflash_config.", nested=True)
    layers, window = read.count("num_hidden_layers", 256), read.optional_count("sliding_window", 1 << 30)
    types = read.get("layer_types") or ["full_attention"] * layers
    if not isinstance(types, list) or len(types) != layers:
        raise read.error("layer_types", types, f"a kind for each of {layers} layers")
    if unknown := [t for t in types if t not in ("full_attention", "sliding_attention")]:
        raise read.error("layer_types", unknown[0], "full_attention or sliding_attention")
    sliding = [t == "sliding_attention" for t in types]
    if any(sliding) and window is None:
        raise read.error("sliding_window", None, "a window for the sliding layers")
    causal = read.flag("is_causal")
    return DFlashConfig(
        source=source,
        layers=layers,
        hidden=read.count("hidden_size", 1 << 20),
        ffn=read.count("intermediate_size", 1 << 20),
        heads=read.count("num_attention_heads", 1 << 16),
        kv_heads=read.count("num_key_value_heads", 1 << 16),
        head_dim=read.count("head_dim", 1 << 16),
        rope_theta=_rope_theta(read),
        block=read.count("block_size", 64, low=2),
        mask_token=inner.count("mask_token_id", 1 << 30, low=0),
        target_layers=inner.counts("target_layer_ids"),
        windows=tuple(window if s else None for s in sliding),
        causal=_causal(sliding, inner.flag("causal") if causal is None else causal),
        eps=read.positive("rms_norm_eps", EPS),
        vocab=read.optional_count("vocab_size", 1 << 30),
        target_depth=read.optional_count("num_target_layers", 1 << 20),
    )


def _rope_theta(read: _Reader) -> float:
    """Older configurations have it on top, newer ones beside the other rope settings."""
    for key in ("rope_parameters", "rope_scaling"):
        settings = read.get(key)
        if settings is None:
            continue
        rope = _Reader(read.mapping(key), read.source, f"{key}.", nested=True)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default":
            raise rope.error("rope_type", kind, "plain RoPE, the only kind computed")
        if "rope_theta" in settings:
            return rope.positive("rope_theta")
    return read.positive("rope_theta")


# -- GGUF -----------------------------------------------------------------------------------------------------------


def _open_gguf(path: Path) -> DraftFile:
    from warpsmith.checkpoint.gguf import open_gguf

    file = open_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise BadFile(f"{path}: general.architecture is {brief(architecture)}, which is no DFlash draft.", _OTHER)
    config = replace(_config_from_gguf(file.metadata, architecture, str(path)), own_head=HEAD in file.tensors)
    names = {name: _gguf_name(name) for name in file.tensors}
    _check_tensors(config, {names[n] or n: t.shape for n, t in file.tensors.items()}, _named_in(names))

    tensors = {}
    for stored, name in names.items():
        if name:
            tensor = file.tensors[stored]
            tensors[name] = Tensor(name, tensor.type, tensor.shape, tensor.raw)
    general = {key: value for key, value in file.metadata.items() if key.startswith("general.")}
    return DraftFile(config, tensors, general)


def _config_from_gguf(metadata: Mapping[str, Any], architecture: str, source: str) -> DFlashConfig:
    read = _Reader(metadata, source, f"{architecture}.")
    layers = read.count("block_count", 256)
    if architecture == LLAMA_CPP:
        # its ids name the layer that reads the feature, the one after the layer that wrote it
        inputs = read.counts("target_layers", low=1)
        block, target_layers = read.count("block_size", 64, low=2), tuple(i - 1 for i in inputs)
        mask_token = _Reader(metadata, source, "tokenizer.ggml.").count("mask_token_id", 1 << 30, low=0)
    else:
        block, target_layers = read.count("dflash.block_size", 64, low=2), read.counts("dflash.target_layer_ids")
        mask_token = read.count("dflash.mask_token_id", 1 << 30, low=0)
    window = read.optional_count("attention.sliding_window", 1 << 30, low=0) or None
    sliding = _pattern(read, layers) if window else [False] * layers
    heads = read.count("attention.head_count", 1 << 16)
    return DFlashConfig(
        source=source,
        layers=layers,
        hidden=read.count("embedding_length", 1 << 20),
        ffn=read.count("feed_forward_length", 1 << 20),
        heads=heads,
        kv_heads=read.count("attention.head_count_kv", 1 << 16),
        head_dim=read.count("attention.key_length", 1 << 16),
        rope_theta=read.positive("rope.freq_base"),
        block=block,
        mask_token=mask_token,
        target_layers=target_layers,
        windows=tuple(window if s else None for s in sliding),
        causal=_causal(sliding, read.flag("attention.causal")),
        eps=read.positive("attention.layer_norm_rms_epsilon", EPS),
        vocab=read.optional_count("vocab_size", 1 << 30),
        speaks=read.optional_count("draft_vocab_size", 1 << 30, low=LEAST_SPOKEN),
    )


def _pattern(read: _Reader, layers: int) -> list[bool]:
    """Which layers slide: flags, or every n-th does not (0: all slide)."""
    pattern = read.get("attention.sliding_window_pattern")
    if pattern is None:
        return [True] * layers
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 0:
        return [pattern == 0 or i % pattern < pattern - 1 for i in range(layers)]
    if not isinstance(pattern, list) or len(pattern) < layers or not all(f in (0, 1) for f in pattern):
        raise read.error("attention.sliding_window_pattern", pattern, f"a flag for each of {layers} layers")
    return [bool(f) for f in pattern[:layers]]


_GGUF_TOP = {
    "dflash.fc.weight": "fc.weight",
    "dflash_fc.weight": "fc.weight",
    "fc.weight": "fc.weight",
    "dflash.hidden_norm.weight": "hidden_norm.weight",
    "dflash_hidden_norm.weight": "hidden_norm.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    HEAD: HEAD,
}
GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _gguf_name(stored: str) -> str | None:
    """z-lab's name of a tensor in either dialect; None if it has none."""
    if stored in _GGUF_TOP:
        return _GGUF_TOP[stored]
    match = re.fullmatch(r"blk\.(\d{1,3})\.(\w+)\.weight", stored, re.ASCII)
    if match and match[2] in GGUF_LAYER:
        return f"layers.{int(match[1])}.{GGUF_LAYER[match[2]]}.weight"
    return None


def _named_in(names: Mapping[str, str | None]) -> Callable[[str], str]:
    stored = {name: original for original, name in names.items() if name}
    return lambda name: stored.get(name, name)


# -- both -----------------------------------------------------------------------------------------------------------


def _causal(sliding: Sequence[bool], said: bool | None) -> tuple[bool, ...]:
    """Unless the file says otherwise, sliding layers were trained causal inside the block, and full ones were not."""
    return tuple(sliding) if said is None else (said,) * len(sliding)


def _check_tensors(config: DFlashConfig, found: Mapping[str, tuple[int, ...]], original: Callable[[str], str]) -> None:
    """Every tensor there, of the right shape, and none that this network would not use."""
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise BadFile(
            f"The draft {config.source} has {config.heads} heads for {config.kv_heads} key heads, "
            f"{config.head_dim} wide, which do not divide.",
            _OTHER,
        )
    shapes = expected_shapes(config)
    for name, shape in shapes.items():
        if name not in found:
            raise BadFile(f"The draft {config.source} lacks the tensor {original(name)}.", _OTHER)
        if found[name] != shape:
            raise BadFile(
                f"The draft {config.source}: tensor {original(name)} has shape {list(found[name])}, and its "
                f"configuration needs {list(shape)}.",
                _OTHER,
            )
    for name in found:
        if name not in shapes and name not in _BORROWED:
            raise BadFile(
                f"The draft {config.source} holds {brief(name)}, a part that plain DFlash drafts do not have.",
                "Use the plain DFlash draft of this model.",
            )


class _Reader:
    """Fields of a configuration with their bounds; one that is missing or absurd is an error that names it."""

    def __init__(self, data: Mapping[str, Any], source: str, prefix: str = "", nested: bool = False) -> None:
        """`prefix` comes before every key: in `data` too, unless that is the nested object so called."""
        self.data, self.source, self.prefix, self.nested = data, source, prefix, nested

    def get(self, key: str) -> Any:
        return self.data.get(key if self.nested else self.prefix + key)

    def error(self, key: str, value: object, expected: str) -> BadFile:
        found = "missing" if value is None else brief(value)
        return BadFile(f"{self.source}: {self.prefix}{key} is {found}, expected {expected}.", _OTHER)

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.get(key)
        if not isinstance(value, Mapping):
            raise self.error(key, value, "an object")
        return value

    def count(self, key: str, high: int, *, low: int = 1) -> int:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, value, f"a whole number from {low} to {high}")
        return value

    def optional_count(self, key: str, high: int, *, low: int = 1) -> int | None:
        return None if self.get(key) is None else self.count(key, high, low=low)

    def counts(self, key: str, *, low: int = 0) -> tuple[int, ...]:
        values = self.get(key)
        if not isinstance(values, list) or not 1 <= len(values) <= 64 or not all(type(v) is int for v in values):
            raise self.error(key, values, "a list of layers")
        if min(values) < low or max(values) > 1 << 20:
            raise self.error(key, min(values), f"layers from {low}")
        return tuple(values)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 <= value <= 1e30:
            raise self.error(key, value, "a positive number")
        return float(str(np.float32(value)))  # GGUF keeps float32: its shortest decimal is what was meant

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value
