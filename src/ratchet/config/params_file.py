"""params.yaml: read, checked with the place of every problem, and written with a sentence beside every knob."""

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node

from ratchet.config.data import ColumnSettings, SourceSettings
from ratchet.config.export import AdditionalAdapterSettings
from ratchet.config.fields import Section, parse_number
from ratchet.config.gate import RULES, HookSettings, MustImproveRule
from ratchet.config.schema import Settings
from ratchet.config.sweep import SweepParameter
from ratchet.errors import SettingsError
from ratchet.redaction import redact

Options = Mapping[str, str | None]


def load(path: Path, machine: Options | None = None) -> Settings:
    """Read and validate params.yaml.

    Args:
        path: of the file.
        machine: settings of section `machine` that the command line gives instead, by name; None: it does not.

    Raises:
        SettingsError: one message that lists every problem with file, line, key path, what was found, what to do.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    return parse(text, path.name, machine)


def parse(text: str, name: str = "params.yaml", machine: Options | None = None) -> Settings:
    """`load` for text at hand; `name` stands for the file in messages."""
    try:
        document = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise SettingsError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from None
    except YAMLError as error:
        raise SettingsError(f"{name}: not valid YAML: {error}") from None
    if not isinstance(document, CommentedMap):
        raise SettingsError(f"{name}: expected sections such as `train:`, found {_format_found(document)}")
    plain = _convert_to_builtin(document)
    given = {key: value for key, value in (machine or {}).items() if value is not None}
    if given and isinstance(plain.setdefault("machine", {}), dict):
        plain["machine"] |= given
    try:
        return Settings.model_validate(plain)
    except ValidationError as error:
        options = {("machine", key) for key in given}
        problems = [
            _format_option_problem(dict(item))
            if item["loc"] in options
            else _format_problem(document, dict(item), name)
            for item in error.errors()
        ]
        raise SettingsError("\n".join(problems)) from None


def _convert_to_builtin(node: Any) -> Any:
    """ruamel's containers and scalars as builtin ones (pydantic's strict mode takes nothing else)."""
    if isinstance(node, CommentedMap):
        return {str(key): _convert_to_builtin(value) for key, value in node.items()}
    if isinstance(node, CommentedSeq):
        return [_convert_to_builtin(value) for value in node]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node


def _format_found(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    text = redact(text)  # a password that should not stand there
    text = re.sub(r"(://[^?'\"\s]*\?)[^'\"\s]*", r"\1***", text)  # nor a key in the query of an address
    return text if len(text) <= 60 else text[:57] + "..."


def _format_option_problem(item: dict[str, Any]) -> str:
    return f"--{item['loc'][-1]}: {_format_complaint(item)}"


def _format_problem(document: CommentedMap, item: dict[str, Any], name: str) -> str:
    """One line for one of pydantic's findings."""
    # Tags of unions ('must_improve', 'str', 'tuple[...]') stand in pydantic's location, but not in the file.
    keys, node, line = [], document, 1
    for part in item["loc"]:
        if isinstance(node, CommentedMap):  # a key may be a number, true or null; the location has it as text
            part = next((key for key in node if str(key) == part), part)  # noqa: PLW2901
        if isinstance(node, CommentedMap) and part in node:
            line, node = node.lc.key(part)[0] + 1, node[part]
        elif isinstance(node, CommentedSeq) and isinstance(part, int) and part < len(node):
            line, node = node.lc.item(part)[0] + 1, node[part]
        elif part is not item["loc"][-1] or item["type"] not in ("missing",):
            continue
        keys.append(str(part))
    where = f"{name}:{line}: "
    path = ".".join(keys)
    kind = item["type"]
    if kind == "extra_forbidden":
        known = _list_known_keys(keys[:-1])
        near = difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return f"{where}unknown key {path}: {hint}"
    if kind == "missing":
        return f"{where}{path} is missing: add it"
    if kind == "union_tag_invalid":
        expected = str(item["ctx"]["expected_tags"]).replace("'", "")
        return f"{where}{path}: unknown rule {_format_found(item['ctx']['tag'])}; known rules: {expected}"
    if isinstance(item["input"], dict) and kind == "value_error":  # of a section as a whole: it names its own keys
        message = _format_message(item)
        if not path:  # of several sections together
            return f"{name}: {message}"
        named = re.split(r"[.: ]", message, maxsplit=1)[0] in _list_known_keys(keys)
        return f"{where}{path}{'.' if named else ': '}{message}"
    return f"{where}{path}: {_format_complaint(item)}"


