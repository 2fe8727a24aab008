// Builders of indices over whole prompts, fused for the CPU: estimates, means of tiles, selection, and top-k.
//
// Shapes: B batch, h heads of a kind, G KV heads, Q query length, K key length, D head dim, L last queries.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "../attention/index.h"

namespace {

using namespace headwise;

// Keys of a task of the estimate: enough to share the packing of a tile between heads, few enough for all threads.
constexpr int64_t CHUNK = 16 * TILE;

// One head of the estimate: where its results go, its queries in blocks of 64 rows, and how many there are.
template <class elem>
struct Member {
  int64_t at, last;
  std::unique_ptr<elem[], Free> queries;
  int64_t blocks() const { return (last + TILE - 1) / TILE; }
};

// A KV head with those of its query heads that are asked for.
template <class elem>
struct Group {
  int64_t b, g;
  std::vector<Member<elem>> members;
};

// All K keys of an element of the batch.
inline Sequence whole(int64_t b, int64_t K) { return {b, 0, 0, 0, K}; }

// Calls visit(member, i, key0, s): for the member's i-th last query and each tile of a chunk, the 64 scores from key0 on,
// -inf where the query does not see the key. Queries that see none of the tile are left out.
template <class Engine, class T, class Visit>
void for_each_row(const Keys<T>& ks, const Group<typename Engine::elem>& group, int64_t K, int64_t D, int64_t window,
                  int64_t chunk, Visit visit) {
  using elem = typename Engine::elem;
  const int inner = round_up(D, Engine::INNER);
  const auto panel = allocate<elem>(inner * TILE);
  const auto scores = allocate<float>(TILE * TILE);
  const auto wide = allocate<T>(ks.stored.eight() ? TILE * D : 0);
  const Sequence keys = whole(group.b, K);
  const InUse<Engine> engine;
  for (int64_t key0 = chunk * CHUNK; key0 < std::min(K, (chunk + 1) * CHUNK); key0 += TILE) {
    const T* rows[TILE];
    const int have = std::min<int64_t>(TILE, K - key0);
    for (int j = 0; j < have; ++j) rows[j] = ks.at(keys, group.b, group.g, key0 + j, D, wide.get(), j);
    pack_k<Engine>(rows, have, D, inner, panel.get());
    for (const auto& member : group.members)
      for (int64_t block = 0; block < member.blocks(); ++block) {
        const int64_t first = K - member.last + block * TILE;
        const int64_t rows_here = std::min<int64_t>(TILE, member.last - block * TILE);
        if (key0 > first + rows_here - 1 || key0 + TILE <= first - window + 1) continue;
        Engine::qk(member.queries.get() + block * TILE * inner, rows_here, inner, panel.get(), scores.get(), TILE);
        for (int64_t r = 0; r < rows_here; ++r) {
          const int64_t pos = first + r, from = pos - window + 1;
          if (key0 > pos || key0 + TILE <= from) continue;
          float* s = scores.get() + r * TILE;
          if (pos < key0 + TILE - 1) std::fill(s + pos + 1 - key0, s + TILE, NEG_INF);
          if (from > key0) std::fill(s, s + from - key0, NEG_INF);
          visit(member, block * TILE + r, key0, s);
        }
      }
  }
}

template <class Engine, class T>
void estimate_with(const at::Tensor& q, const at::Tensor& k, const std::optional<at::Tensor>& table, at::IntArrayRef heads,
                   at::IntArrayRef last_q, float factor, int64_t window, at::Tensor& vertical, at::Tensor& slash) {
  using elem = typename Engine::elem;
  const int64_t B = q.size(0), Q = q.size(2), D = q.size(3), K = vertical.size(2), G = k.size(table ? 2 : 1);
  const int64_t share = q.size(1) / G;
  const int64_t h = heads.size(), chunks = (K + CHUNK - 1) / CHUNK;
  const int inner = round_up(D, Engine::INNER);
  const Strided<T> qs(q);
  const Keys<T> ks(k, table);
  const Exp2<6> exp2(factor);

  std::vector<Group<elem>> groups;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t g = 0; g < G; ++g) {
      Group<elem> group{b, g, {}};
      for (int64_t i = 0; i < h; ++i)
        if (heads[i] / share == g) {
          Member<elem> member{b * h + i, std::min(last_q[i], Q), nullptr};
          member.queries = allocate<elem>(member.blocks() * TILE * inner);
          std::fill_n(member.queries.get(), member.blocks() * TILE * inner, elem(0));
          for (int64_t r = 0; r < member.last; ++r)
            copy(qs.at(b, heads[i], Q - member.last + r), D, member.queries.get() + r * inner);
          group.members.push_back(std::move(member));
        }
      if (!group.members.empty()) groups.push_back(std::move(group));
    }

