"""How much memory a rank's GPU holds: the highest in each phase, and what stays while the sampler sleeps.

No counter of PyTorch's tells it alone. vLLM's pool goes through PyTorch's allocator, which goes on counting it while it
sleeps; CUDA's context, NCCL and what the driver loads are in nobody's counter. The driver tells how much of the device
is in use, but only now. So a peak is what is in use now, less what PyTorch holds now, plus the most that it has held
since the last ``start``: exact if the sampler neither slept nor woke in between. Other processes' memory counts too.
"""

from __future__ import annotations

import os
import resource

import torch

from engine.machine.world import World
from engine.memory.planning import MemoryPlan
from engine.memory.units import GIB

ASLEEP_GROWTH = 0.05
"""Share by which the memory asleep may exceed that of the second cycle, the first one with AdamW's moments."""


class MemoryGrowthError(RuntimeError):
    """What stays on the GPU while the sampler sleeps has grown since the second cycle."""


def in_use(device: torch.device) -> int:
    """Bytes of a GPU in use, by anyone."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def use_growing_segments() -> None:
    """From now on this process's PyTorch maps pages into segments that grow, unless its environment says otherwise.

    Microbatches differ in length by a few tokens, and so do the sizes of all that a pass keeps: blocks of fixed sizes,
    which are the default, fit the next microbatch badly, and PyTorch holds far more than is needed. Memory that vLLM
    allocates to sleep with must not be in such segments: it has to exist before, and no sampler may be built after.
    """
    # PyTorch's versions do not agree which of the two counts if both are set.
    chosen = [os.environ.get(variable, "") for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
    if not any(word in setting for setting in chosen for word in ("expandable_segments", "backend")):
        # The call forgets some of the options that are not in it.
        settings = [next(filter(None, chosen), ""), "expandable_segments:True"]
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, settings)))


class Meter:
    """Measures one rank. On a CPU there are no phases, and the peak is the process's."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._gpu = device, device.type == "cuda"
        self._peak = 0
        self._asleep: list[int] = []
        self.phases: dict[str, int] = {}
        """The newest peaks, in bytes."""

    def start(self) -> None:
        """Begins a phase."""
        if self._gpu:
            torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self, name: str) -> None:
        """Ends a phase and notes its peak."""
        if self._gpu:
            used, held = in_use(self._device), torch.cuda.memory_reserved(self._device)
            self.phases[name] = used - held + torch.cuda.max_memory_reserved(self._device)
            self._peak = max(self._peak, self.phases[name])

    def asleep(self) -> None:
        """Notes what stays in use, right after the sampler fell asleep in a step.

        Raises:
            MemoryGrowthError: more than in the second step by over 5 %.
        """
        if not self._gpu:
            return
        self.phases["asleep"] = in_use(self._device)
        self._asleep = [*self._asleep[:2], self.phases["asleep"]]
        if self.growth > ASLEEP_GROWTH:
            raise MemoryGrowthError(
                f"with the sampler asleep {self._asleep[-1] / GIB:.2f} GiB of {self._device} are in use, "
                f"{self._asleep[1] / GIB:.2f} GiB were in the second step: something keeps memory from step to step"
            )

    def metrics(self, plan: MemoryPlan, world: World) -> dict[str, float]:
        """Of the fullest GPU, in GiB, and how far off the plan was. Collective."""
        measured = {name: int(world.max(size)) for name, size in self.phases.items()}
        metrics = {f"memory/{name}_gib": size / GIB for name, size in measured.items()}
        metrics["memory/peak_gib"] = world.max(self.peak_gib)
        if "asleep" in measured:
            metrics["memory/asleep_growth"] = world.max(self.growth)
        elif measured and plan.phases:  # nothing sleeps, so either phase holds what the fuller one needs
            fullest = max(plan.phases, key=lambda name: plan.phases[name].total)
            measured = {fullest: max(measured.values())}
        return metrics | plan.errors(measured)

    @property
    def growth(self) -> float:
        """Of the memory asleep since the second step, as a share."""
        return self._asleep[-1] / self._asleep[1] - 1 if len(self._asleep) > 1 else 0.0

    @property
    def peak_gib(self) -> float:
        """The highest of all phases so far, in GiB; on a CPU of the process's resident memory."""
        return self._peak / GIB if self._gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
