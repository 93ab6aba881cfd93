"""Generates the reference of the documentation from the source, and a page from the notebook. A hook of mkdocs.yml.

The pages are not in git: `make docs` adds them to the site. `python .ci/reference.py DIR` writes them to a folder.
"""

import argparse
import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

import ratchet
from ratchet import api, errors
from ratchet.cli.main import COMMANDS, build_parser
from ratchet.config import defaults, params_file
from ratchet.config.fields import Section
from ratchet.config.prepare import DROP_REASONS
from ratchet.config.settings import Settings
from ratchet.runs import journal, restart_policy
from ratchet.runs.prometheus_series import METRICS
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.prometheus import QUEUE_JOBS

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "ratchet"
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
RECORDS = SOURCE / "storage" / "records"
SPECIAL = re.compile(r"[|<>]")
UNITS = {
    "_bytes_per_s": "bytes/s", "_s": "seconds", "_bytes": "bytes", "_tokens": "tokens",
    "_celsius": "degrees Celsius", "_hours": "hours", "_steps": "optimizer steps", "_characters": "characters",
}  # fmt: skip
"""Unit of a setting, by the end of its name."""


def escape(text: Any) -> str:
    """Return text for a table cell or a paragraph: one line, and nothing that Markdown takes for a column or HTML."""
    joined = " ".join(str(text).split())
    parts = joined.split("`")
    for number in range(0, len(parts), 2):  # outside of code
        parts[number] = SPECIAL.sub(lambda match: f"&#{ord(match[0])};", parts[number]).replace("_", r"\_")
        parts[number] = parts[number].replace("*", r"\*")
    return "`".join(parts)


def code(text: Any) -> str:
    """Return text as inline code, in which Markdown takes nothing for a column."""
    return f"`{text}`" if str(text) else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def read_descriptions(tree: ast.AST) -> dict[str, str]:
    """Return the docstring below each assignment of a module or class, by name."""
    found: dict[str, str] = {}
    for node, text in pairwise(getattr(tree, "body", [])):
        target = getattr(node, "target", None) or next(iter(getattr(node, "targets", [])), None)
        value = getattr(getattr(text, "value", None), "value", None)
        if isinstance(target, ast.Name) and isinstance(text, ast.Expr) and isinstance(value, str):
            found[target.id] = " ".join(value.split())
    return found


