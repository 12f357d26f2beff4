"""The public face: load a model, then stream, generate or score.

>>> import warpsmith
>>> llm = warpsmith.load()
>>> completion = llm.generate("def fibonacci(n):", max_tokens=8, stop_ids=[])
>>> len(completion.token_ids), completion.finish_reason, completion.stats.mode
(8, 'length', 'plain')
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np

from warpsmith.backend.base import Backend, Want
from warpsmith.backend.checks import check_tokens
from warpsmith.backend.devices import backend_for
from warpsmith.backend.finite import NOT_FINITE, not_finite
from warpsmith.backend.host_memory import check_fits
from warpsmith.checkpoint.canonical import Checkpoint, open_checkpoint
from warpsmith.draft.base import Proposer
from warpsmith.engine.arguments import stop_strings, stop_tokens, whole_number
from warpsmith.engine.loop import FinishReason, Generation
from warpsmith.engine.prefix import common_prefix
from warpsmith.engine.request import Options, check_options, sampling_for
from warpsmith.engine.scheduler import Scheduler
from warpsmith.engine.stats import Stats
from warpsmith.engine.text import Text
from warpsmith.engine.turns import Turns
from warpsmith.errors import BadRequest, WarpsmithError
from warpsmith.model.weights import read_config
from warpsmith.wisp import WISP

if TYPE_CHECKING:
    from warpsmith.model.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]

DEFAULT_CONTEXT = 8192
SCORE_PIECE = 256  # tokens scored in one call


@dataclass(frozen=True)
class Chunk:
    """A piece of a completion as it streams. `text` may lag behind `token_ids`: a character may need several tokens,
    and what could be the beginning of a stop string waits. The last chunk says why it is the last."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stats: Stats | None = None


