// Sparse attention over a SparseIndex on the CPU. Compiled once for each machine by kernels/native/build.py.
//
// Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
//
// K and V are packed once a KV head into panels of 64 keys (K transposed, both in the order the inner product reads),
// and the single columns of each query head once into panels of the same form. From there a column group costs exactly
// as much as a tile. A task is one block of queries: it walks its panels up to STEP at a time, ROWS queries at a time, so
// that one softmax pass sees STEP * 64 keys, with the running maximum and sum of online softmax (Milakov and Gimelshein,
// 2018; FlashAttention-2). Few queries behind many keys are cut into parts of the keys, whose results whoever finishes the
// last of them puts together in order (Flash-Decoding; Dao et al., 2023).

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <vector>

#include "panels.h"

namespace {

using namespace headwise;

// 64 keys of a block, the columns of a group or those of a tile.
template <class elem>
struct Panel {
  const elem* k;
  const elem* v;
  uint64_t live;           // those that are computed: 0 for a column that a tile of this row holds already
  const int32_t* columns;  // positions of its `have` keys, ascending; null for a tile, whose keys begin at `first`
  int64_t first;
  int have;
  bool edge;  // whether some query of the block does not see all of it

  // Those that the query at a position sees.
  uint64_t seen(int64_t position, int64_t window) const {
    if (!edge) return live;
    const int64_t from = position - window + 1;
    if (columns) return live & bits(std::lower_bound(columns, columns + have, from) - columns, have);
    return live & bits(from - first, position + 1 - first);
  }
};

// Everything one thread needs for a task; allocated once a call.
template <class Engine>
struct Scratch {
  using elem = typename Engine::elem;
  static constexpr int LD = TILE * Engine::STEP;  // scores of a query in a step
  std::vector<uint64_t> held;       // key tiles of this row, a bit each
  std::vector<Panel<elem>> panels;  // what this block computes
  size_t anchors;                   // how many of them, the first ones, are computed whatever their scores
  std::unique_ptr<elem[], Free> q;
  std::unique_ptr<float[], Free> s;  // scores, and then in their place the weights
  std::unique_ptr<float[], Free> o;
  // Of each query the score that its weights are relative to, their sum, and the largest score.
  float top[TILE], total[TILE], highest[TILE];
  Scratch(int64_t tiles, int64_t groups, int inner, int width)
      : held((tiles + 63) / 64),
        q(allocate<elem>(TILE * inner)),
        s(allocate<float>(TILE * LD)),
        o(allocate<float>(TILE * width)) {
    panels.reserve(tiles + groups);
    std::fill(q.get(), q.get() + TILE * inner, elem(0));
    // Rows that are no queries are multiplied, too.
    std::fill(s.get(), s.get() + TILE * LD, 0.0f);
  }
};

template <class Engine, class T>
struct Run {
  using elem = typename Engine::elem;
  using Scratch = ::Scratch<Engine>;
  static constexpr int ROWS = Engine::ROWS, STEP = Engine::STEP, LD = Scratch::LD;

  const Index& index;
  const int64_t H, D, G, E, group = H / G;
  const int inner = round_up(D, Engine::INNER), width = round_up(E, LANES);
  const Softmax how;
  const float factor = how.factor();
  const Exp2<Engine::TERMS> exp2{factor};
  const float* sinks;
  const Strided<T> qs, os;
  const Keys<T> ks, vs;
  at::Tensor& lse;
  int32_t* skipped;  // of each (sequence, head) the number of tiles, or null
  int64_t parts;
  const std::vector<Block> blocks;
  const Panels<Engine, T> packed;
  // Of each part and row of a block that is cut: output, maximum and sum; and how many parts are not there yet.
  std::unique_ptr<float[], Free> partial, tops, totals;
  std::unique_ptr<std::atomic<int>[]> open;

  Run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& block_table,
      const Index& entries, Softmax softmax, const float* sink, at::Tensor& out, at::Tensor& log_sum_exp,
      int32_t* left_out)
      : index(entries), H(q.size(1)), D(q.size(3)), G(k.size(block_table ? 2 : 1)), E(v.size(3)), how(softmax),
        sinks(sink), qs(q), os(out), ks(k, block_table), vs(v, block_table), lse(log_sum_exp),
        skipped(left_out), blocks(entries.blocks(group, parts)), packed(entries, blocks, ks, vs, G, D, E, inner, width),
        partial(allocate<float>(parts * TILE * width)), tops(allocate<float>(parts * TILE)),
        totals(allocate<float>(parts * TILE)), open(std::make_unique<std::atomic<int>[]>(parts)) {
    for (const Block& block : blocks)
      if (block.parts > 1) open[block.place] = block.parts;
  }

