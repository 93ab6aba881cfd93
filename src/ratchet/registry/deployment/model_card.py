"""Renders the model card: README.md of a promoted model and of its releases, which describes all formats.

The card contains only facts from bundle.json and eval.json, so equal facts give equal bytes. It contains no row of the
data, no path of a machine, no time, and no measured speed. The front matter follows the Hugging Face hub
(https://huggingface.co/docs/hub/model-cards#model-card-metadata).
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from ratchet.config import units
from ratchet.models.model_card import Publication, format_front_matter
from ratchet.registry.model_store import artifact_path
from ratchet.storage import html
from ratchet.storage.records.evaluation import (
    SAFETY_PREFIX,
    SAFETY_TESTS,
    EvaluationReport,
    ModelRole,
    list_untested,
)
from ratchet.storage.records.export import ExportArtifact, ModelBundle
from ratchet.storage.records.gate import ForcedPromotion
from ratchet.storage.records.push import ForcedPush

MODEL_CARD = "README.md"
_MARKDOWN_CHARACTERS = re.compile(r"([\\`*_\[\]<>|])")
"""Characters with a meaning in Markdown."""


def render_card(
    bundle: ModelBundle,
    name: str,
    forced: ForcedPromotion | None,
    commands: Mapping[str, str],
    evaluation: EvaluationReport | None,
) -> str:
    """Render the card.

    Args:
        bundle: the exported model and its measurements.
        name: name of the registered model.
        forced: the forced promotion; None: the promotion was not forced.
        commands: a command or a line of Python for each format, by the format's name.
        evaluation: evaluation of the model; None: not evaluated.
    """
    lines = [_front_matter(bundle, name), f"# {escape_markdown(name)}", ""]
    if forced is not None:
        lines += [f"**{escape_markdown(describe_forced(forced))}**", ""]
    lines += ["## Model", "", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in _facts(bundle)), ""]
    if bundle.artifacts:
        lines += [*_formats(bundle), *_usage(bundle, commands), ""]
    role: ModelRole = "merged" if evaluation is not None and "merged" in evaluation.scores else "candidate"
    lines += describe_coverage(evaluation, role)
    return "\n".join(lines).rstrip() + "\n"


def describe_forced(forced: ForcedPromotion | ForcedPush) -> str:
    """Describe a forced promotion or push: the actor, the overridden decision, and the reason."""
    return f"FORCED by {forced.actor} despite {forced.obstacle}: {forced.reason}"


def escape_markdown(text: str) -> str:
    """Escape a text so that Markdown shows it unchanged, in one line and in one table cell."""
    return _MARKDOWN_CHARACTERS.sub(r"\\\1", html.escape_invisible(" ".join(text.split())))


def describe_coverage(evaluation: EvaluationReport | None, role: ModelRole) -> Iterator[str]:
    """Yield a section about the tests that were made, those that were not, and the figures of safety.

    Args:
        evaluation: evaluation of the model; None: not evaluated.
        role: form of the model whose figures are shown.
    """
    yield from ("## What was tested and what was not", "")
    safety = evaluation.safety if evaluation is not None else None
    if evaluation is not None:
        yield "- Tested: quality on test rows, with the metrics of `ratchet evaluate`."
    if safety is not None:
        yield from (f"- Tested: {SAFETY_TESTS[name]}." for name in safety.tested)
    yield from (f"- Not tested: {description}." for description in list_untested(evaluation))
    yield "- Not tested: other languages, subjects and attacks. A passed test does not exclude harm."
    yield ""
    if evaluation is None or safety is None:
        return
    yield from (f"Safety tests; answers were judged by {escape_markdown(safety.scorer)}.", "")
    names = sorted(name for name in evaluation.scores[role].metrics if name.startswith(SAFETY_PREFIX))
    yield from (*format_metrics(evaluation, role, names), "")
    if safety.untestable_rows:
        yield f"Training rows that were too short to be tested for memorization: {safety.untestable_rows:,}."
    found = [one for one in safety.differences.get(role, ()) if one.is_significant]
    for one in found:
        yield (
            f"- Difference between groups in {one.score}: {escape_markdown(one.second)} minus "
            f"{escape_markdown(one.first)} {one.difference:+.3f} ({one.low:+.3f} to {one.high:+.3f}, "
            f"{units.format_count(one.templates, 'template')})"
        )
    yield from ([""] if safety.untestable_rows or found else [])


def format_metrics(evaluation: EvaluationReport, role: ModelRole, names: Sequence[str]) -> Iterator[str]:
    """Yield a table of metrics of a model, with those of the base."""
    yield from ("| Metric | Value | 95 % interval | Samples | Base |", "|---|---:|---:|---:|---:|")
    base = evaluation.scores.get("base")
    for name in names:
        metric = evaluation.scores[role].metrics[name]
        of_base = base.metrics.get(name) if base is not None else None
        cells = [
            escape_markdown(name), f"{metric.value:.4g}", f"{metric.low:.4g} to {metric.high:.4g}",
            f"{metric.n:,}", f"{of_base.value:.4g}" if of_base is not None else "",
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def _front_matter(bundle: ModelBundle, name: str) -> str:
    """Return the hub's metadata, with the score of each format on the test rows."""
    from huggingface_hub import EvalResult

    results = [
        EvalResult(
            task_type="text-generation", dataset_type="private", dataset_name="test rows of the project",
            dataset_args={"rows": task.rows, "data_sha256": bundle.data_digest},
            metric_type=task.metric, metric_value=task.value, metric_name=f"{task.metric} of {artifact.name}",
        )
        for artifact in bundle.artifacts
        if (task := artifact.task) is not None
    ]  # fmt: skip
    base = bundle.lineage.base if bundle.lineage is not None else None
    return format_front_matter(base, "finetune", [], publication=Publication(name, tuple(results)))


