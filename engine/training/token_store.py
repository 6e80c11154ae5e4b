"""Per-token quantities of a rank's samples, by microbatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sample import Sample
from engine.training.packing import Microbatch


class TokenStore:
    """Flat per-token vectors of a rank's samples, responses end to end in the samples' order."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        lengths = torch.tensor([0] + [sample.loss_tokens for sample in samples])
        self.cu_seqlens = lengths.cumsum(0)
        self._borders = self.cu_seqlens.tolist()

    def take(self, vector: Tensor, batch: Microbatch) -> Tensor:
        """The rows of a microbatch, in its order, on its device."""
        if not batch.counts:
            return vector.new_zeros(len(batch.rows)).to(batch.rows.device)
        parts = [vector[self._borders[i] : self._borders[i + 1]] for i in batch.indices]
        return torch.cat(parts).to(batch.rows.device)

    def put(self, vector: Tensor, batch: Microbatch, rows: Tensor) -> None:
        """Writes a microbatch's rows to their samples' places."""
        for i, part in zip(batch.indices, rows.split(batch.cu_seqlens.diff().tolist()), strict=True):
            vector[self._borders[i] : self._borders[i + 1]] = part

    def rows(self, indices: Sequence[int]) -> Tensor:
        """[R] int64 places of the tokens of some samples."""
        parts = [torch.arange(self._borders[i], self._borders[i + 1]) for i in indices]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def empty(self) -> Tensor:
        """An fp32 vector for every response token; NaN, so that a forgotten one shows."""
        return torch.full((self._borders[-1],), torch.nan)
