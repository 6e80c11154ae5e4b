#include "product.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <exception>
#include <vector>

#include "vector.h"

namespace tandem {
namespace {

// Asked by trying: which CPUs and builds have a kernel is ATen's and oneDNN's to know; either raises where it has none.
template <typename T>
bool try_brgemm() {
  try {
    const std::vector<T> ones(4, 1);
    float product[4];
    at::native::cpublas::brgemm(2, 2, 2, 2, 2, 2, /*add_C=*/false, ones.data(), ones.data(), product);
    at::native::cpublas::brgemm_release();
    return product[0] == 2;
  } catch (const std::exception&) {
    return false;
  }
}

template <typename T>
bool has_brgemm() {
  static const bool has = try_brgemm<T>();
  return has && at::globalContext().userEnabledMkldnn();
}

TANDEM_CLONES void interleave(const at::BFloat16* even, const at::BFloat16* odd, int64_t count, at::BFloat16* out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const IntVec low = to_bits(load(even + i)), high = to_bits(load(odd + i));
    const IntVec pairs = ((low >> 16) & 0xffff) | high;
    std::memcpy(static_cast<void*>(out + 2 * i), &pairs, sizeof(pairs));
  }
  for (; i < count; ++i) {
    out[2 * i] = even[i];
    out[2 * i + 1] = odd[i];
  }
}

}  // namespace

Panel::Panel(const at::Tensor& matrix, int64_t block_width)
    : depth_(matrix.size(0)), columns_(matrix.size(1)), block_width_(block_width) {
  const bool paired = matrix.scalar_type() == at::kBFloat16 && depth_ % 2 == 0 && has_brgemm<at::BFloat16>();
  const bool rows_contiguous = matrix.stride(1) == 1;
  packed_ = matrix.scalar_type() != at::kFloat || !rows_contiguous;
  if (!packed_) {
    values_ = matrix;
    return;
  }
  values_ = at::empty({depth_ * columns_}, matrix.options().dtype(paired ? at::kBFloat16 : at::kFloat));
  at::parallel_for(0, blocks(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const auto source = matrix.narrow(1, first(index), width(index));
      const auto target = values_.narrow(0, first(index) * depth_, width(index) * depth_);
      if (!paired) {
        target.view({depth_, width(index)}).copy_(source);
      } else if (!rows_contiguous) {
        target.view({depth_ / 2, width(index), 2}).copy_(source.unflatten(0, {depth_ / 2, 2}).transpose(1, 2));
      } else {
        const auto *row = source.data_ptr<at::BFloat16>(), *last = row + depth_ * source.stride(0);
        auto* out = target.data_ptr<at::BFloat16>();
        for (; row != last; row += 2 * source.stride(0), out += 2 * width(index)) {
          interleave(row, row + source.stride(0), width(index), out);
        }
      }
    }
  });
}

TileProduct::TileProduct(const at::Tensor& left, const Panel& panel)
    : left_(left), panel_(panel), as_it_is_(left.scalar_type() == panel.dtype() && left.stride(1) == 1) {}

TileProduct::~TileProduct() {
  if (panel_.dtype() == at::kBFloat16) at::native::cpublas::brgemm_release();
}

void TileProduct::load(int64_t first, int64_t rows) {
  count_ = rows;
  if (as_it_is_) {  // thousands of times a call: not even a view is made
    stride_ = left_.stride(0);
    rows_ = static_cast<const char*>(left_.const_data_ptr()) + first * stride_ * left_.element_size();
  } else {
    converted_ = left_.narrow(0, first, rows).to(panel_.dtype()).contiguous();
    stride_ = converted_.stride(0);
    rows_ = converted_.const_data_ptr();
  }
}

template <typename T>
void TileProduct::multiply_loaded(int64_t block, float* out, int64_t out_stride, bool add) const {
  at::native::cpublas::brgemm(
      count_, panel_.width(block), panel_.depth(), stride_, panel_.stride(block), out_stride, add,
      static_cast<const T*>(rows_), panel_.block<T>(block), out);
}

void TileProduct::multiply(int64_t block, float* out, int64_t out_stride, bool add) const {
  if (panel_.dtype() == at::kBFloat16) {
    multiply_loaded<at::BFloat16>(block, out, out_stride, add);
  } else if (has_brgemm<float>()) {
    multiply_loaded<float>(block, out, out_stride, add);
  } else {
    const int64_t depth = panel_.depth(), width = panel_.width(block);
    const auto matrix = [](const void* start, int64_t rows, int64_t columns, int64_t stride) {
      return at::from_blob(const_cast<void*>(start), {rows, columns}, {stride, 1});
    };
    matrix(out, count_, width, out_stride)
        .addmm_(
            matrix(rows_, count_, depth, stride_),
            matrix(panel_.block<float>(block), depth, width, panel_.stride(block)), /*beta=*/add ? 1 : 0);
  }
}

}  // namespace tandem
