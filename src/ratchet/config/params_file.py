"""Reads and validates params.yaml, writes it with a comment above every setting, and edits its text."""

import difflib
import functools
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node
from ruamel.yaml.reader import ReaderError

from ratchet.config import defaults
from ratchet.config.evaluate import AdditionalJudgeSettings
from ratchet.config.export import AdditionalAdapterSettings
from ratchet.config.fields import CHECK_ENVIRONMENT, Section, parse_number
from ratchet.config.gate import RULES, MustImproveRule
from ratchet.config.prepare import ColumnSettings, SourceSettings
from ratchet.config.promote import HookSettings
from ratchet.config.settings import Settings
from ratchet.config.sweep import SweepParameter
from ratchet.errors import SettingsError
from ratchet.redaction import SETTING_PREFIX, redact

COMMAND_LINE_OPTIONS = {"machine.nodes": "--nodes", "machine.rendezvous": "--rendezvous"}
"""Options that override a setting. Messages name both."""
BAD_VALUES = (ValueError, KeyError, TypeError, RecursionError)
"""Errors of ruamel.yaml for values that it cannot construct: an impossible date, a tag that does not fit, a list in
itself."""
FOUND_CHARACTERS = 60
"""A longer value is shortened in messages."""
COMMENT_COLUMNS = 118
SCHEMA_FILE = ".ratchet/params.schema.json"
"""Path of the JSON schema in a project; params.yaml names it for editors."""
_NO_BREAK = "\x00"
"""Replaces a space at which a comment must not be wrapped."""
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_NAMES = {
    "integer": "an integer", "number": "a number", "boolean": "true or false", "null": "null", "object": "a mapping",
    "array": "a list", "string": "text",
}  # fmt: skip
"""Signs and words for keys and types of JSON schema."""

Changes = Mapping[str, Any]
"""New values by dotted name, such as `train.rank`."""


