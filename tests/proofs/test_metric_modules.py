"""Proves that metrics of answers are computed offline from our own modules, whatever a cache holds."""

import subprocess
import sys
from pathlib import Path

from tiny_project import environment

PACKAGES = ("reports", "evaluation")


def test_nobody_s_cache_of_modules_is_touched_or_trusted(tmp_path: Path) -> None:
    """A module of the same name that lies in the user's cache is not run, and nothing is added there."""
    planted = tmp_path / "modules" / "evaluate_modules" / "metrics" / "exact_match" / ("0" * 64) / "exact_match.py"
    planted.parent.mkdir(parents=True)
    planted.write_text("raise SystemExit('planted')\n")
    before = sorted(tmp_path.rglob("*"))
    code = (
        "import sys\n"
        "from ratchet.config.evaluate import Evaluate\n"
        "from ratchet.evaluation.answer_metrics import score_answers as measure\n"
        "path = list(sys.path)\n"
        "for _ in range(2):\n"
        "    print(measure(['a'], [['a']], Evaluate(metrics=('token_f1',)), 'exact_match')[0].values)\n"
        "assert sys.path == path and not [name for name in sys.modules if name.startswith('evaluate_modules')]\n"
    )
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment() | offline, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[1.0]\n[1.0]\n"), done.stderr
    assert sorted(tmp_path.rglob("*")) == before