def read_list(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each entry in a docstring, and headings with an empty text.

    An entry is indented by four columns: a name, spaces, a text. Its next lines are indented further.
    """
    name, texts = "", [""]
    for line in [*docstring.splitlines(), "end"]:
        entry = re.match(r" {4}(\w+) +(\S.*)$", line)
        if (entry or not line.startswith(" ")) and name:
            yield name, " ".join(texts)
            name = ""
        if entry:
            name, texts = entry[1], [entry[2]]
        elif name:
            texts.append(line.strip())
        elif re.fullmatch(r"[A-Z]\w+", line):
            yield line, ""


def write_commands() -> str:
    """Return the page of all commands and flags."""
    parser = build_parser()
    lines = [
        "# Commands\n",
        "From `ratchet --help` and `ratchet COMMAND --help`. Flags of every command:\n",
        _write_flags(parser),
        "`--json`: standard output is one JSON document, the record that the Python function returns. `-q`, `-v` and "
        "`--json` are in every command and are left out below. Exit codes: [Exit codes and errors](errors.md).\n",
    ]
    for name, command in COMMANDS.items():
        subparser = parser.commands[name]
        usage = " ".join(subparser.format_usage().removeprefix("usage: ").split())
        usage = re.sub(r" \[-h\]| \[--json\]| \[-q \| -v\]", "", usage)
        lines += [
            f"## ratchet {name}\n",
            f"{escape(command.HELP[0].upper() + command.HELP[1:])}.\n",
            f"    {usage}\n",
            _write_flags(subparser),
        ]
    return "\n".join(lines)


def _write_flags(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if action.dest in ("help", "json") or isinstance(action, argparse._SubParsersAction):
            continue
        if action.dest in ("quiet", "verbose") and parser.prog != "ratchet":
            continue
        names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        value = action.metavar if action.option_strings and action.nargs != 0 else ""
        if action.choices and not action.metavar:
            value = "{" + ",".join(map(str, action.choices)) + "}"
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        rows.append([code(f"{names} {value if isinstance(value, str) else ''}".strip()), escape(text)])
    return table(["argument", "meaning"], rows) if rows else ""


def write_settings() -> str:
    """Return the page of all settings."""
    changes = {
        name: f"version {number - 1}: {params_file.format_value(change.before)}"
        for number, changed in sorted(defaults.CHANGES.items())
        for name, change in changed.items()
    }
    lines = [
        "# Settings\n",
        "All settings of `params.yaml`. `ratchet config` shows those of your project with their origin, and "
        "`RATCHET__TRAIN__RANK=8` or `--set train.rank=8` replaces one. A default that depends on `version:` in "
        f"params.yaml (now {defaults.VERSION}) has its earlier value behind it. Section `machine` changes neither "
        "results nor the RunId.\n",
    ]
    seen: set[type[Section]] = {Settings}
    for name in Settings.model_fields:
        section = type(getattr(Settings(), name))
        lines += [f"## {name}\n", f"{escape(inspect.getdoc(section))}\n", *_write_section(section, name, changes, seen)]
    reasons = [
        [code(name), "none" if rule.default_limit is None else f"{rule.default_limit:g}", escape(rule.meaning)]
        for name, rule in DROP_REASONS.items()
    ]
    lines += ["## Keys of prepare.limits\n", table(["reason", "default", "rows"], reasons)]
    lines.append("## Parts of lists and mappings\n")
    for kind in params_file.list_sections(Settings):
        if kind not in seen:
            lines += [f"### {kind.__name__}\n", f"{escape(inspect.getdoc(kind))}\n"]
            lines += _write_section(kind, "", changes, seen)
    return "\n".join(lines)


def _write_section(
    section: type[Section], prefix: str, changes: dict[str, str], seen: set[type[Section]]
) -> Iterator[str]:
    seen.add(section)
    rows, inner = [], []
    for name, field in section.model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        kind, default = field.annotation, field.get_default(call_default_factory=True)
        if prefix and isinstance(kind, type) and issubclass(kind, Section):
            inner.append((kind, path, section.descriptions().get(name, "")))
            continue
        schema = params_file.find_schema(tuple(path.split("."))) if prefix else section_schema(section, name)
        accepted = params_file.describe_schema(schema or {})
        shown = "required" if field.is_required() else code(_format_default(default))
        if path in changes:
            shown += f" ({escape(changes[path])})"
        if re.search("integer|number", accepted):
            accepted += next((f"; {unit}" for end, unit in UNITS.items() if name.endswith(end)), "")
        meaning = section.descriptions().get(name, "Kind of the rule." if name == "rule" else "")
        rows.append([code(path), escape(accepted), shown, escape(meaning)])
    yield table(["setting", "accepts", "default", "meaning"], rows) if rows else ""
    for kind, path, text in inner:
        yield f"### {path}\n"
        yield f"{escape(text or inspect.getdoc(kind))}\n"
        yield from _write_section(kind, path, changes, seen)


def section_schema(section: type[Section], name: str) -> dict[str, Any]:
    """Return the JSON schema of a setting of a section that is inside a list or mapping."""
    schema: dict[str, Any] = section.model_json_schema()["properties"][name]
    return schema


def _format_default(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], Section):
        return ", ".join(str(getattr(entry, next(iter(type(entry).model_fields)))) for entry in value)
    text = params_file.format_value(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def write_python() -> str:
    """Return the page of the Python API."""
    lines = ["# Python API\n", f"{escape(inspect.getdoc(api))}\n", "```python", *_indented(ratchet.__doc__), "```\n"]
    for name in sorted(api.__all__, key=str.lower):
        thing = getattr(ratchet, name)
        if not inspect.isclass(thing):
            lines += [f"## ratchet.{name}\n", _write_callable(name, thing)]
            continue
        lines += [f"## ratchet.{name}\n", _write_callable(name, thing)]
        for member, value in vars(thing).items():
            if not member.startswith("_") and inspect.getdoc(value):
                if isinstance(value, property):
                    lines.append(f"- `.{member}`: {escape(inspect.getdoc(value))}")
                else:
                    function = getattr(thing, member)
                    lines.append(f"- `.{member}{_signature(function)}`: {escape(inspect.getdoc(function))}")
        lines.append("")
    return "\n".join(lines)


def _indented(docstring: str | None) -> list[str]:
    return [line[4:] for line in inspect.cleandoc(docstring or "").splitlines() if line.startswith("    ")]


def _signature(function: Callable[..., Any]) -> str:
    text = re.sub(r"\bself(, )?", "", str(inspect.signature(function)))
    text = re.sub(r"<function (\w+) at 0x\w+>", r"\1", text)
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # a type that is written as text
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)


def _write_callable(name: str, function: Callable[..., Any]) -> str:
    """Return signature and docstring. A section such as `Raises:` becomes a list."""
    lines = ["```python", f"{name}{_signature(function)}", "```\n"]
    paragraphs = [""]
    for line in (inspect.getdoc(function) or "").splitlines():
        if re.fullmatch(r"\w+:", line):
            paragraphs += [f"**{line}**\n", ""]
        elif re.match(r" {4}\S+: ", line):
            key, _, text = line.strip().partition(": ")
            paragraphs.append(f"- `{key}`: {text}")
        elif not line.strip():
            paragraphs.append("")
        else:
            paragraphs[-1] += f" {line.strip()}" if paragraphs[-1] else line.strip()
    return "\n".join([*lines, *(p if p.startswith("**") else escape(p) for p in paragraphs), ""])


def write_errors() -> str:
    """Return the page of exit codes, error classes and failure classes."""
    texts = read_descriptions(ast.parse(inspect.getsource(errors)))
    codes = sorted((value, texts[name]) for name, value in vars(errors).items() if name.startswith("EXIT_"))
    classes = [
        kind for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.RatchetError)
    ]  # fmt: skip
    return "\n".join([
        "# Exit codes and errors\n",
        "## Exit codes\n",
        table(["code", "meaning"], [[str(number), escape(text)] for number, text in codes]),
        "## Error classes\n",
        "Python raises them; a command prints the message and ends with the exit code. With `--json` a command prints "
        '`{"error": {"type", "message", "exit_code", "help"}}`; `help` is the address of the section of '
        "[Troubleshooting](../troubleshooting.md) that says more, or null. Without `--json` it is the last line.\n",
        table(
            ["class", "exit code", "base class", "meaning"],
            [
                [code(kind.__name__), str(kind.exit_code), code(kind.__base__.__name__), escape(inspect.getdoc(kind))]
                for kind in classes
            ],
        ),
        "## Failure classes\n",
        "Why an attempt of a run ended, in `ratchet status`, in the journal (`failure_class`) and in the metric "
        "`ratchet_failures_total`. The last column is the decision of the supervisor for a first failure.\n",
        table(
            ["class", "meaning", "then"],
            [[code(name), escape(text), _decide(name)] for name, text in list_failure_classes()],
        ),
    ])  # fmt: skip


def list_failure_classes() -> list[tuple[str, str]]:
    """Return each failure class with its text."""
    docstring = next(
        text
        for text in re.findall(r'"""(.*?)"""', inspect.getsource(restart_policy), re.DOTALL)
        if "\n    out_of_memory" in text
    )
    found = list(read_list(docstring))
    if [name for name, _ in found] != list(get_args(restart_policy.FailureClass)):
        raise SystemExit("runs/restart_policy.py: the docstring of FailureClass lists other classes than its type")
    return found


def _decide(name: Any) -> str:
    """Return what the restart policy decides about a first failure with the default settings."""
    machine = Settings().machine
    exit_codes = {"data": errors.EXIT_INPUT, "too_large": errors.EXIT_INPUT}
    end = restart_policy.WorkerExit(exit_codes.get(name, errors.EXIT_BUG), name)
    decision = restart_policy.decide(end, (), machine.max_restarts, machine.restart_delay_s)
    if isinstance(decision, restart_policy.GiveUp):
        return f"the command ends with exit code {decision.exit_code}"
    if name == "peers":
        return f"restarted, up to {restart_policy.MAX_PEERS_RESTARTS} times without a new checkpoint"
    limit = "once" if name == "bug" else "up to `machine.max_restarts` times without a new checkpoint"
    return f"restarted, {limit}"


def write_journal() -> str:
    """Return the page of journal events."""
    introduction = inspect.cleandoc(journal.__doc__ or "").split("\n\nAttempts\n")[0].split("\n\n")
    lines = ["# Journal events\n", *(f"{escape(text)}\n" for text in introduction)]
    lines.append("`journal.jsonl` is in the run directory, `experiments/runs/RUN/`.\n")
    rows: list[list[str]] = []
    for name, text in read_list(journal.__doc__ or ""):
        if not text:
            lines += [table(["event", "meaning and keys"], rows)] if rows else []
            lines, rows = [*lines, f"## {name}\n"], []
        else:
            rows.append([code(name), escape(text)])
    return "\n".join([*lines, table(["event", "meaning and keys"], rows)])


def write_metrics() -> str:
    """Return the page of Prometheus metrics and alerts."""
    rows = [
        [code(name), metric.kind, escape(metric.help), ", ".join(map(code, metric.labels))]
        for name, metric in METRICS.items()
    ]
    rows.append([code(QUEUE_JOBS), "gauge", "Jobs of the queue, by state", "`queue`, `state` (no `run`)"])
    groups = yaml.safe_load((ROOT / "deploy" / "monitoring" / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    alerts = [
        [
            code(rule["alert"]),
            rule["labels"]["severity"],
            code(" ".join(rule["expr"].split())),
            re.sub(r"( on)? \{\{[^}]*\}\}", "", rule["annotations"]["description"]),
        ]
        for group in groups
        for rule in group["rules"]
    ]
    return "\n".join([
        "# Metrics and alerts\n",
        "Metrics for Prometheus, from `machine.metrics_port` or `machine.metrics_file`; "
        "[Monitoring](../monitoring.md) explains how to use them. Every metric has the label `run`.\n",
        table(["metric", "kind", "meaning", "more labels"], rows),
        "## Alerts\n",
        "From `deploy/monitoring/alerts.yml`; change the thresholds as needed.\n",
        table(["alert", "severity", "fires if", "what to do"], alerts),
    ])  # fmt: skip


def write_files() -> str:
    """Return the page of the project's files and of the records in JSON files."""
    layout = ast.parse((SOURCE / "storage" / "layout.py").read_text(encoding="utf-8"))
    lines = [
        "# JSON files\n",
        "Stages exchange records: frozen, typed JSON with a `format` number (now 1).\n",
        "## Paths of a project\n",
        table(["path", "content"], list(_list_paths(layout))),
    ]
    for path in sorted(RECORDS.glob("[a-z]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        namespace = vars(importlib.import_module(f"ratchet.storage.records.{path.stem}"))
        lines += [f"## Records: {path.stem}\n", f"{escape(ast.get_docstring(tree))}\n"]
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and issubclass(namespace[node.name], BaseModel):
                lines += [f"### {node.name}\n", f"{escape(ast.get_docstring(node))}\n", _write_fields(node)]
    return "\n".join(lines)


def _write_fields(node: ast.ClassDef) -> str:
    texts = read_descriptions(node)
    rows = [
        [code(field.target.id), code(ast.unparse(field.annotation)), escape(texts.get(field.target.id, ""))]
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if not ast.unparse(field.annotation).startswith("ClassVar")
    ]
    return table(["field", "type", "meaning"], rows)


def _list_paths(layout: ast.Module) -> Iterator[list[str]]:
    """Yield the relative path and the docstring of each path in ProjectLayout that has one."""
    project = ProjectLayout(ROOT)
    constructor = next(
        node for node in ast.walk(layout) if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    for node, text in pairwise(constructor.body):
        value = getattr(getattr(text, "value", None), "value", None)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute) and isinstance(value, str):
            path = getattr(project, node.targets[0].attr).relative_to(ROOT)
            yield [code(path), escape(value)]


def write_architectures() -> str:
    """Return the page of model architectures."""
    from ratchet.exporters.gguf.architectures import FAMILIES
    from ratchet.exporters.onnx import SUPPORTED_MODEL_TYPES

    rows = [
        [
            code(name),
            "by Ratchet" if name in FAMILIES else "only with `machine.llama_cpp`",
            "yes" if name in SUPPORTED_MODEL_TYPES else "no",
        ]
        for name in sorted({*SUPPORTED_MODEL_TYPES, *FAMILIES})
    ]
    return "\n".join([
        "# Model architectures\n",
        "Training, evaluation and export to Hugging Face's format work with every causal language model of "
        "transformers; [Base models and adapters](../models.md) lists those that tests train. GGUF and ONNX depend on "
        "`model_type` in the model's config.json. `machine.llama_cpp` names a checkout of llama.cpp, whose converter "
        "writes GGUF files of the models that it supports.\n",
        table(["model_type", "GGUF", "ONNX"], rows),
    ])  # fmt: skip


def write_notebook() -> str:
    """Return the notebook as a page: its texts, and its cells as Python blocks."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    parts = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in sources]
    return "\n\n".join(parts).replace("](../docs/", "](../").replace("](../reference/", "](") + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "commands": write_commands,
    "settings": write_settings,
    "python": write_python,
    "errors": write_errors,
    "journal": write_journal,
    "metrics": write_metrics,
    "files": write_files,
    "architectures": write_architectures,
    "notebook": write_notebook,
}
"""Writer of each page, by its file name in reference/."""


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site. MkDocs calls this function."""
    from mkdocs.structure.files import File

    for name, write in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=write()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files outside of docs/ by their text, because the site has none. MkDocs calls this function."""
    return re.sub(r"\[([^\]]+)\]\(\.\./(?!\w+\.md)([^)]+)\)", r"\1 (`\2`)", markdown)


def main() -> None:
    """Write the pages to the folder of the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in PAGES.items():
        (folder / f"{name}.md").write_text(write(), encoding="utf-8")


if __name__ == "__main__":
    main()
