"""Tests files for servers: Ollama's template equals Jinja's, commands listen on loopback, MLflow's model loads."""

import json
import re
import shlex
from pathlib import Path

import jinja2
import pytest
import yaml

from promoted_models import CHATML, NAME, store_fake_model, write_fake_export
from ratchet.errors import DamagedFileError
from ratchet.registry.deployment import server_files
from ratchet.storage.layout import ProjectLayout

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '<|stop|>\n\n' + m['content'] | trim }}"
    "{{ '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\n\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind {{now}}.<|im_end|>\n' }}{% endif %}"
    + CHATML
)
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{% generation %}{{ ' ' + m['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
SYSTEM_IN_QUESTION = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
    "{% elif m.role == 'user' %}{{ '[INST] ' + ns.s + m.content + ' [/INST]' }}{% set ns.s = '' %}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)

Talk = list[dict[str, str]]
TALK: Talk = [
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Well, and {{ you }}?"},
    {"role": "user", "content": "Ça va 🙂"},
]
SYSTEM: Talk = [{"role": "system", "content": "Speak plainly."}]


def go(text: str, talk: Talk) -> str:
    """Render the subset of Go's text/template that our templates use."""
    system = next((m["content"] for m in talk if m["role"] == "system"), "")
    if found := re.match(r"\{\{ if not \.System \}\}(.*?)\{\{ end \}\}(?=\{\{ range)", text, re.DOTALL):
        text = ("" if system else found[1]) + text[found.end() :]
    before, _, rest = text.partition("{{ range .Messages }}")
    body, _, after = rest.rpartition("{{ end }}{{ end }}")
    parts = re.split(r'\{\{ (?:else )?if eq \.Role "(\w+)" \}\}', body)
    branches = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert parts[0] == ""
    written = [branches.get(m["role"], "").replace("{{ .Content }}", m["content"]) for m in talk]
    return "".join(part.replace('{{ "{{" }}', "{{") for part in (before, *written, after))


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize(
    ("template", "system"),
    [(CHATML, True), (LLAMA3, True), (DEFAULT_SYSTEM, True), (NO_SYSTEM, False)],
    ids=["chatml", "llama3", "a default system message", "no system message"],
)
def test_the_go_template_equals_jinja(template: str, system: bool, adds_bos: bool) -> None:
    text = server_files.convert_template(template, TOKENS, adds_bos)
    assert text is not None
    plain = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    compiled = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(plain)  # noqa: S701 (no HTML)
    for talk in (TALK, TALK[:1], *((SYSTEM + TALK, SYSTEM + TALK[:1]) if system else ())):
        expected = compiled.render(messages=talk, add_generation_prompt=True, **TOKENS)
        assert go(text, talk) == (expected.removeprefix("<s>") if adds_bos else expected)


@pytest.mark.parametrize(
    "template",
    [
        SYSTEM_IN_QUESTION,
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
        "{{ messages[-1].content }}",
        "{% for m in messages %}{{ m.role }}{{ loop.index }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        '{% for m in messages %}{{ m.role + \'"""\' + m.content }}{% endfor %}',
        "{{ 1 / 0 }}",
    ],
    ids=["system in question", "reversed", "last only", "numbered", "no Jinja", "break out", "three quotes", "zero"],
)
def test_a_template_that_ollama_cannot_express(template: str) -> None:
    assert server_files.convert_template(template, TOKENS, adds_bos=False) is None


def test_modelfile_and_commands(project: ProjectLayout) -> None:
    source = project.root / "made"
    formats = ("hf", "gguf/q8_0", "bitsandbytes/int8", "onnx/int8")
    write_fake_export(source, "a", formats)
    bundle = store_fake_model(project, source, formats)
    folder = project.promoted_model(bundle.model_digest) / "serving"
    lines = (folder / "gguf-q8_0" / "Modelfile").read_text()
    assert lines.startswith(
        'FROM ./gguf/model-q8_0.gguf\nPARAMETER temperature 0\nPARAMETER num_ctx 128\nPARAMETER stop "<|im_end|>"\n'
        'TEMPLATE """{{ range .Messages }}'
    )
    assert lines.endswith('{{ end }}{{ end }}<|im_start|>assistant\n"""\n')
    guides = {path.parent.name: path.read_text() for path in folder.glob("*/SERVE.md")}
    assert guides.keys() == {"hf", "gguf-q8_0", "bitsandbytes-int8", "onnx-int8"}
    assert "    vllm serve ./bitsandbytes/int8 --served" in guides.pop("bitsandbytes-int8")
    commands = [shlex.split(line) for text in guides.values() for line in text.splitlines() if line.startswith("    ")]
    by_name = {command[0]: command for command in commands}
    assert by_name["llama-server"][1:3] == ["--model", "gguf/model-q8_0.gguf"]
    assert by_name["vllm"][:3] == ["vllm", "serve", "./hf"]
    assert NAME in by_name["vllm"]
    for name in ("llama-server", "vllm"):
        assert by_name[name][by_name[name].index("--host") + 1] == "127.0.0.1"
    assert "onnx/int8/model.onnx" in guides["onnx-int8"]


def test_a_model_without_an_ollama_template_has_a_comment(tmp_path: Path) -> None:
    write_fake_export(tmp_path, "a")
    (tmp_path / "hf" / "chat_template.jinja").write_text(SYSTEM_IN_QUESTION)
    facts = server_files.read_facts(tmp_path / "hf", "m")
    text = server_files.render_modelfile("x.gguf", facts)
    assert text.startswith("# Ollama cannot express this model's chat template")
    assert "TEMPLATE" not in text.replace("# Ollama", "")


def test_context_and_end_tokens_come_from_the_files(tmp_path: Path) -> None:
    write_fake_export(tmp_path, "a")
    config = {"text_config": {"max_position_embeddings": 131072}, "dtype": "bfloat16"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [3, 99]}')
    facts = server_files.read_facts(tmp_path / "hf", "m")
    found = (facts.context_tokens, facts.max_context_tokens, facts.dtype, facts.end_texts)
    assert found == (8192, 131072, "bfloat16", ("<|im_end|>",))
    (tmp_path / "hf" / "config.json").write_text("[]")
    with pytest.raises(DamagedFileError, match=r"config\.json: expected a model's config"):
        server_files.read_facts(tmp_path / "hf", "m")


def test_mlflow_files_trust_no_code_and_no_hub(tmp_path: Path) -> None:
    write_fake_export(tmp_path, "a")
    found = server_files.mlmodel_files(tmp_path / "hf")
    assert sorted(name for name in found if "/" in name) == [
        "components/tokenizer/chat_template.jinja", "components/tokenizer/tokenizer.json",
        "components/tokenizer/tokenizer_config.json",
    ]  # fmt: skip
    flavor = yaml.safe_load(found["MLmodel"])["flavors"]["transformers"]
    import transformers

    assert hasattr(transformers, flavor["pipeline_model_type"])
    assert hasattr(transformers, flavor["tokenizer_type"])
    assert "source_model_name" not in flavor
    assert all(re.fullmatch(r"[a-z]+==[\d.]+", line) for line in found["requirements.txt"].decode().splitlines())
