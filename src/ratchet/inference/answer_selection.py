"""Selects training rows from outputs of `ratchet generate`: verifies the outputs, filters and scores their answers.

A row is a prompt with an answer, or with a chosen and a rejected answer (pair_selection.py).

Selection runs in passes over files: filters, scores, choice within a prompt, duplicates. Memory holds one prompt with
its answers, and for each selected row what duplicate detection needs: 16 bytes of its text's digest (about 100
bytes including the set that holds the digests), 8 bytes for each MinHash band, and up to 9 more bytes for each band
while clusters are computed. For a million rows this is half a gigabyte by default, and a fifth of half a gigabyte
without detection of near-duplicates.
"""

import contextlib
import json
import math
import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ratchet import redaction
from ratchet.config.extensions import compute_extension_scores, describe_extension, load_extension
from ratchet.config.select import NAMED_FORMATS, RewardSettings, Select
from ratchet.config.settings import Settings
from ratchet.data import deduplication
from ratchet.data.conversation import Conversation, format_pair
from ratchet.data.row_table import TextSpool
from ratchet.data.schema_detection import find_text_flaw
from ratchet.data.splits import normalize_text
from ratchet.errors import DamagedFileError, DataError, SettingsError
from ratchet.inference import output, prompts
from ratchet.inference.pair_selection import PairChooser, ScoredAnswer
from ratchet.inference.prompts import Prompt, PromptSource
from ratchet.inference.spec import PROMPTS_KIND, GenerationCard, GenerationPaths
from ratchet.storage import digests, files
from ratchet.storage.files import reject_constant
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import PROVENANCE, FilterReport, PairScore, PairSelection, TeacherGeneration

_KEY = "select.reward.command"
STDERR_LINES = 5
STDERR_BYTES = 2**16
"""Number of bytes at the end of standard error that are kept for the error message."""
STDERR_LINE_CHARACTERS = 400
"""Maximum number of characters of a line of standard error in the error message."""

BYTES_PER_ANSWER, EXTRA_BYTES = 128, 2**16
"""The program may write BYTES_PER_ANSWER bytes for each answer, and EXTRA_BYTES in addition."""

FUNCTION_BATCH = 256
"""Number of answers per call of a reward function."""

READ_BYTES = 2**20
"""Number of bytes per read; no pipe holds more (pipe(7)), so one read empties a pipe."""
POLL_INTERVAL_S = 0.1
"""Seconds between two checks whether the program has ended; its child may still hold the pipes then."""

FILTER_NAMES = (
    "finish", "invalid_text", "length", "format", "probability", "no_final_answer", "reference", "agreement",
    "minority", "reward", "not_selected", "duplicate", "near_duplicate",
)  # fmt: skip
"""The filters, in the order in which they are applied."""
MAX_EXAMPLES = 3
MAX_EXAMPLE_CHARACTERS = 100
"""Maximum number of characters of an example."""
MATCH_TIMEOUT_S = 20.0
"""Time limit in seconds of a regular expression for one answer; with nested repetition, matching can take years."""
BLOCK_ROWS = 1000
RESERVED_FIELDS, RESERVED_PAIR_FIELDS = (
    ("messages", "tools", PROVENANCE), ("prompt", "chosen", "rejected", "tools", PROVENANCE)
)  # fmt: skip
"""Keys of a row, and of a pair, that generate.extra_fields may not contain."""
JUDGED_PROMPTS = 64
"""Number of prompts whose answers the judge compares at once."""


class TeacherAnswer(NamedTuple):
    """One answer to a prompt."""

    output_index: int
    """Index of the output that contains the answer."""
    sample: int
    text: str
    """The answer without its reasoning."""
    reasoning: str | None
    finish: str
    mean_log_probability: float | None
    """Mean log-probability, in nats, of the answer's tokens; None if unknown."""
    probability: float | None
    """Probability of the answer among generate.labels, else the geometric mean over its tokens; None if unknown."""


class PromptAnswers(NamedTuple):
    """A prompt with all its answers."""

    prompt: Prompt
    answers: list[TeacherAnswer]


@dataclass(frozen=True)
class GenerationOutput:
    """A verified output of `ratchet generate`."""

    path: Path
    card: GenerationCard
    prompts: Callable[[], Iterator[Prompt]]

    @property
    def teacher(self) -> TeacherGeneration:
        """The model and its settings, for the selection card."""
        spec = self.card.spec
        return TeacherGeneration(
            generation=self.card.id,
            kind=spec.model.kind,
            model_digest=spec.model.digest,
            weight_format=spec.model.weight_format,
            prompts_digest=spec.prompts_digest,
            answers_digest=self.card.output,
            temperature=spec.generate.temperature,
            samples=spec.generate.samples,
        )