def _facts(bundle: ModelBundle) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table about the model's origin."""
    lineage = bundle.lineage
    yield "Model digest", f"`{bundle.model_digest}`"
    if lineage is not None:
        base = lineage.base
        source = "tiny, created by Ratchet" if base.source == "tiny" else "not from the hub"  # no local path
        if base.revision is not None:
            name = escape_markdown(base.source)
            source = f"[{name}](https://huggingface.co/{base.source}) at `{base.revision}`"
        yield "Base", f"{source}, {escape_markdown(base.architecture)}, {base.parameters:,} weights"
    yield "Base SHA-256", f"`{bundle.base_digest}`"
    if lineage is not None:
        yield "Licence of the base", escape_markdown(lineage.base.licence or "not declared")
        rows = ", ".join(f"{count:,} {split}" for split, count in sorted(lineage.data_rows.items()))
        yield "Data", escape_markdown(f"rows: {rows}; licence: {lineage.data_licence or 'not declared'}")
    yield "Data SHA-256", f"`{bundle.data_digest}`"
    step = f", weights of step {lineage.kept_step:,}" if lineage is not None else ""
    yield "Run", f"`{bundle.run_id}`{step}"
    yield "Adapter SHA-256", f"`{bundle.adapter_digest}`"
    weights = bundle.merge.adapters if bundle.merge is not None else {}
    if any(weight != 1 for weight in weights.values()) or len(weights) > 1:
        yield "Adapters merged", ", ".join(f"`{sha}` x {weight:g}" for sha, weight in sorted(weights.items()))
    storage = f" (stored in training as {bundle.base_weight_format})" if bundle.base_weight_format else ""
    yield "Merged into", escape_markdown(f"the {bundle.merge_target}{storage}, stored in {bundle.dtype}")
    parity = bundle.parity
    yield (
        "Merged model compared with base + adapter",
        f"largest difference of a logit {parity.max_logit_difference:.3g}, mean {parity.mean_logit_difference:.3g}; "
        f"same most likely token at {parity.greedy_agreement:.2%} of {parity.tokens:,} positions",
    )
    if lineage is not None:
        yield "Created by", escape_markdown(f"Ratchet {lineage.code}; libraries in sbom.json")


def _formats(bundle: ModelBundle) -> Iterator[str]:
    positions = bundle.artifacts[0].distance.positions
    task = next((artifact.task for artifact in bundle.artifacts if artifact.task is not None), None)
    yield from ("## Formats", "")
    yield (
        f"Each format was run in its own runtime and compared with base + adapter at {positions:,} answer positions of "
        "test rows. KL is the mean Kullback-Leibler divergence in nats. Same token is the share of positions with the "
        "same most likely token."
    )
    if task is not None:
        yield (
            f"Task is {escape_markdown(task.metric)} on {task.rows:,} test rows; base + adapter has "
            f"{task.reference:.4g}. The difference from it and its paired 95 % interval are in parentheses."
        )
    yield from ("", "| Format | Type | Bytes | KL | Same token | Task | Runtime |", "|---|---|---:|---:|---:|---|---|")
    yield from map(_row, bundle.artifacts)
    yield ""
    notes = [
        f"- `{artifact.name}`: {escape_markdown(note)}" for artifact in bundle.artifacts for note in artifact.notes
    ]
    yield from (*notes, *([""] if notes else []))


def _row(artifact: ExportArtifact) -> str:
    task, distance = artifact.task, artifact.distance
    score = f"{task.value:.4g} ({task.difference:+.4g}, {task.low:+.4g} to {task.high:+.4g})" if task else "no answers"
    cells = [
        f"`{artifact.name}`", escape_markdown(artifact.type), f"{artifact.size_bytes:,}", f"{distance.kl:.3g}",
        f"{distance.greedy_agreement:.2%}", score, escape_markdown(artifact.runtime),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _usage(bundle: ModelBundle, commands: Mapping[str, str]) -> Iterator[str]:
    yield from ("## Usage", "")
    yield (
        "A deployed directory contains one of these formats: release.json names it, and SERVE.md lists all commands "
        "for it. Run in the directory:"
    )
    for artifact in bundle.artifacts:
        yield from ("", f"`{artifact_path(artifact)}`:", "", f"    {commands[artifact.name]}")