def load(
    path: Path, overrides: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> Settings:
    """Read and validate params.yaml.

    Args:
        path: the file.
        overrides: values that replace those of the file and the environment, by dotted name: `{"train.rank": 16}`.
        environment: environment variables; those that begin with SETTING_PREFIX replace values of the file.

    Raises:
        SettingsError: the message lists every problem with file, line, setting, value found, and value expected.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    return parse(text, path.name, overrides, environment)


def parse(
    text: str,
    name: str = "params.yaml",
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Validate the text of a params.yaml as `load` does. `name` is the file name in messages; empty: messages have no
    file and no line."""
    document, plain = _read_document(text, name)
    version = _pop_version(document, plain, name)
    overrides = {} if overrides is None else overrides
    if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
        raise SettingsError(f"overrides: found {overrides!r}; expected a mapping of names such as train.rank to values")
    if "" in overrides:
        raise SettingsError("overrides: found an empty name; expected a setting such as train.rank")
    overrides = _expand_sections(overrides)
    variables = read_variables(environment or {})
    labels = {key: f"override {key}" for key in overrides}  # first, because they win
    labels |= {key: name for key, name in _find_variables(variables).items() if key not in overrides}
    for source in (_expand_sections(variables), overrides):
        for key, value in source.items():
            _override(plain, key, value, labels[key])
    defaults.fill_old_defaults(plain, version)
    try:
        return Settings.model_validate(plain, context={CHECK_ENVIRONMENT: True})
    except ValidationError as error:
        problems: dict[str, None] = {}  # ordered; several branches of a union may reject a value with the same line
        for item in map(dict, error.errors()):
            overridden = next((key for key in labels if _is_caused_by(item, key)), None)
            if overridden is None:
                replaced = f" (with other values of {', '.join(labels)})" if labels else ""
                problems[_format_problem(document, item, name) + replaced] = None
            else:
                problems[_format_override_problem(overridden, labels[overridden], plain, item)] = None
        raise SettingsError("\n".join(problems)) from None


def parse_changes(items: Sequence[str]) -> dict[str, Any]:
    """Return the values of `KEY=VALUE` items, which are written as in params.yaml, by key. Raises SettingsError."""
    changes: dict[str, Any] = {}
    for item in items:
        key, sign, text = (part.strip() for part in item.partition("="))
        if not sign or not key or not text:
            raise SettingsError(f"--set {item}: expected KEY=VALUE, such as train.learning_rate=1e-4")
        if key in changes:
            raise SettingsError(f"--set {item}: found {key} twice; remove one")
        changes[key] = _parse_value(text, f"--set {item}")
    return changes


def _parse_value(text: str, label: str) -> Any:
    """Return a value that is written as in params.yaml. Raises SettingsError, whose message begins with the label."""
    try:
        return _convert_to_builtin(YAML(typ="safe", pure=True).load(text))
    except (YAMLError, *BAD_VALUES):
        raise SettingsError(f"{label}: found {_format_found(text)}; expected a value as in params.yaml") from None


def name_variable(key: str) -> str:
    """Return the environment variable of a setting: `RATCHET__TRAIN__RANK` for `train.rank`."""
    return SETTING_PREFIX + key.upper().replace(".", "__")


def read_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of settings in environment variables, by dotted name; a section precedes its settings.

    Raises:
        SettingsError: a variable is not written as `RATCHET__TRAIN__RANK`, or its value is empty or no YAML.
    """
    for variable in environment:
        if variable.upper().startswith("RATCHET_"):  # without this check, RATCHET_TRAIN__RANK would silently do nothing
            meant = _list_variable_spellings().get(variable.upper().replace("_", ""))
            if meant not in (None, variable):
                raise SettingsError(f"{variable}: unknown variable; did you mean {meant}?")
    values: dict[str, Any] = {}
    for variable in sorted(name for name in environment if name.startswith(SETTING_PREFIX)):
        text = environment[variable].strip()
        if not text:
            raise SettingsError(f"{variable}: found nothing; unset it, or write null for no value")
        key = variable.removeprefix(SETTING_PREFIX).lower().replace("__", ".")
        values[key] = _parse_value(text, variable)
    return values


def _read_document(text: str, name: str) -> tuple[CommentedMap, dict[str, Any]]:
    """Return a params.yaml as ruamel's document, which knows lines, and as built-in types. Raises SettingsError."""
    try:
        document = YAML(typ="rt").load(text)
        plain = _convert_to_builtin(document)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise SettingsError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from None
    except ReaderError as error:
        number = text[: error.position].count("\n") + 1
        raise SettingsError(
            f"{name}:{number}: found character U+{ord(text[error.position]):04X}, which YAML does not allow; remove it"
        ) from None
    except YAMLError as error:
        raise SettingsError(f"{name}: not valid YAML: {error}") from None
    except BAD_VALUES as error:
        raise SettingsError(
            f"{name}: a value cannot be read ({type(error).__name__}: {error}); check tags (!), dates, very long "
            "numbers and nested lists"
        ) from None
    if not isinstance(document, CommentedMap):
        raise SettingsError(f"{name}: found {_format_found(document)}; expected sections such as `train:`")
    return document, plain


def _pop_version(document: CommentedMap, plain: dict[str, Any], name: str) -> int:
    """Remove the version of the defaults from the plain document and return it. Raises SettingsError."""
    if defaults.KEY not in plain:
        return 1
    line = f"{name}:{document.lc.key(defaults.KEY)[0] + 1}: " if name else ""
    return defaults.check_version(plain.pop(defaults.KEY), f"{line}{defaults.KEY}")


class EffectiveSetting(NamedTuple):
    """A setting with its value and the place where the value comes from."""

    name: str
    value: str
    """As in params.yaml."""
    origin: str
    """`default`, `default of version N`, file and line, an environment variable, or `--set`."""


def explain(
    text: str,
    name: str = "params.yaml",
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, list[EffectiveSetting]]:
    """Return the version of the defaults, and every setting with its effective value and its origin.

    Raises:
        SettingsError: the text, an override or a variable is not valid.
    """
    settings = parse(text, name, overrides, environment)
    replaced = _find_variables(read_variables(environment or {}))
    replaced |= dict.fromkeys(_expand_sections(overrides or {}), "--set")
    document, plain = _read_document(text, name)
    version = _pop_version(document, plain, name)
    old_defaults = defaults.fill_old_defaults(plain, version)

    def find_origin(key: str) -> str:
        for part in (key, *(key.rsplit(".", count)[0] for count in range(1, key.count(".") + 1))):
            if part in replaced:
                return replaced[part]
        if key in old_defaults:
            return f"default of version {version}"
        node: Any = document
        line = None
        for part in key.split("."):
            if not isinstance(node, CommentedMap) or part not in node:
                return "default"
            line, node = node.lc.key(part)[0] + 1, node[part]
        return f"{name}:{line}"

    def walk(section: Section, prefix: str) -> Iterator[EffectiveSetting]:
        for field in type(section).model_fields:
            value, key = getattr(section, field), f"{prefix}{field}"
            if isinstance(value, Section):
                yield from walk(value, f"{key}.")
            else:
                yield EffectiveSetting(key, format_value(value), find_origin(key))

    return version, list(walk(settings, ""))


_SHORT_FORMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Prepare", "sources", {"type": "string"}),
    ("LeakageSettings", "tasks", {"type": "string"}),
    ("LeakageSettings", "files", {"type": "string"}),
    ("MustImproveRule", "metric", {"type": "string"}),
    ("BudgetRule", "maximum", {"type": "string"}),
    ("Export", "max_shard_size", {"type": "string"}),
    ("Machine", "replica_bytes_per_s", {"type": "string"}),
    ("Machine", "log_max_bytes", {"type": "string"}),
    ("Machine", "nodes", {"type": "integer"}),
)
"""Section, setting and type of values that are accepted too: one item instead of a list, a size such as 4GB, a number
instead of a text."""


