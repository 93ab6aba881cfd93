"""How likely each of generate.labels is as the whole answer to a prompt, by a model in memory.

Each prompt is computed by itself, with its labels in groups of a fixed number, so that no batch, restart or shortage of
memory has a say in how sums are rounded; told to 4 decimals, as mean log-probabilities are.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ratchet.config.generate import Generate
from ratchet.data import tokenization
from ratchet.data.chat_template import ControlTokens
from ratchet.data.conversation import MASKED, Conversation, EncodedConversation, RefusedConversation
from ratchet.errors import DataError, SettingsError
from ratchet.inference import streaming
from ratchet.inference.backend import BackendCallbacks, GenerationRequest, Speech
from ratchet.inference.prompts import Prompt
from ratchet.inference.reasoning import ReasoningSplitter
from ratchet.inference.spec import GenerationAnswer, GenerationStart, Kind, replace_surrogates
from ratchet.models import adapters, base_model, loading, oom, scoring
from ratchet.models import scoring as label_room
from ratchet.models.decoding import decoder as decoding
from ratchet.models.decoding import token_choice
from ratchet.models.decoding.batch import get_context_length
from ratchet.models.decoding.decoder import BatchDecoder
from ratchet.models.decoding.token_choice import DECIMALS

GROUP_LABELS = 16
"""Computed at once, each on a copy of the prompt's keys and values. In groups of another number sums would be rounded
otherwise."""
KEPT_PROMPTS = 4096
"""Whose likelihoods wait for further samples of the same prompt."""
_QUESTION = {"role": "user", "content": "One?"}

Nats = list[float | None]


def label_token_ids(tokenizer: Any, settings: Generate) -> list[list[int]] | None:
    """Token ids of each of generate.labels as the whole answer, end of turn included; [] if there are none.

    Returns:
        None where the chat template writes an answer otherwise than behind its prompt: then there is nothing to give a
        likelihood of.

    Raises:
        SettingsError: one of them cannot be an answer, or two are the same to the tokenizer.
    """
    if not settings.labels:
        return []
    prompt = tokenization.encode_prompt(tokenizer, Conversation([_QUESTION]))
    found: list[list[int]] = []
    for label, one in zip(settings.labels, _encode_labels(tokenizer, settings.labels), strict=True):
        if isinstance(one, RefusedConversation):
            raise SettingsError(f"generate.labels: {label!r} can be no answer: {one.detail}; take it out")
        if one.input_ids[: len(prompt)] != prompt:
            return None
        learned = [i for i, target in enumerate(one.labels) if target != MASKED]
        ids = one.input_ids[len(prompt) : learned[-1] + 1]
        said = tokenizer.decode([i for i in ids if i not in ControlTokens(tokenizer).ids], skip_special_tokens=False)
        if not said.strip().endswith(label):
            raise SettingsError(
                f"generate.labels: {label!r}: the tokenizer writes it as {said.strip()!r}, so no answer can be this "
                "label; name what it writes"
            )
        if len(ids) > settings.max_new_tokens:
            raise SettingsError(
                f"generate.labels: {label!r} takes {len(ids)} tokens with its end, and answers have "
                f"{settings.max_new_tokens} at most; raise generate.max_new_tokens"
            )
        if ids in found:
            other = settings.labels[found.index(ids)]
            raise SettingsError(f"generate.labels: {label!r} and {other!r} are the same tokens; take one of them out")
        found.append(ids)
    return found


def _encode_labels(tokenizer: Any, labels: Sequence[str]) -> list[EncodedConversation | RefusedConversation]:
    asked = [(repr(label), Conversation([_QUESTION, {"role": "assistant", "content": label}])) for label in labels]
    try:
        return tokenization.ConversationEncoder(tokenizer, "last").encode(asked)
    except DataError as error:
        raise SettingsError(f"generate.labels: {error}") from None


class LabelScorer:
    """Asks one model, prompt by prompt.

    Args:
        model: in evaluation mode.
        labels: token ids of each, see `label_token_ids`.
        pad: token that shorter labels are filled with.
        ties: of the run.
        samples: answers to each prompt.
    """

    def __init__(
        self, model: Any, labels: Sequence[Sequence[int]], pad: int, ties: BackendCallbacks, samples: int
    ) -> None:
        self._model, self._labels, self._pad, self._ties, self._samples = model, labels, pad, ties, samples
        self._context = get_context_length(model)
        self._kept: dict[int, Nats | None] = {}
        self._without_room = 0

    def of(self, place: int, prompt: Sequence[int], decoder: BatchDecoder) -> Nats | None:
        """Log-probability in nats of each label; None of one that the context has no room for, or that is no number;
        None if memory does not suffice for a prompt alone.

        Args:
            place: of the answer: those to one prompt follow each other.
            prompt: token ids.
            decoder: that holds memory, and can make room.
        """
        number = place // self._samples
        if number not in self._kept:
            self._ties.beat()
            found = self._with_room(prompt, decoder)
            if self._samples == 1:
                return found
            if len(self._kept) >= KEPT_PROMPTS:
                del self._kept[next(iter(self._kept))]
            self._kept[number] = found
        return self._kept[number]

    def tell(self) -> None:
        """Say how many prompts are without likelihoods for want of memory, if any."""
        if self._without_room:
            text = f"prompts without likelihoods of labels, because memory did not suffice: {self._without_room:,}"
            self._ties.told("notice", {"text": text})

    def _with_room(self, prompt: Sequence[int], decoder: BatchDecoder) -> Nats | None:
        for make_room in (decoder.make_room, oom.release_memory):
            try:
                return self._computed(prompt)
            except Exception as error:
                if not oom.is_out_of_memory(error):
                    raise
            make_room()
        self._without_room += 1
        return None

    def _computed(self, prompt: Sequence[int]) -> Nats:
        found: Nats = [None] * len(self._labels)
        longest = math.inf if self._context is None else self._context - len(prompt)
        fitting = [k for k, label in enumerate(self._labels) if len(label) <= longest]
        if not fitting:
            return found
        labels = [self._labels[k] for k in fitting]
        self._ties.before_pass(len(prompt) + max(map(len, labels)))
        [scores] = label_room.score_labels(self._model, [prompt], labels, GROUP_LABELS, self._pad)
        for k, nats in zip(fitting, scores, strict=True):
            found[k] = round(nats, DECIMALS) + 0.0 if math.isfinite(nats) else None
        return found


# A model of ours that answers: base, adapter or plain weights, decoded in batches that change no answer.

PROMPT_END_TOKENS = 16
"""Of a prompt, in which the mark that begins reasoning is looked for."""


class TorchBackend:
    """Answers with a loaded model."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Generate,
        ties: BackendCallbacks,
        labels: Sequence[Sequence[int]] = (),
    ) -> None:
        """Takes a loaded model.

        Args:
            labels: token ids of generate.labels, see `labelled.ids_of`; none: likelihoods of labels are not computed.
        """
        self._model, self._tokenizer, self._settings, self._ties = model, tokenizer, settings, ties
        self._labels = labels
        self._voice = streaming.StreamingDecoder(model)
        self._control = ControlTokens(tokenizer)
        marks = {int(tokenizer.convert_tokens_to_ids(mark)) for mark in settings.reasoning_marks if mark in self._names}
        self._unwritten = self._control.ids - marks
        self.ends = scoring.list_end_tokens(model, tokenizer, _end_of_turn(tokenizer))
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), "none")
        self.about = {"device": str(model.device), "compute_dtype": str(dtype).removeprefix("torch.")}

    @property
    def _names(self) -> frozenset[str]:
        return self._control.names

    @property
    def _pad(self) -> int:
        return int(self._tokenizer.pad_token_id)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids up to where the assistant begins to speak.

        Raises:
            DataError: the chat template refuses the prompt; or a text of it holds a control token, so that whoever
                wrote it could speak as the system or the assistant.
        """
        if found := self._control.find(prompt.question):
            raise DataError(f"prompt {prompt.id}: {found}; take it out")
        return tokenization.encode_prompt(self._tokenizer, prompt.question)

    def opens_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the mark that begins reasoning."""
        tail = self._tokenizer.decode(list(ids[-PROMPT_END_TOKENS:]), skip_special_tokens=False)
        return bool(tail.rstrip().endswith(self._settings.reasoning_marks[0]))

    def written(self, ids: Sequence[int]) -> str:
        """The text of answer tokens, without those that structure a conversation; marks of reasoning stay."""
        kept = [one for one in ids if one not in self._unwritten and one not in self.ends]
        return replace_surrogates(self._tokenizer.decode(kept, skip_special_tokens=False))

    def answers(self, questions: Iterator[GenerationRequest], stop: Callable[[], bool]) -> Iterator[GenerationAnswer]:
        """See Speaker."""
        refused: deque[GenerationAnswer] = deque()
        known: dict[int, tuple[list[int], bool]] = {}
        """By place under way: tokens of the prompt, and whether it ends within reasoning."""
        likely = LabelScorer(self._model, self._labels, self._pad, self._ties, self._settings.samples)

        def asked() -> Iterator[decoding.DecodingRequest]:
            for question in questions:
                try:
                    ids = self.prompt_ids(question.prompt)
                except DataError as error:
                    self._ties.told("notice", {"text": f"not asked: {error}"})
                    refused.append(GenerationAnswer(question.place, "", "refused", None, 0, 0.0))
                    continue
                known[question.place] = ids, self.opens_reasoning(ids)
                yield decoding.DecodingRequest(question.place, tuple(ids), self._stream_of(question))

        decoder = self._decoder()
        for one in decoder.answers(asked(), stop):
            while refused:
                yield refused.popleft()
            ids, opened = known.pop(one.place)
            text = self.written(one.ids)
            labels = likely.of(one.place, ids, decoder) if self._labels else None
            yield GenerationAnswer(one.place, text, one.finish, len(ids), len(one.ids), one.nats, opened, labels=labels)
        yield from refused
        likely.tell()

    def spoken(self, question: GenerationRequest, keep: bool) -> Speech:
        """See Speaker. Keys and values are kept from token to token, so on a near tie it may be another answer than
        `answers` gives.
        """
        ids, voice = self.prompt_ids(question.prompt), self._voice
        splitter = ReasoningSplitter(self._settings.reasoning_marks, self.opens_reasoning(ids))
        tokens = voice.tokens(ids, self._how(), self._stream_of(question), keep)
        yield from streaming.stream_chunks(tokens, self.written, splitter, (len(ids), voice.context_tokens))

    def _stream_of(self, question: GenerationRequest) -> str:
        return token_choice.noise_stream_key(self._settings.seed, question.prompt.digest, question.sample)

    def _how(self) -> decoding.DecodingOptions:
        settings = self._settings
        return decoding.DecodingOptions(
            max_new_tokens=settings.max_new_tokens, ends=tuple(self.ends), pad=self._pad,
            temperature=settings.temperature, top_p=settings.top_p, exact=settings.exact, window=settings.window_rows,
        )  # fmt: skip

    def _decoder(self) -> decoding.BatchDecoder:
        return decoding.BatchDecoder(
            self._model, self._how(), None, self._ties.told, self._ties.beat, self._ties.before_pass
        )

    def close(self) -> None:
        """Nothing is held that ends with the process."""


