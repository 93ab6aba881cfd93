"""llama.cpp's own tools, where the user has them: K-quants, and architectures that our writer does not know.

`llama-quantize IN OUT TYPE THREADS` quantises a GGUF file, `convert_hf_to_gguf.py DIR --outtype TYPE --outfile OUT`
writes one. Neither has a deadline: a large model takes as long as it takes, and both end by themselves.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, get_args

from ratchet.config.export import GgufType, ToolType
from ratchet.errors import SettingsError
from ratchet.storage import disk, files

TYPES: frozenset[str] = frozenset(get_args(ToolType))
"""That only llama-quantize makes; it makes all others, too."""
CONVERTED: frozenset[str] = frozenset({"f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0"})
"""That the converter writes by itself."""
QUANTIZE = "llama-quantize"
CONVERT = "convert_hf_to_gguf.py"
PLACES = ("", "bin", "build/bin")
"""In a checkout, after a build, or an installation."""
KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "HOME")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
LOG_BYTES = 4096


@dataclass(frozen=True)
class LlamaCppTools:
    """What there is of llama.cpp."""

    quantize: Path | None
    convert: Path | None


def find_tools(llama_cpp: Path | None) -> LlamaCppTools:
    """Look for both tools in a directory that the user names, and for llama-quantize on PATH.

    Raises:
        SettingsError: the named directory is none, or has neither.
    """
    on_path = shutil.which(QUANTIZE)
    quantize = Path(on_path) if on_path else None
    if llama_cpp is None:
        return LlamaCppTools(quantize, None)
    if not llama_cpp.is_dir():
        raise SettingsError(f"machine.llama_cpp: {llama_cpp}: no such directory; name one that holds llama.cpp")
    own, convert = _find_in_directory(llama_cpp, QUANTIZE, os.X_OK), _find_in_directory(llama_cpp, CONVERT, os.R_OK)
    if own is None and convert is None:
        places = ", ".join(str(llama_cpp / place) for place in PLACES)
        raise SettingsError(
            f"machine.llama_cpp: neither {QUANTIZE} nor {CONVERT} in {places}; build llama.cpp (`cmake -B build && "
            f"cmake --build build --target {QUANTIZE}`), or set machine.llama_cpp: null"
        )
    return LlamaCppTools(own or quantize, convert)


def require_quantizer(tools: LlamaCppTools, kinds: Sequence[GgufType]) -> None:
    """Raise SettingsError where a type needs llama-quantize and there is none."""
    needed = [kind for kind in kinds if kind in TYPES]
    if needed and tools.quantize is None:
        raise _missing_tool_error(needed[0])


def quantize_gguf(tools: LlamaCppTools, source: Path, target: Path, kind: GgufType, threads: int) -> None:
    """Make a smaller file of an F32 one, as llama.cpp's own tool does it.

    A row that cannot be cut into the blocks of a K-quant (256 weights) gets another type of about that size: the tool
    decides, and the file says.

    Raises:
        SettingsError: there is no such tool, or it fails; with its last words.
    """
    if tools.quantize is None:
        raise _missing_tool_error(kind)
    _run_tool(tools.quantize, [str(tools.quantize), str(source)], [kind.upper(), str(threads)], target)


def convert_to_gguf(tools: LlamaCppTools, directory: Path, target: Path, kind: GgufType = "f32") -> None:
    """Write a GGUF file of a Hugging Face directory with the converter of a llama.cpp checkout, offline.

    It is run by this interpreter, which has torch, transformers and sentencepiece.

    Raises:
        SettingsError: there is none, it does not write this type, or it fails; with its last words.
    """
    if tools.convert is None:
        raise SettingsError(
            f"export.gguf: this architecture needs llama.cpp's {CONVERT}; name a checkout of llama.cpp in "
            "machine.llama_cpp, or leave export.gguf.types empty"
        )
    if kind not in CONVERTED:
        raise SettingsError(f"export.gguf.types: {CONVERT} does not write {kind}, but {', '.join(sorted(CONVERTED))}")
    command = [sys.executable, str(tools.convert), str(directory), "--outtype", kind, "--outfile"]
    _run_tool(tools.convert, command, [], target)


def _missing_tool_error(kind: GgufType) -> SettingsError:
    return SettingsError(
        f"export.gguf.types: {kind} is made by llama.cpp's {QUANTIZE}, which is not on PATH; install llama.cpp, or "
        "name its directory in machine.llama_cpp, or choose a type that needs no tool (q8_0, q4_0)"
    )


def _find_in_directory(root: Path, name: str, access: int) -> Path | None:
    found = (root / place / name for place in PLACES)
    return next((path.absolute() for path in found if path.is_file() and os.access(path, access)), None)


def _run_tool(tool: Path, before: list[str], after: list[str], target: Path) -> None:
    """Let a tool write `target`, which is whole or not there: the name of the file goes between both lists."""
    partial = target.with_name(f"{files.PARTIAL}{target.name}")
    environment = {name: os.environ[name] for name in KEPT if name in os.environ} | OFFLINE
    try:
        with tempfile.TemporaryFile() as log:
            try:
                done = subprocess.run(
                    [*before, str(partial), *after],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False,
                )  # fmt: skip
            except OSError as error:
                raise SettingsError(
                    f"{tool}: cannot be started ({error.strerror}); is it made for this machine?"
                ) from None
            if done.returncode != 0 or not _is_gguf(partial):
                raise SettingsError(f"{tool}: failed ({_describe_exit(done.returncode)}): {_last_line(log)}")
        disk.fsync(partial)
        files.publish_directory(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(4) == b"GGUF"


def _last_line(log: IO[bytes]) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - LOG_BYTES))
    lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _describe_exit(code: int) -> str:
    if code == 0:
        return "it wrote no GGUF file"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
