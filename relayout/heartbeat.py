"""Heartbeat: which ranks still live, told through the store, because a broken connection names nobody.

``with Heartbeat(store, rank, world_size) as heartbeat: ...``; every rank of the world starts one. A background thread
with a store connection of its own counts up under the rank's key and reads the others'. ``lost()`` names ranks whose
count stands still; ``publish`` tells the other ranks why this one stopped; ``guard`` calls back when either happens.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import Store, TCPStore

from relaymeter.errors import RankLost

__all__ = ["Failure", "Heartbeat"]

_DONE = "done"


@dataclass(frozen=True)
class Failure:
    """Why ``rank`` stopped, as it published it: ``kind`` is "lost" (of ``ranks``), "timeout" or "error"."""

    rank: int
    kind: str
    ranks: tuple[int, ...]
    text: str


class Heartbeat:
    """Beats from ``start`` (or ``with``) until ``stop``. All times in seconds.

    ``store_host`` is the rank whose process runs the store's server, None where it runs elsewhere: when the store
    cannot be reached that rank counts as lost. ``lost_after_s`` must be longer than any rank's longest stretch that
    lets no other Python thread run.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        interval_s: float = 0.25,
        lost_after_s: float = 5.0,
        *,
        store_host: int | None = 0,
        prefix: str = "relaymeter/heartbeat",
    ) -> None:
        self.rank = rank
        self.interval_s = interval_s
        self.lost_after_s = lost_after_s
        self._others = [other for other in range(world_size) if other != rank]
        self._store_host = store_host
        self._prefix = prefix
        self._client = _own_connection(store)
        self._client.set_timeout(datetime.timedelta(seconds=max(1.0, lost_after_s)))
        self._lock = threading.Lock()
        self._count = 0
        self._known: set[int] = set()
        self._done: set[int] = set()
        self._value: dict[int, bytes] = {}
        self._changed: dict[int, float] = {}
        self._beats: dict[int, int] = dict.fromkeys(self._others, 0)
        self._read_at = 0.0
        self._unreachable = False
        self._failure: Failure | None = None
        self._to_publish: Failure | None = None
        self._published = threading.Event()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._on_trouble: Callable[[], None] | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Heartbeat:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def settle_s(self) -> float:
        """The longest that ``lost()`` takes."""
        return self.lost_after_s + 4 * self.interval_s

    def start(self) -> None:
        """Begin to beat. Every rank calls it, at about the same time; no rank waits for another."""
        if self._threads:
            return
        now = time.monotonic()
        self._read_at = now
        self._changed = dict.fromkeys(self._others, now)
        # daemons: a request to a frozen store never returns, and must not hold up the end of the process
        for body in (self._beat_on, self._watch):
            thread = threading.Thread(target=body, name=f"relaymeter-heartbeat-{body.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Say that this rank ended on purpose and stop beating. Returns soon even where the store does not answer."""
        self._stopping.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(1.0)
        self._threads = []

    def lost(self) -> tuple[int, ...]:
        """Ranks that no longer beat, ascending; ranks that ended on purpose are not lost.

        Takes its own time: returns once every other rank has either been seen to beat twice or been silent for
        ``lost_after_s``. Where the store is out of reach its host is the lost rank.
        """
        begin = time.monotonic()
        with self._lock:
            before = dict(self._beats)
        while True:
            found = self._silent()
            with self._lock:
                # the first beat that is read may have been written before the call, by a rank that died since
                unsure = {r for r in self._others if self._beats[r] < before[r] + 2 and r not in self._done}
            if self._store_is_silent() or not unsure - set(found) or time.monotonic() > begin + self.settle_s:
                return found
            time.sleep(min(0.02, self.interval_s))

    def failure(self) -> Failure | None:
        """The first failure that any rank published, this one included, or None."""
        with self._lock:
            return self._failure

    def trouble(self) -> bool:
        """Whether a rank published a failure or is silent, as far as is known now. Does not wait."""
        return self.failure() is not None or bool(self._silent())

    def poll(self) -> None:
        """Raise RankLost, without ranks, where ``trouble``: for the waits of an exchange."""
        if self.trouble():
            raise RankLost("another rank stopped")

    def await_failure(self, limit_s: float) -> Failure | None:
        """Like ``failure``, but waits up to ``limit_s`` for one to be published."""
        deadline = time.monotonic() + limit_s
        while (found := self.failure()) is None and time.monotonic() < deadline:
            time.sleep(min(0.02, self.interval_s))
        return found

    def publish(self, kind: str, ranks: tuple[int, ...], text: str) -> None:
        """Tell every rank why this one stopped; only the first failure of a world is kept. Waits at most briefly."""
        if self._store_is_silent():
            return
        with self._lock:
            self._to_publish = Failure(self.rank, kind, ranks, text)
            self._published.clear()
        self._wake.set()
        self._published.wait(4 * self.interval_s)

    @contextlib.contextmanager
    def guard(self, on_trouble: Callable[[], None]) -> Iterator[None]:
        """Call ``on_trouble`` once, from another thread, when a rank is lost or publishes a failure in this context.

        Inside another such context the inner one's call stands, and the outer one's again once the inner has ended.
        """
        with self._lock:
            outer, self._on_trouble = self._on_trouble, on_trouble
        try:
            yield
        finally:
            with self._lock:
                self._on_trouble = outer

    def _key(self, what: int | str) -> str:
        return f"{self._prefix}/{what}"

    def _store_is_silent(self) -> bool:
        with self._lock:
            return self._unreachable or time.monotonic() - self._read_at > self.lost_after_s

    def _silent(self) -> tuple[int, ...]:
        """Ranks silent for longer than ``lost_after_s`` at the last reading; the store's host where that is too old."""
        if self._store_is_silent():
            return () if self._store_host is None or self._store_host == self.rank else (self._store_host,)
        with self._lock:
            late = [r for r in self._others if self._read_at - self._changed[r] > self.lost_after_s]
            return tuple(r for r in late if r not in self._done)

    def _beat_on(self) -> None:
        try:
            while not self._stopping.is_set():
                self._beat()
                self._wake.wait(self.interval_s)
                self._wake.clear()
            self._client.set(self._key(self.rank), _DONE)
        except RuntimeError:  # DistStoreError and DistNetworkError among them: the server is gone
            with self._lock:
                self._unreachable = not self._stopping.is_set()

    def _beat(self) -> None:
        self._count += 1
        self._client.set(self._key(self.rank), str(self._count))
        with self._lock:
            pending, self._to_publish = self._to_publish, None
        if pending is not None:
            self._client.compare_set(self._key("failure"), "", json.dumps(asdict(pending)))
            self._published.set()
        for rank in self._others:
            if rank not in self._known and self._client.check([self._key(rank)]):
                self._known.add(rank)
        known = sorted(self._known)
        values = self._client.multi_get([self._key(rank) for rank in known]) if known else []
        failure = self._failure
        if failure is None and self._client.check([self._key("failure")]):
            entry = json.loads(self._client.get(self._key("failure")))
            failure = Failure(entry["rank"], entry["kind"], tuple(entry["ranks"]), entry["text"])
        now = time.monotonic()
        with self._lock:
            self._read_at = now
            self._failure = failure
            for rank, value in zip(known, values, strict=True):
                if self._value.get(rank) != value:
                    self._value[rank] = value
                    self._changed[rank] = now
                    self._beats[rank] += 1
                (self._done.add if value == _DONE.encode() else self._done.discard)(rank)

    def _watch(self) -> None:
        while not self._stopping.wait(self.interval_s):
            if not self.trouble():
                continue
            with self._lock:  # held during the call: a guard that has ended is never called for
                call, self._on_trouble = self._on_trouble, None
                if call is not None:
                    call()


def _own_connection(store: Store) -> Store:
    """A client of the same store with a connection of its own: requests on one connection wait for each other."""
    clone = getattr(store, "clone", None)
    if clone is not None:
        cloned: Store = clone()
        return cloned
    if isinstance(store, TCPStore):
        return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    return store
