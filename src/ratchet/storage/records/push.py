"""Records of pushes to the Hugging Face hub."""

from typing import Literal

from ratchet.storage.records.base import Record
from ratchet.storage.records.gate import Decision, describe_overridden

PushKind = Literal["adapter", "merged", "gguf"]


class ForcedPush(Record):
    """A push that overrides the gate."""

    actor: str
    """Name of the person: RATCHET_ACTOR, git's user, or the login name."""
    reason: str
    decision: Decision | None
    """Decision of the overridden verdict; None: the gate has not judged this adapter."""

    @property
    def obstacle(self) -> str:
        """Description of what was overridden."""
        return describe_overridden(self.decision)


class Push(Record):
    """A line of experiments/pushes.jsonl."""

    time: str
    """Time in UTC, ISO 8601."""
    actor: str
    repository: str
    """Hub id."""
    url: str
    revision: str
    """Commit of the repository that contains exactly these files."""
    kind: PushKind
    model_digest: str
    adapter_digest: str
    run_id: str
    decision: Decision | None
    """Decision of the gate about this adapter; None: not judged."""
    forced: ForcedPush | None = None
    files: dict[str, str]
    """SHA-256 of each file by its name in the repository, signature included."""
    signature: str
    """SHA-256 of model.sig."""
    signed_by: str
    """Fingerprint of the key, or the identity."""
