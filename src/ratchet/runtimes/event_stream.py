"""Server-sent events, as servers of models stream their answers (https://html.spec.whatwg.org/#parsing-an-event-stream).

Only what such servers send is read: the data of events. Names, ids and waits of events are passed over, and so are
comments, which keep a connection alive.
"""

from collections.abc import Iterable, Iterator

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
