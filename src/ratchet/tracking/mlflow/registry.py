"""MLflow's model registry: promoted models as versions of one registered model, and who of them is champion.

A version is found again by the tag `ratchet.model_digest`, so that registering one model twice gives one version. The
alias moves by compare-and-set, under the store's lock: MLflow itself has none, so a hand that moves the alias in its UI
in the same few milliseconds is not seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.errors import ChampionError
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow import run_logger
from ratchet.tracking.mlflow.store import MlflowStore

CHAMPION = "champion"
"""The alias that serving follows: `models:/NAME@champion`."""
DIGEST_TAG = "ratchet.model_digest"


@dataclass(frozen=True)
class MlflowModelVersion:
    """A registered version; `tags` are those that it was registered with."""

    number: int
    model_digest: str
    source: str
    """URI of the folder of the promoted model."""
    tags: dict[str, str]


class MlflowModelRegistry:
    """The versions of one registered model in the project's own MLflow store.

    Every method raises TrackingError when the database cannot be read or written.
    """

    def __init__(self, layout: ProjectLayout, model_name: str) -> None:
        self.layout = layout
        self.model_name = model_name
        self._store = MlflowStore(layout)

    def ensure_version(self, model_digest: str, source: Path, run_id: str, tags: Mapping[str, str]) -> int:
        """The number of the version of this model, registered now if it is not yet.

        Args:
            model_digest: fingerprint of the model's files.
            source: folder of the promoted model; what the version points at.
            run_id: Ratchet's; the version is linked to MLflow's run of it, if there is one.
            tags: stored with a new version.
        """
        with self._store.connected() as client, self._store.locked():
            found = [v.number for v in self._versions(client) if v.model_digest == model_digest]
            if found:
                self._link(client, tags, min(found))
                return min(found)
            if not client.search_registered_models(f"name = '{self.model_name}'"):
                client.create_registered_model(self.model_name)
            made = client.create_model_version(
                self.model_name,
                source.as_uri(),
                run_id=self._mlflow_run(client, run_id),
                tags={**tags, DIGEST_TAG: model_digest},
            )
            self._link(client, tags, int(made.version))
            return int(made.version)

    def _link(self, client: Any, tags: Mapping[str, str], version: int) -> None:
        """Let the adapter's logged model name the version, where runs are shown in this store."""
        experiment = client.get_experiment_by_name(self.model_name)
        if experiment is not None and (adapter := tags.get(run_logger.ADAPTER_TAG)):
            run_logger.link_version(client, experiment.experiment_id, adapter, self.model_name, version)

    def champion(self) -> int | None:
        """The version that the alias points at, or None."""
        if not self.layout.mlflow_database.exists():
            return None
        with self._store.connected() as client:
            models = client.search_registered_models(f"name = '{self.model_name}'")
            version = models[0].aliases.get(CHAMPION) if models else None
            return None if version is None else int(version)

    def set_champion(self, version: int, expected: int | None) -> None:
        """Point the alias at a version: one transaction, so that readers see the old or the new one.

        Args:
            version: who is to be champion. If the alias is there already, nothing happens.
            expected: where the alias was when this was decided; None: nowhere.

        Raises:
            ChampionError: somebody else has moved it since.
        """
        with self._store.connected() as client, self._store.locked():
            models = client.search_registered_models(f"name = '{self.model_name}'")
            found = models[0].aliases.get(CHAMPION) if models else None
            now = None if found is None else int(found)
            if now == version:
                return
            if now != expected:
                was, is_ = (f"version {v}" if v is not None else "no version" for v in (expected, now))
                raise ChampionError(
                    f"the alias {CHAMPION} of {self.model_name} moved from {was} to {is_} meanwhile: somebody else "
                    "promoted; nothing was changed. Evaluate against the new champion: `dvc repro`"
                )
            client.set_registered_model_alias(self.model_name, CHAMPION, str(version))

    def tell(self, version: int, run_id: str, tags: Mapping[str, str], description: str | None) -> None:
        """Write tags and words to a version, and the tags to the MLflow run of this run id, if there is one.

        Repeating it changes nothing; `description` None leaves the words that are there.
        """
        with self._store.connected() as client:
            found = client.get_model_version(self.model_name, str(version))
            for key, value in tags.items():
                if found.tags.get(key) != value:
                    client.set_model_version_tag(self.model_name, str(version), key, value)
            if description is not None and found.description != description:
                client.update_model_version(self.model_name, str(version), description)
            if mlflow_id := self._mlflow_run(client, run_id):
                for key, value in {**tags, "ratchet.version": str(version)}.items():
                    client.set_tag(mlflow_id, key, value)

    def number_of(self, model_digest: str) -> int | None:
        """The version of this model, or None."""
        return next((v.number for v in self.versions() if v.model_digest == model_digest), None)

    def version(self, number: int) -> MlflowModelVersion | None:
        """A registered version, or None."""
        return next((v for v in self.versions() if v.number == number), None)

    def versions(self) -> list[MlflowModelVersion]:
        """All versions that Ratchet registered, ascending."""
        if not self.layout.mlflow_database.exists():
            return []
        with self._store.connected() as client:
            return sorted(self._versions(client), key=lambda v: v.number)

    def _versions(self, client: Any) -> list[MlflowModelVersion]:
        found, token = [], None
        while True:
            page = client.search_model_versions(f"name = '{self.model_name}'", page_token=token)
            found += [
                MlflowModelVersion(int(v.version), v.tags[DIGEST_TAG], v.source, dict(v.tags))
                for v in page
                if DIGEST_TAG in v.tags
            ]
            token = page.token
            if not token:
                return found

    def _mlflow_run(self, client: Any, run_id: str) -> str | None:
        experiment = client.get_experiment_by_name(self.model_name)
        if experiment is None:
            return None
        found = client.search_runs([experiment.experiment_id], f"tags.`ratchet.run_id` = '{run_id}'", max_results=1)
        return str(found[0].info.run_id) if found else None
