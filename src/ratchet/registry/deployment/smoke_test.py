"""A real server on loopback, from the files of a release, asked again what was asked when the form was measured.

gguf: llama.cpp's OpenAI-compatible server, asked over HTTP with the settings that the release's commands have. hf and
onnx: a process of its own that opens the form as any server would. Answers must be the verified ones, token for token.
Where they part at a token that was almost a tie (TIE_NATS), another processor may round it the other way: that is
said, and is no failure; anything else is. Servers end with this process, however it ends.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ratchet.errors import ChampionError, DamagedFileError
from ratchet.models.runtimes import llama_server
from ratchet.registry.bundle_files import artifact_path
from ratchet.storage.records.export import ExportArtifact, ExportProbe

TIE_NATS = 0.05
"""Log-probability by which the verified token was ahead, below which another processor may choose the other one."""
ANSWER_S = 900.0
"""A large model is read from a slow disk, and answers on few threads."""
KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "HOME", "OMP_NUM_THREADS")
"""Environment that the child needs; tokens of hubs and trackers are not among it."""
_MODULES = {"hf": "ratchet.models.answer_process", "onnx": "ratchet.registry.deployment.onnx_answers"}
_ROOM_TOKENS = 8


def run_smoke_test(folder: Path, artifact: ExportArtifact, dated: bool, threads: int | None = None) -> str:
    """Start a server on the files of a release, ask it, end it; returns what to tell.

    Args:
        folder: the release.
        artifact: the form that is in it, with the verified answers.
        dated: the chat template writes the date, so prompts of today are others than those that were verified.
        threads: CPU threads; by default those with which it was measured.

    Raises:
        ChampionError: it does not start, does not answer, or answers otherwise; the message says to which question.
        DamagedFileError: the release cannot be read, or nothing was verified to compare with.
    """
    if not artifact.probes:
        raise DamagedFileError(
            f"{folder}: no verified answers of {artifact.name} in bundle.json; export and promote again"
        )
    count = threads or artifact.threads
    if artifact.kind == "gguf":
        found = _ask_llama(folder, artifact, dated, count)
    else:
        found = _ask_process(folder, artifact, dated, count)
    ties = [
        text for probe, ids in zip(artifact.probes, found, strict=True) if (text := _compare_answer(folder, probe, ids))
    ]
    told = f"{len(artifact.probes) - len(ties)} of {len(artifact.probes)} answers as verified"
    return "; ".join([told, *ties])


def _ask_llama(folder: Path, artifact: ExportArtifact, dated: bool, threads: int) -> list[tuple[int, ...]]:
    """Over HTTP: the chat; and whole prompts where the chat template writes the date."""
    longest = max(len(probe.prompt_ids) + len(probe.answer_ids) for probe in artifact.probes)
    with llama_server.start_server(folder / artifact_path(artifact), threads, longest + _ROOM_TOKENS) as server:
        found = []
        for probe in artifact.probes:
            messages = [{"role": "user", "content": probe.question}]
            prompt = server.tokenize(server.template(messages), whole=True)
            if _is_same_prompt(folder, probe, prompt, dated):
                found.append(server.chat(messages, len(probe.answer_ids)).ids)
            else:
                tokens = server.completion(probe.prompt_ids, len(probe.answer_ids))["tokens"]
                found.append(tuple(int(one) for one in tokens))
        return found


def _ask_process(folder: Path, artifact: ExportArtifact, dated: bool, threads: int) -> list[tuple[int, ...]]:
    """Whole prompts, and what the deployed tokenizer makes of the questions."""
    asked = [
        {"question": probe.question, "prompt": probe.prompt_ids, "tokens": len(probe.answer_ids)}
        for probe in artifact.probes
    ]
    opened = (folder / artifact_path(artifact)).absolute()
    command = [sys.executable, "-P", "-m", _MODULES[artifact.kind], str(opened), "--threads", str(threads)]
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, check=False, timeout=ANSWER_S,
            env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ChampionError(f"{opened}: did not answer within {ANSWER_S:g} s; what is current stays so") from None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ChampionError(f"{opened}: does not load and answer ({said}); what is current stays so")
    answers = json.loads(done.stdout.splitlines()[-1])
    for probe, answer in zip(artifact.probes, answers, strict=True):
        if answer["prompt"] is not None:
            _is_same_prompt(folder, probe, answer["prompt"], dated)
    return [tuple(answer["answer"]) for answer in answers]


def _is_same_prompt(folder: Path, probe: ExportProbe, prompt: Iterable[int], dated: bool) -> bool:
    """Whether template and tokenizer make of a question what they made of it; they must, except for dates."""
    same = tuple(prompt) == probe.prompt_ids
    if not same and not dated:
        raise ChampionError(
            f"{folder}: template and tokenizer make another prompt of {probe.question!r} than when it was verified; "
            "what is current stays so. The runtime may be of another version: export again with this one"
        )
    return same


def _compare_answer(folder: Path, probe: ExportProbe, found: Sequence[int]) -> str | None:
    """None where an answer is the verified one, words where it parts at a tie. Raises ChampionError otherwise."""
    if tuple(found) == probe.answer_ids:
        return None
    at = next((i for i, (a, b) in enumerate(zip(found, probe.answer_ids, strict=False)) if a != b), None)
    if at is None:
        at = min(len(found), len(probe.answer_ids))
    margin = probe.margins[at] if at < len(probe.margins) else None
    if margin is not None and margin < TIE_NATS:
        return f"{probe.question!r} parts at token {at + 1}, a tie ({margin:.3f} nats) that fell otherwise here"
    ahead = "" if margin is None else f", where the verified one was {margin:.2f} nats ahead"
    raise ChampionError(
        f"{folder}: answers {probe.question!r} otherwise than {probe.answer!r}, from token {at + 1} on{ahead}; "
        "what is current stays so. Export again on a machine like this one, or look for another runtime's version"
    )
