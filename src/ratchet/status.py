"""`ratchet status`: where a run stands. Imports neither torch nor MLflow."""

import time

from ratchet.layout import Layout
from ratchet.records_gate import read_champion
from ratchet.run import directory
from ratchet.run import status as journal
from ratchet.run.answering import is_generation
from ratchet.run.directory import RunPaths
from ratchet.run.journal import Reader
from ratchet.run.status import duration
from ratchet.run.vitals import begun


def status(layout: Layout, run: str | None) -> str:
    """The verb.

    Args:
        layout: the project.
        run: id of a training or generation, or its beginning; None: the latest training, and the generations that go
            on now; where nothing was trained, the latest generation.

    Raises:
        DataError: no such run, or several.
        DamagedError: it is of a newer version.
    """
    generations = [paths for paths in directory.all_runs(layout.generations) if paths.lock().held_elsewhere()]
    if run is None:
        latest = directory.newest(layout.runs)
        if latest is None and not generations and (last := directory.newest(layout.generations)):
            generations = [last]
        described = [*([] if latest is None else [journal.describe(latest)]), *map(_generation, generations)]
        if not described:
            return "no run yet; `dvc repro` starts one"
    else:
        paths = directory.named((layout.runs, layout.generations), run)
        described = [_generation(paths) if is_generation(paths) else journal.describe(paths)]
    lines = described
    if champion := read_champion(layout.champion).champion:
        forced = champion.forced
        note = f"; FORCED by {forced.by} against {forced.decision}: {forced.reason}" if forced else ""
        whose = f"model {champion.model_digest[:12]}, run {champion.run_id}"
        lines.append(f"champion: version {champion.version}, {whose}{note}")
    return "\n".join(lines)


def _generation(paths: RunPaths) -> str:
    """A generation in a few lines. Raises DamagedError for one of a newer version."""
    paths.require_known_format()
    reader, vitals = Reader(paths.journal), begun(paths)
    for event in reader.read():
        vitals.see(event)
    p, found, running = vitals.progress, vitals.answering, paths.lock().held_elsewhere()
    lines = [f"generation {paths.root.name}: {journal.state(p, running, 'ratchet generate')}"]
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
        lines.append(f"  last told   {duration(max(0.0, time.time() - p.last_t))} ago")
    return "\n".join([*lines, *journal.events(p, reader.damaged_lines)])
