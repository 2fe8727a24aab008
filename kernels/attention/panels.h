// Panels of 64 keys and values, packed once a call in the order that the products read: those tiles of each KV head
// that some block wants, then the columns of each query head in groups. Those of 8 bits become T before.
//
// Shapes: S sequences, H query heads, G KV heads, K key length, D head dim, E value dim.
#pragma once

#include <ATen/Parallel.h>

#include "index.h"

namespace headwise {

template <class Engine, class T>
struct Panels {
  using elem = typename Engine::elem;
  int64_t k_size, v_size;
  std::vector<int64_t> tile_start;   // of each (sequence, KV head), into `slot`
  std::vector<int32_t> slot;         // panel of a key tile; -1 where no block wants it
  std::vector<int64_t> group_start;  // first panel of each (sequence, query head)'s columns
  std::vector<int64_t> count;        // columns of each (sequence, query head)
  int64_t most_groups = 0;
  std::unique_ptr<elem[], Free> k, v;

  Panels(const Index& index, const std::vector<Block>& blocks, const Keys<T>& ks, const Keys<T>& vs, int64_t G,
         int64_t D, int64_t E, int inner, int width)
      : k_size(inner * TILE), v_size(width * TILE) {
    const int64_t S = index.sequences.size(), H = index.heads, group = H / G;
    struct Source {
      int32_t s, g;
      int64_t tile;
      const int32_t* columns;
      int have;
    };
    std::vector<Source> sources;
    want(index, blocks, G);
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
      // Where every query sees every key no column is needed.
      const bool needed = index.dense_from(s, i % H) > index.sequences[s].offset();
      count.push_back(needed ? std::lower_bound(c, c + index.columns.width, std::min<int64_t>(K, PAD)) - c : 0);
      group_start.push_back(sources.size());
      for (int64_t c0 = 0; c0 < count[i]; c0 += TILE)
        sources.push_back({int32_t(s), int32_t(i % H / group), 0, c + c0, int(std::min<int64_t>(TILE, count[i] - c0))});
      most_groups = std::max<int64_t>(most_groups, sources.size() - group_start[i]);
    }
    k = allocate<elem>(sources.size() * k_size);
    v = allocate<elem>(sources.size() * v_size);
    const std::vector<T> zeros(std::max(D, E), T(0));
    at::parallel_for(0, sources.size(), 8, [&](int64_t from, int64_t to) {
      const T *k_rows[TILE], *v_rows[TILE];
      const auto wide = allocate<T>(ks.stored.eight() ? TILE * (D + E) : 0);
      for (int64_t panel = from; panel < to; ++panel) {
        const Source& source = sources[panel];
        const Sequence& one = index.sequences[source.s];
        for (int j = 0; j < source.have; ++j) {
          const int64_t key = source.columns ? source.columns[j] : source.tile * TILE + j;
          TORCH_CHECK_VALUE(0 <= key && key < one.K, "column ", key, " is none of the ", one.K, " keys");
          // The memory of keys behind the window of the first query may belong to another sequence by now.
          if (key <= one.offset() - index.window) {
            k_rows[j] = v_rows[j] = zeros.data();
            continue;
          }
          k_rows[j] = ks.at(one, source.s, source.g, key, D, wide.get(), j);
          v_rows[j] = vs.at(one, source.s, source.g, key, E, wide.get() + TILE * D, j);
        }
        pack_k<Engine>(k_rows, source.have, D, inner, k.get() + panel * k_size);
        pack_v<Engine>(v_rows, source.have, E, width, v.get() + panel * v_size);
      }
    });
  }

  template <class F>
  static void for_each_bit(const std::vector<uint64_t>& held, int64_t last, F f) {
    for (int64_t word = 0; word <= last / 64; ++word)
      for (uint64_t bits = held[word]; bits; bits &= bits - 1) f(word * 64 + __builtin_ctzll(bits));
  }

 private:
  // Marks the key tiles that some block wants. Where queries are as many as keys every tile is some block's own; a
  // chunk of new queries against a long cache may want few, and packing the others would cost more than attending.
  void want(const Index& index, const std::vector<Block>& blocks, int64_t G) {
    const int64_t S = index.sequences.size(), group = index.heads / G;
    int64_t total = 0;
    for (int64_t i = 0; i < S * G; ++i) {
      tile_start.push_back(total);
      total += index.sequences[i / G].tiles();
    }
    slot.assign(total, -1);
    std::vector<uint64_t> held;
    for (const Block& block : blocks) {
      const Sequence& one = index.sequences[block.s];
      int32_t* wanted = slot.data() + tile_start[block.s * G + block.h / group];
      const int64_t own = block.first / TILE;
      if (one.first_row() == 0) {
        wanted[own] = wanted[(block.first + block.rows - 1) / TILE] = 0;
      } else if (block.dense) {
        const auto [from, to] = index.dense_tiles(block.first, block.first + block.rows - 1);
        if (block.part == 0) std::fill(wanted + from, wanted + to + 1, 0);
      } else {
        held.resize((one.tiles() + 63) / 64);
        index.hold(block.s, block.h, own, held);
        for_each_bit(held, own, [&](int64_t t) { wanted[t] = 0; });
      }
    }
  }
};

}  // namespace headwise
