"""One process can hold one run after another, and needs no port that somebody else could take."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.machine.world import joined


def test_deepspeed_works_in_the_next_group_too() -> None:
    import deepspeed

    for stage in (2, 3):
        environment = dict(os.environ)
        with joined("cpu", 1):
            model = torch.nn.Linear(4, 4)
            settings = {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": stage},
                "bf16": {"enabled": True},
            }
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings
            )
            engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
            engine.step()
        assert not dist.is_initialized()
        assert dict(os.environ) == environment


def test_a_lone_process_holds_its_port_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    join = dist.init_process_group

    def taken(*args: Any, **kwargs: Any) -> None:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        join(*args, **kwargs)

    monkeypatch.setattr(dist, "init_process_group", taken)
    with joined("cpu", 1) as world:
        assert (world.rank, world.size) == (0, 1)
        assert world.gather("here") == ["here"]
