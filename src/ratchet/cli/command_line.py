"""What commands share, and those of generating: the command line's second file, below cli.py."""

import argparse
import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.errors import EXIT_OK
from ratchet.storage.layout import Layout

if TYPE_CHECKING:
    from ratchet.config.schema import Settings  # pydantic takes .1 s, which `--help` need not wait for
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType

from ratchet.cli.arguments import Command, parser
from ratchet.errors import EXIT_BUG, EXIT_GATE, EXIT_INPUT, EXIT_INTERRUPTED, RatchetError, SettingsError
from ratchet.redaction import complain, shielded, show_error
from ratchet.runs.signals import die_with_parent, requests
from ratchet.storage.locks import Lock


def project(options: argparse.Namespace, **machine: str | None) -> "tuple[Layout, Settings]":
    """The project that is meant, and its settings; `machine`: those of that section that the command line gives."""
    from ratchet.config import params_file

    layout = Layout.find(options.project)
    return layout, params_file.load(layout.params, machine)


def say(text: str) -> int:
    """Print; returns the exit code of what has been done."""
    try:
        print(text, flush=True)
    except OSError as error:  # `| head`, a closed terminal: nobody listens any more, which is no reason to stop
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
    return EXIT_OK


def _say(text: str) -> None:
    say(text)


def distill(options: argparse.Namespace) -> int:
    """`ratchet distill`."""
    from ratchet.stages.distill import distill as carry_out

    return say(carry_out(*project(options), options.forecast, lambda text: _say(f"  {text}")))


def select(options: argparse.Namespace) -> int:
    """`ratchet select`."""
    from ratchet.stages.select_answers import Options
    from ratchet.stages.select_answers import select as carry_out

    chosen = Options(tuple(options.answers), options.output, options.prompts)
    return say(carry_out(*project(options), chosen, lambda text: _say(f"  {text}")))


def generate(options: argparse.Namespace) -> int:
    """`ratchet generate`."""
    from ratchet.stages.generate import Options
    from ratchet.stages.generate import generate as carry_out

    chosen = Options(options.prompts, options.output, options.model, options.stream)
    return say(carry_out(*project(options), chosen, _say))


def chat(options: argparse.Namespace) -> int:
    """`ratchet chat`."""
    from ratchet.stages.chat import chat as carry_out

    carry_out(*project(options), options.model)
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


