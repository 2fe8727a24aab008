// A SparseIndex as the native kernel reads it, where keys lie, and how the work is cut up.
//
// Shapes: B batch, H query heads, G KV heads, Q query length, K key length.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../native/engines.h"

namespace headwise {

struct Entries {
  const int32_t* data;
  int64_t width;
  Entries(const at::Tensor& t) : data(t.const_data_ptr<int32_t>()), width(t.size(-1)) {}
  const int32_t* row(int64_t i) const { return data + i * width; }
};

// Key tiles listed row by row: those of row i of all rows of all heads from offsets[i] on.
struct Lists {
  const int32_t* data;
  const int64_t* offsets;
  int64_t total, rows;
  Lists(const at::Tensor& tiles, const at::Tensor& begins)
      : data(tiles.const_data_ptr<int32_t>()), offsets(begins.const_data_ptr<int64_t>()), total(tiles.numel()),
        rows(begins.size(2) - 1) {}
  // Of row r of head i; nothing outside of the tensor, whatever a broken index says.
  std::pair<const int32_t*, const int32_t*> row(int64_t i, int64_t r) const {
    const int64_t* at = offsets + i * (rows + 1) + r;
    const int64_t begin = std::clamp<int64_t>(at[0], 0, total);
    return {data + begin, data + std::clamp(at[1], begin, total)};
  }
};

// Sequence s of a batch (kernels/ragged.py): its queries are the last Q of its K positions.
struct Sequence {
  int64_t row, q0, Q, k0, K;
  int64_t offset() const { return K - Q; }
  int64_t first_row() const { return offset() / TILE; }
  int64_t tiles() const { return (K + TILE - 1) / TILE; }
};

// Keys or values by sequence, KV head and position, in tensors or in the pages of a serving engine's cache.
template <class T>
struct Keys {
  Stored<T> stored;
  int64_t batch, head, row;
  const int32_t* pages = nullptr;
  int64_t page_size = 0, table_width = 0, num_pages = 0;
  Keys(const at::Tensor& t, const std::optional<at::Tensor>& table)
      : stored(t), batch(t.stride(0)), head(t.stride(table ? 2 : 1)), row(t.stride(table ? 1 : 2)) {
    if (table) {
      pages = table->const_data_ptr<int32_t>();
      page_size = t.size(1), table_width = table->size(1), num_pages = t.size(0);
    }
  }
  // The n numbers of key j; where they have 8 bits, as row i of `wide`.
  const T* at(const Sequence& one, int64_t s, int64_t g, int64_t j, int64_t n, T* wide, int64_t i) const {
    if (!pages) return stored.row(one.row * batch + g * head + (one.k0 + j) * row, n, wide, i);
    const int64_t page = pages[s * table_width + j / page_size];
    TORCH_CHECK_VALUE(0 <= page && page < num_pages, "page ", page, " is none of the ", num_pages, " pages");
    return stored.row(page * batch + g * head + j % page_size * row, n, wide, i);
  }
};

// Up to TILE queries of one head, from position `first` on, that are computed together: by the entries of their query
// tile, or over every key. Where few blocks walk over many keys, each part of the keys is a separate task.
struct Block {
  int64_t s, h, first;
  int rows;
  bool dense;
  int part, parts;
  int64_t place;  // of all parts of this block, the place of the first among the results kept
};

// Blocks fewer than this are cut into parts of at least MIN_PART tiles; neither depends on the number of threads.
constexpr int64_t FEW_BLOCKS = 64, MIN_PART = 2 * WALK;

// The tensors of an index and what goes with them, read once a call.
struct Index {
  Entries diagonals;
  Lists listed;
  Entries columns;
  std::vector<Sequence> sequences;
  int64_t dense_tail;  // last queries that see every key
  int64_t window, reach, heads;
  const float* skip = nullptr;  // of each (sequence, head) the log of its threshold

  float bound(int64_t s, int64_t h) const { return skip ? skip[s * heads + h] : NEG_INF; }

