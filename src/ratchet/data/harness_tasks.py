"""The project's lm-evaluation-harness tasks as files: which there are, and what they are made of as they lie there now.

Read without the harness, whose import takes many seconds: the gate asks whether a task has changed since it was run.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet.storage import digests

DATA = ("dataset_path", "dataset_kwargs", "dataset_name")
"""Keys of a task below which files are named."""


def find_task_files(tasks_dir: Path) -> list[Path]:
    """The YAML files of the project's tasks, folders in folders included, as the harness finds them."""
    return sorted(tasks_dir.rglob("*.yaml")) if tasks_dir.is_dir() else []


def fingerprint_tasks(names: Sequence[str], root: Path, tasks_dir: Path) -> dict[str, str]:
    """What each task is made of: its YAML, what that includes, its data files, and the Python that it calls.

    Args:
        names: tasks, or groups of tasks; one that no file defines is left out.
        root: paths of data files in the tasks are relative to this directory.
    """
    written: dict[str, Path] = {}
    for path in find_task_files(tasks_dir):
        content = _read_yaml(path)
        for key in ("group", "task"):
            if isinstance(content.get(key), str):
                written.setdefault(str(content[key]), path)
    found = {}
    for name in names:
        if name in written:
            parts = {
                _display_name(path, root): digests.hash_file(path)
                for path in _find_task_dependencies(name, written, root, tasks_dir)
            }
            found[name] = digests.hash_files(parts)
    return found


def _display_name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()


def _read_yaml(path: Path) -> Mapping[str, Any]:
    """A YAML file, its `!function` tags as texts. One that is no mapping is empty here; the harness skips it, too."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    reader = YAML(typ="rt", pure=True)  # it alone keeps tags that it does not know
    reader.allow_duplicate_keys = True
    try:
        content = reader.load(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError):
        return {}
    return content if isinstance(content, Mapping) else {}


def _find_task_dependencies(name: str, written: Mapping[str, Path], root: Path, tasks_dir: Path) -> set[Path]:
    """Every file that the task depends on."""
    found: set[Path] = set()
    todo = [written[name]]
    while todo:
        path = todo.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        content = _read_yaml(path)
        include = content.get("include", [])
        todo += [path.parent / str(one) for one in ([include] if isinstance(include, str) else include)]
        members = content.get("task")
        for member in members if isinstance(members, Sequence) and not isinstance(members, str) else []:
            inner = member if isinstance(member, str) else str(member.get("task", member.get("group", "")))
            todo += [written[inner]] if inner in written else []
        for key in DATA:
            for text in _iterate_texts(content.get(key)):
                found |= _find_data_files(text, root)
        if "!function" in path.read_text(encoding="utf-8"):
            found |= set(tasks_dir.rglob("*.py"))  # what a function imports is not followed: all of it counts
    return found


def _iterate_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _iterate_texts(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _iterate_texts(inner)


def _find_data_files(text: str, root: Path) -> set[Path]:
    """Files that a text names: one file, all of a folder, or all that a pattern matches; nothing for other texts."""
    if not text or "://" in text:
        return set()
    place = root / text
    if place.is_dir():
        return {path for path in place.rglob("*") if path.is_file()}
    if place.is_file():
        return {place}
    start = Path(place.anchor) if Path(text).is_absolute() else root
    return {path for path in start.glob(str(Path(text)).removeprefix(place.anchor)) if path.is_file()}
