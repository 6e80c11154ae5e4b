"""Several nodes, as two launchers on one machine: the same weights, and one line everywhere for what cannot work."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

import engine.run
from engine.config import cli
from engine.run_folder import checkpoints
from engine.start import agreement
from tests.system.helpers import ROOT, free_port, importing, run_engine, steps
from tests.system.test_runs import short
from tests.system.test_signals import alive, descendants, rank_of, until

QUICK = f"--config {ROOT}/configs/quickstart.yaml "
SECONDS = 10.0
"""In which a refusal has been said on both nodes; the ranks have torch loaded."""


@dataclass
class Node:
    """Of a run of one rank a node: where it is, what it is told, and the packages that it finds first."""

    folder: Path
    arguments: str
    packages: Path | None = None

    def run(self, rank: int, port: int) -> int:
        """Forks a rank as a launcher would start it, without the seconds in which a new process imports torch."""
        if process := os.fork():
            return process
        status = 1
        try:
            with (self.folder / "said.txt").open("w") as said:
                for number in (1, 2):
                    os.dup2(said.fileno(), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.chdir(self.folder)
            if self.packages:
                sys.path.insert(0, str(self.packages))
            status = engine.run.main(shlex.split(self.arguments))
        finally:
            sys.stderr.flush()
            os._exit(status)


def refusals(*nodes: Node) -> list[str]:
    """What each node says when the run is refused, which takes neither of them long."""
    begun, port = time.monotonic(), free_port()
    running = {node.run(rank, port): rank for rank, node in enumerate(nodes)}
    ended: dict[int, int] = {}
    while len(ended) < len(running) and time.monotonic() < begun + SECONDS:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in running:
            ended[running[process]] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for process, rank in running.items():
        if rank not in ended:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    said = [(node.folder / "said.txt").read_text() for node in nodes]
    assert ended == {0: 2, 1: 2}, said
    assert all(one.startswith("error: ") and one.count("\n") == 1 for one in said), said
    return said


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The working folders of two nodes: a relative path is another folder on each, as on a disk of its own."""
    monkeypatch.setattr(agreement, "SHARED_WITHIN", 0.5)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return tmp_path / "a", tmp_path / "b"


def run_folder(folder: Path) -> None:
    """A run's folder with a checkpoint of its first step, by two ranks."""
    state = asdict(checkpoints.OnlineTrainerState(step=1, world_size=2)) | {"format": 2, "files": {}}
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "checkpoints" / "step-000001" / "state.json").write_text(json.dumps(state))
    (folder / "config.yaml").write_text(cli.dump_yaml(cli.parse(shlex.split(QUICK))[0]))


def test_a_folder_of_the_same_name_is_not_the_same_folder(two: tuple[Path, Path]) -> None:
    said = refusals(*(Node(folder, QUICK + "--output_dir mine/runs") for folder in two))
    assert said[0] == said[1]
    assert "output_dir: rank 1 on " in said[0] and "does not see what rank 0 on " in said[0]
    assert [[path.name for path in folder.iterdir()] for folder in two] == [["said.txt"], ["said.txt"]]


@pytest.mark.parametrize("both", [False, True])
def test_a_run_is_resumed_from_a_folder_that_all_nodes_see(two: tuple[Path, Path], both: bool) -> None:
    for folder in two[: 1 + both]:
        run_folder(folder / "r")
    said = refusals(*(Node(folder, "--resume r") for folder in two))
    if both:
        assert said[0] == said[1] and "resume: rank 1 on " in said[0] and "does not see what rank 0" in said[0]
    else:
        assert said[1] == "error: resume: 'r' is not a run folder, it has no config.yaml\n"
        assert said[0].startswith("error: rank 1 on ") and said[0].endswith(said[1].removeprefix("error: "))


def test_a_refusal_of_one_node_is_everybody_s(two: tuple[Path, Path]) -> None:
    said = refusals(Node(two[0], QUICK + "--no.such 1"), Node(two[1], QUICK))
    assert said[0] == "error: unknown key 'no.such'; --help lists all keys\n"
    assert said[1].startswith("error: rank 0 on ") and said[1].endswith(said[0].removeprefix("error: "))


def test_nodes_have_the_same_settings_and_versions(two: tuple[Path, Path], tmp_path: Path) -> None:
    arguments = QUICK + f"--output_dir {tmp_path}/runs "
    said = refusals(Node(two[0], arguments), Node(two[1], arguments + "--train.steps 30"))
    assert said[0] == said[1] and "train.steps is 180 for rank 0 on " in said[0] and "but 30 for rank 1" in said[0]
    other = tmp_path / "packages" / "deepspeed-9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 9.9\n")
    said = refusals(Node(two[0], arguments), Node(two[1], arguments, packages=other.parent))
    assert said[0] == said[1] and "deepspeed is " in said[0] and "but 9.9 for rank 1 on " in said[0]
    for number, folder in enumerate(two):
        (folder / "mine.py").write_text(f"def reward(completions, **_):\n    return [{number}.0] * len(completions)\n")
    said = refusals(*(Node(folder, arguments + "--reward.function ./mine.py:reward") for folder in two))
    assert said[0] == said[1] and "reward.function's file is " in said[0]
    assert not (tmp_path / "runs").exists()


