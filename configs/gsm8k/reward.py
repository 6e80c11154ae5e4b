"""1 for a response whose last number is the answer to a GSM8K question, 0 for any other."""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Compares as numbers: 1,000 is 1000.0. ``answer`` is the data set's column, with the result after ``####``."""
    pairs = [(_last(completion), _last(right)) for completion, right in zip(completions, answer, strict=True)]
    return [float(given is not None and given == wanted) for given, wanted in pairs]


def _last(text: str) -> float | None:
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
