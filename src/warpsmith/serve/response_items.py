"""A response of OpenAI's Responses interface as it grows: its items, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warpsmith.serve.answer import CallArguments, CallEnd, CallStart, Content, Part, Reasoning
from warpsmith.serve.choice import Choice, timings
from warpsmith.serve.http import sse
from warpsmith.serve.service import identifier


class Result:
    """The response object. `head` is what it repeats of the request; `names` are the tools' own names, with their
    namespace if they have one, by the name that the model knows."""

    def __init__(self, head: dict[str, Any], names: Mapping[str, tuple[str, str | None]]) -> None:
        self._head, self._names = head, names
        self.items: list[dict[str, Any]] = []

    def open(self, part: Part) -> dict[str, Any]:
        """A new item for a part that does not continue the last one."""
        item: dict[str, Any]
        content: list[dict[str, Any]]
        if isinstance(part, Reasoning):
            content = [{"type": "reasoning_text", "text": ""}]
            item = {"id": identifier("rs_"), "type": "reasoning", "summary": [], "content": content}
        elif isinstance(part, CallStart):
            name, namespace = self._names.get(part.name, (part.name, None))
            item = {"id": identifier("fc_"), "type": "function_call", "call_id": identifier("call_"), "name": name}
            item |= {"arguments": "", **({"namespace": namespace} if namespace else {})}
        else:
            content = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
            item = {"id": identifier("msg_"), "type": "message", "role": "assistant", "content": content}
        item["status"] = "in_progress"
        self.items.append(item)
        return item

    def body(self, status: str, answer: Choice | None = None, error: dict[str, Any] | None = None) -> dict[str, Any]:
        cut = status == "incomplete"
        return {
            **self._head,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self.items,
            "usage": _usage(answer) if answer is not None else None,
            **({"timings": timings(answer.stats)} if answer is not None else {}),
        }


def _usage(answer: Choice) -> dict[str, Any]:
    stats = answer.stats
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.cached_tokens},
        "output_tokens": stats.generated_tokens,
        "output_tokens_details": {
            "reasoning_tokens": answer.reasoning_tokens,
            "accepted_prediction_tokens": stats.accepted_tokens,
        },
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
    }


def status(answer: Choice) -> str:
    assert answer.end is not None
    return "incomplete" if answer.end.reason == "length" else "completed"


class Writer:
    """Parts of an answer as items, and the events that tell of them."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.number = -1
        self._item: dict[str, Any] | None = None

    def event(self, kind: str, **data: Any) -> str:
        self.number += 1
        return sse({"type": kind, "sequence_number": self.number, **data}, kind)

    def show(self, part: Part) -> list[str]:
        if isinstance(part, CallEnd):
            return self.close()
        lines = [] if self._continues(part) else self._open(part)
        if isinstance(part, CallStart):
            return lines
        item = self._item
        assert item is not None
        if isinstance(part, CallArguments):
            item["arguments"] += part.text
            return [*lines, self.event("response.function_call_arguments.delta", **self._place(False), delta=part.text)]
        item["content"][0]["text"] += part.text
        if isinstance(part, Reasoning):
            return [*lines, self.event("response.reasoning_text.delta", **self._place(), delta=part.text)]
        return [*lines, self.event("response.output_text.delta", **self._place(), delta=part.text, logprobs=[])]

    def close(self, status: str = "completed") -> list[str]:
        """End the open item."""
        item = self._item
        if item is None:
            return []
        lines = []
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            lines.append(self.event("response.function_call_arguments.done", **self._place(False), **done))
        else:
            part = item["content"][0]
            if item["type"] == "message":
                lines.append(self.event("response.output_text.done", **self._place(), text=part["text"], logprobs=[]))
            else:
                lines.append(self.event("response.reasoning_text.done", **self._place(), text=part["text"]))
            lines.append(self.event("response.content_part.done", **self._place(), part=part))
        index = len(self.result.items) - 1
        lines.append(self.event("response.output_item.done", output_index=index, item=item))
        self._item = None
        return lines

    def _continues(self, part: Part) -> bool:
        kinds = {Content: "message", Reasoning: "reasoning", CallArguments: "function_call"}
        return self._item is not None and kinds.get(type(part)) == self._item["type"]

    def _open(self, part: Part) -> list[str]:
        lines = self.close()
        self._item = item = self.result.open(part)
        shown = item if item["type"] == "function_call" else {**item, "content": []}
        index = len(self.result.items) - 1
        lines.append(self.event("response.output_item.added", output_index=index, item=dict(shown)))
        if item["type"] != "function_call":
            lines.append(self.event("response.content_part.added", **self._place(), part=dict(item["content"][0])))
        return lines

    def _place(self, content: bool = True) -> dict[str, Any]:
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": len(self.result.items) - 1}
        return place | {"content_index": 0} if content else place
