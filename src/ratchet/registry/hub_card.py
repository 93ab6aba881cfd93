"""Renders the model card of a model that is pushed to the Hugging Face hub.

Equal facts give equal bytes, so repeating a push changes nothing. The card contains no row of the data, no path of a
machine and no time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.config.export import Export
from ratchet.config.train import Train
from ratchet.models import model_card
from ratchet.models.model_card import Publication
from ratchet.registry.deployment.model_card import (
    describe_coverage,
    describe_forced,
    escape_markdown,
    format_metrics,
)
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.evaluation import SAFETY_PREFIX, EvaluationReport, MetricValue, ModelRole
from ratchet.storage.records.export import ExportArtifact, ModelBundle, ModelLineage
from ratchet.storage.records.gate import Decision
from ratchet.storage.records.push import ForcedPush, PushKind
from ratchet.storage.records.training import AdapterAnalysis, TrainReport

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

_TASK = "text-generation"
_LIBRARIES: Mapping[PushKind, str | None] = {"adapter": "peft", "merged": "transformers", "gguf": None}
_ROLE_NAMES: Mapping[ModelRole, str] = {"candidate": "the adapter on its base", "merged": "the merged model"}
_INTERVAL = "95 % interval"


@dataclass(frozen=True)
class CardMetadata:
    """Metadata that the user gives, because a project does not contain it."""

    licence: str | None = None
    """None: the licence of the base."""
    languages: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    """Hub ids, in addition to the datasets in prepare.sources."""

    def complete(self, lineage: ModelLineage) -> "CardMetadata":
        """Add the datasets of the hub that the model was trained on, and the licence of the base."""
        sources = lineage.settings["prepare"]["sources"]
        datasets = [str(source["dataset"]) for source in sources if source.get("dataset")]
        licence = self.licence or lineage.base.licence
        return CardMetadata(licence, self.languages, tuple(dict.fromkeys([*datasets, *self.datasets])))

    def list_omissions(self) -> Iterator[str]:
        """Yield a note for each field of the card that is left out."""
        if self.licence is None:
            yield "the card has no licence, because the base declares none: --license ID"
        if not self.languages:
            yield "the card has no language: --language CODE, such as en"
        if not self.datasets:
            yield "the card has no datasets, because the data is not on the hub: --dataset ID, if it is"


@dataclass(frozen=True)
class HubCard:
    """The facts that a card shows."""

    repository: str
    kind: PushKind
    bundle: ModelBundle
    lineage: ModelLineage
    """Lineage of the bundle."""
    trained: TrainReport
    analysis: AdapterAnalysis | None
    evaluation: EvaluationReport | None
    """Evaluation of this adapter; None: not evaluated."""
    decision: Decision | None
    forced: ForcedPush | None
    metadata: CardMetadata
    signer: str
    files: Mapping[str, Path]
    """Files of the model by their names in the repository."""

    def render(self) -> str:
        """Return the text of README.md."""
        train, base = Train.model_validate(self.lineage.settings["train"]), self.lineage.base
        publication = Publication(
            name=self.repository.rsplit("/", 1)[-1], results=tuple(self._results()), library=_LIBRARIES[self.kind],
            licence=self.metadata.licence, languages=self.metadata.languages, datasets=self.metadata.datasets,
            notices=tuple(self._notices()),
            usage=(
                *self._evaluation_section(), *describe_coverage(self.evaluation, self._scored_role),
                *self._provenance_section(), *self._usage_section(base),
            ),
        )  # fmt: skip
        if self.kind == "adapter":
            return model_card.render_for_adapter(base, train, self.trained, self.analysis, publication)
        export = Export.model_validate(self.lineage.settings["export"] | {"merge_base": self.bundle.merge_base})
        return model_card.render_for_model(base, train, self.trained, export, self.analysis, publication)

    def _notices(self) -> Iterator[str]:
        if self.forced is not None:
            yield f"**{escape_markdown(describe_forced(self.forced))}**"

    @property
    def _scored_role(self) -> ModelRole:
        """The form of the model whose scores are shown: the pushed one if it was evaluated."""
        scores = self.evaluation.scores if self.evaluation is not None else {}
        roles: tuple[ModelRole, ...] = ("candidate", "merged") if self.kind == "adapter" else ("merged", "candidate")
        return next((role for role in roles if role in scores), roles[0])

    @property
    def _metrics(self) -> Mapping[str, MetricValue]:
        scores = self.evaluation.scores.get(self._scored_role) if self.evaluation is not None else None
        return dict(sorted(scores.metrics.items())) if scores is not None else {}

    @property
    def _artifacts(self) -> list[ExportArtifact]:
        return [artifact for artifact in self.bundle.artifacts if artifact.kind == "gguf" == self.kind]

    def _results(self) -> "Iterator[EvalResult]":
        from huggingface_hub import EvalResult

        for name, metric in self._metrics.items() if self.kind != "gguf" else ():
            is_harness = name.startswith("harness/")
            dataset, kind = "test rows of the project", "private"
            if is_harness:
                dataset = kind = name.split("/")[1]
            elif name.startswith(SAFETY_PREFIX):
                dataset, kind = "safety tests", "private-safety-tests"  # the hub groups results by the kind
            yield EvalResult(
                task_type=_TASK, dataset_type=kind, dataset_name=dataset, dataset_split=None if is_harness else "test",
                metric_type=name.rsplit("/", 1)[-1],
                metric_value=metric.value, metric_name=f"{name} of {_ROLE_NAMES[self._scored_role]} "
                f"({_INTERVAL} {metric.low:.4g} to {metric.high:.4g}, n = {metric.n:,})",
                metric_args={"low": metric.low, "high": metric.high, "confidence": 0.95, "samples": metric.n},
            )  # fmt: skip
        for artifact in self._artifacts:
            if (task := artifact.task) is not None:
                yield EvalResult(
                    task_type=_TASK, dataset_type="private", dataset_name="test rows of the project",
                    dataset_split="test", metric_type=task.metric, metric_value=task.value,
                    metric_name=f"{task.metric} of {artifact.name} ({task.difference:+.4g} from base + adapter, "
                    f"{_INTERVAL} {task.low:+.4g} to {task.high:+.4g}, n = {task.rows:,})",
                    metric_args={
                        "difference": task.difference, "low": task.low, "high": task.high, "confidence": 0.95,
                        "samples": task.rows,
                    },
                )  # fmt: skip

    def _evaluation_section(self) -> Iterator[str]:
        yield from ("## Evaluation", "")
        if self.evaluation is None:
            yield from ("This model was not evaluated.", "")
            return
        yield (
            f"Scores of {_ROLE_NAMES[self._scored_role]} on data that was not used for training. The base was scored "
            "on the same data."
        )
        names = [name for name in self._metrics if not name.startswith(SAFETY_PREFIX)]
        yield from ("", *format_metrics(self.evaluation, self._scored_role, names))
        yield ""
        for artifact in self._artifacts:
            distance, task = artifact.distance, artifact.task
            score = f"; {task.metric} {task.value:.4g} on {task.rows:,} rows" if task is not None else ""
            yield (
                f"- `{artifact.name}`: KL divergence from base + adapter {distance.kl:.3g} nats, same most likely "
                f"token at {distance.greedy_agreement:.2%} of {distance.positions:,} positions{score}"
            )
        yield from ([""] if self._artifacts else [])

    def _provenance_section(self) -> Iterator[str]:
        lineage, bundle = self.lineage, self.bundle
        rows = ", ".join(f"{count:,} {split}" for split, count in sorted(lineage.data_rows.items()))
        facts = {
            "Decision of the gate": self.decision or "none",
            "Adapter, SHA-256": f"`{bundle.adapter_digest}`",
            "Rows": f"{rows}; licence of the data: {escape_markdown(lineage.data_licence or 'not declared')}",
            "Signed by": f"{escape_markdown(self.signer)}; signature in `model.sig` (OpenSSF model signing)",
            "Created by": escape_markdown(f"Ratchet {lineage.code}"),
        }
        yield from ("## Provenance", "", "| | |", "|---|---|")
        yield from (f"| {key} | {value} |" for key, value in facts.items())
        yield ""

    def _usage_section(self, base: BaseCard) -> Iterator[str]:
        yield from ("## Use", "")
        if self.kind == "gguf":
            for name in self.files:
                if name.endswith(".gguf"):
                    yield f"    llama-server --hf-repo {self.repository} --hf-file {name} --jinja"
            return
        yield "```python"
        if self.kind == "merged":
            yield from ("from transformers import AutoModelForCausalLM, AutoTokenizer", "")
            yield f'model = AutoModelForCausalLM.from_pretrained("{self.repository}", dtype="auto")'
        elif base.revision is not None:
            yield from ("from peft import AutoPeftModelForCausalLM", "from transformers import AutoTokenizer", "")
            yield f'model = AutoPeftModelForCausalLM.from_pretrained("{self.repository}")'
        else:
            yield from ("from peft import PeftModel", "from transformers import AutoModelForCausalLM, AutoTokenizer")
            yield from ("", 'base = AutoModelForCausalLM.from_pretrained("PATH OF THE BASE")')
            yield f'model = PeftModel.from_pretrained(base, "{self.repository}")'
        yield from (f'tokenizer = AutoTokenizer.from_pretrained("{self.repository}")', "```")
        if self.kind == "adapter" and base.revision is None:
            yield f"\nThe base is not on the hub. The SHA-256 of its files is `{base.digest}`."
