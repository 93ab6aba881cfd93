"""Compares stage prepare with TRL's SFTTrainer on the same rows and cores, and measures it with 10⁴ to 10⁶ rows.

    pip install -c constraints.txt -e '.[benchmarks]'
    python benchmarks/prepare.py --sizes 100000 300000 1000000     # only the second part, with these numbers of rows
    python benchmarks/prepare.py [--quick] [--json FILE] [--data FILE.jsonl --prompt COLUMN --response COLUMN]

Both sides start from the same JSON lines and the same base model, apply its chat template, mask all tokens except the
answers, tokenise and pack to 1,024 tokens. Each turn is a new process, turns alternate, and imports are not counted.
TRL runs with one process and with one per CPU (`dataset_num_proc`), and the faster result counts. Ratchet also checks
every mask by decoding, splits the rows, removes exact duplicates, and seals the output; "everything" adds
near-duplicates and an evaluation set whose rows must not be in the training data. A line through the sizes extrapolates
time and memory to 10⁷ rows. Rows are drawn at random from
invented words unless a file is given.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from report import finish
from report_rows import at_least, at_most, ratio

PACK_TOKENS = 1024
VOCABULARY = 16_000
WORDS = 30_000
ROWS, TURNS, SIZES = 30_000, 3, (10_000, 100_000, 1_000_000)
"""Rows of the comparison; turns of each side; rows of the second part."""
QUICK_ROWS, QUICK_TURNS, QUICK_SIZES = 15_000, 2, (2_000, 6_000, 18_000)
LINEAR_UP_TO = 1.3
"""Allowed factor between the time per row of the second largest size and of the largest size."""
MEMORY_BYTES = 2 * 2**30
EXTRAPOLATED_ROWS = 10_000_000


def invented(rows: int, mean_words: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield rows of invented words that follow Zipf's law. Their lengths vary like those of real instructions."""
    import numpy as np

    words_rng, rng = np.random.default_rng(0), np.random.default_rng(seed)  # the words are the same in every file
    syllables = np.array([a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "el", "or")])
    words = np.array(["".join(words_rng.choice(syllables, size=n)) for n in words_rng.integers(1, 5, size=WORDS)])
    for start in range(0, rows, 10_000):
        count = min(10_000, rows - start)
        lengths = np.clip(rng.lognormal(np.log(mean_words), 0.5, size=count), 12, 600).astype(int)
        drawn = words[np.minimum(rng.zipf(1.2, size=int(lengths.sum())), WORDS) - 1]
        place = 0
        for length in lengths:
            text = drawn[place : place + length]
            place += length
            cut = max(6, length // 2)
            yield {"question": " ".join(text[:cut]) + "?", "answer": " ".join(text[cut:]) + "."}


def write_rows(rows: Iterator[dict[str, str]], path: Path) -> None:
    """Write the rows as JSON lines."""
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def build_base(folder: Path, texts: Sequence[str]) -> None:
    """Create a base model with a tokenizer of realistic size. Its weights do not matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ratchet.models import tiny_model

    tokenizer = tiny_model.train_tokenizer(texts, VOCABULARY)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=4096,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_project(folder: Path, data: Path, base: Path, columns: tuple[str, str], everything: bool) -> None:
    """Create a project with `data`, and run stage base."""
    from ratchet.config import params_file
    from ratchet.config.base import Base
    from ratchet.config.prepare import ColumnSettings, DeduplicationSettings, LeakageSettings, Prepare
    from ratchet.config.settings import Settings
    from ratchet.stages.base import base as run_base
    from ratchet.stages.project import Project
    from ratchet.storage.layout import ProjectLayout

    layout = ProjectLayout(folder)
    layout.raw.mkdir(parents=True)
    (layout.raw / "rows.jsonl").symlink_to(data)
    leakage = LeakageSettings()
    if everything:
        write_rows(invented(1000, 60, seed=99), layout.raw / "benchmark.jsonl")
        leakage = LeakageSettings(files=("data/raw/benchmark.jsonl",))
    settings = Settings(
        base=Base(source=str(base)),
        prepare=Prepare(
            sources=({"files": "data/raw/rows.jsonl"},),
            columns=ColumnSettings(prompt=columns[0], response=columns[1]),
            max_tokens=PACK_TOKENS,
            deduplication=DeduplicationSettings(jaccard_threshold=0.8 if everything else None),
            leakage=leakage,
        ),
    )
    layout.params.write_text(params_file.dump(settings), encoding="utf-8")
    (folder / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    run_base(Project.from_parts(layout, settings), print)


def ours(folder: Path) -> dict[str, float]:
    """Return the seconds of the stage in this process, and the peak memory of the process in bytes."""
    from ratchet.config import params_file
    from ratchet.models import base_model
    from ratchet.stages.prepare import prepare
    from ratchet.stages.project import Project
    from ratchet.storage.layout import ProjectLayout
    from ratchet.storage.records.base import BaseCard

    layout = ProjectLayout(folder)
    base_model.load_tokenizer(
        base_model.locate(layout, BaseCard.load(layout.base_card))
    )  # does imports that the other side has done, too
    started = time.perf_counter()
    prepare(Project.from_parts(layout, params_file.load(layout.params)))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}


def trl(base: Path, data: Path, columns: tuple[str, str], processes: int) -> dict[str, float]:
    """Return the seconds of SFTTrainer's own preparation, which its constructor runs."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    prompt, response = columns
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    with tempfile.TemporaryDirectory() as scratch:
        datasets.config.HF_DATASETS_CACHE = Path(scratch)
        started = time.perf_counter()
        rows = datasets.load_dataset("json", data_files=str(data), split="train", cache_dir=scratch)
        rows = rows.map(
            lambda row: {
                "prompt": [{"role": "user", "content": row[prompt]}],
                "completion": [{"role": "assistant", "content": row[response]}],
            },
            remove_columns=rows.column_names,
            num_proc=processes if processes > 1 else None,
        )
        settings = SFTConfig(
            output_dir=scratch, max_length=PACK_TOKENS, packing=True, report_to=[], use_cpu=True,
            dataset_num_proc=processes if processes > 1 else None,
        )  # fmt: skip
        SFTTrainer(model=model, args=settings, train_dataset=rows, processing_class=tokenizer)
        return {"seconds": time.perf_counter() - started, "bytes": 0.0}


def in_a_process(*arguments: str) -> dict[str, float]:
    """Run one turn in a new process. The last line of its output is the result."""
    done = subprocess.run(
        [sys.executable, __file__, "--turn", *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "true", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def turn(arguments: Sequence[str]) -> int:
    """Run one side once, in this process."""
    side, *rest = arguments
    if side == "ours":
        result = ours(Path(rest[0]))
    else:
        base, data, prompt, response, processes = rest
        result = trl(Path(base), Path(data), (prompt, response), int(processes))
    print(json.dumps(result))
    return 0


def compare(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure rows per second of both sides in turns, and return rows for the ratios."""
    data, columns = folder / "rows.jsonl", (options.prompt, options.response)
    if options.data:
        data = options.data.resolve()
    else:
        write_rows(invented(QUICK_ROWS if options.quick else ROWS, 120, seed=1), data)
    lines = data.read_text(encoding="utf-8").splitlines()
    base = folder / "model"
    build_base(base, [text for line in lines[:6000] for text in json.loads(line).values() if isinstance(text, str)])
    for name in ("plain", "everything"):
        make_project(folder / name, data, base, columns, everything=name == "everything")
    turns = {
        "plain": ("ours", str(folder / "plain")),
        "everything": ("ours", str(folder / "everything")),
    }
    if find_spec("trl"):
        turns |= {f"trl {n}": ("trl", str(base), str(data), *columns, str(n)) for n in (1, os.cpu_count() or 1)}
    else:
        print("skipped: TRL is not installed (pip install -c constraints.txt -e '.[benchmarks]')")
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(QUICK_TURNS if options.quick else TURNS):
        for name, arguments in turns.items():
            times[name].append(in_a_process(*arguments)["seconds"])
    for name, found in times.items():
        rate = len(lines) / statistics.median(found)
        print(f"  {name:12} {rate:9,.0f} rows/s   ({', '.join(f'{t:.1f}' for t in found)} s)", flush=True)
    peers = [found for name, found in times.items() if name.startswith("trl")]
    if not peers:
        return []
    best = min(peers, key=statistics.median)
    return [
        at_least("rows/s without de-duplication, against TRL", *_against(best, times["plain"], 1.5)),
        at_least("rows/s with everything on, against TRL", *_against(best, times["everything"], 1.0)),
    ]


def _against(theirs: Sequence[float], ours: Sequence[float], target: float) -> tuple[float, float, float]:
    """Return the median of (time of TRL / time of Ratchet) over turns, the target, and the spread."""
    value, spread = ratio(theirs, ours)
    return value, target, spread


def scale(folder: Path, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Measure time and memory of the whole stage with all steps enabled, by number of rows."""
    rows, per_row, memory = [], [], []
    for size in sizes:
        data = folder / f"{size}.jsonl"
        write_rows(invented(size, 140, seed=size), data)
        make_project(folder / str(size), data, folder / "model", ("question", "answer"), everything=True)
        found = in_a_process("ours", str(folder / str(size)))
        per_row.append(found["seconds"] / size)
        print(
            f"  {size:9,} rows, {data.stat().st_size / 1e6:7,.0f} MB: {found['seconds']:7.1f} s, "
            f"{1 / per_row[-1]:7,.0f} rows/s, {found['bytes'] / 2**20:7,.0f} MiB resident"
        )
        memory.append(found["bytes"])
        rows.append(at_most(f"resident bytes at {size:,} rows", found["bytes"], MEMORY_BYTES))
        data.unlink()
    seconds = [each * size for each, size in zip(per_row, sizes, strict=True)]
    for name, values, unit in (("seconds", seconds, 1), ("MiB resident", memory, 2**20)):
        slope, constant = statistics.linear_regression(sizes, values)
        print(
            f"  extrapolated, not measured: {(constant + slope * EXTRAPOLATED_ROWS) / unit:,.0f} {name} for "
            f"{EXTRAPOLATED_ROWS:,} rows ({constant / unit:,.0f} and {slope * 1e6 / unit:,.0f} for each million rows)"
        )
    growth = per_row[-1] / per_row[-2]
    return [*rows, at_most(f"time per row, {sizes[-1]:,} against {sizes[-2]:,} rows", growth, LINEAR_UP_TO)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows and turns: minutes")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--data", type=Path, metavar="FILE", help="JSON lines to compare on, instead of invented rows")
    parser.add_argument("--prompt", default="question", metavar="COLUMN")
    parser.add_argument("--response", default="answer", metavar="COLUMN")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="ROWS", help="only the second part, with these sizes")
    parser.add_argument("--turn", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        return turn(options.turn)
    with tempfile.TemporaryDirectory() as scratch:
        rows = []
        if options.sizes:
            build_base(Path(scratch) / "model", [row["answer"] for row in invented(6000, 120, seed=1)])
        else:
            print("template, mask, tokenise and pack:")
            rows = compare(Path(scratch), options)
        print("whole stage, everything on:")
        rows += scale(Path(scratch), options.sizes or (QUICK_SIZES if options.quick else SIZES))
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
