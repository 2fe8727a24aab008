// Gradients of dense causal attention on the CPU. Compiled once for each machine by kernels/native/build.py.
//
// Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
//
// FlashAttention-2, Algorithm 2 (Dao, 2023): the probabilities of a tile are computed again from the log-sum-exp, and
// each tile of keys (64) meets each tile of queries (64) once. A tile of scores is held transposed, a row for each key:
// the products for dk and dv read its rows as they are, and a row's lanes are queries, as log-sum-exps are.
//
// A task is a strip of query tiles of one head against a strip of key tiles. Tasks of one query strip add to the same
// dq, tasks of one key strip to the same dk and dv. Each waits for those before it in a list that depends on the shapes
// alone, so every sum is made in the same order by any number of threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>
#include <vector>

#include "../native/engines.h"

namespace {

using namespace headwise;

constexpr int64_t STRIP = 8;      // tiles of a strip
constexpr int64_t STEP = 4;       // query tiles whose products for dk and dv are made together
constexpr int AREA = TILE * TILE;
constexpr int LD = TILE * STEP;

struct Options {
  Softmax softmax;
  int64_t window;  // keys that a query sees, itself included
  float least;     // log2 of the probability below which a tile is skipped
};

// Lengths in tiles. Tiles are aligned to positions, and the queries are the last Q of the K positions.
struct Lengths {
  int64_t Q, K;
  int64_t offset() const { return K - Q; }
  int64_t tiles() const { return (K + TILE - 1) / TILE; }
  int64_t first() const { return offset() / TILE; }
  int64_t strips() const { return (tiles() + STRIP - 1) / STRIP; }
};

// to[j * 64 + i] = rows[i][j]: dim rows of 64, zero up to `up`.
template <class T, class elem>
void transpose(const T* const* rows, int64_t dim, int64_t up, elem* to) {
  for (int64_t d = 0; d < dim; ++d)
    for (int i = 0; i < TILE; ++i) to[d * TILE + i] = cast<elem>(rows[i][d]);
  std::fill(to + dim * TILE, to + up * TILE, elem(0));
}

template <class T, class elem>
void rows_of(const T* const* rows, int64_t dim, int64_t up, elem* to) {
  for (int i = 0; i < TILE; ++i) {
    copy(rows[i], dim, to + i * up);
    std::fill(to + i * up + dim, to + (i + 1) * up, elem(0));
  }
}

template <class T>
float product(const T* a, const T* b, int64_t n) {
  vf total = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    float x[LANES], y[LANES];
    copy(a + i, LANES, x);
    copy(b + i, LANES, y);
    total += load(x) * load(y);
  }
  float rest = 0;
  for (; i < n; ++i) rest += cast<float>(a[i]) * cast<float>(b[i]);
  return sum(total) + rest;
}

