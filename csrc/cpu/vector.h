// Sixteen fp32 lanes as a compiler vector type: one source, compiled for AVX-512, AVX2 and the baseline and chosen when
// the module is loaded, so that a wheel built on one machine runs on another.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TANDEM_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TANDEM_CLONES
#endif
// What a cloned function calls must end up inside it to be compiled for its target.
#define TANDEM_INLINE __attribute__((always_inline)) inline

namespace tandem {

constexpr int64_t kLanes = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef uint16_t HalfVec __attribute__((vector_size(32)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TANDEM_INLINE Vec splat(float value) { return Vec{} + value; }

// The lanes at `source`, the ones past `count` filled.
TANDEM_INLINE Vec load(const float* source, int64_t count, float fill) {
  Vec value = splat(fill);
  if (count >= kLanes) {
    std::memcpy(&value, source, sizeof(value));
  } else {
    std::memcpy(&value, source, count * sizeof(float));
  }
  return value;
}

template <typename T, typename V>
TANDEM_INLINE void store(T* target, int64_t count, V value) {
  if (count >= kLanes) {
    std::memcpy(target, &value, sizeof(value));
  } else {
    std::memcpy(target, &value, count * sizeof(T));
  }
}

TANDEM_INLINE Vec maximum(Vec a, Vec b) { return a > b ? a : b; }
TANDEM_INLINE Vec minimum(Vec a, Vec b) { return a < b ? a : b; }

// Lanes in a fixed tree: the same sum on every repeat.
TANDEM_INLINE float sum(Vec value) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) value[lane] += value[lane + half];
  return value[0];
}

TANDEM_INLINE float largest(Vec value) {
  float result = value[0];
  for (int64_t lane = 1; lane < kLanes; ++lane) result = value[lane] > result ? value[lane] : result;
  return result;
}

// e^x for x up to 88, within 2 ulp: x = n·ln 2 + r, a Taylor polynomial of r, and n put into the exponent. Exactly 0
// where the result would not be a normal number (and for -inf); NaN stays NaN.
TANDEM_INLINE Vec exp(Vec x) {
  constexpr float kLowest = -87.33654f;
  constexpr float kRound = 12582912.0f;  // 1.5·2^23: adding it leaves the nearest integer in the low bits
  const Vec shifted = maximum(x, splat(kLowest)) * 1.44269504f + kRound;
  const Vec n = shifted - kRound;
  const Vec r = x - n * 0.693359375f - n * -2.12194440e-4f;
  Vec p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  IntVec bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits << 23) + 0x3f800000;  // the low bits of `shifted` are n: everything above leaves at the top
  Vec scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  return x < kLowest ? splat(0) : p * scale;
}

TANDEM_INLINE Vec tanh(Vec x) {
  const Vec bounded = minimum(maximum(x, splat(-10)), splat(10));  // tanh is ±1 in fp32 from there on
  const Vec result = 1.0f - 2.0f / (exp(bounded + bounded) + 1.0f);
  return x == x ? result : x;
}

// To bf16, ties to even.
TANDEM_INLINE HalfVec to_bfloat16(Vec value) {
  IntVec bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const IntVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(value == value ? rounded : IntVec{} + 0x7fc0, HalfVec);
}

}  // namespace tandem
