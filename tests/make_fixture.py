"""Make tests/data/oracle: a tiny Qwen3.5 and what transformers computes with it. Needs torch and transformers 5.

    python tests/make_fixture.py

The model is saved by transformers as it saves any other, in shards and with the MTP tensors of a real checkpoint
added, so that the directory is also a specimen of the format. Weights are BF16, the computation is float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

DIRECTORY = Path(__file__).parent / "data" / "oracle"
LENGTH = 130  # two chunks of 64 and a bit
DRAFTED = 5  # steps that the MTP block runs on its own output

SETTINGS = {
    "vocab_size": 144,
    "hidden_size": 60,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
}


class MultiTokenPrediction(nn.Module):
    """The block that Qwen3.5 checkpoints carry and transformers leaves out, from transformers' own parts.

    It reads the embedding of a token and the model's normed hidden state of the position before it, and predicts the
    token after. Its own normed output is the hidden state for the next step.
    """

    def __init__(self, config: transformers.Qwen3_5TextConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = qwen.Qwen3_5RMSNorm(width, eps)
        self.pre_fc_norm_hidden = qwen.Qwen3_5RMSNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        attention = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([qwen.Qwen3_5DecoderLayer(config, attention)])
        self.norm = qwen.Qwen3_5RMSNorm(width, eps)

    def forward(self, rotary: nn.Module, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        count = len(hidden)
        merged = torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], dim=-1)
        x = self.fc(merged)[None]
        causal = torch.full((count, count), -torch.inf).triu(1)[None, None]
        positions = torch.arange(count)[None]
        x = self.layers[0](x, position_embeddings=rotary(x, positions), attention_mask=causal, position_ids=positions)
        return self.norm(x)[0]


def randomise(module: nn.Module) -> None:
    """Values large enough that a mistake anywhere shows in the logits, and exact in BF16."""
    for name, parameter in module.named_parameters():
        if name.endswith("A_log"):
            parameter.copy_(torch.empty_like(parameter).uniform_(0.1, 8).log())
        elif parameter.ndim >= 2:
            parameter.normal_(0, parameter[0].numel() ** -0.5 * (3 if "conv1d" in name else 1.5))
        else:
            parameter.normal_(0, 0.3)
        parameter.copy_(parameter.bfloat16().float())


def save(model: nn.Module, mtp: nn.Module) -> None:
    """BF16 files from transformers; then the MTP tensors in a file of their own, put into the index."""
    for old in DIRECTORY.iterdir():
        old.unlink()
    model.bfloat16().save_pretrained(DIRECTORY, max_shard_size="90KB")
    name = "mtp.safetensors"
    tensors = {f"mtp.{key}": value.bfloat16().contiguous() for key, value in mtp.state_dict().items()}
    save_file(tensors, DIRECTORY / name, metadata={"format": "pt"})
    index_path = DIRECTORY / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"] |= dict.fromkeys(tensors, name)
    index_path.write_text(json.dumps(index, indent=1))
    (DIRECTORY / "generation_config.json").unlink(missing_ok=True)
    saved = [load_file(path) for path in DIRECTORY.glob("*.safetensors")]
    assert sum(len(part) for part in saved) == len(model.state_dict()) + len(tensors)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(35)
    torch.use_deterministic_algorithms(True)
    config = transformers.Qwen3_5TextConfig(**SETTINGS, attn_implementation="eager")
    model = transformers.Qwen3_5ForCausalLM(config).float().eval()
    mtp = MultiTokenPrediction(config).float().eval()
    randomise(model)
    randomise(mtp)
    ids = torch.randint(0, config.vocab_size, (LENGTH,))
    output = model(ids[None], output_hidden_states=True)
    states = torch.stack(output.hidden_states)[:, 0]  # after the embedding, after each layer; the last one normed

    # the MTP block over the whole text, then on its own output: the hidden state of a draft is the draft's own
    embed, rotary = model.model.embed_tokens, model.model.rotary_emb
    tokens, hidden = ids[1:], states[-1][:-1]
    mtp_hidden = mtp(rotary, embed(tokens), hidden)
    mtp_logits = model.lm_head(mtp_hidden)
    drafted = []
    for _ in range(DRAFTED):
        out = mtp(rotary, embed(tokens), hidden)[-1:]
        drafted.append(model.lm_head(out)[0])
        tokens = torch.cat([tokens, drafted[-1].argmax()[None]])
        hidden = torch.cat([hidden, out])

    DIRECTORY.mkdir(parents=True, exist_ok=True)
    save(model, mtp)  # last, for it rounds RoPE's frequencies too
    rows = np.array([0, 1, 2, 3, 62, 63, 64, 65, 127, 128, 129])  # around every boundary; all of them would be 1 MB
    np.savez_compressed(
        DIRECTORY / "expected.npz",
        ids=ids.numpy().astype(np.int32),
        rows=rows,
        logits=output.logits[0, rows].numpy(),
        argmax=output.logits[0].argmax(-1).numpy().astype(np.int32),
        logsumexp=output.logits[0].logsumexp(-1).numpy(),
        states=states[:, rows].numpy(),
        mtp_rows=rows[:-1],
        mtp_logits=mtp_logits[rows[:-1]].numpy(),
        mtp_argmax=mtp_logits.argmax(-1).numpy().astype(np.int32),
        mtp_hidden=mtp_hidden[rows[:-1]].numpy(),
        drafted_tokens=tokens[-DRAFTED:].numpy().astype(np.int32),
        drafted_logits=torch.stack(drafted).numpy(),
    )
    size = sum(path.stat().st_size for path in DIRECTORY.iterdir())
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: {size / 1000:.0f} kB in {DIRECTORY}")


if __name__ == "__main__":
    sys.exit(main())
