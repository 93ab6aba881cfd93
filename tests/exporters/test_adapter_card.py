"""Tests model cards: metadata for the hub, and correct contents."""

import re
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from ratchet.config.export import Export
from ratchet.config.train import AdaLoraSettings, Train
from ratchet.models import model_card
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.training import AdapterAnalysis, ModuleAnalysis, TrainReport

HUB = BaseCard(
    source="some-lab/Some-1B-Instruct", revision="0123abcd" * 5, digest="d" * 64, files={},
    architecture="LlamaForCausalLM", parameters=1_234_567, licence="Apache-2.0",
)  # fmt: skip
TINY = BaseCard(**{**HUB.model_dump(), "source": "tiny", "revision": None})
LOCAL = BaseCard(**{**HUB.model_dump(), "source": "/home/someone/models/secret", "revision": None, "licence": None})

REPORT = TrainReport(
    run_id="run0", adapter_digest="a" * 64, base_digest="d" * 64, data_digest="e" * 64, steps=40, planned_steps=60,
    best_step=30, kept_step=30, validation_loss={30: 1.23456, 40: 1.5}, final_train_loss=1.1, trained_tokens=12_345,
    input_tokens=23_456, quantized_parameters=1000, trainable_parameters=8_388_608, total_parameters=6_746_804_224,
)  # fmt: skip

MERGED = Export(merge_base="dequantized")


def module(update: float, rank: float) -> ModuleAnalysis:
    return ModuleAnalysis(
        rank=16, parameters=100, gradient_norms=(1.0,), weight_norm=10.0, update_norm=update, singular_values=(1.0,),
        effective_rank=rank,
    )  # fmt: skip


ANALYSIS = AdapterAnalysis(
    steps=(1,), modules={"a": module(1.0, 4.0), "b": module(2.0, 8.0), "c": module(0.1, 2.0)}, unchanged_modules=("c",),
    advice=(),
)  # fmt: skip


def rows(text: str) -> dict[str, str]:
    """Return the rows of all tables of a card."""
    return dict(re.findall(r"^\| ([^|]+) \| (.*) \|$", text, re.MULTILINE))


def front(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return found


def test_the_hub_reads_the_front_of_both_cards() -> None:
    adapter = model_card.render_for_adapter(HUB, Train(), REPORT)
    assert front(adapter) == {
        "library_name": "peft", "pipeline_tag": "text-generation", "base_model": "some-lab/Some-1B-Instruct",
        "base_model_relation": "adapter", "license": "apache-2.0", "tags": ["lora", "qlora", "ratchet"],
    }  # fmt: skip
    model = model_card.render_for_model(HUB, Train(), REPORT, Export())
    assert front(model) == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "base_model": "some-lab/Some-1B-Instruct",
        "base_model_relation": "finetune", "license": "apache-2.0", "tags": ["lora", "ratchet"],
    }  # fmt: skip
    for text in (adapter, model):
        data = ModelCard(text).data
        assert (data.base_model, data.license) == (HUB.source, "apache-2.0")


def test_values_equal_those_of_the_records() -> None:
    found = rows(
        model_card.render_for_model(HUB, Train(rank=8, alpha=24, target_modules="attention"), REPORT, MERGED, ANALYSIS)
    )
    assert found["Trained weights"] == "8,388,608 of 6,746,804,224 (0.12%)"
    assert found["Rank"] == "8"
    assert found["Alpha"] == "24; updates are multiplied by alpha / rank"
    assert found["Targets"] == "`attention`"
    assert found["Quantization in training"].startswith("NF4, 4 bits in uint8 tensors: 1,000 of ")
    assert found["Validation loss"] == "1.2346 nats per answer token"
    assert found["Weights"] == "float32, the adapter merged into the dequantized base; sums in float32"
    assert found["Data, SHA-256"] == f"`{'e' * 64}`"
    assert found["Revision"] == f"`{HUB.revision}`"


@pytest.mark.parametrize(
    ("train", "row", "said"),
    [
        (Train(adapter="dora"), "Method", "DoRA"),
        (Train(use_rslora=True), "Alpha", "32; updates are multiplied by alpha / sqrt(rank), rsLoRA"),
        (Train(rank_pattern={"q_proj": 4}), "Rank", "16; q_proj: 4"),
        (
            Train(adapter="adalora", adalora=AdaLoraSettings(target_rank=8)),
            "Rank",
            "16 at first, 8 on average at the end",
        ),
        (Train(quantization="none", initialization="pissa"), "Initialized as", "principal singular vectors"),
        (Train(quantization="none"), "Quantization in training", "not quantized"),
        (Train(quantization="fp4", double_quantization=False), "Quantization in training", "constants in float32"),
        (Train(loraplus_lr_ratio=16), "Learning rate", "matrices B at 16 times that, LoRA+"),
        (Train(objective="kto", beta=0.2), "Objective", "KTO, beta 0.2"),
        (Train(objective="kto"), "Validation loss", "1.2346 per answer"),
        (Train(objective="dpo", batch_size=8), "Rows per step", "8 pairs"),
        (Train(target_modules=r".*\.(q|v)_proj"), "Targets", r"`.*\.(q\|v)_proj`"),
    ],
    ids=[
        "dora",
        "rslora",
        "pattern",
        "adalora",
        "pissa",
        "none",
        "fp4",
        "loraplus",
        "objective",
        "unit",
        "pairs",
        "regex",
    ],
)
def test_settings_are_listed(train: Train, row: str, said: str) -> None:
    assert said in rows(model_card.render_for_adapter(HUB, train, REPORT))[row]


def test_analysis_is_summed_up() -> None:
    text = model_card.render_for_adapter(HUB, Train(), REPORT, ANALYSIS)
    assert "3 modules have an adapter. The median update is 10.00% of a module's weights, the largest 20.00%" in text
    assert "effective rank (Roy and Vetterli 2007) is 4.0 of 16" in text
    assert "1 of them hardly changed: `c`." in text
    assert "Effects of training" not in model_card.render_for_adapter(HUB, Train(), REPORT)


def test_added_tokens_are_named_and_can_break_nothing() -> None:
    tokens = ("<|tool|>", "a\nb", *(f"<{number}>" for number in range(20)))
    base = BaseCard(**{**HUB.model_dump(), "added_tokens": tokens})
    text = model_card.render_for_adapter(base, Train(), REPORT)
    said = rows(text)["Added tokens"]
    assert said.startswith("22: `<\\|tool\\|>`, `a\\nb`, `<0>`")
    assert said.endswith("and 10 more; their embedding rows were trained")
    code = text.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert "tokenizer.add_tokens(" in code


@pytest.mark.parametrize("base", [TINY, LOCAL], ids=["tiny", "directory"])
def test_a_base_that_is_not_from_the_hub_is_named_by_what_it_is(base: BaseCard) -> None:
    for text in (
        model_card.render_for_adapter(base, Train(), REPORT),
        model_card.render_for_model(base, Train(), REPORT, Export()),
    ):
        assert "base_model" not in front(text)
        assert "/home" not in text
        assert rows(text)["Model"].startswith("not from the hub, LlamaForCausalLM")
    assert ("license" in front(text)) == (base is TINY)


def test_a_licence_that_is_no_identifier_is_another_one() -> None:
    base = BaseCard(**{**HUB.model_dump(), "licence": 'My "own": licence'})
    found = front(model_card.render_for_adapter(base, Train(), REPORT))
    assert (found["license"], found["license_name"]) == ("other", 'My "own": licence')
