"""Compares the memory forecast with measured memory: real models with random weights, real steps, real processes.

    pip install -c constraints.txt -e .
    python benchmarks/memory.py [--quick] [--json FILE]

Each cell is a process of its own that does the work of a worker (memory_cell.py): forecast, load, adapt, three
optimizer steps of two micro-batches each, validation, checkpoints. The project's own monitor measures each phase. On a
CPU it measures resident memory (VmHWM); on a GPU it measures the memory that torch's allocator gave out
(max_memory_allocated). Errors refer to the peak, and on a CPU also to the memory above the libraries, which take a
known half gigabyte.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from report import finish
from report_rows import Row, at_most, told

GIB, MIB = 2**30, 2**20
CELL_S = 1500

CPU_MODELS: dict[str, dict[str, Any]] = {
    "llama-37M": {
        "model_type": "llama", "vocab_size": 16_000, "hidden_size": 448, "intermediate_size": 1280,
        "num_hidden_layers": 10, "num_attention_heads": 7, "num_key_value_heads": 7, "tie_word_embeddings": False,
    },
    "gpt2-52M": {"model_type": "gpt2", "vocab_size": 50_000, "n_embd": 512, "n_layer": 8, "n_head": 8},
    "qwen3-117M": {
        "model_type": "qwen3", "vocab_size": 48_000, "hidden_size": 768, "intermediate_size": 2304, "head_dim": 64,
        "num_hidden_layers": 10, "num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": True,
    },
}  # fmt: skip
GPU_MODELS: dict[str, dict[str, Any]] = {
    "llama-1B": {
        "model_type": "llama", "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "llama-7B": {
        "model_type": "llama", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": False,
    },
    "llama-13B": {
        "model_type": "llama", "vocab_size": 32_000, "hidden_size": 5120, "intermediate_size": 13_824,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40, "tie_word_embeddings": False,
    },
}  # fmt: skip
QUICK_CELLS: dict[str, Sequence[int]] = {"llama-37M": (3, 6), "gpt2-52M": (0, 5, 6)}
"""Numbers of cells for each model; see `cpu_cells`."""
LIMITS = {"7B": 10, "13B": 18}
"""Limits in GiB for QLoRA of rank 16, 2,048 tokens, one row."""


@dataclass(frozen=True)
class Cell:
    """Settings of one training."""

    model: str
    rank: int
    tokens: int
    rows: int
    checkpointing: bool
    quantization: str


def cpu_cells(quick: bool) -> Iterator[Cell]:
    """Yield half of all combinations of five settings with two values each, such that every pair of values occurs; 24
    cells.

    Quick: five cells of the smaller models, with every value of each setting.
    """
    for model, numbers in QUICK_CELLS.items() if quick else ((model, range(8)) for model in CPU_MODELS):
        for number in numbers:
            long, many, checkpointing = bool(number & 1), bool(number & 2), bool(number & 4)
            rank = 64 if long ^ many else 8
            quantization = "none" if many ^ checkpointing else "nf4"
            yield Cell(model, rank, 512 if long else 192, 4 if many else 1, checkpointing, quantization)


def gpu_cells(quick: bool) -> Iterator[Cell]:
    """Yield QLoRA cells with and without checkpointing. The largest model has checkpointing only, as in practice. One
    cell of the smallest model is not quantised."""
    for model in ["llama-1B"] if quick else list(GPU_MODELS):
        yield Cell(model, 16, 2048, 1, True, "nf4")
        yield Cell(model, 64, 1024, 4, True, "nf4")
        if model != "llama-13B":
            yield Cell(model, 16, 1024, 1, False, "nf4")
    yield Cell("llama-1B", 16, 1024, 2, False, "none")


def save_model(described: dict[str, Any], dtype: str, path: Path) -> None:
    """Save a model of this shape. Its weights repeat a random sequence, because 13 billion draws would take minutes."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    shape = dict(described)
    config = CONFIG_MAPPING[shape.pop("model_type")](**shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.to_empty(device="cpu").tie_weights()
    drawn = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), drawn.numel()):
                part = flat[start : start + drawn.numel()]
                part.copy_(drawn[: part.numel()])
    model.save_pretrained(path)


