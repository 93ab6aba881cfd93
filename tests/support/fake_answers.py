"""Outputs of generations that are written by hand: records and their card."""

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ratchet.config.generate import Generate
from ratchet.inference.spec import GenerationCard, GenerationSpec, ModelIdentity
from ratchet.storage import digests
from ratchet.storage.output_card import card_path


def spec(**settings: Any) -> GenerationSpec:
    """Return the spec of a generation with these settings."""
    generate = Generate.model_validate({"temperature": 0.7, **settings})
    model = ModelIdentity(kind="merged", digest="d" * 64, weight_format="plain weights")
    return GenerationSpec(generate=generate, prompts_digest="p" * 64, model=model, template_digest="")


def record(number: int, said: str, reference: str | None, **changed: Any) -> dict[str, Any]:
    """Return the record of one answer."""
    return {
        "id": f"q{number}", "sample": 0, "prompt_digest": "x" * 64, "text": said, "reasoning": None, "answer": said,
        "prompt_tokens": 9, "tokens": len(said) + 1, "finish": "stop", "mean_log_probability": -0.25,
        "model": "d" * 12, "reference": reference, "fields": {}, **changed,
    }  # fmt: skip


def write(path: Path, records: Sequence[dict[str, Any]], **settings: Any) -> Path:
    """Write the output of a generation and its card."""
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    made = spec(**settings)
    finish = Counter(one["finish"] for one in records)
    card = GenerationCard(
        spec=made, id=made.run_id, model_name="a model", prompts=len(records) // made.generate.samples, faults=0,
        answers=len(records), finish=dict(finish), prompt_tokens=9 * len(records),
        tokens=sum(one["tokens"] or 0 for one in records), output=digests.hash_file(path),
    )  # fmt: skip
    card.save(card_path(path))
    return path


def of_labels(labels: Sequence[str], count: int, sure: float = 2.0, seed: int = 1) -> list[dict[str, Any]]:
    """Create answers to a label task with random log-probabilities. The label with the highest log-probability is the
    answer.

    Args:
        labels: the possible labels.
        count: number of prompts.
        sure: mean lead of the right label over the other labels, in nats.
        seed: seed of the random numbers.
    """
    draw = random.Random(seed)
    found = []
    for number in range(count):
        reference = draw.choice(labels)
        scores = {one: draw.gauss(sure if one == reference else 0.0, 1.0) for one in labels}
        # 1.5 nats leave probability mass for texts other than the labels.
        whole = math.log(sum(map(math.exp, scores.values()))) + 1.5
        nats = {one: round(score - whole, 4) for one, score in scores.items()}
        said = max(nats, key=lambda one: nats[one])
        topic = {"topic": "even" if number % 2 == 0 else "odd", "row": number}
        found.append(record(number, said, reference, label_log_probabilities=nats, fields=topic))
    return found
