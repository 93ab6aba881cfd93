"""Tests README.md of a promoted model: origin, measurements of each format, and no path or time."""

import re
from pathlib import Path

import pytest
import yaml

from promoted_models import artifact, distance, write_fake_export
from ratchet.registry.deployment import model_card, server_files
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.evaluation import (
    REFUSED_UNSAFE,
    EvaluationReport,
    GroupDifference,
    MetricValue,
    ModelScores,
    SafetyReport,
)
from ratchet.storage.records.export import BaseScan, MergeParity, MergeReport, ModelBundle, ModelLineage, TaskScore
from ratchet.storage.records.gate import ForcedPromotion

FORMATS = ("hf", "gguf/q8_0", "onnx/int8")
TASK = TaskScore(
    metric="exact_match", rows=200, value=0.925, reference=0.935, difference=-0.01, low=-0.04, high=0.02,
    same_answers=0.98,
)  # fmt: skip


def lineage(**about: object) -> ModelLineage:
    facts = {
        "source": "org/some_base", "revision": "c" * 40, "digest": "b" * 64, "files": {}, "parameters": 1234567,
        "architecture": "LlamaForCausalLM", "licence": "Apache-2.0",
    }  # fmt: skip
    return ModelLineage(
        base=BaseCard.model_validate(facts | about), data_digest="d" * 64, data_rows={"train": 3000, "test": 600},
        data_licence="CC-BY-4.0", settings={}, run_id="run", kept_step=40, code="1.0", recipe="e" * 64,
        sbom_digest="f" * 64, scan=BaseScan(files=1, pickles=(), suspicious=(), scanner="none"),
    )  # fmt: skip


def bundle(root: Path, origin: ModelLineage | None, merge: MergeReport | None = None) -> ModelBundle:
    write_fake_export(root, "a", FORMATS)
    formats = [artifact(root, form) for form in FORMATS]
    formats[1] = formats[1].model_copy(update={
        "task": TASK, "notes": ("ends at <|end|>, too",), "distance": distance().model_copy(update={"kl": 0.0123}),
    })  # fmt: skip
    parity = MergeParity(
        rows=1, tokens=200, max_logit_difference=3e-5, mean_logit_difference=1e-6, greedy_agreement=0.995
    )
    return ModelBundle(
        model_digest="1" * 64, adapter_digest="a" * 64, base_digest="b" * 64, data_digest="d" * 64, run_id="run",
        merge_base="dequantized", dtype="float32", size_bytes=1, parity=parity, base_weight_format="nf4+dq uint8",
        merge=merge,
        artifacts=tuple(formats), lineage=origin,
    )  # fmt: skip


def written(
    root: Path, origin: ModelLineage | None, forced: ForcedPromotion | None = None, merge: MergeReport | None = None
) -> str:
    return server_files.build_model_files(root, bundle(root, origin, merge), "some_model", forced)["README.md"].decode()


def cells(text: str, first: str) -> list[str]:
    """Return the cells of the table row that begins with this cell."""
    [row] = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def test_the_card_names_the_origin_of_the_model(tmp_path: Path) -> None:
    text = written(tmp_path, lineage(), merge=MergeReport(
        adapters={"a" * 64: 0.5, "9" * 64: 1.0}, modules=(), changed=7, streamed=True, trials=(),
    ))  # fmt: skip
    front = yaml.safe_load(text.split("---")[1])
    assert {key: value for key, value in front.items() if key != "model-index"} == {
        "pipeline_tag": "text-generation", "base_model": "org/some_base", "base_model_relation": "finetune",
        "license": "apache-2.0", "tags": ["ratchet"],
    }  # fmt: skip
    (index,) = front["model-index"]
    assert index["name"] == "some_model"
    scores = {metric["name"]: metric["value"] for result in index["results"] for metric in result["metrics"]}
    assert scores == {"exact_match of gguf/q8_0": 0.925}
    assert "\n# some\\_model\n" in text
    assert cells(text, "Base")[1].startswith("[org/some\\_base](https://huggingface.co/org/some_base) at `cccc")
    assert cells(text, "Data")[1] == "rows: 600 test, 3,000 train; licence: CC-BY-4.0"
    assert cells(text, "Data SHA-256")[1] == f"`{'d' * 64}`"
    assert cells(text, "Run")[1] == "`run`, weights of step 40"
    assert cells(text, "Adapters merged")[1] == f"`{'9' * 64}` x 1, `{'a' * 64}` x 0.5"
    assert "3e-05" in cells(text, "Merged model compared with base + adapter")[1]
    assert "99.50%" in cells(text, "Merged model compared with base + adapter")[1]


