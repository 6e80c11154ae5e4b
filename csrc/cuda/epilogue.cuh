// What the epilogues share: where a thread's numbers lie in the tile, and the way out through shared memory.
#pragma once

#include <cuda_bf16.h>

#include "copy.cuh"
#include "roles.cuh"
#include "scheduler.cuh"

namespace tandem::cuda {

// Row of a warpgroup's tile that d[block][4j + 2h + i] lies in, and the first column, of which 8j + i is counted.
__device__ __forceinline__ int fragment_row(int block, int h) {
  const int thread = threadIdx.x % kWarpgroup;
  return block * 64 + thread / 32 * 16 + thread % 32 / 4 + 8 * h;
}
__device__ __forceinline__ int fragment_column() { return 2 * (threadIdx.x % 4); }

// The sum over the four threads that have parts of one row.
__device__ __forceinline__ float row_sum(float value) {
  value += __shfl_xor_sync(0xffffffff, value, 1);
  return value + __shfl_xor_sync(0xffffffff, value, 2);
}

__device__ __forceinline__ uint32_t packed_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Pieces of a warpgroup's tile, 64 rows of 128 bytes, on their way to global memory: while one is copied out the next
// is written.
class Staging {
 public:
  static constexpr int kRows = 64;
  static constexpr int kPieceBytes = kRows * kBoxBytes;
  static constexpr int kBytes = kConsumers * 2 * kPieceBytes;

  __device__ __forceinline__ Staging(uint32_t base, int consumer)
      : piece_(base + consumer * 2 * kPieceBytes), other_(piece_ + kPieceBytes), barrier_(kStaging + consumer) {}

  // Sixteen columns of the piece, 16·sixteen on, as bf16 from v[0] to v[7]: two fragments of eight columns.
  __device__ __forceinline__ void write_bf16(int sixteen, const float* v) const {
    const uint32_t thread = threadIdx.x % kWarpgroup, lane = thread % 32;
    // Each lane gives stmatrix one row of one 8 × 8 matrix: lanes 0 to 15 rows of the first eight columns, the others
    // of the next.
    const uint32_t row = thread / 32 * 16 + lane % 16;
    const uint32_t place = piece_ + row * kBoxBytes + ((((lane / 16) ^ (lane % 8)) << 4) ^ (sixteen << 5));
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(packed_bf16(v[0], v[1])),
        "r"(packed_bf16(v[2], v[3])), "r"(packed_bf16(v[4], v[5])), "r"(packed_bf16(v[6], v[7]))
        : "memory");
  }

  // Eight columns, 8·eight on, as fp32 from v[0] to v[3].
  __device__ __forceinline__ void write_fp32(int eight, const float* v) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t row = fragment_row(0, h), byte = 4 * (8 * eight + fragment_column());
      const uint32_t place = piece_ + row * kBoxBytes + ((byte & 0x70) ^ ((row % 8) << 4)) + (byte & 0xf);
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(place), "f"(v[2 * h]), "f"(v[2 * h + 1]) : "memory");
    }
  }

  // The whole warpgroup has written the piece: copy it out, and go on with the other one. `copy` gets its address.
  template <class Copy>
  __device__ __forceinline__ void send(const Copy& copy) {
    const bool leads = threadIdx.x % kWarpgroup == 0;
    fence_for_copies();
    // The other piece has been read before anybody passes the barrier to write it again.
    if (leads) wait_copies_read<0>();
    named_barrier_sync(barrier_, kWarpgroup);
    if (leads) {
      copy(piece_);
      commit_copies();
    }
    const uint32_t sent = piece_;
    piece_ = other_;
    other_ = sent;
  }

  __device__ __forceinline__ void close() const {
    if (threadIdx.x % kWarpgroup == 0) wait_copies();
  }

 private:
  uint32_t piece_, other_;
  int barrier_;
};

// For what the main loop costs alone: each warp writes one number a tile, to sums [tiles down, tiles across, warps].
template <class S>
class TileSums {
 public:
  struct Arguments {
    float* sums;
  };
  static constexpr int kSharedBytes = 0;
  static constexpr int kOutColumns = 0, kOutBytes = 0;
  static constexpr int kWarps = S::kTurns ? 4 : 4 * kConsumers;

  __device__ __forceinline__ TileSums(
      const Arguments& arguments, const CUtensorMap&, const Sizes& sizes, uint32_t, int consumer)
      : arguments_(arguments),
        across_(divided_up(sizes.columns, S::kColumns)),
        down_(divided_up(sizes.rows, S::kRows)),
        warp_(threadIdx.x % kWarpgroup / 32 + (S::kTurns ? 0 : 4 * consumer)) {}

  __device__ __forceinline__ void look_up(int row, int column) {
    const int down = row / S::kRows, across = column / S::kColumns;
    place_ = down < down_ && across < across_ ? (size_t{1} * down * across_ + across) * kWarps + warp_ : ~size_t{0};
  }

  __device__ __forceinline__ void finish(typename S::Accumulators& d) {
    float parts[4] = {};
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < S::kColumns / 2; ++i) parts[i % 4] += d[block][i];
    }
    float sum = row_sum(parts[0] + parts[1] + parts[2] + parts[3]);
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (threadIdx.x % 32 == 0 && place_ != ~size_t{0}) arguments_.sums[place_] = sum;
  }

  __device__ __forceinline__ void close() {}

 private:
  const Arguments& arguments_;
  int across_, down_, warp_;
  size_t place_ = 0;
};

}  // namespace tandem::cuda
