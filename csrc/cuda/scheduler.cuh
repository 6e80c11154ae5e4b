// Which tile of the result a block works on, and in which order.
#pragma once

#include <cstdint>

namespace tandem::cuda {

// The product C [rows, columns] = A [rows, depth] · B [depth, columns].
struct Sizes {
  int rows, columns, depth;
  // So many rows of tiles go down a column of tiles before the next column: what they read of B stays in L2, and so do
  // their rows of A.
  int band;
};

__host__ __device__ __forceinline__ int divided_up(int value, int by) { return (value + by - 1) / by; }

struct Tile {
  int down, across;
};

// All blocks are there at once and take every so many-th tile.
struct Tiles {
  int down, across, band;

  __device__ __forceinline__ int count() const { return down * across; }

  // The divisions take long to answer: ask while something else is in flight.
  __device__ __forceinline__ Tile at(int index) const {
    const int per_band = band * across;
    const int first = index / per_band * band;
    const int size = min(down - first, band);
    const int within = index % per_band;
    return {first + within % size, within / size};
  }
};

}  // namespace tandem::cuda
