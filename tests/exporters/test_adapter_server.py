"""`ratchet adapters`: several adapters in one llama.cpp server, each chosen by a request, as a user starts it."""

import argparse
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import tiny_project
from ratchet.cli import adapters as command
from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.errors import BaseModelError, SettingsError
from ratchet.models import base_model
from ratchet.models.runtimes import llama_server
from ratchet.stages.adapters import adapters
from ratchet.stages.project import Project
from ratchet.stages.verify import verify
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.export import AdapterServer

SETTINGS: Settings = params_file.apply_changes(
    tiny_project.SETTINGS, {"export.gguf.types": ["f32"], "export.parity_rows": 4}
)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    """Create a project with two adapters; the second one has ranks and scales that differ by module."""
    torch.set_num_threads(1)
    found = tiny_project.prepared(tmp_path_factory.mktemp("adapters") / "project", SETTINGS)
    mixed = params_file.apply_changes(
        SETTINGS, {"train.rank_pattern": {"q_proj": 2}, "train.alpha_pattern": {"k_proj": 32}, "train.use_rslora": True}
    )
    tiny_project.adapted(found, mixed, seed=9, strength=0.3)
    shutil.copytree(found.adapter, found.root / "mixed")
    tiny_project.adapted(found, SETTINGS)
    return found


@pytest.fixture(scope="module")
def served(layout: ProjectLayout) -> tuple[Path, AdapterServer]:
    folder = layout.root / "served"
    named = {"intents": layout.adapter, "mixed": layout.root / "mixed"}
    return folder, adapters(Project.from_parts(layout, SETTINGS), folder, named)


def test_each_request_gets_its_adapter(served: tuple[Path, AdapterServer]) -> None:
    folder, report = served
    files.verify_sealed(folder, "adapters")
    assert verify([folder]).is_intact
    assert AdapterServer.load(folder / "adapters.json") == report
    assert report.base.kl < 1e-8 and report.base.greedy_agreement == 1
    for found in report.adapters:
        assert found.distance.kl < 1e-6 and found.effect > 1e-3
    assert [(found.name, found.rank) for found in report.adapters] == [("intents", 4), ("mixed", 4)]
    names = [folder / "gguf" / f"{found.name}.gguf" for found in report.adapters]
    prompt = [1, 5, 9, 20, 7]
    with llama_server.start_server(folder / report.base_file, 1, 64, "f32", adapters=names) as server:
        answers = []
        for adapter in (None, 0, 1, None, 1, 0):
            server.adapter = adapter
            answers.append(server.completion(prompt, 12, cache_prompt=False)["tokens"])
        plain, first, second, *again = answers
        assert again == [plain, second, first], "an answer does not depend on earlier requests"
        assert len({tuple(plain), tuple(first), tuple(second)}) == 3


def test_files_for_servers_name_every_adapter(served: tuple[Path, AdapterServer]) -> None:
    folder, _ = served
    compose = yaml.safe_load((folder / "compose.yaml").read_text(encoding="utf-8"))["services"]
    llama, vllm = compose["llama-server"]["command"], compose["vllm"]["command"]
    assert llama[llama.index("--lora-scaled") + 1] == "/models/gguf/intents.gguf:0,/models/gguf/mixed.gguf:0"
    assert vllm[-2:] == ["intents=/models/adapters/intents", "mixed=/models/adapters/mixed"]
    assert vllm[vllm.index("--max-lora-rank") + 1] == "8", "the smallest rank that vLLM accepts"
    for service in compose.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    named = [part for argument in (*llama, *vllm) for part in argument.replace("=", ",").replace(":0", "").split(",")]
    paths = [folder / part.removeprefix("/models/") for part in named if part.startswith("/models/")]
    assert len(paths) == 6 and all(path.exists() for path in paths)
    guide = (folder / "SERVE.md").read_text(encoding="utf-8")
    assert "- 0: intents\n- 1: mixed\n" in guide and "Not verified: vLLM was not run." in guide
    reader = gguf.GGUFReader(folder / "gguf" / "mixed.gguf")
    assert reader.fields["adapter.type"].contents() == "lora" and reader.fields["general.type"].contents() == "adapter"
    rank = {tensor.name: tensor.shape[-1] for tensor in reader.tensors}
    assert rank["blk.0.attn_q.weight.lora_a"] == 2 and rank["blk.0.attn_k.weight.lora_a"] == 4
    assert all(np.isfinite(tensor.data).all() for tensor in reader.tensors)


def test_what_cannot_be_served_is_refused_before_anything_is_written(layout: ProjectLayout, tmp_path: Path) -> None:
    project, target = Project.from_parts(layout, SETTINGS), tmp_path / "served"

    def copy(name: str, change: object = None, digest: str | None = None) -> Path:
        folder = tmp_path / name
        shutil.copytree(layout.adapter, folder)
        tensors = load_file(folder / "adapter_model.safetensors")
        if change is not None:
            tensors |= {str(change): torch.zeros(4)}
        base = digest or base_model.read_base_digest(layout.adapter)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={base_model.BASE_DIGEST: base})
        return folder

    dora = copy("dora", "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight")
    for named, said in (
        ({"a b": layout.adapter}, "found the name 'a b'; expected letters"),
        ({"base": layout.adapter}, "and not 'base'"),
        ({"x": tmp_path}, "x: found no adapter_config.json"),
        ({"x": dora}, "lora_magnitude_vector.weight, but servers apply LoRA matrices only"),
    ):
        with pytest.raises(SettingsError, match=said):
            adapters(project, target, named)
    with pytest.raises(BaseModelError, match="f" * 12):
        adapters(project, target, {"x": copy("foreign", digest="f" * 64)})
    assert not target.exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(SettingsError, match="mine: already exists and was not written by this command"):
        adapters(project, tmp_path / "mine", {"x": layout.adapter})


@pytest.mark.long
def test_the_command(layout: ProjectLayout, served: tuple[Path, AdapterServer]) -> None:
    folder, report = served
    before = files.read_manifest(folder)
    done = tiny_project.ratchet(
        layout, "adapters", str(folder), f"intents={layout.adapter}", f"mixed={layout.root / 'mixed'}", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["adapters"][1]["name"] == "mixed"
    assert files.read_manifest(folder) == before, "equal inputs give equal bytes"
    assert "gguf/base-f32.gguf with 2 adapters in one server" in command.format_server(report)
    wrong = argparse.Namespace(project=layout.root, directory=folder, named=["intents"])
    with pytest.raises(SettingsError, match="found 'intents'; expected NAME=ADAPTER"):
        command.run(wrong)
