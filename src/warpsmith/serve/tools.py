"""Tool calls in a stream of text: the family's XML dialect and the JSON that other models of it write.

    <tool_call>                          <tool_call>
    <function=NAME>                      {"name": NAME, "arguments": {...}}
    <parameter=KEY>                      </tool_call>
    VALUE
    </parameter>                         <tool_call>NAME{...}</tool_call>
    </function>
    </tool_call>                         <function=NAME>...</function>

The calls, their arguments and the text between them are the same however the stream is chopped. What only looks like
the beginning of a call comes out as text, unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from warpsmith.serve.arguments import Parameters
from warpsmith.serve.markers import first_of, unfinished
from warpsmith.serve.reasoning import Content

CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
# how a call begins when the model forgot to close its thoughts
IMPLIED = (f"{CALL}\n{FUNCTION}", f'{CALL}\n{{"name"')

_NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True)
class CallStart:
    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    index: int


Event = Content | CallStart | CallArguments | CallEnd


class ToolParser:
    """`tools` maps the name of each tool to the JSON schema of its arguments.

    A state is a method that takes what it can of the text held so far, and returns whether it got any further.
    """

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self._tools = {name: Parameters(schema) for name, schema in tools.items()}
        self._bare = [f"{FUNCTION}{name}>" for name in tools]
        self._state: Callable[[], bool] = self._in_text
        self._held = ""
        self._events: list[Event] = []
        self.calls = 0  # that were begun
        self._name = ""  # of the open call
        self._keys = 0  # its arguments so far
        self._key = ""  # the one being read
        self._blank = True  # nothing has followed its name yet
        self._gap = False  # a call has ended and no text has followed: spaces there mean nothing
        self._searched = 0  # of what is held: there is no end of the JSON in it

    def push(self, text: str) -> list[Event]:
        self._held += text
        self._work()
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """No more text comes. A call that breaks off stays incomplete, and so does the JSON of its arguments."""
        while self._state in (self._in_opening, self._in_json):
            if self._state == self._in_json and self._take_json(self._held):
                self._held, self._state = "", self._in_text
            else:
                self._no_call()
            self._work()
        if self._state == self._in_text and not (self._gap and self._held.isspace()):
            self._say(self._held)
        elif self._state == self._in_arguments:
            self._argue(self._held)
        self._held, self._state = "", self._in_text
        events, self._events = self._events, []
        return events

    def _work(self) -> None:
        while self._state():
            pass

    # States

    def _in_text(self) -> bool:
        if self._gap:
            self._held = self._held.lstrip()
        markers = (CALL, *self._bare)
        found = first_of(self._held, markers)
        if found is None:
            # spaces before a call are not part of the text, and what follows them is not known yet
            safe = len(self._held[: len(self._held) - unfinished(self._held, markers)].rstrip())
            self._say(self._held[:safe])
            self._held = self._held[safe:]
            return False
        at, marker = found
        safe = len(self._held[:at].rstrip())
        self._say(self._held[:safe])
        self._held = self._held[safe:]
        if marker == CALL:
            self._state = self._in_opening
        else:
            self._begin_call(marker[len(FUNCTION) : -1], self._held.index(marker) + len(marker))
        return True

    def _in_opening(self) -> bool:
        """`<tool_call>` has come, after spaces that are only dropped if it is one."""
        start = self._held.index(CALL) + len(CALL)
        body = self._held[start:].lstrip()
        start = len(self._held) - len(body)
        if FUNCTION.startswith(body):
            return False  # also when there is nothing yet
        if body.startswith(FUNCTION):
            name, closed, _ = body[len(FUNCTION) :].partition(">")
            if closed and _NAME.fullmatch(name):
                self._begin_call(name, start + len(FUNCTION) + len(name) + 1)
                return True
            possible = not closed and (not name or _NAME.fullmatch(name) is not None)
            return False if possible else self._no_call()
        if body.startswith("{"):
            self._state, self._searched = self._in_json, start
            return True
        return self._bare_name(body, start)

    def _bare_name(self, body: str, start: int) -> bool:
        match = _NAME.match(body)
        name = match.group() if match else ""
        rest = body[len(name) :].lstrip()
        if not rest and any(known.startswith(name) for known in self._tools) and name:
            return False
        follows = (PARAMETER, "{", END_CALL)
        if name in self._tools and rest.startswith(follows):
            self._begin_call(name, len(self._held) - len(rest))
            return True
        if name in self._tools and unfinished(rest, follows) == len(rest):
            return False
        return self._no_call()

    def _no_call(self) -> bool:
        end = self._held.index(CALL) + len(CALL)
        self._say(self._held[:end])
        self._held, self._state = self._held[end:], self._in_text
        return True

    def _in_json(self) -> bool:
        """A whole call in JSON. Its end is the first `</tool_call>` up to which it is valid: a string may hold one."""
        at = self._held.find(END_CALL, self._searched)
        if at < 0:
            self._searched = max(self._searched, len(self._held) - len(END_CALL) + 1)
            return False
        self._searched = at + 1
        if self._take_json(self._held[:at]):
            self._held, self._state = self._held[at + len(END_CALL) :], self._in_text
        return True

    def _take_json(self, text: str) -> bool:
        try:
            call = json.loads(text[text.index(CALL) + len(CALL) :])
            call = call.get("function", call)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return False
        self._events += [CallStart(self.calls, name), CallArguments(self.calls, _dumps(arguments)), CallEnd(self.calls)]
        self.calls += 1
        self._gap = True
        return True

    def _in_function(self) -> bool:
        """Between the parameters of a call. What is neither one nor an end has no meaning here."""
        if self._blank and self._held.lstrip().startswith("{"):
            self._state, self._searched = self._in_arguments, 0
            return True
        self._blank = self._blank and not self._held.strip()
        markers = (PARAMETER, END_FUNCTION, END_CALL)
        found = first_of(self._held, markers)
        if found is None:
            self._held = self._held[len(self._held) - unfinished(self._held, markers) :]
            return False
        at, marker = found
        if marker != PARAMETER:
            self._end_call("}" if self._keys else "{}")
            self._state = self._in_closing if marker == END_FUNCTION else self._in_text
            self._held = self._held[at + len(marker) :]
            return True
        key, closed, rest = self._held[at + len(PARAMETER) :].partition(">")
        if not closed:
            self._held = self._held[at:]
            return False
        self._key = key
        self._argue(("{" if not self._keys else ", ") + _dumps(key) + ": ")
        self._keys += 1
        self._held, self._state = rest, self._in_first_line
        return True

    def _in_first_line(self) -> bool:
        """The newline after `<parameter=KEY>` is not part of the value."""
        if not self._held:
            return False
        self._held = self._held.removeprefix("\n")
        if self._parameters.types(self._key) == {"string"}:
            self._argue('"')
            self._state = self._in_string
        else:
            self._state = self._in_value
        return True

    def _in_string(self) -> bool:
        """Text goes out as it comes."""
        at = self._held.find(END_PARAMETER)
        if at >= 0:
            self._argue(_dumps(self._held[:at].removesuffix("\n"))[1:])
            self._held, self._state = self._held[at + len(END_PARAMETER) :], self._in_function
            return True
        safe = len(self._held) - unfinished(self._held, (END_PARAMETER, "\n" + END_PARAMETER))
        self._argue(_dumps(self._held[:safe])[1:-1])
        self._held = self._held[safe:]
        return False

    def _in_value(self) -> bool:
        """Anything but text has to be there in full before it can be read."""
        at = self._held.find(END_PARAMETER)
        if at < 0:
            return False
        self._argue(_dumps(self._parameters.value(self._key, self._held[:at].removesuffix("\n"))))
        self._held, self._state = self._held[at + len(END_PARAMETER) :], self._in_function
        return True

    def _in_arguments(self) -> bool:
        """All arguments of a named function in JSON, up to its end tag."""
        found = first_of(self._held[self._searched :], (END_FUNCTION, END_CALL))
        if found is None:
            self._searched = max(self._searched, len(self._held) - len(END_CALL) + 1)
            return False
        at, marker = found[0] + self._searched, found[1]
        self._searched = at + 1
        try:
            arguments = json.loads(self._held[:at])
        except (ValueError, RecursionError):
            return True
        self._argue(_dumps(arguments))
        self._end_call(braces="")
        self._held = self._held[at + len(marker) :]
        self._state = self._in_closing if marker == END_FUNCTION else self._in_text
        return True

    def _in_closing(self) -> bool:
        """`</tool_call>` follows `</function>`, unless it was forgotten."""
        rest = self._held.lstrip()
        if rest.startswith(END_CALL):
            self._held, self._state = rest[len(END_CALL) :], self._in_text
            return True
        if END_CALL.startswith(rest):
            return False
        self._state = self._in_text
        return True

    # What comes out

    @property
    def _parameters(self) -> Parameters:
        return self._tools.get(self._name, Parameters(None))

    def _begin_call(self, name: str, taken: int) -> None:
        self._name, self._keys, self._blank = name, 0, True
        self._events.append(CallStart(self.calls, name))
        self.calls += 1
        self._held, self._state = self._held[taken:], self._in_function

    def _end_call(self, braces: str) -> None:
        self._argue(braces)
        self._events.append(CallEnd(self.calls - 1))
        self._gap = True

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self.calls - 1, text))

    def _say(self, text: str) -> None:
        if text:
            self._events.append(Content(text))
            self._gap = False


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
