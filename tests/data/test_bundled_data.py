"""The bundled data are those that their generator writes, and new projects get the same text."""

import gzip
import shutil
import subprocess
import sys
from pathlib import Path

from ratchet.stages.init import TINY_BASE_TEXT

DATA = Path(__file__).parents[2] / "data"


def test_the_generator_writes_the_bundled_data(tmp_path: Path) -> None:
    data, package = tmp_path / "data", tmp_path / "src" / "ratchet" / "data"
    data.mkdir()
    package.mkdir(parents=True)
    for name in ("generate.py", "phrases.txt"):
        shutil.copy(DATA / name, data)
    subprocess.run([sys.executable, str(data / "generate.py"), str(data)], check=True)
    for name in ("raw/support.csv", "raw/support.jsonl", "text/help.txt"):
        assert (data / name).read_bytes() == (DATA / name).read_bytes(), name
    assert gzip.decompress((package / "help.txt.gz").read_bytes()) == (DATA / "text" / "help.txt").read_bytes()


def test_a_new_project_gets_the_bundled_text() -> None:
    assert gzip.decompress(TINY_BASE_TEXT.read_bytes()) == (DATA / "text" / "help.txt").read_bytes()
