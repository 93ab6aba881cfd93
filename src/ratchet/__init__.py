"""QLoRA fine-tuning with experiment tracking: a run never loses a step, and a worse model never ships.

    import ratchet

    project = ratchet.Project("support", overrides={"train.rank": 16})
    ratchet.base(project)
    ratchet.prepare(project)
    run = ratchet.train(project)
    bundle = ratchet.export(project)
    report = ratchet.evaluate(project)
    verdict = ratchet.gate(project)

`ratchet.api` documents every function, `ratchet.errors` every exception. Python loads a name when you first use it, so
`import ratchet` takes milliseconds.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratchet.api import (
        Project,
        Run,
        adopt,
        approve,
        audit,
        base,
        chat,
        compare,
        control_trial,
        evaluate,
        export,
        gate,
        generate,
        init,
        list_runs,
        load_run,
        monitor,
        prepare,
        promote,
        push,
        rollback,
        sweep,
        train,
    )
    from ratchet.errors import RatchetError

__all__ = [
    "Project",
    "RatchetError",
    "Run",
    "__version__",
    "adopt",
    "approve",
    "audit",
    "base",
    "chat",
    "compare",
    "control_trial",
    "evaluate",
    "export",
    "gate",
    "generate",
    "init",
    "list_runs",
    "load_run",
    "monitor",
    "prepare",
    "promote",
    "push",
    "rollback",
    "sweep",
    "train",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module, metadata

    if name == "__version__":
        return metadata.version("ratchet-llm")
    if name in ("api", "errors"):
        return import_module(f"ratchet.{name}")
    if name in __all__:
        return getattr(import_module("ratchet.errors" if name == "RatchetError" else "ratchet.api"), name)
    raise AttributeError(f"module 'ratchet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