@shielded()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code: 0 done, 1 our bug, 2 your settings or data, 3 gate not passed, 75 repeat."""
    options = parser(COMMANDS).parse_args(arguments)
    set_library_defaults()
    if "DVC_STAGE" in os.environ:
        # Killing dvc must not leave a trainer behind: the kernel tells us, and we seal a checkpoint and end.
        die_with_parent(signal.SIGTERM)
    sys.excepthook = show_error
    for number in requests():  # so scratch directories are removed; train does more (supervisor.py)
        signal.signal(number, _interrupt)
    try:
        command: Command = options.command
        with _only_one(options):
            if options.verb in OPEN_MODELS and getattr(options, "require", None) is None:
                from ratchet.models import lazy_imports

                lazy_imports.load()
            return command(options)
    except KeyboardInterrupt:
        complain(f"ratchet {options.verb}: interrupted; nothing half-written is left, repeat it\n")
        return EXIT_INTERRUPTED
    except RatchetError as error:
        if error.exit_code == EXIT_INTERRUPTED:
            _be_deaf()
        complain(f"ratchet {options.verb}: {error}{error.advice}\n")
        return error.exit_code
    except OSError as error:
        if error.errno not in STORAGE_ERRORS:
            raise
        text = f"{error.filename or 'a file'}: {error.strerror}; nothing half-written is left: mend that, and repeat"
        complain(f"ratchet {options.verb}: {text}\n")
        return EXIT_INPUT


def _interrupt(number: int, frame: FrameType | None) -> None:
    _be_deaf()
    raise KeyboardInterrupt


def _be_deaf() -> None:
    """One request is enough: another would break off the tidying up, or the way out."""
    for number in requests():
        signal.signal(number, signal.SIG_IGN)


def _only_one(options: argparse.Namespace) -> AbstractContextManager[object]:
    """The lock of the stage that is run, if it is one: two writers of one output would both believe to have won."""
    if options.verb not in STAGES:
        return nullcontext()
    layout = Layout.find(options.project)
    return Lock(layout.stage_lock(options.verb), f"stage {options.verb} of {layout.root}").acquire(wait_s=1.0)


def _project_or_none(options: argparse.Namespace) -> "tuple[Layout | None, Settings]":
    """For what can be asked outside a project too; there, settings are those of a new one."""
    from ratchet.config.schema import Settings

    if options.project == Path() and not any((p / "params.yaml").is_file() for p in (Path.cwd(), *Path.cwd().parents)):
        return None, Settings()
    return project(options)


def _progress(text: str) -> None:
    say(f"  {text}")


def _init(options: argparse.Namespace) -> int:
    from ratchet.stages.init import init

    named = options.prompt, options.response
    return say(init(options.directory, options.data, named, options.base, options.revision))


def _base(options: argparse.Namespace) -> int:
    from ratchet.stages.base import base

    return say(base(*project(options), _progress))


def _prepare(options: argparse.Namespace) -> int:
    from ratchet.stages.prepare import prepare

    return say(prepare(*project(options)))


def _train(options: argparse.Namespace) -> int:
    layout, settings = project(
        options, nodes=options.nodes, rendezvous=options.rendezvous, on_forecast="report" if options.force else None
    )
    if options.profile is not None:
        from ratchet.stages.train import profile

        return say(profile(layout, settings, options.profile))
    from ratchet.stages.callbacks import observation
    from ratchet.stages.train import train

    with observation(layout, settings) as told:
        return say(train(layout, settings, told.observers, told.publish))


def _sweep(options: argparse.Namespace) -> int:
    from ratchet.console.sweep_table import Board
    from ratchet.stages.sweep import Options, repair, sweep

    layout, settings = project(options)
    if options.repair:
        return say(repair(layout))
    adopted = None if options.adopt is True else options.adopt  # True: the winner
    engine = options.engine
    chosen = Options(
        options.workers, options.fork, options.chaos, options.report, options.adopt is not None, adopted, engine
    )
    return say(sweep(layout, settings, chosen, lambda: Board(sys.stdout), _progress))


def _evaluate(options: argparse.Namespace) -> int:
    from ratchet.stages.evaluate import evaluate
    from ratchet.stages.quantization_cost import quantization

    return say((quantization if options.quantization else evaluate)(*project(options), _progress))


def _export(options: argparse.Namespace) -> int:
    from ratchet.stages.export import export

    return say(export(*project(options)))


def _gate(options: argparse.Namespace) -> int:
    from ratchet.stages.gate import aa, check, gate

    layout, settings = project(options)
    if options.check or options.aa:
        if options.aa:
            from ratchet.stages.evaluate import again

            again(layout, settings, _progress)
        passed, text = aa(layout, settings) if options.aa else check(layout, settings)
        say(text)
        return EXIT_OK if passed else EXIT_GATE
    from ratchet.stages.callbacks import of_verdict

    with of_verdict(layout, settings):
        return say(gate(layout, settings))


def _promote(options: argparse.Namespace) -> int:
    from ratchet.stages.callbacks import of_promotions
    from ratchet.stages.promote import Options, promote

    layout, settings = project(options)
    chosen = Options(force=options.force, reason=options.reason, dry_run=options.dry_run, anchor=options.anchor)
    with of_promotions(layout, settings):
        return say(promote(layout, settings, chosen))


def _rollback(options: argparse.Namespace) -> int:
    from ratchet.stages.callbacks import of_promotions
    from ratchet.stages.promote import Options, rollback

    layout, settings = project(options)
    chosen = Options(reason=options.reason, dry_run=options.dry_run)
    with of_promotions(layout, settings):
        return say(rollback(layout, settings, options.version, chosen))


def _promotions(options: argparse.Namespace) -> int:
    from ratchet.stages.callbacks import of_promotions
    from ratchet.stages.promotions import promotions

    layout, settings = project(options)
    with of_promotions(layout, settings):
        whole, text = promotions(layout, settings, deliver=options.deliver, as_json=options.json)
        say(text)
    return EXIT_OK if whole else EXIT_INPUT


def _deploy(options: argparse.Namespace) -> int:
    from ratchet.stages.deploy import Options, deploy, watch

    layout, settings = project(options)
    chosen = Options(options.format, options.version, options.rollback, smoke=not options.no_smoke)
    if options.watch:
        return watch(layout, settings, options.directory, chosen, say)
    return say(deploy(layout, settings, options.directory, chosen))


def _keys(options: argparse.Namespace) -> int:
    from ratchet.stages.keys import Options, keys

    chosen = Options(
        new=options.new, trust=options.trust, revoke=options.revoke, reason=options.reason,
        trust_identity=options.trust_identity, issuer=options.issuer,
    )  # fmt: skip
    return say(keys(Layout.find(options.project), chosen))


def _forecast(options: argparse.Namespace) -> int:
    from ratchet.config.units import bytes_from
    from ratchet.stages.forecast import Options, forecast

    memory = None if options.memory is None else bytes_from(options.memory, "--memory")
    asked = Options(
        options.base, options.rows, options.tokens, options.device, memory, options.json, options.html, options.ranks
    )
    return say(forecast(*_project_or_none(options), asked))


def _doctor(options: argparse.Namespace) -> int:
    layout, settings = _project_or_none(options)
    if options.require is not None or options.mirror or options.json:
        from ratchet.stages.machine_check import admission

        return say(admission(layout, settings, options.require, options.mirror, options.json))
    from ratchet.stages.doctor import doctor

    well, text = doctor(layout, settings if layout else None, options.base, options.write)
    say(text)
    return EXIT_OK if well else EXIT_INPUT


def _status(options: argparse.Namespace) -> int:
    if options.mirror is not None:
        from ratchet.stages.status import mirrored

        return say(mirrored(_project_or_none(options)[1].machine, options.mirror, options.run))
    from ratchet.stages.status import status

    return say(status(Layout.find(options.project), options.run))


def _watch(options: argparse.Namespace) -> int:
    from ratchet.stages.watch import Options, watch

    layout, settings = _project_or_none(options)
    watch(layout, settings.machine, Options(tuple(options.runs), options.mirror, options.once), sys.stdout)
    return EXIT_OK


def _verify(options: argparse.Namespace) -> int:
    from ratchet.stages.verify import verify

    whole, text = verify(options.paths, options.public_key, options.project if options.project != Path() else None)
    say(text)
    return EXIT_OK if whole else EXIT_INPUT


def _reset(options: argparse.Namespace) -> int:
    from ratchet.stages.reset import reset, reset_mirror

    if options.mirror is not None:
        return say(reset_mirror(_project_or_none(options)[1].machine, options.mirror, options.run, options.yes))
    return say(reset(Layout.find(options.project), options.run, options.yes))


def _chaos(options: argparse.Namespace) -> int:
    from ratchet.reports import plots
    from ratchet.stages.chaos import Options, chaos

    names = None if options.faults is None else tuple(name for name in options.faults.split(",") if name)
    chosen = Options(options.kills, options.seed, names, options.steps, options.keep, options.output)
    exact, text = chaos(*project(options), chosen, plots.timeline, _progress)
    say(text)
    return EXIT_OK if exact else EXIT_BUG


def _ui(options: argparse.Namespace) -> int:
    layout, settings = project(options)
    if not 0 < options.port < 65536:
        raise SettingsError(f"--port: {options.port} is no port; take one between 1024 and 65535")
    from ratchet.stages.ui import ui

    ui(layout, settings, options.port)


def _compare(options: argparse.Namespace) -> int:
    from ratchet.stages.compare import compare

    return say(compare(*project(options), options.names, options.output))


def _report(options: argparse.Namespace) -> int:
    from ratchet.stages.report import report

    return say(report(*project(options), options.run, options.output))


_VERBS: tuple[Command, ...] = (
    _init, _base, _prepare, distill, _train, _sweep, _evaluate, _export, _gate, _promote, _rollback, _promotions,
    _deploy, generate, chat, select, _keys, _forecast, _doctor, _status, _watch, _compare, _report, _verify, _reset,
    _chaos, _ui,
)  # fmt: skip
COMMANDS: dict[str, Command] = {command.__name__.removeprefix("_"): command for command in _VERBS}
