"""How knobs of `machine` may be written: each function takes what was found, and gives what pydantic then checks.

What is none of it, or must not stand there, is refused by ValueError with a way out; params.py adds the place.
"""

import math
import re
from typing import Any

from ratchet.config.fields import Positive, PositiveCount, Section, parse_interval, parse_number
from ratchet.config.units import parse_bytes
from ratchet.errors import SettingsError


def parse_rows(value: Any) -> Any:
    """A number of rows, or `auto`."""
    value = parse_number(value)
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{value!r} is no number of rows; write one, or auto")
    return value


def check_interval(value: Any) -> Any:
    """A number of steps, a time, or `auto`, as it stands."""
    value = parse_number(value)
    parse_interval(value)
    return value


def parse_database_address(value: Any) -> Any:
    """The address of a database, without a password."""
    if isinstance(value, str) and re.match(r"[^/]*://[^/@]*:[^/@]*@", value):
        raise ValueError("holds a password, and params.yaml is no place for one; put it into PGPASSWORD or ~/.pgpass")
    return value


def parse_gpus(value: Any) -> Any:
    """GPUs of a worker, parts of one too, or `auto`."""
    value = parse_number(value)
    if value != "auto" and (not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf):
        raise ValueError(f"{value!r} is no number of GPUs; write one, or auto")
    return value


def parse_ranks(value: Any) -> Any:
    """A number of ranks, or `auto`."""
    value = parse_number(value)
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{value!r} is no number of ranks; write one, or auto")
    return value


def parse_nodes(value: Any) -> Any:
    """A number of machines, or MIN:MAX, as text."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    found = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text) if isinstance(text, str) else None
    if not found or not 1 <= int(found[1]) <= int(found[2] or found[1]):
        raise ValueError(f"{value!r} is no number of machines; write one such as 4, or the fewest and the most: 2:8")
    return text


def parse_rendezvous(value: Any) -> Any:
    """HOST:PORT."""
    found = re.fullmatch(r"[^\s/:]+:([0-9]{1,5})", value) if isinstance(value, str) else None
    if isinstance(value, str) and not (found and 0 < int(found[1]) < 65536):
        raise ValueError(f"{value!r} is no place to meet; write HOST:PORT, the host one of the machines")
    return value


NO_MIRRORS = {
    "memory", "http", "https", "data", "git", "github", "gist", "dvc", "wandb", "reference", "zip", "tar", "libarchive",
    "dir", "generic", "dask", "jlab", "jupyter", "pyscript", "cached", "blockcache", "filecache", "simplecache",
    "asynclocal", "async_wrapper", "asyncwrapper",
}  # fmt: skip
"""Schemes of fsspec for what ends with its process, can only be read, or is another place in disguise."""


def explain_scheme_fault(url: str) -> str:
    """Why nothing of this scheme can be a mirror, in words; empty: something may."""
    if (scheme := url.split(":", 1)[0]) not in NO_MIRRORS:
        return ""
    return (
        f"{scheme}: is no place for a mirror: other machines could not write and read there; take a shared folder, "
        "s3://, gs://, az:// or sftp://"
    )


def parse_mirror_url(value: Any) -> Any:
    """Where a mirror may be, without a secret."""
    if isinstance(value, str) and "://" not in value and not value.startswith("/"):
        raise ValueError(f"{value!r} is no place; write a URL such as s3://BUCKET/FOLDER, or a path that begins with /")
    if isinstance(value, str) and re.match(r"[^/]*://(?:[^/@]*:[^/@]*@|[^?#]*\?)", value):
        raise ValueError(
            "holds a password or a query, and params.yaml is kept with the run for everybody to read; leave it out and "
            "give credentials in the environment or in the library's own files"
        )
    if isinstance(value, str) and (fault := explain_scheme_fault(value)):
        raise ValueError(fault)
    return value


def parse_rate(value: Any) -> Any:
    """Bytes a second, or null."""
    return _parse_bytes_or(value, ", or null")


LEAST_LOG_BYTES = 4096
"""Room for one record with what it is about."""


def parse_log_bytes(value: Any) -> Any:
    """The size of a log file."""
    size = _parse_bytes_or(value, "")
    if isinstance(size, int) and not isinstance(size, bool) and size < LEAST_LOG_BYTES:
        raise ValueError(f"{value!r} is too little for one line of a log; write at least {LEAST_LOG_BYTES}")
    return size


def _parse_bytes_or(value: Any, otherwise: str) -> Any:
    value = parse_number(value)
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value, "")
    except SettingsError:
        raise ValueError(f"{value!r} is no number of bytes; write 20MB, 512KiB or a number{otherwise}") from None


def parse_tracking_server(value: Any) -> Any:
    """The address of an MLflow server, without a secret."""
    if isinstance(value, str) and re.match(r"[^/]*://[^/@]*@", value):
        raise ValueError(
            "holds a user or a password, and params.yaml is no place for them; put them into MLFLOW_TRACKING_USERNAME "
            "and MLFLOW_TRACKING_PASSWORD"
        )
    if isinstance(value, str) and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", value):
        raise ValueError(f"{value!r} is no address of an MLflow server; write http://HOST:PORT or https://HOST")
    return value


def parse_metrics_file(value: Any) -> Any:
    """An absolute path that node_exporter would read."""
    if isinstance(value, str) and not (value.startswith("/") and re.search(r"[^/]\.prom$", value)):
        raise ValueError(f"{value!r} is no file that node_exporter reads; write an absolute path that ends in .prom")
    return value


# Settings of `machine.endpoint`: how servers of models are asked, whoever asks them.


class EndpointSettings(Section):
    """How OpenAI-compatible servers (vLLM, llama.cpp and others) are asked; their key is in RATCHET_ENDPOINT_KEY."""

    requests: PositiveCount = 8
    """Requests in flight at once."""
    answer_s: Positive = 600.0
    """Longest wait for one whole answer, in seconds; then the request is sent again."""
    tries: PositiveCount = 8
    """Of one request, after 429, 5xx, broken connections, stalls and answers that are none; then exit 75."""
    pause_s: Positive = 1.0
    """Wait before the second try, in seconds; doubled with each, to 60 at most, or as long as the server asks for."""