def build_json_schema() -> dict[str, Any]:
    """Return the JSON schema of params.yaml, with the descriptions of settings, for editors."""
    schema = json.loads(json.dumps(_build_json_schema()))
    schema["properties"][defaults.KEY] = {
        "type": "integer", "minimum": 1, "maximum": defaults.VERSION,
        "description": "Version of the defaults of settings that this file leaves out.",
    }  # fmt: skip
    definitions = schema["$defs"]
    for section, field, accepted in _SHORT_FORMS:
        found = definitions[section]["properties"][field]
        description = {key: found.pop(key) for key in ("default", "title") if key in found}
        definitions[section]["properties"][field] = {"anyOf": [dict(found), accepted], **description}
    sources = definitions["Prepare"]["properties"]["sources"]
    sources["anyOf"][0]["items"] = {"anyOf": [sources["anyOf"][0]["items"], {"type": "string"}]}
    for kind in list_sections(Settings):
        properties = definitions.get(kind.__name__, schema)["properties"]
        for field_name, text in kind.descriptions().items():
            if field_name in properties:
                properties[field_name]["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Ratchet: params.yaml"}


def list_sections(section: type[Section]) -> list[type[Section]]:
    """Return a section and all sections inside its fields, also in lists and mappings."""
    found = {section: None}

    def visit(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, Section) and annotation not in found:
            found[annotation] = None
            for field in annotation.model_fields.values():
                visit(field.annotation)
        for part in get_args(annotation):
            visit(part)

    for field in section.model_fields.values():
        visit(field.annotation)
    return list(found)


def _override(sections: dict[str, Any], name: str, value: Any, label: str) -> None:
    """Set a value by its dotted name. Raises SettingsError if the name goes through a setting that is not a section."""
    keys = name.split(".")
    for key in keys[:-1]:
        sections = sections.setdefault(key, {})
        if not isinstance(sections, dict):
            raise SettingsError(f"{label}: unknown setting; {key} is not a section")
    sections[keys[-1]] = _convert_to_builtin(value)


