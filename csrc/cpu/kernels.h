// What kernels/_cpu offers. Tensors are on the CPU; kernels/cpu.py sees to dtypes and strides.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

namespace tandem {

// Rows of a chunk are padded to a multiple of this: they are a vector's lanes.
constexpr int64_t kRowMultiple = 16;

// Scans z = softcap(hidden·weightᵀ + bias)·inverse_temperature for n rows (softcap 0: none). `anchor` [n] is near each
// row's logsumexp. With y the target, E = e^(z - anchor) and s = Σ E, gives fp32 [5, n]:
//   {log p(y), entropy, Σ E without y, 1/s, max z};
// where 1/s is outside e^±40 the anchor was too far off. Writes E to `exponentials` [V, at least n], bf16 or fp32, if
// there is one: 0 at the target, and something finite in columns from n up to a multiple of kRowMultiple. With
// `columns` [n] row i's go to column columns[i] alone.
at::Tensor scan(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& inverse_temperature,
    double softcap,
    const at::Tensor& targets,
    const at::Tensor& anchor,
    const std::optional<at::Tensor>& exponentials,
    const std::optional<at::Tensor>& columns);

// Moves the columns `rows` (rising) of exponentials [V, n] to the front, in place, zeros behind them.
void compact(const at::Tensor& exponentials, const at::Tensor& rows);

// out = E·(dlogprob + dentropy·(log p + entropy))·(1 - (z / (inverse_temperature·softcap))²), elementwise, with
// log p = log E + log 1/s and z = log E + anchor. exponentials E [V, at least n] is fp32, `out` [V, n] the same memory or
// another, bf16 or fp32, with room for n up to a multiple of kRowMultiple; all others [n].
void reshape(
    const at::Tensor& exponentials,
    const at::Tensor& out,
    const at::Tensor& dlogprob,
    const at::Tensor& dentropy,
    const at::Tensor& entropy,
    const at::Tensor& inverse_total,
    const at::Tensor& anchor,
    const at::Tensor& inverse_temperature,
    double softcap);

// [n, H] fp32 = exponentials [V, n] transposed · weight [V, H].
at::Tensor transposed_product(const at::Tensor& exponentials, const at::Tensor& weight);

// out [V, H], bf16 or fp32, = exponentials [V, n]·hidden [n, H], or out += it; summed in fp32 and rounded once.
void add_product(const at::Tensor& exponentials, const at::Tensor& hidden, const at::Tensor& out, bool add);

// {advantages, returns} [T] fp32; bootstrap [sequences] is the value after each sequence.
std::vector<at::Tensor> gae(
    const at::Tensor& rewards,
    const at::Tensor& values,
    const at::Tensor& cu_seqlens,
    double gamma,
    double lam,
    const std::optional<at::Tensor>& bootstrap);

}  // namespace tandem
