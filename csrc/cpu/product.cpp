// hidden·weightᵀ of bf16 operands with fp32 sums and an fp32 result, which at::mm does not give on the CPU.
#include "kernels.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <vector>

namespace tandem {
namespace {

constexpr int64_t kColumns = 64;  // of the vocabulary in a tile
constexpr int64_t kRows = 128;    // of hidden in a tile

struct Pair {
  at::BFloat16 even, odd;
};

}  // namespace

void linear_logits(const at::Tensor& hidden, const at::Tensor& weight, at::Tensor out) {
  const int64_t rows = hidden.size(0), width = hidden.size(1), vocabulary = weight.size(0);
  const auto *x = hidden.data_ptr<at::BFloat16>(), *w = weight.data_ptr<at::BFloat16>();
  float* z = out.data_ptr<float>();
  const int64_t x_stride = hidden.stride(0), w_stride = weight.stride(0), z_stride = out.stride(0);
  at::parallel_for(0, (vocabulary + kColumns - 1) / kColumns, 1, [&](int64_t begin, int64_t end) {
    // The kernel wants pairs of consecutive k side by side: packed[k / 2][column] = (w[column][k], w[column][k + 1]).
    std::vector<Pair> packed(width / 2 * kColumns);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tile * kColumns, columns = std::min(kColumns, vocabulary - first);
      for (int64_t j = 0; j < columns; ++j) {
        const at::BFloat16* source = w + (first + j) * w_stride;
        for (int64_t k = 0; k < width / 2; ++k) packed[k * kColumns + j] = {source[2 * k], source[2 * k + 1]};
      }
      for (int64_t t = 0; t < rows; t += kRows) {
        at::native::cpublas::brgemm(
            std::min(kRows, rows - t), columns, width, x_stride, kColumns, z_stride, /*add_C=*/false, x + t * x_stride,
            &packed[0].even, z + t * z_stride + first);
      }
    }
    at::native::cpublas::brgemm_release();
  });
}

bool has_linear_logits() {
  // Asked by trying: which CPUs and builds have the kernel is ATen's to know, and it raises where it has none.
  try {
    const auto numbers = at::arange(5 * 34, at::kBFloat16).view({5, 34}) / 64;
    const auto hidden = numbers.slice(0, 0, 3), weight = numbers;
    auto out = at::empty({3, 5}, at::kFloat);
    linear_logits(hidden, weight, out);
    return at::allclose(out, at::mm(hidden.to(at::kFloat), weight.to(at::kFloat).t()), 1e-5);
  } catch (const c10::Error&) {
    return false;
  }
}

}  // namespace tandem
