"""What is removed from a mirror, and what a holder that was frozen while it did so can still do."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import snapshots
from machines import NAMES, Node, settings, store, wait_until
from ratchet import files
from ratchet.errors import MirrorError
from ratchet.mirror.store import Store
from ratchet.mirror.tidy import Tidied, Tidier
from snapshots import contents


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Node]:
    """A holder that has copied the steps 2 and 4."""
    node = Node(tmp_path, "first", settings(tmp_path)).take()
    for step in (2, 4):
        node.save(step)
        node.settled()
    yield node
    node.leave()


def objects_there(root: Path) -> set[str]:
    return {name.rsplit("/", 1)[-1] for name in store(root).list(NAMES.folder("objects"))}


def objects_of(node: Node, step: int) -> set[str]:
    return {digest for digest, _ in files.read_manifest(node.paths.checkpoint(step)).files.values()}


class Frozen:
    """Tidies up in a thread, and is frozen right before the second thing is removed: it has been asked for already."""

    def __init__(self, root: Path, holder: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asleep, self._wakes = threading.Event(), threading.Event()
        self.raised: BaseException | None = None
        self.removed: list[str] = []
        slow = store(root)
        remove = slow._engine.remove

        def freezing(name: str) -> None:
            if self.removed:
                self.asleep.set()
                self._wakes.wait()
            self.removed.append(name)
            remove(name)

        monkeypatch.setattr(slow._engine, "remove", freezing)
        self._tidier = Tidier(slow, NAMES, 1, holder.keeper._lease)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.asleep.wait()

    def _run(self) -> None:
        try:
            self._tidier.tidy()
        except BaseException as error:
            self.raised = error

    def wake(self) -> None:
        self._wakes.set()
        self._thread.join()


def test_a_holder_that_was_frozen_while_it_removed_things_removes_no_more_than_one(
    tmp_path: Path, first: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = Frozen(tmp_path, first, monkeypatch)
    first.keeper._lease._ended.set()  # with its signs of life
    first.keeper._upload.end()
    second = Node(tmp_path, "second", settings(tmp_path)).take()
    assert snapshots.newest(second.paths) == (4, []), "what is restored is on nobody's list"
    second.save(2)  # the very content that the first is about to remove
    second.save(6, best=2)
    second.settled()
    assert objects_there(tmp_path) >= objects_of(second, 2) | objects_of(second, 6)
    frozen.wake()
    assert isinstance(frozen.raised, MirrorError)
    assert "in doubt" in str(frozen.raised)
    assert len(frozen.removed) == 2
    second.save(8, best=2)
    second.settled()
    wait_until(lambda: objects_there(tmp_path) >= objects_of(second, 2) | objects_of(second, 8))
    second.settled()
    made = contents(second.paths.checkpoint(2))
    second.leave()
    third = Node(tmp_path, "third", settings(tmp_path)).take()
    assert snapshots.newest(third.paths) == (8, [])
    assert contents(third.paths.checkpoint(2)) == made
    third.leave()


def test_what_somebody_removed_is_missed_and_sent_again(tmp_path: Path, first: Node) -> None:
    first.save(6, best=2)
    first.settled()
    gone = sorted(objects_of(first, 2) - objects_of(first, 4))[0]
    store(tmp_path).remove([NAMES.object(gone)])
    first.save(8, best=2)
    first.settled()
    wait_until(lambda: gone in objects_there(tmp_path))
    assert any("sent again" in text for text in first.texts("notice"))


def test_nothing_is_broken_where_all_is_there(tmp_path: Path, first: Node) -> None:
    first.keeper._upload.end()
    tidier = Tidier(store(tmp_path), NAMES, 1, first.keeper._lease)
    only = objects_of(first, 2) - objects_of(first, 4)
    assert tidier.tidy() == Tidied(1 + len(only), frozenset())
    assert tidier.tidy() == Tidied(0, frozenset())
    assert objects_there(tmp_path) == objects_of(first, 4)


def test_a_request_to_remove_is_asked_for_at_each_try(tmp_path: Path) -> None:
    here: Store = store(tmp_path)
    here.write("a", b"1")
    here.write("b", b"2")
    left = iter([None])

    def require() -> None:
        if next(left, "over") == "over":
            raise MirrorError("not any more")

    with pytest.raises(MirrorError, match="not any more"):
        here.remove(["a", "b"], require)
    assert sorted(here.list("")) == ["b"]
