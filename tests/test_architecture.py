"""The laws of the house (docs/architecture.md), read off the source: who imports whom, how long, under which names."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet import cli, config, params

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ratchet"

# `store` is how the two MLflow services reach their one database: they never import each other.
VOCABULARY = {
    "amend", "card", "config", "config_data", "config_endpoint", "config_evaluation", "config_export", "config_gate",
    "config_generate", "config_machine", "config_select", "config_sweep", "config_train", "digest", "disk", "errors",
    "fields", "files", "layout", "lock", "markup", "outputs", "params", "posting", "records", "records_distill",
    "records_evaluation", "records_export", "records_gate", "records_held_out", "records_model", "records_profile",
    "records_select", "records_sweep", "redaction", "sizes", "store", "version",
}  # fmt: skip
# What each room may import beside itself and the vocabulary. A verb may use every room; the command line every verb.
BELOW = {
    "run": set[str](),
    "faults": {"run"},
    "mirror": {"run"},
    "node": {"mirror", "model"},
    "data": set[str](),
    "model": {"data", "wire"},
    "formats": {"data", "model"},
    "merging": {"data", "model"},
    "runtimes": set[str](),
    "proof": {"data", "model", "merging", "formats", "runtimes", "gating"},
    "bundle": set[str](),
    "deployment": {"bundle", "runtimes"},
    "forms": {"bundle", "data", "formats", "merging", "model", "proof", "run", "runtimes"},
    "wire": set[str](),
    "training": {"data", "model", "formats", "run", "faults", "wire"},
    "generating": {"data", "faults", "model", "promotion", "run", "runtimes", "terminal", "training"},
    "appraisal": {"generating", "measures", "pages", "services"},
    "selecting": {"data", "generating"},
    "gating": set[str](),
    "studies": {"run"},
    "sweeping": {"data", "gating", "run", "studies", "training"},
    "promotion": set[str](),
    "history": {"gating", "promotion", "run"},
    "pages": {"gating", "history"},
    "measures": set[str](),
    "terminal": {"run"},
    "tracked": {"run"},
    "services": {
        "data",
        "model",
        "formats",
        "run",
        "gating",
        "promotion",
        "history",
        "pages",
        "measures",
        "studies",
        "terminal",
        "tracked",
    },
    "evaluation": {"data", "gating", "model", "run", "runtimes", "services"},
    "verb": {
        "appraisal",
        "history",
        "pages",
        "data",
        "model",
        "formats",
        "run",
        "faults",
        "gating",
        "promotion",
        "training",
        "services",
        "evaluation",
        "generating",
        "selecting",
        "forms",
        "merging",
        "runtimes",
        "proof",
        "bundle",
        "deployment",
        "studies",
        "sweeping",
        "mirror",
        "node",
        "terminal",
        "tracked",
    },
}
BELOW["cli"] = BELOW["verb"] | {"verb"}

# Where an outside library may be imported: rooms end with a dot, modules do not.
TENSORS = {"model.", "training.", "formats.", "evaluation.", "forms.", "merging.", "proof.", "wire.", "generating."}
OUTSIDE = {
    "torch": TENSORS,
    "transformers": TENSORS,
    "peft": TENSORS,
    "safetensors": TENSORS,
    "tokenizers": TENSORS | {"runtimes."},
    "gguf": {"formats."},
    "onnx": {"formats."},
    "onnxruntime": {"runtimes."},
    "xllamacpp": {"runtimes."},
    "jinja2": {"deployment.ollama", "formats.gguf_vocabulary"},
    "sigstore": {"bundle."},
    "packaging": {"bundle."},
    "packageurl": {"bundle."},
    "cyclonedx": {"bundle."},
    "cryptography": {"bundle."},
    "picklescan": {"bundle."},
    "rensa": {"data.quality"},
    "pyarrow": {"data.", "generating.output", "history.columns"},
    "tqdm": {"services.bars"},
    "bitsandbytes": TENSORS,
    "fsspec": {"mirror.bucket", "mirror.remote"},
    "huggingface_hub": {"model.hub"},
    "numpy": {
        "appraisal.",
        "data.",
        "formats.",
        "forms.",
        "gating.",
        "history.",
        "measures.",
        "merging.",
        "proof.",
        "runtimes.",
        "selecting.",
        "prepare",
        "services.harness",
        "services.metrics",
        "studies.",
        "sweeping.",
    },
    "alembic": {"store"},
    "optuna": {"studies."},
    "ray": {"sweeping.cluster"},
    "cmaes": {"studies.covariance"},
    "prometheus_client": {"services.prometheus"},
    "psutil": {"run.system"},
    "psycopg": {"studies."},
    "sqlalchemy": {"studies."},
    "rich": {"services.board", "terminal.", "watch"},
    "datasets": {"data.tokens", "data.hub", "measures."},
    "mlflow": {"tracked.", "services.sweep_tracking", "services.registry", "store"},
    "lm_eval": {"services.harness"},
    "sklearn": {"services.metrics"},
    "matplotlib": {"pages.", "services.cost_plot", "services.curves_plot", "services.plots"},
    "ruamel": {"amend", "data.tasks", "params"},
    "pydantic": {
        "card",
        "config",
        "config_data",
        "config_evaluation",
        "config_export",
        "config_gate",
        "config_generate",
        "config_select",
        "config_sweep",
        "config_train",
        "records_evaluation",
        "fields",
        "params",
        "records",
        "records_sweep",
        "studies.knobs",
    },
    "pydantic_core": {"run.journal"},
    "scipy": {"gating."},
    "evaluate": {"services.answer_metrics", "measures."},
    "sacrebleu": {"measures."},
    "rouge_score": {"measures."},
}
# Declared under another name than it is imported by, or declared for others who import it.
DECLARED_AS = {
    "lm_eval": "lm-eval", "rouge_score": "rouge-score", "sklearn": "scikit-learn", "ruamel": "ruamel.yaml",
    "cyclonedx": "cyclonedx-python-lib", "packageurl": "packageurl-python", "pydantic_core": "pydantic",
}  # fmt: skip
USED_INDIRECTLY = {"accelerate", "dvc", "onnxscript", "s3fs"}

BANNED = {"manager", "handler", "helper", "helpers", "util", "utils", "common", "misc", "core", "pipeline", "processor"}
BASE_CLASSES = {"Base", "BaseCard", "BaseModelError"}  # all of the base model, the one meaning that the word may have

LONGEST_FILE = 350
LONGEST_FUNCTION = 80
LONGER_FUNCTIONS = {"training.loop": 120}


@dataclass(frozen=True)
class Import:
    """One import statement's target, seen from one of our modules."""

    target: str
    line: int
    types_only: bool


