"""Turn training's shards into the files that ship: wisp and its draft as Q8_0 GGUF.

python -m train.export --shards DIR --tokenizer DIR --out src/warpsmith/wisp

DIR holds wisp.0, wisp.1, ... and draft.0, as `train.pretrain` and `train.draft` leave them. The draft is written in
llama.cpp's dialect (its layer ids count from the layer that reads a feature).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from train import shards
from warpsmith.checkpoint.gguf_writer import write_gguf
from warpsmith.draft.dflash_files import LLAMA_CPP, DFlashConfig, DraftFile, open_draft

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.weight"
    _, layer, rest = stem.split(".", 2)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.weight"


def draft_metadata(config: DFlashConfig) -> dict[str, object]:
    values = {
        "block_count": config.layers,
        "embedding_length": config.hidden,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.eps,
        "rope.freq_base": config.rope_theta,
        "block_size": config.block,
        "target_layers": [layer + 1 for layer in config.target_layers],
        "vocab_size": config.vocab,
    }
    metadata: dict[str, object] = {f"{LLAMA_CPP}.{key}": value for key, value in values.items()}
    return {
        "general.architecture": LLAMA_CPP,
        "general.name": "wisp-dflash",
        **metadata,
        "tokenizer.ggml.mask_token_id": config.mask_token,
    }


def write_draft(draft: DraftFile, path: Path) -> None:
    weights = {name: read() for name, read in draft.weights.items()}
    kinds = {name: "Q8_0" if w.ndim == 2 else "F32" for name, w in weights.items()}
    write_gguf(path, draft_metadata(draft.config), {gguf_name(n): (kinds[n], w) for n, w in weights.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model, draft = Path(scratch) / "wisp", Path(scratch) / "wisp-dflash"
        shards.join(args.shards / "wisp", model)
        for file in args.tokenizer.iterdir():
            shutil.copy(file, model)
        target = args.out / "wisp.gguf"
        target.unlink(missing_ok=True)
        subprocess.run([sys.executable, "-m", "warpsmith.cli", "convert", model, target, "--type", "q8_0"], check=True)
        if (args.shards / "draft.0").exists():
            shards.join(args.shards / "draft", draft)
            write_draft(open_draft(draft), args.out / "wisp-dflash.gguf")
    for file in sorted(args.out.glob("*.gguf")):
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
