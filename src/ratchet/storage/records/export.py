"""Records of the exported model: its formats, their distance from the trained model, and its lineage."""

from collections.abc import Callable
from typing import Any, Literal

from ratchet.storage.records.base import BaseCard, Record

FormatKind = Literal["hf", "gguf", "bitsandbytes", "onnx"]

Progress = Callable[[str, int, int], None]
"""Progress callback. Arguments: current work, amount done, total amount (in bytes, tensors or rows)."""


class MergeParity(Record):
    """Comparison of the merged model, reloaded from disk, with base + adapter on the same test rows."""

    rows: int
    tokens: int
    """Number of compared answer positions."""
    max_logit_difference: float
    mean_logit_difference: float
    greedy_agreement: float
    """Share of answer positions with the same most likely token."""


class DistributionDistance(Record):
    """Comparison of a format's next-token distributions with those of base + adapter, at answer positions."""

    rows: int
    positions: int
    max_difference: float
    """Largest absolute log-probability difference in nats, over tokens that base + adapter gives a probability above
    1 / (1000 x vocabulary)."""
    mean_difference: float
    kl: float
    """Mean KL divergence from base + adapter, in nats."""
    max_kl: float
    greedy_agreement: float
    """Share of positions with the same most likely token."""
    perplexity: float
    """Perplexity of the reference answers at these positions."""
    reference_perplexity: float
    """Perplexity of base + adapter at these positions."""


class TaskScore(Record):
    """Task score of a format, and its difference from base + adapter."""

    metric: str
    """Name of the metric: accuracy, exact_match or token_f1."""
    rows: int
    value: float
    reference: float
    """Value of base + adapter on the same rows."""
    difference: float
    """value - reference."""
    low: float
    high: float
    """Bounds of the paired two-sided 95 % interval of the difference."""
    same_answers: float
    """Share of rows with the same answer tokens as base + adapter."""


class ExportProbe(Record):
    """A built-in question, and the greedy answer of a format in its runtime."""

    question: str
    prompt_ids: tuple[int, ...]
    """Tokens of the prompt, by the chat template and the format's own tokenizer."""
    answer_ids: tuple[int, ...]
    answer: str
    margins: tuple[float, ...]
    """Margin of each answer token over the second most likely one, in nats. Near ties may differ on other machines."""


class ExportArtifact(Record):
    """The model in one format, with results of runs in its runtime."""

    name: str
    """`hf`, `gguf/q8_0`, `onnx/int8`; also the path in the export."""
    kind: FormatKind
    type: str
    """Type of its weights: float32, q8_0, int8."""
    digest: str
    """Fingerprint of its files."""
    size_bytes: int
    runtime: str
    """Name and version of the runtime."""
    distance: DistributionDistance
    task: TaskScore | None
    """Task score on the test rows; None if no test row has an answer."""
    texts_tokenised: int
    """Number of texts (emoji, code, digits, special tokens, prompts) that its tokenizer splits into the same tokens."""
    texts: int
    """Number of texts that were compared."""
    second_reader: str | None = None
    """Name of a second reader of the same file, such as transformers' GGUF loader."""
    second_reader_difference: float | None = None
    """Largest logit difference between the second reader and the merged model, if comparable."""
    tokens_per_second: float
    """Generated tokens per second, one answer at a time, on the machine that exported."""
    threads: int
    """CPU threads of the runtime."""
    probes: tuple[ExportProbe, ...] = ()
    """Probes with the settings for serving."""
    notes: tuple[str, ...] = ()


class ModuleDifference(Record):
    """Comparison of a module of the merged model with the same module of base + adapter, on the same input."""

    name: str
    max_difference: float
    """Largest absolute output difference."""
    scale: float
    """Largest absolute output of base + adapter; for a decoder layer, the largest change of its input."""


class MergeCheck(Record):
    """Check of a merge by module and layer, against base + adapter with the same weights."""

    modules: int
    layers: int
    worst: tuple[ModuleDifference, ...]
    """The largest differences relative to scale, worst first; at most eight."""
    tolerance: float
    """Allowed difference / scale; depends on the type of the merged weights."""
    adapter_effect: float
    """Largest logit difference between merged model and base. 0 if the adapter has no effect."""


class MergeTrial(Record):
    """A merge into one base, and its comparison with the trained model."""

    merge_base: Literal["dequantized", "original"]
    parity: MergeParity
    kl: float
    """Mean KL divergence from base + adapter at answer positions, in nats."""
    check: MergeCheck


