"""Telling one hook of one event: a signed POST, or a program; tried again where that may help.

A webhook's request carries (times in Unix seconds, the key from the environment, never written anywhere):

    X-Ratchet-Event       promote | rollback
    X-Ratchet-Delivery    the event's id: the same in every try, so a receiver knows what it has seen
    X-Ratchet-Timestamp   when this try was sent
    X-Ratchet-Signature   sha256=HMAC-SHA256(key, timestamp + "." + body), hexadecimal; only where there is a key

It is tried again after errors of the connection, 5xx and 429 (Retry-After is honoured), not after other answers: those
will not change. Redirects are not followed: they would take the signature elsewhere. A program is tried again whatever
it ends with.
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
from ratchet.config.gate import HookSettings
from ratchet.errors import SettingsError
from ratchet.http_client import PostResult
from ratchet.storage import digests

Wait = Callable[[float], None]


@dataclass(frozen=True)
class HookResult:
    """How it went."""

    told: bool
    detail: str
    tries: int


def check_hooks(hooks: Sequence[HookSettings], tell: bool = True) -> None:
    """Raise SettingsError for a hook that could never be told, before anything is promoted.

    Args:
        hooks: of params.yaml.
        tell: they are to be told now; where a key is asked for by name, it must be there.
    """
    for number, hook in enumerate(hooks):
        if hook.webhook is not None and (problem := http_client.find_address_problem(hook.webhook)):
            raise SettingsError(f"promote.hooks[{number}].webhook: {problem}")
        if tell and hook.webhook and "key_variable" in hook.model_fields_set and not os.environ.get(hook.key_variable):
            raise SettingsError(
                f"promote.hooks[{number}].key_variable: {hook.key_variable} is not set in the environment, so nothing "
                "could be signed; set it, or leave key_variable out to send unsigned"
            )


def hook_key(hook: HookSettings) -> str:
    """Names a hook: its address or command. How long it is waited for may change without making it another."""
    return digests.hash_json([hook.webhook, list(hook.command)])[: digests.SHORT]


def hook_label(hook: HookSettings) -> str:
    """A hook for people; path and query of an address are left out, for some services keep a secret there."""
    if hook.webhook is None:
        return f"command {Path(hook.command[0]).name}"
    parts = urlsplit(hook.webhook)
    return f"webhook {parts.scheme}://{parts.netloc}"


def send_event(hook: HookSettings, event: Path, root: Path, wait: Wait = time.sleep) -> HookResult:
    """Tell a hook until it answers, or it is given up. Does not raise for what the other side does.

    Args:
        event: the file whose bytes are sent.
        root: the project; where a command runs.
        wait: called with seconds between two tries.
    """
    answer = PostResult(False, "not tried")
    for number in range(hook.retries + 1):
        if number:
            wait(http_client.compute_pause_s(number, answer))
        answer = _post_event(hook, event) if hook.webhook is not None else _run_command(hook, event, root)
        if answer.told or not answer.again:
            return HookResult(answer.told, answer.detail, number + 1)
    return HookResult(False, answer.detail, hook.retries + 1)


def compute_signature(secret: str, timestamp: str, body: bytes) -> str:
    """What a receiver computes and compares (in constant time, and only for a recent timestamp)."""
    return "sha256=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


# --- webhooks ---------------------------------------------------------------------------------------------------------


def _post_event(hook: HookSettings, event: Path) -> PostResult:
    """One try; what was told without a signature is said to be."""
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
    if answer.told and not secret:
        return PostResult(True, f"{answer.detail}, unsigned: {hook.key_variable} is not set")
    return answer


# --- programs ---------------------------------------------------------------------------------------------------------


def _run_command(hook: HookSettings, event: Path, root: Path) -> PostResult:
    """One try: the event on standard input, its id in RATCHET_EVENT_ID, what it says into a log beside the event."""
    environment = os.environ | {"RATCHET_EVENT_ID": str(json.loads(event.read_bytes())["id"])}
    log = event.parent / f"{hook_key(hook)}.log"
    with event.open("rb") as stdin, log.open("ab") as out:
        try:
            process = subprocess.Popen(
                hook.command, cwd=root, env=environment, stdin=stdin, stdout=out, stderr=out, start_new_session=True
            )
        except OSError as error:
            return PostResult(False, f"does not start ({error.strerror})", again=False)
        try:
            code = process.wait(hook.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own group: nothing that it started goes on
            process.wait()
            return PostResult(False, f"not done within {hook.timeout_s:g} s; killed")
    return PostResult(code == 0, f"exit code {code}" + (f" (see {log})" if code else ""))
