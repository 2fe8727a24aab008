// What caches that keep tokens by their scores need on the CPU. Compiled by kernels/native/build.py.
//
// Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
//
// Causal attention of many queries that also adds up each key's probabilities. As in attention/cpu.cpp a task is one
// tile of queries of one head, which walks its panels of 64 keys with the running maximum of online softmax. It keeps
// its unnormalised probabilities, TILE x K, until their maximum and sum are known, and adds up their columns then.
// Sums are whole numbers, so that they are the same whatever thread adds what first.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <vector>

#include "../native/engines.h"

namespace {

using namespace headwise;

// The integer of a probability of 1; 2^26 queries fit.
constexpr float ONE = static_cast<float>(int64_t(1) << 36);
// Keys of a walk.
constexpr int LD = TILE * WALK;

template <class Engine, class T>
void run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Softmax how, at::Tensor& out, at::Tensor& lse,
         at::Tensor& scores) {
  using elem = typename Engine::elem;
  const int64_t B = q.size(0), H = q.size(1), Q = q.size(2), D = q.size(3), G = k.size(1), K = k.size(2), E = v.size(3);
  const int64_t group = H / G, offset = K - Q, tiles = (K + TILE - 1) / TILE, first_row = offset / TILE;
  const int64_t rows = tiles - first_row, walks = (tiles + WALK - 1) / WALK, padded = walks * LD;
  const int inner = round_up(D, Engine::INNER), width = round_up(E, LANES);
  const Strided<T> qs(q), ks(k), vs(v), os(out);
  const int64_t k_size = inner * TILE, v_size = width * TILE;
  const float factor = how.factor();
  const Exp2<Engine::TERMS> exp2(factor);

  const auto k_panels = allocate<elem>(B * G * tiles * k_size), v_panels = allocate<elem>(B * G * tiles * v_size);
  at::parallel_for(0, B * G * tiles, 8, [&](int64_t from, int64_t to) {
    const T *k_rows[TILE], *v_rows[TILE];
    for (int64_t panel = from; panel < to; ++panel) {
      const int64_t head = panel / tiles, first = panel % tiles * TILE;
      const int have = std::min<int64_t>(TILE, K - first);
      for (int j = 0; j < have; ++j)
        k_rows[j] = ks.at(head / G, head % G, first + j), v_rows[j] = vs.at(head / G, head % G, first + j);
      pack_k<Engine>(k_rows, have, D, inner, k_panels.get() + panel * k_size);
      pack_v<Engine>(v_rows, have, E, width, v_panels.get() + panel * v_size);
    }
  });

  struct Scratch {
    std::unique_ptr<elem[], Free> q, p;
    std::unique_ptr<float[], Free> s, o;
    std::vector<float> tops;      // of each walk and row, the maximum that its probabilities are relative to
    std::vector<int64_t> sums;    // B x G x padded
  };

  const auto task = [&](Scratch& w, int64_t b, int64_t h, int64_t at) {
    const int64_t head = b * G + h / group;
    const elem *k_at = k_panels.get() + head * tiles * k_size, *v_at = v_panels.get() + head * tiles * v_size;
    // Query rows of the tile that exist; the others are computed on zeros and dropped.
    const int lo = std::max<int64_t>(offset - at * TILE, 0), hi = std::min<int64_t>(K - at * TILE, TILE);
    std::fill(w.q.get(), w.q.get() + TILE * inner, elem(0));
    for (int r = lo; r < hi; ++r) copy(qs.at(b, h, at * TILE + r - offset), D, w.q.get() + r * inner);
    float top[TILE], total[TILE];
    std::fill(top, top + TILE, NEG_INF);
    std::fill(total, total + TILE, 0.0f);
    std::fill(w.o.get(), w.o.get() + TILE * width, 0.0f);
    for (int64_t t0 = 0; t0 <= at; t0 += WALK) {
      const int step = std::min<int64_t>(WALK, at + 1 - t0), n = step * TILE;
      float* const block = w.s.get() + t0 * TILE * TILE;
      const elem* values[WALK];
      for (int t = 0; t < step; ++t) {
        Engine::qk(w.q.get(), TILE, inner, k_at + (t0 + t) * k_size, block + t * TILE, LD);
        values[t] = v_at + (t0 + t) * v_size;
      }
      for (int r = lo; r < hi; ++r) {
        float* s = block + r * LD;
        if (how.softcap > 0) cap(s, n, how);
        if (t0 + step > at) std::fill(s + n - TILE + r + 1, s + n, NEG_INF);
        float* o = w.o.get() + r * width;
        const float rescale = rebase(largest(s, n), factor, top[r]);
        total[r] = total[r] * rescale + weigh<Engine::TERMS, true>(s, w.p.get() + r * LD, n, exp2, top[r]);
        w.tops[t0 / WALK * TILE + r] = top[r];
        if (rescale != 1.0f)
          for (int e = 0; e < width; e += LANES) store(o + e, load(o + e) * rescale);
      }
      Engine::pv(w.p.get(), TILE, LD, values, step, width, w.o.get());
    }
    for (int r = lo; r < hi; ++r) {
      copy(w.o.get() + r * width, E, 1.0f / total[r], const_cast<T*>(os.at(b, h, at * TILE + r - offset)));
      lse.mutable_data_ptr<float>()[(b * H + h) * Q + at * TILE + r - offset] =
          top[r] * how.to_logit() + std::log(total[r]);
    }
    for (int64_t t0 = 0; t0 <= at; t0 += WALK) {
      const int n = std::min<int64_t>(WALK, at + 1 - t0) * TILE;
      const float* const block = w.s.get() + t0 * TILE * TILE;
      float weights[TILE];
      for (int r = lo; r < hi; ++r)
        weights[r] = std::exp2((w.tops[t0 / WALK * TILE + r] - top[r]) * factor) / total[r];
      int64_t* const to = w.sums.data() + head * padded + t0 * TILE;
      for (int j = 0; j < n; j += 4 * LANES) {
        vf columns[4] = {};
        for (int r = lo; r < hi; ++r)
          for (int i = 0; i < 4; ++i) columns[i] += load(block + r * LD + j + i * LANES) * weights[r];
        float found[4 * LANES];
        for (int i = 0; i < 4; ++i) store(found + i * LANES, columns[i] * ONE);
        for (int i = 0; i < 4 * LANES; ++i) to[j + i] += static_cast<int64_t>(found[i]);
      }
    }
  };

  std::vector<int64_t> sums(B * G * padded, 0);
  std::mutex adding;
  std::atomic<int64_t> next{0};
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    Scratch w{allocate<elem>(TILE * inner), allocate<elem>(TILE * LD), allocate<float>(TILE * padded),
              allocate<float>(TILE * width), std::vector<float>(walks * TILE), std::vector<int64_t>(sums.size(), 0)};
    const InUse<Engine> engine;
    // Rows of a tile that are no queries are multiplied, too.
    std::fill(w.p.get(), w.p.get() + TILE * LD, elem(0));
    // The longest rows first, so that threads finish together; the query heads of a KV head side by side.
    for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < B * H * rows;)
      task(w, t / H % B, t % H, tiles - 1 - t / (B * H));
    const std::lock_guard<std::mutex> lock(adding);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += w.sums[i];
  });
  float* const to = scores.mutable_data_ptr<float>();
  for (int64_t i = 0; i < B * G * K; ++i) to[i] = static_cast<float>(sums[i / K * padded + i % K]) / ONE;
}

