"""From answers to rows, in passes over files: filters, scores, the choice within a prompt, duplicates.

Memory holds one prompt with its answers, and of each chosen row what finds duplicates: 16 bytes of its text's digest
(about 100 with the set they are in), 8 bytes for each MinHash band, and up to 9 more for each band while clusters are
looked for (quality.clusters): half a gigabyte for a million rows by default, a fifth of it without near-duplicates.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ratchet import digest, files
from ratchet.config_select import Select
from ratchet.data import quality
from ratchet.data.conversation import Conversation
from ratchet.data.intake import Texts
from ratchet.errors import SettingsError
from ratchet.records_select import PROVENANCE
from ratchet.selecting import reward
from ratchet.selecting.answers import Answered, Asked, Output, asked
from ratchet.selecting.filters import Filters, Kept, Tally, likeliest

BLOCK_ROWS = 1000
TAKEN = ("messages", "tools", PROVENANCE)
"""Names in a row that no field of generate.keep may have."""


class _Left(NamedTuple):
    """A prompt with the answers that are left, and their scores."""

    prompt: dict[str, Any]
    kept: list[Kept]
    scores: list[float | None]

    def line(self) -> bytes:
        """As JSON, with the line's end; without scores, which are known later."""
        return _line({"prompt": self.prompt, "kept": [[*one.answered, one.agreement] for one in self.kept]})

    @classmethod
    def of(cls, line: bytes) -> "_Left":
        """What `line` wrote."""
        document = json.loads(line)
        kept = [Kept(Answered(*parts), agreement) for *parts, agreement in document["kept"]]
        return cls(document["prompt"], kept, [None] * len(kept))


