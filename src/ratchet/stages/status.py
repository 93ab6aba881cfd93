"""`ratchet status`: where a run stands. Imports neither torch nor MLflow."""

import time

from ratchet.config.schema import Machine
from ratchet.runs import directory
from ratchet.runs import status as journal
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalReader
from ratchet.runs.progress_view import create_view, is_generation
from ratchet.runs.replication import remote_status
from ratchet.runs.status import format_duration
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import read_champion


def status(layout: ProjectLayout, run: str | None) -> str:
    """The verb.

    Args:
        layout: the project.
        run: id of a training or generation, or its beginning; None: the latest training, and the generations that go
            on now; where nothing was trained, the latest generation.

    Raises:
        DataError: no such run, or several.
        DamagedFileError: it is of a newer version.
    """
    generations = [paths for paths in directory.list_runs(layout.generations) if paths.lock().held_elsewhere()]
    if run is None:
        latest = directory.find_newest_run(layout.runs)
        if latest is None and not generations and (last := directory.find_newest_run(layout.generations)):
            generations = [last]
        described = [*([] if latest is None else [journal.describe_run(latest)]), *map(_format_generation, generations)]
        if not described:
            return "no run yet; `dvc repro` starts one"
    else:
        paths = directory.find_run((layout.runs, layout.generations), run)
        described = [_format_generation(paths) if is_generation(paths) else journal.describe_run(paths)]
    lines = described
    if champion := read_champion(layout.champion).champion:
        forced = champion.forced
        note = f"; FORCED by {forced.by} against {forced.decision}: {forced.reason}" if forced else ""
        whose = f"model {champion.model_digest[:12]}, run {champion.run_id}"
        lines.append(f"champion: version {champion.version}, {whose}{note}")
    return "\n".join(lines)


def _format_generation(paths: RunPaths) -> str:
    """A generation in a few lines. Raises DamagedFileError for one of a newer version."""
    paths.require_known_format()
    reader, vitals = JournalReader(paths.journal), create_view(paths)
    for event in reader.read():
        vitals.see(event)
    p, found, running = vitals.progress, vitals.answering, paths.lock().held_elsewhere()
    lines = [f"generation {paths.root.name}: {journal.describe_state(p, running, 'ratchet generate')}"]
    lines.append(f"  answers     {p.step:,} of {format(p.planned_steps, ',') if p.planned_steps else '?'}")
    if found is not None and found.answers_per_s is not None and found.tokens_per_s is not None:
        lines.append(f"  rate        {found.answers_per_s:,.2f} answers/s, {found.tokens_per_s:,.0f} tokens/s")
    if running and (left := vitals.outlook.left(time.time())):
        lines.append(f"  time left   {left.describe()}")
    if found is not None and found.finishes:
        lines.append(f"  ends        {', '.join(found.ends())}")
    lines += [
        f"  budget      at most {tokens:,} padded tokens" for tokens, _ in p.budgets.values() if tokens is not None
    ]
    if p.last_t and not p.finished:
        lines.append(f"  last told   {format_duration(max(0.0, time.time() - p.last_t))} ago")
    return "\n".join([*lines, *journal.describe_events(p, reader.damaged_lines)])


# `ratchet status --mirror`: where runs stand, from any machine, without their directories.


def replica_status(machine: Machine, words: str | bool, run: str | None) -> str:
    """The verb: all runs in a mirror, or one.

    Args:
        machine: settings of the project, or those of a new one.
        words: what followed `--mirror`: a URL, the beginning of a run's id, or True: nothing.
        run: the beginning of a run's id; None: all.

    Raises:
        SettingsError: there is no mirror, or none that may be used like this.
        DataError: no such run there, or several.
        MirrorError: it cannot be reached.
    """
    store, run = remote_status.resolve_mirror(machine, words, run)
    if run is not None:
        return remote_status.describe_remote_run(store, remote_status.find_remote_run(store, run))
    return (
        "\n".join(remote_status.summarize_run(store, one) for one in remote_status.list_remote_runs(store))
        or "no run in this mirror yet"
    )
