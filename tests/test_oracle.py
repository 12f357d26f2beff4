"""The reference backend against Hugging Face transformers, on tiny random models."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import warpsmith  # noqa: E402
from warpsmith.backend.base import LOGITS, Want  # noqa: E402
from warpsmith.backend.reference import ReferenceBackend  # noqa: E402
from warpsmith.backend.tree import Tree  # noqa: E402
from warpsmith.checkpoint.canonical import Checkpoint, open_checkpoint  # noqa: E402
from warpsmith.model.weights import read_config  # noqa: E402

pytestmark = pytest.mark.oracle

LENGTHS = [1, 3, 63, 64, 65, 200]
EVERY_ROW = Want("logits", every_row=True)


def make_model(ratio: int, seed: int, **changes: object) -> torch.nn.Module:
    """A random Qwen3.5 with values large enough that a mistake anywhere shows in the logits."""
    torch.manual_seed(seed)
    settings: dict[str, object] = {
        "vocab_size": 320,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2 * ratio,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": False,
    }
    config = transformers.Qwen3_5TextConfig(**(settings | changes))
    model = transformers.Qwen3_5ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.1, 8).log())
            elif parameter.ndim >= 2:
                parameter.normal_(0, parameter[0].numel() ** -0.5 * (3 if "conv1d" in name else 1.5))
            else:
                parameter.normal_(0, 0.3)
    return model


def score(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()


def backend_of(checkpoint: Checkpoint) -> ReferenceBackend:
    return ReferenceBackend(read_config(checkpoint), checkpoint.tensors)


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda r: f"ratio{r}")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    model = make_model(request.param, seed=request.param)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return model, path


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_match(saved: tuple[torch.nn.Module, Path], length: int) -> None:
    model, path = saved
    backend = backend_of(open_checkpoint(path))
    ids = np.random.default_rng(length).integers(0, backend.config.vocab, length)
    expected = score(model, ids)
    whole = backend.prefill(backend.new_state(length), ids, EVERY_ROW).logits.numpy()
    assert whole is not None
    assert relative_error(whole, expected) < 1e-4


def test_score_is_what_transformers_says(saved: tuple[torch.nn.Module, Path]) -> None:
    model, path = saved  # there is no tokenizer beside the weights: score needs none
    ids = np.random.default_rng(4).integers(0, 320, 130)
    with warpsmith.load(path, device="reference", context=256) as llm:
        assert relative_error(llm.score(ids), score(model, ids)) < 1e-4


def test_logits_match_however_the_prompt_is_split(saved: tuple[torch.nn.Module, Path]) -> None:
    model, path = saved
    backend = backend_of(open_checkpoint(path))
    rng = np.random.default_rng(5)
    ids = rng.integers(0, backend.config.vocab, 200)
    expected = score(model, ids)
    for _ in range(4):
        cuts = [0, *sorted(rng.choice(np.arange(1, 200), 3, replace=False)), 200]
        state = backend.new_state(200)
        parts = [backend.prefill(state, ids[a:b], EVERY_ROW).logits.numpy() for a, b in pairwise(cuts)]
        assert relative_error(np.concatenate(parts), expected) < 1e-4


def test_trees_match_each_path_run_alone(saved: tuple[torch.nn.Module, Path]) -> None:
    model, path = saved
    backend = backend_of(open_checkpoint(path))
    rng = np.random.default_rng(6)
    prompt = rng.integers(0, backend.config.vocab, 70)
    state = backend.new_state(100)
    backend.prefill(state, prompt)
    parents = np.array([-1, 0, 0, 1, 1, 2, 3, 5, 7, 7])
    tree = Tree(rng.integers(0, backend.config.vocab, len(parents)), parents)
    logits = backend.forward([(state, tree)], LOGITS).logits.numpy()
    assert logits is not None
    for node in range(len(tree)):
        alone = score(model, np.concatenate([prompt, tree.tokens[tree.path(node)]]))
        assert relative_error(logits[node], alone[-1]) < 1e-4


def test_decoding_continues_a_prefill(saved: tuple[torch.nn.Module, Path]) -> None:
    model, path = saved
    backend = backend_of(open_checkpoint(path))
    ids = np.random.default_rng(7).integers(0, backend.config.vocab, 90)
    state = backend.new_state(90)
    backend.prefill(state, ids[:50])
    rows = []
    for token in ids[50:]:
        rows.append(backend.forward([(state, Tree.chain([token]))], LOGITS).logits.numpy())
        backend.commit(state, [0])
    assert relative_error(np.concatenate(rows), score(model, ids)[50:]) < 1e-4


def test_features_are_the_residual_after_a_layer(saved: tuple[torch.nn.Module, Path]) -> None:
    model, path = saved
    backend = backend_of(open_checkpoint(path))
    ids = np.random.default_rng(8).integers(0, backend.config.vocab, 20)
    with torch.no_grad():
        states = model.model(torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states
    output = backend.prefill(backend.new_state(20), ids, Want("none", features=(3, 0), hidden=True))
    assert output.features is not None
    assert output.hidden is not None
    expected = np.concatenate([states[4][0].numpy(), states[1][0].numpy()], axis=1)
    assert relative_error(output.features.numpy(), expected) < 1e-4
    assert relative_error(output.hidden.numpy(), states[-1][0].numpy()) < 1e-4  # transformers norms the last one


def test_tied_embeddings_and_the_default_pattern(tmp_path: Path) -> None:
    model = make_model(2, seed=11, tie_word_embeddings=True, layer_types=None, num_hidden_layers=8)
    model.tie_weights()
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    backend = backend_of(checkpoint)
    assert backend.config.tied
    assert backend.config.attention_layers == (3, 7)
    ids = np.arange(40) * 7 % 320
    got = backend.prefill(backend.new_state(40), ids, EVERY_ROW).logits.numpy()
    assert got is not None
    assert relative_error(got, score(model, ids)) < 1e-4
