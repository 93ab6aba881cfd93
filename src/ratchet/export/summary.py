"""An export in a few lines, for the terminal."""

from collections.abc import Iterator

from ratchet.config.units import written
from ratchet.storage.records.export import Artifact, Bundle, MergeTrial


def describe(bundle: Bundle) -> str:
    """What was merged and how close it is, then a line a form."""
    lines = [f"model {bundle.model_digest[:12]}, merged into the {bundle.into} in {bundle.dtype}"]
    if bundle.merge:
        lines += (_trial(trial, bundle.merge_base) for trial in bundle.merge.trials)
        if all(trial.check.moved == 0 for trial in bundle.merge.trials):
            lines.append("  what was merged changes nothing: this is the bare base")
        if list(bundle.merge.adapters.values()) != [1.0] or bundle.merge.modules:
            lines.append("  base + adapter: with what export.weight, also and modules make of the adapters")
    return "\n".join([*lines, *_table(bundle.artifacts)])


def _trial(trial: MergeTrial, taken: str) -> str:
    p, check = trial.parity, trial.check
    worst = f"; furthest off: {check.worst[0].name}, {check.worst[0].max_difference:.2g}" if check.worst else ""
    name = f"{trial.merge_base} (taken)" if trial.merge_base == taken else trial.merge_base
    return (
        f"  {name}: against base + adapter on {p.rows} rows logits"
        f" differ by {p.max_logit_difference:.2g} at most, {p.mean_logit_difference:.2g} on average; same greedy "
        f"token at {p.greedy_agreement:.2%}; {check.modules} modules and {check.layers} layers as they should be{worst}"
    )


def _table(artifacts: tuple[Artifact, ...]) -> Iterator[str]:
    heads = ("form", "size", "KL, nats", "same token", "answers", "difference", "same", "texts", "tokens/s", "runs in")
    rows = [heads, *map(_row, artifacts)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for one in artifacts:
        yield from (f"  {one.name}: {note}" for note in one.notes)


def _row(one: Artifact) -> tuple[str, ...]:
    task = one.task
    answers = (f"{task.value:.1%}", f"{task.difference:+.1%} [{task.low:+.1%}, {task.high:+.1%}]",
               f"{task.same_answers:.1%}") if task else ("-", "-", "-")  # fmt: skip
    return (
        one.name, written(one.size_bytes), f"{one.closeness.kl:.2g}", f"{one.closeness.greedy_agreement:.2%}", *answers,
        f"{one.texts_tokenised}/{one.texts}", f"{one.tokens_per_second:.0f}", one.runtime,
    )  # fmt: skip
