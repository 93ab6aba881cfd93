"""Tests the llama.cpp backend with a real GGUF file."""

from pathlib import Path

import tiny_gguf
from generations import SETTINGS, Generation, project, with_generate, write_prompts
from ratchet.errors import EXIT_OK

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
    assert all(one["finish"] == "length" for one in records if one["tokens"] == 6), records
    assert all(one["finish"] == "stop" for one in records if one["tokens"] < 6), records
