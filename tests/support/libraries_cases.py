"""Libraries that are imported without their unused parts behave like fully imported libraries."""

import subprocess
import sys
from pathlib import Path

LIGHT = "from ratchet.models import lazy_imports as libraries; libraries.import_model_libraries()"


def told(*lines: str) -> str:
    """Run Python code in a new process and return its output. A process imports a module only once, so each case needs
    its own process."""
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


FAKE_CLOUD = {
    "__init__.py": "from boto3.session import Session\n\ndef client(name):\n    return Session().client(name)\n",
    "session.py": "class Session:\n    def client(self, name):\n        return f'client of {name}'\n",
}


def cloud(tmp_path: Path) -> str:
    """Write a small boto3 and return the line that makes it importable. The test then does not depend on the real
    boto3."""
    folder = tmp_path / "boto3"
    folder.mkdir()
    for name, text in FAKE_CLOUD.items():
        (folder / name).write_text(text)
    (tmp_path / "boto3-1.0.dist-info").mkdir()
    (tmp_path / "boto3-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: boto3\nVersion: 1.0\n")
    return f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
