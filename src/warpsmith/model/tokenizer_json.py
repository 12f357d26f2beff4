"""tokenizer.json and its companions: what lies beside safetensors weights, read and written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpsmith.errors import BadFile
from warpsmith.model.vocabulary import CONTROL, MAX_IDS, NORMAL, REFETCH, SPLIT, UNUSED, USER_DEFINED, filler, is_int

if TYPE_CHECKING:
    from warpsmith.model.tokenizer import Tokenizer

_MAX_JSON_BYTES = 256 << 20


def read_json_files(path: str | Path) -> dict[str, Any]:
    """What `Tokenizer` is made of, from tokenizer.json (or the directory that holds it) and the files beside it."""
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    spec = _read_json(file)
    config = _read_json(file.with_name("tokenizer_config.json"), optional=True)
    generation = _read_json(file.with_name("generation_config.json"), optional=True)
    return _parts(spec, config, generation, file)


def write_json_files(tokenizer: Tokenizer, directory: str | Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, as found beside safetensors weights."""
    added = [
        {
            "id": i,
            "content": tokenizer.tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": type == CONTROL,
        }
        for i, type in enumerate(tokenizer.types)
        if type in (CONTROL, USER_DEFINED)
    ]
    vocab = {
        token: i
        for i, (token, type) in enumerate(zip(tokenizer.tokens, tokenizer.types, strict=True))
        if type == NORMAL
    }
    if [token["id"] for token in added] != list(range(len(vocab), len(vocab) + len(added))):
        # Readers number added tokens upwards from the vocabulary unless the vocabulary itself places them.
        vocab |= {str(token["content"]): int(str(token["id"])) for token in added}
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT[tokenizer.pre]}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [merge.split(" ") for merge in tokenizer.merges],
        },
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    for role, id in (("eos_token", tokenizer.eos_id), ("pad_token", tokenizer.pad_id)):
        if id is not None and id < tokenizer.vocab_size:
            config[role] = tokenizer.tokens[id]
    for name, content in (("tokenizer.json", spec), ("tokenizer_config.json", config)):
        (Path(directory) / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _read_json(file: Path, optional: bool = False) -> dict[str, Any]:
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise BadFile(f"{file} is too large to be what its name says.", REFETCH)
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        if optional:
            return {}
        raise BadFile(f"{file} does not exist.", "Put the model's tokenizer.json beside its weights.") from None
    except (ValueError, RecursionError):
        raise BadFile(f"{file} is not valid JSON.", REFETCH) from None
    except OSError as error:
        raise BadFile(f"{file} cannot be read ({error.strerror}).") from None
    if not isinstance(content, dict):
        raise BadFile(f"{file} does not hold a JSON object.", REFETCH)
    return content


def _parts(spec: dict[str, Any], config: dict[str, Any], generation: dict[str, Any], file: Path) -> dict[str, Any]:
    def bad(field: str, problem: str, name: str = file.name) -> BadFile:
        return BadFile(f"{file.with_name(name)}: {field} {problem}.", "Use the tokenizer of a Qwen3.5 model.")

    model = spec.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        raise bad("model", "is not BPE")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"):
        if model.get(option):
            raise bad(f"model.{option}", "is set, which this family does not use")
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not set(map(type, vocab.values())) <= {int}:
        raise bad("model.vocab", "does not map tokens to ids")
    if not isinstance(merges, list) or not all(
        type(m) is str or (type(m) is list and set(map(type, m)) == {str}) for m in merges
    ):
        raise bad("model.merges", "is not a list of pairs")
    if spec.get("normalizer") != {"type": "NFC"}:
        raise bad("normalizer", "is not NFC")
    pre = _split_name(spec.get("pre_tokenizer"))
    if pre is None:
        raise bad("pre_tokenizer", "is not the family's split expression followed by ByteLevel")

    placed: dict[int, tuple[str, int]] = {}  # id -> token, type
    added = _added_tokens(spec, config, bad)
    texts = {text for text, _ in added.values()}
    for id, token in [(id, (token, NORMAL)) for token, id in vocab.items() if token not in texts] + [*added.items()]:
        if not 0 <= id < MAX_IDS:
            raise bad("model.vocab", f"gives a token the id {id}, outside 0..{MAX_IDS - 1}")
        if placed.setdefault(id, token) != token:
            raise bad("model.vocab", f"uses the id {id} twice")
    rows = range(max(placed, default=-1) + 1)
    tokens = [placed[i][0] if i in placed else filler(i) for i in rows]
    types = [placed[i][1] if i in placed else UNUSED for i in rows]

    ids = {text: id for id, (text, _) in placed.items()}

    def named(field: str) -> int | None:
        value = config.get(field)
        text = value.get("content") if isinstance(value, dict) else value
        if text is not None and (not isinstance(text, str) or text not in ids):
            raise bad(field, "names no token of the vocabulary", "tokenizer_config.json")
        return None if text is None else ids[text]

    stops = generation.get("eos_token_id", [])
    stops = stops if isinstance(stops, list) else [stops]
    if not all(is_int(i) and 0 <= i < len(tokens) for i in stops):
        raise bad("eos_token_id", "is not an id of the vocabulary", "generation_config.json")
    return {
        "tokens": tokens,
        "types": types,
        "merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "pre": pre,
        "eos_id": named("eos_token"),
        "pad_id": named("pad_token"),
        "stop_ids": stops,
        "source": str(file),
    }


def _added_tokens(
    spec: dict[str, Any], config: dict[str, Any], bad: Callable[..., BadFile]
) -> dict[int, tuple[str, int]]:
    """Added tokens of both files. What reads `<|...|>` is control even where the flag says no (the code-completion
    marks), as converters to GGUF decide: so both kinds of file give the same tokenizer."""
    listed, decoder = spec.get("added_tokens") or [], config.get("added_tokens_decoder") or {}
    if not isinstance(listed, list) or not isinstance(decoder, dict):
        raise bad("added_tokens", "is not a list")
    entries = [(entry.get("id") if isinstance(entry, dict) else None, entry) for entry in listed]
    entries += [(int(id) if id.isdecimal() else None, entry) for id, entry in decoder.items()]
    added: dict[int, tuple[str, int]] = {}
    for id, entry in entries:
        text = entry.get("content") if isinstance(entry, dict) else None
        if type(id) is not int or not isinstance(text, str):
            raise bad("added_tokens", "has an entry without an id or content")
        if any(entry.get(option) for option in ("lstrip", "rstrip", "single_word", "normalized")):
            raise bad(f"added token {id}", "strips or normalises around itself, which this family does not use")
        control = entry.get("special") or (text.startswith("<|") and text.endswith("|>"))
        token = (text, CONTROL if control else USER_DEFINED)
        if added.setdefault(id, token) != token:
            raise bad(f"added token {id}", "is defined twice")
    return added


def _split_name(pre_tokenizer: Any) -> str | None:
    """Which of SPLIT a tokenizer.json uses, if it uses one as the family does."""
    steps = pre_tokenizer.get("pretokenizers") if isinstance(pre_tokenizer, dict) else None
    if not isinstance(steps, list) or len(steps) != 2 or not all(isinstance(step, dict) for step in steps):
        return None
    split, bytelevel = steps
    if split.get("type") != "Split" or split.get("behavior") != "Isolated" or split.get("invert"):
        return None
    if bytelevel.get("type") != "ByteLevel" or bytelevel.get("add_prefix_space") or bytelevel.get("use_regex", True):
        return None
    return next((name for name, regex in SPLIT.items() if split.get("pattern") == {"Regex": regex}), None)
