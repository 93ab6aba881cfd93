"""What the answer of an OpenAI-compatible server says: a reply, words of refusal, or nothing that could be read."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LONGEST_WORDS = 300
"""Characters of a server's words that are repeated."""

CONTEXT = ("max_model_len", "n_ctx", "n_ctx_train")

TOO_LONG = ("context_length_exceeded", "exceed_context_size_error", "maximum context length", "context size")
"""What servers say of a prompt that does not fit: OpenAI and vLLM, llama.cpp, vLLM's words, llama.cpp's."""


class ShapeError(ValueError):
    """What came is no answer; the text names what it was."""


@dataclass(frozen=True)
class Reply:
    """What a model said."""

    text: str
    reasoning: str | None
    """Set apart by the server (`reasoning_content` or `reasoning`); None: it sets none apart."""
    finish: str
    """As the server says (stop, length, ...); `context`: it refused the prompt as too long for the model; `refused`:
    for another reason, see `refusal`."""
    prompt_tokens: int | None
    """As the server counts; None: it does not say."""
    tokens: int | None
    """Of the answer and its reasoning; None: the server does not say."""
    mean_log_probability: float | None
    """Of the tokens that the server gave log-probabilities for, in nats; None: none."""
    tries: int = 1
    """Requests that it took."""
    refusal: str | None = None
    """The server's words, where it answers others and not this chat (`finish` is then `refused`)."""


def read_reply(body: bytes, tries: int) -> Reply:
    """The first choice of a chat completion.

    Raises:
        ShapeError: it is none.
    """
    document = read_object(body)
    choices = document.get("choices")
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        raise ShapeError(f"no choices in it: {_seen(body)}")
    choice = choices[0]
    message, finish = choice.get("message"), choice.get("finish_reason")
    if not isinstance(message, dict) or not isinstance(finish, str):
        raise ShapeError(f"a choice without message or finish_reason: {_seen(body)}")
    text = message.get("content")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(text, str | None) or not isinstance(reasoning, str | None):
        raise ShapeError(f"a message whose content is no text: {_seen(body)}")
    usage = document.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return Reply(
        text=_sound(text or ""),
        reasoning=_sound(reasoning) if reasoning else None,
        finish=shorten_for_message(finish),
        prompt_tokens=_count(counts.get("prompt_tokens")),
        tokens=_count(counts.get("completion_tokens")),
        mean_log_probability=_mean(choice.get("logprobs")),
        tries=tries,
    )


def read_object(body: bytes) -> dict[str, Any]:
    """An answer that is a JSON object. Raises ShapeError."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise ShapeError(f"no JSON, or half of it: {_seen(body)}") from None
    if not isinstance(document, dict):
        raise ShapeError(f"no JSON object: {_seen(body)}")
    return document


def words(body: bytes) -> str:
    """What a server says is wrong, shortened: the message of its error, else the body as it is."""
    try:
        document = read_object(body)
    except ShapeError:
        return shorten_for_message(body.decode("utf-8", "replace")) or "nothing"
    error = document.get("error", document)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or json.dumps(error)
    return shorten_for_message(error if isinstance(error, str) else json.dumps(error))


def context_of(entry: Mapping[str, Any]) -> int | None:
    """Tokens that prompt and answer may have together, by a server's entry of a model: vLLM and llama.cpp say it."""
    meta = entry.get("meta")
    known = {**(meta if isinstance(meta, dict) else {}), **entry}
    return next((count for name in CONTEXT if (count := _count(known.get(name)))), None)


def is_too_long(body: bytes) -> bool:
    """Whether it is refused because the model's context does not hold prompt and answer."""
    text = body.decode("utf-8", "replace").lower()
    return any(known in text for known in TOO_LONG)


def shorten_for_message(text: str) -> str:
    """Printable, on one line, shortened."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())  # nor halves of surrogate pairs
    return line if len(line) <= LONGEST_WORDS else f"{line[:LONGEST_WORDS]}..."


def _seen(body: bytes) -> str:
    return shorten_for_message(body[: 2 * LONGEST_WORDS].decode("utf-8", "replace")) or "nothing at all"


def _sound(text: str) -> str:
    """Without halves of surrogate pairs, which JSON may hold and no file in UTF-8 can."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _mean(logprobs: Any) -> float | None:
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or not content:
        return None
    found = [one.get("logprob") if isinstance(one, dict) else None for one in content]
    values = [float(v) for v in found if isinstance(v, int | float) and math.isfinite(v)]
    return math.fsum(values) / len(values) if len(values) == len(content) else None


# Server-sent events, as servers of models stream their answers (https://html.spec.whatwg.org/#parsing-an-event-
# stream).
#
# Only what such servers send is read: the data of events. Names, ids and waits of events are passed over, and so are
# comments, which keep a connection alive.

DONE = "[DONE]"
"""What OpenAI-compatible servers end a stream with."""


def data_of(lines: Iterable[bytes]) -> Iterator[str | None]:
    """The data of each event, from the lines of a stream, with their ends; None for a comment: nothing but a sign.

    An event that the stream breaks off in is given too: what it lacks shows itself in its data.
    """
    data: list[str] = []
    for raw in lines:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if not line:
            if data:
                yield "\n".join(data)
            data = []
        elif line.startswith(":"):
            yield None
        else:
            name, _, value = line.partition(":")
            if name == "data":
                data.append(value.removeprefix(" "))
    if data:
        yield "\n".join(data)
