"""Tests slow drift: each candidate is a little worse than its champion, and the anchor stops this."""

import numpy as np

from gate_cases import Models, evidence, gate
from ratchet.config.gate import MustNotRegressRule, Reference
from ratchet.quality_gate.decision import decide_verdict
from ratchet.storage.records.gate import Champion, ChampionFile

ROWS, CANDIDATES, LOSS = 1000, 20, 0.005
ACCURACY, DISCORDANCE, MARGIN = 0.8, 0.05, 0.025
FIRST = Champion(version=1, model_digest="a" * 64, adapter_digest="x" * 64, run_id="r0")
NEXT = Champion(version=2, model_digest="b" * 64, adapter_digest="z" * 64, run_id="r2")


def drifted(against: tuple[Reference, ...], seed: int) -> tuple[float, float]:
    """Simulate 20 candidates, each truly half a point worse; return the champion's loss in truth and on the rows."""
    draw = np.random.default_rng(seed)
    ids = [f"s{k}" for k in range(ROWS)]
    champion = anchor = (draw.random(ROWS) < ACCURACY).astype(float)
    accuracy, promotions = ACCURACY, 0  # true accuracy of the champion
    rules = [
        MustNotRegressRule(rule="must_not_regress", metric="accuracy", margin=MARGIN, against=who) for who in against
    ]
    for _ in range(CANDIDATES):
        # The probabilities that a right answer becomes wrong, and a wrong one right; together they lose half a point.
        lost, won = (DISCORDANCE + LOSS) / 2 / accuracy, (DISCORDANCE - LOSS) / 2 / (1 - accuracy)
        dice = draw.random(ROWS)
        candidate = np.where(champion == 1, dice >= lost, dice < won).astype(float)
        models: Models = {
            name: {"accuracy": dict(zip(ids, scores.tolist(), strict=True))}
            for name, scores in (("candidate", candidate), ("champion", champion), ("anchor", anchor))
        }  # type: ignore[assignment]
        file = ChampionFile(champion=NEXT if promotions else FIRST, anchor=FIRST)
        if decide_verdict(evidence(models, file), gate(*rules)).decision == "PROMOTE":
            champion, promotions, accuracy = candidate, promotions + 1, accuracy - LOSS
    return LOSS * promotions, float(anchor.mean() - champion.mean())


def test_the_anchor_stops_a_drift_that_the_champion_does_not() -> None:
    """In four runs of 20 candidates, the champion truly loses 8 points without the anchor, and under 4 with it.

    The remaining loss comes from 20 evaluations on the same rows, which gate.max_test_set_uses limits.
    """
    alone = [drifted(("champion",), seed) for seed in range(4)]
    is_anchor = [drifted(("champion", "anchor"), seed) for seed in range(4)]
    assert all(seen > MARGIN for _, seen in alone)
    assert all(seen < MARGIN for _, seen in is_anchor)
    true_alone, true_anchored = (sum(true for true, _ in found) / 4 for found in (alone, is_anchor))
    assert true_alone >= 3 * MARGIN
    assert true_anchored <= true_alone / 2
