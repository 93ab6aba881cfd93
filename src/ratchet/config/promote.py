"""Section `promote` of params.yaml: the registered model, its approvals and signature, and hooks."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from ratchet.config.fields import Count, Name, Names, Positive, Section, convert_to_tuple


class HookSettings(Section):
    """A webhook or a command that receives promotion events."""

    webhook: Name | None = None
    """URL (https, or http on loopback) that receives the event as JSON, signed if there is a key."""
    key_variable: Name = "RATCHET_WEBHOOK_KEY"
    """Name of the environment variable with the key of the HMAC-SHA256 signature."""
    command: Names = ()
    """Program and arguments. It runs in the project directory and reads the event as JSON from standard input."""
    events: Annotated[
        tuple[Literal["promote", "rollback"], ...], BeforeValidator(convert_to_tuple), Field(min_length=1)
    ] = (
        "promote",
        "rollback",
    )
    """Events to receive."""
    timeout_s: Positive = 60.0
    """Timeout for an answer, or for the end of the program, in seconds."""
    retries: Count = 5
    """Retries after a failure. The delay starts at 1 s and doubles each time."""

    @model_validator(mode="after")
    def _check_target(self) -> "HookSettings":
        if bool(self.webhook) == bool(self.command):
            raise ValueError("expected either webhook or command")
        return self


class Promote(Section):
    """The model registry, and hooks that run after a promotion."""

    model_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "ratchet-model"
    """Name of the registered model in MLflow, and of the experiment that its runs are logged to."""
    approvals: Count = 0
    """Approvals by people that a promotion needs (`ratchet approve`); one of them must not be the person who promotes.
    0: none."""
    signing: Literal["key", "sigstore"] = "key"
    """Sign promoted models with this machine's key (`ratchet keys`), or with an identity through sigstore."""
    hooks: Annotated[tuple[HookSettings, ...], BeforeValidator(convert_to_tuple)] = ()
    """Webhooks or commands that receive every promotion and rollback exactly once."""
