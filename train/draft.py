"""Train a DFlash draft: a few layers that fill a block of masked positions at once from the target's features.

python -m train.draft --target MODEL --data FILE --out DIR

MODEL is any Qwen3.5 that warpsmith runs: a GGUF file, a directory of safetensors, a name on the Hub. FILE holds what
it will be asked, a JSON object a line: {"text": ...} or {"prompt": ...} to continue, or {"messages": [...]} for its
chat template. The model continues pieces of it, and the draft learns to foresee what it wrote. DIR/draft.gguf is then
ready for `warpsmith run -m MODEL --draft DIR/draft.gguf`. FILE may also be the folder that `train.data pack` writes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train import shards
from train.export import write_draft
from train.generate import cut_prompts, write_samples
from train.model import MLP, Qwen35, half_precision, rope_angles, rotate
from train.optim import Optimizer, multiplier
from train.target import ASSISTANT_TURN, load_target, load_tokenizer, read_tokens


@dataclass(frozen=True)
class DraftConfig:
    hidden_size: int = 512
    intermediate_size: int = 1024
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e7
    block_size: int = 16
    target_layer_ids: tuple[int, ...] = (1, 3, 5, 6)
    mask_token_id: int = 8191
    vocab_size: int = 8192
    num_target_layers: int = 8

    def to_json(self) -> dict:
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": 4096,
            "sliding_window": None,
            "use_sliding_window": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }

    @classmethod
    def from_json(cls, data: dict) -> DraftConfig:
        known = {k: data[k] for k in cls.__dataclass_fields__ if k in data}
        inner = data["dflash_config"]
        return cls(**known, mask_token_id=inner["mask_token_id"], target_layer_ids=tuple(inner["target_layer_ids"]))


class PlainRMSNorm(nn.Module):
    """The draft's norms multiply by the weight itself, unlike the target's zero-centred ones."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class BlockAttention(nn.Module):
    """Block rows attend to every context feature before their anchor and to their whole block."""

    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, c.hidden_size, bias=False)
        self.q_norm = PlainRMSNorm(self.width, c.rms_norm_eps)
        self.k_norm = PlainRMSNorm(self.width, c.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, theta: float) -> Tensor:
        """x [B, N, block, H]: N blocks a sequence; context [B, S, H]; anchors [B, N]."""
        batch, blocks, size, _ = x.shape
        length = context.shape[1]
        group = self.heads // self.kv_heads
        context_rope = rope_angles(0, length, self.width, theta, x.device)
        cos, sin = rope_angles(0, length + size, self.width, theta, x.device)
        positions = anchors[..., None] + torch.arange(size, device=x.device)
        block_rope = cos[positions], sin[positions]  # [B, N, block, 1, width / 2]

        def heads(y: Tensor, count: int) -> Tensor:
            return y.unflatten(-1, (count, self.width))

        q = rotate(self.q_norm(heads(self.q_proj(x), self.heads)), block_rope)
        k = rotate(self.k_norm(heads(self.k_proj(x), self.kv_heads)), block_rope)
        v = heads(self.v_proj(x), self.kv_heads)
        past_k = rotate(self.k_norm(heads(self.k_proj(context), self.kv_heads)), context_rope)
        past_v = heads(self.v_proj(context), self.kv_heads)

        q = q.to(v.dtype).unflatten(3, (self.kv_heads, group))  # [B, N, block, kv, group, width]
        k, past_k = k.to(v.dtype), past_k.to(v.dtype)
        # [B, kv, N * block * group, S] and [B, kv, N, block * group, block], joined before the softmax
        rows = q.permute(0, 3, 1, 2, 4, 5).reshape(batch, self.kv_heads, -1, self.width)
        past = rows @ past_k.permute(0, 2, 3, 1)
        past = past.unflatten(2, (blocks, size * group)).float()
        own = rows.unflatten(2, (blocks, size * group)) @ k.permute(0, 3, 1, 4, 2)
        visible = torch.arange(length, device=x.device) < anchors[..., None]  # strictly before the anchor
        past = past.masked_fill(~visible[:, None, :, None, :], -torch.inf)
        scores = torch.cat([past, own.float()], -1) * self.width**-0.5
        weights = scores.softmax(-1).to(v.dtype)
        out = weights[..., :length].flatten(2, 3) @ past_v.transpose(1, 2)
        out = out.unflatten(2, (blocks, size * group)) + weights[..., length:] @ v.permute(0, 3, 1, 2, 4)
        out = out.unflatten(3, (size, group)).permute(0, 2, 3, 1, 4, 5).reshape(batch, blocks, size, -1)
        return self.o_proj(out)


