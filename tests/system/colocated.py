"""Sampler and trainer in two gloo ranks, hand-overs between them; started by test_colocation.

Usage: colocated.py MODEL
"""

import sys
import time
from types import SimpleNamespace

import numpy as np

from engine.generation.base import Response
from engine.generation.sampling import Request, Sampling
from engine.generation.vllm import VLLMGenerator
from engine.machine.world import World, joined
from engine.memory.planning import MemoryPlan
from engine.sample import Sample
from engine.schedules.colocation import Colocation
from engine.training import weights
from tests.system import offloading

PROMPTS = [[1, 5, 9], [1, 7], [1, *range(3, 14), *range(3, 14), *range(3, 14)], [1, 3, 4, 11]]
GREEDY, WARM = Sampling(16, 0.0, ()), Sampling(6, 1.0, ())


def build(model: str, tensor_parallel: int) -> VLLMGenerator:
    return VLLMGenerator(
        model,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=16,
        seed=0,
        kv_cache_bytes=2**25,
        tensor_parallel=tensor_parallel,
    )


def samples_of(responses: list[Response], requests: list[Request]) -> list[Sample]:
    return [
        Sample(
            index=i,
            group_id=i,
            prompt_ids=request.prompt_ids,
            response_ids=response.token_ids,
            behaviour_logprobs=response.logprobs,
            finish_reason=response.finish_reason,
        )
        for i, (request, response) in enumerate(zip(requests, responses, strict=True))
    ]


def whole_and_in_time(one: SimpleNamespace, world: World) -> None:
    """Buckets of one to a few tensors, a rank that lags behind: every tensor is full-size and right on every rank."""
    seen = {}
    for name, tensor in weights.full_weights(one):
        if world.main:
            time.sleep(0.01)
        seen[name] = tensor.clone()
    plain = dict(one.module.model.named_parameters())
    assert seen.keys() == plain.keys()
    for name, tensor in seen.items():
        shape = getattr(plain[name], "ds_shape", plain[name].shape)
        assert tensor.shape == shape and tensor.abs().sum() > 0, name
    everyones = world.gather({name: float(tensor.double().sum()) for name, tensor in seen.items()})
    assert everyones[0] == everyones[1]


def two_large_steps(turns: Colocation) -> None:
    """Two turns with an update between sampling and sampling again."""
    for version in (1, 2):
        turns.rest()
        turns.take_back()
        offloading.update(turns.trainer, version)
        turns.make_room()
        turns.hand_over(version)


def turn(model: str, stage: int, tensor_parallel: int, world: World) -> list[Response]:
    """Proof, a first sampling, a large step, another sampling; gives the first responses of this rank."""
    turns = Colocation(
        world,
        MemoryPlan("level2", True, False, 2**25),
        lambda: MemoryPlan("none", False, False, 0),
        PROMPTS,
        tokens=16,
        source=None,
        build_generator=lambda plan, shared: build(model, tensor_parallel),
        build_trainer=lambda: offloading.trainer(model, stage, "float32", world),
        say=print,
    )
    turns.trainer.config.train.tokens_per_microbatch = 64
    # Uneven: some ranks have nothing to do.
    mine = PROMPTS if world.main else [] if tensor_parallel > 1 else PROMPTS[:1]
    requests = [Request(prompt, 10 + seed) for prompt in mine for seed in range(2)]
    first = turns.generator.generate(requests, WARM)
    before = [response.token_ids for response in turns.generator.generate([Request(PROMPTS[2], 0)], GREEDY)]
    two_large_steps(turns)
    receipt = turns.generator.receipt
    assert receipt and not receipt.lost and not receipt.unread, receipt
    assert receipt.sent.keys() == {name for name, _, _ in weights.manifest(turns.trainer.policy)}
    whole_and_in_time(turns.trainer.policy, world)
    after = [response.token_ids for response in turns.generator.generate([Request(PROMPTS[2], 0)], GREEDY)]
    assert after != before and turns.generator.version == 2, "the cached keys are of the old weights"
    requests = requests or [Request(PROMPTS[0], 10)]
    found = samples_of(turns.generator.generate(requests, WARM), requests)
    own = turns.trainer.logprobs(turns.trainer.policy, found).numpy()
    np.testing.assert_allclose(np.concatenate([one.behaviour_logprobs for one in found]), own, atol=1e-3)
    turns.generator.close()
    return first


def main(model: str) -> None:
    weights.BUCKET_BYTES = 50_000
    with joined("cpu", 1) as world:
        together = turn(model, 3, 2, world)
        alone = turn(model, 2, 1, world)
        assert len(together) == (len(alone) if world.main else 0)
        for a, b in zip(together, alone if world.main else [], strict=True):
            assert a.token_ids == b.token_ids, "seeds do not depend on who samples"
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-3)


if __name__ == "__main__":
    main(*sys.argv[1:])
