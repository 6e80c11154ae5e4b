"""Samplers that keep the old values of one tensor and say nothing; test_hand_over_digest runs them.

As a program, one of a run's two ranks, of which the second has such a sampler. Usage: losing.py TENSOR ARGUMENTS-OF-A-RUN...
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

import engine.run
from engine.generation.hf import HFGenerator
from engine.proof import HandOverError


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
    """vLLM's loaders get one tensor as it came the first time."""
    from engine.generation import vllm_compat

    load, first = vllm_compat.load_weights, {}

    def losing(llm: Any, weights: Any) -> None:
        def stream() -> Any:
            for name, tensor in weights:
                yield name, first.setdefault(name, tensor.detach().clone()) if name == victim else tensor

        load(llm, stream())

    patch.setattr(vllm_compat, "load_weights", losing)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            hf(patch, sys.argv[1])
        try:
            print("ended with", engine.run.main(sys.argv[2:]))
        except HandOverError as error:
            print("HandOverError:", error)