// even and odd by turns.
template <class elem>
inline void put_pairs(elem* to, vf even, vf odd) {
#if defined(__AVX512BF16__)
  static const __m512i turns = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i both = _mm512_permutexvar_epi16(turns, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
  std::memcpy(static_cast<void*>(to), &both, 64);
#else
  for (int i = 0; i < LANES; ++i) to[2 * i] = cast<elem>(even[i]), to[2 * i + 1] = cast<elem>(odd[i]);
#endif
}

inline vi lanes() {
  vi at;
  for (int i = 0; i < LANES; ++i) at[i] = i;
  return at;
}

// Which of a row of keys the queries of a tile see. `Whole` is a tile in which all see all.
struct Whole {
  vf operator()(vf x, int, int, vf) const { return x; }
};
struct Edge {
  int32_t distance;  // of the tile's first query from its first key
  int32_t window;
  vf operator()(vf x, int key, int column, vf otherwise) const {
    const vi behind = lanes() + (distance + column - key);
    return (behind >= 0) & (behind < window) ? x : otherwise;
  }
};

// Whether a tile of scores has a probability whose log2 is at least `least`.
template <class Mask>
inline bool reaches(const float* s, const float* lse, float factor, Mask mask, float least) {
  constexpr int N = 4;
  for (int c = 0; c < TILE; c += N * LANES) {
    vf most[N], shift[N];
    for (int i = 0; i < N; ++i) most[i] = splat(NEG_INF), shift[i] = load(lse + c + i * LANES);
    for (int j = 0; j < TILE; ++j)
      for (int i = 0; i < N; ++i)
        most[i] = larger(most[i], mask(load(s + j * TILE + c + i * LANES) * factor - shift[i], j, c + i * LANES,
                                       splat(NEG_INF)));
    if (!(maximum(larger(larger(most[0], most[1]), larger(most[2], most[3]))) < least)) return true;
  }
  return false;
}

// From scores s and dp to the probabilities p and ds, a row for each key, and ds once more as the product for dq reads
// it. Of ds the factor `scale` is left out.
template <class Engine, bool CAPPED, class Mask, class elem>
void softmax_gradient(const float* s, const float* dp, const float* lse, const float* delta, Softmax how,
                             Mask mask, elem* p, elem* ds, elem* pairs) {
  const float factor = how.factor(), cap = CAPPED ? 1.0f / how.softcap : 0.0f;
  const Exp2<Engine::TERMS> exp2{factor};
  for (int c = 0; c < TILE; c += 2 * LANES) {
    // In the unit of the scores: differences are scaled, not their operands.
    const vf shift[2] = {load(lse + c) / factor, load(lse + c + LANES) / factor};
    const vf mean[2] = {load(delta + c), load(delta + c + LANES)};
    for (int j = 0; j < TILE; j += 2) {
      vf prob[2][2], grad[2][2];
#pragma GCC unroll 2
      for (int row = 0; row < 2; ++row)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const int at = (j + row) * TILE + c + half * LANES;
          const vf x = load(s + at);
          const vf e = mask(exp2(x - shift[half]), j + row, c + half * LANES, vf{});
          vf g = e * (load(dp + at) - mean[half]);
          if constexpr (CAPPED) g *= 1.0f - (x * cap) * (x * cap);
          prob[row][half] = e;
          grad[row][half] = g;
        }
#pragma GCC unroll 2
      for (int row = 0; row < 2; ++row) {
        put(p + (j + row) * LD + c, prob[row][0], prob[row][1]);
        put(ds + (j + row) * LD + c, grad[row][0], grad[row][1]);
        if constexpr (Engine::PAIR == 1) put(pairs + (j + row) * TILE + c, grad[row][0], grad[row][1]);
      }
      if constexpr (Engine::PAIR == 2)
        for (int half = 0; half < 2; ++half)
          put_pairs(pairs + Engine::place(TILE, TILE, j, c + half * LANES), grad[0][half], grad[1][half]);
    }
  }
}

template <class elem>
struct Scratch {
  std::unique_ptr<float[], Free> s = allocate<float>(AREA), dp = allocate<float>(AREA);
  std::unique_ptr<elem[], Free> p = allocate<elem>(TILE * LD), ds = allocate<elem>(TILE * LD);
  std::unique_ptr<elem[], Free> pairs = allocate<elem>(AREA);
};

struct Task {
  int32_t unit, head, query_strip, key_strip;  // head: of the unit's query heads
  int32_t query_turn, key_turn;                // how many tasks add to the same strips before it
};

// The tensors of a call.
template <class T>
struct Tensors {
  Strided<T> q, k, v, out, grad_out, dq, dk, dv;
  const at::Tensor& lse;
};

// Some KV heads, with everything that is kept of them during a call: packed tiles, and sums in fp32.
template <class Engine, class T>
struct Units {
  using elem = typename Engine::elem;
  const Tensors<T>& tensors;
  const Lengths n;
  const Options how;
  const int64_t G, group, D, E;
  const int inner, inner_v, width, width_v, high;
  const int64_t most, rows, tiles;
  // Queries and gradients of the outputs, by (unit, head, query tile): transposed, and as values are packed.
  std::unique_ptr<elem[], Free> q_across, q_along, o_across, o_along;
  std::unique_ptr<float[], Free> lse, delta, dq;
  // Keys and values by (unit, key tile): as rows, and keys transposed.
  std::unique_ptr<elem[], Free> k_rows, k_across, v_rows;
  std::unique_ptr<float[], Free> dk, dv;

