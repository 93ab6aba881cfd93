"""`ratchet deploy`: puts a promoted model into a directory that a server reads."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record, print_text, progress_printer
from ratchet.config.units import utc_timestamp
from ratchet.errors import SettingsError
from ratchet.stages.project import Project, open_project_or_defaults

if TYPE_CHECKING:
    from ratchet.stages.deploy import DeployOptions, DeployResult
    from ratchet.stages.project import Project

HELP = "verify the champion, test it, and make it current in a directory that a server reads"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory that a server reads; made if missing")
    parser.add_argument(
        "--format", metavar="FORMAT",
        help="hf, gguf, bitsandbytes, onnx, or gguf/q8_0 (default: DIR's present format; in a new DIR, the first "
        "GGUF file, or hf if there is none)",
    )  # fmt: skip
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--version", type=int, metavar="N", help="a registered version (default: the champion)")
    choice.add_argument("--rollback", action="store_true", help="go back to the previous release")
    choice.add_argument("--watch", action="store_true", help="keep running, and deploy every new champion")
    parser.add_argument(
        "--model", metavar="NAME", help="outside a project: the registered model on the server of MLFLOW_TRACKING_URI"
    )
    parser.add_argument(
        "--public-key", type=Path, metavar="FILE", help="outside a project: PEM file of the key that must have signed"
    )
    parser.add_argument(
        "--no-smoke", action="store_true", help="do not test the release with a server before it becomes current"
    )


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.deploy import DeployOptions, deploy

    project = _open_project(arguments)
    options = DeployOptions(arguments.format, arguments.version, arguments.rollback, smoke_test=not arguments.no_smoke)
    if arguments.watch:
        _watch(project, options, arguments)
    else:
        print_record(deploy(project, arguments.directory, options), format_deployment, arguments)


def _open_project(arguments: argparse.Namespace) -> Project:
    """Open the project; outside a project, the registered model on a server."""
    from ratchet.stages.deploy import open_model_on_server

    if open_project_or_defaults(arguments.project)[0] is None:
        return open_model_on_server(arguments.model, arguments.public_key)
    if arguments.model is not None or arguments.public_key is not None:
        raise SettingsError("--model and --public-key are for a directory outside a project, which names both itself")
    return Project(arguments.project)


def _watch(project: "Project", options: "DeployOptions", arguments: argparse.Namespace) -> None:
    """Deploy every new champion until SIGTERM or Ctrl-C."""
    from ratchet.stages.deploy import watch_champion

    report = progress_printer(arguments) if arguments.json else print_text

    def add_time(text: str) -> str:
        return f"{utc_timestamp()}  {text}"

    from ratchet.config.mlflow_environment import resolve_addresses

    registry = resolve_addresses(project.settings, project.layout.mlflow_database).registry
    report(f"watching {registry or project.layout.promotions}; SIGTERM or Ctrl-C ends it")
    try:
        watch_champion(
            project, arguments.directory, options,
            on_deploy=lambda result: print_record(result, lambda _: add_time(format_deployment(result)), arguments),
            on_problem=lambda problem: report(add_time(problem)),
        )  # fmt: skip
    except KeyboardInterrupt:  # `ratchet.cli.main` raises it at SIGTERM as well
        report(f"stopped watching; the current release in {arguments.directory} stays")


def format_deployment(result: "DeployResult") -> str:
    """Format the current release, its smoke test, how to serve it, and warnings."""
    from ratchet.storage import digests

    deployment = result.deployment
    release = (
        f"version {deployment.version} (model {deployment.model_digest[: digests.SHORT]}, {deployment.artifact_name})"
    )
    replaced = f", instead of {deployment.previous_release}"
    if result.status == "unchanged":
        lines = [f"{release} is deployed in {result.current} already"]
    elif result.status == "rollback_finished":
        lines = [f"{release} is current again in {result.current}: this finished an interrupted rollback"]
    elif result.status == "rolled_back":
        lines = [f"{release} is current again in {result.current}{replaced}; every byte is as signed"]
    else:
        has_changed = deployment.previous_release not in (None, deployment.release)
        test = f"smoke test: {deployment.smoke_test}" if deployment.smoke_test else None
        lines = [
            f"{release} is current in {result.current}{replaced if has_changed else ''}",
            test or "no smoke test: no server was started",
            f"how to serve it: {result.guide}",
        ]
    return "\n  ".join([*lines, *(f"warning: {text}" for text in result.warnings)])
