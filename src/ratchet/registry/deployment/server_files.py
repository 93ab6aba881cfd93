"""What MLflow wants to find in a registered version's folder, so that `mlflow models serve` works on it.

    MLmodel  requirements.txt  python_env.yaml  conda.yaml  components/tokenizer/

The flavor is `mlflow.transformers` on the folder's own `hf/`: the serving process needs mlflow, torch and transformers,
neither Ratchet nor peft. All of it is signed with the model, since MLmodel says what is imported. Classes are named as
transformers' own Auto classes on purpose: a name that transformers does not have makes MLflow trust code that came with
the model (mlflow/transformers/model_io.py). No `source_model_name` for a like reason: MLflow would ask a hub for it.
Answers are the likeliest ones, as every form was compared, unless a request says `do_sample`: transformers' pipeline
would draw at temperature 0.7 where nobody said anything. The flavor writes prompts by the chat template and has them
tokenised as any text: `add_special_tokens` is off, or the first token would be there twice.

MLflow 3.17 writes a file `registered_model_meta` (name and version) into a version's folder when it opens it from a
local disk (store/artifact/models_artifact_repo.py): files.FOREIGN. Nothing reads it; seal and signature leave it out.
"""

import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ratchet.errors import DamagedFileError
from ratchet.registry.bundle_files import artifact_path
from ratchet.registry.deployment import model_card
from ratchet.storage.records.export import ExportArtifact, ModelBundle
from ratchet.storage.records.gate import ForcedPromotion

MLMODEL = "MLmodel"
TASK = "llm/v1/chat"
SERVED_BY = ("mlflow", "torch", "transformers", "accelerate")
_TOKENIZER = "components/tokenizer"
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_NO_TOKENIZER = ("config.json", "generation_config.json", "README.md")


def mlmodel_files(directory: Path) -> dict[str, bytes]:
    """The files, by their names in the folder of the promoted model.

    Args:
        directory: Hugging Face directory of the merged model; its tokenizer's files are copied to where MLflow looks.
    """
    found = {
        f"{_TOKENIZER}/{path.name}": path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name not in _NO_TOKENIZER
    }
    requirements = [f"{name}=={version(name).partition('+')[0]}" for name in SERVED_BY]
    found["requirements.txt"] = ("\n".join(requirements) + "\n").encode()
    found["python_env.yaml"] = _encode_yaml(
        {"python": platform.python_version(), "dependencies": ["-r requirements.txt"]}
    )
    found["conda.yaml"] = _encode_yaml({
        "name": "mlflow-env",
        "channels": ["conda-forge"],
        "dependencies": [f"python={platform.python_version()}", "pip", {"pip": requirements}],
    })  # fmt: skip
    return found | {MLMODEL: _encode_yaml(_mlmodel_document())}


def _mlmodel_document() -> dict[str, Any]:
    return {
        "flavors": {
            "transformers": {
                "task": "text-generation", "instance_type": "TextGenerationPipeline", "inference_task": TASK,
                "pipeline_model_type": "AutoModelForCausalLM", "model_binary": "hf", "components": ["tokenizer"],
                "tokenizer_type": "AutoTokenizer", "transformers_version": version("transformers"), "code": None,
            },
            "python_function": {
                "loader_module": "mlflow.transformers", "python_version": platform.python_version(),
                "env": {"conda": "conda.yaml", "virtualenv": "python_env.yaml"},
                "config": {"do_sample": False, "add_special_tokens": False},
            },
        },
        "metadata": {"task": TASK},
        "mlflow_version": version("mlflow"),
        "signature": _mlmodel_signature(),
    }  # fmt: skip


def _mlmodel_signature() -> dict[str, Any]:
    """Of MLflow's chat task, as far as the flavor obeys it: it takes `stop`, and does nothing with it."""
    texts = {key: {"type": "string", "required": True} for key in ("role", "content")}
    inputs = [
        {"name": "messages", "type": "array", "items": {"type": "object", "properties": texts}, "required": True},
        {"name": "max_tokens", "type": "long", "required": False},
        {"name": "do_sample", "type": "boolean", "required": False},
        {"name": "temperature", "type": "double", "required": False},
        {"name": "top_p", "type": "double", "required": False},
    ]
    outputs = [{"name": name, "type": "string", "required": True} for name in ("id", "object", "model")]
    return {"inputs": json.dumps(inputs), "outputs": json.dumps(outputs), "params": None}


def _encode_yaml(value: Any) -> bytes:
    """JSON, which is YAML."""
    return (json.dumps(value, indent=2) + "\n").encode()