  void operator()() {
    int64_t most_tiles = 0;
    for (const Sequence& one : index.sequences) most_tiles = std::max(most_tiles, one.tiles());
    std::atomic<size_t> next{0};
    at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
      Scratch scratch(most_tiles, packed.most_groups, inner, width);
      const InUse<Engine> engine;
      for (size_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < blocks.size();) task(scratch, blocks[t]);
    });
  }

  Panel<elem> panel(int64_t at) const {
    return {packed.k.get() + at * packed.k_size, packed.v.get() + at * packed.v_size, ~uint64_t(0), nullptr, 0, TILE,
            false};
  }

  void add_tile(Scratch& w, const Block& block, int64_t t) const {
    const int64_t last = block.first + block.rows - 1;
    Panel<elem> one = panel(packed.slot[packed.tile_start[block.s * G + block.h / group] + t]);
    one.first = t * TILE;
    one.edge = (t + 1) * TILE > block.first + 1 || t * TILE <= last - index.window;
    w.panels.push_back(one);
  }

  // The panels of a block, ascending: columns, then tiles; where tiles may be skipped, the own one and tile 0 first.
  void collect(Scratch& w, const Block& block) const {
    w.panels.clear();
    const int64_t last = block.first + block.rows - 1;
    if (block.dense) {
      const auto [from, to] = index.dense_tiles(block.first, last);
      const int64_t n = to - from + 1;
      for (int64_t t = from + n * block.part / block.parts; t < from + n * (block.part + 1) / block.parts; ++t)
        add_tile(w, block, t);
      w.anchors = w.panels.size();
      return;
    }
    const int64_t at = block.first / TILE, i = block.s * H + block.h;
    index.hold(block.s, block.h, at, w.held);
    const int32_t* c = index.columns.row(i);
    for (int64_t c0 = 0; c0 < packed.count[i]; c0 += TILE) {
      if (c[c0] / TILE >= at) break;
      Panel<elem> one = panel(packed.group_start[i] + c0 / TILE);
      one.columns = c + c0, one.have = std::min<int64_t>(TILE, packed.count[i] - c0), one.live = 0;
      for (int j = 0; j < one.have; ++j) {
        const int64_t t = c[c0 + j] / TILE;
        const bool alive = t < at && t >= at - index.reach && !(w.held[t / 64] >> (t % 64) & 1);
        one.live |= uint64_t(alive) << j;
      }
      one.edge = c[c0] <= last - index.window;
      if (one.live) w.panels.push_back(one);
    }
    const bool skips = index.bound(block.s, block.h) > NEG_INF;
    if (skips) {
      add_tile(w, block, at);
      if (at && w.held[0] & 1) add_tile(w, block, 0);
    }
    w.anchors = w.panels.size();
    packed.for_each_bit(w.held, at, [&](int64_t t) {
      if (!skips || (t && t != at)) add_tile(w, block, t);
    });
    if (!skips) w.anchors = w.panels.size();
  }

  void task(Scratch& w, const Block& block) {
    const Sequence& one = index.sequences[block.s];
    const int64_t g = block.h / group;
    const int rows = block.rows;
    collect(w, block);
    for (int r = 0; r < rows; ++r)
      copy(qs.at(one.row, block.h, one.q0 + block.first + r - one.offset()), D, w.q.get() + r * inner);

    std::fill(w.top, w.top + TILE, NEG_INF);
    std::fill(w.total, w.total + TILE, 0.0f);
    std::fill(w.highest, w.highest + TILE, NEG_INF);
    std::fill(w.o.get(), w.o.get() + TILE * width, 0.0f);
    const int64_t anchors = w.anchors, steps = (anchors + STEP - 1) / STEP;
    for (int64_t i = 0; i < steps; ++i) {
      const int64_t p0 = anchors * i / steps;
      const int step = anchors * (i + 1) / steps - p0;
      for (int r0 = 0; r0 < rows; r0 += ROWS) {
        const int r1 = std::min(r0 + ROWS, rows);
        for (int t = 0; t < step; ++t) score(w, block, w.panels[p0 + t], r0, r1, w.s.get() + t * TILE);
        attend(w, block, p0, step, r0, r1, w.s.get());
      }
    }
    if (anchors < int64_t(w.panels.size())) attend_to_rest(w, block);
    if (block.parts == 1) {
      for (int r = 0; r < rows; ++r) write(block, r, w.o.get() + r * width, w.top[r], w.total[r]);
      return;
    }
    const int64_t mine = (block.place + block.part) * TILE;
    std::copy(w.o.get(), w.o.get() + rows * width, partial.get() + mine * width);
    std::copy(w.top, w.top + rows, tops.get() + mine);
    std::copy(w.total, w.total + rows, totals.get() + mine);
    if (open[block.place].fetch_sub(1, std::memory_order_acq_rel) == 1) combine(w, block);
  }

  // The scores of queries [r0, r1) for a panel, into rows of LD from s on.
  void score(Scratch& w, const Block& block, const Panel<elem>& each, int r0, int r1, float* s) const {
    Engine::qk(w.q.get() + r0 * inner, r1 - r0, inner, each.k, s, LD);
    if (how.softcap > 0)
      for (int r = r0; r < r1; ++r) cap(s + (r - r0) * LD, TILE, how);
    if (each.edge || ~each.live)
      for (int r = r0; r < r1; ++r) keep_seen(s + (r - r0) * LD, each.seen(block.first + r, index.window));
  }

  // Softmax over the scores that queries [r0, r1) have for `step` panels from p0 on, and the values of these.
  void attend(Scratch& w, const Block& block, int64_t p0, int step, int r0, int r1, float* scores) const {
    const elem* values[STEP];
    for (int t = 0; t < step; ++t) values[t] = w.panels[p0 + t].v;
    for (int r = r0; r < r1; ++r) {
      float *s = scores + (r - r0) * LD, *o = w.o.get() + r * width;
      const float most = largest(s, step * TILE), rescale = rebase(most, factor, w.top[r]);
      w.highest[r] = std::max(w.highest[r], most);
      if (rescale != 1.0f)
        for (int e = 0; e < width; e += LANES) store(o + e, load(o + e) * rescale);
      w.total[r] = w.total[r] * rescale + weigh(s, reinterpret_cast<elem*>(s), step * TILE, exp2, w.top[r]);
    }
    constexpr int ldp = LD * sizeof(float) / sizeof(elem);
    Engine::pv(reinterpret_cast<elem*>(scores), r1 - r0, ldp, values, step, width, w.o.get() + r0 * width);
  }

  // The panels after the anchors, but for those whose scores are too far below the anchors' (SparseIndex.skip).
  void attend_to_rest(Scratch& w, const Block& block) const {
    const int rows = block.rows;
    float limit[TILE];
    for (int r = 0; r < rows; ++r) {
      const bool known = std::isfinite(w.highest[r]) && !std::isnan(w.total[r]);
      limit[r] = known ? w.highest[r] + index.bound(block.s, block.h) / how.to_logit() : NAN;
    }
    int step = 0;
    int64_t p0 = w.anchors, left_out = 0;
    const auto flush = [&] {
      for (int r0 = 0; r0 < rows; r0 += ROWS)
        attend(w, block, p0, step, r0, std::min(r0 + ROWS, rows), w.s.get() + r0 * LD);
      p0 += step;
      step = 0;
    };
    for (size_t p = p0; p < w.panels.size(); ++p) {
      float* const s = w.s.get() + step * TILE;
      score(w, block, w.panels[p], 0, rows, s);
      bool matters = false;
      for (int r = 0; r < rows && !matters; ++r) matters = any_not_below(s + r * LD, limit[r]);
      if (!matters) {
        ++left_out;
        continue;
      }
      w.panels[p0 + step++] = w.panels[p];
      if (step == STEP) flush();
    }
    if (step) flush();
    if (skipped) std::atomic_ref(skipped[block.s * H + block.h]) += int32_t(left_out);
  }

  // Puts the parts of a block together, in their order.
  void combine(Scratch& w, const Block& block) {
    for (int r = 0; r < block.rows; ++r) {
      const int64_t first = block.place * TILE + r;
      float highest = NEG_INF, total = 0;
      for (int i = 0; i < block.parts; ++i) highest = std::max(highest, tops[first + i * TILE]);
      float* o = w.o.get();
      std::fill(o, o + width, 0.0f);
      for (int i = 0; i < block.parts; ++i) {
        const int64_t at = first + i * TILE;
        // A part that the query sees nothing of has no maximum.
        if (totals[at] == 0) continue;
        const float weight = std::isnan(totals[at]) ? 1.0f : std::exp2((tops[at] - highest) * factor);
        total += weight * totals[at];
        for (int e = 0; e < width; e += LANES) store(o + e, load(o + e) + load(partial.get() + at * width + e) * weight);
      }
      write(block, r, o, highest, total);
    }
  }

  void write(const Block& block, int r, const float* o, float top, float total) const {
    const Sequence& one = index.sequences[block.s];
    const int64_t at = one.q0 + block.first + r - one.offset();
    float found = top * how.to_logit() + std::log(total), share = 1.0f;
    if (sinks) {
      const WithSink with(sinks[block.h], found);
      found = with.lse, share = with.share;
    }
    copy(o, E, share / total, const_cast<T*>(os.at(one.row, block.h, at)));
    lse.mutable_data_ptr<float>()[one.row * lse.stride(0) + block.h * lse.stride(1) + at] = found;
  }
};