def open_output(path: Path, layout: ProjectLayout, settings: Settings, prompts_file: Path | None) -> GenerationOutput:
    """Open an output with its prompts.

    Args:
        path: the output.
        layout: layout of the project that generated it.
        settings: settings of the project, which determine how a file of prompts is read.
        prompts_file: the file of prompts, needed if the directory of the generation was deleted.

    Raises:
        SettingsError: the file does not exist, or is not an output of `ratchet generate`.
        DamagedFileError: the file changed since it was written.
        DataError: the prompts are missing or differ.
    """
    card = output.read_card(path)
    if digests.hash_file(path) != card.output:
        raise DamagedFileError(
            f"{path}: the file changed since `ratchet generate` wrote it; remove it and run `ratchet generate` again "
            "(saved answers are reused)"
        )
    return GenerationOutput(path, card, _find_prompts(path, card, layout, settings, prompts_file))


def _find_prompts(
    path: Path, card: GenerationCard, layout: ProjectLayout, settings: Settings, prompts_file: Path | None
) -> Callable[[], Iterator[Prompt]]:
    folder = GenerationPaths(layout.generations / card.id).prompts
    try:
        files.verify_sealed(folder, PROMPTS_KIND)
    except DamagedFileError as error:
        if prompts_file is None:
            problem = f"are damaged ({error})" if folder.exists() else f"are missing (no {folder})"
            raise DataError(
                f"{path}: the prompts of generation {card.id} {problem}; name their original file with --prompts"
            ) from None
    else:
        return lambda: prompts.read_prompts(folder)
    update = {"prompt_column": settings.generate.prompt_column, "skip_invalid": settings.generate.skip_invalid}
    prompt_settings = settings.model_copy(update={"generate": card.spec.generate.model_copy(update=update)})
    source = PromptSource(prompts_file.absolute(), prompt_settings)
    if source.measure()[1] != card.spec.prompts_digest:
        raise DataError(
            f"--prompts {prompts_file}: not the prompts of generation {card.id} ({path.name}); use the original file, "
            "and the original generate.prompt_column and prepare.system"
        )
    return source.prompts


def read_prompt_answers(outputs: Sequence[GenerationOutput]) -> Iterator[PromptAnswers]:
    """Yield every prompt with its answers from all outputs for the same prompts. One prompt is in memory at a time.

    Raises:
        DamagedFileError: an output does not have the answers that its card describes.
    """
    by_prompts: dict[str, list[int]] = {}
    for number, generation in enumerate(outputs):
        by_prompts.setdefault(generation.card.spec.prompts_digest, []).append(number)
    for numbers in by_prompts.values():
        streams = {number: output.read_records(outputs[number].path, outputs[number].card) for number in numbers}
        for prompt in outputs[numbers[0]].prompts():
            answers = [
                answer
                for number in numbers
                for answer in _read_answers(outputs[number], number, prompt, streams[number])
            ]
            yield PromptAnswers(prompt, answers)
        for number, records in streams.items():
            if next(records, None) is not None:
                raise DamagedFileError(
                    f"{outputs[number].path}: more answers than prompts; run its `ratchet generate` again"
                )


def _read_answers(
    generation: GenerationOutput, number: int, prompt: Prompt, records: Iterator[dict[str, Any]]
) -> Iterator[TeacherAnswer]:
    for sample in range(generation.card.spec.generate.samples):
        record: dict[str, Any] = next(records, {})
        record_key = (record.get("id"), record.get("prompt_digest"), record.get("sample"))
        if record_key != (prompt.id, prompt.digest, sample):
            raise DamagedFileError(
                f"{generation.path}: sample {sample} of prompt {prompt.id!r} is not at its position; run its `ratchet "
                "generate` again"
            )
        nats, text = record["mean_log_probability"], record["answer"]
        probability = _label_probability(record.get(output.LABEL_LOG_PROBABILITIES), text, nats)
        yield TeacherAnswer(number, sample, text, record["reasoning"], record["finish"], nats, probability)


def _label_probability(labels: Mapping[str, float | None] | None, text: str, nats: float | None) -> float | None:
    """Return the softmax over the labels if all are known and the answer is one of them, else exp(nats)."""
    known = [value for value in (labels or {}).values() if value is not None]
    if labels and len(known) == len(labels) and (own := labels.get(text)) is not None:
        return math.exp(own - max(known)) / math.fsum(math.exp(value - max(known)) for value in known)
    return None if nats is None else math.exp(nats)


