"""The queue of whole runs, on SQLite and on Postgres."""

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import postgres
from ratchet.errors import DataError, StorageError
from ratchet.runs.job_queue import Job, JobQueue, JobRequest
from ratchet.storage.layout import ProjectLayout

LEASE_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    with postgres.serve() as started:
        yield started


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str | None:
    if request.param == "sqlite":
        return None
    started: postgres.Server = request.getfixturevalue("server")
    return started.database()


@pytest.fixture
def queue(project: ProjectLayout, url: str | None) -> JobQueue:
    return JobQueue(project, url, "support")


def submit(queue: JobQueue, **values: Any) -> Job:
    return queue.submit(JobRequest(params="train: {}\n", **values))


def claim(queue: JobQueue, worker: str = "node/1", lease_s: float = LEASE_S) -> Job:
    job = queue.claim(worker, lease_s)
    assert job is not None
    return job


def wait_until_claimed(queue: JobQueue, worker: str) -> Job:
    """Claim a job as soon as a lease or a delay has ended."""
    while True:
        job = queue.claim(worker, LEASE_S)
        if job is not None:
            return job
        time.sleep(0.02)


def test_ended_jobs_are_listed_last_and_the_newest_first(queue: JobQueue) -> None:
    for _ in range(2):
        submit(queue)
        assert queue.finish(claim(queue), "done", "")
    submit(queue)
    assert [job.id for job in queue.list_jobs()] == [3, 2, 1]


def test_jobs_are_claimed_by_priority_and_then_in_their_order(queue: JobQueue) -> None:
    first, second, urgent = submit(queue), submit(queue), submit(queue, priority=5)
    assert [claim(queue).id for _ in range(3)] == [urgent.id, first.id, second.id]
    assert queue.claim("node/1", LEASE_S) is None
    assert queue.count_states() == {"waiting": 0, "running": 3, "done": 0, "failed": 0, "cancelled": 0}


def test_many_workers_claim_each_job_once(project: ProjectLayout, url: str | None) -> None:
    queue = JobQueue(project, url, "support")
    numbers = {submit(queue).id for _ in range(24)}

    def work(number: int) -> list[int]:
        own, found = JobQueue(project, url, "support"), []
        while (job := own.claim(f"node/{number}", LEASE_S)) is not None:
            found.append(job.id)
            assert own.finish(job, "done", "")
        return found

    with ThreadPoolExecutor(6) as pool:
        claimed = [number for found in pool.map(work, range(6)) for number in found]
    assert sorted(claimed) == sorted(numbers)


def test_processes_that_start_at_once_create_the_table_once(project: ProjectLayout, url: str | None) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=JobQueue, args=(project, url, "support")) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6


def test_a_job_of_a_vanished_worker_is_claimed_again_and_the_old_worker_is_fenced_off(queue: JobQueue) -> None:
    submit(queue)
    lost = claim(queue, "node/1", lease_s=0.05)
    assert queue.renew(lost, 0.05)
    taken = wait_until_claimed(queue, "node/2")
    assert (taken.id, taken.attempts, taken.token, taken.worker) == (lost.id, 2, 2, "node/2")
    assert not queue.renew(lost, LEASE_S)
    assert not queue.set_run(lost, "run-of-the-lost-worker")
    assert not queue.release(lost, "late")
    assert not queue.finish(lost, "done", "late")
    assert queue.set_run(taken, "run")
    assert queue.finish(taken, "done", "")
    [job] = queue.list_jobs()
    assert (job.state, job.run_id, job.note) == ("done", "run", "")


def test_a_job_whose_attempts_are_used_up_fails_and_may_be_retried(queue: JobQueue) -> None:
    submit(queue, max_attempts=2)
    assert queue.release(claim(queue), "first", delay_s=0.0)
    assert queue.release(claim(queue), "second", delay_s=0.0)
    [job] = queue.list_jobs()
    assert (job.state, job.attempts, job.note) == ("failed", 2, "second")
    assert queue.claim("node/1", LEASE_S) is None
    assert queue.retry(job.id).state == "waiting"
    assert claim(queue).attempts == 1


def test_a_worker_that_vanishes_in_the_last_attempt_leaves_a_failed_job(queue: JobQueue) -> None:
    submit(queue, max_attempts=1)
    claim(queue, "node/7", lease_s=0.01)
    while queue.count_states()["failed"] == 0:
        assert queue.claim("node/8", LEASE_S) is None
    assert queue.list_jobs()[0].note == "the worker of the last attempt vanished: node/7"


def test_a_stop_on_request_is_no_attempt_and_a_delay_is_respected(queue: JobQueue) -> None:
    submit(queue)
    assert queue.release(claim(queue), "stopped", is_counted=False)
    job = claim(queue)
    assert job.attempts == 1
    assert queue.release(job, "failed", delay_s=3600.0)
    assert queue.claim("node/1", LEASE_S) is None
    assert queue.count_states()["waiting"] == 1


def test_a_cancelled_job_is_taken_from_its_worker(queue: JobQueue) -> None:
    submitted = submit(queue)
    job = claim(queue)
    assert queue.cancel(submitted.id).state == "cancelled"
    assert not queue.renew(job, LEASE_S)
    with pytest.raises(
        DataError, match=f"job {job.id} of queue support is cancelled; expected a job that is waiting or"
    ):
        queue.cancel(job.id)
    with pytest.raises(DataError, match="job 99 of queue support does not exist"):
        queue.retry(99)


def test_queues_in_one_database_are_separate(project: ProjectLayout, url: str | None) -> None:
    submit(JobQueue(project, url, "support"))
    other = JobQueue(project, url, "other")
    assert other.claim("node/1", LEASE_S) is None
    assert other.list_jobs() == []


def test_a_database_that_does_not_answer_is_one_message(project: ProjectLayout) -> None:
    project.queue.mkdir()
    project.job_queue.write_text("no database", encoding="utf-8")
    with pytest.raises(StorageError, match=r"queue support in .*jobs\.db: file is not a database; check that it"):
        JobQueue(project, None, "support")