@dataclass
class Choice:
    """The passes, for outputs that are open.

    Args:
        settings: section select.
        outputs: to choose from.
        root: the project's directory.
        folder: room for files on the way.
    """

    settings: Select
    outputs: Sequence[Output]
    root: Path
    folder: Path

    def __post_init__(self) -> None:
        self.tally = Tally()
        self.prompts = self.without_reference = self.rows = self.taught_prompts = 0
        self._requested = self._signed = 0
        """Answers that are to be scored; rows that are chosen, before near-duplicates are looked for."""

    def write(self, target: Path) -> None:
        """Write the chosen rows, in the order of the prompts.

        Raises:
            SettingsError: the reward's program fails, or no prompt has the reference that is asked for.
            DamagedError: an output is not whole.
            OSError: the disk does not take it.
        """
        left, chosen = self.folder / "left.jsonl", self.folder / "chosen.jsonl"
        files.write_blocks(left, _blocks(one.line() for one in self._filtered()))
        said = None
        if self.settings.reward.command:
            requests = self.folder / "requests.jsonl"
            files.write_blocks(requests, _blocks(self._requests(left)))
            said = reward.run(self.settings.reward, self.root, requests, self.folder, self._requested)
        texts = Texts(self.folder)
        try:
            files.write_blocks(chosen, _blocks(self._chosen(self._scored(left, said), texts)))
            dropped = self._near(texts)
        finally:
            texts.close()
        files.write_blocks(target, _blocks(self._unlike(chosen, dropped)))

    def _filtered(self) -> Iterator[_Left]:
        filters = Filters(self.settings, [one.card.spec.generate.labels for one in self.outputs], self.tally)
        for one in asked(self.outputs):
            self.prompts += 1
            if kept := filters.left(one):
                yield _Left(_document(one), kept, [])
        self.without_reference = filters.without_reference
        if self.settings.reference == "match" and not filters.with_reference:
            raise SettingsError(
                "select.reference: match, but no prompt has a reference; generate answers to prompts that came with one"
            )

    def _requests(self, left: Path) -> Iterator[bytes]:
        """What the reward's program is asked."""
        for one in _read(left):
            known = {key: one.prompt[key] for key in ("id", "messages", "reference", "fields")}
            self._requested += len(one.kept)
            for kept in one.kept:
                yield _line({**known, "answer": kept.answered.answer, "reasoning": kept.answered.reasoning})

    def _scored(self, left: Path, said: reward.Said | None) -> Iterator[_Left]:
        if said is None:
            yield from _read(left)
            return
        scores = reward.scores(said, self._requested)
        for one in _read(left):
            yield one._replace(scores=list(islice(scores, len(one.kept))))
        next(scores, None)  # to its end, where it counts

    def _chosen(self, scored: Iterable[_Left], texts: Texts) -> Iterator[bytes]:
        """A line for each row whose text no row before it has, with the number of its prompt."""
        known: set[bytes] = set()
        for number, one in enumerate(scored):
            for kept, score in self._best(one):
                row = self._row(one.prompt, kept, score)
                conversation = Conversation(row["messages"], row.get("tools"))
                key = quality.exact_key(f"{conversation.system}\0{conversation.text}")
                if key in known:
                    self.tally.drop("duplicate", one.prompt["id"], kept.answered.sample)
                    continue
                known.add(key)
                texts.add([conversation.text])
                self._signed += 1
                yield _line([number, row])

    def _best(self, one: _Left) -> list[tuple[Kept, float | None]]:
        """The answers to a prompt that are taken, the best first."""
        settings, left = self.settings.reward, list[tuple[Kept, float | None]]()
        for kept, score in zip(one.kept, one.scores, strict=True):
            if settings.minimum is not None and score is not None and score < settings.minimum:
                self.tally.drop("reward", one.prompt["id"], kept.answered.sample, f"{score:g}")
            else:
                left.append((kept, score))
        left.sort(key=lambda pair: (-(pair[1] or 0.0) if settings.choose else 0.0, *likeliest(pair[0].answered)))
        for kept, _ in left[self.settings.per_prompt :]:
            self.tally.drop("not_chosen", one.prompt["id"], kept.answered.sample)
        return left[: self.settings.per_prompt]

    def _row(self, prompt: dict[str, Any], kept: Kept, score: float | None) -> dict[str, Any]:
        one = kept.answered
        spec = self.outputs[one.teacher].card.spec
        answer = one.answer
        if self.settings.reasoning == "keep" and one.reasoning is not None:
            begin, end = spec.generate.reasoning_marks
            answer = f"{begin}\n{one.reasoning}\n{end}\n\n{answer}"
        tools = {"tools": prompt["tools"]} if prompt["tools"] else {}
        provenance = {
            "generation": self.outputs[one.teacher].card.id,
            "model": spec.model.digest[: digest.SHORT],
            "sample": one.sample,
            "agreement": kept.agreement,
            "reward": score,
        }
        messages = [*prompt["messages"], {"role": "assistant", "content": answer}]
        return {"id": prompt["id"], "messages": messages, **tools, **prompt["fields"], PROVENANCE: provenance}

    def _near(self, texts: Texts) -> NDArray[np.bool_]:
        """Which of the chosen rows are almost like one before them."""
        settings, dropped = self.settings.duplicates, np.zeros(self._signed, dtype=np.bool_)
        if settings.near is None or not self._signed:
            return dropped
        signatures = quality.Signatures(settings)
        starts = range(0, self._signed, BLOCK_ROWS)
        parts = [signatures.of([texts[row] for row in _from(start, self._signed)]) for start in starts]
        rank = np.arange(self._signed, dtype=np.int64)
        for cluster in quality.clusters(np.concatenate(parts), rank, texts.__getitem__, settings, lambda _: None):
            dropped[list(cluster.dropped)] = True
        return dropped

    def _unlike(self, chosen: Path, dropped: NDArray[np.bool_]) -> Iterator[bytes]:
        """The rows that are written."""
        last = -1
        with chosen.open("rb") as stream:
            for line, is_dropped in zip(stream, dropped, strict=True):
                number, row = json.loads(line)
                if is_dropped:
                    self.tally.drop("near_duplicate", row["id"], row[PROVENANCE]["sample"])
                    continue
                self.rows += 1
                self.taught_prompts += number != last
                last = number
                yield _line(row)


def _from(start: int, end: int) -> range:
    return range(start, min(start + BLOCK_ROWS, end))


def _document(one: Asked) -> dict[str, Any]:
    """What rows and the reward's program need of a prompt."""
    prompt = one.prompt
    return {
        "id": prompt.id,
        "messages": prompt.question.messages,
        "tools": prompt.question.tools,
        "reference": prompt.reference,
        "fields": {name: value for name, value in prompt.fields.items() if name != "id"},
    }


def _line(value: Any) -> bytes:
    """JSON with its keys in their order, for a template may write a tool call as it is given."""
    return (json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _read(left: Path) -> Iterator[_Left]:
    with left.open("rb") as stream:
        yield from map(_Left.of, stream)


def _blocks(lines: Iterator[bytes]) -> Iterator[list[bytes]]:
    while block := list(islice(lines, BLOCK_ROWS)):
        yield block
