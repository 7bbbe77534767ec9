from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore

from relaymeter.relayout.heartbeat import Heartbeat


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def beat(store: TCPStore, rank: int, world_size: int = 3) -> Heartbeat:
    return Heartbeat(store, rank, world_size, interval_s=0.05, lost_after_s=0.5)


def test_living_and_finished_ranks_are_not_lost_and_silent_ones_are(store: TCPStore) -> None:
    with beat(store, 0) as first, beat(store, 1):
        finished = beat(store, 2)
        finished.start()
        assert first.lost() == ()
        finished.stop()
        time.sleep(0.7)
        assert first.lost() == ()
    begin = time.monotonic()
    with beat(store, 0, 4) as first, beat(store, 1, 4):
        assert first.lost() == (3,)  # never seen; rank 2 said that it was done
        assert 0.4 < time.monotonic() - begin < 2


def test_a_published_failure_reaches_all_and_the_first_is_kept(store: TCPStore) -> None:
    called = threading.Event()
    with beat(store, 0, 2) as first, beat(store, 1, 2) as second:
        with second.guard(called.set):
            assert not second.trouble()
            first.publish("error", (0,), "out of luck")
            assert called.wait(2)
        second.publish("error", (1,), "later")
        found = second.await_failure(2)
        assert found is not None
        assert (found.rank, found.kind, found.ranks, found.text) == (0, "error", (0,), "out of luck")
        assert first.failure() == found


def test_a_guard_that_ended_is_not_called(store: TCPStore) -> None:
    called = threading.Event()
    with beat(store, 0, 2) as first:
        with first.guard(called.set):
            pass
        assert first.lost() == (1,)
        time.sleep(0.2)
    assert not called.is_set()


def test_the_outer_of_two_guards_stands_again_once_the_inner_has_ended(store: TCPStore) -> None:
    outer, inner = threading.Event(), threading.Event()
    with beat(store, 0, 2) as first, beat(store, 1, 2) as second, second.guard(outer.set):
        with second.guard(inner.set):
            pass
        first.publish("error", (0,), "out of luck")
        assert outer.wait(2)
    assert not inner.is_set()


def test_an_unreachable_store_counts_as_its_host_lost() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    with Heartbeat(client, 1, 3, interval_s=0.05, lost_after_s=0.5, store_host=0) as heartbeat:
        del server
        assert heartbeat.lost() == (0,)
        begin = time.monotonic()
        heartbeat.publish("lost", (0,), "nobody listens")
        assert time.monotonic() - begin < 1
