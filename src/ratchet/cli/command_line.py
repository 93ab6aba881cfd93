"""What commands share, and those of generating: the command line's second file, below cli.py."""

import argparse
import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.errors import EXIT_OK
from ratchet.storage.layout import ProjectLayout

if TYPE_CHECKING:
    from ratchet.config.schema import Settings  # pydantic takes .1 s, which `--help` need not wait for
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType

from ratchet.cli.arguments import Command, build_parser
from ratchet.errors import EXIT_BUG, EXIT_GATE, EXIT_INPUT, EXIT_INTERRUPTED, RatchetError, SettingsError
from ratchet.redaction import print_exception, redact_stderr, write_stderr
from ratchet.runs.signals import die_with_parent, list_stop_signals
from ratchet.storage.locks import FileLock


def load_project(options: argparse.Namespace, **machine: str | None) -> "tuple[ProjectLayout, Settings]":
    """The project that is meant, and its settings; `machine`: those of that section that the command line gives."""
    from ratchet.config import params_file

    layout = ProjectLayout.find(options.project)
    return layout, params_file.load(layout.params, machine)


def print_result(text: str) -> int:
    """Print; returns the exit code of what has been done."""
    try:
        print(text, flush=True)
    except OSError as error:  # `| head`, a closed terminal: nobody listens any more, which is no reason to stop
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
    return EXIT_OK


def _print_text(text: str) -> None:
    print_result(text)


def distill(options: argparse.Namespace) -> int:
    """`ratchet distill`."""
    from ratchet.stages.distill import distill as carry_out

    return print_result(carry_out(*load_project(options), options.forecast, lambda text: _print_text(f"  {text}")))


def select(options: argparse.Namespace) -> int:
    """`ratchet select`."""
    from ratchet.stages.select_answers import SelectOptions
    from ratchet.stages.select_answers import select as carry_out

    chosen = SelectOptions(tuple(options.answers), options.output, options.prompts)
    return print_result(carry_out(*load_project(options), chosen, lambda text: _print_text(f"  {text}")))


def generate(options: argparse.Namespace) -> int:
    """`ratchet generate`."""
    from ratchet.stages.generate import GenerateOptions
    from ratchet.stages.generate import generate as carry_out

    chosen = GenerateOptions(options.prompts, options.output, options.model, options.stream)
    return print_result(carry_out(*load_project(options), chosen, _print_text))


def chat(options: argparse.Namespace) -> int:
    """`ratchet chat`."""
    from ratchet.stages.chat import chat as carry_out

    carry_out(*load_project(options), options.model)
    return EXIT_OK


# `ratchet VERB`: one subcommand a verb; every error becomes one message and an exit code.
#
# Verbs are imported when they run: `ratchet --help` and `ratchet status` load neither torch nor MLflow.

STORAGE_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG,
}  # fmt: skip
"""What a disk says that is not for us to mend; every other OSError is our bug, and shows where."""

OPEN_MODELS = {"base", "distill", "export", "evaluate", "forecast", "doctor"}
"""Verbs that load libraries as a worker does: in half the time, and holding what it holds (2 of 5 s, 70 MiB)."""

STAGES = ("base", "prepare", "distill", "train", "export", "evaluate", "gate")


def set_library_defaults() -> None:
    """Set in the environment, which workers inherit, what libraries read when they are loaded; what is set stays.

    Must come before torch is imported.
    """
    # Threads that wait for each other sleep. Two of them on two processors that nobody else uses need 1.7 times as long
    # for a step as threads that spin (libgomp's default); beside one busy process those need 40 times as long
    # (docs/performance.md, "Threads that wait").
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A kernel for each shape of a product in 16 bits, 1024 of them unless told otherwise: batches of many lengths held
    # 550 MB after 57 steps of a model of 0.1M parameters, and growing. With 32 it is 35 MB, as fast (oneDNN, ideep).
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "32")
    os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' bars of milliseconds; our own lines tell what takes time


