// Epilogues of the gradient products: bf16, its rows scaled (dX) or not (dW), or fp32 written or added in place (dW).
#pragma once

#include "epilogue.cuh"

namespace tandem::cuda {

// C in bf16; SCALED: row i times factor[i].
template <class S, bool SCALED>
class Rounded {
 public:
  struct Arguments {
    const float* factor;  // [rows], if SCALED
  };
  static constexpr int kSharedBytes = Staging::kBytes;
  static constexpr int kOutColumns = 64, kOutBytes = 2;

  __device__ __forceinline__ Rounded(
      const Arguments& arguments, const CUtensorMap& out, const Sizes& sizes, uint32_t staging, int consumer)
      : arguments_(arguments), out_(out), sizes_(sizes), staging_(staging, consumer) {}

  __device__ __forceinline__ void look_up(int row, int column) {
    row_ = row;
    column_ = column;
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = row + fragment_row(block, h);
        factor_[block][h] = SCALED && at < sizes_.rows ? __ldg(arguments_.factor + at) : 1.0f;
      }
    }
  }

  __device__ __forceinline__ void finish(typename S::Accumulators& d) {
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
      for (int piece = 0; piece < S::kColumns / kOutColumns; ++piece) {
#pragma unroll
        for (int sixteen = 0; sixteen < kOutColumns / 16; ++sixteen) {
          float value[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            value[i] = d[block][piece * (kOutColumns / 2) + sixteen * 8 + i] * factor_[block][i / 2 % 2];
          }
          staging_.write_bf16(sixteen, value);
        }
        staging_.send([&](uint32_t from) {
          copy_out(out_, column_ + piece * kOutColumns, row_ + block * Staging::kRows, from, evict_first());
        });
      }
    }
  }

  __device__ __forceinline__ void close() { staging_.close(); }

 private:
  const Arguments& arguments_;
  const CUtensorMap& out_;
  const Sizes& sizes_;
  Staging staging_;
  int row_, column_;
  float factor_[S::kBlocks][2];
};

// C in fp32; ADDED: on top of what is there, in memory. Each element is added to once a launch: the order is fixed.
template <class S, bool ADDED>
class Sums {
 public:
  struct Arguments {};
  static constexpr int kSharedBytes = Staging::kBytes;
  static constexpr int kOutColumns = 32, kOutBytes = 4;

  __device__ __forceinline__ Sums(
      const Arguments&, const CUtensorMap& out, const Sizes&, uint32_t staging, int consumer)
      : out_(out), staging_(staging, consumer) {}

  __device__ __forceinline__ void look_up(int row, int column) {
    row_ = row;
    column_ = column;
  }

  __device__ __forceinline__ void finish(typename S::Accumulators& d) {
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
      const int row = row_ + block * Staging::kRows;
#pragma unroll
      for (int piece = 0; piece < S::kColumns / kOutColumns; ++piece) {
        const int column = column_ + piece * kOutColumns;
#pragma unroll
        for (int eight = 0; eight < kOutColumns / 8; ++eight) {
          staging_.write_fp32(eight, &d[block][piece * (kOutColumns / 2) + eight * 4]);
        }
        staging_.send([&](uint32_t from) {
          if constexpr (ADDED) {
            copy_out_added(out_, column, row, from);
          } else {
            copy_out(out_, column, row, from, evict_first());
          }
        });
      }
    }
  }

  __device__ __forceinline__ void close() { staging_.close(); }

 private:
  const CUtensorMap& out_;
  Staging staging_;
  int row_, column_;
};

}  // namespace tandem::cuda
