"""The documentation: its links, commands, settings, paths and code exist, its pages keep their budgets, and it builds.

`.ci/reference.py` generates the pages of docs/reference/ from the source; they are not in git.
"""

import ast
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import yaml
from markdown.extensions.toc import slugify, unique

from chromium import Browser, Tab
from monitoring_cases import ALERTS
from ratchet import errors
from ratchet.cli.main import build_parser
from ratchet.cli.parser import list_flags
from ratchet.cli.troubleshooting import SECTIONS
from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.runs.prometheus_series import METRICS
from ratchet.storage.records.base import flatten

PACKAGES = ["cli", "config", "runs", "storage"]
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "ratchet"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md", *sorted((ROOT / "examples").rglob("README.md"))]
BUDGETS = yaml.safe_load(Path(__file__).with_name("documentation.yaml").read_text(encoding="utf-8"))
WRONG = set(BUDGETS["wrong_on_purpose"])
HISTORY = DOCS / "changelog.md"  # names what existed once
FENCE = re.compile(r"^( *)(`{3,})(\w*)(?: title=\"[^\"]+\")?\n(.*?)^\1\2\s*$", re.DOTALL | re.MULTILINE)
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+|\n\n|\n(?:-|\d+\.) ")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FILES = re.compile(r"\.(json|jsonl|html|md|py|yaml|yml|lock|pem|png|svg|parquet|csv|arrow|sh|gguf)$")
SHELL_ENDS = {"&&", "||", "|", ";", "#", "→", "->"}


class Code(NamedTuple):
    """A piece of code on a page: a block with its language, or inline code (`inline`)."""

    language: str
    text: str
    line: int


