"""Text to token ids and back: the byte-level BPE of the Qwen3.5 family, from tokenizer.json or GGUF metadata.

Encoding runs in the `tokenizers` library; decoding is a table of bytes kept here, so that one token at a time gives
the same text as all at once. Both sources end in the same Tokenizer: NFC first (the model was trained that way; files
in GGUF do not say, and llama.cpp does not normalise), the family's split expression, then BPE. No BOS is ever added,
whatever `add_bos_token` says: no member of the family uses one.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpsmith.errors import BadFile, BadRequest

if TYPE_CHECKING:
    import tokenizers

# Token types as GGUF numbers them.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

# How text is cut before BPE. The two differ in \p{M}: qwen35 keeps combining marks with their letters.
SPLIT = {
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}

# A turn ends at the first two; the others mark the end of a file or gap in code completion.
_STOP_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")

_MAX_IDS = 1 << 20  # four times the family's vocabulary; bounds what a hostile id can make us allocate
_MAX_JSON_BYTES = 256 << 20
_REFETCH = "Download or convert the model again."


def _byte_characters() -> list[str]:
    """The printable stand-in for each byte that BPE vocabularies store: itself where printable, else U+0100 up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


_CHARACTER = _byte_characters()
# Unmapped Latin-1 characters go to U+FFFF, which cannot be encoded as Latin-1: a stray one is then an error.
_TO_LATIN1 = dict.fromkeys(range(256), 0xFFFF) | {ord(char): byte for byte, char in enumerate(_CHARACTER)}