template <class T>
void run_for(const std::string& engine, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Softmax how,
             at::Tensor& out, at::Tensor& lse, at::Tensor& scores) {
  with_engine<T>(engine, [&](auto with) { run<decltype(with), T>(q, k, v, how, out, lse, scores); });
}

// See kernels.decode.cpu.with_sums.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_with_sums(const at::Tensor& q, const at::Tensor& k,
                                                                   const at::Tensor& v, double scale, double softcap,
                                                                   std::string engine) {
  at::Tensor out = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
  at::Tensor lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  at::Tensor scores = at::empty({k.size(0), k.size(1), k.size(2)}, q.options().dtype(at::kFloat));
  const Softmax how{static_cast<float>(scale), static_cast<float>(softcap)};
  switch (q.scalar_type()) {
    case at::kFloat: run_for<float>(engine, q, k, v, how, out, lse, scores); break;
    case at::kHalf: run_for<at::Half>(engine, q, k, v, how, out, lse, scores); break;
    case at::kBFloat16: run_for<at::BFloat16>(engine, q, k, v, how, out, lse, scores); break;
    default: TORCH_CHECK_VALUE(false, "dtype ", q.scalar_type(), " is not served");
  }
  return {out, lse, scores};
}

// See kernels.decode.dropping.drop_lowest. Without queries scores stay as they are.
void drop_lowest(at::Tensor keys, at::Tensor values, at::Tensor scores, at::Tensor positions, at::IntArrayRef all_rows,
                 at::IntArrayRef all_latest, at::IntArrayRef all_queries) {
  const int64_t kv_heads = scores.size(1), heads = scores.size(0) * kv_heads, room = scores.size(2);
  float* const score = scores.mutable_data_ptr<float>();
  int32_t* const position = positions.mutable_data_ptr<int32_t>();
  char *const k = static_cast<char*>(keys.mutable_data_ptr()), *const v = static_cast<char*>(values.mutable_data_ptr());
  const int64_t k_row = keys.size(3) * keys.element_size(), v_row = values.size(3) * values.element_size();
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t sequence = head / kv_heads, rows = all_rows[sequence], latest = all_latest[sequence];
    const int64_t queries = all_queries.empty() ? 0 : all_queries[sequence];
    if (!rows) continue;
    float *s = score + head * room, lowest = -NEG_INF;
    int32_t* p = position + head * room;
    int64_t victim = rows - 1;
    for (int64_t i = 0; i < rows; ++i) {
      const float rank = p[i] >= latest ? -NEG_INF : queries ? s[i] / static_cast<float>(queries - p[i]) : s[i];
      if (rank < lowest) lowest = rank, victim = i;
    }
    if (victim == rows - 1) continue;
    const int64_t last = head * room + rows - 1, to = head * room + victim;
    s[victim] = s[rows - 1], p[victim] = p[rows - 1];
    std::memcpy(k + to * k_row, k + last * k_row, k_row);
    std::memcpy(v + to * v_row, v + last * v_row, v_row);
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(headwise, m) {
  m.def("attention_with_sums(Tensor q, Tensor k, Tensor v, float scale, float softcap, str engine) "
        "-> (Tensor, Tensor, Tensor)");
  m.def("drop_lowest(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) scores, Tensor(d!) positions, "
        "int[] rows, int[] latest, int[] queries) -> ()");
}

TORCH_LIBRARY_IMPL(headwise, CPU, m) {
  m.impl("attention_with_sums", &attention_with_sums);
  m.impl("drop_lowest", &drop_lowest);
}