# Filters.
#
# The vote is self-consistency (Wang et al. 2022, arXiv 2203.11171): among the samples of a prompt, the final answer
# that most of them give is probably correct. Comparing with a reference is rejection sampling (Yuan et al. 2023, arXiv
# 2308.01825; Zelikman et al. 2022, arXiv 2203.14465). Every removed answer is counted.


class FilterTally:
    """Counts the answers that each filter removed, with the first few as examples."""

    def __init__(self) -> None:
        self.answers = 0
        self._dropped: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {name: [] for name in FILTER_NAMES}

    def drop(self, name: str, id: str, sample: int, detail: str = "") -> None:
        """Record a removed answer.

        Args:
            name: the filter.
            id: the prompt.
            sample: number of the sample.
            detail: more about the answer, for the examples.
        """
        self._dropped[name] += 1
        if len(self._examples[name]) < MAX_EXAMPLES:
            text = f"{id}, sample {sample}" + (f": {' '.join(detail.split())}" if detail else "")
            self._examples[name].append(
                text if len(text) <= MAX_EXAMPLE_CHARACTERS else text[: MAX_EXAMPLE_CHARACTERS - 3] + "..."
            )

    @property
    def filters(self) -> tuple[FilterReport, ...]:
        """The reports of all filters, in order."""
        left, reports = self.answers, []
        for name in FILTER_NAMES:
            left -= self._dropped[name]
            reports.append(
                FilterReport(name=name, dropped=self._dropped[name], left=left, examples=tuple(self._examples[name]))
            )
        return tuple(reports)


class AcceptedAnswer(NamedTuple):
    """An answer that passed the filters."""

    answer: TeacherAnswer
    agreement: float
    """Fraction of the samples that have the same final answer."""
    is_right: bool | None
    """Whether the final answer is that of the reference; None without a reference."""


class AnswerFilters:
    """The filters that need only one prompt with its answers.

    Args:
        settings: section `select`.
        labels: generate.labels of each output.
        tally: counts the removed answers.
        for_pairs: keep wrong answers, and those without a final answer, because pairs reject them.
    """

    def __init__(
        self, settings: Select, labels: Sequence[Sequence[str]], tally: FilterTally, for_pairs: bool = False
    ) -> None:
        self._settings, self._tally, self._for_pairs = settings, tally, for_pairs
        self._labels = [frozenset(names) for names in labels]
        pattern = settings.answer_format if settings.answer_format not in NAMED_FORMATS else None
        self._format = re.compile(pattern) if pattern else None
        self._final = re.compile(settings.final_answer_pattern) if settings.final_answer_pattern else None
        self.without_reference = 0
        self.with_reference = 0

    def apply(self, prompt_answers: PromptAnswers) -> list[AcceptedAnswer]:
        """Return the answers that pass all filters, in order.

        Raises:
            SettingsError: a regular expression takes too long.
        """
        self._tally.answers += len(prompt_answers.answers)
        reference = prompt_answers.prompt.reference
        expected = None if reference is None else (self._final_answer(reference) or self._comparison_key(reference))
        self.without_reference += expected is None
        self.with_reference += expected is not None
        must_match = self._settings.reference == "match" and not self._for_pairs
        passed: list[tuple[TeacherAnswer, str]] = []
        for answer in prompt_answers.answers:
            reason, detail, final = self._check(answer)
            if not reason and must_match and expected not in (None, final):
                reason, detail = "reference", f"{final!r} is not {expected!r}"
            if reason:
                self._tally.drop(reason, prompt_answers.prompt.id, answer.sample, detail)
            else:
                passed.append((answer, final))
        return self._apply_vote(prompt_answers, passed, expected)

    def _check(self, answer: TeacherAnswer) -> tuple[str, str, str]:
        """Return the filter that removes an answer (or ""), a detail for the report, and the final answer ("" if it has
        none)."""
        settings, text = self._settings, answer.text
        if answer.finish not in settings.finish_reasons:
            return "finish", answer.finish, ""
        if problem := find_text_flaw(text) or find_text_flaw(answer.reasoning or ""):
            return "invalid_text", problem, ""
        if len(text.strip()) < settings.min_characters or len(text) > (settings.max_characters or len(text)):
            return "length", f"{len(text):,} characters", ""
        if not self._has_valid_format(answer):
            return "format", text, ""
        minimum = settings.min_probability
        if minimum is not None and (answer.probability is None or answer.probability < minimum):
            return "probability", "unknown" if answer.probability is None else f"{answer.probability:.4f}", ""
        final = self._final_answer(text)
        return ("no_final_answer", text, "") if final is None and not self._for_pairs else ("", "", final or "")

    def _has_valid_format(self, answer: TeacherAnswer) -> bool:
        if self._settings.answer_format == "labels":
            return answer.text in self._labels[answer.output_index]
        if self._settings.answer_format == "json":
            return _normalize_json(answer.text) is not None
        if self._format is None:
            return True
        with _limit_match_time("answer_format", self._format.pattern):
            return self._format.fullmatch(answer.text) is not None

    def _final_answer(self, text: str) -> str | None:
        """Return the normalized final answer of a text; None if it has none."""
        if self._final is None:
            return self._comparison_key(text)
        with _limit_match_time("final_answer_pattern", self._final.pattern):
            last = deque(self._final.finditer(text), maxlen=1)
        if not last:
            return None
        final = last[0][1] if self._final.groups else last[0][0]
        return None if final is None else self._comparison_key(final)

    def _comparison_key(self, text: str) -> str:
        parsed = _normalize_json(text) if self._settings.answer_format == "json" else None
        return parsed or normalize_text(text)

    def _apply_vote(
        self, prompt_answers: PromptAnswers, passed: Sequence[tuple[TeacherAnswer, str]], expected: str | None
    ) -> list[AcceptedAnswer]:
        total = len(prompt_answers.answers)
        votes = Counter(final for _, final in passed)
        minimum = self._settings.min_agreement
        candidates = [
            AcceptedAnswer(answer, round(votes[final] / total, 4), None if expected is None else final == expected)
            for answer, final in passed
        ]
        if minimum is None or not passed:
            return candidates
        _, winner = min(((-votes[final], *likelihood_key(answer)), final) for answer, final in passed)
        has_majority = votes[winner] >= minimum * total - 1e-9
        accepted = []
        for candidate, (answer, final) in zip(candidates, passed, strict=True):
            if has_majority and final == winner:
                accepted.append(candidate)
            else:
                detail = f"{votes[final]} of {total} answers are {final!r}"
                name = "minority" if has_majority else "agreement"
                self._tally.drop(name, prompt_answers.prompt.id, answer.sample, detail)
        return accepted


