"""The ranks of a run: process groups, device, and the few collectives the loop needs.

A split run has two sides, training ranks and, after them, generating ranks. Each has a process group of its own, which
every library takes for the whole world; between them there is a link.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine.machine.link import Link


@dataclass(frozen=True, slots=True)
class World:
    """This process among all ranks, or in a split run among those of its side."""

    rank: int
    size: int
    device: torch.device
    first: int = 0
    """Number of the side's first process among all of the run's."""
    link: Link | None = None
    """To the other side, on the ranks that have part in it."""

    @property
    def main(self) -> bool:
        """True on the rank that writes files and talks to the person."""
        return self.process == 0

    @property
    def generates(self) -> bool:
        """True on the generating side of a split run."""
        return self.first > 0

    @property
    def process(self) -> int:
        """This process's number among all of the run's."""
        return self.first + self.rank

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise sum over ranks, a new tensor on every rank."""
        total = tensor.detach().clone().to(self.device)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def max(self, value: float) -> float:
        """The largest of the ranks' values."""
        top = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        return float(top)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's picklable value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable value in rank order, on every rank."""
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, value)
        return boxes

    def barrier(self) -> None:
        """Waits for every rank."""
        dist.barrier()


@contextlib.contextmanager
def joined(device_type: str, timeout_minutes: float, generators: int = 0) -> Iterator[World]:
    """Joins the process group for the time of a run and leaves the environment as it was.

    A process that nobody launched becomes rank 0 of 1. Collectives of CUDA tensors go through NCCL, all others through
    gloo. Must run before vLLM is built: it takes the process group it finds.

    Args:
        device_type: ``cpu`` or ``cuda``.
        timeout_minutes: how long one rank waits for another.
        generators: how many of the ranks, the last ones, are the generating side of a split run.
    """
    environment = dict(os.environ)
    alone, timeout = None, timedelta(minutes=timeout_minutes)
    if "RANK" not in os.environ:
        # The store finds a port by itself and holds it; one that was looked up before could be gone by now.
        alone = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout)
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(alone.port)
        )
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if device_type == "cuda" else "cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    try:
        if generators:
            yield _side(backend, timeout, device, generators)
        else:
            if alone:
                dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
            else:
                dist.init_process_group(backend, timeout=timeout)
            yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        deepspeed = sys.modules.get("deepspeed")
        if deepspeed and deepspeed.comm.is_initialized():
            deepspeed.comm.destroy_process_group()  # so that it does not take this group for the process's next one
        elif dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)


def _side(backend: str, timeout: timedelta, device: torch.device, generators: int) -> World:
    """Joins one side of a split run; the environment tells of that side alone, as libraries read it."""
    store, process, processes = next(dist.rendezvous("env://", timeout=timeout))
    trainers = processes - generators
    generates = process >= trainers
    first, size = (trainers, generators) if generates else (0, trainers)
    side = dist.PrefixStore("generate" if generates else "train", store)
    dist.init_process_group(backend, store=side, rank=process - first, world_size=size, timeout=timeout)
    os.environ.update(RANK=str(process - first), WORLD_SIZE=str(size))
    link = None
    if generates or process == 0:
        member = 1 + process - first if generates else 0
        between = dist.PrefixStore("between", store)
        link = Link(between, member=member, size=1 + generators, device=device, timeout=timeout)
    return World(process - first, size, device, first, link)