# A chat template in the language that Ollama understands.
#
# Ollama reads no Jinja: a GGUF file's own template is used only where it equals one of a list (ollama/ollama, issues
# 10222 and 6371), and else a prompt goes to the model bare, without a word of warning. So the template is rendered
# here
# with marks for texts, what stands around them is read off, and written as a Go template over `.Messages`
# (https://docs.ollama.com/modelfile). What was read off must then give, for conversations of several shapes, what
# Jinja
# gives, to the last character; a template that does more than write texts between literals has no Ollama form.

Message = Mapping[str, str]

_SHAPES = ("u", "uau", "uauau", "su", "suau", "suauau")
"""Conversations, a letter a role, on which the Go template must write what Jinja writes."""
_ROLES = {"s": "system", "u": "user", "a": "assistant"}


@dataclass(frozen=True)
class TemplateLiterals:
    """What stands around the texts of a conversation. (before, after) for each role."""

    opening: str
    """Before the first message where there is no system message, such as a default system message."""
    system: tuple[str, str] | None
    """None: the template takes no system message."""
    user: tuple[str, str]
    assistant: tuple[str, str]
    prompt: str
    """After the last message: the assistant is about to speak."""


class _UnwritableTemplateError(Exception):
    """The template is no row of texts between literals."""


class _GenerationTag(Extension):
    """transformers' `{% generation %}` marks what is learned; it writes nothing."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def convert_template(jinja: str, tokens: Mapping[str, str], adds_first: bool) -> str | None:
    """The Go template for a Jinja chat template, or None where there is none that writes the same.

    Args:
        jinja: from the base, so it is rendered in a sandbox, as transformers does.
        tokens: bos_token and the like, by name.
        adds_first: the tokenizer puts bos_token before every text by itself, so the template must not.
    """
    try:
        compiled = _environment().from_string(jinja)
        found = _read_literals(compiled, tokens)
        for shape in _SHAPES if found.system else [shape for shape in _SHAPES if "s" not in shape]:
            conversation = _probe_conversation(shape)
            if render_literals(found, conversation) != _render(compiled, tokens, conversation):
                return None
    except (
        jinja2.TemplateError,
        _UnwritableTemplateError,
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
    ):
        return None  # what a template may do wrong in the sandbox; the caller says what that means
    text = _go_template(found, tokens.get("bos_token", "") if adds_first else "")
    return None if '"""' in text else text


def render_literals(literals: TemplateLiterals, conversation: Sequence[Message]) -> str:
    """What the Go template writes: the meaning of `_go_template`, for comparison."""
    around = {"system": literals.system, "user": literals.user, "assistant": literals.assistant}
    text = "" if any(message["role"] == "system" for message in conversation) else literals.opening
    for message in conversation:
        before, after = around[message["role"]] or ("", "")
        text += before + message["content"] + after
    return text + literals.prompt


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers sets it up (utils/chat_template_utils.py)."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    made.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
    made.globals["raise_exception"] = _raise_template_error
    made.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return made


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _render(
    compiled: jinja2.Template, tokens: Mapping[str, str], conversation: Sequence[Message], go_on: bool = True
) -> str:
    facts: dict[str, Any] = {**tokens, "tools": None, "documents": None}
    return compiled.render(messages=[dict(one) for one in conversation], add_generation_prompt=go_on, **facts)


def _probe_conversation(shape: str) -> list[Message]:
    return [{"role": _ROLES[letter], "content": f"slot{number}of{letter}"} for number, letter in enumerate(shape)]


def _literals_around(compiled: jinja2.Template, tokens: Mapping[str, str], shape: str, go_on: bool = True) -> list[str]:
    """The literals of a conversation: before the first text, between texts, after the last."""
    conversation = _probe_conversation(shape)
    rest, found = _render(compiled, tokens, conversation, go_on), []
    for message in conversation:
        before, mark, rest = rest.partition(message["content"])
        if not mark:
            raise _UnwritableTemplateError(f"a text of role {message['role']} is not written")
        found.append(before)
    return [*found, rest]


def _read_literals(compiled: jinja2.Template, tokens: Mapping[str, str]) -> TemplateLiterals:
    opening, asked, answered, last = _literals_around(compiled, tokens, "uau")
    user_after = _literals_around(compiled, tokens, "u", go_on=False)[1]
    assistant_after = _literals_around(compiled, tokens, "ua", go_on=False)[2]
    user_before = _strip_part(answered, assistant_after, at_end=False)
    try:
        first, second, *_ = _literals_around(compiled, tokens, "su")
        system = (first, _strip_part(second, user_before, at_end=True))
    except jinja2.TemplateError:  # it refuses system messages, and Ollama then leaves them out
        system = None
    return TemplateLiterals(
        opening=_strip_part(opening, user_before, at_end=True), system=system, user=(user_before, user_after),
        assistant=(_strip_part(asked, user_after, at_end=False), assistant_after),
        prompt=_strip_part(last, user_after, at_end=False),
    )  # fmt: skip


