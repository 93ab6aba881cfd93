"""Tests stage base: it finds every problem of a base model that would stop a later stage."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import families
import tiny_project
from ratchet.cli.base import format_base
from ratchet.config.base import Base
from ratchet.config.train import Train
from ratchet.errors import BaseModelError
from ratchet.models import base_model, loading
from ratchet.stages import base
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard, StoredQuantization

CPU = torch.device("cpu")
PLAIN = Train(quantization="none")


@pytest.fixture
def mine(layout: ProjectLayout, built: Path) -> Path:
    """Return a copy of the model that a test may change."""
    return Path(shutil.copytree(built, layout.root / "mine"))


def run(layout: ProjectLayout, **wanted: Any) -> BaseCard:
    settings = tiny_project.SETTINGS.model_copy(update={"base": Base(source="mine", **wanted)})
    return base.base(Project.from_parts(layout, settings))


def card(layout: ProjectLayout, **wanted: Any) -> BaseCard:
    run(layout, **wanted)
    return BaseCard.load(layout.base_card)


def configure(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def refused(layout: ProjectLayout, **wanted: Any) -> str:
    with pytest.raises(BaseModelError) as caught:
        run(layout, **wanted)
    assert not layout.base.exists()
    return str(caught.value)


def replaced(directory: Path, family: str, vocabulary: int = 400) -> None:
    """Replace the model by another one with the same tokenizer."""
    (directory / base_model.WEIGHTS).unlink()
    families.make(family, vocab_size=vocabulary).save_pretrained(directory)


def test_an_encoder_decoder_is_refused(layout: ProjectLayout, mine: Path) -> None:
    replaced(mine, "t5")
    assert "T5ForConditionalGeneration (t5) is an encoder-decoder" in refused(layout)


def test_a_model_in_4_bits_is_pinned_as_what_it_is(layout: ProjectLayout, mine: Path) -> None:
    plain = card(layout)
    assert plain.quantization is None
    settings = Train(quantization="nf4", double_quantization=True)
    stored = loading.load(mine, None, settings, CPU)
    (mine / base_model.WEIGHTS).unlink()
    stored.save_pretrained(mine)
    found = card(layout)
    assert found.quantization == StoredQuantization(kind="nf4", double=True, storage="uint8")
    assert found.parameters == plain.parameters
    assert "stored in 4 bits (nf4, double quantization) and used as stored" in format_base(run(layout))


def test_weights_that_the_model_does_not_have_are_named(layout: ProjectLayout, mine: Path) -> None:
    configure(mine, num_hidden_layers=1)
    message = "stored tensors do not belong to LlamaForCausalLM and are not loaded: model.layers.1."
    assert message in format_base(run(layout))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3}, "model.layers.2."),
        ({"intermediate_size": 96}, "but config.json expects 64 x 96"),
        ({"hidden_size": "wide"}, "config.json"),
        ({"model_type": "tomorrow"}, "does not know model_type tomorrow"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "already quantized (gptq)"),
    ],
    ids=["layers", "width", "text", "unknown", "zero", "gptq"],
)
def test_a_config_that_does_not_fit(layout: ProjectLayout, mine: Path, changes: dict[str, Any], words: str) -> None:
    configure(mine, **changes)
    assert words in refused(layout)


def test_pickles_are_converted_only_with_the_setting(layout: ProjectLayout, mine: Path) -> None:
    plain = card(layout)
    before = loading.load(mine, plain, PLAIN, CPU)
    torch.save(load_file(mine / base_model.WEIGHTS), mine / "pytorch_model.bin")
    (mine / base_model.WEIGHTS).unlink()
    shutil.rmtree(layout.base)
    assert "pytorch_model.bin is a pickle: for the base, set base.convert_pickles: true to convert it" in refused(
        layout
    )
    converted = card(layout, convert_pickles=True)
    assert converted.converted
    assert (converted.source, converted.parameters) == ("mine", plain.parameters)
    path = base_model.locate(layout, converted)
    assert path == layout.tiny_model
    base_model.verify_files(path, converted.files)
    after = loading.load(path, converted, PLAIN, CPU)
    assert all(torch.equal(weight, after.get_parameter(name)) for name, weight in before.named_parameters())
    assert card(layout, convert_pickles=True) == converted
    assert [name for name in mine.iterdir() if name.suffix == ".safetensors"] == []


def test_safetensors_are_preferred_to_pickles(layout: ProjectLayout, mine: Path) -> None:
    (mine / "pytorch_model.bin").write_bytes(b"never read")
    assert not card(layout, convert_pickles=True).converted
    assert not layout.tiny_model.exists()


def test_added_tokens_make_another_base_and_get_their_rows(layout: ProjectLayout, mine: Path) -> None:
    plain, more = card(layout), card(layout, added_tokens=("<tool>", "<end of tool>"))
    assert more.added_tokens == ("<tool>", "<end of tool>")
    assert plain.files == more.files
    assert len({plain.digest, more.digest, card(layout, added_tokens=("<end of tool>", "<tool>")).digest}) == 3
    tokenizer = base_model.load_tokenizer(mine, None, more.added_tokens)
    ids = tokenizer.convert_tokens_to_ids(list(more.added_tokens))
    rows = len(loading.load(mine, plain, PLAIN, CPU).get_input_embeddings().weight)
    assert ids == [rows, rows + 1]
    model = loading.load(mine, more, Train(), CPU)
    assert len(model.get_input_embeddings().weight) == len(model.get_output_embeddings().weight) == rows + 2
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("stored", "rows"), [(512, 512), (390, 400)], ids=["padded", "tokenizer knows more"])
def test_embeddings_have_a_row_for_every_token_and_never_shrink(
    stored: int, rows: int, layout: ProjectLayout, mine: Path
) -> None:
    replaced(mine, "llama", vocabulary=stored)
    model = loading.load(mine, card(layout), PLAIN, CPU)
    assert len(model.get_input_embeddings().weight) == model.config.vocab_size == rows
    more = loading.load(mine, card(layout, added_tokens=("<tool>",)), PLAIN, CPU)
    assert len(more.get_input_embeddings().weight) == max(rows, 401)


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path(__file__).with_name("ran").touch()

class OwnConfig(LlamaConfig):
    model_type = "users-own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory in which transformers puts the code that it runs."""
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    return tmp_path / "modules"


