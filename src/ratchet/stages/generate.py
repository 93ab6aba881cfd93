"""Prompts → answers: a supervised run that loses none and repeats none. Imports no torch: the worker does."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ratchet.config.schema import Settings
from ratchet.console.callback import ConsoleCallback
from ratchet.console.log_lines import RunLogPrinter
from ratchet.console.stream_printer import PartialAnswer, StreamPrinter
from ratchet.console.text_layout import is_live_terminal
from ratchet.errors import DamagedFileError, DataError, SettingsError, StorageError
from ratchet.evaluation import answer_analysis
from ratchet.inference import backend_factory, model_reference, output
from ratchet.inference.backend import BackendCallbacks, GenerationRequest
from ratchet.inference.model_reference import ModelReference
from ratchet.inference.prompts import PromptSource
from ratchet.inference.spec import ASKED, GenerationCard, GenerationPaths, GenerationSpec
from ratchet.runs.callbacks import RunCallback
from ratchet.runs.directory import Run, storage_errors
from ratchet.runs.supervisor import supervise
from ratchet.storage import digests, files
from ratchet.storage.code_version import code_version
from ratchet.storage.html import format_count
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.locks import FileLock


@dataclass(frozen=True)
class GenerateOptions:
    """What the command line says."""

    prompts: Path
    output: Path | None
    model: str = "adapter"
    stream: bool = False


def generate(layout: ProjectLayout, settings: Settings, options: GenerateOptions, say: Callable[[str], None]) -> str:
    """Answer every prompt of a file, and write one record an answer; starting again is going on.

    Args:
        say: takes lines on how far it is.

    Returns:
        What came of it, for people.

    Raises:
        SettingsError: no such model; an output that is there from other settings, whose name has no known ending, or
            that cannot be made.
        DataError, DamagedFileError, ChampionError, BaseModelError: prompts or model are not there, or not whole.
        LockHeldError: somebody else writes this output, or answers the same.
        StorageError: the output could be made before, and cannot now; the answers are kept.
        InterruptedRunError, InputError, RunFailedError: see `supervise`.
    """
    source = PromptSource(options.prompts.absolute(), settings)
    if options.stream:
        if options.output is not None:
            raise SettingsError(f"--output {options.output}: --stream writes no file; leave one of the two out")

        return stream_answers(model_reference.resolve_model(options.model, layout, settings), source, sys.stdout)
    if options.output is None:
        raise SettingsError("--output: name a file that ends in .jsonl or .parquet (or watch answers with --stream)")
    target = options.output.absolute()
    output.require_writable(target)
    model = model_reference.resolve_model(options.model, layout, settings)
    count, prompts_digest = source.measured()
    say(f"{format_count(count, 'prompt')} of {options.prompts.name} ({source.described})")
    if source.fault_count:
        say(f"left out: {format_count(source.fault_count, 'record')} that cannot be asked (generate.skip_faults)")
    for note in source.notes():
        say(note)
    spec = GenerationSpec(
        generate=settings.generate.decisive(), prompts_digest=prompts_digest, model=model.model,
        template_digest=model.template_digest,
    )  # fmt: skip
    name = digests.hash_bytes(str(target).encode())[: digests.SHORT]
    with FileLock(layout.stage_lock(f"generate-{name}"), f"output {target}").acquire(wait_s=1.0):
        if output.is_complete(target, spec, source.digest_with):
            return f"{target}: is there, of these prompts, settings and model (generation {spec.run_id}); nothing to do"
        run = Run.open(layout.generations, spec)
        try:
            paths = GenerationPaths(run.paths.root)
            if not run.paths.is_finished():
                with storage_errors(paths.root):
                    _seal_prompts(paths, source, count)
            supervise(run, model.start, [_create_console(run, say)], code_version())
            card = _write_answers(paths, target, options.model, source.fault_count)
        finally:
            run.close()
    return "\n".join([describe(card, target), *answer_analysis.summarize_generation(target, settings.prepare.task)])


def _create_console(run: Run, say: Callable[[str], None]) -> RunCallback:
    """A screen where one can be drawn, else lines."""
    return ConsoleCallback(run.paths) if is_live_terminal(sys.stdout) else RunLogPrinter(lambda text: say(f"  {text}"))


def _write_answers(paths: GenerationPaths, target: Path, model_name: str, faults: int) -> GenerationCard:
    try:
        return output.write_output(paths, target, model_name, faults)
    except OSError as error:
        raise StorageError(
            f"{error.filename or target}: {error.strerror or error}; all answers are kept in {paths.result}: mend that "
            "and repeat, or name another --output"
        ) from error


def _seal_prompts(paths: GenerationPaths, source: PromptSource, count: int) -> None:
    """Seal the prompts with the run, unless they are: the file may be gone or changed when a worker starts again."""
    try:
        files.verify_sealed(paths.prompts, ASKED)
    except DamagedFileError:
        source.keep(paths.prompts, count)


def describe(card: GenerationCard, target: Path) -> str:
    """The card in a few lines, for the terminal."""
    ends = ", ".join(f"{count:,} {name}" for name, count in card.finish.items())
    left_out = f"; {format_count(card.faults, 'record')} left out" if card.faults else ""
    given = f"{format_count(card.answers, 'answer')} to {format_count(card.prompts, 'prompt')}"
    return (
        f"generation {card.id}: {given} ({ends}){left_out}\n"
        f"  {card.tokens:,} tokens, of prompts {card.prompt_tokens:,}; model {card.spec.model.digest[: digests.SHORT]} "
        f"({card.model_name})\n  {target}"
    )


# `ratchet generate --stream`: answers on the screen as they are given, one at a time, with the reasoning set apart.


def stream_answers(meant: ModelReference, source: PromptSource, out: IO[str]) -> str:
    """Answer each prompt of a file, generate.samples times, and write no file.

    Raises:
        InputError: prompts or model are not usable.
        RatchetError: whoever answers does not, or broke off.
    """
    settings = meant.start.generate
    source.measured()  # a file that cannot be read is refused before the model is loaded
    page = StreamPrinter(out)
    speaker = backend_factory.open_backend(meant.model.kind, meant.start, create_notice_callbacks(page))
    count = 0
    try:
        for number, prompt in enumerate(source.prompts()):
            for sample in range(settings.samples):
                page.head(f"prompt {prompt.id}")
                heard = PartialAnswer()
                try:
                    page.answer(
                        speaker.spoken(GenerationRequest(number * settings.samples + sample, sample, prompt), False),
                        heard,
                    )
                except DataError as error:
                    page.note(f"not asked: {error}")
                count += 1
                if heard.ended and heard.ended.finish != "stop":
                    page.note(f"({ENDS.get(heard.ended.finish, heard.ended.finish)})")
                page.gap()
    finally:
        speaker.close()
    return f"{count:,} answers shown, none written"


ENDS = {
    "length": "cut at generate.max_new_tokens",
    "context": "the model's context is full",
    "memory": "memory ran out",
    "invalid": "the model gave numbers that are none",
    "filtered": "the server holds it back",
}
"""Ends of answers for people; of one that ends by itself nothing is said."""


def create_notice_callbacks(page: StreamPrinter) -> BackendCallbacks:
    """Those of a speaker that belongs to no run: what is worth telling stands on the page."""

    def told(kind: str, data: object) -> None:
        if kind == "notice" and isinstance(data, dict):
            page.note(f"notice: {data['text']}")

    return BackendCallbacks(lambda: None, told, lambda _: None)
