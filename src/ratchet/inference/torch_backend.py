"""Inference backend for a model in memory: batch generation, streaming, and likelihoods of labels."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from ratchet.config.generate import Generate
from ratchet.data import tokenization
from ratchet.data.chat_template import ControlTokens
from ratchet.data.conversation import (
    IGNORE_INDEX,
    Conversation,
    EncodedConversation,
    RefusedConversation,
    replace_surrogates,
)
from ratchet.errors import DataError, SettingsError
from ratchet.inference.backend import AnswerChunk, AnswerEnd, AnswerStream, BackendCallbacks, GenerationRequest
from ratchet.inference.prompts import Prompt
from ratchet.inference.spec import (
    FinishReason,
    GenerationAnswer,
    GenerationStart,
    Kind,
    ReasoningSplitter,
)
from ratchet.models import adapters, base_model, loading, oom, scoring
from ratchet.models.decoding import decoder as decoding
from ratchet.models.decoding import token_choice
from ratchet.models.decoding.batch import get_context_length
from ratchet.models.decoding.decoder import BatchDecoder, DecodingOptions
from ratchet.models.decoding.token_choice import DECIMALS, TokenSampler

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""A decoded text ends with this character if its last character needs further tokens."""

LABEL_GROUP_SIZE = 16
"""Number of labels computed at once, each on a copy of the prompt's cache. Another number rounds sums differently."""
CACHED_PROMPTS = 4096
"""Number of prompts whose label likelihoods are cached for further samples of the same prompt."""
PROMPT_END_TOKENS = 16
"""Number of last tokens of a prompt in which the backend searches the begin tag of the reasoning."""
_SAMPLE_MESSAGE = {"role": "user", "content": "One?"}
Nats = list[float | None]