  Units(const Tensors<T>& tensors, Lengths n, Options how, int64_t H, int64_t G, int64_t D, int64_t E, int64_t most)
      : tensors(tensors),
        n(n),
        how(how),
        G(G),
        group(H / G),
        D(D),
        E(E),
        inner(round_up(D, Engine::INNER)),
        inner_v(round_up(E, Engine::INNER)),
        width(round_up(D, LANES)),
        width_v(round_up(E, LANES)),
        high(round_up(D, Engine::BAND)),
        most(most),
        rows(n.tiles() - n.first()),
        tiles(n.tiles()) {
    const int64_t queries = most * group * rows * TILE, keys = most * tiles * TILE;
    q_across = allocate<elem>(queries * inner), q_along = allocate<elem>(queries * width);
    o_across = allocate<elem>(queries * inner_v), o_along = allocate<elem>(queries * width_v);
    lse = allocate<float>(queries), delta = allocate<float>(queries), dq = allocate<float>(queries * high);
    k_rows = allocate<elem>(keys * inner), k_across = allocate<elem>(keys * high);
    v_rows = allocate<elem>(keys * inner_v);
    dk = allocate<float>(keys * width), dv = allocate<float>(keys * width_v);
  }

  int64_t query_at(int64_t unit, int64_t head, int64_t tile) const {
    return ((unit * group + head) * rows + tile - n.first()) * TILE;
  }
  int64_t key_at(int64_t unit, int64_t tile) const { return (unit * tiles + tile) * TILE; }

  void pack_queries(int64_t b, int64_t h, int64_t at, int64_t tile, const T* nothing) {
    const T *q[TILE], *o[TILE];
    for (int r = 0; r < TILE; ++r) {
      const int64_t i = tile * TILE + r - n.offset();
      const bool there = 0 <= i && i < n.Q;
      q[r] = there ? tensors.q.at(b, h, i) : nothing;
      o[r] = there ? tensors.grad_out.at(b, h, i) : nothing;
      // For a query that does not exist every probability is 0.
      lse[at + r] = there ? tensors.lse.template const_data_ptr<float>()[(b * G * group + h) * n.Q + i] * LOG2E : -NEG_INF;
      delta[at + r] = there ? product(tensors.out.at(b, h, i), o[r], E) : 0.0f;
    }
    pack_k<Engine>(q, TILE, D, inner, q_across.get() + at * inner);
    pack_v<Engine>(q, TILE, D, width, q_along.get() + at * width);
    pack_k<Engine>(o, TILE, E, inner_v, o_across.get() + at * inner_v);
    pack_v<Engine>(o, TILE, E, width_v, o_along.get() + at * width_v);
    std::fill_n(dq.get() + at * high, TILE * high, 0.0f);
  }

  void pack_keys(int64_t b, int64_t g, int64_t at, int64_t tile, const T* nothing) {
    const T *k[TILE], *v[TILE];
    for (int r = 0; r < TILE; ++r) {
      const int64_t j = tile * TILE + r;
      k[r] = j < n.K ? tensors.k.at(b, g, j) : nothing;
      v[r] = j < n.K ? tensors.v.at(b, g, j) : nothing;
    }
    rows_of(k, D, inner, k_rows.get() + at * inner);
    transpose(k, D, high, k_across.get() + at * high);
    rows_of(v, E, inner_v, v_rows.get() + at * inner_v);
    std::fill_n(dk.get() + at * width, TILE * width, 0.0f);
    std::fill_n(dv.get() + at * width_v, TILE * width_v, 0.0f);
  }

  void write_queries(int64_t b, int64_t h, int64_t at, int64_t tile) const {
    const float* from = dq.get() + at * high;
    for (int r = 0; r < TILE; ++r) {
      const int64_t i = tile * TILE + r - n.offset();
      if (i < 0 || i >= n.Q) continue;
      T* to = const_cast<T*>(tensors.dq.at(b, h, i));
      for (int64_t d = 0; d < D; ++d) to[d] = cast<T>(from[d * TILE + r] * how.softmax.scale);
    }
  }

  void write_keys(int64_t b, int64_t g, int64_t at, int64_t tile) const {
    for (int64_t r = 0; r < std::min<int64_t>(TILE, n.K - tile * TILE); ++r) {
      const int64_t j = tile * TILE + r;
      copy(dk.get() + (at + r) * width, D, how.softmax.scale, const_cast<T*>(tensors.dk.at(b, g, j)));
      copy(dv.get() + (at + r) * width_v, E, const_cast<T*>(tensors.dv.at(b, g, j)));
    }
  }

