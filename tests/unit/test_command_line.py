"""How settings are written: on the command line, in a file, in the environment; and what is refused of it."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

import pytest

import engine.run
from engine.config import Config, ConfigError, cli
from engine.launch import failures
from engine.machine import devices

TASK = ["--data.task", "addition"]


@pytest.fixture(autouse=True)
def nobody_s_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*devices.LAUNCHED, "LOCAL_WORLD_SIZE", failures.LAUNCHER, failures.REFUSAL_FILE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(failures, "PATIENCE", 0.0)
    monkeypatch.setattr(faulthandler, "enable", lambda: None)  # it asks for a real stderr


def parsed(*arguments: str) -> Config:
    return cli.parse([*TASK, *arguments])[0]


def in_file(tmp_path: Path, text: str, *arguments: str) -> Config:
    (tmp_path / "run.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    return cli.parse(["--config", str(tmp_path / "run.yaml"), *arguments])[0]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command line is refused with."""
    assert engine.run.main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1, printed.err
    return printed.err


@pytest.mark.parametrize(
    "arguments,key,value",
    [
        ("--lora.target_modules q_proj,v_proj", "lora.target_modules", ["q_proj", "v_proj"]),
        ("--lora.target_modules|q_proj, v_proj", "lora.target_modules", ["q_proj", "v_proj"]),
        ("--lora.target_modules [q_proj,v_proj]", "lora.target_modules", ["q_proj", "v_proj"]),
        ("--lora.target_modules=q_proj", "lora.target_modules", ["q_proj"]),
        ("--lora.target_modules=", "lora.target_modules", []),
        ("--generation.stop_tokens </s>", "generation.stop_tokens", ["</s>"]),
        ("--generation.stop_tokens|\n", "generation.stop_tokens", ["\n"]),
        ("--generation.stop_tokens| the", "generation.stop_tokens", [" the"]),
        ("--generation.stop_tokens|[',', 'a,b']", "generation.stop_tokens", [",", "a,b"]),
        ("--generation.stop_tokens [1,no,010]", "generation.stop_tokens", ["1", "no", "010"]),
        ("--train.adam_betas 0.9,0.95", "train.adam_betas", (0.9, 0.95)),
        ("--train.adam_betas [0.8,1e-1]", "train.adam_betas", (0.8, 0.1)),
        ("--reward.weights.model 0.5", "reward.weights", {"model": 0.5}),
        ("--reward.weights.model=0.5 --reward.weights.url -1", "reward.weights", {"model": 0.5, "url": -1}),
        ("--reward.weights function=1,model=0.5", "reward.weights", {"function": 1, "model": 0.5}),
        ("--reward.weights|{function: 1, model: 0.5}", "reward.weights", {"function": 1, "model": 0.5}),
        ("--reward.weights.model 2 --reward.weights function=1", "reward.weights", {"function": 1, "model": 2}),
        ("--env.TANDEM_A yes --env.TANDEM_B=a=b,c", "env", {"TANDEM_A": "yes", "TANDEM_B": "a=b,c"}),
        ("--env TANDEM_A=1,TANDEM_B=010", "env", {"TANDEM_A": "1", "TANDEM_B": "010"}),
        ("--train.entropy_coef -1e-3", "train.entropy_coef", -1e-3),
        ("--train.steps 5 --train.steps 7", "train.steps", 7),
    ],
)
def test_values_of_several_parts(arguments: str, key: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_A", "")
    monkeypatch.setenv("TANDEM_B", "")
    found = dict(cli.flat(parsed(*(arguments.split("|") if "|" in arguments else arguments.split(" ")))))[key]
    assert found == value


@pytest.mark.parametrize(
    "arguments,needles",
    [
        (["--generation.stop_tokens", "[a"], ["generation.stop_tokens = '[a'"]),
        (["--train.adam_betas", "0.9"], ["train.adam_betas", "a,b or [a, b]"]),
        (["--reward.weights", "0.5"], ["reward.weights", "name=value", "--reward.weights.name value"]),
        (["--reward.weights.model", "much"], ["reward.weights.model = 'much'", "name=value"]),
        (["--reward.weights", "{model: 1, model: 2}"], ["'model' is given twice"]),
        (["--reward.weights.model"], ["--reward.weights.model needs a value"]),
        (["--reward.weights.", "1"], ["unknown key 'reward.weights.'"]),
        (["--train.steps"], ["--train.steps needs a value"]),
        (["--memory.explain", "--train.steps", "3"], ["--memory.explain needs a value"]),
        (["--"], ["'--' is not an option"]),
        (["--resume", "x\nerror: y"], ["resume: 'x error: y' is not a run folder"]),
        (["--algo", "x" * 5000], ["algo = 'xxx", "[...]", "'grpo'"]),
    ],
)
def test_the_form_is_shown(capsys: pytest.CaptureFixture[str], arguments: list[str], needles: list[str]) -> None:
    line = refused(capsys, *([] if "--resume" in arguments else TASK), *arguments)
    assert all(needle in line for needle in needles) and len(line) < 1100, line


def test_help_shows_the_forms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--lora.target_modules A,B" in text and "--reward.weights NAME=VALUE" in text
    assert "--reward.weights.model 0.5" in text


@pytest.mark.parametrize(
    "text,needle",
    [
        ("train:\n  steps: 5\nrollout: {}\ntrain:\n  learning_rate: 1\n", "'train' is given twice, on lines 1 and 4"),
        ("train:\n  steps: 5\n  steps: 5\n", "'train.steps' is given twice, on lines 2 and 3"),
        ("train.steps: 5\ntrain.steps: 6\n", "'train.steps' is given twice, on lines 1 and 2"),
        ("train:\n  steps: 5\ntrain.steps: 6\n", "'train.steps' is given twice, on lines 2 and 3"),
        ("reward: {weights: {model: 1, model: 1}}", "'reward.weights.model' is given twice, on line 1"),
        ("train: 5\ntrain.steps: 6\n", "train = 5: is a section"),
        ("1: 2\n", "line 1: the key '1' is no name"),
        ("on: 2\n", "line 1: the key 'on' is no name"),
        ("? [a]\n: 2\n", "line 1: the key is no name"),
        ("train:\n\tsteps: 5\n", "line 2: not YAML"),
        ("train: &t\n  steps: *t\n", "an alias stands inside"),
        ("".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}1]\n" for i in range(9)).replace("*a-1, ", ""), "aliases"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("train.stepz: 5\n", "did you mean train.steps"),
        ("resume: runs/x\n", "it goes on the command line"),
        ("seed: 1:30\n", "seed = '1:30'"),
        ("train: [1]\n", "train"),
        ("a: 1\n---\na: 1\n", "single document"),
        ("seed: !!int x\n", "not YAML"),
        ("seed: !!python/name:os.system\n", "not YAML"),
        ("seed: \x01\n", "not YAML"),
    ],
)
def test_yaml_that_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, needle: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert needle in refused(capsys, "--config", str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    "text,key,value",
    [
        ("train.steps: 5\n", "train.steps", 5),
        ("train.steps: 5\ntrain: {learning_rate: 1e-6}\n", "train.learning_rate", 1e-6),
        ("train.steps: 5\ntrain:\n", "train.steps", 5),
        ("reward: {weights: {function: 1}}\nreward.weights.model: 2\n", "reward.weights", {"function": 1, "model": 2}),
        ("train:\nkl:\n", "kl.coef", 0.05),
        ("seed: 010\n", "seed", 10),
        ("train: {learning_rate: 3e-4, adam_eps: 1.e-8}\n", "train.adam_eps", 1e-8),
        ("\ufeffseed: 3\r\nlive: no\r\n", "live", False),
        ("x.y: 1\n".replace("x.y", "launch.timeout_minutes") + "memory: {offload: on}", "memory.offload", "on"),
        ("train: &t {steps: 5}\nppo: {}\n", "train.steps", 5),
        ("train: {<<: {steps: 5, warmup_steps: 2}, steps: 6}\n", "train.steps", 6),
        ("env: {TANDEM_A: yes, TANDEM_B: 010}\n", "env", {"TANDEM_A": "yes", "TANDEM_B": "010"}),
        ("env.TANDEM_A: off\n", "env", {"TANDEM_A": "off"}),
    ],
)
def test_yaml_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, key: str, value: object) -> None:
    monkeypatch.setenv("TANDEM_A", "")
    monkeypatch.setenv("TANDEM_B", "")
    assert dict(cli.flat(in_file(tmp_path, text, *TASK)))[key] == value


