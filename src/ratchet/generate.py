"""Prompts → answers: a supervised run that loses none and repeats none. Imports no torch: the worker does."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ratchet import digest, files
from ratchet.appraisal import summary
from ratchet.config import Settings
from ratchet.errors import DamagedError, SettingsError, StorageError
from ratchet.generating import identity, output
from ratchet.generating.lines import Lines
from ratchet.generating.prompts import Source
from ratchet.generating.spec import ASKED, Card, GenerationPaths, GenerationSpec
from ratchet.layout import Layout
from ratchet.lock import Lock
from ratchet.markup import counted
from ratchet.run.directory import Run, storage
from ratchet.run.observers import Observer
from ratchet.run.supervisor import supervise
from ratchet.services.console import Console
from ratchet.terminal.stream import is_live
from ratchet.version import code_version


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    prompts: Path
    output: Path | None
    model: str = "adapter"
    stream: bool = False


def generate(layout: Layout, settings: Settings, options: Options, say: Callable[[str], None]) -> str:
    """Answer every prompt of a file, and write one record an answer; starting again is going on.

    Args:
        say: takes lines on how far it is.

    Returns:
        What came of it, for people.

    Raises:
        SettingsError: no such model; an output that is there from other settings, whose name has no known ending, or
            that cannot be made.
        DataError, DamagedError, ChampionError, BaseModelError: prompts or model are not there, or not whole.
        BusyError: somebody else writes this output, or answers the same.
        StorageError: the output could be made before, and cannot now; the answers are kept.
        InterruptedRunError, InputError, RunFailedError: see `supervise`.
    """
    source = Source(options.prompts.absolute(), settings)
    if options.stream:
        if options.output is not None:
            raise SettingsError(f"--output {options.output}: --stream writes no file; leave one of the two out")
        from ratchet.generating.streaming import stream  # loads the model here

        return stream(identity.meant(options.model, layout, settings), source, sys.stdout)
    if options.output is None:
        raise SettingsError("--output: name a file that ends in .jsonl or .parquet (or watch answers with --stream)")
    target = options.output.absolute()
    output.require_place(target)
    model = identity.meant(options.model, layout, settings)
    count, prompts_digest = source.measured()
    say(f"{counted(count, 'prompt')} of {options.prompts.name} ({source.described})")
    if source.fault_count:
        say(f"left out: {counted(source.fault_count, 'record')} that cannot be asked (generate.skip_faults)")
    for note in source.notes():
        say(note)
    spec = GenerationSpec(
        generate=settings.generate.decisive(), prompts_digest=prompts_digest, model=model.model,
        template_digest=model.template_digest,
    )  # fmt: skip
    name = digest.of_bytes(str(target).encode())[: digest.SHORT]
    with Lock(layout.stage_lock(f"generate-{name}"), f"output {target}").acquire(wait_s=1.0):
        if output.is_there(target, spec, source.digest_with):
            return f"{target}: is there, of these prompts, settings and model (generation {spec.run_id}); nothing to do"
        run = Run.open(layout.generations, spec)
        try:
            paths = GenerationPaths(run.paths.root)
            if not run.paths.is_finished():
                with storage(paths.root):
                    _keep_prompts(paths, source, count)
            supervise(run, model.start, [_shown(run, say)], code_version())
            card = _written(paths, target, options.model, source.fault_count)
        finally:
            run.close()
    return "\n".join([describe(card, target), *summary.lines(target, settings.prepare.task)])


def _shown(run: Run, say: Callable[[str], None]) -> Observer:
    """A screen where one can be drawn, else lines."""
    return Console(run.paths) if is_live(sys.stdout) else Lines(lambda text: say(f"  {text}"))


def _written(paths: GenerationPaths, target: Path, model_name: str, faults: int) -> Card:
    try:
        return output.write(paths, target, model_name, faults)
    except OSError as error:
        raise StorageError(
            f"{error.filename or target}: {error.strerror or error}; all answers are kept in {paths.result}: mend that "
            "and repeat, or name another --output"
        ) from error


def _keep_prompts(paths: GenerationPaths, source: Source, count: int) -> None:
    """Seal the prompts with the run, unless they are: the file may be gone or changed when a worker starts again."""
    try:
        files.verify(paths.prompts, ASKED)
    except DamagedError:
        source.keep(paths.prompts, count)


def describe(card: Card, target: Path) -> str:
    """The card in a few lines, for the terminal."""
    ends = ", ".join(f"{count:,} {name}" for name, count in card.finish.items())
    left_out = f"; {counted(card.faults, 'record')} left out" if card.faults else ""
    given = f"{counted(card.answers, 'answer')} to {counted(card.prompts, 'prompt')}"
    return (
        f"generation {card.id}: {given} ({ends}){left_out}\n"
        f"  {card.tokens:,} tokens, of prompts {card.prompt_tokens:,}; model {card.spec.model.digest[: digest.SHORT]} "
        f"({card.model_name})\n  {target}"
    )
