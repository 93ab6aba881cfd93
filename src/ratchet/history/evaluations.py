"""Figures that were measured of a training: on test rows by stage evaluate, on validation rows for finalists."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ratchet import files
from ratchet.errors import DamagedError, DataError
from ratchet.gating.evidence import Samples, read_rows, read_samples
from ratchet.history.accounts import Account
from ratchet.history.subjects import Names
from ratchet.layout import Layout
from ratchet.records_evaluation import Cost, EvalReport, Scores, Who
from ratchet.records_held_out import HeldOut

CURRENT = "experiments/evaluate"
OWN: tuple[Who, ...] = ("candidate", "merged")
"""Names under which the model that an evaluation is about was scored."""


@dataclass(frozen=True)
class Examined:
    """One model's scores in one evaluation."""

    run_id: str
    who: Who
    """Under which it was scored."""
    place: str
    """Which evaluation."""
    report: EvalReport
    samples: Mapping[str, Samples] = field(default_factory=dict)
    """Per-sample scores by metric; none where only the figures were kept."""
    groups: Mapping[str, str | None] = field(default_factory=dict)
    """Of the test rows: those of one group are no independent samples."""

    @property
    def scores(self) -> Scores:
        """Its figures."""
        return self.report.scores[self.who]

    @property
    def cost(self) -> Cost | None:
        """What answering costs, if that was measured."""
        return self.report.costs.get(self.who)

    @property
    def contract(self) -> Mapping[str, Any]:
        """What made the scores comparable."""
        return self.report.contracts.get(self.scores.contract, {})


class Evaluations:
    """What a project keeps of evaluations."""

    def __init__(self, layout: Layout, names: Names) -> None:
        """Raises DamagedError when a file of the evaluation is not as it was written."""
        self._layout, self._names = layout, names
        self.current: EvalReport | None = None
        self.groups: Mapping[str, str | None] = {}
        if layout.eval_report.exists():
            files.verify(layout.evaluate, "evaluation")
            self.current = EvalReport.load(layout.eval_report)
            self.groups = {row.id: row.group for row in read_rows(layout)}

    def of(self, run_id: str) -> list[Examined]:
        """Of one training: of the evaluation as it is now, else of those kept with its promoted versions."""
        digests = [self._names.versions[number][1] for number in self._names.versions_of(run_id)]
        found = self._current(run_id, digests)
        for model_digest in digests if not found else ():
            path = self._layout.promoted_model(model_digest) / "eval.json"
            if path.exists():
                report = EvalReport.load(path)
                place = f"kept with model {model_digest[:12]}"
                found += [Examined(run_id, who, place, report) for who in OWN if who in report.scores]
        return found

    def _current(self, run_id: str, digests: list[str]) -> list[Examined]:
        report = self.current
        if report is None:
            return []
        names: list[Who] = list(OWN) if report.run_id == run_id else []
        if not names and report.champion_digest in digests:
            names.append("champion")
        if not names and report.anchor_digest in digests:
            names.append("anchor")
        return [self.scored(who, run_id) for who in names if who in report.scores]

    def scored(self, who: Who, run_id: str = "") -> Examined:
        """One model of the evaluation as it is now, which must have been scored; the base is of no training."""
        report = self.current
        if report is None:
            raise ValueError("there is no evaluation")
        return Examined(run_id, who, CURRENT, report, self._samples(report.scores[who]), self.groups)

    def _samples(self, scores: Scores) -> dict[str, Samples]:
        found: dict[str, Samples] = {}
        for metric, name in scores.samples.items():
            by_id, twice = read_samples(self._layout.evaluate / name)
            if twice is None:
                found[metric] = by_id
        return found


def held_out(account: Account) -> dict[str, HeldOut]:
    """Row by row scores of a run's adapter on validation rows, by question; what cannot be trusted is left out."""
    found: dict[str, HeldOut] = {}
    for path in sorted(account.paths.root.glob("held_out-*.json")):
        try:
            one = HeldOut.load(path)
        except (DataError, DamagedError):
            continue
        if account.report is not None and one.adapter_digest == account.report.adapter_digest:
            found[one.question] = one
    return found
