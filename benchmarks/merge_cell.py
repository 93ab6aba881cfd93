"""Runs one cell of benchmarks/merge.py in its own process: creates, merges or compares. Reads JSON, prints JSON."""

import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, PreTrainedTokenizerFast

from ratchet.config.train import Train
from ratchet.exporters.merge import merger
from ratchet.exporters.merge.recipe import MergeRecipe, WeightedAdapter
from ratchet.models import adapters
from ratchet.models.memory import capacity
from ratchet.storage.records.base import BaseCard

VOCABULARY = 4000
SAMPLED_S = 0.005
CARD = BaseCard(
    source="x", revision=None, digest="base", files={}, architecture="LlamaForCausalLM", parameters=1, licence=None
)
TRAIN = Train(quantization="nf4", double_quantization=True, compute_dtype="float32")


def make(work: Path, layers: int, shard_bytes: int) -> dict[str, Any]:
    """Create a base of many files with random weights, a tokenizer, and a LoRA of all linear layers with non-zero
    effect."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=768, intermediate_size=2048, num_hidden_layers=layers,
        num_attention_heads=12, num_key_value_heads=12, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(work / "base", max_shard_size=shard_bytes)
    words = Tokenizer(WordLevel({f"t{number}": number for number in range(VOCABULARY)}, **{"unk_token": "t0"}))
    PreTrainedTokenizerFast(tokenizer_object=words, **{"eos_token": "t2"}).save_pretrained(work / "base")
    model.name_or_path = "base"
    learned = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for _, parameter in adapters.trainable_parameters(learned):
            parameter.add_(torch.randn(parameter.shape), alpha=0.02)
    learned.save_pretrained(work / "adapter", save_embedding_layers=False)
    files = list((work / "base").glob("*.safetensors"))
    return {"bytes": sum(file.stat().st_size for file in files), "files": len(files)}


def ours(work: Path, way: Any, target: Path, shard_bytes: int) -> None:
    """Merge with Ratchet, shard by shard."""
    recipe = MergeRecipe(
        base=work / "base", card=CARD, train=TRAIN, adapters=(WeightedAdapter(work / "adapter"),), modules=(),
        merge_base=way,
        dtype=torch.float32, device=torch.device("cpu"), shard_bytes=shard_bytes,
    )  # fmt: skip
    merger.merge_model(recipe, target, lambda *_: None)


def theirs(work: Path, way: str, target: Path, shard_bytes: int) -> None:
    """Merge as peft's documentation does; with 4 bits, dequantise first. Then write all files to disk with fsync, as
    Ratchet does."""
    if way == "original":
        model = AutoModelForCausalLM.from_pretrained(work / "base", dtype=torch.float32)
    else:
        four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        model = AutoModelForCausalLM.from_pretrained(work / "base", quantization_config=four, dtype=torch.float32)
        model = model.dequantize()
    merged = PeftModel.from_pretrained(model, work / "adapter").merge_and_unload()
    merged.save_pretrained(target, max_shard_size=shard_bytes)
    for path in target.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


class OwnMemory(threading.Thread):
    """Samples the process's own memory (RssAnon of proc(5)), and keeps the largest value."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most_bytes = 0
        self._over = threading.Event()

    @staticmethod
    def now_bytes() -> int:
        """Return the current value in bytes."""
        with open("/proc/self/status", encoding="ascii") as stream_:  # noqa: PTH123 (read hundreds of times a second)
            line = next(line for line in stream_ if line.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024

    def run(self) -> None:
        """Sample until stopped."""
        while not self._over.wait(SAMPLED_S):
            self.most_bytes = max(self.most_bytes, self.now_bytes())

    def end(self) -> int:
        """Stop sampling, and return the largest value in bytes."""
        self._over.set()
        self.join()
        return self.most_bytes


def measured(merge: Callable[[], None]) -> dict[str, Any]:
    """Return memory and time of one merge in this process. Memory is counted above the memory after all imports."""
    before, own_before = capacity.resident_bytes(), OwnMemory.now_bytes()
    if not capacity.reset_peak():
        raise SystemExit("this kernel does not let a process forget its peak of memory")
    watch = OwnMemory()
    watch.start()
    begun = time.perf_counter()
    merge()
    seconds = time.perf_counter() - begun
    own, peak = watch.end(), capacity.peak_resident_bytes()
    return {
        "seconds": seconds,
        "peak_bytes": peak,
        "above_bytes": peak - before,
        "own_bytes": own - own_before,
    }


def compare(one: Path, other: Path) -> dict[str, Any]:
    """Return the largest difference of a number. Raises SystemExit if the names of tensors differ."""
    found = [{name: path for path in folder.glob("*.safetensors") for name in _names(path)} for folder in (one, other)]
    if found[0].keys() != found[1].keys():
        raise SystemExit(f"{one} and {other} hold other tensors: {sorted(found[0].keys() ^ found[1].keys())[:4]}")
    most = 0.0
    for name in found[0]:
        a, b = (_read(paths[name], name) for paths in found)
        most = max(most, float((a - b).abs().max()))
    return {"difference": most}


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as tensors:
        return list(tensors.keys())


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as tensors:
        found: torch.Tensor = tensors.get_tensor(name)
        return found


def main(given: dict[str, Any]) -> dict[str, Any]:
    """Run the requested action."""
    work = Path(given["work"])
    if given["do"] == "make":
        return make(work, given["layers"], given["shard_bytes"])
    if given["do"] == "compare":
        one, other = (work / name for name in given["names"])
        return compare(one, other)
    merge = {"ours": ours, "peft": theirs}[given["who"]]
    return measured(lambda: merge(work, given["way"], work / given["to"], given["shard_bytes"]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(json.dumps(main(json.loads(sys.argv[1]))))
