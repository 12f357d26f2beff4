"""Q8_0 weights on a GPU: the stream as packed, products against exact ones, whole models against the reference; files
of several types, and embeddings of their own."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest

from device_checks import plain_run, relative, same_state
from format_cases import check_products, stored_as
from random_models import random_tree
from test_cuda import SHAPE, STAGES, ids
from warpsmith.backend.base import LOGITS, Backend, Want
from warpsmith.backend.cuda.shape import chunks_of
from warpsmith.backend.cuda.weights.stream import HeldPart, WeightStream
from warpsmith.backend.cuda.weights_first import WeightsFirstBackend
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.blocks import TYPES, dequantize
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.quantize import quantize
from warpsmith.errors import NoDevice
from warpsmith.model.config import Config

pytestmark = pytest.mark.gpu

WATCHDOG = {"WATCHDOG_CYCLES": "4000000000ll"}
# Activations are rounded to bf16 between stages, as with bf16 weights; the weights are those that the device holds.
BOUND = 0.02


def backend_of(config: Config, tensors: dict[str, Tensor]) -> WeightsFirstBackend:
    try:
        return WeightsFirstBackend(config, tensors, options=WATCHDOG)
    except NoDevice as error:
        pytest.skip(str(error))


def as_held(cuda: WeightsFirstBackend, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The file's weights, rounded where the device holds another type."""
    stream = cuda.layout.stream
    held = {piece.tensor: each.format.type.name for each in stream.parts for piece in each.part.pieces}
    if not cuda.config.tied:
        held["token_embd.weight"] = stream.embedding_format.type.name
    rounded = dict(tensors)
    for name, kind in held.items():
        if tensors[name].type.name != kind:
            raw = quantize(TYPES[kind], tensors[name].float32())
            rounded[name] = Tensor(name, TYPES[kind], tensors[name].shape, lambda raw=raw: raw)
    return rounded


