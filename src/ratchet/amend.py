"""Change values in params.yaml and nothing else of its text: comments, order, quotes and blank lines stay."""

from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node

from ratchet import params
from ratchet.config import Settings
from ratchet.errors import SettingsError

Changes = Mapping[str, Any]
"""New values by dotted key, such as `train.rank`."""


def value_of(settings: Settings, key: str) -> Any:
    """The value of a dotted key, such as `train.rank`."""
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def changed(settings: Settings, changes: Changes) -> Settings:
    """These settings with other values. Raises SettingsError when they do not go together."""
    tree = settings.model_dump()
    for key, value in changes.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[leaf] = value
    try:
        return Settings.model_validate(tree)
    except ValueError as error:
        raise SettingsError(f"{', '.join(changes)}: {error}") from None


def amended(text: str, changes: Changes) -> str:
    """The text of params.yaml with these values.

    A key that is not written there is added at the end of its section, with its sentence. The result is read again: it
    must mean what the text meant, with these changes and no other.

    Raises:
        SettingsError: the text is not valid, or cannot be changed so (an anchor that several keys share, for example).
    """
    wanted = changed(params.parse(text), changes)
    full = params.dump(wanted)
    for key in changes:
        text = _with(text, full, key.split("."))
    try:
        exact = params.parse(text) == wanted
    except SettingsError:
        exact = False
    if not exact:
        raise SettingsError(
            f"params.yaml: {', '.join(changes)} cannot be changed without touching other keys (an anchor, or a section "
            "on one line?); write them by hand"
        )
    return text


def _compose(text: str) -> Node:
    root: Node = YAML(typ="rt", pure=True).compose(text)
    return root


def _with(text: str, full: str, path: list[str]) -> str:
    """The text with one key as `full` has it, which names every key."""
    node, other = _compose(text), _compose(full)
    missing: list[str] = []
    for name in path:
        other = _known(other, name)
        found = None if missing else _child(node, name)
        if found is None:
            missing.append(name)
        else:
            node = found
    if missing:
        return _with_lines(text, node, full, other, missing[:-1])
    start, stop = _span(text, node)
    written = full[slice(*_span(full, other))]
    head = text[:start]
    if start == stop or not head.rpartition("\n")[2].strip():  # `rank:` with nothing behind it, or lines of its own
        head = f"{head.rstrip()} "
    return head + written + text[stop:]


def _child(node: Node, name: str) -> Node | None:
    if not isinstance(node, MappingNode):
        return None
    return next((value for key, value in node.value if str(key.value) == name), None)


def _known(node: Node, name: str) -> Node:
    found = _child(node, name)
    if found is None:
        raise SettingsError(f"{name}: no such key")
    return found


def _with_lines(text: str, node: Node, full: str, other: Node, sections: list[str]) -> str:
    """The text with new lines at the end of a section: a key and its sentence, in sections of its own if need be.

    Where the section is written on one line, the result will not mean what it should.
    """
    start, stop = _span(full, other)
    lines = full[: full.find("\n", stop) + 1].splitlines()
    first = full.count("\n", 0, start)
    first -= 1 if lines[first - 1].lstrip().startswith("#") else 0
    own = len(lines[first]) - len(lines[first].lstrip())
    depth = int(node.value[0][0].start_mark.column) if isinstance(node, MappingNode) and node.value else 0
    wanted = [f"{'  ' * i}{name}:" for i, name in enumerate(sections)]
    wanted += ["  " * len(sections) + line[own:] for line in lines[first:]]
    block = "".join(f"{' ' * depth}{line}\n" for line in wanted)
    place = _end_of_line(text, _span(text, node)[1])
    return text[:place] + (block if not place or text[place - 1] == "\n" else f"\n{block}") + text[place:]


def _span(text: str, node: Node) -> tuple[int, int]:
    """Where a node's own characters begin and end; marks of block nodes lie behind the blank lines that follow."""
    start, stop = int(node.start_mark.index), int(node.end_mark.index)
    last = node
    while isinstance(last, MappingNode) and not last.flow_style and last.value:
        last = last.value[-1][1]
        stop = int(last.end_mark.index)
    return start, start + len(text[start:stop].rstrip())


def _end_of_line(text: str, index: int) -> int:
    found = text.find("\n", index)
    return len(text) if found < 0 else found + 1