template <class T>
void run_for(const std::string& engine, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
             const std::optional<at::Tensor>& block_table, const Index& index, Softmax how, const float* sinks,
             at::Tensor& out, at::Tensor& lse, int32_t* skipped) {
  with_engine<T>(engine, [&](auto with) {
    Run<decltype(with), T>(q, k, v, block_table, index, how, sinks, out, lse, skipped)();
  });
}

// sequences: five numbers for each, row, q_start, q_len, k_start, k_len. window 0 is none. skip: of each sequence and
// head, fp32. sinks: a logit of each head, fp32. Writes out and lse where a sequence is, adds to skipped.
void sparse_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& diagonals,
                      const at::Tensor& tiles, const at::Tensor& offsets, const at::Tensor& columns,
                      at::IntArrayRef sequences, int64_t dense_tail, int64_t window,
                      const std::optional<at::Tensor>& block_table, const std::optional<at::Tensor>& skip,
                      const std::optional<at::Tensor>& sinks, double scale, double softcap, std::string engine,
                      at::Tensor out, at::Tensor lse, std::optional<at::Tensor> skipped) {
  // Above glibc's largest threshold the memory is new from the system at every call.
  if (out.is_non_overlapping_and_dense() && out.nbytes() > size_t(32) << 20)
    on_huge_pages(out.mutable_data_ptr(), out.nbytes());
  constexpr int64_t NONE = int64_t(1) << 40;
  Index index{diagonals, {tiles, offsets}, columns, {}, dense_tail, window ? window : NONE, NONE, q.size(1)};
  if (skip) index.skip = skip->const_data_ptr<float>();
  int32_t* left_out = skipped ? skipped->mutable_data_ptr<int32_t>() : nullptr;
  if (window) index.reach = (window - 1 + TILE - 1) / TILE;
  for (size_t i = 0; i + 4 < sequences.size(); i += 5)
    index.sequences.push_back({sequences[i], sequences[i + 1], sequences[i + 2], sequences[i + 3], sequences[i + 4]});
  const Softmax how{static_cast<float>(scale), static_cast<float>(softcap)};
  const float* sink = sinks ? sinks->const_data_ptr<float>() : nullptr;
  switch (q.scalar_type()) {
    case at::kFloat: run_for<float>(engine, q, k, v, block_table, index, how, sink, out, lse, left_out); break;
    case at::kHalf: run_for<at::Half>(engine, q, k, v, block_table, index, how, sink, out, lse, left_out); break;
    case at::kBFloat16: run_for<at::BFloat16>(engine, q, k, v, block_table, index, how, sink, out, lse, left_out); break;
    default: TORCH_CHECK_VALUE(false, "dtype ", q.scalar_type(), " is not served");
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(headwise, m) {
  m.def(
      "sparse_attention(Tensor q, Tensor k, Tensor v, Tensor diagonals, Tensor tiles, Tensor offsets, Tensor columns, "
      "int[] sequences, int dense_tail, int window, Tensor? block_table, Tensor? skip, Tensor? sinks, float scale, "
      "float softcap, str engine, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? skipped) -> ()");
  m.def("engines(ScalarType dtype) -> str[]", &engines);
  m.def("why_no_tiles() -> str", [] { return tiles::fault(); });
}

TORCH_LIBRARY_IMPL(headwise, CPU, m) { m.impl("sparse_attention", &sparse_attention); }
