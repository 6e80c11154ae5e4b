// The bulk tensor copy engine, seen from the device: boxes of a matrix between global and shared memory.
//
// A box is at most 128 bytes wide. Its rows lie 128 bytes apart in shared memory, the 16-byte pieces of row r permuted
// by XOR with r mod 8, which is how wgmma reads without bank conflicts; so a box starts at a multiple of 1024 bytes.
// What lies outside of the matrix arrives as zeros, which count as bytes, and is not written.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace tandem::cuda {

constexpr int kBoxBytes = 128;

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// To this block; the barrier is told of the bytes.
__device__ __forceinline__ void copy_in(uint32_t to, const CUtensorMap& map, int column, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// To the same place in every block of `blocks` (a bit each); the barrier at the same place in each of them is told.
__device__ __forceinline__ void copy_in_shared(
    uint32_t to, const CUtensorMap& map, int column, int row, uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}

// Makes what this thread stored to shared memory visible to the copy engine.
__device__ __forceinline__ void fence_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The L2 is better used by what is read again.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_out(
    const CUtensorMap& map, int column, int row, uint32_t from, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2}], [%3], %4;" ::"l"(&map),
      "r"(column), "r"(row), "r"(from), "l"(policy)
      : "memory");
}

// Memory adds to what is there.
__device__ __forceinline__ void copy_out_added(const CUtensorMap& map, int column, int row, uint32_t from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
      "r"(column), "r"(row), "r"(from)
      : "memory");
}

// Closes the group of this thread's copies out.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until no more than PENDING groups have still to read shared memory.
template <int PENDING>
__device__ __forceinline__ void wait_copies_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Until all are written.
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace tandem::cuda