def likelihood_key(answer: TeacherAnswer) -> tuple[float, int, int]:
    """Return a sort key: the likeliest answer first, then by output and sample."""
    nats = answer.mean_log_probability
    return (float("inf") if nats is None else -nats), answer.output_index, answer.sample


def _normalize_json(text: str) -> str | None:
    """Return canonical JSON; None if the text is not valid JSON (RFC 8259 does not allow NaN)."""
    try:
        return digests.canonical_json(json.loads(text, parse_constant=reject_constant))
    except (ValueError, RecursionError):
        return None


@contextmanager
def _limit_match_time(name: str, pattern: str) -> Iterator[None]:
    """Raise SettingsError if matching takes too long; a signal handler raises it, because signals interrupt `re`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SettingsError(
            f"select.{name}: {pattern!r} takes more than {MATCH_TIMEOUT_S:g} s on one answer; write it without a "
            "repetition inside a repetition"
        )

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MATCH_TIMEOUT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)


# Scores by the user's reward: a program that reads JSON lines, or a function of an installed package.
#
# The program reads its input from a file, so that program and Ratchet never wait for each other. The program is not
# trusted: it gets an environment without secrets, a time limit, and a limit on its output. Ratchet kills the program
# with all its children. It cannot find children that start a session of their own (setsid(2), a daemon).


class RewardOutput(NamedTuple):
    """The output of a reward."""

    scores: Path
    """File with the scores, one number per line."""
    stderr_tail: bytes
    """The end of the program's standard error; empty for a function."""


def fingerprint_command(settings: RewardSettings, root: Path) -> dict[str, str]:
    """Return the SHA-256 of each file that the command names, except a program outside the project."""
    project_dir = root.resolve()
    return {
        word: digests.hash_file(root / word)
        for number, word in enumerate(settings.command)
        if (root / word).is_file() and (number or (root / word).resolve().is_relative_to(project_dir))
    }


def fingerprint(settings: RewardSettings, root: Path) -> dict[str, str]:
    """Identify the reward: the files of its command, or the package and version of its function."""
    if settings.function is None:
        return fingerprint_command(settings, root)
    load_extension("ratchet.rewards", settings.function, "select.reward.function")
    return {"function": describe_extension("ratchet.rewards", settings.function)}