def load_backend(kind: Kind, start: GenerationStart, ties: BackendCallbacks) -> TorchBackend:
    """The model that a generation asks, loaded.

    Raises:
        BaseModelError, DamagedFileError, SettingsError: it cannot be loaded, or generate.labels are no answers.
    """
    device = loading.pick_device(start.machine.device)
    path, base = Path(start.path), start.base
    code = base is not None and base.remote_code
    own_template = Path(start.template) if start.template else None
    if kind == "merged":
        tokenizer = base_model.load_tokenizer(path, remote_code=code)
        labels = _usable_label_ids(tokenizer, start.generate, ties)
        model = loading.load_plain(path, loading.pick_dtype(start.dtype, device), device, code)
        return TorchBackend(model, tokenizer, start.generate, ties, labels)
    if base is not None:
        base_model.verify_files(path, base.files)
    ties.beat()
    tokenizer = base_model.load_tokenizer(path, own_template, base.added_tokens if base else (), code)
    labels = _usable_label_ids(tokenizer, start.generate, ties)
    model = loading.load(path, base, start.train, device)
    if start.adapter is not None:
        model = adapters.load(model, Path(start.adapter))
    return TorchBackend(model, tokenizer, start.generate, ties, labels)


def _usable_label_ids(tokenizer: Any, settings: Generate, ties: BackendCallbacks) -> Sequence[Sequence[int]]:
    """Token ids of generate.labels; none where the template leaves no place for them, which is told."""
    found = label_token_ids(tokenizer, settings)
    if found is None:
        text = "the chat template writes an answer not simply behind its prompt, so labels have no likelihood"
        ties.told("notice", {"text": text})
    return found or ()


def _end_of_turn(tokenizer: Any) -> str:
    """The token with which the template ends an answer; the tokenizer's own where the template does not show one."""
    try:
        return tokenization.ConversationEncoder(tokenizer).end_of_turn
    except DataError:
        return str(tokenizer.eos_token)
