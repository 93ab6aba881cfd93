"""Checks the architecture in the source: which package imports which, which names are used, what stages depend on."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.config.extras import DISTRIBUTION, EXTRAS
from ratchet.config.settings import Settings

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ratchet"

LAYERS = [
    "cli", "api", "stages", "reports", "console", "tracking", "evaluation", "exporters", "tuning", "inference",
    "registry",
    "training", "quality_gate", "models", "runs", "data", "storage", "config", "errors",
]  # fmt: skip
"""Layers from top to bottom. A package may import itself and the packages after it in this list."""
BESIDE_ERRORS = {"http_client", "redaction"}
"""Modules of the lowest layer, in addition to `errors`."""
FORBIDDEN = {
    "torch": {"runs", "tuning", "registry", "tracking", "quality_gate", "data", "storage", "config"},
    "transformers": {"runs", "tuning", "registry", "tracking", "quality_gate", "data", "storage", "config"},
    "mlflow": {"training", "models", "runs", "tuning", "evaluation", "inference", "registry"},
    "optuna": {"training", "models", "runs", "evaluation", "inference", "registry", "tracking"},
}
# Distributions with another name than their import package, or distributions that only other libraries import.
DECLARED_AS = {
    "lm_eval": "lm-eval", "rouge_score": "rouge-score", "sklearn": "scikit-learn", "ruamel": "ruamel.yaml",
    "cyclonedx": "cyclonedx-python-lib", "packageurl": "packageurl-python", "pydantic_core": "pydantic",
    "pynvml": "nvidia-ml-py", "opentelemetry": "opentelemetry-exporter-otlp-proto-http",
}  # fmt: skip
USED_INDIRECTLY = {"dvc", "immutabledict", "nltk", "onnxscript"}
BROUGHT_BY = {
    "alembic": "mlflow",
    "anyio": "httpx2",
    "markupsafe": "jinja2",
    "numpy": "scikit-learn",
    "packageurl-python": "cyclonedx-python-lib",
    "packaging": "transformers",
    "pandas": "mlflow",
    "shtab": "dvc",
    "scipy": "scikit-learn",
    "sqlalchemy": "mlflow",
    "tokenizers": "transformers",
    "tqdm": "huggingface-hub",
}
"""Libraries that are imported and not declared, with the declared one that depends on them."""

EMPTY_WORDS = {"manager", "handler", "helper", "helpers", "util", "utils", "common", "misc", "core", "processor"}


@dataclass(frozen=True)
class Import:
    """The target of one import statement in a module of this project."""

    target: str
    line: int
    types_only: bool


def module_name(path: Path) -> str:
    """Return the name below `ratchet`, such as `runs.status`. An `__init__` has the name of its package; the root has
    no name."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


FILES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
MODULES = [name for name in FILES if name]


@cache
def tree(name: str) -> ast.Module:
    """Return the parsed source of a module."""
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


@cache
def imports(name: str) -> tuple[Import, ...]:
    """Return all imports of a module, including imports inside functions. Modules of this project are named
    `ratchet.NAME`."""
    type_checking = {
        inner
        for node in ast.walk(tree(name))
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for branch in node.body
        for inner in ast.walk(branch)
    }
    found: list[Import] = []
    for node in ast.walk(tree(name)):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{FILES[name]}:{node.lineno}: relative import; write it from `ratchet` on"
            source = str(node.module)
            members = [f"{source}.{alias.name}" for alias in node.names]
            targets = [
                m if m.removeprefix("ratchet.") in FILES and m.startswith("ratchet.") else source for m in members
            ]
        found += [Import(t, getattr(node, "lineno", 0), node in type_checking) for t in targets]
    return tuple(found)


def our_imports(name: str) -> Iterator[tuple[str, Import]]:
    """Yield the imports of this project's modules, with the module name below `ratchet`."""
    for found in imports(name):
        if found.target == "ratchet" or found.target.startswith("ratchet."):
            yield found.target.removeprefix("ratchet").removeprefix("."), found


def layer(name: str) -> str:
    """Return the layer of a module."""
    first = name.split(".", maxsplit=1)[0]
    return {"__main__": "cli", "": "api", **dict.fromkeys(BESIDE_ERRORS, "errors")}.get(first, first)


def test_the_source_is_found() -> None:
    assert {"cli.main", "config.settings", "runs.journal", "training.trainer"} <= set(MODULES)
    assert all(list(our_imports(name)) for name in ("storage.files", "config.params_file", "cli.main"))


def test_imports_go_down_only() -> None:
    problems = []
    for name in MODULES:
        for target, found in our_imports(name):
            here, there = layer(name), layer(target)
            if LAYERS.index(there) < LAYERS.index(here):
                problems.append(f"{FILES[name]}:{found.line}: {name} ({here}) imports {target} ({there})")
    assert problems == []