@dataclass(frozen=True)
class Completion:
    """A whole answer. `token_ids` include the end token or the tokens of a stop string; `text` does not."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats


def load(
    model: str | Path | None = None,
    *,
    device: str = "auto",
    draft: Proposer | str | Path | None = None,
    spec_budget: int | Literal["auto"] = "auto",
    context: int | None = None,
    threads: int | None = None,
    cpu_features: Sequence[str] | None = None,
    cache_type_k: str | None = None,
    cache_type_v: str | None = None,
    memory_limit: int | None = None,
    offline: bool = False,
    progress: Callable[[int, int], object] | None = None,
    parallel: int | None = 1,
    cache_bytes: int | None = None,
) -> LLM:
    """Open a model and make it ready to run.

    `model` is a GGUF file, a directory of safetensors, or a name on the Hugging Face Hub (`user/repo`,
    `user/repo:QUANT`, `user/repo/file.gguf`); None is wisp, the small model that comes with the package.
    `device` is one of auto, cuda, cpu, reference. `context` is how many tokens of prompt and answer there is room for.

    `cache_type_k` and `cache_type_v` are how keys and values are kept: f16, q8_0, q4_0 or f32 where the device can;
    left out, the device's own. Settings of the cpu device, which naming one of them chooses: `threads` (all usable
    cores but one of every eight), `cpu_features` (the instruction sets that kernels may use, ["portable"] for
    none; all). Of the cuda device, which naming it chooses: `memory_limit`, bytes that may be taken on the
    GPU.

    `draft` guesses ahead so that one forward pass can decide several tokens; the text stays the same to the byte. It
    is auto (n-grams, and the model's own draft or its MTP head), ngram, mtp, a DFlash draft by path or Hub name, or a
    `Proposer`; None or none decode plainly. `spec_budget` is how many tokens it may guess a step, at most 63;
    auto chooses what pays on this machine, which may be nothing.

    `progress` hears of the bytes loaded and of the bytes in all, again and again.

    `parallel` is how many sequences there is memory for; a server runs so many at a time, an `LLM` itself one. None
    takes as many as fit into half of the free memory, at most eight. `cache_bytes` bounds the snapshots of earlier
    requests, which prompts that begin alike go on from; left out, a quarter of what is then free, at most 8 GiB.

    >>> llm = load(device="reference", context=256)
    >>> llm.device, llm.context
    ('reference', 256)
    """
    if isinstance(draft, str | Path):
        from warpsmith.draft.select import find_draft

        draft = find_draft(draft, spec_budget, offline)
    if model is None:
        checkpoint = open_checkpoint(WISP)
    else:
        from warpsmith.checkpoint.hub import resolve

        checkpoint = open_checkpoint(resolve(model, offline=offline))
    config = read_config(checkpoint)
    if context is None:
        context = min(config.context, DEFAULT_CONTEXT)
    context = whole_number("context", context)
    if not 1 < context <= config.context:
        raise BadRequest(
            f"A context of {context} is outside [2, {config.context}].", "Choose one the model was made for."
        )
    backend = backend_for(
        device,
        checkpoint,
        config,
        context,
        progress,
        threads=threads,
        cpu_features=cpu_features,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        memory_limit=memory_limit,
    )
    if isinstance(draft, str | Path):
        from warpsmith.draft.select import make_proposer

        draft = make_proposer(draft, spec_budget, backend, checkpoint.path)
    return LLM(backend, checkpoint, context, draft, parallel, cache_bytes)


class LLM:
    """A model that is ready to run. One request at a time; what two requests begin with in common is computed once.

    Requests may come from any thread: they wait for each other, in order. Who has left a stream unfinished finishes or
    closes it before the next request. Closing the model ends the request that runs, and those that wait.

    Made by `load`. Also a context manager that gives the memory back at the end.
    """

    def __init__(
        self,
        backend: Backend,
        checkpoint: Checkpoint,
        context: int,
        draft: Proposer | None = None,
        parallel: int | None = 1,
        cache_bytes: int | None = None,
    ) -> None:
        self.checkpoint, self.config, self.context = checkpoint, backend.config, context
        self.device = backend.name
        self._scheduler: Scheduler | None = Scheduler(backend, context, draft, parallel, cache_bytes)
        self._turns = Turns()

    @property
    def backend(self) -> Backend:
        return self._open().backend

    @property
    def scheduler(self) -> Scheduler:
        """What requests run on."""
        return self._open()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, read when first used: scoring and plain token ids need none."""
        from warpsmith.model.tokenizer import Tokenizer

        checkpoint = self.checkpoint
        if checkpoint.tokenizer_dir is not None:
            return Tokenizer.from_tokenizer_json(checkpoint.tokenizer_dir)
        if not self._has_tokenizer:
            raise BadRequest(f"{checkpoint.path} has no tokenizer.", "Pass token ids, or add its tokenizer.json.")
        return Tokenizer.from_gguf(checkpoint.metadata, str(checkpoint.path))

    @property
    def _has_tokenizer(self) -> bool:
        return self.checkpoint.tokenizer_dir is not None or "tokenizer.ggml.tokens" in self.checkpoint.metadata

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Chunk]:
        """Generate piece by piece. The last chunk carries `finish_reason` and `stats`.

        `prompt` is text to continue, a list of messages for the model's chat template, or token ids. Generation ends
        at a stop id (default: the model's end tokens; an empty list for none) or before a string in `stop` ("stop"),
        or at `max_tokens` or the end of the context ("length"). `enable_thinking` and `tools` go to the chat template.

        Temperature 0 takes the likeliest token. What is left out of temperature, top_k, top_p and min_p is what the
        model's file declares, else 0, 20, 0.95 and 0; `top_k=0, top_p=1` turns truncation off. Without a `seed` each
        call draws its own, and `stats.seed` tells it; the same seed gives the same text, with and without a draft.
        `on_step` is shown every step of the decode loop: the tree that was drafted and what was accepted of it.

        >>> llm = load(context=256)
        >>> for chunk in llm.stream([{"role": "user", "content": "Hello!"}], max_tokens=3, stop_ids=[], seed=1):
        ...     print(chunk.token_ids != [], chunk.finish_reason)
        True None
        True None
        True length
        """
        from warpsmith.model.chat import declared_sampling

        check_options(options)
        stops, stop_ids = stop_strings(options.get("stop")), options.get("stop_ids")
        if stops and not self._has_tokenizer:
            raise BadRequest("Stop strings need a tokenizer, and this model has none.", "Use stop_ids.")
        if stop_ids is None:
            stop_ids = self.tokenizer.eos_ids if self._has_tokenizer else ()
        text = Text(self.tokenizer if self._has_tokenizer else None, stops)
        ids, kept = self._ids(prompt, options.get("enable_thinking"), options.get("tools"))
        generation = Generation(
            self._open(),
            ids,
            sampling_for(options, declared_sampling(self.checkpoint.metadata)),
            max_tokens=options.get("max_tokens"),
            stop_ids=stop_tokens(stop_ids),
            until=text.push,
            on_step=options.get("on_step"),
            kept=kept,
            answer_kept=bool(options.get("tools")),
        )
        return _chunks(generation, text, self._turns)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Generate to the end. Takes the keywords of `stream`.

        >>> llm = load(context=256)
        >>> completion = llm.generate("Once upon a time", max_tokens=5, stop_ids=[], temperature=0.8, seed=7)
        >>> completion.finish_reason, completion.stats.generated_tokens, completion.stats.seed
        ('length', 5, 7)
        """
        chunks = list(self.stream(prompt, **options))
        last = chunks[-1]
        assert last.finish_reason is not None
        assert last.stats is not None
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        return Completion("".join(chunk.text for chunk in chunks), token_ids, last.finish_reason, last.stats)

    def score(self, ids: Sequence[int]) -> np.ndarray:
        """The logits after each of `ids`, float32 [len(ids), vocab]: row i is about token i + 1.

        At most `context` tokens, and only as many as there is memory for the logits of.

        >>> llm = load()
        >>> llm.score([1, 2, 3]).shape
        (3, 8192)
        """
        backend, tokens = self.backend, _token_ids(ids)
        if not tokens:
            raise BadRequest("Scoring takes a list of token ids, at least one.", "Encode text with `tokenizer.encode`.")
        check_tokens(self.config, np.asarray(tokens))
        if len(tokens) > self.context:
            raise BadRequest(
                f"{len(tokens)} tokens do not fit in the context of {self.context}.",
                "Score fewer, or load the model with a longer context.",
            )
        check_fits(len(tokens) * self.config.vocab * 4, f"The logits of {len(tokens)} tokens")
        logits = np.empty((len(tokens), self.config.vocab), dtype=np.float32)
        turn = self._turns.take()
        try:
            with self._turns.computing(turn):
                state = backend.new_state(len(tokens))
            for start in range(0, len(tokens), SCORE_PIECE):
                piece = tokens[start : start + SCORE_PIECE]
                with self._turns.computing(turn):
                    output = backend.prefill(state, piece, Want(tokens="logits", every_row=True))
                    assert output.argmax is not None
                    assert output.logits is not None
                    if len(bad := np.flatnonzero(output.argmax == NOT_FINITE)):
                        raise not_finite(start + int(bad[0]) + 1)
                    logits[start : start + len(piece)] = output.logits.numpy()
        finally:
            self._turns.give(turn)
        return logits

    def close(self) -> None:
        """Give back the memory. The model cannot be used afterwards, and a request that runs ends with an error.

        >>> llm = load()
        >>> llm.close()
        """
        self._turns.close()
        self._scheduler = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Scheduler:
        self._turns.check()
        assert self._scheduler is not None
        return self._scheduler

    def _ids(
        self, prompt: Prompt, enable_thinking: bool | None, tools: list[dict[str, Any]] | None
    ) -> tuple[list[int], int | None]:
        """Token ids of any kind of prompt; of a chat also how many of them the next turn's prompt begins with."""
        if isinstance(prompt, bytes) or not isinstance(prompt, str | Sequence | np.ndarray):
            raise BadRequest(
                f"A prompt cannot be of type {type(prompt).__name__}.", "Pass text, a list of messages, or token ids."
            )
        plain = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        if plain is None:
            ids = self.tokenizer.encode(self._render(prompt, enable_thinking, tools))
            return ids, self._kept(prompt, ids, enable_thinking, tools)
        if enable_thinking is not None or tools is not None:
            raise BadRequest("Thinking and tools are for chats, and this prompt is plain.", "Pass a list of messages.")
        return plain, None

    def _kept(self, messages: Any, ids: list[int], *how: Any) -> int:
        """How much of a chat's prompt is still there when the template renders it with an answer and a new question:
        templates leave out earlier thoughts, and with them the end of the prompt that asked for some."""
        following = [{"role": "assistant", "content": "."}, {"role": "user", "content": "."}]
        try:
            later = self._render([*messages, *following], *how)
        except WarpsmithError:  # a template that takes no more messages
            return len(ids)
        return common_prefix(ids, self.tokenizer.encode(later))

    def _render(self, messages: Any, enable_thinking: bool | None, tools: list[dict[str, Any]] | None) -> str:
        from warpsmith.model.chat import default_template, render

        template = self.checkpoint.chat_template
        if template is None:
            template = default_template(thinking=self.checkpoint.parameters > 3e9)  # the small ones do not by default
        return render(template, list(messages), enable_thinking=enable_thinking, tools=tools)


def _chunks(generation: Generation, text: Text, turns: Turns) -> Iterator[Chunk]:
    turn = turns.take()
    try:
        with closing(iter(generation)) as runs:
            while generation.finish_reason is None:
                with turns.computing(turn):
                    tokens = next(runs)
                if generation.finish_reason is None:
                    yield Chunk(text.take(), tokens)
    finally:
        turns.give(turn)
    yield Chunk(text.finish(), tokens, generation.finish_reason, generation.stats)


def _token_ids(prompt: Sequence[Any]) -> list[int] | None:
    """The prompt as a list of ids, if that is what it is."""
    if all(isinstance(item, Integral) and not isinstance(item, bool) for item in prompt):
        return [int(item) for item in prompt]
    return None
