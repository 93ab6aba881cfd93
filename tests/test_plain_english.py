"""Docstrings, comments, messages and settings are in plain English: the words of plain_english.yaml do not occur."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
RULES = yaml.safe_load(Path(__file__).with_name("plain_english.yaml").read_text(encoding="utf-8"))
SOURCES = sorted((ROOT / "src").rglob("*.py"))
SETTINGS = [ROOT / "params.yaml", *sorted((ROOT / "src").rglob("*.yaml")), *sorted((ROOT / "examples").rglob("*.yaml"))]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each comment and string of a module, or each comment of a YAML file, with its line number."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from ((n, line.partition("#")[2]) for n, line in enumerate(source.splitlines(), 1) if "#" in line)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#! ")
        elif token.type == tokenize.STRING:
            yield token.start[0], re.sub(r"\s+", " ", re.sub(r"^[a-zA-Z]*([\"']{3}|[\"'])", "", token.string))


def find(rules: list[dict[str, str]], text: str, at_start: bool = False) -> Iterator[str]:
    for rule in rules:
        match = (re.match if at_start else re.search)(rule["pattern"], text, 0 if at_start else re.IGNORECASE)
        if match:
            yield f"{match[0]!r} (use: {rule['use']})"


def problems(path: Path) -> list[str]:
    """Return all forbidden words and openings of a file."""
    where = path.relative_to(ROOT)
    found = [f"{where}:{line}: {fault}" for line, text in texts(path) for fault in find(RULES["words"], text)]
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                line = getattr(node, "lineno", 1)
                docstring = ast.get_docstring(node) or ""
                found += [f"{where}:{line}: {fault}" for fault in find(RULES["openings"], docstring, True)]
    return found


@pytest.mark.parametrize("path", [*SOURCES, *SETTINGS], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_has_none_of_the_words(path: Path) -> None:
    assert problems(path) == []


def test_a_forbidden_word_is_found_in_comments_docstrings_and_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text('"""What is sealed."""\n# nobody waits\nraise ValueError(f"{1}: mend it")\nname = nobody\n')
    assert [line.split(": ")[0] for line in problems(path)] == ["module.py:2", "module.py:3", "module.py:1"]
