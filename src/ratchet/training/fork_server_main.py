"""Entry point of a fork server: `python -m ratchet.training.fork_server_main SOCKET PARENT_PID`.

SOCKET is the descriptor of a connection with a ForkServer (runs/fork_server.py).
"""

import os
import socket
import sys

from ratchet.models import lazy_imports
from ratchet.runs import fork_server
from ratchet.runs.gpus import count_visible_gpus


def _preload() -> None:
    # torch.cuda.is_available counts devices by NVML then, which leaves CUDA usable in forks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if count_visible_gpus():  # bitsandbytes uses CUDA while it is imported
        lazy_imports.import_transformers(in_own_process=True)
        return
    lazy_imports.import_model_libraries(in_own_process=True)
    with lazy_imports.pause_garbage_collection():
        import torch.fx.experimental.symbolic_shapes  # noqa: F401  operators on the meta device import it, and sympy

        import ratchet.training.worker  # noqa: F401


if __name__ == "__main__":
    fork_server.serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), _preload)
