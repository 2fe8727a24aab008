// Sparse attention over a SparseIndex on the CPU. Compiled once for each machine by kernels/native/build.py.
//
// Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
//
// K and V are packed once a KV head into panels of 64 keys (K transposed, both in the order the inner product reads),
// and the single columns of each query head once into panels of the same form. From there a column group costs exactly
// what a tile costs. A task is one query tile of one head: it walks its panels WALK at a time, so that one softmax pass
// sees up to WALK * 64 keys, with the running maximum and sum of online softmax (Milakov and Gimelshein, 2018;
// FlashAttention-2).
//
// Three engines compute the products: `Float` (compiler vectors: AVX-512, AVX2, NEON), `Dot` (AVX-512 bf16 dot
// products) and `Brgemm` (ATen's wrapper of oneDNN, which uses AMX). The last two read bf16 in pairs of adjacent inner
// indices.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "../native/vectors.h"

namespace {

using namespace headwise;

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

struct Entries {
  const int32_t* data;
  int64_t width;
  Entries(const at::Tensor& t) : data(t.const_data_ptr<int32_t>()), width(t.size(-1)) {}
  const int32_t* row(int64_t i) const { return data + i * width; }
};

template <class elem>
struct Panel {
  const elem* k;
  const elem* v;
  const float* live;  // 64 x {1, 0}, 0 for a column that a tile of this row holds already; null where all are live
};

// Everything one thread needs for a task; allocated once a call.
template <class elem>
struct Scratch {
  std::vector<uint64_t> held;       // key tiles of this row, a bit each
  std::vector<Panel<elem>> panels;  // what this row computes, its own tile last
  std::vector<float> live;
  std::unique_ptr<elem[], Free> q, p;
  std::unique_ptr<float[], Free> s, o;
  Scratch(int64_t tiles, int64_t groups, int inner, int width)
      : held((tiles + 63) / 64),
        live(groups * TILE),
        q(allocate<elem>(TILE * inner)),
        p(allocate<elem>(TILE * TILE * WALK)),
        s(allocate<float>(TILE * TILE * WALK)),
        o(allocate<float>(TILE * width)) {
    panels.reserve(tiles + groups);
  }
};

// One row of scores to unnormalised probabilities; returns their sum, updates the running maximum, gives the factor of
// the old sum.
template <int TERMS, class elem>
inline float softmax_row(float* s, elem* p, int n, float factor, float& top, float& rescale) {
  vf m = splat(NEG_INF);
  for (int j = 0; j < n; j += LANES) m = larger(load(s + j), m);
  const float before = top;
  top = std::max(before, maximum(m));
  // Before the first visible key the sum is 0 (or NaN, which stays) and needs no factor.
  rescale = before == NEG_INF ? 1.0f : std::exp2((before - top) * factor);
  const vf shift = splat(top == NEG_INF ? 0.0f : top * factor);
  vf total = {};
  if constexpr (std::is_same_v<elem, float>) {
    for (int j = 0; j < n; j += LANES) {
      const vf e = exp2<TERMS>(load(s + j) * factor - shift);
      total += e;
      store(p + j, e);
    }
  } else {
#if defined(__AVX512BF16__)
    vf second = {};
    for (int j = 0; j < n; j += 2 * LANES) {
      const vf a = exp2<TERMS>(load(s + j) * factor - shift);
      const vf b = exp2<TERMS>(load(s + j + LANES) * factor - shift);
      total += a;
      second += b;
      const __m512bh both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
      std::memcpy(static_cast<void*>(p + j), &both, 64);
    }
    total += second;
#else
    for (int j = 0; j < n; j += LANES) {
      const vf e = exp2<TERMS>(load(s + j) * factor - shift);
      total += e;
      for (int i = 0; i < LANES; ++i) p[j + i] = static_cast<elem>(e[i]);
    }
#endif
  }
  return sum(total);
}

template <class Engine, class T>
void run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& diagonals,
         const at::Tensor& tiles, const at::Tensor& columns, Softmax how, at::Tensor& out, at::Tensor& lse) {
  using elem = typename Engine::elem;
  const int64_t B = q.size(0), H = q.size(1), Q = q.size(2), D = q.size(3);
  const int64_t G = k.size(1), K = k.size(2), E = v.size(3), group = H / G;
  const int64_t N = (K + TILE - 1) / TILE, offset = K - Q, first_row = offset / TILE, R = N - first_row;
  const int inner = round_up(D, Engine::INNER), width = round_up(E, LANES);
  const Strided<T> qs(q), ks(k), vs(v), os(out);
  const Entries diag(diagonals), listed(tiles), single(columns);
  const int64_t k_panel = inner * TILE, v_panel = width * TILE;

  // Columns of each head, in groups of 64: where its panels start.
  std::vector<int64_t> count(B * H), start(B * H + 1, 0);
  int64_t most_groups = 0;
  for (int64_t i = 0; i < B * H; ++i) {
    const int32_t* c = single.row(i);
    count[i] = std::lower_bound(c, c + single.width, static_cast<int32_t>(std::min<int64_t>(K, PAD))) - c;
    const int64_t groups = (count[i] + TILE - 1) / TILE;
    start[i + 1] = start[i] + groups;
    most_groups = std::max(most_groups, groups);
  }
  const int64_t total_panels = B * G * N + start[B * H];
  const auto k_store = allocate<elem>(total_panels * k_panel), v_store = allocate<elem>(total_panels * v_panel);
  elem *const kp = k_store.get(), *const vp = v_store.get();

  at::parallel_for(0, total_panels, 8, [&](int64_t from, int64_t to) {
    const T *k_rows[TILE], *v_rows[TILE];
    for (int64_t panel = from; panel < to; ++panel) {
      int64_t b, g, have;
      if (panel < B * G * N) {
        b = panel / (G * N), g = panel / N % G;
        const int64_t key = panel % N * TILE;
        have = std::min<int64_t>(TILE, K - key);
        for (int64_t j = 0; j < have; ++j) k_rows[j] = ks.at(b, g, key + j), v_rows[j] = vs.at(b, g, key + j);
      } else {
        const int64_t at = panel - B * G * N;
        const int64_t i = std::upper_bound(start.begin(), start.end(), at) - start.begin() - 1;
        const int64_t c0 = (at - start[i]) * TILE;
        b = i / H, g = i % H / group;
        have = std::min<int64_t>(TILE, count[i] - c0);
        const int32_t* c = single.row(i) + c0;
        for (int64_t j = 0; j < have; ++j) {
          TORCH_CHECK_VALUE(0 <= c[j] && c[j] < K, "column ", c[j], " is none of the ", K, " keys");
          k_rows[j] = ks.at(b, g, c[j]), v_rows[j] = vs.at(b, g, c[j]);
        }
      }
      pack_k<Engine>(k_rows, have, D, inner, kp + panel * k_panel);
      pack_v<Engine>(v_rows, have, E, width, vp + panel * v_panel);
    }
  });

  auto task = [&](Scratch<elem>& w, int64_t b, int64_t h, int64_t row) {
    const int64_t at = first_row + row, i = b * H + h, g = h / group;
    const elem* k_tiles = kp + (b * G + g) * N * k_panel;
    const elem* v_tiles = vp + (b * G + g) * N * v_panel;

    std::fill(w.held.begin(), w.held.begin() + at / 64 + 1, 0);
    // Unsigned, so that a negative entry of a broken index ends the list and writes nowhere.
    for (const int32_t *d = diag.row(i), *end = d + diag.width; d < end && static_cast<uint32_t>(*d) <= at; ++d)
      w.held[(at - *d) / 64] |= uint64_t(1) << ((at - *d) % 64);
    for (const int32_t *t = listed.row(i * R + row), *end = t + listed.width;
         t < end && static_cast<uint32_t>(*t) <= at; ++t)
      w.held[*t / 64] |= uint64_t(1) << (*t % 64);

    w.panels.clear();
    const int32_t* c = single.row(i);
    for (int64_t group_at = 0; group_at * TILE < count[i]; ++group_at) {
      const int64_t c0 = group_at * TILE, have = std::min<int64_t>(TILE, count[i] - c0);
      if (c[c0] / TILE >= at) break;
      float* live = w.live.data() + c0;
      int64_t living = 0;
      for (int64_t j = 0; j < have; ++j) {
        const int64_t t = c[c0 + j] / TILE;
        const bool alive = t < at && !(w.held[t / 64] >> (t % 64) & 1);
        living += alive;
        live[j] = alive;
      }
      if (!living) continue;
      std::fill(live + have, live + TILE, 0.0f);
      const int64_t panel = B * G * N + start[i] + group_at;
      w.panels.push_back({kp + panel * k_panel, vp + panel * v_panel, living == TILE ? nullptr : live});
    }
    for (int64_t word = 0; word <= at / 64; ++word)
      for (uint64_t bits = w.held[word]; bits; bits &= bits - 1) {
        const int64_t t = word * 64 + __builtin_ctzll(bits);
        if (t != at) w.panels.push_back({k_tiles + t * k_panel, v_tiles + t * v_panel, nullptr});
      }
    w.panels.push_back({k_tiles + at * k_panel, v_tiles + at * v_panel, nullptr});

    // Query rows of the tile that exist; the others are computed on zeros and dropped.
    const int lo = std::max<int64_t>(offset - at * TILE, 0), hi = std::min<int64_t>(K - at * TILE, TILE);
    std::fill(w.q.get(), w.q.get() + TILE * inner, elem(0));
    for (int r = lo; r < hi; ++r) copy(qs.at(b, h, at * TILE + r - offset), D, w.q.get() + r * inner);

    float top[TILE], total[TILE];
    std::fill(top, top + TILE, NEG_INF);
    std::fill(total, total + TILE, 0.0f);
    std::fill(w.o.get(), w.o.get() + TILE * width, 0.0f);
    const float factor = how.factor();
    constexpr int LD = TILE * WALK;
    const int64_t panels = w.panels.size();
    for (int64_t p0 = 0; p0 < panels; p0 += WALK) {
      const int step = std::min<int64_t>(WALK, panels - p0), n = step * TILE;
      const elem* values[WALK];
      for (int t = 0; t < step; ++t) {
        Engine::qk(w.q.get(), inner, w.panels[p0 + t].k, w.s.get() + t * TILE, LD);
        values[t] = w.panels[p0 + t].v;
      }
      const bool own = p0 + step == panels;
      for (int r = lo; r < hi; ++r) {
        float* s = w.s.get() + r * LD;
        if (how.softcap > 0) cap(s, n, how);
        for (int t = 0; t < step; ++t)
          if (const float* live = w.panels[p0 + t].live)
            for (int j = 0; j < TILE; j += LANES) {
              float* to = s + t * TILE + j;
              store(to, load(live + j) > 0 ? load(to) : splat(NEG_INF));
            }
        if (own) std::fill(s + n - TILE + r + 1, s + n, NEG_INF);
        float rescale;
        const float part = softmax_row<Engine::TERMS>(s, w.p.get() + r * LD, n, factor, top[r], rescale);
        total[r] = total[r] * rescale + part;
        if (rescale != 1.0f) {
          float* o = w.o.get() + r * width;
          for (int e = 0; e < width; e += LANES) store(o + e, load(o + e) * rescale);
        }
      }
      Engine::pv(w.p.get(), LD, values, step, width, w.o.get());
    }

    float* lse_row = lse.mutable_data_ptr<float>() + i * Q;
    for (int r = lo; r < hi; ++r) {
      const int64_t at_q = at * TILE + r - offset;
      copy(w.o.get() + r * width, E, 1.0f / total[r], const_cast<T*>(os.at(b, h, at_q)));
      lse_row[at_q] = (top[r] * factor + std::log2(total[r])) / LOG2E;
    }
  };

  // The longest rows of a KV head's query heads first, so that threads finish together and share its panels in cache.
  std::atomic<int64_t> next{0};
  const int64_t all = B * H * R;
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    Scratch<elem> scratch(N, most_groups, inner, width);
    std::fill(scratch.p.get(), scratch.p.get() + TILE * TILE * WALK, elem(0));
    for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < all;) {
      const int64_t kv = t / (R * group), rest = t % (R * group);
      task(scratch, kv / G, kv % G * group + rest % group, R - 1 - rest / group);
    }
    Engine::finish();
  });
}

