// Shared by the native kernels: vectors of the widest kind of this processor, conversions, memory, and soft-capping.
//
// Every source is compiled with the same flags (build.py), so that these types mean the same in all of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

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
// Of x + 0 the compiler keeps the addition, for -0 + 0 is not -0: products by `Float` took 1.5 times as long.
inline vf splat(float x) { return x - vf{}; }
// b where either is NaN.
inline vf larger(vf a, vf b) { return a > b ? a : b; }

// 2^(d * factor) for a factor > 0 and powers below 2^126, exactly 0 below 2^-125, NaN for NaN. Of 2^f on [-1/2, 1/2] the
// Taylor series of 6 terms (relative error 1.2e-7), or the best polynomial of 3 terms that is exact at 0 (1.0e-4), where
// the result is rounded to bf16 (3.9e-3) anyway.
//
// Of two logits it is their difference that is scaled, never the other way round: a product that is part of a fused
// multiply-add is exact while the one it is taken from has been rounded, and above 2^31 the rounding alone overflows.
template <int TERMS>
struct Exp2 {
  vf factor, none;
  explicit Exp2(float by) : factor(splat(by)), none(splat(-125.0f / by)) {}

  vf operator()(vf d) const {
    const vf magic = splat(12582912.0f);
    const vf shifted = d * factor + magic;
    const vf f = d * factor - (shifted - magic);
    vf p;
    if constexpr (TERMS == 6) {
      p = splat(1.54035304e-4f);
      p = ((p * f + 1.33335581e-3f) * f) + 9.61812911e-3f;
      p = ((((p * f + 5.55041087e-2f) * f + 2.40226507e-1f) * f + 6.93147181e-1f) * f) + 1.0f;
    } else {
      p = (((splat(5.50089318e-2f) * f + 2.42210965e-1f) * f + 6.93282928e-1f) * f) + 1.0f;
    }
    // Far below `none` this is garbage, and dropped.
    const vf scaled = (vf)((vi)p + ((vi)shifted << 23));
    return d <= none ? vf{} : scaled;
  }
};

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

// Bits [from, to) of a word, clamped to its 64.
inline uint64_t bits(int64_t from, int64_t to) {
  from = std::clamp<int64_t>(from, 0, 64), to = std::clamp<int64_t>(to, 0, 64);
  if (from >= to) return 0;
  return (to == 64 ? ~uint64_t(0) : (uint64_t(1) << to) - 1) & ~uint64_t(0) << from;
}

// -inf in those of 64 scores whose bit is not set.
inline void keep_seen(float* s, uint64_t seen) {
  if (seen == ~uint64_t(0)) return;
#if defined(__AVX512F__)
  for (int j = 0; j < 64; j += LANES) _mm512_mask_storeu_ps(s + j, ~(seen >> j), _mm512_set1_ps(NEG_INF));
#else
  for (int j = 0; j < 64; ++j)
    if (!(seen >> j & 1)) s[j] = NEG_INF;
#endif
}

// Whether any of 64 scores is no less than a limit; NaN is not less than anything.
inline bool any_not_below(const float* s, float limit) {
#if defined(__AVX512F__)
  const __m512 bound = _mm512_set1_ps(limit);
  unsigned found = 0;
  for (int j = 0; j < 64; j += LANES) found |= _mm512_cmp_ps_mask(_mm512_loadu_ps(s + j), bound, _CMP_NLT_UQ);
  return found;
#else
  bool found = false;
  for (int j = 0; j < 64; ++j) found |= !(s[j] < limit);
  return found;
#endif
}

// The float of a number of 8 bits. Without a branch, so that the compiler uses vectors, and without a subnormal on the way.
template <class Eight>
inline uint32_t widened(Eight x) {
  constexpr bool infinities = std::is_same_v<Eight, at::Float8_e5m2>;
  constexpr int mantissa = infinities ? 2 : 3, bias = infinities ? 15 : 7;
  const uint32_t code = x.x & 0x7f;
  const float subnormal = static_cast<float>(static_cast<int32_t>(code)) / (1 << (mantissa + bias - 1));
  uint32_t bits, below;
  std::memcpy(&below, &subnormal, sizeof below);
  bits = (code << (23 - mantissa)) + ((127 - bias) << 23);
  bits = code < 1 << mantissa ? below : bits;
  bits |= code >= (infinities ? 0x7c : 0x7f) ? 0x7f800000 : 0;
  return bits | static_cast<uint32_t>(x.x & 0x80) << 24;
}

