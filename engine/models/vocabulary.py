"""How many rows an embedding has when a model learns new tokens. No torch is imported."""

from __future__ import annotations

MULTIPLE = 64
"""vLLM pads vocabularies to a multiple of this, and shares the trainer's weights where there is nothing to pad."""


def grown(rows: int, tokens: int) -> int:
    """Rows for so many tokens: as many as there are where these suffice, and a multiple of 64 where they were one."""
    if tokens <= rows:
        return rows
    return -(-tokens // MULTIPLE) * MULTIPLE if rows % MULTIPLE == 0 else tokens
