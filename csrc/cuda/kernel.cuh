// The kernel: persistent blocks of a producer warpgroup and two consumer warpgroups around one ring.
//
//   turns (each consumer has a tile of its own):
//     consumer 0  | products of tile 0 | epilogue 0 ....... | products of tile 2 | epilogue 2 .......
//     consumer 1  |                    | products of tile 1 | epilogue 1 ....... | products of tile 3
//   An epilogue that takes no longer than the products of a tile costs no time. The tensor cores stand still neither at
//   the change: the turn is passed on when the last products are issued, not when they are done.
#pragma once

#include "mainloop.cuh"
#include "scheduler.cuh"

namespace tandem::cuda {

// What a kernel's shared memory holds: stages, what the epilogue needs, two barriers a stage; and up to 1023 bytes
// before them, as boxes begin at multiples of 1024.
template <class S, class Epilogue>
constexpr int shared_bytes() {
  return 1024 + S::kStages * S::kStageBytes + Epilogue::kSharedBytes + 2 * 8 * S::kStages;
}

template <class S, class Epilogue>
__global__ void __launch_bounds__(kThreads, 1) product(
    const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
    const __grid_constant__ CUtensorMap out, const __grid_constant__ Sizes sizes,
    const __grid_constant__ typename Epilogue::Arguments arguments) {
  extern __shared__ uint8_t shared[];
  const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  const uint32_t staging = base + S::kStages * S::kStageBytes;
  const Ring<S> ring{base, staging + Epilogue::kSharedBytes};
  const uint32_t rank = S::kCluster > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    prefetch_map(a);
    prefetch_map(b);
    ring.init();
  }
  // Nobody arrives at a barrier, of the other block either, before it is there.
  if constexpr (S::kCluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  const Tiles tiles{
      divided_up(sizes.rows, S::kRows * S::kDown), divided_up(sizes.columns, S::kColumns * S::kAcross), sizes.band};
  const int steps = divided_up(sizes.depth, kDepth), count = tiles.count();
  const int first = blockIdx.x / S::kCluster, stride = gridDim.x / S::kCluster;
  const auto row_of = [&](Tile tile) { return (tile.down * S::kDown + (S::kDown > 1 ? rank : 0)) * S::kRows; };
  const auto column_of = [&](Tile tile) {
    return (tile.across * S::kAcross + (S::kAcross > 1 ? rank : 0)) * S::kColumns;
  };
  RingPlace<S::kStages> place;

  const int group = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);  // the same in a warp, and known to be
  if (group == 0) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) {
      for (int index = first; index < count; index += stride) {
        const Tile tile = tiles.at(index);
        produce<S>(ring, place, a, b, row_of(tile), column_of(tile), steps, rank);
      }
    }
    __syncwarp();
    if constexpr (S::kCluster > 1) cluster_sync();
  } else {
    take_registers<kConsumerRegisters>();
    const int consumer = group - 1;
    const int first_row = S::kTurns ? 0 : consumer * S::kGroupRows;
    Epilogue epilogue(arguments, out, sizes, staging, consumer);
    if constexpr (S::kTurns) {
      if (consumer == 1) {
        place.skip(steps);
        pass_turn(0);
      }
    }
    for (int index = first + (S::kTurns ? consumer * stride : 0); index < count; index += stride * S::kStep) {
      typename S::Accumulators d;
      if constexpr (S::kTurns) wait_for_turn(consumer);
      const uint32_t last = issue_products<S>(d, ring, place, first_row, steps);
      if constexpr (S::kTurns) {
        pass_turn(1 - consumer);
        place.skip(steps);
      }
      const Tile tile = tiles.at(index);
      epilogue.look_up(row_of(tile) + first_row, column_of(tile));
      wait_products<0>();
      products_arrived(d);
      ring.release(last);
      epilogue.finish(d);
    }
    epilogue.close();
    // A block's barriers are there until the other has made its last arrival.
    if constexpr (S::kCluster > 1) cluster_sync();
  }
}

}  // namespace tandem::cuda
