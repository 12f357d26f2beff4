"""What every endpoint needs: the model's names, prompts, sampling, and the way into the queue."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from warpsmith import __version__
from warpsmith.engine.choice import Constraint
from warpsmith.engine.prefix import common_prefix
from warpsmith.engine.request import check_sampling, sampling_for
from warpsmith.errors import WarpsmithError
from warpsmith.llm import LLM
from warpsmith.model.chat import declared_sampling, default_template, render
from warpsmith.serve.answer import opens_thinking
from warpsmith.serve.constraints import Grammar, Grammars, Thoughts
from warpsmith.serve.engine import Worker
from warpsmith.serve.errors import ApiError, refused
from warpsmith.serve.job import End, Event, Job, Request
from warpsmith.serve.metrics import Metrics
from warpsmith.serve.models import FormatFields, SamplerFields
from warpsmith.serve.tools import END_CALL

SHORT = 2000  # characters of a conversation that are rendered in less time than another thread takes to begin
KEEP_ALIVE = 10.0  # seconds of silence after which a stream shows that it lives


@dataclass(frozen=True)
class Prompt:
    text: str
    ids: list[int]
    thinking: bool = False  # it ends within an open block of thoughts
    kept: int | None = None  # tokens that the prompt begins with, too, in which the user asks the next question
    tools: bool = False  # the next turn may be a tool's, and go on from the answer with all its thoughts


@dataclass
class Service:
    worker: Worker
    names: list[str]  # the first is the model's own
    template: str | None = None  # instead of the model's
    api_keys: list[str] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def llm(self) -> LLM:
        return self.worker.llm

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.llm.tokenizer, self.llm.config.vocab)

    @cached_property
    def chat_template(self) -> str:
        checkpoint = self.llm.checkpoint
        return self.template or checkpoint.chat_template or default_template(thinking=checkpoint.parameters > 3e9)

    @cached_property
    def fingerprint(self) -> str:
        """Which engine answered."""
        return f"warpsmith-{__version__}-{self.llm.device}"

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"There is no model {name!r} here. Ask for {self.names[0]!r}, or start the server with --alias.",
                param="model",
                code="model_not_found",
            )

    # Prompts

    async def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        thinking: bool | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """A conversation as the model reads it. Long ones take a while, so they are not made on the event loop."""
        if tools and "tools" not in self.chat_template:
            raise refused("tools", "This model's chat template has no place for tools.", "Use a model that calls them.")
        messages = _system_first(messages)

        def rendered(messages: list[dict[str, Any]]) -> str:
            options: dict[str, Any] = {"tools": tools or None, "enable_thinking": thinking, **(variables or {})}
            return render(self.chat_template, messages, **options)

        def make() -> Prompt:
            text = rendered(messages)
            ids = self.llm.tokenizer.encode(text)
            try:
                later = rendered([*messages, {"role": "assistant", "content": "."}, {"role": "user", "content": "."}])
                kept = common_prefix(ids, self.llm.tokenizer.encode(later))
            except WarpsmithError:  # a template that takes no more messages
                kept = len(ids)
            return Prompt(text, ids, opens_thinking(text), kept, bool(tools))

        short = _length([messages, tools, variables]) <= SHORT
        return make() if short else await asyncio.to_thread(make)

    async def text_prompt(self, text: str) -> Prompt:
        return Prompt(text, await asyncio.to_thread(self.llm.tokenizer.encode, text))

    # Requests

    def request(
        self,
        prompt: Prompt,
        fields: Mapping[str, Any],
        *,
        max_tokens: int | None,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        top_logprobs: int | None = None,
        constraint: Callable[[], Constraint] | None = None,
        one_call: bool = False,
    ) -> Request:
        """A request that is known to be good. `fields` are those of `Sampling` that were given; `one_call` ends the
        answer with its first tool call."""
        sampling = sampling_for(fields, declared_sampling(self.llm.checkpoint.metadata))
        check_sampling(sampling, self.llm.config.vocab)
        if not prompt.ids:
            raise refused("prompt", "The prompt is empty.", "Send at least one token.")
        if len(prompt.ids) >= self.llm.context:
            raise ApiError(
                400,
                f"The prompt has {len(prompt.ids)} tokens, and the context of {self.llm.context} must hold the answer "
                "too. Shorten it, or start the server with a larger -c.",
                code="context_length_exceeded",
                kind="exceed_context_size_error",
                n_prompt_tokens=len(prompt.ids),
                n_ctx=self.llm.context,
            )
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if not all(stops):
            raise refused("stop", "A stop string is empty.")
        stops += (END_CALL,) if one_call else ()
        return Request(
            prompt.ids, sampling, prompt.kept, max_tokens, stops, ignore_eos, top_logprobs, constraint, prompt.tools
        )

    async def constraint(
        self, prompt: Prompt, answer: Grammar | None, budget: int | None
    ) -> Callable[[], Constraint] | None:
        """What binds the answer, after thoughts that are bound by their budget."""
        if prompt.thinking and (answer is not None or budget is not None):
            return Thoughts.of(self.llm.tokenizer, budget, answer)
        return answer

    async def format(self, fields: FormatFields) -> Grammar | None:
        """The grammar that a request asks for."""
        wanted = [
            name
            for name in ("response_format", "json_schema", "grammar", "regex")
            if getattr(fields, name) is not None
            and not (name == "response_format" and fields.response_format and fields.response_format.type == "text")
        ]
        if not wanted:
            return None
        if len(wanted) > 1:
            raise refused(wanted[1], f"{' and '.join(wanted)} both say what the answer must fit.", "Send one of them.")
        name, grammars = wanted[0], self.grammars
        if name == "grammar":
            return await asyncio.to_thread(grammars.text, fields.grammar or "", name)
        if name == "regex":
            return await asyncio.to_thread(grammars.regex, fields.regex or "", name)
        schema = fields.json_schema
        if fields.response_format is not None:
            nested = fields.response_format.json_schema
            schema = nested.schema_ if nested is not None else fields.response_format.schema_
            if fields.response_format.type == "json_schema" and schema is None:
                raise refused("response_format", "response_format.json_schema.schema is missing.", "Send it.")
        return await asyncio.to_thread(grammars.json_schema, schema, name)


def model_name(model: str | Path | None) -> str:
    """What clients call a model that was given no other name."""
    if model is None:
        return "wisp"
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name if path.is_dir() else str(model)


def sampler_fields(fields: SamplerFields, choice: int = 0) -> dict[str, Any]:
    """The fields of `Sampling` that a request gives. Choice i of several draws with the i-th seed after the first."""
    given: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repeat_last_n")
        if (value := getattr(fields, name)) is not None
    }
    if fields.top_k is not None:
        given["top_k"] = max(fields.top_k, 0)
    if fields.repeat_penalty is not None and fields.repetition_penalty is not None:
        raise refused("repetition_penalty", "repeat_penalty and repetition_penalty are the same.", "Send one of them.")
    penalty = fields.repeat_penalty if fields.repeat_penalty is not None else fields.repetition_penalty
    if penalty is not None:
        given["repeat_penalty"] = penalty
    if fields.logit_bias:
        given["logit_bias"] = {int(token): bias for token, bias in fields.logit_bias.items()}
    if fields.seed is not None and fields.seed >= 0:
        given["seed"] = fields.seed + choice
    return given


def _system_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The family's templates take one system message, the first. More of them at the beginning are joined to it; one
    that comes later, as agents send them, is a message of the user's that says what it is."""
    first = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    texts = [message["content"] for message in messages[:first] if message["content"]]
    opening = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    later = [
        {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}
        if message["role"] == "system"
        else message
        for message in messages[first:]
    ]
    return opening + later


def _length(value: Any) -> int:
    """Characters of all texts in it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _length(each) for key, each in value.items())
    return sum(map(_length, value)) if isinstance(value, list | tuple) else 0


async def events(jobs: Sequence[Job]) -> AsyncIterator[tuple[int, Event] | None]:
    """The events of all jobs as they come, with the job's index; None where nothing came for a while. The jobs were
    submitted together.

    However this ends, the jobs end with it.
    """
    left = dict(enumerate(jobs))
    try:
        while left:
            silent = True
            for index, job in list(left.items()):
                for event in job.taken():
                    silent = False
                    if isinstance(event, End):
                        del left[index]
                    yield index, event
            if silent and not await _heard(jobs[0].news):
                yield None
    finally:
        for job in jobs:
            job.cancel()


async def _heard(news: asyncio.Event) -> bool:
    """Wait until there is some; False where nothing came for a while."""
    loop = asyncio.get_running_loop()
    news.clear()
    alarm = loop.call_later(KEEP_ALIVE, news.set)  # much cheaper than a timeout, and there is one for every event
    try:
        await news.wait()
        return loop.time() < alarm.when()
    finally:
        alarm.cancel()


def identifier(prefix: str) -> str:
    return prefix + secrets.token_hex(12)