def test_no_import_cycle_even_through_functions() -> None:
    graph = {name: {t for t, found in our_imports(name) if not found.types_only} for name in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_the_top_level_of_the_package_stays_small() -> None:
    names = {path.name for path in SOURCE.iterdir() if path.name != "__pycache__"}
    assert len(names) <= 24, sorted(names)
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert packages == set(LAYERS) - {"api", "errors"}


def test_the_page_lists_the_packages_as_they_describe_themselves() -> None:
    script = ROOT / ".ci" / "packages.py"
    done = subprocess.run([sys.executable, str(script), "--check"], check=False)
    assert done.returncode == 0, "python .ci/packages.py writes the list"
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(page.split()) <= 1200
    named = set(re.findall(r"`([a-z_/]+\.py)`", page)) - {"tests/test_architecture.py"}
    assert named
    assert [name for name in named if not (SOURCE / name).is_file() and not (ROOT / name).is_file()] == []


def outside(name: str) -> Iterator[tuple[str, Import]]:
    """Yield the imports of libraries outside this project and the standard library."""
    for found in imports(name):
        library = found.target.split(".")[0]
        if library != "ratchet" and library not in sys.stdlib_module_names:
            yield library, found


def test_libraries_stay_out_of_packages_that_must_not_need_them() -> None:
    problems = [
        f"{FILES[name]}:{found.line}: {library} has no place in {layer(name)}"
        for name in MODULES
        for library, found in outside(name)
        if layer(name) in FORBIDDEN.get(library, set())
    ]
    assert problems == []


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def distributions(texts: Sequence[str]) -> set[str]:
    """Return the names of required distributions, without Ratchet's own extras."""
    return {name for text in texts if (name := Requirement(text).name) != DISTRIBUTION}


def test_outside_libraries_are_the_declared_dependencies() -> None:
    declared = distributions(PROJECT["dependencies"])
    optional = distributions([text for extra in EXTRAS for text in PROJECT["optional-dependencies"][extra]])
    modules = {library for name in MODULES for library, _ in outside(name)}
    imported = {DECLARED_AS.get(module, module.replace("_", "-")) for module in modules}
    assert imported - declared - optional == set(BROUGHT_BY), "imported, not declared"
    assert (declared | optional) - imported == USED_INDIRECTLY, "declared, not imported"
    assert len(declared) <= 25


@pytest.mark.parametrize(("library", "source"), BROUGHT_BY.items())
def test_undeclared_libraries_are_dependencies_of_declared_ones(library: str, source: str) -> None:
    assert source in distributions(PROJECT["dependencies"])
    required = [Requirement(text) for text in requires(source) or []]
    assert library in {found.name.lower() for found in required if found.marker is None or found.marker.evaluate()}


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_installs_the_libraries_that_messages_promise(extra: str) -> None:
    own = distributions(PROJECT["optional-dependencies"][extra])
    names = {DECLARED_AS.get(module, module.replace("_", "-")) for module in EXTRAS[extra]}
    assert names == own


def test_the_command_of_the_distribution_exists() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"ratchet"}
    module, _, function = scripts["ratchet"].partition(":")
    body = tree(module.removeprefix("ratchet.")).body
    assert function in {node.name for node in body if isinstance(node, ast.FunctionDef)}


HEAVY = ("torch", "transformers", "mlflow", "peft", "datasets", "lm_eval")


@pytest.mark.parametrize(
    "modules",
    [
        ["ratchet.cli.main"],
        ["ratchet.runs.status"],
        ["ratchet.training.worker_main", "ratchet.inference.worker_main"],
        [f"ratchet.{name}" for name in MODULES if re.fullmatch(r"runs\.\w+", name)],
        [f"ratchet.stages.{name}" for name in ("train", "sweep", "gate", "promote", "push", "audit", "generate")],
    ],
    ids=["command line", "status", "starts of workers", "runs", "stages"],
)
def test_supervisor_and_status_load_neither_torch_nor_mlflow(modules: list[str]) -> None:
    assert find_loaded(modules, HEAVY) == []


def test_a_supervisor_imports_no_numerical_library() -> None:
    modules = ["ratchet.stages.train", "ratchet.stages.callbacks", "ratchet.console.callback"]
    assert find_loaded(modules, ("numpy", "scipy", "plotly", "jinja2", "pandas", "torch")) == []


def test_help_waits_for_no_settings() -> None:
    assert find_loaded(["ratchet.cli.main"], ("pydantic", "ruamel", "ratchet.config.settings")) == []


