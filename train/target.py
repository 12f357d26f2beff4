"""What a draft is trained for and on: a model that warpsmith opens, as a torch module, and text in its tokens."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from train.model import Config, Qwen35
from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.checkpoint.convert import to_safetensors
from warpsmith.checkpoint.hub import resolve
from warpsmith.model.chat import default_template, render
from warpsmith.model.tokenizer import Tokenizer

ASSISTANT_TURN = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def load_target(source: str | Path, device: torch.device) -> Qwen35:
    """Frozen, in fp32, from a GGUF file, a directory of safetensors or a name on the Hub."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as scratch:
        to_safetensors(open_checkpoint(resolve(source)), scratch, "F32")
        config = json.loads((Path(scratch) / "config.json").read_text())
        tensors = {}
        for file in Path(scratch).glob("*.safetensors"):
            tensors |= load_file(file)
    model = Qwen35(Config.from_json(config))
    model.load_state_dict(tensors)
    return model.to(device).eval().requires_grad_(False)


def load_tokenizer(source: str | Path) -> tuple[Tokenizer, str]:
    """A model's tokenizer and its chat template."""
    checkpoint = open_checkpoint(resolve(source))
    if checkpoint.tokenizer_dir:
        tokenizer = Tokenizer.from_tokenizer_json(checkpoint.tokenizer_dir)
    else:
        tokenizer = Tokenizer.from_gguf(checkpoint.metadata, str(checkpoint.path))
    return tokenizer, checkpoint.chat_template or default_template(thinking=checkpoint.parameters > 3e9)


def texts(file: Path, template: str) -> Iterator[str]:
    """The documents of a JSONL file: each under `text` or `prompt`, or a chat under `messages`."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            row = json.loads(line)
            if "messages" in row:
                answered = row["messages"][-1]["role"] == "assistant"
                yield render(template, row["messages"], add_generation_prompt=not answered)
            elif "text" in row or "prompt" in row:
                yield row.get("text") or row["prompt"]
            else:
                raise SystemExit(f"{file}: line {number} has none of text, prompt and messages")


def read_tokens(file: Path, tokenizer: Tokenizer, template: str) -> torch.Tensor:
    """All documents of a JSONL file one after the other, each closed by the end token."""
    end = tokenizer.token_id("<|endoftext|>")
    closing = [] if end is None else [end]
    ids = [token for text in texts(file, template) for token in [*tokenizer.encode(text), *closing]]
    return torch.tensor(ids, dtype=torch.int32)