@cache
def load_reference() -> ModuleType:
    """Import `.ci/reference.py`."""
    spec = spec_from_file_location("reference", ROOT / ".ci" / "reference.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def write_page(name: str) -> str:
    text: str = load_reference().PAGES[name]()
    return text


@cache
def read_code(text: str) -> tuple[Code, ...]:
    """Return all code of a page, in order: fenced blocks, indented blocks, inline code."""
    found = [Code(m[3], textwrap.dedent(m[4]), text[: m.start()].count("\n") + 2) for m in FENCE.finditer(text)]
    prose = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    is_after_blank = is_block = False
    for number, line in enumerate(prose.splitlines(), 1):
        is_block = line.startswith("    ") and (is_after_blank or is_block) and bool(line.strip())
        is_after_blank = not line.strip() or is_block
        if is_block:
            found.append(Code("indented", line.strip(), number))
        else:
            found += [Code("inline", match[1], number) for match in INLINE.finditer(line)]
    return tuple(found)


def list_anchors(text: str) -> set[str]:
    """Return the anchors of a page as the site has them: of headings, and of elements with an id."""
    used: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE):
        unique(slugify(re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", title).replace("`", ""), "-"), used)
    return used | set(re.findall(r'<a id="([^"]+)"', text))


def find_broken_links(page: Path, text: str) -> Iterator[str]:
    prose = INLINE.sub("", FENCE.sub("", text))
    for target in re.findall(r"(?:\]\(|\bsrc(?:set)?=\")([^)\"\s]+)[)\"]", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        generated = file.parent == DOCS / "reference" and file.stem in load_reference().PAGES
        if not generated and not file.exists():
            yield f"{target}: no such file"
        elif anchor and file.suffix == ".md":  # `picture.png#gh-dark-mode-only` names a theme
            there = write_page(file.stem) if generated else text if file == page else file.read_text(encoding="utf-8")
            if anchor not in list_anchors(there):
                yield f"{target}: no such anchor"


@cache
def parser() -> Any:
    return build_parser()


def find_unknown_commands(text: str) -> Iterator[str]:
    """Yield the commands and flags after `ratchet` that its parser does not know."""
    for code in read_code(text):
        for line in code.text.splitlines():
            for match in re.finditer(r"(?:^|[;&|(] ?|=\S* |run )ratchet +([^`\n]*)", line):
                yield from (f"{code.line}: {fault}" for fault in _check_command(match[1]))


def _check_command(text: str) -> Iterator[str]:
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "TEXT", text)
    words = re.sub(r"[\[\](){},]|(?<=\S)\|(?=\S)", " ", re.sub(r"(?<=\S);", " ;", text)).split()
    words = words[: next((i for i, word in enumerate(words) if word in SHELL_ENDS), len(words))]
    known = parser().commands
    command = ""
    for i, word in enumerate(words):
        flag = word.partition("=")[0].rstrip(":.")
        if command == "" and not word.startswith("-") and words[i - 1] != "--project":
            if not re.fullmatch(r"[a-z]+", word):  # a placeholder such as COMMAND
                return
            if word not in known:
                yield f"ratchet {word}: no such command"
                return
            command = word
        elif flag.startswith("--") and len(flag) > 2:
            flags = list_flags(known[command]) if command else []
            if flag not in [*flags, *list_flags(parser())]:
                yield f"ratchet {command} {flag}: no such flag"


@cache
def list_settings() -> frozenset[str]:
    return frozenset(params_file.list_setting_names())


def is_setting(name: str) -> bool:
    """Return whether a dotted name is a setting or a section, or is inside a setting that is a list or a mapping."""
    parts = name.split(".")
    if name in list_settings():
        return True
    for count in range(len(parts) - 1, 1, -1):
        if (outer := ".".join(parts[:count])) in list_settings():
            return not any(other.startswith(f"{outer}.") for other in list_settings())
    return False


def find_unknown_settings(text: str) -> Iterator[str]:
    sections = "|".join(Settings.model_fields)
    for code in read_code(text):
        if code.language == "inline":
            match = re.match(rf"(?:({sections})((?:\.[a-z_0-9]+)+))(?=$|[:= ])", code.text)
            if match and match[0] not in WRONG and not FILES.search(match[0]) and not is_setting(match[0]):
                yield f"{code.line}: {match[0]}: no such setting"
        elif code.language == "yaml":
            document = yaml.safe_load(code.text)
            if isinstance(document, dict) and document and document.keys() <= {*Settings.model_fields, "version"}:
                names = flatten(document)
                yield from (
                    f"{code.line}: {name}: no such setting" for name in names if "." in name and not is_setting(name)
                )


def find_missing_files(text: str) -> Iterator[str]:
    """Yield the paths of files of the repository in inline code that do not exist."""
    for code in read_code(text):
        name = code.text.rstrip("/")
        if code.language != "inline" or not re.fullmatch(r"[\w.-]+(/[\w.-]+)+", name):
            continue
        folders = [ROOT, SOURCE] if (SOURCE / name.split("/")[0]).is_dir() else [ROOT]
        is_ours = re.match(r"(src|tests|docs|deploy|examples|benchmarks|\.ci)/", name) or len(folders) > 1
        if is_ours and FILES.search(name) and not any((folder / name).exists() for folder in folders):
            yield f"{code.line}: {name}: no such file"


def find_syntax_errors(text: str) -> Iterator[str]:
    for code in read_code(text):
        if code.language == "python":
            try:
                compile(code.text, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            except SyntaxError as error:
                yield f"{code.line}: {error}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_commands_settings_files_and_code_of_a_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    problems = [
        *find_broken_links(page, text), *find_missing_files(text), *find_syntax_errors(text),
        *([] if page == HISTORY else [*find_unknown_commands(text), *find_unknown_settings(text)]),
    ]  # fmt: skip
    assert problems == []


def test_the_checks_find_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("## A title: `x`\n")
    page = tmp_path / "page.md"
    text = "\n".join([
        "[a](there.md#a-title-x) [b](there.md#none) [c](gone.md) `[d](code.md)` [e](https://example.org/x.md)",
        "`ratchet train --profile 3` `ratchet trian` `ratchet gate --chek` `ratchet --project DIR sweep --fork --forc`",
        "", "    RATCHET__TRAIN__RANK=8 ratchet prepare --row 3; ratchet chat  # --unknown", "",
        "`train.rank` `train.rank: 8` `train.bach_size` `prepare.limits.leaked` `train.guards.typo` `train.json`",
        "`runs/journal.py` `runs/none.py` `tests/test_documentation.py` `deploy/none.yaml`", "",
        "```yaml", "train:", "  rank: 8", "  guards: {on_spkie: skip}", "```",
        "```python", "def f(:", "```", "",
    ])  # fmt: skip
    assert [fault.split(":")[0] for fault in find_broken_links(page, text)] == ["there.md#none", "gone.md"]
    assert [fault.split(": ")[1] for fault in find_unknown_commands(text)] == [
        "ratchet trian", "ratchet gate --chek", "ratchet sweep --forc", "ratchet prepare --row",
    ]  # fmt: skip
    assert [fault.split(": ")[1] for fault in find_unknown_settings(text)] == [
        "train.guards.on_spkie", "train.bach_size", "train.guards.typo",
    ]  # fmt: skip
    assert [fault.split(": ")[1] for fault in find_missing_files(text)] == ["runs/none.py", "deploy/none.yaml"]
    assert len(list(find_syntax_errors(text))) == 1


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_a_page_has_short_sentences_and_plain_words_and_names_the_next_page(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    prose = "\n".join(line for line in text.splitlines() if not line.startswith(("    ", "|", "#", "<", "!")))
    lengths = [n for sentence in SENTENCE_END.split(prose) if (n := len(sentence.split())) > 2]
    assert sum(lengths) / len(lengths) <= 18
    rules = yaml.safe_load(Path(__file__).with_name("plain_english.yaml").read_text(encoding="utf-8"))["words"]
    assert [match[0] for rule in rules if (match := re.search(rule["pattern"], prose, re.IGNORECASE))] == []
    if page.name not in BUDGETS["without_next"]:
        assert re.search(r"\b[Nn]ext:?\s", prose[-400:]), "expected a line `Next: [page](page.md)`"


def test_every_picture_is_on_a_page_with_a_description() -> None:
    texts = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = set(re.findall(r"!\[[^\]]+\]\((?:[\w.-]+/)*([\w.-]+)", texts))
    assert {path.name for suffix in ("png", "svg") for path in DOCS.rglob(f"*.{suffix}")} - shown == set()


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_a_picture_follows_the_theme_of_the_site(page: Path) -> None:
    """Each screenshot has a variant for dark pages on the next line, and each drawing has a media query."""
    pictures = re.findall(r"^!\[[^\]]+\]\(([^)]+)\)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    screenshots = [picture for picture in pictures if ".png" in picture]
    light, dark = screenshots[::2], screenshots[1::2]
    assert all(picture.endswith(".png#gh-light-mode-only") for picture in light)
    assert dark == [picture.replace(".png#gh-light", "-dark.png#gh-dark") for picture in light]
    for drawing in set(pictures) - set(screenshots):
        assert "@media (prefers-color-scheme" in (DOCS / drawing).read_text(encoding="utf-8")


def test_no_page_is_longer_than_its_budget() -> None:
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in DOCS.glob("*.md")}
    budgets = BUDGETS["words"]
    assert budgets.keys() <= words.keys()
    assert [f"{n}: {w} words" for n, w in words.items() if w > budgets.get(n, BUDGETS["default"])] == []


def test_troubleshooting_has_every_error_class() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    classes = [n for n, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, errors.RatchetError)]
    assert [name for name in classes if f"| `{name}` |" not in page] == []


def test_troubleshooting_quotes_messages_that_exist() -> None:
    """Inline code with spaces is a command, a setting with its value, or a message, with `...` for what varies."""
    texts = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    source = "\n".join(" ".join(text.split()) for text in texts)
    found = []
    for code in read_code((DOCS / "troubleshooting.md").read_text(encoding="utf-8")):
        is_command = re.match(r"(ratchet|dvc|git|hf|pip|iconv|nvidia-smi|df) ", code.text)
        is_value = is_setting(code.text.partition(": ")[0])
        if code.language == "inline" and " " in code.text and not is_command and not is_value:
            pieces = [piece.strip(" ;,:()") for piece in re.split(r"\.\.\.|\b[A-Z]{4,}\b", code.text)]
            unknown = [piece for piece in pieces if piece not in source and piece not in BUDGETS["foreign"]]
            found += [f"{code.line}: {piece}" for piece in unknown]
    assert found == []


def test_messages_link_to_sections_that_quote_them() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    texts = {}
    for section in re.split(r"^(?=#+ )", page, flags=re.MULTILINE):
        texts |= dict.fromkeys(list_anchors(section), section)
    assert [anchor for anchor in SECTIONS.values() if anchor not in list_anchors(page)] == []
    assert [part for part, anchor in SECTIONS.items() if part not in texts[anchor]] == []


def list_messages() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each string of the source that is no docstring."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", node.value


def test_messages_name_no_page_of_this_repository_and_only_settings_that_exist() -> None:
    """A project has no docs/, so messages name the documentation by `errors.DOCUMENTATION`."""
    sections = "|".join(Settings.model_fields)
    dotted = re.compile(rf"(?<![\w./-])(?:{sections})(?:\.[a-z_0-9]+)+(?![\w/(-])")
    found = []
    for place, text in list_messages():
        found += [f"{place}: {page}" for page in re.findall(r"docs/\w+\.md", text)]
        found += [
            f"{place}: {name}: no such setting"
            for name in dotted.findall(text)
            if not is_setting(name) and not FILES.search(name) and name not in BUDGETS["not_settings"]
        ]
    found += [str(path) for path in SOURCE.rglob("*.j2") if "docs/" in path.read_text(encoding="utf-8")]
    kinds = params_file.list_sections(Settings)
    found += [f"{kind.__name__}.{n}" for kind in kinds for n, text in kind.descriptions().items() if "docs/" in text]
    assert found == []


def test_the_reference_has_every_command_setting_event_and_function() -> None:
    commands, settings, journal = (write_page(name) for name in ("commands", "settings", "journal"))
    for name, subparser in parser().commands.items():
        assert f"## ratchet {name}\n" in commands
        for flag in set(list_flags(subparser)) - {"--json", "-q", "--quiet", "-v", "--verbose", "-h", "--help"}:
            assert re.search(rf"`[^`]*{flag}[ ,`]", commands), flag
    sections = {name.rpartition(".")[0] for name in list_settings()}
    assert [name for name in list_settings() - sections if f"| `{name}` |" not in settings] == []
    assert [line for line in settings.splitlines() if line.endswith("|  |")] == []  # a setting without a meaning
    source = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    events = set(re.findall(r"\bjournal\.append\(\s*\"([a-z_]+)\"", source))
    assert len(events) >= 20
    assert [event for event in sorted(events) if f"| `{event}` |" not in journal] == []
    assert "`peers`" in write_page("errors")
    metrics, alerts = write_page("metrics").split("## Alerts\n")
    assert [name for name in METRICS if f"| `{name}` |" not in metrics] == []
    assert re.findall(r"^\| `(\w+)` .*[^ ] \|$", alerts, re.MULTILINE) == list(ALERTS)
    assert "## ratchet.promote\n" in write_page("python")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.long
def test_the_site_builds_without_warnings_and_names_no_script_of_another_server(site: Path) -> None:
    pages = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    assert len(pages) > len(load_reference().PAGES) + 40
    element = r"<(?:script|img|iframe|link rel=\"?(?:stylesheet|preconnect|preload))[^>]*"
    loaded = re.compile(rf"{element}(?:src|href)=\"?https?:")
    assert [match[0] for page in pages for match in loaded.finditer(page)] == []
    troubleshooting = (site / "troubleshooting.html").read_text(encoding="utf-8")
    assert [anchor for anchor in SECTIONS.values() if f'id="{anchor}"' not in troubleshooting] == []


@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_site_shows_the_pictures_of_its_theme(site: Path, chrome: Browser, dark: bool) -> None:
    with Tab(chrome, dark=dark) as tab:
        tab.open(site / "console.html")
        tab.ask("localStorage.clear()")  # the site stores its first theme
        tab.open(site / "console.html")
        tab.wait_for(f"document.body.dataset.mdColorScheme === '{'slate' if dark else 'default'}'")
        images = "[...document.querySelectorAll('article img')].filter(one => one.checkVisibility())"
        names = tab.ask(f"{images}.map(one => one.src.split(/[/#]/).at(-2))")
    assert names == (["console-dark.png", "watch-dark.png"] if dark else ["console.png", "watch.png"])


@pytest.mark.long
def test_the_search_of_the_site_finds_pages_in_a_browser_without_another_server(site: Path, chrome: Browser) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, Tab(chrome) as tab:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        tab.open(f"{address}/index.html?q=champion")
        tab.wait_for("document.querySelectorAll('.md-search-result__item').length > 5")
        assert [url for url in tab.requests() if not url.startswith((f"{address}/", "data:"))] == []
        assert tab.complaints() == []
        server.shutdown()
