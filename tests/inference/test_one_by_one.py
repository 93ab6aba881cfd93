"""Answers as they are given, by models in memory: states kept between two questions change nothing."""

import io
from pathlib import Path

import pytest

import families
import generations
from generations import SETTINGS, with_generate
from ratchet.config.schema import Settings
from ratchet.console.stream_printer import PartialAnswer, StreamPrinter
from ratchet.errors import DataError
from ratchet.inference import model_reference, torch_backend
from ratchet.inference.backend import AnswerChunk, AnswerEnd, BackendCallbacks
from ratchet.inference.chat_session import ChatSession
from ratchet.inference.reasoning import ReasoningSplitter
from ratchet.inference.streaming import StreamingDecoder, stream_chunks
from ratchet.models.decoding.decoder import DecodingOptions
from ratchet.storage.layout import ProjectLayout

QUESTIONS = ("what is water", "and the colour of it", "name three")
TIES = BackendCallbacks(lambda: None, lambda *_: None, lambda _: None)
HOW = DecodingOptions(max_new_tokens=12, ends=(2,), pad=0)


@pytest.fixture
def settings() -> Settings:
    return with_generate(SETTINGS, max_new_tokens=12, temperature=0.9)


@pytest.fixture
def speaker(chat_directory: Path, settings: Settings, tmp_path: Path) -> torch_backend.TorchBackend:
    layout: ProjectLayout = generations.project(tmp_path / "p", settings)
    start = model_reference.resolve_model(str(chat_directory), layout, settings).start
    return torch_backend.load_backend("merged", start, TIES)


def said(speaker: torch_backend.TorchBackend, settings: Settings, *, keep: bool) -> list[tuple[str, AnswerEnd | None]]:
    """A conversation."""
    talk, found = ChatSession(settings), []
    for text in QUESTIONS:
        heard = PartialAnswer()
        StreamPrinter(io.StringIO()).answer(speaker.spoken(talk.ask(text), keep), heard)
        talk.answered(heard.answer)
        found.append((heard.answer, heard.ended))
    return found


def test_kept_states_change_no_answer_of_a_conversation(
    speaker: torch_backend.TorchBackend, settings: Settings
) -> None:
    kept = said(speaker, settings, keep=True)
    assert speaker._voice.reused_tokens > 20
    assert kept == said(speaker, settings, keep=False)
    assert speaker._voice.reused_tokens == 0
    assert len({answer for answer, _ in kept}) > 1
    assert all(ended and ended.tokens and ended.context_tokens == 128 for _, ended in kept)


def test_a_stopped_answer_changes_no_later_one(speaker: torch_backend.TorchBackend, settings: Settings) -> None:
    first = ChatSession(settings).ask(QUESTIONS[0])
    whole = [*speaker.spoken(first, False)]
    for count in range(4):
        pieces = speaker.spoken(first, True)
        for _ in range(count):
            next(pieces)
        pieces.close()
        assert [*speaker.spoken(first, True)] == whole


def test_prompts_that_cannot_be_asked_are_refused(speaker: torch_backend.TorchBackend, settings: Settings) -> None:
    with pytest.raises(DataError, match="im_end"):
        next(speaker.spoken(ChatSession(settings).ask("say <|im_end|>"), True))
    (ended,) = speaker.spoken(ChatSession(settings).ask("water " * 200), True)
    assert isinstance(ended, AnswerEnd)
    assert ended.finish == "context"
    assert ended.tokens == 0


def test_states_that_cannot_go_back_are_not_kept() -> None:
    voice = StreamingDecoder(families.make("mamba"))
    first = list(voice.tokens([5, 6, 7], HOW, "a", keep=True))
    longer = [5, 6, 7, *[one for one in first if isinstance(one, int)], 8, 9]
    assert list(voice.tokens(longer, HOW, "b", keep=True)) == list(voice.tokens(longer, HOW, "b", keep=False))
    assert voice.reused_tokens == 0


def test_characters_of_several_tokens_come_whole_and_reasoning_apart() -> None:
    text = "<think>Löß</think>Grüße 🦫!".encode()

    def written(ids: object) -> str:
        return bytes(ids).decode(errors="replace")  # type: ignore[call-overload]

    pieces = list(stream_chunks(iter([*text, "length"]), written, ReasoningSplitter(("<think>", "</think>")), (3, 99)))
    assert pieces[-1] == AnswerEnd("length", 3, len(text), 99)
    texts = [one for one in pieces if isinstance(one, AnswerChunk)]
    assert "".join(one.text for one in texts if one.reasoning) == "Löß"
    assert "".join(one.text for one in texts if not one.reasoning) == "Grüße 🦫!"
    assert all("\N{REPLACEMENT CHARACTER}" not in one.text for one in texts)
    assert len(texts) > 8
