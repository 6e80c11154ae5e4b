// Generalised advantage estimation over packed sequences, backwards through each.
#include "kernels.h"

#include <ATen/Parallel.h>

namespace tandem {

std::vector<at::Tensor> gae(
    const at::Tensor& rewards,
    const at::Tensor& values,
    const at::Tensor& cu_seqlens,
    double gamma,
    double lam,
    const std::optional<at::Tensor>& bootstrap) {
  auto advantages = at::empty_like(rewards), returns = at::empty_like(rewards);
  const float *r = rewards.data_ptr<float>(), *v = values.data_ptr<float>(),
              *after = bootstrap ? bootstrap->data_ptr<float>() : nullptr;
  float *a = advantages.data_ptr<float>(), *out = returns.data_ptr<float>();
  const int64_t* bounds = cu_seqlens.data_ptr<int64_t>();
  at::parallel_for(0, cu_seqlens.numel() - 1, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      double next_value = after ? after[s] : 0, next_advantage = 0;
      for (int64_t t = bounds[s + 1] - 1; t >= bounds[s]; --t) {
        next_advantage = r[t] + gamma * next_value - v[t] + gamma * lam * next_advantage;
        next_value = v[t];
        a[t] = static_cast<float>(next_advantage);
        out[t] = static_cast<float>(next_advantage + v[t]);
      }
    }
  });
  return {advantages, returns};
}

}  // namespace tandem
