// The warpgroup's matrix product: D [64, N] fp32 in registers += A [64, 16] · B [16, N], bf16 in shared memory.
//
// Thread t of the warpgroup (warp w, lane l) holds d[4j + 2h + i] = D[16w + l/4 + 8h, 8j + 2(l mod 4) + i].
#pragma once

#include <cstdint>

namespace tandem::cuda {

// How an operand lies in shared memory, in boxes of 128 bytes' width with the copy engine's permutation (copy.cuh):
// K: a row of a box is 64 consecutive k of one row of A (or column of B). Eight rows are 1024 bytes.
// MN: a row of a box is 64 consecutive rows of A (columns of B) at one k. Eight k are 1024 bytes.
enum class Major { K, MN };

// What wgmma is told of an operand: where it starts, the stride of groups of eight rows (eight k where MN-major), and,
// where MN-major, the stride from 64 rows to the next 64; each in 16 bytes, at bits 0, 32 and 16. Bits 62 and 63 say
// that 128 bytes are permuted. All strides are below 2^18 bytes.
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t start, uint32_t stride_of_64) {
  constexpr uint64_t permuted = uint64_t{1} << 62;
  constexpr uint64_t stride_of_8 = uint64_t{1024 >> 4} << 32;
  return permuted | stride_of_8 | (uint64_t{stride_of_64 >> 4} << 16) | ((start & 0x3ffff) >> 4);
}

// Before the first product, and after registers of D were touched by anything else.
__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of products issued since the last.
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until no more than PENDING groups are in flight.
template <int PENDING>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The compiler does not know that wgmma writes registers later than where it stands: it may use them only after this.
template <int BLOCKS, int COUNT>
__device__ __forceinline__ void products_arrived(float (&d)[BLOCKS][COUNT]) {
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[block][i])::"memory");
  }
}

#define TANDEM_PLACES_0_31 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TANDEM_PLACES_32_63 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TANDEM_PLACES_64_95 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TANDEM_PLACES_96_127 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TANDEM_REGISTERS(o) \
  "+f"(d[(o) + 0]), "+f"(d[(o) + 1]), "+f"(d[(o) + 2]), "+f"(d[(o) + 3]), \
  "+f"(d[(o) + 4]), "+f"(d[(o) + 5]), "+f"(d[(o) + 6]), "+f"(d[(o) + 7]), \
  "+f"(d[(o) + 8]), "+f"(d[(o) + 9]), "+f"(d[(o) + 10]), "+f"(d[(o) + 11]), \
  "+f"(d[(o) + 12]), "+f"(d[(o) + 13]), "+f"(d[(o) + 14]), "+f"(d[(o) + 15]), \
  "+f"(d[(o) + 16]), "+f"(d[(o) + 17]), "+f"(d[(o) + 18]), "+f"(d[(o) + 19]), \
  "+f"(d[(o) + 20]), "+f"(d[(o) + 21]), "+f"(d[(o) + 22]), "+f"(d[(o) + 23]), \
  "+f"(d[(o) + 24]), "+f"(d[(o) + 25]), "+f"(d[(o) + 26]), "+f"(d[(o) + 27]), \
  "+f"(d[(o) + 28]), "+f"(d[(o) + 29]), "+f"(d[(o) + 30]), "+f"(d[(o) + 31])

// D = A·B, or D += A·B where `add` is not zero.
template <int N, Major A, Major B>
__device__ __forceinline__ void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {
  constexpr int TRANSPOSED_A = A == Major::MN, TRANSPOSED_B = B == Major::MN;
  static_assert(N == 64 || N == 128 || N == 192 || N == 256);
  if constexpr (N == 64) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" TANDEM_PLACES_0_31
        "}, %32, %33, p, 1, 1, %35, %36;\n}"
        : TANDEM_REGISTERS(0)
        : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));
  } else if constexpr (N == 128) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" TANDEM_PLACES_0_31 TANDEM_PLACES_32_63
        "}, %64, %65, p, 1, 1, %67, %68;\n}"
        : TANDEM_REGISTERS(0), TANDEM_REGISTERS(32)
        : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));
  } else if constexpr (N == 192) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" TANDEM_PLACES_0_31
        TANDEM_PLACES_32_63 TANDEM_PLACES_64_95
        "}, %96, %97, p, 1, 1, %99, %100;\n}"
        : TANDEM_REGISTERS(0), TANDEM_REGISTERS(32), TANDEM_REGISTERS(64)
        : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));
  } else if constexpr (N == 256) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" TANDEM_PLACES_0_31
        TANDEM_PLACES_32_63 TANDEM_PLACES_64_95 TANDEM_PLACES_96_127
        "}, %128, %129, p, 1, 1, %131, %132;\n}"
        : TANDEM_REGISTERS(0), TANDEM_REGISTERS(32), TANDEM_REGISTERS(64), TANDEM_REGISTERS(96)
        : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));
  }
}

#undef TANDEM_PLACES_0_31
#undef TANDEM_PLACES_32_63
#undef TANDEM_PLACES_64_95
#undef TANDEM_PLACES_96_127
#undef TANDEM_REGISTERS

}  // namespace tandem::cuda
