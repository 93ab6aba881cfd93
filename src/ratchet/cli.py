"""`ratchet VERB`: one subcommand a verb; every error becomes one message and an exit code.

Verbs are imported when they run: `ratchet --help` and `ratchet status` load neither torch nor MLflow.
"""

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType

from ratchet import config, params
from ratchet.config_data import Columns
from ratchet.errors import EXIT_BUG, EXIT_GATE, EXIT_INPUT, EXIT_INTERRUPTED, EXIT_OK, RatchetError, SettingsError
from ratchet.layout import Layout
from ratchet.lock import Lock

Command = Callable[[argparse.Namespace], int]

STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}
"""What a disk says that is not for us to mend; every other OSError is our bug, and shows where."""

STAGES = ("base", "prepare", "train", "export", "evaluate", "gate")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code: 0 done, 1 our bug, 2 your settings or data, 3 gate not passed, 75 repeat."""
    options = _parser().parse_args(arguments)
    # OpenMP threads that spin while they wait made a step 4 to 6 times slower beside another busy process (2 cores).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A kernel for each shape of a product in 16 bits, 1024 of them unless told otherwise: batches of many lengths held
    # 550 MB after 57 steps of a model of 0.1M parameters, and growing. With 32 it is 35 MB, as fast (oneDNN, ideep).
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "32")
    os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' bars of milliseconds; our own lines tell what takes time
    if "DVC_STAGE" in os.environ:
        # Killing dvc must not leave a trainer behind: the kernel tells us, and we seal a checkpoint and end.
        from ratchet.run.signals import die_with_parent

        die_with_parent(signal.SIGTERM)
    signal.signal(
        signal.SIGTERM, _interrupt
    )  # so that scratch directories are removed; train does more (supervisor.py)
    try:
        command: Command = options.command
        with _only_one(options):
            return command(options)
    except KeyboardInterrupt:
        print(f"ratchet {options.verb}: interrupted; nothing half-written is left, repeat it", file=sys.stderr)
        return EXIT_INTERRUPTED
    except RatchetError as error:
        if error.exit_code == EXIT_INTERRUPTED:
            _be_deaf()
        print(f"ratchet {options.verb}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in STORAGE_ERRORS:
            raise
        where = error.filename or "a file"
        print(
            f"ratchet {options.verb}: {where}: {error.strerror}; nothing half-written is left: mend that, and repeat",
            file=sys.stderr,
        )
        return EXIT_INPUT


def _interrupt(number: int, frame: FrameType | None) -> None:
    _be_deaf()
    raise KeyboardInterrupt


def _be_deaf() -> None:
    """One request is enough: another would break off the tidying up, or the way out."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _only_one(options: argparse.Namespace) -> AbstractContextManager[object]:
    """The lock of the stage that is run, if it is one: two writers of one output would both believe to have won."""
    if options.verb not in STAGES:
        return nullcontext()
    layout = Layout.find(options.project)
    return Lock(layout.stage_lock(options.verb), f"stage {options.verb} of {layout.root}").acquire(wait_s=1.0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ratchet", description="QLoRA fine-tuning: a run never loses a step, and a worse model never ships."
    )
    parser.add_argument("--project", type=Path, default=Path(), metavar="DIR", help="the project (default: here)")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    init = verb("init", _init, "make a new project directory around your data")
    init.add_argument("directory", type=Path, metavar="DIR")
    init.add_argument("--data", type=Path, required=True, metavar="FILE", help="rows: JSON, JSONL, CSV, TSV or Parquet")
    init.add_argument("--prompt", metavar="COLUMN", help="column with what the user says (default: looked for)")
    init.add_argument("--response", metavar="COLUMN", help="column with the answer or label (default: looked for)")
    init.add_argument("--base", default="tiny", metavar="MODEL", help="hub id or directory (default: a tiny one)")
    init.add_argument("--revision", metavar="REV", help="commit, tag or branch of a hub id")
    verb("base", _base, "stage: resolve and pin the base model, or build the tiny one")
    verb("prepare", _prepare, "stage: source files to split, templated, tokenised data")
    train = verb("train", _train, "stage: fine-tune under supervision; starting is resuming")
    train.add_argument("--force", action="store_true", help="go on when the forecast says that memory will not suffice")
    evaluate = verb("evaluate", _evaluate, "stage: score base, candidate and champion on the test rows")
    evaluate.add_argument(
        "--quantization", action="store_true", help="instead, measure what 4 bits cost the base, layer by layer"
    )
    verb("export", _export, "stage: merge the adapter, save, reload and compare")
    gate = verb("gate", _gate, "stage: decide from the reports: PROMOTE, HOLD, REJECT or INVALID")
    gate.add_argument("--check", action="store_true", help="decide nothing; exit 3 unless the verdict is PROMOTE")
    verb("promote", _promote, "register the exported model and make it champion")
    rollback = verb("rollback", _rollback, "make the previous champion champion again")
    rollback.add_argument("version", type=int, nargs="?", help="registered version (default: the previous champion)")
    _forecast_options(verb("forecast", _forecast, "how much memory a training will need, without loading weights"))
    doctor = verb("doctor", _doctor, "look at data, base and machine, and propose settings with their reasons")
    doctor.add_argument("--base", type=Path, metavar="PATH", help="a model directory, or a config.json alone")
    doctor.add_argument("--write", action="store_true", help="write the proposals into params.yaml")
    status = verb("status", _status, "where a run stands")
    status.add_argument("run", nargs="?", metavar="RUN", help="run id, or its beginning (default: the latest)")
    verify = verb("verify", _verify, "check every byte of sealed directories, runs or whole projects")
    verify.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    reset = verb("reset", _reset, "remove a run, after asking")
    reset.add_argument("run", metavar="RUN", help="run id, or its beginning")
    reset.add_argument("--yes", action="store_true", help="do not ask")
    _chaos_options(verb("chaos", _chaos, "prove on this project that faults change nothing: train, break, compare"))
    ui = verb("ui", _ui, "open the MLflow UI on this project's store, on loopback")
    ui.add_argument("--port", type=int, default=5000)
    return parser


