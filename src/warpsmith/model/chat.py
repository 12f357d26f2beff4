"""Conversation to prompt: renders a model's Jinja chat template as Hugging Face transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jinja2

from warpsmith.errors import BadFile, BadRequest
from warpsmith.model.sandbox import Refused, TooMuch, run

_OTHER_TEMPLATE = "Use another chat template."


def render(
    template: str,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    enable_thinking: bool | None = None,
    tools: list[dict[str, Any]] | None = None,
    **extra: Any,
) -> str:
    """The prompt text of a conversation. `extra` are more variables for the template, such as `eos_token`."""
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise BadRequest("tools is not a list of objects.", 'Send [{"type": "function", "function": {…}}].')
    variables: dict[str, Any] = {
        "messages": [_message(message, i) for i, message in enumerate(messages)],
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **extra,
    }
    if enable_thinking is not None:
        variables["enable_thinking"] = enable_thinking
    # Plain JSON values have no methods that the sandbox does not know, and a copy keeps the caller's lists as they are.
    try:
        as_json = json.dumps(variables)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"The conversation holds something that is not JSON ({_line(error)}).", "Send text.") from None

    text = _run(template, as_json)
    if tools and text == _run(template, json.dumps(variables | {"tools": None})):
        raise BadRequest("The model's chat template ignores tools.", "Leave them out, or use a model that knows tools.")
    return text


def _run(template: str, variables: str) -> str:
    """Render with the variables in this JSON object."""
    try:
        return run(template, json.loads(variables), len(variables))
    except Refused as error:
        raise BadRequest(
            f"The chat template refuses this conversation: {_line(error)}", "Change its roles or their order."
        ) from None
    except jinja2.TemplateSyntaxError as error:
        raise BadFile(
            f"The chat template is not valid at line {error.lineno} ({_line(error)}).", _OTHER_TEMPLATE
        ) from None
    except TooMuch:
        raise BadFile("The chat template asks for more work than a prompt needs.", _OTHER_TEMPLATE) from None
    except Exception as error:  # a template is a program: it may raise anything
        raise BadFile(f"The chat template fails ({type(error).__name__}: {_line(error)}).", _OTHER_TEMPLATE) from None


def default_template(thinking: bool = True) -> str:
    """A chat template for models that bring none. `thinking`: whether to think when the request does not say; the
    0.8B and 2B models do not, the larger ones do."""
    return _DEFAULT_TEMPLATE.replace("THINKING", "true" if thinking else "false")


def declared_sampling(metadata: Mapping[str, Any] | None = None) -> dict[str, float]:
    """How to sample when the request does not say: what the file declares."""
    sampling: dict[str, float] = {}
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    for key, name in names.items():
        value = (metadata or {}).get(f"general.sampling.{key}")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 31:
            raise BadFile(f"general.sampling.{key} is {value!r}, not a sampling setting.", "Convert the model again.")
        sampling[name] = value
    return sampling


def _message(message: Any, index: int) -> dict[str, Any]:
    """A message as templates expect it: content as one string, tool arguments as a mapping, one name for reasoning."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest(f"Message {index} is not an object with a role.", 'Send {"role": "user", "content": "…"}.')
    message = dict(message)
    if message.get("content") is not None:
        message["content"] = _text(message["content"], index)
    reasoning = next((message[key] for key in ("reasoning_content", "thinking", "reasoning") if message.get(key)), None)
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, index) for call in message["tool_calls"]]
    return message


def _text(content: Any, index: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"The content of message {index} is neither a string nor a list of parts.", "Send text.")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(
                f"Message {index} has a part of type {kind!r}, and this engine reads text only.",
                'Send parts of the form {"type": "text", "text": "…"}.',
            )
    return "".join(part["text"] for part in content)


def _tool_call(call: Any, index: int) -> dict[str, Any]:
    """Over the wire arguments are a string of JSON; templates iterate over them."""
    try:
        function = dict(call.get("function", call))
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
        if not isinstance(function["name"], str) or not isinstance(function.get("arguments", {}), Mapping):
            raise TypeError
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise BadRequest(
            f"Message {index} has a tool call without a name or whose arguments are not a JSON object.",
            'Send {"function": {"name": "…", "arguments": "{…}"}}.',
        ) from None
    return {**call, "function": function} if "function" in call else function


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


_DEFAULT_TEMPLATE = r"""
{%- macro plain(content) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content %}
        {%- for part in content %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{#- Past answers lose their thoughts; those that follow the last question are still at work and keep them. #}
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
    {%- set body = plain(message.content)|trim %}
    {%- if message.role == 'user' and not (body.startswith('<tool_response>') and body.endswith('</tool_response>')) %}
        {%- set last.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if last.question < 0 %}
    {{- raise_exception('there is no message from the user.') }}
{%- endif %}
{%- set instructed = messages[0].role == 'system' %}
{%- set system = plain(messages[0].content)|trim if instructed else '' %}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + tool|tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\nTo call functions, end your reply with one block of this form for each call:\n\n' }}
    {{- '<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>\n\n' }}
    {{- 'Give every required parameter. Explain before a call if you like, but write nothing after it. ' }}
    {{- 'When no function helps, answer directly.' }}
    {{- '\n\n' + system if system }}
    {{- '<|im_end|>\n' }}
{%- elif instructed %}
    {{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set body = plain(message.content)|trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- raise_exception('only the first message may be a system message.') }}
        {%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' + body + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thoughts = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not thoughts and '</think>' in body %}
            {%- set thoughts = body.split('</think>')[0].split('<think>')[-1] %}
            {%- set body = body.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > last.question %}
            {{- '<think>\n' + thoughts|trim + '\n</think>\n\n' }}
        {%- endif %}
        {{- body }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- ('\n\n' if body else '') if loop.first else '\n' }}
            {{- '<tool_call>\n<function=' + call.name + '>\n' }}
            {%- for key, value in (call.arguments or {})|items %}
                {{- '<parameter=' + key + '>\n' + (value if value is string else value|tojson) + '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' + body + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- else %}
        {{- raise_exception('the role ' + message.role + ' is unknown.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- set think = enable_thinking if enable_thinking is defined else THINKING %}
    {{- '<|im_start|>assistant\n<think>\n' + ('' if think else '\n</think>\n\n') }}
{%- endif %}
""".strip()
