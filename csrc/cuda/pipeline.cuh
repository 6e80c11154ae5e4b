// Barriers in shared memory, and the ring of stages that they guard.
//
// An mbarrier completes a phase once its arrivals are in and, where bytes were announced, these have come. Phases
// alternate in parity: whoever waits names the parity of the phase that it waits for. Before its first phase completes
// a barrier answers as if a phase of parity 1 had.
#pragma once

#include <cstdint>

namespace tandem::cuda {

// A wait that takes longer than this many tries (each suspends the thread for a while) is a hang: the kernel traps, so
// that an error is seen and not a GPU that never answers.
constexpr uint32_t kMostTries = 1u << 22;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the other block of the cluster.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival, and the bytes that copies will bring before the phase completes.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// An arrival at the barrier that a block of the cluster has at the same place in its shared memory.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t block) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(block)
      : "memory");
}

// ACROSS: what is waited for may have happened in the other block of the cluster.
template <bool ACROSS>
__device__ __forceinline__ bool barrier_try(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  if constexpr (ACROSS) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
  return done != 0;
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (!barrier_try<false>(barrier, parity)) {
  }
}

// For the producer, whom a hang of anybody reaches in the end, and who has registers to count with.
template <bool ACROSS>
__device__ __forceinline__ void barrier_wait_or_trap(uint32_t barrier, uint32_t parity) {
  for (uint32_t tries = 0; !barrier_try<ACROSS>(barrier, parity); ++tries) {
    if (tries == kMostTries) __trap();
  }
}

// Where in a ring of STAGES a thread stands: producer and consumers count the same steps, each for itself.
template <int STAGES>
struct RingPlace {
  uint32_t stage = 0;
  uint32_t parity = 0;  // of the phase in which the stage fills

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }

  // Over steps that are another warpgroup's.
  __device__ __forceinline__ void skip(uint32_t steps) {
    const uint32_t to = stage + steps;
    stage = to % STAGES;
    parity ^= (to / STAGES) & 1;
  }
};

}  // namespace tandem::cuda
