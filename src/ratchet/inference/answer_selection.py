"""Outputs of `ratchet generate`, checked against their cards, each answer with the prompt that it answers."""

import json
import math
import re
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ratchet.config.schema import Settings
from ratchet.config.selection import FORMATS, Select
from ratchet.data import deduplication
from ratchet.data.conversation import Conversation
from ratchet.data.ingest import TextSpool
from ratchet.data.schema_detection import find_text_flaw
from ratchet.data.splits import normalize_text
from ratchet.errors import DamagedFileError, DataError, SettingsError
from ratchet.inference import output, prompts, reward
from ratchet.inference.prompts import Prompt, PromptSource
from ratchet.inference.spec import ASKED, GenerationCard, GenerationPaths
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import PROVENANCE, FilterReport, TeacherGeneration


class TeacherAnswer(NamedTuple):
    """One answer to a prompt."""

    teacher: int
    """Index into the outputs."""
    sample: int
    answer: str
    reasoning: str | None
    finish: str
    nats: float | None
    """Mean log-probability of its tokens; None: not known."""
    probability: float | None
    """Of the answer among generate.labels, where that is known; else the geometric mean of its tokens'; else None."""


class PromptAnswers(NamedTuple):
    """A prompt and all that was answered to it."""

    prompt: Prompt
    answers: list[TeacherAnswer]


@dataclass(frozen=True)
class GenerationOutput:
    """One output of `ratchet generate`, as it was written."""

    path: Path
    card: GenerationCard
    prompts: Callable[[], Iterator[Prompt]]

    @property
    def teacher(self) -> TeacherGeneration:
        """Who answered, for the record."""
        spec = self.card.spec
        return TeacherGeneration(
            generation=self.card.id,
            kind=spec.model.kind,
            model_digest=spec.model.digest,
            held=spec.model.held,
            prompts_digest=spec.prompts_digest,
            answers_digest=self.card.output,
            temperature=spec.generate.temperature,
            samples=spec.generate.samples,
        )


def open_output(path: Path, layout: ProjectLayout, settings: Settings, other: Path | None) -> GenerationOutput:
    """An output with its prompts.

    Args:
        path: of the output.
        layout: of the project in which it was generated.
        settings: of the project: how a file of prompts is read.
        other: the file of prompts, where the generation's directory is gone.

    Raises:
        SettingsError: no such file, or no output of `ratchet generate`.
        DamagedFileError: it was changed since.
        DataError: its prompts are not there, or others.
    """
    card = output.read_card(path)
    if digests.hash_file(path) != card.output:
        raise DamagedFileError(
            f"{path}: was changed since `ratchet generate` wrote it; remove it and generate it again (answers that are "
            "kept are not asked for again)"
        )
    return GenerationOutput(path, card, _find_prompts(path, card, layout, settings, other))


def _find_prompts(
    path: Path, card: GenerationCard, layout: ProjectLayout, settings: Settings, other: Path | None
) -> Callable[[], Iterator[Prompt]]:
    folder = GenerationPaths(layout.generations / card.id).prompts
    try:
        files.verify_sealed(folder, ASKED)
    except DamagedFileError as error:
        if other is None:
            what = f"are not as they were kept ({error})" if folder.exists() else f"are not here any more (no {folder})"
            raise DataError(
                f"{path}: the prompts of its generation {card.id} {what}; name the file that they came from with "
                "--prompts"
            ) from None
    else:
        return lambda: prompts.read_prompts(folder)
    how = {"column": settings.generate.column, "skip_faults": settings.generate.skip_faults}
    asked = settings.model_copy(update={"generate": card.spec.generate.model_copy(update=how)})
    source = PromptSource(other.absolute(), asked)
    if source.measured()[1] != card.spec.prompts_digest:
        raise DataError(
            f"--prompts {other}: not the prompts of generation {card.id} ({path.name}); give the file as it was, and "
            "generate.column and prepare.system as they were"
        )
    return source.prompts


