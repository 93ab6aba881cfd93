"""The promotion ledger on an MLflow server: the order in which a team's promotions took place, without a lock; and the
team's proposals and approvals.

MLflow's aliases can be overwritten, but a parameter of a run cannot: its database accepts one value for each name, and
refuses another. So line N of the ledger is the parameter `promotion.N` of one run, and of several people who write
line N at once, exactly one succeeds. That write commits the promotion. Nothing is locked, so a
killed process blocks no one: before the write nothing happened, and after it every person's next command moves the
alias (`MlflowModelRegistry`).

The run is named by a tag that the registered model gets when it is created. Its name is unique in MLflow, so people who
create it at once agree on one run.

A proposal or an approval (`registry.approvals`) is stored in parameters whose names have the SHA-256 of the text, so
that several people can add theirs at once, no one can replace one, and a text of which a part is missing is ignored.
"""

from collections import defaultdict
from functools import partial
from typing import Any

from ratchet.errors import ChampionError, SettingsError, TrackingError
from ratchet.registry import ledger
from ratchet.storage import digests
from ratchet.storage.records.gate import Promotion
from ratchet.tracking.mlflow.experiments import MlflowStore, open_experiment, repeat_on_collision

LEDGER_TAG = "ratchet.ledger"
"""Tag of the registered model with the id of the run that has the ledger."""
LEDGER_SUFFIX = ".promotions"
LINE = "promotion."
APPROVAL = "approval."
"""Parameter `approval.VERDICT.SHA256.N`: part N of a text about the verdict with this digest."""
MAX_LINE_CHARACTERS = 6000
"""MLflow's limit of a parameter's value (3.17); it truncates longer values without an error."""


