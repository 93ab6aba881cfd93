"""llama.cpp's own HTTP server in a process of its own: `python -m ratchet.models.runtimes.llama_process MODEL.gguf`.

No torch and no transformers: the wheel `xllamacpp` carries llama.cpp (its `server` with all endpoints), so neither a
compiler nor an installed `llama-server` is needed. It listens on 127.0.0.1 and nowhere else. When it is ready, one line
of JSON on standard output says where: {"address": "http://127.0.0.1:41234"}; what llama.cpp has to say goes to standard
error, errors only.

Found in xllamacpp 2026.10 (docs of llama.cpp: tools/server/README.md):
- `Server(parameters)` returns when the model is loaded, and holds Python's lock until then: nothing else runs here
  meanwhile. What it cannot load it logs, and raises RuntimeError without a reason.
- Its log is written by a thread of its own: what is said last is lost if the process ends at once.
- It installs no signal handlers: SIGTERM ends this process at once, even while it loads.
- The context is rounded up to a multiple of 256 tokens.
- Flash attention, on by default where it can be, computes in F16 on CPUs, whatever the cache holds: an F32 cache
  alone changes nothing, without flash attention log-probabilities are off by 8e-6 nats instead of .007 (2.5M
  parameters in F32).
- By default a web page of any origin may ask it, answers are kept in up to 8 GiB of memory for later prompts, and the
  context is shrunk to what fits the machine (`fit_params`): all three are off here.
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
QUIET = 1
"""llama.cpp's verbosity: errors only."""
EXIT_NOT_STARTED = 3
LOG_S, LOG_STEP_S = 2.0, 0.1


def build_server_parameters(options: argparse.Namespace) -> Any:
    """llama.cpp's settings; whatever is not named here has the defaults of its server."""
    import xllamacpp

    found = xllamacpp.CommonParams()
    found.model.path = str(options.model)
    found.model_alias = {options.model.stem}  # else answers name the path, which is nobody's business
    found.hostnames = ["127.0.0.1"]
    found.port = options.port
    found.n_ctx = options.context * options.parallel
    found.n_parallel = options.parallel
    found.cpuparams.n_threads = found.cpuparams_batch.n_threads = options.threads
    found.n_gpu_layers = 0  # what is measured is the same with a wheel for GPUs
    found.fit_params = False
    found.cache_ram_mib = 0
    found.cache_idle_slots = False
    found.n_ctx_checkpoints = 0
    found.verbosity = QUIET
    found.offline = True
    found.ui = found.endpoint_slots = found.endpoint_props = False
    found.cors_origins, found.cors_credentials = "", False
    if options.cache == "f32":
        found.cache_type_k = found.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        found.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return found


def _parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ratchet.models.runtimes.llama_process", description=__doc__)
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each conversation")
    parser.add_argument("--cache", choices=CACHES, default="f16", help="type of keys and values that are kept")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--parallel", type=int, default=1, help="conversations at once")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input does")
    return parser.parse_args(words)


def _exit_when_stdin_closes() -> None:
    while os.read(0, 4096):  # not sys.stdin: Python aborts when it ends while a thread reads that
        pass
    os._exit(0)  # whoever wanted answers is gone


def _flush_llama_log() -> None:
    """llama.cpp writes its log from a thread, and what that still has is lost when the process ends."""
    written, deadline_s = 0, time.monotonic() + LOG_S
    while time.monotonic() < deadline_s:
        time.sleep(LOG_STEP_S)
        before, written = written, os.fstat(2).st_size
        if written and written == before:
            return


def main(words: list[str] | None = None) -> int:
    """Serve until SIGTERM (or, with --with-parent, the end of standard input)."""
    options = _parse_arguments(words)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback when a person types Ctrl-C
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library that prints must not spoil the one line that is read
    if options.with_parent:
        threading.Thread(target=_exit_when_stdin_closes, daemon=True).start()
    import xllamacpp

    try:
        server = xllamacpp.Server(build_server_parameters(options))
    except RuntimeError as error:  # the reason is in the log, which goes to standard error
        _flush_llama_log()
        sys.stderr.write(f"{error}\n")
        return EXIT_NOT_STARTED
    answer.write(json.dumps({"address": server.listening_address}) + "\n")
    answer.close()
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
