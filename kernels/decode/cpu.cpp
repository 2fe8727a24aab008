// Attention of a few queries over all or chosen keys on the CPU. Compiled by kernels/native/build.py.
//
// Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen keys, D head dim, E value dim,
// R = Q * H / G query rows of a KV head.
//
// A task is some keys of one KV head with all query rows that read it, so that each row of K and V comes from memory
// once. It leaves their maximum, sum and unnormalised output; whoever finishes the last split of a KV head combines
// them in order (Flash-Decoding; Dao et al., 2023). Neither splits nor order depend on the number of threads. For
// scores the probabilities are stored and in the end rescaled by the sums of all splits.
//
// Two engines read the rows as they lie, but those of 8 bits, which become the queries' dtype before: `Float` (compiler
// vectors; any dtype becomes fp32) and `Dot` (AVX-512 bf16 dot products, pairs of adjacent head dims for K and of adjacent
// keys for V).

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <vector>

#include "../native/vectors.h"

namespace {

using namespace headwise;

// Keys of a task at most and at least; in between, as many as make FEW_TASKS, enough for any processor.
constexpr int SPLIT = 512, SMALL_SPLIT = 128, FEW_TASKS = 64;
// Keys of a step of either product: what stays in the first cache while all query rows read it.
constexpr int QK_KEYS = 16, PV_KEYS = 64;
// How many keys ahead rows are asked for: chosen rows lie where no processor expects them.
constexpr int AHEAD = 64;
// Query rows, sums of a QK block and vectors of a row in a PV block that fit the registers.
constexpr int ROWS = 4, SUMS = LANES == 16 ? 16 : 8, VECTORS = LANES == 16 ? 4 : 2;

// ---- engines: a `vec` holds CHUNK elements of a row of K, or LANES columns of STEP rows of V ----

inline vf widen(const float* p) { return load(p); }
inline vf widen(const at::BFloat16* p) {
  typedef uint16_t words __attribute__((vector_size(LANES * 2)));
  words v;
  std::memcpy(&v, p, sizeof v);
  return (vf)(__builtin_convertvector(v, vi) << 16);
}
inline vf widen(const at::Half* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__) && defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vf v;
  for (int i = 0; i < LANES; ++i) v[i] = static_cast<float>(p[i]);
  return v;
#endif
}

template <class Row>
struct Float {
  using row = Row;
  using elem = float;
  using vec = vf;
  static constexpr int STEP = 1, CHUNK = LANES, TERMS = 6;

  static vec whole(const row* p) { return widen(p); }
  static vec part(const row* p, int n) {
    row padded[LANES] = {};
    std::memcpy(static_cast<void*>(padded), p, n * sizeof(row));
    return widen(padded);
  }
  static vec query(const elem* p) { return load(p); }
  static vec weight(const elem* p) { return splat(*p); }
  static void pair(const vec* rows, vec* out) { *out = *rows; }
  static vf add(vf sum, vec a, vec b) { return sum + a * b; }
  static void keep(elem* p, vf a) { store(p, a); }
  // Which four columns a quarter of an accumulator's vectors holds.
  static int columns(int i) { return i; }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
struct Dot {
  using row = at::BFloat16;
  using elem = at::BFloat16;
  using vec = __m512bh;
  static constexpr int STEP = 2, CHUNK = 2 * LANES, TERMS = 3;

  static vec whole(const row* p) {
    vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static vec part(const row* p, int n) { return (vec)_mm512_maskz_loadu_epi16((__mmask32(1) << n) - 1, p); }
  static vec query(const elem* p) { return whole(p); }
  static vec weight(const elem* p) {
    int32_t both;
    std::memcpy(&both, p, sizeof both);
    return (vec)_mm512_set1_epi32(both);
  }
  // Adjacent keys side by side; the columns stay in their quarters of a vector.
  static void pair(const vec* rows, vec* out) {
    out[0] = (vec)_mm512_unpacklo_epi16((__m512i)rows[0], (__m512i)rows[1]);
    out[1] = (vec)_mm512_unpackhi_epi16((__m512i)rows[0], (__m512i)rows[1]);
  }
  static vf add(vf sum, vec a, vec b) { return (vf)_mm512_dpbf16_ps((__m512)sum, a, b); }
  static void keep(elem* p, vf a) {
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)a);
    std::memcpy(static_cast<void*>(p), &narrow, sizeof narrow);
  }
  static int columns(int i) { return i / CHUNK * CHUNK + i % LANES * 2 + i % CHUNK / LANES * 4; }
};
#endif

