"""Scores adapters of finished runs on validation rows: each base form is loaded once, adapters are exchanged on it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ratchet.config.evaluation import Evaluate, Measure
from ratchet.config.schema import Settings
from ratchet.config.train import Train
from ratchet.data import tokenization
from ratchet.errors import BaseModelError, DataError, DivergenceError, MemoryExhaustedError, first_line
from ratchet.evaluation import answer_metrics
from ratchet.evaluation import rows as row_room
from ratchet.evaluation.comparability import NumericsSpec
from ratchet.evaluation.model_loader import ADAPTER, EvaluationBatchSize
from ratchet.evaluation.rows import TestRows
from ratchet.evaluation.scorer import Scorer, ScoreStore
from ratchet.models import adapters, base_model, loading, oom, scoring
from ratchet.runs.directory import RESULT, RunPaths, RunSpec, storage_errors
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard, TrainReport
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import (
    ANSWERED,
    LOSS,
    HeldOutLaunch,
    HeldOutMetric,
    HeldOutScores,
    held_out_path,
    read_held_out,
)

EXACT, TOKEN_F1 = "exact_match", "token_f1"
_MEASURES: tuple[Measure, ...] = ("token_f1",)


@dataclass(frozen=True)
class RunAdapter:
    """A finished run whose adapter is scored."""

    paths: RunPaths
    train: Train
    """Of the run's own spec: params.yaml may say something else by now."""
    adapter_digest: str

    @property
    def form(self) -> tuple[str, str, str]:
        """What two entrants must share to be scored on one base in memory."""
        return self.train.base_form, self.train.compute_dtype, self.train.attention


def score_runs(layout: ProjectLayout, launch: HeldOutLaunch) -> list[HeldOutScores]:
    """The scores of each run, in the order asked for; those that its directory keeps already are taken as they are.

    Where memory runs out the batch is halved, and all that was not kept is scored anew: in batches of one size.

    Raises:
        DamagedFileError: a run has no sealed result, or data or base are not as they were written.
        DataError: a run was trained on other data or another base than the project has now.
        SettingsError: a metric that this data gives no figure of.
        DivergenceError: a model gives no numbers for some rows.
        MemoryExhaustedError: not even one row fits.
        StorageError: a run directory takes nothing.
    """
    base, card = BaseCard.load(layout.base_card), DatasetCard.load(layout.dataset_card)
    if card.base_digest != base.digest:
        raise BaseModelError(f"{layout.data}: prepared for another base model; run `dvc repro prepare`")
    launch.require_measurable(card)
    question = launch.question(card)
    entrants = {run_id: _read_run_adapter(RunPaths(layout.runs / run_id), card) for run_id in launch.job.run_ids}
    kept = {run_id: read_held_out(one.paths.root, question, one.adapter_digest) for run_id, one in entrants.items()}
    missing = [entrants[run_id] for run_id, found in kept.items() if found is None]
    if missing:
        found = _ValidationScoringSession.of(layout, launch, base, card).all_of(missing)
        for one, made in zip(missing, found, strict=True):
            with storage_errors(one.paths.root):
                made.save(held_out_path(one.paths.root, question))
            kept[one.paths.root.name] = made
    return [scores for run_id in launch.job.run_ids if (scores := kept[run_id]) is not None]


def _read_run_adapter(paths: RunPaths, card: DatasetCard) -> RunAdapter:
    files.verify_sealed(paths.result, RESULT)
    spec, report = RunSpec.load(paths.spec), TrainReport.load(paths.result / "train.json")
    spec.require(report)
    if (spec.data_digest, spec.base_digest) != (card.digest, card.base_digest):
        raise DataError(
            f"run {paths.root.name} was trained on other data or another base than the project has now, so the "
            "validation rows of now say nothing about it; bring those back (`git checkout` and `dvc checkout`)"
        )
    return RunAdapter(paths, spec.train, report.adapter_digest)