class TorchBackend:
    """Generates answers with a loaded model: base, adapter or merged. The batch size does not change the answers.

    Args:
        model: a model in evaluation mode.
        tokenizer: its tokenizer.
        settings: section `generate`.
        callbacks: callbacks of the run.
        labels: token ids of generate.labels (see `label_token_ids`); if empty, no label likelihoods are computed.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Generate,
        callbacks: BackendCallbacks,
        labels: Sequence[Sequence[int]] = (),
    ) -> None:
        self._model, self._tokenizer, self._settings, self._callbacks = model, tokenizer, settings, callbacks
        self._labels = labels
        self._streaming_decoder = StreamingDecoder(model)
        self._control = ControlTokens(tokenizer)
        special_tags = [tag for tag in settings.reasoning_tags if tag in self._control.names]
        tags = {int(tokenizer.convert_tokens_to_ids(tag)) for tag in special_tags}
        self._removed_tokens = self._control.ids - tags
        self.end_token_ids = scoring.list_end_tokens(model, tokenizer, _end_of_turn(tokenizer))
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), "none")
        self.device_info = {"device": str(model.device), "compute_dtype": str(dtype).removeprefix("torch.")}

    @property
    def _pad(self) -> int:
        return int(self._tokenizer.pad_token_id)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, up to the position where the answer begins.

        Raises:
            DataError: the chat template raises for the prompt, or a text contains a control token, which could forge a
                system or assistant message.
        """
        if problem := self._control.find(prompt.conversation):
            raise DataError(f"prompt {prompt.id}: {problem}; remove it")
        return tokenization.encode_prompt(self._tokenizer, prompt.conversation)

    def opens_reasoning(self, ids: Sequence[int]) -> bool:
        """Return whether a prompt ends with the begin tag of the reasoning."""
        tail = self._tokenizer.decode(list(ids[-PROMPT_END_TOKENS:]), skip_special_tokens=False)
        return bool(tail.rstrip().endswith(self._settings.reasoning_tags[0]))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode answer tokens without control tokens; reasoning tags stay."""
        kept = [token for token in ids if token not in self._removed_tokens and token not in self.end_token_ids]
        return replace_surrogates(self._tokenizer.decode(kept, skip_special_tokens=False))

    def generate(
        self, requests: Iterator[GenerationRequest], should_stop: Callable[[], bool]
    ) -> Iterator[GenerationAnswer]:
        """See `GenerationBackend`."""
        refused: deque[GenerationAnswer] = deque()
        prompts_in_progress: dict[int, tuple[list[int], bool]] = {}
        """Prompt tokens, and whether the prompt ends inside the reasoning, by index of a pending answer."""
        label_scorer = LabelScorer(self._model, self._labels, self._pad, self._callbacks, self._settings.samples)

        def decoding_requests() -> Iterator[decoding.DecodingRequest]:
            for request in requests:
                try:
                    ids = self.prompt_ids(request.prompt)
                except DataError as error:
                    self._callbacks.on_event("notice", {"text": f"skipped: {error}"})
                    refused.append(GenerationAnswer(request.index, "", "refused", None, 0, 0.0))
                    continue
                prompts_in_progress[request.index] = ids, self.opens_reasoning(ids)
                yield decoding.DecodingRequest(request.index, tuple(ids), self._noise_key(request))

        decoder = self._decoder()
        for result in decoder.generate(decoding_requests(), should_stop):
            while refused:
                yield refused.popleft()
            ids, starts_in_reasoning = prompts_in_progress.pop(result.index)
            yield GenerationAnswer(
                index=result.index,
                text=self.decode(result.ids),
                finish=result.finish,
                prompt_tokens=len(ids),
                tokens=len(result.ids),
                mean_log_probability=result.nats,
                starts_in_reasoning=starts_in_reasoning,
                label_log_probabilities=label_scorer.score(result.index, ids, decoder) if self._labels else None,
            )
        yield from refused
        label_scorer.report_failures()

    def stream(self, request: GenerationRequest, reuse_cache: bool) -> AnswerStream:
        """See `GenerationBackend`.

        The key-value cache may change the choice between two almost equally likely tokens, so the answer may differ
        from that of `generate`.
        """
        ids, decoder = self.prompt_ids(request.prompt), self._streaming_decoder
        splitter = ReasoningSplitter(self._settings.reasoning_tags, self.opens_reasoning(ids))
        tokens = decoder.generate(ids, self._decoding_options(), self._noise_key(request), reuse_cache)
        yield from stream_chunks(tokens, self.decode, splitter, (len(ids), decoder.context_tokens))

    def _noise_key(self, request: GenerationRequest) -> str:
        return token_choice.noise_stream_key(self._settings.seed, request.prompt.digest, request.sample)

    def _decoding_options(self) -> decoding.DecodingOptions:
        settings = self._settings
        return decoding.DecodingOptions(
            max_new_tokens=settings.max_new_tokens, end_token_ids=tuple(self.end_token_ids), pad_token_id=self._pad,
            temperature=settings.temperature, top_p=settings.top_p, exact=settings.batch_invariant,
            window=settings.window_rows,
        )  # fmt: skip

    def _decoder(self) -> decoding.BatchDecoder:
        return decoding.BatchDecoder(
            self._model,
            self._decoding_options(),
            None,
            self._callbacks.on_event,
            self._callbacks.heartbeat,
            self._callbacks.before_forward,
        )

    def close(self) -> None:
        """Do nothing: the model is released with the process."""


def load_backend(kind: Kind, start: GenerationStart, callbacks: BackendCallbacks) -> TorchBackend:
    """Load the model of a generation.

    Raises:
        BaseModelError, DamagedFileError, SettingsError: the model cannot be loaded, or a label cannot be an answer.
    """
    device = loading.pick_device(start.machine.device)
    path, base = Path(start.path), start.base
    remote_code = base is not None and base.remote_code
    template = Path(start.template) if start.template else None
    if kind == "merged":
        tokenizer = base_model.load_tokenizer(path, remote_code=remote_code)
        labels = _usable_label_ids(tokenizer, start.generate, callbacks)
        model = loading.load_plain(path, loading.pick_dtype(start.dtype, device), device, remote_code)
        return TorchBackend(model, tokenizer, start.generate, callbacks, labels)
    if base is not None:
        base_model.verify_files(path, base.files)
    callbacks.heartbeat()
    tokenizer = base_model.load_tokenizer(path, template, base.added_tokens if base else (), remote_code)
    labels = _usable_label_ids(tokenizer, start.generate, callbacks)
    model = loading.load(path, base, start.train, device)
    if start.adapter is not None:
        model = adapters.load(model, Path(start.adapter))
    return TorchBackend(model, tokenizer, start.generate, callbacks, labels)


def _usable_label_ids(tokenizer: Any, settings: Generate, callbacks: BackendCallbacks) -> Sequence[Sequence[int]]:
    """Return the token ids of generate.labels; report and return () if the template does not allow likelihoods."""
    label_ids = label_token_ids(tokenizer, settings)
    if label_ids is None:
        text = "the chat template does not append an answer to its prompt, so label likelihoods are not computed"
        callbacks.on_event("notice", {"text": text})
    return label_ids or ()


def _end_of_turn(tokenizer: Any) -> str:
    """Return the token with which the template ends an answer, or the tokenizer's EOS token if it cannot be found."""
    try:
        return tokenization.ConversationEncoder(tokenizer).end_of_turn
    except DataError:
        return str(tokenizer.eos_token)


