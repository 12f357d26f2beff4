"""POST /v1/completions: plain text on, as OpenAI has it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from warpsmith.model.tokenizer import Tokenizer
from warpsmith.serve.choice import Choice, timings, usage
from warpsmith.serve.errors import api_error, refused
from warpsmith.serve.http import EventStream, json_response, parse, sse, unless_gone
from warpsmith.serve.job import Job, Logprob, Run
from warpsmith.serve.models import MAX_CHOICES, FormatFields, Harmless, MaxTokens, SamplerFields, StreamOptions
from warpsmith.serve.service import Prompt, Service, events, identifier, sampler_fields

DEFAULT_TOKENS = 16  # OpenAI's

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class CompletionRequest(SamplerFields, FormatFields, Harmless):
    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    best_of: Annotated[int | None, Field(ge=1, le=1)] = None


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await parse(request, CompletionRequest)
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "stream_options needs stream: true.", "Send both.")
    if body.echo and body.logprobs is not None:
        raise refused(
            "echo", "Probabilities of the prompt's own tokens are not computed.", "Leave echo or logprobs out."
        )
    prompts = await _prompts(service, body)
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise refused("n", f"{len(prompts)} prompts times n are more than {MAX_CHOICES} answers.", "Ask for fewer.")
    grammar = await service.format(body)
    if grammar is not None and body.ignore_eos:
        raise refused("ignore_eos", "ignore_eos would let an answer go on that has to fit something.")
    requests = [
        service.request(
            prompt,
            sampler_fields(body, index),
            max_tokens=body.max_tokens or DEFAULT_TOKENS,
            stop=body.stop,
            ignore_eos=bool(body.ignore_eos),
            top_logprobs=body.logprobs,
            constraint=grammar,
        )
        for prompt in prompts
        for index in range(body.n or 1)
    ]
    echoes = [prompt.text if body.echo else "" for prompt in prompts for _ in range(body.n or 1)]
    choices = [Choice(service.llm.tokenizer, False, raw=True) for _ in requests]
    jobs = service.worker.submit(requests)
    head = {
        "id": identifier("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.names[0],
        "system_fingerprint": service.fingerprint,
    }
    if body.stream:
        return EventStream(_stream(body, head, choices, jobs, echoes), jobs)
    return json_response(await unless_gone(request, _whole(body, head, choices, jobs, echoes)))


async def _prompts(service: Service, body: CompletionRequest) -> list[Prompt]:
    if isinstance(body.prompt, str):
        return [await service.text_prompt(body.prompt)]
    if isinstance(body.prompt[0], str):
        return [await service.text_prompt(text) for text in body.prompt if isinstance(text, str)]
    ids = [token for token in body.prompt if isinstance(token, int)]
    if max(ids) >= service.llm.config.vocab:
        raise refused("prompt", f"Token ids must be below {service.llm.config.vocab}.", "Use this model's tokenizer.")
    return [Prompt(service.llm.tokenizer.decode(ids), ids)]


async def _whole(
    body: CompletionRequest, head: dict[str, Any], choices: list[Choice], jobs: list[Job], echoes: list[str]
) -> dict[str, Any]:
    async for news in events(jobs):
        if news is not None:
            choices[news[0]].feed(news[1])
    return {
        **head,
        "choices": [
            {
                "index": index,
                "text": echo + choice.content,
                "logprobs": None if body.logprobs is None else _logprobs(choice.tokenizer, choice.logprobs, 0),
                "finish_reason": choice.finish_reason,
            }
            for index, (choice, echo) in enumerate(zip(choices, echoes, strict=True))
        ],
        "usage": usage(choices),
        "timings": timings(choices[0].stats),
    }


async def _stream(
    body: CompletionRequest, head: dict[str, Any], choices: list[Choice], jobs: list[Job], echoes: list[str]
) -> AsyncIterator[str]:
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    offsets = [0] * len(choices)

    def chunk(index: int, text: str, finish: str | None = None, probabilities: Any = None, **more: Any) -> str:
        entry = {"index": index, "text": text, "logprobs": probabilities, "finish_reason": finish}
        return sse({**head, "choices": [entry], **({"usage": None} if with_usage else {}), **more})

    try:
        for index, echo in enumerate(echoes):
            if echo:
                yield chunk(index, echo)
        async for news in events(jobs):
            if news is None:
                yield ": keep-alive\n\n" + chunk(0, "")
                continue
            index, event = news
            choice = choices[index]
            text = "".join(part.text for part in choice.feed(event) if hasattr(part, "text"))
            probabilities = None
            if isinstance(event, Run) and body.logprobs is not None:
                probabilities = _logprobs(choice.tokenizer, event.logprobs, offsets[index])
                offsets[index] += sum(map(len, probabilities["tokens"]))
            if text or probabilities:
                yield chunk(index, text, probabilities=probabilities)
            if choice.end is event:
                yield chunk(index, "", choice.finish_reason, timings=timings(choice.stats))
        if with_usage:
            yield sse({**head, "choices": [], "usage": usage(choices), "timings": timings(choices[0].stats)})
        yield sse("[DONE]")
    except Exception as error:
        yield sse(api_error(error).openai())


def _logprobs(tokenizer: Tokenizer, tokens: list[Logprob], offset: int) -> dict[str, Any]:
    def text(token: int) -> str:
        return tokenizer.token_bytes(token).decode("utf-8", "replace")

    texts = [text(item.token) for item in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [item.logprob for item in tokens],
        "top_logprobs": [{text(token): logprob for token, logprob in item.top} for item in tokens],
        "text_offset": [offset + sum(map(len, texts[:i])) for i in range(len(texts))],
    }
