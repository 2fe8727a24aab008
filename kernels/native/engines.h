// Products of 64 x 64 tiles in the number formats of the processor, and the packing that they read from.
//
// Three engines: `Float` (compiler vectors: AVX-512, AVX2, NEON), `Dot` (AVX-512 bf16 dot products) and `Amx` (its tiles).
// The last two read bf16 in pairs of adjacent inner indices.

#pragma once

#include "tiles.h"
#include "vectors.h"

namespace headwise {

constexpr int TILE = 64;
constexpr int WALK = 8;
// A block of a product in registers: rows, vectors.
constexpr int MR = 4, NV = LANES == 8 ? 2 : 4;

// ---- engines: qk writes C (rows x 64) = A (rows x inner) B; pv adds P (rows x 64 count) V to C (rows x width). Both
// may compute rows up to the next multiple of 16, which A, P and C must have. `place` says where an element of a packed B
// or V lies, of which RUN columns lie side by side. ROWS queries are attended to at a time, over STEP panels a softmax. ----

constexpr int WHOLE = std::numeric_limits<int>::max();

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
  static constexpr int PAIR = 2, INNER = 2, TERMS = 3;

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

// Packed row by row, PAIR rows together.
template <int PAIR>
struct ByRows {
  static constexpr int RUN = WHOLE, ROWS = TILE, STEP = WALK;

  static int place(int, int cols, int row, int col) { return row / PAIR * PAIR * cols + col * PAIR + row % PAIR; }
};

// Blocked products over an engine's `block`. They are never inlined: inside a large caller the compiler spills their
// accumulators, and attention takes 1.8 times as long (Zen 3, AVX2, gcc 12).
template <class Engine>
struct Blocked : Engine, ByRows<Engine::PAIR> {
  using elem = typename Engine::elem;

  static void begin() {}

  [[gnu::noinline]] static void qk(const elem* a, int rows, int inner, const elem* b, float* c, int ldc) {
    for (int col = 0; col < TILE; col += NV * LANES)
      for (int row = 0; row < rows; row += MR) {
        vf acc[MR][NV] = {};
        Engine::template block<NV>(a + row * inner, inner, b + col * Engine::PAIR, TILE, inner, acc);
        for (int i = 0; i < MR; ++i)
          for (int j = 0; j < NV; ++j) store(c + (row + i) * ldc + col + j * LANES, acc[i][j]);
      }
  }

  template <int V>
  [[gnu::noinline]] static void pv_columns(const elem* p, int rows, int ldp, const elem* const* v, int count, int width, float* c) {
    for (int row = 0; row < rows; row += MR) {
      vf acc[MR][V];
      for (int i = 0; i < MR; ++i)
        for (int j = 0; j < V; ++j) acc[i][j] = load(c + (row + i) * width + j * LANES);
      for (int t = 0; t < count; ++t)
        Engine::template block<V>(p + row * ldp + t * TILE, ldp, v[t], width, TILE, acc);
      for (int i = 0; i < MR; ++i)
        for (int j = 0; j < V; ++j) store(c + (row + i) * width + j * LANES, acc[i][j]);
    }
  }

  static void pv(const elem* p, int rows, int ldp, const elem* const* v, int count, int width, float* c) {
    const elem* at[WALK];
    for (int col = 0; col < width;) {
      for (int t = 0; t < count; ++t) at[t] = v[t] + col * Engine::PAIR;
      const int left = (width - col) / LANES;
      if (left >= NV) {
        pv_columns<NV>(p, rows, ldp, at, count, width, c + col);
        col += NV * LANES;
      } else if (left >= 2) {
        pv_columns<2>(p, rows, ldp, at, count, width, c + col);
        col += 2 * LANES;
      } else {
        pv_columns<1>(p, rows, ldp, at, count, width, c + col);
        col += LANES;
      }
    }
  }
};

#if defined(HEADWISE_TILES)
// One configuration of the tiles for as long as a thread computes. B and V are packed as tiles of 1 KB: 16 pairs of rows by
// 16 columns, those of a band of columns one after another. Two tiles of A by two of B make four of C, which stay in
// registers over all panels of a step; the scores of 32 queries by 256 keys, 32 KB, stay in the first cache.
struct Amx {
  using elem = at::BFloat16;
  static constexpr int PAIR = 2, INNER = 32, TERMS = 3, RUN = 16, ROWS = 32, STEP = 4;
  // Elements of a tile, and the rows and columns of a packed matrix that it holds.
  static constexpr int SIZE = 512, HIGH = 32, WIDE = 16;

  static int place(int rows, int, int row, int col) {
    return (col / WIDE * (rows / HIGH) + row / HIGH) * SIZE + row % HIGH / 2 * 2 * WIDE + col % WIDE * 2 + row % 2;
  }

  static void begin() { tiles::configure(); }
  static void finish() { tiles::release(); }

  static void qk(const elem* a, int rows, int inner, const elem* b, float* c, int ldc) {
    multiply<false>(a, rows, inner, &b, 1, inner / HIGH, TILE, c, ldc);
  }
  static void pv(const elem* p, int rows, int ldp, const elem* const* v, int count, int width, float* c) {
    multiply<true>(p, rows, ldp, v, count, TILE / HIGH, width, c, width);
  }

