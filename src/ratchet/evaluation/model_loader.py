"""Who is examined, and how each is brought into memory: on one loaded base where that can be, else as plain weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ratchet.config.schema import Settings
from ratchet.errors import ChampionError, DamagedFileError, DataError
from ratchet.evaluation import scorer
from ratchet.evaluation.comparability import NumericsSpec
from ratchet.evaluation.evaluator import EvaluationResult, EvaluationSubject, Evaluator
from ratchet.models import adapters, base_model, loading, oom
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard, TrainReport
from ratchet.storage.records.evaluation import Who
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Champion, ChampionFile

ADAPTER = "adapter"
"""Folder of a promoted model with the adapter that it was merged from."""


@dataclass(frozen=True)
class EvaluationReference:
    """A promoted model that the candidate must stand beside."""

    champion: Champion
    folder: Path
    bundle: ModelBundle

    def fits(self, base: BaseCard, settings: Settings) -> bool:
        """Whether its adapter belongs on this base as it is held now."""
        same = self.bundle.base_digest == base.digest and self.bundle.base_form == settings.train.base_form
        return same and (self.folder / ADAPTER).is_dir()


@dataclass
class EvaluationBatchSize:
    """Rows of a batch: settled with the first model that is loaded, and the same for all of one evaluation."""

    wanted: int | Literal["auto"]
    longest_tokens: int
    """Of any row that is scored, generated tokens included."""
    rows: int | None = None

    def of(self, model: Any) -> int:
        """The size, settled now if it is not yet."""
        if self.rows is None:
            vocabulary = int(model.get_input_embeddings().weight.shape[0])
            self.rows = scorer.choose_batch_rows(self.wanted, model, self.longest_tokens, vocabulary)
        return self.rows

    def halve(self) -> bool:
        """Half of it from now on; False when it cannot be less."""
        if self.rows is None or self.rows == 1:
            return False
        self.rows //= 2
        return True


@dataclass(frozen=True)
class EvaluationModelLoader:
    """All models of one evaluation, none of them loaded yet."""

    layout: ProjectLayout
    settings: Settings
    base: BaseCard
    trained: TrainReport
    model_digest: str | None
    """Of the export of this adapter, every byte checked; None where there is none."""
    opponents: dict[Who, EvaluationReference]
    device: torch.device

    @property
    def base_path(self) -> Path:
        return base_model.locate(self.layout, self.base)

    @property
    def needs_export(self) -> bool:
        """Whether any model is examined as plain weights: then the candidate is, too."""
        return "merged" in self.settings.evaluate.forms or any(self._strangers())

    def require_export(self) -> str:
        """Digest of the candidate as it was exported. Raises DataError where there is no export of its adapter."""
        if self.model_digest is None:
            why = "evaluate.forms names merged"
            if strangers := " and ".join(self._strangers()):
                why = f"the {strangers} can be scored as plain weights only (of another base, or in another form)"
            raise DataError(
                f"{self.layout.bundle}: not there, or exported from another adapter than "
                f"{self.trained.adapter_digest[:12]}, which {self.layout.train} holds; it is needed because {why}: "
                "run `dvc repro export`"
            )
        return self.model_digest

    def _strangers(self) -> Iterator[Who]:
        """Opponents that are no adapter on this base."""
        return (who for who, opponent in self.opponents.items() if not opponent.fits(self.base, self.settings))

    def examine(self, examination: Evaluator, size: EvaluationBatchSize) -> dict[Who, EvaluationResult]:
        """Examine every model in batches of one size; the base's 4-bit weights are loaded once."""
        found: dict[Who, EvaluationResult] = {}
        if "adapter" in self.settings.evaluate.forms:
            found |= dict(self._as_adapters(examination, size))
        oom.release_memory()
        if self.needs_export:
            found |= dict(self._as_plain_weights(examination, size, set(found)))
        return found

    def again(self, examination: Evaluator, batch_rows: int) -> EvaluationResult:
        """Examine the candidate alone, in the one form that the settings name."""
        [form] = self.settings.evaluate.forms
        arithmetic = NumericsSpec.of(form, self.settings, self.device, batch_rows)
        if form == "merged":
            exported = self.require_export()
            subject = EvaluationSubject("merged", exported, exported, form)
            return examination.of(subject, *self._plain(self.layout.merged_model), arithmetic)
        own = self.trained.adapter_digest
        model = adapters.load(self._quantized(), self.layout.adapter)
        return examination.of(
            EvaluationSubject("candidate", own, self._on_base(own), form), model, self._tokenizer(), arithmetic
        )

    def same_as(self, who: Who) -> Who | None:
        """The model that this opponent is as well, so that it need not be examined again."""
        opponent = self.opponents[who]
        if opponent.champion.model_digest == self.model_digest:
            return "candidate"
        champion = self.opponents.get("champion")
        if who == "anchor" and champion and champion.champion.model_digest == opponent.champion.model_digest:
            return "champion"
        return None

    def _as_adapters(self, examination: Evaluator, size: EvaluationBatchSize) -> Iterator[tuple[Who, EvaluationResult]]:
        base, trained = self.base, self.trained
        tokenizer = self._tokenizer()
        model = adapters.load(self._quantized(), self.layout.adapter)
        arithmetic = NumericsSpec.of("adapter", self.settings, self.device, size.of(model))
        with model.disable_adapter():
            subject = EvaluationSubject("base", base.digest, base.digest, "adapter")
            yield "base", examination.of(subject, model, tokenizer, arithmetic)
        candidate = examination.of(
            EvaluationSubject(
                "candidate", trained.adapter_digest, self._on_base(trained.adapter_digest), "adapter", costs=True
            ),
            model, tokenizer, arithmetic,
        )  # fmt: skip
        yield "candidate", candidate
        known: dict[Who, EvaluationResult] = {"candidate": candidate}
        for who, opponent in self.opponents.items():
            if not opponent.fits(base, self.settings):
                continue
            if (twin := self.same_as(who)) is not None and twin in known:
                known[who] = known[twin]
            else:
                model = adapters.swap(model, opponent.folder / ADAPTER)
                own = opponent.champion.adapter_digest
                known[who] = examination.of(
                    EvaluationSubject(who, own, self._on_base(own), "adapter"), model, tokenizer, arithmetic
                )
            yield who, known[who]

    def _quantized(self) -> Any:
        return loading.load(self.base_path, self.base, self.settings.train, self.device)

    def _tokenizer(self) -> Any:
        """The base's, as the rows were prepared with it."""
        base = self.base
        return base_model.load_tokenizer(self.base_path, self.layout.own_template, base.added_tokens, base.remote_code)

    def _on_base(self, adapter_digest: str) -> str:
        return digests.hash_json([self.base.digest, adapter_digest])

    def _as_plain_weights(
        self, examination: Evaluator, size: EvaluationBatchSize, done: set[Who]
    ) -> Iterator[tuple[Who, EvaluationResult]]:
        def examined(subject: EvaluationSubject, model: Any, tokenizer: Any) -> EvaluationResult:
            arithmetic = NumericsSpec.of("merged", self.settings, self.device, size.of(model))
            return examination.of(subject, model, tokenizer, arithmetic)

        # Nothing here holds a model while the next is loaded: two of them need not fit.
        if "base" not in done:
            subject = EvaluationSubject("base", self.base.digest, self.base.digest, "merged")
            yield "base", examined(subject, self._plain_base(), self._tokenizer())
        own = self.require_export()
        known: dict[Who, EvaluationResult] = {
            "merged": examined(
                EvaluationSubject("merged", own, own, "merged", costs=True), *self._plain(self.layout.merged_model)
            )
        }
        yield "merged", known["merged"]
        for who, opponent in self.opponents.items():
            if who in done:
                continue
            twin = self.same_as(who)
            if twin is not None and (twin := "merged" if twin == "candidate" else twin) in known:
                known[who] = known[twin]
            else:
                own = opponent.champion.model_digest
                known[who] = examined(EvaluationSubject(who, own, own, "merged"), *self._plain(opponent.folder / "hf"))
            yield who, known[who]

    def _plain_base(self) -> Any:
        oom.release_memory()
        plain = {"quantization": "none", "compute_dtype": self.settings.export.dtype, "initialization": "zero"}
        return loading.load(self.base_path, self.base, self.settings.train.model_copy(update=plain), self.device)

    def _plain(self, folder: Path) -> tuple[Any, Any]:
        oom.release_memory()
        remote_code = self.base.remote_code
        dtype = loading.pick_dtype(self.settings.export.dtype, self.device)
        model = loading.load_plain(folder, dtype, self.device, remote_code)
        return model, base_model.load_tokenizer(folder, remote_code=remote_code)


