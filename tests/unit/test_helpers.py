"""Starting ranks from tests: none blocks another, and the one that failed is the one that is shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.system import helpers


def script(folder: Path, text: str) -> str:
    (folder / "rank.py").write_text(f"import os, sys, time\nrank = os.environ['RANK']\n{text}\n")
    return str(folder / "rank.py")


def test_a_rank_may_write_more_than_a_pipe_holds_before_another_ends(tmp_path: Path) -> None:
    wait = "if rank == '0':\n    while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
    write = "else:\n    print('x' * 200_000, flush=True)\n    open(sys.argv[1], 'w').close()"
    one, other = helpers.rank_outputs(2, script(tmp_path, wait + write), str(tmp_path / "written"), timeout=20)
    assert one == "" and len(other) == 200_001


def test_the_failing_rank_is_shown_and_not_the_one_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "GRACE", 0.2)
    with pytest.raises(AssertionError, match="rank 1 ended with 1:\nthe reason") as error:
        helpers.run_ranks(2, script(tmp_path, "sys.exit('the reason') if rank == '1' else time.sleep(60)"), timeout=20)
    assert "rank 0" not in str(error.value)


def test_ranks_find_what_the_tests_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    found = helpers.run_ranks(1, script(tmp_path, "print(os.environ['PYTHONPATH'])")).strip()
    assert found == os.pathsep.join([str(helpers.ROOT), str(tmp_path / "site")])


def test_a_run_that_a_test_starts_is_no_rank_of_the_test_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixture may have joined a process group, whose port and rank are in the environment."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "none")
    assert "algo: ppo" in helpers.run_engine("--print-config").stdout