def module_name(path: Path) -> str:
    """Name below `ratchet`, such as `run.status`; an `__init__` has its package's name, and the root none."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


FILES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


@cache
def tree(name: str) -> ast.Module:
    """The parsed source of a module."""
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


def imports(name: str) -> list[Import]:
    """Every import of a module, wherever it stands; our own modules as `ratchet.` plus their name."""
    type_checking = {
        inner
        for node in ast.walk(tree(name))
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for branch in node.body
        for inner in ast.walk(branch)
    }
    found = []
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
    return found


def our_imports(name: str) -> Iterator[tuple[str, Import]]:
    """Imports of our own modules, by name below `ratchet`."""
    for found in imports(name):
        if found.target == "ratchet" or found.target.startswith("ratchet."):
            yield found.target.removeprefix("ratchet").removeprefix("."), found


def room(name: str) -> str:
    """The layer that a module belongs to."""
    first = name.split(".", maxsplit=1)[0]
    if name in VOCABULARY:
        return "vocabulary"
    if name in ("__main__", "arguments", "commands"):
        return "cli"
    if first in BELOW:
        return first
    assert "." not in name and not (SOURCE / first).is_dir(), f"{name}: a folder that DESIGN does not know"
    return "verb"


MODULES = [name for name in FILES if name]


def test_the_source_is_found() -> None:
    assert {"cli", "config", "run.journal", "training.loop"} <= set(MODULES)
    assert tuple(name for name in ("files", "params", "cli") if list(our_imports(name))) == ("files", "params", "cli")


def test_imports_go_down_only() -> None:
    problems = []
    for name in MODULES:
        for target, found in our_imports(name):
            here, there = room(name), room(target) if target else "vocabulary"
            sideways = here == there and here not in ("verb", "services")
            if not (there == "vocabulary" or sideways or there in BELOW.get(here, set())):
                problems.append(f"{FILES[name]}:{found.line}: {name} ({here}) imports {target} ({there})")
    assert problems == []


def test_no_import_cycle_even_through_functions() -> None:
    graph = {name: {t for t, found in our_imports(name) if not found.types_only} for name in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def outside(name: str) -> Iterator[tuple[str, Import]]:
    for found in imports(name):
        library = found.target.split(".")[0]
        if library != "ratchet" and library not in sys.stdlib_module_names:
            yield library, found


def test_each_outside_library_is_imported_in_its_room_only() -> None:
    problems = []
    for name in MODULES:
        for library, found in outside(name):
            rooms = OUTSIDE.get(library, set())
            if not any(name == place or (place.endswith(".") and name.startswith(place)) for place in rooms):
                belongs = ", ".join(sorted(rooms)) or "no room yet: say where in OUTSIDE"
                problems.append(f"{FILES[name]}:{found.line}: {library} belongs to {belongs}")
    assert problems == []


def test_outside_libraries_are_the_declared_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared, extra = (
        {re.split(r"[^A-Za-z0-9._-]", text)[0] for text in texts}
        for texts in (project["dependencies"], project["optional-dependencies"]["ray"])
    )
    imported = {DECLARED_AS.get(x, x.replace("_", "-")) for name in MODULES for x, _ in outside(name)}
    assert imported - declared == extra, "imported, not declared"
    assert declared - imported == USED_INDIRECTLY, "declared, not imported"


HEAVY = ("torch", "transformers", "mlflow", "peft", "datasets", "lm_eval")


@pytest.mark.parametrize(
    "modules",
    [
        ["ratchet.cli"],
        ["ratchet.run.status"],
        ["ratchet.training.start", "ratchet.generating.start"],
        [f"ratchet.{name}" for name in MODULES if name.startswith("run.")],
        ["ratchet.train", "ratchet.sweep", "ratchet.gate", "ratchet.promote", "ratchet.generate"],
    ],
    ids=lambda modules: "+".join(name.removeprefix("ratchet.") for name in modules),
)
def test_supervising_and_asking_load_neither_torch_nor_mlflow(modules: list[str]) -> None:
    code = f"import sys, {', '.join(modules)}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_help_waits_for_no_settings() -> None:
    code = "import sys, ratchet.cli\nprint(*({'pydantic', 'ruamel', 'ratchet.config'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_files_stay_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES.values()}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_functions_stay_short() -> None:
    problems = []
    for name, path in FILES.items():
        limit = LONGER_FUNCTIONS.get(name, LONGEST_FUNCTION)
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > limit:
                    problems.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {limit}")
    assert problems == []


def names_given(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that a module makes up itself: classes, functions, parameters, variables, attributes."""
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
    """`HTTPHandler_of` → {http, handler, of}."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}


def test_names_say_what_a_thing_is() -> None:
    problems = []
    for name, path in FILES.items():
        for given, line in ((name, 1), *names_given(tree(name))):
            if empty := words(given) & BANNED:
                problems.append(f"{path}:{line}: {given}: {', '.join(empty)} says nothing")
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.ClassDef) and "base" in words(node.name) and node.name not in BASE_CLASSES:
                problems.append(f"{path}:{node.lineno}: {node.name}: base is the base model")
    assert problems == []


def test_package_roots_reexport_nothing() -> None:
    roots = [name for name in MODULES if FILES[name].name == "__init__.py"]
    assert roots
    assert [name for name in roots if list(our_imports(name))] == []
    assert [name for name in roots if "__all__" in {given for given, _ in names_given(tree(name))}] == []


UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


RUNNERS = {"torch.load", "eval", "exec", "os.system", "os.popen", "yaml.load"}


REMOTE_CODE = {"remote_code", "card.remote_code"}
"""What base.trust_remote_code becomes: true only for the one model that it names."""


def dangers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Calls that run what a file or a text says; not where the user asked for it, and torch's reader that runs none."""
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