def _find_variables(variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variable that sets each setting, by dotted name."""
    return {key: name_variable(name) for name, value in variables.items() for key in _expand_sections({name: value})}


def _expand_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each value of a whole stage's section, such as `train`, by its settings, so that the section's other
    settings keep their values."""
    settings: dict[str, Any] = {}
    for name, value in values.items():
        if name in Settings.model_fields and isinstance(value, Mapping):
            settings |= {f"{name}.{key}": part for key, part in value.items()}
        else:
            settings[name] = value
    return settings


def _is_caused_by(item: dict[str, Any], key: str) -> bool:
    """Return whether pydantic's problem is about this setting, a part of its value, or one of its sections."""
    keys, location = tuple(key.split(".")), tuple(item["loc"])
    if item["type"] == "extra_forbidden" and len(location) < len(keys):
        return keys[: len(location)] == location
    if item["type"] == "value_error" and len(location) == len(keys) - 1:  # of a section, about one of its settings
        return keys[:-1] == location and _clean_message(item).startswith(f"{keys[-1]}: ")
    return location[: len(keys)] == keys


def _convert_to_builtin(node: Any) -> Any:
    """Convert ruamel's containers and scalars, and those of overrides (numpy's numbers, paths), to built-in types,
    because pydantic's strict mode requires them."""
    if isinstance(node, Mapping):
        return {str(key): _convert_to_builtin(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_convert_to_builtin(value) for value in node]
    kinds: tuple[tuple[type, Callable[[Any], Any]], ...] = (
        (bool, bool), (Integral, int), (Real, float), (str, str), (PurePath, str),
    )  # fmt: skip
    for abstract, kind in kinds:
        if isinstance(node, abstract):
            return kind(node)
    return node


# Messages: `params.yaml:52: train.rank: found 'eight'; expected an integer >= 1`.


def _format_problem(document: CommentedMap, item: dict[str, Any], name: str) -> str:
    """Format one of pydantic's errors as one line."""
    keys, line = [], 1
    for key, node in _walk_location(document, item):
        keys.append(str(key))
        if isinstance(node, CommentedMap) and key in node and node.lc.data:  # an ordered map has no lines
            line = node.lc.key(key)[0] + 1
        elif isinstance(node, CommentedSeq):
            line = node.lc.item(key)[0] + 1
    path = ".".join(keys)
    if not path:  # a problem of several sections, whose message names the setting
        return f"{name}: {_clean_message(item)}" if name else _clean_message(item)
    complaint = _format_complaint(path, keys, item)
    return f"{name}:{line}: {complaint}" if name else complaint


def _format_override_problem(key: str, label: str, sections: dict[str, Any], item: dict[str, Any]) -> str:
    """Format one of pydantic's errors about an override. If the value is a mapping or a list, the line names the part
    of it."""
    option = COMMAND_LINE_OPTIONS.get(key) if label.startswith("override ") else None
    name = f"{option} ({key})" if option else label
    if item["type"] == "value_error" and len(item["loc"]) < len(key.split(".")):
        return f"{name}: {_clean_message(item).partition(': ')[2]}"
    parts = [str(part) for part, _ in _walk_location(sections, item)][len(key.split(".")) :]
    path = f"{name}: {'.'.join(parts)}" if parts else name
    return _format_complaint(path, [str(part) for part in item["loc"]], item)


def _walk_location(node: Any, item: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each key or index on the way to an error, with the mapping or list that has it; a missing key at the end
    too.

    The location of pydantic's error also has labels of union branches ('must_improve', 'str', 'tuple[...]'), which are
    not in the file.
    """
    for part in item["loc"]:
        if isinstance(node, dict):  # a key may be a number, true or null, which the location has as text
            part = next((key for key in node if str(key) == part), part)  # noqa: PLW2901
        is_key = isinstance(node, dict) and part in node
        is_index = isinstance(node, list | tuple) and isinstance(part, int) and part < len(node)
        if is_key or is_index:
            yield part, node
            node = node[part]
        elif part is item["loc"][-1] and item["type"] == "missing":
            yield part, node


def _format_complaint(path: str, keys: list[str], item: dict[str, Any]) -> str:
    """Return a line with the setting, the value found and the value expected."""
    kind = item["type"]
    if kind == "extra_forbidden":
        section = _find_section(keys[:-1])
        if section is not None and keys[-1] in section.__class_vars__:
            constant = format_value(getattr(section, keys[-1]))
            text = f"found {_format_found(item['input'])}; it is no setting any more and always {constant}; remove it"
        else:
            in_list = any(key.isdecimal() for key in keys)  # no variable sets one item of a list
            is_variable = path.startswith(SETTING_PREFIX) and not in_list
            text = f"unknown setting; {_suggest_key(keys, is_variable)}"
    elif kind == "literal_error" and item["loc"][-1:] == ("[key]",):  # an unknown key of a mapping
        text = f"unknown; expected one of: {item['ctx']['expected']!s}"
    elif kind == "union_tag_not_found":
        names = [name for rule in RULES for name in get_args(rule.model_fields["rule"].annotation)]
        path, text = f"{path}.rule", f"missing; expected one of: {', '.join(names)}"
    elif kind == "union_tag_invalid":
        expected = str(item["ctx"]["expected_tags"]).replace("'", "")
        path, text = f"{path}.rule", f"found {_format_found(item['ctx']['tag'])}; expected one of: {expected}"
    elif kind == "value_error" and isinstance(item["input"], dict):  # from a section; it may begin with a key of it
        text = _clean_message(item)
        if re.split(r"[.: ]", text, maxsplit=1)[0] in _list_known_keys(keys):
            return f"{path}.{text}"
    else:
        found = "missing" if kind == "missing" else f"found {_format_found(item['input'])}"
        expected = _clean_message(item) if kind == "value_error" else f"expected {_describe_expected(item)}"
        is_unquoted = kind == "string_type" and isinstance(item["input"], int | float)
        text = f"{found}; {expected}{' (in quotes)' if is_unquoted else ''}"
    return f"{path}: {text}"


def _suggest_key(keys: list[str], is_variable: bool = False) -> str:
    """Return a hint for an unknown key: a section that has it, the nearest name in the same section, or all names.

    With `is_variable` the names are those of environment variables.
    """
    *path, key = keys
    known = _list_known_keys(path)
    if "." in key and key in list_setting_names():
        section, _, name = key.rpartition(".")
        return f"write {name} below {section}, without the dot"
    elsewhere = sorted((n for n in list_setting_names() if n.endswith(f".{key}")), key=lambda name: name.count("."))
    if elsewhere and not path:
        nearest = elsewhere[:3]
    else:
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        if is_variable:
            nearest, known = ([".".join([*path, name]) for name in names] for names in (nearest, known))
    if is_variable:
        nearest, known = (list(map(name_variable, names)) for names in (nearest, known))
    return f"did you mean {' or '.join(nearest)}?" if nearest else f"known: {', '.join(known)}"


@functools.cache
def list_setting_names() -> tuple[str, ...]:
    """Return the dotted names of all settings that every project has."""

    def walk(section: type[Section], prefix: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            yield prefix + name
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                yield from walk(field.annotation, f"{prefix}{name}.")

    return tuple(walk(Settings, ""))


@functools.cache
def _list_variable_spellings() -> dict[str, str]:
    """Return the variable of each setting by its name without underscores."""
    variables = [name_variable(name) for name in list_setting_names() if "." in name]
    return {variable.replace("_", ""): variable for variable in variables}


def _format_found(value: Any) -> str:
    text = redact("nothing" if value is None else repr(value))
    text = re.sub(r"(://[^?'\"\s]*\?)[^'\"\s]*", r"\1***", text)  # a query may contain a key
    return text if len(text) <= FOUND_CHARACTERS else text[: FOUND_CHARACTERS - 3] + "..."


def _clean_message(item: dict[str, Any]) -> str:
    return redact(str(item["msg"]).removeprefix("Value error, "))


def _describe_expected(item: dict[str, Any]) -> str:
    """Describe the accepted values by the JSON schema of the setting. Without a schema, use pydantic's message."""
    text = describe_schema(schema) if (schema := find_schema(item["loc"])) else ""
    if not text:
        message = _clean_message(item)
        text = message[0].lower() + message[1:]
    if text in ("a list", "a non-empty list") and isinstance(item["input"], str | int | float):
        words = re.findall(r"[^\s,\[\]]+", item["input"]) if isinstance(item["input"], str) else [item["input"]]
        text += f" such as [{', '.join(map(_format_found, words))}]" if words else ""
    return text


@functools.cache
def _build_json_schema() -> dict[str, Any]:
    return Settings.model_json_schema()


def find_schema(location: tuple[int | str, ...]) -> dict[str, Any] | None:
    """Return the JSON schema of the setting at pydantic's location; None if the setting has no schema."""
    root = _build_json_schema()

    def resolve(schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
        return schema

    def expand(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        schema = resolve(schema)
        yield schema
        for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from expand(branch)

    node: dict[str, Any] = root
    for part in location:
        for branch in expand(node):
            tags = branch.get("discriminator", {}).get("mapping", {})
            if part in tags:
                node = resolve({"$ref": tags[part]})
            elif part in branch.get("properties", {}):
                node = branch["properties"][part]
            elif isinstance(part, int) and "items" in branch:
                node = branch["items"]
            elif isinstance(part, int) and part < len(branch.get("prefixItems", ())):
                node = branch["prefixItems"][part]
            elif isinstance(part, str) and isinstance(branch.get("additionalProperties"), dict):
                node = branch["additionalProperties"]
            else:
                continue
            break  # parts that match nothing are labels of union branches
    return resolve(node)


def describe_schema(schema: dict[str, Any]) -> str:
    """Describe a JSON schema in words; empty if it restricts nothing."""
    branches = schema.get("anyOf") or schema.get("oneOf") or [schema]
    words = [branch["const"] for branch in branches if "const" in branch]
    words += [word for branch in branches for word in branch.get("enum", ())]
    texts = [_describe_type(branch) for branch in branches if not {"const", "enum"} & branch.keys()]
    if len(words) > 1:
        words = [f"one of: {', '.join(map(str, words))}"]
    return " or ".join(dict.fromkeys(filter(None, [*texts, *map(str, words)])))


def _describe_type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return describe_schema(schema)
    text = "a mapping" if "$ref" in schema else _NAMES.get(schema.get("type", ""), "")
    if "pattern" in schema:
        text += f" that matches {schema['pattern']}"
    if schema.get("minLength") or schema.get("minItems"):
        text = f"a non-empty {text[2:]}" if text.startswith("a ") else f"non-empty {text}"
    bounds = [f"{sign} {schema[name]:g}" for name, sign in _BOUNDS.items() if name in schema]
    return " ".join([text, " and ".join(bounds)]).strip()


def _find_section(path: list[str]) -> type[Section] | None:
    """Return the class of the section at a path; None if there is none."""
    section: type[Section] | None = Settings
    for key in path:
        if section is None or key.isdigit():
            break
        field = section.model_fields.get(key)
        candidates = [field.annotation, *get_args(field.annotation)] if field else []
        section = next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)
    return section


def _list_known_keys(path: list[str]) -> list[str]:
    section = _find_section(path)
    if path[:2] == ["sweep", "space"] and len(path) > 2:
        return list(SweepParameter.model_fields)
    if "sources" in path:
        return list((ColumnSettings if path[-1] == "columns" else SourceSettings).model_fields)
    if section is None or (path and path[-1].isdigit()):
        lists: dict[str, tuple[type[Section], ...]] = {
            "hooks": (HookSettings,),
            "additional_adapters": (AdditionalAdapterSettings,),
            "additional_judges": (AdditionalJudgeSettings,),
        }
        kinds = next((lists[key] for key in path if key in lists), RULES)
        return sorted({key for kind in kinds for key in kind.model_fields})
    return list(section.model_fields)


# Writing: every setting with its description and default as a comment, or those that people change.

SHORT = frozenset({
    "base.source",
    "prepare.sources", "prepare.record_schema", "prepare.columns", "prepare.task", "prepare.split",
    "prepare.max_tokens",
    "train.quantization", "train.rank", "train.alpha", "train.epochs", "train.batch_size", "train.learning_rate",
    "train.seed",
    "evaluate.generation_rows", "evaluate.max_new_tokens", "evaluate.metrics", "evaluate.harness",
    "export.gguf", "export.onnx",
    "gate.rules", "promote.model_name", "sweep.space", "sweep.trials",
    "machine.device", "machine.micro_batch_size", "machine.tracking_uri", "machine.replica",
})  # fmt: skip
"""Settings that a new params.yaml has: those that people change, and those that dvc.yaml tracks one by one."""


def dump_short(settings: Settings) -> str:
    """Format the settings in SHORT and all that differ from their defaults, each with a short comment."""
    lines = [
        f"# yaml-language-server: $schema={SCHEMA_FILE}",
        f"{defaults.KEY}: {defaults.VERSION}  # of the defaults of all settings that are not here: `ratchet config`",
    ]
    for name in Settings.model_fields:
        if body := list(_dump_short_section(name, getattr(settings, name))):
            lines += ["", f"{name}:", *body]
    return "\n".join(lines) + "\n"


def _dump_short_section(prefix: str, section: Section) -> Iterator[str]:
    descriptions = section.descriptions()
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if f"{prefix}.{name}" not in SHORT and value == field.get_default(call_default_factory=True):
            continue
        first, *rest = _format_entry(name, value, 1)
        parts = (descriptions.get(name, "").split(mark, 1)[0].rstrip(".") for mark in (". ", "; ", ": "))
        comments = (
            part
            for part in parts
            if part and part.count("(") == part.count(")") and len(first) + len(part) + 3 <= COMMENT_COLUMNS
        )
        yield f"{first}  # {comment}" if (comment := next(comments, "")) else first
        yield from rest


def dump(settings: Settings) -> str:
    """Format settings as params.yaml, with a comment above each setting."""
    lines = [
        "# Settings of this project. Edit them here, or override one with `dvc exp run -S train.rank=8`.",
        f"{defaults.KEY}: {defaults.VERSION}",
    ]
    for name in Settings.model_fields:
        section = getattr(settings, name)
        lines += ["", f"# {(type(section).__doc__ or '').splitlines()[0]}", f"{name}:"]
        lines += _dump_section(section, 1)
    return "\n".join(lines) + "\n"


def _dump_section(section: Section, depth: int) -> list[str]:
    pad, lines, descriptions = "  " * depth, [], section.descriptions()
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        text = descriptions.get(name, "")
        default = field.get_default(call_default_factory=True)
        if default not in (None, (), {}) and not isinstance(value, Section) and not _contains_section(default):
            text += f" Default: {_format_scalar(default)}.".replace(": ", f":{_NO_BREAK}")
        wrapped = textwrap.wrap(text, COMMENT_COLUMNS - len(pad), break_on_hyphens=False)
        lines += [f"{pad}# {line.replace(_NO_BREAK, ' ')}" for line in wrapped]
        if isinstance(value, Section):
            lines += [f"{pad}{name}:", *_dump_section(value, depth + 1)]
        else:
            lines += _format_entry(name, value, depth)
    return lines


def _format_entry(name: str, value: Any, depth: int) -> list[str]:
    """Return the lines of a setting; a section is written on one line."""
    pad = "  " * depth
    if isinstance(value, dict) and _contains_section(value):
        return [
            f"{pad}{name}:",
            *(f"{pad}  {_format_scalar(key)}: {_format_flow(item)}" for key, item in value.items()),
        ]
    if isinstance(value, tuple) and _contains_section(value) and not all(map(_is_path, value)):
        return [f"{pad}{name}:", *(f"{pad}  - {format_value(item)}" for item in value)]
    return [f"{pad}{name}: {format_value(value)}"]


def format_value(value: Any) -> str:
    """Format a value on one line."""
    if _is_path(value):
        return _format_scalar(value.files)
    if isinstance(value, Section):
        return _format_flow(value)
    if isinstance(value, dict) and _contains_section(value):
        return "{" + ", ".join(f"{_format_scalar(key)}: {_format_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple) and _contains_section(value):
        return "[" + ", ".join(map(format_value, value)) + "]"
    return _format_scalar(value)


def _contains_section(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return any(isinstance(item, Section) for item in items)


def _is_path(item: Any) -> bool:
    """Return whether the item is a source that sets only its files."""
    return isinstance(item, SourceSettings) and item.files is not None and item == SourceSettings(files=item.files)


def _format_flow(item: Section) -> str:
    """Format a section on one line. A source, hook or sweep parameter shows only values that differ from defaults."""
    shows_defaults = not isinstance(item, SourceSettings | ColumnSettings | HookSettings | SweepParameter)
    fields = type(item).model_fields
    shown = {
        key: value
        for key, value in item
        if value != (default := fields[key].get_default(call_default_factory=True))
        or (shows_defaults and default is not None)
    }
    if isinstance(item, MustImproveRule) and len(item.metric) == 1:
        shown["metric"] = item.metric[0]
    return (
        "{"
        + ", ".join(
            f"{key}: {_format_flow(value) if isinstance(value, Section) else _format_scalar(value)}"
            for key, value in shown.items()
        )
        + "}"
    )


def _quote(text: str) -> str:
    """Quote text as JSON, which YAML reads too, and escape the control characters that JSON keeps."""
    raw = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in raw)


def _format_collection(value: tuple[Any, ...] | dict[str, Any]) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_format_scalar(k)}: {_format_scalar(v)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(_format_scalar(v) for v in value) + "]"


def _format_scalar(value: Any) -> str:
    """Format a value so that YAML 1.1 and YAML 1.2 readers read the same value: both kinds read params.yaml."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = repr(value)
        if "e" in text:  # PyYAML reads 1e-05 as text, but all readers read 1.0e-05 as a number
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
        # Text that starts with another character may be a number or a date (0x1f, 2024-01-01).
        return value if plain and value[0].isalpha() else _quote(value)
    return str(value)


# Editing: changes values in the text of params.yaml, and keeps comments, order, quotes and blank lines.


def get_value(settings: Settings, key: str) -> Any:
    """Return the value of a setting by its dotted name, such as `train.rank`."""
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def apply_changes(settings: Settings, changes: Changes) -> Settings:
    """Return these settings with other values. Raises SettingsError if a value is not valid."""
    tree = settings.model_dump()
    for key, value in changes.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[leaf] = value
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        problems: dict[str, None] = {}  # ordered, without duplicates
        for details in error.errors():
            item = dict(details)
            keys = [str(part) for part in details["loc"]]
            problems[_format_complaint(".".join(keys), keys, item) if keys else _clean_message(item)] = None
        raise SettingsError("\n".join(problems)) from None


def amend_text(text: str, changes: Changes) -> str:
    """Change values in the text of a params.yaml.

    A setting that the text does not have is added at the end of its section, with its comment. The result is parsed
    again: it must equal the old settings with these changes and no others.

    Raises:
        SettingsError: the text is not valid, or cannot be changed like this (for example, keys share an anchor).
    """
    changed_settings = apply_changes(parse(text), changes)
    full = dump(changed_settings)
    for key in changes:
        text = _set_key(text, full, key.split("."))
    try:
        is_exact = parse(text) == changed_settings
    except SettingsError:
        is_exact = False
    if not is_exact:
        raise SettingsError(
            f"params.yaml: {', '.join(changes)}: cannot be changed without touching other settings (an anchor, or a "
            "section on one line?); edit the file by hand"
        )
    return text


def _compose(text: str) -> Node:
    root: Node = YAML(typ="rt", pure=True).compose(text)
    return root


def _set_key(text: str, full: str, path: list[str]) -> str:
    """Set one key of the text to its value in `full`, which has every key."""
    node, full_node = _compose(text), _compose(full)
    missing: list[str] = []
    for name in path:
        full_node = _require_child(full_node, name)
        child = None if missing else _find_child(node, name)
        if child is None:
            missing.append(name)
        else:
            node = child
    if missing:
        return _insert_lines(text, node, full, full_node, missing[:-1])
    start, end = _find_span(text, node)
    value = full[slice(*_find_span(full, full_node))]
    before = text[:start]
    if start == end or not before.rpartition("\n")[2].strip():  # `rank:` without a value, or a value on its own lines
        before = f"{before.rstrip()} "
    return before + value + text[end:]


def _find_child(node: Node, name: str) -> Node | None:
    if not isinstance(node, MappingNode):
        return None
    return next((value for key, value in node.value if str(key.value) == name), None)


def _require_child(node: Node, name: str) -> Node:
    child = _find_child(node, name)
    if child is None:
        raise SettingsError(f"{name}: unknown setting")
    return child


def _insert_lines(text: str, node: Node, full: str, full_node: Node, sections: list[str]) -> str:
    """Insert a key with its comment at the end of a section, inside new sections if needed.

    If the section is written on one line, the result is not valid. `amend_text` detects that.
    """
    start, end = _find_span(full, full_node)
    lines = full[: full.find("\n", end) + 1].splitlines()
    first = full.count("\n", 0, start)
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    indent = len(lines[first]) - len(lines[first].lstrip())
    depth = int(node.value[0][0].start_mark.column) if isinstance(node, MappingNode) and node.value else 0
    inserted = [f"{'  ' * i}{name}:" for i, name in enumerate(sections)]
    inserted += ["  " * len(sections) + line[indent:] for line in lines[first:]]
    block = "".join(f"{' ' * depth}{line}\n" for line in inserted)
    position = _find_end_of_line(text, _find_span(text, node)[1])
    return text[:position] + (block if not position or text[position - 1] == "\n" else f"\n{block}") + text[position:]


def _find_span(text: str, node: Node) -> tuple[int, int]:
    """Return start and end of a node's own characters. A block node's end mark is after the blank lines below it."""
    start, end = int(node.start_mark.index), int(node.end_mark.index)
    last = node
    while isinstance(last, MappingNode) and not last.flow_style and last.value:
        last = last.value[-1][1]
        end = int(last.end_mark.index)
    return start, start + len(text[start:end].rstrip())


def _find_end_of_line(text: str, index: int) -> int:
    end = text.find("\n", index)
    return len(text) if end < 0 else end + 1
