"""A project before a promotion, with models of a few bytes, and checks of the project after the promotion."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import gate_cases
from ratchet.config.evaluate import Evaluate
from ratchet.config.gate import AtLeastRule, Gate
from ratchet.config.promote import HookSettings, Promote
from ratchet.config.settings import Settings
from ratchet.quality_gate import decision as judgement
from ratchet.quality_gate import evidence as reading
from ratchet.quality_gate import test_sets
from ratchet.registry import ledger
from ratchet.registry.model_store import KIND
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.export import MergeParity, ModelBundle
from ratchet.storage.records.gate import Promotion, read_champion
from ratchet.tracking.mlflow.registry import MlflowModelRegistry

SETTINGS = Settings(
    evaluate=Evaluate(formats=("merged",)),
    gate=Gate(rules=(AtLeastRule(rule="at_least", metric="accuracy", value=0.5),)),
)
NAME = SETTINGS.promote.model_name


def with_hooks(*hooks: HookSettings) -> Settings:
    return SETTINGS.model_copy(update={"promote": Promote(hooks=hooks)})


def accept_model(model: Path) -> None:
    """Replace the smoke test, because the fake models have only a few bytes."""
    assert (model / "model.safetensors").exists()


def write_outputs(layout: ProjectLayout, model: str, decision: str = "PROMOTE") -> str:
    """Write the outputs of the stages for a model with this name. Return the digest of the model."""
    adapter = f"adapter of {model}".encode()
    files.write_atomic(layout.adapter / "adapter_model.safetensors", adapter)
    adapter_digest = digests.hash_tree(layout.adapter, ["adapter_model.safetensors"])
    contents = {"hf/model.safetensors": f"weights of {model}".encode(), "hf/config.json": CONFIG}
    model_digest = digests.hash_files({name: digests.hash_bytes(content) for name, content in contents.items()})
    with files.sealed_directory(layout.export, "export") as scratch:
        for name, content in contents.items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_bytes(content)
        parity = MergeParity(
            rows=1, tokens=2, max_logit_difference=0.0, mean_logit_difference=0.0, greedy_agreement=1.0
        )
        ModelBundle(
            model_digest=model_digest, adapter_digest=adapter_digest, run_id=f"run-{model}", base_digest="b" * 64,
            data_digest="d" * 64, merge_base="original", dtype="float32", size_bytes=1, parity=parity,
        ).save(scratch / "bundle.json")  # fmt: skip
    write_verdict(layout, decision)
    return model_digest


CONFIG = b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 128}'
RIGHT: Mapping[str, int] = {"PROMOTE": 190, "HOLD": 104, "REJECT": 20, "INVALID": 190}
"""Number of right answers out of 200 that leads to each decision, for a rule that requires at least one half."""


def write_verdict(layout: ProjectLayout, decision: str, model_digest: str | None = None) -> None:
    """Write evaluation, verdict and page about the exported model or another model, with a comparison to the current
    champion."""
    bundle = ModelBundle.load(layout.bundle)
    file = read_champion(layout.champion)
    scores = {"accuracy": gate_cases.right(RIGHT[decision]), "harness/odd|task/../acc,none": gate_cases.right(150)}
    plain: dict[str, Any] = {
        "model_digest": model_digest or bundle.model_digest, "adapter_digest": bundle.adapter_digest,
        "run_id": bundle.run_id, "base_digest": bundle.base_digest, "data_digest": bundle.data_digest,
        "contracts": {"k2": {"model_format": "merged", "tasks": {}}},
        "selection_overlaps": {"a sweep": 3} if decision == "INVALID" else {},
    }  # fmt: skip
    found = gate_cases.evidence({"merged": scores}, file, bundle=bundle, current_task_digests={})
    report = gate_cases.report({"merged": scores}, file, **plain)
    of_merged = report.scores["merged"].model_copy(update={"model_digest": plain["model_digest"]})
    report = report.model_copy(update={"scores": {"merged": of_merged}})
    gate_cases.write_evaluation(layout, dataclasses.replace(found, report=report))
    test_sets.record_test_set_use(layout, report.test_set_digest, bundle.adapter_digest, bundle.run_id)
    verdict = judgement.decide_verdict(reading.read_evidence(layout, SETTINGS, {}), SETTINGS.gate)
    if model_digest is None:
        assert verdict.decision == decision
    with files.sealed_directory(layout.gate, "gate") as scratch:
        verdict.model_copy(update={"model_digest": plain["model_digest"]}).save(scratch / layout.verdict.name)
    files.write_atomic(layout.gate_page, f"<p>{decision}</p>")


def list_champions(layout: ProjectLayout) -> list[str]:
    """Return the champion and its predecessors, by model. Check them against registry, model directories and ledger."""
    file = read_champion(layout.champion)
    registry = MlflowModelRegistry(layout, NAME)
    assert registry.champion() == (file.champion.version if file.champion else None)
    champions = ([file.champion] if file.champion else []) + list(file.previous)
    for champion in champions:
        found = registry.version(champion.version)
        assert found is not None
        assert found.model_digest == champion.model_digest
        files.verify_sealed(layout.promoted_model(champion.model_digest), KIND)
    entries = read_ledger(layout)
    assert len({entry.id for entry in entries}) == len(entries)
    assert not layout.promotion_intent.exists()
    return [c.run_id.removeprefix("run-") for c in champions]


def read_ledger(layout: ProjectLayout) -> list[Promotion]:
    """Return the entries of the ledger. Check that the ledger is complete and agrees with the champion file."""
    entries = ledger.read_entries(layout.promotions)
    ledger.check_champion(layout, entries, read_champion(layout.champion))
    return entries


def read_tree(root: Path) -> dict[str, bytes]:
    """Return the path and the content of each file. Lock files have empty contents in the result."""
    found = {}
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        locks = path.suffix == ".lock"
        found[path.relative_to(root).as_posix()] = b"" if locks else path.read_bytes()
    return found


def count_in_child(work: Callable[[], int]) -> tuple[int, int]:
    """Do the work in a child process, which it may kill. Return the exit code of the child, and the number that the
    work returned, or 0."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.write(writer, str(work()).encode())
            os._exit(0)
        os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as stream:
        answer = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(answer or 0)
