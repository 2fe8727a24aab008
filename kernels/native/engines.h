// Products of 64 x 64 tiles in the number formats of the processor, and the packing that they read from.
//
// Three engines: `Float` (compiler vectors: AVX-512, AVX2, NEON), `Dot` (AVX-512 bf16 dot products) and `Brgemm` (ATen's
// wrapper of oneDNN, which uses AMX). The last two read bf16 in pairs of adjacent inner indices.

#pragma once

#include <ATen/native/CPUBlas.h>

#include "vectors.h"

namespace headwise {

constexpr int TILE = 64;
constexpr int WALK = 8;
// A block of a product in registers: rows, vectors.
constexpr int MR = 4, NV = LANES == 8 ? 2 : 4;

// ---- engines: qk writes C (64 x 64) = A (64 x inner) B; pv adds P (64 x 64 count) V to C (64 x width) ----

struct Float {
  using elem = float;
  static constexpr int PAIR = 1, INNER = 1, TERMS = 6;

  template <int V>
  static void block(const float* a, int lda, const float* b, int ldb, int inner, vf (&acc)[MR][V]) {
    for (int k = 0; k < inner; ++k) {
      vf bv[V];
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) bv[j] = load(b + k * ldb + j * LANES);
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i) {
        const vf av = splat(a[i * lda + k]);
#pragma GCC unroll 8
        for (int j = 0; j < V; ++j) acc[i][j] += av * bv[j];
      }
    }
  }
  static void finish() {}
};

#if defined(__AVX512BF16__)
struct Dot {
  using elem = at::BFloat16;
  static constexpr int PAIR = 2, INNER = 2, TERMS = 4;

  template <int V>
  static void block(const elem* a, int lda, const elem* b, int ldb, int inner, vf (&acc)[MR][V]) {
    for (int k = 0; k < inner; k += 2) {
      __m512bh bv[V];
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) std::memcpy(&bv[j], b + k * ldb + j * LANES * 2, 64);
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i) {
        int32_t pair;
        std::memcpy(&pair, a + i * lda + k, 4);
        const __m512bh av = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
        for (int j = 0; j < V; ++j) acc[i][j] = (vf)_mm512_dpbf16_ps((__m512)acc[i][j], av, bv[j]);
      }
    }
  }
  static void finish() {}
};
#endif

// Blocked products over an engine's `block`.
template <class Engine>
struct Blocked : Engine {
  using elem = typename Engine::elem;

  static void qk(const elem* a, int inner, const elem* b, float* c, int ldc) {
    for (int col = 0; col < TILE; col += NV * LANES)
      for (int row = 0; row < TILE; row += MR) {
        vf acc[MR][NV] = {};
        Engine::template block<NV>(a + row * inner, inner, b + col * Engine::PAIR, TILE, inner, acc);
        for (int i = 0; i < MR; ++i)
          for (int j = 0; j < NV; ++j) store(c + (row + i) * ldc + col + j * LANES, acc[i][j]);
      }
  }

  template <int V>
  static void pv_columns(const elem* p, int ldp, const elem* const* v, int count, int width, float* c) {
    for (int row = 0; row < TILE; row += MR) {
      vf acc[MR][V];
      for (int i = 0; i < MR; ++i)
        for (int j = 0; j < V; ++j) acc[i][j] = load(c + (row + i) * width + j * LANES);
      for (int t = 0; t < count; ++t)
        Engine::template block<V>(p + row * ldp + t * TILE, ldp, v[t], width, TILE, acc);
      for (int i = 0; i < MR; ++i)
        for (int j = 0; j < V; ++j) store(c + (row + i) * width + j * LANES, acc[i][j]);
    }
  }

  static void pv(const elem* p, int ldp, const elem* const* v, int count, int width, float* c) {
    const elem* at[WALK];
    for (int col = 0; col < width;) {
      for (int t = 0; t < count; ++t) at[t] = v[t] + col * Engine::PAIR;
      const int left = (width - col) / LANES;
      if (left >= NV) {
        pv_columns<NV>(p, ldp, at, count, width, c + col);
        col += NV * LANES;
      } else if (left >= 2) {
        pv_columns<2>(p, ldp, at, count, width, c + col);
        col += 2 * LANES;
      } else {
        pv_columns<1>(p, ldp, at, count, width, c + col);
        col += LANES;
      }
    }
  }
};

struct Brgemm {
  using elem = at::BFloat16;
  // AMX multiplies 32 bf16 of the inner dimension at a time.
  static constexpr int PAIR = 2, INNER = 32, TERMS = 4;

  static void qk(const elem* a, int inner, const elem* b, float* c, int ldc) {
    at::native::cpublas::brgemm(TILE, TILE, inner, inner, TILE, ldc, false, a, b, c, true);
  }
  static void pv(const elem* p, int ldp, const elem* const* v, int count, int width, float* c) {
    for (int t = 0; t < count; ++t)
      at::native::cpublas::brgemm(TILE, width, TILE, ldp, width, width, true, p + t * TILE, v[t], c, true);
  }
  static void finish() { at::native::cpublas::brgemm_release(true); }
};

// ---- packing ----

// Panel of `have` keys, zero up to 64: element (d, j) of K transposed, pairs of d together.
template <class Engine, class T>
void pack_k(const T* const* rows, int have, int dim, int inner, typename Engine::elem* __restrict to) {
  using elem = typename Engine::elem;
  constexpr int P = Engine::PAIR;
  if (have < TILE || dim < inner) std::fill(to, to + inner * TILE, elem(0));
  for (int d = 0; d < dim; d += P)
    for (int j = 0; j < have; ++j) {
      elem* at = to + d * TILE + j * P;
      at[0] = cast<elem>(rows[j][d]);
      if (P == 2 && d + 1 < dim) at[1] = cast<elem>(rows[j][d + 1]);
    }
}

// Panel of `have` values, zero up to 64: element (j, e), pairs of j together.
template <class Engine, class T>
void pack_v(const T* const* rows, int have, int dim, int width, typename Engine::elem* __restrict to) {
  using elem = typename Engine::elem;
  constexpr int P = Engine::PAIR;
  if (have < TILE || dim < width) std::fill(to, to + width * TILE, elem(0));
  for (int j = 0; j < have; j += P) {
    elem* at = to + j * width;
    if (P == 2 && j + 1 < have) {
      const T *__restrict a = rows[j], *__restrict b = rows[j + 1];
      for (int e = 0; e < dim; ++e) at[2 * e] = cast<elem>(a[e]), at[2 * e + 1] = cast<elem>(b[e]);
    } else {
      for (int e = 0; e < dim; ++e) at[e * P] = cast<elem>(rows[j][e]);
    }
  }
}

// The engines that this build and this processor have for a dtype, fastest first.
inline std::vector<std::string> engines(at::ScalarType dtype) {
  std::vector<std::string> found;
  if (dtype == at::kBFloat16) {
    const bool amx = at::native::cpublas::could_pack(at::kBFloat16);
    if (amx) found.push_back("brgemm");
#if defined(__AVX512BF16__)
    found.push_back("dot");
    if (!amx) found.push_back("brgemm");
#endif
  }
  found.push_back("float");
  return found;
}

}  // namespace headwise