def test_files_that_are_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "Is a directory" in refused(capsys, "--config", str(tmp_path))
    (tmp_path / "x.yaml").write_bytes("seed: 1".encode("utf-16"))
    assert "not UTF-8" in refused(capsys, "--config", str(tmp_path / "x.yaml"))


def test_a_leading_tilde_is_the_user_s_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text = "output_dir: ~/runs\nmodel: {path: ~/policy}\nreward: {function: '~/mine.py:score', model: ~/judge}"
    config = in_file(tmp_path, text)
    assert (config.output_dir, config.model.path) == (f"{tmp_path}/runs", f"{tmp_path}/policy")
    assert (config.reward.function, config.reward.model) == (f"{tmp_path}/mine.py:score", f"{tmp_path}/judge")
    assert parsed("--output_dir=~/runs").output_dir == f"{tmp_path}/runs"


def test_a_run_s_configuration_that_was_emptied(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    for folder in (str(tmp_path / "run"), "~/run"):
        assert f"resume: {tmp_path}/run/config.yaml is empty" in refused(capsys, "--resume", folder)


@pytest.mark.parametrize(
    "arguments,missing",
    [
        (["--data.path", "p.jsonl"], ["model.path is missing", "reward.function, reward.model or reward.url"]),
        (["--model.path", "gpt2"], ["data.path is missing", "reward.function, reward.model or reward.url"]),
        ([*TASK, "--rollout.prompts_per_step", "3", "--train.minibatches_per_batch", "7"], ["7 equal minibatches"]),
        ([*TASK, "--data.path", "p.jsonl"], ["exactly one of data.task and data.path"]),
        ([*TASK], []),
    ],
)
def test_an_incomplete_configuration_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], missing: list[str]
) -> None:
    assert engine.run.main([*arguments, "--print-config", "--launch.device", "cpu"]) == 0
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert len(lines) == len(missing)
    for line, needle in zip(lines, missing, strict=True):
        assert line.startswith("not ready to run: ") and needle in line
    (tmp_path / "again.yaml").write_text(printed.out)
    assert engine.run.main(["--config", str(tmp_path / "again.yaml"), "--print-config"]) == 0
    assert capsys.readouterr().out == printed.out


