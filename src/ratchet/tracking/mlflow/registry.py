"""Reads and writes MLflow's model registry. Promoted models are versions of one registered model; an alias marks the
champion.

A version is found by the tag `ratchet.model_digest`, so a model that is registered twice has one version.

In the project's own store, versions refer to the folders of promoted models, and the alias moves by compare-and-set
under the store's lock. MLflow itself has no compare-and-set, so a move of the alias in MLflow's UI within the same few
milliseconds is not detected.

On a server, the files are uploaded, and the shared ledger decides (`shared_ledger`). The alias follows the ledger: the
person who adds an entry moves it, then reads the ledger again, and moves it again if there is a newer entry. If that
person is killed in between, the next command of anybody moves it: a version without the tag of its newest entry is not
complete yet.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.config.mlflow_environment import EXPERIMENT, REGISTRY, resolve_addresses
from ratchet.config.settings import Settings
from ratchet.errors import ChampionError
from ratchet.registry.model_store import KIND
from ratchet.registry.promotion import EVENT, promotion_tags
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import Champion, Promotion
from ratchet.tracking.mlflow import model_files, run_logger
from ratchet.tracking.mlflow.experiments import MlflowStore, open_experiment, repeat_on_collision
from ratchet.tracking.mlflow.model_files import DIGEST_TAG
from ratchet.tracking.mlflow.shared_ledger import SharedLedger

CHAMPION = "champion"
"""The alias that serving follows: `models:/NAME@champion`."""
UPLOAD_TIMEOUT_S = "600"
"""Timeout of a request to a server with registered models, unless MLFLOW_HTTP_REQUEST_TIMEOUT is set. After an upload,
the server copies the file before it answers."""


@dataclass(frozen=True)
class MlflowModelVersion:
    """A version of the registered model, with its tags."""

    number: int
    model_digest: str
    source: str
    """URI of the directory of the promoted model."""
    tags: dict[str, str]


class MlflowModelRegistry:
    """The versions of one registered model, in the project's own MLflow store or on a server.

    Every method raises TrackingError if MLflow cannot be read or written.
    """

    def __init__(
        self, layout: ProjectLayout, model_name: str, server: str | None = None, experiment: str | None = None
    ) -> None:
        self.layout = layout
        self.model_name = model_name
        self.server = server
        self._named_experiment = experiment
        roles = f"to read registered model {model_name}, a user needs role viewer, and to change it, role promoter"
        self._store = MlflowStore(layout, server, needed_roles=roles)
        self.shared = None if server is None else SharedLedger(self._store, model_name)
        """The ledger on the server; None in the project's own store, whose ledger is in the project."""
        if server is not None:
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", UPLOAD_TIMEOUT_S)

    @classmethod
    def open(cls, layout: ProjectLayout, settings: Settings) -> "MlflowModelRegistry":
        """Open the registry that the settings and the environment name. Raises SettingsError for the environment."""
        addresses = resolve_addresses(settings, layout.mlflow_database)
        named = addresses.experiment if addresses.experiment_source == EXPERIMENT else None
        return cls(layout, settings.promote.model_name, addresses.registry, named)

    def open_model(self, model_name: str) -> "MlflowModelRegistry":
        """Open another registered model of the same store or server."""
        return MlflowModelRegistry(self.layout, model_name, self.server, self._named_experiment)

    @property
    def _experiment(self) -> str:
        """Name of the experiment with the project's runs."""
        return self._named_experiment or self.model_name

    @property
    def where(self) -> str:
        """Address of the server, or path of the project's database."""
        return self._store.where

    @property
    def exists(self) -> bool:
        """Whether there is a registry that can be asked: a server, or the project's database."""
        return self.server is not None or self.layout.mlflow_database.exists()

    def ensure_version(self, model_digest: str, source: Path, run_id: str, tags: Mapping[str, str]) -> int:
        """Return the version number of the model in `source`. If the model has no version yet, register one.

        A new version gets the tags, and is linked to the MLflow run of Ratchet's run id, if it exists. A server gets
        the files that it lacks.
        """
        if self.shared is not None:
            return self._ensure_on_server(self.shared, model_digest, source, run_id, tags)
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

    def _ensure_on_server(
        self, shared: SharedLedger, model_digest: str, source: Path, run_id: str, tags: Mapping[str, str]
    ) -> int:
        """Upload the files, then register the version: a registered version has all of its files."""
        with self._store.connected() as client:
            shared.open_run(client)  # creates the registered model
            experiment_id = open_experiment(client, shared.experiment_name)
            model_id = model_files.upload_model(
                client, self.where, experiment_id, model_digest, source, f"model-{model_digest[:12]}"
            )
            numbers = [v.number for v in self._versions(client) if v.model_digest == model_digest]
            if not numbers:
                client.create_model_version(
                    self.model_name,
                    f"models:/{model_id}",
                    run_id=self._mlflow_run(client, run_id),
                    tags={**tags, DIGEST_TAG: model_digest},
                    await_creation_for=0,  # a database needs no wait
                    model_id=model_id,
                )
                # Another person may have registered the same model at the same time: both take the lower number.
                numbers = [v.number for v in self._versions(client) if v.model_digest == model_digest]
            self._link(client, tags, min(numbers))
            return min(numbers)

    def fetch_model(self, model_digest: str) -> None:
        """Fetch a promoted model from the server into its folder, or what the folder lacks. No effect without a server.

        Raises:
            ChampionError: the model is not registered on the server.
            DamagedFileError: the server has other bytes than the model's manifest.
        """
        if self.server is None:
            return
        with self._store.connected() as client:
            version = next((v for v in self._versions(client) if v.model_digest == model_digest), None)
            if version is None:
                raise ChampionError(
                    f"model {model_digest[:12]} of {self.model_name} is not registered on {self.where}. "
                    f"{self.explain_missing(model_digest)}"
                )
            folder = self.layout.promoted_model(model_digest)
            model_files.fetch_model(client, self.where, version.source.rpartition("/")[2], folder, KIND)

    def explain_missing(self, model_digest: str) -> str:
        """Explain, as a sentence without its full stop, why a promoted model is not registered here, and what to do."""
        if self.shared is None:
            return "Git does not track mlruns/: copy it from the machine where that version was promoted"
        if any(entry.model_digest == model_digest for entry in self.shared.read()):
            return "It was promoted there, and its version was deleted since: promote it again"
        own = f"{REGISTRY}=sqlite:///{self.layout.mlflow_database}"
        return f"If it was promoted in the project's own registry, keep that one: {own}"

    def _link(self, client: Any, tags: Mapping[str, str], version: int) -> None:
        """Link the adapter's logged model to the version, if runs are logged to this store."""
        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is not None and (adapter := tags.get(run_logger.ADAPTER_TAG)):
            run_logger.link_version(client, experiment.experiment_id, adapter, self.model_name, version)

    def champion(self) -> int | None:
        """Return the version number of the champion alias, or None."""
        if not self.exists:
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

    def commit(self, entry: Promotion, expected: int | None) -> None:
        """Make the version of a ledger's entry champion: move the alias, or add the entry to the server's ledger.

        Raises:
            ChampionError: another promotion took place since the decision.
        """
        if self.shared is None:
            self.set_champion(entry.version, expected)
        else:
            self.shared.append(entry)

    def has_committed(self, event: str, version: int) -> bool:
        """Return whether `commit` was done for this event and version."""
        if self.shared is None:
            return self.champion() == version
        return any(entry.id == event for entry in self.shared.read())

    def move_alias(self) -> None:
        """Move the alias to the version of the newest entry on the server. No effect in the project's own store."""
        if self.shared is None:
            return
        with self._store.connected() as client:
            # Each pass reads the ledger after the alias was moved, so the last of several writers corrects the alias.
            while (entries := self.shared.read()) and self._champion(client) != entries[-1].version:
                version = str(entries[-1].version)
                repeat_on_collision(partial(client.set_registered_model_alias, self.model_name, CHAMPION, version))

    def complete_newest(self) -> Promotion | None:
        """Complete the newest promotion on the server, if the person who started it was interrupted.

        Returns:
            The entry, if something was missing. Its hooks are called by the project of that person.
        """
        entries = self.shared.read() if self.shared is not None else []
        version = self.version(entries[-1].version) if entries else None
        if version is None or version.tags.get(EVENT) == entries[-1].id:
            return None
        self.move_alias()
        self.annotate_version(version.number, entries[-1].run_id, promotion_tags(entries[-1]), None)
        return entries[-1]

    def model_uri(self, version: int, folder: Path) -> str:
        """Return the address of a version: its folder, or on a server `models:/NAME/VERSION`."""
        return folder.as_uri() if self.server is None else f"models:/{self.model_name}/{version}"

    def annotate_version(self, version: int, run_id: str, tags: Mapping[str, str], description: str | None) -> None:
        """Set tags and description of a version. Set the same tags and `ratchet.version` of the MLflow run of this run
        id.

        A run id without an MLflow run is ignored. A second call changes nothing. If `description` is None, the current
        description is kept. The version's tag EVENT is set last, because it means that the others are there.
        """
        with self._store.connected() as client:
            model_version = client.get_model_version(self.model_name, str(version))
            if description is not None and model_version.description != description:
                client.update_model_version(self.model_name, str(version), description)
            if mlflow_id := self._mlflow_run(client, run_id):
                for key, value in {**tags, "ratchet.version": str(version)}.items():
                    repeat_on_collision(partial(client.set_tag, mlflow_id, key, value))
            for key, value in sorted(tags.items(), key=lambda item: item[0] == EVENT):
                if model_version.tags.get(key) != value:
                    tag = partial(client.set_model_version_tag, self.model_name, str(version), key, value)
                    repeat_on_collision(tag)  # another person may complete the same promotion

    def find_version(self, model_digest: str) -> int | None:
        """Return the version number of this model, or None."""
        return next((v.number for v in self.versions() if v.model_digest == model_digest), None)

    def version(self, number: int) -> MlflowModelVersion | None:
        """Return a registered version, or None."""
        return next((v for v in self.versions() if v.number == number), None)

    def versions(self) -> list[MlflowModelVersion]:
        """Return all versions that Ratchet registered, ascending."""
        if not self.exists:
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

    def read_run_tags(self, run_id: str) -> dict[str, str]:
        """Return the tags of the MLflow run of Ratchet's run id; empty if there is none in this store."""
        if not self.exists:
            return {}
        with self._store.connected() as client:
            mlflow_id = self._mlflow_run(client, run_id)
            return {} if mlflow_id is None else dict(client.get_run(mlflow_id).data.tags)

    def _mlflow_run(self, client: Any, run_id: str) -> str | None:
        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is None:
            return None
        runs = client.search_runs([experiment.experiment_id], f"tags.`ratchet.run_id` = '{run_id}'", max_results=1)
        return str(runs[0].info.run_id) if runs else None


def fetch_missing_models(layout: ProjectLayout, settings: Settings, champions: Iterable[Champion]) -> None:
    """Fetch promoted models that this machine lacks from the server. No effect without a server.

    Raises:
        ChampionError: a model is not registered on the server.
        DamagedFileError: the server has other bytes than the model's manifest.
    """
    missing = {c.model_digest for c in champions if not layout.promoted_model(c.model_digest).is_dir()}
    if missing:
        registry = MlflowModelRegistry.open(layout, settings)
        for model_digest in sorted(missing):
            registry.fetch_model(model_digest)
