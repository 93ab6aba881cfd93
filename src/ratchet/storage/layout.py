"""Layout of a project: the paths of all its files and folders."""

import os
from dataclasses import dataclass
from pathlib import Path

from ratchet.errors import ProjectError

RUNS_VARIABLE = "RATCHET_RUNS"
"""Environment variable that names another directory for runs, profiles and generations, such as on a larger disk."""

CHAT_TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True)
class ProjectLayout:
    """Paths of a project. `root` is absolute and contains params.yaml and dvc.yaml."""

    root: Path

    @classmethod
    def find(cls, start: Path) -> "ProjectLayout":
        """Find the project that contains the folder `start`. Raises ProjectError if there is none."""
        start = start.resolve()
        for folder in (start, *start.parents):
            if (folder / "params.yaml").is_file() and (folder / "dvc.yaml").is_file():
                if unusable := set(str(folder)) & set("?%"):
                    raise ProjectError(
                        f"{folder}: MLflow cannot use a path that contains {unusable.pop()}; move the project"
                    )
                return cls(folder)
        raise ProjectError(
            f"{start}: no Ratchet project here (expected params.yaml and dvc.yaml); change to its folder, pass "
            "--project DIR, or create one with `ratchet init DIR --data FILE ...`"
        )

    @property
    def params(self) -> Path:
        return self.root / "params.yaml"

    @property
    def raw(self) -> Path:
        """Folder of the source files, which `prepare.sources` names."""
        return self.root / "data" / "raw"

    @property
    def text(self) -> Path:
        """Plain text for the pre-training of the tiny base."""
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
        """Output of stage base: base.json, and model/ if Ratchet built or converted the model."""
        return self.experiments / "base"

    @property
    def base_card(self) -> Path:
        return self.base / "base.json"

    @property
    def chat_template(self) -> Path | None:
        """Chat template of the project, which replaces that of the tokenizer; None unless base.chat_template is set."""
        path = self.base / CHAT_TEMPLATE_FILE
        return path if path.is_file() else None

    @property
    def tiny_model(self) -> Path:
        return self.base / "model"

    @property
    def data(self) -> Path:
        """Output of stage prepare: card.json, card.html, an Arrow file per split, test.jsonl for harness tasks."""
        return self.experiments / "data"

    @property
    def dataset_page(self) -> Path:
        """The dataset card as HTML."""
        return self.data / "card.html"

    @property
    def dataset_card(self) -> Path:
        return self.data / "card.json"

    @property
    def distill(self) -> Path:
        """Output of `ratchet distill`: distill.json, and shards with the teacher's probabilities."""
        return self.experiments / "distill"

    @property
    def distillation_shards(self) -> Path:
        """Shards of an unfinished `ratchet distill`; outside git and DVC."""
        return self.experiments / "distillation_shards"

    @property
    def train(self) -> Path:
        """Output of stage train: train.json, adapter/, checkpoints/best and checkpoints/last."""
        return self.experiments / "train"

    @property
    def train_report(self) -> Path:
        return self.train / "train.json"

    @property
    def adapter(self) -> Path:
        return self.train / "adapter"

    @property
    def evaluate(self) -> Path:
        """Output of stage evaluate: eval.json, samples/*.jsonl, confusion matrix."""
        return self.experiments / "evaluate"

    @property
    def eval_report(self) -> Path:
        return self.evaluate / "eval.json"

    @property
    def quantization(self) -> Path:
        """Output of `ratchet evaluate --quantization` (not a stage): quantization.json and quantization.html."""
        return self.experiments / "quantization"

    @property
    def export(self) -> Path:
        """Output of stage export: bundle.json, sbom.json, hf/, gguf/*.gguf, onnx/*/."""
        return self.experiments / "export"

    @property
    def bundle(self) -> Path:
        return self.export / "bundle.json"

    @property
    def merged_model(self) -> Path:
        return self.export / "hf"

    @property
    def sbom(self) -> Path:
        """Libraries, base and data of the exported model, as CycloneDX."""
        return self.export / "sbom.json"

    @property
    def keyring(self) -> Path:
        """Public keys that this project trusts, and revoked keys; committed to git."""
        return self.root / ".ratchet" / "keys.json"

    @property
    def private_key(self) -> Path:
        """Signing key, unless RATCHET_SIGNING_KEY names another; readable only by its owner, ignored by git."""
        return self.root / ".ratchet" / "private.pem"

    @property
    def evidence(self) -> Path:
        """Evaluation results of promoted models, with rows of the data; one folder per model."""
        return self.mlruns / "evidence"

    @property
    def scores(self) -> Path:
        """Cache of scores by model and contract, kept across evaluations and crashes; outside git and DVC."""
        return self.experiments / "scores"

    @property
    def noise(self) -> Path:
        """Output of `ratchet gate --aa` (not a stage): noise.json and samples/."""
        return self.experiments / "noise"

    @property
    def objectives(self) -> Path:
        """Sets of samples that select models and must not be in the test set; one JSON file (`ObjectiveSet`) per
        set."""
        return self.experiments / "objectives"

    @property
    def sweeps(self) -> Path:
        """Studies of sweeps, with a folder per study and a common journal; outside git and DVC."""
        return self.experiments / "sweeps"

    @property
    def studies(self) -> Path:
        """SQLite file with all studies of Optuna; unused if machine.study_storage is a database."""
        return self.sweeps / "studies.db"

    def sweep(self, study: str) -> Path:
        """Return the folder of a study: report.json, page.html, finals/, plots/."""
        return self.sweeps / study

    @property
    def pages(self) -> Path:
        """Reports of `ratchet compare` and `ratchet report`; outside git and DVC."""
        return self.experiments / "pages"

    @property
    def admission(self) -> Path:
        """Result of `ratchet doctor --require` on this machine; outside git and DVC."""
        return self.experiments / "admission.json"

    @property
    def test_set_uses(self) -> Path:
        """Uses of test sets: one JSON line per evaluated or judged model; committed to git."""
        return self.experiments / "test_set_uses.jsonl"

    @property
    def gate(self) -> Path:
        """Output of stage gate: verdict.json."""
        return self.experiments / "gate"

    @property
    def gate_page(self) -> Path:
        """Output of stage gate: the verdict with its evidence as HTML."""
        return self.experiments / "report" / "gate.html"

    @property
    def verdict(self) -> Path:
        return self.gate / "verdict.json"

    @property
    def champion(self) -> Path:
        """Version of the champion; committed to git, so git log is the promotion history."""
        return self.experiments / "champion.json"

    @property
    def promotions(self) -> Path:
        """The promotion ledger: JSON lines, each with the digest of the previous one; committed to git."""
        return self.experiments / "promotions.jsonl"

    @property
    def promotion_intent(self) -> Path:
        """Intent of a promotion in progress, so that it can be completed after a crash."""
        return self.mlruns / "promotion.json"

    @property
    def outbox(self) -> Path:
        """Events for hooks, with the state of their delivery: a folder per event."""
        return self.mlruns / "outbox"

    def stage_lock(self, stage: str) -> Path:
        """Return the lock file that a process must lock to write the output of a stage."""
        return self.experiments / ".locks" / stage

    @property
    def runs(self) -> Path:
        """Run directories; outside git and DVC, because DVC would delete checkpoints when a stage runs again."""
        return self._runs_root or self.experiments / "runs"

    @property
    def profiles(self) -> Path:
        """Output of `ratchet train --profile`: a folder per RunId; outside git and DVC.

        A profile is made in a run directory of its own, so RATCHET_RUNS moves profiles too.
        """
        return self._runs_root / ".profiles" if self._runs_root else self.experiments / "profiles"

    @property
    def generations(self) -> Path:
        """Run directories of `ratchet generate`; outside git and DVC. RATCHET_RUNS moves them too."""
        return self._runs_root / ".generations" if self._runs_root else self.experiments / "generations"

    @property
    def _runs_root(self) -> Path | None:
        """The directory in RUNS_VARIABLE, if it is set."""
        directory = os.environ.get(RUNS_VARIABLE)
        return Path(directory).resolve() if directory else None

    @property
    def mlruns(self) -> Path:
        return self.root / "mlruns"

    @property
    def mlflow_database(self) -> Path:
        return self.mlruns / "mlflow.db"

    @property
    def artifacts(self) -> Path:
        """Artifacts of MLflow runs."""
        return self.mlruns / "artifacts"

    @property
    def models(self) -> Path:
        """Promoted models: a sealed directory per model digest. Registered versions point to them."""
        return self.mlruns / "models"

    def promoted_model(self, model_digest: str) -> Path:
        """Return the directory of a promoted model: bundle, verdict, evaluation, gate.html, adapter/, hf/."""
        return self.models / model_digest[:16]
