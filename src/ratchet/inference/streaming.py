"""Generates one answer token by token and streams it as text."""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from ratchet.inference.backend import AnswerChunk, AnswerEnd
from ratchet.inference.reasoning import ReasoningSplitter
from ratchet.inference.spec import FinishReason
from ratchet.models import oom
from ratchet.models.decoding.batch import get_context_length
from ratchet.models.decoding.decoder import DecodingOptions
from ratchet.models.decoding.token_choice import TokenSampler

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""End of a decoded text whose last character is incomplete, since further tokens are missing."""


class StreamingDecoder:
    """Generates answers with a model, one token at a time.

    The key-value cache, if the model has one, is reused from token to token, and on request from answer to answer as
    far as the prompts begin with the same tokens.

    Args:
        model: a model in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.context_tokens = get_context_length(model)
        self._cached: tuple[list[int], Any] | None = None
        """Tokens with their cache; None also while a forward pass changes the cache."""
        self.reused_tokens = 0
        """Tokens of the last prompt that were not computed again."""

    def generate(
        self, prompt: Sequence[int], options: DecodingOptions, noise_key: str, reuse_cache: bool
    ) -> Iterator[int | FinishReason]:
        """Yield the token ids of the answer, including the end-of-turn token, and then the reason to end.

        Args:
            prompt: token ids.
            options: temperature, top_p, end_token_ids and max_new_tokens are read.
            noise_key: key of the random draws.
            reuse_cache: whether to reuse the cache of the previous answer, and to keep it for the next.
        """
        available_tokens = options.max_new_tokens if self.context_tokens is None else self.context_tokens - len(prompt)
        if available_tokens < 1:
            yield "context"
            return
        sampler = TokenSampler(options.temperature, options.top_p)
        computed, cache = self._crop_cache(prompt) if reuse_cache else ([], None)
        self.reused_tokens = len(computed)
        ids = list(prompt[len(computed) :])
        for step in range(min(available_tokens, options.max_new_tokens)):
            self._cached = None
            try:
                with torch.no_grad():
                    input_ids = torch.tensor([ids], device=self._model.device)
                    out = self._model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                    chosen = sampler.choose(out.logits[:, -1], [(noise_key, step)], 0.0)
            except Exception as error:
                if not oom.is_out_of_memory(error):
                    raise
                yield "memory"
                return
            computed, cache = [*computed, *ids], getattr(out, "past_key_values", None)
            self._cached = (computed, cache) if reuse_cache else None
            if not chosen.is_finite[0]:
                yield "invalid"
                return
            ids = [chosen.tokens[0]]
            yield chosen.tokens[0]
            if chosen.tokens[0] in options.end_token_ids:
                yield "stop"
                return
            if cache is None:  # a model with other states (Mamba): the whole text is computed again for each token
                computed, ids = [], [*computed, *ids]
        yield "length" if options.max_new_tokens <= available_tokens else "context"

    def _crop_cache(self, prompt: Sequence[int]) -> tuple[list[int], Any]:
        """Crop the cache to the common beginning with a prompt, without its last token, which is always computed."""
        if self._cached is None:
            return [], None
        ids, cache = self._cached
        if not isinstance(cache, DynamicCache) or any(type(layer) is not DynamicLayer for layer in cache.layers):
            return [], None  # states of a recurrent model or a sliding window cannot be cropped
        pairs = zip(ids, prompt[:-1], strict=False)
        count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._cached = None
        cache.crop(count - len(ids))
        return ids[:count], cache


def stream_chunks(
    tokens: Iterator[int | FinishReason],
    decode: Callable[[Sequence[int]], str],
    splitter: ReasoningSplitter,
    sizes: tuple[int, int | None],
) -> Iterator[AnswerChunk | AnswerEnd]:
    """Convert the tokens of a `StreamingDecoder` to chunks of text; characters of several tokens are not divided.

    Args:
        tokens: the tokens of an answer.
        decode: decodes tokens to text.
        splitter: a new splitter of reasoning and answer.
        sizes: tokens of the prompt, and the context length.
    """
    ids: list[int] = []
    begin = end = 0  # a token's text may depend on the previous token, so both are decoded together
    finish: FinishReason = "stop"
    for token in tokens:
        if isinstance(token, str):
            finish = token
            break
        ids.append(token)
        text = decode(ids[begin:])
        if not text.endswith(UNFINISHED):
            yield from _split_chunks(splitter, text[len(decode(ids[begin:end])) :])
            begin, end = end, len(ids)
    yield from _split_chunks(splitter, decode(ids[begin:])[len(decode(ids[begin:end])) :])
    for is_reasoning, piece in splitter.close():
        yield AnswerChunk(is_reasoning, piece)
    yield AnswerEnd(finish, sizes[0], len(ids), sizes[1])


def _split_chunks(splitter: ReasoningSplitter, text: str) -> Iterator[AnswerChunk]:
    for is_reasoning, piece in splitter.feed(text):
        yield AnswerChunk(is_reasoning, piece)
