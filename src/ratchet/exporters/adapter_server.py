"""Writes a directory from which vLLM and llama.cpp serve several LoRA adapters on one base, and tests it in llama.cpp.

    hf/                 the base in the weights that the adapters were trained on, with tokenizer and chat template
    adapters/NAME/      each adapter in peft's format, for vLLM
    gguf/base-TYPE.gguf  gguf/NAME.gguf        base and adapters for llama.cpp
    compose.yaml  SERVE.md                     one service and the commands for each server
    adapters.json                              what was measured

Every adapter is activated by a request in a server that has all of them, and its next-token distributions are compared
with those of base + adapter. vLLM needs a GPU, so its part is not run here.
"""

import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ratchet.config.export import BuiltInGgufType
from ratchet.data import token_files
from ratchet.errors import DamagedFileError, SettingsError
from ratchet.exporters import merged_model
from ratchet.exporters.gguf import architectures, lora, writer
from ratchet.exporters.inputs import ExportJob
from ratchet.exporters.merge import merger
from ratchet.exporters.merge.recipe import WeightedAdapter
from ratchet.exporters.verification import parity, probe_inputs, reference
from ratchet.exporters.verification.parity import TorchRuntime
from ratchet.exporters.verification.probe_inputs import ProbeInputs
from ratchet.models import adapter_format, base_model, oom, scoring
from ratchet.models.runtimes import llama_server
from ratchet.models.runtimes.llama_server import LlamaRuntime
from ratchet.storage import digests, files
from ratchet.storage.records.export import AdapterServer, DistributionDistance, ServedAdapter

