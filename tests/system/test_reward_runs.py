"""Whole runs with rewards as users write them: what works, what is refused before anything loads, what ends a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import run
from engine.rewards import RewardError
from tests import users

pytestmark = pytest.mark.usefixtures("without_pictures")

ROOT = Path(__file__).parents[2]

USUAL = """
from __future__ import annotations
import dataclasses, multiprocessing
import beside

@dataclasses.dataclass
class Seen:
    text: str = ""
    words: list[str] = dataclasses.field(default_factory=list)

def length(text):
    return len(Seen(text).text)

def score(prompts, completions, raw_prompts, **columns):
    beside.SEEN.append((prompts, raw_prompts))
    with multiprocessing.Pool(2) as pool:
        return pool.map(length, completions)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return users.model_folder(tmp_path_factory.mktemp("model"))


def test_an_ordinary_file_and_the_row_s_own_prompts(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A dataclass with postponed annotations, a pool of processes, a neighbour, a name with a dash; raw_prompts."""
    (tmp_path / "my-reward.py").write_text(USUAL)
    (tmp_path / "beside.py").write_text("SEEN = []\n")
    rows = [{"prompt": "a  b\tc"}, {"prompt": "a zz c"}] * 8
    given = users.arguments(tmp_path, model, "--reward.function", f"{tmp_path}/my-reward.py:score", rows=rows)
    assert run.main(given) == 0, capfd.readouterr().err
    import beside  # type: ignore[import-not-found]

    pairs = {pair for prompts, raw in beside.SEEN for pair in zip(prompts, raw, strict=True)}
    assert {raw for _, raw in pairs} == {"a  b\tc", "a zz c"}
    assert all("zz" not in prompt and "\t" not in prompt for prompt, _ in pairs), "what the model saw"


@pytest.mark.parametrize(
    "text,name,needle",
    [
        (users.REWARD, "typo", r"mine.py has no 'typo'; it has score"),
        (users.REWARD, "scor", r"did you mean 'score'"),
        ("import nothing_of_the_kind\n", "score", r"mine.py, line 1: ModuleNotFoundError"),
        ("def score(x):\n    return [0.0]\n", "score", r"needs the argument x, but is called with prompts, .*answer"),
        ("raise SystemExit(3)\n", "score", r"mine.py, line 1: SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_serve_is_refused_in_one_line(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str], text: str, name: str, needle: str
) -> None:
    (tmp_path / "mine.py").write_text(text)
    given = users.arguments(tmp_path, model, "--reward.function", f"{tmp_path}/mine.py:{name}")
    capfd.readouterr()
    started = time.monotonic()
    assert run.main(given) == 2
    message = capfd.readouterr().err
    assert len(message.splitlines()) == 1 and re.search(needle, message), message
    assert not (tmp_path / "runs" / "run").exists()
    assert time.monotonic() - started < 10  # no weights, no DeepSpeed


@pytest.mark.parametrize("function", ["mine.py:", ":score", ".:score", "mine.py", "no_module_of_that_name:score"])
def test_what_names_no_function_is_refused(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str], function: str
) -> None:
    assert run.main(users.arguments(tmp_path, model, "--reward.function", function)) == 2
    message = capfd.readouterr().err
    assert len(message.splitlines()) == 1 and "reward.function" in message


def test_a_column_in_an_argument_s_place_is_refused(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "a b", "completions": "c"}] * 4
    assert run.main(users.arguments(tmp_path, model, rows=rows)) == 2
    assert "column 'completions'" in capfd.readouterr().err and not (tmp_path / "runs" / "run").exists()


@pytest.mark.parametrize(
    "returned,needle",
    [
        ("dict(enumerate(range(16)))", r"mine.py:score' must return one number.*it returned a dict: \{0: 0, 1: 1"),
        ("'01' * 8", r"it returned a str: '0101"),
    ],
)
def test_another_kind_of_answer_ends_the_run(tmp_path: Path, model: Path, returned: str, needle: str) -> None:
    (tmp_path / "mine.py").write_text(f"def score(**_):\n    return {returned}\n")
    with pytest.raises(RuntimeError, match=needle):
        run.main(users.arguments(tmp_path, model, "--reward.function", f"{tmp_path}/mine.py:score"))
    assert "must return one number" in (tmp_path / "runs/run/crash.txt").read_text()


def test_one_that_does_not_return_ends_the_run_by_its_name(tmp_path: Path, model: Path) -> None:
    (tmp_path / "mine.py").write_text("import time\ndef score(**_):\n    time.sleep(60)\n")
    function = f"{tmp_path}/mine.py:score"
    options = ("--reward.function", function, "--reward.batch_timeout_minutes", "0.01")
    with pytest.raises(RuntimeError, match=re.escape(function)):
        run.main(users.arguments(tmp_path, model, *options))
    folder = tmp_path / "runs/run"
    assert f"'{function}' has not returned after 0.01 minutes" in (folder / "crash.txt").read_text()
    assert (folder / "report.html").exists()


def command(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "engine.run", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


LEFT_BEHIND = """
import multiprocessing, os, signal, subprocess, time
pool = None
def stuck(file):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    below = subprocess.Popen(["sleep", "500"], start_new_session=True)
    file.write_text(f"{os.getpid()} {below.pid}")
    time.sleep(500)
def score(completions, **_):
    global pool
    if pool is None:
        from pathlib import Path
        pool = multiprocessing.Pool(3)
        file = Path(__file__).with_name("processes")
        pool.apply_async(stuck, (file,))
        while not file.exists() or not file.read_text():
            time.sleep(0.01)
        with file.open("a") as more:
            print("", *(one.pid for one in pool._pool), file=more)
    return [float(len(text)) for text in completions]
"""


def test_no_worker_outlives_the_run(tmp_path: Path, model: Path) -> None:
    """A pool that is never closed: one worker ignores SIGTERM and has a process of its own, in another session."""
    (tmp_path / "mine.py").write_text(LEFT_BEHIND)
    done = command(users.arguments(tmp_path, model, "--reward.function", f"{tmp_path}/mine.py:score"))
    assert done.returncode == 0, done.stderr
    processes = [int(one) for one in (tmp_path / "processes").read_text().split()]
    assert len(processes) == 5 and not any(alive(process) for process in processes)


DEAF = """
import time
def score(completions, **_):
    while True:
        try:
            time.sleep(60)
        except:
            pass
"""


@pytest.mark.slow  # two starts and the seconds of grace
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_that_cannot_be_interrupted_ends_with_the_process(tmp_path: Path, model: Path, ranks: int) -> None:
    """Here it catches every exception; on two ranks only the second one is stuck."""
    spared = "    import os\n    if os.environ['RANK'] == '0':\n        return [1.0] * len(completions)\n"
    text = DEAF if ranks == 1 else DEAF.replace("    while", f"{spared}    while")
    (tmp_path / "mine.py").write_text(text)
    function = f"{tmp_path}/mine.py:score"
    options = ("--reward.function", function, "--reward.batch_timeout_minutes", "0.02", "--launch.ranks", str(ranks))
    done = command(users.arguments(tmp_path, model, *options))
    assert done.returncode == 1 and f"'{function}' has not returned" in done.stderr, done.stderr
    folder = tmp_path / "runs/run"
    assert f"'{function}' has not returned" in (folder / "crash.txt").read_text()
    assert f"{(ranks > 1 and 'rank 1 failed') or ''}" in (folder / "crash.txt").read_text()
    assert (folder / "report.html").exists()


@pytest.mark.parametrize(
    "body,more,words",
    [
        ("import sys\n    sys.exit()", (), "ended itself: SystemExit"),
        ("raise GeneratorExit", (), "ended itself: GeneratorExit"),
        ("return [1e39 * i for i in range(len(completions))]", (), "no finite fp32 number"),
        ("return [2e38] * len(completions)", ("--reward.scale", "10"), "reward.scale"),
    ],
)
def test_what_no_training_can_follow_ends_the_run_with_its_reason(
    tmp_path: Path, model: Path, body: str, more: tuple[str, ...], words: str
) -> None:
    """Not as if it had finished, and not with a policy of NaN."""
    (tmp_path / "reward.py").write_text(f"def score(completions, **columns):\n    {body}\n")
    with pytest.raises(RewardError, match=words):
        run.main(users.arguments(tmp_path, model, *more))
    assert words in (tmp_path / "runs/run/crash.txt").read_text()
    assert not (tmp_path / "runs/run/model").exists()
