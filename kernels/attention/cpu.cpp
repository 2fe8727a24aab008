// Sparse attention over a SparseIndex on the CPU. Compiled once for each machine by kernels/native/build.py.
//
// Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
//
// K and V are packed once a KV head into panels of 64 keys (K transposed, both in the order the inner product reads),
// and the single columns of each query head once into panels of the same form. From there a column group costs exactly
// what a tile costs. A task is one query tile of one head: it walks its panels WALK at a time, so that one softmax pass
// sees up to WALK * 64 keys, with the running maximum and sum of online softmax (Milakov and Gimelshein, 2018;
// FlashAttention-2).

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <vector>

#include "../native/engines.h"

namespace {

using namespace headwise;

struct Entries {
  const int32_t* data;
  int64_t width;
  Entries(const at::Tensor& t) : data(t.const_data_ptr<int32_t>()), width(t.size(-1)) {}
  const int32_t* row(int64_t i) const { return data + i * width; }
};

// Sequence s of a batch (kernels/ragged.py): its queries are the last Q of its K positions.
struct Sequence {
  int64_t row, q0, Q, k0, K;
  int64_t offset() const { return K - Q; }
  int64_t first_row() const { return offset() / TILE; }
  int64_t tiles() const { return (K + TILE - 1) / TILE; }
  int64_t rows() const { return tiles() - first_row(); }
};

// Keys or values by sequence, KV head and position, in tensors or in the pages of a serving engine's cache.
template <class T>
struct Keys {
  const T* data;
  int64_t batch, head, row;
  const int32_t* pages = nullptr;
  int64_t page_size = 0, table_width = 0, num_pages = 0;
  Keys(const at::Tensor& t, const std::optional<at::Tensor>& table)
      : data(t.const_data_ptr<T>()), batch(t.stride(0)), head(t.stride(table ? 2 : 1)), row(t.stride(table ? 1 : 2)) {
    if (table) {
      pages = table->const_data_ptr<int32_t>();
      page_size = t.size(1), table_width = table->size(1), num_pages = t.size(0);
    }
  }
  const T* at(const Sequence& one, int64_t s, int64_t g, int64_t j) const {
    if (!pages) return data + one.row * batch + g * head + (one.k0 + j) * row;
    const int64_t page = pages[s * table_width + j / page_size];
    TORCH_CHECK_VALUE(0 <= page && page < num_pages, "page ", page, " is none of the ", num_pages, " pages");
    return data + page * batch + g * head + j % page_size * row;
  }
};

template <class elem>
struct Panel {
  const elem* k;
  const elem* v;
  const float* live;  // 64 x {1, 0}, 0 for a column that a tile of this row holds already; null where all are live
  // Where a window may end inside the panel: its keys' positions, ascending, or of a tile the first; else have = 0.
  const int32_t* positions;
  int64_t first;
  int have;

  // How many of its keys lie before position `from`.
  int before(int64_t from) const {
    if (!positions) return std::clamp<int64_t>(from - first, 0, have);
    return std::lower_bound(positions, positions + have, from) - positions;
  }
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

// The tensors of an index and what goes with them, read once a call.
struct Index {
  Entries diagonals, listed, columns;
  std::vector<Sequence> sequences;
  std::vector<int64_t> dense_tail;  // a head's number of queries, or empty
  int64_t window, reach, heads, most_rows;

