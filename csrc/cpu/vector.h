// Sixteen fp32 lanes as a compiler vector type: one source, compiled for AVX-512, AVX2 and the baseline and chosen when
// the module is loaded, so that a wheel built on one machine runs on another.
#pragma once

#include <c10/util/BFloat16.h>

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

TANDEM_INLINE Vec from_bits(IntVec bits) {
  Vec value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

TANDEM_INLINE IntVec to_bits(Vec value) {
  IntVec bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

TANDEM_INLINE Vec load(const float* source) {
  Vec value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}

TANDEM_INLINE Vec load(const at::BFloat16* source) {
  HalfVec value;
  std::memcpy(&value, source, sizeof(value));
  return from_bits(__builtin_convertvector(value, IntVec) << 16);
}

TANDEM_INLINE void store(float* target, Vec value) { std::memcpy(target, &value, sizeof(value)); }

// Rounded, ties to even.
TANDEM_INLINE void store(at::BFloat16* target, Vec value) {
  const IntVec bits = to_bits(value);
  const IntVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const HalfVec result = __builtin_convertvector(value == value ? rounded : IntVec{} + 0x7fc0, HalfVec);
  std::memcpy(target, &result, sizeof(result));
}

// The second where one is NaN.
TANDEM_INLINE Vec maximum(Vec a, Vec b) { return a > b ? a : b; }
TANDEM_INLINE Vec minimum(Vec a, Vec b) { return a < b ? a : b; }

// Lanes in a fixed tree: the same sum on every repeat.
TANDEM_INLINE float sum(Vec value) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) value[lane] += value[lane + half];
  return value[0];
}

constexpr float kExpFloor = -87.33654f;
constexpr float kExpCeiling = 88.0f;

// e^x within 2 ulp: x = n·ln 2 + r, a Taylor polynomial of r, and n put into the exponent. Exactly 0 where the result
// would not be a normal number (and for -inf), e^88 from there on; NaN stays NaN.
TANDEM_INLINE Vec exp(Vec x) {
  constexpr float kRound = 12582912.0f;  // 1.5·2^23: adding it leaves the nearest integer in the low bits
  const Vec bounded = minimum(splat(kExpCeiling), maximum(splat(kExpFloor), x));
  const Vec shifted = bounded * 1.44269504f + kRound;
  const Vec n = shifted - kRound;
  const Vec r = bounded - n * 0.693359375f - n * -2.12194440e-4f;
  Vec p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // The low bits of `shifted` are n: everything above leaves at the top.
  const Vec scale = from_bits((to_bits(shifted) << 23) + 0x3f800000);
  return x < kExpFloor ? splat(0) : p * scale;
}

// log x of a normal number within 2 ulp: x = 2^n·(1 + f) with 1 + f from √½ to √2, and log(1 + f) from s = f/(2 + f),
// whose odd powers it is twice the sum of.
TANDEM_INLINE Vec log(Vec x) {
  constexpr int32_t kRootHalf = 0x3f3504f3;
  const IntVec shifted = to_bits(x) - kRootHalf;
  const Vec n = __builtin_convertvector(shifted >> 23, Vec);
  const Vec f = from_bits((shifted & 0x7fffff) + kRootHalf) - 1.0f;
  const Vec s = f / (f + 2.0f), s2 = s * s;
  Vec p = splat(2.0f / 9);
  p = p * s2 + 2.0f / 7;
  p = p * s2 + 2.0f / 5;
  p = p * s2 + 2.0f / 3;
  return n * 0.693359375f + (n * -2.12194440e-4f + (s + s + s * s2 * p));
}

// Near 0 a series: the difference would be exact only next to 1, and a large softcap multiplies its error.
TANDEM_INLINE Vec tanh(Vec x) {
  const Vec bounded = minimum(maximum(x, splat(-10)), splat(10));  // tanh is ±1 in fp32 from there on
  const Vec result = 1.0f - 2.0f / (exp(bounded + bounded) + 1.0f), square = bounded * bounded;
  Vec p = splat(-1382.0f / 155925);
  p = p * square + 62.0f / 2835;
  p = p * square - 17.0f / 315;
  p = p * square + 2.0f / 15;
  p = p * square - 1.0f / 3;
  const Vec near = bounded + bounded * square * p;
  return x == x ? (square < 0.1f ? near : result) : x;
}

}  // namespace tandem