class SharedLedger:
    """The ledger of a registered model on a server. Every method raises TrackingError if the server cannot be used."""

    def __init__(self, store: MlflowStore, model_name: str) -> None:
        self._store = store
        self._model_name = model_name

    @property
    def experiment_name(self) -> str:
        """Name of the experiment with the ledger's run and the files of promoted models."""
        return f"{self._model_name}{LEDGER_SUFFIX}"

    def read(self) -> list[Promotion]:
        """Return all entries, oldest first.

        Raises:
            DamagedFileError: their chain is broken.
            ChampionError: the registered model is not Ratchet's, or the ledger's run was deleted.
        """
        with self._store.connected() as client:
            run_id = self._find_run(client)
            return [] if run_id is None else self._read(client, run_id)

    def append(self, entry: Promotion) -> None:
        """Write an entry, which is chained to the newest entry that the caller has seen. A second call changes nothing.

        Raises:
            ChampionError: another entry follows the newest entry that the caller has seen; nothing was written.
            SettingsError: the entry is longer than MLflow stores.
        """
        line = ledger.encode_entry(entry).decode().rstrip("\n")
        if len(line) > MAX_LINE_CHARACTERS:
            raise SettingsError(
                f"--reason: the line of the ledger would have {len(line):,} characters; MLflow stores "
                f"{MAX_LINE_CHARACTERS:,}: give a shorter reason"
            )
        with self._store.connected() as client:
            run_id = self.open_run(client)
            known = self._read(client, run_id)
            if any(other.id == entry.id for other in known):
                return
            self._require_newest(known, entry)
            number = len(known) + 1
            from mlflow.exceptions import MlflowException

            try:
                client.log_param(run_id, f"{LINE}{number:06d}", line)
            except MlflowException:
                # Another person wrote the line, or a call whose answer was lost.
                written = self._read(client, run_id)[number - 1 :]
                if written and written[0].id == entry.id:
                    return
                self._require_newest([*known, *written], entry)
                raise

    def add_approval(self, verdict_digest: str, text: str) -> None:
        """Store a signed proposal or approval. A second call changes nothing. Raises ChampionError as `read`."""
        from mlflow.entities import Param

        name = f"{APPROVAL}{verdict_digest}.{digests.hash_bytes(text.encode())}"
        parts = [text[start : start + MAX_LINE_CHARACTERS] for start in range(0, len(text), MAX_LINE_CHARACTERS)]
        with self._store.connected() as client:
            run_id = self.open_run(client)
            self._load_params(client, run_id)  # raises if the run was deleted
            params = [Param(f"{name}.{n:03d}", part) for n, part in enumerate(parts)]
            repeat_on_collision(partial(client.log_batch, run_id, params=params))

    def read_approvals(self) -> dict[str, str]:
        """Return all signed proposals and approvals, by a description of their place. Raises ChampionError as `read`.

        They are not verified.
        """
        with self._store.connected() as client:
            run_id = self._find_run(client)
            params = {} if run_id is None else self._load_params(client, run_id)
        texts: dict[str, str] = defaultdict(str)
        for name in sorted(name for name in params if name.startswith(APPROVAL)):
            texts[name.rpartition(".")[0]] += params[name]
        return {
            f"{self._store.where}, run {run_id}, {name}": text
            for name, text in texts.items()
            if name.endswith(digests.hash_bytes(text.encode()))
        }

    def _require_newest(self, entries: list[Promotion], entry: Promotion) -> None:
        """Raise ChampionError unless `entry` follows the newest of these entries."""
        if entries and entries[-1].digest != entry.previous:
            newest = entries[-1]
            raise ChampionError(
                f"{newest.actor} made version {newest.version} of {self._model_name} champion on {self._store.where} "
                f"({newest.action}, {newest.time}) since your decision; nothing was changed. Fetch it with `ratchet "
                "promotions`, then compare with it: `dvc repro`"
            )

    def open_run(self, client: Any) -> str:
        """Return the run with the ledger. If there is no registered model, create both."""
        from mlflow.exceptions import MlflowException

        if (found := self._find_run(client)) is not None:
            return found
        name = f"promotions of {self._model_name}"
        created = client.create_run(open_experiment(client, self.experiment_name), run_name=name).info.run_id
        client.update_run(created, "FINISHED")  # no process works on it; parameters can be added
        try:
            client.create_registered_model(self._model_name, {LEDGER_TAG: created})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        if (run_id := self._find_run(client)) != created:
            client.delete_run(created)
        if run_id is None:
            raise TrackingError(f"{self._store.where}: the registered model {self._model_name} was deleted meanwhile")
        return run_id

    def _find_run(self, client: Any) -> str | None:
        models = client.search_registered_models(f"name = '{self._model_name}'")
        if not models:
            return None
        if (run_id := models[0].tags.get(LEDGER_TAG)) is None:
            raise ChampionError(
                f"{self._store.where}: the registered model {self._model_name} was not created by Ratchet (it has no "
                f"tag {LEDGER_TAG}); choose another promote.model_name"
            )
        return str(run_id)

    def _load_params(self, client: Any, run_id: str) -> dict[str, str]:
        """Load the parameters of the ledger's run. Raises ChampionError if the run was deleted."""
        run = client.get_run(run_id)
        if run.info.lifecycle_stage != "active":  # MLflow still returns it, but no line can be added
            raise ChampionError(
                f"{self._store.where}: the run with the ledger of {self._model_name} was deleted; restore it, on "
                f"MLflow's page of experiment {self.experiment_name}, or with `mlflow runs restore --run-id {run_id}` "
                "on the server"
            )
        return dict(run.data.params)

    def _read(self, client: Any, run_id: str) -> list[Promotion]:
        params = self._load_params(client, run_id)
        lines = [f"{params[name]}\n".encode() for name in sorted(params) if name.startswith(LINE)]
        where = f"{self._store.where}, run {run_id}, {LINE}"
        return ledger.parse_lines(
            lines, where, is_whole=False, advice="compare with experiments/promotions.jsonl in git"
        )
