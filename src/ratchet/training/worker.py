"""The work of a training process, from an opened run directory to a sealed result.

A worker checks its inputs, loads the model, trains, and seals the result: adapter, best and last checkpoint, report,
analysis and model card. It uses only the run directory: no MLflow, no Optuna, no DVC.
"""

import math
import os
import platform
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ratchet.config.train import Train
from ratchet.data import token_files
from ratchet.data.batches import BatchPlan, TokenRows
from ratchet.errors import (
    EXIT_OK,
    DamagedFileError,
    InsufficientMemoryError,
    NonFiniteStateError,
    SettingsError,
    StorageError,
)
from ratchet.models import (
    adapters,
    base_model,
    initialization,
    loading,
    model_card,
    model_spec,
    oom,
    targets,
    vocabulary,
)
from ratchet.models.cpu_kernels import library
from ratchet.models.memory import parameters as model_parameters
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.models.start_adapter import StartAdapter
from ratchet.runs import replication_protocol
from ratchet.runs.directory import CHECKPOINT, RESULT, RunPaths, RunSpec, TrainingLaunchSpec
from ratchet.runs.fault_injection.injection import FaultInjector
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal, JournalEvent
from ratchet.runs.signals import GracefulShutdown
from ratchet.storage import digests, files
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.training import AdapterAnalysis, MemoryForecast, TrainReport
from ratchet.training import analysis, checkpoint, distillation, distributed, memory_monitor, optimizer, step_timer
from ratchet.training.context import TrainingContext
from ratchet.training.distillation import OnlineTeacherReader, TeacherShardReader
from ratchet.training.distributed import RankEnvironment, RankGroup
from ratchet.training.exit_codes import report_worker_end
from ratchet.training.group import GroupMember, MemberShutdown, TrainingGroup
from ratchet.training.memory_monitor import InitialMemoryPlan, MemoryMonitor
from ratchet.training.trainer import TrainingLoop

REPORT, ANALYSIS, CARD = "train.json", "analysis.json", "README.md"
MEMORY_ADVICE = (
    "Memory ran out for the model or the optimizer, not in a step, where micro-batches would have been made smaller: "
    "set train.quantization: nf4, a smaller train.rank, train.optimizer: adamw_8bit, or a smaller base; with a teacher "
    "in memory, train.distill.quantization: nf4, or train.distill.mode: offline"
)
MAY_DIFFER_BETWEEN_RANKS = ("device", "threads", "kernels")
"""Entries of the environment that may differ between ranks."""
SAMPLE_ROWS = 1000
"""Approximate number of training rows from which the share of trained tokens is estimated."""


@dataclass(frozen=True)
class _Attempt:
    """An attempt of a run, with everything that its process gives it."""

    spec: RunSpec
    launch: TrainingLaunchSpec
    paths: RunPaths
    journal: Journal
    shutdown: GracefulShutdown
    heartbeat: Heartbeat
    group: GroupMember | None
    """None: the process trains only this run."""


def run_worker(paths: RunPaths, attempt: int, shutdown: GracefulShutdown, heartbeat: Heartbeat) -> int:
    """Train the run in `paths` until its result is sealed or a stop is requested; return the exit code."""
    environment = RankEnvironment.from_environment()
    journal = Journal(paths.journal, attempt) if environment.is_writer else RankJournal(paths.journal, attempt)
    try:
        _train(paths, journal, shutdown, heartbeat, None)
    except BaseException as error:
        return report_worker_end(error, journal, MEMORY_ADVICE)
    return EXIT_OK


def run_member(
    paths: RunPaths, attempt: int, shutdown: MemberShutdown, heartbeat: Heartbeat, group: TrainingGroup
) -> int:
    """Train a run as a member of a group, in the calling thread; return what would be the exit code of a worker."""
    journal = Journal(paths.journal, attempt)
    try:
        delay_s = TrainingLaunchSpec.load(paths.launch).machine.restart_delay_s
        member = group.join(paths, journal, shutdown, heartbeat, delay_s)
        try:
            _train(paths, journal, shutdown, heartbeat, member)
        finally:
            member.end()
    except BaseException as error:
        exit_code = report_worker_end(error, journal, MEMORY_ADVICE)
        if oom.is_device_lost(error):
            os._exit(exit_code)  # no run of this process can continue; all of them are started again in another one
        return exit_code
    finally:
        journal.close()
    return EXIT_OK