// ---- products ----

// The sum of each vector.
[[gnu::always_inline]] inline void sums(const vf (&a)[SUMS], float* to) {
#if defined(__AVX512F__)
  const auto quarters = [](vf a, vf b, auto which) {
    constexpr int even = which == 0 ? 0x44 : 0x88, odd = which == 0 ? 0xee : 0xdd;
    return (vf)_mm512_shuffle_f32x4((__m512)a, (__m512)b, even) + (vf)_mm512_shuffle_f32x4((__m512)a, (__m512)b, odd);
  };
  const auto lanes = [](vf a, vf b) {
    return (vf)_mm512_unpacklo_ps((__m512)a, (__m512)b) + (vf)_mm512_unpackhi_ps((__m512)a, (__m512)b);
  };
  vf quarter[4];
  for (int i = 0; i < 4; ++i)
    quarter[i] = quarters(quarters(a[i], a[i + 4], std::integral_constant<int, 0>()),
                          quarters(a[i + 8], a[i + 12], std::integral_constant<int, 0>()),
                          std::integral_constant<int, 1>());
  store(to, lanes(lanes(quarter[0], quarter[2]), lanes(quarter[1], quarter[3])));
#elif defined(__AVX2__)
  const auto four = [&](int i) {
    return _mm256_hadd_ps(_mm256_hadd_ps((__m256)a[i], (__m256)a[i + 1]),
                          _mm256_hadd_ps((__m256)a[i + 2], (__m256)a[i + 3]));
  };
  const __m256 x = four(0), y = four(4);
  store(to, (vf)_mm256_permute2f128_ps(x, y, 0x20) + (vf)_mm256_permute2f128_ps(x, y, 0x31));
#else
  for (int i = 0; i < SUMS; ++i) to[i] = sum(a[i]);
#endif
}

// Logits of N query rows with QK_KEYS keys.
template <class Engine, int N>
void qk(const typename Engine::elem* q, int inner, const typename Engine::row* const* rows, int dim, float* s) {
  using vec = typename Engine::vec;
  constexpr int KEYS = SUMS / (N == 3 ? 4 : N), CHUNK = Engine::CHUNK;
  for (int j = 0; j < QK_KEYS; j += KEYS) {
    vf acc[SUMS] = {};
    const auto add = [&](int c, auto key) {
      vec qs[N];
#pragma GCC unroll 4
      for (int r = 0; r < N; ++r) qs[r] = Engine::query(q + r * inner + c);
#pragma GCC unroll 16
      for (int i = 0; i < KEYS; ++i) {
        __builtin_prefetch(rows[j + i + AHEAD] + c, 0, 1);
        const vec k = key(rows[j + i] + c);
#pragma GCC unroll 4
        for (int r = 0; r < N; ++r) acc[r * KEYS + i] = Engine::add(acc[r * KEYS + i], k, qs[r]);
      }
    };
    int c = 0;
    for (; c + CHUNK <= dim; c += CHUNK) add(c, [](const auto* p) { return Engine::whole(p); });
    if (c < dim) add(c, [&](const auto* p) { return Engine::part(p, dim - c); });
    float found[SUMS];
    sums(acc, found);
    for (int r = 0; r < N; ++r) std::memcpy(s + r * SPLIT + j, found + r * KEYS, KEYS * sizeof(float));
  }
}