def find_loaded(modules: Sequence[str], unwanted: Sequence[str]) -> list[str]:
    """Return which of the unwanted modules a new process has loaded after it imported `modules`."""
    code = f"import sys, {', '.join(modules)}\nprint(*(name for name in {unwanted!r} if name in sys.modules))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def names_given(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that a module defines: classes, functions, parameters, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def words(name: str) -> set[str]:
    """Split a name into lower-case words: `HTTPHandler_of` → {http, handler, of}."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}


def test_names_say_what_a_thing_is() -> None:
    problems = []
    for name, path in FILES.items():
        for given, line in ((name, 1), *names_given(tree(name))):
            if empty := words(given) & EMPTY_WORDS:
                problems.append(f"{path}:{line}: {given}: {', '.join(empty)} says nothing")
    assert problems == []


UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


RUNNERS = {"torch.load", "eval", "exec", "os.system", "os.popen", "yaml.load"}


REMOTE_CODE = {"remote_code", "card.remote_code"}
"""Expressions that carry the value of base.trust_remote_code. The value is true only for the model that the user
names."""


def dangers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield calls that execute code from a file or a text. Two cases are allowed: remote code that the user permits,
    and torch.load with weights_only=True."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if ast.unparse(node.func) in RUNNERS and not (
                ast.unparse(node.func) == "torch.load" and given.get("weights_only") == "True"
            ):
                yield ast.unparse(node.func), node.lineno
            if given.get("shell", "False") != "False":
                yield f"shell={given['shell']}", node.lineno
            if given.get("trust_remote_code", "False") not in {"False", *REMOTE_CODE}:
                yield f"trust_remote_code={given['trust_remote_code']}", node.lineno
        elif isinstance(node, ast.Constant) and "trust_remote_code=True" in str(node.value):
            yield str(node.value), node.lineno


def test_nothing_runs_code_out_of_a_file() -> None:
    problems = []
    for name, path in FILES.items():
        found = [(i.target, i.line) for i in imports(name) if i.target.split(".")[0] in UNPICKLERS]
        problems += [f"{path}:{line}: {what}" for what, line in (*found, *dangers(tree(name)))]
    assert problems == []


STAGES: dict[str, Any] = yaml.safe_load((SOURCE / "stages" / "dvc_template.yaml").read_text())["stages"]


def test_the_stages_and_their_order() -> None:
    assert list(STAGES) == ["base", "prepare", "train", "export", "evaluate", "gate"]


def test_this_repository_has_the_stages_that_new_projects_get() -> None:
    assert (ROOT / "dvc.yaml").read_bytes() == (SOURCE / "stages" / "dvc_template.yaml").read_bytes()


@pytest.mark.parametrize("stage", STAGES)
def test_one_word_five_places(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert STAGES[stage]["cmd"] == f"ratchet {stage}"
    with pytest.raises(SystemExit) as ended:
        main([stage, "--help"])
    assert ended.value.code == 0
    assert f"ratchet {stage}" in capsys.readouterr().out
    functions = {node.name for node in tree(f"stages.{stage}").body if isinstance(node, ast.FunctionDef)}
    assert stage in functions
    assert any(str(param).split(".")[0] == stage for param in STAGES[stage]["params"])
    section = Settings.model_fields[stage].annotation
    assert isinstance(section, type)
    assert section.__name__ == stage.capitalize()


def known(param: str) -> bool:
    """Return whether a dotted name, such as `prepare.columns`, is a section or a setting of Settings."""
    node: Any = Settings().model_dump()
    for key in param.split("."):
        if not isinstance(node, dict) or key not in node:
            return False
        node = node[key]
    return True


@pytest.mark.parametrize("stage", STAGES)
def test_stages_depend_on_settings_that_exist_and_never_on_the_machine(stage: str) -> None:
    for param in STAGES[stage]["params"]:
        assert known(param), f"{stage}: params: {param} is no setting"
        assert param.split(".")[0] != "machine", "how a run is carried out changes nothing that it learns"


@pytest.mark.parametrize("stage", STAGES)
def test_stages_talk_through_outs_of_stages_before_them(stage: str) -> None:
    earlier = list(STAGES)[: list(STAGES).index(stage)]
    outs = {next(iter(out)) if isinstance(out, dict) else out for name in earlier for out in STAGES[name]["outs"]}
    for dep in STAGES[stage]["deps"]:
        is_input = dep.startswith("data/") or dep in ("experiments/champion.json", "experiments/judgements.jsonl")
        assert is_input or dep in outs, f"{stage}: {dep} is made by no stage before it"


def test_params_yaml_of_this_repository_is_short_and_has_every_setting_that_stages_track() -> None:
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    settings = params_file.load(ROOT / "params.yaml")
    assert text == params_file.dump_short(settings)
    assert len(text.splitlines()) <= 60
    written = yaml.safe_load(text)
    for stage in STAGES.values():
        for param in stage["params"]:
            node = written
            for key in param.split("."):
                node = node[key]
    assert params_file.parse(params_file.dump(settings)) == settings


def test_the_schema_beside_params_yaml_is_current() -> None:
    written = json.loads((ROOT / params_file.SCHEMA_FILE).read_text(encoding="utf-8"))
    assert written == params_file.build_json_schema()
