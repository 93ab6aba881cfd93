"""README.md of a promoted model: the card of all its forms, in its folder and in every release.

From bundle.json's facts alone, so equal facts give equal bytes: no row of the data, no path of a machine, no time, and
nothing that differs from one repetition to the next, such as speed. Front matter is what the Hugging Face hub reads
(https://huggingface.co/docs/hub/model-cards#model-card-metadata).
"""

import json
import re
from collections.abc import Iterator, Mapping

from ratchet.registry.bundle_files import artifact_path
from ratchet.storage import html
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.export import ExportArtifact, ModelBundle, ModelLineage
from ratchet.storage.records.gate import ForcedPromotion

CARD = "README.md"
_MARKS = re.compile(r"([\\`*_\[\]<>|])")
"""What Markdown would obey, in the texts of people."""


def render_card(bundle: ModelBundle, name: str, forced: ForcedPromotion | None, commands: Mapping[str, str]) -> str:
    """The card.

    Args:
        bundle: what was exported, and how it was measured.
        name: of the registered model.
        forced: who promoted it against the verdict; None: the gate was for it.
        commands: how to use each form, by the form's name: a command or a line of Python.
    """
    lines = [*_front(bundle.lineage), f"# {escape_markdown(name)}", ""]
    if forced is not None:
        lines += [f"**{escape_markdown(describe_forced(forced))}**", ""]
    lines += ["## The model", "", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in _model(bundle)), ""]
    if bundle.artifacts:
        lines += [*_forms(bundle), *_use(bundle, commands)]
    return "\n".join(lines).rstrip() + "\n"


def describe_forced(forced: ForcedPromotion) -> str:
    """Who forced the promotion, against what, and why."""
    against = "the model had been rolled back" if forced.decision == "PROMOTE" else f"the gate said {forced.decision}"
    return f"FORCED by {forced.by} although {against}: {forced.reason}"


def escape_markdown(written: str) -> str:
    """Text that stays text in Markdown, in one line and in its cell of a table."""
    return _MARKS.sub(r"\\\1", html.escape_invisible(" ".join(written.split())))


def _front(lineage: ModelLineage | None) -> list[str]:
    """YAML between two lines of dashes. Texts are written as JSON strings, which YAML reads as what they are."""
    front: dict[str, object] = {"pipeline_tag": "text-generation"}
    if lineage is not None and lineage.base.revision is not None:
        front |= {"base_model": lineage.base.source, "base_model_relation": "finetune"}
    licence = lineage.base.licence if lineage is not None else None
    if licence is not None and re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", licence.lower()):
        front["license"] = licence.lower()
    elif licence is not None:
        front |= {"license": "other", "license_name": licence}
    front["tags"] = ["ratchet"]
    return ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]


def _model(bundle: ModelBundle) -> Iterator[tuple[str, str]]:
    """Where it comes from, row by row."""
    lineage = bundle.lineage
    yield "Model, digest", f"`{bundle.model_digest}`"
    if lineage is not None:
        yield "Base", _base(lineage.base)
    yield "Base, SHA-256", f"`{bundle.base_digest}`"
    if lineage is not None:
        yield "Licence of the base", escape_markdown(lineage.base.licence or "the base declares none")
        rows = ", ".join(f"{count:,} {split}" for split, count in sorted(lineage.data_rows.items()))
        yield "Data", escape_markdown(f"rows: {rows}; licence: {lineage.data_licence or 'not declared'}")
    yield "Data, SHA-256", f"`{bundle.data_digest}`"
    step = f", the weights of step {lineage.kept_step:,}" if lineage is not None else ""
    yield "Run", f"`{bundle.run_id}`{step}"
    yield "Adapter, SHA-256", f"`{bundle.adapter_digest}`"
    yield from _merge(bundle)
    if lineage is not None:
        yield "Made by", escape_markdown(f"Ratchet {lineage.code}; libraries in sbom.json")


def _base(base: BaseCard) -> str:
    """Not where it lay on somebody's disk."""
    if base.revision is not None:
        named = f"[{escape_markdown(base.source)}](https://huggingface.co/{base.source}) at `{base.revision}`"
    else:
        named = "tiny, made by Ratchet" if base.source == "tiny" else "not from the hub"
    return f"{named}, {escape_markdown(base.architecture)}, {base.parameters:,} weights"


def _merge(bundle: ModelBundle) -> Iterator[tuple[str, str]]:
    weights = bundle.merge.adapters if bundle.merge is not None else {}
    if any(weight != 1 for weight in weights.values()) or len(weights) > 1:
        yield "Adapters merged", ", ".join(f"`{sha}` x {weight:g}" for sha, weight in sorted(weights.items()))
    held = f" (held in training as {bundle.base_form})" if bundle.base_form else ""
    yield "Merged into", escape_markdown(f"the {bundle.into}{held}, stored in {bundle.dtype}")
    parity = bundle.parity
    yield (
        "Merged model against base + adapter",
        f"largest difference of a logit {parity.max_logit_difference:.3g}, mean {parity.mean_logit_difference:.3g}; "
        f"the same most likely token at {parity.greedy_agreement:.2%} of {parity.tokens:,} positions",
    )


def _forms(bundle: ModelBundle) -> Iterator[str]:
    positions = bundle.artifacts[0].closeness.positions
    task = next((one.task for one in bundle.artifacts if one.task is not None), None)
    yield from ("## Forms", "")
    yield (
        f"Each was run in its own runtime and compared with base + adapter, at {positions:,} answer "
        "positions of test rows: mean Kullback-Leibler divergence in nats (KL), and how often both hold the same token "
        "most likely."
    )
    if task is not None:
        yield (
            f"Task: {escape_markdown(task.metric)} on {task.rows:,} test rows, "
            f"where base + adapter has {task.reference:.4g}; "
            "in brackets the difference from it, with its paired 95 % interval."
        )
    yield from ("", "| Form | Type | Bytes | KL | Same token | Task | Runtime |", "|---|---|---:|---:|---:|---|---|")
    yield from map(_row, bundle.artifacts)
    yield ""
    notes = [f"- `{one.name}`: {escape_markdown(note)}" for one in bundle.artifacts for note in one.notes]
    yield from (*notes, *([""] if notes else []))


def _row(one: ExportArtifact) -> str:
    task, close = one.task, one.closeness
    scored = f"{task.value:.4g} ({task.difference:+.4g}, {task.low:+.4g} to {task.high:+.4g})" if task else "no answers"
    cells = [
        f"`{one.name}`", escape_markdown(one.type), f"{one.size_bytes:,}", f"{close.kl:.3g}",
        f"{close.greedy_agreement:.2%}", scored, escape_markdown(one.runtime),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _use(bundle: ModelBundle, commands: Mapping[str, str]) -> Iterator[str]:
    yield from ("## Use", "")
    yield (
        "A directory that was deployed holds one of these forms: release.json names it, and SERVE.md has all of its "
        "commands. In its root:"
    )
    for one in bundle.artifacts:
        yield from ("", f"`{artifact_path(one)}`:", "", f"    {commands[one.name]}")