STAGES: dict[str, Any] = yaml.safe_load((SOURCE / "template" / "dvc.yaml").read_text())["stages"]


def test_the_stages_are_the_road() -> None:
    assert list(STAGES) == ["base", "prepare", "train", "export", "evaluate", "gate"]


def test_this_repository_has_the_stages_that_new_projects_get() -> None:
    assert (ROOT / "dvc.yaml").read_bytes() == (SOURCE / "template" / "dvc.yaml").read_bytes()


@pytest.mark.parametrize("stage", STAGES)
def test_one_word_five_places(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert STAGES[stage]["cmd"] == f"ratchet {stage}"
    with pytest.raises(SystemExit) as ended:
        cli.main([stage, "--help"])
    assert ended.value.code == 0
    assert f"ratchet {stage}" in capsys.readouterr().out
    functions = {node.name for node in tree(stage).body if isinstance(node, ast.FunctionDef)}
    assert stage in functions
    assert any(str(param).split(".")[0] == stage for param in STAGES[stage]["params"])
    section = config.Settings.model_fields[stage].annotation
    assert isinstance(section, type)
    assert section.__name__ == stage.capitalize()


def known(param: str) -> bool:
    """Whether `prepare.columns` and the like is a section or knob of Settings."""
    node: Any = config.Settings().model_dump()
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
        is_input = dep.startswith("data/") or dep == "experiments/champion.json"
        assert is_input or dep in outs, f"{stage}: {dep} is made by no stage before it"


def leaves(node: Any, prefix: str = "") -> set[str]:
    if isinstance(node, dict) and node and not any("." in key for key in node):  # keys with dots name other knobs
        return {leaf for key, value in node.items() for leaf in leaves(value, f"{prefix}{key}.")}
    return {prefix.removesuffix(".")}


def test_params_yaml_of_this_repository_names_every_knob() -> None:
    settings = params.load(ROOT / "params.yaml")
    written = leaves(yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8")))
    assert leaves(config.Settings().model_dump(mode="json")) - written == set()
    assert params.parse(params.dump(settings)) == settings
