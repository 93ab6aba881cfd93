"""Runs one cell of benchmarks/evaluate.py in its own process: creates, evaluates, or scores labels. JSON in and out.

Both sides call the same function of the harness, `evaluate`, which builds requests, has them computed and scores them.
Its time counts as evaluation. Imports, the index of tasks and loading are excluded for both.
"""

import json
import logging
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ratchet.config.evaluate import HarnessSettings
from ratchet.evaluation import harness
from ratchet.evaluation.scorer import ScoreStore
from ratchet.models import cpu_products, likelihoods, scoring, tiny_model

VOCABULARY = 8192
MERGES = 2000
PASSAGE_WORDS, ENDING_WORDS, CHOICES, SHOT_WORDS, SHOTS = 180, (3, 8), 4, 40, 5
MODEL_TOKENS = 2048
TEXT = Path(__file__).parents[1] / "data" / "text" / "help.txt"
CHOICE = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: data/tasks/{name}.jsonl, train: data/tasks/{name}-shots.jsonl}}}}
test_split: test
fewshot_split: train
fewshot_config: {{sampler: first_n}}
num_fewshot: {shots}
output_type: multiple_choice
doc_to_text: "{{{{passage}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ENDING = """\
task: endings
dataset_path: json
dataset_kwargs: {data_files: {test: data/tasks/endings.jsonl}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{passage}}"
doc_to_target: " {{ending}}"
metric_list: [{metric: perplexity}, {metric: acc}]
"""


def make(work: Path, documents: int, layers: int) -> dict[str, Any]:
    """Create a Llama with random weights, and three tasks on the bundled text: which words continue a passage."""
    text = TEXT.read_text(encoding="utf-8")
    tokenizer = tiny_model.train_tokenizer(text.splitlines(), MERGES)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024, num_hidden_layers=layers,
        num_attention_heads=6, max_position_embeddings=MODEL_TOKENS, initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(work / "model")
    tokenizer.save_pretrained(work / "model")
    folder = work / "data" / "tasks"
    folder.mkdir(parents=True)
    words, draw = text.split(), random.Random(7)
    for name, length, shots in (("passages", PASSAGE_WORDS, 0), ("shots", SHOT_WORDS, SHOTS)):
        rows = [_choices(words, draw, length) for _ in range(documents + SHOTS)]
        _write(folder / f"{name}-shots.jsonl", rows[documents:])
        _write(folder / f"{name}.jsonl", rows[:documents])
        (folder / f"{name}.yaml").write_text(CHOICE.format(name=name, shots=shots))
    rows = [_choices(words, draw, PASSAGE_WORDS) for _ in range(documents)]
    _write(folder / "endings.jsonl", [{"passage": r["passage"], "ending": r["choices"][r["gold"]]} for r in rows])
    (folder / "endings.yaml").write_text(ENDING)
    return {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def _choices(words: list[str], draw: random.Random, length: int) -> dict[str, Any]:
    """Return a passage of about this many words, its continuation, and continuations of other passages."""

    def piece(start: int, count: int) -> str:
        return " ".join(words[start : start + count])

    own = draw.randint(length * 2 // 3, length * 4 // 3)
    start, gold = draw.randrange(len(words) - own - ENDING_WORDS[1]), draw.randrange(CHOICES)
    endings = [piece(draw.randrange(len(words) - 20), draw.randint(*ENDING_WORDS)) for _ in range(CHOICES)]
    endings[gold] = piece(start + own, draw.randint(*ENDING_WORDS))
    return {"passage": piece(start, own), "choices": endings, "gold": gold}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class Clock:
    """Measures the time of a function, and the CPU time that the process used in it, in seconds."""

    def __init__(self, timed: Callable[..., Any]) -> None:
        self.timed, self.seconds, self.cpu_s = timed, 0.0, 0.0

    def __call__(self, *given: Any, **named: Any) -> Any:
        start, cpu = time.perf_counter(), time.process_time()
        try:
            return self.timed(*given, **named)
        finally:
            self.seconds, self.cpu_s = time.perf_counter() - start, time.process_time() - cpu


def command(work: Path, tasks: list[str], batch_rows: int, out: str) -> list[str]:
    """Return the arguments of `lm_eval`."""
    return [
        "run", "--model", "hf", "--model_args", f"pretrained={work / 'model'},dtype=float32", "--tasks",
        ",".join(tasks), "--include_path", str(work / "data" / "tasks"), "--batch_size", str(batch_rows), "--device",
        "cpu", "--apply_chat_template", "--fewshot_as_multiturn", "--log_samples", "--output_path", str(work / out),
    ]  # fmt: skip


def theirs(work: Path, tasks: list[str], batch_rows: int, out: str) -> dict[str, Any]:
    """Run the harness's own command once for each task. The only change is a clock."""
    from lm_eval import __main__, evaluator

    found = {}
    for task in tasks:
        evaluator.evaluate = clock = Clock(getattr(evaluator.evaluate, "timed", evaluator.evaluate))
        sys.argv = ["lm_eval", *command(work, [task], batch_rows, f"{out}-{task}")]
        __main__.cli_evaluate()
        folder = next((work / f"{out}-{task}").glob("*/"))
        samples = next(folder.glob(f"samples_{task}_*.jsonl")).read_text(encoding="utf-8").splitlines()
        documents = {}
        for line in samples:
            one = json.loads(line)
            said = [answer for response in one["resps"] for answer in response]
            nats = [float(answer[0] if isinstance(answer, list) else answer) for answer in said]
            documents[one["doc_hash"]] = [nats, one["acc"]]
        found[task] = {"seconds": clock.seconds, "cpu_s": clock.cpu_s, "documents": documents}
    return found


