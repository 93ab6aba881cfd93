"""Cases on a simulated GPU, all in one process: `python simulated_gpu_cases.py NAME...`. Prints the outcome of each as
JSON: empty, or the end of the traceback."""

import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import simulated_gpu  # first, because libraries look for CUDA while they are imported

# isort: split
import torch
import transformers
from torch import Tensor
from torch.profiler import ProfilerActivity

import decoding_cases
import families
import online_distillation_cases
from ratchet.config.train import Train
from ratchet.errors import InterruptedRunError
from ratchet.evaluation import evaluator
from ratchet.models import adapters, device, initialization, merged_pass, scoring
from ratchet.models.decoding.decoder import DecodingOptions
from ratchet.models.memory import capacity
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalReader
from ratchet.stages import hardware_probe
from ratchet.storage.records.training import TrainingProfile
from ratchet.training import distributed, optimizer, profiler
from ratchet.training.distillation import OnlineTeacherReader
from ratchet.training.gpu_temperature import GpuThermometer
from ratchet.training.step_timer import StepTimer
from small_loop import SHAPE, SMALL, after_steps, loop_of, losses, random_rows, trained_by

FOUR_BITS = Train(compute_dtype="float32")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
EXPERTS = transformers.Qwen3MoeConfig(
    **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16
)
SLIDING = transformers.Gemma3TextConfig(
    **SHAPE, head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
)


def trained_like_a_cpu(config: object = None, **changes: Any) -> Callable[[], None]:
    """Return a case: a training has the losses that it has on a CPU."""

    def case() -> None:
        train = Train.model_validate(SMALL.model_dump() | {"epochs": 0.5} | changes)
        roots = [Path(tempfile.mkdtemp()) for _ in range(2)]
        for root, place in zip(roots, (CPU, GPU), strict=True):
            loop_of(root, train, device=place, config=config).run()
        expected, found = (losses(RunPaths(root)) for root in roots)
        assert len(found) > 4
        assert all(abs(a - b) < 1e-3 for a, b in zip(expected, found, strict=True)), (expected, found)
        check_peaks(RunPaths(roots[1]))

    return case


