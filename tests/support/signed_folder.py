"""A folder like a promoted model's, and the reference implementation of signatures."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from ratchet.registry.signing import keys
from ratchet.storage.layout import ProjectLayout


def make(folder: Path) -> Path:
    """Write files in folders with a space and a non-ASCII letter in their names; one sorts next to a folder."""
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "model one.safetensors").write_bytes(bytes(range(200)))
    (folder / "hf" / "manifest.json").write_text("{}")  # only the one at the top is not covered
    (folder / "hf-notes.txt").write_text("n")
    (folder / "gruß.txt").write_text("ß")
    return folder


def public_key(layout: ProjectLayout, path: Path) -> Path:
    """Write the public key of a project that trusts one key, as a third party might have it."""
    (key,) = keys.read_keyring(layout.keyring).keys
    path.write_text(key.public)
    return path


def model_signing(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run OpenSSF's `model_signing` in its own process.

    Its version 1.1.1 imports pyOpenSSL, which it does not declare, for signatures by certificates, which ours are not;
    where that is not installed, a module of the name is enough.
    """
    extra = folder.parent / "beside"
    if importlib.util.find_spec("OpenSSL") is None:
        (extra / "OpenSSL").mkdir(parents=True, exist_ok=True)
        code = "from types import SimpleNamespace\n\ncrypto = SimpleNamespace(X509=None, X509Store=None)\n"
        (extra / "OpenSSL" / "__init__.py").write_text(code)
    command = [sys.executable, "-m", "model_signing", *arguments]
    environment = os.environ | {"PYTHONPATH": str(extra)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