def read_prompt_answers(outputs: Sequence[GenerationOutput]) -> Iterator[PromptAnswers]:
    """Every prompt with its answers; of outputs for the same prompts all answers together. One prompt in memory.

    Raises:
        DamagedFileError: an output does not hold the answers that its card speaks of.
    """
    together: dict[str, list[int]] = {}
    for number, one in enumerate(outputs):
        together.setdefault(one.card.spec.prompts_digest, []).append(number)
    for numbers in together.values():
        streams = {number: output.read_records(outputs[number].path, outputs[number].card) for number in numbers}
        for prompt in outputs[numbers[0]].prompts():
            answers = [
                one for number in numbers for one in _read_answers(outputs[number], number, prompt, streams[number])
            ]
            yield PromptAnswers(prompt, answers)
        for number, records in streams.items():
            if next(records, None) is not None:
                raise DamagedFileError(f"{outputs[number].path}: more answers than prompts; generate it again")


def _read_answers(
    one: GenerationOutput, number: int, prompt: Prompt, records: Iterator[dict[str, Any]]
) -> Iterator[TeacherAnswer]:
    for sample in range(one.card.spec.generate.samples):
        record: dict[str, Any] = next(records, {})
        told = (record.get("id"), record.get("prompt_digest"), record.get("sample"))
        if told != (prompt.id, prompt.digest, sample):
            raise DamagedFileError(
                f"{one.path}: sample {sample} of prompt {prompt.id!r} is not where it belongs; generate it again"
            )
        nats, answer = record["mean_log_probability"], record["answer"]
        probability = _label_probability(record.get(output.LABELS), answer, nats)
        yield TeacherAnswer(number, sample, answer, record["reasoning"], record["finish"], nats, probability)


def _label_probability(labels: Mapping[str, float | None] | None, answer: str, nats: float | None) -> float | None:
    """Softmax of the labels' log-probabilities, where all are known and the answer is one of them."""
    known = [one for one in (labels or {}).values() if one is not None]
    if labels and len(known) == len(labels) and (own := labels.get(answer)) is not None:
        return math.exp(own - max(known)) / math.fsum(math.exp(one - max(known)) for one in known)
    return None if nats is None else math.exp(nats)


# What answers must be like, each by itself and among the samples of their prompt; everything left out is counted.
#
# The vote is self-consistency (Wang et al. 2022, arXiv 2203.11171): of the samples of a prompt those are right,
# probably,
# whose final answer most of them give. Comparing with a reference is rejection sampling (Yuan et al. 2023, arXiv
# 2308.01825; Zelikman et al. 2022, arXiv 2203.14465).

NAMES = (
    "finish", "unfit", "length", "format", "probability", "final", "reference", "agreement", "minority", "reward",
    "not_chosen", "duplicate", "near_duplicate",
)  # fmt: skip
"""Filters in their order."""

EXAMPLES = 3
LONGEST_DETAIL = 100
"""Characters of an example."""

LONGEST_S = 20.0
"""Time that a regular expression may take for one answer: with nested repetition it can run for years."""


class FilterTally:
    """How many answers each filter left out, and the first few of them."""

    def __init__(self) -> None:
        self.answers = 0
        self._dropped: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {name: [] for name in NAMES}

    def drop(self, name: str, id: str, sample: int, detail: str = "") -> None:
        """Book an answer that is left out."""
        self._dropped[name] += 1
        if len(self._examples[name]) < EXAMPLES:
            text = f"{id}, sample {sample}" + (f": {' '.join(detail.split())}" if detail else "")
            self._examples[name].append(text if len(text) <= LONGEST_DETAIL else text[: LONGEST_DETAIL - 3] + "...")

    @property
    def filters(self) -> tuple[FilterReport, ...]:
        """All of them, in their order."""
        left, found = self.answers, []
        for name in NAMES:
            left -= self._dropped[name]
            found.append(
                FilterReport(name=name, dropped=self._dropped[name], left=left, examples=tuple(self._examples[name]))
            )
        return tuple(found)


class AcceptedAnswer(NamedTuple):
    """An answer that is left, and the share of its prompt's samples that say the same."""

    answered: TeacherAnswer
    agreement: float


