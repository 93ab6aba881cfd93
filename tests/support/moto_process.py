"""The server of moto, with atomic conditional writes and conditions of policies, as S3 has them.

Moto checks a condition and then writes without a lock, so that of two writers in two threads both may succeed. Of a
policy, it checks actions and resources, but for a deletion the bucket instead of each object. Of conditions, this
module checks the only one that the tests use, the prefix of a listing (Amazon S3 User Guide, "Bucket policy examples
using condition keys").

    python moto_process.py PORT
"""

import io
import re
import sys
import threading
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from flask import request
from moto.iam.access_control import IAMPolicyStatement, IAMRequestBase, S3IAMRequest
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


def has_allowed_prefix(statement: IAMPolicyStatement, _: object) -> bool:
    """Return whether a listing has a prefix that the condition of a statement allows."""
    condition = statement._statement.get("Condition")
    prefix = request.args.get("prefix", "")
    return condition is None or any(fnmatchcase(prefix, text) for text in condition["StringLike"]["s3:prefix"])


def check_each_object(iam: S3IAMRequest, resource: str) -> None:
    """Check the permission to delete each object of the request; for other requests, that for the resource."""
    keys = re.findall(r"<Key>([^<]+)</Key>", request.get_data(as_text=True)) if "delete" in request.args else []
    for name in [f"{resource.rstrip('/')}/{key}" for key in keys] or [resource]:
        IAMRequestBase.check_action_permitted(iam, name)


if __name__ == "__main__":
    S3IAMRequest.check_action_permitted = check_each_object  # type: ignore[method-assign]
    IAMPolicyStatement._check_conditions = has_allowed_prefix  # type: ignore[method-assign]
    application = AtomicConditions(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=True, request_handler=MotoRequestHandler)
