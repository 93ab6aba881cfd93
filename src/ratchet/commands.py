"""What commands share, and those of generating: the command line's second file, below cli.py."""

import argparse
import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.errors import EXIT_OK
from ratchet.layout import Layout

if TYPE_CHECKING:
    from ratchet.config import Settings  # pydantic takes .1 s, which `--help` need not wait for


def project(options: argparse.Namespace, **machine: str | None) -> "tuple[Layout, Settings]":
    """The project that is meant, and its settings; `machine`: those of that section that the command line gives."""
    from ratchet import params

    layout = Layout.find(options.project)
    return layout, params.load(layout.params, machine)


def say(text: str) -> int:
    """Print; returns the exit code of what has been done."""
    try:
        print(text, flush=True)
    except OSError as error:  # `| head`, a closed terminal: nobody listens any more, which is no reason to stop
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
    return EXIT_OK


def _say(text: str) -> None:
    say(text)


def distill(options: argparse.Namespace) -> int:
    """`ratchet distill`."""
    from ratchet.distill import distill as carry_out

    return say(carry_out(*project(options), options.forecast, lambda text: _say(f"  {text}")))


def select(options: argparse.Namespace) -> int:
    """`ratchet select`."""
    from ratchet.select import Options
    from ratchet.select import select as carry_out

    chosen = Options(tuple(options.answers), options.output, options.prompts)
    return say(carry_out(*project(options), chosen, lambda text: _say(f"  {text}")))


def generate(options: argparse.Namespace) -> int:
    """`ratchet generate`."""
    from ratchet.generate import Options
    from ratchet.generate import generate as carry_out

    chosen = Options(options.prompts, options.output, options.model, options.stream)
    return say(carry_out(*project(options), chosen, _say))


def chat(options: argparse.Namespace) -> int:
    """`ratchet chat`."""
    from ratchet.chat import chat as carry_out

    carry_out(*project(options), options.model)
    return EXIT_OK