  // Calls f(b, head, first row of the tile here, tile) for every tile of queries, then of keys, of `count` units.
  template <class Queries, class Keys>
  void for_each_tile(int64_t first, int64_t count, Queries queries, Keys keys) {
    const int64_t of_queries = count * group * rows;
    at::parallel_for(0, of_queries + count * tiles, 4, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        if (i < of_queries) {
          const int64_t unit = i / rows / group, head = i / rows % group, tile = n.first() + i % rows;
          const int64_t b = (first + unit) / G, h = (first + unit) % G * group + head;
          queries(b, h, query_at(unit, head, tile), tile);
        } else {
          const int64_t unit = (i - of_queries) / tiles, tile = (i - of_queries) % tiles;
          keys((first + unit) / G, (first + unit) % G, key_at(unit, tile), tile);
        }
      }
    });
  }

  // Tiles that a query's window reaches behind its own.
  int64_t reach() const { return std::min<int64_t>((how.window - 1 + TILE - 1) / TILE, tiles); }

  // In this order neighbours share no strip, as far as that is possible: a Latin square over the strips.
  std::vector<Task> tasks(int64_t count) const {
    const int32_t N = n.strips(), first = n.first() / STRIP;
    std::vector<int32_t> query_turns(count * group * N), key_turns(count * N);
    std::vector<Task> found;
    for (int32_t wave = 0; wave < N; ++wave)
      for (int32_t head = 0; head < group; ++head)
        for (int32_t unit = 0; unit < count; ++unit)
          for (int32_t i = first; i < N; ++i) {
            const int32_t j = ((wave + head - i) % N + N) % N;
            if (j > i || (i - j - 1) * STRIP + 1 > reach()) continue;
            int32_t &of_query = query_turns[(unit * group + head) * N + i], &of_key = key_turns[unit * N + j];
            found.push_back({unit, head, i, j, of_query++, of_key++});
          }
    return found;
  }

  // From the scores of a tile of keys and one of queries to the probabilities and ds; false if it is skipped.
  template <class Mask>
  bool step(Scratch<elem>& w, int live, Mask mask, int64_t key, int64_t at) const {
    const float *s = w.s.get(), *shift = lse.get() + at;
    if (how.least > NEG_INF && !reaches(s, shift, how.softmax.factor(), mask, how.least)) return false;
    Engine::qk(v_rows.get() + key * inner_v, TILE, inner_v, o_across.get() + at * inner_v, w.dp.get(), TILE);
    const auto make = how.softmax.softcap > 0 ? softmax_gradient<Engine, true, Mask, elem>
                                              : softmax_gradient<Engine, false, Mask, elem>;
    make(s, w.dp.get(), shift, delta.get() + at, how.softmax, mask, w.p.get() + live * TILE, w.ds.get() + live * TILE,
         w.pairs.get());
    return true;
  }

  void run(const Task& task, Scratch<elem>& w) {
    const int64_t last = std::min((task.query_strip + 1) * STRIP, tiles);
    const int64_t last_key = std::min((task.key_strip + 1) * STRIP, tiles);
    const elem *queries[STEP], *gradients[STEP];
    for (int64_t t = task.key_strip * STRIP; t < last_key; ++t) {
      const int64_t key = key_at(task.unit, t);
      int live = 0;
      const auto flush = [&] {
        if (!live) return;
        Engine::pv(w.p.get(), TILE, LD, gradients, live, width_v, dv.get() + key * width_v);
        Engine::pv(w.ds.get(), TILE, LD, queries, live, width, dk.get() + key * width);
        live = 0;
      };
      const int64_t end = std::min(last, t + reach() + 1);
      for (int64_t i = std::max({task.query_strip * STRIP, t, n.first()}); i < end; ++i) {
        const int64_t at = query_at(task.unit, task.head, i);
        const int64_t distance = (i - t) * TILE;
        Engine::qk(k_rows.get() + key * inner, TILE, inner, q_across.get() + at * inner, w.s.get(), TILE);
        if (how.softmax.softcap > 0) cap(w.s.get(), AREA, how.softmax);
        const bool edge = i == t || distance + TILE > how.window;
        const int32_t window = std::min<int64_t>(how.window, PAD);
        const bool counts = edge ? step(w, live, Edge{int32_t(distance), window}, key, at)
                                 : step(w, live, Whole{}, key, at);
        if (!counts) continue;
        Engine::add(k_across.get() + key * high, high, w.pairs.get(), dq.get() + at * high);
        gradients[live] = o_along.get() + at * width_v;
        queries[live] = q_along.get() + at * width;
        if (++live == STEP) flush();
      }
      flush();
    }
  }

  void compute(int64_t first, int64_t count) {
    const std::vector<T> nothing(std::max(D, E), T(0));
    for_each_tile(
        first, count, [&](auto... at) { pack_queries(at..., nothing.data()); },
        [&](auto... at) { pack_keys(at..., nothing.data()); });
    const std::vector<Task> list = tasks(count);
    std::vector<std::atomic<int32_t>> queries_done(count * group * n.strips()), keys_done(count * n.strips());
    std::atomic<size_t> next{0};
    at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
      Scratch<elem> scratch;
      const InUse<Engine> engine;
      for (size_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < list.size();) {
        const Task& task = list[t];
        auto& of_query = queries_done[(task.unit * group + task.head) * n.strips() + task.query_strip];
        auto& of_key = keys_done[task.unit * n.strips() + task.key_strip];
        // The first task that is not done waits for none, so this ends.
        while (of_query.load(std::memory_order_acquire) != task.query_turn ||
               of_key.load(std::memory_order_acquire) != task.key_turn)
          std::this_thread::yield();
        run(task, scratch);
        of_query.store(task.query_turn + 1, std::memory_order_release);
        of_key.store(task.key_turn + 1, std::memory_order_release);
      }
    });
    for_each_tile(
        first, count, [&](auto... at) { write_queries(at...); }, [&](auto... at) { write_keys(at...); });
  }
};

