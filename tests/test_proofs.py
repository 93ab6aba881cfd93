"""The selection of proofs for CI: each share stays within its time limit and runs proofs of changed packages first."""

import subprocess
import sys
from datetime import UTC, datetime
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "proofs.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Import the script, which is not part of a package."""
    spec = util.spec_from_file_location("proofs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules["proofs"] = module  # dataclasses look up the module in sys.modules
    spec.loader.exec_module(module)
    return module


def test_every_proof_names_packages_that_exist_and_was_timed(script: ModuleType) -> None:
    proofs = script.read_proofs()
    names = {path.name.removesuffix(".py") for path in (ROOT / "src" / "ratchet").iterdir()}
    assert {name for proof in proofs for name in proof.packages} <= names
    assert all(proof.packages for proof in proofs)
    assert set(script.json.loads(script.SECONDS.read_text(encoding="utf-8"))) == {proof.name for proof in proofs}


def test_a_share_keeps_to_its_minutes_and_takes_first_whose_turn_it_is_then_what_changed(script: ModuleType) -> None:
    proofs = script.read_proofs()
    for turn, commit in ((0, "0" * 40), (3, "1" * 40)):
        chosen = script.choose(proofs, {"tuning"}, turn, commit, 20)
        due = script.divide(proofs)[turn]
        assert set(chosen[: len(due)]) == set(due)
        is_changed = ["tuning" in proof.packages for proof in chosen[len(due) :]]
        assert is_changed == sorted(is_changed, reverse=True)
        seconds = [proof.seconds for proof in chosen]
        assert (sum(seconds) + max(seconds)) / script.PROCESSES <= 20 * 60
    assert script.choose(proofs, set(), 0, "0" * 40, 10_000) != proofs
    assert set(script.choose(proofs, set(), 0, "0" * 40, 10_000)) == set(proofs)


def test_five_turns_run_every_proof(script: ModuleType) -> None:
    proofs = script.read_proofs()
    everything = {proof.packages for proof in proofs}
    changed = {name for packages in everything for name in packages}
    chosen = [script.choose(proofs, changed, turn, "0" * 40, 20) for turn in range(7, 7 + script.GROUPS)]
    assert {proof for share in chosen for proof in share} == set(proofs)


def test_without_an_advance_the_hash_of_the_commit_decides(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turn = tmp_path / "tests" / "proofs" / "turn"
    turn.parent.mkdir(parents=True)
    turn.write_text("6\n", encoding="utf-8")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "TURN", turn)
    assert script.read_turn("f" * 40, ["README.md"]) == int("f" * 40, 16)
    assert "did not advance tests/proofs/turn" in capsys.readouterr().out
    script.advance_turn()
    assert script.read_turn("f" * 40, ["README.md", "tests/proofs/turn"]) == 7


def test_a_proof_that_was_edited_is_among_what_changed(script: ModuleType) -> None:
    changed = script.changed_packages(
        ["src/ratchet/runs/replication/store.py", "src/ratchet/stages/train.py", "tests/proofs/test_x.py"]
    )
    assert changed == {"runs", "stages", "test_x.py"}
    assert (
        script.changed_packages(["README.md", "src/ratchet", "tests/test_gate.py", "tests/proofs/seconds.json"])
        == set()
    )


def test_the_share_of_this_commit_is_printed_and_nothing_runs_when_it_is_only_listed() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--minutes", "20", "--list"], capture_output=True, text=True, check=True
    )
    assert "files of proofs" in done.stdout
    assert " run  test_" in done.stdout
    assert "passed" not in done.stdout


def test_a_file_without_packages_is_named(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"test_it\.py: no constant PACKAGES"):
        script.read_packages(tmp_path / "test_it.py")


def test_a_report_of_all_proofs_becomes_a_table_of_what_they_prove(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "tests" / "test_first.py", tmp_path / "tests" / "test_second.py"
    first.parent.mkdir()
    first.write_text('"""Proves that nothing\\nis lost.\\n\\nMore."""\n', encoding="utf-8")
    second.write_text('"""Proves a | b."""\n', encoding="utf-8")
    report, page = tmp_path / "report.xml", tmp_path / "page.md"
    cases = '<testcase classname="tests.test_first" time="1.6"/>'
    cases += '<testcase classname="tests.test_first" time="2"><failure/></testcase>'
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>", encoding="utf-8")
    page.write_text("Before\n<!-- measured: proofs -->\nold\n<!-- end -->\nAfter\n", encoding="utf-8")
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr(script, "ROOT", ROOT)
    monkeypatch.setattr(script, "PROOFS", first.parent / "proofs")
    proofs = [script.Proof(path, frozenset(), 1.0) for path in (first, second)]
    script.write_page(proofs, script.read_results(report), datetime(2026, 11, 24, tzinfo=UTC), 70.4)
    text = page.read_text(encoding="utf-8")
    first_row = "| Proves that nothing is lost. | `tests/test_first.py` | 4 | 1 passed, 1 failed | 24 November 2026 |"
    assert first_row in text
    assert "| Proves a \\| b. | `tests/test_second.py` | | not run yet | |" in text
    script.write_page(
        proofs, {"test_second.py": script.Result(2, {"passed": 3})}, datetime(2026, 11, 25, tzinfo=UTC), 1
    )
    later = page.read_text(encoding="utf-8")
    assert first_row in later
    assert "| Proves a \\| b. | `tests/test_second.py` | 2 | 3 passed | 25 November 2026 |" in later
    assert "24 November 2026, 70 minutes; " in text
    assert "old" not in text
    assert text.startswith("Before\n")
    assert text.endswith("<!-- end -->\nAfter\n")
