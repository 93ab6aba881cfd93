"""Layout of a project: the paths of all its files and folders."""

import os
from pathlib import Path

from ratchet.errors import ProjectError

RUNS_VARIABLE = "RATCHET_RUNS"
"""Environment variable that names another directory for runs, profiles and generations, such as on a larger disk."""

CHAT_TEMPLATE_FILE = "chat_template.jinja"

DVC_ROOT_VARIABLE = "DVC_ROOT"
"""Environment variable in which DVC passes the root of its repository to a stage. In the temporary workspace of an
experiment (`dvc queue start`, `dvc exp run --temp`), it names the repository to which the experiment belongs."""

EXPERIMENT_WORKSPACES = Path(".dvc", "tmp", "exps")
"""Directory of these workspaces in that repository. DVC removes a workspace when its experiment ends."""


QUEUE_WORKSPACES = Path("experiments", "queue")
"""Directory of the workspaces of jobs in a project (stages/work.py)."""


def find_user_cache() -> Path:
    """Return Ratchet's folder for what can be made again: `$XDG_CACHE_HOME/ratchet`, by default `~/.cache/ratchet`.
    Raises RuntimeError if the user has no home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache.absolute() / "ratchet"


class ProjectLayout:
    """Paths of a project. `root` is absolute and contains params.yaml and dvc.yaml.

    An experiment of DVC, or a job of the queue, may run in a temporary workspace, a copy of the project. There,
    `shared_root` is the project itself. Files that git and DVC do not carry (runs, scores, MLflow) are in it, so that
    they outlive the workspace and every experiment has the same. Several processes may write them at once. Outputs of
    stages are in the workspace.
    """

    def __init__(self, root: Path) -> None:  # noqa: PLR0915 (one assignment for each path)
        self.root = root
        self.shared_root = _find_shared_root(root)
        self.mlruns = self.shared_root / "mlruns"
        shared_experiments = self.shared_root / "experiments"
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
        self.streamed_shards = self.experiments / "streamed_shards"
        """Shards of streamed datasets that an unfinished stage prepare has read; outside git and DVC."""
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
        """Output of stage export: bundle.json, sbom.json, hf/, gguf/*.gguf, bitsandbytes/*/, onnx/*/."""
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
        self.scores = shared_experiments / "scores"
        """Cache of scores by model and contract, kept across evaluations and crashes; outside git and DVC."""
        self.noise = self.experiments / "noise"
        """Output of `ratchet gate --aa` (not a stage): noise.json and samples/."""
        self.objectives = self.experiments / "objectives"
        """Sets of samples that select models and must not be in the test set; one JSON file (`ObjectiveSet`) per
        set."""
        self.sweeps = shared_experiments / "sweeps"
        """Studies of sweeps, with a folder per study and a common journal; outside git and DVC."""
        self.studies = self.sweeps / "studies.db"
        """SQLite file with all studies of Optuna; unused if machine.study_storage is a database."""
        self.queue = shared_experiments / "queue"
        """Workspaces and logs of jobs that `ratchet work` runs here; outside git and DVC."""
        self.job_queue = self.queue / "jobs.db"
        """SQLite file with the jobs of `ratchet submit`; unused if machine.study_storage is a database."""
        self.pages = shared_experiments / "pages"
        """Reports of `ratchet compare` and `ratchet report`; outside git and DVC."""
        self.monitor = shared_experiments / "monitor"
        """State of `ratchet monitor`, with a folder per version; outside git and DVC."""
        self.admission = self.experiments / "admission.json"
        """Result of `ratchet doctor --require` on this machine; outside git and DVC."""
        self.start_adapters = self.experiments / "start_adapters.json"
        """Adapters that train.init_adapter means by a branch of the hub, or by `champion`; committed to git."""
        self.start_weights = self.experiments / "start_weights"
        """Best weights of trials from which others start: a folder per digest; outside git and DVC."""
        self.test_set_uses = self.experiments / "test_set_uses.jsonl"
        """Uses of test sets: one JSON line per evaluated or judged model; committed to git."""
        self.experiment_uses = self.mlruns / "test_set_uses.jsonl"
        """Uses of test sets by experiments in temporary workspaces; read together with `test_set_uses`."""
        self.judgements = self.experiments / "judgements.jsonl"
        """Judgements of people (`ratchet label`): one JSON line per judgement; committed to git, an input of stage
        gate."""
        self.gate = self.experiments / "gate"
        """Output of stage gate: verdict.json."""
        self.gate_page = self.experiments / "report" / "gate.html"
        """Output of stage gate: the verdict with its evidence as HTML."""
        self.verdict = self.gate / "verdict.json"
        self.champion = self.experiments / "champion.json"
        """Version of the champion; committed to git, so git log is the promotion history."""
        self.promotions = self.experiments / "promotions.jsonl"
        """The promotion ledger: JSON lines, each with the digest of the previous one; committed to git."""
        self.approvals = self.experiments / "approvals"
        """Signed proposals and approvals of promotions: a folder per verdict, a file per signer; committed to git."""
        self.pushes = self.experiments / "pushes.jsonl"
        """Pushes to the Hugging Face hub: one JSON line per commit; committed to git."""
        self.deployments = self.experiments / "deployments.jsonl"
        """Deployments from this project: one JSON line per change of a deployment directory; committed to git."""
        self.push = self.experiments / "push"
        """Files of a push that is not finished; outside git and DVC."""
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
        """Find the project that contains the folder `start`. Raises ProjectError if folder or project do not exist."""
        if not start.is_dir():
            raise ProjectError(f"{start}: no such directory; expected the folder of a project, or a folder inside it")
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
    def test_set_uses_lock(self) -> Path:
        """Lock file that a process must lock to record the use of a test set."""
        return self.shared_root / "experiments" / ".locks" / "test_set_uses"

    @property
    def name(self) -> str:
        """Name of the project's directory."""
        return self.shared_root.name

    @property
    def is_temporary(self) -> bool:
        """Whether `root` is the temporary workspace of an experiment of DVC, or of a job of the queue."""
        return self.shared_root != self.root

    @property
    def runs(self) -> Path:
        """Run directories; outside git and DVC, because DVC would delete checkpoints when a stage runs again."""
        return self._runs_root or self.shared_root / "experiments" / "runs"

    @property
    def profiles(self) -> Path:
        """Output of `ratchet train --profile`: a folder per RunId; outside git and DVC.

        A profile is made in a run directory of its own, so RATCHET_RUNS moves profiles too.
        """
        return self._runs_root / ".profiles" if self._runs_root else self.shared_root / "experiments" / "profiles"

    @property
    def generations(self) -> Path:
        """Run directories of `ratchet generate`; outside git and DVC. RATCHET_RUNS moves them too."""
        if self._runs_root:
            return self._runs_root / ".generations"
        return self.shared_root / "experiments" / "generations"

    @property
    def _runs_root(self) -> Path | None:
        """The directory in RUNS_VARIABLE, if it is set."""
        directory = os.environ.get(RUNS_VARIABLE)
        return Path(directory).resolve() if directory else None

    def promoted_model(self, model_digest: str) -> Path:
        """Return the directory of a promoted model: bundle, verdict, evaluation, gate.html, adapter/, hf/."""
        return self.models / model_digest[:16]


def _find_shared_root(root: Path) -> Path:
    """Return the project to which the workspace of an experiment or job belongs; `root` itself if it is none."""
    if root.parent.parts[-2:] == QUEUE_WORKSPACES.parts and (root.parents[2] / "params.yaml").is_file():
        return root.parents[2]
    repository = Path(os.environ.get(DVC_ROOT_VARIABLE, "")).resolve()
    if not root.is_relative_to(repository / EXPERIMENT_WORKSPACES):
        return root
    # The project may be in a subdirectory of the repository, of which the workspace is a copy.
    copy = next((folder for folder in (root, *root.parents) if (folder / ".dvc").is_dir()), root)
    return repository / root.relative_to(copy)
