"""Tests that batched answers equal those of plain passes, whatever the batches are."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding_cases import DRAWN, GREEDY, SETTINGS, EventRecorder, answered, expected, model_of, plainly, ragged
from ratchet.config.train import Train
from ratchet.models import adapters, loading
from ratchet.models.decoding.decoder import BatchDecoder, DecodingOptions


@pytest.mark.parametrize("header", [0, 24], ids=["no header", "header"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_greedy_and_drawn_answers_are_the_plain_ones(family: str, settings: DecodingOptions, header: int) -> None:
    assert answered(model_of(family), ragged(header), settings) == expected(family, settings, header)


@pytest.mark.parametrize(("rows", "window", "budget"), [(1, 1, 1), (3, 50, 150), (50, 7, None)])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_batches_change_nothing(settings: DecodingOptions, rows: int, window: int, budget: int | None) -> None:
    found = answered(model_of("llama"), ragged(24), replace(settings, max_rows=rows, window=window), budget)
    assert found == expected("llama", settings, 24)


def test_the_order_of_prompts_changes_nothing() -> None:
    asked, found = ragged(), expected("llama", DRAWN)
    model = model_of("llama")
    assert answered(model, asked[::-1], DRAWN)[::-1] == found
    assert answered(model, asked[3:9], DRAWN) == found[3:9]


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_windows_of_attention_shorter_than_the_texts_change_nothing(family: str) -> None:
    model, recorder = model_of(family, sliding_window=8), EventRecorder()
    assert answered(model, ragged(), DRAWN, recorder=recorder) == [plainly(model, one, DRAWN) for one in ragged()]
    assert recorder.method == "joined"


def test_a_model_that_bears_no_mask_decodes_rows_of_one_length() -> None:
    model, recorder = model_of("llama"), EventRecorder()
    forward = model.forward

    def bare(input_ids: Any, past_key_values: Any = None, use_cache: bool = False) -> Any:
        return forward(input_ids=input_ids, past_key_values=past_key_values, use_cache=use_cache)

    model.forward = bare
    assert answered(model, ragged(), DRAWN, recorder=recorder) == expected("llama", DRAWN)
    assert recorder.method == "even"


def test_a_model_whose_cache_is_wrong_reads_whole_texts() -> None:
    """The decoder finds this by a trial; in this model, cached keys lead to wrong attention outputs."""
    model, recorder = model_of("llama"), EventRecorder()

    def spoil(module: Any, inputs: Any, given: Any, output: Any) -> Any:
        return output * 1.3 if given.get("past_key_values") is not None else output

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(
            lambda m, i, given, out: (spoil(m, i, given, out[0]), *out[1:]), with_kwargs=True
        )
    assert answered(model, ragged()[:4], DRAWN, recorder=recorder) == expected("llama", DRAWN)[:4]
    assert recorder.method == "alone"


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_in_doubt_is_decided_by_the_plain_pass_if_answers_are_exact(exact: bool) -> None:
    recorder, model = EventRecorder(), model_of("llama", torch.bfloat16)
    decoder = BatchDecoder(model, replace(DRAWN, exact=exact), None, recorder.record, recorder.beat)
    assert len(list(decoder.generate(iter(ragged()), lambda: False))) == len(ragged())
    figures = decoder.figures
    assert figures["tokens_chosen"] == figures["answer_tokens"]
    if exact:
        assert 0 < figures["tokens_rechecked"] < figures["tokens_chosen"]
        assert 0 < figures["means_recomputed"] <= figures["answers"] == len(ragged())
    else:
        assert figures["tokens_rechecked"] == figures["means_recomputed"] == 0


def test_a_header_is_read_once() -> None:
    model, tokens = model_of("llama"), list[int]()
    asked = [replace(one, ids=(one.ids * 2)[:34]) for one in ragged(24)[1:9]]
    settings = replace(GREEDY, max_new_tokens=1, max_rows=8)
    decoder = BatchDecoder(model, replace(settings, exact=False), None, lambda *_: None, lambda: None)
    assert len(list(decoder.generate(iter(asked), lambda: False))) == 8  # the trial is done, so later calls need none
    model.model.layers[0].register_forward_hook(lambda _, inputs, output: tokens.append(inputs[0].shape[:2].numel()))
    assert len(list(decoder.generate(iter(asked), lambda: False))) == 8
    assert sum(tokens) == 24 + sum(len(one.ids) - 24 for one in asked)


def test_adapters_on_a_base_in_4_bits_answer_as_they_do_alone(saved_family: Callable[[str], Path]) -> None:
    settings = Train(rank=4, alpha=12.0, target_modules=("q_proj", "down_proj"), compute_dtype="float32")
    base = loading.load(saved_family("llama"), None, settings, torch.device("cpu"))
    model, recorder = adapters.attach(base, settings, "digest").eval(), EventRecorder()
    torch.manual_seed(5)
    for _, parameter in adapters.trainable_parameters(model):
        parameter.data.normal_(0, 0.1)
    asked = ragged(24)[:7]
    assert answered(model, asked, DRAWN, recorder=recorder) == [plainly(model, one, DRAWN) for one in asked]
    assert recorder.method == "joined"
