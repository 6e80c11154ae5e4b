"""Samplers that keep the old values of one tensor and say nothing; test_hand_over_digest runs them.

As a program, a run on one rank with such a sampler, or one of a run's two ranks, of which the second has it.
Usage: losing.py hf|vllm TENSOR ARGUMENTS-OF-A-RUN...; without a TENSOR ('') nothing is lost.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

import engine.run
from engine.generation.equal_weights import HandOverError
from engine.generation.hf import HFGenerator


def hf(patch: pytest.MonkeyPatch, victim: str) -> None:
    """transformers' copy is loaded, and then one tensor is as it was before."""
    load = HFGenerator._load_weights

    def losing(self: HFGenerator, weights: Any) -> None:
        parameter = dict(self._model.named_parameters())[victim]
        kept = parameter.clone()
        load(self, weights)
        parameter.copy_(kept)

    patch.setattr(HFGenerator, "_load_weights", losing)


def vllm(patch: pytest.MonkeyPatch, victim: str) -> None:
    """vLLM's loaders, copying or only refreshing the vectors of shared weights, get one tensor as it came first."""
    from engine.generation import vllm_patches
    from engine.generation.shared_weights import SharedWeights

    load, refresh, first = vllm_patches.load_weights, SharedWeights.refresh, {}

    def stale(weights: Any) -> Any:
        for name, tensor in weights:
            yield name, first.setdefault(name, tensor.detach().clone()) if name == victim else tensor

    def losing_refresh(self: SharedWeights) -> None:
        model = self._model()
        whole = model.load_weights
        model.load_weights = lambda weights: whole(stale(weights))
        try:
            refresh(self)
        finally:
            del model.load_weights

    patch.setattr(vllm_patches, "load_weights", lambda llm, weights: load(llm, stale(weights)))
    patch.setattr(SharedWeights, "refresh", losing_refresh)


LOSING = {"hf": hf, "vllm": vllm}

if __name__ == "__main__":
    kind, victim, *arguments = sys.argv[1:]
    with pytest.MonkeyPatch.context() as patch:
        last = int(os.environ.get("WORLD_SIZE", 1)) - 1
        if victim and int(os.environ.get("RANK", 0)) == last:
            LOSING[kind](patch, victim)
        try:
            print("ended with", engine.run.main(arguments))
        except HandOverError as error:
            print("HandOverError:", error)
