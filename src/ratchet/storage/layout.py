"""Every path of a project, from one root."""

import os
from dataclasses import dataclass
from pathlib import Path

from ratchet.errors import SettingsError

RUNS_VARIABLE = "RATCHET_RUNS"
"""Environment variable that moves the run directories, and profiles of runs, for example to a larger disk."""


OWN_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class ProjectLayout:
    """Where things live. `root` is absolute; it is the directory that holds params.yaml and dvc.yaml."""

    root: Path

    @classmethod
    def find(cls, start: Path) -> "ProjectLayout":
        """The project that `start` lies in. Raises SettingsError when there is none."""
        here = start.resolve()
        for folder in (here, *here.parents):
            if (folder / "params.yaml").is_file() and (folder / "dvc.yaml").is_file():
                if odd := set(str(folder)) & set("?%"):
                    raise SettingsError(
                        f"{folder}: MLflow cannot keep a database below a path with {odd.pop()}; move it"
                    )
                return cls(folder)
        raise SettingsError(
            f"{here}: no Ratchet project here (no params.yaml beside a dvc.yaml); "
            "go to one, name it with --project DIR, or make one with `ratchet init DIR --data FILE ...`"
        )

    @property
    def params(self) -> Path:
        return self.root / "params.yaml"

    @property
    def raw(self) -> Path:
        """Source files of the rows to learn from; everything that `prepare.sources` names lies below."""
        return self.root / "data" / "raw"

    @property
    def text(self) -> Path:
        """Plain text that the tiny base is pre-trained on."""
        return self.root / "data" / "text"

    @property
    def tasks(self) -> Path:
        """lm-evaluation-harness tasks of the project (YAML)."""
        return self.root / "data" / "tasks"

    @property
    def experiments(self) -> Path:
        return self.root / "experiments"

    @property
    def base(self) -> Path:
        """Out of stage base: base.json, and model/ when we built the model ourselves."""
        return self.experiments / "base"

    @property
    def base_card(self) -> Path:
        return self.base / "base.json"

    @property
    def own_template(self) -> Path | None:
        """The project's chat template, in the place of the tokenizer's, if base.chat_template names one."""
        path = self.base / OWN_TEMPLATE
        return path if path.is_file() else None

    @property
    def tiny_model(self) -> Path:
        return self.base / "model"

    @property
    def data(self) -> Path:
        """Out of stage prepare: card.json, card.html, one Arrow file a split, test.jsonl for harness tasks."""
        return self.experiments / "data"

    @property
    def dataset_page(self) -> Path:
        """The dataset card for people."""
        return self.data / "card.html"

    @property
    def dataset_card(self) -> Path:
        return self.data / "card.json"

    @property
    def distill(self) -> Path:
        """Out of `ratchet distill`: distill.json, and what the teacher says about the training rows, in shards."""
        return self.experiments / "distill"

    @property
    def teachings(self) -> Path:
        """Shards of a `ratchet distill` that has not come to its end; outside git and DVC."""
        return self.experiments / "teachings"

    @property
    def train(self) -> Path:
        """Out of stage train: train.json, adapter/, checkpoints/best and checkpoints/last."""
        return self.experiments / "train"

    @property
    def train_report(self) -> Path:
        return self.train / "train.json"

    @property
    def adapter(self) -> Path:
        return self.train / "adapter"

    @property
    def evaluate(self) -> Path:
        """Out of stage evaluate: eval.json, samples/*.jsonl, confusion matrix."""
        return self.experiments / "evaluate"

    @property
    def eval_report(self) -> Path:
        return self.evaluate / "eval.json"

    @property
    def quantization(self) -> Path:
        """Out of `ratchet evaluate --quantization`, which is no stage: quantization.json and quantization.png."""
        return self.experiments / "quantization"

    @property
    def export(self) -> Path:
        """Out of stage export: bundle.json, sbom.json, hf/, gguf/*.gguf, onnx/*/."""
        return self.experiments / "export"

    @property
    def bundle(self) -> Path:
        return self.export / "bundle.json"

    @property
    def merged_model(self) -> Path:
        return self.export / "hf"

    @property
    def sbom(self) -> Path:
        """CycloneDX: libraries, base and data of the exported model."""
        return self.export / "sbom.json"

    @property
    def keyring(self) -> Path:
        """Public keys whose signatures this project trusts, and those it no longer does; committed to git."""
        return self.root / ".ratchet" / "keys.json"

    @property
    def private_key(self) -> Path:
        """The key that signs here unless RATCHET_SIGNING_KEY names another; readable by its owner, ignored by git."""
        return self.root / ".ratchet" / "private.pem"

    @property
    def evidence(self) -> Path:
        """What spoke for promoted models and shows rows of the data: a folder a model, beside the models."""
        return self.mlruns / "evidence"

    @property
    def scores(self) -> Path:
        """Scores by model and contract, kept between evaluations and across kills; outside git and DVC."""
        return self.experiments / "scores"

    @property
    def noise(self) -> Path:
        """Out of `ratchet gate --aa`, which is no stage: noise.json and samples/."""
        return self.experiments / "noise"

    @property
    def objectives(self) -> Path:
        """Sets by which models are chosen (records_evaluation.Objective), a JSON file each."""
        return self.experiments / "objectives"

    @property
    def sweeps(self) -> Path:
        """Studies of sweeps, a folder each, and the journal that all of them share; outside git and DVC."""
        return self.experiments / "sweeps"

    @property
    def study_journal(self) -> Path:
        """Optuna's journal of all studies, where no database keeps them."""
        return self.sweeps / "studies.jsonl"

    def sweep(self, study: str) -> Path:
        """Of one study: report.json, page.html, finals/, plots/."""
        return self.sweeps / study

    @property
    def pages(self) -> Path:
        """Pages of `ratchet compare` and `ratchet report`; outside git and DVC."""
        return self.experiments / "pages"

    @property
    def admission(self) -> Path:
        """What `ratchet doctor --require` found on this machine; outside git and DVC."""
        return self.experiments / "admission.json"

    @property
    def lookups(self) -> Path:
        """Models whose scores on a gate set were seen, a JSON line each; committed to git."""
        return self.experiments / "lookups.jsonl"

    @property
    def gate(self) -> Path:
        """Out of stage gate: verdict.json."""
        return self.experiments / "gate"

    @property
    def gate_page(self) -> Path:
        """Out of stage gate, too: the evidence, for people."""
        return self.experiments / "report" / "gate.html"

    @property
    def verdict(self) -> Path:
        return self.gate / "verdict.json"

    @property
    def champion(self) -> Path:
        """Which version is champion; committed to git, so that git log is the promotion history."""
        return self.experiments / "champion.json"

    @property
    def promotions(self) -> Path:
        """The promotion ledger: JSON lines, each with the digest of the one before; committed to git."""
        return self.experiments / "promotions.jsonl"

    @property
    def intent(self) -> Path:
        """What a promotion that has begun is about to do."""
        return self.mlruns / "promotion.json"

    @property
    def outbox(self) -> Path:
        """Events for hooks, and how far their delivery is: a folder an event."""
        return self.mlruns / "outbox"

    def stage_lock(self, stage: str) -> Path:
        """Lock of who writes this stage's out."""
        return self.experiments / ".locks" / stage

    @property
    def runs(self) -> Path:
        """Run directories, outside git and DVC: a stage's rerun must not delete checkpoints."""
        return self._moved or self.experiments / "runs"

    @property
    def profiles(self) -> Path:
        """Of `ratchet train --profile`, which changes no run: a folder a RunId; outside git and DVC.

        Each is made in a run directory of its own, which takes a run's room: they move with the runs, and lie among
        them under a name that is no run's.
        """
        return self._moved / ".profiles" if self._moved else self.experiments / "profiles"

    @property
    def generations(self) -> Path:
        """Run directories of `ratchet generate`; outside git and DVC, and where the runs are, like profiles."""
        return self._moved / ".generations" if self._moved else self.experiments / "generations"

    @property
    def _moved(self) -> Path | None:
        """Where RUNS_VARIABLE puts the runs, if it is set."""
        moved = os.environ.get(RUNS_VARIABLE)
        return Path(moved).resolve() if moved else None

    @property
    def mlruns(self) -> Path:
        return self.root / "mlruns"

    @property
    def mlflow_database(self) -> Path:
        return self.mlruns / "mlflow.db"

    @property
    def artifacts(self) -> Path:
        """MLflow's artifacts of runs."""
        return self.mlruns / "artifacts"

    @property
    def models(self) -> Path:
        """Promoted models, one sealed directory a model digest; what registered versions point at."""
        return self.mlruns / "models"

    def promoted_model(self, model_digest: str) -> Path:
        """Where the promoted model of this digest is kept: bundle, verdict, evaluation, gate.html, adapter/, hf/."""
        return self.models / model_digest[:16]
