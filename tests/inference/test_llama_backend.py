"""Tests the llama.cpp backend with a real GGUF file."""

from contextlib import closing
from pathlib import Path

import tiny_gguf
from generations import SETTINGS, Generation, project, with_generate, write_prompts
from ratchet.errors import EXIT_OK
from ratchet.inference import model_reference, server_backends
from ratchet.inference.backend import AnswerEnd, BackendCallbacks
from ratchet.stages.chat import ChatSession

COUNT = 4


def test_a_gguf_file_gives_reproducible_answers(tmp_path: Path) -> None:
    file = tiny_gguf.write(tiny_gguf.directory(tmp_path / "hf"), tmp_path / "model.gguf")
    prompts = write_prompts(tmp_path / "p.jsonl", COUNT)
    found = []
    for name in ("one", "two"):
        project(tmp_path / name)
        settings = with_generate(SETTINGS, temperature=0.7, samples=2, max_new_tokens=6)
        made = Generation(tmp_path / name, prompts, settings, str(file))
        assert made.work() == EXIT_OK, made.events("worker_error")
        found.append(made.written())
    assert found[0] == found[1]
    records = made.records()
    assert len(records) == 2 * COUNT
    assert all(0 < one["tokens"] <= 6 and one["mean_log_probability"] < 0 for one in records), records
    assert {one["finish"] for one in records} <= {"length", "stop"}


def test_a_streamed_answer_says_why_it_ended(tmp_path: Path) -> None:
    file = tiny_gguf.write(tiny_gguf.directory(tmp_path / "hf"), tmp_path / "model.gguf")
    settings = with_generate(SETTINGS, max_new_tokens=6)
    layout = project(tmp_path / "p", settings)
    start = model_reference.resolve_model(str(file), layout, settings).start
    backend = server_backends.load_llama_backend(start, BackendCallbacks(lambda: None, lambda *_: None, lambda _: None))
    with closing(backend):
        *_, ended = backend.stream(ChatSession(settings).ask("say one"), False)
    assert isinstance(ended, AnswerEnd)
    assert (ended.finish, ended.tokens) == ("length", 6)