def verify_references(layout: ProjectLayout, file: ChampionFile) -> dict[Who, EvaluationReference]:
    """Champion and anchor with their files, every byte checked. Raises ChampionError when they are gone or damaged."""
    found: dict[Who, EvaluationReference] = {}
    if file.champion:
        found["champion"] = verify_reference(layout, file.champion, "champion")
    if file.anchor:
        same = file.champion and file.champion.model_digest == file.anchor.model_digest
        found["anchor"] = found["champion"] if same else verify_reference(layout, file.anchor, "anchor")
    return found


def verify_reference(layout: ProjectLayout, champion: Champion, who: str) -> EvaluationReference:
    """A promoted model, after checking every byte. Raises ChampionError when it is not here, or damaged."""
    folder = layout.promoted_model(champion.model_digest)
    try:
        if not folder.is_dir():
            raise DamagedFileError(f"{folder} is not there")
        files.verify_sealed(folder, "model")
        bundle = ModelBundle.load(folder / "bundle.json")
    except DamagedFileError as error:
        cure = f"start anew: echo {{}} > {layout.champion}"
        if who == "anchor":
            cure = f"take another one: remove `anchor` from {layout.champion}, and promote with --anchor"
        raise ChampionError(
            f"{layout.champion.name} names version {champion.version} as {who}, but its model is not usable here "
            f"({error}); bring {folder} back from where it was promoted, or {cure}"
        ) from None
    if bundle.model_digest != champion.model_digest:
        raise ChampionError(
            f"{folder}: holds model {bundle.model_digest[:12]}, {layout.champion.name} says "
            f"{champion.model_digest[:12]}"
        )
    return EvaluationReference(champion, folder, bundle)
