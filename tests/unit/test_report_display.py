"""What is printed during a run: plain lines, and the live panel at every width."""

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from engine.report import Recorder
from engine.report.display import PlainDisplay, can_be_live, evaluation_line, make_display, step_line
from engine.report.format import duration, number, percent, sparkline
from engine.report.live import _STYLES, LiveDisplay, panel
from engine.report.metrics import PHASES
from engine.report.output import Output
from engine.report.progress import Progress, describe

FULL = {
    "reward/mean": -0.0123,
    "reward/accuracy": 1.0,
    "kl/ref_mean": 1.2e-05,
    "policy/entropy": 11.93,
    "policy/clip_fraction": 0.125,
    "value/explained_variance": -123.4,
    "tokens_per_second": 123456.0,
    "rollout/response_tokens_mean": 1023.5,
    "memory/peak_gib": 139.5,
    "time/step": 4321.0,
    **{f"time/{name}": 543.21 for name in PHASES if name not in ("eval", "save")},
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def progress(total: int = 100, steps: int = 3, metrics: dict[str, float] = FULL, seconds: float = 10.0) -> Progress:
    clock = Clock()
    state = Progress(total, {"algo": "ppo"}, clock=clock)
    for step in range(1, steps + 1):
        clock.now += seconds
        state.finish_step(step, dict(metrics))
    return state


def drawn(state: Progress, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(panel(state, width))
    return capture.get().splitlines()


def test_a_plain_line_fits_a_log_whatever_the_values() -> None:
    line = step_line(progress(total=100_000, seconds=9_000.0))
    assert len(line) <= 110
    assert line.isascii()
    for piece in ("step      3/100000", "reward -0.0123", "acc 100.0%", "123k tok/s", "eta"):
        assert piece in line


def test_plain_columns_stay_in_place_when_a_metric_is_missing() -> None:
    full = step_line(progress())
    partial = step_line(progress(metrics={"reward/mean": 0.5, "tokens_per_second": 10.0}))
    assert partial.index("tok/s") == full.index("tok/s")
    assert "acc" not in partial


def test_plain_output_survives_any_encoding_and_adds_no_escape_codes(tmp_path: Path) -> None:
    raw = io.BytesIO()
    state = progress()
    display = PlainDisplay(state, Output(io.TextIOWrapper(raw, encoding="ascii")))
    display.open()
    display.message("β → 0")
    state.evaluation = (3, {"eval/accuracy": 0.5})
    display.evaluation()
    display.step()
    text = raw.getvalue().decode("ascii")
    assert "Tandem | PPO" in text
    assert "? ? 0" in text
    assert "eval   3/100  accuracy 50.0%" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("metrics", [{}, {"reward/mean": 0.5}, FULL, {"time/train": 0.0}])
def test_the_panel_fits_its_width(width: int, metrics: dict[str, float]) -> None:
    state = progress(metrics=metrics)
    state.evaluation = (2, {"eval/accuracy": 0.5})
    state.enter("generate")
    lines = drawn(state, width)
    assert {len(line) for line in lines} == {width}
    assert "step 3/100" in lines[0]


def test_the_panel_shows_where_the_run_is_at_80_columns() -> None:
    state = progress()
    state.evaluation = (2, {"eval/accuracy": 0.5})
    state.remember({"eval/accuracy": 0.5})
    state.enter("train")
    text = "\n".join(drawn(state, 80))
    for piece in ("train 0.0 s", "ETA 16m 10s", "100.0%", "50.0%", "step 2", "123k", "generate 9m 03s", "140 GiB"):
        assert piece in text
    state.ended = "crashed"
    assert "crashed" in drawn(state, 80)[0]


def test_each_phase_has_a_colour_of_its_own_in_the_panel() -> None:
    assert set(_STYLES) == set(PHASES)
    assert len(set(_STYLES.values())) == len(PHASES)


def test_graded_rewards_are_shown_where_accuracy_would_be() -> None:
    state = progress(metrics={"reward/mean": 0.25})
    state.evaluation = (2, {"eval/reward": 0.5})
    state.remember({"eval/reward": 0.5})
    assert evaluation_line(state) == "eval   2/100  reward 0.500"
    assert any("held-out" in line and "0.500" in line and "step 2" in line for line in drawn(state, 80))


class Broken(io.StringIO):
    def flush(self) -> None:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("stream", [None, Broken(), io.TextIOWrapper(io.FileIO("/dev/full", "w"))])
@pytest.mark.parametrize("live", [False, True, None])
def test_a_display_without_a_reader_is_silent(stream: io.TextIOBase | None, live: bool | None) -> None:
    display = make_display(progress(), Output(stream), live)
    display.open()
    display.step()
    display.message("nobody hears this")
    display.close()


RUN = """
import sys
sys.modules["torch.utils.tensorboard"] = None  # takes seconds to load
from pathlib import Path
from engine.report import Recorder
recorder = Recorder(Path(sys.argv[1]), header={"algo": "ppo"}, total_steps=300, live=sys.argv[2] == "live" or None)
for step in range(1, 301):
    recorder.step(step, {"reward/mean": 0.5})
recorder.close({"algo": "ppo"})
recorder.say_last("that was all")
"""


@pytest.mark.parametrize("where", ["| head -1", ">&-", ">/dev/full", "2>&1 | head -1"])
@pytest.mark.parametrize("live", ["live", "default"])
def test_a_run_survives_the_loss_of_its_output_and_ends_well(tmp_path: Path, where: str, live: str) -> None:
    command = f'set -o pipefail; "$0" -c "$1" "$2" {live} {where}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, RUN, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 300
    assert (tmp_path / "summary.json").exists()
    assert (tmp_path / "report.html").exists()


def test_the_last_words_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(tmp_path, header={}, total_steps=1, live=True)
    recorder.close()
    recorder.say_last(f"report {'x' * 200}")
    assert capsys.readouterr().out.endswith(f"report {'x' * 200}\n"), "a wrapped path cannot be copied"


def test_time_left_ignores_the_first_step_and_follows_the_recent_ones() -> None:
    clock = Clock()
    state = Progress(10, {}, clock=clock)
    assert state.seconds_left() is None
    for step, now in enumerate((100.0, 110.0, 120.0), start=1):
        clock.now = now
        state.finish_step(step, {})
    assert state.seconds_left() == pytest.approx(70.0)


@pytest.mark.parametrize(
    ("environment", "encoding", "live"),
    [
        ({"TERM": "xterm"}, "utf-8", True),
        ({"TERM": "dumb"}, "utf-8", False),
        ({}, "utf-8", False),
        ({"TERM": "xterm", "CI": "true"}, "utf-8", False),
        ({"TERM": "xterm"}, "ascii", False),
    ],
)
def test_live_only_where_a_terminal_can_show_it(environment: dict[str, str], encoding: str, live: bool) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    assert can_be_live(Output(Terminal(io.BytesIO(), encoding=encoding)), environment) is live
    assert not can_be_live(Output(io.TextIOWrapper(io.BytesIO(), encoding=encoding)), environment)


def test_log_lines_of_libraries_go_above_the_live_panel_and_their_handlers_come_back() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(sys.stderr)
    before = handler.stream
    logger = logging.getLogger("a.library")
    logger.addHandler(handler)
    display = LiveDisplay(progress(), Output(stream), Console(file=stream, force_terminal=True, width=80))
    try:
        display.open()
        assert handler.stream is not before
        logger.warning("a library warns")
    finally:
        display.close()
        logger.removeHandler(handler)
    assert handler.stream is before
    assert "a library warns" in stream.getvalue()
    display.close()


def test_phases_nest_and_end_with_their_block(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, header={}, total_steps=1, live=False)
    seen = []
    with recorder.phase("train"):
        with recorder.phase("sync"):
            seen.append(recorder._progress.phase)
        seen.append(recorder._progress.phase)
    seen.append(recorder._progress.phase)
    recorder.close()
    assert seen == ["sync", "train", None]


def test_header_pieces() -> None:
    header = {"algo": "rloo", "model": "m", "data": None, "seed": 1, "world_size": 8}
    assert describe(header) == ["RLOO", "m", "seed 1", "8 ranks"]


def test_numbers() -> None:
    numbers = [number(x) for x in (0, 0.0123, 1.0, -12.34, 999.4, 999.6, 12_345, 1.2e-5, 2.5e9)]
    assert numbers == ["0", "0.0123", "1.00", "-12.3", "999", "1.00k", "12.3k", "1.2e-05", "2.50G"]
    durations = [duration(x) for x in (0.04, 9.96, 192, 7500, 273_600, float("inf"))]
    assert durations == ["0.0 s", "10 s", "3m 12s", "2h 05m", "3d 04h", "?"]
    assert percent(0.6237) == "62.4%"


def test_sparkline_shows_the_whole_history_in_the_width_given() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(list(range(1000)), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, float("nan"), 1.0], 8) == "▁▁"
    assert sparkline([], 8) == ""
    assert sparkline([1.0], 0) == ""
