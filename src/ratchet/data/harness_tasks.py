"""Finds and fingerprints the project's own lm-evaluation-harness tasks, so that the gate can detect changed tasks.

The task files are read without the harness, whose import takes many seconds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet.data.conversation import join_leaf_texts
from ratchet.storage import digests

DATA = ("dataset_path", "dataset_kwargs", "dataset_name")
"""Keys of a task that name data files."""


def find_task_files(tasks_dir: Path) -> list[Path]:
    """Return all YAML files below a folder, in subfolders too, as the harness finds them."""
    return sorted(tasks_dir.rglob("*.yaml")) if tasks_dir.is_dir() else []


def fingerprint_tasks(names: Sequence[str], root: Path, tasks_dir: Path) -> dict[str, str]:
    """Return a digest of each task or group, over its YAML, included files, data files, and Python files it may call.

    Names that no file in `tasks_dir` defines are left out. Data paths in the tasks are relative to `root`.
    """
    defined_in: dict[str, Path] = {}
    for path in find_task_files(tasks_dir):
        content = _read_yaml(path)
        for key in ("group", "task"):
            if isinstance(content.get(key), str):
                defined_in.setdefault(str(content[key]), path)
    fingerprints = {}
    for name in names:
        if name in defined_in:
            paths = _find_task_dependencies(name, defined_in, root, tasks_dir)
            shown = {path: path.relative_to(root) if path.is_relative_to(root) else path for path in paths}
            fingerprints[name] = digests.hash_files({shown[p].as_posix(): digests.hash_file(p) for p in paths})
    return fingerprints


def _read_yaml(path: Path) -> Mapping[str, Any]:
    """Return a YAML file's content, with `!function` tags as texts; {} for other files, which the harness skips too."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    reader = YAML(typ="rt", pure=True)  # the only type that keeps unknown tags
    reader.allow_duplicate_keys = True
    try:
        content = reader.load(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError):
        return {}
    return content if isinstance(content, Mapping) else {}


def _find_task_dependencies(name: str, defined_in: Mapping[str, Path], root: Path, tasks_dir: Path) -> set[Path]:
    """Return all files that a task depends on."""
    dependencies: set[Path] = set()
    pending = [defined_in[name]]
    while pending:
        path = pending.pop()
        if path in dependencies or not path.is_file():
            continue
        dependencies.add(path)
        content = _read_yaml(path)
        include = content.get("include", [])
        pending += [path.parent / str(file) for file in ([include] if isinstance(include, str) else include)]
        members = content.get("task")
        for member in members if isinstance(members, Sequence) and not isinstance(members, str) else []:
            inner = member if isinstance(member, str) else str(member.get("task", member.get("group", "")))
            pending += [defined_in[inner]] if inner in defined_in else []
        for key in DATA:
            for text in join_leaf_texts(content.get(key)).splitlines():
                dependencies |= _find_data_files(text, root)
        if "!function" in path.read_text(encoding="utf-8"):
            dependencies |= set(tasks_dir.rglob("*.py"))  # without following imports, every Python file may matter
    return dependencies


def _find_data_files(text: str, root: Path) -> set[Path]:
    """Return the files that a text names: a file, all files of a folder, or the matches of a glob."""
    if not text or "://" in text:
        return set()
    target = root / text
    if target.is_dir():
        return {path for path in target.rglob("*") if path.is_file()}
    if target.is_file():
        return {target}
    start = Path(target.anchor) if Path(text).is_absolute() else root
    return {path for path in start.glob(str(Path(text)).removeprefix(target.anchor)) if path.is_file()}
