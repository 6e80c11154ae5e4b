// What kernels/_cpu offers. Tensors are on the CPU; kernels/cpu.py sees to dtypes and strides.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

namespace tandem {

// Turns logits [n, V] fp32 into z = softcap(logits + bias)·inverse_temperature in place (softcap 0: none) and gives
// {logprob of the target, entropy, maximum, log total}, fp32 [n] each: log p = (z - maximum) - log total.
std::vector<at::Tensor> statistics(
    at::Tensor logits,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& targets,
    const at::Tensor& inverse_temperature,
    double softcap);

// out [len(rows), V], bf16 or fp32 = the gradient by hidden·weightᵀ of some rows of the logits z [n, V], given what
// statistics() gave and {dL/dlogprob, dL/dentropy}. With all rows and fp32, out may be logits itself.
void dlogits(
    const at::Tensor& logits,
    const at::Tensor& targets,
    const at::Tensor& rows,
    const std::vector<at::Tensor>& statistics,
    const std::vector<at::Tensor>& grads,
    const at::Tensor& inverse_temperature,
    double softcap,
    at::Tensor out);

// out [n, V] fp32 = hidden [n, H]·weight [V, H]ᵀ, bf16 with contiguous rows, H even.
void linear_logits(const at::Tensor& hidden, const at::Tensor& weight, at::Tensor out);

// Whether linear_logits works on this CPU.
bool has_linear_logits();

// {advantages, returns} [T] fp32; bootstrap [sequences] is the value after each sequence.
std::vector<at::Tensor> gae(
    const at::Tensor& rewards,
    const at::Tensor& values,
    const at::Tensor& cu_seqlens,
    double gamma,
    double lam,
    const std::optional<at::Tensor>& bootstrap);

}  // namespace tandem
