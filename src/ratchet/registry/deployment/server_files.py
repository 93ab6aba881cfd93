"""Builds the files that servers need in addition to the weights, for every format of a promoted model.

    README.md  serving/gguf-q8_0/Modelfile  serving/gguf-q8_0/SERVE.md  serving/hf/SERVE.md  serving/onnx-int8/SERVE.md
    MLmodel  requirements.txt  python_env.yaml  conda.yaml  components/tokenizer/

The files are created when a model is promoted, so its signature covers them. A release has the files of its format in
its top directory. With the commands in these files, servers listen on 127.0.0.1 only.
"""

import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ratchet.errors import DamagedFileError
from ratchet.models import base_model
from ratchet.registry.deployment import model_card
from ratchet.registry.model_store import artifact_path
from ratchet.storage.records.evaluation import EvaluationReport
from ratchet.storage.records.export import ExportArtifact, ModelBundle
from ratchet.storage.records.gate import ForcedPromotion

MLMODEL = "MLmodel"
TASK = "llm/v1/chat"
REQUIREMENTS = ("mlflow", "torch", "transformers", "accelerate")
_TOKENIZER = "components/tokenizer"
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json")
_OTHER_FILES = ("config.json", "generation_config.json", "README.md")
"""Files of a Hugging Face directory that do not belong to the tokenizer."""

_SHAPES = ("u", "uau", "uauau", "su", "suau", "suauau")
"""Conversations, one letter per message, for which the Go template must equal Jinja's output."""

