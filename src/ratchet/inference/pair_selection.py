"""Chooses pairs of a better and a worse answer to the same prompt, for preference tuning."""

from collections.abc import Sequence
from typing import NamedTuple

from ratchet.config.select import PairSettings
from ratchet.storage import digests
from ratchet.storage.records.data import PairScore, PairSelection

SCORE_DIGITS = 9
"""Differences of scores are rounded to this number of decimals, so that sums in another order are equal."""


class ScoredAnswer(NamedTuple):
    """Text of an answer with its score; None if it has none, because the judge's verdict could not be read."""

    text: str
    score: float | None


class PairChooser:
    """Chooses the pairs of one prompt after the other, and counts prompts without a pair.

    Args:
        by: what the scores come from.
        settings: section select.pairs.
        limit: maximum number of pairs for each prompt.
    """

    def __init__(self, by: PairScore, settings: PairSettings, limit: int) -> None:
        self._by, self._settings, self._limit = by, settings, limit
        self._single = self._equal = self._close = 0
        self._pairs = self._chosen = self._rejected = self._longer = 0.0
        self.duplicates = 0
        """Number of pairs that are like an earlier one."""

    def choose(self, prompt_id: str, answers: Sequence[ScoredAnswer]) -> list[tuple[int, int]]:
        """Return pairs of indices into `answers`: the chosen answer, then the rejected one.

        The pair with the largest difference of scores comes first; of equal ones, the pair whose answers are in the
        fewest pairs so far, then (select.pairs.similar_length) the one with the most similar lengths, then the one with
        the smallest digest of seed, prompt and answers. Of equal texts only the first counts.
        """
        first = {answer.text.strip(): index for index, answer in reversed([*enumerate(answers)])}
        scores = {index: score for index in first.values() if (score := answers[index].score) is not None}
        gaps = {
            (better, worse): gap
            for better in scores
            for worse in scores
            if (gap := round(scores[better] - scores[worse], SCORE_DIGITS)) > 0
        }
        wide = [pair for pair, gap in gaps.items() if gap >= self._settings.min_difference]
        self._single += len(scores) < 2
        self._equal += len(scores) > 1 and not gaps
        self._close += bool(gaps) and not wide
        ranks = {pair: digests.hash_json([self._settings.seed, prompt_id, *pair]) for pair in wide}
        uses = dict.fromkeys(scores, 0)

        def sort_key(pair: tuple[int, int]) -> tuple[float, int, int, str]:
            better, worse = pair
            lengths = abs(len(answers[better].text) - len(answers[worse].text)) if self._settings.similar_length else 0
            return -gaps[pair], uses[better] + uses[worse], lengths, ranks[pair]

        chosen: list[tuple[int, int]] = []
        while wide and len(chosen) < self._limit:
            pair = min(wide, key=sort_key)
            wide.remove(pair)
            chosen.append(pair)
            for index in pair:
                uses[index] += 1
        return chosen

    def count(self, chosen: str, rejected: str) -> None:
        """Count a pair that is written, with the lengths of its answers."""
        self._pairs += 1
        self._chosen += len(chosen)
        self._rejected += len(rejected)
        self._longer += (len(chosen) > len(rejected)) + 0.5 * (len(chosen) == len(rejected))

    @property
    def report(self) -> PairSelection:
        """The counts, for the selection's card."""
        pairs = self._pairs or 1
        return PairSelection(
            by=self._by,
            single_prompts=self._single,
            equal_prompts=self._equal,
            close_prompts=self._close,
            duplicates=self.duplicates,
            chosen_characters=round(self._chosen / pairs, 2),
            rejected_characters=round(self._rejected / pairs, 2),
            longer_chosen=round(self._longer / pairs, 4),
        )
