"""Did training work: held-out bits per byte, and how many tokens a round the draft and the MTP layer would give.

python -m train.evaluate --target MODEL [--draft PREFIX] --data DIR --out DIR
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from train.data import KINDS
from train.model import Qwen35, half_precision


@torch.no_grad()
def bits_per_byte(model: Qwen35, heldout: dict[str, np.ndarray], length: int, rows: int) -> dict[str, float]:
    """Loss a token and bits a byte over the held-out documents, packed as in training, and per kind of text."""
    device = model.model.norm.weight.device
    tokens = torch.from_numpy(heldout["tokens"].astype(np.int64)).to(device)
    kind = torch.from_numpy(np.repeat(heldout["kind"], heldout["lengths"]).astype(np.int64)).to(device)
    windows = (len(tokens) - 1) // length
    rows = min(rows, windows)
    used = windows * length
    losses = torch.zeros(used, device=device)
    for first in range(0, windows, rows):
        # Always `rows` windows, so that a compiled model keeps its shape.
        index = (torch.arange(first, first + rows, device=device) % windows)[:, None] * length
        places = index + torch.arange(length, device=device)
        with half_precision(device):
            hidden, _ = model.hidden(tokens[places])
            for row in range(0, rows, 16):
                logits = model.logits(hidden[row : row + 16]).float().flatten(0, 1)
                part = F.cross_entropy(logits, tokens[places[row : row + 16] + 1].flatten(), reduction="none")
                losses[places[row : row + 16].flatten()] = part
    kind = kind[1 : used + 1]
    per_kind = np.bincount(heldout["kind"], heldout["bytes"], 3) / np.bincount(
        heldout["kind"], heldout["lengths"], 3
    ).clip(1)
    result = {"loss": float(losses.mean())}
    total_bytes = heldout["bytes"].sum() / heldout["lengths"].sum()
    result["bits_per_byte"] = float(result["loss"] / math.log(2) / total_bytes)
    for i, name in enumerate(KINDS):
        if bool((kind == i).any()):
            result[f"{name}_bits_per_byte"] = float(losses[kind == i].mean() / math.log(2) / per_kind[i])
    return result


def walk(accepted: Tensor, first: int, last: int) -> float:
    """Mean tokens a round of a greedy chain: from each anchor jump over what was accepted, plus the bonus."""
    rounds = tokens = 0
    for row in accepted.tolist():
        place = first
        while place < last:
            rounds += 1
            tokens += row[place - first] + 1
            place += row[place - first] + 1
    return tokens / max(1, rounds)


@torch.no_grad()
def draft_length(target: Qwen35, draft, ids: Tensor, prompt: int) -> float:
    """Acceptance length of the draft's chain on greedy text `ids` of the target (its own continuation is the truth)."""
    from train.draft import blocks_at, target_features

    c = draft.config
    last = ids.shape[1] - c.block_size
    anchors = torch.arange(prompt, last, device=ids.device)
    accepted = []
    for rows in ids.split(8):
        places = anchors.expand(len(rows), -1)
        features = target_features(target, rows, c.target_layer_ids)
        inputs, labels = blocks_at(rows, places, c.block_size, c.mask_token_id)
        embedding = target.model.embed_tokens.weight
        with half_precision(ids.device):
            guesses = target.logits(draft(features, F.embedding(inputs, embedding), places)[:, :, 1:]).argmax(-1)
        accepted.append((guesses == labels).long().cumprod(-1).sum(-1))
    return walk(torch.cat(accepted), prompt, last)


@torch.no_grad()
def mtp_length(target: Qwen35, ids: Tensor, prompt: int, depth: int) -> list[float]:
    """Acceptance length with chains of 1..depth MTP steps; steps past the first see keys of their own pass."""
    rope = target.rope(0, ids.shape[1])
    with half_precision(ids.device):
        hidden, _ = target.hidden(ids)
        right = []
        for k in range(1, depth + 1):
            # Position i holds the hidden state for token i; its successor's embedding joins it.
            following = F.pad(ids[:, k:], (0, k))
            hidden = target.mtp(target.model.embed_tokens(following), hidden, rope)
            guess = target.logits(hidden).argmax(-1)
            truth = F.pad(ids[:, k + 1 :], (0, k + 1), value=-1)
            right.append(guess == truth)
    lengths = []
    last = ids.shape[1] - depth - 1
    for k in range(1, depth + 1):
        accepted = torch.stack(right[:k], -1).long().cumprod(-1).sum(-1)
        # The anchor at place p is drafted from the hidden state of p - 1.
        lengths.append(walk(accepted[:, prompt - 1 : last - 1], prompt, last))
    return lengths


def main() -> None:
    from train import shards
    from train.draft import Draft, DraftConfig
    from train.generate import continue_prompts, cut_prompts
    from train.pretrain import load_heldout
    from train.target import ASSISTANT_TURN, load_target, load_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, metavar="MODEL")
    parser.add_argument("--draft", type=Path, help="prefix of its shards")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(args.target, device)
    heldout = load_heldout(args.data)
    report: dict = {"heldout": bits_per_byte(target, heldout, args.length, args.rows)}
    tokens = torch.from_numpy(heldout["tokens"].astype(np.int32)).to(device)
    tokenizer, _ = load_tokenizer(args.target)
    marker = torch.tensor(tokenizer.encode(ASSISTANT_TURN), device=device)
    prompts = cut_prompts(tokens, args.prompts, args.prompt, marker, 0.25, 7)
    greedy = continue_prompts(target, prompts, args.new, torch.zeros(args.prompts, device=device))
    chats = args.prompts // 4
    report["mtp_length_by_depth"] = mtp_length(target, greedy, args.prompt, 4)
    if args.draft:
        tensors, config = shards.load(args.draft)
        draft = Draft(DraftConfig.from_json(config)).to(device)
        draft.load_state_dict(tensors)
        report["draft_length_chat"] = draft_length(target, draft, greedy[:chats], args.prompt)
        report["draft_length_code"] = draft_length(target, draft, greedy[chats:], args.prompt)
    report["samples"] = [tokenizer.decode(row.tolist()) for row in (*greedy[:4], *greedy[chats : chats + 4])]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "evaluation.json").write_text(json.dumps(report, indent=1))
    samples = report.pop("samples")
    print(json.dumps(report, indent=1))
    for text in samples[:2] + samples[4:6]:
        print("-" * 80 + "\n" + text)


if __name__ == "__main__":
    main()