_ROLES = {"s": "system", "u": "user", "a": "assistant"}
FOLDER = "serving"
MODELFILE = "Modelfile"
GUIDE = "SERVE.md"
MAX_CONTEXT_TOKENS = 8192
"""Context size in the commands, unless the model's limit is smaller. A server's memory grows with the context size."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
Message = Mapping[str, str]


def build_model_files(
    export: Path,
    bundle: ModelBundle,
    name: str,
    forced: ForcedPromotion | None = None,
    evaluation: EvaluationReport | None = None,
) -> dict[str, bytes]:
    """Build the model card and the files for MLflow, Ollama, llama.cpp and vLLM, by their names in the model's folder.

    Args:
        export: directory of the export.
        bundle: the exported model.
        name: name of the registered model.
        forced: the forced promotion, which the card and the guides show; None: not forced.
        evaluation: evaluation of the model, for the card; None: not evaluated.

    Raises:
        DamagedFileError: the merged model in the export has no valid config.json.
    """
    facts = read_facts(export / "hf", name)
    commands = {artifact.name: _open_command(artifact, facts) for artifact in bundle.artifacts}
    contents = mlmodel_files(export / "hf")
    contents[model_card.MODEL_CARD] = model_card.render_card(bundle, name, forced, commands, evaluation).encode()
    for artifact in bundle.artifacts:
        folder = f"{FOLDER}/{format_slug(artifact.name)}"
        contents[f"{folder}/{GUIDE}"] = _render_guide(artifact, facts, forced).encode()
        if artifact.kind == "gguf":
            contents[f"{folder}/{MODELFILE}"] = render_modelfile(artifact_path(artifact), facts).encode()
    return contents


# ------------------------------------------------------------------------------------------------------------- MLflow
#
# The flavor is `mlflow.transformers` on the folder's own `hf/`, so `mlflow models serve` works: the serving process
# needs mlflow, torch and transformers, but neither Ratchet nor peft. These files are signed with the model, because
# MLmodel controls imports. The classes are transformers' Auto classes on purpose: for a class that transformers does
# not have, MLflow trusts code that came with the model (mlflow/transformers/model_io.py). `source_model_name` is
# missing on purpose, too, because MLflow would contact a hub. Answers are greedy, as in the verification of every
# format, unless a request sets `do_sample`; transformers' pipeline would sample at temperature 0.7 by default. The
# flavor renders prompts with the chat template and tokenizes them like any text; `add_special_tokens` is off, because
# the first token would otherwise appear twice.
#
# MLflow 3.17 writes a file `registered_model_meta` (name and version) into a version's folder when it opens the folder
# on a local disk (store/artifact/models_artifact_repo.py). Ratchet does not read it; seal and signature exclude it
# (files.FOREIGN).


def mlmodel_files(directory: Path) -> dict[str, bytes]:
    """Build MLflow's files, by their names in the promoted model's folder.

    Args:
        directory: Hugging Face directory of the merged model; its tokenizer files are copied to where MLflow expects
            them.
    """
    contents = {
        f"{_TOKENIZER}/{path.name}": path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.is_file() and is_tokenizer_file(path.name)
    }
    requirements = [f"{name}=={version(name).partition('+')[0]}" for name in REQUIREMENTS]
    contents["requirements.txt"] = ("\n".join(requirements) + "\n").encode()
    python = platform.python_version()
    environment = {"python": python, "dependencies": ["-r requirements.txt"]}
    conda = {
        "name": "mlflow-env",
        "channels": ["conda-forge"],
        "dependencies": [f"python={python}", "pip", {"pip": requirements}],
    }
    # The signature is the one of MLflow's chat task, without `stop`, which the flavor accepts but ignores.
    texts = {key: {"type": "string", "required": True} for key in ("role", "content")}
    inputs = [
        {"name": "messages", "type": "array", "items": {"type": "object", "properties": texts}, "required": True},
        {"name": "max_tokens", "type": "long", "required": False},
        {"name": "do_sample", "type": "boolean", "required": False},
        {"name": "temperature", "type": "double", "required": False},
        {"name": "top_p", "type": "double", "required": False},
    ]
    outputs = [{"name": name, "type": "string", "required": True} for name in ("id", "object", "model")]
    document = {
        "flavors": {
            "transformers": {
                "task": "text-generation", "instance_type": "TextGenerationPipeline", "inference_task": TASK,
                "pipeline_model_type": "AutoModelForCausalLM", "model_binary": "hf", "components": ["tokenizer"],
                "tokenizer_type": "AutoTokenizer", "transformers_version": version("transformers"), "code": None,
            },
            "python_function": {
                "loader_module": "mlflow.transformers", "python_version": python,
                "env": {"conda": "conda.yaml", "virtualenv": "python_env.yaml"},
                "config": {"do_sample": False, "add_special_tokens": False},
            },
        },
        "metadata": {"task": TASK},
        "mlflow_version": version("mlflow"),
        "signature": {"inputs": json.dumps(inputs), "outputs": json.dumps(outputs), "params": None},
    }  # fmt: skip
    documents = {"python_env.yaml": environment, "conda.yaml": conda, MLMODEL: document}
    # JSON is valid YAML.
    return contents | {name: (json.dumps(value, indent=2) + "\n").encode() for name, value in documents.items()}


def is_tokenizer_file(name: str) -> bool:
    """Return whether a file of a Hugging Face directory belongs to the tokenizer."""
    return "/" not in name and not name.endswith(_WEIGHT_SUFFIXES) and name not in _OTHER_FILES


# ------------------------------------------------------------------------------------ commands and guide of a format


@dataclass(frozen=True)
class ServingFacts:
    """Facts about a model from its Hugging Face directory."""

    name: str
    """Name of the served model: the name of the registered model."""
    context_tokens: int
    max_context_tokens: int | None
    """Longest context that the model supports."""
    dtype: str
    end_texts: tuple[str, ...]
    """Texts of the tokens that end an answer."""
    ollama_template: str | None


def format_slug(format_: str) -> str:
    """Convert a format's name to a file name: `gguf/q8_0` → `gguf-q8_0`."""
    return format_.replace("/", "-")


