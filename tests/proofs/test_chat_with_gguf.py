"""Proves that a user can chat with a GGUF file, and that Ctrl-C ends an answer but not its server."""

import re
from pathlib import Path

import tiny_gguf
from chat_cases import (
    layout,  # noqa: F401 (a fixture)
    model,  # noqa: F401 (a fixture)
    terminal,
)
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("stages", "models", "inference")


def test_a_gguf_file_talks_and_ctrl_c_does_not_end_its_server(layout: ProjectLayout, tmp_path: Path) -> None:
    file = tiny_gguf.write(tiny_gguf.directory(tmp_path / "hf"), tmp_path / "model.gguf")
    with terminal(layout, str(file)) as seen:
        seen.until("> ")
        seen.press("half")
        seen.until("half")
        seen.interrupt("Ctrl-D ends")
        seen.press("what is water\r")
        assert re.search(r"\d tokens.*context [\d,]+ of [\d,]+", seen.until("tokens/s.*> "))
        seen.press("\x04")
        assert seen.end() == 0