# Streaming.


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
        """Number of tokens of the last prompt that were not computed again."""

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
        """Crop the cache to its common beginning with a prompt, whose last token is always computed again."""
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
    """Convert the tokens of a `StreamingDecoder` to chunks of text; a character of several tokens is not divided.

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


# Likelihoods of labels.


def label_token_ids(tokenizer: Any, settings: Generate) -> list[list[int]] | None:
    """Encode each of generate.labels as the whole answer, including the end-of-turn token; [] if there are no labels.

    Returns:
        None if the chat template does not simply append an answer to its prompt, so that likelihoods are undefined.

    Raises:
        SettingsError: a label cannot be an answer, or two labels have the same tokens.
    """
    if not settings.labels:
        return []
    prompt = tokenization.encode_prompt(tokenizer, Conversation([_SAMPLE_MESSAGE]))
    label_ids: list[list[int]] = []
    for label, encoded in zip(settings.labels, _encode_labels(tokenizer, settings.labels), strict=True):
        if isinstance(encoded, RefusedConversation):
            raise SettingsError(f"generate.labels: {label!r} cannot be an answer: {encoded.detail}; remove it")
        if encoded.input_ids[: len(prompt)] != prompt:
            return None
        trained = [i for i, target in enumerate(encoded.labels) if target != IGNORE_INDEX]
        ids = encoded.input_ids[len(prompt) : trained[-1] + 1]
        text = tokenizer.decode([i for i in ids if i not in ControlTokens(tokenizer).ids], skip_special_tokens=False)
        if not text.strip().endswith(label):
            raise SettingsError(
                f"generate.labels: {label!r}: the tokenizer decodes it as {text.strip()!r}, so no answer can equal "
                "this label; use the decoded text"
            )
        if len(ids) > settings.max_new_tokens:
            raise SettingsError(
                f"generate.labels: {label!r} has {len(ids)} tokens with the end-of-turn token, more than "
                f"generate.max_new_tokens ({settings.max_new_tokens}); raise generate.max_new_tokens"
            )
        if ids in label_ids:
            other = settings.labels[label_ids.index(ids)]
            raise SettingsError(f"generate.labels: {label!r} and {other!r} have the same tokens; remove one")
        label_ids.append(ids)
    return label_ids


def _encode_labels(tokenizer: Any, labels: Sequence[str]) -> list[EncodedConversation | RefusedConversation]:
    conversations = [
        (repr(label), Conversation([_SAMPLE_MESSAGE, {"role": "assistant", "content": label}])) for label in labels
    ]
    try:
        return tokenization.ConversationEncoder(tokenizer, "last").encode(conversations)
    except DataError as error:
        raise SettingsError(f"generate.labels: {error}") from None


class LabelScorer:
    """Computes how likely each of generate.labels is as the whole answer to a prompt.

    Each prompt is computed separately, with its labels in groups of a fixed size, so that batches, restarts and a
    shortage of memory do not change how sums are rounded. Results have 4 decimals, like mean log-probabilities.

    Args:
        model: a model in evaluation mode.
        labels: token ids of each label, see `label_token_ids`.
        pad_token_id: token to pad shorter labels with.
        callbacks: callbacks of the run.
        samples: number of answers per prompt.
    """

    def __init__(
        self, model: Any, labels: Sequence[Sequence[int]], pad_token_id: int, callbacks: BackendCallbacks, samples: int
    ) -> None:
        self._model, self._labels, self._pad = model, labels, pad_token_id
        self._callbacks, self._samples = callbacks, samples
        self._context = get_context_length(model)
        self._cache: dict[int, Nats | None] = {}
        self._out_of_memory_count = 0

    def score(self, index: int, prompt: Sequence[int], decoder: BatchDecoder) -> Nats | None:
        """Return the log-probability, in nats, of each label.

        The value is None for a label that does not fit in the context or has no finite result. The result is None if
        memory does not suffice.

        Args:
            index: index of the answer; the samples of a prompt follow each other.
            prompt: token ids.
            decoder: the decoder, which can free memory.
        """
        number = index // self._samples
        if number not in self._cache:
            self._callbacks.heartbeat()
            scores = self._score_with_retry(prompt, decoder)
            if self._samples == 1:
                return scores
            if len(self._cache) >= CACHED_PROMPTS:
                del self._cache[next(iter(self._cache))]
            self._cache[number] = scores
        return self._cache[number]

    def report_failures(self) -> None:
        """Report the number of prompts without likelihoods because of a lack of memory, if any."""
        if self._out_of_memory_count:
            text = f"prompts without label likelihoods because memory did not suffice: {self._out_of_memory_count:,}"
            self._callbacks.on_event("notice", {"text": text})

    def _score_with_retry(self, prompt: Sequence[int], decoder: BatchDecoder) -> Nats | None:
        for free_memory in (decoder.make_room, oom.release_memory):
            try:
                return self._score(prompt)
            except Exception as error:
                if not oom.is_out_of_memory(error):
                    raise
            free_memory()
        self._out_of_memory_count += 1
        return None

    def _score(self, prompt: Sequence[int]) -> Nats:
        scores: Nats = [None] * len(self._labels)
        longest = math.inf if self._context is None else self._context - len(prompt)
        fitting = [k for k, label in enumerate(self._labels) if len(label) <= longest]
        if not fitting:
            return scores
        labels = [self._labels[k] for k in fitting]
        self._callbacks.before_forward(len(prompt) + max(map(len, labels)))
        [fitting_scores] = scoring.score_labels(self._model, [prompt], labels, LABEL_GROUP_SIZE, self._pad)
        for k, nats in zip(fitting, fitting_scores, strict=True):
            scores[k] = round(nats, DECIMALS) + 0.0 if math.isfinite(nats) else None
        return scores
