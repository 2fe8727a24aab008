// What the native kernels share: vectors of the widest kind this processor has, conversions, memory, and soft-capping.
//
// Every source is compiled with the same flags (build.py), so that these types mean the same in all of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace headwise {

constexpr int64_t PAD = std::numeric_limits<int32_t>::max();
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();
constexpr float LOG2E = 1.44269504088896340736f;

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));

inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline vf splat(float x) { return vf{} + x; }
// b where either is NaN.
inline vf larger(vf a, vf b) { return a > b ? a : b; }

// 2^x for x <= 0, exactly 0 below -126, NaN for NaN. Taylor series of 2^f on [-1/2, 1/2]: relative error 1.2e-7 with
// 6 terms, 4.2e-5 with 4, where the result is rounded to bf16 (3.9e-3) anyway.
template <int TERMS>
inline vf exp2(vf x) {
  const vf magic = splat(12582912.0f);
  const vf clamped = larger(splat(-127.0f), x);
  const vf shifted = clamped + magic;
  const vf f = clamped - (shifted - magic);
  vf p = splat(TERMS == 6 ? 1.54035304e-4f : 9.61812911e-3f);
  if constexpr (TERMS == 6) p = ((p * f + 1.33335581e-3f) * f) + 9.61812911e-3f;
  p = ((((p * f + 5.55041087e-2f) * f + 2.40226507e-1f) * f + 6.93147181e-1f) * f) + 1.0f;
  const vf scaled = (vf)((vi)p + ((vi)shifted << 23));
  return x <= -126.0f ? vf{} : scaled;
}

#if defined(__AVX512F__)
inline float sum(vf v) { return _mm512_reduce_add_ps((__m512)v); }
inline float maximum(vf v) { return _mm512_reduce_max_ps((__m512)v); }
#else
inline float sum(vf v) {
  float s = 0;
  for (int i = 0; i < LANES; ++i) s += v[i];
  return s;
}
inline float maximum(vf v) {
  float m = v[0];
  for (int i = 1; i < LANES; ++i) m = std::max(m, v[i]);
  return m;
}
#endif

template <class To, class From>
inline To cast(From x) {
  if constexpr (std::is_same_v<To, From>) return x;
  return static_cast<To>(static_cast<float>(x));
}

// c10's own conversion has a branch that keeps the compiler from using vectors.
template <>
inline at::BFloat16 cast(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = x == x ? bits + 0x7fff + (bits >> 16 & 1) : 0x7fc00000;
  return at::BFloat16(bits >> 16, at::BFloat16::from_bits());
}

inline int round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

template <class To, class From>
inline void copy(const From* __restrict from, int64_t n, float factor, To* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[i] = cast<To>(from[i] * factor);
}
template <class To, class From>
inline void copy(const From* __restrict from, int64_t n, To* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[i] = cast<To>(from[i]);
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};

constexpr size_t HUGE_PAGE = size_t(2) << 20;

// Ask for huge pages: the page faults of a long prompt's panels cost three times what packing them does.
inline void on_huge_pages(void* p, size_t bytes) {
#if defined(__linux__)
  const uintptr_t from = (reinterpret_cast<uintptr_t>(p) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  const uintptr_t to = (reinterpret_cast<uintptr_t>(p) + bytes) / HUGE_PAGE * HUGE_PAGE;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#endif
}

// Uninitialised memory for many panels.
template <class elem>
std::unique_ptr<elem[], Free> allocate(int64_t count) {
  const size_t bytes = count * sizeof(elem), unit = bytes < HUGE_PAGE ? 64 : HUGE_PAGE;
  const size_t rounded = std::max<size_t>((bytes + unit - 1) / unit, 1) * unit;
  void* p = std::aligned_alloc(unit, rounded);
  TORCH_CHECK(p, "not enough memory for ", rounded, " bytes of packed keys or values");
  on_huge_pages(p, rounded);
  return std::unique_ptr<elem[], Free>(static_cast<elem*>(p));
}

template <class T>
struct Strided {
  const T* data;
  int64_t batch, head, row;
  Strided(const at::Tensor& t)
      : data(t.const_data_ptr<T>()), batch(t.stride(0)), head(t.stride(1)), row(t.stride(2)) {}
  const T* at(int64_t b, int64_t h, int64_t i) const { return data + b * batch + h * head + i * row; }
};

struct Softmax {
  float scale, softcap;
  // Factor from what the score buffer holds to powers of two.
  float factor() const { return (softcap > 0 ? 1.0f : scale) * LOG2E; }
};

// softcap * tanh(scale * s / softcap), with tanh |x| = (1 - t) / (1 + t) for t = e^(-2 |x|).
inline void cap(float* s, int n, Softmax how) {
  const float inner = how.scale / how.softcap;
  for (int j = 0; j < n; j += LANES) {
    const vf x = load(s + j) * inner;
    const vf t = exp2<6>((x < 0 ? x : -x) * (2 * LOG2E));
    const vf y = (1.0f - t) / (1.0f + t) * how.softcap;
    store(s + j, x < 0 ? -y : y);
  }
}

}  // namespace headwise
