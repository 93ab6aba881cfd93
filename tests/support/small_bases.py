"""Tiny bases on disk with a tokenizer, adapters that change the output, and recipes that merge both."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import families
from ratchet.config.train import Train
from ratchet.exporters.merge import merger
from ratchet.exporters.merge.merger import MergeResult
from ratchet.exporters.merge.recipe import MergeRecipe, WeightedAdapter
from ratchet.models import adapter_format, adapters, base_model, loading, vocabulary
from ratchet.models.base_model import BaseReference
from ratchet.models.device import Model
from ratchet.storage.records.base import BaseCard

CPU = torch.device("cpu")
SHARD_BYTES = 100_000
"""Shard size in bytes; small enough to split a model of 400 kB into several files."""
ROWS = [list(range(3, 40)), list(range(50, 90))]


def settings(**changes: Any) -> Train:
    return Train(**{"rank": 4, "alpha": 16, "quantization": "none", **changes})


def card(**changes: Any) -> BaseCard:
    given = {"source": "x", "revision": None, "digest": "base", "files": {}, "architecture": "x", "parameters": 1}
    return BaseCard.model_validate(given | {"licence": None} | changes)


def write_base(directory: Path, family: str, shard_bytes: int = SHARD_BYTES, **changes: Any) -> Path:
    """Write a base in several files. Its weights and biases are large enough for an adapter to change the output."""
    model = families.make(family, **changes)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)
    model.save_pretrained(directory, max_shard_size=shard_bytes)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path, size: int = families.VOCABULARY) -> None:
    names = {f"t{number}": number for number in range(size)}
    names["<|endoftext|>"] = names.pop("t1")  # the tokenizer class of Qwen2 adds this token if it is missing
    words = Tokenizer(WordLevel(names, **{"unk_token": "t0"}))
    words.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, **{"eos_token": "<|endoftext|>"})
    made.save_pretrained(directory)


def disturb(model: Model, seed: int = 3) -> Model:
    """Change the parameters of the adapter, as a training does."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapters.trainable_parameters(model):
            drawn = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * drawn)
            else:
                parameter.add_(drawn, alpha=0.2)
    return model.eval()


def write_adapter(directory: Path, base: Path, chosen: Train, about: BaseCard | None = None, seed: int = 3) -> Path:
    """Write an adapter with Ratchet's code. It includes rows for the added tokens of the card."""
    about = about or card()
    model = loading.load(base, about, chosen, CPU)
    tokenizer = base_model.open_tokenizer(base)
    vocabulary.add_tokens(tokenizer, about.added_tokens)
    new = vocabulary.list_new_token_ids(tokenizer, about, model)
    adapted = disturb(adapters.attach(model, chosen, "base", new, steps=10), seed)
    directory.mkdir(parents=True)
    adapters.save(adapted, directory, BaseReference("base"))
    return directory


def write_foreign(directory: Path, base: Path, embeddings: bool = False, **words: Any) -> Model:
    """Write an adapter with peft alone and return its model."""
    plain = loading.load_plain(base, torch.float32, CPU)
    plain.name_or_path = "base"
    with adapters.suppress_peft_warnings():
        model = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", **words))
    disturb(model)
    with warnings.catch_warnings():  # peft warns about biases, which it takes for parts of matrices
        warnings.filterwarnings("ignore", message=r"Adapter 'default': \d LoRA tensor\(s\) have invalid shape")
        model.save_pretrained(directory, save_embedding_layers=embeddings)
    return model


def recipe(base: Path, *parts: Path | WeightedAdapter, **changes: Any) -> MergeRecipe:
    given: dict[str, Any] = {
        "base": base, "card": card(), "train": settings(), "modules": (), "merge_base": "dequantized",
        "dtype": torch.float32, "device": CPU, "shard_bytes": SHARD_BYTES,
        "adapters": tuple(one if isinstance(one, WeightedAdapter) else WeightedAdapter(one) for one in parts),
    }  # fmt: skip
    return MergeRecipe(**given | changes)


def adapted(directory: Path, base: Path, chosen: Train, about: BaseCard | None = None, **changes: Any) -> MergeRecipe:
    """Write an adapter with Ratchet's code. Return the recipe that merges it."""
    saved = write_adapter(directory, base, chosen, about)
    return recipe(base, saved, train=chosen, card=about or card(), **changes)


def merge(wanted: MergeRecipe, directory: Path) -> tuple[MergeResult, dict[str, Tensor], Model]:
    """Merge the model. Return the result, and the tensors and the model as transformers loads them."""
    told: list[tuple[str, int, int]] = []
    found = merger.merge_model(wanted, directory, lambda *about: told.append(about))
    files = [*directory.glob("*.safetensors"), *directory.glob("*.index.json")]
    assert sum(file.stat().st_size for file in files) == merger.merged_size_bytes(wanted)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][1] == told[-1][2] > 0
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=wanted.dtype).eval()
    return found, model.state_dict(), model


def trained(wanted: MergeRecipe) -> Model:
    """Return the base as in training, with the only adapter of the recipe, computed by peft."""
    [part] = wanted.adapters
    return adapters.load(loading.load(wanted.base, wanted.card, wanted.train, CPU), part.adapter)


def logits(model: Model, rows: list[list[int]] | None = None) -> Tensor:
    with torch.no_grad():
        found = [model(input_ids=torch.tensor([row]), use_cache=False).logits.float()[0] for row in rows or ROWS]
    return torch.cat(found)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / adapter_format.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
