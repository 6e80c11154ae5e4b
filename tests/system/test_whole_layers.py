"""ZeRO-3 gathers and reduces whole layers; no gradient is lost by it."""

from __future__ import annotations

from pathlib import Path

from tests.system import whole_layers
from tests.system.helpers import run_ranks


def test_whole_layers_train_as_in_pieces(tmp_path: Path) -> None:
    """Every kind, with recomputed activations and without, and adapters from the first layer on or from a later one."""
    run_ranks(2, whole_layers.__file__, str(tmp_path))
