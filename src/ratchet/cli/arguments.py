"""The command line's words: verbs, their options, and a sentence on each."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

PROFILE_STEPS = 20
"""Optimizer steps that `ratchet train --profile` measures unless told otherwise."""

Command = Callable[[argparse.Namespace], int]


def build_parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """The command line; `commands` carry out the verbs, by name."""
    whole = argparse.ArgumentParser(
        prog="ratchet", description="QLoRA fine-tuning: a run never loses a step, and a worse model never ships."
    )
    whole.add_argument("--project", type=Path, default=Path(), metavar="DIR", help="the project (default: here)")
    verbs = whole.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.set_defaults(command=commands[name])
        return sub

    init = verb("init", "make a new project directory around your data")
    init.add_argument("directory", type=Path, metavar="DIR")
    init.add_argument("--data", type=Path, required=True, metavar="FILE", help="rows: JSON, JSONL, CSV, TSV or Parquet")
    init.add_argument("--prompt", metavar="COLUMN", help="column with what the user says (default: looked for)")
    init.add_argument("--response", metavar="COLUMN", help="column with the answer or label (default: looked for)")
    init.add_argument("--base", default="tiny", metavar="MODEL", help="hub id or directory (default: a tiny one)")
    init.add_argument("--revision", metavar="REV", help="commit, tag or branch of a hub id")
    verb("base", "stage: resolve and pin the base model, or build the tiny one")
    verb("prepare", "stage: source files to split, templated, tokenised data")
    distill = verb("distill", "optional stage: ask a larger model about the training rows (train.distill)")
    distill.add_argument("--forecast", action="store_true", help="only say how much disk and memory it will take")
    _add_train_options(verb("train", "stage: fine-tune under supervision; starting is resuming"))
    _add_sweep_options(verb("sweep", "many trainings chosen by a study: search rank, alpha, learning rate ..."))
    evaluate = verb("evaluate", "stage: score base, candidate and champion on the test rows")
    evaluate.add_argument(
        "--quantization", action="store_true", help="instead, measure what 4 bits cost the base, layer by layer"
    )
    verb("export", "stage: merge the adapter, write every format, run each and compare")
    gate = verb("gate", "stage: decide from the reports: PROMOTE, HOLD, REJECT or INVALID")
    either = gate.add_mutually_exclusive_group()
    either.add_argument("--check", action="store_true", help="decide nothing; exit 3 unless the verdict is PROMOTE")
    either.add_argument(
        "--aa", action="store_true", help="score the candidate a second time and compare it with itself: what is noise?"
    )
    _add_promotion_options(verb)
    _add_deployment_options(verb)
    _add_generation_options(verb("generate", "answer every prompt of a file; starting is going on, and none is lost"))
    _add_model_option(verb("chat", "talk to a model in this terminal; /help says what else can be typed"))
    _add_selection_options(
        verb("select", "choose among a teacher's answers, and write those taken as data to learn from")
    )
    _add_forecast_options(verb("forecast", "how much memory a training will need, without loading weights"))
    doctor = verb("doctor", "look at data, base and machine, and propose settings with their reasons")
    doctor.add_argument("--base", type=Path, metavar="PATH", help="a model directory, or a config.json alone")
    _add_requirement_options(doctor)
    _add_watch_options(verb)
    _add_history_options(verb)
    verify = verb("verify", "check every byte of sealed directories, runs or whole projects")
    verify.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    verify.add_argument(
        "--public-key", type=Path, metavar="FILE", help="PEM file of the key that must have signed (default: keys.json)"
    )
    reset = verb("reset", "remove a training's or generation's directory, after asking")
    reset.add_argument("run", nargs="?", metavar="RUN", help="run id, or its beginning")
    _add_mirror_option(reset, "remove it from this mirror (default: machine.mirror), not from this machine")
    reset.add_argument("--yes", action="store_true", help="do not ask")
    _add_chaos_options(verb("chaos", "prove on this project that faults change nothing: train, break, compare"))
    ui = verb("ui", "open the MLflow UI on this project's store, on loopback")
    ui.add_argument("--port", type=int, default=5000)
    return whole


def _add_watch_options(verb: Callable[[str, str], argparse.ArgumentParser]) -> None:
    status = verb("status", "where a training or generation stands")
    status.add_argument("run", nargs="?", metavar="RUN", help="run id, or its beginning (default: the latest)")
    _add_mirror_option(status, "of runs in this mirror (default: machine.mirror), from any machine")
    watch = verb("watch", "runs on this screen while they go on, wherever they were started")
    watch.add_argument("runs", nargs="*", metavar="RUN", help="id, or its beginning (default: all that go on)")
    watch.add_argument("--once", action="store_true", help="draw it once, and end")
    _add_mirror_option(watch, "runs in this mirror (default: machine.mirror), from any machine")


def _add_train_options(train: argparse.ArgumentParser) -> None:
    train.add_argument("--force", action="store_true", help="go on when the forecast says that memory will not suffice")
    train.add_argument("--nodes", metavar="MIN:MAX", help="machines that train this run (default: machine.nodes)")
    train.add_argument("--rendezvous", metavar="HOST:PORT", help="where they meet (default: machine.rendezvous)")
    train.add_argument(
        "--profile", nargs="?", const=PROFILE_STEPS, type=int, metavar="STEPS",
        help=f"train nothing: measure where the time of the first steps goes (default: {PROFILE_STEPS})",
    )  # fmt: skip


def _add_history_options(verb: Callable[[str, str], argparse.ArgumentParser]) -> None:
    compare = verb("compare", "trainings side by side: what differs, curves, scores, which differences are real")
    compare.add_argument(
        "names", nargs="+", metavar="A",
        help="a run (id, or its beginning), a trial (SWEEP/NUMBER), a version (v3, champion, anchor), or seeds "
        "(A+B+C); LABEL=A gives it a name",
    )  # fmt: skip
    report = verb("report", "a training as a page (curves, evaluation, origin), or a generation's answers judged")
    report.add_argument(
        "run", nargs="?", metavar="RUN", help="as for compare, or an output of generate (default: the latest run)"
    )
    for one in (compare, report):
        one.add_argument("--output", type=Path, metavar="FILE", help="the page (default: in experiments/pages)")


def _add_mirror_option(verb: argparse.ArgumentParser, text: str) -> None:
    verb.add_argument("--mirror", nargs="?", const=True, metavar="URL", help=text)


def _add_requirement_options(doctor: argparse.ArgumentParser) -> None:
    act = doctor.add_mutually_exclusive_group()
    act.add_argument("--write", action="store_true", help="write the proposals into params.yaml")
    act.add_argument(
        "--require", metavar="A=B,C=D",
        help="only see whether this machine is good enough, and exit 69 if not: vram=22GB,gpus=1,cuda=12.6,driver=550,"
        "ram=32GB,cpus=8,disk=50GB,python=3.11,download=50Mbps,upload=20Mbps",
    )  # fmt: skip
    doctor.add_argument("--mirror", metavar="URL", help="with --require: what to measure the network against")
    doctor.add_argument("--json", type=Path, metavar="FILE", help="with --require: write the findings there, too")


def _add_promotion_options(verb: Callable[[str, str], argparse.ArgumentParser]) -> None:
    promote = verb("promote", "register the exported model and make it champion")
    promote.add_argument("--force", action="store_true", help="against the verdict; recorded with who and why")
    promote.add_argument("--reason", metavar="TEXT", help="why it is forced")
    promote.add_argument(
        "--anchor", action="store_true", help="make it the anchor, too, which no model may fall behind"
    )
    rollback = verb("rollback", "make the previous champion champion again")
    rollback.add_argument("version", type=int, nargs="?", help="registered version (default: the previous champion)")
    rollback.add_argument("--reason", metavar="TEXT", help="why, for the record")
    for one in (promote, rollback):
        one.add_argument("--dry-run", action="store_true", help="only say what would be done")
    promotions = verb("promotions", "who was champion when, by whom; checks that the record is whole")
    promotions.add_argument("--deliver", action="store_true", help="tell those hooks that have not been reached")
    promotions.add_argument("--json", action="store_true", help="print JSON")


def _add_deployment_options(verb: Callable[[str, str], argparse.ArgumentParser]) -> None:
    deploy = verb("deploy", "put the champion into a directory that a server reads, checked, and swapped in at once")
    deploy.add_argument("directory", type=Path, metavar="DIR")
    deploy.add_argument("--format", metavar="FORM", help="hf, gguf, onnx, or gguf/q8_0 (default: gguf)")
    which = deploy.add_mutually_exclusive_group()
    which.add_argument("--version", type=int, metavar="N", help="a registered version (default: the champion)")
    which.add_argument("--rollback", action="store_true", help="back to the release before, at once")
    which.add_argument("--watch", action="store_true", help="stay, and deploy every new champion")
    deploy.add_argument("--no-smoke", action="store_true", help="start no server on it before it becomes current")
    keys = verb("keys", "who may sign promoted models here")
    act = keys.add_mutually_exclusive_group()
    act.add_argument("--new", action="store_true", help="make a key pair of yours, and trust it")
    act.add_argument("--trust", type=Path, metavar="FILE", help="trust the public key in this PEM file")
    act.add_argument("--trust-identity", metavar="WHO", help="trust what this identity signs through sigstore")
    act.add_argument("--revoke", metavar="KEY", help="trust a key (by its beginning) or an identity no longer")
    keys.add_argument("--issuer", metavar="URL", help="who vouches for the identity")
    keys.add_argument("--reason", metavar="TEXT", help="why it is revoked")


def _add_generation_options(generate: argparse.ArgumentParser) -> None:
    generate.add_argument("prompts", type=Path, metavar="PROMPTS", help="JSON, JSONL, CSV, TSV or Parquet")
    generate.add_argument("--output", type=Path, metavar="FILE", help="one record an answer, .jsonl or .parquet")
    _add_model_option(generate)
    generate.add_argument(
        "--stream", action="store_true", help="write no file: show each answer as it is given, reasoning set apart"
    )


def _add_model_option(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--model", default="adapter", metavar="WHICH",
        help="base, adapter, merged, champion, v3, a directory, a .gguf file, or http(s)://HOST[#MODEL] "
        "(default: adapter)",
    )  # fmt: skip


def _add_selection_options(select: argparse.ArgumentParser) -> None:
    select.add_argument("answers", nargs="+", type=Path, metavar="ANSWERS", help="outputs of `ratchet generate`")
    select.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the rows, such as data/raw/taught.jsonl"
    )
    select.add_argument(
        "--prompts", type=Path, metavar="FILE", help="where prompts came from, if their generation's directory is gone"
    )


def _add_sweep_options(sweep: argparse.ArgumentParser) -> None:
    sweep.add_argument(
        "--workers", type=int, default=1, metavar="N", help="trainings at once, here or on the cluster (default: 1)"
    )
    sweep.add_argument(
        "--fork", action="store_true", help="after a change of the search: a new study from the old trials"
    )
    sweep.add_argument(
        "--chaos", type=int, default=0, metavar="N", help="kill N workers at random, to show that it is fine"
    )
    sweep.add_argument(
        "--engine", choices=("local", "ray"), default="local",
        help="where workers run: here, or on the Ray cluster of machine.ray (default: local)",
    )  # fmt: skip
    act = sweep.add_mutually_exclusive_group()
    act.add_argument("--report", action="store_true", help="train nothing: write down what came of it until now")
    act.add_argument(
        "--adopt", nargs="?", const=True, type=int, metavar="TRIAL",
        help="train nothing: write the winner's values, or those of a trial, into params.yaml",
    )  # fmt: skip
    act.add_argument("--repair", action="store_true", help="cut a damaged journal of studies at the first bad line")


def _add_chaos_options(chaos: argparse.ArgumentParser) -> None:
    chaos.add_argument("--kills", type=int, default=5, metavar="N", help="kills of each kind of signal (default: 5)")
    chaos.add_argument("--seed", type=int, default=0, metavar="S", help="of every schedule (default: 0)")
    chaos.add_argument("--faults", metavar="A,B", help="only these (default: all; a wrong one lists them)")
    chaos.add_argument("--steps", type=int, default=24, metavar="K", help="optimizer steps of a run (default: 24)")
    chaos.add_argument("--keep", action="store_true", help="keep the directories of all trials")
    chaos.add_argument("--output", type=Path, metavar="DIR", help="for chaos.json and timeline.png")


def _add_forecast_options(forecast: argparse.ArgumentParser) -> None:
    forecast.add_argument("--base", type=Path, metavar="PATH", help="a model directory, or a config.json alone")
    forecast.add_argument("--rows", type=int, metavar="N", help="rows of a micro-batch (default: of params.yaml)")
    forecast.add_argument("--tokens", type=int, metavar="N", help="tokens of the longest row (default: of the data)")
    forecast.add_argument("--device", choices=("cpu", "cuda"), help="to train on (default: what this machine has)")
    forecast.add_argument("--memory", metavar="SIZE", help="of that device, such as 24GiB (default: this machine's)")
    forecast.add_argument("--ranks", type=int, metavar="N", help="GPUs that train together (default: of params.yaml)")
    forecast.add_argument("--json", action="store_true", help="print JSON")
    forecast.add_argument("--html", type=Path, metavar="FILE", help="write the table with a picture, too")