Distributions = list[NDArray[np.float32]]
"""Log-probabilities of the next token of each row: [positions, vocabulary]."""
BASE_NAME = "base"
POSITIONS = 64
"""Number of answer positions at which distributions are compared; llama.cpp needs a request for each."""
MAX_CONTEXT_TOKENS = 8192
_CARD = """\
---
tags: [ratchet]
---

# base

The base of several adapters, in the weights that they were trained on.
"""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as --max-lora-rank."""
LLAMA_IMAGE, VLLM_IMAGE = "ghcr.io/ggml-org/llama.cpp:server", "vllm/vllm-openai:latest"


def require_servable(name: str, adapter: Path) -> None:
    """Check that an adapter has LoRA matrices only. Raises SettingsError with the first other tensor."""
    if not (adapter / adapter_format.CONFIG).is_file():
        raise SettingsError(f"{name}: found no {adapter_format.CONFIG} in {adapter}; name a saved adapter's directory")
    for key in sorted(adapter_format.read(adapter)):
        if not key.endswith((".lora_A.weight", ".lora_B.weight")):
            raise SettingsError(
                f"{name}: {adapter} has {key}, but servers apply LoRA matrices only (no DoRA, biases, token rows or "
                "whole modules); serve this adapter merged (`ratchet export`)"
            )


def write_adapter_server(
    job: ExportJob, adapters: Mapping[str, Path], type_: BuiltInGgufType, target: Path
) -> AdapterServer:
    """Write and test the directory.

    Args:
        job: the project's inputs; its base is served.
        adapters: directory of each adapter by name.
        type_: type of the base's GGUF file.
        target: the directory to fill, which the caller seals.

    Raises:
        SettingsError: llama.cpp cannot adapt a module, or does not support the base.
        BaseModelError: an adapter belongs to another base.
        DamagedFileError: llama.cpp's answers with an adapter are not those of base + adapter.
    """
    recipe = job.recipe("dequantized")
    recipes = {
        name: replace(recipe, adapters=(WeightedAdapter(path),), modules=(), method="linear")
        for name, path in adapters.items()
    }
    for one in recipes.values():
        merger.plan_merge(one)  # refuses adapters of another base before any long work
    tokenizer, test = job.tokenizer(), token_files.open_split(job.layout.data, "test")
    hf, gguf = target / "hf", target / "gguf"
    hf.mkdir()
    gguf.mkdir()
    first = next(iter(recipes.values()))
    merger.merge_model(replace(first, adapters=(replace(first.adapters[0], weight=0.0),)), hf, job.progress)
    inputs: ProbeInputs | None = None
    expected: dict[str, Distributions] = {}
    ranks: dict[str, int] = {}
    for number, (name, one) in enumerate(recipes.items()):
        job.progress(f"base + {name}", number, len(recipes))
        model = reference.load_adapted_model(one)
        if inputs is None:
            ends = scoring.list_end_tokens(model.get_base_model(), tokenizer, job.card.end_of_turn)
            merged_model.complete_directory(hf, tokenizer, ends, _CARD)
            parts = job.settings.export.model_copy(update={"parity_positions": POSITIONS})
            inputs = probe_inputs.choose_probe_inputs(
                test, tokenizer, job.settings.model_copy(update={"export": parts}), ends
            )
        factors = list(adapter_format.iterate_factors(model))
        ranks[name] = max(part.rank for part in factors)
        lora.write_lora(factors, architectures.read_architecture(hf), name, gguf / f"{name}.gguf")
        expected[name] = _collect_distributions(TorchRuntime(model, tokenizer), inputs)
        if BASE_NAME not in expected:
            with reference.disable_adapters(model):
                expected[BASE_NAME] = _collect_distributions(TorchRuntime(model, tokenizer), inputs)
        del model, factors
        oom.release_memory()
        shutil.copytree(adapters[name], target / "adapters" / name)  # no links: a server's user may write here
    assert inputs is not None  # noqa: S101 (there is at least one adapter)
    base_file = gguf / f"{BASE_NAME}-{type_}.gguf"
    writer.write_gguf(hf, base_file, type_, job.progress)
    distances = _measure(job, base_file, [gguf / f"{name}.gguf" for name in adapters], expected, inputs)
    served = tuple(
        ServedAdapter(
            name=name, digest=_digest(path), rank=ranks[name], distance=distances[name],
            effect=_distance(expected[name], expected[BASE_NAME], inputs).kl,
        )
        for name, path in adapters.items()
    )  # fmt: skip
    # An adapter that was not applied, or one that was although it was not chosen, is as far away as its effect.
    effects = [found.effect for found in served if found.effect > 0]
    if effects and distances[BASE_NAME].kl >= min(effects) / 2:
        raise DamagedFileError(
            f"{base_file.name}: llama.cpp's distributions without an adapter are {distances[BASE_NAME].kl:.3g} nats "
            f"from the base, about as far as an adapter; use a more precise type than {type_}"
        )
    for found in served:
        if found.effect > 0 and found.distance.kl >= found.effect / 2:
            raise DamagedFileError(
                f"{found.name}: llama.cpp's distributions with this adapter are {found.distance.kl:.3g} nats from base "
                f"+ adapter, and the base is {found.effect:.3g} nats from it; use a more precise type than {type_}"
            )
    server = AdapterServer(
        base_digest=job.base.digest, base_file=base_file.relative_to(target).as_posix(), base=distances[BASE_NAME],
        adapters=served, runtime=llama_server.get_version(),
    )  # fmt: skip
    _write_server_files(target, server)
    return server


def _collect_distributions(runtime: TorchRuntime | LlamaRuntime, inputs: ProbeInputs) -> Distributions:
    return [
        runtime.log_probabilities(ids, positions) for ids, positions in zip(inputs.rows, inputs.positions, strict=True)
    ]


def _distance(expected: Distributions, found: Distributions, inputs: ProbeInputs) -> DistributionDistance:
    return parity.measure_distance(expected, found, inputs.targets)


def _measure(
    job: ExportJob,
    base_file: Path,
    files_: list[Path],
    expected: Mapping[str, Distributions],
    inputs: ProbeInputs,
) -> dict[str, DistributionDistance]:
    """Compare base and adapters in one server that has all of them."""
    threads = job.settings.machine.threads or 1
    context_tokens = max(map(len, inputs.rows)) + 1
    found: dict[str, DistributionDistance] = {}
    with llama_server.start_server(base_file, threads, context_tokens, "f32", adapters=files_) as server:
        runtime = LlamaRuntime(server)
        for number, name in enumerate([None, *range(len(files_))]):
            label = BASE_NAME if name is None else files_[name].stem
            job.progress(f"llama.cpp: {label}", number, len(files_) + 1)
            server.adapter = name
            found[label] = _distance(expected[label], _collect_distributions(runtime, inputs), inputs)
    return found


def _digest(adapter: Path) -> str:
    return digests.hash_tree(adapter, sorted(path.name for path in adapter.iterdir() if path.is_file()))


# Files for servers.


def _write_server_files(target: Path, server: AdapterServer) -> None:
    names = [adapter.name for adapter in server.adapters]
    limit = base_model.find_context_length(base_model.read_config(target / "hf"))
    context = min(MAX_CONTEXT_TOKENS, limit or MAX_CONTEXT_TOKENS)
    rank = next((size for size in VLLM_RANKS if size >= max(a.rank for a in server.adapters)), VLLM_RANKS[-1])

    def llama(folder: str, host: str) -> list[str]:
        adapters = ",".join(f"{folder}/gguf/{name}.gguf:0" for name in names)  # scale 0, until a request sets another
        return [
            "--model", f"{folder}/{server.base_file}", "--alias", BASE_NAME, "--lora-scaled", adapters,
            "--host", host, "--port", "8080", "--ctx-size", str(context), "--jinja",
        ]  # fmt: skip

    def vllm(folder: str, host: str) -> list[str]:
        modules = [f"{name}={folder}/adapters/{name}" for name in names]
        return [
            f"{folder}/hf", "--served-model-name", BASE_NAME, "--enable-lora", "--max-loras", str(len(names)),
            "--max-lora-rank", str(rank), "--max-model-len", str(context), "--host", host, "--port", "8000",
            "--lora-modules", *modules,
        ]  # fmt: skip

    services = {
        "llama-server": {
            "image": LLAMA_IMAGE, "profiles": ["llama"], "command": llama("/models", "0.0.0.0"),  # noqa: S104
            "volumes": ["./:/models:ro"], "ports": ["127.0.0.1:8080:8080"],
        },
        "vllm": {
            "image": VLLM_IMAGE, "profiles": ["vllm"], "command": ["--model", *vllm("/models", "0.0.0.0")],  # noqa: S104
            "volumes": ["./:/models:ro"], "ports": ["127.0.0.1:8000:8000"],
            "environment": {"HF_HUB_OFFLINE": "1"},
            "deploy": {
                "resources": {"reservations": {"devices": [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]}}
            },
        },
    }  # fmt: skip
    # JSON is YAML, and needs no library here.
    files.write_atomic(target / "compose.yaml", json.dumps({"services": services}, indent=2) + "\n")
    choice = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "lora": [{"id": 0, "scale": 1.0}]})
    lines = [
        "# Serving several adapters on one base", "",
        "Run the commands in this directory. Servers listen on 127.0.0.1; put a proxy with authentication before them.",
        "",
        "## llama.cpp", "",
        f"    {shlex.join(['llama-server', *llama('.', '127.0.0.1')])}",
        "    docker compose --profile llama up", "",
        "No adapter is active by itself. A request chooses one by its number:", "",
        *(f"- {number}: {name}" for number, name in enumerate(names)), "",
        f"    curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' -d '{choice}'", "",
        f"Tested in {server.runtime}: adapters.json has the divergence of each adapter from base + adapter.", "",
        "## vLLM", "",
        f"    {shlex.join(['vllm', 'serve', *vllm('.', '127.0.0.1')])}",
        "    docker compose --profile vllm up", "",
        "A request chooses an adapter by its name as the model, or the base by `base`. Not verified: vLLM was not run.",
    ]  # fmt: skip
    files.write_atomic(target / "SERVE.md", "\n".join(lines) + "\n")