def check_peaks(run: RunPaths) -> None:
    """Check that the peaks are the allocator's, plus what belongs to no tensor: half of the memory less 1 MiB."""
    peaks = [e.data for e in JournalReader(run.journal).read() if e.kind == "memory_peak"]
    figures = {(peak["device"], peak["device_bytes"], peak["peak_bytes"], peak["allocated_bytes"]) for peak in peaks}
    size = simulated_gpu.MEMORY_BYTES
    assert figures == {("cuda", size, 2**21 + size // 2 - 2**20, 2**20)}, figures


def snapshot() -> None:
    """Another thread may take a snapshot. Its current GPU is the first, not that of the rank."""
    loop = loop_of(Path(tempfile.mkdtemp()), SMALL, device=GPU)
    loop.executor.step()
    simulated_gpu.queue.current = 1
    try:
        taken, _ = loop.executor.snapshot()
    finally:
        simulated_gpu.queue.current = 0
        loop.checkpointer.close()
    found = taken.weights | taken.optimizer_tensors
    expected = trained_by(loop) | optimizer.flatten_state(loop.executor.optimizer)[0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in expected.items())


def resumed() -> None:
    train = SMALL.model_copy(update={"epochs": 0.5})
    whole = loop_of(Path(tempfile.mkdtemp()), train, device=GPU)
    whole.run()
    part = RunPaths(Path(tempfile.mkdtemp()))
    try:
        loop_of(part.root, train, after_steps(part, 2), device=GPU).run()
    except InterruptedRunError:
        pass
    else:
        raise AssertionError("the training was not stopped")
    loop = loop_of(part.root, train, device=GPU)
    loop.run()
    assert losses(part) == losses(whole.context.paths)
    expected = trained_by(whole)
    assert all(torch.equal(tensor.cpu(), expected[name].cpu()) for name, tensor in trained_by(loop).items())


def out_of_memory() -> None:
    train = SMALL.model_copy(update={"epochs": 0.3, "dropout": 0.0})
    roots = [Path(tempfile.mkdtemp()) for _ in range(2)]
    for root, limit in zip(roots, (2**40, 9_000), strict=True):
        loop = loop_of(root, train, device=GPU)
        simulated_gpu.memory.largest_bytes = limit
        try:
            loop.run()
        finally:
            simulated_gpu.memory.largest_bytes = 2**40
    expected, found = (losses(RunPaths(root)) for root in roots)
    assert all(abs(a - b) < 1e-4 for a, b in zip(expected, found, strict=True)), (expected, found)
    events = list(JournalReader(RunPaths(roots[1]).journal).read())
    assert any(event.kind == "microbatch_budget" for event in events)


def inputs_explained() -> None:
    model = adapters.attach(families.make("llama").to(GPU), SMALL, "base", (), 10)
    initialization.explain_inputs(model, iter([list(range(3, 40))] * 4), GPU)


def decoded() -> None:
    torch.use_deterministic_algorithms(False)  # only trainings need it
    options = DecodingOptions(6, (2,), 0)
    asked = decoding_cases.ragged(count=5)
    plain, simulated = (decoding_cases.model_of("llama").to(place) for place in (CPU, GPU))
    for temperature in (0.0, 0.8):
        chosen = replace(options, temperature=temperature, top_p=0.9)
        expected, found = (decoding_cases.answered(model, asked, chosen) for model in (plain, simulated))
        assert [one.ids for one in expected] == [one.ids for one in found]


def scored() -> None:
    rows = [list(range(3, 20)), [5, 9, 4]]
    labels = [[-100] * 4 + rows[0][4:], [-100, 9, 4]]
    expected, found = (scoring.score_rows(families.make("llama").to(place), rows, labels, 0) for place in (CPU, GPU))
    assert all(abs(a.nll - b.nll) < 1e-3 for a, b in zip(expected, found, strict=True))
    cost = evaluator.measure_cost(families.make("llama").to(GPU), 0, rows, (2,), 4)
    assert cost.device == "NVIDIA L4"


def taught() -> None:
    folder, rows = Path(tempfile.mkdtemp()), random_rows(48, seed=1)
    train = online_distillation_cases.distill_settings().model_copy(update={"epochs": 0.6})
    teacher = OnlineTeacherReader(online_distillation_cases.found(folder), train, rows, GPU)
    loop_of(Path(tempfile.mkdtemp()), train, device=GPU, train_rows=rows, teacher=teacher).run()


def examined() -> None:
    assert device.pick_device("auto").type == "cuda"
    assert device.pick_dtype("auto", GPU) == torch.bfloat16
    device.require_dtype("bfloat16", GPU)
    assert device.describe_device(GPU).startswith("NVIDIA L4 (compute capability 8.9), ")
    assert not (fault := device.find_four_bit_fault(GPU, (64, 512), "nf4")), fault
    assert capacity.allocated_bytes(GPU) == 2**20
    timer = StepTimer(GPU)
    timer.start()
    with timer.measure("forward"):
        distributed.RankGroup(distributed.RankEnvironment(), GPU, lambda: None, 1.0).wait_for_device(GPU)
    assert timer.stop().seconds >= timer.stop().spans["forward"] > 0
    assert GpuThermometer.of_device(GPU, 40, print).update()
    assert profiler.measure_seconds(lambda: torch.ones(2, device=GPU).sum(), GPU) > 0


def profiled() -> None:
    """Every second step waits for the GPU at its spans, and the trace has the GPU's kernels."""
    traced: list[Any] = []
    profile, constants = torch.profiler.profile, (profiler.SQUARE_SIDE, profiler.COPY_BYTES, profiler.BLOCK_S)

    def profile_cpu(activities: Any, **options: Any) -> Any:
        traced.extend(activities)
        return profile(activities=activities[:1], **options)

    torch.profiler.profile = profile_cpu  # type: ignore[assignment,misc]
    profiler.SQUARE_SIDE, profiler.COPY_BYTES, profiler.BLOCK_S = {"cuda": 64}, {"cuda": 2**16}, 1e-5
    try:
        config = transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 1})
        context = loop_of(Path(tempfile.mkdtemp()), SMALL, device=GPU, config=config).context
        environment = {"device": "cuda NVIDIA L4", "compute_dtype": "bfloat16"}
        profiler.profile_training(replace(context, environment=environment), 6)
    finally:
        torch.profiler.profile = profile  # type: ignore[misc]
        profiler.SQUARE_SIDE, profiler.COPY_BYTES, profiler.BLOCK_S = constants
    found = TrainingProfile.load(context.paths.result / profiler.PROFILE)
    assert ProfilerActivity.CUDA in traced
    assert found.synchronised_step_s is not None
    assert found.limits.datasheet_flops_per_s == 121e12
    assert all(operator.self_s == 0 for operator in found.operators), "the time of a GPU, and it has computed nothing"


