"""``python -m engine.run --algo ppo``: checks the configuration, starts the ranks, trains."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

from engine.config import Config, ConfigError, cli
from engine.launch import failures, launcher, signals
from engine.machine import children, devices, disk
from engine.machine.meeting import Meeting
from engine.memory import planning
from engine.models import hub
from engine.run_folder import checkpoints, folder
from engine.start import agreement, checks

FIXED = {
    "algo", "seed", "model.path", "model.value_path", "model.reference_path", "model.dtype", "lora.rank",
    "lora.alpha", "lora.target_modules", "data.task", "data.path", "data.name", "data.split", "data.shuffle",
    "data.mixture", "data.eval_fraction", "data.prompt_column", "data.completion_column", "data.messages_column",
    "data.chosen_column", "data.rejected_column", "data.tools_column", "data.loss_on", "data.max_row_tokens",
    "data.too_long", "data.chat_template", "data.chat_template_kwargs", "data.new_special_tokens", "data.templated",
    "rollout.max_prompt_tokens", "train.zero_stage", "train.optimizer_offload", "train.epochs_per_batch",
    "train.minibatches_per_batch", "schedule.placement", "schedule.staleness", "schedule.generators",
}  # fmt: skip
"""What a resumed run cannot change: its checkpoint would not load, or would go on as another run."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command line.

    Returns:
        0 when the run finished, 2 for a configuration that cannot work, 130 or 143 when stopped by Ctrl-C or SIGTERM,
        1 when another rank failed or was lost; a failure in this process raises.
    """
    argv = sys.argv[1:] if argv is None else argv
    if sys.stdout is None:  # closed by the caller: no file opened later may take its place
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if devices.is_rank():
        launcher.die_with_launcher()
        faulthandler.enable()  # a rank that a library ends by a signal says where it was
    meeting = Meeting()
    try:
        config, options = cli.parse(argv)
        if options.print_config:
            return _print_config(config)
        world_size, device_type = devices.world_size(config), devices.device_type(config)
        checks.check(config, world_size, device_type)
        if config.memory.explain:
            for plan in planning.plans(config, world_size, planning.gpu_bytes(config)).values():
                print(plan.table())
            return 0
        if config.resume is None:
            folder.check_new(config)
        else:
            _check_resumed_run(config, world_size)
        _check_packages(config)
        if device_type == "cuda" and not devices.is_rank():
            # Too small a GPU, or a machine with too little memory, is said before anything starts.
            plans = planning.plans(config, world_size, planning.gpu_bytes(config))
            planning.check_host(config, plans["train"], world_size - config.generating_ranks)
    except ConfigError as error:
        return failures.refuse(error, meeting)
    launcher.tidy_environment(device_type)
    launcher.mute_libraries()
    signals.stop_on_sigterm(devices.is_rank())
    try:
        if world_size > 1 and not devices.is_rank():
            return launcher.start_ranks(world_size, argv)
        agreement.on_settings(config, meeting)
        from engine import loop
        from engine.start import preflight  # import torch

        inputs = preflight.read(config)
        agreement.on_inputs(config, inputs, meeting)
        loop.run(preflight.with_steps(config, inputs), inputs, options.config)
    except ConfigError as error:
        return failures.refuse(error, meeting)
    except KeyboardInterrupt as error:
        if not failures.ours():  # the launcher says it
            print("interrupted", file=sys.stderr)
        return signals.exit_status(error)
    except failures.RankFailed as error:  # that rank has printed its traceback; our launcher has the last word
        if failures.LAUNCHER not in os.environ:
            print(f"error: {error}", file=sys.stderr)
        return 1
    except disk.WriteFailed as error:
        if not failures.ours():  # the launcher says it
            print(f"error: {failures.one_line(str(error))}", file=sys.stderr)
        return 1
    except Exception as error:
        if not failures.lost_connection(error):
            meeting.tell(failures.one_line(f"failed: {type(error).__name__}: {error}"))
            raise
        # The launcher, which sees the other rank's end, may send SIGTERM meanwhile: it changes nothing here.
        with contextlib.suppress(KeyboardInterrupt):
            if failures.ours() and failures.refusal(wait=1.0):
                return 1
        print(
            f"rank {os.environ.get('RANK')}: {' '.join(str(error).split())}", file=sys.stderr
        )  # follows from another's
        return 1
    return 0


def _print_config(config: Config) -> int:
    """The configuration on stdout, for ``--config`` to take again, and on stderr why it would not run yet."""
    print(cli.dump_yaml(config.model_copy(update={"resume": None})), end="")
    lacks = checks.missing(config)
    if not lacks:
        try:
            checks.check(config, devices.world_size(config), devices.device_type(config))
        except ConfigError as error:
            lacks = [str(error)]
    for line in lacks:
        print(f"not ready to run: {failures.one_line(line)}", file=sys.stderr)
    return 0


def _check_resumed_run(config: Config, world_size: int) -> None:
    """A resumed run needs a checkpoint of the same kind of run, by as many ranks, and something left to do."""
    run_dir = Path(str(config.resume))
    checkpoint = checkpoints.newest(run_dir)
    if checkpoint is None:
        torn = f" that is whole: {faults[0]}" if (faults := checkpoints.torn(run_dir)) else ""
        raise ConfigError(f"resume: {run_dir} has no checkpoint{torn} (save.every_steps writes them); start anew")
    disk.probe("resume", run_dir)
    before = dict(cli.flat(cli.load_run(run_dir)))
    for key, value in cli.flat(config):
        if key in FIXED and value != before[key]:
            raise ConfigError(f"resume: {key} is {before[key]} in {run_dir} and cannot become {value}")
    saved = checkpoints.read(checkpoint)
    if saved.world_size != world_size:
        raise ConfigError(
            f"resume: {checkpoint} was written by {saved.world_size} rank(s), not {world_size}: set launch.ranks"
        )
    if config.train.epochs is not None:  # the steps follow when the rows are counted
        return
    finished = saved.step == config.train.steps and (run_dir / "summary.json").exists()
    if finished or saved.step > config.train.steps:
        raise ConfigError(
            f"resume: {checkpoint} has all of train.steps ({config.train.steps}); give more, --train.steps N"
        )


def _check_packages(config: Config) -> None:
    """What this run needs and the package imports without."""
    setup = "run make setup, or pip install .[gpu]"
    needed = {"deepspeed": ("training", setup)}
    if config.generation.backend == "vllm":
        needed["vllm"] = ("generation.backend vllm", setup)
    if config.lora.rank:
        needed["peft"] = ("lora.rank", setup)
    for package in config.report.projects:
        needed[package] = (f"report.{package}", f"pip install {package}, or .[{package}]")
    for package, (purpose, remedy) in needed.items():
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:  # a folder of that name, such as the ./wandb of another run
            raise ConfigError(f"the package {package} is missing, {purpose} needs it: {remedy}")
    if config.push.hub_id is not None:
        hub.check("push.hub_id")
    try:
        importlib.metadata.distribution("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ConfigError("the PyPI package 'kernels' collides with Tandem's own 'kernels': run pip uninstall kernels")


if __name__ == "__main__":
    children.run(main)
