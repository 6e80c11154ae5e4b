// The products of a chunk's exponentials E [V, n] with hidden and with the weight. Factors of rows are the caller's.
#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "product.h"
#include "vector.h"

namespace tandem {
namespace {

// Of a right operand, so much stays in the second-level cache while rows of the left one pass by.
constexpr int64_t kResidentBytes = 256 << 10;
// Words that dX is multiplied over at a time.
constexpr int64_t kDepth = 256;

// Columns of a block: as many as stay in cache, as calling a product of few rows is not free.
int64_t block_width(int64_t depth, int64_t item_bytes) {
  return std::max<int64_t>(1, kResidentBytes / (depth * item_bytes * kTile)) * kTile;
}

// out = values, or out += values, rounded once.
TANDEM_CLONES void add_row(const float* values, int64_t count, at::BFloat16* out, bool add) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, add ? load(values + i) + load(out + i) : load(values + i));
  for (; i < count; ++i) out[i] = add ? values[i] + static_cast<float>(out[i]) : values[i];
}

template <typename T>
void transpose_to(const T* in, int64_t rows, int64_t columns, int64_t stride, T* out) {
  for (int64_t row = 0; row < rows; row += kLanes)  // strips, so that both sides' lines stay in the first-level cache
    for (int64_t column = 0; column < columns; ++column)
      for (int64_t i = row; i < std::min(rows, row + kLanes); ++i) out[column * rows + i] = in[i * stride + column];
}

at::Tensor transposed(const at::Tensor& matrix) {
  const auto result = at::empty({matrix.size(1), matrix.size(0)}, matrix.options());
  const int64_t rows = matrix.size(0), columns = matrix.size(1), stride = matrix.stride(0);
  if (matrix.scalar_type() == at::kBFloat16) {
    transpose_to(matrix.data_ptr<at::BFloat16>(), rows, columns, stride, result.data_ptr<at::BFloat16>());
  } else {
    transpose_to(matrix.data_ptr<float>(), rows, columns, stride, result.data_ptr<float>());
  }
  return result;
}

}  // namespace

void add_product(const at::Tensor& exponentials, const at::Tensor& hidden, const at::Tensor& out, bool add) {
  const int64_t words = exponentials.size(0), width = out.size(1), stride = out.stride(0), odd = hidden.size(0) % 2;
  // bf16 kernels take pairs: an odd count is filled up with the column behind it, times zero.
  const auto left = exponentials.as_strided({words, exponentials.size(1) + odd}, exponentials.strides());
  const auto right = at::constant_pad_nd(hidden, {0, 0, 0, odd});
  const Panel panel(right, block_width(right.size(0), right.element_size()));
  const bool rounds = out.scalar_type() == at::kBFloat16;
  at::parallel_for(0, (words + kTile - 1) / kTile, 1, [&](int64_t begin, int64_t end) {
    TileProduct product(left, panel);
    std::vector<float> sums(rounds ? kTile * width : 0);
    for (int64_t first = begin * kTile; first < std::min(words, end * kTile); first += kTile) {
      const int64_t height = std::min(kTile, words - first);
      float* target = rounds ? sums.data() : out.data_ptr<float>() + first * stride;
      product.load(first, height);
      for (int64_t block = 0; block < panel.blocks(); ++block) {
        product.multiply(block, target + panel.first(block), rounds ? width : stride, add && !rounds);
      }
      for (int64_t v = 0; v < height && rounds; ++v) {
        add_row(target + v * width, width, out.data_ptr<at::BFloat16>() + (first + v) * stride, add);
      }
    }
  });
}

at::Tensor transposed_product(const at::Tensor& exponentials, const at::Tensor& weight) {
  const int64_t words = exponentials.size(0), count = exponentials.size(1), width = weight.size(1);
  // Threads share out the words and then, where their sums would take more than an eighth of E, also dX's columns.
  const int64_t threads = at::get_num_threads(), sum_bytes = 4 * width, e_bytes = words * exponentials.element_size();
  const int64_t slices = std::clamp<int64_t>(e_bytes / 8 / sum_bytes, 1, threads), parts = threads / slices;
  const int64_t slice_words = (words + slices - 1) / slices, part_width = (width + parts - 1) / parts;
  const auto sums = at::zeros({slices, count, width}, at::kFloat);
  at::parallel_for(0, slices * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t slice = task / parts, column = task % parts * part_width;
      if (column >= width) continue;
      const auto right = weight.narrow(1, column, std::min(part_width, width - column));
      float* sum = sums.data_ptr<float>() + slice * count * width + column;
      const int64_t stop = std::min(words, (slice + 1) * slice_words);
      for (int64_t first = slice * slice_words; first < stop; first += kDepth) {
        const int64_t depth = std::min(kDepth, stop - first);
        const Panel panel(right.narrow(0, first, depth), block_width(depth, right.element_size()));
        const auto left = transposed(exponentials.narrow(0, first, depth));
        TileProduct product(left, panel);
        product.load(0, count);
        for (int64_t block = 0; block < panel.blocks(); ++block) {
          product.multiply(block, sum + panel.first(block), width, /*add=*/true);
        }
      }
    }
  });
  return sums.sum(0);
}

}  // namespace tandem
