"""Runs the cell of benchmarks/generate.py: both sides generate with one model in turns. JSON in and out."""

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, pipeline
from transformers.utils import logging

from ratchet.models import tiny_model
from ratchet.models.decoding.decoder import BatchDecoder, DecodingOptions, DecodingRequest, DecodingResult

VOCABULARY = 4096
WORDS = (8, 110)
ENDS_SHARE = 0.02
TEXT = Path(__file__).parents[1] / "data" / "text" / "help.txt"


class Sides:
    """The model, the prompts, and both ways to generate."""

    def __init__(self, prompts: int, tokens: int) -> None:
        text = TEXT.read_text(encoding="utf-8")
        draw, words = random.Random(7), text.split()
        self.tokenizer = tiny_model.train_tokenizer(text.splitlines(), VOCABULARY)
        self.tokenizer.padding_side = "left"
        count, pad = len(self.tokenizer), self.tokenizer.pad_token_id
        self.ends = sorted(draw.sample(range(300, count), int(ENDS_SHARE * count)))
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=count, hidden_size=256, intermediate_size=688, num_hidden_layers=8, num_attention_heads=4,
            max_position_embeddings=1024, initializer_range=0.1, pad_token_id=pad, bos_token_id=None,
            eos_token_id=self.ends,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).eval()
        lengths = [draw.randint(*WORDS) for _ in range(prompts)]
        starts = [draw.randrange(len(words) - length) for length in lengths]
        self.texts = [" ".join(words[i : i + length]) for i, length in zip(starts, lengths, strict=True)]
        self.settings = DecodingOptions(max_new_tokens=tokens, end_token_ids=tuple(self.ends), pad_token_id=pad)
        self.figures: dict[str, int] = {}

    def ours(self, **changes: Any) -> list[DecodingResult]:
        """Generate with Ratchet. The results are in the order of the texts."""
        settings = DecodingOptions(**{**vars(self.settings), **changes})
        asked = (
            DecodingRequest(i, tuple(self.tokenizer(text)["input_ids"]), f"stream {i}")
            for i, text in enumerate(self.texts)
        )
        decoder = BatchDecoder(self.model, settings, None, lambda *_: None, lambda: None)
        found = sorted(decoder.generate(asked, lambda: False), key=lambda one: one.index)
        self.figures = decoder.figures
        return found

    def read(self, answers: Sequence[DecodingResult]) -> list[str]:
        """Return the texts of the answers."""
        return [self.tokenizer.decode(one.ids, skip_special_tokens=True) for one in answers]

    def theirs(self, batch: int) -> list[str]:
        """Return the pipeline's answers."""
        asked = pipeline("text-generation", model=self.model, tokenizer=self.tokenizer)
        wanted = GenerationConfig(
            max_new_tokens=self.settings.max_new_tokens, do_sample=False, eos_token_id=self.ends,
            pad_token_id=self.settings.pad_token_id,
        )  # fmt: skip
        found = asked(self.texts, batch_size=batch, generation_config=wanted, return_full_text=False)
        return [one["generated_text"] for (one,) in found]


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Return the result of a function, and its wall and CPU seconds."""
    start, cpu = time.perf_counter(), time.process_time()
    found = work()
    return found, {"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}


def turn(sides: Sides, batches: Sequence[int], ours_first: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Generate once with each side. Return the times, and the number of texts that differ."""
    answers: dict[str, list[str]] = {}
    times: dict[str, Any] = {}
    order = ["ours", *map(str, batches)]
    for who in order if ours_first else order[::-1]:
        if who == "ours":
            found, times[who] = timed(lambda: sides.read(sides.ours()))
        else:
            found, times[who] = timed(partial(sides.theirs, int(who)))
        answers[who] = found
    changed = {
        who: sum(a != b for a, b in zip(answers["ours"], answers[who], strict=True)) for who in map(str, batches)
    }
    seconds = {who: round(one["seconds"], 1) for who, one in times.items()}
    print(seconds, file=sys.stderr, flush=True)
    return times, {"changed": changed}


def main() -> None:
    """Run all measurements and print them as JSON."""
    shape = json.loads(sys.argv[1])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sides = Sides(shape["prompts"], shape["tokens"])
    whole, texts = sides.texts, sides.texts[:2]
    sides.texts = texts  # a warm-up for costs that occur once
    sides.ours()
    sides.theirs(2)
    sides.texts = whole
    turns = [turn(sides, shape["batches"], bool(i % 2)) for i in range(shape["pairs"])]
    answers, greedy = timed(sides.ours)
    figures = sides.figures
    few, many = sides.texts[: len(whole) // 4], answers[: len(whole) // 4]
    sides.texts = few
    moved = sum(a != b for a, b in zip(sides.ours(max_rows=3), many, strict=True))
    sides.texts = whole
    drawn_answers, drawn = timed(lambda: sides.ours(temperature=1.0))
    speeds = [
        sum(len(one.ids) for one in some) / taken["cpu_s"]
        for some, taken in ((drawn_answers, drawn), (answers, greedy))
    ]
    found = {
        "pairs": [times for times, _ in turns], "texts": [found for _, found in turns], "moved": moved,
        "tokens": sum(len(one.ids) for one in answers), "figures": figures, "drawn": speeds[0] / speeds[1],
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
