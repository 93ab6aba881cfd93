"""Proves that a real terminal shows the progress of a generation until its end."""

import json
import subprocess
import sys
from pathlib import Path

import generations
from generations import SETTINGS, Generation, with_generate, write_prompts
from ratchet.runs.fault_injection.injection import VARIABLE, InjectedFault
from tmux_screen import Screen, needs_tmux

PACKAGES = ("inference", "console")
COUNT = 60
SLOW = json.dumps([InjectedFault(kind="slow", seconds=0.4).model_dump(mode="json")])


def generation(root: Path, url: str) -> Generation:
    generations.project(root / "p")
    return Generation(root / "p", write_prompts(root / "prompts.jsonl", COUNT), SETTINGS, url)


@needs_tmux
def test_a_generation_on_a_real_terminal(tmp_path: Path) -> None:
    model = generations.chat_directory(tmp_path / "model")
    layout = generations.project(tmp_path / "p", with_generate(max_new_tokens=24))
    prompts, output = write_prompts(tmp_path / "prompts.jsonl", COUNT), tmp_path / "answers.jsonl"
    ratchet = f"cd {layout.root} && {sys.executable} -m ratchet"
    command = f"{ratchet} generate {prompts} --model {model} --output {output}"
    with Screen(command, environment={VARIABLE: SLOW}) as screen:
        lines = screen.until(lambda lines: any("padded tokens" in line for line in lines))
        name = next(line for line in lines if line.startswith("generation ")).split()[1]
        assert any("answering" in line for line in lines)
        assert any("forecast" in line for line in lines)
        assert any(f"of {COUNT}" in line for line in lines)
        assert not screen.shows_cursor
        said = subprocess.run(
            ["bash", "-c", f"{ratchet} status; {ratchet} watch --once {name[:6]}; {ratchet} reset --yes {name}"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert f"generation {name}: running" in said.stdout
        assert f"{name}  answering" in said.stdout
        assert said.returncode == 2
        screen.resize(40, 12)
        narrow = screen.until(lambda lines: any(f"/{COUNT}" in line for line in lines))
        assert max(map(len, narrow)) <= 40
        screen.resize(80, 24)
        screen.until(lambda lines: "[ended 0]" in lines)
        assert screen.shows_cursor
        text = "\n".join(screen.lines(all_of_it=True))
        assert "finished" in text
        assert f"{COUNT} answers to {COUNT} prompts" in text
    assert len(output.read_bytes().splitlines()) == COUNT
