"""Layout of a project: the paths of all its files and folders."""

import os
from pathlib import Path

from ratchet.errors import ProjectError

RUNS_VARIABLE = "RATCHET_RUNS"
"""Environment variable that names another directory for runs, profiles and generations, such as on a larger disk."""

CHAT_TEMPLATE_FILE = "chat_template.jinja"


class ProjectLayout:
    """Paths of a project. `root` is absolute and contains params.yaml and dvc.yaml."""

    def __init__(self, root: Path) -> None:  # noqa: PLR0915 (one assignment for each path)
        self.root = root
        self.mlruns = root / "mlruns"
        self.params = root / "params.yaml"
        self.raw = root / "data" / "raw"
        """Folder of the source files, which `prepare.sources` names."""
        self.text = root / "data" / "text"
        """Plain text for the pre-training of the tiny base."""
        self.tasks = root / "data" / "tasks"
        """lm-evaluation-harness tasks of the project (YAML)."""
        self.experiments = root / "experiments"
        self.base = self.experiments / "base"
        """Output of stage base: base.json, and model/ if Ratchet built or converted the model."""
        self.base_card = self.base / "base.json"
        self.tiny_model = self.base / "model"
        self.data = self.experiments / "data"
        """Output of stage prepare: card.json, card.html, an Arrow file per split, test.jsonl for harness tasks."""
        self.dataset_page = self.data / "card.html"
        """The dataset card as HTML."""
        self.dataset_card = self.data / "card.json"
        self.distill = self.experiments / "distill"
        """Output of `ratchet distill`: distill.json, and shards with the teacher's probabilities."""
        self.distillation_shards = self.experiments / "distillation_shards"
        """Shards of an unfinished `ratchet distill`; outside git and DVC."""
        self.train = self.experiments / "train"
        """Output of stage train: train.json, adapter/, checkpoints/best and checkpoints/last."""
        self.train_report = self.train / "train.json"
        self.adapter = self.train / "adapter"
        self.evaluate = self.experiments / "evaluate"
        """Output of stage evaluate: eval.json, samples/*.jsonl, confusion matrix."""
        self.eval_report = self.evaluate / "eval.json"
        self.quantization = self.experiments / "quantization"
        """Output of `ratchet evaluate --quantization` (not a stage): quantization.json and quantization.html."""
        self.export = self.experiments / "export"
        """Output of stage export: bundle.json, sbom.json, hf/, gguf/*.gguf, onnx/*/."""
        self.bundle = self.export / "bundle.json"
        self.merged_model = self.export / "hf"
        self.sbom = self.export / "sbom.json"
        """Libraries, base and data of the exported model, as CycloneDX."""
        self.keyring = root / ".ratchet" / "keys.json"
        """Public keys that this project trusts, and revoked keys; committed to git."""
        self.private_key = root / ".ratchet" / "private.pem"
        """Signing key, unless RATCHET_SIGNING_KEY names another; readable only by its owner, ignored by git."""
        self.evidence = self.mlruns / "evidence"
        """Evaluation results of promoted models, with rows of the data; one folder per model."""
        self.scores = self.experiments / "scores"
        """Cache of scores by model and contract, kept across evaluations and crashes; outside git and DVC."""
        self.noise = self.experiments / "noise"
        """Output of `ratchet gate --aa` (not a stage): noise.json and samples/."""
        self.objectives = self.experiments / "objectives"
        """Sets of samples that select models and must not be in the test set; one JSON file (`ObjectiveSet`) per
        set."""
        self.sweeps = self.experiments / "sweeps"
        """Studies of sweeps, with a folder per study and a common journal; outside git and DVC."""
        self.studies = self.sweeps / "studies.db"
        """SQLite file with all studies of Optuna; unused if machine.study_storage is a database."""
        self.pages = self.experiments / "pages"
        """Reports of `ratchet compare` and `ratchet report`; outside git and DVC."""
        self.admission = self.experiments / "admission.json"
        """Result of `ratchet doctor --require` on this machine; outside git and DVC."""
        self.test_set_uses = self.experiments / "test_set_uses.jsonl"
        """Uses of test sets: one JSON line per evaluated or judged model; committed to git."""
        self.gate = self.experiments / "gate"
        """Output of stage gate: verdict.json."""
        self.gate_page = self.experiments / "report" / "gate.html"
        """Output of stage gate: the verdict with its evidence as HTML."""
        self.verdict = self.gate / "verdict.json"
        self.champion = self.experiments / "champion.json"
        """Version of the champion; committed to git, so git log is the promotion history."""
        self.promotions = self.experiments / "promotions.jsonl"
        """The promotion ledger: JSON lines, each with the digest of the previous one; committed to git."""
        self.promotion_intent = self.mlruns / "promotion.json"
        """Intent of a promotion in progress, so that it can be completed after a crash."""
        self.outbox = self.mlruns / "outbox"
        """Events for hooks, with the state of their delivery: a folder per event."""
        self.mlflow_database = self.mlruns / "mlflow.db"
        self.artifacts = self.mlruns / "artifacts"
        """Artifacts of MLflow runs."""
        self.models = self.mlruns / "models"
        """Promoted models: a sealed directory per model digest. Registered versions point to them."""

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
    def chat_template(self) -> Path | None:
        """Chat template of the project, which replaces that of the tokenizer; None unless base.chat_template is set."""
        path = self.base / CHAT_TEMPLATE_FILE
        return path if path.is_file() else None

    def sweep(self, study: str) -> Path:
        """Return the folder of a study: report.json, page.html, finals/, plots/."""
        return self.sweeps / study

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

    def promoted_model(self, model_digest: str) -> Path:
        """Return the directory of a promoted model: bundle, verdict, evaluation, gate.html, adapter/, hf/."""
        return self.models / model_digest[:16]
