"""The work of a training process, from an opened run directory to a sealed result.

It knows the run directory and nothing else: no MLflow, no Optuna, no DVC.
"""

import math
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ratchet.config.schema import Machine
from ratchet.data import token_files
from ratchet.data.batches import BatchPlan
from ratchet.errors import EXIT_OK, SettingsError, StorageError
from ratchet.models import activation_checkpointing, adapters, base_model, loading, model_spec, targets, vocabulary
from ratchet.models.memory import parameters as storage
from ratchet.runs.directory import RunPaths, RunSpec, TrainingLaunchSpec
from ratchet.runs.fault_injection.injection import FaultInjector
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal, JournalEvent
from ratchet.storage import files
from ratchet.training import distributed, memory_monitor, mfu, online_distillation, result, train_step
from ratchet.training.distillation import TeacherShardReader
from ratchet.training.distributed import RankEnvironment, RankGroup
from ratchet.training.exit_codes import report_worker_end
from ratchet.training.memory_monitor import MemoryMonitor
from ratchet.training.online_distillation import OnlineTeacherReader
from ratchet.training.result import ParameterCounts
from ratchet.training.stopping import GracefulShutdown
from ratchet.training.train_step import TrainingContext
from ratchet.training.trainer import TrainingLoop

ADVICE = (
    "not in a step, where micro-batches would have been made smaller, but for the model or the optimizer itself: take "
    "train.quantization nf4, a smaller train.rank, train.optimizer adamw_8bit, or a smaller base; with a teacher in "
    "memory, train.distill.quantization nf4, or train.distill.asked: before"
)
SAMPLE = 1000
"""Rows, and a few more, by which it is told how many tokens are learned from."""


def run_worker(paths: RunPaths, attempt: int, stop: GracefulShutdown, heartbeat: Heartbeat) -> int:
    """Train the run in `paths` until its result is sealed, or `stop` is asked; returns the exit code."""
    place = RankEnvironment.of_environment()
    journal = Journal(paths.journal, attempt) if place.writes else RankJournal(paths.journal, attempt)
    try:
        _train(paths, journal, stop, heartbeat)
    except BaseException as error:
        return report_worker_end(error, journal, ADVICE)
    return EXIT_OK


class RankJournal(Journal):
    """The journal in the hands of a rank that does not write it: told are its failure, and what it alone knows."""

    def append(self, kind: str, **data: Any) -> JournalEvent:
        if kind == "failure" or "rank" in data:
            return super().append(kind, **{"rank": RankEnvironment.of_environment().rank} | data)
        return JournalEvent(kind, round(time.time(), 3), self.attempt, data)


def _train(paths: RunPaths, journal: Journal, stop: GracefulShutdown, heartbeat: Heartbeat) -> None:
    spec, launch = RunSpec.load(paths.spec), TrainingLaunchSpec.load(paths.launch)
    hidden_size = base_model.read_hidden_size(Path(launch.base_path))
    loading.use_threads(launch.machine.threads, RankEnvironment.of_environment().local_world, hidden_size)
    torch.use_deterministic_algorithms(True)
    # Else torch fills every new tensor with NaN, 2,000 times a step: 1 to 5 % of its time, and no kernel reads them.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    heartbeat.beat("load")
    task = _build_context(spec, launch, WorkerContext(paths, journal, heartbeat, stop))
    if launch.profile_steps is not None:
        from ratchet.training import profiler  # no training needs what it imports

        profiler.profile_training(task, launch.profile_steps)
        return
    loop = TrainingLoop(task)
    trainable = sum(parameter.numel() for _, parameter in adapters.trainable_parameters(task.model))
    quantized_count = storage.count_quantized_parameters(task.model)
    parameters = ParameterCounts(trainable, launch.base.parameters + trainable, quantized_count)
    journal.append(
        "ready", start_step=loop.state.step, planned_steps=loop.plan.steps, trainable_parameters=parameters.trainable,
        total_parameters=parameters.total, device=str(task.device), torch=torch.__version__,
        compute_dtype=task.made_by["compute_dtype"], threads=torch.get_num_threads(), ranks=task.ranks.place.world,
        leads=task.ranks.leads, shares_base=task.shares_base, machines=distributed.list_machines(task.ranks, paths),
        hosts=task.ranks.gather_json(socket.gethostname()), **_compute_flops(task),
    )  # fmt: skip
    loop.run()
    heartbeat.beat("save")
    with task.ranks.in_concert(task.shares_base):  # whoever writes has sealed the end then, and needs all shares
        found = result.analyse_kept_weights(loop) if task.ranks.place.writes or task.shares_base else None
    if found is None or not task.ranks.place.writes:
        return
    digest_of_adapter = _seal_with_retry(task, lambda: result.seal(loop, found, launch.base, parameters))
    journal.append("finished", step=loop.state.step, reason=loop.end_reason, adapter_digest=digest_of_adapter)
    journal.sync()


