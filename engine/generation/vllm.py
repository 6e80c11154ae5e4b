"""The vLLM sampler: one engine a rank, inside the training process.

vLLM builds its groups on the process group it finds (its ``external_launcher``). Ranks are replicas unless
``tensor_parallel`` joins neighbours; apart from construction replicas share no collective and may generate at
different times. Joined ranks sample each other's requests too, and call ``generate`` at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.generation import vllm_compat as compat
from engine.generation import vllm_patches as patches
from engine.generation import vllm_process as process
from engine.generation.base import Generator, NamedTensors, Response, Text
from engine.generation.equal_weights import Held, values
from engine.generation.sampling import Request, Sampling
from engine.generation.vllm_compat import CPU_BUILD, GPU_BUILD, patch

if TYPE_CHECKING:
    import torch

    from engine.generation.shared_weights import SharedWeights
    from engine.memory.arrangements import Sleep

MIN_TEMPERATURE = 0.01
"""vLLM samples at this temperature when asked for a lower one that is not 0."""


class VLLMGenerator(Generator):
    """Samples with an in-process vLLM engine. Building one takes seconds, and all ranks have to.

    Args:
        model_path: a Hugging Face model folder; its weights are loaded, so the sampler starts ``ready``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        max_model_len: most tokens of prompt and response together.
        max_num_seqs: most responses decoded at a time; further requests wait.
        seed: the engine's own; responses depend on their request's seed only.
        kv_cache_bytes: of the KV cache, on each rank.
        sleep: what ``sleep()`` gives back on a GPU: nothing, the KV cache, or the weights too, which ``"level1"`` keeps
            in host memory and ``"level2"`` drops. On a CPU nothing.
        tensor_parallel: neighbouring ranks that hold one replica together.
        shared: the trainer's weights, which the engine is to use in place; ``model_path`` gives its shape only, and
            ``load_weights`` reads nothing.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: torch.distributed is not initialised.
        ValueError: ``tensor_parallel`` does not divide the number of ranks.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str,
        max_model_len: int,
        max_num_seqs: int,
        seed: int,
        kv_cache_bytes: int,
        sleep: Sleep = "none",
        tensor_parallel: int = 1,
        shared: SharedWeights | None = None,
    ) -> None:
        import torch.distributed as dist

        from engine.generation.vllm_held import HeldWeights

        super().__init__()
        if not dist.is_initialized():
            raise RuntimeError("VLLMGenerator needs torch.distributed, as engine.machine.world.joined() starts it")
        if (ranks := dist.get_world_size()) % tensor_parallel:
            raise ValueError(f"generation.tensor_parallel {tensor_parallel} does not divide the {ranks} rank(s)")
        self._max_model_len = max_model_len
        with ExitStack() as stack:
            stack.enter_context(process.process_kept())
            vllm = process.import_vllm()
            process.keep_process_group()
            process.leave_memory_unbound()
            process.name_shared_memory()
            stack.enter_context(process.model_classes_kept())
            stack.enter_context(patches.weights_stay_awake(sleep == "kv"))
            patches.capture_without_bar()
            patches.count_ranks_uncompiled()
            self._sampling_params = vllm.SamplingParams
            self._llm: Any = vllm.LLM(
                model_path,
                dtype=dtype,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                seed=seed,
                tensor_parallel_size=tensor_parallel,
                distributed_executor_backend="external_launcher",
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                # No defaults from the model's generation_config.json: those truncate the distribution or stop it.
                generation_config="vllm",
                # Token ids in, token ids out.
                skip_tokenizer_init=True,
                use_tqdm_on_load=False,
                kv_cache_memory_bytes=kv_cache_bytes,
                load_format=shared.register() if shared else "auto",
                **compat.device_options(dtype, sleep),
            )
        patches.look_up_blocks_once(self._llm)
        self._level: Sleep = "none" if compat.on_cpu() else sleep
        self._tensor_parallel, self._shared = tensor_parallel, shared
        self._shapes, self._parameters = _checkpoint_layout(model_path)
        # Shared matrices are the trainer's own memory, whose addresses ``refresh`` compares.
        copied = {name: shape for name, shape in self._shapes.items() if name in self._parameters}
        if shared:
            copied = {name: shape for name, shape in copied.items() if len(shape) < 2}
        self._weights = HeldWeights(self._llm, copied, tensor_parallel)
        self.unread = self._weights.unread
        self._built = values(self._held())

    def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        if self._tensor_parallel == 1:
            return self._sample(requests, sampling)
        parts, place = compat.shared_with_group(list(requests))
        everyones = self._sample([request for part in parts for request in part], sampling)
        start = sum(map(len, parts[:place]))
        return everyones[start : start + len(requests)]

    def _sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        if not requests:
            return []
        self._check(requests, sampling)
        params = [
            self._sampling_params(
                temperature=sampling.temperature,
                max_tokens=sampling.max_tokens,
                seed=request.seed,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=0.0,
                # Only the ids asked for stop a response; vLLM keeps such a token as the last one.
                ignore_eos=True,
                stop_token_ids=list(sampling.stop_token_ids),
                detokenize=False,
                logprobs=0,  # of the sampled token alone
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        with process.random_state_kept(), patches.requests_forgotten(self._llm):
            return responses(self._llm, prompts, params)

    def _logprobs(self, texts: Sequence[Text]) -> list[np.ndarray]:
        """As log-probabilities of a prompt, one token of which is the most that vLLM has to add to it."""
        params = self._sampling_params(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": prompt + response} for prompt, response in texts]
        with process.random_state_kept(), patches.requests_forgotten(self._llm):
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [
            np.array(
                [output.prompt_logprobs[len(prompt) + i][token].logprob for i, token in enumerate(response)], np.float32
            )
            for output, (prompt, response) in zip(outputs, texts, strict=True)
        ]

    def _check(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Refuses what vLLM would change without a word: a low temperature, a budget beyond ``max_model_len``."""
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature {sampling.temperature}: vLLM needs 0 or at least {MIN_TEMPERATURE}")
        longest = max(len(request.prompt_ids) for request in requests)
        if longest + sampling.max_tokens > self._max_model_len:
            raise ValueError(
                f"a prompt of {longest} tokens and max_tokens {sampling.max_tokens} exceed max_model_len "
                f"{self._max_model_len}"
            )

    def _sleep(self) -> None:
        if self._level != "none":
            self._llm.sleep(level=2 if self._level == "level2" else 1)

    def _wake(self) -> None:
        if self._level != "none":
            patches.wake_up(self._llm, "weights")

    def _load_weights(self, weights: NamedTensors) -> None:
        """Raises ValueError, naming the tensors, if any is missing, unknown or of a wrong shape."""
        if self._shared:
            for _ in weights:  # their digests are taken as they pass
                pass
            self._shared.refresh()
            return
        stream = _CheckedStream(weights, self._shapes)
        patches.load_weights(self._llm, stream)
        stream.raise_problems(self._parameters)

    def _as_held(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        return None if name in self.unread else self._weights.as_held(name, tensor)

    def _held(self) -> Held:
        return self._weights.digests({name for name in self._parameters if name not in self.unread})

    def _start(self) -> None:
        if self._level != "none":
            patches.wake_up(self._llm, "kv_cache")
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: it still holds keys of the old weights")

    def close(self) -> None:
        """Frees the engine; the process group stays. Call it before that ends; the sampler is of no use afterwards."""
        if self._level != "none" and self.state != "ready":  # vLLM cannot free what it has unmapped
            self._llm.wake_up(None if self.state == "asleep" else ["kv_cache"])
        process.shut_down(self._llm)
        del self._llm, self._weights
        process.release_memory()


@patch(GPU_BUILD, CPU_BUILD, reason="makes objects of every token that nobody reads")
def responses(llm: Any, prompts: Sequence[Any], params: Sequence[Any]) -> list[Response]:
    """``LLM.generate`` without them, for speed. The requests stay in the engine: see ``requests_forgotten``.

    Args:
        params: have ``logprobs`` 0.

    Raises:
        RuntimeError: vLLM gave a request up.
    """
    names = llm.enqueue(prompts, params, use_tqdm=False)
    tokens: dict[str, list[int]] = {name: [] for name in names}
    logprobs: dict[str, list[float]] = {name: [] for name in names}
    reasons: dict[str, Any] = {}
    while len(reasons) < len(names):
        for output in llm.llm_engine.engine_core.get_output().outputs:
            name = output.request_id
            if output.new_token_ids:
                tokens[name] += output.new_token_ids
                logprobs[name] += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                reasons[name] = str(output.finish_reason)
    if odd := set(reasons.values()) - {"stop", "length"}:
        raise RuntimeError(f"vLLM gave a request up: {', '.join(sorted(odd))}")
    return [Response(tokens[name], np.array(logprobs[name], np.float32), reasons[name]) for name in names]


class _CheckedStream:
    """Passes tensors on that fit the model and remembers what did not fit.

    The stream always runs to its end, even when its source fails: an exception halfway would leave vLLM's layers
    taken apart, and the next load would complete them from two different sets of weights.
    """

    def __init__(self, weights: NamedTensors, shapes: dict[str, tuple[int, ...]]) -> None:
        self._weights, self._shapes = weights, shapes
        self._loaded: set[str] = set()
        self._problems: list[str] = []
        self._failure: Exception | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for name, tensor in self._weights:
                expected = self._shapes.get(name)
                if expected != tuple(tensor.shape):
                    self._problems.append(f"{name} has shape {tuple(tensor.shape)}, expected {expected or 'no such'}")
                    continue
                self._loaded.add(name)
                yield name, tensor.detach()
        except Exception as failure:
            self._failure = failure

    def raise_problems(self, parameters: set[str]) -> None:
        """Raises what went wrong, if anything; ``parameters`` are the names that had to come."""
        if self._failure:
            raise self._failure
        problems = self._problems + [f"{name} is missing" for name in sorted(parameters - self._loaded)]
        if problems:
            raise ValueError(f"weights do not fit the sampler's model ({len(problems)}): {'; '.join(problems[:8])}")


def _checkpoint_layout(model_path: str) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Shapes of all tensors a checkpoint of this model may hold, and names of those it must hold (tied ones once)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return shapes, {name for name, _ in model.named_parameters()}
