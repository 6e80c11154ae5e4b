"""A tiny policy for tests with real models, real DeepSpeed, real processes."""

import pytest
import torch

from engine.tasks import addition


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random policy of the embedded task's shape with sharper, position-dependent distributions than a fresh one."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(addition.model_config())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    model.save_pretrained(folder)
    addition.tokenizer().save_pretrained(folder)
    return str(folder)
