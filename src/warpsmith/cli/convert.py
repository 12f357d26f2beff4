"""`warpsmith convert`: the same model, or the same draft, in another format or weight type."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpsmith.cli.options import check_absent, natural
from warpsmith.cli.terminal import aside, progress
from warpsmith.errors import BadRequest
from warpsmith.measure.units import size

if TYPE_CHECKING:
    from warpsmith.checkpoint.canonical import Checkpoint


def arguments(parser: argparse.ArgumentParser) -> None:
    from warpsmith.checkpoint.quantize import RECIPES

    parser.add_argument("source", metavar="SRC", help="a model or DFlash draft: file, directory or name on the Hub")
    parser.add_argument("path", metavar="DST", type=Path, help="NAME.gguf, or a directory for safetensors")
    parser.add_argument("--type", metavar="T", help=f"weight type (default: as they are): {', '.join(RECIPES)}")
    parser.add_argument(
        "--speaks",
        type=natural,
        metavar="N",
        help="of a draft: let it guess the vocabulary's first N tokens only, and read no more of the model's LM head",
    )
    parser.add_argument(
        "--head",
        metavar="MODEL",
        help="of a draft: give it a copy of this model's LM head, as --type says, to read instead of the model's own",
    )
    parser.add_argument("--offline", action="store_true", help="never use the network")


def main(args: argparse.Namespace) -> int:
    from warpsmith.checkpoint.atomic import whole_directory
    from warpsmith.checkpoint.canonical import open_checkpoint
    from warpsmith.checkpoint.convert import exact_dtype, rounded_types, to_gguf, to_safetensors
    from warpsmith.checkpoint.dflash import is_draft
    from warpsmith.checkpoint.hub import resolve
    from warpsmith.model.weights import read_config

    source, recipe = resolve(args.source, offline=args.offline), args.type and args.type.lower()
    if is_draft(source):
        model = open_checkpoint(resolve(args.head, offline=args.offline)) if args.head else None
        return _convert_draft(source, args.path, recipe, args.speaks, model)
    if args.speaks is not None:
        raise BadRequest(f"{args.source} is a model, and models speak all of their vocabulary.", "Leave --speaks out.")
    if args.head is not None:
        raise BadRequest(f"{args.source} is a model, and has its LM head.", "Leave --head out.")
    checkpoint = open_checkpoint(source)
    read_config(checkpoint)  # a model that is not whole is not converted
    check_absent(args.path)
    if args.path.suffix == ".gguf":
        with progress("writing", checkpoint.nbytes) as advance:
            to_gguf(checkpoint, _gguf_metadata(checkpoint), args.path, recipe, advance)
    else:
        dtype = recipe.upper() if recipe else exact_dtype(checkpoint)
        with whole_directory(args.path) as part:
            to_safetensors(checkpoint, part, dtype)
            _write_tokenizer(checkpoint, part)
    written = open_checkpoint(args.path)
    aside(f"{args.path}: {len(written.tensors)} tensors, {size(written.nbytes)}")
    if rounded := rounded_types(checkpoint.tensors.values(), recipe):
        aside(f"{', '.join(rounded)} weights were rounded to {recipe}; --type f32 holds them exactly")
    return 0


def _convert_draft(source: Path, path: Path, recipe: str | None, speaks: int | None, model: Checkpoint | None) -> int:
    from warpsmith.checkpoint.convert import rounded_types
    from warpsmith.checkpoint.dflash import open_draft, speaking, with_head
    from warpsmith.checkpoint.dflash_writer import write_draft
    from warpsmith.model.dflash import check_fits
    from warpsmith.model.weights import read_config

    file = open_draft(source)
    if speaks is not None:
        file = speaking(file, speaks)
    if model is not None:
        config = read_config(model)
        check_fits(file.config, config)
        file = with_head(file, model.tensors[config.head_tensor])
    if path.suffix != ".gguf":
        raise BadRequest("A draft is written as a GGUF file.", "Name one, such as draft.gguf.")
    check_absent(path)
    with progress("writing", sum(tensor.nbytes for tensor in file.tensors.values())) as advance:
        write_draft(file, path, recipe, advance)
    written = open_draft(path)
    aside(f"{path}: a draft of {len(written.tensors)} tensors, {size(sum(t.nbytes for t in written.tensors.values()))}")
    if rounded := rounded_types(file.tensors.values(), recipe):
        aside(f"{', '.join(rounded)} weights were rounded to {recipe}; --type f32 holds them exactly")
    return 0


def _gguf_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """All that belongs in a GGUF file, whatever the source keeps beside the weights."""
    from warpsmith.model.tokenizer import Tokenizer, to_gguf_metadata

    metadata = dict(checkpoint.metadata)
    metadata.setdefault("general.name", checkpoint.path.stem)
    if checkpoint.tokenizer_dir:
        tokenizer = Tokenizer.from_tokenizer_json(checkpoint.tokenizer_dir)
        metadata |= to_gguf_metadata(tokenizer, checkpoint.tensors["token_embd.weight"].shape[0])
    if checkpoint.chat_template:
        metadata["tokenizer.chat_template"] = checkpoint.chat_template
    return metadata


def _write_tokenizer(checkpoint: Checkpoint, directory: Path) -> None:
    from warpsmith.model.tokenizer import Tokenizer

    if checkpoint.tokenizer_dir:
        Tokenizer.from_tokenizer_json(checkpoint.tokenizer_dir).to_json_files(directory)
    elif "tokenizer.ggml.tokens" in checkpoint.metadata:
        Tokenizer.from_gguf(checkpoint.metadata, str(checkpoint.path)).to_json_files(directory)
    if checkpoint.chat_template:
        (directory / "chat_template.jinja").write_text(checkpoint.chat_template, encoding="utf-8")
