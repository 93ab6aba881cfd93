"""Pairs of generated answers put to a judge behind an endpoint, each in both orders; replies are kept as they come."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ratchet import digest
from ratchet.config import Settings
from ratchet.config_evaluation import Judge as Wanted
from ratchet.evaluation import judge_figures, judge_rubric
from ratchet.evaluation.examination import TOLD_EVERY_S, Progress, Result
from ratchet.evaluation.judge_figures import Judged, Preferred
from ratchet.evaluation.rows import TestRows
from ratchet.evaluation.store import ScoreStore
from ratchet.layout import Layout
from ratchet.records_evaluation import Judgements, Preference, Who
from ratchet.runtimes.endpoint import Asked, Endpoint, Sampling, Served

Reply = Mapping[str, Any]
"""What is kept of a reply: text, reasoning, finish, prompt_tokens, tokens, tries."""
Lines = dict[Who, list[dict[str, Any]]]
"""Of each opponent: a line for each row, as stage evaluate writes it."""


@dataclass(frozen=True)
class _Question:
    """A row's answers in one order."""

    key: str
    messages: list[dict[str, Any]]


@dataclass(frozen=True)
class Judge:
    """A judge that is there and has its rubric."""

    wanted: Wanted
    rubric: str
    endpoint: Endpoint
    served: Served
    store: ScoreStore

    @classmethod
    def of(cls, layout: Layout, settings: Settings) -> "Judge | None":
        """The judge of these settings; None: none is asked, and nothing leaves this machine.

        Raises:
            SettingsError: no rubric, no such address or model, or the server refuses.
            EndpointError: it does not answer.
        """
        wanted = settings.evaluate.judge
        if wanted.address is None:
            return None
        rubric = judge_rubric.read(layout, wanted)
        endpoint = Endpoint(wanted.address, settings.machine.endpoint, wanted.model)
        served = endpoint.served()
        name = digest.of_json(["judge", str(endpoint.place), dict(served.identity)])[:32]
        return cls(wanted, rubric, endpoint, served, ScoreStore(layout.scores / f"judge-{name}.jsonl"))

    def compare(
        self, results: Mapping[Who, Result], rows: TestRows, progress: Progress
    ) -> tuple[Judgements, Lines, list[str]]:
        """Hold the candidate's answers against those of every opponent there is.

        Returns:
            Figures, the lines behind them, and what a reader should know.

        Raises:
            SettingsError: the server refuses a request.
            EndpointError: it does not answer any more; what it had said is kept.
        """
        candidate: Who = "candidate" if "candidate" in results else "merged"
        count = min(rows.generated, self.wanted.rows or rows.generated)
        opponents = [who for who in self.wanted.against if who in results]
        questions = {
            who: [self._questions(rows, i, results[candidate], results[who]) for i in range(count)] for who in opponents
        }
        asked = {one.key: one for by_row in questions.values() for pair in by_row for one in pair}
        replies = self._replies(asked, progress)
        figures: dict[Who, Preference] = {}
        lines: Lines = {}
        for who in opponents:
            figures[who], lines[who] = self._account(who, rows, questions[who], replies)
        notes = [*self.endpoint.notes]
        if any(len(given) > 1 for given in results[candidate].answers[:count]):
            notes.append("the judge is shown the first of each row's answers")
        notes += [
            f"evaluate.judge.against: there is no {who} to compare with" for who in self.wanted.against
            if who not in results
        ]  # fmt: skip
        return self._judgements(candidate, figures, list(replies.values())), lines, notes

    def _questions(self, rows: TestRows, row: int, ours: Result, theirs: Result) -> tuple[_Question, ...]:
        """With our answer first and with it second; none where both answers are the same."""
        answers = ours.answers[row][0], theirs.answers[row][0]
        if answers[0] == answers[1]:
            return ()
        found = []
        for order in (answers, answers[::-1]):
            messages = judge_rubric.chat(self.rubric, rows.conversations[row], order, self.wanted.reference)
            key = digest.of_json({"messages": messages, "sampling": asdict(self._sampling)})
            found.append(_Question(key, messages))
        return tuple(found)

    @property
    def _sampling(self) -> Sampling:
        drawn = self.wanted.seed if self.wanted.temperature > 0 else None
        return Sampling(self.wanted.max_tokens, self.wanted.temperature, seed=drawn)

    def _replies(self, asked: Mapping[str, _Question], progress: Progress) -> dict[str, Reply]:
        """By key: from the store, or asked now and stored before anything is made of it."""
        found = {key: reply for key in asked if (reply := self.store.get(key)) is not None}
        left = [key for key in asked if key not in found]
        progress(f"judge {self.served.name}: {len(left):,} questions, {len(found):,} answered before")
        told_s = time.monotonic()
        chats = (Asked(place, asked[key].messages, self._sampling) for place, key in enumerate(left))
        for done, (place, reply) in enumerate(self.endpoint.answers(chats), 1):
            kept = {
                "text": reply.text, "reasoning": reply.reasoning, "finish": reply.finish, "tries": reply.tries,
                "prompt_tokens": reply.prompt_tokens, "tokens": reply.tokens,
            }  # fmt: skip
            found[left[place]] = self.store.take(left[place], partial(dict, kept))
            if done < len(left) and time.monotonic() - told_s > TOLD_EVERY_S:
                progress(f"judge {self.served.name}: {done:,} of {len(left):,}")
                told_s = time.monotonic()
        return {key: found[key] for key in asked}

    def _account(
        self, who: Who, rows: TestRows, questions: Sequence[Sequence[_Question]], replies: Mapping[str, Reply]
    ) -> tuple[Preference, list[dict[str, Any]]]:
        judged, lines, unreadable = [], [], Counter[str]()
        for row, pair in enumerate(questions):
            given = [replies[one.key] for one in pair]
            verdicts = [judge_rubric.verdict(reply["text"]) for reply in given]
            unreadable.update(_why(reply) for reply, one in zip(given, verdicts, strict=True) if one is None)
            ours = [_preferred(one, order) for order, one in enumerate(verdicts)] or [None, None]
            group = rows.groups[row]
            name = f"row {row}" if group is None else f"group {group}"
            judged.append(Judged(name, (ours[0], ours[1]), equal=not pair))
            lines.append(
                {"id": rows.ids[row], "equal": not pair, "score": judged[-1].score, "preferred": ours,
                 "replies": [reply["text"] for reply in given]}
            )  # fmt: skip
        return judge_figures.preference(who, judged, unreadable, self.wanted.seed), lines

    def _judgements(self, candidate: Who, figures: dict[Who, Preference], replies: Sequence[Reply]) -> Judgements:
        sent, written = (_sum(reply[name] for reply in replies) for name in ("prompt_tokens", "tokens"))
        paid = _price(sent, self.wanted.price_in), _price(written, self.wanted.price_out)
        return Judgements(
            model=self.served.name,
            address=str(self.endpoint.place),
            rubric_digest=digest.of_bytes(self.rubric.encode()),
            candidate=candidate,
            comparisons=figures,
            questions=len(replies),
            requests=sum(int(reply["tries"]) for reply in replies),
            prompt_tokens=sent,
            tokens=written,
            cost=None if paid[0] is None or paid[1] is None else paid[0] + paid[1],
        )


def _preferred(verdict: judge_rubric.Verdict | None, order: int) -> Preferred | None:
    """Whose answer it is for; in order 0 ours is A, in order 1 it is B."""
    if verdict is None or verdict == "tie":
        return verdict
    return "candidate" if (verdict == "A") == (order == 0) else "opponent"


def _why(reply: Reply) -> str:
    """Why a reply holds no verdict."""
    if reply["finish"] == "context":
        return "longer than the judge's context"
    return "cut off at max_tokens" if reply["finish"] == "length" else "no verdict in it"


def _sum(counts: Iterator[int | None]) -> int | None:
    """None where the server has not told one of them."""
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)


def _price(tokens: int | None, million: float | None) -> float | None:
    return None if tokens is None or million is None else tokens * million / 1e6