@redact_stderr()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code: 0 done, 1 our bug, 2 your settings or data, 3 gate not passed, 75 repeat."""
    options = build_parser(COMMANDS).parse_args(arguments)
    set_library_defaults()
    if "DVC_STAGE" in os.environ:
        # Killing dvc must not leave a trainer behind: the kernel tells us, and we seal a checkpoint and end.
        die_with_parent(signal.SIGTERM)
    sys.excepthook = print_exception
    for number in list_stop_signals():  # so scratch directories are removed; train does more (supervisor.py)
        signal.signal(number, _raise_interrupt)
    try:
        command: Command = options.command
        with _stage_lock(options):
            if options.verb in OPEN_MODELS and getattr(options, "require", None) is None:
                from ratchet.models import lazy_imports

                lazy_imports.import_model_libraries()
            return command(options)
    except KeyboardInterrupt:
        write_stderr(f"ratchet {options.verb}: interrupted; nothing half-written is left, repeat it\n")
        return EXIT_INTERRUPTED
    except RatchetError as error:
        if error.exit_code == EXIT_INTERRUPTED:
            _ignore_signals()
        write_stderr(f"ratchet {options.verb}: {error}{error.advice}\n")
        return error.exit_code
    except OSError as error:
        if error.errno not in STORAGE_ERRORS:
            raise
        text = f"{error.filename or 'a file'}: {error.strerror}; nothing half-written is left: mend that, and repeat"
        write_stderr(f"ratchet {options.verb}: {text}\n")
        return EXIT_INPUT


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    _ignore_signals()
    raise KeyboardInterrupt


def _ignore_signals() -> None:
    """One request is enough: another would break off the tidying up, or the way out."""
    for number in list_stop_signals():
        signal.signal(number, signal.SIG_IGN)


def _stage_lock(options: argparse.Namespace) -> AbstractContextManager[object]:
    """The lock of the stage that is run, if it is one: two writers of one output would both believe to have won."""
    if options.verb not in STAGES:
        return nullcontext()
    layout = ProjectLayout.find(options.project)
    return FileLock(layout.stage_lock(options.verb), f"stage {options.verb} of {layout.root}").acquire(wait_s=1.0)


def _load_project_or_none(options: argparse.Namespace) -> "tuple[ProjectLayout | None, Settings]":
    """For what can be asked outside a project too; there, settings are those of a new one."""
    from ratchet.config.schema import Settings

    if options.project == Path() and not any((p / "params.yaml").is_file() for p in (Path.cwd(), *Path.cwd().parents)):
        return None, Settings()
    return load_project(options)


def _print_progress(text: str) -> None:
    print_result(f"  {text}")


def _init(options: argparse.Namespace) -> int:
    from ratchet.stages.init import init

    named = options.prompt, options.response
    return print_result(init(options.directory, options.data, named, options.base, options.revision))


def _base(options: argparse.Namespace) -> int:
    from ratchet.stages.base import base

    return print_result(base(*load_project(options), _print_progress))


def _prepare(options: argparse.Namespace) -> int:
    from ratchet.stages.prepare import prepare

    return print_result(prepare(*load_project(options)))


def _train(options: argparse.Namespace) -> int:
    layout, settings = load_project(
        options, nodes=options.nodes, rendezvous=options.rendezvous, on_forecast="report" if options.force else None
    )
    if options.profile is not None:
        from ratchet.stages.train import profile_training

        return print_result(profile_training(layout, settings, options.profile))
    from ratchet.stages.callbacks import open_callbacks
    from ratchet.stages.train import train

    with open_callbacks(layout, settings) as told:
        return print_result(train(layout, settings, told.observers, told.publish))


def _sweep(options: argparse.Namespace) -> int:
    from ratchet.console.sweep_table import SweepConsole
    from ratchet.stages.sweep import SweepOptions, repair_journal, sweep

    layout, settings = load_project(options)
    if options.repair:
        return print_result(repair_journal(layout))
    adopted = None if options.adopt is True else options.adopt  # True: the winner
    engine = options.engine
    chosen = SweepOptions(
        options.workers, options.fork, options.chaos, options.report, options.adopt is not None, adopted, engine
    )
    return print_result(sweep(layout, settings, chosen, lambda: SweepConsole(sys.stdout), _print_progress))


def _evaluate(options: argparse.Namespace) -> int:
    from ratchet.stages.evaluate import evaluate
    from ratchet.stages.quantization_cost import measure_quantization

    return print_result(
        (measure_quantization if options.quantization else evaluate)(*load_project(options), _print_progress)
    )


def _export(options: argparse.Namespace) -> int:
    from ratchet.stages.export import export

    return print_result(export(*load_project(options)))


def _gate(options: argparse.Namespace) -> int:
    from ratchet.stages.gate import check_verdict, gate, run_aa_test

    layout, settings = load_project(options)
    if options.check or options.aa:
        if options.aa:
            from ratchet.stages.evaluate import evaluate_again

            evaluate_again(layout, settings, _print_progress)
        passed, text = run_aa_test(layout, settings) if options.aa else check_verdict(layout, settings)
        print_result(text)
        return EXIT_OK if passed else EXIT_GATE
    from ratchet.stages.callbacks import notify_verdict

    with notify_verdict(layout, settings):
        return print_result(gate(layout, settings))


def _promote(options: argparse.Namespace) -> int:
    from ratchet.stages.callbacks import notify_promotions
    from ratchet.stages.promote import PromoteOptions, promote

    layout, settings = load_project(options)
    chosen = PromoteOptions(force=options.force, reason=options.reason, dry_run=options.dry_run, anchor=options.anchor)
    with notify_promotions(layout, settings):
        return print_result(promote(layout, settings, chosen))


def _rollback(options: argparse.Namespace) -> int:
    from ratchet.stages.callbacks import notify_promotions
    from ratchet.stages.promote import PromoteOptions, rollback

    layout, settings = load_project(options)
    chosen = PromoteOptions(reason=options.reason, dry_run=options.dry_run)
    with notify_promotions(layout, settings):
        return print_result(rollback(layout, settings, options.version, chosen))


def _promotions(options: argparse.Namespace) -> int:
    from ratchet.stages.callbacks import notify_promotions
    from ratchet.stages.promotions import promotions

    layout, settings = load_project(options)
    with notify_promotions(layout, settings):
        whole, text = promotions(layout, settings, deliver=options.deliver, as_json=options.json)
        print_result(text)
    return EXIT_OK if whole else EXIT_INPUT


def _deploy(options: argparse.Namespace) -> int:
    from ratchet.stages.deploy import DeployOptions, deploy, watch_champion

    layout, settings = load_project(options)
    chosen = DeployOptions(options.format, options.version, options.rollback, smoke=not options.no_smoke)
    if options.watch:
        return watch_champion(layout, settings, options.directory, chosen, print_result)
    return print_result(deploy(layout, settings, options.directory, chosen))


def _keys(options: argparse.Namespace) -> int:
    from ratchet.stages.keys import KeysOptions, keys

    chosen = KeysOptions(
        new=options.new, trust=options.trust, revoke=options.revoke, reason=options.reason,
        trust_identity=options.trust_identity, issuer=options.issuer,
    )  # fmt: skip
    return print_result(keys(ProjectLayout.find(options.project), chosen))


def _forecast(options: argparse.Namespace) -> int:
    from ratchet.config.units import parse_bytes
    from ratchet.stages.forecast import ForecastOptions, forecast

    memory = None if options.memory is None else parse_bytes(options.memory, "--memory")
    asked = ForecastOptions(
        options.base, options.rows, options.tokens, options.device, memory, options.json, options.html, options.ranks
    )
    return print_result(forecast(*_load_project_or_none(options), asked))


def _doctor(options: argparse.Namespace) -> int:
    layout, settings = _load_project_or_none(options)
    if options.require is not None or options.mirror or options.json:
        from ratchet.stages.machine_check import admission

        return print_result(admission(layout, settings, options.require, options.mirror, options.json))
    from ratchet.stages.doctor import doctor

    well, text = doctor(layout, settings if layout else None, options.base, options.write)
    print_result(text)
    return EXIT_OK if well else EXIT_INPUT


def _status(options: argparse.Namespace) -> int:
    if options.mirror is not None:
        from ratchet.stages.status import replica_status

        return print_result(replica_status(_load_project_or_none(options)[1].machine, options.mirror, options.run))
    from ratchet.stages.status import status

    return print_result(status(ProjectLayout.find(options.project), options.run))


def _watch(options: argparse.Namespace) -> int:
    from ratchet.stages.watch import WatchOptions, watch

    layout, settings = _load_project_or_none(options)
    watch(layout, settings.machine, WatchOptions(tuple(options.runs), options.mirror, options.once), sys.stdout)
    return EXIT_OK


def _verify(options: argparse.Namespace) -> int:
    from ratchet.stages.verify import verify

    whole, text = verify(options.paths, options.public_key, options.project if options.project != Path() else None)
    print_result(text)
    return EXIT_OK if whole else EXIT_INPUT


def _reset(options: argparse.Namespace) -> int:
    from ratchet.stages.reset import reset, reset_replica

    if options.mirror is not None:
        return print_result(
            reset_replica(_load_project_or_none(options)[1].machine, options.mirror, options.run, options.yes)
        )
    return print_result(reset(ProjectLayout.find(options.project), options.run, options.yes))


def _chaos(options: argparse.Namespace) -> int:
    from ratchet.reports import plots
    from ratchet.stages.chaos import ChaosOptions, chaos

    names = None if options.faults is None else tuple(name for name in options.faults.split(",") if name)
    chosen = ChaosOptions(options.kills, options.seed, names, options.steps, options.keep, options.output)
    exact, text = chaos(*load_project(options), chosen, plots.draw_timeline, _print_progress)
    print_result(text)
    return EXIT_OK if exact else EXIT_BUG


def _ui(options: argparse.Namespace) -> int:
    layout, settings = load_project(options)
    if not 0 < options.port < 65536:
        raise SettingsError(f"--port: {options.port} is no port; take one between 1024 and 65535")
    from ratchet.stages.ui import ui

    ui(layout, settings, options.port)


def _compare(options: argparse.Namespace) -> int:
    from ratchet.stages.compare import compare

    return print_result(compare(*load_project(options), options.names, options.output))


def _report(options: argparse.Namespace) -> int:
    from ratchet.stages.report import report

    return print_result(report(*load_project(options), options.run, options.output))


_VERBS: tuple[Command, ...] = (
    _init, _base, _prepare, distill, _train, _sweep, _evaluate, _export, _gate, _promote, _rollback, _promotions,
    _deploy, generate, chat, select, _keys, _forecast, _doctor, _status, _watch, _compare, _report, _verify, _reset,
    _chaos, _ui,
)  # fmt: skip
COMMANDS: dict[str, Command] = {command.__name__.removeprefix("_"): command for command in _VERBS}
