// Vectors of 16 floats as GCC and Clang spell them on any machine, and the functions of them that kernels need.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace pallas_kernels {

constexpr int kLanes = 16;

typedef float Vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t IntVec __attribute__((vector_size(64), aligned(4)));
typedef uint16_t HalfVec __attribute__((vector_size(32), aligned(2)));
typedef int8_t ByteVec __attribute__((vector_size(16), aligned(1)));
typedef int16_t ShortVec __attribute__((vector_size(32), aligned(2)));

inline Vec Splat(float x) { return Vec{} + x; }

inline Vec Load(const float* p) { return *reinterpret_cast<const Vec*>(p); }

// Integers of other sizes, widened. GCC 12 has no single instruction for these conversions unless it is told.
#ifdef __AVX512F__
inline IntVec Widen(const uint16_t* p) { return (IntVec)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline IntVec Widen(const int8_t* p) { return (IntVec)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
#else
inline IntVec Widen(const uint16_t* p) { return __builtin_convertvector(*reinterpret_cast<const HalfVec*>(p), IntVec); }

inline IntVec Widen(const int8_t* p) {
  return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const ByteVec*>(p), ShortVec), IntVec);
}
#endif

// bfloat16 is the upper half of a float32.
inline Vec Load(const uint16_t* p) {
  IntVec wide = Widen(p) << 16;
  Vec out;
  std::memcpy(&out, &wide, sizeof out);
  return out;
}

inline Vec Load(const int8_t* p) { return __builtin_convertvector(Widen(p), Vec); }

inline void Store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

typedef float Vec8 __attribute__((vector_size(32)));
typedef float Vec4 __attribute__((vector_size(16)));

inline Vec4 Quarter(Vec v) {
  Vec8 eight = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
}

// A fixed tree, so that the order of the sum is the same everywhere.
inline float Sum(Vec v) {
  Vec4 four = Quarter(v);
  Vec4 two = four + __builtin_shufflevector(four, four, 2, 3, 2, 3);
  return two[0] + two[1];
}

// Four sums at once, each in the order of Sum.
inline Vec4 Sums(const Vec* v) {
  Vec4 a = Quarter(v[0]), b = Quarter(v[1]), c = Quarter(v[2]), d = Quarter(v[3]);
  Vec4 ab = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
  Vec4 cd = __builtin_shufflevector(c, d, 0, 1, 4, 5) + __builtin_shufflevector(c, d, 2, 3, 6, 7);
  return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
}

inline float Max(Vec v) {
  Vec8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), b = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  a = a > b ? a : b;
  Vec4 c = __builtin_shufflevector(a, a, 0, 1, 2, 3), d = __builtin_shufflevector(a, a, 4, 5, 6, 7);
  c = c > d ? c : d;
  d = __builtin_shufflevector(c, c, 2, 3, 2, 3);
  c = c > d ? c : d;
  return std::max(c[0], c[1]);
}

// exp for x <= 0: 2^n times a polynomial of degree 6 on [-ln2/2, ln2/2] (coefficients of Cephes expf); below -87 it is 0.
inline Vec Exp(Vec x) {
  IntVec is_tiny = x < Splat(-87.0f);
  x = is_tiny ? Splat(-87.0f) : x;
  IntVec n = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, IntVec);
  Vec whole = __builtin_convertvector(n, Vec);
  Vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vec y = Splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  IntVec bits = (n + 127) << 23;
  Vec power;
  std::memcpy(&power, &bits, sizeof power);
  y = y * power;
  return is_tiny ? Splat(0.0f) : y;
}

// tanh: near zero an odd polynomial (coefficients of Cephes tanhf), where the quotient of exponentials would cancel.
inline Vec Tanh(Vec x) {
  Vec size = x < Splat(0.0f) ? -x : x;
  Vec square = x * x;
  Vec y = Splat(-5.70498872745e-3f);
  y = y * square + 2.06390887954e-2f;
  y = y * square - 5.37397155531e-2f;
  y = y * square + 1.33314422036e-1f;
  y = y * square - 3.33332819422e-1f;
  y = y * square * x + x;
  Vec power = Exp(-2.0f * size);
  Vec far = (1.0f - power) / (1.0f + power);
  far = x < Splat(0.0f) ? -far : far;
  return size < Splat(0.625f) ? y : far;
}

}  // namespace pallas_kernels
