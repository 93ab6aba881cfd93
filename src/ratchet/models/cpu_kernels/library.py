"""Compiles the kernels in `kernels.cpp` for this CPU, once per user, and loads them.

They need a CPU with AVX2 or AVX-512, and the compiler g++; elsewhere torch's kernels are used. The library stays in
`$XDG_CACHE_HOME/ratchet/kernels` (`~/.cache/ratchet/kernels`). The file's name has a digest of the source, the flags
and the version of the C library, so it is compiled again if one of them changes.
"""

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratchet.storage import digests, files
from ratchet.storage.layout import find_user_cache

SWITCH = "RATCHET_CPU_KERNELS"
"""Environment variable; if it is `0`, torch's kernels are used."""
SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILER = "g++"
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=fast", "-Wno-psabi")
"""Flags for every CPU. `-ffp-contract=fast` lets the compiler use fused multiply-add."""
FLAGS_OF_CAPABILITY = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma"),
}
"""The compiler's flags for each set of instructions, by torch's name (`torch.backends.cpu.get_cpu_capability`)."""
DIGEST_BYTES = 64
"""Bytes of the SHA-256 digest at the end of the file, in hexadecimal."""
COMPILE_S = 120.0
"""Seconds after which the compiler is stopped."""

_operators = torch.library.Library("ratchet", "DEF")


class Heads(ctypes.Structure):
    """A float32 tensor [sequences, heads, positions, width], contiguous in width; strides count elements."""

    _fields_ = (("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3))

    @classmethod
    def of(cls, tensor: Tensor) -> "Heads":
        return cls(tensor.data_ptr(), (ctypes.c_int64 * 3)(*tensor.stride()[:3]))


@dataclass(frozen=True)
class KernelLibrary:
    """The kernels, or the reason why torch's are used."""

    kernels: ctypes.CDLL | None
    text: str
    """Instructions of the kernels, such as `AVX512`, or why there are none."""
    digest: str = ""
    """SHA-256 of the library."""

    @property
    def is_available(self) -> bool:
        return self.kernels is not None


@functools.cache
def load_kernels() -> KernelLibrary:
    """Return the library for this CPU. The first call of a user compiles it, which takes 2 s."""
    if os.environ.get(SWITCH) == "0":
        return KernelLibrary(None, f"{SWITCH} is 0")
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in FLAGS_OF_CAPABILITY:
        return KernelLibrary(None, f"they need AVX2 or AVX-512; this CPU has {capability}")
    flags = (*FLAGS, *FLAGS_OF_CAPABILITY[capability])
    try:
        path = _make_folder() / f"kernels-{_digest(flags)}.so"
        if (digest := _read_digest(path)) is None:
            if (compiler := shutil.which(COMPILER)) is None:
                return KernelLibrary(None, f"the compiler {COMPILER} is not installed")
            digest = _compile([compiler, *flags], path)
        return KernelLibrary(ctypes.CDLL(str(path)), capability, digest)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return KernelLibrary(None, f"{COMPILER} failed: {lines[0] if lines else error}")
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:  # RuntimeError: the user has no home
        return KernelLibrary(None, str(error))


def _make_folder() -> Path:
    """Return the folder of compiled libraries. Raises PermissionError if another user could put a library there."""
    folder = find_user_cache() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder}: other users may write there, so no library is loaded from it")
    return folder


def _digest(flags: tuple[str, ...]) -> str:
    """Return the digest of what the library depends on. The compiler's version is left out: after an update or removal
    of the compiler, a resumed training must compute the same bits."""
    return digests.hash_bytes(SOURCE.read_bytes() + " ".join((*flags, *platform.libc_ver())).encode())[:16]


def _compile(command: list[str], path: Path) -> str:
    """Compile the library and return its digest. If this process is killed, or another compiles at the same time, no
    half of it is left."""
    with tempfile.TemporaryDirectory(prefix="compile-", dir=path.parent) as folder:
        built = Path(folder) / path.name
        subprocess.run([*command, str(SOURCE), "-o", str(built)], check=True, capture_output=True, timeout=COMPILE_S)
        digest = digests.hash_file(built)
        with built.open("a", encoding="ascii") as stream:
            stream.write(digest)  # the loader ignores what follows the library
        files.fsync(built)
        built.replace(path)
    return digest


def _read_digest(path: Path) -> str | None:
    """Return the digest of a library that is as it was compiled; else None. To load a damaged one could kill this
    process."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest = digests.hash_bytes(content[:-DIGEST_BYTES])
    return digest if content[-DIGEST_BYTES:] == digest.encode() else None


def get_kernels() -> ctypes.CDLL:
    """Return the loaded kernels. Raises RuntimeError if there are none."""
    if (kernels := load_kernels().kernels) is None:
        raise RuntimeError(f"there are no kernels: {load_kernels().text}")
    return kernels


def define_operators(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Define operators of torch by their signatures, so that profiles and memory traces see them. On the meta device
    the functions return tensors without contents."""
    for signature, function in functions.items():
        name = _operators.define(signature)
        for device in ("CPU", "Meta"):
            _operators.impl(name, function, device)


def count_threads(parts: int, work: int, work_per_thread: int) -> int:
    """Return the number of threads for work that can be divided into this many parts.

    `work` and `work_per_thread` have the same unit. Starting a thread takes 10 µs, so each must have at least
    `work_per_thread`.
    """
    threads: int = torch.get_num_threads()
    return max(1, min(threads, parts, work // work_per_thread))
