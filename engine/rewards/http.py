"""Scores by a server: JSON over HTTP, batches at a time, connection and server errors tried again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx

from engine.config import Config
from engine.rewards.answers import RewardError, Scores, checked, columns
from engine.sample import Sample

CONNECTIONS = 8
"""Requests of one rank under way at a time."""
ATTEMPTS = 4
FIRST_WAIT = 0.5
"""Seconds before the second attempt; every further wait is twice as long."""


class HttpReward:
    """Posts prompts, completions and the data set's columns to ``reward.url``, which answers with their scores."""

    def __init__(self, config: Config) -> None:
        assert config.reward.url is not None
        self._url, self._settings, self._prompt_column = config.reward.url, config.reward, config.data.prompt_column

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Raises ``RewardError``, which names the URL and what came back."""
        return asyncio.run(self._all(samples)) if samples else []

    async def _all(self, samples: Sequence[Sample]) -> Scores:
        size, gate = self._settings.batch_size, asyncio.Semaphore(CONNECTIONS)
        async with httpx.AsyncClient(timeout=self._settings.timeout_seconds) as client:

            async def one(batch: Sequence[Sample]) -> Scores:
                async with gate:
                    return await self._batch(client, batch)

            parts = await asyncio.gather(*(one(samples[i : i + size]) for i in range(0, len(samples), size)))
        return [score for part in parts for score in part]

    async def _batch(self, client: httpx.AsyncClient, samples: Sequence[Sample]) -> Scores:
        body: dict[str, list[Any]] = {
            "prompts": [sample.prompt_text for sample in samples],
            "completions": [sample.response_text for sample in samples],
        }
        body |= columns(samples, self._prompt_column, body)
        try:
            content = json.dumps(body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RewardError(f"reward.url {self._url}: a column of the data set is no JSON: {error}") from error
        answer = await self._post(client, content)
        try:
            scores = answer.json()["scores"]
        except (ValueError, KeyError, TypeError):
            raise RewardError(
                f'reward.url {self._url} must answer {{"scores": [...]}}; it answered {answer.text!r:.200}'
            ) from None
        return checked(scores, samples, f"reward.url {self._url}")

    async def _post(self, client: httpx.AsyncClient, content: str) -> httpx.Response:
        """A successful answer, or ``RewardError`` after the last attempt."""
        fault = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_WAIT * 2 ** (attempt - 1))
            try:
                answer = await client.post(self._url, content=content, headers={"Content-Type": "application/json"})
            except httpx.TransportError as error:
                fault = f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            if answer.is_success:
                return answer
            fault = f"status {answer.status_code}: {answer.text!r:.200}"
            if answer.status_code < 500:
                raise RewardError(f"reward.url {self._url} refused the request with {fault}")
        raise RewardError(f"reward.url {self._url} gave no scores in {ATTEMPTS} attempts; the last one: {fault}")
