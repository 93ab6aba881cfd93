"""Measures the matrix of docs/evidence_formats.md: each file (architecture x format) is written, loaded and compared.

The models are tiny and random, and use transformers' real classes. The spread of the weights is large, so that
distributions are far from uniform. The benchmark compares every position of some rows with transformers in float32 on
the merged weights.

    python benchmarks/formats.py [--quick] [--json FILE] [--markdown FILE]
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from report import finish
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from ratchet.config.export import BuiltInGgufType, OnnxType
from ratchet.config.gate import ExportParityRule
from ratchet.errors import RatchetError
from ratchet.exporters import merged_model, onnx
from ratchet.exporters.gguf import writer
from ratchet.exporters.verification import probe_inputs
from ratchet.exporters.verification.parity import ModelRuntime, TorchRuntime, measure_distance
from ratchet.models import base_model
from ratchet.models.runtimes import llama_server
from ratchet.models.runtimes import onnx as onnx_runtime
from ratchet.storage.records.export import DistributionDistance

VOCABULARY, TOKENS = 544, 512
"""Rows of the embedding, and entries that the tokenizer learns. The rest is for tokens that some families' classes
add."""
ROWS, ROW_TOKENS = 4, 48
BEGIN, END = "<|begin|>", "<|end|>"
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.08,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 256,
                        "initializer_range": 0.08, "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "llama (tied, llama3 rope)": SHAPE | {
        "model_type": "llama", "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    },
    "mistral": SHAPE | {"sliding_window": None},
    "qwen2": SHAPE,
    "qwen3": SHAPE | {"head_dim": 64},
    "gemma": SHAPE | {"head_dim": 64},
    "gemma2": SHAPE | {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 128},
    "phi3": SHAPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "gpt2": GPT2,
}  # fmt: skip
QUICK_ARCHITECTURES = ("llama", "llama (tied, llama3 rope)", "qwen3", "gemma2", "phi3", "gpt2")
"""Architectures with the largest differences."""
GGUF_TYPES: tuple[BuiltInGgufType, ...] = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4")
ONNX_TYPES: tuple[OnnxType, ...] = ("fp32", "int8")
RULE = ExportParityRule(rule="export_parity", max_logit_difference=0.01, min_greedy_agreement=0.99)


@dataclass(frozen=True)
class Cell:
    """Result of one format of one architecture."""

    architecture: str
    form: str
    runtime: str
    found: DistributionDistance | None
    texts: int
    why: str = ""

    @property
    def allowed(self) -> float:
        """Largest divergence that the gate accepts."""
        return RULE.kl_bound(self.form.rpartition("/")[2]) or RULE.kl_bound("float32") or 0.0

    @property
    def ok(self) -> bool:
        """Whether divergence and tokenizer agreement are within the bounds, or the format was refused with a
        message."""
        if self.found is None:
            return bool(self.why)
        return self.found.kl <= self.allowed and self.texts >= RULE.min_tokenizer_agreement * len(probe_inputs.TEXTS)


def tokenizer_of(directory: Path) -> Any:
    """Train a byte-level BPE with GPT-2's splits on the project's documentation, and reload it with the family's
    class."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS, special_tokens=[BEGIN, END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    here = Path(__file__).parents[1]
    made.train([str(here / "README.md"), *map(str, sorted((here / "docs").glob("*.md")))], trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=BEGIN, eos_token=END)
    whole.chat_template = (
        "{% for m in messages %}<|begin|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
    )
    whole.save_pretrained(str(directory))
    opened = base_model.load_tokenizer(directory)
    opened.save_pretrained(str(directory))  # some families' classes rebuild the tokenizer and ignore the file
    return opened