def _format_message(item: dict[str, Any]) -> str:
    return redact(str(item["msg"]).removeprefix("Value error, "))


def _format_complaint(item: dict[str, Any]) -> str:
    message = _format_message(item)
    if item["type"] == "tuple_type":
        one = item["input"]
        message = f"a list is wanted{f'; write [{_format_found(one)}]' if isinstance(one, str | int | float) else ''}"
    return f"found {_format_found(item['input'])}: {message[0].lower() + message[1:]}"


def _list_known_keys(path: list[str]) -> list[str]:
    section: type[Section] | None = Settings
    for key in path:
        if section is None or key.isdigit():
            break
        field = section.model_fields.get(key)
        candidates = [field.annotation, *get_args(field.annotation)] if field else []
        section = next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)
    if path[:2] == ["sweep", "space"] and len(path) > 2:
        return list(SweepParameter.model_fields)
    if "sources" in path:
        return list((ColumnSettings if path[-1] == "columns" else SourceSettings).model_fields)
    if section is None or (path and path[-1].isdigit()):
        own: dict[str, tuple[type[Section], ...]] = {"hooks": (HookSettings,), "also": (AdditionalAdapterSettings,)}
        kinds = next((own[key] for key in path if key in own), RULES)
        return sorted({key for kind in kinds for key in kind.model_fields})
    return list(section.model_fields)


def dump(settings: Settings) -> str:
    """params.yaml for these settings: every knob, each with its sentence as a comment."""
    lines = ["# Settings of this project: one section a stage. Change one here, or with `dvc exp run -S train.rank=8`."]
    for name in Settings.model_fields:
        section = getattr(settings, name)
        lines += ["", f"# {(type(section).__doc__ or '').splitlines()[0]}", f"{name}:"]
        lines += _dump_section(section, 1)
    return "\n".join(lines) + "\n"


def _dump_section(section: Section, depth: int) -> list[str]:
    pad, lines, sentences = "  " * depth, [], section.sentences()
    for name in type(section).model_fields:
        value = getattr(section, name)
        comment = f"{pad}# {' '.join(sentences.get(name, '').split())}"
        if isinstance(value, Section):
            lines += [comment, f"{pad}{name}:", *_dump_section(value, depth + 1)]
        elif isinstance(value, dict) and value and all(isinstance(one, Section) for one in value.values()):
            lines += [
                comment,
                f"{pad}{name}:",
                *(f"{pad}  {_format_scalar(key)}: {_format_flow(one)}" for key, one in value.items()),
            ]
        elif isinstance(value, tuple) and value and all(map(_is_path, value)):
            lines += [comment, f"{pad}{name}: {_format_scalar(tuple(source.files for source in value))}"]
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            lines += [comment, f"{pad}{name}:"]
            lines += [
                f"{pad}  - {_format_scalar(source.files) if _is_path(source) else _format_flow(source)}"
                for source in value
            ]
        else:
            lines += [comment, f"{pad}{name}: {_format_scalar(value)}"]
    return lines


def _is_path(item: Any) -> bool:
    """Whether a source says nothing but which files."""
    return isinstance(item, SourceSettings) and item.files is not None and item == SourceSettings(files=item.files)


def _format_flow(item: Section) -> str:
    """A section on one line; of a source, hook or knob, what is not as by default."""
    whole = not isinstance(item, SourceSettings | ColumnSettings | HookSettings | SweepParameter)
    fields = type(item).model_fields
    shown = {
        k: v for k, v in item if v is not None and (whole or v != fields[k].get_default(call_default_factory=True))
    }
    if isinstance(item, MustImproveRule) and len(item.metric) == 1:
        shown["metric"] = item.metric[0]
    return (
        "{"
        + ", ".join(
            f"{k}: {_format_flow(v) if isinstance(v, Section) else _format_scalar(v)}" for k, v in shown.items()
        )
        + "}"
    )


def _quote(text: str) -> str:
    """JSON's string is YAML's too, but for line breaks and controls that only YAML knows."""
    raw = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in raw)


