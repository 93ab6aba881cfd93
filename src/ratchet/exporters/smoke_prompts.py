"""Short fixed prompts and their greedy answers. Deployment repeats them before a server may use the model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ratchet.data import tokenization
from ratchet.data.conversation import Conversation
from ratchet.models.runtimes.runtime import ModelRuntime
from ratchet.storage.records.export import ExportProbe

MAX_NEW_TOKENS = 16
"""Tokens per answer: enough to distinguish two models."""


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """Encode a question as a conversation that ends where the assistant's answer begins."""
    return tokenization.encode_prompt(tokenizer, Conversation([{"role": "user", "content": question}]))


def collect_probes(
    runtime: ModelRuntime, tokenizer: Any, questions: Sequence[str], end_ids: Sequence[int]
) -> tuple[ExportProbe, ...]:
    """Answer each question greedily.

    Each probe records for every answer token its log-probability above the second most likely token, in nats.
    """
    probes = []
    for question in questions:
        prompt = prompt_ids(tokenizer, question)
        answer = runtime.generate(prompt, MAX_NEW_TOKENS, end_ids)
        positions = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        log_probabilities = (
            runtime.log_probabilities([*prompt, *answer], positions) if answer else np.empty((0, 2), np.float32)
        )
        top_two = np.sort(log_probabilities, axis=1)[:, -2:]
        probes.append(
            ExportProbe(
                question=question,
                prompt_ids=tuple(prompt),
                answer_ids=tuple(answer),
                answer=tokenizer.decode(
                    [one for one in answer if one not in end_ids], skip_special_tokens=True
                ).strip(),
                margins=tuple(float(best - second) for second, best in top_two),
            )
        )
    return tuple(probes)
