"""Runs llama.cpp's own HTTP server in a separate process: `python -m ratchet.models.runtimes.llama_process MODEL.gguf`.

Imports neither torch nor transformers. The wheel `xllamacpp` contains llama.cpp (its `server` with all endpoints), so
neither a compiler nor an installed `llama-server` is needed. The server listens only on 127.0.0.1. When it is ready, it
prints its address as one line of JSON on standard output: {"address": "http://127.0.0.1:41234"}. llama.cpp's errors go
to standard error.

Properties of xllamacpp 2026.10 (docs of llama.cpp: tools/server/README.md):
- `Server(parameters)` returns when the model is loaded, and holds Python's GIL until then, so no other thread runs. It
  logs why a model cannot be loaded, and raises RuntimeError without a reason.
- Its log is written by its own thread: the last lines are lost if the process ends immediately.
- It installs no signal handlers: SIGTERM ends this process immediately, even during loading.
- The context is rounded up to a multiple of 256 tokens.
- Flash attention, enabled by default where available, computes in F16 on CPUs for every cache type, so an F32 cache
  alone changes nothing. Without flash attention, log-probabilities are off by 8e-6 nats instead of 0.007 (2.5M
  parameters in F32).
- By default a web page of any origin may send requests, answers are kept in up to 8 GiB of memory for later prompts,
  and the context shrinks until it fits the machine (`fit_params`). All three are disabled here.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

CACHES = ("f32", "f16")
LOG_ERRORS_ONLY = 1
"""llama.cpp's verbosity level for errors only."""
EXIT_NOT_STARTED = 3
LOG_TIMEOUT_S, LOG_STEP_S = 2.0, 0.1


def build_server_parameters(options: argparse.Namespace) -> Any:
    """Build llama.cpp's settings; all settings that are not set here keep the server's defaults."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(options.model)
    parameters.model_alias = {options.model.stem}  # otherwise replies contain the path
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = options.port
    parameters.n_ctx = options.context * options.parallel
    parameters.n_parallel = options.parallel
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = options.threads
    parameters.n_gpu_layers = 0  # so that a wheel for GPUs gives the same results
    parameters.fit_params = False
    parameters.cache_ram_mib = 0
    parameters.cache_idle_slots = False
    parameters.n_ctx_checkpoints = 0
    parameters.verbosity = LOG_ERRORS_ONLY
    parameters.offline = True
    parameters.ui = parameters.endpoint_slots = parameters.endpoint_props = False
    parameters.cors_origins, parameters.cors_credentials = "", False
    if options.lora:
        # With scale 0 no adapter is active by itself: each request names those that it wants. (The option
        # lora_init_without_apply does not prevent that requests without a choice use all of them.)
        parameters.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(path), 0.0) for path in options.lora]
    if options.cache == "f32":
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return parameters


def _parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ratchet.models.runtimes.llama_process", description=__doc__)
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--context", type=int, default=1024, help="maximum tokens of a conversation")
    parser.add_argument("--cache", choices=CACHES, default="f16", help="type of cached keys and values")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--parallel", type=int, default=1, help="conversations processed together")
    parser.add_argument("--lora", type=Path, action="append", default=[], help="a .gguf adapter; may be repeated")
    parser.add_argument("--with-parent", action="store_true", help="exit when standard input closes")
    return parser.parse_args(arguments)


def _exit_when_stdin_closes() -> None:
    while os.read(0, 4096):  # not sys.stdin, because Python aborts at exit while a thread reads from it
        pass
    os._exit(0)  # the parent process is gone


def _flush_llama_log() -> None:
    """Wait for llama.cpp's log thread, because lines that it has not written are lost when the process ends."""
    size, deadline_s = 0, time.monotonic() + LOG_TIMEOUT_S
    while time.monotonic() < deadline_s:
        time.sleep(LOG_STEP_S)
        previous, size = size, os.fstat(2).st_size
        if size and size == previous:
            return


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or, with --with-parent, until standard input closes."""
    options = _parse_arguments(arguments)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback on Ctrl-C
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with the address line
    if options.with_parent:
        threading.Thread(target=_exit_when_stdin_closes, daemon=True).start()
    import xllamacpp

    try:
        server = xllamacpp.Server(build_server_parameters(options))
    except RuntimeError as error:  # the reason is in the log on standard error
        _flush_llama_log()
        sys.stderr.write(f"{error}\n")
        return EXIT_NOT_STARTED
    output.write(json.dumps({"address": server.listening_address}) + "\n")
    output.close()
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