class DraftLayer(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = PlainRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = PlainRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = BlockAttention(c)
        self.mlp = MLP(c.hidden_size, c.intermediate_size)
        self.theta = c.rope_theta

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, anchors, self.theta)
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        c = self.config = config
        self.fc = nn.Linear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = PlainRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(c) for _ in range(c.num_hidden_layers))
        self.norm = PlainRMSNorm(c.hidden_size, c.rms_norm_eps)

    def initialise(self, seed: int) -> None:
        torch.manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                quiet = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=(0.4 if quiet else 1.0) / math.sqrt(p.shape[1]))

    def forward(self, features: Tensor, embedded: Tensor, anchors: Tensor) -> Tensor:
        """features [B, S, n_f * H]; embedded [B, N, block, H] -> hidden of the same shape, for the target's head."""
        context = self.hidden_norm(self.fc(features))
        x = embedded
        for layer in self.layers:
            x = layer(x, context, anchors)
        return self.norm(x)


def blocks_at(ids: Tensor, anchors: Tensor, size: int, mask: int) -> tuple[Tensor, Tensor]:
    """Inputs [anchor, mask, ...] and labels [B, N, size - 1]; a label past the end is -100."""
    inputs = torch.full((*anchors.shape, size), mask, device=ids.device)
    inputs[..., 0] = ids.gather(1, anchors)
    places = anchors[..., None] + torch.arange(1, size, device=ids.device)
    inside = places < ids.shape[1]
    labels = ids.gather(1, places.clamp(max=ids.shape[1] - 1).flatten(1)).view_as(places)
    return inputs, labels.masked_fill(~inside, -100)


def target_features(target: Qwen35, ids: Tensor, layers: tuple[int, ...]) -> Tensor:
    with torch.no_grad(), half_precision(ids.device):
        _, taken = target.hidden(ids, features=list(layers))
        return torch.cat(taken, -1)


