// One pass over a head's logits z: per row the sums of a softmax that is anchored at a guess, and its exponentials.
//
// Tiles are words × rows of hidden: no operand has to be transposed but hidden, a row is a lane, and sums over the
// vocabulary are sums of vectors. Logits live in the first-level cache only, a tile at a time.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "product.h"
#include "vector.h"

namespace tandem {
namespace {

static_assert(kRowMultiple == kLanes && kTile % kLanes == 0);

// Words a task works through. Sums are fp32 over tiles and over the stripe, fp64 over stripes, whose size is fixed so
// that results do not depend on the number of threads.
constexpr int64_t kStripe = 8 * kTile;
// So much of hidden stays in the second-level cache while a stripe's tiles pass by.
constexpr int64_t kResidentBytes = 512 << 10;

// A tile of logits and what its rows bring along; the last three are running values.
struct Tile {
  float* z;  // [words, kTile]
  int64_t words, rows;
  const float *bias, *scale, *anchor;
  float *total, *weighted, *highest;  // Σ e^u, Σ e^u·u and the maximum of u = z - anchor
};

TANDEM_CLONES void add_bias_and_cap(const Tile* tile, float softcap) {
  for (int64_t v = 0; v < tile->words; ++v) {
    float* z = tile->z + v * kTile;
    for (int64_t t = 0; t < tile->rows; t += kLanes) {
      store(z + t, tanh((load(z + t) + tile->bias[v]) / softcap) * softcap);
    }
  }
}

template <typename T>
TANDEM_INLINE void exponentiate(const Tile& tile, T* out, int64_t stride) {
  for (int64_t t = 0; t < tile.rows; t += kLanes) {
    const Vec scale = load(tile.scale + t), anchor = load(tile.anchor + t);
    Vec total{}, weighted{}, highest = load(tile.highest + t);
    for (int64_t v = 0; v < tile.words; ++v) {
      const Vec u = (load(tile.z + v * kTile + t) + tile.bias[v]) * scale - anchor;
      const Vec e = exp(u);
      total += e;
      weighted += e * maximum(splat(kExpFloor), u);  // 0·(-inf) is 0 here
      highest = maximum(highest, u);
      if (out != nullptr) store(out + v * stride + t, e);
    }
    store(tile.total + t, load(tile.total + t) + total);
    store(tile.weighted + t, load(tile.weighted + t) + weighted);
    store(tile.highest + t, highest);
  }
}

TANDEM_CLONES void exponentiate_to(const Tile* tile, float* out, int64_t stride) { exponentiate(*tile, out, stride); }

TANDEM_CLONES void exponentiate_to(const Tile* tile, at::BFloat16* out, int64_t stride) {
  exponentiate(*tile, out, stride);
}

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

// fp32 and contiguous, `fill` up to `size`.
at::Tensor padded(const at::Tensor& values, int64_t size, double fill) {
  return at::constant_pad_nd(values.to(at::kFloat), {0, size - values.size(0)}, fill).contiguous();
}

template <typename T>
at::Tensor scan_to(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& inverse_temperature,
    float softcap,
    const at::Tensor& targets,
    const at::Tensor& anchors,
    const std::optional<at::Tensor>& exponentials,
    const std::optional<at::Tensor>& columns) {
  const int64_t count = hidden.size(0), words = weight.size(0), stripes = (words + kStripe - 1) / kStripe;
  const int64_t rows = (count + kLanes - 1) / kLanes * kLanes;
  const Panel panel(at::constant_pad_nd(hidden, {0, 0, 0, rows - count}).t());
  const int64_t block_bytes = kTile * panel.depth() * c10::elementSize(panel.dtype());
  const int64_t resident = std::max<int64_t>(1, kResidentBytes / block_bytes);

  const auto scales = padded(inverse_temperature, rows, 1), all_anchors = padded(anchors, rows, 0);
  const auto all_bias = bias ? bias->to(at::kFloat).contiguous() : at::zeros({words}, at::kFloat);
  const auto target_list = targets.contiguous(), sums = at::zeros({stripes, 3, rows}, at::kFloat);
  const auto target_logits = at::empty({count}, at::kFloat);
  sums.select(1, 2).fill_(-kInfinity);
  const float *scale = scales.data_ptr<float>(), *anchor = all_anchors.data_ptr<float>(),
              *shift = all_bias.data_ptr<float>();
  const int64_t *target = target_list.data_ptr<int64_t>(), *column = columns ? columns->data_ptr<int64_t>() : nullptr;
  T* out = exponentials ? exponentials->data_ptr<T>() : nullptr;
  const int64_t stride = exponentials ? exponentials->stride(0) : 0;
  float *sum = sums.data_ptr<float>(), *target_logit = target_logits.data_ptr<float>();

  at::parallel_for(0, stripes, 1, [&](int64_t begin, int64_t end) {
    TileProduct product(weight, panel);
    const std::vector<float> no_bias(kTile, 0);
    alignas(64) float z[kTile * kTile];
    alignas(64) T scattered[kTile * kTile];
    for (int64_t stripe = begin; stripe < end; ++stripe)
      for (int64_t group = 0; group < panel.blocks(); group += resident)
        for (int64_t first = stripe * kStripe; first < std::min(words, (stripe + 1) * kStripe); first += kTile) {
          const int64_t height = std::min(kTile, words - first);
          product.load(first, height);
          for (int64_t block = group; block < std::min(panel.blocks(), group + resident); ++block) {
            product.multiply(block, z, kTile, /*add=*/false);
            const int64_t row = block * kTile;
            float* running = sum + stripe * 3 * rows + row;
            Tile tile{z,           height,      panel.width(block), shift + first,     scale + row,
                      anchor + row, running, running + rows,     running + 2 * rows};
            if (softcap > 0) {
              add_bias_and_cap(&tile, softcap);
              tile.bias = no_bias.data();
            }
            for (int64_t t = row; t < std::min(count, row + kTile); ++t) {
              const int64_t v = target[t] - first;
              if (v < 0 || v >= height) continue;
              float& logit = z[v * kTile + t - row];
              target_logit[t] = (logit + tile.bias[v]) * scale[t];
              logit = -kInfinity;  // out of the sums, so that nothing cancels as p → 1
            }
            if (column == nullptr) {
              exponentiate_to(&tile, out == nullptr ? out : out + first * stride + row, stride);
              continue;
            }
            exponentiate_to(&tile, scattered, kTile);
            for (int64_t v = 0; v < height; ++v)
              for (int64_t t = row; t < std::min(count, row + kTile); ++t)
                out[(first + v) * stride + column[t]] = scattered[v * kTile + t - row];
          }
        }
  });

  const auto results = at::empty({5, count}, at::kFloat);
  float *logprob = results.data_ptr<float>(), *entropy = logprob + count, *others = entropy + count,
        *inverse_total = others + count, *maximum = inverse_total + count;
  for (int64_t t = 0; t < count; ++t) {
    double total = 0, weighted = 0;
    float highest = -kInfinity;
    for (int64_t stripe = 0; stripe < stripes; ++stripe) {
      const float* running = sum + stripe * 3 * rows + t;
      total += running[0];
      weighted += running[rows];
      highest = std::max(highest, running[2 * rows]);
    }
    // e^odds are the odds against the target, whose share 1 - p is therefore never a difference.
    const double above = target_logit[t] - static_cast<double>(anchor[t]), log_others = std::log(total);
    const double odds = log_others - above, logp = -softplus(odds), share = std::exp(-softplus(-odds));
    // Σ -p·log p, each part of one sign; among the others log p = u - log Σ + log(1 - p).
    double h = logp > -kInfinity ? -std::exp(logp) * logp : 0;
    if (share > 0) h += share * (std::max(0.0, log_others - weighted / total) + softplus(-odds));
    logprob[t] = static_cast<float>(logp);
    entropy[t] = static_cast<float>(h);
    others[t] = static_cast<float>(total);
    inverse_total[t] = static_cast<float>(1 / (total + std::exp(above)));
    maximum[t] = std::max(target_logit[t], highest + anchor[t]);
  }
  return results;
}

}  // namespace

at::Tensor scan(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& inverse_temperature,
    double softcap,
    const at::Tensor& targets,
    const at::Tensor& anchor,
    const std::optional<at::Tensor>& exponentials,
    const std::optional<at::Tensor>& columns) {
  const bool bfloat16 = exponentials && exponentials->scalar_type() == at::kBFloat16;
  return (bfloat16 ? scan_to<at::BFloat16> : scan_to<float>)(
      hidden, weight, bias, inverse_temperature, static_cast<float>(softcap), targets, anchor, exponentials, columns);
}

}  // namespace tandem