def as_prompts_multiply(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Prompts widen Q8_0 to bf16 in registers, which rounds; passes over trees multiply what is stored."""
    rounded = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.type.name == "Q8_0":
            raw = quantize(TYPES["BF16"], tensor.float32())
            rounded[name] = Tensor(name, TYPES["BF16"], tensor.shape, lambda raw=raw: raw)
    return rounded


def mixed_kind(name: str) -> str:
    """Gates in F32, as some files have them, and here and there a type of which the kernel has no products."""
    if "ssm_beta" in name or "ssm_alpha" in name:
        return "F32"
    return ("Q8_0", "BF16", "Q8_0", "Q6_K")[zlib.crc32(name.encode()) % 4]


@pytest.fixture(scope="module")
def q8() -> tuple[WeightsFirstBackend, ReferenceBackend]:
    tensors = stored_as(SHAPE, lambda name: "Q8_0")
    return backend_of(SHAPE, tensors), ReferenceBackend(SHAPE, tensors)


@pytest.fixture(scope="module")
def mixed() -> tuple[WeightsFirstBackend, ReferenceBackend]:
    tensors = stored_as(SHAPE, mixed_kind)
    cuda = backend_of(SHAPE, tensors)
    return cuda, ReferenceBackend(SHAPE, as_held(cuda, tensors))


# -- the stream --------------------------------------------------------------------------------------------------------


def streamed(planned: WeightStream, stream: np.ndarray) -> dict[str, np.ndarray]:
    """Every tensor's values, read the way lanes and warps take them (see kernels/formats)."""
    values: dict[str, np.ndarray] = {}
    for number, held in enumerate(planned.parts):
        mine = [
            stream[start : start + size]
            for start, size in zip(planned.part_start[number], planned.part_bytes[number], strict=True)
        ]
        stage, matrix = held.stage, unpacked(held, np.concatenate(mine))
        for piece in held.part.pieces:
            first = piece.first_row - held.part.first_tile * stage.tile_rows
            if piece.weave:
                values[piece.tensor] = matrix.reshape(-1, 2, 8, stage.k)[:, piece.weave - 1].reshape(-1, stage.k)
            else:
                values[piece.tensor] = matrix[first:]
    return values


def unpacked(held: HeldPart, stream: np.ndarray) -> np.ndarray:
    """The rows of a part, from all SMs' shares of it."""
    stage, part = held.stage, held.part
    chunks, halves = chunks_of(stage.k), stage.tile_rows // 8
    tiles = stream.reshape(part.tiles * chunks, -1)
    if held.format.type.name == "Q8_0":
        # chunk, warp, row of eight, eight k, half of the rows, k; then the scales
        low = tiles[:, : 2048 * halves].reshape(-1, chunks, 8, 8, 4, halves, 8).astype(np.float32) - 128
        scales = np.ascontiguousarray(tiles[:, 2048 * halves :]).view(np.float16).astype(np.float32)
        low *= scales.reshape(-1, chunks, 8, 8, 1, halves, 1)
        rows = low.transpose(0, 5, 3, 2, 1, 4, 6)
    else:
        words = (np.ascontiguousarray(tiles).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        if halves == 2:  # chunk, warp, later four k, row of eight, eight k, later pair, half of the rows, k
            rows = words.reshape(-1, chunks, 8, 2, 8, 4, 2, 2, 2).transpose(0, 7, 4, 2, 1, 5, 3, 6, 8)
        else:  # chunk, warp, row, eight k, later pair, later four k, k
            rows = words.reshape(-1, chunks, 8, 8, 4, 2, 2, 2).transpose(0, 3, 2, 1, 4, 6, 5, 7)
    matrix = rows.reshape(part.tiles * stage.tile_rows, chunks * 256)
    assert not matrix[:, stage.k :].any()
    return matrix[:, : stage.k]


@pytest.mark.parametrize("file", ["q8", "mixed"])
def test_the_stream_holds_what_the_file_holds(file: str, request: pytest.FixtureRequest) -> None:
    backend, reference = request.getfixturevalue(file)
    planned = backend.layout.stream
    values = streamed(planned, backend.stream.read(np.uint8, (planned.bytes,)))
    kinds = {held.format.type.name for held in planned.parts}
    assert kinds == ({"Q8_0"} if file == "q8" else {"Q8_0", "BF16"})
    for held in planned.parts:
        for piece in held.part.pieces:
            expected = reference.tensors[piece.tensor].float32()
            if held.format.type.name == "BF16":
                expected = dequantize(TYPES["BF16"], quantize(TYPES["BF16"], expected))
            np.testing.assert_array_equal(values[piece.tensor][: len(expected)], expected, err_msg=piece.tensor)


# -- products ----------------------------------------------------------------------------------------------------------


def test_products_are_those_of_the_file_s_weights() -> None:
    check_products(lambda tensors: backend_of(SHAPE, tensors), SHAPE, "Q8_0", (1, 7, 20))


# -- whole models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 6, 22])
@pytest.mark.parametrize("file", ["q8", "mixed"])
def test_every_stage_matches_the_reference(file: str, nodes: int, request: pytest.FixtureRequest) -> None:
    pair = request.getfixturevalue(file)
    cuda, reference = pair
    states = [b.new_state(128) for b in pair]
    for backend, state in zip(pair, states, strict=True):
        plain_run(backend, state, ids(0, 9))
    tree = random_tree(np.random.default_rng(nodes), nodes, SHAPE.vocab)
    worst = {}
    for stage in STAGES:
        expected = reference.trace(states[1], tree, stage)
        for name, got in cuda.trace(states[0], tree, stage).items():
            worst[f"{stage}:{name}"] = relative(got, expected[name])
    print(f"{file}, {nodes} nodes: largest error {max(worst.values()):.5f}")
    # h is a product of two projections, each as far off as any other
    bad = {k: v for k, v in worst.items() if not v < BOUND * (2 if k.endswith(":h") else 1)}
    assert not bad, bad


@pytest.mark.parametrize("length", [1, 100])
@pytest.mark.parametrize("file", ["q8", "mixed"])
def test_logits_match_the_reference(file: str, length: int, request: pytest.FixtureRequest) -> None:
    cuda, reference = request.getfixturevalue(file)
    widened = ReferenceBackend(SHAPE, as_prompts_multiply(reference.tensors))
    for name, got, expected in (
        ("prompt", logits_of(cuda, length), logits_of(widened, length)),
        ("passes", plain_run(cuda, cuda.new_state(512), ids(2, length)), logits_of(reference, length)),
    ):
        agreement = float((got.argmax(axis=1) == expected.argmax(axis=1)).mean())
        print(f"{file}, {name} of {length}: error {relative(got, expected):.5f}, top-1 agreement {agreement:.4f}")
        assert relative(got, expected) < BOUND
        assert agreement > 0.9


def logits_of(backend: Backend, length: int) -> np.ndarray:
    return backend.prefill(backend.new_state(512), ids(2, length), Want("logits", every_row=True)).logits.numpy()


@pytest.mark.parametrize("nodes", [1, 3, 8, 13, 16, 22, 32, 50, 64])
@pytest.mark.parametrize("file", ["q8", "mixed"])
def test_a_node_depends_only_on_its_ancestors(file: str, nodes: int, request: pytest.FixtureRequest) -> None:
    cuda, _ = request.getfixturevalue(file)
    tree = random_tree(np.random.default_rng(nodes), nodes, SHAPE.vocab)
    state, plain = cuda.new_state(256), cuda.new_state(256)
    for each in (state, plain):
        cuda.prefill(each, ids(3, 45))
    logits = cuda.forward([(state, tree)], LOGITS).logits.numpy()
    path = tree.path(nodes - 1)
    np.testing.assert_array_equal(logits[path], plain_run(cuda, plain, tree.tokens[path]))
    cuda.forward([(state, tree)])
    cuda.commit(state, path)
    assert same_state(SHAPE, state, plain)


@pytest.mark.parametrize("file", ["q8", "mixed"])
def test_decoding_on_the_device_equals_stepping(file: str, request: pytest.FixtureRequest) -> None:
    cuda, _ = request.getfixturevalue(file)
    states = [cuda.new_state(256) for _ in range(2)]
    token, step = (int(cuda.prefill(state, ids(4, 30)).argmax[-1]) for state in states)
    decoded = list(cuda.decode(states[0], token, 100))
    for following in decoded:
        step = int(cuda.forward([(states[1], Tree.chain([step]))]).argmax[0])
        cuda.commit(states[1], [0])
        assert step == following
    assert same_state(SHAPE, *states)


# -- embeddings of their own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("embedding", "head"), [("BF16", "BF16"), ("Q8_0", "Q8_0"), ("Q8_0", "BF16"), ("Q6_K", "Q8_0")]
)
def test_untied_embeddings(embedding: str, head: str) -> None:
    config = replace(SHAPE, tied=False)
    kinds = {"token_embd.weight": embedding, "output.weight": head}
    tensors = stored_as(config, lambda name: kinds.get(name, "Q8_0"))
    cuda = backend_of(config, tensors)
    held = as_held(cuda, tensors)
    want = Want("logits", every_row=True)
    widened = ReferenceBackend(config, as_prompts_multiply(held))
    got, expected = (b.prefill(b.new_state(64), ids(5, 40), want).logits.numpy() for b in (cuda, widened))
    print(f"{embedding}, {head}: error {relative(got, expected):.5f}")
    assert relative(got, expected) < BOUND
    tree = Tree(ids(6, 6), np.array([-1, 0, 0, 1, 1, 2]))
    x = cuda.trace(cuda.new_state(64), tree, "embed")["x"]
    assert relative(x, held["token_embd.weight"].float32()[tree.tokens]) < 2**-8  # published in bf16
    state, twin = cuda.new_state(64), cuda.new_state(64)
    decoded = list(cuda.decode(state, 3, 20))
    assert decoded == [int(cuda_step(cuda, twin, t)) for t in [3, *decoded[:-1]]]


def cuda_step(cuda: WeightsFirstBackend, state: object, token: int) -> int:
    output = cuda.forward([(state, Tree.chain([token]))])  # type: ignore[arg-type]
    cuda.commit(state, [0])  # type: ignore[arg-type]
    return int(output.argmax[0])
