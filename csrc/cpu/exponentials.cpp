// A chunk's exponentials E [V, n] on their way to a gradient: dead columns out, entropy and softcap in.
#include <ATen/Parallel.h>

#include <algorithm>

#include "kernels.h"
#include "vector.h"

namespace tandem {
namespace {

// Words a thread should at least get.
int64_t grain(int64_t columns) { return at::internal::GRAIN_SIZE / std::max<int64_t>(1, columns) + 1; }

template <typename T>
void compact_to_front(T* exponentials, int64_t words, int64_t stride, const int64_t* rows, int64_t count) {
  const int64_t end = (count + kLanes - 1) / kLanes * kLanes;
  at::parallel_for(0, words, grain(count), [&](int64_t begin, int64_t stop) {
    for (int64_t v = begin; v < stop; ++v) {
      T* word = exponentials + v * stride;
      for (int64_t i = 0; i < count; ++i) word[i] = word[rows[i]];
      std::fill(word + count, word + end, T(0));
    }
  });
}

// Per column, padded to whole vectors.
struct Columns {
  const float *dlogprob, *dentropy, *entropy, *log_inverse, *anchor, *to_tanh;
};

template <typename T>
TANDEM_INLINE void reshape_word(const float* word, T* out, int64_t size, const Columns& columns) {
  for (int64_t t = 0; t < size; t += kLanes) {
    const Vec e = load(word + t), log_e = log(e);
    const Vec log_p = log_e + load(columns.log_inverse + t);
    const Vec capped = (log_e + load(columns.anchor + t)) * load(columns.to_tanh + t);
    const Vec gradient = load(columns.dlogprob + t) + load(columns.dentropy + t) * (log_p + load(columns.entropy + t));
    const Vec result = e * gradient * (1.0f - capped * capped);
    store(out + t, e > 0.0f ? result : e);
  }
}

// Where the words and the results are, and how far apart.
template <typename T>
struct Matrices {
  const float* e;
  T* out;
  int64_t stride, out_stride;
};

TANDEM_CLONES void reshape_words(Matrices<float> m, int64_t words, int64_t size, const Columns* columns) {
  for (int64_t v = 0; v < words; ++v) reshape_word(m.e + v * m.stride, m.out + v * m.out_stride, size, *columns);
}

TANDEM_CLONES void reshape_words(Matrices<at::BFloat16> m, int64_t words, int64_t size, const Columns* columns) {
  for (int64_t v = 0; v < words; ++v) reshape_word(m.e + v * m.stride, m.out + v * m.out_stride, size, *columns);
}

template <typename T>
void reshape_all(const at::Tensor& exponentials, const at::Tensor& out, int64_t size, const Columns& columns) {
  const float* e = exponentials.data_ptr<float>();
  T* result = out.data_ptr<T>();
  const int64_t stride = exponentials.stride(0), out_stride = out.stride(0);
  at::parallel_for(0, out.size(0), grain(size), [&](int64_t begin, int64_t end) {
    const Matrices<T> matrices{e + begin * stride, result + begin * out_stride, stride, out_stride};
    reshape_words(matrices, end - begin, size, &columns);
  });
}

}  // namespace

void compact(const at::Tensor& exponentials, const at::Tensor& rows) {
  const int64_t words = exponentials.size(0), stride = exponentials.stride(0), count = rows.numel();
  const int64_t* list = rows.data_ptr<int64_t>();
  if (exponentials.scalar_type() == at::kBFloat16) {
    compact_to_front(exponentials.data_ptr<at::BFloat16>(), words, stride, list, count);
  } else {
    compact_to_front(exponentials.data_ptr<float>(), words, stride, list, count);
  }
}

void reshape(
    const at::Tensor& exponentials,
    const at::Tensor& out,
    const at::Tensor& dlogprob,
    const at::Tensor& dentropy,
    const at::Tensor& entropy,
    const at::Tensor& inverse_total,
    const at::Tensor& anchor,
    const at::Tensor& inverse_temperature,
    double softcap) {
  const int64_t count = out.size(1), size = (count + kLanes - 1) / kLanes * kLanes;
  const auto to_tanh = softcap > 0 ? 1 / (inverse_temperature * softcap) : at::zeros_like(anchor);
  const auto table = at::zeros({6, size}, at::kFloat);
  table.narrow(1, 0, count).copy_(at::stack({dlogprob, dentropy, entropy, inverse_total.log(), anchor, to_tanh}));
  const float* row = table.data_ptr<float>();
  const Columns columns{row, row + size, row + 2 * size, row + 3 * size, row + 4 * size, row + 5 * size};
  if (out.scalar_type() == at::kBFloat16) {
    reshape_all<at::BFloat16>(exponentials, out, size, columns);
  } else {
    reshape_all<float>(exponentials, out, size, columns);
  }
}

}  // namespace tandem
