"""`--set KEY=VALUE`: settings of one run in place of those in params.yaml."""

import argparse
from collections.abc import Sequence
from typing import Any

from ratchet.errors import SettingsError

EXAMPLES = {"train": "rank=8", "generate": "temperature=0.7"}
"""An example of a setting, by section, for the help."""


def add_set_argument(parser: argparse.ArgumentParser, sections: Sequence[str]) -> None:
    """Add `--set` to a command that reads these sections of params.yaml."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help=f"a setting of this run, such as {sections[0]}.{EXAMPLES[sections[0]]}; params.yaml is unchanged (section "
        f"{' or '.join(sections)}; may be repeated)",
    )  # fmt: skip
    parser.set_defaults(set_sections=tuple(sections))


def parse_set_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values of `--set` by key. Raises SettingsError for a setting that the command does not read."""
    from ratchet.config.params_file import parse_changes

    changes = parse_changes(arguments.set)
    for key in changes:
        if key.partition(".")[0] not in arguments.set_sections:
            raise SettingsError(
                f"--set {key}: `ratchet {arguments.command}` takes settings of section "
                f"{' or '.join(arguments.set_sections)}; change any other setting in params.yaml"
            )
    return changes
