"""The rule about the model as it is handed on: every form of it answers as what was evaluated does."""

from collections.abc import Iterator

from ratchet.config_gate import ExportParity
from ratchet.gating.rules import Case
from ratchet.records_export import Artifact, Parity
from ratchet.records_gate import Reason

EXACT = "float32"
"""Type in which a merge can be held to single logits; rounding to 16 bits alone moves them more, and divergence judges
it."""


def export_parity(case: Case, rule: ExportParity) -> Reason:
    """Each form, opened in its own runtime, beside base + adapter: divergence, tokens, answers."""
    bundle = case.evidence.bundle
    exact = bundle.dtype == EXACT or not bundle.artifacts  # of an earlier version, which had one bound for all
    wrong = list(_of_merged(bundle.parity, rule, exact))
    for artifact in bundle.artifacts:
        wrong += (f"{artifact.name}: {text}" for text in _of_form(artifact, rule))
    if wrong:
        return Reason(rule=rule.rule, metric="export_parity", outcome="fail", text="; ".join(wrong))
    names = ", ".join(artifact.name for artifact in bundle.artifacts)
    p, where = bundle.parity, "" if exact else " in float32"
    text = (
        f"merged model against base + adapter: logits differ by at most {p.max_logit_difference:.2g} (allowed "
        f"{rule.max_logit_difference:g}{where}), same greedy token at {p.greedy_agreement:.4f} of the answer positions "
        f"(required {rule.min_greedy_agreement:g})" + (f"; within the bounds of their types: {names}" if names else "")
    )
    return Reason(rule=rule.rule, metric="export_parity", outcome="pass", text=text)


def _of_merged(parity: Parity, rule: ExportParity, exact: bool) -> Iterator[str]:
    # Not "above": a NaN is no small difference.
    if exact and not parity.max_logit_difference <= rule.max_logit_difference:
        yield (
            f"merged model: a logit differs by {parity.max_logit_difference:.2g} from base + adapter "
            f"(allowed {rule.max_logit_difference:g})"
        )
    if not parity.greedy_agreement >= rule.min_greedy_agreement:
        yield (
            f"merged model: same greedy token at {parity.greedy_agreement:.4f} of the answer positions "
            f"(required {rule.min_greedy_agreement:g})"
        )


def _of_form(artifact: Artifact, rule: ExportParity) -> Iterator[str]:
    allowed, found = rule.kl_of(artifact.type), artifact.closeness
    if allowed is None:
        yield f"no bound for type {artifact.type}; give it one in max_kl of the rule export_parity"
    elif not found.kl <= allowed:
        yield f"diverges from base + adapter by {found.kl:.2g} nats a token in {artifact.runtime} (allowed {allowed:g})"
    if artifact.texts_tokenised < rule.min_same_texts * artifact.texts:
        yield (
            f"{artifact.texts - artifact.texts_tokenised} of {artifact.texts} texts become other tokens in it "
            f"(required alike {rule.min_same_texts:g})"
        )
    task = artifact.task
    if task is not None and task.high < -rule.max_task_loss:
        yield (
            f"{task.metric} {task.value:.4g} where base + adapter have {task.reference:.4g} on {task.rows} rows "
            f"(difference {task.low:+.3g} to {task.high:+.3g}, allowed {-rule.max_task_loss:g})"
        )