def test_the_card_lists_each_format_with_its_measurements_and_usage(tmp_path: Path) -> None:
    text = written(tmp_path, lineage())
    size = (tmp_path / "gguf" / "model-q8_0.gguf").stat().st_size
    assert cells(text, "`gguf/q8_0`") == [
        "`gguf/q8_0`", "q8\\_0", str(size), "0.0123", "100.00%", "0.925 (-0.01, -0.04 to +0.02)", "some runtime 1",
    ]  # fmt: skip
    scores = [cells(text, f"`{form}`")[5] for form in FORMATS]
    assert scores == ["no answers", "0.925 (-0.01, -0.04 to +0.02)", "no answers"]
    assert "exact\\_match on 200 test rows; base + adapter has 0.935" in text
    assert "- `gguf/q8_0`: ends at \\<\\|end\\|\\>, too\n" in text
    use = text.split("## Usage")[1]
    assert 'from_pretrained("hf"' in use
    assert "llama-server --model gguf/model-q8_0.gguf --alias some_model --host 127.0.0.1" in use
    assert 'InferenceSession("onnx/int8/model.onnx")' in use
    for form in ("hf", "gguf/model-q8_0.gguf", "onnx/int8/model.onnx"):
        assert (tmp_path / form).exists()


@pytest.mark.parametrize("source", ["tiny", "/home/ada/secret_models/base", "../bases/llama"])
def test_equal_facts_give_equal_bytes_without_paths(tmp_path: Path, source: str) -> None:
    text = written(tmp_path / "one", lineage(source=source, revision=None, licence="Ada's own | terms"))
    assert text == written(tmp_path / "two", lineage(source=source, revision=None, licence="Ada's own | terms"))
    assert str(tmp_path) not in text
    assert (source in text) == (source == "tiny")
    assert cells(text, "Licence of the base")[1] == "Ada's own \\| terms"
    front = yaml.safe_load(text.split("---")[1])
    assert (front["license"], front["license_name"]) == ("other", "Ada's own | terms")
    assert "base_model" not in front


def test_a_bundle_without_lineage_has_a_card(tmp_path: Path) -> None:
    text = written(tmp_path, None)
    assert cells(text, "Base SHA-256")[1] == f"`{'b' * 64}`"
    assert "| Base |" not in text


@pytest.mark.parametrize(
    ("decision", "against"), [("REJECT", "the gate's decision REJECT"), ("PROMOTE", "a rollback of this model")]
)
def test_a_forced_promotion_is_named_first(tmp_path: Path, decision: str, against: str) -> None:
    forced = ForcedPromotion.model_validate({"actor": "ada", "reason": "<b>it</b> *must* | go", "decision": decision})
    text = written(tmp_path, lineage(), forced)
    said = f"**FORCED by ada despite {against}: \\<b\\>it\\</b\\> \\*must\\* \\| go**"
    assert text.split("---\n")[2].split("\n\n")[:2] == ["\n# some\\_model", said]
    guides = server_files.build_model_files(tmp_path, bundle(tmp_path, None), "m", forced)
    assert all(said in guides[name].decode() for name in guides if name.endswith("SERVE.md"))
    assert "FORCED" not in written(tmp_path, lineage())


def test_texts_are_plain() -> None:
    assert (
        model_card.describe_forced(ForcedPromotion(actor="ada", reason="why", decision="HOLD"))
        == "FORCED by ada despite the gate's decision HOLD: why"
    )
    assert model_card.escape_markdown("a\nb \u202e c") == "a b \\\\u202e c"


def test_card_says_what_was_tested_and_what_was_not(tmp_path: Path) -> None:
    text = written(tmp_path, None)
    coverage = text.partition("## What was tested and what was not")[2]
    assert coverage.count("- Not tested: ") == 8 and "- Tested: " not in coverage

    share = MetricValue(value=0.98, n=50, low=0.9, high=1.0, better="higher", unit="proportion")
    scores = ModelScores(
        model_digest="1" * 64, model_format="adapter", contract="c", samples={},
        metrics={REFUSED_UNSAFE: share, "accuracy": share},
    )  # fmt: skip
    about = GroupDifference(
        score="refused", first="A|B", second="C", templates=24, difference=0.5, low=0.2, high=0.8, p=0.01
    )
    safety = SafetyReport(
        scorer="patterns", tested=(REFUSED_UNSAFE, "bias"), untestable_rows=3,
        differences={"candidate": (about, about.model_copy(update={"p": 0.9}))},
    )  # fmt: skip
    report = EvaluationReport(
        adapter_digest="a" * 64, base_digest="b" * 64, data_digest="d" * 64, run_id="run", model_digest=None,
        champion_digest=None, test_set_digest="e" * 64, contracts={"c": {}}, scores={"candidate": scores},
        safety=safety,
    )  # fmt: skip
    model = bundle(tmp_path, None)
    card = server_files.build_model_files(tmp_path, model, "m", evaluation=report)["README.md"].decode()
    coverage = card.partition("## What was tested and what was not")[2]
    assert "- Tested: refusal of unsafe prompts." in coverage and coverage.count("- Not tested: ") == 6
    assert cells(coverage, r"safety/refused\_unsafe") == [r"safety/refused\_unsafe", "0.98", "0.9 to 1", "50", ""]
    assert "| accuracy" not in coverage
    assert coverage.count("Difference between groups") == 1 and r"C minus A\|B +0.500 (+0.200 to +0.800" in coverage
    assert "Training rows that were too short to be tested for memorization: 3." in coverage
