"""Turns as sources have them (OpenAI's messages, ShareGPT's turns) into messages as chat templates want them."""

import json
import math
import re
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any

from ratchet.data.conversation import Message
from ratchet.data.readers import type_name

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),  # OpenAI's newer name; templates know the older one
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "ai"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "tool_response", "observation", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}


class UnfitError(Exception):
    """A record that is no example, and why; it becomes a Fault."""


# --------------------------------------------------------------------------------------------------------------- values


def flaw(text: str) -> str | None:
    """Why this is no text that can be learned from or written to a file; None if it is one."""
    if "\0" in text:
        return "holds a NUL character"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return "holds half a surrogate pair, which is no text"
    return None


_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")


def text_from(value: Any, place: str) -> str:
    """A value as text; null is no text, a number its digits. `place` says in messages whose value it is.

    Blank lines around it and white space at its end go; the first line keeps its indentation, which code needs.
    """
    if type(value) is str:
        text = _BLANK_LINES.sub("", value.rstrip())
    elif value is None:
        return ""
    elif isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise UnfitError(f"{place} holds {type_name(value)}, expected text")
    elif not math.isfinite(value):
        raise UnfitError(f"{place} holds {value}, which is no number")  # an answer `nan` would be learned
    else:
        text = str(value)
    if problem := flaw(text):
        raise UnfitError(f"{place} {problem}")
    return text


def decoded(value: Any, place: str) -> Any:
    """What JSON in a text says (tables keep lists so); other values as they are, and an empty text as null."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        hint = (
            "; it looks like Python's notation: write it with json.dumps" if value.lstrip()[:2] in ("[{", "{'") else ""
        )
        raise UnfitError(f"{place} holds text that is not JSON ({error}){hint}") from None


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def plain(value: Any, place: str) -> Any:
    """A nested value as JSON can say it, its texts checked."""
    if isinstance(value, str):
        if problem := flaw(value):
            raise UnfitError(f"{place} {problem}")
        return value
    if isinstance(value, dict):
        return {plain(key, place): plain(one, f"{place}.{key!a}") for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one, place) for one in value]
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        raise UnfitError(f"{place} holds {value}, which is no number")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise UnfitError(f"{place} holds {type_name(value)}, which JSON has no word for")


# ---------------------------------------------------------------------------------------------------------------- turns


def messages_from(value: Any, place: str, keys: tuple[str, str]) -> list[Message]:
    """A list of turns, or JSON of one; `keys` are the names of who says what."""
    turns = decoded(value, place)
    if turns is None:
        return []
    if not isinstance(turns, list):
        raise UnfitError(f"{place} holds {type_name(turns)}, expected a list of messages")
    return [_message(turn, f"{place}[{number}]", keys) for number, turn in enumerate(turns)]


def _message(turn: Any, place: str, keys: tuple[str, str]) -> Message:
    who, what = keys
    if not isinstance(turn, Mapping):
        raise UnfitError(f"{place} is {type_name(turn)}, expected an object with {who} and {what}")
    if who not in turn:
        raise UnfitError(f"{place} has no {who!r}; found: {', '.join(map(ascii, turn))}")
    name = turn[who]
    role = _ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise UnfitError(f"{place} has the unknown role {name!a}; known: {', '.join(_ROLES)}")
    if role == "call":
        calls = decoded(turn.get(what), f"{place}.{what}")
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": _calls(calls, f"{place}.{what}"),
            **_rest(turn, place),
        }
    message: Message = {"role": role, "content": _content(turn.get(what), f"{place}.{what}")}
    if len(turn) > len(keys) or what not in turn:
        message |= _rest(turn, place)
    if what not in turn and "tool_calls" not in message:
        raise UnfitError(f"{place} has no {what!r}; found: {', '.join(map(ascii, turn))}")
    return message


def _content(value: Any, place: str) -> str:
    """A message's text; OpenAI's lists of text parts are joined."""
    if not isinstance(value, list):
        return text_from(value, place)
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in value]
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise UnfitError(f"{place}[{number}] is no text part; only text can be learned from")
    return text_from("".join(map(str, texts)), place)


def _rest(turn: Mapping[str, Any], place: str) -> Message:
    """What a template may read beside role and content: calls, names, reasoning, flags; nulls say nothing."""
    known = ("role", "content", "from", "value")
    rest = {key: value for key, value in turn.items() if value is not None and key not in known}
    calls = decoded(rest.pop("tool_calls", None), f"{place}.tool_calls")
    if "function_call" in rest:  # OpenAI's older form of a single call
        calls = decoded(rest.pop("function_call"), f"{place}.function_call")
    message: Message = {key: plain(value, f"{place}.{key}") for key, value in rest.items()}
    if calls:
        message["tool_calls"] = _calls(calls, f"{place}.tool_calls")
    return message


def _calls(value: Any, place: str) -> list[Any]:
    """Tool calls in OpenAI's form, their arguments as an object: templates would quote a text once more."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        called = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(called, Mapping) or not isinstance(called.get("name"), str):
            raise UnfitError(f"{place} holds {type_name(call)}, expected calls with a function's name and arguments")
        arguments = decoded(called.get("arguments", called.get("parameters")), f"{place}.arguments")
        if not isinstance(arguments, (Mapping, type(None))):
            raise UnfitError(f"{place}.arguments is {type_name(arguments)}, expected an object")
        outer = {key: one for key, one in call.items() if key not in ("function", "name", "arguments", "parameters")}
        function = {"name": called["name"], "arguments": arguments or {}}
        calls.append(plain({"type": "function", **outer, "function": function}, place))
    return calls


def tools_from(value: Any, place: str) -> list[Any] | None:
    """The tools of a conversation, from a list of schemas, JSON of one, or a list of such JSON."""
    tools = decoded(value, place)
    if not tools:
        return None
    if not isinstance(tools, list):
        raise UnfitError(f"{place} holds {type_name(tools)}, expected a list of tools")
    schemas = [decoded(tool, place) for tool in tools]
    if not all(isinstance(schema, Mapping) for schema in schemas):
        raise UnfitError(f"{place} holds a tool that is no object with its schema")
    return [plain(schema, place) for schema in schemas]


def closed(messages: list[Message]) -> tuple[list[Message], int]:
    """The messages up to the last answer, and how many behind it were left out; an empty answer where there is none."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return [*messages, {"role": "assistant", "content": ""}], 0
    end = answers[-1] + 1
    return messages[:end], len(messages) - end
