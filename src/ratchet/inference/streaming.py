"""One answer, token by token, for somebody who watches."""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from ratchet.inference.backend import AnswerChunk, AnswerEnd
from ratchet.inference.reasoning import ReasoningSplitter
from ratchet.inference.spec import Finish
from ratchet.models import oom
from ratchet.models.decoding.batch import get_context_length
from ratchet.models.decoding.decoder import DecodingOptions
from ratchet.models.decoding.token_choice import TokenSampler

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoded text ends with while a character lacks tokens."""


class StreamingDecoder:
    """A model that speaks. Keys and values, if it has them, are kept from one token to the next, and, where asked, from
    one answer to the next, as far as both prompts begin with the same tokens.

    Args:
        model: in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.context_tokens = get_context_length(model)
        self._kept: tuple[list[int], Any] | None = None
        """Tokens, and their keys and values; None also while a pass changes them."""
        self.reused_tokens = 0
        """Of the last prompt, so many were not computed again."""

    def tokens(self, prompt: Sequence[int], how: DecodingOptions, stream: str, keep: bool) -> Iterator[int | Finish]:
        """Ids of the answer as they are chosen, its end included; then how it ended.

        Args:
            prompt: ids.
            how: temperature, top_p, ends and limit are read.
            stream: what random draws depend on.
            keep: see above.
        """
        room = how.max_new_tokens if self.context_tokens is None else self.context_tokens - len(prompt)
        if room < 1:
            yield "context"
            return
        chooser = TokenSampler(how.temperature, how.top_p)
        known, kept = self._shared(prompt) if keep else ([], None)
        self.reused_tokens = len(known)
        ids = list(prompt[len(known) :])
        for step in range(min(room, how.max_new_tokens)):
            self._kept = None
            try:
                with torch.no_grad():
                    read = torch.tensor([ids], device=self._model.device)
                    out = self._model(input_ids=read, past_key_values=kept, use_cache=True, logits_to_keep=1)
                    chosen = chooser.choose(out.logits[:, -1], [(stream, step)], 0.0)
            except Exception as error:
                if not oom.is_out_of_memory(error):
                    raise
                yield "memory"
                return
            known, kept = [*known, *ids], getattr(out, "past_key_values", None)
            self._kept = (known, kept) if keep else None
            if not chosen.finite[0]:
                yield "invalid"
                return
            ids = [chosen.tokens[0]]
            yield chosen.tokens[0]
            if chosen.tokens[0] in how.ends:
                yield "stop"
                return
            if kept is None:  # states of another kind (Mamba): the whole text is read for each token
                known, ids = [], [*known, *ids]
        yield "length" if how.max_new_tokens <= room else "context"

    def _shared(self, prompt: Sequence[int]) -> tuple[list[int], Any]:
        """What is kept of the beginning of a prompt; its last token is always computed."""
        if self._kept is None:
            return [], None
        ids, kept = self._kept
        if not isinstance(kept, DynamicCache) or any(type(layer) is not DynamicLayer for layer in kept.layers):
            return [], None  # states of a recurrent model, a sliding window: they cannot go back
        pairs = zip(ids, prompt[:-1], strict=False)
        count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._kept = None
        kept.crop(count - len(ids))
        return ids[:count], kept


def stream_chunks(
    tokens: Iterator[int | Finish],
    written: Callable[[Sequence[int]], str],
    splitter: ReasoningSplitter,
    sizes: tuple[int, int | None],
) -> Iterator[AnswerChunk | AnswerEnd]:
    """Tokens of a `StreamingDecoder` as text, reasoning set apart; a character that takes several tokens comes whole.

    Args:
        tokens: of an answer.
        written: makes text of tokens.
        splitter: at the beginning of the answer.
        sizes: tokens of the prompt and of the context.
    """
    said: list[int] = []
    begin = end = 0  # a token's text may depend on the one before: what is new is told from the text with it
    finish: Finish = "stop"
    for token in tokens:
        if isinstance(token, str):
            finish = token
            break
        said.append(token)
        text = written(said[begin:])
        if not text.endswith(UNFINISHED):
            yield from _split_chunks(splitter, text[len(written(said[begin:end])) :])
            begin, end = end, len(said)
    yield from _split_chunks(splitter, written(said[begin:])[len(written(said[begin:end])) :])
    for reasoning, piece in splitter.close():
        yield AnswerChunk(reasoning, piece)
    yield AnswerEnd(finish, sizes[0], len(said), sizes[1])


def _split_chunks(splitter: ReasoningSplitter, text: str) -> Iterator[AnswerChunk]:
    for reasoning, piece in splitter.feed(text):
        yield AnswerChunk(reasoning, piece)