def _format_collection(value: tuple[Any, ...] | dict[str, Any]) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_format_scalar(k)}: {_format_scalar(v)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(_format_scalar(v) for v in value) + "]"


def _format_scalar(value: Any) -> str:
    """A YAML 1.1 *and* 1.2 spelling of a value: both kinds of reader are at work on params.yaml."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = repr(value)
        if "e" in text:  # PyYAML takes 1e-05 for text; 1.0e-05 is a number to every reader
            mantissa, exponent = text.split("e")
            text = f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent}"
        return text.removesuffix(".0")
    if isinstance(value, tuple | dict):
        return _format_collection(value)
    if isinstance(value, str):
        plain = (
            value
            and all(c.isalnum() or c in "_-./" for c in value)
            and not isinstance(parse_number(value), (int, float))
        )
        plain = plain and value.lower() not in {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
        # Only what begins with a letter can be no number and no date (0x1f, 2024-01-01).
        return value if plain and value[0].isalpha() else _quote(value)
    return str(value)


# Change values in params.yaml and nothing else of its text: comments, order, quotes and blank lines stay.

Changes = Mapping[str, Any]
"""New values by dotted key, such as `train.rank`."""


def get_value(settings: Settings, key: str) -> Any:
    """The value of a dotted key, such as `train.rank`."""
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def apply_changes(settings: Settings, changes: Changes) -> Settings:
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


def amend_text(text: str, changes: Changes) -> str:
    """The text of params.yaml with these values.

    A key that is not written there is added at the end of its section, with its sentence. The result is read again: it
    must mean what the text meant, with these changes and no other.

    Raises:
        SettingsError: the text is not valid, or cannot be changed so (an anchor that several keys share, for example).
    """
    wanted = apply_changes(parse(text), changes)
    full = dump(wanted)
    for key in changes:
        text = _set_key(text, full, key.split("."))
    try:
        exact = parse(text) == wanted
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


def _set_key(text: str, full: str, path: list[str]) -> str:
    """The text with one key as `full` has it, which names every key."""
    node, other = _compose(text), _compose(full)
    missing: list[str] = []
    for name in path:
        other = _require_child(other, name)
        found = None if missing else _find_child(node, name)
        if found is None:
            missing.append(name)
        else:
            node = found
    if missing:
        return _insert_lines(text, node, full, other, missing[:-1])
    start, stop = _find_span(text, node)
    written = full[slice(*_find_span(full, other))]
    head = text[:start]
    if start == stop or not head.rpartition("\n")[2].strip():  # `rank:` with nothing behind it, or lines of its own
        head = f"{head.rstrip()} "
    return head + written + text[stop:]


def _find_child(node: Node, name: str) -> Node | None:
    if not isinstance(node, MappingNode):
        return None
    return next((value for key, value in node.value if str(key.value) == name), None)


def _require_child(node: Node, name: str) -> Node:
    found = _find_child(node, name)
    if found is None:
        raise SettingsError(f"{name}: no such key")
    return found


def _insert_lines(text: str, node: Node, full: str, other: Node, sections: list[str]) -> str:
    """The text with new lines at the end of a section: a key and its sentence, in sections of its own if need be.

    Where the section is written on one line, the result will not mean what it should.
    """
    start, stop = _find_span(full, other)
    lines = full[: full.find("\n", stop) + 1].splitlines()
    first = full.count("\n", 0, start)
    first -= 1 if lines[first - 1].lstrip().startswith("#") else 0
    own = len(lines[first]) - len(lines[first].lstrip())
    depth = int(node.value[0][0].start_mark.column) if isinstance(node, MappingNode) and node.value else 0
    wanted = [f"{'  ' * i}{name}:" for i, name in enumerate(sections)]
    wanted += ["  " * len(sections) + line[own:] for line in lines[first:]]
    block = "".join(f"{' ' * depth}{line}\n" for line in wanted)
    place = _find_end_of_line(text, _find_span(text, node)[1])
    return text[:place] + (block if not place or text[place - 1] == "\n" else f"\n{block}") + text[place:]


def _find_span(text: str, node: Node) -> tuple[int, int]:
    """Where a node's own characters begin and end; marks of block nodes lie behind the blank lines that follow."""
    start, stop = int(node.start_mark.index), int(node.end_mark.index)
    last = node
    while isinstance(last, MappingNode) and not last.flow_style and last.value:
        last = last.value[-1][1]
        stop = int(last.end_mark.index)
    return start, start + len(text[start:stop].rstrip())


def _find_end_of_line(text: str, index: int) -> int:
    found = text.find("\n", index)
    return len(text) if found < 0 else found + 1
