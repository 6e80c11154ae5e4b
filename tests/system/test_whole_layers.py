"""ZeRO-3 gathers and reduces whole layers; no gradient is lost by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system import whole_layers
from tests.system.helpers import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("Qwen2",), ("GPTNeoX", "Llama", "Mistral", "Qwen3")])
def test_whole_layers_train_as_in_pieces(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Qwen2 also without recomputed activations, and with adapters from the first layer on or from a later one."""
    run_ranks(2, whole_layers.__file__, str(tmp_path), *kinds)
