"""report.html, the pictures and the closing lines."""

import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from engine.report import closing_lines, write_report
from engine.report.__main__ import main
from engine.report.curve_colours import COLOURS, style_sheet
from engine.report.curves import Series, smooth, thin
from engine.report.figures import title
from engine.report.html import page
from engine.report.metrics import CURVES, PHASES
from engine.report.records import load_run
from engine.report.svg import line_chart, stacked_chart, ticks

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>\"&\x00"


def write(run_dir: Path, name: str, rows: list[dict]) -> None:
    (run_dir / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


class Tags(HTMLParser):
    """Collects the tags of a page with their attributes, and checks that they close in order."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_nothing_a_run_contains_becomes_markup(tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", [{"step": 1, EVIL: 1.0, f"time/{EVIL}": 2.0, "reward/mean": None}])
    row = {"step": 1, "prompt": EVIL, "response": EVIL, "reward": EVIL, "finish_reason": EVIL, EVIL: EVIL}
    write(tmp_path, "samples.jsonl", [row])
    (tmp_path / "config.yaml").write_text(f"algo: ppo\nmodel:\n  path: {json.dumps(EVIL)}\n# {EVIL}")
    (tmp_path / "summary.json").write_text(json.dumps({"algo": EVIL, "seed": EVIL, "versions": {EVIL: EVIL}}))
    (tmp_path / "crash.txt").write_text(f"ValueError: {EVIL}\n\nTraceback {EVIL}")
    tags = Tags(page(load_run(tmp_path)))
    assert not {tag for tag, _ in tags.seen} & {"script", "img", "link", "iframe"}
    assert not [name for _, attributes in tags.seen for name in attributes if name.startswith("on") or name == "src"]


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", [{"step": step, "reward/mean": step / 9} for step in range(9)])
    assert not re.search(r"https?:|url\(|@import|src=", page(load_run(tmp_path)))


@pytest.mark.parametrize("missing", ["metrics.jsonl", "samples.jsonl", "summary.json", "config.yaml", "all"])
def test_any_file_may_be_missing(tmp_path: Path, missing: str) -> None:
    write(tmp_path, "metrics.jsonl", [{"step": 1, "reward/mean": 0.5}, {"step": 1, "eval/accuracy": 0.5}])
    write(tmp_path, "samples.jsonl", [{"step": 1, "prompt": "p"}])
    (tmp_path / "summary.json").write_text('{"algo": "ppo", "accuracy_before": 0.25, "accuracy_after": 0.5}')
    (tmp_path / "config.yaml").write_text("algo: ppo")
    for path in list(tmp_path.iterdir()):
        if missing in (path.name, "all"):
            path.unlink()
    text = write_report(tmp_path).read_text()
    Tags(text)
    assert ("+25.0 points" in text) == (missing not in ("summary.json", "all"))
    assert ("<svg" in text) == (missing not in ("metrics.jsonl", "all"))
    assert ("no summary" in text) == (missing in ("summary.json", "all"))
    assert ("Resolved configuration" in text) == (missing not in ("config.yaml", "all"))
    assert ("<table>" in text) == (missing not in ("samples.jsonl", "all"))


@pytest.mark.parametrize("text", ["{", "- a\n- b", "a: [", "null", "\x00"])
def test_torn_files_cost_only_themselves(tmp_path: Path, text: str) -> None:
    for name in ("summary.json", "config.yaml", "samples.jsonl"):
        (tmp_path / name).write_text(text)
    write(tmp_path, "metrics.jsonl", [{"step": 1, "reward/mean": 0.5}])
    assert "<h3>Reward</h3>" in page(load_run(tmp_path))


def test_first_and_last_step_are_compared(tmp_path: Path) -> None:
    write(
        tmp_path,
        "samples.jsonl",
        [{"step": step, "prompt": "p", "response": f"answer at {step}", "reward": 0.5} for step in (1, 1, 5, 9, 9)],
    )
    text = page(load_run(tmp_path))
    assert text.count("answer at 1<") == 2
    assert text.count("answer at 9<") == 2
    assert "answer at 5" not in text


def test_pictures_are_drawn_and_the_command_rebuilds_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"step": s, "reward/mean": 0.0, "kl/ref_mean": 0.1, "time/train": 1.0} for s in range(1, 4)]
    write(tmp_path, "metrics.jsonl", rows)
    assert main([str(tmp_path)]) == 0
    assert str(tmp_path / "report.html") in capsys.readouterr().out
    for name in ("curves.png", "details.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert main([str(tmp_path / "nowhere")]) == 1


def test_graded_rewards_are_compared_and_drawn_with_the_rewards(tmp_path: Path) -> None:
    rows = [{"step": 1, "reward/mean": 0.25}, {"step": 1, "eval/reward": 0.12}, {"step": 2, "eval/reward": 0.56}]
    write(tmp_path, "metrics.jsonl", rows)
    for summary in ({"algo": "ppo", "reward_before": 0.12, "reward_after": 0.56}, {}):
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        text = page(load_run(tmp_path))
        assert "Mean reward, before → after" in text
        assert "0.12 → 0.56" in text
        assert "+0.44" in text
        assert "<title>step 1: train 0.250, held-out 0.120</title>" in text
        assert "more metrics" not in text
        assert "ccuracy" not in text.partition("</style>")[2]


def test_each_phase_and_each_curve_of_a_chart_has_a_colour_of_its_own(tmp_path: Path) -> None:
    curves = max(len(curve.metrics) for curve in CURVES)
    light, dark = style_sheet().split("prefers-color-scheme: dark")
    for scheme in (light, dark):
        for name, count in (("p", len(PHASES)), ("c", curves)):
            colours = [re.findall(rf"--{name}{i}: (#\w+);", scheme) for i in range(count)]
            assert len({colour for (colour,) in colours}) == count
    assert len(COLOURS) == len(PHASES) + curves
    write(tmp_path, "metrics.jsonl", [{"step": 1, **{f"time/{phase}": 1.0 for phase in PHASES}}])
    text = page(load_run(tmp_path))
    for i, phase in enumerate(PHASES):
        assert f'<i class="p{i}"></i>{phase}</span>' in text
    assert all(f".{name}{count - 1} {{" in text for name, count in (("p", len(PHASES)), ("c", curves)))


def test_the_turns_on_a_gpu_are_shown(tmp_path: Path) -> None:
    row = {
        "weights/logprob_gap_mean": 0.0121, "weights/logprob_gap_p999": 0.185,
        "memory/generate_gib": 51.4, "memory/train_gib": 60.6, "memory/asleep_gib": 33.7, "memory/asleep_growth": 0.0,
        "memory/plan_error_generate": -0.0312, "memory/plan_error_train": 0.0123,
        "time/generate": 6.0, "time/sleep": 0.5, "time/offload": 1.5, "time/train": 7.0, "time/sync": 0.25,
    }  # fmt: skip
    write(tmp_path, "metrics.jsonl", [{"step": step} | row for step in (1, 2)])
    text = write_report(tmp_path).read_text()
    for told in (
        "<title>step 2: mean 0.0121, 99.9 % 0.185</title>",
        "<title>step 2: sampling 51.4, training 60.6, asleep 33.7</title>",
        "<title>step 2: sampling -3.1%, training 1.2%</title>",
        "train 7.0 s, generate 6.0 s, offload 1.5 s, sleep 0.5 s, sync 0.2 s</title>",
    ):
        assert told in text
    assert "<summary>1 more metric</summary>" in text and "<h3>memory/asleep_growth</h3>" in text
    assert (tmp_path / "details.png").read_bytes().startswith(b"\x89PNG")


def test_scores_that_were_all_right_or_wrong_for_a_while_do_not_make_an_accuracy(tmp_path: Path) -> None:
    write(
        tmp_path,
        "metrics.jsonl",
        [
            {"step": 0, "eval/accuracy": 0.0},
            {"step": 1, "reward/mean": 0.0, "reward/accuracy": 0.0},
            {"step": 2, "eval/reward": 0.5},
        ],
    )
    run = load_run(tmp_path)
    assert run.series("eval/reward") == [(0, 0.0), (2, 0.5)]
    assert not {"eval/accuracy", "reward/accuracy"} & set(run.names())
    assert "0.00 → 0.50" in page(run)


def test_samples_show_whole_numbers_whole_and_names_in_words(tmp_path: Path) -> None:
    row = {"step": 1, "prompt": "p", "response": "r", "reward": 1.0, "policy_version": 1234, "score": 0.5}
    write(tmp_path, "samples.jsonl", [row])
    text = page(load_run(tmp_path))
    assert "policy version 1234<br>score 0.500" in text
    assert "<b>1.00</b>" in text


def test_held_out_responses_have_tables_of_their_own(tmp_path: Path) -> None:
    rows = [{"step": step, "prompt": "p", "response": f"held at {step}", "held_out": True} for step in (0, 5, 9)]
    write(tmp_path, "samples.jsonl", [*rows, {"step": 9, "prompt": "p", "response": "r", "dropped": True}])
    text = page(load_run(tmp_path))
    samples, held_out = text.split("<h2>Held-out responses</h2>")
    assert "After step 0<" in held_out and "After step 9<" in held_out and "held at 5" not in text
    assert (
        "dropped: nothing was learned" in samples
        and "held at" not in samples
        and "special" not in samples.split("</style>")[1]
    )


def test_special_tokens_can_be_shown(tmp_path: Path) -> None:
    """By a switch of style alone, once on the page."""
    row = {"step": 1, "prompt": "p", "reward": 1.0}
    rows = [row | {"response": "a", "ending": "<|end|>"}, row | {"response": "b c", "response_raw": "b<think>c"}]
    write(tmp_path, "samples.jsonl", [*rows, *(one | {"held_out": True} for one in rows)])
    text = page(load_run(tmp_path))
    assert text.count('type="checkbox"') == 1 and text.count('id="special"') == 1
    for shown in ('class="plain">a<', 'class="special">a&lt;|end|&gt;<', 'class="special">b&lt;think&gt;c<'):
        assert text.count(shown) == 2
    Tags(text)


def test_the_picture_for_a_readme_says_what_ran(tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", [{"step": s, "reward/mean": 0.5, "reward/accuracy": 0.5} for s in (1, 2)])
    (tmp_path / "config.yaml").write_text("algo: rloo\ndata:\n  task: addition")
    write_report(tmp_path)
    header = (tmp_path / "curves.png").read_bytes()[16:24]
    assert struct.unpack(">II", header) == (1200, 420)
    assert title(load_run(tmp_path)) == "RLOO · addition"
    (tmp_path / "config.yaml").write_text("algo: rloo\ndata:\n  path: somewhere/prompts.jsonl")
    assert title(load_run(tmp_path)) == "RLOO · prompts.jsonl"
    (tmp_path / "config.yaml").unlink()
    assert title(load_run(tmp_path)) == tmp_path.name


@pytest.mark.parametrize(
    "points",
    [
        [(5, 0.0)],
        [(1, 2.0), (2, 2.0)],
        [(1, -1e-9), (2, 1e-9)],
        [(1, 1e12), (2, -3e12)],
        [(s, s % 7) for s in range(5000)],
    ],
)
def test_charts_are_well_formed_and_stay_inside_their_frame(points: list[tuple[int, float]]) -> None:
    for svg in (line_chart([Series("a", points, "c0")], str), line_chart([Series("a", points, "c0", dots=True)], str)):
        root = ElementTree.fromstring(svg)
        numbers = [float(n) for path in root.iter("path") for n in re.findall(r"-?[\d.]+", path.attrib["d"])]
        assert numbers
        assert all(-1 <= n <= 381 for n in numbers)
    assert len(svg) < 100_000


def test_a_point_says_its_step_and_value() -> None:
    svg = line_chart([Series("train", [(7, 0.5)], "c0"), Series("held-out", [(7, 0.25)], "c1")], "{:.2f}".format)
    assert "<title>step 7: train 0.50, held-out 0.25</title>" in svg


def test_stacked_areas_add_up_and_a_missing_part_counts_as_zero() -> None:
    svg = stacked_chart([Series("a", [(1, 1.0), (2, 1.0)], "p0"), Series("b", [(2, 3.0)], "p1")], "{:.0f}".format)
    assert "<title>step 1: 1: a 1</title>" in svg
    assert "<title>step 2: 4: b 3, a 1</title>" in svg


def test_smoothing_keeps_a_straight_line_straight() -> None:
    line = [(step, 2.0 * step) for step in range(100)]
    assert [y for _, y in smooth(line)][3:-3] == pytest.approx([y for _, y in line][3:-3])
    assert smooth([(1, 5.0)]) == [(1, 5.0)]


def test_thinning_keeps_the_mean_and_the_last_step() -> None:
    points = thin([(step, float(step)) for step in range(1, 1501)])
    assert len(points) == 150
    assert points[-1] == (1500, 1495.5)
    assert sum(y for _, y in points) / 150 == pytest.approx(750.5)


def test_ticks_are_round_and_enclose_the_range() -> None:
    assert ticks(0, 0.82, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(-0.06, 0.03, 5)[0] <= -0.06
    assert ticks(3, 100, 5)[-1] >= 100


def test_closing_lines_say_what_was_learned_where_it_is_and_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "report.html").touch()
    summary = {"algo": "ppo", "steps": 100, "seconds": 192.0, "accuracy_before": 0.125, "accuracy_after": 0.75}
    text = closing_lines(summary, tmp_path, ["python -m engine.run --resume"])
    assert "PPO: accuracy 12.5% -> 75.0% (+62.5 points)" in text
    assert "100 steps, 3m 12s" in text
    assert f"{tmp_path}/report.html" in text
    assert "samples.jsonl" not in text, "only what is there is named"
    assert text.endswith("To go on:\n  python -m engine.run --resume")
    assert text.isascii()


def test_closing_lines_do_not_dress_up_a_loss_or_invent_an_accuracy(tmp_path: Path) -> None:
    assert "(-10.0 points)" in closing_lines(
        {"algo": "ppo", "accuracy_before": 0.5, "accuracy_after": 0.4}, tmp_path, []
    )
    assert "no accuracy was measured" in closing_lines({"algo": "ppo"}, tmp_path, [])


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (0.12, 0.56, "0.12 -> 0.56 (+0.44)"),
        (-0.001, -1.5, "0.00 -> -1.50 (-1.50)"),
        (0.004, 0.006, "0.00400 -> 0.00600 (+0.00200)"),
        (0.0, 12_345.0, "0 -> 12.3k (+12.3k)"),
        (None, 0.56, "0.56 at the end; it was not measured before training"),
    ],
)
def test_closing_lines_tell_the_mean_of_graded_rewards(
    tmp_path: Path, before: float | None, after: float, told: str
) -> None:
    summary = {"algo": "ppo", "reward_before": before, "reward_after": after}
    assert f"PPO: mean reward {told}" in closing_lines(summary, tmp_path, [])


def test_standard_errors_are_part_of_their_metric(tmp_path: Path) -> None:
    """Drawn at its points, said beside its last value, and no chart of their own."""
    rows = [{"step": step, "eval/accuracy": value, "eval/accuracy_stderr": 0.02, "eval/pass@4": 0.9,
             "eval/pass@4_stderr": 0.01} for step, value in ((0, 0.25), (10, 0.75))]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_report(tmp_path).read_text()
    assert "+50.0 points</span> on held-out prompts, standard error at the end 2.0 points" in text
    assert text.count("held-out 75.0% ± 2.0%") == 2 and "value 0.900 ± 0.0100" in text and "stderr" not in text
    assert len(re.findall(r'<path class="raw c1" d="M[\d.]+ [\d.]+V[\d.]+"/>', text)) == 2