  // Key tiles of a row, a bit each, own tile included; false if the row is dense (columns are then all held).
  bool hold(int64_t s, int64_t h, int64_t row, std::vector<uint64_t>& held) const {
    const Sequence& one = sequences[s];
    const int64_t at = one.first_row() + row, i = s * heads + h, from = std::max<int64_t>(at - reach, 0);
    std::fill(held.begin(), held.begin() + at / 64 + 1, 0);
    const auto set = [&](int64_t t) { held[t / 64] |= uint64_t(1) << (t % 64); };
    set(at);
    if (!dense_tail.empty() && dense_tail[h] && at >= std::max<int64_t>(one.K - dense_tail[h], 0) / TILE) {
      for (int64_t t = from; t < at; ++t) set(t);
      return false;
    }
    // Unsigned, so that a negative entry of a broken index ends the list and writes nowhere.
    for (const int32_t *d = diagonals.row(i), *end = d + diagonals.width;
         d < end && static_cast<uint32_t>(*d) <= at - from; ++d)
      set(at - *d);
    for (const int32_t *t = listed.row(i * most_rows + row), *end = t + listed.width;
         t < end && static_cast<uint32_t>(*t) <= at; ++t)
      if (*t >= from) set(*t);
    return true;
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

// Panels of 64 keys and values, packed once a call: those tiles of each KV head that some row wants, then the columns
// of each query head in groups.
template <class Engine, class T>
struct Panels {
  using elem = typename Engine::elem;
  int64_t k_size, v_size;
  std::vector<int64_t> tile_start;   // of each (sequence, KV head), into `slot`
  std::vector<int32_t> slot;         // panel of a key tile; -1 where no row wants it
  std::vector<int64_t> group_start;  // first panel of each (sequence, query head)'s columns
  std::vector<int64_t> count;        // columns of each (sequence, query head)
  int64_t most_groups = 0;
  std::unique_ptr<elem[], Free> k, v;

  Panels(const Index& index, const Keys<T>& ks, const Keys<T>& vs, int64_t G, int64_t D, int64_t E, int inner,
         int width)
      : k_size(inner * TILE), v_size(width * TILE) {
    const int64_t S = index.sequences.size(), H = index.heads, group = H / G;
    struct Source {
      int32_t s, g;
      int64_t tile;
      const int32_t* columns;
      int have;
    };
    std::vector<Source> sources;
    want(index, G);
    for (int64_t s = 0; s < S; ++s)
      for (int64_t g = 0; g < G; ++g)
        for (int64_t t = 0; t < index.sequences[s].tiles(); ++t)
          if (int32_t& at = slot[tile_start[s * G + g] + t]; at >= 0) {
            at = sources.size();
            const int have = std::min<int64_t>(TILE, index.sequences[s].K - t * TILE);
            sources.push_back({int32_t(s), int32_t(g), t, nullptr, have});
          }
    for (int64_t i = 0; i < S * H; ++i) {
      const int64_t s = i / H, K = index.sequences[s].K;
      const int32_t* c = index.columns.row(i);
      count.push_back(std::lower_bound(c, c + index.columns.width, std::min<int64_t>(K, PAD)) - c);
      group_start.push_back(sources.size());
      for (int64_t c0 = 0; c0 < count[i]; c0 += TILE)
        sources.push_back({int32_t(s), int32_t(i % H / group), 0, c + c0, int(std::min<int64_t>(TILE, count[i] - c0))});
      most_groups = std::max<int64_t>(most_groups, sources.size() - group_start[i]);
    }
    k = allocate<elem>(sources.size() * k_size);
    v = allocate<elem>(sources.size() * v_size);
    at::parallel_for(0, sources.size(), 8, [&](int64_t from, int64_t to) {
      const T *k_rows[TILE], *v_rows[TILE];
      for (int64_t panel = from; panel < to; ++panel) {
        const Source& source = sources[panel];
        const Sequence& one = index.sequences[source.s];
        for (int j = 0; j < source.have; ++j) {
          const int64_t key = source.columns ? source.columns[j] : source.tile * TILE + j;
          TORCH_CHECK_VALUE(0 <= key && key < one.K, "column ", key, " is none of the ", one.K, " keys");
          k_rows[j] = ks.at(one, source.s, source.g, key), v_rows[j] = vs.at(one, source.s, source.g, key);
        }
        pack_k<Engine>(k_rows, source.have, D, inner, k.get() + panel * k_size);
        pack_v<Engine>(v_rows, source.have, E, width, v.get() + panel * v_size);
      }
    });
  }

  // Marks the key tiles that some row wants. Where queries are as many as keys every tile is some row's own; a chunk of
  // new queries against a long cache wants few, and packing the others would cost more than attending.
  void want(const Index& index, int64_t G) {
    const int64_t S = index.sequences.size(), group = index.heads / G;
    int64_t total = 0;
    for (int64_t i = 0; i < S * G; ++i) {
      tile_start.push_back(total);
      total += index.sequences[i / G].tiles();
    }
    slot.assign(total, -1);
    at::parallel_for(0, S * G, 1, [&](int64_t from, int64_t to) {
      std::vector<uint64_t> held;
      for (int64_t i = from; i < to; ++i) {
        const int64_t s = i / G;
        const Sequence& one = index.sequences[s];
        int32_t* wanted = slot.data() + tile_start[i];
        if (one.first_row() == 0) {
          std::fill(wanted, wanted + one.tiles(), 0);
          continue;
        }
        held.assign((one.tiles() + 63) / 64, 0);
        for (int64_t h = i % G * group; h < (i % G + 1) * group; ++h)
          for (int64_t row = 0; row < one.rows(); ++row) {
            index.hold(s, h, row, held);
            for_each_bit(held, one.first_row() + row, [&](int64_t t) { wanted[t] = 0; });
          }
      }
    });
  }

  template <class F>
  static void for_each_bit(const std::vector<uint64_t>& held, int64_t last, F f) {
    for (int64_t word = 0; word <= last / 64; ++word)
      for (uint64_t bits = held[word]; bits; bits &= bits - 1) f(word * 64 + __builtin_ctzll(bits));
  }
};

template <class Engine, class T>
void run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& block_table,
         const Index& index, Softmax how, at::Tensor& out, at::Tensor& lse) {
  using elem = typename Engine::elem;
  const int64_t H = q.size(1), D = q.size(3), G = k.size(block_table ? 2 : 1), E = v.size(3), group = H / G;
  const int64_t S = index.sequences.size();
  const int inner = round_up(D, Engine::INNER), width = round_up(E, LANES);
  const Strided<T> qs(q), os(out);
  const Panels<Engine, T> packed(index, Keys<T>(k, block_table), Keys<T>(v, block_table), G, D, E, inner, width);

  auto task = [&](Scratch<elem>& w, int64_t s, int64_t h, int64_t row) {
    const Sequence& one = index.sequences[s];
    const int64_t K = one.K, offset = one.offset(), at = one.first_row() + row, i = s * H + h;
    const int32_t* slots = packed.slot.data() + packed.tile_start[s * G + h / group];
    // Query rows of the tile that exist; the others are computed on zeros and dropped.
    const int lo = std::max<int64_t>(offset - at * TILE, 0), hi = std::min<int64_t>(K - at * TILE, TILE);
    // Keys before this position are outside the window of the tile's last query.
    const int64_t outside = at * TILE + hi - index.window;
    const auto panel_of = [&](int64_t panel) {
      return Panel<elem>{packed.k.get() + panel * packed.k_size, packed.v.get() + panel * packed.v_size};
    };

    w.panels.clear();
    if (index.hold(s, h, row, w.held)) {
      const int32_t* c = index.columns.row(i);
      for (int64_t group_at = 0; group_at * TILE < packed.count[i]; ++group_at) {
        const int64_t c0 = group_at * TILE, have = std::min<int64_t>(TILE, packed.count[i] - c0);
        if (c[c0] / TILE >= at) break;
        float* live = w.live.data() + c0;
        int64_t living = 0;
        for (int64_t j = 0; j < have; ++j) {
          const int64_t t = c[c0 + j] / TILE;
          const bool alive = t < at && t >= at - index.reach && !(w.held[t / 64] >> (t % 64) & 1);
          living += alive;
          live[j] = alive;
        }
        if (!living) continue;
        std::fill(live + have, live + TILE, 0.0f);
        Panel<elem> panel = panel_of(packed.group_start[i] + group_at);
        panel.live = living == TILE ? nullptr : live;
        if (c[c0] < outside) panel.positions = c + c0, panel.have = have;
        w.panels.push_back(panel);
      }
    }
    packed.for_each_bit(w.held, at, [&](int64_t t) {  // ascending, so the own tile comes last
      Panel<elem> panel = panel_of(slots[t]);
      if (t * TILE < outside) panel.first = t * TILE, panel.have = TILE;
      w.panels.push_back(panel);
    });

    std::fill(w.q.get(), w.q.get() + TILE * inner, elem(0));
    for (int r = lo; r < hi; ++r)
      copy(qs.at(one.row, h, one.q0 + at * TILE + r - offset), D, w.q.get() + r * inner);

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
      bool ends = false;
      for (int t = 0; t < step; ++t) {
        Engine::qk(w.q.get(), inner, w.panels[p0 + t].k, w.s.get() + t * TILE, LD);
        values[t] = w.panels[p0 + t].v;
        ends |= w.panels[p0 + t].have > 0;
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
        if (ends)
          for (int t = 0; t < step; ++t)
            std::fill_n(s + t * TILE, w.panels[p0 + t].before(at * TILE + r + 1 - index.window), NEG_INF);
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

    float* lse_row = lse.mutable_data_ptr<float>() + one.row * lse.stride(0) + h * lse.stride(1);
    for (int r = lo; r < hi; ++r) {
      const int64_t at_q = one.q0 + at * TILE + r - offset;
      copy(w.o.get() + r * width, E, 1.0f / total[r], const_cast<T*>(os.at(one.row, h, at_q)));
      lse_row[at_q] = (top[r] * factor + std::log2(total[r])) / LOG2E;
    }
  };

  // The longest rows of a KV head's query heads first, so that threads finish together and share its panels in cache.
  std::vector<int64_t> tasks_before{0};
  int64_t most_tiles = 0;
  for (const Sequence& one : index.sequences) {
    tasks_before.push_back(tasks_before.back() + H * one.rows());
    most_tiles = std::max(most_tiles, one.tiles());
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    Scratch<elem> scratch(most_tiles, packed.most_groups, inner, width);
    std::fill(scratch.p.get(), scratch.p.get() + TILE * TILE * WALK, elem(0));
    int64_t s = 0;
    for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks_before[S];) {
      while (t >= tasks_before[s + 1]) ++s;
      const int64_t R = index.sequences[s].rows(), in = t - tasks_before[s], rest = in % (R * group);
      task(scratch, s, in / (R * group) * group + rest % group, R - 1 - rest / group);
    }
    Engine::finish();
  });
}

template <class T>
void run_for(const std::string& engine, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
             const std::optional<at::Tensor>& block_table, const Index& index, Softmax how, at::Tensor& out,
             at::Tensor& lse) {
  if (engine == "float") return run<Blocked<Float>, T>(q, k, v, block_table, index, how, out, lse);
  if constexpr (std::is_same_v<T, at::BFloat16>) {
#if defined(__AVX512BF16__)
    if (engine == "dot") return run<Blocked<Dot>, T>(q, k, v, block_table, index, how, out, lse);
#endif
    if (engine == "brgemm") return run<Brgemm, T>(q, k, v, block_table, index, how, out, lse);
  }
  TORCH_CHECK_VALUE(false, "engine '", engine, "' does not serve ", q.scalar_type(), " on this processor");
}

// sequences: five numbers for each, row, q_start, q_len, k_start, k_len. window 0 is none. Writes out and lse where a sequence is.
void sparse_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& diagonals,
                      const at::Tensor& tiles, const at::Tensor& columns, at::IntArrayRef sequences,
                      at::IntArrayRef dense_tail, int64_t window, const std::optional<at::Tensor>& block_table,
                      double scale, double softcap, std::string engine, at::Tensor out, at::Tensor lse) {
  // Above glibc's largest threshold the memory is new from the system at every call.
  if (out.is_non_overlapping_and_dense() && out.nbytes() > size_t(32) << 20)
    on_huge_pages(out.mutable_data_ptr(), out.nbytes());
  constexpr int64_t NONE = int64_t(1) << 40;
  Index index{diagonals, tiles, columns, {}, dense_tail.vec(), window ? window : NONE, NONE, q.size(1), tiles.size(2)};
  if (window) index.reach = (window - 1 + TILE - 1) / TILE;
  for (size_t i = 0; i + 4 < sequences.size(); i += 5)
    index.sequences.push_back({sequences[i], sequences[i + 1], sequences[i + 2], sequences[i + 3], sequences[i + 4]});
  const Softmax how{static_cast<float>(scale), static_cast<float>(softcap)};
  switch (q.scalar_type()) {
    case at::kFloat: run_for<float>(engine, q, k, v, block_table, index, how, out, lse); break;
    case at::kHalf: run_for<at::Half>(engine, q, k, v, block_table, index, how, out, lse); break;
    case at::kBFloat16: run_for<at::BFloat16>(engine, q, k, v, block_table, index, how, out, lse); break;
    default: TORCH_CHECK_VALUE(false, "dtype ", q.scalar_type(), " is not served");
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(headwise, m) {
  m.def(
      "sparse_attention(Tensor q, Tensor k, Tensor v, Tensor diagonals, Tensor tiles, Tensor columns, int[] sequences, "
      "int[] dense_tail, int window, Tensor? block_table, float scale, float softcap, str engine, Tensor(a!) out, "
      "Tensor(b!) lse) -> ()");
  m.def("engines(ScalarType dtype) -> str[]", &engines);
}

TORCH_LIBRARY_IMPL(headwise, CPU, m) { m.impl("sparse_attention", &sparse_attention); }
