"""Reads and writes MLflow's model registry. Promoted models are versions of one registered model; an alias marks the
champion.

A version is found by the tag `ratchet.model_digest`, so a model that is registered twice has one version. The alias
moves by compare-and-set under the store's lock. MLflow itself has no compare-and-set, so a move of the alias in
MLflow's UI within the same few milliseconds is not detected.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.errors import ChampionError
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow import run_logger
from ratchet.tracking.mlflow.experiments import MlflowStore

CHAMPION = "champion"
"""The alias that serving follows: `models:/NAME@champion`."""
DIGEST_TAG = "ratchet.model_digest"


@dataclass(frozen=True)
class MlflowModelVersion:
    """A version of the registered model, with its tags."""

    number: int
    model_digest: str
    source: str
    """URI of the directory of the promoted model."""
    tags: dict[str, str]


class MlflowModelRegistry:
    """The versions of one registered model in the project's own MLflow store.

    Every method raises TrackingError if the database cannot be read or written.
    """

    def __init__(self, layout: ProjectLayout, model_name: str) -> None:
        self.layout = layout
        self.model_name = model_name
        self._store = MlflowStore(layout)

    def ensure_version(self, model_digest: str, source: Path, run_id: str, tags: Mapping[str, str]) -> int:
        """Return the version number of the model in `source`. If the model has no version yet, register one.

        A new version gets the tags, and is linked to the MLflow run of Ratchet's run id, if it exists.
        """
        with self._store.connected() as client, self._store.locked():
            numbers = [v.number for v in self._versions(client) if v.model_digest == model_digest]
            if numbers:
                self._link(client, tags, min(numbers))
                return min(numbers)
            if not client.search_registered_models(f"name = '{self.model_name}'"):
                client.create_registered_model(self.model_name)
            created = client.create_model_version(
                self.model_name,
                source.as_uri(),
                run_id=self._mlflow_run(client, run_id),
                tags={**tags, DIGEST_TAG: model_digest},
            )
            self._link(client, tags, int(created.version))
            return int(created.version)

    def _link(self, client: Any, tags: Mapping[str, str], version: int) -> None:
        """Link the adapter's logged model to the version, if runs are logged to this store."""
        experiment = client.get_experiment_by_name(self.model_name)
        if experiment is not None and (adapter := tags.get(run_logger.ADAPTER_TAG)):
            run_logger.link_version(client, experiment.experiment_id, adapter, self.model_name, version)

    def champion(self) -> int | None:
        """Return the version number of the champion alias, or None."""
        if not self.layout.mlflow_database.exists():
            return None
        with self._store.connected() as client:
            return self._champion(client)

    def _champion(self, client: Any) -> int | None:
        models = client.search_registered_models(f"name = '{self.model_name}'")
        version = models[0].aliases.get(CHAMPION) if models else None
        return None if version is None else int(version)

    def set_champion(self, version: int, expected: int | None) -> None:
        """Move the alias to a version in one transaction, so that readers see either the old or the new champion.

        `expected` is the version of the alias at the time of the decision; None if it did not exist.

        Raises:
            ChampionError: the alias has moved since the decision.
        """
        with self._store.connected() as client, self._store.locked():
            current = self._champion(client)
            if current == version:
                return
            if current != expected:
                texts = [f"version {number}" if number is not None else "no version" for number in (expected, current)]
                raise ChampionError(
                    f"alias {CHAMPION} of {self.model_name} moved from {texts[0]} to {texts[1]} since the "
                    "decision: another promotion took place; nothing was changed. Evaluate against the new champion: "
                    "`dvc repro`"
                )
            client.set_registered_model_alias(self.model_name, CHAMPION, str(version))

    def annotate_version(self, version: int, run_id: str, tags: Mapping[str, str], description: str | None) -> None:
        """Set tags and description of a version. Set the same tags and `ratchet.version` of the MLflow run of this run
        id.

        A run id without an MLflow run is ignored. A second call changes nothing. If `description` is None, the current
        description is kept.
        """
        with self._store.connected() as client:
            model_version = client.get_model_version(self.model_name, str(version))
            for key, value in tags.items():
                if model_version.tags.get(key) != value:
                    client.set_model_version_tag(self.model_name, str(version), key, value)
            if description is not None and model_version.description != description:
                client.update_model_version(self.model_name, str(version), description)
            if mlflow_id := self._mlflow_run(client, run_id):
                for key, value in {**tags, "ratchet.version": str(version)}.items():
                    client.set_tag(mlflow_id, key, value)

    def find_version(self, model_digest: str) -> int | None:
        """Return the version number of this model, or None."""
        return next((v.number for v in self.versions() if v.model_digest == model_digest), None)

    def version(self, number: int) -> MlflowModelVersion | None:
        """Return a registered version, or None."""
        return next((v for v in self.versions() if v.number == number), None)

    def versions(self) -> list[MlflowModelVersion]:
        """Return all versions that Ratchet registered, ascending."""
        if not self.layout.mlflow_database.exists():
            return []
        with self._store.connected() as client:
            return sorted(self._versions(client), key=lambda v: v.number)

    def _versions(self, client: Any) -> list[MlflowModelVersion]:
        versions, token = [], None
        while True:
            page = client.search_model_versions(f"name = '{self.model_name}'", page_token=token)
            versions += [
                MlflowModelVersion(int(v.version), v.tags[DIGEST_TAG], v.source, dict(v.tags))
                for v in page
                if DIGEST_TAG in v.tags
            ]
            token = page.token
            if not token:
                return versions

    def _mlflow_run(self, client: Any, run_id: str) -> str | None:
        experiment = client.get_experiment_by_name(self.model_name)
        if experiment is None:
            return None
        runs = client.search_runs([experiment.experiment_id], f"tags.`ratchet.run_id` = '{run_id}'", max_results=1)
        return str(runs[0].info.run_id) if runs else None
