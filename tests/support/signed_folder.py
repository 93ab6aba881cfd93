"""A directory like that of a promoted model, and the reference implementation of signatures."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from ratchet.registry import keys
from ratchet.storage.layout import ProjectLayout


def make(folder: Path) -> Path:
    """Write files below directories and with names that have spaces and non-ASCII letters. One file name sorts next to
    a directory."""
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "model one.safetensors").write_bytes(bytes(range(200)))
    # The signature excludes only the manifest at the top level.
    (folder / "hf" / "manifest.json").write_text("{}")
    (folder / "hf-notes.txt").write_text("n")
    (folder / "gruß.txt").write_text("ß")
    return folder


def public_key(layout: ProjectLayout, path: Path) -> Path:
    """Write the public key of a project that trusts one key, in the form that a third party receives."""
    (key,) = keys.read_keyring(layout.keyring).keys
    path.write_text(key.public)
    return path


def model_signing(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run OpenSSF's `model_signing` in its own process.

    Its version 1.1.1 imports pyOpenSSL without declaring the dependency. It needs pyOpenSSL only for signatures by
    certificates, which Ratchet does not use. If pyOpenSSL is not installed, an empty module replaces it.
    """
    extra = folder.parent / "beside"
    if importlib.util.find_spec("OpenSSL") is None:
        (extra / "OpenSSL").mkdir(parents=True, exist_ok=True)
        code = "from types import SimpleNamespace\n\ncrypto = SimpleNamespace(X509=None, X509Store=None)\n"
        (extra / "OpenSSL" / "__init__.py").write_text(code)
    command = [sys.executable, "-m", "model_signing", *arguments]
    environment = os.environ | {"PYTHONPATH": str(extra)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
