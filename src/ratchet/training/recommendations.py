"""What the figures of an analysis say: which modules barely moved, and what to try in the next run.

The thresholds are ours, chosen so that a healthy training gives little advice; the papers are cited for the relations
that they rest on. Every sentence holds its figures, so that a reader may disagree.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from ratchet.config.train import Train
from ratchet.models import module_names
from ratchet.storage.records.model import ModuleAnalysis

STILL_FACTOR = 10.0
"""A module that barely moved did so at most by the median over this ..."""
STILL_DEVIATIONS = 3.5
"""... and lies, in logarithms, this many scaled median absolute deviations below it (Iglewicz and Hoaglin 1993)."""
NORMAL_MAD = 1.4826
"""Standard deviations in one median absolute deviation of a normal distribution."""

MOST = 0.75
"""Share of the modules that makes a rule."""
FAR_BELOW, NEAR = 0.5, 0.9
"""Of its rank, a module's effective rank."""
SPREAD = 10.0
"""Factor between kinds of modules, in the median of update over weight, that is told."""
LITTLE = 1e-3
"""Update over weight, in the median, below which a training has done next to nothing."""
GROWTH = 3.0
"""Factor by which gradients grew from the first third of the run to the last."""
FEWEST_STEPS = 12
"""Steps with gradient norms that tell a trend."""
NAMED = 4

Modules = Mapping[str, ModuleAnalysis]


def still(modules: Modules) -> tuple[str, ...]:
    """Modules that barely moved, in order of their names: their update, beside their weights, is far below the median.

    Far: see STILL_FACTOR and STILL_DEVIATIONS, both of which must hold; in logarithms, for ratios are spread over
    orders of magnitude. Nothing is still when most modules are. Small gradients are no sign of it: Adam scales every
    update to about the learning rate.
    """
    return tuple(sorted(_far_below({name: one.update_ratio for name, one in modules.items()})))


def _far_below(found: Mapping[str, float]) -> set[str]:
    if not found or (median := statistics.median(found.values())) <= 0:
        return set()
    centre = math.log(median)
    known = {name: math.log(value) if value > 0 else -math.inf for name, value in found.items()}
    # With half or more of the modules alike the deviation is 0, and the factor decides alone.
    deviation = NORMAL_MAD * statistics.median(abs(value - centre) for value in known.values())
    limit = centre - max(math.log(STILL_FACTOR), STILL_DEVIATIONS * deviation)
    return {name for name, value in known.items() if value < limit}


def advice(modules: Modules, not_moved: Sequence[str], settings: Train) -> tuple[str, ...]:
    """Sentences about the next run, each with the figures that it rests on; none when nothing stands out."""
    if not modules:
        return ()
    if not any(one.update_norm for one in modules.values()):
        return ("Nothing was learned: no module's weights have changed. Look at the loss and at train.learning_rate.",)
    rules: tuple[Callable[[], str | None], ...] = (
        lambda: _on_little(modules, settings),
        lambda: _on_rank(modules, settings),
        lambda: _on_still(modules, not_moved),
        lambda: _on_spread(modules),
        lambda: _on_growth(modules, settings),
    )
    return tuple(said for rule in rules if (said := rule()))


def _on_little(modules: Modules, settings: Train) -> str | None:
    typical = statistics.median(one.update_ratio for one in modules.values())
    if typical >= LITTLE:
        return None
    return (
        f"train.learning_rate: try {5 * settings.learning_rate:g}: the update is {typical:.2g} of a module's weights "
        "in the median, next to nothing; if the validation loss hardly fell, steps were too short or too few."
    )


def _on_rank(modules: Modules, settings: Train) -> str | None:
    """How much of the rank is used.

    A few directions do most of the work of a low-rank update (Hu et al. 2021, section 7.2); where all are used alike,
    the rank may be what limits it.
    """
    moved = [one for one in modules.values() if one.singular_values and one.update_norm]
    if not moved or settings.adapter == "adalora":  # which finds its ranks itself
        return None
    used = [one.effective_rank / len(one.singular_values) for one in moved]
    below, near = (sum(map(test, used)) for test in (lambda share: share < FAR_BELOW, lambda share: share >= NEAR))
    typical = statistics.median(one.effective_rank for one in moved)
    most = statistics.median(len(one.singular_values) for one in moved)
    facts = f"effective rank {typical:.1f} of {most:g} in the median"
    if below >= MOST * len(used) and settings.rank > 1:
        return (
            f"train.rank: {settings.rank // 2} may do as well: {below} of {len(used)} modules use less than "
            f"{FAR_BELOW:.0%} of their rank ({facts}; Hu et al. 2021, section 7.2)."
        )
    if near >= MOST * len(used):
        stable = "" if settings.rank_stabilized else ", with rank_stabilized: true if it is large (Kalajdzievski 2023)"
        return (
            f"train.rank: {2 * settings.rank} may learn more{stable}: {near} of {len(used)} modules use at least "
            f"{NEAR:.0%} of their rank ({facts}). Compare the validation loss."
        )
    return None


def _on_still(modules: Modules, not_moved: Sequence[str]) -> str | None:
    if not not_moved:
        return None
    saved = sum(modules[name].parameters for name in not_moved)
    share = saved / max(1, sum(one.parameters for one in modules.values()))
    kinds: dict[str, list[str]] = {}
    for name in modules:
        kinds.setdefault(module_names.place(name).kind, []).append(name)
    whole = sorted(what for what, members in kinds.items() if set(members) <= set(not_moved))
    where = f"every {_listed(whole)}" if whole else _listed(not_moved)
    return (
        f"train.targets: leave out what barely moved, {len(not_moved)} of {len(modules)} modules ({where}), with "
        f"{share:.1%} of what is trained."
    )


def _on_spread(modules: Modules) -> str | None:
    """Modules of one kind are judged together: their place in the model differs, their task does not."""
    kinds: dict[str, list[float]] = {}
    for name, one in modules.items():
        kinds.setdefault(module_names.place(name).kind, []).append(one.update_ratio)
    medians = {what: statistics.median(ratios) for what, ratios in kinds.items()}
    moved = {what: ratio for what, ratio in medians.items() if ratio > 0}
    if len(moved) < 2:
        return None
    most, least = max(moved, key=lambda what: moved[what]), min(moved, key=lambda what: moved[what])
    if moved[most] < SPREAD * moved[least]:
        return None
    return (
        f"train.rank_pattern, train.alpha_pattern: {most} changed by {moved[most]:.2%} of its weights in the median, "
        f"{least} by {moved[least]:.2%}; more rank or alpha for the one, less for the other, may even that out "
        "(budgets by importance: Zhang et al. 2023, AdaLoRA)."
    )


def _on_growth(modules: Modules, settings: Train) -> str | None:
    series = [one.gradient_norms for one in modules.values() if one.gradient_norms]
    if not series or len(series[0]) < FEWEST_STEPS:
        return None
    totals = [math.hypot(*step) for step in zip(*series, strict=True)]
    third = len(totals) // 3
    first, last = statistics.median(totals[:third]), statistics.median(totals[-third:])
    if first <= 0 or last < GROWTH * first:
        return None
    return (
        f"train.learning_rate: try {settings.learning_rate / 2:g}: the gradient norm grew from {first:.3g} in the "
        f"first third of the run to {last:.3g} in the last; steps may be too long."
    )


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more
