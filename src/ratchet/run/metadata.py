"""One question to a metadata server: it is on the machine itself, behind no proxy, and answers at once or never."""

from collections.abc import Mapping
from typing import NamedTuple

LONGEST_ANSWER_BYTES = 1 << 16
LINK_LOCAL = "http://169.254.169.254"
"""Where all three clouds have theirs. No name is used: resolvers can take long to say that there is none."""


class Answer(NamedTuple):
    """An answer 200."""

    text: str
    """The body without white space around it; may be empty."""
    headers: Mapping[str, str]
    """By name in small letters."""


def ask(url: str, headers: Mapping[str, str], timeout_s: float, method: str = "GET") -> Answer | None:
    """What is at a URL; None for 404.

    Args:
        url: http or https.
        headers: of the request.
        timeout_s: for each wait: to connect, and between two bytes.
        method: `GET` or `PUT`.

    Raises:
        OSError: every other answer (urllib.error.HTTPError has its number), or none.
        ValueError: a URL that is none.
    """
    from urllib.error import HTTPError  # not for workers, who import this room too
    from urllib.request import ProxyHandler, Request, build_opener

    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(Request(url, method=method, headers=dict(headers)), timeout=timeout_s) as reply:  # noqa: S310 (http, by our callers)
            content: bytes = reply.read(LONGEST_ANSWER_BYTES)
            told = {name.lower(): value for name, value in reply.headers.items()}
    except HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        raise
    return Answer(content.decode(errors="replace").strip(), told)


def code_of(error: OSError) -> int | None:
    """The number of the answer that an error is about; None when there was no answer."""
    code = getattr(error, "code", None)
    return code if isinstance(code, int) else None
