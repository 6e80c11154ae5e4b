"""Makes pairs to train on of sampled responses to the embedded task's problems.

    python -m scripts.addition_pairs responses.jsonl --verified gold-pairs.jsonl --sampled pairs.jsonl

RESPONSES is a file of ``engine.generate``. The verifier makes the first file: each wrong response to a problem is a
rejected answer, the right answer the chosen one. The second holds the different responses to each problem two by two in
the order in which they were sampled, which says nothing about which one is better.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from engine.tasks import addition

Pair = dict[str, str]
"""``prompt``, ``chosen`` and ``rejected``, as --algo reward_model and engine.relabel read them, and ``answer``."""


def responses_by_problem(path: Path) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Each problem's first row and its different responses, without those that are empty or were cut off."""
    with open(path, encoding="utf-8") as file:
        rows = map(json.loads, file)
        for _, group in groupby(rows, key=lambda row: row["row"]):
            samples = list(group)
            ended = [row["response"] for row in samples if row["finish_reason"] == "stop" and row["response"]]
            yield samples[0], list(dict.fromkeys(ended))


def pair(problem: dict[str, Any], chosen: str, rejected: str) -> Pair:
    """A row of either file."""
    return {"prompt": problem["raw_prompt"], "chosen": chosen, "rejected": rejected, "answer": problem["answer"]}


def verified_pairs(problem: dict[str, Any], responses: Sequence[str]) -> list[Pair]:
    """The right answer over every response that the verifier finds wrong."""
    right = problem["answer"]
    scores = addition.verify(list(responses), [right] * len(responses))
    return [pair(problem, right, response) for response, score in zip(responses, scores, strict=True) if not score]


def sampled_pairs(problem: dict[str, Any], responses: Sequence[str]) -> list[Pair]:
    """The first two responses, the next two and so on; an odd one is left out."""
    return [pair(problem, *two) for two in zip(responses[::2], responses[1::2], strict=False)]


def main() -> None:
    """Reads the responses and writes both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("responses", type=Path, help="file of engine.generate, .jsonl")
    parser.add_argument("--verified", type=Path, required=True, help="file of right answers over wrong responses")
    parser.add_argument("--sampled", type=Path, required=True, help="file of pairs of responses, in no order")
    options = parser.parse_args()
    problems = list(responses_by_problem(options.responses))
    for path, make in ((options.verified, verified_pairs), (options.sampled, sampled_pairs)):
        pairs = [one for problem in problems for one in make(*problem)]
        path.write_text("".join(json.dumps(one) + "\n" for one in pairs), encoding="utf-8")
        print(f"{len(pairs)} pairs of {len(problems)} problems: {path}")


if __name__ == "__main__":
    main()