def run_cell(cell: Cell, base: Path, work: Path, dtype: str) -> dict[str, Any]:
    """Return the results of memory_cell.py. End the benchmark if it fails."""
    given = {**asdict(cell), "base": str(base), "work": str(work), "targets": "all", "dtype": dtype}
    script = Path(__file__).with_name("memory_cell.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(given)], capture_output=True, text=True, env=environment,
        timeout=CELL_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{cell}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@dataclass(frozen=True)
class Result:
    """Forecast and measured peak of a cell, in bytes."""

    cell: Cell
    forecast: int
    measured: int
    floor: int
    """Memory of libraries, which both numbers include."""
    process: int
    """Largest memory of the process on the device, including the cache of torch's allocator and the context."""

    @classmethod
    def of(cls, cell: Cell, found: dict[str, Any]) -> "Result":
        """Create the result of a cell. On a GPU the context is left out, because torch's allocator does not count
        it."""
        phases = found["forecast"].values()
        totals = [sum(count for part, count in parts.items() if part != "CUDA context") for parts in phases]
        floor = found["measured"]["baseline"] if found["device"] == "cpu" else 0
        return cls(cell, max(totals), max(found["measured"].values()), floor, max(found["process"].values()))

    @property
    def error(self) -> float:
        """Signed error relative to the measured peak."""
        return self.forecast / self.measured - 1

    @property
    def error_above_floor(self) -> float:
        """Error relative to the memory above the libraries."""
        return (self.forecast - self.floor) / (self.measured - self.floor) - 1


def table(results: Sequence[Result]) -> Iterator[str]:
    """Yield a header, and a line for each cell."""
    yield "model        rank tokens rows checkpointing quantisation  forecast  measured    error  above libraries"
    for one in results:
        cell = one.cell
        yield (
            f"{cell.model:12} {cell.rank:4} {cell.tokens:6} {cell.rows:4} {cell.checkpointing!s:13} "
            f"{cell.quantization:12} {one.forecast / MIB:9.0f} {one.measured / MIB:9.0f} {one.error:+8.1%} "
            f"{one.error_above_floor:+16.1%}"
        )


def judged(results: Sequence[Result], on_gpu: bool) -> Iterator[Row]:
    """Yield the rows of the benchmark."""
    errors = [100 * abs(one.error) for one in results]
    where = "GPU" if on_gpu else "CPU"
    yield at_most(f"{where}: median error of the peak, %", statistics.median(errors), 5 if on_gpu else 10)
    if on_gpu:
        yield at_most("GPU: worst error of the peak, %", max(errors), 10)
        yield from _limits(results)
        return
    yield told("CPU: worst error of the peak, %", max(errors))
    above = [100 * abs(one.error_above_floor) for one in results]
    yield at_most("CPU: median error above the libraries, %", statistics.median(above), 20)
    yield told("CPU: worst error above the libraries, %", max(above))
    signed = statistics.mean(100 * one.error_above_floor for one in results)
    yield told("CPU: mean of signed errors above the libraries, %", signed)
    yield told("CPU: cells", len(results))


def _limits(results: Sequence[Result]) -> Iterator[Row]:
    """Yield rows for the total device memory of a QLoRA step with 2,048 tokens."""
    for name, limit in LIMITS.items():
        for one in results:
            if one.cell.model == f"llama-{name}" and one.cell.tokens == 2048:
                yield at_most(f"GPU: {name} QLoRA, r=16, 2,048 tokens, GiB", one.process / GIB, limit)


def measure(models: dict[str, dict[str, Any]], cells: Sequence[Cell], dtype: str) -> list[Result]:
    """Measure all cells, one model at a time, because a disk may not have space for two large models."""
    results = []
    for name in dict.fromkeys(cell.model for cell in cells):
        with tempfile.TemporaryDirectory(prefix="ratchet-memory-") as folder:
            base = Path(folder) / "base"
            save_model(models[name], "bfloat16" if dtype == "bfloat16" else "float32", base)
            for number, cell in enumerate(one for one in cells if one.model == name):
                found = run_cell(cell, base, Path(folder) / f"run{number}", "auto")
                results.append(Result.of(cell, found))
                print(*list(table(results[-1:]))[1:], flush=True)
    return results


def main() -> int:
    """Run the benchmark. The exit code is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="five cells instead of 24; on a GPU the smallest model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    given = parser.parse_args()
    import torch

    print(*list(table([])), sep="\n", flush=True)
    if torch.cuda.is_available():
        rows = list(judged(measure(GPU_MODELS, list(gpu_cells(given.quick)), "bfloat16"), on_gpu=True))
    else:
        rows = list(judged(measure(CPU_MODELS, list(cpu_cells(given.quick)), "float32"), on_gpu=False))
    return finish(rows, given.json)


if __name__ == "__main__":
    sys.exit(main())
