"""Tests streaming with a model in memory: reuse of the cache does not change answers."""

import io
from pathlib import Path

import pytest

import families
import generations
from generations import SETTINGS, with_generate
from ratchet.config.settings import Settings
from ratchet.console.stream_printer import PartialAnswer, StreamPrinter
from ratchet.errors import DataError
from ratchet.inference import model_reference, torch_backend
from ratchet.inference.backend import AnswerChunk, AnswerEnd, BackendCallbacks
from ratchet.inference.spec import ReasoningSplitter
from ratchet.inference.torch_backend import StreamingDecoder, stream_chunks
from ratchet.models.decoding.decoder import DecodingOptions
from ratchet.stages.chat import ChatSession
from ratchet.storage.layout import ProjectLayout

QUESTIONS = ("what is water", "and the colour of it", "name three")
TIES = BackendCallbacks(lambda: None, lambda *_: None, lambda _: None)
HOW = DecodingOptions(max_new_tokens=12, end_token_ids=(2,), pad_token_id=0)


@pytest.fixture
def settings() -> Settings:
    return with_generate(SETTINGS, max_new_tokens=12, temperature=0.9)


@pytest.fixture
def backend(chat_directory: Path, settings: Settings, tmp_path: Path) -> torch_backend.TorchBackend:
    layout: ProjectLayout = generations.project(tmp_path / "p", settings)
    start = model_reference.resolve_model(str(chat_directory), layout, settings).start
    return torch_backend.load_backend("merged", start, TIES)


def said(backend: torch_backend.TorchBackend, settings: Settings, *, keep: bool) -> list[tuple[str, AnswerEnd | None]]:
    """Hold a conversation; return each answer and its end."""
    session, found = ChatSession(settings), []
    for text in QUESTIONS:
        heard = PartialAnswer()
        StreamPrinter(io.StringIO()).answer(backend.stream(session.ask(text), keep), heard)
        session.add_answer(heard.answer)
        found.append((heard.answer, heard.end))
    return found


def test_cache_reuse_does_not_change_answers(backend: torch_backend.TorchBackend, settings: Settings) -> None:
    kept = said(backend, settings, keep=True)
    assert backend._streaming_decoder.reused_tokens > 20
    assert kept == said(backend, settings, keep=False)
    assert backend._streaming_decoder.reused_tokens == 0
    assert len({answer for answer, _ in kept}) > 1
    assert all(ended and ended.tokens and ended.context_tokens == 128 for _, ended in kept)


def test_a_stopped_answer_does_not_change_later_answers(
    backend: torch_backend.TorchBackend, settings: Settings
) -> None:
    first = ChatSession(settings).ask(QUESTIONS[0])
    whole = [*backend.stream(first, False)]
    for count in range(4):
        pieces = backend.stream(first, True)
        for _ in range(count):
            next(pieces)
        pieces.close()
        assert [*backend.stream(first, True)] == whole


def test_prompts_that_cannot_be_rendered_are_refused(backend: torch_backend.TorchBackend, settings: Settings) -> None:
    with pytest.raises(DataError, match="im_end"):
        next(backend.stream(ChatSession(settings).ask("say <|im_end|>"), True))
    (ended,) = backend.stream(ChatSession(settings).ask("water " * 200), True)
    assert isinstance(ended, AnswerEnd)
    assert ended.finish == "context"
    assert ended.tokens == 0


def test_caches_that_cannot_be_cropped_are_not_reused() -> None:
    voice = StreamingDecoder(families.make("mamba"))
    first = list(voice.generate([5, 6, 7], HOW, "a", reuse_cache=True))
    longer = [5, 6, 7, *[one for one in first if isinstance(one, int)], 8, 9]
    assert list(voice.generate(longer, HOW, "b", reuse_cache=True)) == list(
        voice.generate(longer, HOW, "b", reuse_cache=False)
    )
    assert voice.reused_tokens == 0


def test_characters_are_not_divided_and_reasoning_is_separated() -> None:
    text = "<think>Löß</think>Grüße 🦫!".encode()

    def written(ids: object) -> str:
        return bytes(ids).decode(errors="replace")  # type: ignore[call-overload]

    pieces = list(stream_chunks(iter([*text, "length"]), written, ReasoningSplitter(("<think>", "</think>")), (3, 99)))
    assert pieces[-1] == AnswerEnd("length", 3, len(text), 99)
    texts = [one for one in pieces if isinstance(one, AnswerChunk)]
    assert "".join(one.text for one in texts if one.is_reasoning) == "Löß"
    assert "".join(one.text for one in texts if not one.is_reasoning) == "Grüße 🦫!"
    assert all("\N{REPLACEMENT CHARACTER}" not in one.text for one in texts)
    assert len(texts) > 8