def probed() -> None:
    """A GPU without bfloat16 is not measured in it, because torch would emulate it."""
    supported = torch.cuda.is_bf16_supported
    torch.cuda.is_bf16_supported = lambda including_emulation=True: including_emulation
    try:
        products = next(hardware_probe.probe_gpu(GPU, 64, {}))[1]
    finally:
        torch.cuda.is_bf16_supported = supported
    assert re.fullmatch(r"float32 \S+ TFLOP/s, float16 \S+ TFLOP/s; `auto` is float16", products), products


def streams_of_random_numbers() -> None:
    torch_generator = torch.Generator
    torch.Generator = lambda _: torch_generator()  # type: ignore[assignment,misc]
    try:
        stream = merged_pass.RandomStream(GPU)
    finally:
        torch.Generator = torch_generator  # type: ignore[misc]
    stream.seed(3)
    with stream.use():
        drawn = torch.rand(3, device=GPU)
    assert torch.equal(drawn.cpu(), torch.rand(3, generator=torch.Generator().manual_seed(3)))


def simulation() -> None:
    """The simulation fails where a GPU fails."""
    number: Tensor = torch.ones(3, device=GPU)
    for work in (lambda: number + torch.ones(3), number.numpy, lambda: torch.kthvalue(number, 2)):
        try:
            work()
        except (RuntimeError, TypeError):
            continue
        raise AssertionError(f"{work} did not fail")


SHORT_CASES: dict[str, Callable[[], None]] = {
    "simulation": simulation,
    "examined": examined,
    "packed": trained_like_a_cpu(batching="packed", epochs=1.5),
    "adalora": trained_like_a_cpu(adapter="adalora", adalora={"target_rank": 2, "every_steps": 1}),
    "inputs explained": inputs_explained,
    "decoded": decoded,
    "scored": scored,
    "snapshot": snapshot,
    "profiled": profiled,
    "probed": probed,
    "streams of random numbers": streams_of_random_numbers,
}
LONG_CASES: dict[str, Callable[[], None]] = {
    "plain": trained_like_a_cpu(),
    "8-bit states": trained_like_a_cpu(optimizer="adamw_8bit"),
    "dora": trained_like_a_cpu(adapter="dora"),
    "pissa": trained_like_a_cpu(initialization="pissa"),
    "kto": trained_like_a_cpu(objective="kto"),
    "experts": trained_like_a_cpu(EXPERTS, dropout=0.0),
    "sliding window": trained_like_a_cpu(SLIDING),
    "resumed": resumed,
    "out of memory": out_of_memory,
    "taught": taught,  # the last, because transformers changes more while it loads than the simulation can bear
}


def main() -> None:
    outcomes = {}
    torch.set_num_threads(1)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # the simulation is that of one thread
    with simulated_gpu.simulate():
        torch.utils.deterministic.fill_uninitialized_memory = False
        for name in sys.argv[1:]:
            case = (SHORT_CASES | LONG_CASES)[name]
            torch.use_deterministic_algorithms(True)
            try:
                case()
                outcomes[name] = ""
            except Exception:
                outcomes[name] = traceback.format_exc()[-3000:]
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