def _compute_flops(task: TrainingContext) -> dict[str, float | None]:
    """What a token takes, and what all devices together can do at most: in operations, and operations a second."""
    rows = range(len(task.train))[:: max(1, len(task.train) // SAMPLE)]
    learned = task.train.trained(rows) / task.train.tokens(rows)
    name = torch.cuda.get_device_name(task.device) if task.device.type == "cuda" else ""
    dtype = loading.pick_dtype(task.settings.compute_dtype, task.device)
    peak = task.ranks.gather([mfu.datasheet_flops_s(name, dtype) or math.nan])
    whole = sum(one for (one,) in peak)
    taken = None if task.shares_base else mfu.flops_per_token(task.model, learned)
    if taken is not None and isinstance(task.lessons, OnlineTeacherReader):
        asked = mfu.flops_per_token(task.lessons.model, learned, passes=1)
        taken = None if asked is None else taken + asked
    return {
        "flops_per_token": taken,
        "peak_flops_s": None if math.isnan(whole) else whole,
    }


@dataclass(frozen=True)
class WorkerContext:
    """What a worker has that is not its run's: its pens, and its ties to the supervisor."""

    paths: RunPaths
    journal: Journal
    heartbeat: Heartbeat
    stop: GracefulShutdown


def _build_context(spec: RunSpec, launch: TrainingLaunchSpec, process: WorkerContext) -> TrainingContext:
    place = RankEnvironment.of_environment()
    device = _select_device(launch.machine, place)
    ranks = RankGroup(place, device, lambda: process.heartbeat.beat("peers"), launch.machine.peers_wait_s)
    made_by = _describe_origin(spec, device, launch.machine, place.world)
    distributed.require_consistent(ranks, {"run": spec.model_dump(mode="json"), "with": _select_comparable(made_by)})
    monitor = MemoryMonitor(process.journal, device, launch.machine.memory_warnings)
    base_model.verify_files(Path(launch.base_path), launch.base.files)
    data = Path(launch.data_path)
    files.verify_sealed(data, "data")
    train, validation = token_files.load_rows(data, "train"), token_files.load_rows(data, "validation")
    plan = BatchPlan(train.lengths, spec.train)
    lessons: TeacherShardReader | OnlineTeacherReader | None = None
    if spec.teaching and launch.teaching_path:
        lessons = TeacherShardReader(Path(launch.teaching_path), train, spec.train.distill, spec.teaching)
    process.heartbeat.beat("load")
    teacher = online_distillation.find_teacher(spec, launch, train)
    base = model_spec.load(Path(launch.base_path), launch.base.remote_code)
    targets.check_adapter(base, spec.train, bool(launch.base.added_tokens))
    if teacher and process.journal.attempt == 1 and (said := teacher.padding(base)):
        process.journal.append("notice", text=f"teacher: {said}")
    work = memory_monitor.compute_largest_work(plan, train, validation, launch.machine, device)
    sharing = place.local_world if device.type == "cpu" else 1
    beside = None if teacher is None else teacher.blueprint
    work = replace(work, new_tokens=len(launch.base.added_tokens), teacher=beside)
    work = work.among(place.world, sharing, spec.train.batch_rows)
    beginning = memory_monitor.require_memory(process.paths, base, spec.train, launch.machine, work, process.journal)
    shares_base = ranks.any(beginning.shard_base)
    if shares_base and (why := targets.sharding_obstacle(spec.train)):
        raise SettingsError(f"machine.shard_base: {why}; set it to false")
    # Every pass over a shared base is one of all ranks: what one of them recomputes, all do.
    recompute = ranks.any(beginning.recompute) if shares_base else beginning.recompute
    manner = ModelMemoryOptions(recompute, ranks if shares_base else None)
    process.heartbeat.beat("load")
    if teacher:
        monitor.enter("loaded")
        lessons = OnlineTeacherReader(teacher, spec.train, train, device)
        process.heartbeat.beat("load")
    return TrainingContext(
        spec=spec,
        machine=launch.machine,
        model=_load_model(spec, launch, device, plan.steps, monitor, manner),
        device=device,
        train=train,
        validation=validation,
        paths=process.paths,
        journal=process.journal,
        heartbeat=process.heartbeat,
        stop=process.stop,
        made_by=made_by,
        plan=plan,
        monitor=monitor,
        advise=lambda tokens: memory_monitor.suggest_memory_changes(base, spec.train, launch.machine, work, tokens),
        first_tokens=beginning.first_tokens,
        loss_scale=train_step.initial_loss_scale(loading.pick_dtype(spec.train.compute_dtype, device)),
        faults=FaultInjector.from_environment(),
        ranks=ranks,
        shares_base=shares_base,
        lessons=lessons,
    )


def _select_device(machine: Machine, place: RankEnvironment) -> torch.device:
    """Where this rank computes. Raises SettingsError where there are fewer GPUs than ranks."""
    device = loading.pick_device(machine.device)
    if device.type != "cuda" or place.world == 1:
        return device
    if place.local_world > (there := torch.cuda.device_count()):
        raise SettingsError(
            f"machine.gpus: found {place.local_world}, and this machine has {there} that may be used "
            "(CUDA_VISIBLE_DEVICES counts): write no more than that, or auto"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


@dataclass(frozen=True)
class ModelMemoryOptions:
    """In which a model is held."""

    recompute: bool
    """Activations."""
    sharers: RankGroup | None
    """Those who have its base together; None: each has all of it."""


def _load_model(
    spec: RunSpec,
    launch: TrainingLaunchSpec,
    device: torch.device,
    steps: int,
    monitor: MemoryMonitor,
    manner: ModelMemoryOptions,
) -> loading.Model:
    """The base with a fresh adapter, as it is trained."""
    if manner.sharers is None:
        return _build_model(spec, launch, device, steps, monitor, manner)
    return manner.sharers.in_turns(lambda: _build_model(spec, launch, device, steps, monitor, manner))


def _build_model(
    spec: RunSpec,
    launch: TrainingLaunchSpec,
    device: torch.device,
    steps: int,
    monitor: MemoryMonitor,
    manner: ModelMemoryOptions,
) -> loading.Model:
    path = Path(launch.base_path)
    monitor.enter("loaded")
    # The whole base has a place in the host's memory, if anywhere.
    place = None if manner.sharers is None else torch.device("cpu")
    base = loading.load(path, launch.base, spec.train, device, place)
    monitor.enter("adapters")
    tokenizer = base_model.open_tokenizer(path, launch.base.remote_code)
    vocabulary.add_tokens(tokenizer, launch.base.added_tokens)
    learned = vocabulary.list_new_token_ids(tokenizer, launch.base, base)
    model = adapters.attach(base, spec.train, spec.base_digest, learned, steps)
    if manner.recompute:
        activation_checkpointing.enable(model)
    if manner.sharers is not None:
        from ratchet.training import sharding  # a second of imports that most runs do without

        sharding.shard_base(model, manner.sharers, device)
    return model


def _select_comparable(made_by: dict[str, str]) -> dict[str, str]:
    """What has to be the same on all ranks: GPUs and threads may differ."""
    return {name: value for name, value in made_by.items() if name not in ("device", "threads")}


def _describe_origin(spec: RunSpec, device: torch.device, machine: Machine, world: int) -> dict[str, str]:
    """What a checkpoint's numbers depend on beside the run's spec: with any of it changed they are no longer exact."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    libraries = {library: version(library) for library in ("torch", "transformers", "peft", "bitsandbytes")}
    dtype = str(loading.pick_dtype(spec.train.compute_dtype, device)).removeprefix("torch.")
    return libraries | {
        "device": f"{device.type} {name}", "compute_dtype": dtype, "threads": str(torch.get_num_threads()),
        "micro_batch_rows": str(machine.micro_batch_rows), **({"ranks": str(world)} if world > 1 else {}),
        **({"micro_batch_tokens": str(machine.micro_batch_tokens)} if machine.micro_batch_tokens else {}),
    }  # fmt: skip


def _seal_with_retry(task: TrainingContext, seal: Callable[[], str]) -> str:
    """Try again as long as the disk takes nothing and `machine.storage_wait_s` is not over: training is done."""
    begun, wait_s = time.monotonic(), 1.0
    while True:
        task.heartbeat.beat("save")
        try:
            return seal()
        except OSError as error:
            left_s = begun + task.machine.storage_wait_s - time.monotonic()
            if left_s <= 0:
                raise StorageError(f"the result could not be sealed: {error}. Make room, and repeat") from None
            if wait_s == 1.0:
                task.journal.append("alert", text=f"the result cannot be sealed ({error}); it is tried again")
        time.sleep(min(wait_s, left_s))
        wait_s = min(30.0, 2 * wait_s)