def block_loss(draft_hidden: Tensor, head: Tensor, labels: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy weighted by exp(-(j - 1) / gamma), and the share of right guesses at each offset."""
    logits = F.linear(draft_hidden[:, :, 1:], head).float()
    losses = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), ignore_index=-100, reduction="none").view_as(
        labels
    )
    offsets = torch.arange(labels.shape[-1], device=labels.device)
    weights = torch.exp(-offsets / gamma) * (labels >= 0)
    right = ((logits.argmax(-1) == labels).float().sum((0, 1))) / (labels >= 0).sum((0, 1)).clamp(min=1)
    return (losses * weights).sum() / weights.sum(), right.detach()


def train_draft(
    target: Qwen35,
    sequences: Tensor,
    prompt: int,
    config: DraftConfig,
    seconds: float,
    steps: int,
    batch: int,
    anchors: int,
    rate: float,
    out: Path,
    seed: int,
    compiled: bool,
) -> Draft:
    """Fit a draft to `sequences` [n, length] written by `target`; anchors fall after the prompt."""
    started = time.monotonic()
    device = sequences.device
    draft = Draft(config).to(device)
    draft.initialise(seed)
    optimizer = Optimizer(draft, rate, 0.003, decay=0.01)
    embedding, head = target.model.embed_tokens.weight.detach(), target.head.detach()
    random = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    loss_of = block_loss
    if compiled:
        for layer in draft.layers:
            layer.compile(dynamic=False)
        loss_of = torch.compile(block_loss, dynamic=False)
    history, step, first = [], 0, 0.0
    length = sequences.shape[1]
    while True:
        now = time.monotonic() - started
        by_time = (now - first) / max(1.0, seconds - first) if step > 3 else 0.005
        progress = step / steps if steps else by_time
        if progress >= 1:
            break
        if len(order) < batch:
            order = torch.cat([order, torch.randperm(len(sequences), generator=random)])
        ids = sequences[order[:batch].to(device)].long()
        order = order[batch:]
        places = torch.randint(prompt, length - 2, (len(ids), anchors), generator=random).to(device)
        features = target_features(target, ids, config.target_layer_ids)
        inputs, labels = blocks_at(ids, places, config.block_size, config.mask_token_id)
        with half_precision(device):
            hidden = draft(features, F.embedding(inputs, embedding), places)
            loss, right = loss_of(hidden, head, labels, 7.0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step(multiplier(progress, 0.04, 0.3))
        step += 1
        if step % 20 == 0 or step <= 3:
            value = float(loss.detach())
            foreseen = 1 + float(right.cumprod(0).sum())
            history.append({"step": step, "loss": value, "expected_length": foreseen, "first": float(right[0])})
            if step % 100 == 0 or step <= 3:
                print(
                    f"draft step {step} loss {value:.3f} first {float(right[0]):.3f} expected length {foreseen:.2f} "
                    f"{time.monotonic() - started:.0f} s",
                    flush=True,
                )
        if step == 3:  # compilation is over: time counts from here
            first = time.monotonic() - started
    shards.save(out / "draft", draft.state_dict(), config.to_json())
    (out / "draft.json").write_text(json.dumps(history))
    return draft


def spread(layers: int, features: int) -> tuple[int, ...]:
    """Evenly from the second layer to the last but two, as published drafts read them."""
    return tuple(dict.fromkeys(round(1 + i * (layers - 4) / max(1, features - 1)) for i in range(features)))


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, metavar="MODEL")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    shape = parser.add_argument_group("shape")
    shape.add_argument("--layers", type=int, default=3)
    shape.add_argument("--ffn", type=int, help="inner size of the MLPs (default: twice the target's hidden size)")
    shape.add_argument("--heads", type=int, help="of 128 (default: as many as the hidden size holds)")
    shape.add_argument("--block", type=int, default=16, help="tokens filled at once, the known one included")
    shape.add_argument("--features", type=numbers, metavar="I,J,...", help="target layers to read (default: 4, spread)")
    shape.add_argument("--mask-token", type=int, help="id (default: the token <|mask|>, else the vocabulary's last)")
    text = parser.add_argument_group("text")
    text.add_argument("--sequences", type=int, default=8192, help="written by the target; each is seen as three")
    text.add_argument("--corpus-sequences", type=int, default=49152, help="cut from the data, for breadth")
    text.add_argument("--generate-batch", type=int, default=8192, help="written at once; less needs less memory")
    text.add_argument("--generate-minutes", type=float, default=60.0, help="stop writing after so long")
    text.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    text.add_argument("--new", type=int, default=384, help="tokens written after it")
    fit = parser.add_argument_group("training")
    fit.add_argument("--steps", type=int, default=1030)
    fit.add_argument("--minutes", type=float, help="train for so long instead of so many steps")
    fit.add_argument("--batch", type=int, default=128, help="sequences a step")
    fit.add_argument("--anchors", type=int, default=48, help="blocks a sequence")
    fit.add_argument("--rate", type=float, default=0.02)
    fit.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    fit.add_argument("--seed", type=int, default=35)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, template = load_tokenizer(args.target)
    if args.data.is_dir():
        tokens = torch.from_numpy(np.load(args.data / "tokens.npy").astype("int32"))
    else:
        tokens = read_tokens(args.data, tokenizer, template)
    if len(tokens) <= args.prompt + args.new:
        raise SystemExit(f"{args.data} holds {len(tokens)} tokens: --prompt and --new together need more")
    tokens = tokens.to(device)
    target = load_target(args.target, device)
    marker = torch.tensor(tokenizer.encode(ASSISTANT_TURN), device=device)
    sequences = write_samples(
        target,
        tokens,
        marker,
        args.sequences,
        min(args.generate_batch, args.sequences),
        args.prompt,
        args.new,
        args.seed,
        args.generate_minutes * 60,
    )
    corpus = cut_prompts(tokens, args.corpus_sequences, args.prompt + args.new, marker, 0.1, args.seed + 1000)
    sequences = torch.cat([sequences.repeat(3, 1), corpus.to(torch.int32)])
    c, mask = target.config, tokenizer.token_id("<|mask|>")
    heads = args.heads or max(1, c.hidden_size // 128)
    config = DraftConfig(
        hidden_size=c.hidden_size,
        intermediate_size=args.ffn or 2 * c.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        rope_theta=c.rope_theta,
        block_size=args.block,
        target_layer_ids=args.features or spread(c.num_hidden_layers, 4),
        mask_token_id=args.mask_token or mask or c.vocab_size - 1,
        vocab_size=c.vocab_size,
        num_target_layers=c.num_hidden_layers,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    draft = train_draft(
        target,
        sequences,
        args.prompt,
        config,
        (args.minutes or 0) * 60,
        0 if args.minutes else args.steps,
        args.batch,
        args.anchors,
        args.rate,
        args.out,
        args.seed,
        args.compile,
    )
    write_draft(args.out / "draft.gguf", f"{Path(args.target).stem}-dflash", config, draft.state_dict())


if __name__ == "__main__":
    main()