class RankJournal(Journal):
    """Journal of a rank that is not its machine's writer: it writes only failures and events of this rank alone."""

    def append(self, kind: str, **data: Any) -> JournalEvent:
        if kind == "worker_error" or "rank" in data:
            return super().append(kind, **{"rank": RankEnvironment.from_environment().rank} | data)
        return JournalEvent(kind, round(time.time(), 3), self.attempt, data)


def _train(
    paths: RunPaths, journal: Journal, shutdown: GracefulShutdown, heartbeat: Heartbeat, group: GroupMember | None
) -> None:
    spec, launch = RunSpec.load(paths.spec), TrainingLaunchSpec.load(paths.launch)
    hidden_size = base_model.read_hidden_size(Path(launch.base_path))
    loading.use_threads(launch.machine.threads, RankEnvironment.from_environment().local_world_size, hidden_size)
    torch.set_deterministic_debug_mode("error")  # torch.use_deterministic_algorithms would load torch's compiler
    # By default, torch's deterministic mode fills every new tensor with NaN, 2,000 times per step. This takes 1 to 5 %
    # of the step's time, and no kernel reads these values.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    heartbeat.beat("load")
    context = _build_context(_Attempt(spec, launch, paths, journal, shutdown, heartbeat, group))
    if launch.profile_steps is not None:
        from ratchet.training import profiler  # imports libraries that training does not need

        profiler.profile_training(context, launch.profile_steps)
        return
    loop = TrainingLoop(context)
    ranks, is_sharded = context.ranks, context.is_base_sharded
    trainable = sum(parameter.numel() for _, parameter in adapters.trainable_parameters(context.model))
    quantized = model_parameters.count_quantized_parameters(context.model)
    replication = replication_protocol.read_replication_state(paths)
    replicators = ranks.gather_json(replication.node if replication else "")  # by their names in the run's leases
    journal.append(
        "worker_ready", start_step=loop.state.step, planned_steps=loop.plan.steps,
        trainable_parameters=trainable, total_parameters=launch.base.parameters + trainable, device=str(context.device),
        torch=torch.__version__, compute_dtype=context.environment["compute_dtype"], threads=torch.get_num_threads(),
        ranks=ranks.environment.world_size, has_rank_zero=ranks.is_first, shares_base=is_sharded,
        replicators=sorted(set(filter(None, replicators))), hosts=ranks.gather_json(socket.gethostname()),
        **_compute_flops(context),
    )  # fmt: skip
    loop.run()
    heartbeat.beat("save")
    with ranks.collective_section(is_sharded):  # the analysis needs the shares of all ranks
        adapter_analysis = _analyse_kept_weights(loop) if ranks.environment.is_writer or is_sharded else None
    if adapter_analysis is None or not ranks.environment.is_writer:
        return
    adapter_digest = _seal_with_retry(context, lambda: _seal(loop, adapter_analysis, launch.base, trainable, quantized))
    journal.append("finished", step=loop.state.step, reason=loop.end_reason, adapter_digest=adapter_digest)
    journal.sync()