class AdapterRetention(Record):
    """Result of an adapter in a merge with others: the loss of its answers alone and merged, in nats per token."""

    adapter: str
    """Path of the adapter as in the settings; `trained` for the project's own."""
    weight: float
    rows: int
    """Number of validation rows, of the adapter's own data if they were named."""
    base: float
    """Mean over rows of the loss of the base without adapters."""
    alone: float
    """The same with this adapter alone, with weight 1."""
    merged: float
    """The same for the merged model."""
    low: float
    high: float
    """Bounds of the paired 95 % interval of merged - alone."""


class MergeReport(Record):
    """Merged adapters, and the quality of the merge."""

    adapters: dict[str, float]
    """Weight of each adapter, by digest."""
    modules: tuple[str, ...]
    """Patterns of the merged modules; empty: all."""
    changed: int
    """Number of changed tensors."""
    streamed: bool
    """Whether tensors were merged one at a time. Otherwise the complete model was merged in memory, because the tensor
    names in its files could not be mapped to parameters."""
    trials: tuple[MergeTrial, ...]
    """Merges that were tried. The bundle names the base of the selected merge."""
    method: str = "linear"
    """How several adapters were combined."""
    density: float | None = None
    """Share of the entries of each update that the method kept; None for linear."""
    retention: tuple[AdapterRetention, ...] = ()
    """The loss of each adapter, if several were merged."""


class ServedAdapter(Record):
    """An adapter in a server with several adapters, compared with base + adapter as peft computes it."""

    name: str
    digest: str
    rank: int
    """Largest rank of its matrices."""
    distance: DistributionDistance
    """Distance of the server with this adapter from base + adapter."""
    effect: float
    """Mean KL divergence of the base alone from base + adapter, in nats: the distance if the adapter were ignored."""


class AdapterServer(Record):
    """Result of `ratchet adapters`: base and adapters for one server."""

    base_digest: str
    base_file: str
    """GGUF file of the base, relative to the directory."""
    base: DistributionDistance
    """Distance of the server without an adapter from the base."""
    adapters: tuple[ServedAdapter, ...]
    runtime: str
    """Server in which they were tested."""


class BaseScan(Record):
    """Scan of the base's files for code that would run when they are loaded."""

    files: int
    """Number of scanned files."""
    pickles: tuple[str, ...]
    """Files that are or contain pickles; they are never unpickled."""
    suspicious: tuple[str, ...]
    """Imports in pickles that are not known as harmless or dangerous."""
    scanner: str


class ModelLineage(Record):
    """Lineage of a model."""

    base: BaseCard
    data_digest: str
    data_rows: dict[str, int]
    """Number of rows by split."""
    data_licence: str | None
    settings: dict[str, Any]
    """Sections of params.yaml that determine results: all sections except machine and promote."""
    run_id: str
    kept_step: int
    """Step whose checkpoint is the adapter."""
    code: str
    """Version of Ratchet, with its commit if known."""
    recipe: str
    """Digest of the run's identity."""
    sbom_digest: str
    """SHA-256 of sbom.json (CycloneDX: libraries, base and data)."""
    scan: BaseScan


class ModelBundle(Record):
    """The exported model in all its formats, which are promoted as a unit."""

    model_digest: str
    """Digest of the files of all formats; identifies the model in evaluation, verdict and promotion."""
    adapter_digest: str
    base_digest: str
    data_digest: str
    run_id: str
    merge_base: str
    dtype: str
    size_bytes: int
    """Size of the merged model (`hf`), in bytes."""
    parity: MergeParity
    """Comparison of the merged model with base + adapter."""
    base_weight_format: str = ""
    """Storage of the base's weights in training, e.g. `nf4+dq uint8`, `none`."""
    merge: MergeReport | None = None
    """Report of the merge. This field and the next ones are missing in bundles of earlier versions."""
    artifacts: tuple[ExportArtifact, ...] = ()
    """Exported formats, `hf` first."""
    lineage: ModelLineage | None = None
    evaluation: str | None = None
    """SHA-256 of eval.json. This field and `verdict` are set when the model is promoted."""
    verdict: str | None = None

    @property
    def merge_target(self) -> str:
        """Base that the adapter was merged into, for display."""
        own = self.lineage.base.quantization if self.lineage else None
        return "base" if self.base_weight_format == "none" and own is None else f"{self.merge_base} base"

    def artifact(self, name: str) -> ExportArtifact | None:
        """Return a format by name; None if it was not exported."""
        return next((artifact for artifact in self.artifacts if artifact.name == name), None)
