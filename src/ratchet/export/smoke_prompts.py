"""Questions of ours, asked of a form: what deployment asks again before it lets a server read the model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ratchet.data import tokenization
from ratchet.data.conversation import Conversation
from ratchet.models.runtimes.runtime import ModelRuntime
from ratchet.storage.records.export import ExportProbe

NEW_TOKENS = 16
"""Of each answer, at most: enough to tell one model from another."""


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """The question as a conversation that the assistant is about to answer."""
    return tokenization.encode_prompt(tokenizer, Conversation([{"role": "user", "content": question}]))


def ask_probes(
    runtime: ModelRuntime, tokenizer: Any, questions: Sequence[str], ends: Sequence[int]
) -> tuple[ExportProbe, ...]:
    """Let the form answer, greedily; with how far ahead each token was of the second most likely one."""
    return tuple(_ask_probe(runtime, tokenizer, question, ends) for question in questions)


def _ask_probe(runtime: ModelRuntime, tokenizer: Any, question: str, ends: Sequence[int]) -> ExportProbe:
    prompt = prompt_ids(tokenizer, question)
    answer = runtime.generate(prompt, NEW_TOKENS, ends)
    places = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
    found = runtime.log_probabilities([*prompt, *answer], places) if answer else np.empty((0, 2), np.float32)
    best = np.sort(found, axis=1)[:, -2:]
    return ExportProbe(
        question=question, prompt_ids=tuple(prompt), answer_ids=tuple(answer),
        answer=tokenizer.decode([one for one in answer if one not in ends], skip_special_tokens=True).strip(),
        margins=tuple(float(high - low) for low, high in best),
    )  # fmt: skip