def run_program(settings: RewardSettings, root: Path, requests: Path, folder: Path, count: int) -> RewardOutput:
    """Score answers with a program.

    Args:
        settings: select.reward.
        root: the project's directory, which is the working directory of the program.
        requests: file with a JSON line for each answer.
        folder: directory for the output.
        count: number of answers.

    Raises:
        SettingsError: the program cannot be started, fails, takes too long, or writes too much.
    """
    scores = folder / "scores"
    with requests.open("rb") as stdin, scores.open("wb") as out:
        try:
            child = subprocess.Popen(
                settings.command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root,
                env=redaction.build_secret_free_environment(), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise SettingsError(f"{_KEY}: {settings.command[0]}: cannot be started ({error.strerror})") from None
        with child:
            try:
                stderr_tail = _read_output(child, settings.timeout_s, out, count)
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)  # the program and its children
        code = child.returncode
    if code:
        reason = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        raise SettingsError(f"{_KEY}: the program {reason}{_format_stderr(stderr_tail)}")
    return RewardOutput(scores, stderr_tail)


def _read_output(child: "subprocess.Popen[bytes]", timeout_s: float, out: BinaryIO, count: int) -> bytes:
    """Copy the program's output to `out` until it ends; return the end of its standard error."""
    deadline_s, remaining_bytes, stderr_tail = time.monotonic() + timeout_s, EXTRA_BYTES + count * BYTES_PER_ANSWER, b""
    with selectors.DefaultSelector() as streams:
        for stream in filter(None, (child.stdout, child.stderr)):
            streams.register(stream, selectors.EVENT_READ)
        while True:
            has_ended = (
                child.poll() is not None
            )  # checked before the read, so that the last read gets the remaining output
            remaining_s = deadline_s - time.monotonic()
            for key, _ in streams.select(0 if has_ended else max(0.0, min(POLL_INTERVAL_S, remaining_s))):
                data = os.read(key.fd, READ_BYTES)
                if not data:
                    streams.unregister(key.fileobj)
                elif key.fileobj is child.stderr:
                    stderr_tail = (stderr_tail + data)[-STDERR_BYTES:]
                elif len(data) > remaining_bytes:
                    raise SettingsError(
                        f"{_KEY}: the program wrote more than the numbers for {count:,} answers can need; expected one "
                        f"number per line, in the order of the answers{_format_stderr(stderr_tail)}"
                    )
                else:
                    remaining_bytes -= out.write(data)
            if has_ended:
                return stderr_tail
            if remaining_s <= 0:
                raise SettingsError(
                    f"{_KEY}: the program took more than {timeout_s:g} s (select.reward.timeout_s)"
                    f"{_format_stderr(stderr_tail)}"
                )


def run_function(name: str, requests: Path, folder: Path) -> RewardOutput:
    """Score answers with a reward of an installed package, in this process.

    Args:
        name: select.reward.function.
        requests: a JSON line for each answer.
        folder: directory for the scores.

    Raises:
        SettingsError: the package is not installed, the function fails, or does not return a finite number for each
            answer.
    """
    key = "select.reward.function"
    function = load_extension("ratchet.rewards", name, key)
    path = folder / "scores"
    with requests.open(encoding="utf-8") as stream, path.open("w", encoding="utf-8") as out:
        while lines := list(islice(stream, FUNCTION_BATCH)):
            rows = [json.loads(line) for line in lines]
            prompts = [row["messages"][-1]["content"] for row in rows]
            answers, references = [row["answer"] for row in rows], [row["reference"] for row in rows]
            scores = compute_extension_scores(function, name, key, prompts, answers, references)
            out.writelines(f"{score!r}\n" for score in scores)
    return RewardOutput(path, b"")


