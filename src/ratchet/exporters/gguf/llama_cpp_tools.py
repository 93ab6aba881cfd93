"""Runs llama.cpp's own tools, if installed, for K-quants and for architectures that our writer does not support.

`llama-quantize IN OUT TYPE THREADS` quantizes a GGUF file, and `convert_hf_to_gguf.py DIR --outtype TYPE --outfile OUT`
writes a GGUF file. Neither call has a timeout, because a large model may take hours and both tools end by themselves.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from ratchet.config.export import GgufType, LlamaCppGgufType
from ratchet.config.units import format_exit_code
from ratchet.errors import SettingsError
from ratchet.storage import files

TYPES: frozenset[str] = frozenset(get_args(LlamaCppGgufType))
"""Types that only llama-quantize writes; llama-quantize also writes all other types."""
CONVERTED: frozenset[str] = frozenset({"f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0"})
"""Types that the converter writes without llama-quantize."""
QUANTIZE = "llama-quantize"
CONVERT = "convert_hf_to_gguf.py"
SUBDIRECTORIES = ("", "bin", "build/bin")
"""Directories that may contain the tools, relative to a checkout, a build, or an installation."""
INHERITED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "HOME")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True)
class LlamaCppTools:
    """Paths of llama.cpp's tools; None: the tool is not installed."""

    quantize: Path | None
    convert: Path | None


def find_tools(llama_cpp: Path | None) -> LlamaCppTools:
    """Find both tools in the directory of the settings, and llama-quantize on PATH.

    Raises:
        SettingsError: the directory does not exist, or contains neither tool.
    """
    on_path = shutil.which(QUANTIZE)
    quantize = Path(on_path) if on_path else None
    if llama_cpp is None:
        return LlamaCppTools(quantize, None)
    if not llama_cpp.is_dir():
        raise SettingsError(
            f"machine.llama_cpp: {llama_cpp}: directory not found; expected a checkout or an installation of llama.cpp"
        )
    quantize_in_directory = _find_in_directory(llama_cpp, QUANTIZE, os.X_OK)
    convert = _find_in_directory(llama_cpp, CONVERT, os.R_OK)
    if quantize_in_directory is None and convert is None:
        searched = ", ".join(str(llama_cpp / name) for name in SUBDIRECTORIES)
        raise SettingsError(
            f"machine.llama_cpp: found neither {QUANTIZE} nor {CONVERT} in {searched}; build llama.cpp (`cmake "
            f"-B build && cmake --build build --target {QUANTIZE}`), or set machine.llama_cpp: null"
        )
    return LlamaCppTools(quantize_in_directory or quantize, convert)


def require_quantizer(tools: LlamaCppTools, kinds: Sequence[GgufType], is_supported: bool) -> None:
    """Raise SettingsError if a type needs llama-quantize and the tool is not installed.

    `is_supported`: whether our own writer supports the architecture; otherwise, the converter writes some types.
    """
    needed = [kind for kind in kinds if (kind in TYPES if is_supported else kind not in CONVERTED)]
    if needed and tools.quantize is None:
        raise _missing_tool_error(needed[0], ("q8_0", "q4_0") if is_supported else sorted(CONVERTED))


def quantize_gguf(tools: LlamaCppTools, source: Path, target: Path, kind: GgufType, threads: int) -> None:
    """Quantize an F32 file with llama.cpp's own tool.

    Rows whose length is not a multiple of a K-quant's block (256 weights) get another type of similar size, which the
    tool chooses and records in the file.

    Raises:
        SettingsError: the tool is not installed, or fails; the message contains the last line of its output.
    """
    if tools.quantize is None:
        raise _missing_tool_error(kind, sorted(CONVERTED))
    _run_tool(tools.quantize, [str(tools.quantize), str(source)], [kind.upper(), str(threads)], target)


def convert_to_gguf(tools: LlamaCppTools, directory: Path, target: Path, kind: GgufType = "f32") -> None:
    """Convert a Hugging Face directory to GGUF with the converter of a llama.cpp checkout, offline.

    The converter runs in this interpreter, which has torch, transformers and sentencepiece.

    Raises:
        SettingsError: the converter is not installed, does not write this type, or fails; the message contains the last
            line of its output.
    """
    if tools.convert is None:
        raise SettingsError(
            f"export.gguf: this architecture needs llama.cpp's {CONVERT}; set machine.llama_cpp to a checkout of "
            "llama.cpp, or remove all types from export.gguf.types"
        )
    if kind not in CONVERTED:
        raise SettingsError(f"export.gguf.types: found {kind}; {CONVERT} writes only {', '.join(sorted(CONVERTED))}")
    command = [sys.executable, str(tools.convert), str(directory), "--outtype", kind, "--outfile"]
    _run_tool(tools.convert, command, [], target)


def _missing_tool_error(kind: GgufType, others: Sequence[str]) -> SettingsError:
    return SettingsError(
        f"export.gguf.types: {kind} needs llama.cpp's {QUANTIZE}, which is not on PATH; install llama.cpp, or set "
        f"machine.llama_cpp to its directory, or use a type that needs no tool ({', '.join(others)})"
    )


def _find_in_directory(root: Path, name: str, access: int) -> Path | None:
    paths = (root / subdirectory / name for subdirectory in SUBDIRECTORIES)
    return next((path.absolute() for path in paths if path.is_file() and os.access(path, access)), None)


def _run_tool(tool: Path, command: list[str], further_arguments: list[str], target: Path) -> None:
    """Run a tool that writes `target`, as `command TARGET further_arguments`. A failed tool leaves no file."""
    partial = target.with_name(f"{files.PARTIAL}{target.name}")
    environment = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ} | OFFLINE
    try:
        try:
            result = subprocess.run(
                [*command, str(partial), *further_arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, env=environment, encoding="utf-8", errors="replace", check=False,
            )  # fmt: skip
        except OSError as error:
            raise SettingsError(
                f"{tool}: cannot be started ({error.strerror}); check that it is built for this machine"
            ) from None
        code = result.returncode
        if code != 0 or not _is_gguf(partial):
            problem = format_exit_code(code)
            problem += "" if code else ", but no GGUF file"
            lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
            raise SettingsError(f"{tool}: failed ({problem}): {lines[-1] if lines else 'no output'}")
        files.fsync(partial)
        files.publish_directory(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(4) == b"GGUF"
