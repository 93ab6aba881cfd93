"""Base, candidate and champion on the test rows, under one contract: what the gate compares."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ratchet import digest, files, records
from ratchet.card import DatasetCard
from ratchet.config import Settings
from ratchet.data import template, tokens
from ratchet.data.conversation import Conversation, Encoded, text_of
from ratchet.errors import BaseModelError, ChampionError, DamagedError, DataError
from ratchet.layout import Layout
from ratchet.model import adapter, cost, prequantized, quantized, scoring, source
from ratchet.records import BaseCard, Bundle, TrainReport
from ratchet.records_evaluation import EvalReport, Metric, Scores
from ratchet.records_gate import Champion, read_champion
from ratchet.records_model import QuantizationReport
from ratchet.run.directory import RunPaths, RunSpec
from ratchet.services import cost_plot, harness, metrics, plots
from ratchet.services.tracking import Tracking

Who = Literal["base", "candidate", "champion"]


@dataclass(frozen=True)
class _Test:
    """The test rows, and those of them that are answered with generated text."""

    ids: list[str]
    conversations: list[Conversation]
    input_ids: list[list[int]]
    labels: list[list[int]]
    generated: list[int]

    @property
    def responses(self) -> list[str]:
        return [self.conversations[i].response for i in self.generated]


@dataclass
class _Result:
    """One model's figures and per-sample scores, before they are written."""

    model_digest: str
    figures: dict[str, Metric] = field(default_factory=dict)
    samples: dict[str, dict[str, float]] = field(default_factory=dict)
    answers: list[str] = field(default_factory=list)
    per_class: dict[str, dict[str, float]] = field(default_factory=dict)
    confusion: metrics.Confusion | None = None

    def take(self, name: str, metric: Metric, ids: Sequence[str], values: Sequence[float]) -> None:
        self.figures[name] = metric
        self.samples[name] = dict(zip(ids, values, strict=True))


def evaluate(layout: Layout, settings: Settings, progress: Callable[[str], None]) -> str:
    """Run the stage.

    Raises:
        ChampionError: champion.json names a model that is not on this machine.
        SettingsError: a harness task is not defined.
    """
    base, card = BaseCard.load(layout.base_card), DatasetCard.load(layout.dataset_card)
    trained = TrainReport.load(layout.train_report)
    RunSpec(train=settings.train, data_digest=card.digest, base_digest=base.digest).require(trained)
    champion = read_champion(layout.champion).champion
    champion_hf = champion_directory(layout, champion) if champion else None
    test = _read_test(layout.data, settings.evaluate.generate_rows)
    base_path = source.locate(layout, base)
    source.check(base_path, base.files)
    tokenizer = source.load_tokenizer(base_path, layout.own_template, base.added_tokens, base.remote_code)
    quantized.use_threads(settings.machine.threads)
    device = quantized.pick_device(settings.machine.device)
    scorer = _Scorer(layout, settings, card, test, progress)

    model = adapter.load(quantized.load(base_path, base, settings.train, device), layout.adapter)
    results: dict[Who, _Result] = {}
    with model.disable_adapter():
        results["base"] = scorer.score("base", base.digest, model, tokenizer)
    results["candidate"] = scorer.score("candidate", trained.adapter_digest, model, tokenizer)
    if champion and champion_hf:
        if champion.adapter_digest == trained.adapter_digest:
            results["champion"] = results["candidate"]
        else:
            del model
            dtype = quantized.pick_dtype(settings.train.compute_dtype, device)
            merged = quantized.load_plain(champion_hf, dtype, device, base.remote_code)
            own = source.load_tokenizer(champion_hf, remote_code=base.remote_code)
            results["champion"] = scorer.score("champion", champion.model_digest, merged, own)
    report = EvalReport(
        contract=scorer.contract(),
        adapter_digest=trained.adapter_digest,
        base_digest=base.digest,
        data_digest=card.digest,
        run_id=trained.run_id,
        champion_digest=champion.model_digest if champion else None,
        scores={who: _scores(who, result) for who, result in results.items()},
    )
    _write(layout.evaluate, report, results, test)
    _track(layout, settings, report)
    return describe(report)


def champion_directory(layout: Layout, champion: Champion) -> Path:
    """The champion's model, after checking every byte. Raises ChampionError when it is not here, or damaged."""
    folder = layout.promoted_model(champion.model_digest)
    try:
        files.verify(folder, "model")
        found = Bundle.load(folder / "bundle.json").model_digest
    except DamagedError as error:
        raise ChampionError(
            f"{layout.champion.name} names version {champion.version} as champion, but its model is not usable here "
            f"({error}); bring {folder} back from where it was promoted, or start anew: "
            f"echo {{}} > {layout.champion}"
        ) from None
    if found != champion.model_digest:
        raise ChampionError(
            f"{folder}: holds model {found[:12]}, {layout.champion.name} says {champion.model_digest[:12]}"
        )
    return folder / "hf"


