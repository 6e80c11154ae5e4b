"""How many ranks there are, what they find in the environment, and what of it is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine.config import Config, ConfigError, cli
from engine.launch import failures, launcher, signals
from engine.machine import devices
from engine.machine.world import World
from engine.run_folder import folder

ROOT = Path(__file__).resolve().parents[2]
QUICK = str(ROOT / "configs" / "quickstart.yaml")
RANK = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher's variables, and four GPUs by name."""
    for name in RANK:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    return monkeypatch


def configured(*arguments: str) -> Config:
    return cli.parse(["--config", QUICK, *arguments])[0]


def test_one_rank_a_gpu(environment: pytest.MonkeyPatch) -> None:
    assert devices.world_size(configured()) == 4
    assert devices.world_size(configured("--launch.ranks", "2")) == 2
    assert devices.world_size(configured("--launch.device", "cpu")) == 1
    with pytest.raises(ConfigError, match=r"launch\.ranks is 5, but 4 GPU"):
        devices.world_size(configured("--launch.ranks", "5"))
    environment.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.world_size(configured()) == 1
    assert devices.device_type(configured("--memory.explain", "true", "--memory.gpu_gib", "80")) == "cuda"


def test_a_launcher_s_ranks_are_joined_on_any_node(environment: pytest.MonkeyPatch) -> None:
    for name, value in RANK.items():
        environment.setenv(name, value)
    assert devices.world_size(configured()) == 16
    assert devices.world_size(configured("--local_rank=1")) == 16  # as DeepSpeed's launcher calls its ranks
    environment.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="LOCAL_RANK is 1, but 1 GPU"):
        devices.world_size(configured())
    assert devices.world_size(configured("--launch.device", "cpu")) == 16
    environment.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError, match="LOCAL_RANK is missing"):
        devices.world_size(configured())
    with pytest.raises(ConfigError, match="local_rank"):
        configured("--local_rank=1")


@pytest.mark.parametrize(
    ("told", "several"),
    [
        ({}, False),
        ({"WORLD_SIZE": "4"}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"WORLD_SIZE": "4", "LOCAL_SIZE": "2"}, True),  # DeepSpeed's launcher
        ({"WORLD_SIZE": "four", "LOCAL_WORLD_SIZE": "2"}, False),
    ],
)
def test_other_nodes_are_known_by_the_ranks_that_are_not_here(
    environment: pytest.MonkeyPatch, told: dict[str, str], several: bool
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        environment.delenv(name, raising=False)
    for name, value in told.items():
        environment.setenv(name, value)
    assert devices.several_nodes() == several


@pytest.mark.parametrize("start", ["name", "resume"])
def test_an_earlier_start_s_errors_are_not_this_one_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    """Stopped before a generating rank has heard of the folder; what a rank leaves after that is reported."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signals, "_ending", False)
    (tmp_path / "crash-rank-1.txt").write_text("ValueError: long ago\n\n")
    where = {"resume": str(tmp_path)} if start == "resume" else {"output_dir": str(tmp_path.parent)}
    config = configured("--live", "false").model_copy(update={"name": tmp_path.name} | where)
    world = World(0, 2, torch.device("cpu"))
    for new in (None, "crash-rank-2.txt"):
        run_dir = folder.locate(config, None)
        assert run_dir == tmp_path
        with pytest.raises((KeyboardInterrupt, failures.RankFailed)) as stopped:
            with folder.recording(config, world, run_dir):
                if new:
                    (run_dir / new).write_text("ValueError: just now\n\n")
                raise KeyboardInterrupt("SIGTERM")
        assert ("rank 2 failed: ValueError: just now" in str(stopped.value)) == bool(new), stopped.value
        assert (stopped.type is KeyboardInterrupt) == (new is None)
        (tmp_path / "config.yaml").unlink(missing_ok=True)  # a name belongs to the run that has it


def test_rank_0_waits_for_no_file_once_the_launcher_has_spoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its SIGTERM says that the other rank has ended: one that was killed leaves no file."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signals, "_ending", False)
    monkeypatch.setattr(signals, "_told", False)
    monkeypatch.setattr(failures, "PATIENCE", 1.0)
    monkeypatch.setenv(failures.LAUNCHER, "1")
    monkeypatch.setattr(time, "sleep", lambda _: signals._stop(signal.SIGTERM, None))  # it speaks after the first look
    lost, begun = RuntimeError("gloo: connection closed by peer"), time.monotonic()
    assert failures.cause(tmp_path, lost) is lost
    assert time.monotonic() - begun < 0.5
    monkeypatch.delenv(failures.LAUNCHER)
    assert failures.cause(tmp_path, lost) is lost
    assert time.monotonic() - begun > 1.0, "another launcher may speak before a rank on another machine has ended"
    failures.leave(tmp_path, 1, ValueError("mine"))
    assert str(failures.cause(tmp_path, lost)).startswith("rank 1 failed: ValueError: mine")


IN_A_DESTRUCTOR = """
import os, signal, sys, time
from engine.launch import signals

class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})
        for _ in range(1000):
            pass

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may have been told to ignore it
signals.stop_on_sigterm(is_rank=True)
try:
    Last()
    time.sleep(20)