def _compute_flops(context: TrainingContext) -> dict[str, float | None]:
    """Return the operations per token, and the peak rate of all devices in operations per second; None if unknown."""
    rows = context.train_rows
    sample = range(len(rows))[:: max(1, len(rows) // SAMPLE_ROWS)]
    trained_share = rows.count_trained(sample) / rows.count_tokens(sample)
    name = loading.get_gpu_name(context.device)
    dtype = loading.pick_dtype(context.settings.compute_dtype, context.device)
    peak = sum(rate for (rate,) in context.ranks.gather([step_timer.datasheet_flops_per_s(name, dtype) or math.nan]))
    per_token = None if context.is_base_sharded else step_timer.flops_per_token(context.model, trained_share)
    if per_token is not None and isinstance(context.teacher, OnlineTeacherReader):
        teacher_flops = step_timer.flops_per_token(context.teacher.model, trained_share, passes=1)
        per_token = None if teacher_flops is None else per_token + teacher_flops
    return {"flops_per_token": per_token, "peak_flops_per_s": None if math.isnan(peak) else peak}


def _build_context(attempt: _Attempt) -> TrainingContext:
    """Check all inputs, forecast the memory and load the model."""
    spec, launch, journal, heartbeat = attempt.spec, attempt.launch, attempt.journal, attempt.heartbeat
    machine, base_path = launch.machine, Path(launch.base_path)
    rank_environment = RankEnvironment.from_environment()
    device = distributed.select_device(machine.device, rank_environment)
    ranks = RankGroup(rank_environment, device, lambda: heartbeat.beat("peers"), machine.peer_timeout_s)
    environment = _describe_environment(attempt, device, rank_environment.world_size)
    shared_environment = {name: value for name, value in environment.items() if name not in MAY_DIFFER_BETWEEN_RANKS}
    distributed.require_consistent(ranks, {"run": spec.model_dump(mode="json"), "environment": shared_environment})
    monitor = MemoryMonitor(journal, device, machine.memory_warnings)
    base_model.verify_files(base_path, launch.base.files)
    data = Path(launch.data_path)
    files.verify_sealed(data, "data")
    objective = spec.train.objective
    train_rows, validation_rows = (token_files.load_rows(data, split, objective) for split in ("train", "validation"))
    plan = BatchPlan(train_rows.lengths, spec.train)
    teacher: TeacherShardReader | OnlineTeacherReader | None = None
    if spec.distillation_digest and launch.distillation_path:
        shards = Path(launch.distillation_path)
        teacher = TeacherShardReader(shards, train_rows, spec.train.distill, spec.distillation_digest)
    heartbeat.beat("load")
    online_teacher = distillation.find_teacher(spec, launch, train_rows)
    base = model_spec.load(base_path, launch.base.remote_code)
    targets.check_adapter(base, spec.train, bool(launch.base.added_tokens))
    if online_teacher and journal.attempt == 1 and (text := online_teacher.describe_padding(base)):
        journal.append("notice", text=f"teacher: {text}")

    work = memory_monitor.compute_largest_work(plan, train_rows, validation_rows, machine, device)
    teacher_spec = None if online_teacher is None else online_teacher.spec
    work = replace(work, new_tokens=len(launch.base.added_tokens), teacher=teacher_spec)
    ranks_per_memory = rank_environment.local_world_size if device.type == "cpu" else 1
    work = work.on_ranks(rank_environment.world_size, ranks_per_memory, spec.train.batch_size)
    memory_plan = _plan_memory(attempt, base, work)
    is_sharded = ranks.any(memory_plan.shard_base)
    if is_sharded and (obstacle := targets.sharding_obstacle(spec.train)):
        raise SettingsError(f"machine.shard_base: {obstacle}; set it to false")
    # All ranks take part in every pass over a sharded base. So if one rank must recompute activations, all ranks do.
    recompute = ranks.any(memory_plan.recompute) if is_sharded else memory_plan.recompute
    heartbeat.beat("load")
    if online_teacher:
        monitor.enter("loaded")
        teacher = OnlineTeacherReader(online_teacher, spec.train, train_rows, device)
        heartbeat.beat("load")

    def load_model() -> loading.Model:
        with nullcontext() if attempt.group is None else attempt.group.computing():
            heartbeat.beat("load")
            model = _load_with_adapter(attempt, device, plan, train_rows, monitor, is_sharded)
        if recompute:
            adapters.enable_activation_checkpointing(model)
        if is_sharded:
            from ratchet.training import sharding  # its imports take a second, and most runs do not need them

            sharding.shard_base(model, ranks, device)
        return model

    return TrainingContext(
        spec=spec,
        machine=machine,
        model=_unify_adapters(ranks.run_in_turns(load_model) if is_sharded else load_model(), ranks, spec.train),
        device=device,
        train_rows=train_rows,
        validation_rows=validation_rows,
        paths=attempt.paths,
        journal=journal,
        heartbeat=heartbeat,
        shutdown=attempt.shutdown,
        environment=environment,
        batch_plan=plan,
        memory_monitor=monitor,
        suggest_memory_changes=lambda tokens: memory_monitor.suggest_memory_changes(
            base, spec.train, machine, work, tokens
        ),
        initial_micro_batch_tokens=memory_plan.micro_batch_tokens,
        initial_loss_scale=optimizer.initial_loss_scale(loading.pick_dtype(spec.train.compute_dtype, device)),
        faults=FaultInjector.from_environment(),
        ranks=ranks,
        is_base_sharded=is_sharded,
        teacher=teacher,
        group=attempt.group,
    )


def _unify_adapters(model: loading.Model, ranks: RankGroup, settings: Train) -> loading.Model:
    """Give all ranks the adapter of rank 0 if it was computed from data or weights, because other hardware may compute
    other singular vectors. Return the model."""
    if settings.initialization in ("loftq", "eva"):
        own = {name: parameter.detach() for name, parameter in adapters.trainable_parameters(model)}
        first, *_ = ranks.gather_tensors(own)
        for name, parameter in own.items():
            parameter.copy_(first[name])
    return model


def _plan_memory(attempt: _Attempt, base: model_spec.ModelSpec, work: MemoryWorkload) -> InitialMemoryPlan:
    """Plan the memory of the first step; in a group, wait until the other runs leave enough memory."""
    paths, train, machine, journal = attempt.paths, attempt.spec.train, attempt.launch.machine, attempt.journal
    group = attempt.group
    if group is None:
        return memory_monitor.require_memory(paths, base, train, machine, work, journal)
    is_reported = False
    while True:
        with group.computing():  # the runs plan one after the other
            work = replace(work, reserved_bytes=group.group.sum_reserved_bytes(group))
            try:
                plan = memory_monitor.require_memory(paths, base, train, machine, work, journal)
            except InsufficientMemoryError as error:
                refusal = error
            else:
                group.reserved_bytes = _count_own_bytes(paths)
                return plan
        if not is_reported:
            journal.append("notice", text=f"waits for memory that other runs of the process use: {refusal}")
            is_reported = True
        if not group.group.wait_for_memory(group):
            raise refusal


def _count_own_bytes(paths: RunPaths) -> int:
    """Return the memory that a run needs by its forecast in addition to the process and the base; at least 1."""
    if not paths.forecast.exists():  # there is no forecast for this kind of model
        return 1
    forecast = MemoryForecast.load(paths.forecast)
    shared_bytes = forecast.phase_memory("baseline").total_bytes + forecast.peak.parts.get("weights", 0)
    return max(1, forecast.needed_bytes() - shared_bytes)


def _base_key(spec: RunSpec, launch: TrainingLaunchSpec) -> str:
    """Return the digest of everything that determines the frozen tensors of a base in memory."""
    train = spec.train
    parts = (
        spec.base_digest, launch.base_path, train.quantization, train.double_quantization, train.quantization_storage,
        train.compute_dtype, train.attention,
    )  # fmt: skip
    return digests.hash_json(list(parts))


def _load_with_adapter(
    attempt: _Attempt,
    device: torch.device,
    plan: BatchPlan,
    train_rows: TokenRows,
    monitor: MemoryMonitor,
    on_host: bool,
) -> loading.Model:
    """Load the base with a new adapter. `on_host`: the base must be complete in the host's memory to be sharded."""
    spec, launch, group = attempt.spec, attempt.launch, attempt.group
    path = Path(launch.base_path)
    monitor.enter("loaded")

    def load_base() -> loading.Model:
        return loading.load(path, launch.base, spec.train, device, torch.device("cpu") if on_host else None)

    base = group.load_base(_base_key(spec, launch), load_base) if group else load_base()
    monitor.enter("adapters")
    tokenizer = base_model.open_tokenizer(path, launch.base.remote_code)
    vocabulary.add_tokens(tokenizer, launch.base.added_tokens)
    new_tokens = vocabulary.list_new_token_ids(tokenizer, launch.base, base)
    model = adapters.attach(base, spec.train, spec.base_digest, new_tokens, plan.steps)
    # A resumed attempt does it again, because its checkpoint may turn out to be damaged.
    attempt.heartbeat.beat("load")
    if spec.train.initialization == "loftq":
        initialization.correct_quantization(model, path)
    if spec.train.initialization == "eva":
        rows = (row for step in range(plan.steps) for sequence in plan.batch(step) for row in sequence)
        initialization.explain_inputs(
            model, (train_rows.list_ids(row) for row in rows), torch.device("cpu") if on_host else device
        )
    if spec.train.init_adapter is not None:
        start = StartAdapter(Path(str(launch.start_path)))
        start.require_digest(spec.train.init_adapter)
        adapters.start_from(model, start)
    if group is not None:
        group.attach(model, device)
    return model


def _describe_environment(attempt: _Attempt, device: torch.device, world_size: int) -> dict[str, str]:
    """Return the environment of a training: two runs of one spec are bit-exact only if their environments are equal."""
    spec, machine = attempt.spec, attempt.launch.machine
    name = loading.get_gpu_name(device) or platform.machine()
    libraries = {library: version(library) for library in ("torch", "transformers", "peft", "bitsandbytes")}
    dtype = str(loading.pick_dtype(spec.train.compute_dtype, device)).removeprefix("torch.")
    kernels = library.load_kernels() if device.type == "cpu" and dtype == "float32" else None
    return libraries | {
        "device": f"{device.type} {name}", "compute_dtype": dtype, "threads": str(torch.get_num_threads()),
        "micro_batch_size": str(machine.micro_batch_size), **({"ranks": str(world_size)} if world_size > 1 else {}),
        **({"micro_batch_tokens": str(machine.micro_batch_tokens)} if machine.micro_batch_tokens else {}),
        **({"computed": "with other runs"} if attempt.group is not None else {}),
        **({"kernels": f"{kernels.text} {kernels.digest[:8]}"} if kernels is not None and kernels.is_available else {}),
    }  # fmt: skip


# The result.


def _seal_with_retry(context: TrainingContext, seal_result: Callable[[], str]) -> str:
    """Seal the result and return the adapter's digest.

    If the disk fails, try again for up to `machine.storage_timeout_s`, because the training is already complete.
    """
    started_s, delay_s = time.monotonic(), 1.0
    while True:
        context.heartbeat.beat("save")
        try:
            return seal_result()
        except OSError as error:
            left_s = started_s + context.machine.storage_timeout_s - time.monotonic()
            if left_s <= 0:
                raise StorageError(
                    f"the result could not be sealed: {error}. Free disk space, then run the same command again"
                ) from None
            if delay_s == 1.0:
                context.journal.append("alert", text=f"the result cannot be sealed ({error}); trying again")
        time.sleep(min(delay_s, left_s))
        delay_s = min(30.0, 2 * delay_s)


def _seal(loop: TrainingLoop, adapter_analysis: AdapterAnalysis, base: BaseCard, trainable: int, quantized: int) -> str:
    """Seal the result of a completed training; return the adapter's digest. Raises OSError if the disk is full or
    failing."""
    context, spec, state = loop.context, loop.context.spec, loop.state
    with files.sealed_directory(context.paths.result, RESULT) as scratch:
        saved = scratch / "adapter"
        adapters.save(context.model, saved, base_model.refer_to(base))
        for name, step in (("best", state.best_step), ("last", state.step)):
            files.link_tree(context.paths.checkpoint(step), scratch / "checkpoints" / name)
        report = TrainReport(
            run_id=spec.run_id,
            adapter_digest=digests.hash_tree(saved, sorted(p.name for p in saved.iterdir())),
            base_digest=spec.base_digest,
            data_digest=spec.data_digest,
            steps=state.step,
            planned_steps=loop.plan.steps,
            best_step=state.best_step,
            kept_step=_select_kept_step(loop),
            validation_loss=state.validation_loss,
            final_train_loss=state.train_loss,
            trained_tokens=state.trained_tokens,
            input_tokens=state.input_tokens,
            trainable_parameters=trainable,
            total_parameters=base.parameters + trainable,
            quantized_parameters=quantized,
        )
        report.save(scratch / REPORT)
        adapter_analysis.save(scratch / ANALYSIS)
        card = model_card.render_for_adapter(base, context.settings, report, adapter_analysis)
        files.write_atomic(scratch / CARD, card)
    return report.adapter_digest


def _analyse_kept_weights(loop: TrainingLoop) -> AdapterAnalysis:
    """Load the kept weights into the model and analyse them. All ranks must call it if the base is sharded. Raises
    NonFiniteStateError if a checkpoint that belongs to the result was damaged after it was sealed."""
    context, state = loop.context, loop.state
    for step in {state.best_step, state.step}:
        try:
            files.verify_sealed(context.paths.checkpoint(step), CHECKPOINT)
        except DamagedFileError as error:  # the next attempt resumes from an older checkpoint
            raise NonFiniteStateError(str(error)) from None
    checkpoint.load_weights(context.paths.checkpoint(_select_kept_step(loop)), context.model)
    return analysis.analyse(context.model, state, context.settings)


def _select_kept_step(loop: TrainingLoop) -> int:
    return loop.state.best_step if loop.context.settings.final_checkpoint == "best" else loop.state.step