template <class T>
void run_for(const std::string& engine, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
             const at::Tensor& diagonals, const at::Tensor& tiles, const at::Tensor& columns, Softmax how,
             at::Tensor& out, at::Tensor& lse) {
  if (engine == "float") return run<Blocked<Float>, T>(q, k, v, diagonals, tiles, columns, how, out, lse);
  if constexpr (std::is_same_v<T, at::BFloat16>) {
#if defined(__AVX512BF16__)
    if (engine == "dot") return run<Blocked<Dot>, T>(q, k, v, diagonals, tiles, columns, how, out, lse);
#endif
    if (engine == "brgemm") return run<Brgemm, T>(q, k, v, diagonals, tiles, columns, how, out, lse);
  }
  TORCH_CHECK_VALUE(false, "engine '", engine, "' does not serve ", q.scalar_type(), " on this processor");
}

std::tuple<at::Tensor, at::Tensor> sparse_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                    const at::Tensor& diagonals, const at::Tensor& tiles,
                                                    const at::Tensor& columns, double scale, double softcap,
                                                    std::string engine) {
  at::Tensor out = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
  at::Tensor lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  // Above glibc's largest threshold the memory is new from the system at every call.
  if (out.nbytes() > size_t(32) << 20) on_huge_pages(out.mutable_data_ptr(), out.nbytes());
  const Softmax how{static_cast<float>(scale), static_cast<float>(softcap)};
  switch (q.scalar_type()) {
    case at::kFloat: run_for<float>(engine, q, k, v, diagonals, tiles, columns, how, out, lse); break;
    case at::kHalf: run_for<at::Half>(engine, q, k, v, diagonals, tiles, columns, how, out, lse); break;
    case at::kBFloat16: run_for<at::BFloat16>(engine, q, k, v, diagonals, tiles, columns, how, out, lse); break;
    default: TORCH_CHECK_VALUE(false, "dtype ", q.scalar_type(), " is not served");
  }
  return {out, lse};
}

// The engines that this build and this processor have for a dtype, fastest first.
std::vector<std::string> engines(at::ScalarType dtype) {
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

}  // namespace

TORCH_LIBRARY_FRAGMENT(headwise, m) {
  m.def(
      "sparse_attention(Tensor q, Tensor k, Tensor v, Tensor diagonals, Tensor tiles, Tensor columns, float scale, "
      "float softcap, str engine) -> (Tensor, Tensor)");
  m.def("engines(ScalarType dtype) -> str[]", &engines);
}

TORCH_LIBRARY_IMPL(headwise, CPU, m) { m.impl("sparse_attention", &sparse_attention); }