def _strip_part(text: str, part: str, at_end: bool) -> str:
    if not (text.endswith(part) if at_end else text.startswith(part)):
        raise _UnwritableTemplateError(f"{part!r} is not at its place in {text!r}")
    return text.removesuffix(part) if at_end else text.removeprefix(part)


def _go_template(found: TemplateLiterals, first_token: str) -> str:
    system = found.system
    opening = found.opening.removeprefix(first_token)
    branches = []
    if system is not None:
        branches.append(("system", (system[0].removeprefix(first_token), system[1])))
        opening = f"{{{{ if not .System }}}}{_go_literal(opening)}{{{{ end }}}}" if opening else ""
    else:
        opening = _go_literal(opening)
    branches += [("user", found.user), ("assistant", found.assistant)]
    text = opening + "{{ range .Messages }}"
    for number, (role, (before, after)) in enumerate(branches):
        text += f'{{{{ {"else " if number else ""}if eq .Role "{role}" }}}}'
        text += _go_literal(before) + "{{ .Content }}" + _go_literal(after)
    return text + "{{ end }}{{ end }}" + _go_literal(found.prompt)


def _go_literal(text: str) -> str:
    """Text that Go writes as it is."""
    return text.replace("{{", '{{ "{{" }}')


# What the server of each form needs beside the weights: Ollama's Modelfile, the commands in words, the model card.
#
#     README.md  serving/gguf-q8_0/Modelfile  SERVE.md  serving/hf/SERVE.md  serving/onnx-int8/SERVE.md
#
# They are made when a model is promoted, so its signature covers them, and stand in the root of a release. Every
# server
# is told to listen on 127.0.0.1 only.

FOLDER = "serving"
MODELFILE = "Modelfile"
GUIDE = "SERVE.md"
LONGEST_CONTEXT = 8192
"""Tokens that servers are told to make room for, unless the model knows fewer: their memory grows with it."""

_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_ADDING = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True)
class ServingFacts:
    """What is known of the model from its Hugging Face directory."""

    name: str
    """Under which it is served: that of the registered model."""
    context_tokens: int
    limit_tokens: int | None
    """Longest context that the model was made for."""
    dtype: str
    ends: tuple[str, ...]
    """Texts of the tokens that end an answer."""
    ollama_template: str | None


def format_slug(form: str) -> str:
    """A form's name, as a file's: `gguf/q8_0` → `gguf-q8_0`."""
    return form.replace("/", "-")


def build_server_files(
    directory: Path, bundle: ModelBundle, name: str, forced: ForcedPromotion | None = None
) -> dict[str, bytes]:
    """The files of every form, and the card of all, by their names in the folder of the promoted model.

    Args:
        directory: Hugging Face directory of the merged model.
        bundle: what was exported.
        name: of the registered model.
        forced: who promoted it against the verdict.

    Raises:
        DamagedFileError: the directory has no usable config.json.
    """
    facts = read_facts(directory, name)
    commands = {one.name: _serve_command(one, facts) for one in bundle.artifacts}
    found = {model_card.CARD: model_card.render_card(bundle, name, forced, commands).encode()}
    for artifact in bundle.artifacts:
        folder = f"{FOLDER}/{format_slug(artifact.name)}"
        found[f"{folder}/{GUIDE}"] = _render_guide(artifact, facts, forced).encode()
        if artifact.kind == "gguf":
            found[f"{folder}/{MODELFILE}"] = render_modelfile(artifact_path(artifact), facts).encode()
    return found


def read_facts(directory: Path, name: str) -> ServingFacts:
    """Facts of a Hugging Face directory. Raises DamagedFileError when it has no usable config.json."""
    config = _read_json(directory / "config.json")
    if not config:
        raise DamagedFileError(f"{directory / 'config.json'}: no config of a model; export it again")
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    numbers = [part.get(key) for part in (config, text) for key in _LIMITS if isinstance(part, dict)]
    limit = next((number for number in numbers if isinstance(number, int) and number > 0), None)
    tokens = _named_tokens(_read_json(directory / "tokenizer_config.json"))
    return ServingFacts(
        name=name, context_tokens=min(limit or LONGEST_CONTEXT, LONGEST_CONTEXT), limit_tokens=limit,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "auto"), ends=_read_end_texts(directory),
        ollama_template=_ollama_template(directory, tokens),
    )  # fmt: skip