  // First pass: maximum and sum of each query over each chunk; rows of member m start at row_start[m].
  std::vector<int64_t> row_start(B * h + 1, 0), last(B * h);
  for (int64_t m = 0; m < B * h; ++m) last[m] = std::min(last_q[m % h], Q), row_start[m + 1] = row_start[m] + last[m];
  std::vector<float> top(row_start[B * h] * chunks, NEG_INF), total(row_start[B * h] * chunks, 0.0f);
  const int64_t tasks = groups.size() * chunks;
  at::parallel_for(0, tasks, 1, [&](int64_t from, int64_t to) {
    for (int64_t task = from; task < to; ++task) {
      const int64_t chunk = task % chunks;
      for_each_row<Engine>(ks, groups[task / chunks], K, D, window, chunk, [&](const auto& m, int64_t i, int64_t, float* s) {
        const int64_t at = (row_start[m.at] + i) * chunks + chunk;
        vf best = splat(NEG_INF);
        for (int j = 0; j < TILE; j += LANES) best = larger(load(s + j), best);
        const float before = top[at], now = std::max(before, maximum(best));
        const vf shift = splat(now);
        vf part = {};
        for (int j = 0; j < TILE; j += LANES) part += exp2(load(s + j) - shift);
        total[at] = total[at] * (before == NEG_INF ? 0.0f : std::exp2((before - now) * factor)) + sum(part);
        top[at] = now;
      });
    }
  });

  // Of each query the largest score, and one over the sum of all powers relative to it.
  std::vector<float> highest(row_start[B * h]), inverse(highest.size());
  for (size_t row = 0; row < highest.size(); ++row) {
    const float *t = top.data() + row * chunks, best = *std::max_element(t, t + chunks);
    float all = 0;
    for (int64_t c = 0; c < chunks; ++c)
      if (t[c] != NEG_INF) all += total[row * chunks + c] * std::exp2((t[c] - best) * factor);
    highest[row] = best, inverse[row] = 1 / all;
  }

  // Second pass: columns belong to one task; diagonals cross chunks, so that each chunk has its part of them.
  float *const columns = vertical.mutable_data_ptr<float>(), *const diagonals = slash.mutable_data_ptr<float>();
  std::fill_n(columns, B * h * K, 0.0f);
  const auto width = [&](int64_t m) { return CHUNK + last[m]; };
  std::vector<int64_t> share_start(B * h + 1, 0);
  for (int64_t m = 0; m < B * h; ++m) share_start[m + 1] = share_start[m] + width(m) * chunks;
  std::vector<float> shares(share_start[B * h], 0.0f);
  at::parallel_for(0, tasks, 1, [&](int64_t from, int64_t to) {
    for (int64_t task = from; task < to; ++task) {
      const int64_t chunk = task % chunks;
      for_each_row<Engine>(ks, groups[task / chunks], K, D, window, chunk,
                           [&](const auto& m, int64_t i, int64_t key0, float* s) {
        const vf shift = splat(highest[row_start[m.at] + i]), share = splat(inverse[row_start[m.at] + i]);
        for (int j = 0; j < TILE; j += LANES) store(s + j, exp2(load(s + j) - shift) * share);
        float* column = columns + m.at * K + key0;
        const int have = std::min<int64_t>(TILE, K - key0);
        if (have == TILE)
          for (int j = 0; j < TILE; j += LANES) store(column + j, load(column + j) + load(s + j));
        else
          for (int j = 0; j < have; ++j) column[j] += s[j];
        // Entry r of a share is the diagonal at distance K - 1 - CHUNK * chunk - r.
        float* diagonal = shares.data() + share_start[m.at] + chunk * width(m.at) + (m.last - 1 - i) + key0 - chunk * CHUNK;
        for (int j = 0; j < TILE; j += LANES) store(diagonal + j, load(diagonal + j) + load(s + j));
      });
    }
  });
  at::parallel_for(0, B * h, 1, [&](int64_t from, int64_t to) {
    for (int64_t m = from; m < to; ++m) {
      float* sums = diagonals + m * K;
      std::fill_n(sums, K, 0.0f);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const float* mine = shares.data() + share_start[m] + chunk * width(m);
        const int64_t far = K - 1 - CHUNK * chunk;
        for (int64_t r = 0; r <= std::min(far, width(m) - 1); ++r) sums[far - r] += mine[r];
      }
    }
  });
}