def read_facts(directory: Path, name: str) -> ServingFacts:
    """Read facts from a Hugging Face directory. Raises DamagedFileError if it has no valid config.json."""
    config = _read_json(directory / "config.json")
    if not config:
        raise DamagedFileError(f"{directory / 'config.json'}: expected a model's config; run `dvc repro -f export`")
    limit = base_model.find_context_length(config)
    tokenizer = _read_json(directory / "tokenizer.json")
    end_ids = _read_json(directory / "generation_config.json").get("eos_token_id")
    tokens = [token for token in tokenizer.get("added_tokens") or [] if isinstance(token, dict)]
    added = {token.get("id"): token.get("content") for token in tokens}
    end_texts = [added.get(number) for number in (end_ids if isinstance(end_ids, list) else [end_ids])]
    template = directory / "chat_template.jinja"
    ollama_template = None
    if template.is_file():
        special = _read_json(directory / "tokenizer_config.json")
        values = {key: special.get(key) for key in _SPECIAL_TOKENS}
        texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()}
        by_role = {key: text for key, text in texts.items() if isinstance(text, str)}
        bos_token = by_role.get("bos_token", "")
        processing = json.dumps(tokenizer.get("post_processor"), ensure_ascii=False)
        adds_bos = bool(bos_token) and json.dumps(bos_token, ensure_ascii=False) in processing
        ollama_template = convert_template(template.read_text(encoding="utf-8"), by_role, adds_bos)
    return ServingFacts(
        name=name, context_tokens=min(limit or MAX_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS), max_context_tokens=limit,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "auto"),
        end_texts=tuple(text for text in end_texts if isinstance(text, str)), ollama_template=ollama_template,
    )  # fmt: skip


def render_modelfile(weights: str, facts: ServingFacts) -> str:
    """Render Ollama's Modelfile; answers are greedy, as in the verification of every format."""
    lines = [f"FROM ./{weights}", "PARAMETER temperature 0", f"PARAMETER num_ctx {facts.context_tokens}"]
    lines += [f"PARAMETER stop {json.dumps(end, ensure_ascii=False)}" for end in facts.end_texts]
    if facts.ollama_template is not None:
        lines.append(f'TEMPLATE """{facts.ollama_template}"""')
    else:
        lines.insert(
            0, "# Ollama cannot express this model's chat template: send complete prompts, or use llama-server."
        )
    return "\n".join(lines) + "\n"


def _llama_command(artifact: ExportArtifact, facts: ServingFacts) -> list[str]:
    return [
        "llama-server", "--model", artifact_path(artifact), "--alias", facts.name, "--host", "127.0.0.1",
        "--port", "8080", "--ctx-size", str(facts.context_tokens), "--jinja",
    ]  # fmt: skip


def _open_command(artifact: ExportArtifact, facts: ServingFacts) -> str:
    """Return a command or a line of Python that opens a format."""
    if artifact.kind == "gguf":
        return shlex.join(_llama_command(artifact, facts))
    if artifact.kind in ("hf", "bitsandbytes"):
        return f'transformers.AutoModelForCausalLM.from_pretrained("{artifact_path(artifact)}", dtype="auto")'
    return f'onnxruntime.InferenceSession("{artifact_path(artifact)}/model.onnx")'