// Adds P V of N query rows and n keys to CHUNKS chunks of columns; TAIL if only `have` columns of one chunk exist.
template <class Engine, int N, int CHUNKS, bool TAIL>
void pv(const typename Engine::elem* p, const typename Engine::row* const* rows, int n, int column, int have, float* o,
        int width) {
  using vec = typename Engine::vec;
  constexpr int STEP = Engine::STEP, V = CHUNKS * STEP;
  vf acc[N][V];
  for (int r = 0; r < N; ++r)
    for (int i = 0; i < V; ++i) acc[r][i] = load(o + r * width + column + i * LANES);
  for (int j = 0; j < n; j += STEP) {
    vec v[V];
#pragma GCC unroll 4
    for (int i = 0; i < CHUNKS; ++i) {
      vec loaded[STEP];
#pragma GCC unroll 2
      for (int t = 0; t < STEP; ++t) {
        const int first = column + i * Engine::CHUNK;
        __builtin_prefetch(rows[j + t + AHEAD] + first, 0, 1);
        const auto* at = rows[j + t] + first;
        loaded[t] = TAIL ? Engine::part(at, have) : Engine::whole(at);
      }
      Engine::pair(loaded, v + i * STEP);
    }
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) {
      const vec weight = Engine::weight(p + r * SPLIT + j);
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) acc[r][i] = Engine::add(acc[r][i], weight, v[i]);
    }
  }
  for (int r = 0; r < N; ++r)
    for (int i = 0; i < V; ++i) store(o + r * width + column + i * LANES, acc[r][i]);
}

template <class Engine, int N>
void pv(const typename Engine::elem* p, const typename Engine::row* const* rows, int n, int dim, float* o, int width) {
  constexpr int CHUNK = Engine::CHUNK, CHUNKS = VECTORS / Engine::STEP;
  int column = 0;
  for (; column + CHUNKS * CHUNK <= dim; column += CHUNKS * CHUNK)
    pv<Engine, N, CHUNKS, false>(p, rows, n, column, 0, o, width);
  for (; column + CHUNK <= dim; column += CHUNK) pv<Engine, N, 1, false>(p, rows, n, column, 0, o, width);
  if (column < dim) pv<Engine, N, 1, true>(p, rows, n, column, dim - column, o, width);
}

// Calls `go` with the first row and the number of rows, as a constant, of each block of query rows.
template <class Go>
void blocks_of_rows(int rows, Go go) {
  int r = 0;
  for (; r + ROWS <= rows; r += ROWS) go(r, std::integral_constant<int, ROWS>());
  if (rows - r == 3) go(r, std::integral_constant<int, 3>());
  if (rows - r == 2) go(r, std::integral_constant<int, 2>());
  if (rows - r == 1) go(r, std::integral_constant<int, 1>());
}

// Scores to unnormalised probabilities; their maximum and their sum. `kept` gets them in fp32.
template <class Engine>
void softmax(const float* s, typename Engine::elem* p, float* kept, int n, const Exp2<Engine::TERMS>& exp2, float& top,
             float& total) {
  vf m = splat(NEG_INF);
  for (int j = 0; j < n; j += LANES) m = larger(load(s + j), m);
  top = maximum(m);
  const vf shift = splat(top == NEG_INF ? 0.0f : top);
  vf added = {};
  for (int j = 0; j < n; j += LANES) {
    const vf e = exp2(load(s + j) - shift);
    added += e;
    Engine::keep(p + j, e);
    if (kept) store(kept + j, e);
  }
  total = sum(added);
}

// ---- where keys lie ----

// K or V: (B, heads, length, dim), or pages (pages, page size, heads, dim) and a table of them for each sequence.
template <class T>
struct Cache {
  Stored<T> stored;
  int64_t batch, head, row;
  Cache(const at::Tensor& t, bool paged)
      : stored(t), batch(t.stride(0)), head(t.stride(paged ? 2 : 1)), row(t.stride(paged ? 1 : 2)) {}
};

struct Lists {
  const int32_t* data = nullptr;
  int64_t batch = 0, head = 0, width = 0;
  Lists(const std::optional<at::Tensor>& t) {
    if (!t) return;
    data = t->const_data_ptr<int32_t>(), batch = t->stride(0), width = t->size(-1);
    if (t->dim() == 3) head = t->stride(1);
  }
  const int32_t* at(int64_t b, int64_t g) const { return data + b * batch + g * head; }
};

