"""What the server of each form needs beside the weights: Ollama's Modelfile, the commands in words, the model card.

    README.md  serving/gguf-q8_0/Modelfile  SERVE.md  serving/hf/SERVE.md  serving/onnx-int8/SERVE.md

They are made when a model is promoted, so its signature covers them, and stand in the root of a release. Every server
is told to listen on 127.0.0.1 only.
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.errors import DamagedError
from ratchet.registry.bundle_files import place
from ratchet.registry.deployment import model_card, ollama
from ratchet.storage.records.export import Artifact, Bundle
from ratchet.storage.records.gate import Forced

FOLDER = "serving"
MODELFILE = "Modelfile"
GUIDE = "SERVE.md"
LONGEST_CONTEXT = 8192
"""Tokens that servers are told to make room for, unless the model knows fewer: their memory grows with it."""

_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_ADDING = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True)
class Facts:
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


def slug(form: str) -> str:
    """A form's name, as a file's: `gguf/q8_0` → `gguf-q8_0`."""
    return form.replace("/", "-")


def files_of(directory: Path, bundle: Bundle, name: str, forced: Forced | None = None) -> dict[str, bytes]:
    """The files of every form, and the card of all, by their names in the folder of the promoted model.

    Args:
        directory: Hugging Face directory of the merged model.
        bundle: what was exported.
        name: of the registered model.
        forced: who promoted it against the verdict.

    Raises:
        DamagedError: the directory has no usable config.json.
    """
    facts = read(directory, name)
    commands = {one.name: _command(one, facts) for one in bundle.artifacts}
    found = {model_card.CARD: model_card.text(bundle, name, forced, commands).encode()}
    for artifact in bundle.artifacts:
        folder = f"{FOLDER}/{slug(artifact.name)}"
        found[f"{folder}/{GUIDE}"] = _guide(artifact, facts, forced).encode()
        if artifact.kind == "gguf":
            found[f"{folder}/{MODELFILE}"] = modelfile(place(artifact), facts).encode()
    return found


def read(directory: Path, name: str) -> Facts:
    """Facts of a Hugging Face directory. Raises DamagedError when it has no usable config.json."""
    config = _json(directory / "config.json")
    if not config:
        raise DamagedError(f"{directory / 'config.json'}: no config of a model; export it again")
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    numbers = [part.get(key) for part in (config, text) for key in _LIMITS if isinstance(part, dict)]
    limit = next((number for number in numbers if isinstance(number, int) and number > 0), None)
    tokens = _named_tokens(_json(directory / "tokenizer_config.json"))
    return Facts(
        name=name, context_tokens=min(limit or LONGEST_CONTEXT, LONGEST_CONTEXT), limit_tokens=limit,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "auto"), ends=_ends(directory),
        ollama_template=_ollama_template(directory, tokens),
    )  # fmt: skip


def modelfile(weights: str, facts: Facts) -> str:
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


def llama_command(artifact: Artifact, facts: Facts) -> list[str]:
    """llama.cpp's OpenAI-compatible server."""
    return [
        "llama-server", "--model", place(artifact), "--alias", facts.name, "--host", "127.0.0.1", "--port", "8080",
        "--ctx-size", str(facts.context_tokens), "--jinja",
    ]  # fmt: skip


def vllm_command(facts: Facts) -> list[str]:
    """vLLM's OpenAI-compatible server."""
    length = ["--max-model-len", str(facts.context_tokens)] if facts.limit_tokens else []
    return [
        "vllm", "serve", "./hf", "--served-model-name", facts.name, "--host", "127.0.0.1", "--port", "8000", *length,
        "--dtype", facts.dtype,
    ]  # fmt: skip


def _command(artifact: Artifact, facts: Facts) -> str:
    """What opens a form, for the card."""
    if artifact.kind == "gguf":
        return shlex.join(llama_command(artifact, facts))
    if artifact.kind == "hf":
        return f'transformers.AutoModelForCausalLM.from_pretrained("{place(artifact)}", dtype="auto")'
    return f'onnxruntime.InferenceSession("{place(artifact)}/model.onnx")'


def _guide(artifact: Artifact, facts: Facts, forced: Forced | None) -> str:
    lines = [f"# Serving {facts.name}, {artifact.name}", ""]
    if forced is not None:
        lines += [f"**{model_card.plain(model_card.words(forced))}**", ""]
    lines += ["Run in this directory.", ""]
    if artifact.kind == "gguf":
        lines += _block("llama.cpp (OpenAI-compatible, http://127.0.0.1:8080/v1)", llama_command(artifact, facts))
        if facts.ollama_template is None:
            lines += ["Ollama has no form of this model's chat template; Modelfile says more.", ""]
        lines += _block("Ollama", ["ollama", "create", facts.name, "-f", MODELFILE], ["ollama", "run", facts.name])
    elif artifact.kind == "hf":
        lines += _block("vLLM (OpenAI-compatible, http://127.0.0.1:8000/v1)", vllm_command(facts))
        lines += [
            f"transformers: `{_command(artifact, facts)}`, tokenizer and chat template beside it.", "",
        ]  # fmt: skip
    else:
        lines += [
            f"onnxruntime: `{_command(artifact, facts)}`; tokenizer and config lie beside it, and "
            "`session.get_inputs()` names the inputs, with the keys and values of earlier tokens.", "",
        ]  # fmt: skip
    lines.append(f"Measured in {artifact.runtime}: {artifact.closeness.kl:.3g} nats from base + adapter (KL).")
    return "\n".join(lines) + "\n"


def _block(title: str, *commands: list[str]) -> list[str]:
    return [f"## {title}", "", *(f"    {shlex.join(command)}" for command in commands), ""]


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {name: config.get(name) for name in _ADDING}
    plain = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: value for name, value in plain.items() if isinstance(value, str)}


def _ends(directory: Path) -> tuple[str, ...]:
    """Texts of the ids that generation_config.json names as ends."""
    ids = _json(directory / "generation_config.json").get("eos_token_id")
    wanted = ids if isinstance(ids, list) else [ids]
    added = _json(directory / "tokenizer.json").get("added_tokens") or []
    texts = {one.get("id"): one.get("content") for one in added if isinstance(one, dict)}
    return tuple(text for number in wanted if isinstance(text := texts.get(number), str))


def _ollama_template(directory: Path, tokens: dict[str, str]) -> str | None:
    path = directory / "chat_template.jinja"
    if not path.is_file():
        return None
    first = tokens.get("bos_token", "")
    after = json.dumps(_json(directory / "tokenizer.json").get("post_processor"), ensure_ascii=False)
    adds = bool(first) and json.dumps(first, ensure_ascii=False) in after
    return ollama.template(path.read_text(encoding="utf-8"), tokens, adds)
