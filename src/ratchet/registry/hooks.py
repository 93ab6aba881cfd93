"""Sends a promotion event to one hook, a signed POST request or a command, with retries.

A webhook request has these headers (times in Unix seconds; the key comes from the environment and is never stored):

    X-Ratchet-Event       promote | rollback
    X-Ratchet-Delivery    id of the event, the same for every attempt, so that a receiver recognizes repetitions
    X-Ratchet-Timestamp   time of this attempt
    X-Ratchet-Signature   sha256=HMAC-SHA256(key, timestamp + "." + body), hexadecimal; only if there is a key

A request is retried after connection errors, 5xx and 429 (Retry-After is obeyed), but not after other answers, which
would not change. Redirects are not followed, because they would send the signature elsewhere. A command is retried
after any failure.
"""

import hashlib
import hmac
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ratchet import http_client
from ratchet.config.promote import HookSettings
from ratchet.errors import SettingsError
from ratchet.http_client import PostResult
from ratchet.storage import digests

Wait = Callable[[float], None]


@dataclass(frozen=True)
class HookResult:
    """Result of sending an event to a hook."""

    is_delivered: bool
    detail: str
    attempts: int


def check_hooks(hooks: Sequence[HookSettings], require_keys: bool = True) -> None:
    """Check, before anything is promoted, that hooks can receive events.

    Args:
        hooks: hooks in params.yaml.
        require_keys: also require the keys whose variables are named explicitly.

    Raises:
        SettingsError: an address is invalid, or a key is missing.
    """
    for number, hook in enumerate(hooks):
        if hook.webhook is not None and (problem := http_client.find_address_problem(hook.webhook)):
            raise SettingsError(f"promote.hooks[{number}].webhook: {problem}")
        names_key = hook.webhook is not None and "key_variable" in hook.model_fields_set
        if require_keys and names_key and not os.environ.get(hook.key_variable):
            raise SettingsError(
                f"promote.hooks[{number}].key_variable: the environment variable {hook.key_variable} is not set, so "
                "events cannot be signed; set it, or remove key_variable to send them unsigned"
            )


def hook_key(hook: HookSettings) -> str:
    """Identify a hook by its address or command; it stays the same if timeouts or retries change."""
    return digests.hash_json([hook.webhook, list(hook.command)])[: digests.SHORT]


def hook_label(hook: HookSettings) -> str:
    """Describe a hook without path and query of its address, which contain a secret for some services."""
    if hook.webhook is None:
        return f"command {Path(hook.command[0]).name}"
    parts = urlsplit(hook.webhook)
    return f"webhook {parts.scheme}://{parts.netloc}"


def send_event(hook: HookSettings, event: Path, root: Path, wait: Wait = time.sleep) -> HookResult:
    """Send an event to a hook until it succeeds or no retry is left. Failures of the receiver are not raised.

    Args:
        hook: the hook.
        event: file with the bytes to send.
        root: directory of the project, in which a command runs.
        wait: called with the seconds between two attempts.
    """
    answer = PostResult(False, "no attempt was made")
    for number in range(hook.retries + 1):
        if number:
            wait(http_client.compute_retry_delay_s(number, answer))
        answer = _post_event(hook, event) if hook.webhook is not None else _run_command(hook, event, root)
        if answer.is_delivered or not answer.is_retryable:
            return HookResult(answer.is_delivered, answer.detail, number + 1)
    return HookResult(False, answer.detail, hook.retries + 1)


def compute_signature(secret: str, timestamp: str, body: bytes) -> str:
    """Compute a request's signature. Receivers compare it in constant time, and reject old timestamps."""
    return "sha256=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def _post_event(hook: HookSettings, event: Path) -> PostResult:
    """Make one attempt. The result says if the event was sent unsigned."""
    body, timestamp = event.read_bytes(), str(int(time.time()))
    content = json.loads(body)
    headers = {
        "X-Ratchet-Event": str(content["action"]),
        "X-Ratchet-Delivery": str(content["id"]),
        "X-Ratchet-Timestamp": timestamp,
    }
    if secret := os.environ.get(hook.key_variable):
        headers["X-Ratchet-Signature"] = compute_signature(secret, timestamp, body)
    answer = http_client.post(str(hook.webhook), body, headers, hook.timeout_s)
    if answer.is_delivered and not secret:
        return PostResult(True, f"{answer.detail}; unsigned: {hook.key_variable} is not set")
    return answer


def _run_command(hook: HookSettings, event: Path, root: Path) -> PostResult:
    """Make one attempt: the event is on standard input, its id in RATCHET_EVENT_ID; output goes to a log file."""
    environment = os.environ | {"RATCHET_EVENT_ID": str(json.loads(event.read_bytes())["id"])}
    log = event.parent / f"{hook_key(hook)}.log"
    with event.open("rb") as stdin, log.open("ab") as out:
        try:
            process = subprocess.Popen(
                hook.command, cwd=root, env=environment, stdin=stdin, stdout=out, stderr=out, start_new_session=True
            )
        except OSError as error:
            return PostResult(False, f"cannot be started ({error.strerror})", is_retryable=False)
        try:
            code = process.wait(hook.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the process group, so that its children end, too
            process.wait()
            return PostResult(False, f"timed out after {hook.timeout_s:g} s and was killed")
    return PostResult(code == 0, f"exit code {code}" + (f" (see {log})" if code else ""))