struct Call {
  const at::Tensor &q, &k, &v;
  const std::optional<at::Tensor>&tokens, &starts, &ends, &block_table, &sinks;
  int64_t window;
  Softmax how;
  bool sum, max;
  at::Tensor &out, &lse, &scores;
};

// One KV head of one sequence: which entries of its list (or which keys, without a list) its queries see together.
struct Head {
  int64_t b, g, end, first, count, split;  // `split` counts those of all heads before it
};

template <class Engine>
struct Run {
  using T = typename Engine::row;
  using elem = typename Engine::elem;

  const Call& call;
  const bool paged = call.block_table.has_value();
  const int64_t B = call.q.size(0), H = call.q.size(1), Q = call.q.size(2);
  const int64_t G = call.k.size(paged ? 2 : 1), page = paged ? call.k.size(1) : 0, pages = call.k.size(0);
  const int64_t K = paged ? call.block_table->size(1) * page : call.k.size(2);
  const int D = call.q.size(3), E = call.v.size(3), R = H / G * Q;
  const int inner = round_up(D, Engine::CHUNK), width = round_up(E, Engine::CHUNK);
  const Strided<T> qs{call.q}, os{call.out};
  const Cache<T> ks{call.k, paged}, vs{call.v, paged};
  const Lists tokens{call.tokens}, table{call.block_table};
  const float factor = call.how.factor();
  const Exp2<Engine::TERMS> exp2{factor};
  const float* const sinks = call.sinks ? call.sinks->template const_data_ptr<float>() : nullptr;
  // The values of places beyond the last key: no memory of others is multiplied, not even by 0.
  const std::vector<T> zeros = std::vector<T>(width, T(0));

  std::vector<Head> heads;
  // Keys of a split, splits of all heads, and of the head with the most.
  int64_t share = SPLIT, splits = 0, most = 0;
  // Of each split and query row: maximum, sum and output; with scores also the probabilities.
  std::unique_ptr<float[], Free> tops, totals, partial, kept;
  // Of each KV head and query row: maximum and 1 / sum of all splits.
  std::unique_ptr<float[], Free> top, inverse;
  std::unique_ptr<std::atomic<int>[]> open;

  struct Scratch {
    // Those of K, then those of V, so that the last of K ask for the first of V.
    const T* rows[2 * SPLIT + AHEAD];
    // Rows that have 8 bits where they lie: all of K, then all of V.
    std::unique_ptr<T[], Free> wide;
    std::unique_ptr<elem[], Free> q, p;
    std::unique_ptr<float[], Free> s, row;
    std::vector<float> weights;
    Scratch(const Run& run)
        : wide(allocate<T>(run.ks.stored.eight() ? SPLIT * (run.D + run.E) : 0)),
          q(allocate<elem>(run.R * run.inner)),
          p(allocate<elem>(run.R * SPLIT)),
          s(allocate<float>(run.R * SPLIT)),
          row(allocate<float>(run.width)),
          weights(run.most) {}
  };

  explicit Run(const Call& c) : call(c) {
    const int32_t* start = c.starts ? c.starts->const_data_ptr<int32_t>() : nullptr;
    const int32_t* end = c.ends ? c.ends->const_data_ptr<int32_t>() : nullptr;
    heads.reserve(B * G);
    int64_t keys = 0;
    for (int64_t b = 0; b < B; ++b) {
      const int64_t from = start ? start[b] : 0, to = end ? end[b] : K;
      TORCH_CHECK_VALUE(from >= 0, "starts must not be negative, got ", from, " for sequence ", b);
      TORCH_CHECK_VALUE(to <= K, "ends must be at most the key length ", K, ", got ", to, " for sequence ", b);
      const auto seen = range(from, to, to - Q);
      for (int64_t g = 0; g < G; ++g) {
        const auto [first, last] = places(b, g, seen);
        heads.push_back({b, g, to, first, last - first, 0});
        keys += last - first;
      }
    }
    share = std::clamp<int64_t>(round_up(keys / FEW_TASKS, QK_KEYS), SMALL_SPLIT, SPLIT);
    for (Head& head : heads) {
      // A head that sees nothing still has one split, which writes zeros.
      const int64_t needed = std::max<int64_t>((head.count + share - 1) / share, 1);
      head.split = splits;
      splits += needed, most = std::max(most, needed);
    }
    tops = allocate<float>(splits * R), totals = allocate<float>(splits * R);
    partial = allocate<float>(splits * R * width);
    top = allocate<float>(B * G * R), inverse = allocate<float>(B * G * R);
    if (c.sum || c.max) kept = allocate<float>(splits * R * share);
    open = std::make_unique<std::atomic<int>[]>(heads.size());
    for (size_t i = 0; i < heads.size(); ++i) open[i] = splits_of(i);
  }

