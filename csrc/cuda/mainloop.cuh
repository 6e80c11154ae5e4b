// The products of a tile: a producer thread fills a ring of stages, consumer warpgroups multiply what is in it.
//
// Each stage holds 64 k of the tile's rows of A and columns of B. Its barrier `full` waits for the bytes, `empty` for
// every warp that reads it. In a cluster of two the blocks' tiles lie side by side and have A or B in common: each
// block copies half of it to both, so that L2 delivers it once, and `empty` counts the warps of both blocks.
#pragma once

#include "copy.cuh"
#include "pipeline.cuh"
#include "roles.cuh"
#include "wgmma.cuh"

namespace tandem::cuda {

constexpr int kDepth = 64;                   // k of a stage: 128 bytes
constexpr int kBlock = kDepth * kBoxBytes;   // bytes of 64 rows × 64 k

// What the blocks of a cluster have in common; without, there is one block.
enum class Common { Nothing, A, B };

// ROWS rows of A or columns of B in a stage; SHARERS blocks copy a part each.
template <Major MAJOR, int ROWS, int SHARERS>
struct Operand {
  static_assert(ROWS % 64 == 0);
  static constexpr int kBytes = ROWS * kDepth * 2;
  static constexpr int kBoxes = MAJOR == Major::K ? 1 : ROWS / 64;
  static constexpr int kBoxRows = (MAJOR == Major::K ? ROWS : kDepth) / SHARERS;
  static_assert(kBoxRows <= 256 && kBoxRows % 8 == 0);

  // `first` is the row of A or column of B that the stage begins with.
  __device__ static __forceinline__ void copy(
      uint32_t to, const CUtensorMap& map, int first, int k, uint32_t barrier, uint32_t rank) {
    const int skipped = SHARERS > 1 ? rank * kBoxRows : 0;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const uint32_t place = to + box * kBlock + skipped * kBoxBytes;
      const int column = MAJOR == Major::K ? k : first + box * 64;
      const int row = MAJOR == Major::K ? first + skipped : k + skipped;
      if constexpr (SHARERS > 1) {
        copy_in_shared(place, map, column, row, barrier, (1 << SHARERS) - 1);
      } else {
        copy_in(place, map, column, row, barrier);
      }
    }
  }

  // Of k 16·slice to 16·slice + 15, from a row that is a multiple of 64 on.
  __device__ static __forceinline__ uint64_t descriptor(uint32_t stage, int row, int slice) {
    if constexpr (MAJOR == Major::K) {
      return operand_descriptor(stage + row * kBoxBytes + slice * 32, 16);  // the stride of 64 is not looked at
    } else {
      return operand_descriptor(stage + row / 64 * kBlock + slice * 16 * kBoxBytes, kBlock);
    }
  }
};

// GROUP_ROWS × COLUMNS of the result are one warpgroup's, in registers.
// TURNS: each warpgroup has a tile of its own, and they take turns: while one multiplies the other is in its epilogue.
// Otherwise a tile is GROUP_ROWS rows of either.
template <int GROUP_ROWS, int COLUMNS, int STAGES, bool TURNS, Common COMMON, Major A_MAJOR, Major B_MAJOR>
struct Shape {
  static constexpr int kGroupRows = GROUP_ROWS, kColumns = COLUMNS, kStages = STAGES;
  static constexpr bool kTurns = TURNS;
  static constexpr Major kMajorA = A_MAJOR, kMajorB = B_MAJOR;
  static constexpr int kCluster = COMMON == Common::Nothing ? 1 : 2;
  static constexpr int kDown = COMMON == Common::B ? 2 : 1, kAcross = COMMON == Common::A ? 2 : 1;
  static constexpr int kRows = GROUP_ROWS * (TURNS ? 1 : kConsumers);
  static constexpr int kBlocks = GROUP_ROWS / 64;  // wgmma has 64 rows
  static constexpr int kStep = TURNS ? kConsumers : 1;
  using A = Operand<A_MAJOR, kRows, COMMON == Common::A ? 2 : 1>;
  using B = Operand<B_MAJOR, COLUMNS, COMMON == Common::B ? 2 : 1>;
  static constexpr int kStageBytes = A::kBytes + B::kBytes;
  static constexpr int kReaders = 4 * (TURNS ? 1 : kConsumers) * kCluster;  // warps that read a stage, or its half
  using Accumulators = float[kBlocks][COLUMNS / 2];
};

// Addresses in shared memory.
template <class S>
struct Ring {
  uint32_t stages, barriers;

  __device__ __forceinline__ uint32_t a(uint32_t stage) const { return stages + stage * S::kStageBytes; }
  __device__ __forceinline__ uint32_t b(uint32_t stage) const { return a(stage) + S::A::kBytes; }
  __device__ __forceinline__ uint32_t full(uint32_t stage) const { return barriers + stage * 8; }
  __device__ __forceinline__ uint32_t empty(uint32_t stage) const { return barriers + (S::kStages + stage) * 8; }

  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < S::kStages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), S::kReaders);
    }
    barrier_init_fence();
  }

  // One lane of every warp that read the stage says so, to every block that copies into it.
  __device__ __forceinline__ void release(uint32_t stage) const {
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (S::kCluster == 1) {
      if (lane == 0) barrier_arrive(empty(stage));
    } else {
      if (lane < S::kCluster) barrier_arrive_at(empty(stage), lane);
    }
  }
};

// One thread: copy a tile's steps into the ring, as far ahead as it is long.
template <class S>
__device__ __forceinline__ void produce(
    const Ring<S>& ring, RingPlace<S::kStages>& place, const CUtensorMap& a, const CUtensorMap& b, int row, int column,
    int steps, uint32_t rank) {
  for (int step = 0; step < steps; ++step) {
    const uint32_t stage = place.stage, full = ring.full(stage);
    barrier_wait_or_trap<(S::kCluster > 1)>(ring.empty(stage), place.parity ^ 1);
    // All of the stage's bytes, also those that the other block copies. They may come before they are announced: the
    // phase waits for this arrival, and the other block for this block's readers of the stage before.
    barrier_expect(full, S::kStageBytes);
    S::A::copy(ring.a(stage), a, row, step * kDepth, full, rank);
    S::B::copy(ring.b(stage), b, column, step * kDepth, full, rank);
    place.advance();
  }
}

// A warpgroup: issue the products of a tile's steps. One step's stays in flight behind the next one's, so that a stage
// is given back when the products after it have been issued. The last stage is still in use on return: its number.
template <class S>
__device__ __forceinline__ uint32_t issue_products(
    typename S::Accumulators& d, const Ring<S>& ring, RingPlace<S::kStages>& place, int first_row, int steps) {
  uint32_t last = 0;
  for (int step = 0; step < steps; ++step) {
    const uint32_t stage = place.stage;
    barrier_wait(ring.full(stage), place.parity);
    products_fence();
#pragma unroll
    for (int slice = 0; slice < kDepth / 16; ++slice) {
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block) {
        multiply<S::kColumns, S::kMajorA, S::kMajorB>(
            d[block], S::A::descriptor(ring.a(stage), first_row + block * 64, slice),
            S::B::descriptor(ring.b(stage), 0, slice), step | slice);
      }
    }
    commit_products();
    wait_products<1>();
    if (step > 0) ring.release(last);
    last = stage;
    place.advance();
  }
  return last;
}

}  // namespace tandem::cuda
