"""Writes the bundled corpus: customer requests with their intent, and related plain text without labels.

    python data/generate.py data      # writes data/raw/support.{csv,jsonl} and data/text/help.txt, which is also packed
                                      # into the package, for the tiny base of new projects

All texts are invented. Seeded generators draw them from the phrase tables of phrases.txt. The generators use
only `Random.random`, whose sequence Python guarantees, so the same code writes the same bytes on every machine. The two
outputs share words but no sentences: `raw` has requests with labels, `text` has no requests.

The task is learnable but not trivial. A third of the requests mention another intent in passing, and some have typing
errors. Intents share their vocabulary on purpose ("charged", "order", "arrived", "card"), so that only the whole
sentence distinguishes them.

In a template, `[a|b|]` picks one of the alternatives (choices can be nested, and an alternative can be empty), and
`{slot}` is filled from `SLOTS` or, for numbers, by the generator. A table has one entry per line; a line that is
indented by four or more spaces continues the entry above it.
"""

import csv
import gzip
import io
import json
import re
import sys
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import TypeVar

TABLES = {
    section.split("\n", 1)[0]: section.split("\n", 1)[1]
    for section in Path(__file__).with_name("phrases.txt").read_text(encoding="utf-8").split("\n## ")[1:]
}
"""Phrase tables by name."""


def parse_entries(table: str) -> list[str]:
    """Split a table into entries: join continuation lines, skip blank lines."""
    return [line.strip() for line in re.sub(r"\n {4,}", " ", table).splitlines() if line.strip()]


@dataclass(frozen=True)
class CustomerIntent:
    """One kind of customer request."""

    name: str
    """Label of the request."""
    weight: float
    """Frequency relative to other intents."""
    aside: str
    """Noun phrase with which a customer who asks for something else mentions this intent in passing."""
    asks: tuple[str, ...]
    """Templates of the request."""


def _read_intents(table: str) -> tuple[CustomerIntent, ...]:
    """Parse intents: lines `name: weight: aside`, each followed by its templates, indented by two spaces."""
    intents = []
    for block in re.split(r"\n(?=\w)", table.strip()):
        head, *asks = parse_entries(block)
        name, weight, aside = head.split(": ")
        intents.append(CustomerIntent(name, float(weight), aside, tuple(asks)))
    return tuple(intents)


SLOTS: dict[str, tuple[str, ...]] = {
    name: tuple(values.split(" | ")) for name, values in (entry.split(": ") for entry in parse_entries(TABLES["SLOTS"]))
}

INTENTS = _read_intents(TABLES["INTENTS"])
GREETINGS = parse_entries(TABLES["GREETINGS"])
CONTEXTS = parse_entries(TABLES["CONTEXTS"])
ASIDES = parse_entries(TABLES["ASIDES"])
CLOSINGS = parse_entries(TABLES["CLOSINGS"])
ARTICLES = {
    name: tuple(sentences.split(" // "))
    for name, sentences in (entry.split(": ", 1) for entry in parse_entries(TABLES["ARTICLES"]))
}
EVERYDAY = parse_entries(TABLES["EVERYDAY"])
NOTES = parse_entries(TABLES["NOTES"])

CSV_ROWS, JSONL_ROWS, TEXT_LINES = 2400, 1800, 2000
CHANNELS = ("email", "chat", "web form", "phone note")

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
_ABBREVIATIONS = {"please": "pls", "thanks": "thx", "you": "u", "because": "cos", "and": "&", "are": "r", "to": "2"}
_T = TypeVar("_T")


