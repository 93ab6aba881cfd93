"""A real S3 server for tests: the server of moto in its own process on loopback."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

START_S = 60.0
KEY_ID = "AKIARATCHETTESTKEY00"
SECRET = "planted+secret/that-must-appear-nowhere0"  # noqa: S105 (of a server on loopback that lives for seconds)
TOKEN = "planted-session-token-that-must-appear-nowhere"  # noqa: S105


class S3Server:
    """Buckets on `endpoint`. `files` and `digest` query the server directly and bypass any proxy in front of it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"
        self._names = (f"bucket-{number}" for number in count())

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """Return the environment variables with which a client finds this server. `endpoint` replaces its address, for
        example by that of a proxy."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_SESSION_TOKEN": TOKEN,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    @property
    def client(self) -> Any:
        """Return a boto3 client with a direct connection to the server."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY_ID,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def bucket(self) -> str:
        """Create an empty bucket and return its name. The URL of a replica in it is `s3://NAME/any/prefix`."""
        name = next(self._names)
        self.client.create_bucket(Bucket=name)
        return name

    def create_user(self, name: str, policy: Mapping[str, Any]) -> dict[str, str]:
        """Create a user with a policy. Return the environment variables with the user's keys."""
        import boto3

        iam = boto3.client(
            "iam", endpoint_url=self.endpoint, aws_access_key_id=KEY_ID, aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )  # fmt: skip
        iam.create_user(UserName=name)
        iam.put_user_policy(UserName=name, PolicyName="tenant", PolicyDocument=json.dumps(policy))
        key = iam.create_access_key(UserName=name)["AccessKey"]
        own = {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
        return {name: value for name, value in self.environment().items() if name != "AWS_SESSION_TOKEN"} | own

    def enforce_policies(self) -> None:
        """Refuse from now on what no policy allows. Requests with other keys than those of users are refused too."""
        request = urllib.request.Request(  # noqa: S310 (our own loopback)
            f"{self.endpoint}/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(request, timeout=10).close()  # noqa: S310 (our own loopback)

    def files(self, bucket: str) -> dict[str, bytes]:
        """Return all objects in a bucket, by key, without those that are removed during the call."""
        client, found = self.client, {}
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        for key in keys:
            with suppress(client.exceptions.NoSuchKey):
                found[key] = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return found

    def digest(self, bucket: str, key: str) -> str | None:
        """Return the SHA-256 of an object as the server stores it, or None if the object does not exist."""
        content = self.files(bucket).get(key)
        return None if content is None else hashlib.sha256(content).hexdigest()


@contextmanager
def serve() -> Iterator[S3Server]:
    """Start a server without buckets. It stops at the end of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, str(Path(__file__).with_name("moto_process.py")), str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(tempfile.gettempdir()))
        try:
            deadline = time.monotonic() + START_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    log.seek(0)
                    told = "" if process.poll() is None else log.read().decode(errors="replace")
                    assert process.poll() is None and time.monotonic() < deadline, told
                    time.sleep(0.05)
            yield S3Server(port)
        finally:
            process.kill()
            process.wait()
