"""The export on the gate's page: the merge, and every form beside base + adapter."""

from collections.abc import Iterator, Sequence

from ratchet import markup
from ratchet.markup import NONE, Html, percentage, quiet, tag
from ratchet.pages.values import MINUS, digits
from ratchet.records_export import Artifact, Bundle, Merge, Parity, TaskScore
from ratchet.sizes import written

Body = Sequence[Html]


def forms(bundle: Bundle) -> Body:
    """What was merged and how close it is; then the forms, each as its own runtime answered."""
    shown = [*_merged(bundle.parity)]
    if bundle.merge is not None:
        shown += _trials(bundle.merge, bundle.merge_base)
    if bundle.artifacts:
        shown += [
            tag("h3", "Forms"),
            quiet(
                "Every form was opened where it is used and asked the same as base and adapter: divergence and same "
                "tokens at answer positions, answers to the gate's samples with a paired 95 % interval of the "
                "difference, texts that its own tokenizer cuts alike."
            ),
            _forms(bundle.artifacts),
        ]
        shown += [tag("p", f"{one.name}: {note}") for one in bundle.artifacts for note in one.notes]
    return shown


def _merged(found: Parity) -> Iterator[Html]:
    rows = [
        ("largest difference of a logit", digits(found.max_logit_difference)),
        ("mean difference of logits", digits(found.mean_logit_difference)),
        ("same most likely token", percentage(found.greedy_agreement, 1)),
        ("rows", f"{found.rows:,}"),
        ("positions compared", f"{found.tokens:,}"),
    ]
    yield quiet("The merged model, read back from disk, against base and adapter on the same test rows.")
    yield markup.table("Export parity", "tn", ("", "measured"), rows)


def _trials(merge: Merge, taken: str) -> Iterator[Html]:
    how = "tensor by tensor, shards to shards" if merge.streamed else "as a whole in memory"
    yield tag("h3", "Merge")
    yield quiet(
        f"{merge.changed:,} tensors changed, {how}. Each module was given what it is given in base + adapter, and its "
        "output compared."
    )
    rows = [
        (
            f"into the {trial.merge_base} base" + (", taken" if trial.merge_base == taken else ""),
            digits(trial.parity.max_logit_difference), digits(trial.kl), percentage(trial.parity.greedy_agreement, 1),
            f"{trial.check.modules:,} + {trial.check.layers:,}",
            (f"{digits(trial.check.worst[0].max_difference)} in {trial.check.worst[0].name}"
             if trial.check.worst else NONE),
            digits(trial.check.moved),
        )
        for trial in merge.trials
    ]  # fmt: skip
    heads = (
        "Merged", "largest difference of a logit", "divergence, nats", "same token", "modules + layers compared",
        "furthest module", "moved from the bare base",
    )  # fmt: skip
    yield markup.table("Ways to merge", "tnnnntn", heads, rows)


def _forms(artifacts: Sequence[Artifact]) -> Html:
    heads = (
        "Form", "runs in", "size", "divergence, nats", "largest difference, nats", "same token", "perplexity",
        "answers", "difference", "same answers", "texts", "tokens/s",
    )  # fmt: skip
    return markup.table("Forms", "ttnnnnnnnnnn", heads, map(_row, artifacts))


def _row(one: Artifact) -> Sequence[str]:
    near, task = one.closeness, one.task
    return (
        one.name, one.runtime, written(one.size_bytes), digits(near.kl), digits(near.max_difference),
        percentage(near.greedy_agreement, 1), f"{near.perplexity:.4g} ({near.reference_perplexity:.4g})",
        f"{task.value:.4g} {task.metric}" if task else NONE, _difference(task) if task else NONE,
        percentage(task.same_answers, 1) if task else NONE, f"{one.texts_tokenised:,} of {one.texts:,}",
        f"{one.tokens_per_second:.4g}",
    )  # fmt: skip


def _difference(task: TaskScore) -> str:
    return f"{task.difference:+.3f} [{task.low:+.3f}, {task.high:+.3f}]".replace("-", MINUS)