 private:
  // C (16 R x 16 N) of A and, one below the other, `count` matrices B of `depth` tiles a band of columns, from tile
  // `first` on.
  template <bool ADD, int R, int N>
  HEADWISE_USES_TILES static void block(const elem* a, int lda, const elem* const* b, int count, int depth, int first,
                                        float* c, int ldc) {
    const int64_t a_row = lda * sizeof(elem), c_row = ldc * sizeof(float);
    float* const c_low = c + 16 * ldc;
    if constexpr (ADD) {
      tiles::load<0>(c, c_row);
      if constexpr (N > 1) tiles::load<1>(c + WIDE, c_row);
      if constexpr (R > 1) tiles::load<2>(c_low, c_row);
      if constexpr (R > 1 && N > 1) tiles::load<3>(c_low + WIDE, c_row);
    } else {
      tiles::zero<0>();
      if constexpr (N > 1) tiles::zero<1>();
      if constexpr (R > 1) tiles::zero<2>();
      if constexpr (R > 1 && N > 1) tiles::zero<3>();
    }
    for (int t = 0; t < count; ++t) {
      const elem* at = b[t] + first * SIZE;
      for (int d = 0; d < depth; ++d, a += HIGH, at += SIZE) {
        tiles::load<4>(a, a_row);
        tiles::load<6>(at, 64);
        tiles::add_product<0, 4, 6>();
        if constexpr (N > 1) {
          tiles::load<7>(at + depth * SIZE, 64);
          tiles::add_product<1, 4, 7>();
        }
        if constexpr (R > 1) {
          tiles::load<5>(a + 16 * lda, a_row);
          tiles::add_product<2, 5, 6>();
        }
        if constexpr (R > 1 && N > 1) tiles::add_product<3, 5, 7>();
      }
    }
    tiles::store<0>(c, c_row);
    if constexpr (N > 1) tiles::store<1>(c + WIDE, c_row);
    if constexpr (R > 1) tiles::store<2>(c_low, c_row);
    if constexpr (R > 1 && N > 1) tiles::store<3>(c_low + WIDE, c_row);
  }

  template <bool ADD>
  HEADWISE_USES_TILES static void multiply(const elem* a, int rows, int lda, const elem* const* b, int count, int depth,
                                           int cols, float* c, int ldc) {
    for (int row = 0; row < rows; row += 32)
      for (int col = 0; col < cols; col += 2 * WIDE) {
        const bool two_bands = rows - row > 16;
        const bool two_columns = cols - col > WIDE;
        const int first = col / WIDE * depth;
        const elem* const from = a + row * lda;
        float* const to = c + row * ldc + col;
        if (two_bands && two_columns) block<ADD, 2, 2>(from, lda, b, count, depth, first, to, ldc);
        else if (two_bands) block<ADD, 2, 1>(from, lda, b, count, depth, first, to, ldc);
        else if (two_columns) block<ADD, 1, 2>(from, lda, b, count, depth, first, to, ldc);
        else block<ADD, 1, 1>(from, lda, b, count, depth, first, to, ldc);
      }
  }
};
#endif

// An engine in use by a thread, until the end of its life, also where that is an error.
template <class Engine>
struct InUse {
  InUse() { Engine::begin(); }
  ~InUse() { Engine::finish(); }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;
};

// Calls f with the engine of that name, which computes on T.
template <class T, class F>
void with_engine(const std::string& name, F f) {
  if (name == "float") return f(Blocked<Float>());
  if constexpr (std::is_same_v<T, at::BFloat16>) {
#if defined(HEADWISE_TILES)
    if (name == "amx" && tiles::fault().empty()) return f(Amx());
#endif
#if defined(__AVX512BF16__)
    if (name == "dot") return f(Blocked<Dot>());
#endif
  }
  TORCH_CHECK_VALUE(false, "engine '", name, "' does not serve ", c10::CppTypeToScalarType<T>::value,
                    " on this processor");
}

// ---- packing ----

#if defined(__AVX512F__)
// 16 words of each of 16 rows from byte `at` on, transposed: word w of all rows to to + w * STRIDE.
template <int STRIDE>
inline void transpose_words(const char* const* rows, int64_t at, int32_t* to) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + at);
  for (int i = 0; i < 16; i += 2)
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]), a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]), a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // a[4 g + w] holds, in its quarter q, word 4 q + w of the rows 4 g ... 4 g + 3.
  for (int w = 0; w < 4; ++w) {
    const __m512i low = _mm512_shuffle_i32x4(a[w], a[4 + w], 0x44), high = _mm512_shuffle_i32x4(a[w], a[4 + w], 0xee);
    const __m512i low2 = _mm512_shuffle_i32x4(a[8 + w], a[12 + w], 0x44);
    const __m512i high2 = _mm512_shuffle_i32x4(a[8 + w], a[12 + w], 0xee);
    _mm512_storeu_si512(to + w * STRIDE, _mm512_shuffle_i32x4(low, low2, 0x88));
    _mm512_storeu_si512(to + (4 + w) * STRIDE, _mm512_shuffle_i32x4(low, low2, 0xdd));
    _mm512_storeu_si512(to + (8 + w) * STRIDE, _mm512_shuffle_i32x4(high, high2, 0x88));
    _mm512_storeu_si512(to + (12 + w) * STRIDE, _mm512_shuffle_i32x4(high, high2, 0xdd));
  }
}
#endif