class AnswerFilters:
    """The filters that look at one prompt at a time.

    Args:
        settings: section select.
        labels: of each output, its generate.labels.
        tally: where what is left out is counted.
    """

    def __init__(self, settings: Select, labels: Sequence[Sequence[str]], tally: FilterTally) -> None:
        self._settings, self._tally = settings, tally
        self._labels = [frozenset(one) for one in labels]
        named = settings.format if settings.format not in FORMATS else None
        self._format = re.compile(named) if named else None
        self._final = re.compile(settings.final) if settings.final else None
        self.without_reference = 0
        self.with_reference = 0

    def left(self, asked: PromptAnswers) -> list[AcceptedAnswer]:
        """The answers to a prompt that pass, in their order.

        Raises:
            SettingsError: a regular expression takes too long.
        """
        self._tally.answers += len(asked.answers)
        reference = asked.prompt.reference
        wanted = None if reference is None else (self._final_of(reference) or self._key(reference))
        if self._settings.reference == "match":
            self.without_reference += wanted is None
            self.with_reference += wanted is not None
        found: list[tuple[TeacherAnswer, str]] = []
        for one in asked.answers:
            reason, detail, final = self._judged(one)
            if not reason and self._settings.reference == "match" and wanted not in (None, final):
                reason, detail = "reference", f"{final!r} is not {wanted!r}"
            if reason:
                self._tally.drop(reason, asked.prompt.id, one.sample, detail)
            else:
                found.append((one, final))
        return self._voted(asked, found)

    def _judged(self, one: TeacherAnswer) -> tuple[str, str, str]:
        """The filter that leaves an answer out, or "", with what was found; and its final answer."""
        settings, text = self._settings, one.answer
        if one.finish not in settings.finishes:
            return "finish", one.finish, ""
        if problem := find_text_flaw(text) or find_text_flaw(one.reasoning or ""):
            return "unfit", problem, ""
        if len(text) < settings.min_characters or len(text) > (settings.max_characters or len(text)):
            return "length", f"{len(text):,} characters", ""
        if not self._is_formed(one):
            return "format", text, ""
        least = settings.min_probability
        if least is not None and (one.probability is None or one.probability < least):
            return "probability", "not known" if one.probability is None else f"{one.probability:.4f}", ""
        final = self._final_of(text)
        return ("final", text, "") if final is None else ("", "", final)

    def _is_formed(self, one: TeacherAnswer) -> bool:
        if self._settings.format == "labels":
            return one.answer in self._labels[one.teacher]
        if self._settings.format == "json":
            return _normalize_json(one.answer) is not None
        if self._format is None:
            return True
        with _limit_match_time("format", self._format.pattern):
            return self._format.fullmatch(one.answer) is not None

    def _final_of(self, text: str) -> str | None:
        """What answers are compared by; None where there is no final answer."""
        if self._final is None:
            return self._key(text)
        with _limit_match_time("final", self._final.pattern):
            found = deque(self._final.finditer(text), maxlen=1)
        if not found:
            return None
        last = found[0][1] if self._final.groups else found[0][0]
        return None if last is None else self._key(last)

    def _key(self, text: str) -> str:
        parsed = _normalize_json(text) if self._settings.format == "json" else None
        return parsed or normalize_text(text)

    def _voted(self, asked: PromptAnswers, found: Sequence[tuple[TeacherAnswer, str]]) -> list[AcceptedAnswer]:
        total = len(asked.answers)
        votes = Counter(final for _, final in found)
        least = self._settings.agreement
        kept = [AcceptedAnswer(one, round(votes[final] / total, 4)) for one, final in found]
        if least is None or not found:
            return kept
        _, winner = min(((-votes[final], *likelihood_key(one)), final) for one, final in found)
        enough = votes[winner] >= least * total - 1e-9
        left = []
        for one, (answered, final) in zip(kept, found, strict=True):
            if enough and final == winner:
                left.append(one)
            else:
                said = f"{votes[final]} of {total} say {final!r}"
                self._tally.drop("minority" if enough else "agreement", asked.prompt.id, answered.sample, said)
        return left


def likelihood_key(one: TeacherAnswer) -> tuple[float, int, int]:
    """A key that sorts the likeliest answer first; of equal ones the earlier sample."""
    return (float("inf") if one.nats is None else -one.nats), one.teacher, one.sample


