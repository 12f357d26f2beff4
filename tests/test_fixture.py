"""The reference backend against what transformers computed once (tests/make_fixture.py): needs no torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from warpsmith.backend.base import LOGITS, Want
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.model.weights import read_config

DIRECTORY = Path(__file__).parent / "data" / "oracle"
EVERYTHING = Want("logits", features=(0, 1, 2, 3), hidden=True, every_row=True)


@pytest.fixture(scope="module")
def backend() -> ReferenceBackend:
    checkpoint = open_checkpoint(DIRECTORY)
    return ReferenceBackend(read_config(checkpoint), checkpoint.tensors)


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    with np.load(DIRECTORY / "expected.npz") as file:
        return dict(file)


def close(got: np.ndarray | None, wanted: np.ndarray) -> None:
    """Within 1e-4 of the largest value, everywhere."""
    assert got is not None
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max()


def test_the_specimen_has_what_it_should_test(backend: ReferenceBackend) -> None:
    config = backend.config
    assert config.value_heads == 2 * config.key_heads
    assert config.heads == 2 * config.kv_heads
    assert config.recurrent == (True, False, True, False)
    assert 0 < config.rotary_dim < config.head_dim
    assert config.mtp_layers == 1
    assert len(list(DIRECTORY.glob("model-*.safetensors"))) > 1
    assert sum(file.stat().st_size for file in DIRECTORY.iterdir()) < 400_000


def test_prefill(backend: ReferenceBackend, expected: dict[str, np.ndarray]) -> None:
    ids, rows, states = expected["ids"], expected["rows"], expected["states"]
    output = backend.prefill(backend.new_state(len(ids)), ids, EVERYTHING)
    assert output.logits is not None
    assert output.features is not None
    assert output.hidden is not None
    close(output.logits.numpy()[rows], expected["logits"])
    close(np.log(np.exp(output.logits.numpy().astype(np.float64)).sum(axis=1)), expected["logsumexp"])
    np.testing.assert_array_equal(output.argmax, expected["argmax"])
    features = np.split(output.features.numpy(), len(backend.config.recurrent), axis=1)
    for layer in range(3):  # transformers keeps the last layer's state only after the final norm
        close(features[layer][rows], states[layer + 1])
    close(output.hidden.numpy()[rows], states[-1])


def test_decoding(backend: ReferenceBackend, expected: dict[str, np.ndarray]) -> None:
    """The recurrent form of the DeltaNet and a growing cache, by the same logits."""
    ids, rows = expected["ids"], expected["rows"]
    state = backend.new_state(len(ids))
    logits = []
    for token in ids:
        logits.append(backend.forward([(state, Tree.chain([token]))], LOGITS).logits.numpy())
        backend.commit(state, [0])
    close(np.concatenate(logits)[rows], expected["logits"])


def test_mtp_over_a_text_and_on_its_own_output(backend: ReferenceBackend, expected: dict[str, np.ndarray]) -> None:
    ids, rows = expected["ids"], expected["mtp_rows"]
    state = backend.new_state(len(ids) + 8)
    hidden = backend.prefill(state, ids, Want("none", hidden=True)).hidden.numpy()
    assert hidden is not None
    want = Want("logits", hidden=True, every_row=True)
    output = backend.mtp(state, ids[1:], hidden[:-1], 0, want)
    assert output.logits is not None
    assert output.hidden is not None
    close(output.logits.numpy()[rows], expected["mtp_logits"])
    close(output.hidden.numpy()[rows], expected["mtp_hidden"])
    np.testing.assert_array_equal(output.argmax, expected["mtp_argmax"])

    drafted = [output.logits.numpy()[-1]]
    for step, token in enumerate(expected["drafted_tokens"][:-1]):
        assert output.hidden is not None
        output = backend.mtp(state, [token], output.hidden.numpy()[-1:], len(ids) - 1 + step, want)
        assert output.logits is not None
        drafted.append(output.logits.numpy()[-1])
    close(np.stack(drafted), expected["drafted_logits"])
    assert [row.argmax() for row in drafted] == list(expected["drafted_tokens"])