class Agents:
    """Two torchrun agents as two nodes, of one rank each, on the same command, each in a working folder."""

    def __init__(self, arguments: str, folder: Path, where: tuple[Path, Path] = (ROOT, ROOT)) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": importing(ROOT)}
        together = f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free_port()}"
        self.said = [folder / f"agent-{number}.txt" for number in range(2)]
        self.processes = []
        for file, place in zip(self.said, where, strict=True):
            with file.open("w") as output:
                command = [sys.executable, "-m", "torch.distributed.run", *together.split(), "-m", "engine.run"]
                self.processes.append(
                    subprocess.Popen(
                        [*command, *shlex.split(arguments)], cwd=place, env=env, stdout=output, stderr=output
                    )
                )

    def wait(self) -> None:
        """Until the run is done on both."""
        for process in self.processes:
            assert process.wait(280) == 0, "\n".join(file.read_text()[-4000:] for file in self.said)

    def agent_of(self, rank: str) -> subprocess.Popen:
        """The agent below which a rank runs."""
        return next(agent for agent in self.processes if any(rank_of(one) == rank for one in descendants(agent.pid)))

    def kill(self) -> None:
        """Ends what is left."""
        for process in self.processes:
            for one in [*descendants(process.pid), process.pid]:
                if alive(one):
                    os.kill(one, signal.SIGKILL)
            process.wait()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agents]]:
    """Those that a test starts; none outlives it."""
    started: list[Agents] = []
    yield started
    for one in started:
        one.kill()


@pytest.mark.slow
def test_two_nodes_end_with_the_weights_of_two_ranks_on_one(
    tiny_model: str, tmp_path: Path, agents: list[Agents]
) -> None:
    """ZeRO-2 in turns, to the last bit; also across a checkpoint, whose parts both nodes wrote."""
    settings = "--algo rloo --train.zero_stage 2 --save.every_steps 2 "
    run_engine(short(tiny_model, tmp_path, "one") + settings + "--launch.ranks 2")
    agents.append(Agents(short(tiny_model, tmp_path, "two") + settings, tmp_path))
    agents[-1].wait()
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) == 0.0
    agents.append(Agents(f"--resume {tmp_path}/two --train.steps 4", tmp_path))
    agents[-1].wait()
    assert len(steps(tmp_path / "two")) == 4


@pytest.mark.slow
def test_nodes_read_the_same_rows(
    tiny_model: str, tmp_path: Path, two: tuple[Path, Path], agents: list[Agents]
) -> None:
    """A file that lies on each node's own disk, and is another one there."""
    for number, folder in enumerate(two):
        rows = [json.dumps({"prompt": f"{left}+1="}) for left in range(9 - number)]
        (folder / "prompts.jsonl").write_text("\n".join(rows))
    arguments = short(tiny_model, tmp_path, "r") + "--algo rloo --data.task null --data.path ./prompts.jsonl"
    agents.append(Agents(arguments, tmp_path, two))
    assert [process.wait(120) for process in agents[-1].processes] == [1, 1]  # torchrun's own status
    for file in agents[-1].said:
        lines = [line for line in file.read_text().splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "the number of prompts or rows is " in lines[0], file.read_text()
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_a_split_run_has_its_sides_on_two_nodes(tiny_model: str, tmp_path: Path, agents: list[Agents]) -> None:
    split = "--algo rloo --schedule.placement split --schedule.staleness 1"
    agents.append(Agents(short(tiny_model, tmp_path, "s") + split, tmp_path))
    agents[-1].wait()
    summary = json.loads((tmp_path / "s" / "summary.json").read_text())
    assert (summary["steps"], summary["world_size"]) == (3, 2)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_node_that_is_killed_ends_the_other(tiny_model: str, tmp_path: Path, agents: list[Agents], rank: str) -> None:
    """Within 5 s; rank 0's node has written the report by then, and then draws the curves' picture."""
    endless = "--algo rloo --train.steps 100000 --eval.prompts 8 --rollout.max_response_tokens 4"
    agents.append(Agents(short(tiny_model, tmp_path, "k") + endless, tmp_path))
    run = tmp_path / "k"
    assert until(lambda: (run / "metrics.jsonl").exists() and steps(run), 90), agents[-1].said[0].read_text()
    killed, other = agents[-1].agent_of(rank), agents[-1].agent_of("1" if rank == "0" else "0")
    left = descendants(other.pid)
    for one in [killed.pid, *descendants(killed.pid)]:
        os.kill(one, signal.SIGKILL)
    if rank == "1":
        assert until((run / "report.html").exists, 5.0), "no report"
        assert "gloo" in (run / "crash.txt").read_text()
    drawing = 20.0 if rank == "1" else 0.0
    assert until(lambda: not any(alive(one) for one in left), 5.0 + drawing), "a rank of the other node still runs"
