"""Proves that the score of each document equals the score of the lm-evaluation-harness command."""

from typing import Any

import pytest

from harness_cases import (
    TASKS,
    bench,  # noqa: F401 (a fixture)
    command,  # noqa: F401 (a fixture)
    of,
    ours,  # noqa: F401 (a fixture)
    theirs,  # noqa: F401 (a fixture)
)

PACKAGES = ("reports", "evaluation")


@pytest.mark.parametrize("task", TASKS)
def test_every_document_has_the_command_s_score(task: str, ours: Any, theirs: Any) -> None:
    found = {one["id"]: one for one in ours[task].documents}
    assert len(found) == len(theirs["samples"][task]) > 0
    for sample in theirs["samples"][task]:
        document = found[sample["doc_hash"]]
        said = [answer for one in sample["resps"] for answer in one]
        if task == "write":
            assert document["answers"] == said
            assert of(ours[task], "letters").values[sample["doc_hash"]] == sample["letters"]
        else:
            nats = [float(one[0] if isinstance(one, list) else one) for one in said]
            # The command batches requests of all tasks together and Ratchet batches each task separately, so float32
            # rounds differently.
            assert document["likelihoods"] == pytest.approx(nats, rel=1e-6)
        if task == "choice":
            assert document["scores"] == {"acc": sample["acc"], "acc_norm": sample["acc_norm"]}