  struct Range {
    int64_t first, last;
  };
  // Keys that the queries from position `at` on see, the window of the first of them included.
  Range range(int64_t from, int64_t to, int64_t at) const {
    if (call.window) from = std::max(from, at - call.window + 1);
    return {std::min(from, to), to};
  }
  // The same as places in the list of a KV head.
  Range places(int64_t b, int64_t g, Range keys) const {
    if (!tokens.data) return keys;
    const int32_t *list = tokens.at(b, g), *stop = list + tokens.width;
    const auto place = [&](int64_t key) { return std::lower_bound(list, stop, std::max<int64_t>(key, 0)) - list; };
    const int64_t first = place(keys.first);
    return {first, std::max<int64_t>(first, place(keys.last))};
  }
  int64_t splits_of(size_t head) const {
    return (head + 1 < heads.size() ? heads[head + 1].split : splits) - heads[head].split;
  }
  int64_t head_of(int64_t split) const {
    return std::upper_bound(heads.begin(), heads.end(), split, [](int64_t s, const Head& h) { return s < h.split; }) -
           heads.begin() - 1;
  }

  // Rows of n keys of K, as many as `whole`, and of V behind them.
  void rows_of(const Head& head, int64_t first, int n, int whole, Scratch& w) const {
    const T **k_rows = w.rows, **v_rows = w.rows + whole;
    const int32_t* list = tokens.data ? tokens.at(head.b, head.g) + first : nullptr;
    const int64_t k_head = head.g * ks.head, v_head = head.g * vs.head;
    int64_t k = head.b * ks.batch + k_head, v = head.b * vs.batch + v_head;
    int64_t page_first = 0, page_end = paged ? 0 : K, before = list && first ? list[-1] : -1;
    for (int j = 0; j < n; ++j) {
      const int64_t key = list ? list[j] : first + j;
      TORCH_CHECK_VALUE(before < key && key < K, "tokens must ascend below ", K, ", got ", key, " after ", before);
      before = list ? key : -1;
      if (paged && (key < page_first || key >= page_end)) {
        const int64_t number = table.at(head.b, 0)[key / page];
        TORCH_CHECK_VALUE(0 <= number && number < pages, "page ", number, " is none of the ", pages, " pages");
        k = number * ks.batch + k_head, v = number * vs.batch + v_head;
        page_first = key / page * page, page_end = page_first + page;
      }
      k_rows[j] = ks.stored.row(k + (key - page_first) * ks.row, D, w.wide.get(), j);
      v_rows[j] = vs.stored.row(v + (key - page_first) * vs.row, E, w.wide.get() + SPLIT * D, j);
    }
    // Rows beyond the last key have no weight.
    std::fill(k_rows + n, k_rows + whole, k_rows[n - 1]);
    std::fill(v_rows + n, v_rows + whole + AHEAD, zeros.data());
  }

