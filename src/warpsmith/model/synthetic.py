"""Random models of any shape: for tests, and for measuring speed at sizes nobody wants to download.

A tensor's weights are draws from a quantile table: 16 random bits choose one of 65,536 values, already in the type
they are stored in. So a seed gives the same weights on every machine, whatever its libm and threads. Scales are those
of a network at initialisation, which keep activations and logits around one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from statistics import NormalDist
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from warpsmith.checkpoint.atomic import whole_directory
from warpsmith.checkpoint.blocks import LAYOUTS, BlockType
from warpsmith.checkpoint.canonical import Checkpoint, Tensor
from warpsmith.checkpoint.convert import FLOATS, recipe_metadata, tensor_type, to_safetensors, write_pieces
from warpsmith.checkpoint.levels import IQ4_LEVELS
from warpsmith.checkpoint.quantize import quantize
from warpsmith.errors import BadRequest
from warpsmith.model.chat import default_template
from warpsmith.model.config import SIZES, Config, config_to_metadata
from warpsmith.model.tokenizer import Tokenizer, byte_tokenizer, to_gguf_metadata
from warpsmith.model.weights import expected_shapes

_LEVELS = 1 << 16
_PIECE = 1 << 21  # weights made at a time: bounds the memory that a tensor of any size takes


def synthesize(
    config: Config,
    path: str | Path,
    recipe: str = "bf16",
    seed: int = 0,
    format: str = "gguf",
    tokenizer: Tokenizer | None = None,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Write a random model that can be run: a GGUF file or a directory of safetensors. `progress` hears of bytes made.

    Float types hold the weights of `random_checkpoint`. Quantised ones are made of random blocks of the same scale,
    which is so much faster than rounding floats that a 27B model takes about as long as the disk does.
    """
    tokenizer = tokenizer or byte_tokenizer(config.vocab)
    metadata = model_metadata(config, tokenizer) | recipe_metadata(recipe)
    plan = _plan(config, recipe)
    if format == "gguf":
        pieces = [(*tensor, counted(weight_bytes(seed, *tensor), progress)) for tensor in plan]
        write_pieces(path, metadata, pieces)
    elif format == "safetensors":
        tensors = {}
        for name, block_type, shape in plan:
            read = partial(_whole, seed, name, block_type, shape, progress)
            tensors[name] = Tensor(name, block_type, shape, read)
        with whole_directory(Path(path)) as part:
            to_safetensors(Checkpoint(Path(path), metadata, tensors), part, recipe.upper())
            tokenizer.to_json_files(part)
            (part / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")
    else:
        raise BadRequest(f"There is no model format {format!r}.", "Use gguf or safetensors.")


def planned_bytes(config: Config, recipe: str) -> int:
    """How much weight data `synthesize` will write."""
    return sum(math.prod(shape) // kind.elems * kind.bytes for _, kind, shape in _plan(config, recipe))


def random_checkpoint(
    config: Config, seed: int = 0, recipe: str = "f32", tokenizer: Tokenizer | None = None
) -> Checkpoint:
    """A model in memory: the same float weights whatever the recipe, rounded to its types by our quantisers."""
    tensors = {}
    for name, block_type, shape in _plan(config, recipe):
        values = np.concatenate([_values(name, shape)[draw] for draw in _draws(seed, name, math.prod(shape))])
        raw = quantize(block_type, values.reshape(-1, shape[-1]))
        tensors[name] = Tensor(name, block_type, shape, partial(np.asarray, raw))
    metadata = model_metadata(config, tokenizer) | recipe_metadata(recipe)
    name = f"random-{config.name or 'model'}-{recipe}-seed{seed}"
    return Checkpoint(Path(name), metadata, tensors, None, metadata["tokenizer.chat_template"])


def tiny_model() -> Checkpoint:
    """What runs when no model is named: four layers of noise that exercise everything and know nothing."""
    return random_checkpoint(SIZES["tiny"])


def model_metadata(config: Config, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Canonical metadata of a runnable model: shape, tokenizer (bytes unless given), chat template."""
    tokenizer = tokenizer or byte_tokenizer(config.vocab)
    # of the family, only the sizes with more than 24 layers think unless told otherwise
    template = {"tokenizer.chat_template": default_template(thinking=config.layers > 24)}
    return config_to_metadata(config) | to_gguf_metadata(tokenizer, config.vocab) | template


def weight_bytes(seed: int, name: str, block_type: BlockType, shape: tuple[int, ...]) -> Iterator[NDArray[np.uint8]]:
    """A tensor's stored bytes, piece by piece."""
    count = math.prod(shape)
    if block_type.name in FLOATS:
        values = _values(name, shape)
        table = quantize(block_type, values.reshape(-1, 1)).view(f"<u{block_type.bytes}").ravel()
        for draw in _draws(seed, name, count):
            yield table.take(draw).view(np.uint8)
    else:
        random = _generator(seed, name)
        for start in range(0, count, _PIECE):
            blocks = min(_PIECE, count - start) // block_type.elems
            yield random_blocks(block_type, random, blocks, deviation=1 / math.sqrt(shape[-1]))


def random_blocks(
    block_type: BlockType, random: np.random.SFC64, count: int, deviation: float = 1.0
) -> NDArray[np.uint8]:
    """Blocks whose weights are spread evenly around zero with the given standard deviation."""
    raw = _random_bytes(random, count * block_type.bytes)
    blocks = raw.view(LAYOUTS[block_type.name])
    name = block_type.name
    if name == "Q2_K":  # sub-block scales of 8 to 15, and mins equal to them
        packed = blocks["sc"]
        packed &= 7
        packed |= 8
        packed *= 17
    elif name in ("Q4_K", "Q5_K"):
        # Sub-block scales of 32 to 63, and mins equal to them: `dmin` alone then centres the weights.
        packed = blocks["sc"]
        packed[:, 0:4] |= 0xA0
        packed[:, 4:8] = packed[:, 0:4]
        packed[:, 8:12] &= 15
        packed[:, 8:12] *= 17
    elif name == "Q6_K":  # scales of -128 to -65 and 64 to 127: bit 6 is the opposite of the sign
        sub_scales = blocks["sc"].view(np.uint8)
        sub_scales &= 0xBF
        sub_scales |= ~sub_scales >> 1 & 0x40
    choice = blocks["d"].view("<u2") & 31  # the random bits that stand where the scale goes choose it
    scales = _scales(deviation / _UNIT_DEVIATION[name], signed=name not in _CENTRE)
    blocks["d"] = scales[choice]
    if name in _CENTRE:
        field, centre = _CENTRE[name]
        blocks[field] = (scales * np.float32(centre)).astype("<f2")[choice]
    return raw


def _scales(typical: float, signed: bool) -> NDArray[np.float32]:
    """32 block scales within a quarter of `typical`. Random signs undo the lean of levels such as -8 to 7.

    Rounded to 6 significant bits, so that in half precision an offset of 7.5 or 15.5 scales is exact.
    """
    spread = np.linspace(0.75, 1.25, 16)
    mantissa, exponent = np.frexp(typical * spread / _rms(spread))
    scales = np.ldexp(np.round(mantissa * 64) / 64, exponent).astype(np.float32)
    return np.concatenate([scales, -scales if signed else scales])


def _rms(values: Iterable[float]) -> float:
    values = list(values)
    return math.sqrt(sum(v * v for v in values) / len(values))


# The standard deviation of weights whose block scale is 1, when all stored bits are random.
_UNIT_DEVIATION = {
    "Q8_0": _rms(range(-128, 128)),
    "Q4_0": _rms(range(-8, 8)),
    "Q5_0": _rms(range(-16, 16)),
    "Q4_1": _rms(q - 7.5 for q in range(16)),
    "Q5_1": _rms(q - 15.5 for q in range(32)),
    "Q2_K": _rms(range(8, 16)) * _rms(q - 1.5 for q in range(4)),
    "Q3_K": _rms(range(-32, 32)) * _rms(range(-4, 4)),
    "Q4_K": _rms(range(32, 64)) * _rms(q - 7.5 for q in range(16)),
    "Q5_K": _rms(range(32, 64)) * _rms(q - 15.5 for q in range(32)),
    "Q6_K": _rms([*range(-128, -64), *range(64, 128)]) * _rms(range(-32, 32)),
    "IQ4_NL": _rms(IQ4_LEVELS.tolist()),
    "IQ4_XS": _rms(range(-32, 32)) * _rms(IQ4_LEVELS.tolist()),
}
# Formats with an offset: its field, and its value in block scales that puts the middle of the levels on zero.
_CENTRE = {
    "Q4_1": ("m", -7.5),
    "Q5_1": ("m", -15.5),
    "Q2_K": ("dmin", 1.5),
    "Q4_K": ("dmin", 7.5),
    "Q5_K": ("dmin", 15.5),
}


def _plan(config: Config, recipe: str) -> list[tuple[str, BlockType, tuple[int, ...]]]:
    """Name, type and shape of every tensor."""
    layers = config.layers + config.mtp_layers
    return [
        (name, tensor_type(recipe, name, shape, layers, config.tied), shape)
        for name, shape in expected_shapes(config).items()
    ]


def _values(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The 65,536 quantiles of a tensor's distribution."""
    if name.endswith("norm.weight"):
        values = 1 + 0.1 * _normal()
    elif name.endswith("ssm_a"):  # decay rates of 1 to 16, as such layers are initialised
        values = -1 - 15 * _uniform()
    elif name.endswith("ssm_dt.bias"):  # softplus(bias) is a time step of 0.001 to 0.1
        step = 0.001 * 100 ** _uniform()
        values = step + np.log(-np.expm1(-step))
    else:
        values = _normal() / math.sqrt(shape[-1])
    return values.astype(np.float32)


@cache
def _uniform() -> NDArray[np.float64]:
    return (np.arange(_LEVELS) + 0.5) / _LEVELS


@cache
def _normal() -> NDArray[np.float64]:
    return np.array([NormalDist().inv_cdf(p) for p in _uniform().tolist()])


def _draws(seed: int, name: str, count: int) -> Iterator[NDArray[np.uint16]]:
    """`count` random indices into a quantile table, piece by piece."""
    random = _generator(seed, name)
    for start in range(0, count, _PIECE):
        yield _random_bytes(random, 2 * min(_PIECE, count - start)).view("<u2")


def _generator(seed: int, name: str) -> np.random.SFC64:
    """A tensor's own stream: it depends on nothing but the seed and the name."""
    return np.random.SFC64(np.random.SeedSequence(seed, spawn_key=(crc32(name.encode()),)))


def _random_bytes(random: np.random.SFC64, count: int) -> NDArray[np.uint8]:
    return random.random_raw(-(-count // 8)).view(np.uint8)[:count]


def _whole(
    seed: int, name: str, block_type: BlockType, shape: tuple[int, ...], progress: Callable[[int], object]
) -> NDArray[np.uint8]:
    """All of a tensor's bytes as rows, in memory once."""
    raw = np.empty(math.prod(shape) // block_type.elems * block_type.bytes, np.uint8)
    end = 0
    for piece in counted(weight_bytes(seed, name, block_type, shape), progress):
        raw[end : end + len(piece)] = piece
        end += len(piece)
    return raw.reshape(-1, block_type.row_bytes(shape[-1]))


def counted(pieces: Iterable[NDArray[np.uint8]], progress: Callable[[int], object]) -> Iterator[NDArray[np.uint8]]:
    """Pieces as they are made, of whose bytes `progress` hears."""
    for piece in pieces:
        yield piece
        progress(len(piece))
