"""Optional libraries: the extra of the distribution that installs each, and the error for a library that is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from ratchet.errors import MissingLibraryError

DISTRIBUTION = "ratchet-llm"

EXTRAS = {
    "export": ("gguf", "onnx", "onnxruntime", "onnxscript", "xllamacpp"),
    "language": ("py3langid",),
    "semantic": ("sentence_transformers",),
    "harness": ("immutabledict", "langdetect", "lm_eval", "nltk", "rouge_score", "sacrebleu"),
    "sweep": ("cmaes", "optuna"),
    "storage": ("obstore",),
    "sign": ("sigstore",),
    "postgres": ("psycopg",),
    "ray": ("ray",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "dvclive": ("dvclive",),
    "observability": ("opentelemetry", "sentry_sdk"),
}
"""Top-level modules of the libraries that each extra installs; `pyproject.toml` lists their distributions."""

TRACE_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SENTRY_VARIABLE = "SENTRY_DSN"
"""Environment variables that enable the libraries of the extra observability (tracking/telemetry.py)."""


def require_libraries(purpose: str, extra: str) -> None:
    """Require the libraries of an extra, before work whose result would need them.

    Args:
        purpose: what needs the libraries, such as `export.gguf`; the message begins with it.
        extra: key of EXTRAS.

    Raises:
        MissingLibraryError: one of them is not installed.
    """
    for module in EXTRAS[extra]:
        if find_spec(module) is None:
            raise MissingLibraryError(f"{purpose} needs {_describe(module)}")


@contextmanager
def explained_imports() -> Iterator[None]:
    """Convert the error of an import that fails because a library is not installed. Also a decorator.

    Raises:
        MissingLibraryError: the library is missing; the message has the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in ("", "ratchet"):
            raise
        raise MissingLibraryError(f"this needs {_describe(module)}") from error


def _describe(module: str) -> str:
    extra = next((name for name, modules in EXTRAS.items() if module in modules), "")
    target = f"{DISTRIBUTION}[{extra}]" if extra else DISTRIBUTION
    return f"{module}, which is not installed; install it with: pip install '{target}'"