  void task(int64_t split, Scratch& w) {
    const Head& head = heads[head_of(split)];
    const int64_t place = (split - head.split) * share, first = head.first + place;
    const int n = std::min<int64_t>(share, head.count - place), whole = round_up(n, QK_KEYS);
    float *o = partial.get() + split * R * width, *tops_ = tops.get() + split * R, *totals_ = totals.get() + split * R;
    std::fill(o, o + R * width, 0.0f);
    if (n == 0) {
      std::fill(tops_, tops_ + R, NEG_INF);
      std::fill(totals_, totals_ + R, 0.0f);
      return;
    }
    rows_of(head, first, n, whole, w);
    const T *const *k_rows = w.rows, *const *v_rows = w.rows + whole;
    for (int r = 0; r < R; ++r) {
      elem* to = w.q.get() + r * inner;
      copy(qs.at(head.b, head.g * (R / Q) + r / Q, r % Q), D, to);
      std::fill(to + D, to + inner, elem(0));
    }
    for (int j = 0; j < whole; j += QK_KEYS) {
      blocks_of_rows(R, [&](int r, auto count) {
        qk<Engine, count.value>(w.q.get() + r * inner, inner, k_rows + j, D, w.s.get() + r * SPLIT + j);
      });
    }
    for (int i = 0; i < Q; ++i) {
      const int64_t at = head.end - Q + i;
      const Range seen = places(head.b, head.g, range(INT64_MIN / 2, at + 1, at));
      const int from = std::clamp<int64_t>(seen.first - first, 0, n), to = std::clamp<int64_t>(seen.last - first, 0, n);
      for (int r = i; r < R; r += Q) {
        float* s = w.s.get() + r * SPLIT;
        if (call.how.softcap > 0) cap(s, whole, call.how);
        std::fill(s, s + from, NEG_INF);
        std::fill(s + to, s + whole, NEG_INF);
        float* keep = kept ? kept.get() + (split * R + r) * share : nullptr;
        softmax<Engine>(s, w.p.get() + r * SPLIT, keep, whole, exp2, tops_[r], totals_[r]);
      }
    }
    for (int j = 0; j < whole; j += PV_KEYS) {
      const int some = std::min(PV_KEYS, whole - j);
      blocks_of_rows(R, [&](int r, auto count) {
        pv<Engine, count.value>(w.p.get() + r * SPLIT + j, v_rows + j, some, E, o + r * width, width);
      });
    }
  }

  void combine(int64_t at, Scratch& w) {
    const Head& head = heads[at];
    const int64_t n = splits_of(at);
    for (int r = 0; r < R; ++r) {
      const int64_t first = head.split * R + r;
      float highest = NEG_INF, total = 0;
      for (int64_t i = 0; i < n; ++i) highest = std::max(highest, tops[first + i * R]);
      const float shift = highest == NEG_INF ? 0.0f : highest;
      for (int64_t i = 0; i < n; ++i) {
        w.weights[i] = std::exp2((tops[first + i * R] - shift) * factor);
        total += w.weights[i] * totals[first + i * R];
      }
      const int64_t h = head.g * (R / Q) + r / Q, i_q = r % Q;
      // No key seen: no division by zero, and zeros from here on.
      float inverted = total == 0 ? 0.0f : 1 / total;
      float lse = total == 0 ? NEG_INF : highest * call.how.to_logit() + std::log(total);
      if (sinks && total == 0) {
        lse = sinks[h];
      } else if (sinks) {
        const WithSink with(sinks[h], lse);
        inverted *= with.share, lse = with.lse;
      }
      top[at * R + r] = shift, inverse[at * R + r] = inverted;
      call.lse.mutable_data_ptr<float>()[(head.b * H + h) * Q + i_q] = lse;
      for (int e = 0; e < width; e += LANES) {
        vf o = {};
        for (int64_t i = 0; i < n; ++i) o += load(partial.get() + (first + i * R) * width + e) * w.weights[i];
        o *= inverted;
        for (int part = 0; part < LANES; part += 4)
          std::memcpy(w.row.get() + Engine::columns(e + part), reinterpret_cast<float*>(&o) + part, 4 * sizeof(float));
      }
      copy(w.row.get(), E, const_cast<T*>(os.at(head.b, h, i_q)));
    }
  }

