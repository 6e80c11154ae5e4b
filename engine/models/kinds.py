"""Kinds of models that Tandem knows more of, by the ``model_type`` of their configuration. No torch is imported."""

from __future__ import annotations

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
"""Decoders built as Llama is: RMSNorm before attention and MLP, a SwiGLU of gate and up, RoPE. Their backbones run with
Liger's kernels (``engine.training.liger``) and an fp32 residual stream (``engine.training.residual``), and vLLM fuses
their matrices in an order in which the trainer's can lie, so that the weights can be shared."""
WHOLE_LAYERS = (*LLAMA_LIKE, "gpt_neox")
"""Those whose layers ZeRO-3 gathers whole: they take the hidden states as their first argument, which is where
DeepSpeed's hooks look for what needs a gradient."""
