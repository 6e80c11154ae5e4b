// The epilogue of the loss's scan: E = exp(z − anchor) and its row sums, from the logits z in registers.
#pragma once

#include "epilogue.cuh"

namespace tandem::cuda {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// With u = z·inverse_temperature − anchor and e = exp(u), the target's column left out, a tile of columns n writes Σ e
// to total [tiles across, rows], with ENTROPY Σ e·u to `weighted`, and with STORE e itself to the matrix behind `out`.
template <class S, bool STORE, bool ENTROPY>
class Scan {
 public:
  struct Arguments {
    const float* inverse_temperature;  // [rows]
    const float* anchor;               // [rows]
    const int* target;                 // [rows]
    float* total;
    float* weighted;
  };
  static constexpr int kPieceColumns = 64;
  static constexpr int kSharedBytes = STORE ? Staging::kBytes : 0;
  static constexpr int kOutColumns = STORE ? kPieceColumns : 0, kOutBytes = 2;

  __device__ __forceinline__ Scan(
      const Arguments& arguments, const CUtensorMap& out, const Sizes& sizes, uint32_t staging, int consumer)
      : arguments_(arguments), out_(out), sizes_(sizes), staging_(staging, consumer) {}

  // Numbers of the rows, while the tile's last products are in flight.
  __device__ __forceinline__ void look_up(int row, int column) {
    row_ = row;
    column_ = column;
    limit_ = sizes_.columns - column - fragment_column();
    masked_ = column + S::kColumns > sizes_.columns;
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = row + fragment_row(block, h);
        const bool inside = at < sizes_.rows;
        scale_[block][h] = inside ? kLog2E * __ldg(arguments_.inverse_temperature + at) : 0.0f;
        anchor_[block][h] = inside ? kLog2E * __ldg(arguments_.anchor + at) : 0.0f;
        target_[block][h] = inside ? __ldg(arguments_.target + at) - column - fragment_column() : -1;
        masked_ |= static_cast<unsigned>(target_[block][h]) < S::kColumns;
      }
    }
    masked_ = __any_sync(0xffffffff, masked_);
  }

  __device__ __forceinline__ void finish(typename S::Accumulators& d) {
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
      float total[2] = {}, weighted[2] = {};
#pragma unroll
      for (int piece = 0; piece < S::kColumns / kPieceColumns; ++piece) {
        if (masked_) mask(d[block], block, piece);
#pragma unroll
        for (int sixteen = 0; sixteen < kPieceColumns / 16; ++sixteen) {
          float e[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int h = i / 2 % 2;
            const float z = d[block][piece * (kPieceColumns / 2) + sixteen * 8 + i];
            const float u = fmaf(z, scale_[block][h], -anchor_[block][h]);
            e[i] = exp2_approx(u);
            total[h] += e[i];
            if constexpr (ENTROPY) weighted[h] = fmaf(e[i], u, weighted[h]);
          }
          if constexpr (STORE) staging_.write_bf16(sixteen, e);
        }
        if constexpr (STORE) {
          staging_.send([&](uint32_t from) {
            copy_out(out_, column_ + piece * kPieceColumns, row_ + block * Staging::kRows, from, evict_first());
          });
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = row_ + fragment_row(block, h);
        const size_t place = static_cast<size_t>(column_ / S::kColumns) * sizes_.rows + at;
        const bool writes = threadIdx.x % 4 == 0 && at < sizes_.rows && column_ < sizes_.columns;
        const float sum = row_sum(total[h]);
        if (writes) arguments_.total[place] = sum;
        if constexpr (ENTROPY) {
          const float weighted_sum = kLn2 * row_sum(weighted[h]);
          if (writes) arguments_.weighted[place] = weighted_sum;
        }
      }
    }
  }

  __device__ __forceinline__ void close() {
    if constexpr (STORE) staging_.close();
  }

 private:
  static constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

  // Columns past the vocabulary add nothing, and neither does the target: what is left must not cancel. The logit that
  // stands there instead gives u = −1e30, which is finite, so that 0·u is 0.
  __device__ __forceinline__ void mask(float (&z)[S::kColumns / 2], int block, int piece) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float low = -1e30f / fmaxf(scale_[block][h], 1e-6f);
#pragma unroll
      for (int j = 0; j < kPieceColumns / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = piece * kPieceColumns + 8 * j + i;
          if (column == target_[block][h] || column >= limit_) z[column / 8 * 4 + 2 * h + i] = low;
        }
      }
    }
  }

  const Arguments& arguments_;
  const CUtensorMap& out_;
  const Sizes& sizes_;
  Staging staging_;
  int row_, column_, limit_;
  bool masked_;
  float scale_[S::kBlocks][2], anchor_[S::kBlocks][2];
  int target_[S::kBlocks][2];
};

}  // namespace tandem::cuda