def render_modelfile(weights: str, facts: ServingFacts) -> str:
    """Ollama's Modelfile; greedy, as every form was compared."""
    lines = [f"FROM ./{weights}", "PARAMETER temperature 0", f"PARAMETER num_ctx {facts.context_tokens}"]
    lines += [f"PARAMETER stop {json.dumps(end, ensure_ascii=False)}" for end in facts.ends]
    if facts.ollama_template is not None:
        lines.append(f'TEMPLATE """{facts.ollama_template}"""')
    else:
        lines.insert(
            0, "# Ollama cannot express this model's chat template: send it whole prompts, or use llama-server."
        )
    return "\n".join(lines) + "\n"


def llama_command(artifact: ExportArtifact, facts: ServingFacts) -> list[str]:
    """llama.cpp's OpenAI-compatible server."""
    return [
        "llama-server", "--model", artifact_path(artifact), "--alias", facts.name, "--host", "127.0.0.1",
        "--port", "8080", "--ctx-size", str(facts.context_tokens), "--jinja",
    ]  # fmt: skip


def vllm_command(facts: ServingFacts) -> list[str]:
    """vLLM's OpenAI-compatible server."""
    length = ["--max-model-len", str(facts.context_tokens)] if facts.limit_tokens else []
    return [
        "vllm", "serve", "./hf", "--served-model-name", facts.name, "--host", "127.0.0.1", "--port", "8000", *length,
        "--dtype", facts.dtype,
    ]  # fmt: skip


def _serve_command(artifact: ExportArtifact, facts: ServingFacts) -> str:
    """What opens a form, for the card."""
    if artifact.kind == "gguf":
        return shlex.join(llama_command(artifact, facts))
    if artifact.kind == "hf":
        return f'transformers.AutoModelForCausalLM.from_pretrained("{artifact_path(artifact)}", dtype="auto")'
    return f'onnxruntime.InferenceSession("{artifact_path(artifact)}/model.onnx")'


def _render_guide(artifact: ExportArtifact, facts: ServingFacts, forced: ForcedPromotion | None) -> str:
    lines = [f"# Serving {facts.name}, {artifact.name}", ""]
    if forced is not None:
        lines += [f"**{model_card.escape_markdown(model_card.describe_forced(forced))}**", ""]
    lines += ["Run in this directory.", ""]
    if artifact.kind == "gguf":
        lines += _command_block(
            "llama.cpp (OpenAI-compatible, http://127.0.0.1:8080/v1)", llama_command(artifact, facts)
        )
        if facts.ollama_template is None:
            lines += ["Ollama has no form of this model's chat template; Modelfile says more.", ""]
        lines += _command_block(
            "Ollama", ["ollama", "create", facts.name, "-f", MODELFILE], ["ollama", "run", facts.name]
        )
    elif artifact.kind == "hf":
        lines += _command_block("vLLM (OpenAI-compatible, http://127.0.0.1:8000/v1)", vllm_command(facts))
        lines += [
            f"transformers: `{_serve_command(artifact, facts)}`, tokenizer and chat template beside it.", "",
        ]  # fmt: skip
    else:
        lines += [
            f"onnxruntime: `{_serve_command(artifact, facts)}`; tokenizer and config lie beside it, and "
            "`session.get_inputs()` names the inputs, with the keys and values of earlier tokens.", "",
        ]  # fmt: skip
    lines.append(f"Measured in {artifact.runtime}: {artifact.closeness.kl:.3g} nats from base + adapter (KL).")
    return "\n".join(lines) + "\n"


def _command_block(title: str, *commands: list[str]) -> list[str]:
    return [f"## {title}", "", *(f"    {shlex.join(command)}" for command in commands), ""]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {name: config.get(name) for name in _ADDING}
    plain = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: value for name, value in plain.items() if isinstance(value, str)}


def _read_end_texts(directory: Path) -> tuple[str, ...]:
    """Texts of the ids that generation_config.json names as ends."""
    ids = _read_json(directory / "generation_config.json").get("eos_token_id")
    wanted = ids if isinstance(ids, list) else [ids]
    added = _read_json(directory / "tokenizer.json").get("added_tokens") or []
    texts = {one.get("id"): one.get("content") for one in added if isinstance(one, dict)}
    return tuple(text for number in wanted if isinstance(text := texts.get(number), str))


def _ollama_template(directory: Path, tokens: dict[str, str]) -> str | None:
    path = directory / "chat_template.jinja"
    if not path.is_file():
        return None
    first = tokens.get("bos_token", "")
    after = json.dumps(_read_json(directory / "tokenizer.json").get("post_processor"), ensure_ascii=False)
    adds = bool(first) and json.dumps(first, ensure_ascii=False) in after
    return convert_template(path.read_text(encoding="utf-8"), tokens, adds)