// See kernels.patterns.last_queries.estimate. K keys, in pages if there is a table; window 0 is none.
std::tuple<at::Tensor, at::Tensor> vertical_slash_estimate(const at::Tensor& q, const at::Tensor& k,
                                                           const std::optional<at::Tensor>& table, int64_t K,
                                                           at::IntArrayRef heads, at::IntArrayRef last_q, double scale,
                                                           int64_t window, std::string engine) {
  at::Tensor vertical = at::empty({q.size(0), int64_t(heads.size()), K}, q.options().dtype(at::kFloat));
  at::Tensor slash = at::empty_like(vertical);
  const float factor = static_cast<float>(scale) * LOG2E;
  if (!window) window = K;
  const auto serve = [&](auto zero) {
    using T = decltype(zero);
    with_engine<T>(engine, [&](auto with) {
      estimate_with<decltype(with), T>(q, k, table, heads, last_q, factor, window, vertical, slash);
    });
  };
  switch (q.scalar_type()) {
    case at::kHalf: serve(at::Half()); break;
    case at::kBFloat16: serve(at::BFloat16()); break;
    default: serve(float());
  }
  return {vertical, slash};
}

template <class T>
void pool_with(const at::Tensor& x, const std::optional<at::Tensor>& table, int64_t L, int64_t lead, at::Tensor& out) {
  const int64_t H = out.size(1), D = out.size(3), tiles = out.size(2);
  const Keys<T> xs(x, table);
  float* const to = out.mutable_data_ptr<float>();
  at::parallel_for(0, out.size(0) * H * tiles, 16, [&](int64_t begin, int64_t end) {
    std::vector<T> wide(xs.stored.eight() ? D : 0);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t tile = i % tiles, head = i / tiles % H, b = i / tiles / H;
      const int64_t from = std::max<int64_t>(tile * TILE - lead, 0), until = std::min((tile + 1) * TILE - lead, L);
      const Sequence all = whole(b, L);
      float* mean = to + i * D;
      std::fill_n(mean, D, 0.0f);
      for (int64_t row = from; row < until; ++row) {
        const T* __restrict one = xs.at(all, b, head, row, D, wide.data(), 0);
        for (int64_t d = 0; d < D; ++d) mean[d] += cast<float>(one[d]);
      }
      for (int64_t d = 0; d < D; ++d) mean[d] /= until - from;
    }
  });
}

// Mean over each tile of 64 of `length` positions, in pages if there is a table, fp32 (B, H, tiles, D); `lead` positions
// of the first tile are missing. Those of 8 bits are read as fp32.
at::Tensor mean_pool(const at::Tensor& x, const std::optional<at::Tensor>& table, int64_t length, int64_t lead) {
  const int64_t tiles = (lead + length + TILE - 1) / TILE;
  at::Tensor out = at::empty({(table ? *table : x).size(0), x.size(table ? 2 : 1), tiles, x.size(3)},
                             x.options().dtype(at::kFloat));
  switch (x.scalar_type()) {
    case at::kHalf: pool_with<at::Half>(x, table, length, lead, out); break;
    case at::kBFloat16: pool_with<at::BFloat16>(x, table, length, lead, out); break;
    default: pool_with<float>(x, table, length, lead, out);
  }
  return out;
}

// A score as bits that compare like it, above the place of its entry: larger scores first, then smaller places.
inline uint64_t ordered(float score, int64_t place) {
  uint32_t bits;
  std::memcpy(&bits, &score, 4);
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t(bits) << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(place));
}

// How a head chooses: at most `size` entries; where coverage > 0 no more than it takes for their sum to reach that share
// of the sum of all, and none that adds nothing to it.
struct Choice {
  int64_t size;
  double coverage;
};

