"""Prompts for decoding, and reference answers that are computed with plain forward passes."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional

import families
from ratchet.models.decoding.decoder import BatchDecoder, DecodingOptions, DecodingRequest, DecodingResult
from ratchet.models.decoding.token_choice import batched_gumbel_noise

ENDS = (3, 4, 5, 6)
GREEDY = DecodingOptions(max_new_tokens=20, end_token_ids=ENDS, pad_token_id=0, max_rows=5, window=9)
DRAWN = replace(GREEDY, temperature=0.9)
NUCLEUS = replace(GREEDY, temperature=1.1, top_p=0.7)
SETTINGS = {"greedy": GREEDY, "drawn": DRAWN, "nucleus": NUCLEUS}


def words(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(7, families.VOCABULARY) for _ in range(count))


def ragged(header: int = 0, count: int = 14) -> list[DecodingRequest]:
    """Return prompts of 1 to 40 tokens after a common header. Some prompts have equal lengths, and two prompts are
    equal."""
    draw = random.Random(5)
    begin = words(draw, header)
    lengths = [1, 40, 17, 17, 17] + [draw.randint(2, 40) for _ in range(count - 6)]
    asked = [DecodingRequest(10 + i, begin + words(draw, length), f"stream {i}") for i, length in enumerate(lengths)]
    return [*asked, replace(asked[1], index=99, stream="another")]


def model_of(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return families.make(family, **changes).to(dtype)


def plainly(model: Any, asked: DecodingRequest, settings: DecodingOptions) -> DecodingResult:
    """Compute the reference answer: decode one prompt at a time, with the whole text in each pass and without a
    cache."""
    text, ids, finish = list(asked.ids), list[int](), "length"
    with torch.no_grad():
        for step in range(settings.max_new_tokens):
            logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].float()
            scores = logits
            if settings.temperature:
                heated = logits / settings.temperature
                mass = heated.double().softmax(0)
                greater = (mass * (heated > heated.unsqueeze(1))).sum(dim=1)
                noise = batched_gumbel_noise([(asked.stream, step)], len(logits))[0]
                scores = torch.where(greater < settings.top_p, heated + noise, -torch.inf)
            token = int(scores.argmax())
            ids.append(token)
            text.append(token)
            if token in settings.end_token_ids:
                finish = "stop"
                break
        logits = model(input_ids=torch.tensor([text[:-1]]), use_cache=False).logits[0, len(asked.ids) - 1 :]
        nll = functional.cross_entropy(logits.float(), torch.tensor(ids), reduction="none")
    return DecodingResult(asked.index, tuple(ids), finish, round(-float(nll.double().sum()) / len(ids), 4) + 0.0)  # type: ignore[arg-type]


class EventRecorder:
    """Records the events of a decoder."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.beats = 0

    def record(self, kind: str, data: dict[str, Any]) -> None:
        self.events.append((kind, data))

    def beat(self) -> None:
        self.beats += 1

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [data for one, data in self.events if one == kind]

    @property
    def method(self) -> Any:
        return self.of_kind("method")[-1]["method"]


def answered(
    model: Any, asked: Sequence[DecodingRequest], settings: DecodingOptions, budget: int | None = None,
    recorder: EventRecorder | None = None, before: Callable[[int], None] = lambda _: None,
) -> list[DecodingResult]:  # fmt: skip
    """Return all answers in the order of the prompts."""
    recorder = recorder or EventRecorder()
    decoder = BatchDecoder(model, settings, budget, recorder.record, recorder.beat, before)
    found = {one.index: one for one in decoder.generate(iter(asked), lambda: False)}
    return [found[one.index] for one in asked]


@lru_cache(maxsize=64)
def expected(
    family: str, settings: DecodingOptions, header: int = 0, dtype: torch.dtype = torch.float32
) -> list[DecodingResult]:
    model = model_of(family, dtype)
    once = replace(settings, max_rows=1, window=1)
    return [plainly(model, one, once) for one in ragged(header)]
