"""Proves the README's sentence "Exports are tested before they ship" for merged models: for each family, the result
equals a merge in memory and loads with transformers alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import families
import small_bases as small
from merging_cases import (
    check,
)
from ratchet.models import model_spec

PACKAGES = ("exporters",)
FAMILIES = sorted(families.FAMILIES.keys() - {"mamba"})
SOME = ["falcon", "gemma2", "gpt2", "mixtral"]


@pytest.mark.parametrize(
    ("family", "merge_base"), [(one, "dequantized") for one in FAMILIES] + [(one, "original") for one in SOME]
)
def test_every_family_streams_and_equals_a_merge_in_memory(family: str, merge_base: str, tmp_path: Path) -> None:
    base, chosen = small.write_base(tmp_path / "base", family), small.settings(quantization="nf4")
    saved = small.write_adapter(tmp_path / "adapter", base, chosen)
    found = check(small.recipe(base, saved, train=chosen, merge_base=merge_base), tmp_path / "merged")
    plan = model_spec.load(base)
    assert found.is_tied == plan.tied_head
    assert found.changed == sum(layer.role in ("attention", "mlp") for layer in plan.layers)
    assert len(list((tmp_path / "merged").glob("model-0*.safetensors"))) > 1


def test_what_is_written_loads_where_there_is_nothing_but_transformers(tmp_path: Path) -> None:
    base = small.write_base(tmp_path / "base", "qwen2")
    saved = small.write_adapter(tmp_path / "adapter", base, small.settings())
    small.merge(small.recipe(base, saved), tmp_path / "merged")
    program = (
        "import sys\n"
        "for name in ('peft', 'bitsandbytes', 'ratchet'): sys.modules[name] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "import torch\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)\n"
        "print(float(model(torch.tensor([[3, 4, 5]])).logits.abs().sum()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "merged")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        assert float(done.stdout) == pytest.approx(float(model(torch.tensor([[3, 4, 5]])).logits.abs().sum()), rel=1e-5)
