"""The benchmark harness: what is planned, timed, recorded and reported. No kernel is measured here."""

import argparse
import json
from dataclasses import fields, replace

import pytest
import torch

from benchmarks import cases, targets
from benchmarks.cases import Case
from benchmarks.competitors import COMPETITORS, OURS, Outcome, Unavailable
from benchmarks.competitors.bare import chunk_rows
from benchmarks.conftest import _shard, recorded_command
from benchmarks.guard import Failure, attempt
from benchmarks.inputs import exact, make_inputs
from benchmarks.measure import Finding, Setup, measure, record
from benchmarks.merge import main as merge_files
from benchmarks.plot import COLOURS
from benchmarks.records import Record, load, merge, save
from benchmarks.tables import markdown, plain, report
from benchmarks.timing import CudaClock, interleave, median_ratio, paired_ratios, quantile, round_order

ISSUE_KEYS = {
    "case", "impl", "T", "H", "V", "inputs", "live_rows", "ms", "ratio_to_bare", "tflops", "extra_gib", "logprob_err",
    "card", "torch", "triton", "command",
}  # fmt: skip
POLICY = Case("policy", 8192, 4096, 151936)


def setup(**changes) -> Setup:
    return replace(Setup("cpu", "pytest benchmarks --benchmark", ["tandem", "eager"], float("inf"), 60.0), **changes)


def made(impl: str = OURS, case: Case = POLICY, **changes) -> Record:
    fields = setup().describe(case, impl) | {"card": "a card", "status": "ok"}
    return Record(**(fields | changes))


