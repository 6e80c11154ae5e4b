"""Between the two sides of a split run: messages through the store that all ranks joined by, weights by broadcast."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Manifest = Sequence[tuple[str, tuple[int, ...], torch.dtype]]
"""Name, shape and numbers of each tensor of a transfer, in its order."""

POLL = 0.005
"""Seconds between two looks for a message."""


class Link:
    """One end. Training rank 0 is member 0, generating rank r member r + 1; other training ranks take no part.

    Args:
        store: seen by all members and by nobody else.
        member: this process's number.
        size: members.
        device: of the weights; on GPUs they go through NCCL.
        timeout: how long to wait for the other side.
    """

    def __init__(self, store: dist.Store, *, member: int, size: int, device: torch.device, timeout: timedelta) -> None:
        self._store, self._timeout, self._device = store, timeout, device
        weights = dist.PrefixStore("weights", store)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = dist.ProcessGroupNCCL(weights, member, size, options)
        else:
            self._group = dist.ProcessGroupGloo(weights, member, size, timeout)

    def send(self, name: str, message: Any) -> None:
        """Leaves a picklable message for the other side; a name is used once."""
        self._store.set(name, pickle.dumps(message))  # type: ignore[arg-type]  # bytes do as well

    def receive(self, name: str) -> Any:
        """Waits for a message and takes it.

        Raises:
            TimeoutError: it did not come.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not self.arrived(name):  # the store's own wait would keep the interpreter from noticing a signal
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no '{name}' from the other side in {self._timeout}: if it is still at work, raise "
                    "launch.timeout_minutes"
                )
            time.sleep(POLL)
        message = pickle.loads(self._store.get(name))
        self._store.delete_key(name)
        return message

    def arrived(self, name: str) -> bool:
        """True if ``receive`` would not wait."""
        return self._store.check([name])

    def send_tensors(self, tensors: Iterable[Tensor]) -> None:
        """From member 0 to all others, one after another."""
        for tensor in tensors:
            self._broadcast(tensor.contiguous())

    def receive_tensors(self, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        """What member 0 sends; to be consumed to its end, or member 0 waits."""
        for name, shape, dtype in manifest:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            self._broadcast(tensor)
            yield name, tensor

    def _broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()