class Tokenizer:
    """One vocabulary. Ids from `vocab_size` up to `padded_size` are spare embedding rows and decode to nothing."""

    def __init__(
        self,
        tokens: Sequence[str],
        types: Sequence[int],
        merges: Sequence[str],
        *,
        pre: str = "qwen35",
        eos_id: int | None = None,
        pad_id: int | None = None,
        stop_ids: Iterable[int] = (),
        source: str = "tokenizer",
    ) -> None:
        """`tokens` as vocabularies store them (stand-ins for bytes; added ones as text), `merges` as "left right"."""
        known = len(tokens)
        while known and types[known - 1] == UNUSED:
            known -= 1
        self.padded_size = len(tokens)
        self.pre = pre
        self._tokens = list(tokens[:known])
        self._types = list(types[:known])
        self._merges = list(merges)
        self._bytes, self._ends = _decode_table(self._tokens, self._types, source)
        self._with_added, self._text_only = _encoders(self._tokens, self._types, self._merges, pre, source)

        self.special_ids = frozenset(i for i, type in enumerate(self._types) if type == CONTROL)
        stops = [id for text in _STOP_TEXTS if (id := self.token_id(text)) is not None]
        self.eos_id = eos_id if eos_id is not None else (stops[0] if stops else None)
        self.pad_id = pad_id
        self.eos_ids = frozenset([*stops, *stop_ids, *([] if self.eos_id is None else [self.eos_id])])

    @classmethod
    def from_tokenizer_json(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json (or the directory that holds it) and the configuration files beside it."""
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        spec = _read_json(file)
        config = _read_json(file.with_name("tokenizer_config.json"), optional=True)
        generation = _read_json(file.with_name("generation_config.json"), optional=True)
        return _from_json(spec, config, generation, file)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str = "GGUF metadata") -> Tokenizer:
        """Read the `tokenizer.ggml.*` fields of a GGUF file; `source` names the file in errors."""

        def bad(field: str, problem: str) -> BadFile:
            return BadFile(f"{source}: tokenizer.ggml.{field} {problem}.", _REFETCH)

        def array(field: str, kind: type) -> list[Any]:
            value: Any = metadata.get(f"tokenizer.ggml.{field}")
            value = value.tolist() if hasattr(value, "tolist") else value
            if not isinstance(value, list | tuple):
                raise bad(field, "is missing" if value is None else "is not an array")
            if not set(map(type, value)) <= {kind}:
                raise bad(field, f"holds something other than {kind.__name__}")
            return list(value)

        model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
        if model != "gpt2":
            raise bad("model", f"is {model!r}, not 'gpt2' (byte-level BPE)")
        if not isinstance(pre, str) or pre not in SPLIT:
            raise bad("pre", f"is {pre!r}, not one of {', '.join(SPLIT)}")
        tokens, types, merges = array("tokens", str), array("token_type", int), array("merges", str)
        if len(types) != len(tokens):
            raise bad("token_type", f"has {len(types)} entries for {len(tokens)} tokens")
        if len(tokens) > _MAX_IDS:
            raise bad("tokens", f"has {len(tokens)} entries, more than the {_MAX_IDS} accepted")
        if odd := set(types) - {NORMAL, CONTROL, USER_DEFINED, UNUSED}:
            raise bad("token_type", f"holds type {min(odd)}, which a byte-level BPE does not have")

        def special(field: str) -> int | None:
            value = metadata.get(f"tokenizer.ggml.{field}")
            if value is not None and (not _is_int(value) or not 0 <= value < len(tokens)):
                raise bad(field, f"is {value!r}, not an id below {len(tokens)}")
            return None if value is None else int(value)

        eos_id, pad_id = special("eos_token_id"), special("padding_token_id")
        stop_ids = [i for i in (special("eot_token_id"), special("eom_token_id")) if i is not None]
        return cls(tokens, types, merges, pre=pre, eos_id=eos_id, pad_id=pad_id, stop_ids=stop_ids, source=source)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that stands for something."""
        return len(self._tokens)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of `text`. Without `special` it is only text: no `<|im_end|>` or `<think>` in it becomes that token."""
        tokenizer = self._with_added if special else self._text_only
        try:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise BadRequest("The text to encode is not valid Unicode.", "Remove lone surrogates from it.") from None
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. Tags such as `<think>` are not special: they stay."""
        dropped = self.special_ids if skip_special else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in dropped).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes of one token; none for a spare embedding row."""
        if id < 0:
            raise BadRequest(f"{id} is not a token id.", "Ids start at 0.")
        if id >= len(self._tokens):
            return b""
        return self._bytes[self._ends[id - 1] if id else 0 : self._ends[id]]

    def token_id(self, text: str) -> int | None:
        """The id of an added token such as `<think>`, if this vocabulary has it."""
        id: int | None = self._with_added.token_to_id(text)
        return id if id is not None and self._types[id] in (CONTROL, USER_DEFINED) else None

    def is_special(self, id: int) -> bool:
        return id in self.special_ids

    def stream(self, skip_special: bool = False) -> Detokenizer:
        return Detokenizer(self, skip_special)

    def to_json_files(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as found beside safetensors weights."""
        added = [
            {
                "id": i,
                "content": self._tokens[i],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": type == CONTROL,
            }
            for i, type in enumerate(self._types)
            if type in (CONTROL, USER_DEFINED)
        ]
        vocab = {
            token: i for i, (token, type) in enumerate(zip(self._tokens, self._types, strict=True)) if type == NORMAL
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
                    {"type": "Split", "pattern": {"Regex": SPLIT[self.pre]}, "behavior": "Isolated", "invert": False},
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
                "merges": [merge.split(" ") for merge in self._merges],
            },
        }
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
        }
        for role, id in (("eos_token", self.eos_id), ("pad_token", self.pad_id)):
            if id is not None and id < self.vocab_size:
                config[role] = self._tokens[id]
        for name, content in (("tokenizer.json", spec), ("tokenizer_config.json", config)):
            (Path(directory) / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


class Detokenizer:
    """Text of a stream of tokens: each push gives the characters completed by that token."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        if self._skip_special and self._tokenizer.is_special(id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    def finish(self) -> str:
        """U+FFFD for a character that never became complete, else nothing."""
        return self._decoder.decode(b"", final=True)


def to_gguf_metadata(tokenizer: Tokenizer, rows: int | None = None) -> dict[str, Any]:
    """The `tokenizer.ggml.*` fields of a GGUF file whose embedding has `rows` rows (default: those of the source)."""
    rows = tokenizer.padded_size if rows is None else rows
    known = tokenizer.vocab_size
    if not known <= rows <= _MAX_IDS:
        raise BadRequest(f"An embedding of {rows} rows does not suit {known} tokens.", f"Use {known} rows or more.")
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": tokenizer.pre,
        "tokenizer.ggml.tokens": tokenizer._tokens + [_filler(i) for i in range(known, rows)],
        "tokenizer.ggml.token_type": tokenizer._types + [UNUSED] * (rows - known),
        "tokenizer.ggml.merges": list(tokenizer._merges),
        "tokenizer.ggml.add_bos_token": False,
    }
    if tokenizer.eos_id is not None:
        metadata["tokenizer.ggml.eos_token_id"] = tokenizer.eos_id
    if tokenizer.pad_id is not None:
        metadata["tokenizer.ggml.padding_token_id"] = tokenizer.pad_id
    return metadata


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer for synthetic models: id b is byte b, then the family's chat tokens, then spare rows.

    Writers and readers of GGUF stumble over an empty list of merges, so there is one: of two bytes no UTF-8 text has.
    """
    never = _CHARACTER[0xFF]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    tokens = [*_CHARACTER, never + never, *control, *tags]
    if not len(tokens) <= vocab_size <= _MAX_IDS:
        raise BadRequest(
            f"A byte tokenizer does not fit {vocab_size} ids.", f"Use a vocabulary of {len(tokens)} to {_MAX_IDS}."
        )
    spare = range(len(tokens), vocab_size)
    types = [NORMAL] * 257 + [CONTROL] * len(control) + [USER_DEFINED] * len(tags) + [UNUSED] * len(spare)
    tokens += [_filler(i) for i in spare]
    ids = {token: i for i, token in enumerate(tokens)}
    return Tokenizer(tokens, types, [f"{never} {never}"], eos_id=ids["<|im_end|>"], pad_id=ids["<|endoftext|>"])


def _filler(id: int) -> str:
    return f"[PAD{id}]"


def _is_int(value: object) -> bool:
    import numpy

    return isinstance(value, int | numpy.integer) and not isinstance(value, bool)


def _decode_table(tokens: list[str], types: list[int], source: str) -> tuple[bytes, list[int]]:
    """All tokens' bytes end to end, and where each ends. One stand-in is one byte, so lengths carry over."""

    def stand_ins(i: int) -> str:
        if types[i] == NORMAL:
            return tokens[i]
        if types[i] == UNUSED:
            return ""
        try:
            return "".join(_CHARACTER[byte] for byte in tokens[i].encode("utf-8"))
        except UnicodeEncodeError:
            raise BadFile(f"{source}: added token {i} is not valid Unicode.", _REFETCH) from None

    pieces = [stand_ins(i) for i in range(len(tokens))]
    try:
        table = "".join(pieces).translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError as error:
        position = error.start
        culprit = next(i for i, end in enumerate(accumulate(map(len, pieces))) if end > position)
        raise BadFile(f"{source}: token {culprit} is not byte-level BPE text.", _REFETCH) from None
    return table, list(accumulate(map(len, pieces)))


def _encoders(
    tokens: list[str], types: list[int], merges: list[str], pre: str, source: str
) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """Two encoders that share one BPE model: the first finds added tokens in text, the second takes all as text."""
    from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Encoder

    normal = {token: i for i, token in enumerate(tokens) if types[i] == NORMAL}
    added = {token: i for i, token in enumerate(tokens) if types[i] in (CONTROL, USER_DEFINED)}
    # Added tokens are placed in the model's vocabulary too: that gives them their ids, and no merge leads to them.
    vocab = normal | added
    if len(vocab) != len(tokens) - types.count(UNUSED):
        raise BadFile(f"{source}: the vocabulary lists a token twice.", _REFETCH)
    if "" in vocab:
        raise BadFile(f"{source}: token {vocab['']} is empty.", _REFETCH)
    for byte, character in enumerate(_CHARACTER):
        if character not in normal:
            raise BadFile(f"{source}: the vocabulary has no token for byte {byte}.", _REFETCH)
    pairs = []
    for i, merge in enumerate(merges):  # checked here: the library aborts where it should raise
        left, _, right = merge.partition(" ")
        if left not in normal or right not in normal or left + right not in normal:
            raise BadFile(f"{source}: merge {i} ({merge[:60]!r}) does not join two tokens to a third.", _REFETCH)
        pairs.append((left, right))

    model = models.BPE(vocab=vocab, merges=pairs)

    def encoder(added: Iterable[str]) -> tokenizers.Tokenizer:
        encoder = Encoder(model)
        encoder.normalizer = normalizers.NFC()
        encoder.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        encoder.add_tokens([AddedToken(token, normalized=False) for token in added])
        return encoder

    return encoder(added), encoder(())


def _read_json(file: Path, optional: bool = False) -> dict[str, Any]:
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise BadFile(f"{file} is too large to be what its name says.", _REFETCH)
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        if optional:
            return {}
        raise BadFile(f"{file} does not exist.", "Put the model's tokenizer.json beside its weights.") from None
    except (ValueError, RecursionError):
        raise BadFile(f"{file} is not valid JSON.", _REFETCH) from None
    except OSError as error:
        raise BadFile(f"{file} cannot be read ({error.strerror}).") from None
    if not isinstance(content, dict):
        raise BadFile(f"{file} does not hold a JSON object.", _REFETCH)
    return content


def _from_json(spec: dict[str, Any], config: dict[str, Any], generation: dict[str, Any], file: Path) -> Tokenizer:
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
        if not 0 <= id < _MAX_IDS:
            raise bad("model.vocab", f"gives a token the id {id}, outside 0..{_MAX_IDS - 1}")
        if placed.setdefault(id, token) != token:
            raise bad("model.vocab", f"uses the id {id} twice")
    rows = range(max(placed, default=-1) + 1)
    tokens = [placed[i][0] if i in placed else _filler(i) for i in rows]
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
    if not all(_is_int(i) and 0 <= i < len(tokens) for i in stops):
        raise bad("eos_token_id", "is not an id of the vocabulary", "generation_config.json")
    return Tokenizer(
        tokens,
        types,
        [m if isinstance(m, str) else " ".join(m) for m in merges],
        pre=pre,
        eos_id=named("eos_token"),
        pad_id=named("pad_token"),
        stop_ids=stops,
        source=str(file),
    )


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
