"""A fork server, whose processes start in tenths of a second, because it has imported the libraries of the tests."""

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

IMPORTED = [
    "torch.distributed", "ratchet.models.gradient_compression", "mlflow.store.tracking.sqlalchemy_store",
    "ratchet.tracking.mlflow.client",
]  # fmt: skip
"""A test process has one fork server, which imports what the first user asks for. So all users ask for all of it."""


def fork_server_context() -> ForkServerContext:
    """Return the multiprocessing context of the fork server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()  # its processes get the environment of this moment, not that of their first test
    return context