def with_code(directory: Path, place: str = "own") -> None:
    (directory / "own.py").write_text(CODE)
    names = {"AutoConfig": f"{place}.OwnConfig", "AutoModelForCausalLM": f"{place}.OwnForCausalLM"}
    configure(directory, model_type="users-own", architectures=["OwnForCausalLM"], auto_map=names)


def test_code_runs_only_when_the_model_is_named_again(layout: ProjectLayout, mine: Path, modules: Path) -> None:
    plain = loading.load(mine, None, PLAIN, CPU)
    with_code(mine)
    assert "set base.trust_remote_code to the value of base.source" in refused(layout)
    assert not list(modules.rglob("ran"))
    trusted = card(layout, trust_remote_code="mine")
    assert list(modules.rglob("ran"))
    assert trusted.remote_code
    assert "own.py" in trusted.files
    assert trusted.architecture == "OwnForCausalLM"
    loaded = loading.load(mine, trusted, PLAIN, CPU)
    assert type(loaded).__name__ == "OwnForCausalLM"
    assert torch.equal(loaded.lm_head.weight, plain.lm_head.weight)
    with pytest.raises(BaseModelError, match=r"base\.trust_remote_code"):
        loading.load(mine, None, PLAIN, CPU)
    (mine / "own.py").write_text(CODE + "\n# changed\n")
    with pytest.raises(BaseModelError, match=r"own\.py: changed since the base was pinned"):
        base_model.verify_files(mine, trusted.files)


def test_code_in_another_repository_is_not_run(layout: ProjectLayout, mine: Path, modules: Path) -> None:
    with_code(mine, place="another/user--own")
    message = refused(layout, trust_remote_code="mine")
    assert "takes its code from another repository (another/user--own.OwnConfig)" in message
    assert not list(modules.rglob("ran"))


def test_code_that_the_config_does_not_name_is_not_part_of_the_model(layout: ProjectLayout, mine: Path) -> None:
    (mine / "convert.py").write_text("raise SystemExit")
    assert "convert.py" not in card(layout).files