def _chaos_options(chaos: argparse.ArgumentParser) -> None:
    chaos.add_argument("--kills", type=int, default=5, metavar="N", help="kills of each kind of signal (default: 5)")
    chaos.add_argument("--seed", type=int, default=0, metavar="S", help="of every schedule (default: 0)")
    chaos.add_argument("--faults", metavar="A,B", help="only these (default: all; a wrong one lists them)")
    chaos.add_argument("--steps", type=int, default=24, metavar="K", help="optimizer steps of a run (default: 24)")
    chaos.add_argument("--keep", action="store_true", help="keep the directories of all trials")
    chaos.add_argument("--output", type=Path, metavar="DIR", help="for chaos.json and timeline.png")


def _forecast_options(forecast: argparse.ArgumentParser) -> None:
    forecast.add_argument("--base", type=Path, metavar="PATH", help="a model directory, or a config.json alone")
    forecast.add_argument("--rows", type=int, metavar="N", help="rows of a micro-batch (default: of params.yaml)")
    forecast.add_argument("--tokens", type=int, metavar="N", help="tokens of the longest row (default: of the data)")
    forecast.add_argument("--device", choices=("cpu", "cuda"), help="to train on (default: what this machine has)")
    forecast.add_argument("--memory", metavar="SIZE", help="of that device, such as 24GiB (default: this machine's)")
    forecast.add_argument("--json", action="store_true", help="print JSON")
    forecast.add_argument("--html", type=Path, metavar="FILE", help="write the table with a picture, too")


def _project(options: argparse.Namespace) -> tuple[Layout, config.Settings]:
    layout = Layout.find(options.project)
    return layout, params.load(layout.params)


def _project_or_none(options: argparse.Namespace) -> tuple[Layout | None, config.Settings]:
    """For what can be asked outside a project too; there, settings are those of a new one."""
    if options.project == Path() and not any((p / "params.yaml").is_file() for p in (Path.cwd(), *Path.cwd().parents)):
        return None, config.Settings()
    return _project(options)


