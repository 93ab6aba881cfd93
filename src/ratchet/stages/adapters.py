"""`ratchet adapters`: a directory from which one server serves several adapters on one base."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast, get_args

from ratchet.config.export import BuiltInGgufType
from ratchet.errors import SettingsError
from ratchet.exporters import inputs
from ratchet.registry import pickle_scan
from ratchet.stages.project import Project, ignore_progress
from ratchet.storage import files
from ratchet.storage.progress import report_progress
from ratchet.storage.records.export import AdapterServer

REPORT = "adapters.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of adapters, which are names of files and of models in requests."""


def adapters(
    project: Project, directory: Path, named: Mapping[str, Path], on_progress: Callable[[str], None] = ignore_progress
) -> AdapterServer:
    """Write the directory, and test every adapter in llama.cpp.

    Args:
        project: the project whose base the adapters have.
        directory: the directory to write; it must not exist, or be one that this command wrote.
        named: directory of each adapter by the name that requests use.
        on_progress: receives lines of text.

    Raises:
        SettingsError: a name or an adapter cannot be served, or the directory has other content.
        BaseModelError: an adapter belongs to another base.
        DamagedFileError: llama.cpp computes other values than base + adapter.
        LockHeldError: another process exports this project.
    """
    if not named:
        raise SettingsError("adapters: found no adapter; name at least one as NAME=DIRECTORY")
    for name, path in named.items():
        if not _NAME.fullmatch(name) or name == "base" or name.startswith("base-"):
            raise SettingsError(
                f"adapters: found the name {name!r}; expected letters, digits, dots, _ and -, and not {name!r}"
                if name.startswith("base")
                else f"adapters: found the name {name!r}; expected letters, digits, dots, _ and -"
            )
        if not path.is_dir():
            raise SettingsError(f"{name}: found no directory {path}; name the directory of a saved adapter")
    if directory.exists() and not (directory / REPORT).is_file():
        raise SettingsError(f"{directory}: already exists and was not written by this command; name a new directory")
    from ratchet.exporters import adapter_server  # needs the extra `export`, and loads torch

    for name, path in named.items():
        adapter_server.require_servable(name, path)
        pickle_scan.scan_directory(path)
    types = [name for name in project.settings.export.gguf.types if name in get_args(BuiltInGgufType)]
    type_ = cast(BuiltInGgufType, types[0] if types else "f16")
    with project.lock("export"), files.sealed_directory(directory, "adapters") as scratch:
        job = inputs.open_job(project.layout, project.settings, report_progress)
        on_progress(f"base in {type_}, and {len(named)} adapters")
        server = adapter_server.write_adapter_server(job, named, type_, scratch)
        server.save(scratch / REPORT)
    return server
