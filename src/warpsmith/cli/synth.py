"""`warpsmith synth`: random models, for tests and for measuring speed without a download."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

from warpsmith.cli.options import check_absent, natural, whole
from warpsmith.cli.terminal import aside, progress
from warpsmith.errors import BadRequest, WarpsmithError
from warpsmith.measure.units import size

# flag -> field of the configuration
SHAPE = {
    "hidden": "width of the residual stream",
    "ffn": "width of the MLP",
    "vocab": "rows of the embedding",
    "heads": "query heads of an attention layer",
    "kv_heads": "key and value heads of an attention layer",
    "key_heads": "key heads of a DeltaNet layer",
    "value_heads": "value heads of a DeltaNet layer",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    from warpsmith.checkpoint.quantize import RECIPES

    parser.add_argument("size", metavar="SIZE", help="0.8B, 2B, 4B, 9B, 27B or tiny")
    parser.add_argument("path", metavar="PATH", type=Path, help="NAME.gguf, or a directory for safetensors")
    parser.add_argument(
        "--type", default="bf16", metavar="T", help=f"weight type (default: bf16): {', '.join(RECIPES)}"
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="makes it repeatable (default: 0)")
    parser.add_argument("--layers", type=natural, metavar="N", help="layers, every fourth an attention layer")
    parser.add_argument("--mtp", action="store_true", help="add a multi-token-prediction layer")
    parser.add_argument("--dflash", action="store_true", help="write a DFlash draft for such a model instead (GGUF)")
    for flag, help in SHAPE.items():
        parser.add_argument(f"--{flag.replace('_', '-')}", type=natural, metavar="N", help=help)


def main(args: argparse.Namespace) -> int:
    from warpsmith.model.config import SIZES, every_fourth_is_attention
    from warpsmith.model.synthetic import planned_bytes, synthesize
    from warpsmith.model.synthetic_draft import planned_draft_bytes, synthesize_draft

    config = SIZES.get(args.size) or SIZES.get(args.size.upper())
    if config is None:
        raise BadRequest(f"There is no size {args.size!r}.", f"Use one of {', '.join(SIZES)}.")
    config = replace(config, **{field: getattr(args, field) for field in SHAPE if getattr(args, field)})
    if args.layers:
        config = replace(config, layers=args.layers, recurrent=every_fourth_is_attention(args.layers))
    if args.mtp:
        config = replace(config, mtp_layers=1)
    if config.heads % config.kv_heads or config.value_heads % config.key_heads:
        raise BadRequest(
            f"{config.heads} query heads over {config.kv_heads} and {config.value_heads} value heads over "
            f"{config.key_heads} do not divide.",
            "Make --heads a multiple of --kv-heads and --value-heads one of --key-heads.",
        )
    format = "gguf" if args.path.suffix == ".gguf" else "safetensors"
    if args.dflash and format != "gguf":
        raise BadRequest("A random draft is written as a GGUF file.", "Name one, such as draft.gguf.")
    check_absent(args.path)
    recipe = args.type.lower()
    total = planned_draft_bytes(config, recipe) if args.dflash else planned_bytes(config, recipe)
    free = shutil.disk_usage(args.path.absolute().parent).free
    if total > free:
        raise WarpsmithError(f"The model takes {size(total)}, and {size(free)} are free there.", "Make room first.")
    with progress(f"{args.size} {recipe}", total) as advance:
        if args.dflash:
            synthesize_draft(config, args.path, recipe, args.seed, advance)
        else:
            synthesize(config, args.path, recipe, args.seed, format, progress=advance)
    aside(f"{args.path}: {size(total)} of random weights, {recipe}, seed {args.seed}")
    return 0


def _seed(text: str) -> int:
    """An argparse type: a whole number from 0."""
    number = whole(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number