@dataclass(frozen=True)
class _ValidationScoringSession:
    """What all entrants are asked, and on what."""

    layout: ProjectLayout
    launch: HeldOutLaunch
    base: BaseCard
    card: DatasetCard
    rows: TestRows
    """Of the validation split."""
    tokenizer: Any
    device: torch.device

    @classmethod
    def of(
        cls, layout: ProjectLayout, launch: HeldOutLaunch, base: BaseCard, card: DatasetCard
    ) -> "_ValidationScoringSession":
        """Read rows and tokenizer, each byte checked."""
        path = base_model.locate(layout, base)
        base_model.verify_files(path, base.files)
        loading.use_threads(launch.machine.threads)
        device = loading.pick_device(launch.machine.device)
        rows = _take_first_rows(row_room.read(layout, Settings(), "validation"), launch.job.rows)
        if not rows.ids:
            raise DataError(f"{layout.data}: no validation rows; give prepare.split.validation a share")
        tokenizer = base_model.load_tokenizer(path, layout.own_template, base.added_tokens, base.remote_code)
        return cls(layout, launch, base, card, rows, tokenizer, device)

    def all_of(self, entrants: Sequence[RunAdapter]) -> list[HeldOutScores]:
        """Every entrant in batches of one size: where one does not fit, all are scored anew in smaller ones."""
        longest = max(map(len, self.rows.input_ids)) + (self.launch.max_new_tokens if self._answers else 0)
        size = EvaluationBatchSize(self.launch.machine.evaluation_rows, longest)
        while True:
            try:
                return self._in_batches(entrants, size)
            except Exception as error:
                if not oom.is_out_of_memory(error):
                    raise
                cause = first_line(error)
            what = "a single row" if size.rows else "the model itself"
            if not size.halve():
                raise MemoryExhaustedError(
                    f"held-out scores: memory does not suffice for {what} ({cause}); lower evaluate.max_new_tokens or "
                    "prepare.max_tokens, or take a machine with more memory"
                )
            oom.release_memory()

    @property
    def _answers(self) -> bool:
        return bool(ANSWERED & set(self.launch.job.metrics))

    @cached_property
    def _prompts(self) -> list[list[int]]:
        return [tokenization.encode_prompt(self.tokenizer, one.question) for one in self.rows.conversations]

    def _in_batches(self, entrants: Sequence[RunAdapter], size: EvaluationBatchSize) -> list[HeldOutScores]:
        found: dict[str, HeldOutScores] = {}
        for form in dict.fromkeys(one.form for one in entrants):
            model = None
            for one in (one for one in entrants if one.form == form):
                folder = one.paths.result / ADAPTER
                if model is None:
                    model = adapters.load(self._loaded(one.train), folder)
                else:
                    model = adapters.swap(model, folder)
                found[one.paths.root.name] = self._scores(one, model, size)
            del model
            oom.release_memory()  # of two forms of the base only one need fit
        return [found[one.paths.root.name] for one in entrants]

    def _loaded(self, train: Train) -> loading.Model:
        return loading.load(base_model.locate(self.layout, self.base), self.base, train, self.device)

    def _scores(self, one: RunAdapter, model: loading.Model, size: EvaluationBatchSize) -> HeldOutScores:
        settings = Settings(train=one.train, machine=self.launch.machine)
        arithmetic = NumericsSpec.of("adapter", settings, self.device, size.of(model)).document()
        # Kept as evaluation keeps them: after a kill, only what is missing is asked for.
        identity = digests.hash_json([self.base.digest, one.adapter_digest])
        name = digests.hash_json([identity, arithmetic])[:32]
        store = ScoreStore(self.layout.scores / f"{name}.jsonl")
        scorer = Scorer(model, self.tokenizer.pad_token_id, arithmetic["batch_rows"], store, lambda done, total: None)
        with storage_errors(self.layout.scores):
            values = self._values(scorer)
        self._require_numbers(one, values)
        rows = self.rows
        tokens = tuple(rows.answer_tokens(row) for row in range(len(rows.ids)))
        return HeldOutScores(
            question=self.launch.question(self.card),
            run_id=one.paths.root.name,
            adapter_digest=one.adapter_digest,
            data_digest=self.card.digest,
            base_digest=self.base.digest,
            rows=self.launch.job.rows,
            ids=tuple(rows.ids),
            groups=tuple(rows.groups),
            tokens=tokens,
            values=values,
            figures={
                metric: math.fsum(found) / (sum(tokens) if metric == LOSS else len(found))
                for metric, found in values.items()
            },
            arithmetic=arithmetic,
        ).sealed()

    def _values(self, scorer: Scorer) -> dict[HeldOutMetric, tuple[float, ...]]:
        """Each metric's score of each row."""
        wanted, found = self.launch.job.metrics, dict[str, Sequence[float] | None]()
        if LOSS in wanted:
            found[LOSS] = [one.nll for one in scorer.likelihoods(self.rows.input_ids, self.rows.labels)]
        if self._answers:
            asked = Evaluate(
                max_new_tokens=self.launch.max_new_tokens, measures=_MEASURES if TOKEN_F1 in wanted else ()
            )
            ends = scoring.list_end_tokens(scorer.model, self.tokenizer, self.card.end_of_turn)
            answers = scorer.answers(self.tokenizer, self._prompts, ends, asked)
            measured = answer_metrics.score_answers(self.rows.expected, answers, asked, EXACT)
            found |= {one.name: one.values for one in measured}
            found["accuracy"] = found[EXACT]  # two names of one measure: of labels, and of free text
        return {metric: tuple(values) for metric in wanted if (values := found[metric]) is not None}

    def _require_numbers(self, one: RunAdapter, values: dict[HeldOutMetric, tuple[float, ...]]) -> None:
        for metric, found in values.items():
            if odd := [self.rows.ids[i] for i, value in enumerate(found) if not math.isfinite(value)]:
                raise DivergenceError(
                    f"run {one.paths.root.name}: {metric} is no number for {len(odd)} of {len(found)} validation rows, "
                    f"first {odd[0]}; look at train.compute_dtype (float16 overflows) and at the run's learning rate"
                )


def _take_first_rows(rows: TestRows, count: int) -> TestRows:
    """The first so many rows; 0: all."""
    end = min(count or len(rows.ids), len(rows.ids))
    return replace(
        rows,
        ids=rows.ids[:end],
        conversations=rows.conversations[:end],
        input_ids=rows.input_ids[:end],
        labels=rows.labels[:end],
        groups=rows.groups[:end],
        fields=rows.fields[:end],
        generated=end,
    )
