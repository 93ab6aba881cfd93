"""Proves that each tutorial works as its page says: every command runs in a new directory, with the output shown.

The trial on docs/replicas.md runs too, with data/raw/support.csv as the reader's file.
"""

import shutil
from pathlib import Path

import pytest

import tutorials

PACKAGES = ("api", "cli", "stages")
PAGES = [*sorted(path.name for path in tutorials.DOCS.glob("tutorial_*.md")), "replicas.md"]
ROWS = tutorials.DOCS.parent / "data" / "raw" / "support.csv"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directories in which pages have run, by page. Other pages continue in a copy."""
    return {}


@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_works_as_its_page_says(name: str, finished: dict[str, Path], tmp_path: Path) -> None:
    run(name, tmp_path / "work", finished)


def run(name: str, directory: Path, finished: dict[str, Path]) -> None:
    page = (tutorials.DOCS / name).read_text(encoding="utf-8")
    before = tutorials.find_prerequisite(page)
    if before is None:
        directory.mkdir()
        shutil.copy(ROWS, directory)
    else:
        if before not in finished:
            run(before, directory.with_name("before"), finished)
        shutil.copytree(finished[before], directory, symlinks=True)
    assert tutorials.run_page(page, directory)
    finished[name] = directory