class SentenceWriter:
    """Writer of sentences from templates, with one sequence of random choices."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def pick(self, items: Sequence[_T]) -> _T:
        return items[int(self._random() * len(items))]

    def pick_weighted(self, items: Sequence[CustomerIntent]) -> CustomerIntent:
        bounds = list(accumulate(item.weight for item in items))
        return items[bisect(bounds, self._random() * bounds[-1])]

    def write_sentence(self, template: str, values: Mapping[str, str] | None = None) -> str:
        """Write one sentence from a template: choices first, innermost before outer ones, then slots.

        A slot that occurs twice gets two independent values. Raises KeyError for an unknown slot.
        """
        while match := _CHOICE.search(template):
            template = template[: match.start()] + self.pick(match[1].split("|")) + template[match.end() :]
        while match := _SLOT.search(template):
            value = (values or {}).get(match[1]) or self._fill(match[1])
            template = template[: match.start()] + value + template[match.end() :]
        return re.sub(r" +([,.!?]?)(?= |$)", r"\1", re.sub(r" {2,}", " ", template)).strip()

    def _fill(self, slot: str) -> str:
        if slot == "n":
            return str(2 + int(self._random() * 7))
        if slot == "amount":
            return self.write_sentence(f"{5 + int(self._random() * 70)}[.50|.99|||] [pounds|euros|pounds]")
        if slot == "order":
            return f"KF{1000 + int(self._random() * 9000)}"
        return self.pick(SLOTS[slot])


def write_requests(raw_dir: Path) -> None:
    """Write `support.csv` and `support.jsonl` with the fields request, intent, channel and received (a date).

    All requests of the two files differ, even without case, spaces and punctuation.
    """
    writer, seen = SentenceWriter(seed=7), set[str]()
    rows: list[dict[str, str]] = []
    while len(rows) < CSV_ROWS + JSONL_ROWS:
        intent = writer.pick_weighted(INTENTS)
        request = _write_request(writer, intent)
        key = " ".join(re.findall(r"\w+", request.lower()))
        if key in seen:
            continue
        seen.add(key)
        received = f"2025-{writer.pick(range(1, 13)):02d}-{writer.pick(range(1, 29)):02d}"
        rows.append({"request": request, "intent": intent.name, "channel": writer.pick(CHANNELS), "received": received})
    table = io.StringIO()
    sheet = csv.DictWriter(table, list(rows[0]), lineterminator="\n")
    sheet.writeheader()
    sheet.writerows(rows[:CSV_ROWS])
    raw_dir.mkdir(parents=True, exist_ok=True)
    (raw_dir / "support.csv").write_text(table.getvalue(), encoding="utf-8", newline="\n")
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[CSV_ROWS:])
    (raw_dir / "support.jsonl").write_text(lines, encoding="utf-8", newline="\n")


def _write_request(writer: SentenceWriter, intent: CustomerIntent) -> str:
    """Write one message: the request, and text around it."""
    before: list[str] = []
    after: list[str] = []
    if writer.chance(0.35):
        before.append(writer.write_sentence(writer.pick(GREETINGS)))
    if writer.chance(0.3):
        before.append(writer.write_sentence(writer.pick(CONTEXTS)))
    if writer.chance(0.33):
        mentioned = writer.pick([candidate for candidate in INTENTS if candidate is not intent])
        aside = writer.write_sentence(writer.pick(ASIDES), {"aside": mentioned.aside})
        (before if writer.chance(0.6) else after).append(aside)
    if writer.chance(0.3):
        after.append(writer.write_sentence(writer.pick(CLOSINGS)))
    ask = writer.write_sentence(writer.pick(intent.asks))
    if ask[-1] not in "?!.":
        ask += writer.pick((".", ".", ".", "!", "..."))
    return _add_typos(writer, " ".join(_capitalize(part) for part in (*before, ask, *after)))


def _capitalize(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _add_typos(writer: SentenceWriter, text: str) -> str:
    """Change a message as if the customer typed it in a hurry: lower case, abbreviations, typing errors."""
    if writer.chance(0.15):
        text = text.lower()
    words = text.split(" ")
    if writer.chance(0.07):
        words = [_ABBREVIATIONS.get(word.lower(), word) for word in words]
    if writer.chance(0.15):
        i = writer.pick(range(len(words)))
        letter = writer.pick(range(max(1, len(words[i]) - 1)))
        word = words[i]
        if word.isalpha() and len(word) > 3:  # two letters swapped, or one left out
            words[i] = (
                word[:letter]
                + (word[letter + 1] + word[letter] if writer.chance(0.5) else word[letter + 1])
                + word[letter + 2 :]
            )
    return " ".join(words)


def write_text(text_dir: Path) -> None:
    """Write `help.txt`, with one paragraph per line: help pages, notes about products, and everyday sentences.

    The file contains the words of the labels, and the labels themselves as names of pages.
    """
    writer, seen = SentenceWriter(seed=11), set[str]()
    lines: list[str] = []
    while len(lines) < TEXT_LINES:
        line = _write_page(writer) if writer.chance(0.4) else _write_paragraph(writer)
        if line not in seen:
            seen.add(line)
            lines.append(line)
    text_dir.mkdir(parents=True, exist_ok=True)
    (text_dir / "help.txt").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def _write_page(writer: SentenceWriter) -> str:
    names = list(ARTICLES)
    name = writer.pick(names)
    first, second = (_capitalize(writer.write_sentence(sentence)) for sentence in ARTICLES[name])
    title = _capitalize(name.replace("_", " "))
    links = f"See also {writer.pick(names)} and {writer.pick(names)}."
    return writer.pick(
        (f"{title}. {first} {second}", f"{second} {first} {links}", f"{title}: {first}", f"{second} {links}")
    )


def _write_paragraph(writer: SentenceWriter) -> str:
    tables = (EVERYDAY, EVERYDAY, EVERYDAY, NOTES)
    return " ".join(
        _capitalize(writer.write_sentence(writer.pick(writer.pick(tables)))) for _ in range(writer.pick((1, 2, 2, 3)))
    )


def main(arguments: Sequence[str]) -> None:
    """Write the corpus to a directory."""
    if len(arguments) != 1:
        sys.exit("usage: python data/generate.py DATA_DIR")
    data = Path(arguments[0])
    write_requests(data / "raw")
    write_text(data / "text")
    packed = gzip.compress((data / "text" / "help.txt").read_bytes(), mtime=0)
    (data.resolve().parent / "src" / "ratchet" / "data" / "help.txt.gz").write_bytes(packed)


if __name__ == "__main__":
    main(sys.argv[1:])
