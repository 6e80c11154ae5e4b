"""Scores by a server: JSON over HTTP, batches at a time; connection and passing errors tried again."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import json
import math
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import httpx

from engine.config import Config, ConfigError
from engine.rewards.answers import RewardError, Scores, check_columns, checked, prompts_and_columns
from engine.sample import Sample

ARGUMENTS = ("prompts", "completions", "raw_prompts")
"""What a server is given besides the data set's columns."""
CONNECTIONS = 8
"""Requests of one rank under way at a time."""
ATTEMPTS = 8
FIRST_WAIT = 0.5
"""Seconds before the second attempt; every further wait is twice as long, 63.5 seconds in all."""
REDIRECTS = 5
"""Of one attempt."""
PASSING = (408, 425, 429)
"""Statuses below 500 that another attempt may not meet: timeout, too early, too many requests."""


class ServerReward:
    """Posts prompts, completions and the data set's columns to ``reward.url``, which answers with their scores.

    Raises:
        ConfigError: the URL is none.
    """

    def __init__(self, config: Config) -> None:
        assert config.reward.url is not None
        self._url, self._settings, self._prompt_column = config.reward.url, config.reward, config.data.prompt_column
        self._seconds = config.scoring_seconds
        try:
            host = httpx.URL(self._url).host
        except httpx.InvalidURL as error:
            raise ConfigError(f"reward.url '{self._url}' is no URL: {error}") from None
        if not host:
            raise ConfigError(f"reward.url '{self._url}' names no host")

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises ``ConfigError`` where a column has the name of something else that the server is given."""
        check_columns(columns, self._prompt_column, ARGUMENTS, "reward.url")

    def check_rows(self, rows: Iterable[dict[str, Any]]) -> None:
        """Raises ``ConfigError`` for a row with a value that JSON cannot hold."""
        for row in rows:
            for name, value in row.items():
                try:
                    json.dumps(value, allow_nan=False)
                except (TypeError, ValueError) as error:
                    raise ConfigError(
                        f"reward.url: the data set's column '{name}' holds {value!r:.80}, which cannot be sent as JSON "
                        f"({error}): take the column out, or make it text"
                    ) from None

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Raises ``RewardError``, which names the URL and what came back."""
        return asyncio.run(self._all(samples)) if samples else []

    async def _all(self, samples: Sequence[Sample]) -> Scores:
        size, gate = self._settings.batch_size, asyncio.Semaphore(CONNECTIONS)
        over = time.monotonic() + self._seconds

        async def one(client: httpx.AsyncClient, batch: Sequence[Sample]) -> Scores:
            async with gate:
                return await self._batch(client, batch, over)

        try:
            async with (
                asyncio.timeout(self._seconds),
                httpx.AsyncClient(timeout=self._settings.timeout_seconds) as client,
            ):
                batches = [samples[i : i + size] for i in range(0, len(samples), size)]
                parts = await asyncio.gather(*(one(client, batch) for batch in batches))
        except TimeoutError:
            raise RewardError(
                f"reward.url {self._url} has not scored {len(samples)} responses after {self._seconds / 60:g} minutes "
                "(reward.batch_timeout_minutes)"
            ) from None
        return [score for part in parts for score in part]

    async def _batch(self, client: httpx.AsyncClient, samples: Sequence[Sample], over: float) -> Scores:
        body: dict[str, list[Any]] = {
            "prompts": [sample.prompt_text for sample in samples],
            "completions": [sample.response_text for sample in samples],
        }
        body |= prompts_and_columns(samples, self._prompt_column)
        try:
            content = json.dumps(body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RewardError(f"reward.url {self._url}: a column of the data set is no JSON: {error}") from error
        answer = await self._post(client, content, over)
        try:
            scores = answer.json()["scores"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RewardError(
                f'reward.url {self._url} must answer {{"scores": [...]}}; it answered {answer.text!r:.200}'
            ) from None
        return checked(scores, samples, f"reward.url {self._url}")

    async def _post(self, client: httpx.AsyncClient, content: str, over: float) -> httpx.Response:
        """A successful answer, or ``RewardError`` after the last attempt.

        Args:
            over: when no time is left, by the monotonic clock.
        """
        fault, asked = "", 0.0
        for attempt in range(ATTEMPTS):
            if attempt:
                wait = max(asked, FIRST_WAIT * 2 ** (attempt - 1))
                if wait > over - time.monotonic():
                    raise RewardError(
                        f"reward.url {self._url} gave no scores ({fault}), and the next attempt in {wait:.0f} s would "
                        f"be after the {self._seconds / 60:g} minutes that a batch has (reward.batch_timeout_minutes)"
                    )
                await asyncio.sleep(wait)
            try:
                answer = await self._followed(client, content)
            except httpx.RequestError as error:
                fault, asked = f"{type(error).__name__}: {error}".rstrip(": "), 0.0
                continue
            if answer.is_success:
                return answer
            fault, asked = f"status {answer.status_code}: {answer.text!r:.200}", _retry_after(answer)
            if answer.has_redirect_location:
                fault = f"status {answer.status_code} and Location {answer.headers['Location']!r:.300}"
            if answer.status_code < 500 and answer.status_code not in PASSING:
                raise RewardError(f"reward.url {self._url} refused the request with {fault}")
        raise RewardError(f"reward.url {self._url} gave no scores in {ATTEMPTS} attempts; the last one: {fault}")

    async def _followed(self, client: httpx.AsyncClient, content: str) -> httpx.Response:
        """The answer at the end of redirections that keep method and body (307, 308)."""
        url = httpx.URL(self._url)
        for _ in range(REDIRECTS + 1):
            answer = await client.post(url, content=content, headers={"Content-Type": "application/json"})
            if answer.status_code not in (307, 308):
                return answer
            location = answer.headers.get("Location", "")
            try:
                url = url.join(location)
            except httpx.InvalidURL:
                location = ""
            if not location or url.scheme not in ("http", "https") or not url.host:
                raise RewardError(
                    f"reward.url {self._url} answered with status {answer.status_code}, whose Location "
                    f"{answer.headers.get('Location')!r:.300} cannot be followed"
                )
        raise RewardError(f"reward.url {self._url} redirects more than {REDIRECTS} times, the last time to {url}")


def _retry_after(answer: httpx.Response) -> float:
    """Seconds that a server asks to wait, given as such or as a date; 0 if it does not, or says nothing sensible."""
    given = answer.headers.get("Retry-After", "").strip()
    try:
        seconds = float(given)
    except ValueError:
        until = _date(given)
        if until is None:
            return 0.0
        # By the server's own clock, where it tells the time.
        now = _date(answer.headers.get("Date", "")) or datetime.datetime.now(datetime.UTC)
        seconds = (until - now).total_seconds()
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def _date(text: str) -> datetime.datetime | None:
    try:
        date = email.utils.parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=datetime.UTC)