def read_scores(output: RewardOutput, count: int) -> Iterator[float]:
    """Yield the scores of all answers.

    Raises:
        SettingsError: the number of lines is not `count`, or a line is not a finite number.
    """
    number = 0
    with output.scores.open(encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                score = float(line)
            except ValueError:
                score = math.nan
            if not math.isfinite(score):
                raise SettingsError(
                    f"{_KEY}: line {number} of the output: found {_format_line(line)}, expected a number"
                )
            if number <= count:
                yield score
    if number != count:
        raise SettingsError(
            f"{_KEY}: the program wrote {number:,} numbers for {count:,} answers; expected one number per line, in the "
            f"order of the answers{_format_stderr(output.stderr_tail)}"
        )


def _format_line(line: str) -> str:
    return repr(redaction.redact(line.strip())[:80])


def _format_stderr(stderr_tail: bytes) -> str:
    """Format standard error for a message; secrets are removed first, because half a secret is not found."""
    lines = [line.rstrip() for line in redaction.redact(stderr_tail.decode(errors="replace")).splitlines()]
    if len(stderr_tail) == STDERR_BYTES and len(lines) > 1:
        del lines[0]  # incomplete
    last = [line[-STDERR_LINE_CHARACTERS:] for line in lines if line][-STDERR_LINES:]
    return "; its standard error:\n" + "\n".join(f"  {line}" for line in last) if last else "; no standard error"


# Selection.


class JudgedPrompt(NamedTuple):
    """A prompt and the answers to it that a judge compares."""

    conversation: Conversation
    """The messages of the prompt, and an empty answer."""
    answers: list[str]
    reference: str | None


class _FilteredPrompt(NamedTuple):
    """A prompt with its accepted answers and their scores."""

    prompt: dict[str, Any]
    accepted: list[AcceptedAnswer]
    scores: list[float | None]

    def to_line(self) -> bytes:
        """Return a line of JSON, without the scores, which are computed later."""
        accepted = [[*item.answer, item.agreement, item.is_right] for item in self.accepted]
        return output.encode_line({"prompt": self.prompt, "accepted": accepted})

    def to_judged(self) -> JudgedPrompt:
        """Return prompt and answers for a judge."""
        messages = [*self.prompt["messages"], {"role": "assistant", "content": ""}]
        texts = [one.answer.text for one in self.accepted]
        return JudgedPrompt(Conversation(messages, self.prompt["tools"]), texts, self.prompt["reference"])

    @classmethod
    def from_line(cls, line: bytes) -> "_FilteredPrompt":
        """Read the output of `to_line`."""
        document = json.loads(line)
        accepted = [
            AcceptedAnswer(TeacherAnswer(*parts), agreement, is_right)
            for *parts, agreement, is_right in document["accepted"]
        ]
        return cls(document["prompt"], accepted, [None] * len(accepted))


@dataclass
class AnswerSelector:
    """Selects rows from opened outputs.

    Args:
        settings: section `select`.
        outputs: the outputs.
        root: the project's directory.
        folder: folder for temporary files.
        pairs_by: what decides about pairs of answers. None: a row has one answer.
        judge: returns the scores of the answers to prompts, if `pairs_by` is judge.
    """

    settings: Select
    outputs: Sequence[GenerationOutput]
    root: Path
    folder: Path
    pairs_by: PairScore | None = None
    judge: Callable[[Sequence[JudgedPrompt]], Sequence[Sequence[float | None]]] | None = None

    def __post_init__(self) -> None:
        self.tally = FilterTally()
        limit = self.settings.max_per_prompt
        self._chooser = PairChooser(self.pairs_by, self.settings.pairs, limit) if self.pairs_by else None
        self.prompts = self.without_reference = self.rows = self.prompts_with_rows = 0
        self._request_count = self._row_count = 0
        """Number of answers to score, and of selected rows before near-duplicates are removed."""

    def write(self, target: Path) -> None:
        """Write the selected rows, in the order of the prompts.

        Raises:
            SettingsError: the reward or the judge fails, or no prompt has a reference although one is needed.
            DamagedFileError: an output is damaged.
            OSError: a file cannot be written.
        """
        filtered, selected = self.folder / "filtered.jsonl", self.folder / "selected.jsonl"
        files.write_blocks(filtered, output.batch_lines(item.to_line() for item in self._filter()))
        reward_output = None
        if self.pairs_by in (None, "reward") and (self.settings.reward.command or self.settings.reward.function):
            requests = self.folder / "requests.jsonl"
            files.write_blocks(requests, output.batch_lines(self._reward_requests(filtered)))
            if self.settings.reward.function is None:
                reward_output = run_program(self.settings.reward, self.root, requests, self.folder, self._request_count)
            else:
                reward_output = run_function(self.settings.reward.function, requests, self.folder)
        texts = TextSpool(self.folder)
        try:
            scored = self._read_scored(filtered, reward_output)
            files.write_blocks(selected, output.batch_lines(self._selected_rows(scored, texts)))
            dropped = self._find_near_duplicates(texts)
        finally:
            texts.close()
        files.write_blocks(target, output.batch_lines(self._unique_rows(selected, dropped)))

    @property
    def pairs(self) -> PairSelection | None:
        """Counts of pairs; None if a row has one answer."""
        return None if self._chooser is None else self._chooser.report

    def _filter(self) -> Iterator[_FilteredPrompt]:
        labels = [generation.card.spec.generate.labels for generation in self.outputs]
        filters = AnswerFilters(self.settings, labels, self.tally, self.pairs_by is not None)
        for prompt_answers in read_prompt_answers(self.outputs):
            self.prompts += 1
            accepted = filters.apply(prompt_answers)
            if accepted or self.pairs_by is not None:
                yield _FilteredPrompt(_prompt_document(prompt_answers.prompt), accepted, [])
        if self.pairs_by == "reference" or (self.pairs_by is None and self.settings.reference == "match"):
            self.without_reference = filters.without_reference
            if not filters.with_reference:
                key = "select.pairs.by: found reference" if self.pairs_by else "select.reference: found match"
                raise SettingsError(
                    f"{key}, but no prompt has a reference; generate answers to prompts with references"
                )

    def _reward_requests(self, filtered: Path) -> Iterator[bytes]:
        """Yield the input lines of the reward, one per answer."""
        for item in _read_filtered(filtered):
            prompt = {key: item.prompt[key] for key in ("id", "messages", "reference", "fields")}
            self._request_count += len(item.accepted)
            for accepted in item.accepted:
                yield output.encode_line(
                    {**prompt, "answer": accepted.answer.text, "reasoning": accepted.answer.reasoning}
                )

    def _read_scored(self, filtered: Path, reward_output: RewardOutput | None) -> Iterator[_FilteredPrompt]:
        if self.judge is not None:
            items = _read_filtered(filtered)
            while batch := list(islice(items, JUDGED_PROMPTS)):
                judged = self.judge([item.to_judged() for item in batch])
                yield from (item._replace(scores=[*scores]) for item, scores in zip(batch, judged, strict=True))
            return
        if reward_output is None:
            for item in _read_filtered(filtered):
                is_scored = self.pairs_by == "reference" and item.prompt["reference"] is not None
                yield item._replace(scores=[float(one.is_right or 0) for one in item.accepted]) if is_scored else item
            return
        scores = read_scores(reward_output, self._request_count)
        for item in _read_filtered(filtered):
            yield item._replace(scores=list(islice(scores, len(item.accepted))))
        next(scores, None)  # runs the check after the last score

    def _selected_rows(self, scored: Iterable[_FilteredPrompt], texts: TextSpool) -> Iterator[bytes]:
        """Yield a line [number of the prompt, row] for each selected row that is not an exact duplicate."""
        keys: set[bytes] = set()
        for number, item in enumerate(scored):
            for row in self._rows(item) if self._chooser is None else self._pairs(item, self._chooser):
                conversation = _row_conversation(row)
                key = deduplication.exact_key(f"{conversation.system}\0{conversation.text}")
                if key in keys:
                    self._drop_duplicate("duplicate", row)
                    continue
                keys.add(key)
                texts.add([conversation.text])
                self._row_count += 1
                yield output.encode_line([number, row])

    def _drop_duplicate(self, name: str, row: dict[str, Any]) -> None:
        if self._chooser is not None:
            self._chooser.duplicates += 1
        else:
            self.tally.drop(name, row["id"], row[PROVENANCE]["sample"])

    def _rows(self, item: _FilteredPrompt) -> Iterator[dict[str, Any]]:
        """Yield the rows of a prompt, each with one answer."""
        for accepted, score in self._select_best(item):
            origin = self._describe_origin(accepted) | {"agreement": accepted.agreement, "reward": score}
            answer = {"role": "assistant", "content": self._answer_text(accepted)}
            messages = [*item.prompt["messages"], answer]
            tools = {"tools": item.prompt["tools"]} if item.prompt["tools"] else {}
            yield {
                "id": item.prompt["id"], "messages": messages, **tools, **item.prompt["fields"], PROVENANCE: origin
            }  # fmt: skip

    def _pairs(self, item: _FilteredPrompt, chooser: PairChooser) -> Iterator[dict[str, Any]]:
        """Yield the pairs of a prompt."""
        pairs: list[tuple[int, int]] = []
        if self.pairs_by != "reference" or item.prompt["reference"] is not None:
            scored = zip(item.accepted, item.scores, strict=True)
            pairs = chooser.choose(
                item.prompt["id"], [ScoredAnswer(self._answer_text(a), score) for a, score in scored]
            )
        used = {index for pair in pairs for index in pair}
        for index, accepted in enumerate(item.accepted):
            if index not in used:
                self.tally.drop("not_selected", item.prompt["id"], accepted.answer.sample)
        for pair in pairs:
            chosen, rejected = (self._answer_text(item.accepted[index]) for index in pair)
            origin: dict[str, Any] = {"by": self.pairs_by}
            for name, index in zip(("chosen", "rejected"), pair, strict=True):
                origin[name] = self._describe_origin(item.accepted[index]) | {"score": item.scores[index]}
            row = format_pair(item.prompt["messages"], chosen, rejected, item.prompt["tools"])
            yield {"id": item.prompt["id"], **row, **item.prompt["fields"], PROVENANCE: origin}

    def _select_best(self, item: _FilteredPrompt) -> list[tuple[AcceptedAnswer, float | None]]:
        """Return the selected answers to a prompt, best first."""
        settings, candidates = self.settings.reward, list[tuple[AcceptedAnswer, float | None]]()
        for accepted, score in zip(item.accepted, item.scores, strict=True):
            if settings.min_score is not None and score is not None and score < settings.min_score:
                self.tally.drop("reward", item.prompt["id"], accepted.answer.sample, f"{score:g}")
            else:
                candidates.append((accepted, score))

        def sort_key(pair: tuple[AcceptedAnswer, float | None]) -> tuple[float, float, int, int]:
            accepted, score = pair
            return (-(score or 0.0) if settings.select_best else 0.0, *likelihood_key(accepted.answer))

        candidates.sort(key=sort_key)
        for accepted, _ in candidates[self.settings.max_per_prompt :]:
            self.tally.drop("not_selected", item.prompt["id"], accepted.answer.sample)
        return candidates[: self.settings.max_per_prompt]

    def _answer_text(self, accepted: AcceptedAnswer) -> str:
        """Return the text that is trained on: the answer, with its reasoning if select.reasoning is keep."""
        answer = accepted.answer
        if self.settings.reasoning == "drop" or answer.reasoning is None:
            return answer.text
        begin, end = self.outputs[answer.output_index].card.spec.generate.reasoning_tags
        return f"{begin}\n{answer.reasoning}\n{end}\n\n{answer.text}"

    def _describe_origin(self, accepted: AcceptedAnswer) -> dict[str, Any]:
        card = self.outputs[accepted.answer.output_index].card
        model = card.spec.model.digest[: digests.SHORT]
        return {"generation": card.id, "model": model, "sample": accepted.answer.sample}

    def _find_near_duplicates(self, texts: TextSpool) -> NDArray[np.bool_]:
        """Return a mask of the selected rows that are near-duplicates of an earlier row."""
        settings, dropped = self.settings.deduplication, np.zeros(self._row_count, dtype=np.bool_)
        if settings.jaccard_threshold is None or not self._row_count:
            return dropped
        signatures = deduplication.MinHashSignatures(settings)
        starts = range(0, self._row_count, BLOCK_ROWS)
        parts = [signatures.band_keys([texts[row] for row in _block_range(start, self._row_count)]) for start in starts]
        for cluster in deduplication.cluster_duplicates(
            np.concatenate(parts).T, ~dropped, lambda rows: rows, texts.__getitem__, settings, lambda _: None
        ):
            dropped[list(cluster.dropped)] = True
        return dropped

    def _unique_rows(self, selected: Path, dropped: NDArray[np.bool_]) -> Iterator[bytes]:
        """Yield the selected rows that are not near-duplicates."""
        last = -1
        with selected.open("rb") as stream:
            for line, is_dropped in zip(stream, dropped, strict=True):
                number, row = json.loads(line)
                if is_dropped:
                    self._drop_duplicate("near_duplicate", row)
                    continue
                if self._chooser is not None:
                    self._chooser.count(*(row[name][0]["content"] for name in ("chosen", "rejected")))
                self.rows += 1
                self.prompts_with_rows += number != last
                last = number
                yield output.encode_line(row)


def _block_range(start: int, end: int) -> range:
    return range(start, min(start + BLOCK_ROWS, end))


def _row_conversation(row: dict[str, Any]) -> Conversation:
    if "messages" in row:
        return Conversation(row["messages"], row.get("tools"))
    return Conversation([*row["prompt"], *row["chosen"]], row.get("tools"), rejected=row["rejected"][0])


def _prompt_document(prompt: Prompt) -> dict[str, Any]:
    """Return the parts of a prompt that rows and the reward need."""
    return {
        "id": prompt.id,
        "messages": prompt.conversation.messages,
        "tools": prompt.conversation.tools,
        "reference": prompt.reference,
        "fields": {name: value for name, value in prompt.fields.items() if name != "id"},
    }


def _read_filtered(path: Path) -> Iterator[_FilteredPrompt]:
    with path.open("rb") as stream:
        yield from map(_FilteredPrompt.from_line, stream)
