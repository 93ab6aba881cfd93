"""The example projects: their settings are valid and fit the GPU that they name, and `ratchet init --example` makes
projects of them."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from init_cases import requests
from ratchet.cli.init import format_init
from ratchet.cli.main import main
from ratchet.config import params_file, units
from ratchet.data.conversation import SourceRow, missing_part_reason
from ratchet.data.sources import SourceReader
from ratchet.models import model_spec
from ratchet.stages import init
from ratchet.stages.forecast import ForecastOptions, forecast
from ratchet.storage.layout import ProjectLayout

ROOT = Path(__file__).parents[2]
LARGEST_SHARE = 0.9
"""Share of a GPU's memory that the forecast may need: the rest is for the display, fragments and buffers of NCCL."""


def qwen(hidden: int, intermediate: int, layers: int, heads: tuple[int, int], tied: bool) -> Qwen2Config:
    """Return the shape of a Qwen2.5 model (arXiv 2412.15115, table 1; config.json on the hub)."""
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"], hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads[0], num_key_value_heads=heads[1],
        vocab_size=151936 if tied else 152064, tie_word_embeddings=tied, max_position_embeddings=32768,
    )  # fmt: skip


def llama(hidden: int, intermediate: int, layers: int, heads: int) -> LlamaConfig:
    """Return the shape of a Llama 3 model (arXiv 2407.21783, table 3; config.json on the hub)."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8, vocab_size=128256,
        tie_word_embeddings=False, max_position_embeddings=131072,
    )  # fmt: skip


MODELS: dict[str, tuple[PretrainedConfig, float]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": (qwen(896, 4864, 24, (14, 2), True), 0.49),
    "Qwen/Qwen2.5-1.5B-Instruct": (qwen(1536, 8960, 28, (12, 2), True), 1.54),
    "Qwen/Qwen2.5-7B-Instruct": (qwen(3584, 18944, 28, (28, 4), False), 7.62),
    "meta-llama/Llama-3.1-8B-Instruct": (llama(4096, 14336, 32, 32), 8.03),
    "meta-llama/Llama-3.3-70B-Instruct": (llama(8192, 28672, 80, 64), 70.6),
}
"""Shape and published number of parameters, in billions, by hub id."""


class Promise(NamedTuple):
    """The machine that an example names, in GiB of each GPU, and GPUs."""

    memory: int
    gpus: int = 1


EXAMPLES = {
    "1.5b-8gb": Promise(8), "8b-24gb": Promise(24), "70b-4x48gb": Promise(48, 4), "classification": Promise(8),
    "chat": Promise(24), "tool-calling": Promise(24), "distillation": Promise(16), "spot": Promise(24),
    "preferences": Promise(24),
}  # fmt: skip


def readme(name: str) -> str:
    return (init.EXAMPLES / name / "README.md").read_text(encoding="utf-8")


def test_every_example_is_tested_and_listed_in_the_documentation() -> None:
    assert init.list_examples() == sorted(EXAMPLES)
    page = (ROOT / "docs" / "tutorial_your_data.md").read_text(encoding="utf-8")
    assert [name for name in EXAMPLES if f"`{name}`" not in page] == []


@pytest.mark.parametrize(("hub_id", "model"), MODELS.items())
def test_the_shapes_have_the_published_number_of_parameters(
    hub_id: str, model: tuple[PretrainedConfig, float], tmp_path: Path
) -> None:
    config, billions = model
    config.save_pretrained(tmp_path)
    assert model_spec.load(tmp_path).parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "promise"),
    [
        pytest.param(*item, marks=pytest.mark.long if item[0] in ("distillation", "preferences") else [])
        for item in EXAMPLES.items()
    ],
)
def test_the_forecast_fits_the_gpu_and_is_the_figure_of_the_readme(name: str, promise: Promise, tmp_path: Path) -> None:
    settings = params_file.load(init.EXAMPLES / name / "params.yaml")
    layout = ProjectLayout(tmp_path)
    base = tmp_path / "base"
    MODELS[settings.base.source][0].save_pretrained(base)
    if settings.train.distill.is_online:  # the README downloads this one
        MODELS["Qwen/Qwen2.5-7B-Instruct"][0].save_pretrained(tmp_path / str(settings.train.distill.teacher))
    found = forecast(layout, settings, ForecastOptions(base=base, device="cuda", ranks=promise.gpus))
    assert found.needed_bytes <= LARGEST_SHARE * promise.memory * units.GIB
    assert f"Forecast: {found.needed_bytes / units.GIB:.2f} GiB" in readme(name)
    assert found.forecast.row_tokens in (settings.prepare.max_tokens, settings.train.pack_tokens)
    assert settings.machine.gpus in ("auto", promise.gpus)
    text = readme(name) + (init.EXAMPLES / name / "params.yaml").read_text(encoding="utf-8")
    assert f"{promise.memory} GB" in text


def test_70b_parameters_do_not_fit_one_of_its_gpus_without_sharding(tmp_path: Path) -> None:
    settings = params_file.load(init.EXAMPLES / "70b-4x48gb" / "params.yaml")
    MODELS[settings.base.source][0].save_pretrained(tmp_path)
    alone = params_file.apply_changes(settings, {"machine.shard_base": False})
    found = forecast(None, alone, ForecastOptions(base=tmp_path, device="cuda", ranks=4, rows=1))
    assert 46 * units.GIB < found.needed_bytes < 47 * units.GIB  # the README has this figure


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_has_the_lines_that_dvc_reads(name: str) -> None:
    text = (init.EXAMPLES / name / "params.yaml").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    assert 15 <= len(readme(name).splitlines()) <= 25
    assert f"--example {name}" in readme(name)
    assert "**Not run.**" in readme(name)
    stages = yaml.safe_load(Path(init.__file__).with_name("dvc_template.yaml").read_text(encoding="utf-8"))["stages"]
    document = yaml.safe_load(text)
    for key in {key for stage in stages.values() for key in stage["params"]}:
        node: Any = document
        for part in key.split("."):
            assert part in node, key
            node = node[part]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_record_of_the_readme_is_a_row(name: str, tmp_path: Path) -> None:
    settings = params_file.load(init.EXAMPLES / name / "params.yaml")
    record = re.findall(r"^```json\n(.+)\n```$", readme(name), re.MULTILINE)[0]
    layout = ProjectLayout(tmp_path)
    layout.raw.mkdir(parents=True)
    (layout.raw / "rows.jsonl").write_text(f"{record}\n", encoding="utf-8")
    [row] = SourceReader(tmp_path, settings.prepare).rows()
    assert isinstance(row, SourceRow)
    assert missing_part_reason(row) is None
    assert bool(row.conversation.tools) is (name == "tool-calling")


def test_a_project_has_the_settings_of_the_example_and_the_data_columns_and_base_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"said": row["prompt"], "topic": row["response"]} for row in requests(80)]
    Path("my rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = init.init(
        "desk", "my rows.jsonl", example="classification", prompt="said", response="topic", base="org/model"
    )
    assert (result.rows, result.task, result.base) == (80, "labels", "org/model")
    layout = ProjectLayout(tmp_path / "desk")
    made, example = params_file.load(layout.params), params_file.load(init.EXAMPLES / "classification" / "params.yaml")
    assert (made.train, made.gate, made.machine) == (example.train, example.gate, example.machine)
    assert [source.files for source in made.prepare.sources] == ["data/raw/my rows.jsonl"]
    assert (made.prepare.columns.prompt, made.prepare.columns.response) == ("said", "topic")
    assert (made.base.revision, made.promote.model_name) == ("main", "desk")
    assert "# accuracy is measured" in layout.params.read_text(encoding="utf-8")
    assert (layout.root / "README.md").read_text(encoding="utf-8") == readme("classification")
    tracked = subprocess.run(["git", "ls-files"], cwd=layout.root, check=True, capture_output=True, text=True).stdout
    assert {"params.yaml", "dvc.yaml", "README.md", "data/raw.dvc"} <= set(tracked.splitlines())


def test_an_example_without_data_says_where_the_rows_belong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--example", "chat"]) == 0
    result = init.init("other", example="chat")
    assert "copy your rows to other/data/raw/rows.jsonl" in format_init(result)
    assert not (tmp_path / "chat" / "data" / "raw.dvc").exists()


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["new", "--example", "none"], "--example none: no such example; expected one of: 1.5b-8gb, 70b-4x48gb"),
        (["there", "--example", "chat"], "there: exists and is not empty"),
        (["new", "--example", "chat", "--revision", "v1"], "--revision v1: name its base too"),
        (["new", "--example", "chat", "--data", "rows.csv"], "columns"),
        (["new"], "--data: missing"),
        ([], "DIR: missing"),
    ],
)
def test_a_refused_init_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str],
    message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("there", "params.yaml").write_text("mine\n", encoding="utf-8")
    Path("rows.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    before = sorted(map(str, tmp_path.rglob("*")))
    assert main(["init", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert sorted(map(str, tmp_path.rglob("*"))) == before
    assert Path("there", "params.yaml").read_text(encoding="utf-8") == "mine\n"