def _read_test(data: Path, generate_rows: int) -> _Test:
    files.verify(data, "data")
    dataset = tokens.read(data, "test")
    ids = list(dataset["id"])
    # Rows are sorted by a hash of their content: the first so many are a random sample, the same for every model.
    count = min(len(ids), generate_rows or len(ids))
    conversations = [Conversation.from_json(text) for text in dataset["conversation"]]
    return _Test(ids, conversations, dataset["input_ids"][:], dataset["labels"][:], list(range(count)))


class _Scorer:
    """Scores any model in exactly the same way."""

    def __init__(
        self, layout: Layout, settings: Settings, card: DatasetCard, test: _Test, progress: Callable[[str], None]
    ) -> None:
        self.layout = layout
        self.settings = settings
        self.card = card
        self.test = test
        self.progress = progress

    def contract(self) -> str:
        """Fingerprint of everything that could make two models' scores incomparable."""
        return digest.of_json(
            {
                "data": self.card.digest,
                "settings": self.settings.evaluate.model_dump(mode="json"),
                "compute_dtype": self.settings.train.compute_dtype,
                "tasks": {p.name: digest.of_file(p) for p in harness.task_files(self.layout.tasks)},
            }
        )

    def score(self, who: Who, model_digest: str, model: Any, tokenizer: Any) -> _Result:
        result = _Result(model_digest)
        batch_rows = self.settings.machine.micro_batch_rows
        if self._same_tokens(tokenizer):
            self.progress(f"{who}: likelihood of {len(self.test.ids)} answers")
            self._likelihoods(result, scoring.likelihoods(model, self.test.input_ids, self.test.labels, batch_rows))
        else:
            self.progress(f"{who}: its tokenizer differs, so loss per token is not compared")
        self.progress(f"{who}: generating {len(self.test.generated)} answers")
        with _cache_in_use(model):
            prompts = [template.prompt_ids(tokenizer, self.test.conversations[i].question) for i in self.test.generated]
            limit = self.settings.evaluate.max_new_tokens
            ends = scoring.end_tokens(model, tokenizer, self.card.end_of_turn)
            result.answers = scoring.answers(model, tokenizer, prompts, ends, limit, batch_rows)
            self._answers(result)
            if self.settings.evaluate.harness.tasks:
                self.progress(f"{who}: lm-evaluation-harness on {', '.join(self.settings.evaluate.harness.tasks)}")
                self._harness(result, model, tokenizer, batch_rows)
        return result

    def _same_tokens(self, tokenizer: Any) -> bool:
        """Whether a model's tokens are those of the prepared rows, cut ones up to where they were cut."""
        try:
            encoder = template.Encoder(tokenizer, self.settings.prepare.turns)
            own = encoder.encode(list(zip(self.test.ids, self.test.conversations, strict=True)))
        except DataError:
            return False
        return all(
            isinstance(one, Encoded) and one.input_ids[: len(ids) - 1] == ids[:-1]
            for one, ids in zip(own, self.test.input_ids, strict=True)
        )

    def _likelihoods(self, result: _Result, found: Sequence[scoring.Likelihood]) -> None:
        per_token = [one.nll / one.tokens for one in found]
        result.take("answer_loss", metrics.mean_loss(per_token), self.test.ids, per_token)
        result.figures["perplexity"] = metrics.perplexity([one.nll for one in found], [one.tokens for one in found])

    def _answers(self, result: _Result) -> None:
        expected = self.test.responses
        hits = [float(a == e.strip()) for a, e in zip(result.answers, expected, strict=True)]
        name = "accuracy" if self.card.task == "labels" else "exact_match"
        result.take(name, metrics.proportion(hits), [self.test.ids[i] for i in self.test.generated], hits)
        if self.card.task == "labels":
            classes, result.confusion = metrics.per_class(expected, result.answers)
            result.per_class = dict(classes)

    def _harness(self, result: _Result, model: Any, tokenizer: Any, batch_rows: int) -> None:
        settings = self.settings.evaluate.harness
        with tokens.fresh_cache():
            found = harness.run(model, tokenizer, settings, self.layout.root, self.layout.tasks, batch_rows)
        for one in found:
            values = list(one.values.values())
            metric = metrics.mean_score(values, one.higher_is_better)
            result.take(f"harness/{one.task}/{one.metric}", metric, list(one.values), values)


@contextmanager
def _cache_in_use(model: Any) -> Iterator[None]:
    """Key-value caching is off while training and needed for generating."""
    before = model.config.use_cache
    model.config.use_cache = True
    try:
        yield
    finally:
        model.config.use_cache = before


def _sample_file(who: Who, metric: str) -> str:
    return f"samples/{who}/{metric.replace('/', '__')}.jsonl"


def _scores(who: Who, result: _Result) -> Scores:
    return Scores(
        model_digest=result.model_digest,
        metrics=result.figures,
        samples={name: _sample_file(who, name) for name in result.samples},
        per_class=result.per_class,
    )