def _render_guide(artifact: ExportArtifact, facts: ServingFacts, forced: ForcedPromotion | None) -> str:
    lines = [f"# Serving {facts.name}, {artifact.name}", ""]
    if forced is not None:
        lines += [f"**{model_card.escape_markdown(model_card.describe_forced(forced))}**", ""]
    lines += ["Run these commands in this directory.", ""]
    if artifact.kind == "gguf":
        lines += _command_block(
            "llama.cpp (OpenAI-compatible, http://127.0.0.1:8080/v1)", _llama_command(artifact, facts)
        )
        if facts.ollama_template is None:
            lines += ["Ollama cannot express this model's chat template; see Modelfile.", ""]
        lines += _command_block(
            "Ollama", ["ollama", "create", facts.name, "-f", MODELFILE], ["ollama", "run", facts.name]
        )
    elif artifact.kind in ("hf", "bitsandbytes"):
        length = ["--max-model-len", str(facts.context_tokens)] if facts.max_context_tokens else []
        vllm = [
            "vllm", "serve", f"./{artifact_path(artifact)}", "--served-model-name", facts.name, "--host", "127.0.0.1",
            "--port", "8000", *length, "--dtype", facts.dtype,
        ]  # fmt: skip
        lines += _command_block("vLLM (OpenAI-compatible, http://127.0.0.1:8000/v1)", vllm)
        lines += [
            f"transformers: `{_open_command(artifact, facts)}`; the directory also has the chat template.", "",
        ]  # fmt: skip
    else:
        lines += [
            f"onnxruntime: `{_open_command(artifact, facts)}`; the directory also has tokenizer and config. "
            "`session.get_inputs()` lists the inputs, including keys and values of earlier tokens.", "",
        ]  # fmt: skip
    lines.append(f"Measured in {artifact.runtime}: KL divergence from base + adapter {artifact.distance.kl:.3g} nats.")
    return "\n".join(lines) + "\n"


def _command_block(title: str, *commands: list[str]) -> list[str]:
    return [f"## {title}", "", *(f"    {shlex.join(command)}" for command in commands), ""]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


# ----------------------------------------------------------------------------------------------- Ollama's chat template
#
# Ollama does not read Jinja: it uses a GGUF file's template only if it equals one of a built-in list (ollama/ollama,
# issues 10222 and 6371), and otherwise sends the bare prompt to the model without a warning. So the Jinja template is
# rendered with placeholder texts, the literals around them are extracted and written as a Go template over `.Messages`
# (https://docs.ollama.com/modelfile). The literals must reproduce Jinja's output exactly for conversations of several
# shapes. A template that does more than put texts between literals cannot be converted.


@dataclass(frozen=True)
class TemplateLiterals:
    """Literals around the texts of a conversation; a pair (before, after) for each role."""

    opening: str
    """Text before a conversation that has no system message, such as a default system message."""
    system: tuple[str, str] | None
    """Texts before and after a system message; None: the template rejects system messages."""
    user: tuple[str, str]
    assistant: tuple[str, str]
    generation_prompt: str
    """Text after the last message, where the assistant's answer begins."""


class _InconvertibleTemplateError(Exception):
    """The template does more than put texts between literals."""


class _GenerationTag(Extension):
    """Jinja extension for transformers' tag `{% generation %}`, which marks trained text and produces no output."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def convert_template(jinja: str, tokens: Mapping[str, str], adds_bos: bool) -> str | None:
    """Convert a Jinja chat template to a Go template; None if there is no equivalent.

    Args:
        jinja: the template, which comes from the base and is rendered in a sandbox, as in transformers.
        tokens: bos_token and other special tokens by name.
        adds_bos: whether the tokenizer puts bos_token before every text, so that the template must omit it.
    """
    try:
        template = _environment().from_string(jinja)
        literals = _read_literals(template, tokens)
        for shape in _SHAPES if literals.system else [shape for shape in _SHAPES if "s" not in shape]:
            conversation = _probe_conversation(shape)
            if render_literals(literals, conversation) != _render(template, tokens, conversation):
                return None
    except (
        jinja2.TemplateError,
        _InconvertibleTemplateError,
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
    ):
        return None  # a template may fail in any of these ways in the sandbox
    text = _go_template(literals, tokens.get("bos_token", "") if adds_bos else "")
    return None if '"""' in text else text


def render_literals(literals: TemplateLiterals, conversation: Sequence[Message]) -> str:
    """Render a conversation as the Go template does (`_go_template`), for comparison with Jinja."""
    by_role = {"system": literals.system, "user": literals.user, "assistant": literals.assistant}
    text = "" if any(message["role"] == "system" for message in conversation) else literals.opening
    for message in conversation:
        before, after = by_role[message["role"]] or ("", "")
        text += before + message["content"] + after
    return text + literals.generation_prompt