def cells(name: str, shape: dict[str, Any], scratch: Path, quick: bool) -> Iterator[Cell]:
    """Yield the result of every format of one architecture."""
    torch.manual_seed(0)
    family = shape.get("model_type", name.partition(" ")[0])
    config = AutoConfig.for_model(family, **{key: value for key, value in shape.items() if key != "model_type"})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    merged = scratch / "hf"
    model.save_pretrained(str(merged))
    tokenizer = tokenizer_of(merged)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(2, TOKENS, (ROWS, ROW_TOKENS), generator=generator).tolist()
    positions = [list(range(ROW_TOKENS - 1))] * ROWS
    targets = [row[1:] for row in rows]
    whole = TorchRuntime(model, tokenizer)
    reference = [whole.log_probabilities(row, places) for row, places in zip(rows, positions, strict=True)]
    texts = [whole.token_ids(text) for text in probe_inputs.TEXTS]

    def examined(form: str, runtime: ModelRuntime) -> Cell:
        found = (runtime.log_probabilities(row, places) for row, places in zip(rows, positions, strict=True))
        close = measure_distance(reference, found, targets)
        same = sum(runtime.token_ids(text) == ids for text, ids in zip(probe_inputs.TEXTS, texts, strict=True))
        return Cell(name, form, runtime.name, close, same)

    reopened, again = merged_model.reopen_model(merged, torch.float32, torch.device("cpu"))
    yield examined("hf", TorchRuntime(reopened, again))
    for kind in GGUF_TYPES[: 4 if quick else None]:
        path = scratch / f"{kind}.gguf"
        try:
            writer.require_exportable(merged, [kind], False)
            writer.write_gguf(merged, path, kind, lambda *_: None)
            with llama_server.open_runtime(path, 1, 4 * ROW_TOKENS, "f32") as runtime:
                yield examined(f"gguf/{kind}", runtime)
        except RatchetError as error:
            yield Cell(name, f"gguf/{kind}", "llama.cpp", None, 0, str(error))
    for precision in ONNX_TYPES:
        path = scratch / precision
        path.mkdir()
        try:
            onnx.require_exportable(merged)
            onnx.write_onnx(merged, path, precision, lambda *_: None)
            with onnx_runtime.open_runtime(path, 1) as onnx_model:
                yield examined(f"onnx/{precision}", onnx_model)
        except RatchetError as error:
            yield Cell(name, f"onnx/{precision}", "onnxruntime", None, 0, str(error))


def written(cell: Cell) -> str:
    """Format a cell for the terminal."""
    if cell.found is None:
        return "refused"
    return f"{cell.found.kl:.1e} / {cell.found.max_difference:.1e} / {cell.found.greedy_agreement:.3f}"


def table(found: list[Cell]) -> str:
    """Format as Markdown: formats by architectures, with divergence in nats and share of equal most likely tokens."""
    names = list(dict.fromkeys(cell.architecture for cell in found))
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for form in dict.fromkeys(cell.form for cell in found):
        by_name = {cell.architecture: cell.found for cell in found if cell.form == form}
        shown = (f"{one.kl:.0e} / {one.greedy_agreement:.2f}" if one else "refused" for one in map(by_name.get, names))
        lines.append(f"| `{form}` | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure all cells, print and judge them."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--quick", action="store_true", help="fewer architectures and types")
    asked.add_argument("--json", type=Path)
    asked.add_argument("--markdown", type=Path, help="write the table of docs/evidence_formats.md")
    options = asked.parse_args()
    torch.set_num_threads(1)
    found = []
    for name in QUICK_ARCHITECTURES if options.quick else ARCHITECTURES:
        with tempfile.TemporaryDirectory() as scratch:
            for cell in cells(name, ARCHITECTURES[name], Path(scratch), options.quick):
                note = cell.why or f"{written(cell)}, {cell.texts} of {len(probe_inputs.TEXTS)} texts, {cell.runtime}"
                print(f"{cell.architecture:<26} {cell.form:<10} {note}", flush=True)
                found.append(cell)
    print("\nKL in nats / same most likely token\n")
    print(table(found))
    if options.markdown:
        options.markdown.write_text(table(found), encoding="utf-8")
    rows = [
        {"name": f"{cell.architecture}, {cell.form}: KL in nats", "value": cell.found.kl if cell.found else 0.0,
         "target": f"<= {cell.allowed:g}" if cell.found else "refused by name", "ok": cell.ok}
        for cell in found
    ]  # fmt: skip
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
