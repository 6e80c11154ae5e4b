"""The transformers sampler: what it says of its tokens is true, and a response depends on its request alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.generation.hf import HFGenerator
from engine.generation.sampling import Request, Sampling

PROMPTS = [[1, 4], [1, 5, 6, 13, 7, 8, 14], [1, 9, 13, 3, 14], [1, 3]]
SAMPLING = Sampling(max_tokens=6, temperature=0.8, stop_token_ids=(2, 14))


@pytest.fixture(scope="module")
def generator(tiny_model: str) -> HFGenerator:
    return HFGenerator(tiny_model, dtype=torch.float32, device=torch.device("cpu"), max_batch=3)


def requests(seed: int = 0, repeat: int = 8) -> list[Request]:
    return [Request(prompt, seed + i) for i, prompt in enumerate(PROMPTS * repeat)]


def logprobs(model: str, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([prompt + response])).logits[0]
    rows = (logits[len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)
    return rows.gather(-1, torch.tensor(response)[:, None])[:, 0]


def test_logprobs_are_those_of_a_whole_forward_pass(generator: HFGenerator, tiny_model: str) -> None:
    for request, response in zip(requests(repeat=2), generator.generate(requests(repeat=2), SAMPLING), strict=True):
        expected = logprobs(tiny_model, request.prompt_ids, response.token_ids, 0.8)
        torch.testing.assert_close(torch.from_numpy(response.logprobs).double(), expected, rtol=0, atol=2e-5)


def test_response_depends_on_its_request_alone(generator: HFGenerator) -> None:
    """Not on the batch, its order or its padding."""
    together = generator.generate(requests(), SAMPLING)
    backwards = generator.generate(requests()[::-1], SAMPLING)[::-1]
    alone = [generator.generate([request], SAMPLING)[0] for request in requests()]
    assert [r.token_ids for r in together] == [r.token_ids for r in backwards] == [r.token_ids for r in alone]
    other = generator.generate(requests(seed=1000), SAMPLING)
    assert [r.token_ids for r in together] != [r.token_ids for r in other]


def test_finish_reasons_and_stop_tokens(generator: HFGenerator) -> None:
    responses = generator.generate(requests(repeat=30), SAMPLING)
    assert {r.finish_reason for r in responses} == {"stop", "length"}
    for r in responses:
        assert len(r.token_ids) == len(r.logprobs) and 1 <= len(r.token_ids) <= 6
        stops = [token in SAMPLING.stop_token_ids for token in r.token_ids]
        assert stops == [False] * (len(stops) - 1) + [r.finish_reason == "stop"], "stops once, at the end, and keeps it"
        assert r.finish_reason == "stop" or len(r.token_ids) == 6


def test_greedy_equals_transformers(generator: HFGenerator, tiny_model: str) -> None:
    (response,) = generator.generate([Request(PROMPTS[1], 0)], Sampling(6, 0.0, ()))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    out = model.generate(torch.tensor([PROMPTS[1]]), do_sample=False, max_new_tokens=6, eos_token_id=None)
    assert response.token_ids == out[0, len(PROMPTS[1]) :].tolist()
    expected = logprobs(tiny_model, PROMPTS[1], response.token_ids, 1.0)
    torch.testing.assert_close(torch.from_numpy(response.logprobs).double(), expected, rtol=0, atol=2e-5)


def test_frequencies_follow_the_distribution(generator: HFGenerator, tiny_model: str) -> None:
    """First tokens of 4,000 samples against their probabilities: within five standard errors each."""
    count = 4000
    sampler = HFGenerator(tiny_model, dtype=torch.float32, device=torch.device("cpu"), max_batch=count)
    responses = sampler.generate([Request(PROMPTS[2], i) for i in range(count)], Sampling(1, 0.8, ()))
    seen = torch.bincount(torch.tensor([r.token_ids[0] for r in responses]), minlength=15) / count
    expected = torch.stack([logprobs(tiny_model, PROMPTS[2], [v], 0.8)[0] for v in range(15)]).exp()
    assert float(expected.max()) < 0.98, "a distribution with something to miss"
    assert torch.all((seen - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt() + 1e-9)


def test_new_weights_take_effect_and_partial_ones_are_refused(tiny_model: str) -> None:
    generator = HFGenerator(tiny_model, dtype=torch.float32, device=torch.device("cpu"), max_batch=64)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    before = generator.generate(requests(), SAMPLING)
    weights = {name: tensor * 1.5 for name, tensor in model.named_parameters()}
    generator.sleep()
    generator.wake()
    with pytest.raises(RuntimeError, match=r"lm_head\.weight"):
        generator.load_weights([(n, w) for n, w in weights.items() if n != "lm_head.weight"], 1)
    generator.load_weights(weights.items(), 1)
    generator.start()
    after = generator.generate(requests(), SAMPLING)
    assert generator.version == 1
    assert [r.token_ids for r in before] != [r.token_ids for r in after]


def test_the_model_s_own_generation_settings_do_not_count(tiny_model: str, tmp_path: Path) -> None:
    """A repetition penalty or top-k in generation_config.json would make the log-probabilities another policy's."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.generation_config.update(repetition_penalty=1.5, top_k=2, do_sample=True, no_repeat_ngram_size=1)
    model.save_pretrained(tmp_path)
    plain, penalised = (
        HFGenerator(str(path), dtype=torch.float32, device=torch.device("cpu"), max_batch=64).generate(
            requests(), SAMPLING
        )
        for path in (tiny_model, tmp_path)
    )
    assert [r.token_ids for r in plain] == [r.token_ids for r in penalised]


def test_diverged_weights_are_named(tiny_model: str) -> None:
    generator = HFGenerator(tiny_model, dtype=torch.float32, device=torch.device("cpu"), max_batch=64)
    with torch.no_grad():
        generator._model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="diverged"):
        generator.generate(requests(), SAMPLING)
