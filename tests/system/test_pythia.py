"""Pythia's architecture (GPT-NeoX), which vLLM on a CPU runs through the very classes of transformers that train it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.helpers import run_engine, steps
from tests.system.test_runs import short


@pytest.fixture(scope="module")
def pythia(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rotary embeddings on a quarter of each head, parallel residuals, an untied head, rows that no token has."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from engine.tasks import addition

    folder, tokenizer = tmp_path_factory.mktemp("pythia"), addition.tokenizer()
    torch.manual_seed(1)
    config = GPTNeoXConfig(
        vocab_size=2 * len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=64,
        rotary_pct=0.25,
        use_parallel_residual=True,
        tie_word_embeddings=False,
        initializer_range=0.15,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = GPTNeoXForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms of 1 and biases of 0 could be mixed up
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


SPLIT = "--launch.ranks 2 --schedule.placement split --schedule.staleness 1"


@pytest.mark.parametrize(
    ("algo", "more"),
    [
        pytest.param("ppo", "--launch.ranks 1", id="colocated"),
        pytest.param("rloo", SPLIT, id="split"),
    ],
)
@pytest.mark.slow
def test_vllm_samples_from_what_is_trained(pythia: str, algo: str, more: str, tmp_path: Path) -> None:
    """The hand-over is proved at start, and by the gap after steps that move the policy far."""
    pytest.importorskip("vllm")
    more += " --generation.backend vllm --memory.kv_cache_gib 0.25 --eval.every_steps 0 --kl.coef 0.01 "
    more += "--train.learning_rate 3e-3 --train.warmup_steps 0 --train.schedule constant"
    run_engine(f"{short(pythia, tmp_path, 'r')} --algo {algo} {more}")
    rows = steps(tmp_path / "r")
    assert len(rows) == 3 and all(row["policy/grad_norm"] > 0 for row in rows)
    assert max(abs(row["kl/ref_mean"]) for row in rows) > 0.1
    gaps = [row["weights/logprob_gap_mean"] for row in rows if "weights/logprob_gap_mean" in row]
    assert len(gaps) >= 2 and max(gaps) < 1e-4
