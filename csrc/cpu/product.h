// Matrix products whose fp32 result is a tile that stays in cache, for a pass over it right away.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>

namespace tandem {

constexpr int64_t kTile = 64;  // rows and columns of a tile, at most

// The right operand [depth, columns] of products, as the kernels want it, in blocks of some columns.
class Panel {
 public:
  // bf16 where `matrix` is, this CPU multiplies bf16 into fp32, and depth is even as the kernel needs; else fp32.
  explicit Panel(const at::Tensor& matrix, int64_t block_width = kTile);

  at::ScalarType dtype() const { return values_.scalar_type(); }
  int64_t depth() const { return depth_; }
  int64_t blocks() const { return (columns_ + block_width_ - 1) / block_width_; }
  int64_t first(int64_t block) const { return block * block_width_; }
  int64_t width(int64_t block) const { return std::min(block_width_, columns_ - first(block)); }

  // bf16 blocks have two consecutive k side by side: [depth / 2, width, 2].
  template <typename T>
  const T* block(int64_t index) const {
    return values_.data_ptr<T>() + first(index) * (packed_ ? depth_ : 1);
  }
  int64_t stride(int64_t block) const { return packed_ ? width(block) : values_.stride(0); }

 private:
  int64_t depth_, columns_, block_width_;
  bool packed_;  // each block lies together; else `values_` is the matrix
  at::Tensor values_;
};

// left·panel, tile by tile, for one thread.
class TileProduct {
 public:
  TileProduct(const at::Tensor& left, const Panel& panel);
  ~TileProduct();

  // Make the rows first … first + rows of `left` the ones that are multiplied.
  void load(int64_t first, int64_t rows);
  // out [rows, width(block)] = their product with a block of the panel, or out += it.
  void multiply(int64_t block, float* out, int64_t out_stride, bool add) const;

 private:
  template <typename T>
  void multiply_loaded(int64_t block, float* out, int64_t out_stride, bool add) const;

  const at::Tensor& left_;
  const Panel& panel_;
  const bool as_it_is_;      // in the panel's dtype, each row contiguous
  at::Tensor converted_;     // the loaded rows, if not
  const void* rows_ = nullptr;
  int64_t count_ = 0, stride_ = 0;
};

}  // namespace tandem
