"""An upload in parts repeats only the part that failed, and verifies the object."""

import json
import re
import threading
from pathlib import Path

import pytest

from behind_proxy import ONCE, Replica, reads
from faulty_proxy import Fault, Request
from ratchet.errors import ReplicaError
from ratchet.runs.replication import object_storage
from ratchet.runs.replication.object_storage import PART_BYTES
from s3_server import S3Server


def test_an_outage_in_mid_upload_costs_no_part_that_has_arrived(replica: Replica) -> None:
    parts = object_storage.PARTS_AT_ONCE + 2
    name, path, entry = replica.file(parts * PART_BYTES)
    proxy, last = replica.proxy, threading.Event()

    def last_part(request: Request) -> bool:
        if f"partNumber={parts}&" in request.target and not last.is_set():
            last.set()
            proxy.down = True  # at least two parts have arrived, because the others fill all places
        return False

    proxy.inject(Fault("status", None, last_part))
    sending = threading.Thread(target=replica.store().send, args=(name, path, entry))
    sending.start()
    while proxy.refused < 5 and sending.is_alive():
        sending.join(0.01)
    proxy.heal()
    sending.join(60)
    assert replica.holds(name) == entry[0]
    numbers = [int(found[1]) for request in proxy.seen if (found := re.search(r"partNumber=(\d+)", request.target))]
    assert sorted(set(numbers)) == list(range(1, parts + 1))
    assert len([number for number in numbers if numbers.count(number) == 1]) >= 2
    assert len([request for request in proxy.seen if request.target.endswith("?uploads=")]) == 1


def test_an_upload_that_failed_leaves_nothing_and_is_repeated(replica: Replica) -> None:
    name, path, entry = replica.file(3 * PART_BYTES)
    replica.proxy.inject(Fault("status", None, lambda request: "partNumber=3" in request.target))
    with pytest.raises(ReplicaError):
        replica.store(ONCE).send(name, path, entry)
    assert replica.holds(name) is None, "complete or absent"
    replica.proxy.heal()
    assert replica.store().send(name, path, entry) == 3 * PART_BYTES
    assert replica.holds(name) == entry[0]


def test_an_upload_that_the_service_has_forgotten_begins_again(replica: Replica) -> None:
    name, path, entry = replica.file(2 * PART_BYTES)
    client, key = replica.server.client, f"replica/{name}"
    aborted = threading.Event()

    def second_part(request: Request) -> bool:
        if "partNumber=2" in request.target and not aborted.is_set():
            aborted.set()
            for upload in client.list_multipart_uploads(Bucket=replica.bucket)["Uploads"]:
                client.abort_multipart_upload(Bucket=replica.bucket, Key=key, UploadId=upload["UploadId"])
            return True
        return False

    # The test answers in place of moto, which returns 500 for parts of an unknown upload.
    replica.proxy.inject(Fault("status", 1, second_part, status=404, code="NoSuchUpload"))
    assert replica.store().send(name, path, entry) == 2 * PART_BYTES
    assert aborted.is_set()
    assert replica.holds(name) == entry[0]


def test_a_service_of_which_nothing_is_known_is_read_back(replica: Replica) -> None:
    replica.proxy.opaque_tags = True
    name, path, entry = replica.file(60_000)
    replica.proxy.inject(Fault("flip-sent", 2, lambda request: request.body_bytes == 60_000))
    assert replica.store().send(name, path, entry) == 3 * 60_000
    assert replica.holds(name) == entry[0]
    assert [request for request in replica.proxy.seen if reads(request)]


def test_an_upload_that_cannot_be_finished_is_given_up_for_a_new_one(replica: Replica) -> None:
    name, path, entry = replica.file(2 * PART_BYTES)

    def finishes(request: Request) -> bool:
        return request.method == "POST" and "uploadId=" in request.target

    replica.proxy.inject(Fault("status", 1, finishes, status=400, code="InvalidPart"))
    assert replica.store().send(name, path, entry) == 2 * PART_BYTES
    assert replica.holds(name) == entry[0]
    assert "Uploads" not in replica.server.client.list_multipart_uploads(Bucket=replica.bucket)


def test_a_file_that_is_removed_while_it_is_sent_arrives(replica: Replica) -> None:
    name, path, entry = replica.file(2 * PART_BYTES)

    def first_part(request: Request) -> bool:
        if "partNumber=1" in request.target:
            path.unlink(missing_ok=True)
        return False

    replica.proxy.inject(Fault("status", None, first_part))
    assert replica.store().send(name, path, entry) == 2 * PART_BYTES
    assert replica.holds(name) == entry[0]
    with pytest.raises(FileNotFoundError):
        replica.store().send("objects/another", path, entry)


def test_the_rule_against_unfinished_uploads_in_the_documentation_is_one_that_the_service_takes(s3: S3Server) -> None:
    page = (Path(__file__).parents[3] / "docs" / "replicas.md").read_text(encoding="utf-8")
    command = page[page.index("--lifecycle-configuration '") :]
    rule = json.loads(command.split("'")[1])
    bucket = s3.bucket()
    s3.client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=rule)
    (there,) = s3.client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert there["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
    assert there["Status"] == "Enabled"
