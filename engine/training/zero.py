"""DeepSpeed engines: trained models under ZeRO 0-3, and frozen ones beside them."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import sysconfig
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.config import Config
from engine.memory.training_bytes import REDUCE_BUCKET
from engine.models.kinds import WHOLE_LAYERS
from engine.training.learning_rate import advance, schedule_factor

logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
# On a CPU DeepSpeed would first compile a shared-memory all-reduce, for half a minute and more; gloo does without.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def prepare_deepspeed(model: nn.Module, config: Config) -> DeepSpeedEngine:
    """A frozen model as a DeepSpeed engine: sharded with ZeRO-3 when training is, whole on every rank otherwise."""
    model.requires_grad_(False)
    model.eval()
    stage = 3 if config.train.zero_stage == 3 else 0
    gather_whole_layers(model)
    with contextlib.redirect_stdout(io.StringIO()):  # in bf16 it prints the machine's memory
        engine, *_ = deepspeed.initialize(model=model, config=_settings(config, stage))
    return engine


def build(model: nn.Module, config: Config, *, learning_rate: float, total_steps: int) -> DeepSpeedEngine:
    """A trained model as a DeepSpeed engine with AdamW and the run's schedule, which counts planned optimizer steps.

    Gradients accumulate over any number of ``backward`` calls until ``step``; DeepSpeed averages them over ranks.
    """
    train = config.train
    options: dict[str, Any] = {
        "lr": learning_rate,
        "betas": train.adam_betas,
        "eps": train.adam_eps,
        "weight_decay": train.weight_decay,
    }
    groups = parameter_groups(model)
    optimizer: torch.optim.Optimizer
    if train.optimizer_offload == "cpu":
        optimizer = _cpu_adam(groups, options)
    else:
        optimizer = torch.optim.AdamW(groups, **options, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, schedule_factor(train.schedule, train.warmup_steps, total_steps)
    )
    settings = _settings(config, train.zero_stage)
    if train.optimizer_offload == "cpu":
        settings["zero_optimization"]["offload_optimizer"] = {
            "device": "cpu",
            "pin_memory": torch.cuda.is_available(),
        }
    if train.zero_stage == 0 and config.model.dtype == "float32":
        _clip_and_measure(optimizer, train.max_grad_norm)
    else:
        settings["gradient_clipping"] = train.max_grad_norm
    gather_whole_layers(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings)
    return engine


def _cpu_adam(groups: list[dict[str, list[nn.Parameter]]], options: dict[str, Any]) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW in C++ for host memory (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840).

    It is compiled at its first use on a machine, for a minute or more, and kept in torch's folder of extensions.
    """
    scripts = sysconfig.get_path("scripts")  # where pip puts ninja, which need not be in PATH
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([*filter(None, [os.environ.get("PATH")]), scripts])
    with contextlib.redirect_stdout(io.StringIO()):  # it prints how long it took to load
        return DeepSpeedCPUAdam(groups, **options)


def gather_whole_layers(model: nn.Module) -> None:
    """Has ZeRO-3 gather a decoder layer's weights at once, and reduce their gradients at once; other stages ignore it.

    By itself it does so for each of the dozen modules in a layer, in Python, before and after every forward and
    backward pass.

    A whole layer's gradients are reduced when its input's is known, so a layer with weights to train whose input needs
    no gradient (the first one with adapters) stays in pieces.
    """
    models: list[Any] = [one for one in model.modules() if isinstance(one, PreTrainedModel)]
    for backbone in (one for one in models if one.base_model is one):
        if backbone.config.model_type not in WHOLE_LAYERS:
            continue
        reached = backbone.get_input_embeddings().weight.requires_grad
        for layer in backbone.layers:
            trained = any(parameter.requires_grad for parameter in layer.parameters())
            set_z3_leaf_module(layer, reached or not trained)
            reached = reached or trained


def parameter_groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """The trained parameters in the model's order: matrices in one group, biases and norms in another.

    Both have the same settings. ZeRO-1 and 2 lay a group's weights end to end in one buffer in this order, where the
    matrices that a sampler fuses (q, k, v; gate, up) are then neighbours, so that it can use them in place.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [[one for one in trained if one.ndim > 1], [one for one in trained if one.ndim < 2]]
    return [{"params": group} for group in groups if group]


def loss_scale(engine: DeepSpeedEngine) -> float:
    """What the optimizer divides gradients by: in fp16 DeepSpeed's current loss scale, a power of two; else 1."""
    return float(getattr(engine.optimizer, "loss_scale", 1.0))


def backward(engine: DeepSpeedEngine, scaled_loss: Tensor) -> None:
    """The backward pass of a loss that has been multiplied by ``loss_scale`` already.

    The loss kernels make the head's gradients in their forward pass and round them to the model's numbers there: in
    fp16 many would be lost if the scale came afterwards. DeepSpeed multiplies by it once more (under ZeRO-1 to 3; under
    ZeRO-0, where the optimizer divides all the same, it does not), so that it is divided out first. Both are exact.
    """
    multiplied = loss_scale(engine) if isinstance(engine.optimizer, ZeROOptimizer) else 1.0
    engine.backward(scaled_loss / multiplied, scale_wrt_gas=False)


def step(engine: DeepSpeedEngine) -> float:
    """A planned optimizer step; gives the global gradient norm.

    Where gradients overflow in fp16, DeepSpeed leaves weights and optimizer as they are and lowers the loss scale. The
    schedule advances all the same: it counts planned steps.
    """
    scale, scheduler = loss_scale(engine), engine.lr_scheduler
    advanced = scheduler.last_epoch + 1
    engine.step()
    if scheduler.last_epoch != advanced:
        advance(engine)
    norm = float(engine.get_global_grad_norm() or 0.0)
    # ZeRO-0's optimizer for fp16 leaves the norm as it was before the division.
    return norm / scale if isinstance(engine.optimizer, FP16_UnfusedOptimizer) else norm


def _clip_and_measure(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    """Clips by global norm before each step and leaves the norm where DeepSpeed's own optimizers do.

    For the one case in which DeepSpeed steps the plain optimizer: it would clip too, but tell nobody the norm.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def before_step(*_: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm or math.inf)
        optimizer._global_grad_norm = norm  # type: ignore[attr-defined]

    optimizer.register_step_pre_hook(before_step)


def _settings(config: Config, stage: int) -> dict[str, Any]:
    """DeepSpeed's configuration. Microbatches are ours to count (``managed_gradient_accumulation`` off)."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,  # DeepSpeed's own default is 1
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "reduce_bucket_size": REDUCE_BUCKET,
            "round_robin_gradients": False,  # it would reorder the weights in ZeRO's buffers: see parameter_groups
        },
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "fp16": {"enabled": config.model.dtype == "float16"},
        "steps_per_print": 2**62,
    }
