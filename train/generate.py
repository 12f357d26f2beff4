"""Text written by the target itself, in large batches: what a draft has to learn to foresee."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from train.model import Cache, Qwen35, half_precision


@torch.no_grad()
def continue_prompts(model: Qwen35, prompts: Tensor, new: int, temperature: Tensor) -> Tensor:
    """Append `new` tokens to each prompt [B, P]; a row of temperature 0 is greedy. Returns [B, P + new]."""
    batch, length = prompts.shape
    device = prompts.device
    cache = Cache(model.config, batch, length + new, device, torch.bfloat16)
    ids = torch.empty(batch, length + new, dtype=torch.long, device=device)
    ids[:, :length] = prompts
    step = prompts
    scale = temperature.clamp(min=1e-3)[:, None]
    greedy = temperature == 0
    for position in range(length, length + new):
        with half_precision(device):
            hidden, _ = model.hidden(step, cache)
            logits = model.logits(hidden[:, -1]).float()
        # Gumbel noise turns an argmax into a sample.
        noise = -torch.empty_like(logits).exponential_().log()
        sampled = (logits / scale + noise).argmax(-1)
        ids[:, position] = torch.where(greedy, logits.argmax(-1), sampled)
        step = ids[:, position : position + 1]
    return ids


def cut_prompts(tokens: Tensor, count: int, length: int, marker: Tensor, chat_share: float, seed: int) -> Tensor:
    """Windows of the corpus [count, length]: some end where an assistant turn begins, the rest anywhere."""
    random = torch.Generator().manual_seed(seed)
    places = torch.randint(length, len(tokens), (count,), generator=random)
    found = find(tokens, marker)
    found = found[found > length].cpu()
    chats = int(count * chat_share) if len(found) else 0
    if chats:
        places[:chats] = found[torch.randint(len(found), (chats,), generator=random)]
    index = (places - length)[:, None] + torch.arange(length)
    return tokens[index.to(tokens.device)].long()


def find(tokens: Tensor, marker: Tensor) -> Tensor:
    """Positions just after each occurrence of `marker`."""
    count = len(tokens) - len(marker) + 1
    hits = torch.ones(count, dtype=torch.bool, device=tokens.device)
    for i, token in enumerate(marker.tolist()):
        hits &= tokens[i : i + count] == token
    return hits.nonzero().squeeze(-1) + len(marker)


def write_samples(
    model: Qwen35,
    tokens: Tensor,
    marker: Tensor,
    sequences: int,
    batch: int,
    prompt: int,
    new: int,
    seed: int,
    seconds: float,
) -> Tensor:
    """[sequences, prompt + new] ids: a third greedy, a third at 0.6, a third at 1.0; fewer if time runs out."""
    started = time.monotonic()
    torch.manual_seed(seed)
    temperature = torch.tensor([0.0, 0.6, 1.0], device=tokens.device).repeat(batch // 3 + 1)[:batch]
    results: list[Tensor] = []
    while len(results) * batch < sequences:
        prompts = cut_prompts(tokens, batch, prompt, marker, 0.3, seed + len(results))
        # Chat prompts come first in the batch; shuffle so that every temperature sees both.
        prompts = prompts[torch.randperm(batch, device=tokens.device)]
        results.append(continue_prompts(model, prompts, new, temperature).to(torch.int32))
        spent = time.monotonic() - started
        if spent + spent / len(results) > seconds:
            break
    made = sum(len(r) for r in results)
    print(f"wrote {made} x {new} tokens in {time.monotonic() - started:.1f} s", flush=True)
    return torch.cat(results)