  // The first query of a head that sees every key, as a position; K if none does. A head whose diagonals have no gap
  // is dense from the first query on.
  int64_t dense_from(int64_t s, int64_t h) const {
    const Sequence& one = sequences[s];
    const int64_t far = std::min(one.tiles() - 1, reach);
    const bool gapless = diagonals.width > far && diagonals.row(s * heads + h)[far] == far;
    if (gapless && !(bound(s, h) > NEG_INF)) return one.offset();
    if (!dense_tail) return one.K;
    return std::max(std::max<int64_t>(one.K - dense_tail, 0) / TILE * TILE, one.offset());
  }

  // First and last key tile that queries [first, last] see where they see every key of their window.
  std::pair<int64_t, int64_t> dense_tiles(int64_t first, int64_t last) const {
    return {std::max<int64_t>(first - window + 1, 0) / TILE, last / TILE};
  }

  // Key tiles of a query tile that is not dense, a bit each, its own included.
  void hold(int64_t s, int64_t h, int64_t at, std::vector<uint64_t>& held) const {
    const int64_t i = s * heads + h, from = std::max<int64_t>(at - reach, 0);
    std::fill(held.begin(), held.begin() + at / 64 + 1, 0);
    const auto set = [&](int64_t t) { held[t / 64] |= uint64_t(1) << (t % 64); };
    set(at);
    // Unsigned, so that a negative entry of a broken index ends the list and writes nowhere.
    for (const int32_t *d = diagonals.row(i), *end = d + diagonals.width;
         d < end && static_cast<uint32_t>(*d) <= at - from; ++d)
      set(at - *d);
    const auto [begin, end] = listed.row(i, at - sequences[s].first_row());
    for (const int32_t* t = begin; t < end && static_cast<uint32_t>(*t) <= at; ++t)
      if (*t >= from) set(*t);
  }

  // All blocks, sequence by sequence and KV head by KV head, so that its panels are in the cache for its query heads;
  // the longest first, so that threads finish together. `parts` becomes the number of results kept.
  std::vector<Block> blocks(int64_t group, int64_t& parts) const {
    std::vector<Block> whole;
    for (int64_t s = 0; s < int64_t(sequences.size()); ++s)
      for (int64_t g = 0; g < heads / group; ++g) blocks_of(s, g * group, (g + 1) * group, whole);
    parts = 0;
    if (whole.size() >= FEW_BLOCKS) return whole;
    std::vector<Block> cut;
    for (const Block& block : whole) {
      const auto [from, to] = dense_tiles(block.first, block.first + block.rows - 1);
      const int64_t pieces = block.dense ? (to - from + 1) / MIN_PART : 1;
      const int64_t most = (FEW_BLOCKS + whole.size() - 1) / whole.size(), n = std::clamp<int64_t>(pieces, 1, most);
      for (int64_t part = 0; part < n; ++part) {
        cut.push_back(block);
        cut.back().part = part, cut.back().parts = n, cut.back().place = parts;
      }
      if (n > 1) parts += n;
    }
    return cut;
  }

 private:
  void blocks_of(int64_t s, int64_t h0, int64_t h1, std::vector<Block>& blocks) const {
    const Sequence& one = sequences[s];
    std::vector<int64_t> dense(h1 - h0);
    for (int64_t h = h0; h < h1; ++h) dense[h - h0] = dense_from(s, h);
    const int64_t begin = blocks.size();
    for (int64_t h = h0; h < h1; ++h) {
      for (int64_t first = dense[h - h0]; first < one.K; first += TILE)
        blocks.push_back({s, h, first, int(std::min<int64_t>(TILE, one.K - first)), true, 0, 1, 0});
      for (int64_t first = one.offset(); first < dense[h - h0]; first = (first / TILE + 1) * TILE)
        blocks.push_back({s, h, first, int(std::min((first / TILE + 1) * TILE, dense[h - h0]) - first), false, 0, 1, 0});
    }
    std::stable_sort(blocks.begin() + begin, blocks.end(),
                     [](const Block& a, const Block& b) { return a.dense > b.dense || (a.dense == b.dense && a.first > b.first); });
  }
};

}  // namespace headwise
