"""Libraries that are imported without their unused parts behave like fully imported libraries."""

import subprocess
import sys

LIGHT = "from ratchet.models import lazy_imports as libraries; libraries.import_model_libraries()"


def told(*lines: str) -> str:
    """Run Python code in a new process and return its output. A process imports a module only once, so each case needs
    its own process."""
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    return done.stdout.strip()