class Ticks:
    """A clock that runs the call and reads out times given beforehand."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)

    def measure(self, call) -> float:
        call()
        return self.times.pop(0)


# the plan


@pytest.mark.parametrize("count", [1, 2, 3, 7, 200])
def test_shards_hold_every_case_once(count):
    everything = cases.everything()
    parts = [cases.shard(everything, index, count) for index in range(1, count + 1)]
    assert sorted(case.id for part in parts for case in part) == sorted(case.id for case in everything)
    if count < 10:
        costs = [sum(case.cost for case in part) for part in parts]
        assert max(costs) < 1.2 * min(costs)
        assert all(part == sorted(part, key=everything.index) for part in parts)


def test_shards_keep_the_inputs_of_a_shape_together():
    for index in range(1, 8):
        part = cases.shard(cases.everything(), index, 7)
        shapes = [(case.name, case.H, case.V) for case in part if case.inputs == "peaked"]
        assert all(Case(name, 8192, *head) in part for name, *head in shapes)


def test_plan_has_no_duplicates_and_contains_the_targets():
    for plan in (cases.everything(), cases.targets(), cases.small()):
        assert len({case.id for case in plan}) == len(plan)
    assert set(cases.targets()) <= set(cases.everything())
    flat = {(case.name, case.H, case.V) for case in cases.targets() if case.inputs == "flat"}
    assert flat == set(targets.GPU_RATIOS)
    assert {(case.name, case.dtype) for case in cases.small()} >= set(targets.CPU_SPEEDUPS)


@pytest.mark.parametrize("text", ["", "3", "0/2", "a/b", "1/"])
def test_bad_shards_are_refused(text):
    if text == "0/2":
        with pytest.raises(ValueError, match="expected 1/2 to 2/2"):
            cases.shard(cases.targets(), *cases.parse_shard(text))
    else:
        with pytest.raises(argparse.ArgumentTypeError, match="not of the form"):
            _shard(text)


def test_useful_flops_leave_dead_rows_out():
    product = 2 * 8192 * 4096 * 151936
    assert POLICY.flops == 3 * product
    assert replace(POLICY, name="policy-half-dead").flops == 2 * product
    assert replace(POLICY, name="kl").flops == 2 * product


@pytest.mark.parametrize(("vocabulary", "rows"), [(151936, 4096), (128256, 4096), (32000, 8192)])
def test_bare_products_come_in_equal_chunks(vocabulary, rows):
    assert chunk_rows(replace(POLICY, V=vocabulary)) == rows


# inputs


@pytest.mark.parametrize("kind", ["flat", "peaked"])
def test_inputs_are_as_described(kind):
    case = Case("policy", 1024, 256, 500, inputs=kind, dtype="float32")
    inputs = make_inputs(case, "cpu", seed=0)
    p = torch.log_softmax(inputs.hidden @ inputs.weight.t(), 1).gather(1, inputs.targets[:, None]).exp()
    if kind == "flat":
        assert p.mean() < 0.02
    else:
        assert 0.3 < p.mean() < 0.9 and (p > 1 - 1e-5).float().mean() > 0.05
    again = make_inputs(case, "cpu", seed=1, like=inputs)
    assert torch.equal(again.weight, inputs.weight) and not torch.equal(again.hidden, inputs.hidden)


def test_half_of_the_rows_are_dead_and_the_oracle_says_so():
    case = Case("policy-half-dead", 1024, 32, 500, dtype="float32")
    outcome = COMPETITORS["eager"].prepare(case, None)(inputs := make_inputs(case, "cpu", seed=0))
    dead = outcome.gradients[0].eq(0).all(1)
    assert dead.sum() == case.T - case.live_rows
    truth = exact(case, inputs)
    assert torch.equal(truth.dhidden.eq(0).all(1), dead[truth.rows])
    assert truth.gradient_error(outcome.gradients[0]) < 1e-5
    assert truth.logprob_error(outcome.logprobs[truth.rows]) < 1e-5


# timing


def test_interleaving_alternates_the_pair_and_keeps_it_together():
    names = ["tandem", "bare", "x", "y"]
    assert round_order(names, ("bare", "tandem"), 0) == ["bare", "tandem", "x", "y"]
    assert round_order(names, ("bare", "tandem"), 1) == ["tandem", "bare", "y", "x"]
    assert round_order(["x"], ("bare", "tandem"), 1) == ["x"]


def test_ratios_are_those_within_rounds():
    seen = []
    calls = {name: lambda index, name=name: seen.append((name, index)) for name in ("ours", "bare")}
    clock = Ticks(10, 11, 24, 20, 30, 33)  # the card is slower in each round; the order alternates
    times, failures = interleave(calls, clock, pair=("bare", "ours"), rounds=3)
    assert times == {"bare": [10, 20, 30], "ours": [11, 24, 33]} and not failures
    assert seen == [("bare", 0), ("ours", 0), ("ours", 1), ("bare", 1), ("bare", 2), ("ours", 2)]
    assert paired_ratios(times["ours"], times["bare"]) == pytest.approx([1.1, 1.2, 1.1])
    assert median_ratio(times["ours"], times["bare"]) == pytest.approx(1.1)
    assert median_ratio([1.0, None], [None, 2.0]) is None and median_ratio([1.0], None) is None


def test_a_slow_competitor_sits_rounds_out_but_the_pair_does_not():
    calls = dict.fromkeys(("bare", "slow"), lambda index: None)
    times, _ = interleave(calls, Ticks(*[2000.0] * 13), pair=("bare",), rounds=9, seconds=3)
    assert times["bare"] == [2000.0] * 9
    assert [value is None for value in times["slow"]] == [False] * 3 + [True] * 6


def test_a_call_that_fails_takes_no_further_part():
    def fails(index):
        if index == 1:
            raise torch.OutOfMemoryError("out of memory\nwith details")

    times, failures = interleave({"a": fails, "b": lambda index: None}, Ticks(*[1.0] * 9), pair=("b",), rounds=3)
    assert failures == {"a": Failure("oom", "OutOfMemoryError: out of memory")}
    assert times == {"a": [1.0, None, None], "b": [1.0] * 3}


class FakeEvent:
    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, stop):
        return 7.0


@pytest.mark.parametrize(("driver_allocations", "calls"), [([0, 0], 1), ([0, 1, 1, 1], 2), ([0, 1, 2, 3, 4, 5], 3)])
def test_a_gpu_measurement_in_which_the_driver_gave_memory_is_repeated(monkeypatch, driver_allocations, calls):
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_device_alloc": driver_allocations.pop(0)})
    clock = object.__new__(CudaClock)
    clock.buffer, clock.start, clock.stop = torch.empty(8), FakeEvent(), FakeEvent()
    clock.matrix, clock.product = torch.eye(2), torch.empty(2, 2)
    seen = []
    assert clock.measure(lambda: seen.append(1)) == 7.0
    assert len(seen) == calls and not driver_allocations


def test_quantiles():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2 and quantile([1.0, 2.0], 0.1) == pytest.approx(1.1)
    assert quantile([5.0], 0.9) == 5


# failures and records


def test_failures_are_results():
    def raises(error):
        def call():
            raise error

        return attempt(call)

    assert raises(torch.OutOfMemoryError("no memory")) == Failure("oom", "OutOfMemoryError: no memory")
    assert raises(Unavailable("not installed", "no module")) == Failure("not installed", "no module")
    assert raises(RuntimeError("CUDA error: out of memory")).status == "oom"
    assert raises(ZeroDivisionError("why")) == Failure("error", "ZeroDivisionError: why")
    assert attempt(lambda: 3) == 3


def test_one_record_for_each_implementation_whatever_becomes_of_it(monkeypatch):
    def prepare(case, inputs):
        def run(inputs):
            raise torch.OutOfMemoryError("too large")

        return run

    monkeypatch.setattr("benchmarks.competitors.eager.prepare", prepare)
    monkeypatch.setattr("benchmarks.measure.cpu_extra_gib", lambda case, name: 0.25)
    names = ["tandem", "bare", "bare-whole", "eager", "quack", "torch.compile"]
    case = Case("likelihood", 512, 16, 256, dtype="float32")
    found = {record.impl: record for record in measure(case, setup(implementations=names, case_seconds=0.0))}
    assert found["eager"].status == "oom" and found["eager"].ms is None
    assert found["torch.compile"].status == "no time"
    assert found["bare-whole"].status == "same as bare"
    ours = found["tandem"]
    assert ours.status == "ok" and ours.ms_p10 <= ours.ms <= ours.ms_p90 and ours.ratio_to_bare > 0
    assert ours.extra_gib == 0.25 and ours.logprob_err < 1e-5 and ours.grad_err < 1e-5 and ours.tflops > 0
    assert found["bare"].ratio_to_bare == 1 and found["bare"].extra_gib is None


def test_a_package_that_is_not_there_is_recorded():
    failure = attempt(lambda: COMPETITORS["quack"].prepare(POLICY, None))
    assert isinstance(failure, Failure) and failure.status == "not installed" and "quack" in failure.detail


def test_records_have_the_keys_of_the_issue(tmp_path):
    times = {OURS: [10.0, 12.0, 11.0], "bare": [10.0, 10.0, 10.0]}
    finding = Finding(lambda inputs: Outcome(), extra_gib=1.0, logprob_err=1e-6)
    save([record(POLICY, OURS, setup(), finding, times)], tmp_path / "out" / "a.json")
    (written,) = json.loads((tmp_path / "out" / "a.json").read_text())
    assert written.keys() == {field.name for field in fields(Record)} >= ISSUE_KEYS
    assert (written["ms"], written["ratio_to_bare"], written["rounds"]) == (11.0, 1.1, 3)
    assert written["tflops"] == pytest.approx(POLICY.flops / 0.011 / 1e12)


def test_merging_keeps_one_record_a_measurement_the_later_one():
    old, new, other = made(ms=2.0), made(ms=1.0), made("bare", ms=3.0)
    assert merge([[old, other], [new]]) == [new, other]
    assert merge([[new], [made(status="no time")]]) == [new]
    assert merge([[new], [made(status="error")]]) == [made(status="error")]
    assert len(merge([[old], [made(ms=1.0, card="another")]])) == 2


def test_merging_files_writes_json_tables_and_a_picture(tmp_path, capsys):
    first = [made(ms=2.0, ratio_to_bare=1.2), made("bare", ms=1.6, ratio_to_bare=1.0), made("eager", status="oom")]
    save(first, tmp_path / "a.json")
    save([made(ms=1.5, ratio_to_bare=0.97, extra_gib=1.2, logprob_err=1e-6)], tmp_path / "b.json")
    merge_files([str(tmp_path / "a.json"), str(tmp_path / "b.json"), "-o", str(tmp_path / "results" / "all.json")])
    assert [record.ms for record in load(tmp_path / "results" / "all.json")] == [1.5, 1.6, None]
    assert "≤ 0.980 | yes" in (tmp_path / "results" / "all.md").read_text()
    assert (tmp_path / "results" / "all.png").stat().st_size > 5000
    assert "oom" in capsys.readouterr().out


# targets


def test_targets_are_held_against_the_right_numbers():
    good = made(ratio_to_bare=0.97, extra_gib=1.2, logprob_err=1e-6, grad_err=4e-3)
    eager = made("eager", grad_err=3e-3)
    assert [verdict.met for verdict in targets.verdicts([good, eager])] == [True] * 4
    slow = replace(good, ratio_to_bare=0.99, grad_err=7e-3)
    assert [verdict.met for verdict in targets.verdicts([slow, eager])] == [False, True, True, False]
    failed = made(status="error")
    assert not any(verdict.met for verdict in targets.verdicts([failed]))
    assert targets.verdicts([replace(good, H=512), replace(good, T=65536), eager]) == []


def test_an_fp32_accumulator_counts_as_the_gradient():
    accumulator = 4 * POLICY.H * POLICY.V / 2**30
    values = [targets.verdicts([made(extra_gib=extra)])[1].value for extra in (1.0, accumulator + 1.0)]
    assert values == pytest.approx([1.0, 1.0])


def test_the_cpus_targets_are_about_eager():
    case = Case("policy", 512, 576, 49152)
    ours = made(case=case, ratio_to_eager=0.5, extra_gib=0.02)
    found = targets.verdicts([ours, made("eager", case=case, extra_gib=0.2)])
    assert [(verdict.value, verdict.met) for verdict in found] == [(2.0, True), (pytest.approx(0.1), True)]


# tables and pictures


def test_tables_are_aligned_and_show_failures():
    text = report([made(ms=1.0, ratio_to_bare=1.5, rounds=9), made("trl", status="oom")], plain)
    lines = text.splitlines()
    assert "1.500" in lines[2] and lines[3].endswith("oom")
    assert lines[2].index("1.500") + 5 == lines[0].index("× bare") + 6
    assert report([made(ms=1.0)], markdown).startswith("| case | T |")


def test_every_implementation_has_a_colour_of_its_own():
    assert COLOURS.keys() == COMPETITORS.keys() and len(set(COLOURS.values())) == len(COLOURS)


@pytest.mark.parametrize("out", [["--benchmark-out", "/a/b"], ["--benchmark-out=/a/b"], []])
def test_a_record_names_no_place_of_its_machine(out: list[str]) -> None:
    found = recorded_command(["benchmarks", *out, "--benchmark", "-k", "dpo"])
    assert found == "pytest benchmarks --benchmark -k dpo"
