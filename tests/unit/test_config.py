"""The command line and configuration: every fault is one line naming the key, before anything heavy loads."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import engine.run
from engine.config import Config, ConfigError, cli
from engine.machine import devices
from engine.start import checks

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--config", str(ROOT / "configs" / "quickstart.yaml")]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "engine.run", *arguments], cwd=ROOT, capture_output=True, text=True)


BAD = {
    "unknown key": (["--train.learnin_rate", "1"], "train.learning_rate"),
    "key without section": (["--learning_rate", "1"], "train.learning_rate"),
    "initials": (["--train.lr", "1"], "did you mean train.learning_rate?"),
    "beginning of a word": (["--generation.temp", "1"], "did you mean generation.temperature or"),
    "part of several": (["--train.clip", "1"], "did you mean train.clip_low or train.clip_high?"),
    "no option": (["ppo"], "'ppo' is not an option"),
    "algorithm": (["--algo", "dqo"], "algo = 'dqo'"),
    "wrong type": (["--train.steps", "many"], "train.steps = 'many'"),
    "fraction for a count": (["--train.steps", "1.5"], "train.steps = '1.5'"),
    "out of range": (["--train.clip_low", "1.5"], "train.clip_low"),
    "not finite": (["--train.learning_rate", "nan"], "train.learning_rate"),
    "negative": (["--kl.coef", "-0.1"], "kl.coef"),
    "ranks": (["--launch.ranks", "3"], "rollout.prompts_per_step (32)"),
    "minibatches": (["--train.minibatches_per_batch", "7"], "into 7 equal minibatches"),
    "microbatch too small": (["--train.tokens_per_microbatch", "8"], "train.tokens_per_microbatch (8)"),
    "optimizer offload without its stage": (["--train.optimizer_offload", "cpu"], "train.zero_stage is 0: set it to 2"),
    "optimizer offload both ways": (
        ["--train.optimizer_offload", "cpu", "--train.zero_stage", "2", "--memory.offload", "on"],
        "memory.offload on takes",
    ),
    "truncated sampling": (["--generation.top_p", "0.9"], "generation.top_p"),
    "one sample for rloo": (["--algo", "rloo", "--rollout.samples_per_prompt", "1"], "rollout.samples_per_prompt"),
    "one sample for grpo": (["--algo", "grpo", "--rollout.samples_per_prompt", "1"], "rollout.samples_per_prompt"),
    "KL of a loss in a reward": (["--algo", "ppo", "--kl.estimator", "k3"], "kl.estimator"),
    "two prompt sources": (["--data.path", "x.jsonl"], "data.task and data.path"),
    "missing prompts": (
        [
            "--data.task",
            "null",
            "--data.path",
            "./nowhere.jsonl",
            "--model.path",
            "x",
            "--reward.function",
            "math:sqrt",
        ],
        "./nowhere.jsonl",
    ),
    "configuration of a task": (["--data.name", "main"], "data.name chooses"),
    "configuration of a file": (["--data.eval_path", "x.jsonl", "--data.eval_name", "main"], "is the file x.jsonl"),
    "missing model": (["--model.path", "./nowhere"], "model.path: there is no './nowhere'"),
    "two penalties": (["--rollout.missing_eos_penalty", "1", "--rollout.missing_eos_reward", "0"], "missing_eos"),
    "adaptive KL from zero": (["--kl.coef", "0", "--kl.target", "6"], "kl.target"),
    "no policy steps": (["--ppo.value_warmup_steps", "500", "--train.steps", "500"], "ppo.value_warmup_steps"),
    "reward function": (["--reward.function", "nofunction"], "reward.function"),
    "tensor parallel with hf": (
        ["--generation.tensor_parallel", "2", "--launch.ranks", "2"],
        "generation.backend vllm",
    ),
    "tensor parallel over too few ranks": (
        ["--generation.backend", "vllm", "--generation.tensor_parallel", "4", "--launch.ranks", "2"],
        "generation.tensor_parallel (4) must divide the number of ranks that generate (2)",
    ),
    "plan for no GPU": (["--memory.explain", "true", "--launch.device", "cpu"], "memory.gpu_gib"),
    "sleep level": (["--memory.sleep", "3"], "memory.sleep"),
    "old key": (["--generation.gpu_memory_fraction", "0.3"], "generation.gpu_memory_fraction"),
    "half precision on a CPU": (["--model.dtype", "float16", "--launch.device", "cpu"], "float16"),
    "kernels of another device": (["--train.kernel_backend", "triton", "--launch.device", "cpu"], "runs on cuda"),
    "name that leaves the folder": (["--name", "../up"], "name = '../up'"),
    "output that cannot be": (["--output_dir", "/dev/null/x"], "output_dir"),
    "environment": (["--env", "{'A=B': 1}"], "env"),
    "chat template for a task": (["--data.chat_template", "true"], "data.chat_template"),
    "reward module": (["--reward.function", "no_such_module:f"], "no_such_module"),
    "empty variable": (["--env", "{'': 1}"], "env"),
    "resume without run": (["--resume", "./nowhere"], "./nowhere"),
}


@pytest.mark.parametrize("arguments,needle", BAD.values(), ids=BAD.keys())
def test_bad_configurations_are_one_named_line(
    arguments: list[str], needle: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert engine.run.main([*([] if "--resume" in arguments else QUICK), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1, printed.err
    assert needle in printed.err


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["unknown key", "minibatches", "missing prompts", "reward module", "plan for no GPU"])
def test_bad_configurations_are_said_within_a_second(kind: str) -> None:
    arguments, needle = BAD[kind]
    started = time.perf_counter()
    result = run(*QUICK, *arguments)
    seconds = time.perf_counter() - started
    assert result.returncode == 2 and result.stdout == "" and needle in result.stderr, result
    assert seconds < 1.0, f"took {seconds:.2f} s"


@pytest.mark.parametrize(
    "text,needle",
    [
        ("train: [1, 2]", "train"),
        ("train: {stepz: 3}", "train.steps"),
        ("train: {steps: true}", "train.steps = True"),
        ("rollout: {missing_eos_penalty: yes}", "rollout.missing_eos_penalty"),
        ("- a list", "must be a mapping"),
        ("train: {steps: 3", "not YAML"),
        ("memory: {offload: 1}", "memory.offload = 1"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, needle: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=needle):
        cli.parse(["--config", str(tmp_path / "bad.yaml")])


def test_file_then_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_ENV", "")
    (tmp_path / "run.yaml").write_text(
        "env: {TANDEM_TEST_ENV: 3}\nalgo: rloo\ndata: {task: addition}\ntrain: {steps: 7, learning_rate: 1e-5}\n"
    )
    config, _ = cli.parse(["--config", str(tmp_path / "run.yaml"), "--train.steps", "9", "--train.zero_stage", "2"])
    assert (config.algo, config.train.steps, config.train.learning_rate, config.train.zero_stage) == (
        "rloo",
        9,
        1e-5,
        2,
    )
    import os

    assert os.environ["TANDEM_TEST_ENV"] == "3"


@pytest.mark.parametrize("switch", ["on", "off"])
def test_yaml_s_own_switches(tmp_path: Path, switch: str) -> None:
    """YAML reads a bare on or off as a truth value."""
    (tmp_path / "run.yaml").write_text(f"data: {{task: addition}}\nmemory: {{offload: {switch}}}\n")
    config, _ = cli.parse(["--config", str(tmp_path / "run.yaml")])
    assert config.memory.offload == switch
    assert cli.validate(yaml.safe_load(cli.dump_yaml(config))) == config


def test_a_tensor_parallel_group_is_allowed() -> None:
    config, _ = cli.parse([*QUICK, "--generation.backend", "vllm", "--generation.tensor_parallel", "2"])
    checks.check(config, 4, "cuda")


def test_printed_configuration_reads_back_the_same(tmp_path: Path) -> None:
    result = run(*QUICK, "--algo", "rloo", "--generation.stop_tokens", "['=']", "--print-config")
    assert result.returncode == 0, result.stderr
    assert Config.model_validate(yaml.safe_load(result.stdout)).generation.stop_tokens == ["="]
    (tmp_path / "again.yaml").write_text(result.stdout)
    assert run("--config", str(tmp_path / "again.yaml"), "--print-config").stdout == result.stdout


def test_help_explains_every_key() -> None:
    text = " ".join(run("--help").stdout.split())
    for key, field in cli.leaves():
        assert f"--{key} " in text
        assert field.description and field.description.split("\n")[0][:30] in text, key


def test_quickstart_is_the_default() -> None:
    assert run("--print-config").stdout == run(*QUICK, "--print-config").stdout


def test_parsing_imports_nothing_heavy() -> None:
    code = (
        "import sys, engine.config.cli, engine.machine.devices, engine.launch.launcher, engine.run;"
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


SPLIT = ["--schedule.placement", "split"]
UNFIT = {
    "nobody trains": ([*SPLIT, "--schedule.generators", "2"], 2, "ranks that train besides the 2"),
    "generators and no split": (["--schedule.generators", "2"], 4, "schedule.generators goes with"),
    "prompts over generators": ([*SPLIT, "--schedule.generators", "3"], 4, "multiple of schedule.generators (3)"),
    "prompts over trainers": (SPLIT, 4, "multiple of the number of ranks (3)"),
    "two ahead on the same devices": (["--schedule.staleness", "2"], 1, "needs schedule.placement split"),
    "asleep and awake": (["--schedule.staleness", "1", "--memory.sleep", "level2"], 1, "memory.sleep level2"),
    "offloaded and awake": (["--schedule.staleness", "1", "--memory.offload", "on"], 1, "memory.offload on"),
    "nobody to make room for": ([*SPLIT, "--memory.sleep", "kv"], 2, "memory.sleep kv does not go with"),
    "uncorrected": (["--schedule.staleness", "1", "--off_policy.correction", "false"], 1, "off_policy.correction"),
    "no ratio to correct": (["--algo", "online_dpo", "--off_policy.correction", "true"], 1, "online_dpo has none"),
    "one response to compare": (["--algo", "online_dpo", "--rollout.samples_per_prompt", "1"], 1, "at least 2"),
    "dual clip without a clip": (
        ["--algo", "grpo", "--grpo.loss", "cispo", "--grpo.dual_clip", "3"],
        1,
        "grpo.loss is cispo",
    ),
    "smoothed labels": (["--algo", "online_dpo", "--dpo.loss", "ipo", "--dpo.label_smoothing", "0.1"], 1, "not ipo"),
    "no room for a pair": (
        ["--algo", "online_dpo", "--train.tokens_per_microbatch", "20"],
        1,
        "longest pair of sequences: 2 x (rollout.max_prompt_tokens + rollout.max_response_tokens) = 26",
    ),
    "KL to steer": (["--algo", "bok", "--kl.coef", "0.1", "--kl.target", "3"], 1, "bok has none"),
    "no value model": (["--algo", "grpo", "--model.value_path", "v"], 1, "model.value_path is a value model to start"),
    "no reference": (["--algo", "bok", "--model.reference_path", "r"], 1, "reference policy, and bok has none"),
    "no KL to a reference": (["--kl.coef", "0", "--model.reference_path", "r"], 1, "penalty (kl.coef 0) there is none"),
    "many times the same response": (["--eval.samples_per_prompt", "4"], 1, "eval.temperature above 0"),
}


@pytest.mark.parametrize("arguments,ranks,needle", UNFIT.values(), ids=UNFIT.keys())
def test_settings_that_do_not_go_together(arguments: list[str], ranks: int, needle: str) -> None:
    config, _ = cli.parse([*QUICK, "--generation.backend", "vllm", *arguments])
    with pytest.raises(ConfigError) as refused:
        checks.check(config, ranks, "cpu")
    assert needle in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("algo", ["ppo", "rloo", "grpo", "online_dpo", "bok"])
@pytest.mark.parametrize("schedule", [[], ["--schedule.staleness", "1"], [*SPLIT, "--schedule.staleness", "3"]])
def test_every_algorithm_goes_with_every_schedule(algo: str, schedule: list[str]) -> None:
    config, _ = cli.parse([*QUICK, "--algo", algo, *schedule])
    checks.check(config, 2, "cuda")


def test_a_split_run_starts_as_few_ranks_as_it_needs() -> None:
    config, _ = cli.parse([*QUICK, *SPLIT, "--schedule.generators", "2", "--launch.device", "cpu"])
    assert devices.world_size(config) == 3