// The places of the best of n scores, ascending: ties to the smaller place, the first `forced` always among them, entries
// of -inf never. Returns how many; `candidates` is scratch.
int64_t keep_best(const float* score, int64_t n, Choice how, int64_t forced, std::vector<uint64_t>& candidates,
                  int32_t* kept) {
  const int64_t size = std::min(n, how.size);
  int64_t count = 0;
  double mass = 0, goal = 0;
  candidates.clear();
  for (int64_t j = 0; j < n; ++j) {
    if (score[j] == NEG_INF) continue;
    goal += score[j];
    if (j < forced && count < size) {
      kept[count++] = j, mass += score[j];
    } else {
      candidates.push_back(ordered(score[j], j));
    }
  }
  const int64_t left = std::min<int64_t>(size - count, candidates.size());
  if (left < static_cast<int64_t>(candidates.size()) && left > 0)
    std::nth_element(candidates.begin(), candidates.begin() + left - 1, candidates.end(), std::greater<>());
  const auto stop = candidates.begin() + left;
  // All of it is more than any sum: rounding must not leave out the last entry that has mass.
  goal = how.coverage < 1 ? goal * how.coverage : std::numeric_limits<double>::infinity();
  if (how.coverage > 0) std::sort(candidates.begin(), stop, std::greater<>());
  for (auto at = candidates.begin(); at < stop; ++at) {
    const int32_t place = ~static_cast<uint32_t>(*at);
    if (how.coverage > 0 && (mass >= goal || score[place] <= 0)) break;
    kept[count++] = place, mass += score[place];
  }
  std::sort(kept, kept + count);
  return count;
}

// The places of the best entries of each row of contiguous fp32 scores (B, n), at most `width`, padded with PAD: of row b
// no more than counts[b] of the entries before ends[b] (contiguous int32 (B,) each, if there). See kernels.topk.TopKCall.
at::Tensor top_k_indices(const at::Tensor& scores, int64_t width, const std::optional<at::Tensor>& ends,
                         const std::optional<at::Tensor>& counts) {
  const int64_t rows = scores.size(0), n = scores.size(1);
  width = std::min(n, width);
  at::Tensor out = at::empty({rows, width}, scores.options().dtype(at::kInt));
  int32_t* const to = out.mutable_data_ptr<int32_t>();
  const float* const from = scores.const_data_ptr<float>();
  const int32_t* const stops = ends ? ends->const_data_ptr<int32_t>() : nullptr;
  const int32_t* const most = counts ? counts->const_data_ptr<int32_t>() : nullptr;
  at::parallel_for(0, rows, std::max<int64_t>(1, 4096 / std::max<int64_t>(n, 1)), [&](int64_t begin, int64_t end) {
    std::vector<uint64_t> candidates;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t stop = stops ? std::clamp<int64_t>(stops[row], 0, n) : n;
      const int64_t size = most ? std::min<int64_t>(width, std::max(most[row], 0)) : width;
      int32_t* kept = to + row * width;
      const int64_t count = keep_best(from + row * n, stop, {size, 0}, 0, candidates, kept);
      std::fill(kept + count, kept + width, PAD);
    }
  });
  return out;
}

// A head of the layer: its place among those of its kind; what it may name, see Pattern.limits; and the most tiles that
// a row of it lists, 0 for a head without lists.
struct Head {
  bool massed;
  int64_t place, columns, diagonals, listed;
  double coverage;
};

// Writes 0, 1 ... count - 1, and PAD from there on.
void write_first(int64_t count, int64_t width, int32_t* to) {
  count = std::min(count, width);
  std::iota(to, to + count, 0);
  std::fill(to + count, to + width, PAD);
}

// The columns of most mass, and the tile diagonals that the distances of most mass cross: floor and ceil of distance /
// TILE. vertical and slash (K) of one head; the first TILE of both are always chosen.
void write_lines(const float* vertical, const float* slash, int64_t K, const Head& head, std::vector<uint64_t>& candidates,
                 std::vector<int32_t>& kept, std::vector<char>& crossed, int32_t* columns, int64_t columns_width,
                 int32_t* diagonals, int64_t diagonals_width) {
  int64_t count = keep_best(vertical, K, {head.columns, head.coverage}, TILE, candidates, columns);
  std::fill(columns + count, columns + columns_width, PAD);
  count = keep_best(slash, K, {head.diagonals, head.coverage}, TILE, candidates, kept.data());
  std::fill(crossed.begin(), crossed.end(), 0);
  for (int64_t i = 0; i < count; ++i) crossed[kept[i] / TILE] = crossed[(kept[i] + TILE - 1) / TILE] = 1;
  int32_t* to = diagonals;
  for (int64_t tile = 0; tile < (K + TILE - 1) / TILE; ++tile)
    if (crossed[tile]) *to++ = tile;
  std::fill(to, diagonals + diagonals_width, PAD);
}

