"""Loads the models of an evaluation one after another: as adapters on one loaded base, or as plain weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ratchet.config.settings import Settings
from ratchet.errors import ChampionError, DamagedFileError, DataError
from ratchet.evaluation import scorer
from ratchet.evaluation.comparability import describe_numerics
from ratchet.evaluation.evaluator import EvaluationResult, EvaluationSubject, Evaluator
from ratchet.models import adapters, base_model, loading, oom
from ratchet.storage import digests, files
from ratchet.storage.digests import SHORT
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.evaluation import ModelRole
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Champion, ChampionFile
from ratchet.storage.records.training import TrainReport

ADAPTER = "adapter"
"""Folder of a promoted model with the adapter that it was merged from."""


@dataclass(frozen=True)
class EvaluationReference:
    """A promoted model (champion or anchor) that the candidate is compared with."""

    champion: Champion
    folder: Path
    bundle: ModelBundle

    def fits(self, base: BaseCard, settings: Settings) -> bool:
        """Return whether the adapter can be loaded on the current base in its current form."""
        is_same = (
            self.bundle.base_digest == base.digest
            and self.bundle.base_weight_format == settings.train.base_weight_format
        )
        return is_same and (self.folder / ADAPTER).is_dir()


@dataclass
class EvaluationBatchSize:
    """Batch size of an evaluation: chosen with the first loaded model, and the same for all models."""

    setting: int | Literal["auto"]
    """machine.evaluation_batch_size."""
    longest_tokens: int
    """Tokens of the longest scored row, including generated tokens."""
    rows: int | None = None
    """The chosen batch size; None until a model is loaded."""

    def choose_for(self, model: Any) -> int:
        """Return the batch size; choose it for this model if it is not chosen yet."""
        if self.rows is None:
            vocabulary = int(model.get_input_embeddings().weight.shape[0])
            self.rows = scorer.choose_batch_rows(self.setting, model, self.longest_tokens, vocabulary)
        return self.rows

    def halve(self) -> bool:
        """Halve the batch size; return False if the size is 1 or not chosen yet."""
        if self.rows is None or self.rows == 1:
            return False
        self.rows //= 2
        return True


@dataclass(frozen=True)
class EvaluationModelLoader:
    """Loads and evaluates all models of an evaluation."""

    layout: ProjectLayout
    settings: Settings
    base: BaseCard
    trained: TrainReport
    model_digest: str | None
    """Digest of the verified export of the adapter; None without an export."""
    opponents: dict[ModelRole, EvaluationReference]
    device: torch.device

    @property
    def base_path(self) -> Path:
        """Directory of the base model."""
        return base_model.locate(self.layout, self.base)

    @property
    def needs_export(self) -> bool:
        """Whether any model is scored as plain weights; the candidate is then scored as plain weights too."""
        return "merged" in self.settings.evaluate.formats or any(self._incompatible_opponents())

    def require_export(self) -> str:
        """Return the digest of the exported candidate. Raises DataError if its adapter was not exported."""
        if self.model_digest is None:
            reason = "evaluate.formats has merged"
            if incompatible := " and ".join(self._incompatible_opponents()):
                reason = f"the {incompatible} has another base or form and can only be scored as plain weights"
            raise DataError(
                f"{self.layout.bundle}: the adapter {self.trained.adapter_digest[:SHORT]} of {self.layout.train} was "
                f"not exported, but the evaluation requires it ({reason}); run `dvc repro export`"
            )
        return self.model_digest

    def _incompatible_opponents(self) -> Iterator[ModelRole]:
        """Yield the opponents that cannot be loaded as adapters on this base."""
        return (role for role, opponent in self.opponents.items() if not opponent.fits(self.base, self.settings))

    def evaluate_models(self, evaluator: Evaluator, size: EvaluationBatchSize) -> dict[ModelRole, EvaluationResult]:
        """Evaluate every model with the same batch size; the 4-bit weights of the base are loaded once."""
        results: dict[ModelRole, EvaluationResult] = {}
        if "adapter" in self.settings.evaluate.formats:
            self._evaluate_adapters(evaluator, size, results)
        oom.release_memory()
        if self.needs_export:
            self._evaluate_plain_weights(evaluator, size, results)
        return results

    def evaluate_candidate_again(self, evaluator: Evaluator, batch_rows: int) -> EvaluationResult:
        """Evaluate only the candidate, in the single form of evaluate.formats."""
        [model_format] = self.settings.evaluate.formats
        numerics = describe_numerics(model_format, self.settings, self.device, batch_rows)
        if model_format == "merged":
            digest = self.require_export()
            subject = EvaluationSubject("merged", digest, digest, model_format)
            return evaluator.evaluate(subject, *self._load_plain(self.layout.merged_model), numerics)
        digest = self.trained.adapter_digest
        subject = EvaluationSubject("candidate", digest, digests.hash_json([self.base.digest, digest]), model_format)
        model = adapters.load(self.load_base(), self.layout.adapter)
        return evaluator.evaluate(subject, model, self.load_tokenizer(), numerics)

    def find_identical(self, role: ModelRole) -> ModelRole | None:
        """Return the role of an identical model that is evaluated anyway; None if this opponent must be evaluated."""
        opponent = self.opponents[role]
        if opponent.champion.model_digest == self.model_digest:
            return "candidate"
        champion = self.opponents.get("champion")
        if role == "anchor" and champion and champion.champion.model_digest == opponent.champion.model_digest:
            return "champion"
        return None

    def _evaluate_adapters(
        self, evaluator: Evaluator, size: EvaluationBatchSize, results: dict[ModelRole, EvaluationResult]
    ) -> None:
        """Add the results of base, candidate, and opponents with an adapter on this base."""
        tokenizer = self.load_tokenizer()
        model = adapters.load(self.load_base(), self.layout.adapter)
        numerics = describe_numerics("adapter", self.settings, self.device, size.choose_for(model))

        def evaluate(role: ModelRole, digest: str, identity: str) -> None:
            subject = EvaluationSubject(role, digest, identity, "adapter", measures_cost=role == "candidate")
            results[role] = evaluator.evaluate(subject, model, tokenizer, numerics)

        with model.disable_adapter():
            evaluate("base", self.base.digest, self.base.digest)
        digest = self.trained.adapter_digest
        evaluate("candidate", digest, digests.hash_json([self.base.digest, digest]))
        for role, opponent in self.opponents.items():
            if not opponent.fits(self.base, self.settings):
                continue
            if (identical := self.find_identical(role)) is not None and identical in results:
                results[role] = results[identical]
            else:
                model = adapters.swap(model, opponent.folder / ADAPTER)
                digest = opponent.champion.adapter_digest
                evaluate(role, digest, digests.hash_json([self.base.digest, digest]))

    def _evaluate_plain_weights(
        self, evaluator: Evaluator, size: EvaluationBatchSize, results: dict[ModelRole, EvaluationResult]
    ) -> None:
        """Add the results of the merged candidate, and of all models that have none yet."""

        def evaluate(role: ModelRole, digest: str, model: Any, tokenizer: Any) -> None:
            numerics = describe_numerics("merged", self.settings, self.device, size.choose_for(model))
            subject = EvaluationSubject(role, digest, digest, "merged", measures_cost=role == "merged")
            results[role] = evaluator.evaluate(subject, model, tokenizer, numerics)

        # No variable here holds a model while the next one is loaded, so only one of them must fit into memory.
        if "base" not in results:
            evaluate("base", self.base.digest, self._load_plain_base(), self.load_tokenizer())
        evaluate("merged", self.require_export(), *self._load_plain(self.layout.merged_model))
        for role, opponent in self.opponents.items():
            if role in results:
                continue
            identical = self.find_identical(role)
            identical = "merged" if identical == "candidate" else identical
            if identical is not None and identical in results:
                results[role] = results[identical]
            else:
                evaluate(role, opponent.champion.model_digest, *self._load_plain(opponent.folder / "hf"))

    def load_base(self) -> Any:
        """Load the base as it was loaded for training."""
        return loading.load(self.base_path, self.base, self.settings.train, self.device)

    def load_tokenizer(self) -> Any:
        """Load the tokenizer that the rows were prepared with."""
        return base_model.load_project_tokenizer(self.layout, self.base)

    def _load_plain_base(self) -> Any:
        oom.release_memory()
        plain = {"quantization": "none", "compute_dtype": self.settings.export.dtype, "initialization": "zero"}
        return loading.load(self.base_path, self.base, self.settings.train.model_copy(update=plain), self.device)

    def _load_plain(self, folder: Path) -> tuple[Any, Any]:
        """Load model and tokenizer of exported files."""
        oom.release_memory()
        remote_code = self.base.remote_code
        dtype = loading.pick_dtype(self.settings.export.dtype, self.device)
        model = loading.load_plain(folder, dtype, self.device, remote_code)
        return model, base_model.load_tokenizer(folder, remote_code=remote_code)


def verify_references(layout: ProjectLayout, file: ChampionFile) -> dict[ModelRole, EvaluationReference]:
    """Verify the files of champion and anchor. Raises ChampionError if they are missing or damaged."""
    references: dict[ModelRole, EvaluationReference] = {}
    if file.champion:
        references["champion"] = verify_reference(layout, file.champion, "champion")
    if file.anchor:
        is_same = file.champion and file.champion.model_digest == file.anchor.model_digest
        references["anchor"] = references["champion"] if is_same else verify_reference(layout, file.anchor, "anchor")
    return references


def verify_reference(layout: ProjectLayout, champion: Champion, role: str) -> EvaluationReference:
    """Verify the files of a promoted model. Raises ChampionError if they are missing or damaged."""
    folder = layout.promoted_model(champion.model_digest)
    try:
        if not folder.is_dir():
            raise DamagedFileError(f"{folder} does not exist")
        files.verify_sealed(folder, "model")
        bundle = ModelBundle.load(folder / "bundle.json")
    except DamagedFileError as error:
        alternative = f"start without a champion: echo {{}} > {layout.champion}"
        if role == "anchor":
            alternative = f"remove `anchor` from {layout.champion} and set another with `ratchet promote --anchor`"
        raise ChampionError(
            f"{layout.champion.name} names version {champion.version} as {role}, but its model is not usable on this "
            f"machine ({error}); copy {folder} from the machine that promoted it, or {alternative}"
        ) from None
    if bundle.model_digest != champion.model_digest:
        raise ChampionError(
            f"{folder}: found model {bundle.model_digest[:SHORT]}, but {layout.champion.name} has "
            f"{champion.model_digest[:SHORT]}"
        )
    return EvaluationReference(champion, folder, bundle)
