"""Liger's RMSNorm, SwiGLU and RoPE kernels in the backbone of one model, where the package is installed."""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from engine.models.kinds import LLAMA_LIKE

# Liger looks for kernels for other vendors' devices and warns that it finds none.
logging.getLogger("liger_kernel.backends.registry").setLevel(logging.ERROR)

ROPE = "apply_rotary_pos_emb"
"""What transformers' attention calls for it."""


def patch(model: PreTrainedModel) -> bool:
    """Changes a model on a GPU in place; its parameters stay the same. True if it was changed.

    Only this model changes: Liger's own functions also replace classes and functions in the model's Python module,
    which every other model of the kind (transformers' sampler, say) would then use; those are put back.
    """
    if model.config.model_type not in LLAMA_LIKE or importlib.util.find_spec("liger_kernel") is None:
        return False
    from liger_kernel.transformers import _apply_liger_kernel_to_instance, liger_rotary_pos_emb

    namespace = vars(sys.modules[type(model).__module__])
    before = dict(namespace)
    _apply_liger_kernel_to_instance(model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)
    namespace.update(before)
    for module in model.modules():
        forward = type(module).forward
        if isinstance(forward, types.FunctionType) and ROPE in forward.__code__.co_names:
            give_rope(module, liger_rotary_pos_emb)
    return True


def give_rope(module: nn.Module, rope: Callable[..., Any]) -> None:
    """RoPE is a function that attention finds among its module's globals: this attention gets its own."""
    forward: Any = type(module).forward
    own = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, ROPE: rope},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = types.MethodType(own, module)