COMPLETE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environment,needles",
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, ["LOCAL_RANK, MASTER_ADDR, MASTER_PORT are missing", "unset RANK WORLD_S"]),
        ({"RANK": "0"}, ["unset RANK"]),
        ({"WORLD_SIZE": "1"}, ["unset WORLD_SIZE"]),
        ({"LOCAL_RANK": "0"}, ["unset LOCAL_RANK"]),
        ({"RANK": "", "WORLD_SIZE": ""}, ["unset RANK WORLD_SIZE"]),
        ({name: COMPLETE[name] for name in COMPLETE if name != "MASTER_PORT"}, ["MASTER_PORT is missing", "unset"]),
        (COMPLETE, ["launch.ranks is 2", "WORLD_SIZE is 1", "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_"]),
        (COMPLETE | {"WORLD_SIZE": "two"}, ["WORLD_SIZE is 'two'", "unset"]),
        (COMPLETE | {"RANK": "-1"}, ["RANK is '-1'", "unset"]),
        (COMPLETE | {"RANK": "2", "WORLD_SIZE": "2"}, ["RANK is 2, but WORLD_SIZE is 2", "unset"]),
        (COMPLETE | {"WORLD_SIZE": "0"}, ["WORLD_SIZE is 0", "unset"]),
        (COMPLETE | {"WORLD_SIZE": "2", "MASTER_PORT": "99999"}, ["MASTER_PORT is 99999", "unset"]),
    ],
)
def test_a_launcher_s_leftovers_in_the_shell(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    needles: list[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    line = refused(capsys, "--launch.ranks", "2", "--launch.device", "cpu")
    assert all(needle in line for needle in needles), line


@pytest.mark.parametrize(
    "environment,ranks",
    [
        ({}, 2),
        ({"MASTER_ADDR": "node-1", "MASTER_PORT": "29500"}, 2),  # as cluster profiles set them: no rank
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, 2),
        (COMPLETE | {"WORLD_SIZE": "2"}, 2),
        (COMPLETE | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 4),  # torchrun on two machines
    ],
)
def test_an_environment_that_says_nothing_else(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], ranks: int
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert devices.world_size(parsed("--launch.ranks", "2", "--launch.device", "cpu")) == ranks


def test_one_rank_of_a_machine_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (COMPLETE | {"WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    assert failures.refuse(ConfigError("x: no")) == 2
    assert capsys.readouterr().err == "error: x: no\n"


def test_the_launcher_s_ranks_hand_the_first_refusal_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(failures.LAUNCHER, str(os.getppid()))
    monkeypatch.setenv(failures.REFUSAL_FILE, str(tmp_path / "refusal"))
    assert failures.refusal() == ""
    assert failures.refuse(ConfigError("x: first")) == failures.refuse(ConfigError("y: second")) == 2
    assert failures.refusal() == "error: x: first"
    assert capsys.readouterr().err == ""
