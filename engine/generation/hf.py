"""Sampling with transformers' own ``generate``: the CPU's default, and the oracle for faster samplers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

from engine.generation.base import Generator, NamedTensors, Response, Text
from engine.generation.equal_weights import Held
from engine.generation.sampling import Request, Sampling
from engine.models.digest import digest


class HFGenerator(Generator):
    """Batched sampling from a transformers model of its own."""

    def __init__(self, model_path: str, *, dtype: torch.dtype, device: torch.device, max_batch: int) -> None:
        super().__init__()
        model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, trust_remote_code=False)
        self._model = model.to(device).eval()
        # A model's own generation_config.json may penalise repetition or truncate the distribution.
        self._model.generation_config = GenerationConfig()
        self._model.requires_grad_(False)
        if hasattr(model.config, "output_router_logits"):  # for a loss; transformers cannot make it while generating
            model.config.output_router_logits = False
        self._device, self._max_batch = device, max_batch
        self._dtypes = {name: parameter.dtype for name, parameter in self._model.named_parameters()}

    def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids))  # like lengths pad little
        responses: dict[int, Response] = {}
        for start in range(0, len(order), self._max_batch):
            chunk = order[start : start + self._max_batch]
            responses.update(zip(chunk, self._batch([requests[i] for i in chunk], sampling), strict=True))
            if self._device.type == "cuda":
                # The keys and values grew by a token at a time; PyTorch keeps a block of each of those sizes.
                torch.cuda.empty_cache()
        return [responses[i] for i in range(len(requests))]

    @torch.no_grad()
    def _batch(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        longest = max(len(request.prompt_ids) for request in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.int64)  # left padding; masked, so its value is free
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, longest - len(request.prompt_ids) :] = 1
        choose = _Choose(requests, sampling, self._device)
        self._model.generate(
            ids.to(self._device),
            attention_mask=mask.to(self._device),
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_tokens,
                do_sample=False,
                eos_token_id=list(sampling.stop_token_ids) or None,
                pad_token_id=sampling.stop_token_ids[0] if sampling.stop_token_ids else 0,
            ),
            logits_processor=LogitsProcessorList([choose]),
        )
        return choose.responses(sampling.stop_token_ids)

    @torch.no_grad()
    def _logprobs(self, texts: Sequence[Text]) -> list[np.ndarray]:
        logprobs = []
        for prompt, response in texts:
            logits = self._model(torch.tensor([prompt + response], device=self._device)).logits[0, len(prompt) - 1 : -1]
            targets = torch.tensor(response, device=self._device)
            logprobs.append(logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0].cpu().numpy())
        return logprobs

    def _load_weights(self, weights: NamedTensors) -> None:
        own: dict[str, Any] = dict(self._model.named_parameters())
        for name, tensor in weights:
            own.pop(name).copy_(tensor)
        if own:
            raise RuntimeError(
                f"the hand-over left {len(own)} tensors of the sampler as they were: {', '.join(list(own)[:4])}"
            )

    def _as_held(self, name: str, tensor: Tensor) -> Tensor | None:
        return tensor.to(self._dtypes[name]) if name in self._dtypes else None

    def _held(self) -> Held:
        return {name: [digest(parameter)] for name, parameter in self._model.named_parameters()}

    def _sleep(self) -> None:
        """The model is small where this sampler serves; it stays in memory."""

    def _wake(self) -> None: ...

    def _start(self) -> None:
        """``generate`` keeps no cache between calls."""


def truncated(logits: Tensor, sampling: Sampling) -> Tensor:
    """[B, V] logits with -inf for the tokens that ``top_k`` and then ``top_p`` leave out.

    Tokens that are as probable as the last of ``top_k`` stay. Nucleus sampling: Holtzman et al. 2020, arXiv 1904.09751.
    """
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, places = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        logits = logits.masked_fill((before >= sampling.top_p).gather(-1, places.argsort(-1)), -torch.inf)
    return logits


class _Choose(LogitsProcessor):
    """Draws each row's token by inverting its distribution at the row's own uniform number.

    Its log-probability is noted, and ``generate`` takes the one token left with a finite score. A row's numbers come
    from its request's seed alone, so a response does not depend on what else is in the batch.
    """

    def __init__(self, requests: Sequence[Request], sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        uniforms = [np.random.default_rng(request.seed).random(sampling.max_tokens) for request in requests]
        self._uniforms = torch.from_numpy(np.stack(uniforms, axis=1)).to(device)  # [max_tokens, B] fp64
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        temperature = self._sampling.temperature
        logits = scores.float() / (temperature or 1.0)
        if temperature:
            logits = truncated(logits, self._sampling)
        logprobs = torch.log_softmax(logits, dim=-1)
        if torch.isnan(logprobs).any():
            raise RuntimeError(
                "the policy's logits are not numbers: its weights have diverged (a lower learning rate?)"
            )
        if temperature == 0:
            token = scores.argmax(-1)
        else:
            cumulative = logprobs.double().exp().cumsum(-1)
            threshold = self._uniforms[len(self._tokens)] * cumulative[:, -1]
            token = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]
        self._tokens.append(token)
        self._logprobs.append(logprobs.gather(-1, token[:, None])[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(-1, token[:, None], 0.0)

    def responses(self, stop_token_ids: Sequence[int]) -> list[Response]:
        """Cuts every row after its first stop token."""
        tokens = torch.stack(self._tokens, 1)
        logprobs = torch.stack(self._logprobs, 1).cpu().numpy()
        stops = torch.isin(tokens, torch.tensor(list(stop_token_ids), dtype=tokens.dtype, device=tokens.device))
        lengths = torch.where(stops.any(1), stops.int().argmax(1) + 1, tokens.shape[1]).tolist()
        stopped = stops.any(1).tolist()
        return [
            Response(row[:length], logprobs[i, :length].copy(), "stop" if stopped[i] else "length")
            for i, (row, length) in enumerate(zip(tokens.tolist(), lengths, strict=True))
        ]