def _normalize_json(text: str) -> str | None:
    """JSON written in one way; None for what is none (RFC 8259 knows no NaN)."""
    try:
        return digests.canonical_json(json.loads(text, parse_constant=_refuse_constant))
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@contextmanager
def _limit_match_time(name: str, pattern: str) -> Iterator[None]:
    """Break a regular expression off that takes too long: matching looks for signals now and then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SettingsError(
            f"select.{name}: {pattern!r} takes more than {LONGEST_S:g} s on one answer; write it without a repetition "
            "inside a repetition"
        )

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


# From answers to rows, in passes over files: filters, scores, the choice within a prompt, duplicates.
#
# Memory holds one prompt with its answers, and of each chosen row what finds duplicates: 16 bytes of its text's digest
# (about 100 with the set they are in), 8 bytes for each MinHash band, and up to 9 more for each band while clusters
# are
# looked for (quality.clusters): half a gigabyte for a million rows by default, a fifth of it without near-duplicates.

BLOCK_ROWS = 1000
TAKEN = ("messages", "tools", PROVENANCE)
"""Names in a row that no field of generate.keep may have."""


class _FilteredPrompt(NamedTuple):
    """A prompt with the answers that are left, and their scores."""

    prompt: dict[str, Any]
    kept: list[AcceptedAnswer]
    scores: list[float | None]

    def line(self) -> bytes:
        """As JSON, with the line's end; without scores, which are known later."""
        return _encode_line({"prompt": self.prompt, "kept": [[*one.answered, one.agreement] for one in self.kept]})

    @classmethod
    def of(cls, line: bytes) -> "_FilteredPrompt":
        """What `line` wrote."""
        document = json.loads(line)
        kept = [AcceptedAnswer(TeacherAnswer(*parts), agreement) for *parts, agreement in document["kept"]]
        return cls(document["prompt"], kept, [None] * len(kept))


