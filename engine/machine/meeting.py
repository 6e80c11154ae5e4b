"""Where the ranks of several nodes meet before they join a process group.

Until they have joined, no rank notices that another one has ended. Through the store that all of them join by, the
refusal of one is said on every node within seconds, and what must be alike everywhere is compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from engine.config import ConfigError
from engine.machine import devices

if TYPE_CHECKING:
    import torch.distributed as dist

REFUSED = "refused"
"""The store's key of the first refusal."""
LEFT = "left"
"""Of the number of ranks that have heard of it."""
LEAVING = 60.0
"""Seconds in which a rank that ends waits for the others, which may have to import torch first: the store goes with
rank 0's node."""
POLL = 0.05
"""Seconds between two looks into the store."""


@dataclass(frozen=True, slots=True)
class Said:
    """What one rank brought."""

    who: str
    """The rank and its node's name, for people."""
    value: Any


class Meeting:
    """This rank's part in it; to be kept until the ranks have joined, because the store may be this process's.

    Imports torch when there is something to say. A run on one node needs no meeting, and its is closed from the start.
    """

    def __init__(self) -> None:
        self._open = devices.several_nodes()
        self._heard = False
        self._store: dist.Store | None = None

    @property
    def open(self) -> bool:
        """True on several nodes, until ``close``."""
        return self._open

    def gather(self, stage: str, value: Any, minutes: float) -> list[Said]:
        """What every rank brings to a stage of that name, in rank order, on every rank. Collective.

        Args:
            value: of numbers, strings, lists and dictionaries.
            minutes: how long to wait for the last rank.

        Raises:
            ConfigError: another rank has refused the run, or did not come.
        """
        store = self._joined(minutes)
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        keys = [f"{stage}-{one}" for one in range(ranks)]
        store.set(keys[rank], json.dumps([_who(), value]))
        deadline = time.monotonic() + 60 * minutes
        while not store.check(keys):
            if store.check([REFUSED]):
                self._heard = True
                raise ConfigError(store.get(REFUSED).decode())
            if time.monotonic() > deadline:
                absent = [one for one in range(ranks) if not store.check([keys[one]])]
                raise ConfigError(
                    f"launch.timeout_minutes: after {minutes:g} minutes rank(s) {', '.join(map(str, absent))} had not "
                    "come as far as this one"
                )
            time.sleep(POLL)
        return [Said(*json.loads(store.get(key))) for key in keys]

    def tell(self, line: str) -> None:
        """Tells the other ranks that this one ends, and why, and waits until all have ended the same way or heard it.

        Returns after ``LEAVING`` seconds whoever is missing: then that rank, too, may not have been able to start.
        """
        if not self._open:
            return
        with contextlib.suppress(Exception):  # this rank's own error is the one to show
            store = self._joined(LEAVING / 60)
            if not self._heard:
                store.compare_set(REFUSED, "", f"{_who()}: {line}")
            store.add(LEFT, 1)
            deadline = time.monotonic() + LEAVING
            while store.add(LEFT, 0) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < deadline:
                time.sleep(POLL)
            time.sleep(10 * POLL)  # who has the store goes last

    def close(self) -> None:
        """Nothing is left to agree on: from here on the ranks notice each other's end by their connections."""
        self._open = False

    def _joined(self, minutes: float) -> dist.Store:
        import torch.distributed as dist

        if self._store is None:
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(minutes=minutes)))
            self._store = dist.PrefixStore("tandem-meeting", store)
        return self._store


def _who() -> str:
    return f"rank {os.environ['RANK']} on {socket.gethostname()}"
