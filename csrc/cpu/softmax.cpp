// A chunk of logits [n, V]: the statistics of its rows, and its gradient for the rows that have one.
#include "kernels.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "vector.h"

namespace tandem {
namespace {

// Sums run in blocks of this many vectors: an fp32 sum over a whole vocabulary would drift by more than 1e-5.
constexpr int64_t kBlock = 64 * kLanes;

struct Sums {
  float maximum, total, weighted;  // m, Σ e^(z-m), Σ e^(z-m)·(z-m)
};

// z = softcap(z + bias)·scale in place, softcap 0 for none. The column `target` is left out of the sums.
TANDEM_CLONES void row_sums(
    float* z, const float* bias, int64_t size, int64_t target, float scale, float softcap, Sums* sums) {
  if (bias != nullptr || softcap > 0 || scale != 1) {
    for (int64_t i = 0; i < size; i += kLanes) {
      Vec value = load(z + i, size - i, 0);
      if (bias != nullptr) value += load(bias + i, size - i, 0);
      if (softcap > 0) value = tanh(value / softcap) * softcap;
      store(z + i, size - i, value * scale);
    }
  }
  const float target_logit = z[target];
  z[target] = -kInfinity;

  Vec highest = splat(std::numeric_limits<float>::lowest());  // not -inf: then all columns may be masked out
  for (int64_t i = 0; i < size; i += kLanes) highest = maximum(highest, load(z + i, size - i, -kInfinity));
  const float m = largest(highest);

  Vec total{}, weighted{};
  for (int64_t block = 0; block < size; block += kBlock) {
    const int64_t end = std::min(size, block + kBlock);
    Vec block_total{}, block_weighted{};
    for (int64_t i = block; i < end; i += kLanes) {
      const Vec u = load(z + i, end - i, -kInfinity) - m;
      const Vec e = exp(u);
      block_total += e;
      block_weighted += e == 0.0f ? e : e * u;  // 0·(-inf) is 0 here
    }
    total += block_total;
    weighted += block_weighted;
  }
  z[target] = target_logit;
  *sums = {m, sum(total), sum(weighted)};
}

struct RowGradient {
  float entropy, maximum, log_total, dlogprob, dentropy, scale, softcap;
};

// scale·(1 - (z/softcap)²)·p·(-c - g·(log p + H)), the softmax's part of the gradient, in every column.
template <typename T>
TANDEM_INLINE void row_gradient(const float* z, int64_t size, const RowGradient& row, T* out) {
  const bool with_entropy = row.dentropy != 0;
  const float to_tanh = row.softcap > 0 ? 1 / (row.scale * row.softcap) : 0;
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec value = load(z + i, size - i, 0);
    const Vec log_p = value - row.maximum - row.log_total;
    const Vec p = exp(log_p);
    Vec result = p * -row.dlogprob;
    if (with_entropy) result -= p == 0.0f ? p : p * (log_p + row.entropy) * row.dentropy;
    if (to_tanh != 0) result *= 1.0f - (value * to_tanh) * (value * to_tanh);
    result *= row.scale;
    if constexpr (sizeof(T) == sizeof(float)) {
      store(out + i, size - i, result);
    } else {
      store(out + i, size - i, to_bfloat16(result));
    }
  }
}

TANDEM_CLONES void row_gradient_float(const float* z, int64_t size, const RowGradient* row, float* out) {
  row_gradient(z, size, *row, out);
}

TANDEM_CLONES void row_gradient_bfloat16(const float* z, int64_t size, const RowGradient* row, at::BFloat16* out) {
  row_gradient(z, size, *row, out);
}

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

}  // namespace

std::vector<at::Tensor> statistics(
    at::Tensor logits,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& targets,
    const at::Tensor& inverse_temperature,
    double softcap) {
  const int64_t rows = logits.size(0), size = logits.size(1);
  const auto results = at::empty({4, rows}, logits.options()).unbind();
  float *z = logits.data_ptr<float>(), *logprob = results[0].data_ptr<float>(),
        *entropy = results[1].data_ptr<float>(), *maximum = results[2].data_ptr<float>(),
        *log_total = results[3].data_ptr<float>();
  const float *scale = inverse_temperature.data_ptr<float>(), *shift = bias ? bias->data_ptr<float>() : nullptr;
  const int64_t* target = targets.data_ptr<int64_t>();
  at::parallel_for(0, rows, std::max<int64_t>(1, at::internal::GRAIN_SIZE / size), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      Sums sums;
      row_sums(z + t * size, shift, size, target[t], scale[t], static_cast<float>(softcap), &sums);
      // The target is out of the sum, so nothing cancels as p → 1: exp(odds) are the odds against it.
      const double below = z[t * size + target[t]] - static_cast<double>(sums.maximum);
      const double log_others = std::log(static_cast<double>(sums.total)), odds = log_others - below;
      const double logp = -softplus(odds), others = std::exp(-softplus(-odds));
      // Σ -p·log p, each term of one sign; among the others log p = (z - m) - log Σ + log(1 - p).
      double h = logp > -kInfinity ? -std::exp(logp) * logp : 0;
      if (others > 0) h += others * (log_others + softplus(-odds) - sums.weighted / sums.total);
      logprob[t] = static_cast<float>(logp);
      entropy[t] = static_cast<float>(h);
      maximum[t] = sums.maximum;
      log_total[t] = static_cast<float>(below - logp);
    }
  });
  return results;
}

void dlogits(
    const at::Tensor& logits,
    const at::Tensor& targets,
    const at::Tensor& rows,
    const std::vector<at::Tensor>& statistics,
    const std::vector<at::Tensor>& grads,
    const at::Tensor& inverse_temperature,
    double softcap,
    at::Tensor out) {
  const int64_t count = rows.numel(), size = logits.size(1);
  const bool bfloat16 = out.scalar_type() == at::kBFloat16;
  const float *z = logits.data_ptr<float>(), *logprob = statistics[0].data_ptr<float>(),
              *entropy = statistics[1].data_ptr<float>(), *maximum = statistics[2].data_ptr<float>(),
              *log_total = statistics[3].data_ptr<float>(), *dlogprob = grads[0].data_ptr<float>(),
              *dentropy = grads[1].data_ptr<float>(), *scale = inverse_temperature.data_ptr<float>();
  const int64_t *target = targets.data_ptr<int64_t>(), *row = rows.data_ptr<int64_t>();
  at::parallel_for(0, count, std::max<int64_t>(1, at::internal::GRAIN_SIZE / size), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = row[i];
      const float* source = z + t * size;
      const RowGradient gradient{entropy[t],  maximum[t], log_total[t],               dlogprob[t],
                                 dentropy[t], scale[t],   static_cast<float>(softcap)};
      // 1 - p of the target from its log-probability, exact where p → 1.
      const double logp = logprob[t], p = std::exp(logp);
      double at_target = -dlogprob[t] * std::expm1(logp);
      if (p > 0) at_target -= dentropy[t] * p * (logp + entropy[t]);
      const double capped = softcap > 0 ? source[target[t]] / (scale[t] * softcap) : 0;
      at_target *= scale[t] * (1 - capped * capped);
      if (bfloat16) {
        at::BFloat16* result = out.data_ptr<at::BFloat16>() + i * size;
        row_gradient_bfloat16(source, size, &gradient, result);
        result[target[t]] = static_cast<float>(at_target);
      } else {
        float* result = out.data_ptr<float>() + i * size;
        row_gradient_float(source, size, &gradient, result);
        result[target[t]] = static_cast<float>(at_target);
      }
    }
  });
}

}  // namespace tandem