@dataclass
class AnswerSelector:
    """The passes, for outputs that are open.

    Args:
        settings: section select.
        outputs: to choose from.
        root: the project's directory.
        folder: room for files on the way.
    """

    settings: Select
    outputs: Sequence[GenerationOutput]
    root: Path
    folder: Path

    def __post_init__(self) -> None:
        self.tally = FilterTally()
        self.prompts = self.without_reference = self.rows = self.taught_prompts = 0
        self._requested = self._signed = 0
        """Answers that are to be scored; rows that are chosen, before near-duplicates are looked for."""

    def write(self, target: Path) -> None:
        """Write the chosen rows, in the order of the prompts.

        Raises:
            SettingsError: the reward's program fails, or no prompt has the reference that is asked for.
            DamagedFileError: an output is not whole.
            OSError: the disk does not take it.
        """
        left, chosen = self.folder / "left.jsonl", self.folder / "chosen.jsonl"
        files.write_blocks(left, _batch_lines(one.line() for one in self._filtered()))
        said = None
        if self.settings.reward.command:
            requests = self.folder / "requests.jsonl"
            files.write_blocks(requests, _batch_lines(self._requests(left)))
            said = reward.run_program(self.settings.reward, self.root, requests, self.folder, self._requested)
        texts = TextSpool(self.folder)
        try:
            files.write_blocks(chosen, _batch_lines(self._chosen(self._scored(left, said), texts)))
            dropped = self._near(texts)
        finally:
            texts.close()
        files.write_blocks(target, _batch_lines(self._unlike(chosen, dropped)))

    def _filtered(self) -> Iterator[_FilteredPrompt]:
        filters = AnswerFilters(self.settings, [one.card.spec.generate.labels for one in self.outputs], self.tally)
        for one in read_prompt_answers(self.outputs):
            self.prompts += 1
            if kept := filters.left(one):
                yield _FilteredPrompt(_prompt_document(one), kept, [])
        self.without_reference = filters.without_reference
        if self.settings.reference == "match" and not filters.with_reference:
            raise SettingsError(
                "select.reference: match, but no prompt has a reference; generate answers to prompts that came with one"
            )

    def _requests(self, left: Path) -> Iterator[bytes]:
        """What the reward's program is asked."""
        for one in _read_filtered(left):
            known = {key: one.prompt[key] for key in ("id", "messages", "reference", "fields")}
            self._requested += len(one.kept)
            for kept in one.kept:
                yield _encode_line({**known, "answer": kept.answered.answer, "reasoning": kept.answered.reasoning})

    def _scored(self, left: Path, said: reward.RewardOutput | None) -> Iterator[_FilteredPrompt]:
        if said is None:
            yield from _read_filtered(left)
            return
        scores = reward.read_scores(said, self._requested)
        for one in _read_filtered(left):
            yield one._replace(scores=list(islice(scores, len(one.kept))))
        next(scores, None)  # to its end, where it counts

    def _chosen(self, scored: Iterable[_FilteredPrompt], texts: TextSpool) -> Iterator[bytes]:
        """A line for each row whose text no row before it has, with the number of its prompt."""
        known: set[bytes] = set()
        for number, one in enumerate(scored):
            for kept, score in self._best(one):
                row = self._row(one.prompt, kept, score)
                conversation = Conversation(row["messages"], row.get("tools"))
                key = deduplication.exact_key(f"{conversation.system}\0{conversation.text}")
                if key in known:
                    self.tally.drop("duplicate", one.prompt["id"], kept.answered.sample)
                    continue
                known.add(key)
                texts.add([conversation.text])
                self._signed += 1
                yield _encode_line([number, row])

    def _best(self, one: _FilteredPrompt) -> list[tuple[AcceptedAnswer, float | None]]:
        """The answers to a prompt that are taken, the best first."""
        settings, left = self.settings.reward, list[tuple[AcceptedAnswer, float | None]]()
        for kept, score in zip(one.kept, one.scores, strict=True):
            if settings.minimum is not None and score is not None and score < settings.minimum:
                self.tally.drop("reward", one.prompt["id"], kept.answered.sample, f"{score:g}")
            else:
                left.append((kept, score))
        left.sort(key=lambda pair: (-(pair[1] or 0.0) if settings.choose else 0.0, *likelihood_key(pair[0].answered)))
        for kept, _ in left[self.settings.per_prompt :]:
            self.tally.drop("not_chosen", one.prompt["id"], kept.answered.sample)
        return left[: self.settings.per_prompt]

    def _row(self, prompt: dict[str, Any], kept: AcceptedAnswer, score: float | None) -> dict[str, Any]:
        one = kept.answered
        spec = self.outputs[one.teacher].card.spec
        answer = one.answer
        if self.settings.reasoning == "keep" and one.reasoning is not None:
            begin, end = spec.generate.reasoning_marks
            answer = f"{begin}\n{one.reasoning}\n{end}\n\n{answer}"
        tools = {"tools": prompt["tools"]} if prompt["tools"] else {}
        provenance = {
            "generation": self.outputs[one.teacher].card.id,
            "model": spec.model.digest[: digests.SHORT],
            "sample": one.sample,
            "agreement": kept.agreement,
            "reward": score,
        }
        messages = [*prompt["messages"], {"role": "assistant", "content": answer}]
        return {"id": prompt["id"], "messages": messages, **tools, **prompt["fields"], PROVENANCE: provenance}

    def _near(self, texts: TextSpool) -> NDArray[np.bool_]:
        """Which of the chosen rows are almost like one before them."""
        settings, dropped = self.settings.duplicates, np.zeros(self._signed, dtype=np.bool_)
        if settings.near is None or not self._signed:
            return dropped
        signatures = deduplication.MinHashSignatures(settings)
        starts = range(0, self._signed, BLOCK_ROWS)
        parts = [signatures.of([texts[row] for row in _block_range(start, self._signed)]) for start in starts]
        rank = np.arange(self._signed, dtype=np.int64)
        for cluster in deduplication.cluster_duplicates(
            np.concatenate(parts), rank, texts.__getitem__, settings, lambda _: None
        ):
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
                yield _encode_line(row)


def _block_range(start: int, end: int) -> range:
    return range(start, min(start + BLOCK_ROWS, end))


def _prompt_document(one: PromptAnswers) -> dict[str, Any]:
    """What rows and the reward's program need of a prompt."""
    prompt = one.prompt
    return {
        "id": prompt.id,
        "messages": prompt.question.messages,
        "tools": prompt.question.tools,
        "reference": prompt.reference,
        "fields": {name: value for name, value in prompt.fields.items() if name != "id"},
    }


def _encode_line(value: Any) -> bytes:
    """JSON with its keys in their order, for a template may write a tool call as it is given."""
    return (json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _read_filtered(left: Path) -> Iterator[_FilteredPrompt]:
    with left.open("rb") as stream:
        yield from map(_FilteredPrompt.of, stream)


def _batch_lines(lines: Iterator[bytes]) -> Iterator[list[bytes]]:
    while block := list(islice(lines, BLOCK_ROWS)):
        yield block