def ours(work: Path, tasks: list[str], batch_rows: int, out: str) -> dict[str, Any]:
    """Evaluate harness tasks as `ratchet evaluate` does, including storage of results."""
    import lm_eval
    from lm_eval import evaluator

    model, tokenizer = _loaded(work)
    found = {}
    for task in tasks:
        lm_eval.evaluate = clock = Clock(evaluator.evaluate)
        settings, store = HarnessSettings(tasks=(task,)), ScoreStore(work / f"{out}-{task}.jsonl")
        (result,) = harness.run(model, tokenizer, settings, work, work / "data" / "tasks", batch_rows, store)
        (accuracy,) = (one for one in result.scores if one.metric == "acc")
        documents = {one["id"]: [one["likelihoods"], accuracy.values[one["id"]]] for one in result.documents}
        found[task] = {"seconds": clock.seconds, "cpu_s": clock.cpu_s, "documents": documents}
    return found


def _loaded(work: Path) -> tuple[Any, Any]:
    cpu_products.use_onednn()  # as Ratchet's commands that load models do
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(work / "model")


def labelled(work: Path, prompts: int, batch_rows: int) -> dict[str, Any]:
    """Score labels as answers to prompts of one length: with a shared prompt, and with each pair separately."""
    model, _ = _loaded(work)
    draw = random.Random(5)
    asked = [[draw.randrange(10, MERGES) for _ in range(60)] for _ in range(prompts)]
    named = [[draw.randrange(10, MERGES) for _ in range(draw.randint(2, 5))] for _ in range(20)]
    start = time.perf_counter()
    for first in range(0, prompts, batch_rows):
        scoring.score_labels(model, asked[first : first + batch_rows], named, batch_rows, 0)
    middle = time.perf_counter()
    pairs = [(prompt, label) for prompt in asked for label in named]
    alone = [likelihoods.PromptContinuation.from_tokens(*pair, MODEL_TOKENS) for pair in pairs]
    plan = likelihoods.plan_batches(alone, batch_rows, likelihoods.CacheSharing.NONE)
    reading = likelihoods.ContinuationScorer(model, alone, 0, 0)
    for batch in plan.batches:
        reading.score_batch(batch)
    return {"shared_s": middle - start, "anew_s": time.perf_counter() - middle, "pairs": len(pairs)}


DO: dict[str, Callable[..., dict[str, Any]]] = {"make": make, "ours": ours, "theirs": theirs, "labels": labelled}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    logging.disable(logging.WARNING)
    print(json.dumps(DO[given.pop("do")](Path(given.pop("work")), **given)))
