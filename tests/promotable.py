"""A project as the stages leave it before a promotion, with models of a few bytes; and what must hold after one."""

from pathlib import Path

from ratchet import digest, files
from ratchet.config import Settings
from ratchet.config_gate import Hook, Promote
from ratchet.layout import Layout
from ratchet.promotion import ledger
from ratchet.promotion.kept import KIND
from ratchet.records import Bundle, Parity
from ratchet.records_evaluation import EvalReport, Metric, Scores
from ratchet.records_gate import Promotion, Reason, Verdict, read_champion
from ratchet.services.registry import Registry

SETTINGS = Settings()
NAME = SETTINGS.promote.model_name


def with_hooks(*hooks: Hook) -> Settings:
    return SETTINGS.model_copy(update={"promote": Promote(hooks=hooks)})


def works(model: Path) -> None:
    """Stands for the smoke test where the model is a few bytes."""
    assert (model / "model.safetensors").exists()


def stage(layout: Layout, model: str, decision: str = "PROMOTE") -> str:
    """What the stages would leave for a model of this name; returns its digest."""
    adapter = f"adapter of {model}".encode()
    files.write_atomic(layout.adapter / "adapter_model.safetensors", adapter)
    adapter_digest = digest.of_tree(layout.adapter, ["adapter_model.safetensors"])
    contents = {"hf/model.safetensors": f"weights of {model}".encode(), "hf/config.json": b"{}"}
    model_digest = digest.of_files({name: digest.of_bytes(content) for name, content in contents.items()})
    with files.sealed_directory(layout.export, "export") as scratch:
        for name, content in contents.items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_bytes(content)
        parity = Parity(rows=1, tokens=2, max_logit_difference=0.0, mean_logit_difference=0.0, greedy_agreement=1.0)
        Bundle(
            model_digest=model_digest, adapter_digest=adapter_digest, run_id=f"run-{model}", base_digest="b" * 64,
            data_digest="d" * 64, merge_base="original", dtype="float32", size_bytes=1, parity=parity,
        ).save(scratch / "bundle.json")  # fmt: skip
    judge(layout, decision)
    return model_digest


def judge(layout: Layout, decision: str, model_digest: str | None = None) -> None:
    """Evaluation, verdict and page about the exported model (or another), beside the champion of now."""
    bundle = Bundle.load(layout.bundle)
    file = read_champion(layout.champion)
    about = model_digest or bundle.model_digest
    shared = {
        "model_digest": about, "adapter_digest": bundle.adapter_digest, "run_id": bundle.run_id,
        "champion_digest": file.champion.model_digest if file.champion else None,
        "anchor_digest": file.anchor.model_digest if file.anchor else None,
    }  # fmt: skip
    Verdict.model_validate({
        **shared, "decision": decision, "is_champion": shared["champion_digest"] == about,
        "reasons": (Reason(rule="must_improve", metric="accuracy", outcome="fail", text="accuracy is worse"),),
    }).save(layout.verdict)  # fmt: skip
    figure = Metric(value=0.875, n=8, low=0.5, high=0.99, better="higher", unit="")
    metrics = {"accuracy": figure, "harness/odd|task/../acc,none": figure}
    scores = Scores(model_digest=about, form="merged", contract="c", metrics=metrics, samples={})
    EvalReport.model_validate({
        **shared, "base_digest": "b" * 64, "data_digest": "d" * 64, "gate_set": "g", "contracts": {"c": {}},
        "scores": {"merged": scores},
    }).save(layout.eval_report)  # fmt: skip
    files.write_atomic(layout.gate_page, f"<p>{decision}</p>")


def line(layout: Layout) -> list[str]:
    """Champion and its predecessors, by model; checked against registry, model folders and ledger."""
    file = read_champion(layout.champion)
    registry = Registry(layout, NAME)
    assert registry.champion() == (file.champion.version if file.champion else None)
    champions = ([file.champion] if file.champion else []) + list(file.previous)
    for champion in champions:
        found = registry.version(champion.version)
        assert found is not None
        assert found.model_digest == champion.model_digest
        files.verify(layout.promoted_model(champion.model_digest), KIND)
    entries = chain(layout)
    assert len({entry.id for entry in entries}) == len(entries)
    assert not layout.intent.exists()
    return [c.run_id.removeprefix("run-") for c in champions]


def chain(layout: Layout) -> list[Promotion]:
    """The ledger, whole and in agreement with the champion file."""
    entries = ledger.read(layout.promotions)
    ledger.check(layout.promotions, entries, read_champion(layout.champion))
    return entries


def tree(root: Path) -> dict[str, bytes]:
    """Every file and its content; of locks, only that they are there."""
    found = {}
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        locks = path.suffix == ".lock"
        found[path.relative_to(root).as_posix()] = b"" if locks else path.read_bytes()
    return found
