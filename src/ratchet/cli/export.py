"""`ratchet export`: the DVC stage that merges the adapter and writes every format."""

import argparse
from typing import TYPE_CHECKING

from ratchet.cli.output import format_table, print_record
from ratchet.config.units import format_bytes
from ratchet.stages.project import Project

if TYPE_CHECKING:
    from ratchet.storage.records.export import ExportArtifact, ModelBundle

HELP = "stage: merge the adapter, write every format, run each one and compare"

HEADINGS = (
    "format", "size", "KL, nats", "same token", "answers", "difference", "same", "texts", "tokens/s", "runs in",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no flags of its own."""


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.export import export

    print_record(export(Project(arguments.project)), format_bundle, arguments)


def format_bundle(bundle: "ModelBundle") -> str:
    """Format how close the merged model is to base + adapter, then a line for each format."""
    lines = [f"model {bundle.model_digest[:12]}, merged into the {bundle.merge_target} in {bundle.dtype}"]
    if bundle.merge:
        for trial in bundle.merge.trials:
            parity, check = trial.parity, trial.check
            worst = f"; furthest off: {check.worst[0].name}, {check.worst[0].max_difference:.2g}" if check.worst else ""
            lines.append(
                f"  {trial.merge_base}{' (chosen)' * (trial.merge_base == bundle.merge_base)}: against base + adapter "
                f"on {parity.rows} rows logits differ by {parity.max_logit_difference:.2g} at most, "
                f"{parity.mean_logit_difference:.2g} on average; same greedy token at {parity.greedy_agreement:.2%}; "
                f"{check.modules} modules and {check.layers} layers as they should be{worst}"
            )
        if all(trial.check.adapter_effect == 0 for trial in bundle.merge.trials):
            lines.append("  the merged adapters change nothing: this model equals the base")
        if list(bundle.merge.adapters.values()) != [1.0] or bundle.merge.modules:
            lines.append("  base + adapter: adapters weighted by export.weight, additional_adapters and modules")
        if bundle.merge.retention:
            density = "" if bundle.merge.density is None else f", density {bundle.merge.density:g}"
            lines.append(
                f"  combined by {bundle.merge.method}{density}; loss of each adapter's answers, nats per token:"
            )
            lines += [
                f"    {found.adapter} (weight {found.weight:g}, {found.rows} rows): base {found.base:.3f}, alone "
                f"{found.alone:.3f}, merged {found.merged:.3f}, lost {found.merged - found.alone:+.3f} "
                f"[{found.low:+.3f}, {found.high:+.3f}]"
                for found in bundle.merge.retention
            ]
    lines.append(format_table([HEADINGS, *map(_format_row, bundle.artifacts)]))
    lines += [f"  {artifact.name}: {note}" for artifact in bundle.artifacts for note in artifact.notes]
    return "\n".join(lines)


def _format_row(artifact: "ExportArtifact") -> tuple[str, ...]:
    task = artifact.task
    answers = (f"{task.value:.1%}", f"{task.difference:+.1%} [{task.low:+.1%}, {task.high:+.1%}]",
               f"{task.same_answers:.1%}") if task else ("-", "-", "-")  # fmt: skip
    return (
        artifact.name, format_bytes(artifact.size_bytes),
        f"{artifact.distance.kl:.2g}", f"{artifact.distance.greedy_agreement:.2%}", *answers,
        f"{artifact.texts_tokenised}/{artifact.texts}", f"{artifact.tokens_per_second:.0f}", artifact.runtime,
    )  # fmt: skip