// Entries of the lists of the first r rows of a head: row i lists `most` tiles, or first + i if those are fewer.
inline int64_t entries(int64_t r, int64_t most, int64_t first) {
  const int64_t rising = std::clamp<int64_t>(most - first, 0, r);
  return rising * first + rising * (rising - 1) / 2 + (r - rising) * most;
}

// The best key tiles before each row's own, ascending and padded with PAD, of 64 rows of one head from row0 on. Means of
// its queries (R, D) and keys (N, D), fp32; row r is the query tile at key tile first + r and sees `reach` tiles before
// it. The row's own tile, which is not listed, and the first tile are always chosen; with a coverage by the softmax of the
// scaled products.
struct TileRows {
  int64_t R, N, D, first, reach;
  float scale;
  std::unique_ptr<float[], Free> panel, asked, products;
  std::vector<float> scores;
  std::vector<int32_t> kept;

  TileRows(int64_t R, int64_t N, int64_t D, int64_t first, int64_t reach, float scale)
      : R(R), N(N), D(D), first(first), reach(reach), scale(scale), panel(allocate<float>(D * TILE)),
        asked(allocate<float>(TILE * D)), products(allocate<float>(TILE * round_up(N, TILE))), scores(N + 1), kept(N + 1) {}

  void write(const float* q, const float* k, int64_t row0, const Head& head, std::vector<uint64_t>& candidates,
             int32_t* tiles) {
    const int64_t rows = std::min<int64_t>(TILE, R - row0), columns = round_up(N, TILE);
    std::fill_n(asked.get(), TILE * D, 0.0f);
    std::copy_n(q + row0 * D, rows * D, asked.get());
    const int64_t from = std::max<int64_t>(first + row0 - reach, 0) / TILE * TILE;
    for (int64_t tile0 = from; tile0 < first + row0 + rows; tile0 += TILE) {
      const float* key_rows[TILE];
      const int have = std::min<int64_t>(TILE, N - tile0);
      for (int j = 0; j < have; ++j) key_rows[j] = k + (tile0 + j) * D;
      pack_k<Blocked<Float>>(key_rows, have, D, D, panel.get());
      Blocked<Float>::qk(asked.get(), TILE, D, panel.get(), products.get() + tile0, columns);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t own = first + row0 + r, low = std::max<int64_t>(own - reach, 0);
      const float* product = products.get() + r * columns;
      // Entry 0 is the own tile, so that its mass counts; then come the tiles from `low` on.
      const int64_t n = own - low + 1;
      scores[0] = product[own];
      std::copy(product + low, product + own, scores.begin() + 1);
      if (head.coverage > 0) {
        const float top = *std::max_element(scores.begin(), scores.begin() + n);
        float total = 0;
        for (int64_t j = 0; j < n; ++j) total += scores[j] = std::exp((scores[j] - top) * scale);
        for (int64_t j = 0; j < n; ++j) scores[j] /= total;
      }
      const Choice how{head.listed + 1, head.coverage};
      const int64_t count = keep_best(scores.data(), n, how, low == 0 ? 2 : 1, candidates, kept.data());
      int32_t* listed = tiles + entries(row0 + r, head.listed, first);
      // Entry 0 comes first: it is left out.
      for (int64_t j = 1; j < count; ++j) *listed++ = low + kept[j] - 1;
      std::fill(listed, tiles + entries(row0 + r + 1, head.listed, first), PAD);
    }
  }
};