template <class Engine, class T>
void run(const Tensors<T>& tensors, at::IntArrayRef sizes, Options how) {
  const int64_t B = sizes[0], H = sizes[1], G = sizes[2], D = sizes[5], E = sizes[6];
  const Lengths n{sizes[3], sizes[4]};
  // As many KV heads at once as keep every thread busy: their scratch memory is several times their queries.
  const int64_t together = std::max<int64_t>(n.strips() / 2, 1);
  const int64_t most = std::clamp<int64_t>((2 * at::get_num_threads() + together - 1) / together, 1, B * G);
  Units<Engine, T> units(tensors, n, how, H, G, D, E, most);
  for (int64_t first = 0; first < B * G; first += most) units.compute(first, std::min(most, B * G - first));
}

template <class T>
void run_for(const std::string& engine, const Tensors<T>& tensors, at::IntArrayRef sizes, Options how) {
  with_engine<T>(engine, [&](auto with) { run<decltype(with), T>(tensors, sizes, how); });
}

// window 0 and softcap 0 are none. lse is contiguous; of all others the last dimension is.
void attention_gradients(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                         const at::Tensor& lse, const at::Tensor& grad_out, int64_t window, double scale,
                         double softcap, double skip_below, std::string engine, at::Tensor dq, at::Tensor dk,
                         at::Tensor dv) {
  const int64_t sizes[] = {q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), v.size(3)};
  const Options how{{static_cast<float>(scale), static_cast<float>(softcap)},
                    window ? window : int64_t(1) << 40,
                    skip_below > 0 ? static_cast<float>(std::log2(skip_below)) : NEG_INF};
  const auto serve = [&](auto zero) {
    using T = decltype(zero);
    run_for<T>(engine, Tensors<T>{{q}, {k}, {v}, {out}, {grad_out}, {dq}, {dk}, {dv}, lse}, sizes, how);
  };
  switch (q.scalar_type()) {
    case at::kFloat: return serve(float());
    case at::kHalf: return serve(at::Half());
    case at::kBFloat16: return serve(at::BFloat16());
    default: TORCH_CHECK_VALUE(false, "dtype ", q.scalar_type(), " is not served");
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(headwise, m) {
  m.def(
      "attention_gradients(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor grad_out, int window, "
      "float scale, float softcap, float skip_below, str engine, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> ()");
}

TORCH_LIBRARY_IMPL(headwise, CPU, m) { m.impl("attention_gradients", &attention_gradients); }
