"""Optimizer states in host memory while the sampler has the GPU.

A storage is copied out and shrunk to nothing in place, and grown and filled again on the way back: every tensor and
view that DeepSpeed keeps on it stays what it is, in every stage and with any optimizer. (DeepSpeed's ``offload_states``
points its tensors elsewhere instead, leaves out ZeRO-0, and takes no optimizer but its compiled one under ZeRO-3.)
"""

from __future__ import annotations

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, UntypedStorage

CHUNK_BYTES = 256 * 2**20
"""PyTorch rounds a pinned allocation up to a power of two, in which whole chunks waste nothing."""


class HostStates:
    """One engine's fp32 master weights and AdamW moments, on their device or in (pinned) host memory.

    Gradient buffers, which hold nothing between two steps, are given up and come back as zeros. The weights that
    forward passes read stay where they are.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._hosts: list[list[Tensor]] = []
        self._away: list[tuple[UntypedStorage, int]] = []
        self._kept = 0

    @property
    def offloaded(self) -> bool:
        """True between ``offload`` and ``reload``."""
        return bool(self._away)

    def offload(self) -> int:
        """Frees the states' memory on the device; a no-op where that is done. Between steps only.

        Returns:
            bytes freed.
        """
        if self.offloaded:
            return 0
        kept, scratch = _states(self._engine), _scratch(self._engine)
        for place, storage in enumerate(kept):
            if place == len(self._hosts):
                self._hosts.append([])
            if sum(map(len, self._hosts[place])) != storage.nbytes():
                self._hosts[place] = _host_memory(storage)
            for host, here in zip(self._hosts[place], _view(storage).split(CHUNK_BYTES), strict=True):
                host.copy_(here, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._kept, self._away = len(kept), [(storage, storage.nbytes()) for storage in [*kept, *scratch]]
        for storage, _ in self._away:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # else the sampler, which has an allocator of its own, could not have it
        return sum(size for _, size in self._away)

    def reload(self) -> None:
        """Brings the states back; a no-op where they are on their device."""
        for place, (storage, size) in enumerate(self._away):
            storage.resize_(size)
            if place >= self._kept:
                _view(storage).zero_()
                continue
            for host, here in zip(self._hosts[place], _view(storage).split(CHUNK_BYTES), strict=True):
                here.copy_(host, non_blocking=True)
        self._away = []


def _states(engine: DeepSpeedEngine) -> list[UntypedStorage]:
    """Storages whose content must come back. Master weights that *are* the weights (fp32 without ZeRO-1/2) stay."""
    optimizer, moments = engine.optimizer, engine.basic_optimizer.state
    masters = [
        *getattr(optimizer, "single_partition_of_fp32_groups", []),  # ZeRO-1 and 2
        *getattr(optimizer, "fp32_partitioned_groups_flat", []),  # ZeRO-3
        *(one for group in getattr(optimizer, "fp32_groups", []) for one in group),  # 16 bits without ZeRO
    ]
    for values in moments.values():
        for name, value in values.items():
            # On a CPU a checkpoint's tensors are views of what was read, whose size is fixed.
            if torch.is_tensor(value) and not value.untyped_storage().resizable():
                values[name] = value.clone()
    masters += [value for values in moments.values() for value in values.values() if torch.is_tensor(value)]
    weights = {
        getattr(parameter, "ds_tensor", parameter).untyped_storage().data_ptr()
        for parameter in engine.module.parameters()
    }
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in masters if tensor.ndim}
    return [storage for address, storage in storages.items() if address not in weights]


def _scratch(engine: DeepSpeedEngine) -> list[UntypedStorage]:
    """Storages whose content is worthless between steps: ZeRO-3 keeps its gradient buffers all the time."""
    if engine.zero_optimization_stage() != 3:
        return []
    optimizer = engine.optimizer
    buffers = [optimizer.grad_partitions_flat_buffer, *(bucket.buffer for bucket in optimizer.ipg_buckets.values())]
    return [buffer.untyped_storage() for buffer in buffers if buffer is not None]


def _host_memory(storage: UntypedStorage) -> list[Tensor]:
    sizes = [len(part) for part in _view(storage).split(CHUNK_BYTES)]
    return [torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type == "cuda") for size in sizes]


def _view(storage: UntypedStorage) -> Tensor:
    """The bytes of a storage, [n] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