def _say(text: str) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head`, a closed terminal: nobody listens any more, which is no reason to stop
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
    return EXIT_OK


def _progress(text: str) -> None:
    _say(f"  {text}")


def _init(options: argparse.Namespace) -> int:
    from ratchet.init import init

    named = (options.prompt, options.response)
    if (None in named or named[0] == named[1] or "" in named) and named != (None, None):
        raise SettingsError(
            f"--prompt {options.prompt!r} --response {options.response!r}: name two different columns, or neither"
        )
    columns = Columns(prompt=options.prompt, response=options.response)
    return _say(init(options.directory, options.data, columns, options.base, options.revision))


def _base(options: argparse.Namespace) -> int:
    from ratchet.base import base

    return _say(base(*_project(options), _progress))


def _prepare(options: argparse.Namespace) -> int:
    from ratchet.prepare import prepare

    return _say(prepare(*_project(options)))


def _train(options: argparse.Namespace) -> int:
    from ratchet.run.directory import RunPaths
    from ratchet.services import plots
    from ratchet.services.console import Console
    from ratchet.services.tracking import RunObserver, Tracking
    from ratchet.train import train

    layout, settings = _project(options)
    if options.force:
        machine = settings.machine.model_copy(update={"on_forecast": "report"})
        settings = settings.model_copy(update={"machine": machine})
    tracking = Tracking(layout, settings.promote.model_name)

    def of(run: RunPaths) -> RunObserver:
        return tracking.observer(run, settings, plots.loss_curve)

    return _say(
        train(
            layout,
            settings,
            lambda run: [Console(), of(run)],
            lambda run, page: tracking.report(of(run), {}, {"": [page]}, {}),
        )
    )


def _evaluate(options: argparse.Namespace) -> int:
    from ratchet.evaluate import evaluate, quantization

    return _say((quantization if options.quantization else evaluate)(*_project(options), _progress))


def _export(options: argparse.Namespace) -> int:
    from ratchet.export import export

    return _say(export(*_project(options)))


def _gate(options: argparse.Namespace) -> int:
    from ratchet.gate import check, gate

    layout, settings = _project(options)
    if options.check:
        passed, text = check(layout)
        _say(text)
        return EXIT_OK if passed else EXIT_GATE
    return _say(gate(layout, settings))


def _promote(options: argparse.Namespace) -> int:
    from ratchet.promote import promote

    return _say(promote(*_project(options)))


def _rollback(options: argparse.Namespace) -> int:
    from ratchet.promote import rollback

    layout, settings = _project(options)
    return _say(rollback(layout, settings, options.version))


def _forecast(options: argparse.Namespace) -> int:
    from ratchet.forecast import Options, forecast
    from ratchet.sizes import bytes_from

    memory = None if options.memory is None else bytes_from(options.memory, "--memory")
    asked = Options(options.base, options.rows, options.tokens, options.device, memory, options.json, options.html)
    return _say(forecast(*_project_or_none(options), asked))


def _doctor(options: argparse.Namespace) -> int:
    from ratchet.doctor import doctor

    layout, settings = _project_or_none(options)
    well, text = doctor(layout, settings if layout else None, options.base, options.write)
    _say(text)
    return EXIT_OK if well else EXIT_INPUT


def _status(options: argparse.Namespace) -> int:
    from ratchet.records_gate import read_champion
    from ratchet.run import directory, status

    layout = Layout.find(options.project)
    if options.run is None:
        paths = directory.newest(layout.runs)
        if paths is None:
            return _say("no run yet; `dvc repro` starts one")
    else:
        paths = directory.named(layout.runs, options.run)
    _say(status.describe(paths))
    if champion := read_champion(layout.champion).champion:
        _say(f"champion: version {champion.version}, model {champion.model_digest[:12]}, run {champion.run_id}")
    return EXIT_OK


def _verify(options: argparse.Namespace) -> int:
    from ratchet.verify import verify

    whole, text = verify(options.paths)
    _say(text)
    return EXIT_OK if whole else EXIT_INPUT


def _reset(options: argparse.Namespace) -> int:
    from ratchet.reset import reset

    return _say(reset(Layout.find(options.project), options.run, options.yes))


def _chaos(options: argparse.Namespace) -> int:
    from ratchet.chaos import Options, chaos
    from ratchet.services import plots

    names = None if options.faults is None else tuple(name for name in options.faults.split(",") if name)
    chosen = Options(options.kills, options.seed, names, options.steps, options.keep, options.output)
    exact, text = chaos(*_project(options), chosen, plots.timeline, _progress)
    _say(text)
    return EXIT_OK if exact else EXIT_BUG


def _ui(options: argparse.Namespace) -> int:
    layout = Layout.find(options.project)
    if not 0 < options.port < 65536:
        raise SettingsError(f"--port: {options.port} is no port; take one between 1024 and 65535")
    from ratchet.store import serve_ui

    serve_ui(layout, options.port)
