"""What was exported, how close each form is to what was trained, and where it comes from: see records.py."""

from collections.abc import Callable
from typing import Any, Literal

from ratchet.storage.records.base import BaseCard, Record

FormatKind = Literal["hf", "gguf", "onnx"]

Progress = Callable[[str, int, int], None]
"""Told by whoever merges, writes or compares: what is being done, how much of it is done, how much there is (bytes,
tensors, rows)."""


class MergeParity(Record):
    """The merged model, reloaded from disk, against base + adapter on the same test rows."""

    rows: int
    tokens: int
    """Answer positions compared."""
    max_logit_difference: float
    mean_logit_difference: float
    greedy_agreement: float
    """Fraction of answer positions with the same most likely token."""


class DistributionDistance(Record):
    """Next-token distributions of one form against base + adapter, at answer positions of the same test rows."""

    rows: int
    positions: int
    max_difference: float
    """Largest absolute difference of any log-probability, in nats, among tokens that base + adapter holds likely:
    above a thousandth of an even share, 1 / (1000 x vocabulary)."""
    mean_difference: float
    kl: float
    """Mean Kullback-Leibler divergence from base + adapter, in nats."""
    max_kl: float
    greedy_agreement: float
    """Fraction of positions with the same most likely token."""
    perplexity: float
    """Of the true answers' tokens at these positions."""
    reference_perplexity: float
    """The same of base + adapter."""


class TaskScore(Record):
    """Answers to the gate's samples, beside those of base + adapter."""

    metric: str
    """accuracy, exact_match or token_f1."""
    rows: int
    value: float
    reference: float
    """Of base + adapter on the same rows."""
    difference: float
    """Value - reference."""
    low: float
    high: float
    """Paired 95 % interval of the difference (two-sided)."""
    same_answers: float
    """Fraction of rows with the same answer, token by token."""


class ExportProbe(Record):
    """A question of ours, no row of the data, and what this form answered in its runtime, greedily."""

    question: str
    prompt_ids: tuple[int, ...]
    """As the chat template and the form's own tokenizer make them."""
    answer_ids: tuple[int, ...]
    answer: str
    margins: tuple[float, ...]
    """Of each answer token: log-probability above the second most likely one, in nats; ties may fall otherwise
    elsewhere."""


class ExportArtifact(Record):
    """One form of the model, and what was found when it was run."""

    name: str
    """`hf`, `gguf/q8_0`, `onnx/int8`: also its place in the export."""
    kind: FormatKind
    type: str
    """Of its weights: float32, q8_0, int8."""
    digest: str
    """Fingerprint of its files."""
    size_bytes: int
    runtime: str
    """Name and version of what ran it."""
    closeness: DistributionDistance
    task: TaskScore | None
    """None when no test row has an answer to compare with."""
    texts_tokenised: int
    """Texts (emoji, code, digits, special tokens; prompts) that its own tokenizer cut into the same tokens."""
    texts: int
    witness: str | None = None
    """A second reader of the same file, such as transformers' GGUF loader."""
    witness_difference: float | None = None
    """Largest difference of a logit between the second reader and the merged model, where it can be said."""
    tokens_per_second: float
    """Generated, one answer at a time, on the machine that exported."""
    threads: int
    """CPU threads with which it was run."""
    probes: tuple[ExportProbe, ...] = ()
    """With the settings under which it is served."""
    notes: tuple[str, ...] = ()


class ModuleDifference(Record):
    """One module of the merged model, given what the same module of base + adapter was given."""

    name: str
    max_difference: float
    """Largest absolute difference of an output."""
    scale: float
    """Largest absolute output of base + adapter there; of a decoder layer, the largest change it makes to its input."""


class MergeCheck(Record):
    """The merge, module by module and layer by layer, against base + adapter computed from the same weights."""

    modules: int
    layers: int
    worst: tuple[ModuleDifference, ...]
    """The furthest off, relative to their scale, worst first; at most eight."""
    tolerance: float
    """Difference over scale that was allowed; it follows from the type of the merged weights."""
    moved: float
    """Largest difference of a logit between merged model and bare base: above 0 unless the adapter does nothing."""


class MergeTrial(Record):
    """One way to merge, measured against the model that was trained."""

    merge_base: Literal["dequantized", "original"]
    parity: MergeParity
    kl: float
    """Mean divergence from base + adapter at answer positions, in nats."""
    check: MergeCheck


class MergeReport(Record):
    """What was merged, and how well."""

    adapters: dict[str, float]
    """Weight of every adapter, by digest."""
    modules: tuple[str, ...]
    """Patterns of those that were merged; empty: all."""
    changed: int
    """Tensors that an update was added to."""
    streamed: bool
    """Tensor by tensor, shards to shards; or as a whole in memory, where a model's files use other names than it."""
    trials: tuple[MergeTrial, ...]
    """Of the ways that were tried; the bundle names the one that was taken."""


class BaseScan(Record):
    """What came in with the base, looked through for code that would run when it is opened."""

    files: int
    """Looked at."""
    pickles: tuple[str, ...]
    """Files that are or hold pickles; they are never opened as such."""
    suspicious: tuple[str, ...]
    """What a pickle would import that is neither known as harmless nor as dangerous."""
    scanner: str


class ModelLineage(Record):
    """Where a model comes from."""

    base: BaseCard
    data_digest: str
    data_rows: dict[str, int]
    """Rows by split."""
    data_licence: str | None
    settings: dict[str, Any]
    """Every section of params.yaml that says what is learned or made; neither machine nor promote."""
    run_id: str
    kept_step: int
    """Step whose weights became the adapter: the checkpoint."""
    code: str
    """Version of Ratchet, with its commit where it is known."""
    recipe: str
    """Digest of all that identifies the run."""
    sbom_digest: str
    """SHA-256 of sbom.json: libraries, base and data, as CycloneDX."""
    scan: BaseScan


class ModelBundle(Record):
    """The exported model in all its forms, as one thing that is promoted or not."""

    model_digest: str
    """Fingerprint of the files of every form: what evaluation, verdict and promotion mean by this model."""
    adapter_digest: str
    base_digest: str
    data_digest: str
    run_id: str
    merge_base: str
    dtype: str
    size_bytes: int
    """Of the merged model, as `hf` holds it."""
    parity: MergeParity
    """Of the merged model."""
    base_form: str = ""
    """How the base's weights were held while the adapter was trained, e.g. `nf4+dq uint8`, `none`."""
    merge: MergeReport | None = None
    """None in bundles of earlier versions, as what follows."""
    artifacts: tuple[ExportArtifact, ...] = ()
    """`hf` first."""
    lineage: ModelLineage | None = None
    evaluation: str | None = None
    """SHA-256 of eval.json; known once the model is promoted, as the next."""
    verdict: str | None = None

    @property
    def into(self) -> str:
        """What the adapter was merged into, for people."""
        own = self.lineage.base.quantization if self.lineage else None
        return "base" if self.base_form == "none" and own is None else f"{self.merge_base} base"

    def artifact(self, name: str) -> ExportArtifact | None:
        """One form, by name."""
        return next((one for one in self.artifacts if one.name == name), None)