def _environment() -> ImmutableSandboxedEnvironment:
    """Create a sandboxed environment like transformers' (utils/chat_template_utils.py), with the date of training."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals[base_model.DATE_FUNCTION] = base_model.TEMPLATE_DATE.strftime  # as in training
    return environment


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _render(
    template: jinja2.Template,
    tokens: Mapping[str, str],
    conversation: Sequence[Message],
    add_generation_prompt: bool = True,
) -> str:
    variables: dict[str, Any] = {**tokens, "tools": None, "documents": None}
    messages = [dict(message) for message in conversation]
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)


def _probe_conversation(shape: str) -> list[Message]:
    return [{"role": _ROLES[letter], "content": f"slot{number}of{letter}"} for number, letter in enumerate(shape)]


def _read_literals(template: jinja2.Template, tokens: Mapping[str, str]) -> TemplateLiterals:
    opening, user_to_assistant, assistant_to_user, ending = _literals_around(template, tokens, "uau")
    user_after = _literals_around(template, tokens, "u", add_generation_prompt=False)[1]
    assistant_after = _literals_around(template, tokens, "ua", add_generation_prompt=False)[2]
    user_before = _remove_prefix(assistant_to_user, assistant_after)
    try:
        system_before, system_to_user, *_ = _literals_around(template, tokens, "su")
        system = (system_before, _remove_suffix(system_to_user, user_before))
    except jinja2.TemplateError:  # the template rejects system messages: the Go template omits them
        system = None
    return TemplateLiterals(
        opening=_remove_suffix(opening, user_before),
        system=system,
        user=(user_before, user_after),
        assistant=(_remove_prefix(user_to_assistant, user_after), assistant_after),
        generation_prompt=_remove_prefix(ending, user_after),
    )


def _literals_around(
    template: jinja2.Template, tokens: Mapping[str, str], shape: str, add_generation_prompt: bool = True
) -> list[str]:
    """Extract the literals of a conversation: before the first text, between texts, and after the last."""
    conversation = _probe_conversation(shape)
    rest, literals = _render(template, tokens, conversation, add_generation_prompt), []
    for message in conversation:
        before, placeholder, rest = rest.partition(message["content"])
        if not placeholder:
            raise _InconvertibleTemplateError(f"a text of role {message['role']} is missing")
        literals.append(before)
    return [*literals, rest]


def _remove_prefix(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise _InconvertibleTemplateError(f"{text!r} does not begin with {prefix!r}")
    return text.removeprefix(prefix)


def _remove_suffix(text: str, suffix: str) -> str:
    if not text.endswith(suffix):
        raise _InconvertibleTemplateError(f"{text!r} does not end with {suffix!r}")
    return text.removesuffix(suffix)


def _go_template(literals: TemplateLiterals, first_token: str) -> str:
    system = literals.system
    opening = literals.opening.removeprefix(first_token)
    branches = []
    if system is not None:
        branches.append(("system", (system[0].removeprefix(first_token), system[1])))
        opening = f"{{{{ if not .System }}}}{_go_literal(opening)}{{{{ end }}}}" if opening else ""
    else:
        opening = _go_literal(opening)
    branches += [("user", literals.user), ("assistant", literals.assistant)]
    text = opening + "{{ range .Messages }}"
    for number, (role, (before, after)) in enumerate(branches):
        text += f'{{{{ {"else " if number else ""}if eq .Role "{role}" }}}}'
        text += _go_literal(before) + "{{ .Content }}" + _go_literal(after)
    return text + "{{ end }}{{ end }}" + _go_literal(literals.generation_prompt)


def _go_literal(text: str) -> str:
    """Escape a text so that a Go template writes it unchanged."""
    return text.replace("{{", '{{ "{{" }}')
