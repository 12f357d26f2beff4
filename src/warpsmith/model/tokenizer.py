"""Text to token ids and back: the byte-level BPE of the Qwen3.5 family, from tokenizer.json or GGUF metadata.

Encoding runs in the `tokenizers` library; decoding is a table of bytes kept here, so that one token at a time gives
the same text as all at once. Both sources end in the same Tokenizer: NFC first (the model was trained that way; files
in GGUF do not say, and llama.cpp does not normalise), the family's split expression, then BPE. No BOS is ever added,
whatever `add_bos_token` says: no member of the family uses one.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpsmith.errors import BadFile, BadRequest
from warpsmith.model.tokenizer_json import read_json_files, write_json_files
from warpsmith.model.vocabulary import CONTROL, MAX_IDS, NORMAL, REFETCH, SPLIT, UNUSED, USER_DEFINED, filler, is_int

if TYPE_CHECKING:
    import tokenizers

# A turn ends at the first two; the others mark the end of a file or gap in code completion.
_STOP_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


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
        self.tokens = list(tokens[:known])
        self.types = list(types[:known])
        self.merges = list(merges)
        self._bytes, self._ends = _decode_table(self.tokens, self.types, source)
        self._with_added, self._text_only = _encoders(self.tokens, self.types, self.merges, pre, source)

        self.special_ids = frozenset(i for i, type in enumerate(self.types) if type == CONTROL)
        stops = [id for text in _STOP_TEXTS if (id := self.token_id(text)) is not None]
        self.eos_id = eos_id if eos_id is not None else (stops[0] if stops else None)
        self.pad_id = pad_id
        self.eos_ids = frozenset([*stops, *stop_ids, *([] if self.eos_id is None else [self.eos_id])])

    @classmethod
    def from_tokenizer_json(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json (or the directory that holds it) and the configuration files beside it."""
        return cls(**read_json_files(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str = "GGUF metadata") -> Tokenizer:
        """Read the `tokenizer.ggml.*` fields of a GGUF file; `source` names the file in errors."""

        def bad(field: str, problem: str) -> BadFile:
            return BadFile(f"{source}: tokenizer.ggml.{field} {problem}.", REFETCH)

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
        if len(tokens) > MAX_IDS:
            raise bad("tokens", f"has {len(tokens)} entries, more than the {MAX_IDS} accepted")
        if odd := set(types) - {NORMAL, CONTROL, USER_DEFINED, UNUSED}:
            raise bad("token_type", f"holds type {min(odd)}, which a byte-level BPE does not have")

        def special(field: str) -> int | None:
            value = metadata.get(f"tokenizer.ggml.{field}")
            if value is not None and (not is_int(value) or not 0 <= value < len(tokens)):
                raise bad(field, f"is {value!r}, not an id below {len(tokens)}")
            return None if value is None else int(value)

        eos_id, pad_id = special("eos_token_id"), special("padding_token_id")
        stop_ids = [i for i in (special("eot_token_id"), special("eom_token_id")) if i is not None]
        return cls(tokens, types, merges, pre=pre, eos_id=eos_id, pad_id=pad_id, stop_ids=stop_ids, source=source)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that stands for something."""
        return len(self.tokens)

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
        if id >= len(self.tokens):
            return b""
        return self._bytes[self._ends[id - 1] if id else 0 : self._ends[id]]

    def token_id(self, text: str) -> int | None:
        """The id of an added token such as `<think>`, if this vocabulary has it."""
        id: int | None = self._with_added.token_to_id(text)
        return id if id is not None and self.types[id] in (CONTROL, USER_DEFINED) else None

    def is_special(self, id: int) -> bool:
        return id in self.special_ids

    def is_added(self, id: int) -> bool:
        """Whether the token is a tag or a mark of its own, which no text is split into."""
        return id < len(self.types) and self.types[id] in (CONTROL, USER_DEFINED)

    def stream(self, skip_special: bool = False) -> Detokenizer:
        return Detokenizer(self, skip_special)

    def to_json_files(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as found beside safetensors weights."""
        write_json_files(self, directory)


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
    if not known <= rows <= MAX_IDS:
        raise BadRequest(f"An embedding of {rows} rows does not suit {known} tokens.", f"Use {known} rows or more.")
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": tokenizer.pre,
        "tokenizer.ggml.tokens": tokenizer.tokens + [filler(i) for i in range(known, rows)],
        "tokenizer.ggml.token_type": tokenizer.types + [UNUSED] * (rows - known),
        "tokenizer.ggml.merges": list(tokenizer.merges),
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
    if not len(tokens) <= vocab_size <= MAX_IDS:
        raise BadRequest(
            f"A byte tokenizer does not fit {vocab_size} ids.", f"Use a vocabulary of {len(tokens)} to {MAX_IDS}."
        )
    spare = range(len(tokens), vocab_size)
    types = [NORMAL] * 257 + [CONTROL] * len(control) + [USER_DEFINED] * len(tags) + [UNUSED] * len(spare)
    tokens += [filler(i) for i in spare]
    ids = {token: i for i, token in enumerate(tokens)}
    return Tokenizer(tokens, types, [f"{never} {never}"], eos_id=ids["<|im_end|>"], pad_id=ids["<|endoftext|>"])


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
            raise BadFile(f"{source}: added token {i} is not valid Unicode.", REFETCH) from None

    pieces = [stand_ins(i) for i in range(len(tokens))]
    try:
        table = "".join(pieces).translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError as error:
        position = error.start
        culprit = next(i for i, end in enumerate(accumulate(map(len, pieces))) if end > position)
        raise BadFile(f"{source}: token {culprit} is not byte-level BPE text.", REFETCH) from None
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
        raise BadFile(f"{source}: the vocabulary lists a token twice.", REFETCH)
    if "" in vocab:
        raise BadFile(f"{source}: token {vocab['']} is empty.", REFETCH)
    for byte, character in enumerate(_CHARACTER):
        if character not in normal:
            raise BadFile(f"{source}: the vocabulary has no token for byte {byte}.", REFETCH)
    pairs = []
    for i, merge in enumerate(merges):  # checked here: the library aborts where it should raise
        left, _, right = merge.partition(" ")
        if left not in normal or right not in normal or left + right not in normal:
            raise BadFile(f"{source}: merge {i} ({merge[:60]!r}) does not join two tokens to a third.", REFETCH)
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