def _write(target: Path, report: EvalReport, results: dict[Who, _Result], test: _Test) -> None:
    with files.sealed_directory(target, "evaluation") as scratch:
        for who, result in results.items():
            for name, values in result.samples.items():
                rows = [{"id": key, "value": value} for key, value in values.items()]
                records.write_lines(scratch / _sample_file(who, name), rows)
            answers = [
                {
                    "id": test.ids[i],
                    "prompt": text_of(test.conversations[i].question.messages[-1]),
                    "expected": expected,
                    "answer": answer,
                }
                for i, expected, answer in zip(test.generated, test.responses, result.answers, strict=True)
            ]
            records.write_lines(scratch / f"answers/{who}.jsonl", answers)
            if result.confusion:
                table = {"labels": result.confusion.labels, "matrix": result.confusion.matrix}
                files.write_json(scratch / f"confusion/{who}.json", table)
        if confusion := results["candidate"].confusion:
            labels = [*confusion.labels, metrics.OTHER]
            plots.confusion_matrix(labels, confusion.matrix, scratch / "confusion/candidate.png")
        report.save(scratch / "eval.json")


def _track(layout: Layout, settings: Settings, report: EvalReport) -> None:
    """Add the figures to the run in MLflow."""
    figures = {
        f"test/{who}/{name}": metric.value
        for who, scores in report.scores.items()
        for name, metric in scores.metrics.items()
    }
    artifacts = {"evaluate": [layout.eval_report, *sorted((layout.evaluate / "confusion").glob("*"))]}
    tracking = Tracking(layout, settings.promote.model_name)
    run = tracking.observer(RunPaths(layout.runs / report.run_id), settings, plots.loss_curve)
    tracking.report(run, figures, artifacts, {"ratchet.eval_contract": report.contract})


def describe(report: EvalReport) -> str:
    """A table for the terminal: a row a metric, a column a model, 95 % intervals."""
    names = sorted({name for scores in report.scores.values() for name in scores.metrics})
    table = [["", *report.scores]]
    for name in names:
        figures = [scores.metrics.get(name) for scores in report.scores.values()]
        table.append([name, *(f"{m.value:.4f} [{m.low:.4f}, {m.high:.4f}]" if m else "-" for m in figures)])
    return _table(table)


def _table(table: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in table)
    return "\n".join(f"  {row}".rstrip() for row in rows)


def quantization(layout: Layout, settings: Settings, progress: Callable[[str], None]) -> str:
    """`ratchet evaluate --quantization`: full precision against 4 bits, on a fixed sample of the validation rows.

    Raises:
        BaseModelError: the base is quantised already, or not the one that the data was prepared for.
    """
    base, card = BaseCard.load(layout.base_card), DatasetCard.load(layout.dataset_card)
    if card.base_digest != base.digest:
        raise BaseModelError(f"{layout.data}: prepared for another base model; run `dvc repro prepare`")
    path = source.locate(layout, base)
    source.check(path, base.files)
    if (stored := prequantized.found(source.config_of(path), str(path))) is not None:
        raise BaseModelError(
            f"base.source: {base.source} is stored in {stored.kind} already, so there is no full precision to compare "
            "with; take the model that it was made from"
        )
    files.verify(layout.data, "data")
    dataset = tokens.read(layout.data, "validation").select_columns(["input_ids", "labels"])
    # Rows are sorted by a hash of their content: the first so many are a random sample.
    sample = dataset[: settings.evaluate.quantization_rows]
    rows = list(zip(sample["input_ids"], sample["labels"], strict=True))
    quantized.use_threads(settings.machine.threads)
    device = quantized.pick_device(settings.machine.device)
    costs = cost.measure(lambda train: quantized.load(path, base, train, device), settings.train, rows, progress)
    report = QuantizationReport(
        base_digest=base.digest,
        data_digest=card.digest,
        rows=len(rows),
        tokens=cost.answer_tokens(rows),
        dtype=str(quantized.pick_dtype(settings.train.compute_dtype, device)).removeprefix("torch."),
        costs=costs,
    )
    with files.sealed_directory(layout.quantization, "quantization") as scratch:
        report.save(scratch / "quantization.json")
        cost_plot.draw(report, scratch / "quantization.png")
    return f"{describe_quantization(report)}\n  {layout.quantization / 'quantization.png'}"


def describe_quantization(report: QuantizationReport) -> str:
    """A table for the terminal: a row a way of storing the base."""
    full = report.costs[0].weight_bytes
    table = [["", "bytes", "of full", "loss", "perplexity", "KL", "same token", "layer error", "worst layer"]]
    for one in report.costs:
        errors = {name: layer.output_error for name, layer in one.layers.items()}
        worst = max(errors, key=lambda name: errors[name], default="-")
        table.append(
            [
                one.name, f"{one.weight_bytes:,}", f"{one.weight_bytes / full:.1%}", f"{one.loss:.4f}",
                f"{math.exp(one.loss):.3f}", f"{one.kl:.4f}", f"{one.greedy_agreement:.1%}",
                f"{statistics.median(errors.values()):.1%}" if errors else "-",
                f"{worst} {errors[worst]:.1%}" if errors else "-",
            ]
        )  # fmt: skip
    head = (
        f"4 bits against full precision ({report.dtype}): {report.rows} validation rows, {report.tokens} answer tokens"
    )
    return f"{head}\n{_table(table)}"
