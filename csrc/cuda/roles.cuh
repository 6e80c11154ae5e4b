// How the threads of a block share the work: warpgroups, their registers, their order, and the cluster.
#pragma once

#include <cstdint>

namespace tandem::cuda {

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;

// A block of 384 threads starts with 168 registers each, 64,512 in all. The producer gives most of its own back, the
// consumers take them: 128 · (24 + 2 · 240) = 64,512. Whole warpgroups do so together.
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Hardware barriers of a block by number; 0 is __syncthreads.
enum NamedBarrier : int { kTurn = 1, kStaging = kTurn + kConsumers };

__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The order of two warpgroups that take turns at the tensor cores: consumer c waits for its turn, and passes it on when
// it has issued its tile's products. Each barrier counts those who wait (128) and those who pass (128).
__device__ __forceinline__ void wait_for_turn(int consumer) {
  named_barrier_sync(kTurn + consumer, 2 * kWarpgroup);
}

__device__ __forceinline__ void pass_turn(int to_consumer) {
  named_barrier_arrive(kTurn + to_consumer, 2 * kWarpgroup);
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster; those of a warp together.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace tandem::cuda
