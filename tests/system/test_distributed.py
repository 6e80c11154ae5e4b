"""One process can hold one run after another."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from engine.distributed import joined


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
