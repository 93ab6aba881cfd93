"""Tests traces of a step without data against the same step with data."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import families
from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.models import adapters, chunked_loss, model_spec
from ratchet.models.device import Model
from ratchet.models.loss import SequenceBatch, answer_nll
from ratchet.models.memory import block_events, forecast, meta_model, trace
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.models.memory.trace import (
    AllocationEvent,
    AllocationTrace,
    BatchShape,
    Device,
    MallocSimulator,
    iterate_own_tensors,
)
from ratchet.models.model_spec import ModelSpec
from ratchet.models.preference_loss import Preference, PreferenceLoss
from small_loop import random_rows

ROWS, TOKENS, LEARNED = 2, 64, 10
STEP = BatchShape(ROWS, TOKENS, ROWS * LEARNED, packed=False, device="cpu")
FAMILIES = ["llama", "gpt2", "opt", "mixtral", "gemma2", "qwen3", "falcon", "bloom", "phi3"]


def settings_for(family: str, **changes: object) -> Train:
    plan = model_spec.from_config(families.FAMILIES[family]())
    leaves = {x.name.rsplit(".", 1)[-1] for x in plan.layers if x.role in ("attention", "mlp") and x.kind != "experts"}
    return Train(rank=4, target_modules=tuple(sorted(leaves)), **{"quantization": "none", **changes})  # type: ignore[arg-type]


def on_meta(family: str, dtype: torch.dtype = torch.float32, **changes: object) -> Model:
    plan: ModelSpec = model_spec.from_config(families.FAMILIES[family]())
    (model,) = meta_model.build(plan, settings_for(family, **changes), dtype, "cpu").models
    return model


def with_data(family: str, dtype: torch.dtype = torch.float32, dropout: float = 0.0, **changes: object) -> Model:
    model = adapters.attach(
        families.make(family, dtype=dtype, **changes), settings_for(family, dropout=dropout), "digest"
    )
    return model.train()


def inputs(packed: bool, rows_of_pack: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    input_ids = torch.randint(3, 90, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(input_ids, -100)
    labels[:, -LEARNED:] = 1
    positions = torch.arange(TOKENS // rows_of_pack).repeat(rows_of_pack)
    return input_ids, labels, positions.expand(ROWS, TOKENS).contiguous() if packed else None


def kept_without_data(model: Model, batch: BatchShape) -> int:
    """Return the bytes that the forward pass saves for the backward pass in a trace, including the loss."""
    ledger = AllocationTrace(model, batch, records_graph=True)
    model.train()
    with trace.run_as_worker(batch.device), ledger:
        given = trace.build_meta_inputs(batch)
        loss = answer_nll(model, given.input_ids, given.labels, given.position_ids).sum()
        saved = ledger.total_bytes()
    del loss
    return saved


def kept_by_autograd(model: Model, packed: bool, rows_of_pack: int = 2) -> int:
    own = {tensor.untyped_storage().data_ptr() for tensor in iterate_own_tensors(model)}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        answer_nll(model, *inputs(packed, rows_of_pack)).sum()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packs"])
@pytest.mark.parametrize(
    ("dtype", "dropout"), [(torch.float32, 0.1), (torch.bfloat16, 0.0)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_traced_activations_equal_those_saved_by_autograd(
    family: str, dtype: torch.dtype, dropout: float, packed: bool
) -> None:
    kept = kept_without_data(on_meta(family, dtype, dropout=dropout), BatchShape(ROWS, TOKENS, LEARNED, packed, "cpu"))
    rows_of_pack = 1 if family == "gpt2" else 2  # with dropout, gpt2 keeps scores; a trace treats a pack as one row
    expected = kept_by_autograd(with_data(family, dtype, dropout=dropout), packed, rows_of_pack)
    assert kept == pytest.approx(expected, rel=0.015)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_eager_attention_keeps_what_autograd_keeps(family: str) -> None:
    kept = kept_without_data(on_meta(family, attention="eager"), BatchShape(ROWS, TOKENS, LEARNED, False, "cpu"))
    assert kept == pytest.approx(kept_by_autograd(with_data(family, attn_implementation="eager"), False), rel=0.01)


def highest(ledger: AllocationTrace) -> int:
    return max(peak.total_bytes for peak in ledger.peaks.values())


def highest_with_data(model: Model, checkpointing: bool) -> int:
    """Return the peak of the same trace, recorded while real tensors are computed."""
    if checkpointing:
        model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
    ledger = AllocationTrace(model, STEP, records_graph=True)
    with ledger:
        chunked_loss.forward_backward(model, SequenceBatch(*inputs(packed=False)), 1.0)
    return highest(ledger)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma2"])
def test_what_lives_at_most_in_a_step_is_what_lives_in_one_with_data(family: str, checkpointing: bool) -> None:
    found = highest(trace.trace_micro_batch(on_meta(family), STEP, False, checkpointing))
    assert found == pytest.approx(highest_with_data(with_data(family), checkpointing), rel=0.02)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_preference_tuning_keeps_a_copy_of_its_weights_and_needs_no_more_in_a_step(objective: str, family: str) -> None:
    model, settings = with_data(family), settings_for(family, objective=objective)
    labels = np.array([True, False]) if objective == "kto" else None
    preference = Preference.from_settings(settings, model, replace(random_rows(ROWS, seed=0), is_desirable=labels))
    assert preference is not None
    batch = SequenceBatch(*inputs(packed=False), None if labels is None else torch.from_numpy(labels))
    ledger = AllocationTrace(model, STEP, records_graph=True)
    with ledger:
        PreferenceLoss(model, batch, 1.0, preference).backward()
    copies = sum(-(-tensor.nbytes // 64) * 64 for _, tensor in adapters.trainable_parameters(model))
    found = highest(trace.trace_micro_batch(on_meta(family), STEP, False, False))
    assert found == pytest.approx(highest(ledger) - copies, rel=0.001)  # the ledger sees the reference, too

    plan, work = (
        model_spec.from_config(families.FAMILIES[family]()),
        MemoryWorkload(ROWS, TOKENS, LEARNED, False, "cpu"),
    )
    plain, compared = (
        forecast.forecast(plan, one, Machine(), work) for one in (settings_for(family, beta=1.0), settings)
    )
    for phase, other in zip(plain.phases, compared.phases, strict=True):
        is_present = phase.phase in ("first_step", "steady", "evaluation")
        assert other.parts.get("reference", 0) == (copies if is_present else 0)


def test_recomputation_keeps_less_and_evaluation_keeps_nothing() -> None:
    model = on_meta("llama")
    kept, recomputed = (
        highest(trace.trace_micro_batch(model, STEP, False, checkpointing)) for checkpointing in (False, True)
    )
    assert highest(trace.trace_evaluation(model, STEP)) < recomputed < 0.9 * kept


def test_four_bits_are_written_out_one_layer_at_a_time() -> None:
    def most(quantization: str) -> int:
        found = trace.trace_micro_batch(
            on_meta("llama", quantization=quantization), BatchShape(1, 2, 1, False, "cpu"), False, False
        )
        return max(peak.parts["dequantized weights"] for peak in found.peaks.values())

    layer = families.HIDDEN * families.INNER * 4
    constants = families.HIDDEN * families.INNER // 64 * 4
    assert layer < most("nf4") <= layer + 3 * constants + 64
    assert most("none") == 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_repeated_events_of_the_head_are_those_of_all_its_chunks(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "LEARNED_ELEMENTS", 2 * families.FAMILIES["llama"]().vocab_size)
    model, batch, heads = on_meta("llama"), replace(STEP, learned_positions=19), []
    model.get_output_embeddings().register_forward_hook(lambda *_: heads.append(1))

    def traces() -> tuple[AllocationTrace, AllocationTrace]:
        heads.clear()
        return (
            trace.trace_micro_batch(model, batch, is_accumulated=False, checkpointing=checkpointing),
            trace.trace_evaluation(model, batch),
        )

    found, runs = traces(), len(heads)
    monkeypatch.setattr(AllocationTrace, "describe_events", lambda *_: [object()])
    expected, all_runs = traces(), len(heads)
    assert (runs < all_runs, all_runs) == (True, 2 * 11)  # once in the body's pass, then ten chunks
    for short, long in zip(found, expected, strict=True):
        assert short.peaks == long.peaks
        assert [event.size_bytes for event in short.events] == [event.size_bytes for event in long.events]
        assert MallocSimulator(0).replay(short.events) == MallocSimulator(0).replay(long.events) > 0
        assert len({event.key for event in short.events}) == len({event.key for event in long.events})


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("family", "period"), [("llama", 1), ("gemma2", 2), ("mixtral", 1)])
def test_repeated_events_of_five_periods_are_those_of_nine(family: str, period: int, checkpointing: bool) -> None:
    def traced(periods: int) -> list[list[AllocationEvent]]:
        spec = model_spec.from_config(families.FAMILIES[family](num_hidden_layers=periods * period))
        (model,) = meta_model.build(spec, settings_for(family), torch.float32, "cpu", whole=True).models
        step = trace.trace_micro_batch(model, STEP, is_accumulated=False, checkpointing=checkpointing)
        return [step.events, trace.trace_evaluation(model, STEP).events]

    for few, many in zip(traced(5), traced(9), strict=True):
        repeated = block_events.repeat_periods(few, 0, period, 4)
        assert repeated is not None
        sizes = [[(event.segment, event.size_bytes, event.graph) for event in events] for events in (repeated, many)]
        assert sizes[0] == sizes[1]
        heaps = [MallocSimulator(2**20) for _ in range(2)]
        for _ in range(2):
            assert heaps[0].replay(repeated) == heaps[1].replay(many)
        assert block_events.repeat_periods(few[:-1] + few[:1], 0, period, 4) is None, "a segment is entered twice"


def test_events_of_unequal_blocks_are_not_repeated() -> None:
    spec = model_spec.from_config(families.FAMILIES["llama"](num_hidden_layers=5))
    (model,) = meta_model.build(
        spec, Train(rank=4, rank_pattern={r"layers\.2\.mlp\.up_proj": 8}), torch.float32, "cpu", whole=True
    ).models
    step = trace.trace_micro_batch(model, STEP, is_accumulated=False, checkpointing=False)
    assert block_events.repeat_periods(step.events, 0, 1, 4) is None


def test_accumulated_gradients_are_counted_from_the_start() -> None:
    model, batch = on_meta("llama"), BatchShape(1, 8, 2, False, "cpu")
    own = sum(-(-p.nbytes // 64) * 64 for p in model.parameters() if p.requires_grad)
    first, second = (
        trace.trace_micro_batch(model, batch, there, False).peaks["forward", "before", 0] for there in (False, True)
    )
    assert (first.parts["gradients"], second.parts["gradients"]) == (0, own)


def test_fused_attention_of_gpus_keeps_no_scores_and_a_mask_repeats_the_keys() -> None:
    fused, eager = (on_meta("qwen3", torch.bfloat16, attention=attention) for attention in ("sdpa", "eager"))
    rows, packs = (kept_without_data(fused, BatchShape(1, 512, 1, packed, "cuda")) for packed in (False, True))
    assert rows < packs < kept_without_data(eager, BatchShape(1, 512, 1, False, "cuda"))


@pytest.mark.parametrize(("device", "kept_bytes"), [("cpu", 4), ("cuda", 1)])
def test_dropout_keeps_its_noise_on_a_cpu_and_a_mask_on_a_gpu(device: Device, kept_bytes: int) -> None:
    kept: list[torch.Tensor] = []
    x = torch.empty(8, 16, device="meta", requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda kept: kept)
    with trace.DeviceKernels(device), hooks:
        torch.nn.functional.dropout(x, 0.5)
        assert sum(tensor.nbytes for tensor in kept) == kept_bytes * x.numel()
        kept.clear()
        torch.nn.functional.dropout(x, 0.5, training=False)
    assert not kept


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_the_process_is_left_as_it_was(is_deterministic: bool) -> None:
    before, was_deterministic = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_deterministic)
    trace.trace_micro_batch(on_meta("llama"), BatchShape(1, 8, 2, False, "cpu"), False, True)
    after = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(was_deterministic)
    assert torch.equal(before, torch.get_rng_state())
    assert after is is_deterministic
    assert torch.ones(2).device.type == "cpu"
