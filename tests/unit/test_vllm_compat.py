"""What differs between vLLM's builds, as far as it shows without vLLM."""

from types import SimpleNamespace

import pytest

from engine.generation.vllm_compat import as_named_in


@pytest.mark.parametrize(("own", "expected"), [("embed_out", "embed_out.weight"), ("lm_head", "lm_head.weight")])
def test_the_head_is_called_what_the_samplers_model_calls_it(own: str, expected: str) -> None:
    """vLLM has a GPT-NeoX of its own with ``embed_out``, as checkpoints; elsewhere it runs transformers'."""
    weights = [("gpt_neox.layers.0.attention.dense.weight", 1), ("lm_head.weight", 2)]
    found = list(as_named_in(SimpleNamespace(**{own: None}), weights))
    assert found == [weights[0], (expected, 2)]
