"""Starts a server on loopback from the files of a release, and repeats the probes that were recorded at export.

For gguf, the server is llama.cpp's OpenAI-compatible server over HTTP, with the settings of the release's commands. For
hf and onnx, the server is a separate process that opens the format as any server would. Answers must equal the verified
answers token by token. A difference at a token that was almost a tie (TIE_NATS) is reported but is no failure, because
another processor may round differently. Every other difference is a failure. Servers end with this process, however it
ends.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from ratchet.config.units import describe_failure
from ratchet.errors import ChampionError, DamagedFileError
from ratchet.models.runtimes import llama_server
from ratchet.registry.model_store import artifact_path
from ratchet.storage.records.export import ExportArtifact, ExportProbe

TIE_NATS = 0.05
"""Largest margin of an almost-tie, in nats: if the log-probability of the verified token was less than this above the
second highest, another processor may choose another token."""
ANSWER_TIMEOUT_S = 900.0
"""Maximum time for all answers, enough for loading a large model from a slow disk and for answers on few threads."""
INHERITED_VARIABLES = (
    "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "HOME", "OMP_NUM_THREADS",
)  # fmt: skip
"""Environment variables that the child process gets; none contains a token of a hub or tracker."""
_EXTRA_CONTEXT_TOKENS = 8
"""Number of tokens by which the context exceeds the longest prompt with its answer."""
_UNCHANGED = "the current release was not changed"


def run_smoke_test(folder: Path, artifact: ExportArtifact, has_dated_prompts: bool) -> str:
    """Start a server on the files of a release, check its answers, and stop it.

    Args:
        folder: the release.
        artifact: its format, with the verified answers.
        has_dated_prompts: whether the chat template writes the current date, so that today's prompts differ.

    Returns:
        A summary for the user.

    Raises:
        ChampionError: the server does not start, does not answer, or gives other answers; the message names the prompt.
        DamagedFileError: the release cannot be read, or contains no verified answers.
    """
    if not artifact.probes:
        raise DamagedFileError(
            f"{folder}: bundle.json contains no verified answers of {artifact.name}; export and promote again"
        )
    if artifact.kind == "gguf":
        answers = _ask_llama(folder, artifact, has_dated_prompts)
    else:
        answers = _ask_process(folder, artifact, has_dated_prompts)
    ties = []
    for probe, answer in zip(artifact.probes, answers, strict=True):
        if tuple(answer) == probe.answer_ids:
            continue
        compared = min(len(answer), len(probe.answer_ids))
        position = next((i for i in range(compared) if answer[i] != probe.answer_ids[i]), compared)
        margin = probe.margins[position] if position < len(probe.margins) else None
        if margin is None or margin >= TIE_NATS:
            verified = "" if margin is None else f", where the verified token had a margin of {margin:.2f} nats"
            raise ChampionError(
                f"{folder}: the answer to {probe.question!r} differs from {probe.answer!r} from token {position + 1} on"
                f"{verified}; {_UNCHANGED}. Export again on a machine like this one, or check the runtime's version"
            )
        ties.append(
            f"{probe.question!r} differs from token {position + 1} on, a tie with a margin of {margin:.3f} nats"
        )
    summary = f"{len(artifact.probes) - len(ties)} of {len(artifact.probes)} answers as verified"
    return "; ".join([summary, *ties])


def _ask_llama(folder: Path, artifact: ExportArtifact, has_dated_prompts: bool) -> list[tuple[int, ...]]:
    """Ask over HTTP: as a chat, or with the recorded prompt if the chat template writes another date."""
    longest = max(len(probe.prompt_ids) + len(probe.answer_ids) for probe in artifact.probes)
    context_tokens = longest + _EXTRA_CONTEXT_TOKENS
    with llama_server.start_server(folder / artifact_path(artifact), artifact.threads, context_tokens) as server:
        answers = []
        for probe in artifact.probes:
            messages = [{"role": "user", "content": probe.question}]
            prompt = server.tokenize(server.template(messages), add_special=True)
            if _is_same_prompt(folder, probe, prompt, has_dated_prompts):
                answers.append(server.chat(messages, len(probe.answer_ids)).ids)
            else:
                tokens = server.completion(probe.prompt_ids, len(probe.answer_ids))["tokens"]
                answers.append(tuple(int(token) for token in tokens))
        return answers


def _ask_process(folder: Path, artifact: ExportArtifact, has_dated_prompts: bool) -> list[tuple[int, ...]]:
    """Send the recorded prompts to a separate process, and check the prompts that the deployed tokenizer builds."""
    requests = [
        {"question": probe.question, "prompt": probe.prompt_ids, "tokens": len(probe.answer_ids)}
        for probe in artifact.probes
    ]
    path = (folder / artifact_path(artifact)).absolute()
    command = [
        sys.executable,
        "-P",
        "-m",
        "ratchet.models.answer_process",
        str(path),
        "--threads",
        str(artifact.threads),
    ]
    if artifact.kind == "onnx":
        command.append("--onnx")
    environment = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    try:
        result = subprocess.run(
            command, input=json.dumps(requests), capture_output=True, text=True, check=False,
            timeout=ANSWER_TIMEOUT_S, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ChampionError(f"{path}: no answer within {ANSWER_TIMEOUT_S:g} s; {_UNCHANGED}") from None
    if result.returncode != 0:
        reason = describe_failure(result.stderr, result.returncode)
        raise ChampionError(f"{path}: loading or answering failed ({reason}); {_UNCHANGED}")
    answers = json.loads(result.stdout.splitlines()[-1])
    for probe, answer in zip(artifact.probes, answers, strict=True):
        if answer["prompt"] is not None:
            _is_same_prompt(folder, probe, answer["prompt"], has_dated_prompts)
    return [tuple(answer["answer"]) for answer in answers]


def _is_same_prompt(folder: Path, probe: ExportProbe, prompt: Iterable[int], has_dated_prompts: bool) -> bool:
    """Return whether a prompt equals the recorded one. Raises ChampionError if not, unless the prompts have a date."""
    is_same = tuple(prompt) == probe.prompt_ids
    if not is_same and not has_dated_prompts:
        raise ChampionError(
            f"{folder}: the prompt for {probe.question!r} differs from the recorded one; {_UNCHANGED}. The runtime may "
            "have another version: export again with this one"
        )
    return is_same
