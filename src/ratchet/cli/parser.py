"""The parser of the command line: it names the nearest command or flag for one that it does not know."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ratchet.cli.output import print_text
from ratchet.errors import EXIT_INPUT


class CommandParser(argparse.ArgumentParser):
    """A parser whose messages contain what was probably meant. Errors end the process with exit code 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: dict[str, argparse.ArgumentParser] = {}
        """Parsers of the commands, by name."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse the command line of the whole program."""
        words = sys.argv[1:] if args is None else list(args)
        # argparse would take the value of an unknown flag for the command.
        if (
            words
            and words[0].startswith("--")
            and not any(flag.startswith(words[0].partition("=")[0]) for flag in list_flags(self))
        ):
            self._refuse(self, words[0])
        options, unknown = self.parse_known_args(words, namespace)
        if unknown:
            self._refuse(self.commands.get(getattr(options, "command", ""), self), unknown[0])
        return options

    def _refuse(self, parser: argparse.ArgumentParser, word: str) -> NoReturn:
        """End the process, because a parser, this one or that of a command, does not know a word."""
        name = word.partition("=")[0]
        if parser is self and any(name in list_flags(command) for command in self.commands.values()):
            self.error(f"unknown before the command: {word}; write it after the command")
        parser.error(f"unknown: {word}{suggest(name, list_flags(parser)) if name.startswith('-') else ''}")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or an error. End the process with an error if help cannot be written, which argparse ignores."""
        if file is not sys.stdout:
            super()._print_message(message, file)
            return
        try:
            print_text(message.removesuffix("\n"))
        except OSError as error:
            self.exit(EXIT_INPUT, f"{self.prog}: {error.filename}: {error.strerror}\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Convert a value to the type of its option."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if action.type not in (int, float):
                raise
            expected = "a whole number" if action.type is int else "a number"
            raise argparse.ArgumentError(action, f"found {arg_string!r}; expected {expected}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check a value that must be one of several, such as the name of a command."""
        if action.choices is None or value in action.choices:
            return
        names = list(map(str, action.choices))
        if self.commands:
            text = f"{suggest(str(value), names, before='ratchet ')}; `ratchet --help` lists all"
        else:
            text = f"; expected one of: {', '.join(names)}"
        raise argparse.ArgumentError(action, f"found {value!r}{text}")


def list_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Return all flags of a parser."""
    return [flag for action in parser._actions for flag in action.option_strings]


def suggest(name: str, known: Iterable[str], before: str = "") -> str:
    """Return a question for the most similar known name; empty if none is similar."""
    import difflib  # takes 4 ms, which `ratchet --help` saves

    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {before}{nearest[0]}?" if nearest else ""
