"""The starting checkpoint of the embedded task, made by two ranks where none is cached yet."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from engine.config import cli
from engine.machine.world import joined
from engine.start import bootstrap
from tests.system.helpers import ROOT, run_ranks


@pytest.mark.slow
def test_two_ranks_make_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    run_ranks(2, __file__)
    (folder,) = tmp_path.iterdir()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


if __name__ == "__main__":
    bootstrap.CHECK_EVERY, bootstrap.STOP_AT = 1, 0.0  # one step is enough here
    config, _ = cli.parse(["--config", str(ROOT / "configs" / "quickstart.yaml")])
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with joined("cpu", 1) as world:
        folder = bootstrap.starting_checkpoint(config, world, lambda text: print(text, file=sys.stderr))
        assert world.gather(folder) == [folder] * 2 and os.path.exists(f"{folder}/config.json")
