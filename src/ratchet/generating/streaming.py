"""`ratchet generate --stream`: answers on the screen as they are given, one at a time, with the reasoning set apart."""

from typing import IO

from ratchet.errors import DataError
from ratchet.generating import opening
from ratchet.generating.aloud import Heard, Page
from ratchet.generating.identity import Meant
from ratchet.generating.prompts import Source
from ratchet.generating.speakers import Question, Ties


def stream(meant: Meant, source: Source, out: IO[str]) -> str:
    """Answer each prompt of a file, generate.samples times, and write no file.

    Raises:
        InputError: prompts or model are not usable.
        RatchetError: whoever answers does not, or broke off.
    """
    settings = meant.start.generate
    source.measured()  # a file that cannot be read is refused before the model is loaded
    page = Page(out)
    speaker = opening.opened(meant.model.kind, meant.start, shown_ties(page))
    count = 0
    try:
        for number, prompt in enumerate(source.prompts()):
            for sample in range(settings.samples):
                page.head(f"prompt {prompt.id}")
                heard = Heard()
                try:
                    page.answer(
                        speaker.spoken(Question(number * settings.samples + sample, sample, prompt), False), heard
                    )
                except DataError as error:
                    page.note(f"not asked: {error}")
                count += 1
                if heard.ended and heard.ended.finish != "stop":
                    page.note(f"({ENDS.get(heard.ended.finish, heard.ended.finish)})")
                page.gap()
    finally:
        speaker.close()
    return f"{count:,} answers shown, none written"


ENDS = {
    "length": "cut at generate.max_new_tokens",
    "context": "the model's context is full",
    "memory": "memory ran out",
    "invalid": "the model gave numbers that are none",
    "filtered": "the server holds it back",
}
"""Ends of answers for people; of one that ends by itself nothing is said."""


def shown_ties(page: Page) -> Ties:
    """Those of a speaker that belongs to no run: what is worth telling stands on the page."""

    def told(kind: str, data: object) -> None:
        if kind == "notice" and isinstance(data, dict):
            page.note(f"notice: {data['text']}")

    return Ties(lambda: None, told, lambda _: None)
