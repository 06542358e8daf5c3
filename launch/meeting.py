"""Where the launchers of several machines meet: a store that the first of them keeps.

torch elastic's own rendezvous numbers machines in the order in which they come, and counts restarts on each by itself.
Here machines keep the numbers that they were given, and what happened on one is known to all before any starts anew.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from common.errors import Requeue, UserError
from common.nodes import Nodes, shown_address

JOIN_SECONDS = 600.0  # for machines that are started one after another, or come back
_ANSWER_SECONDS = 15.0  # for what the others have to tell of the same end


class Told(NamedTuple):
    """What a machine tells of the end of its workers."""

    node: int
    host: str
    verdict: dict[str, Any] | None  # None: they are done


class Meeting(RendezvousHandler):
    """torch elastic's handler for a fixed number of numbered machines."""

    def __init__(self, nodes: Nodes, nproc: int, stopped: Callable[[], bool]) -> None:
        """Args:
        nproc: workers of this machine, which must be those of every one.
        stopped: whether to give up waiting.
        """
        self.nodes, self._nproc, self._stopped = nodes, nproc, stopped
        self._kept: TCPStore | None = None  # by the first machine, for as long as its launcher lives
        self._store: Store | None = None
        self._round = -1
        self._hosts = {nodes.rank: socket.gethostname()}
        self._looked, self._deaf = 0.0, False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all machines.

        Raises:
            UserError: the address leads nowhere, the port is taken, machines that do not come or do not fit.
            Requeue: told to stop meanwhile, or the first machine's launcher is gone.
        """
        try:
            return self._join()
        except (DistNetworkError, DistStoreError):
            raise Requeue(
                f"the launcher of machine 0, at {shown_address(self.nodes.host, self.nodes.port)}, is gone; the same "
                f"command on all machines goes on"
            ) from None

    def _join(self) -> RendezvousInfo:
        store, mine = self._connected(), self.nodes.rank
        if mine == 0:
            self._round += 1
            store.set("round", str(self._round))
        else:
            # A launcher that takes the place of one that died waits until the others have noticed.
            self._until(lambda: self._begun(store), "the first machine has not begun")
            self._round = int(store.get("round"))
        here = f"{self._round}/here"
        store.set(f"{here}/{mine}", json.dumps([self._hosts[mine], self.nodes.total, self._nproc]))
        self._until(lambda: not self._missing(store), lambda: f"machines {self._missing(store)} have not come")
        for node in range(self.nodes.total):
            host, count, nproc = json.loads(store.get(f"{here}/{node}"))
            self._hosts[node] = host
            if (count, nproc) != (self.nodes.total, self._nproc):
                raise UserError(
                    f"machine {node} ({host}) was started with --nnodes {count} and {nproc} processes, this one with "
                    f"--nnodes {self.nodes.total} and {self._nproc}; start all with the same"
                )
        self._store, self._deaf = PrefixStore(f"{self._round}", store), False
        address = RendezvousStoreInfo(self.nodes.host, self._port())
        return RendezvousInfo(PrefixStore("elastic", self._store), mine, self.nodes.total, address)

    def agreed(self, name: str, value: int) -> int:
        """The first machine's value, on all of them."""
        assert self._store is not None
        if self.nodes.rank == 0:
            self._store.set(name, str(value))
        return int(self._store.get(name))

    def told(self, verdict: dict[str, Any] | None) -> list[Told]:
        """Tell how the workers here ended, and hear it of the others; those that do not answer in time are left out."""
        if self.nodes.total == 1:
            return [Told(0, self._hosts[0], verdict)]
        if verdict is None:  # whoever wants to know will find it
            self._asked(lambda: self._end(verdict), _ANSWER_SECONDS)
            return []
        told = None if self._deaf else self._asked(lambda: self._exchange(verdict), 2 * _ANSWER_SECONDS + 5)
        told = told or {self.nodes.rank: verdict}
        return [Told(node, self._hosts[node], told[node]) for node in sorted(told)]

    def has_ended(self) -> bool:
        """Whether another machine has told that its workers have failed: those here may wait for them for ever."""
        if self.nodes.total == 1 or self._deaf or time.monotonic() - self._looked < 0.5:
            return False
        self._looked = time.monotonic()
        ends = self._asked(self._others_ended, 2.0)
        self._deaf = ends is None  # over a broken link there is nothing to hear, and workers have a watch of their own
        return bool(ends)

    def _others_ended(self) -> bool:
        store = self._store
        assert store is not None
        others = [f"end/{node}" for node in range(self.nodes.total) if node != self.nodes.rank]
        return any(json.loads(store.get(key)) is not None for key in others if store.check([key]))

    def _end(self, verdict: dict[str, Any] | None) -> None:
        assert self._store is not None
        self._store.set(f"end/{self.nodes.rank}", json.dumps(verdict))

    def _exchange(self, verdict: dict[str, Any]) -> dict[int, Any]:
        store = self._store
        assert store is not None
        self._end(verdict)

        def there(key: str) -> list[int]:
            return [node for node in range(self.nodes.total) if store.check([f"{key}/{node}"])]

        self._patiently(lambda: len(there("end")) == self.nodes.total)
        told = {node: json.loads(store.get(f"end/{node}")) for node in there("end")}
        store.set(f"read/{self.nodes.rank}", "")
        if self.nodes.rank == 0:  # who keeps the store leaves last
            self._patiently(lambda: len(there("read")) >= len([v for v in told.values() if v is not None]))
        return told

    @staticmethod
    def _patiently(so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not so() and time.monotonic() < deadline:
            time.sleep(0.05)

    @staticmethod
    def _asked(question: Callable[[], Any], seconds: float) -> Any:
        """What the store answers; None where it does not, as over a broken link.

        A thread that waits for ever keeps no process alive.
        """
        answers: list[Any] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(question())

        thread = threading.Thread(target=ask, name="meeting", daemon=True)
        thread.start()
        thread.join(seconds)
        return answers[0] if answers else None

    def _connected(self) -> Store:
        """The store of the first machine; a new connection, as the old one may be dead."""
        where, patience = self.nodes, timedelta(seconds=JOIN_SECONDS)
        try:
            socket.getaddrinfo(where.host, None)
        except OSError:
            raise UserError(
                f"{where.option}: the name {where.host} does not resolve here; give the first machine's address "
                f"instead, or mend its entry in DNS or /etc/hosts"
            ) from None
        if where.rank == 0:
            try:
                self._kept = self._kept or TCPStore(where.host, where.port, None, True, patience, False)
            except DistNetworkError:
                raise UserError(
                    f"{where.option}: cannot listen on port {where.port}: it is taken, perhaps by another run; "
                    f"choose another port, on all machines"
                ) from None
        else:
            self._until(self._answers, f"nothing answers at {shown_address(where.host, where.port)}")
        return self._kept or TCPStore(where.host, where.port, None, False, patience, False)

    def _answers(self) -> bool:
        try:
            socket.create_connection((self.nodes.host, self.nodes.port), timeout=2).close()
        except OSError:
            return False
        return True

    def _begun(self, store: Store) -> bool:
        """Whether there is a round that this machine is not in yet."""
        if not store.check(["round"]):
            return False
        number = int(store.get("round"))
        return number > self._round and not store.check([f"{number}/here/{self.nodes.rank}"])

    def _missing(self, store: Store) -> list[int]:
        return [node for node in range(self.nodes.total) if not store.check([f"{self._round}/here/{node}"])]

    def _until(self, so: Callable[[], bool], otherwise: str | Callable[[], str]) -> None:
        deadline = time.monotonic() + JOIN_SECONDS
        while not so():
            # The others have agreed to begin anew, and come; workers are then told of the signal.
            if self._stopped() and (self._round <= 0 or time.monotonic() > deadline - JOIN_SECONDS + _ANSWER_SECONDS):
                raise Requeue("stopped before all machines had come; the same command goes on")
            if time.monotonic() > deadline:
                what = otherwise if isinstance(otherwise, str) else otherwise()
                raise UserError(
                    f"{self.nodes.option}: {what} for {JOIN_SECONDS:.0f} s; start the same command on all "
                    f"{self.nodes.total} machines, each with its own --node-rank, and see that firewalls let them talk"
                )
            time.sleep(0.1)

    def _port(self) -> int:
        return self.nodes.port if self._kept is None else int(self._kept.port)

    @property
    def use_agent_store(self) -> bool:
        """Workers meet in the same store."""
        return True

    def get_backend(self) -> str:
        """See base class."""
        return "gramian"

    def get_run_id(self) -> str:
        """See base class."""
        return "gramian"

    def is_closed(self) -> bool:
        """See base class."""
        return False

    def set_closed(self) -> None:
        """See base class."""

    def num_nodes_waiting(self) -> int:
        """See base class. One that comes back waits until the others have noticed that it was gone."""
        return 0

    def shutdown(self) -> bool:
        """See base class."""
        return True