// Panel of `have` keys, zero up to 64: element (d, j) of K transposed, pairs of d together.
template <class Engine, class T>
void pack_k(const T* const* rows, int have, int dim, int inner, typename Engine::elem* __restrict to) {
  using elem = typename Engine::elem;
  constexpr int P = Engine::PAIR;
  if (have < TILE || dim < inner) std::fill(to, to + inner * TILE, elem(0));
  int first = 0;
#if defined(__AVX512F__)
  // A pair of bf16 is a word, and so is an fp32.
  if constexpr (std::is_same_v<T, elem> && P * sizeof(elem) == 4)
    if (have == TILE)
      for (; first + 16 * P <= dim; first += 16 * P)
        for (int j = 0; j < TILE; j += 16)
          transpose_words<std::min(Engine::RUN, TILE)>(
              reinterpret_cast<const char* const*>(rows + j), first * sizeof(elem),
              reinterpret_cast<int32_t*>(to + Engine::place(inner, TILE, first, j)));
#endif
  for (int d = first; d < dim; d += P)
    for (int j = 0; j < have; ++j) {
      elem* at = to + Engine::place(inner, TILE, d, j);
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
  constexpr int RUN = Engine::RUN;
  for (int j = 0; j < have; j += P)
    for (int64_t first = 0; first < dim; first += RUN) {
      elem* at = to + Engine::place(TILE, width, j, first);
      const int n = std::min<int64_t>(RUN, dim - first);
      if (P == 2 && j + 1 < have) {
        const T *__restrict a = rows[j] + first, *__restrict b = rows[j + 1] + first;
        for (int e = 0; e < n; ++e) at[2 * e] = cast<elem>(a[e]), at[2 * e + 1] = cast<elem>(b[e]);
      } else {
        for (int e = 0; e < n; ++e) at[e * P] = cast<elem>(rows[j][first + e]);
      }
    }
}

// ---- softmax ----

// The largest of n scores, a multiple of 64, of those that are numbers.
inline float largest(const float* s, int n) {
  vf even = splat(NEG_INF);
  vf odd = even;
  for (int j = 0; j < n; j += 2 * LANES) {
    even = larger(load(s + j), even);
    odd = larger(load(s + j + LANES), odd);
  }
  return maximum(larger(even, odd));
}

// How far, as a power of two, scores may rise above the reference of a row's weights. Only beyond it the sums are
// rescaled, which for most rows is never: their first keys set the scale (FlashAttention-4).
constexpr float SLACK = 8.0f;

// Makes weights relative to the highest score where that is far above `top`; returns the factor of the sums so far.
inline float rebase(float highest, float factor, float& top) {
  if (highest <= top + SLACK / factor) return 1.0f;
  const float before = top;
  top = highest;
  // Before the first visible key the sum is 0 (or NaN, which stays) and needs no factor.
  return before == NEG_INF ? 1.0f : std::exp2((before - top) * factor);
}

// 2 * LANES neighbours in elements.
template <class elem>
inline void put(elem* to, vf a, vf b) {
  if constexpr (std::is_same_v<elem, float>) {
    store(to, a);
    store(to + LANES, b);
  } else {
#if defined(__AVX512BF16__)
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    std::memcpy(static_cast<void*>(to), &both, 64);
#else
    for (int i = 0; i < LANES; ++i) to[i] = cast<elem>(a[i]), to[LANES + i] = cast<elem>(b[i]);
#endif
  }
}

// Of a row of n scores, a multiple of 64, the weights relative to `top`; returns their sum. `p` may be where the scores
// are. Where KEEP the weights in fp32 take the scores' place.
template <int TERMS, bool KEEP = false, class elem>
inline float weigh(float* s, elem* p, int n, const Exp2<TERMS>& exp2, float top) {
  const vf shift = splat(top == NEG_INF ? 0.0f : top);
  vf even = {};
  vf odd = {};
  for (int j = 0; j < n; j += 2 * LANES) {
    const vf a = exp2(load(s + j) - shift);
    const vf b = exp2(load(s + j + LANES) - shift);
    even += a;
    odd += b;
    put(p + j, a, b);
    if (KEEP) store(s + j, a), store(s + j + LANES, b);
  }
  return sum(even + odd);
}

// The engines that this build and this processor have for a dtype, fastest first.
inline std::vector<std::string> engines(at::ScalarType dtype) {
  std::vector<std::string> found;
  if (dtype == at::kBFloat16) {
    if (tiles::fault().empty()) found.push_back("amx");
#if defined(__AVX512BF16__)
    found.push_back("dot");
#endif
  }
  found.push_back("float");
  return found;
}

}  // namespace headwise
