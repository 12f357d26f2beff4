"""`warpsmith show`: what a model file holds and what memory it will take. Reads headers only."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from warpsmith.cli.escape import printable
from warpsmith.cli.options import cache_arguments, natural
from warpsmith.errors import BadRequest, NoDevice
from warpsmith.measure.units import count, size

if TYPE_CHECKING:
    from warpsmith.backend.cuda.build.profiles import Profile
    from warpsmith.backend.cuda.choice import PlannedDraft
    from warpsmith.checkpoint.canonical import Checkpoint
    from warpsmith.model.config import Config

WHOLE = ("F32", "F16", "BF16")  # on CUDA a draft's matrices of these are held as Q8_0: it cannot change the text
# Lists as long as the vocabulary: named, not printed, and not even read.
VOCABULARY = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.scores")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="NAME", help="a file, a directory or a name on the Hub (default: wisp)"
    )
    parser.add_argument(
        "-c", "--ctx-size", type=natural, metavar="N", help="context to plan memory for (default: as `run`)"
    )
    parser.add_argument("--device", choices=("cuda",), help="list everything that this device will hold")
    parser.add_argument(
        "--draft", metavar="NAME", help="with --device or --chip: this DFlash draft beside the model, too"
    )
    parser.add_argument("--chip", metavar="NAME", help="the same for a GPU that is not here, such as rtx-3090")
    cache_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--offline", action="store_true", help="never use the network")


def main(args: argparse.Namespace) -> int:
    from warpsmith.llm import DEFAULT_CONTEXT

    if (draft := _draft(args.model, args.offline)) is not None:
        print(json.dumps(draft, indent=2) if args.json else _draft_page(draft))
        return 0
    checkpoint, config = _open(args.model, args.offline)
    context = args.ctx_size or min(DEFAULT_CONTEXT, config.context)
    facts = describe(checkpoint, config, context)
    if args.device or args.chip:
        caches = (args.cache_type_k or "f16", args.cache_type_v or "f16")
        drafts = None if args.draft is None else _beside(args.draft, config, args.offline)
        facts["memory"] = device_plan(checkpoint, config, _chip(args.chip), context, caches, drafts)
    elif args.draft is not None:
        raise BadRequest("--draft plans a draft on a GPU.", "Add --device cuda, or --chip with a GPU's name.")
    print(json.dumps(facts, indent=2) if args.json else _page(facts))
    return 0


def _open(name: str | None, offline: bool) -> tuple[Checkpoint, Config]:
    from warpsmith.checkpoint.canonical import open_checkpoint
    from warpsmith.checkpoint.hub import resolve
    from warpsmith.model.weights import read_config
    from warpsmith.wisp import WISP

    checkpoint = open_checkpoint(WISP if name is None else resolve(name, offline))
    return checkpoint, read_config(checkpoint)


def _beside(name: str, config: Config, offline: bool) -> PlannedDraft:
    """A draft that fits the model, for the plan."""
    from warpsmith.backend.cuda.choice import PlannedDraft
    from warpsmith.backend.cuda.draft.layout import takes
    from warpsmith.checkpoint.dflash import open_draft
    from warpsmith.checkpoint.hub import resolve
    from warpsmith.draft.dflash import capacity_of
    from warpsmith.model.dflash import check_fits

    file = open_draft(resolve(name, offline))
    check_fits(file.config, config)
    if not takes(file.config, config.vocab):
        raise BadRequest(f"The cuda device leaves the draft {name} to the host.", "Leave --draft out of the plan.")
    stored = {each: tensor.type.name for each, tensor in file.tensors.items()}
    return PlannedDraft(file.config, stored, capacity_of(file.config))


def _draft(name: str | None, offline: bool) -> dict[str, Any] | None:
    """What there is to say of a DFlash draft; None if it is none."""
    from warpsmith.checkpoint.dflash import HEAD, is_draft, open_draft
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
        "head": file.tensors[HEAD].type.name if file.config.own_head else None,
        "held_on_cuda": "Q8_0" if any(tensor.type.name in WHOLE for tensor in matrices) else "as in the file",
    }


def _draft_page(facts: dict[str, Any]) -> str:
    c, whole = facts["draft"], facts["held_on_cuda"] == "Q8_0"
    seen = [
        ("all" if window is None else f"{window} tokens") + (", causal" if causal else "")
        for window, causal in zip(c["windows"], c["causal"], strict=True)
    ]
    types = ", ".join(facts["types"])
    spoken = "all" if c["speaks"] is None else f"the first {c['speaks']} tokens"
    head = f"an LM head of its own, {facts['head']}" if c["own_head"] else "its target's LM head"
    lines = [
        facts["path"],
        f"  a DFlash draft: {count(facts['parameters'])} parameters, {size(facts['bytes'])}, {types}",
        f"  layers      {c['layers']}, each sees: {'; '.join(dict.fromkeys(seen))}",
        f"  hidden      {c['hidden']}, MLP {c['ffn']}",
        f"  attention   {c['heads']} query heads, {c['kv_heads']} key/value heads of {c['head_dim']}",
        f"  block       {c['block']} positions, masked with token {c['mask_token']}",
        f"  reads       layers {', '.join(map(str, c['target_layers']))} of its target",
        f"  speaks      {spoken} of its target's vocabulary, by {head}",
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


def _chip(name: str | None) -> Profile:
    """A chip by the name of its profile; None is the GPU at hand, as the driver describes it."""
    from dataclasses import replace

    from warpsmith.backend.cuda.build.profiles import capability_from, choose, load_profiles
    from warpsmith.backend.devices import gpus

    profiles = load_profiles()
    if name is not None:
        if name not in profiles:
            raise BadRequest(f"There is no chip {name!r}.", f"Choose one of {', '.join(sorted(profiles))}.")
        return profiles[name]
    found, _ = gpus()
    if not found:
        raise NoDevice("No NVIDIA GPU is visible.", f"Name one with --chip: {', '.join(sorted(profiles))}.")
    gpu, capability = found[0], capability_from(found[0]["compute_capability"])
    known, _ = choose(gpu["name"], capability)
    return replace(known, name=gpu["name"], capability=capability, sms=gpu["multiprocessors"], memory=gpu["memory"])


def device_plan(
    checkpoint: Checkpoint,
    config: Config,
    chip: Profile,
    context: int,
    caches: tuple[str, str],
    draft: PlannedDraft | None = None,
) -> dict[str, Any]:
    """What the cuda device will hold on a chip, part by part."""
    from warpsmith.backend.cuda.choice import activations_first, planned
    from warpsmith.backend.cuda.memory.caches import CACHE_ROWS

    stored = {name: tensor.type.name for name, tensor in checkpoint.tensors.items()}
    large = activations_first(config, stored)
    for kind in caches:
        if kind not in (CACHE_ROWS if large else ("f16",)):
            raise BadRequest(f"The cuda device does not keep keys and values of this model as {kind}.", "Use f16.")
    parts = planned(config, stored, chip, context, caches, draft)
    total = sum(part.nbytes for part in parts)
    plan: dict[str, Any] = {"context": context, "chip": chip.name, "type_k": caches[0], "type_v": caches[1]}
    plan["parts"] = {part.what: part.nbytes for part in parts if part.nbytes}
    plan |= {"total": total, "memory": chip.memory, "fits": total <= chip.memory}
    return plan


def _device_lines(plan: dict[str, Any]) -> list[str]:
    lines = [f"memory on {plan['chip']} for a context of {plan['context']} (-c)"]
    for name, nbytes in plan["parts"].items():
        kinds = f"  ({plan['type_k']}, {plan['type_v']})" if name == "keys and values" else ""
        lines.append(f"  {name:<16} {size(nbytes):>11}{kinds}")
    verdict = "fits" if plan["fits"] else "does not fit"
    lines.append(f"  {'total':<16} {size(plan['total']):>11}  {verdict} in {size(plan['memory'])}")
    return lines


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
    lines += ["", *(_device_lines(memory) if "chip" in memory else _plain_lines(memory)), "", "metadata"]
    lines += [f"  {key} = {_brief(value)}" for key, value in facts["metadata"].items()]
    return "\n".join(map(printable, lines))


def _plain_lines(memory: dict[str, int]) -> list[str]:
    total = memory["weights"] + memory["keys_and_values"] + memory["deltanet_states"]
    return [
        f"memory for a context of {memory['context']} (-c)",
        f"  weights          {size(memory['weights']):>11}",
        f"  keys and values  {size(memory['keys_and_values']):>11}  (16 bits)",
        f"  DeltaNet states  {size(memory['deltanet_states']):>11}  (float32)",
        f"  total            {size(total):>11}",
    ]


def _brief(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
