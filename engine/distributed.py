"""The ranks of a run: process group, device, and the few collectives the loop needs."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class World:
    """This process among all ranks."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """True on the rank that writes files and talks to the person."""
        return self.rank == 0

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
def joined(device_type: str, timeout_minutes: float) -> Iterator[World]:
    """Joins the process group for the time of a run and leaves the environment as it was.

    A process that nobody launched becomes rank 0 of 1. Collectives of CUDA tensors go through NCCL, all others through
    gloo. Must run before vLLM is built: it takes the process group it finds.
    """
    environment = dict(os.environ)
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if device_type == "cuda" else "cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", timeout=timedelta(minutes=timeout_minutes)
    )
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        deepspeed = sys.modules.get("deepspeed")
        if deepspeed and deepspeed.comm.is_initialized():
            deepspeed.comm.destroy_process_group()  # so that it does not take this group for the process's next one
        elif dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