template <class To, class From>
inline To cast(From x) {
  if constexpr (std::is_same_v<To, From>) return x;
  else if constexpr (sizeof(From) > 1) return static_cast<To>(static_cast<float>(x));
  else if constexpr (std::is_same_v<To, at::BFloat16>) return To(widened(x) >> 16, To::from_bits());
  else return static_cast<To>(c10::detail::fp32_from_bits(widened(x)));
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

constexpr size_t HUGE_PAGE = size_t(2) << 20;

// Ask for huge pages: the page faults of a long prompt's panels cost three times what packing them does.
inline void on_huge_pages(void* p, size_t bytes) {
#if defined(__linux__)
  const uintptr_t from = (reinterpret_cast<uintptr_t>(p) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  const uintptr_t to = (reinterpret_cast<uintptr_t>(p) + bytes) / HUGE_PAGE * HUGE_PAGE;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#endif
}

// Memory of calls that are over, for the next: a layer's panels are as large as those of the layer before, and pages
// that the system clears for each cost a twelfth of a sparse prefill. No more than MOST bytes wait.
class Pool {
 public:
  static constexpr size_t MOST = size_t(64) << 20;

  // One for all sources of the library, and never destroyed: threads may end later than it would.
  static Pool& instance() {
    static Pool* const pool = new Pool;
    return *pool;
  }
  // At least `bytes` bytes; `bytes` becomes the actual number.
  void* take(size_t& bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto best = waiting_.end();
      for (auto at = waiting_.begin(); at != waiting_.end(); ++at)
        if (at->bytes >= bytes && at->bytes <= 2 * bytes && (best == waiting_.end() || at->bytes < best->bytes)) best = at;
      if (best != waiting_.end()) {
        const Block block = *best;
        waiting_.erase(best);
        total_ -= block.bytes, bytes = block.bytes;
        return block.data;
      }
    }
    void* const p = std::aligned_alloc(HUGE_PAGE, bytes);
    if (p) on_huge_pages(p, bytes);
    return p;
  }
  void give_back(void* p, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back({p, bytes}), total_ += bytes;
    while (total_ > MOST) {
      std::free(waiting_.front().data);
      total_ -= waiting_.front().bytes;
      waiting_.erase(waiting_.begin());
    }
  }

 private:
  struct Block {
    void* data;
    size_t bytes;
  };
  std::mutex mutex_;
  std::vector<Block> waiting_;  // the oldest first
  size_t total_ = 0;
};

struct Free {
  size_t pooled = 0;
  void operator()(void* p) const { pooled ? Pool::instance().give_back(p, pooled) : std::free(p); }
};

// Uninitialised memory for many panels.
template <class elem>
std::unique_ptr<elem[], Free> allocate(int64_t count) {
  const size_t bytes = count * sizeof(elem), unit = bytes < HUGE_PAGE ? 64 : HUGE_PAGE;
  size_t rounded = std::max<size_t>((bytes + unit - 1) / unit, 1) * unit;
  const bool pooled = unit == HUGE_PAGE;
  void* p = pooled ? Pool::instance().take(rounded) : std::aligned_alloc(unit, rounded);
  TORCH_CHECK(p, "not enough memory for ", rounded, " bytes of packed keys or values");
  return std::unique_ptr<elem[], Free>(static_cast<elem*>(p), Free{pooled ? rounded : 0});
}

template <class T>
struct Strided {
  const T* data;
  int64_t batch, head, row;
  Strided(const at::Tensor& t)
      : data(t.const_data_ptr<T>()), batch(t.stride(0)), head(t.stride(1)), row(t.stride(2)) {}
  const T* at(int64_t b, int64_t h, int64_t i) const { return data + b * batch + h * head + i * row; }
};

// Keys or values: of the queries' dtype, read where they lie, or of 8 bits, which become such row by row.
template <class T>
struct Stored {
  const at::ScalarType dtype;
  const void* const data;
  Stored(const at::Tensor& t) : dtype(t.scalar_type()), data(eight() ? t.const_data_ptr() : t.const_data_ptr<T>()) {}
  bool eight() const { return dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2; }
  // The n numbers from place `at` on; where they have 8 bits, as row j of `wide`.
  const T* row(int64_t at, int64_t n, T* wide, int64_t j) const {
    if (!eight()) return static_cast<const T*>(data) + at;
    T* const to = wide + j * n;
    if (dtype == at::kFloat8_e5m2) copy(static_cast<const at::Float8_e5m2*>(data) + at, n, to);
    else copy(static_cast<const at::Float8_e4m3fn*>(data) + at, n, to);
    return to;
  }
};

struct Softmax {
  float scale, softcap;
  // Factor from numbers of the score buffer to logits, and to powers of two.
  float to_logit() const { return softcap > 0 ? 1.0f : scale; }
  float factor() const { return to_logit() * LOG2E; }
};

// Attention with a sink's logit: the factor of the output, and the log-sum-exp.
struct WithSink {
  float share, lse;
  WithSink(float sink, float before) {
    // The larger of the two goes first, so that nothing overflows.
    const float rest = std::exp(-std::fabs(before - sink)), whole = 1.0f + rest;
    const bool below = before < sink;
    share = (below ? rest : 1.0f) / whole;
    lse = (below ? sink : before) + std::log(whole);
  }
};

// softcap * tanh(scale * s / softcap), with tanh |x| = (1 - t) / (1 + t) for t = e^(-2 |x|). Where |x| is small 1 - t cancels;
// there tanh is an odd polynomial, with the coefficients of Cephes.
inline void cap(float* s, int n, Softmax how) {
  const float inner = how.scale / how.softcap;
  const Exp2<6> exp2(2 * LOG2E);
  for (int j = 0; j < n; j += LANES) {
    const vf x = load(s + j) * inner;
    const vf size = x < 0 ? -x : x;
    const vf square = x * x;
    vf series = square * -5.70498872745e-3f + 2.06390887954e-2f;
    series = series * square - 5.37397155531e-2f;
    series = series * square + 1.33314422036e-1f;
    series = series * square - 3.33332819422e-1f;
    const vf t = exp2(-size);
    const vf far = (1.0f - t) / (1.0f + t);
    const vf y = size < 0.625f ? series * square * x + x : (x < 0 ? -far : far);
    store(s + j, y * how.softcap);
  }
}

}  // namespace headwise