// Writes the index of a layer of H heads into its memory (B, H, ...), contiguous. Head i is number places[i] of the heads
// with masses (B, m, K) where massed[i], of the heads with means (B, l, R or N, D) where listed[i], and else names the first
// columns and diagonals; fp32, contiguous. See kernels.patterns.base.SelectCall.
void select_index(const std::optional<at::Tensor>& vertical, const std::optional<at::Tensor>& slash,
                  const std::optional<at::Tensor>& queries, const std::optional<at::Tensor>& keys, at::IntArrayRef massed,
                  at::IntArrayRef places, at::IntArrayRef columns, at::IntArrayRef diagonals, at::IntArrayRef listed,
                  at::ArrayRef<double> coverage, int64_t K, int64_t first, int64_t reach, double scale,
                  at::Tensor& out_diagonals, at::Tensor& out_columns, at::Tensor& out_tiles, at::Tensor& out_offsets) {
  const int64_t B = out_diagonals.size(0), H = out_diagonals.size(1), R = out_offsets.size(2) - 1;
  const bool lists = std::any_of(listed.begin(), listed.end(), [](int64_t most) { return most > 0; });
  std::vector<Head> heads;
  for (int64_t i = 0; i < H; ++i)
    heads.push_back({massed[i] != 0, places[i], columns[i], diagonals[i], listed[i], coverage[i]});
  int32_t *const to_diagonals = out_diagonals.mutable_data_ptr<int32_t>(),
          *const to_columns = out_columns.mutable_data_ptr<int32_t>();
  const int64_t ND = out_diagonals.size(2), NC = out_columns.size(2);
  at::parallel_for(0, B * H, 1, [&](int64_t begin, int64_t end) {
    std::vector<uint64_t> candidates;
    std::vector<int32_t> kept(vertical ? K : 0);
    std::vector<char> crossed(vertical ? K / TILE + 2 : 0);
    for (int64_t at = begin; at < end; ++at) {
      const Head& head = heads[at % H];
      if (!head.massed) {
        write_first(head.columns, NC, to_columns + at * NC);
        write_first(head.diagonals, ND, to_diagonals + at * ND);
        continue;
      }
      const int64_t mass = (at / H * vertical->size(1) + head.place) * K;
      write_lines(vertical->const_data_ptr<float>() + mass, slash->const_data_ptr<float>() + mass, K, head, candidates, kept,
                  crossed, to_columns + at * NC, NC, to_diagonals + at * ND, ND);
    }
  });
  if (!lists) return;

  // The lists of a head without any are empty, and begin at 0.
  int64_t* const offsets = out_offsets.mutable_data_ptr<int64_t>();
  std::vector<int64_t> starts(B * H, 0), with_lists;
  int64_t total = 0;
  for (int64_t at = 0; at < B * H; ++at) {
    const int64_t most = heads[at % H].listed;
    if (most) starts[at] = total, total += entries(R, most, first), with_lists.push_back(at);
    for (int64_t r = 0; r <= R; ++r) offsets[at * (R + 1) + r] = starts[at] + (most ? entries(r, most, first) : 0);
  }
  const int64_t l = queries->size(1), N = keys->size(2), D = keys->size(3), row_blocks = (R + TILE - 1) / TILE;
  const float *const q = queries->const_data_ptr<float>(), *const k = keys->const_data_ptr<float>();
  int32_t* const tiles = out_tiles.mutable_data_ptr<int32_t>();
  const int64_t count = with_lists.size();
  at::parallel_for(0, count * row_blocks, 1, [&](int64_t begin, int64_t end) {
    TileRows rows(R, N, D, first, reach, static_cast<float>(scale));
    std::vector<uint64_t> candidates;
    for (int64_t task = begin; task < end; ++task) {
      // Long rows first, and heads in turn, so that threads have alike much to do.
      const int64_t at = with_lists[task % count], row0 = (row_blocks - 1 - task / count) * TILE;
      const int64_t mean = at / H * l + heads[at % H].place;
      rows.write(q + mean * R * D, k + mean * N * D, row0, heads[at % H], candidates, tiles + starts[at]);
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(headwise, m) {
  m.def(
      "vertical_slash_estimate(Tensor q, Tensor k, Tensor? block_table, int k_len, int[] heads, int[] last_q, "
      "float scale, int window, str engine) -> (Tensor, Tensor)");
  m.def("mean_pool(Tensor x, Tensor? block_table, int length, int lead) -> Tensor");
  m.def("top_k_indices(Tensor scores, int width, Tensor? ends, Tensor? counts) -> Tensor");
  m.def(
      "select_index(Tensor? vertical, Tensor? slash, Tensor? queries, Tensor? keys, int[] massed, int[] places, "
      "int[] columns, int[] diagonals, int[] listed, float[] coverage, int k_len, int first, int reach, float scale, "
      "Tensor(a!) out_diagonals, Tensor(b!) out_columns, Tensor(c!) out_tiles, Tensor(d!) out_offsets) -> ()");
}

TORCH_LIBRARY_IMPL(headwise, CPU, m) {
  m.impl("vertical_slash_estimate", &vertical_slash_estimate);
  m.impl("mean_pool", &mean_pool);
  m.impl("top_k_indices", &top_k_indices);
  m.impl("select_index", &select_index);
}