  void score(int64_t from, int64_t to) {
    for (int64_t split = from; split < to; ++split) {
      const int64_t at = head_of(split), place = (split - heads[at].split) * share;
      const int n = std::min<int64_t>(share, heads[at].count - place);
      const int64_t head = heads[at].b * G + heads[at].g;
      float* scores = call.scores.mutable_data_ptr<float>() + head * call.scores.size(-1) + heads[at].first + place;
      for (int r = 0; r < R; ++r) {
        const float weight = std::exp2((tops[split * R + r] - top[at * R + r]) * factor) * inverse[at * R + r];
        const float* p = kept.get() + (split * R + r) * share;
        if (call.sum)
          for (int j = 0; j < n; ++j) scores[j] += p[j] * weight;
        else
          for (int j = 0; j < n; ++j) scores[j] = std::max(scores[j], p[j] * weight);
      }
    }
  }

  void operator()() {
    // Whoever combines a KV head scores its keys as well, unless there are fewer heads than threads.
    const bool at_once = kept && heads.size() >= static_cast<size_t>(at::get_num_threads());
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), splits), 1, [&](int64_t, int64_t) {
      Scratch scratch(*this);
      for (int64_t split; (split = next.fetch_add(1, std::memory_order_relaxed)) < splits;) {
        task(split, scratch);
        const int64_t at = head_of(split);
        if (open[at].fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
        combine(at, scratch);
        if (at_once) score(heads[at].split, heads[at].split + splits_of(at));
      }
    });
    if (kept && !at_once) at::parallel_for(0, splits, 4, [&](int64_t from, int64_t to) { score(from, to); });
  }
};

template <class T>
void run(const Call& call, const std::string& engine) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  if constexpr (std::is_same_v<T, at::BFloat16>)
    if (engine == "dot") return Run<Dot>(call)();
#endif
  TORCH_CHECK_VALUE(engine == "float", "engine '", engine, "' does not serve ", call.q.scalar_type(),
                    " on this processor");
  Run<Float<T>> {call}();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> decode_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& tokens,
    const std::optional<at::Tensor>& starts, const std::optional<at::Tensor>& ends,
    const std::optional<at::Tensor>& block_table, const std::optional<at::Tensor>& sinks, int64_t window, double scale,
    double softcap, std::string scores, std::string engine) {
  at::Tensor out = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
  at::Tensor lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  const bool paged = block_table.has_value(), sum = scores == "sum", max = scores == "max";
  const int64_t keys = paged ? block_table->size(1) * k.size(1) : k.size(2);
  at::Tensor mass = at::zeros({q.size(0), k.size(paged ? 2 : 1), sum || max ? tokens ? tokens->size(-1) : keys : 0},
                              q.options().dtype(at::kFloat));
  const Softmax how{static_cast<float>(scale), static_cast<float>(softcap)};
  const Call call{q, k, v, tokens, starts, ends, block_table, sinks, window, how, sum, max, out, lse, mass};
  switch (q.scalar_type()) {
    case at::kFloat: run<float>(call, engine); break;
    case at::kHalf: run<at::Half>(call, engine); break;
    case at::kBFloat16: run<at::BFloat16>(call, engine); break;
    default: TORCH_CHECK_VALUE(false, "dtype ", q.scalar_type(), " is not served");
  }
  return {out, lse, mass};
}

// The engines that this build has for a dtype, fastest first.
std::vector<std::string> decode_engines(at::ScalarType dtype) {
  std::vector<std::string> found{"float"};
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  if (dtype == at::kBFloat16) found.insert(found.begin(), "dot");
#endif
  return found;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(headwise, m) {
  m.def(
      "decode_attention(Tensor q, Tensor k, Tensor v, Tensor? tokens, Tensor? starts, Tensor? ends, "
      "Tensor? block_table, Tensor? sinks, int window, float scale, float softcap, str scores, str engine) "
      "-> (Tensor, Tensor, Tensor)");
  m.def("decode_engines(ScalarType dtype) -> str[]", &decode_engines);
}

TORCH_LIBRARY_IMPL(headwise, CPU, m) { m.impl("decode_attention", &decode_attention); }
