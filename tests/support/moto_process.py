"""The server of moto, with atomic conditional writes, as S3 has them.

Moto checks a condition and then writes without a lock, so that of two writers in two threads both may succeed.

    python moto_process.py PORT
"""

import io
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

CONDITIONS = {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"}


class AtomicConditions:
    """An application that answers one request with a condition at a time."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application, self._lock = application, threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if CONDITIONS.isdisjoint(environ):
            return self._application(environ, start_response)
        if "wsgi.input_terminated" not in environ:  # a slow body must not hold the lock
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            environ["wsgi.input"] = io.BytesIO(body)
        with self._lock:
            return list(self._application(environ, start_response))


if __name__ == "__main__":
    application = AtomicConditions(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=True, request_handler=MotoRequestHandler)
