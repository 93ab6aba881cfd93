"""Tests of stage gate: inputs, outputs and its report to MLflow; and of `ratchet gate --check` and `--aa`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gate_cases as cases
from gate_cases import CURRENT, Models, evidence, flipped, right, spread, with_noise
from ratchet.cli.gate import format_markdown, format_noise, format_verdict
from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.config.evaluate import Evaluate, HarnessSettings
from ratchet.config.gate import AtLeastRule, Gate, MustImproveRule, MustNotRegressRule
from ratchet.config.settings import Settings
from ratchet.errors import EXIT_GATE, EXIT_OK, DamagedFileError, DataError, GateError
from ratchet.quality_gate import evidence as reading
from ratchet.quality_gate import test_sets
from ratchet.quality_gate.decision import decide_verdict
from ratchet.quality_gate.evidence import GateEvidence
from ratchet.quality_gate.rules import describe_verdict
from ratchet.stages.gate import check_verdict, gate, measure_noise
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.gate import ChampionFile, RuleResult, Verdict
from ratchet.tracking.mlflow.client import MlflowTracker

SETTINGS = Settings(
    gate=Gate(
        resamples=1000,
        rules=(
            MustImproveRule(rule="must_improve", metric="accuracy"),
            MustNotRegressRule(rule="must_not_regress", metric="answer_loss", against="base", margin=0.1),
        ),
    )
)
MODELS: Models = {
    "base": {"accuracy": right(60), "answer_loss": spread(2.0)},
    "candidate": {"accuracy": right(160), "answer_loss": spread(1.0)},
}
NO_TASKS = {**cases.CONTRACTS["k1"], "tasks": {}}


def found(models: Models = MODELS, champion: ChampionFile = cases.NOBODY) -> GateEvidence:
    plain = evidence(models, champion, current_task_digests={}, model_formats=("adapter",))
    return cases.with_report(plain, contracts={"k1": NO_TASKS})


@pytest.fixture
def evaluated(project: ProjectLayout) -> ProjectLayout:
    """Return an evaluated project with a damaged MLflow database. The damage does not prevent a verdict."""
    project.mlruns.mkdir()
    project.mlflow_database.write_bytes(b"no database " * 100)
    cases.write(project, found())
    return project


def artifacts(layout: ProjectLayout) -> tuple[Any, dict[str, Path]]:
    run = MlflowTracker(layout, SETTINGS.promote.model_name).find("r1")
    folder = Path(run.info.artifact_uri.removeprefix("file://").replace("%20", " ")) / "gate"
    return run, {path.name: path for path in folder.iterdir()}


def test_the_stage_writes_verdict_and_page_and_logs_them_to_mlflow(
    tracked_project: ProjectLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated = tracked_project
    cases.write(evaluated, found())
    tracking = MlflowTracker(evaluated, SETTINGS.promote.model_name)
    run = tracking.find_or_create("r1", 0)
    with tracking.connected() as client:
        client.set_terminated(run.info.run_id, "FINISHED")
    verdict = gate(Project.from_parts(evaluated, SETTINGS))
    text = format_verdict(verdict, evaluated)
    files.verify_sealed(evaluated.gate, "gate")
    assert verdict == Verdict.load(evaluated.verdict)
    assert verdict.decision == "PROMOTE"
    assert verdict == decide_verdict(found(), SETTINGS.gate)
    assert text.startswith("PROMOTE: model ")
    assert str(evaluated.gate_page) in text
    assert "PROMOTE" in evaluated.gate_page.read_text(encoding="utf-8")
    run, sent = artifacts(evaluated)
    assert run.data.tags["ratchet.verdict"] == "PROMOTE"
    assert sent["verdict.json"].read_bytes() == evaluated.verdict.read_bytes()
    assert sent["gate.html"].read_bytes() == evaluated.gate_page.read_bytes()
    assert check_verdict(Project.from_parts(evaluated, SETTINGS)).decision == "PROMOTE"

    evaluated.mlflow_database.write_bytes(b"no database " * 100)  # no verdict is lost; equal inputs give equal bytes
    assert gate(Project.from_parts(evaluated, SETTINGS)).decision == "PROMOTE"
    assert "not logged to MLflow" in capsys.readouterr().err
    assert check_verdict(Project.from_parts(evaluated, SETTINGS)).decision == "PROMOTE"
    assert evaluated.verdict.read_bytes() == sent["verdict.json"].read_bytes()
    assert evaluated.gate_page.read_bytes() == sent["gate.html"].read_bytes()


def test_the_stage_succeeds_when_the_verdict_is_reject(evaluated: ProjectLayout) -> None:
    worse: Models = {**MODELS, "candidate": {"accuracy": right(20), "answer_loss": spread(3.0)}}
    cases.write(evaluated, found(worse))
    assert describe_verdict(gate(Project.from_parts(evaluated, SETTINGS))).startswith("REJECT: model ")
    verdict = check_verdict(Project.from_parts(evaluated, SETTINGS))
    assert verdict.decision != "PROMOTE"
    assert "FAIL" in describe_verdict(verdict)


def test_test_set_uses_are_counted_against_the_limit(evaluated: ProjectLayout) -> None:
    for k in range(50):
        test_sets.record_test_set_use(evaluated, "9" * 64, f"model {k}", "run")
    assert describe_verdict(gate(Project.from_parts(evaluated, SETTINGS))).startswith("HOLD: ")
    verdict = Verdict.load(evaluated.verdict)
    assert (verdict.test_set_uses, verdict.reasons[-1].rule) == (51, "test_set_uses")


# ----------------------------------------------------------------------------------------------------------- bad input


def test_evidence_is_read_as_written(project: ProjectLayout) -> None:
    groups = {"s00000": "one", "s00001": "one"}
    made = with_noise(found(), "accuracy", right(61))
    cases.write(project, GateEvidence(**{**vars(made), "groups": groups}))
    read = reading.read_evidence(project, SETTINGS, {"answers": "7"})
    assert read.samples == made.samples
    assert (read.report, read.bundle, read.champion) == (made.report, made.bundle, made.champion)
    assert (read.noise, read.noise_samples) == (made.noise, made.noise_samples)
    assert {key: group for key, group in read.groups.items() if group} == groups
    assert (read.test_set_uses, read.current_task_digests, read.duplicate_samples, read.model_formats) == (
        1,
        {"answers": "7"},
        {},
        ("adapter",),
    )


def reseal(layout: ProjectLayout, name: str, rows: list[dict[str, Any]]) -> None:
    """Write other samples and seal them as stage evaluate does."""
    cases.write(layout, found())
    path = layout.evaluate / name
    files.write_atomic(path, "".join(map(base.to_json_line, rows)))
    files.seal_directory(layout.evaluate, "evaluation")


ROWS = [{"id": key, "value": value} for key, value in right(160).items()]
SAMPLES = "samples/candidate/accuracy.jsonl"


def decided(layout: ProjectLayout) -> Verdict:
    gate(Project.from_parts(layout, SETTINGS))
    return Verdict.load(layout.verdict)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([*ROWS, ROWS[0]], "s00000 occurs twice"),
        (ROWS[1:], "the report has 200 samples, the file has 199"),
        ([{**ROWS[0], "value": float("nan")}, *ROWS[1:]], "s00000 is nan"),
    ],
    ids=["twice", "missing", "nan"],
)
def test_inconsistent_samples_are_invalid(evaluated: ProjectLayout, rows: list[dict[str, Any]], says: str) -> None:
    reseal(evaluated, SAMPLES, rows)
    verdict = decided(evaluated)
    assert verdict.decision == "INVALID"
    assert any(says in one.text for one in verdict.reasons)
    assert check_verdict(Project.from_parts(evaluated, SETTINGS)).decision == "INVALID"


def test_samples_in_another_order_change_nothing(evaluated: ProjectLayout) -> None:
    first = decided(evaluated)
    reseal(evaluated, SAMPLES, ROWS[::-1])
    assert decided(evaluated) == first


def test_samples_that_are_damaged_are_refused(evaluated: ProjectLayout) -> None:
    path = evaluated.evaluate / SAMPLES
    path.write_text(path.read_text(encoding="utf-8").replace("0.0", "1.0"), encoding="utf-8")
    with pytest.raises(DamagedFileError, match="content differs from the manifest"):
        gate(Project.from_parts(evaluated, SETTINGS))
    reseal(evaluated, SAMPLES, [*ROWS[:3], {"id": 7}])
    with pytest.raises(DamagedFileError, match=r"accuracy\.jsonl:4: not a valid SampleScore"):
        gate(Project.from_parts(evaluated, SETTINGS))
    assert not evaluated.verdict.exists()


def test_the_stages_before_must_have_run(project: ProjectLayout) -> None:
    with pytest.raises(DataError, match="dvc repro evaluate"):
        gate(Project.from_parts(project, SETTINGS))
    with pytest.raises(GateError, match="no verdict yet"):
        check_verdict(Project.from_parts(project, SETTINGS))


def test_a_task_file_that_changed_since_the_evaluation_is_invalid(evaluated: ProjectLayout) -> None:
    settings = SETTINGS.model_copy(update={"evaluate": Evaluate(harness=HarnessSettings(tasks=("answers",)))})
    files.make_directory(evaluated.tasks)
    (evaluated.tasks / "answers.yaml").write_text("task: answers\n", encoding="utf-8")
    assert describe_verdict(gate(Project.from_parts(evaluated, settings))).startswith("INVALID: ")
    assert Verdict.load(evaluated.verdict).reasons[0].rule == "tasks"


# --------------------------------------------------------------------------------------------------------- gate --check


def sealed(layout: ProjectLayout, verdict: Verdict) -> None:
    with files.sealed_directory(layout.gate, "gate") as scratch:
        verdict.save(scratch / "verdict.json")


FOUND: dict[str, GateEvidence] = {
    "PROMOTE": found(),
    "HOLD": found({**MODELS, "candidate": {"accuracy": flipped(right(60), 8, 6), "answer_loss": spread(1.0)}}),
    "REJECT": found({**MODELS, "candidate": {"accuracy": right(20), "answer_loss": spread(3.0)}}),
    "INVALID": cases.with_report(found(), selection_overlaps={"a sweep": 3}),
}


@pytest.mark.parametrize("decision", FOUND)
def test_only_promote_passes_the_check(project: ProjectLayout, decision: str) -> None:
    cases.write(project, FOUND[decision])
    sealed(project, decide_verdict(FOUND[decision], SETTINGS.gate))
    verdict = check_verdict(Project.from_parts(project, SETTINGS))
    assert verdict.decision == decision
    assert describe_verdict(verdict).startswith(f"{decision}: ")
    project.params.write_text(params_file.dump(SETTINGS), encoding="utf-8")
    exit_code = main(["--project", str(project.root), "gate", "--check"])
    assert exit_code == (EXIT_OK if decision == "PROMOTE" else EXIT_GATE)


def test_a_verdict_by_other_rules_is_stale(project: ProjectLayout) -> None:
    cases.write(project, found())
    sealed(project, decide_verdict(found(), SETTINGS.gate))
    stricter = AtLeastRule(rule="at_least", metric="accuracy", value=0.95)
    rules = (*SETTINGS.gate.rules[1:], stricter)
    settings = SETTINGS.model_copy(update={"gate": SETTINGS.gate.model_copy(update={"rules": rules})})
    with pytest.raises(
        GateError, match=r"has PROMOTE, but the current rules, tasks and test set uses give REJECT \(at_least"
    ):
        check_verdict(Project.from_parts(project, settings))


def test_a_verdict_that_contradicts_its_evidence_is_refused(project: ProjectLayout) -> None:
    cases.write(project, FOUND["HOLD"])
    hold = decide_verdict(FOUND["HOLD"], SETTINGS.gate)
    sealed(project, hold.model_copy(update={"decision": "PROMOTE"}))
    with pytest.raises(GateError, match="has PROMOTE, but the current rules, tasks and test set uses give HOLD"):
        check_verdict(Project.from_parts(project, SETTINGS))
    sealed(project, hold)
    hold.model_copy(update={"decision": "PROMOTE"}).save(project.verdict)
    with pytest.raises(DamagedFileError, match="manifest"):
        check_verdict(Project.from_parts(project, SETTINGS))


def test_a_verdict_about_another_model_champion_or_anchor_is_stale(project: ProjectLayout) -> None:
    cases.write(project, found())
    sealed(project, decide_verdict(found(), SETTINGS.gate))
    cases.bundle(model_digest="8" * 64).save(project.bundle)
    with pytest.raises(GateError, match="earlier model, champion or anchor"):
        check_verdict(Project.from_parts(project, SETTINGS))
    cases.bundle().save(project.bundle)
    for now, stale in (
        (ChampionFile(champion=cases.ITSELF, anchor=cases.ITSELF), False),  # this verdict has promoted its model since
        (CURRENT, True),
        (ChampionFile(anchor=cases.ANCHOR), True),
    ):
        now.save(project.champion)
        if stale:
            with pytest.raises(GateError, match="earlier model, champion or anchor"):
                check_verdict(Project.from_parts(project, SETTINGS))
        else:
            assert check_verdict(Project.from_parts(project, SETTINGS)).decision == "PROMOTE"


def test_a_verdict_names_earlier_decisions_under_other_rules(evaluated: ProjectLayout) -> None:
    strict = SETTINGS.gate.model_copy(update={"rules": (AtLeastRule(rule="at_least", metric="accuracy", value=0.8),)})
    assert gate(Project.from_parts(evaluated, SETTINGS.model_copy(update={"gate": strict}))).decision == "HOLD"
    text = describe_verdict(gate(Project.from_parts(evaluated, SETTINGS)))
    assert text.startswith("PROMOTE: ")
    assert "under different rules the gate decided HOLD for this model on these samples" in text
    assert Verdict.load(evaluated.verdict).earlier_decisions == ("HOLD",)
    assert Verdict.load(evaluated.verdict).test_set_uses == 1, "one model was evaluated"
    assert check_verdict(Project.from_parts(evaluated, SETTINGS)).decision == "PROMOTE"


# ------------------------------------------------------------------------------------------------------------ gate --aa


def test_noise_of_this_evaluation_is_compared_with_the_margins_of_the_rules(project: ProjectLayout) -> None:
    cases.write(project, found())
    with pytest.raises(DataError, match="no model was scored twice yet"):
        measure_noise(Project.from_parts(project, SETTINGS))
    cases.write(project, with_noise(found(), "accuracy", right(161), model_digest="8" * 64))
    with pytest.raises(DataError, match="not of the evaluated model"):
        measure_noise(Project.from_parts(project, SETTINGS))
    cases.write(project, with_noise(found(), "accuracy", right(161)))
    noise = measure_noise(Project.from_parts(project, SETTINGS))
    assert noise.is_within_limits
    assert "the same model scored twice" in format_noise(noise)
    loud = SETTINGS.gate.model_copy(
        update={"rules": (MustNotRegressRule(rule="must_not_regress", metric="accuracy", margin=0.001),)}
    )
    assert not measure_noise(Project.from_parts(project, SETTINGS.model_copy(update={"gate": loud}))).is_within_limits


def test_markdown_is_the_verdict_on_file_or_a_new_one(
    evaluated: ProjectLayout, capsys: pytest.CaptureFixture[str], calm: None
) -> None:
    def run(*options: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["--project", str(evaluated.root), "gate", *options])
        return code, capsys.readouterr().out

    evaluated.params.write_text(params_file.dump(SETTINGS), encoding="utf-8")
    assert run("--check", "--markdown") == (EXIT_GATE, ""), "there is no verdict yet"
    code, page = run("--markdown")
    assert code == EXIT_OK
    first, written = evaluated.verdict.read_bytes(), evaluated.gate_page.stat().st_mtime_ns
    assert run("--markdown") == (EXIT_OK, page)
    assert run("--check", "--markdown") == (EXIT_OK, page)
    assert evaluated.gate_page.stat().st_mtime_ns == written, "judged again"
    lines = page.splitlines()
    assert lines[0] == "### Ratchet gate: PROMOTE"
    assert lines[4:6] == ["| | rule | metric | result |", "|---|---|---|---|"]
    assert [line.split(" | ")[:3] for line in lines[6:]] == [
        ["| pass", r"must\_improve", "accuracy"], ["| pass", r"must\_not\_regress", r"answer\_loss"],
    ]  # fmt: skip

    strict = SETTINGS.gate.model_copy(update={"rules": (AtLeastRule(rule="at_least", metric="accuracy", value=0.99),)})
    evaluated.params.write_text(params_file.dump(SETTINGS.model_copy(update={"gate": strict})), encoding="utf-8")
    assert run("--check", "--markdown") == (EXIT_GATE, "")
    code, page = run("--markdown")
    assert code == EXIT_OK, "DVC keeps the output"
    assert page.startswith("### Ratchet gate: REJECT\n")
    assert "| **fail** | at\\_least | accuracy | " in page
    assert evaluated.verdict.read_bytes() != first
    assert run("--check", "--markdown") == (EXIT_GATE, page.rstrip("\n") + "\n")
    assert run("--json", "--markdown")[0] == run("--aa", "--markdown")[0] == 2


def test_names_in_markdown_are_plain_text() -> None:
    text = "a|b\n<b>*c*</b> [d](e) `f`"
    reason = RuleResult(rule="at_least", metric=text, outcome="undecided", text=text)
    verdict = decide_verdict(found(), SETTINGS.gate).model_copy(
        update={"reasons": (reason,), "earlier_decisions": ("HOLD",)}
    )
    *_, row, _, note = format_markdown(verdict).splitlines()
    cell = r"a\|b \<b\>\*c\*\</b\> \[d\](e) \`f\`"
    assert row == rf"| undecided | at\_least | {cell} | {cell} |"
    assert note.startswith("Note: under different rules the gate decided HOLD")


def test_the_stage_needs_no_torch() -> None:
    """The stage also imports modules while it runs. These modules do not need torch either."""
    code = (
        "import sys, ratchet.stages.gate, ratchet.reports.verdict_page, ratchet.reports.plots\n"
        "import ratchet.tracking.mlflow.client\n"
        "print(*({'torch', 'transformers', 'peft', 'lm_eval', 'datasets'} & set(sys.modules)), 'done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["done"]
