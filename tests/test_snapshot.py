"""The names that files, other programs and users rely on match snapshot.json.

A changed name breaks existing runs, reports or scripts. If you intend the change, describe it in docs/changelog.md and
run `python tests/test_snapshot.py`, which writes the snapshot again.
"""

import argparse
import ast
import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import ratchet
from ratchet import errors
from ratchet.cli.main import build_parser
from ratchet.config.settings import Settings
from ratchet.runs.directory import RunPaths
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ratchet"
SNAPSHOT = Path(__file__).with_name("snapshot.json")


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """Return the name and the syntax tree of each module. Modules are parsed once, because most parts of the snapshot
    use all of them."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found.append((name, ast.parse(path.read_text(encoding="utf-8"))))
    return found


def strings(pattern: str) -> list[str]:
    """Return each string of the source that matches the pattern completely."""
    found = set()
    for _, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(pattern, node.value):
                found.add(node.value)
    return sorted(found)


def events() -> dict[str, list[str]]:
    """Return the keys of each kind of journal event, as the source appends them. `**` marks keys that are computed at
    run time."""
    found: dict[str, set[str]] = {}
    for _, tree in modules():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append"
                and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
                and (node.keywords or len(node.args) > 1)
            ):  # fmt: skip
                found.setdefault(node.args[0].value, set()).update(key.arg or "**" for key in node.keywords)
    return {kind: sorted(keys) for kind, keys in sorted(found.items())}


def records() -> dict[str, dict[str, str]]:
    """Return the fields and types of each record that is written as JSON."""
    for name, tree in modules():
        bases = {
            base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in map(ast.unparse, node.bases)
        }
        if bases & {"Record", "BaseRunSpec", "LaunchSpec"}:
            import_module(name)
    return {
        kind.__name__: {name: str(field.annotation).replace("typing.", "") for name, field in kind.model_fields.items()}
        for kind in sorted(subclasses(Record), key=lambda kind: kind.__name__)
        if kind.__module__.startswith("ratchet.")
    }


def subclasses(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def settings(model: type[BaseModel] = Settings, prefix: str = "") -> dict[str, Any]:
    """Return the default of each setting, by dotted name."""
    found: dict[str, Any] = {}
    defaults = model().model_dump(mode="json")
    for name, field in model.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            found |= settings(field.annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = defaults[name]
    return found


def paths(owner: Any, root: Path) -> dict[str, str]:
    """Return the paths below a project or run directory, by the name of their attribute or property."""
    found = {}
    properties = dict(inspect.getmembers(type(owner), lambda member: isinstance(member, property)))
    for name in (vars(owner).keys() | properties.keys()) - {"root"}:
        if isinstance(value := getattr(owner, name), Path) and value.is_relative_to(root):
            found[name] = str(value.relative_to(root))
    return found


def flags() -> dict[str, list[str]]:
    """Return the flags and arguments of each command."""
    [commands] = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return {
        name: sorted(option for action in parser._actions for option in action.option_strings or [action.dest])
        for name, parser in commands.choices.items()
    }


@cache
def take_snapshot() -> dict[str, Any]:
    """Collect the current names."""
    root = Path("/project")
    return {
        "commands": flags(),
        "environment": strings("RATCHET_[A-Z_]+"),
        "events": events(),
        "exit_codes": {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")},
        "exceptions": {
            kind.__name__: kind.exit_code for kind in vars(errors).values()
            if inspect.isclass(kind) and issubclass(kind, errors.RatchetError)
        },
        "extensions": strings(r"ratchet\.(metrics|filters|rewards|callbacks)"),
        "mlflow_tags": [
            tag for tag in strings(r"ratchet\.[a-z_]+") if tag.removeprefix("ratchet.") not in subpackages()
        ],
        "project_files": paths(ProjectLayout(root), root),
        "python": sorted(ratchet.__all__),
        "records": records(),
        "run_files": paths(RunPaths(root), root),
        "settings": settings(),
    }  # fmt: skip


def subpackages() -> set[str]:
    return {path.stem for path in SOURCE.iterdir()} | {"metrics", "filters", "rewards", "callbacks"}


@pytest.mark.parametrize("part", sorted(json.loads(SNAPSHOT.read_text(encoding="utf-8"))) if SNAPSHOT.exists() else [])
def test_names_are_those_of_the_snapshot(part: str) -> None:
    expected = json.loads(SNAPSHOT.read_text(encoding="utf-8"))[part]
    assert json.loads(json.dumps(take_snapshot()[part])) == expected, "see the docstring of this file"


def test_the_snapshot_has_every_part() -> None:
    assert sorted(json.loads(SNAPSHOT.read_text(encoding="utf-8"))) == sorted(take_snapshot())


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(take_snapshot(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
