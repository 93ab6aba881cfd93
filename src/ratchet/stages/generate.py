"""`ratchet generate`: a supervised run that answers every prompt of a file. Only the worker process loads torch."""

from collections.abc import Callable
from pathlib import Path
from typing import IO

from ratchet.config.units import format_count
from ratchet.console.callback import ConsoleCallback
from ratchet.console.stream_printer import PartialAnswer, StreamPrinter
from ratchet.errors import DamagedFileError, DataError, SettingsError, StorageError
from ratchet.inference import model_reference, output
from ratchet.inference.backend import BackendCallbacks, GenerationRequest
from ratchet.inference.backend_factory import open_backend
from ratchet.inference.model_reference import ModelReference
from ratchet.inference.prompts import PromptSource
from ratchet.inference.spec import PROMPTS_KIND, GenerationCard, GenerationPaths, GenerationSpec
from ratchet.runs.callbacks import RunCallback
from ratchet.runs.directory import RunDirectory, RunPaths, storage_errors
from ratchet.runs.fork_server import ForkServer
from ratchet.runs.supervisor import supervise
from ratchet.stages.project import Project, ignore_progress
from ratchet.storage import digests, files
from ratchet.storage.digests import code_version
from ratchet.storage.files import FileLock
from ratchet.storage.output_card import card_path
from ratchet.storage.records.base import Record
from ratchet.tracking.mlflow.registry import fetch_missing_models

ENDS = {
    "length": "cut at generate.max_new_tokens",
    "context": "the model's context is full",
    "memory": "memory ran out",
    "invalid": "the model computed NaN or infinite numbers",
    "filtered": "the server's filter withholds the answer",
}
"""Descriptions of the ways in which an answer ends, except the end-of-turn token of the model."""


class GenerateResult(Record):
    """Result of `ratchet generate`."""

    output: Path
    card: GenerationCard
    was_written_before: bool
    """Whether the output of these prompts, settings and model existed already."""


def generate(
    project: Project,
    prompts: Path,
    output_path: Path,
    model: str = "adapter",
    on_progress: Callable[[str], None] = ignore_progress,
    create_console: Callable[[RunPaths], RunCallback] | None = None,
) -> GenerateResult:
    """Answer every prompt of a file and write one record per answer; see `ratchet.generate`. Call it again to resume.

    `create_console` creates the callback that shows the run in the terminal; None: `on_progress` receives its lines.

    Raises:
        SettingsError: the model does not exist, or the output exists with other settings, has an unknown ending, or
            cannot be written.
        DataError, DamagedFileError, ChampionError, BaseModelError: prompts or model are missing or damaged.
        LockHeldError: another process writes this output, or answers the same prompts.
        StorageError: the output cannot be written at the end; the answers are kept.
        InterruptedRunError, InputError, RunFailedError: see `supervise`.
    """
    layout, settings = project.layout, project.settings
    source = PromptSource(prompts.absolute(), settings)
    target = output_path.absolute()
    output.require_writable(target)
    reference = resolve_model(project, model)
    count, prompts_digest = source.measure()
    _require_no_tools(source, reference)
    on_progress(f"{format_count(count, 'prompt')} of {prompts.name} ({source.description})")
    if source.invalid_count:
        on_progress(
            f"left out: {format_count(source.invalid_count, 'record')} that cannot be asked (generate.skip_invalid)"
        )
    for note in source.notes():
        on_progress(note)
    spec = GenerationSpec(
        generate=settings.generate.answer_settings(), prompts_digest=prompts_digest, model=reference.model,
        template_digest=reference.template_digest,
    )  # fmt: skip
    name = digests.hash_bytes(str(target).encode())[: digests.SHORT]
    with FileLock(layout.stage_lock(f"generate-{name}"), f"output {target}").acquire(wait_s=1.0):
        if output.is_complete(target, spec, source.digest_with):
            return GenerateResult(output=target, card=GenerationCard.load(card_path(target)), was_written_before=True)
        run = RunDirectory.open(layout.generations, spec)
        try:
            paths = GenerationPaths(run.paths.root)
            if not run.paths.is_finished():
                with storage_errors(paths.root):
                    try:  # a sealed copy, because the file may change or vanish before a worker starts again
                        files.verify_sealed(paths.prompts, PROMPTS_KIND)
                    except DamagedFileError:
                        source.seal(paths.prompts, count)
            console = (
                create_console(run.paths) if create_console else ConsoleCallback(run.paths, write_line=on_progress)
            )
            with ForkServer() as server:
                supervise(run, reference.start, [console], code_version(), server=server)
            card = _write_answers(paths, target, model, source.invalid_count)
        finally:
            run.close()
    return GenerateResult(output=target, card=card, was_written_before=False)


def resolve_model(project: Project, model: str) -> ModelReference:
    """Resolve the name of a model, and fetch a promoted one that this machine lacks from the server.

    Raises: see `model_reference.resolve_model`; and TrackingError: the server cannot be used.
    """
    layout, settings = project.layout, project.settings
    return model_reference.resolve_model(
        model, layout, settings, lambda champion: fetch_missing_models(layout, settings, [champion])
    )


def _require_no_tools(source: PromptSource, reference: ModelReference) -> None:
    """Raise SettingsError if the model is a server and a prompt has tools: requests to servers contain no tools."""
    if reference.model.kind == "endpoint" and source.first_with_tools is not None:
        raise SettingsError(
            f"{source.path}: prompt {source.first_with_tools} has tools, tool calls or tool results, which are not "
            f"sent to a server (--model {reference.start.path}); remove such prompts, or use a model on this machine"
        )


def _write_answers(paths: GenerationPaths, target: Path, model_name: str, invalid_count: int) -> GenerationCard:
    try:
        return output.write_output(paths, target, model_name, invalid_count)
    except OSError as error:
        raise StorageError(
            f"{error.filename or target}: {error.strerror or error}; all answers are kept in {paths.result}: fix "
            "this and run the command again, or name another --output"
        ) from error


def stream_answers(project: Project, prompts: Path, model: str, stream: IO[str]) -> int:
    """Answer each prompt of a file generate.samples times, and write the answers to a stream. Returns their number.

    Raises:
        InputError: prompts or model cannot be used.
        RatchetError: the model's server does not answer, or stops in the middle of an answer.
    """
    source = PromptSource(prompts.absolute(), project.settings)
    reference = resolve_model(project, model)
    settings = reference.start.generate
    source.measure()  # an unreadable file is refused before the model is loaded
    _require_no_tools(source, reference)
    page = StreamPrinter(stream)
    backend = open_backend(reference.model.kind, reference.start, create_notice_callbacks(page))
    count = 0
    try:
        for number, prompt in enumerate(source.prompts()):
            for sample in range(settings.samples):
                page.head(f"prompt {prompt.id}")
                partial = PartialAnswer()
                request = GenerationRequest(number * settings.samples + sample, sample, prompt)
                try:
                    page.answer(backend.stream(request, False), partial)
                except DataError as error:
                    page.note(f"not asked: {error}")
                count += 1
                if partial.end and partial.end.finish != "stop":
                    page.note(f"({ENDS.get(partial.end.finish, partial.end.finish)})")
                page.gap()
    finally:
        backend.close()
    return count


def create_notice_callbacks(page: StreamPrinter) -> BackendCallbacks:
    """Create callbacks for a backend that does not belong to a run: they print notices on the page."""

    def print_notice(kind: str, data: object) -> None:
        if kind == "notice" and isinstance(data, dict):
            page.note(f"notice: {data['text']}")

    return BackendCallbacks(lambda: None, print_notice, lambda _: None)