except KeyboardInterrupt as error:
    sys.exit(signals.exit_status(error))
"""


@pytest.mark.parametrize("name,status", [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_in_a_destructor_is_not_lost(name: str, status: int) -> None:
    """What a ``__del__`` raises goes nowhere."""
    script = IN_A_DESTRUCTOR.replace("{name}", name)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=15)
    assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.parametrize(
    "listed,plain",
    [
        ("9.0a", "9.0"),
        ("9.0a+PTX", "9.0+PTX"),
        ("8.0;8.6 9.0a 10.0f+PTX", "8.0;8.6;9.0;10.0+PTX"),
        ("9.0;9.0a", "9.0"),
        ("12.0", "12.0"),
        ("Hopper", None),
        ("Ampere;9.0a", "9.0"),
    ],
)
def test_architectures_that_deepspeed_reads(environment: pytest.MonkeyPatch, listed: str, plain: str | None) -> None:
    environment.setenv("TORCH_CUDA_ARCH_LIST", listed)
    environment.setenv("DS_ACCELERATOR", "cpu")
    launcher.tidy_environment("cuda")
    assert os.environ.get("TORCH_CUDA_ARCH_LIST") == plain
    assert os.environ["DS_ACCELERATOR"] == "cpu", "the user's own choice"


def test_deepspeed_s_builder_reads_the_tidied_list(environment: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder import builder

    class Operator(builder.CUDAOpBuilder):
        def absolute_name(self) -> str:
            return "operator"

        def sources(self) -> list[str]:
            return []

        def is_compatible(self, verbose: bool = False) -> bool:
            return True

    operator = Operator("operator")
    operator.jit_mode = True
    environment.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a+PTX")
    with pytest.raises(ValueError):
        operator.compute_capability_args()
    environment.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a+PTX")
    launcher.tidy_environment("cpu")
    operator.compute_capability_args()
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0+PTX"


LOSES_THE_OTHERS = """
import os, signal, sys, threading
from engine import loop, run
from engine.launch import failures
from engine.start import preflight

def lose(config):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    raise RuntimeError("gloo: connection closed by peer")

preflight.read = lose
os.environ[failures.LAUNCHER], os.environ[failures.REFUSAL_FILE] = str(os.getppid()), sys.argv[1]
sys.exit(run.main(["--config", sys.argv[2], "--launch.device", "cpu", "--output_dir", sys.argv[3]]))
"""


def test_the_launcher_s_signal_to_a_rank_that_has_lost_the_others_is_no_error_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOSES_THE_OTHERS, str(tmp_path / "refusal"), QUICK, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "rank None: gloo: connection closed by peer\n")
