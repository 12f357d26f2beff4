"""`warpsmith show`: what a model file holds and what memory it will take. Reads headers only."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from warpsmith.cli.escape import printable
from warpsmith.cli.options import natural
from warpsmith.measure.units import count, size

if TYPE_CHECKING:
    from warpsmith.checkpoint.canonical import Checkpoint
    from warpsmith.model.config import Config

WHOLE = ("F32", "F16", "BF16")  # on CUDA a draft's matrices of these are held as Q8_0: it cannot change the text
# Lists as long as the vocabulary: named, not printed, and not even read.
VOCABULARY = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.scores")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="NAME", help="a file, a directory or a name on the Hub")
    parser.add_argument(
        "-c", "--ctx-size", type=natural, metavar="N", help="context to plan memory for (default: as `run`)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--offline", action="store_true", help="use the network for nothing")


def main(args: argparse.Namespace) -> int:
    from warpsmith.llm import DEFAULT_CONTEXT

    if (draft := _draft(args.model, args.offline)) is not None:
        print(json.dumps(draft, indent=2) if args.json else _draft_page(draft))
        return 0
    checkpoint, config = _open(args.model, args.offline)
    facts = describe(checkpoint, config, args.ctx_size or min(DEFAULT_CONTEXT, config.context))
    print(json.dumps(facts, indent=2) if args.json else _page(facts))
    return 0


def _open(name: str | None, offline: bool) -> tuple[Checkpoint, Config]:
    from warpsmith.checkpoint.canonical import open_checkpoint
    from warpsmith.checkpoint.hub import resolve
    from warpsmith.model.weights import read_config
    from warpsmith.wisp import WISP

    checkpoint = open_checkpoint(WISP if name is None else resolve(name, offline))
    return checkpoint, read_config(checkpoint)


def _draft(name: str | None, offline: bool) -> dict[str, Any] | None:
    """What there is to say of a DFlash draft; None if it is none."""
    from warpsmith.checkpoint.dflash import is_draft, open_draft
    from warpsmith.checkpoint.hub import resolve

    if name is None or not is_draft(path := resolve(name, offline)):
        return None
    file = open_draft(path)
    matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) == 2]
    parameters = sum(tensor.elements for tensor in file.tensors.values())
    return {
        "path": str(path),
        "parameters": parameters,
        "bytes": sum(tensor.nbytes for tensor in file.tensors.values()),
        "types": sorted({tensor.type.name for tensor in matrices}),
        "draft": asdict(file.config),
        "held_on_cuda": "Q8_0" if any(tensor.type.name in WHOLE for tensor in matrices) else "as in the file",
    }


def _draft_page(facts: dict[str, Any]) -> str:
    c, whole = facts["draft"], facts["held_on_cuda"] == "Q8_0"
    seen = [
        ("all" if window is None else f"{window} tokens") + (", causal" if causal else "")
        for window, causal in zip(c["windows"], c["causal"], strict=True)
    ]
    types = ", ".join(facts["types"])
    lines = [
        facts["path"],
        f"  a DFlash draft: {count(facts['parameters'])} parameters, {size(facts['bytes'])}, {types}",
        f"  layers      {c['layers']}, each sees: {'; '.join(dict.fromkeys(seen))}",
        f"  hidden      {c['hidden']}, MLP {c['ffn']}",
        f"  attention   {c['heads']} query heads, {c['kv_heads']} key/value heads of {c['head_dim']}",
        f"  block       {c['block']} positions, masked with token {c['mask_token']}",
        f"  reads       layers {', '.join(map(str, c['target_layers']))} of its target",
        f"  on cuda     its matrices are held {'as Q8_0' if whole else 'as they are in the file'}",
    ]
    return "\n".join(map(printable, lines))


def describe(checkpoint: Checkpoint, config: Config, context: int) -> dict[str, Any]:
    """Everything the verb says, ready for JSON."""
    types: dict[str, dict[str, int]] = {}
    for tensor in checkpoint.tensors.values():
        row = types.setdefault(tensor.type.name, {"tensors": 0, "parameters": 0, "bytes": 0})
        row["tensors"] += 1
        row["parameters"] += tensor.elements
        row["bytes"] += tensor.nbytes
    return {
        "path": str(checkpoint.path),
        "parameters": checkpoint.parameters,
        "bytes": checkpoint.nbytes,
        "config": asdict(config),
        "types": dict(sorted(types.items(), key=lambda item: -item[1]["bytes"])),
        "memory": memory_plan(checkpoint.nbytes, config, context),
        "metadata": {key: checkpoint.metadata[key] for key in checkpoint.metadata if key not in VOCABULARY},
    }


def memory_plan(weight_bytes: int, config: Config, context: int) -> dict[str, int]:
    """Bytes with weights as stored, keys and values in 16 bits, states in float32: what a fast backend holds."""
    kv_layers = len(config.attention_layers) + config.mtp_layers
    state = config.value_heads * config.key_head_dim * config.value_head_dim
    window = (config.conv_kernel - 1) * config.conv_channels
    return {
        "context": context,
        "weights": weight_bytes,
        "keys_and_values": 2 * kv_layers * context * config.kv_heads * config.head_dim * 2,
        "deltanet_states": len(config.recurrent_layers) * (state + window) * 4,
    }


def _page(facts: dict[str, Any]) -> str:
    config, memory = facts["config"], facts["memory"]
    attention = config["recurrent"].count(False)
    lines = [
        facts["path"],
        f"  {count(facts['parameters'])} parameters, {size(facts['bytes'])}",
        "",
        "shape",
        f"  layers      {config['layers']} ({config['layers'] - attention} DeltaNet, {attention} attention)"
        + (f" + {config['mtp_layers']} MTP" if config["mtp_layers"] else ""),
        f"  hidden      {config['hidden']}, MLP {config['ffn']}",
        f"  vocabulary  {config['vocab']}, {'tied' if config['tied'] else 'separate'} output",
        f"  attention   {config['heads']} query heads, {config['kv_heads']} key/value heads of {config['head_dim']}",
        f"  DeltaNet    {config['value_heads']} value heads of {config['value_head_dim']}, "
        f"{config['key_heads']} key heads of {config['key_head_dim']}",
        f"  context     {config['context']}",
        "",
        "tensors",
    ]
    for name, row in facts["types"].items():
        lines.append(f"  {name:<7} {row['tensors']:>5}  {count(row['parameters']):>9}  {size(row['bytes']):>11}")
    total = memory["weights"] + memory["keys_and_values"] + memory["deltanet_states"]
    lines += [
        "",
        f"memory for a context of {memory['context']} (-c)",
        f"  weights          {size(memory['weights']):>11}",
        f"  keys and values  {size(memory['keys_and_values']):>11}  (16 bits)",
        f"  DeltaNet states  {size(memory['deltanet_states']):>11}  (float32)",
        f"  total            {size(total):>11}",
        "",
        "metadata",
    ]
    lines += [f"  {key} = {_brief(value)}" for key, value in facts["metadata"].items()]
    return "\n".join(map(printable, lines))


def _brief(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
