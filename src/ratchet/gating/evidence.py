"""All that the gate judges by, read from a project once: reports, per-sample scores, champion, look-ups and noise."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ratchet import digest, files, records
from ratchet.config import Settings
from ratchet.config_evaluation import Form
from ratchet.config_gate import Gate
from ratchet.errors import DamagedError, first_line
from ratchet.gating import lookups, objectives
from ratchet.layout import Layout
from ratchet.records_evaluation import ROWS, EvalReport, EvaluatedRow, Noise, Sample, Who
from ratchet.records_export import Bundle
from ratchet.records_gate import ChampionFile, Decision, read_champion

T = TypeVar("T", bound=records.Record)
Samples = Mapping[str, Sample]
"""By id."""
CANDIDATE: Mapping[Form, Who] = {"adapter": "candidate", "merged": "merged"}
"""Under which name each form of the candidate was scored."""


@dataclass(frozen=True)
class Evidence:
    """What `judge` is given; nothing in it depends on a path or a time."""

    report: EvalReport
    bundle: Bundle
    champion: ChampionFile
    samples: Mapping[Who, Mapping[str, Samples]]
    """Per-sample scores by model and metric."""
    groups: Mapping[str, str | None]
    """Of the test rows, by id: those of one group are no independent samples."""
    lookups: int
    """Models looked at with this gate set, the candidate included."""
    noise: Noise | None
    noise_samples: Mapping[str, Samples]
    """Of `noise`, by metric."""
    tasks_now: Mapping[str, str]
    """Fingerprint of each local harness task as its files are now."""
    forms: tuple[Form, ...] = ("adapter", "merged")
    """Of the candidate, the one first that is compared where both could be (evaluate.forms)."""
    judged_before: tuple[Decision, ...] = ()
    """What the gate said of the candidate on this gate set under other rules."""
    repeated: Mapping[Who, Mapping[str, str]] = field(default_factory=dict)
    """A sample that was scored twice, by model and metric; of a sound evaluation, none."""

    @property
    def is_champion(self) -> bool:
        """Whether the candidate is the champion already."""
        current = self.champion.champion
        return current is not None and current.model_digest == self.bundle.model_digest

    @property
    def scored_forms(self) -> list[Who]:
        """Names under which the candidate was scored, the preferred form first."""
        order = [CANDIDATE[form] for form in (*self.forms, *CANDIDATE)]
        return [who for who in dict.fromkeys(order) if who in self.report.scores]


def rules_digest(gate: Gate) -> str:
    """Fingerprint of the rules and all else that a verdict is made by."""
    return digest.of_json(gate.model_dump(mode="json"))


def read(layout: Layout, settings: Settings, tasks_now: Mapping[str, str]) -> Evidence:
    """Read what the stages before left, every byte checked.

    Args:
        layout: the project.
        settings: its settings; only evaluate.forms is asked.
        tasks_now: fingerprints of the local harness tasks (services.harness.fingerprints).

    Raises:
        DataError: a stage before has not run.
        DamagedError: a file is not as it was written; names it, and its line.
    """
    report, bundle = EvalReport.load(layout.eval_report), Bundle.load(layout.bundle)
    files.verify(layout.evaluate, "evaluation")
    found: dict[Who, dict[str, Samples]] = {}
    repeated: dict[Who, dict[str, str]] = {}
    for who, scores in report.scores.items():
        for metric, name in scores.samples.items():
            by_id, twice = read_samples(layout.evaluate / name)
            found.setdefault(who, {})[metric] = by_id
            if twice is not None:
                repeated.setdefault(who, {})[metric] = twice
    noise, noise_samples = _noise(layout)
    rows = read_rows(layout)
    tasks = {name for terms in report.contracts.values() for name in terms.get("harness", {})}
    # A sweep may have begun to choose by these rows since they were evaluated.
    now = objectives.shared(layout, [row.id for row in rows], tasks)
    return Evidence(
        report=report.model_copy(update={"chosen_by": report.chosen_by | now}),
        bundle=bundle,
        champion=read_champion(layout.champion),
        samples=found,
        groups={row.id: row.group for row in rows},
        lookups=lookups.count(layout, report.gate_set, report.adapter_digest),
        noise=noise,
        noise_samples=noise_samples,
        tasks_now=tasks_now,
        forms=settings.evaluate.forms,
        judged_before=lookups.before(layout, report.gate_set, report.adapter_digest, rules_digest(settings.gate)),
        repeated=repeated,
    )


def read_samples(path: Path) -> tuple[dict[str, Sample], str | None]:
    """Samples by id, and the first id that comes twice, if one does. Raises DamagedError naming file and line."""
    found: dict[str, Sample] = {}
    twice = None
    for number, row in enumerate(records.read_lines(path), start=1):
        sample = _record(Sample, row, path, number)
        if sample.id in found and twice is None:
            twice = sample.id
        found[sample.id] = sample
    return found, twice


def read_rows(layout: Layout) -> list[EvaluatedRow]:
    """The test rows, as the evaluation wrote them. Raises DamagedError naming file and line."""
    path = layout.evaluate / ROWS
    return [_record(EvaluatedRow, row, path, number) for number, row in enumerate(records.read_lines(path), start=1)]


def _record(kind: type[T], row: dict[str, Any], path: Path, number: int) -> T:
    try:
        return kind.model_validate(row)
    except ValueError as error:
        raise DamagedError(f"{path}:{number}: not a {kind.__name__} ({first_line(error)}); make it again") from None


def _noise(layout: Layout) -> tuple[Noise | None, dict[str, Samples]]:
    """What `ratchet gate --aa` measured last, if anybody asked it."""
    path = layout.noise / "noise.json"
    if not path.exists():
        return None, {}
    files.verify(layout.noise, "noise")
    noise = Noise.load(path)
    return noise, {name: read_samples(layout.noise / file)[0] for name, file in noise.samples.items()}
