"""Checks of the training code on tiny shapes: python -m pytest train -q (needs torch and transformers)."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from train import shards  # noqa: E402
from train.__main__ import Log  # noqa: E402
from train.data import pack  # noqa: E402
from train.deltanet import ScanChunks, UnitLowerInverse, chunked, recurrent_step  # noqa: E402
from train.draft import Draft, DraftConfig, train_draft  # noqa: E402
from train.evaluate import bits_per_byte, draft_length, mtp_length  # noqa: E402
from train.generate import continue_prompts, find, write_samples  # noqa: E402
from train.model import Cache, Config, Qwen35, initialise  # noqa: E402
from train.pretrain import Settings, Trainer, load_heldout  # noqa: E402

TINY = Config(
    vocab_size=97,
    eos_token_id=1,
    pad_token_id=0,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
SMALL_STEPS = {"length": 32, "batch_tokens": 128, "micro_tokens": 64, "decay_from": 0.5, "compile": False}


def tiny(seed: int = 0) -> Qwen35:
    model = Qwen35(TINY)
    initialise(model, seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def delta_inputs(length: int, repeated_keys: bool = False):
    torch.manual_seed(1)
    q, k = torch.randn(2, 2, length, 2, 16).unbind()
    if repeated_keys:
        k = k[:, :1].expand_as(k).contiguous()
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v = torch.randn(2, length, 4, 16)
    beta = torch.rand(2, length, 4)
    g = -torch.rand(2, length, 4) * (0.001 if repeated_keys else 0.3)
    return q, k, v, beta, g, torch.randn(2, 4, 16, 16)


@pytest.mark.parametrize(("length", "repeated"), [(1, False), (64, True), (150, False), (200, True)])
def test_chunked_equals_recurrent(length: int, repeated: bool) -> None:
    q, k, v, beta, g, state = delta_inputs(length, repeated)
    out, last = chunked(q, k, v, beta, g, state)
    for t in range(length):
        expected, state = recurrent_step(q[:, t], k[:, t], v[:, t], beta[:, t], g[:, t], state)
        torch.testing.assert_close(out[:, t], expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(last, state, rtol=1e-3, atol=1e-3)


def test_chunk_gradients_equal_autograd_through_the_recurrence() -> None:
    inputs = [x.double().requires_grad_() for x in delta_inputs(70)]

    def recurrent(q, k, v, beta, g, state):
        outs = []
        for t in range(q.shape[1]):
            o, state = recurrent_step(q[:, t], k[:, t], v[:, t], beta[:, t], g[:, t], state)
            outs.append(o)
        return torch.stack(outs, 1), state

    weight = torch.randn(2, 70, 4, 16).double()
    grads = []
    for rule in (chunked, recurrent):
        used = inputs if rule is recurrent else [x.float() for x in inputs]
        out, last = rule(*used)
        grads.append(torch.autograd.grad((out * weight).sum() + last.square().sum(), inputs))
    for fast, slow in zip(*grads, strict=True):
        torch.testing.assert_close(fast, slow, rtol=2e-3, atol=2e-3)


def test_inverse_is_exact_when_keys_repeat() -> None:
    a = torch.ones(3, 64, 64).tril(-1)
    product = UnitLowerInverse.apply(a) @ (a + torch.eye(64))
    torch.testing.assert_close(product, torch.eye(64).expand_as(product), rtol=0, atol=1e-2)


def test_scan_gradcheck() -> None:
    shapes = ((3, 2, 4, 5), (3, 2, 4, 5), (3, 2, 4, 5), (3, 2), (2, 5, 5))
    inputs = tuple(torch.randn(s, dtype=torch.double, requires_grad=True) for s in shapes)
    assert torch.autograd.gradcheck(ScanChunks.apply, inputs)


def test_decoding_equals_one_pass() -> None:
    model = tiny().eval()
    ids = torch.randint(0, 97, (2, 90))
    with torch.no_grad():
        whole = model(ids)
        cache = Cache(TINY, 2, 90, ids.device, torch.float32)
        pieces = [model.logits(model.hidden(ids[:, :70], cache)[0])]
        pieces += [model.logits(model.hidden(ids[:, t : t + 1], cache)[0]) for t in range(70, 90)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-3, atol=1e-3)


def test_logits_equal_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    model = tiny().eval()
    reference = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY.to_json())).float().eval()
    trunk = {k: v for k, v in model.state_dict().items() if not k.startswith("mtp.")}
    missing, unexpected = reference.load_state_dict(trunk, strict=False)
    assert missing in ([], ["lm_head.weight"])
    assert not unexpected
    ids = torch.randint(0, 97, (2, 131))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), reference(ids).logits.float(), rtol=1e-4, atol=1e-4)


def test_shards_lose_nothing(tmp_path: Path) -> None:
    tensors = {k: v if v.dim() < 2 else v.bfloat16() for k, v in tiny().state_dict().items()}
    shards.save(tmp_path / "wisp", tensors, TINY.to_json())
    loaded, config = shards.load(tmp_path / "wisp")
    assert Config.from_json(config) == TINY
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


def test_every_stage_runs_and_learns(tmp_path: Path) -> None:
    """A language of counting: the next token is always the last plus one, so everything should soon be foreseen."""
    words = 16
    stream = (np.arange(5_000) % words).astype(np.uint16)
    heldout = {
        "tokens": stream[:300],
        "lengths": np.array([150, 150], np.int32),
        "bytes": np.array([300, 300], np.int32),
        "kind": np.array([0, 2], np.uint8),
    }
    settings = Settings(tmp_path, tmp_path, tmp_path / "state", steps=30, save_every=10, log_every=5, **SMALL_STEPS)
    widths = {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "intermediate_size": 64}
    small = replace(TINY, vocab_size=words + 1, **widths)
    trainer = Trainer(small, settings, torch.device("cpu"), time.monotonic())
    trainer.run(stream, heldout)
    target = Qwen35(small).eval().requires_grad_(False)
    target.load_state_dict(shards.load(tmp_path / "wisp")[0])
    score = bits_per_byte(target, heldout, 32, 3)
    assert score["loss"] < 1.0
    assert score["bits_per_byte"] == pytest.approx(score["loss"] / np.log(2) / 2)

    # Interrupted before its second save and begun again, training ends with the same weights to the bit.
    settings.state, settings.out = tmp_path / "interrupted", tmp_path / "again"
    interrupted = Trainer(small, settings, torch.device("cpu"), time.monotonic())
    interrupted.evaluate = lambda _: 1 / (interrupted.step < 20)
    with pytest.raises(ZeroDivisionError):
        interrupted.run(stream, heldout)
    again = Trainer(small, settings, torch.device("cpu"), time.monotonic())
    assert (again.step, again.seen) == (10, trainer.seen // 3)
    again.run(stream, heldout)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name
    assert (tmp_path / "again" / "wisp.0").read_bytes() == (tmp_path / "wisp.0").read_bytes()

    tokens = torch.from_numpy(stream.astype(np.int32))
    marker = torch.tensor([5, 6])
    assert find(tokens, marker)[0] == 7
    sequences = write_samples(target, tokens, marker, 12, 6, 8, 30, 1, 60.0)
    assert sequences.shape == (12, 38)
    config = DraftConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        block_size=8,
        target_layer_ids=(1, 2),
        mask_token_id=words,
        vocab_size=words + 1,
    )
    draft = train_draft(target, sequences, 8, config, 0, 110, 6, 6, 0.02, tmp_path, 1, False)
    greedy = continue_prompts(target, tokens[:16].view(2, 8).long(), 30, torch.zeros(2))
    assert draft_length(target, draft, greedy, 8) > 3
    assert mtp_length(target, greedy, 8, 2)[0] > 1.5


def test_draft_rows_do_not_see_past_their_anchor() -> None:
    config = DraftConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, target_layer_ids=(1, 2), vocab_size=97
    )
    draft = Draft(config)
    draft.initialise(0)
    features, embedded = torch.randn(1, 40, 128), torch.randn(1, 3, 16, 64)
    anchors = torch.tensor([[5, 20, 30]])
    changed = features.clone()
    changed[:, 20:] += 1.0
    with torch.no_grad():
        before, after = draft(features, embedded, anchors), draft(changed, embedded, anchors)
    torch.testing.assert_close(before[:, :2], after[:, :2])
    assert not torch.allclose(before[:, 2], after[:, 2])
    # Inside a block attention is bidirectional: the first row depends on the last.
    embedded[:, :, -1] += 1.0
    with torch.no_grad():
        assert not torch.allclose(before[:, :, 0], draft(features, embedded, anchors)[:, :, 0])


def test_log_keeps_every_stage_and_stops_at_a_failure(tmp_path: Path) -> None:
    log = Log(tmp_path / "out" / "log.txt")
    log.run("this")
    with pytest.raises(SystemExit):
        Log(log.path).run("no.such.module", "a file")
    lines = log.path.read_text().splitlines()
    assert lines[0] == "$ python -m this"
    assert "Namespaces are one honking great idea -- let's do more of those!" in lines
    assert "$ python -m no.such.module 'a file'" in lines
    assert lines[-1].startswith("[no.such.module: exit 1 after ")


def test_pack_ends_every_document_and_stops_at_its_measure(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<|endoftext|>": 0, "one": 1, "two": 2, "three": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="three"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rows = {"heldout": ["one two", "three"], "train": ["one two three"] * 1200}
    for split, texts in rows.items():
        lines = [json.dumps({"kind": "code", "text": text}) + "\n" for text in texts]
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    pack(tmp_path, tmp_path, tmp_path, 2100)
    heldout = load_heldout(tmp_path)
    assert heldout["tokens"].tolist() == [1, 2, 0, 3, 0]
    assert heldout["lengths"].tolist() == [3, 2]
    assert heldout["bytes"].tolist() == [7, 5]
    # Whole batches of 512 documents are taken until there are enough.
    assert np.load(tmp_path / "tokens.npy").tolist() == [1, 2, 3, 0] * 1024
