"""`ratchet verify PATH...`: is every byte as it was sealed? Checks sealed directories, runs, and whole projects."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ratchet import digest, files
from ratchet.errors import DamagedError, SettingsError
from ratchet.layout import Layout
from ratchet.run.directory import CHECKPOINT, RESULT, RunPaths, differing
from ratchet.run.journal import Reader

KINDS = {"base", "data", "train", CHECKPOINT, RESULT, "evaluation", "export", "gate", "model", "noise", "quantization"}

Line = tuple[bool, str]
"""Whether a thing is whole, and what is printed of it."""


def verify(paths: Sequence[Path]) -> tuple[bool, str]:
    """Check everything sealed at or below these paths.

    Returns:
        Whether all is whole; and one line a thing, `ok PATH KIND DIGEST SIZE` or `DAMAGED PATH: WHAT`.

    Raises:
        SettingsError: a path is nothing that could be checked.
    """
    checks = [_check_of(path)(path) for path in paths]
    lines = [line for found in checks for line in found]
    return all(whole for whole, _ in lines), "\n".join(text for _, text in lines)


def _check_of(path: Path) -> Callable[[Path], Iterator[Line]]:
    """What a path is. Damage may have taken what tells it, so one of several signs is enough."""
    if not path.exists():
        raise SettingsError(f"{path}: not there")
    if (path / "params.yaml").is_file() and (path / "dvc.yaml").is_file():
        return _project
    run = RunPaths(path)
    if run.spec.is_file() or run.journal.is_file() or run.format.is_file():
        return _run
    if (path / files.MANIFEST).exists():
        return _sealed
    raise SettingsError(
        f"{path}: nothing that is sealed: no {files.MANIFEST} (sealed directory), no spec.json (run), "
        "no params.yaml beside a dvc.yaml (project)"
    )


def _project(root: Path) -> Iterator[Line]:
    layout = Layout(root.resolve())
    outs = (
        layout.base, layout.data, layout.train, layout.export, layout.evaluate, layout.gate, layout.noise,
        layout.quantization,
    )  # fmt: skip
    things = [out for out in outs if out.exists()]
    things += _folders(layout.models)
    for thing in things:
        yield from _sealed(thing)
    for folder in _folders(layout.runs):
        yield from _run(folder)
    if not things and not _folders(layout.runs):
        yield True, f"ok  {root}  project  nothing is sealed in it yet"


def _folders(parent: Path) -> list[Path]:
    """Those that are not being written or removed."""
    return sorted(p for p in parent.iterdir() if p.is_dir() and p.name[0] != ".") if parent.is_dir() else []


def _sealed(path: Path, kind: str | None = None, spec: dict[str, Any] | None = None) -> Iterator[Line]:
    """A sealed directory; a checkpoint must belong to the run of `spec`, or of the directory that it lies in."""
    try:
        manifest = files.verify(path, kind)
        if manifest.kind not in KINDS:
            raise DamagedError(f"{path / files.MANIFEST}: of the unknown kind {manifest.kind!r}")
        if manifest.kind == CHECKPOINT:
            _require_fitting(path, spec)
    except DamagedError as error:
        yield _damaged(path, error)
    else:
        yield True, f"ok  {path}  {manifest.kind}  {manifest.digest[: digest.SHORT]}  {manifest.size_bytes:,} bytes"


def _damaged(path: Path, error: Exception) -> Line:
    text = str(error).removeprefix(f"{path}: ").removeprefix(f"{path}/")
    return False, f"DAMAGED {path}: {text}"


def _require_fitting(path: Path, spec: dict[str, Any] | None) -> None:
    """Raise DamagedError unless an intact checkpoint is of this run, and what it refers to is there."""
    identity, state = path / "identity.json", path / "state.json"
    if not identity.exists():
        return  # format 1 had none
    run = RunPaths(path.parent.parent)
    if spec is None and path.parent == run.checkpoints and run.spec.is_file():
        spec = _json(run.spec)
    found = _json(identity).get("spec")
    if spec is not None and (names := differing(found if isinstance(found, dict) else {}, spec)):
        raise DamagedError(f"{identity}: belongs to another run, it differs in {', '.join(names)}")
    if path.parent != run.checkpoints:
        return  # of a result, which holds the best and the last beside each other
    counters = _json(state).get("state")
    for name in ("best_step", "good_step"):
        step = counters.get(name) if isinstance(counters, dict) else None
        if not isinstance(step, int):
            raise DamagedError(f"{state}: no {name} in it")
        if step and not run.checkpoint(step).exists():
            raise DamagedError(f"{state}: refers to the checkpoint of step {step}, which is not there")


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: unreadable ({error})") from None
    if not isinstance(value, dict):
        raise DamagedError(f"{path}: not an object of JSON")
    return value


def _run(root: Path) -> Iterator[Line]:
    run = RunPaths(root)
    spec: dict[str, Any] | None = None
    try:
        run.require_known_format()
        spec = _json(run.spec)
        own, name = digest.of_json(spec)[: digest.SHORT], root.resolve().name
        if own != name and re.fullmatch(f"[0-9a-f]{{{digest.SHORT}}}", name):  # a copy may have a name of its own
            raise DamagedError(f"{run.spec}: is the spec of run {own}, not {name}")
    except DamagedError as error:
        yield _damaged(root, error)
    else:
        yield True, f"ok  {run.spec}  spec  {own}  {run.spec.stat().st_size:,} bytes"
    yield from _journal(run)
    for path in map(run.checkpoint, run.checkpoint_steps()):
        yield from _sealed(path, CHECKPOINT, spec)
    if run.result.exists():
        yield from _sealed(run.result, RESULT)


def _journal(run: RunPaths) -> Iterator[Line]:
    if not run.journal.exists():
        yield False, f"DAMAGED {run.journal}: missing"
        return
    reader = Reader(run.journal)
    events = sum(1 for _ in reader.read())
    unfinished = run.journal.stat().st_size > reader.offset
    if reader.damaged_lines:
        yield False, f"DAMAGED {run.journal}: {reader.damaged_lines} damaged line(s) beside {events} events"
    else:
        end = "  the last line is not finished" if unfinished else ""
        yield True, f"ok  {run.journal}  journal  {events} events  {run.journal.stat().st_size:,} bytes{end}"
