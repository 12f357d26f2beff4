"""A draft for anybody's model: python -m train.draft as a user types it, and the models and texts it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import warpsmith  # noqa: E402
from train import draft, shards  # noqa: E402
from train.model import Config, Qwen35, initialise  # noqa: E402
from train.target import load_target, load_tokenizer, read_tokens  # noqa: E402
from warpsmith.model.tokenizer import byte_tokenizer  # noqa: E402

ROOT = Path(__file__).parent.parent
SMALL = Config(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)


def model_directory(path: Path, config: Config) -> tuple[Qwen35, Path]:
    """A random model as a directory of safetensors with a tokenizer of bytes."""
    model = Qwen35(config).eval()
    initialise(model, 3)
    tokenizer = path / "tokenizer"
    tokenizer.mkdir()
    byte_tokenizer(config.vocab_size).to_json_files(tokenizer)
    shards.save(path / "shards", model.state_dict(), config.to_json())
    shards.join(path / "shards", path / "model", tokenizer)
    return model, path / "model"


@pytest.mark.parametrize("shape", [{}, {"tie_word_embeddings": False, "mtp_num_hidden_layers": 0}])
def test_a_target_computes_what_was_saved(tmp_path: Path, shape: dict) -> None:
    model, path = model_directory(tmp_path, replace(SMALL, **shape))
    loaded = load_target(path, torch.device("cpu"))
    assert loaded.config == replace(model.config, eos_token_id=8178, pad_token_id=8176)
    rounded = {k: v.bfloat16().float() if v.dim() > 1 else v for k, v in model.state_dict().items()}
    model.load_state_dict(rounded)
    ids = torch.randint(0, 320, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids), model(ids), rtol=1e-4, atol=1e-4)


def test_texts_prompts_and_chats_become_tokens(tmp_path: Path) -> None:
    _, path = model_directory(tmp_path, SMALL)
    tokenizer, _ = load_tokenizer(path)
    file = tmp_path / "data.jsonl"
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    rows = [{"text": "abc"}, {"prompt": "def"}, {"messages": chat[:1]}, {"messages": chat}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ '>' if add_generation_prompt }}"
    end = "<|endoftext|>" if tokenizer.token_id("<|endoftext|>") is not None else ""
    text = tokenizer.decode(read_tokens(file, tokenizer, template).tolist())
    assert text == f"abc{end}def{end}[Hi]>{end}[Hi][Yes?]{end}"

    file.write_text('{"question": "?"}\n')
    with pytest.raises(SystemExit, match="line 1 has none of text, prompt and messages"):
        read_tokens(file, tokenizer, template)


def test_features_are_read_where_published_drafts_read_them() -> None:
    assert draft.spread(24, 5) == (1, 6, 11, 16, 21)
    assert draft.spread(64, 5) == (1, 16, 31, 46, 61)
    assert draft.spread(4, 4) == (1,)


def test_the_command_makes_a_draft_that_runs(tmp_path: Path) -> None:
    """Too little training to be right often; but a draft of the right form, which changes nothing of the text."""
    _, path = model_directory(tmp_path, SMALL)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"the number {i} and so on, for ever"}) + "\n" for i in range(20)))
    size = ["--sequences", "4", "--corpus-sequences", "4", "--prompt", "8", "--new", "12", "--block", "6"]
    size += ["--steps", "2", "--batch", "4", "--anchors", "2"]
    command = [sys.executable, "-m", "train.draft", "--target", path, "--data", data, "--out", tmp_path, *size]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)

    plain = warpsmith.load(path, device="reference", context=64)
    drafted = warpsmith.load(path, device="reference", context=64, draft=tmp_path / "draft.gguf", spec_budget=5)
    options = {"max_tokens": 12, "stop_ids": [], "temperature": 0}
    expected, answer = (llm.generate("the number 7", **options) for llm in (plain, drafted))
    assert answer.token_ids == expected.token_ids
    assert answer.stats.mode == "dflash"
    assert answer.stats.drafted_tokens > 0


def test_too_little_text_is_refused_before_the_model_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = model_directory(tmp_path, SMALL)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "short"}\n')
    monkeypatch.setattr(sys, "argv", ["draft", "--target", str(path), "--data", str(data), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="--prompt and --new together need more"):
        draft.main()
