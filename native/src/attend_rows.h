// Decode attention over rows: K as [num_pages, kv_heads, page_tokens, head_dim], blocks of any size.
//
// A step takes a tile of kTile tokens and up to kQueryTile query heads that share the KV head:
//
//   scores   dot products q·k, 2^... base (q carries scale * log2(e))
//   softmax  online: running maximum and sum per query head
//   values   acc += weight * v
//
// Scores live in "lane groups": one vector register holds Q query heads x kTokens tokens, Q * kTokens =
// lanes:
//
//   lane  0 .. kTokens-1   query 0, tokens t .. t+kTokens-1
//         kTokens ..       query 1, the same tokens            and so on,
//
// so that the running maximum is one register, exponentials waste no lane, and `lanes` dot products are
// summed across in one transposing reduction. K and V are converted to fp32 once per tile of query heads.
#pragma once

#include "simd_common.h"

namespace neo_desktop {
namespace {

constexpr int kTile = 32;  // tokens

// Locations of the first head's rows for a tile's tokens. Rows may be anywhere: blocks of any size work.
template <class T>
struct Tile {
  const T* k[kTile];
  const T* v[kTile];
};

// The rows of one head in a tile.
template <class T>
struct Rows {
  const Tile<T>* tile;
  int64_t k_offset;  // elements from the first head's row to this head's
  int64_t v_offset;
};

// Walks a block table from token `begin` on, tile by tile. Never reads an entry past the last token's.
template <class T>
class RowWalker {
 public:
  explicit RowWalker(const AttendTask& task) : task_(task), next_(task.begin), tokens_(task, task.begin) {}

  // Fills in the next tile and returns its number of tokens, 0 at the end. Rows past the last token repeat
  // it.
  int next(Tile<T>& tile) {
    const int count = smaller(task_.end - next_, kTile);
    int filled = 0;
    while (filled < count) {
      const TokenWalker::Place place = tokens_.next();
      const int run = smaller(place.tokens, count - filled);
      const T* k =
          static_cast<const T*>(task_.k) + place.page * task_.k_page_stride + place.row * task_.head_dim;
      const T* v =
          static_cast<const T*>(task_.v) + place.page * task_.v_page_stride + place.row * task_.head_dim;
      for (int i = 0; i < run; ++i, k += task_.head_dim, v += task_.head_dim) {
        tile.k[filled + i] = k;
        tile.v[filled + i] = v;
      }
      filled += run;
      tokens_.skip(run);
    }
    if (count > 0) {
      for (int i = count; i < kTile; ++i) {
        tile.k[i] = tile.k[count - 1];
        tile.v[i] = tile.v[count - 1];
      }
    }
    next_ += count;
    return count;
  }

 private:
  const AttendTask& task_;
  int64_t next_;
  TokenWalker tokens_;
};

// Calls body(column, load) for every vector of a row; the last may be half a vector (head_dim % 16 == 8).
template <class V, class T, class Body>
inline void for_each_vector(int head_dim, Body body) {
  int column = 0;
  for (; column + V::kLanes <= head_dim; column += V::kLanes) {
    body(column, [](const T* p) { return V::load(p); });
  }
  if constexpr (V::kLanes > 8) {
    if (column < head_dim) body(column, [](const T* p) { return V::load_half(p); });
  }
}

template <class V, class T, int Q>
class Step {
  using Reg = typename V::Reg;
  static constexpr int kTokens = V::kLanes / Q;
  static constexpr int kGroups = kTile / kTokens;  // lane groups per tile

 public:
  // `lanes` holds the running maximum and sum of these query heads, one register each.
  static void run(const AttendTask& task, const Rows<T>& rows, const Rows<T>& ahead, int count,
                  const float* q, float* lanes, float* acc) {
    alignas(64) float weights[kGroups * V::kLanes];
    const int groups = (count + kTokens - 1) / kTokens;
    scores(task, rows, ahead, groups, q, weights);
    if (task.softcap > 0) cap_scores<V>(task.softcap, weights, groups * V::kLanes);
    softmax(task, groups, count, weights, lanes, acc);
    add_values<V::kLanes / Q>(task, 0, rows, ahead, count, weights, acc);
  }

  // Reduces the lanes per query head to one maximum and one sum.
  static void finish(const float* lanes, int queries, float* max, float* sum) {
    for (int g = 0; g < queries; ++g) {
      max[g] = lanes[g * kTokens];
      sum[g] = 0;
      for (int t = 0; t < kTokens; ++t) sum[g] += lanes[kMaxLanes + g * kTokens + t];
    }
  }

 private:
  static void scores(const AttendTask& task, const Rows<T>& rows, const Rows<T>& ahead, int groups,
                     const float* q, float* out) {
    const int64_t q_stride = task.padded_head_dim;
    for (int n = 0; n < groups; ++n) {
      const T* const* keys = rows.tile->k + n * kTokens;
      const T* const* next_keys = ahead.tile->k + n * kTokens;
      Reg sums[V::kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < V::kLanes; ++i) sums[i] = V::zero();
      for_each_vector<V, T>(task.head_dim, [&](int column, auto load) {
        Reg k[kTokens];
#pragma GCC unroll 16
        for (int t = 0; t < kTokens; ++t) {
          prefetch<V::kLanes>(next_keys[t] + ahead.k_offset, column);
          k[t] = load(keys[t] + rows.k_offset + column);
        }
#pragma GCC unroll 8
        for (int g = 0; g < Q; ++g) {
          const Reg query = V::load(q + g * q_stride + column);
#pragma GCC unroll 16
          for (int t = 0; t < kTokens; ++t) {
            sums[g * kTokens + t] = V::multiply_add(k[t], query, sums[g * kTokens + t]);
          }
        }
      });
      V::store(out + n * V::kLanes, V::sum_each(sums));
    }
  }

  static void softmax(const AttendTask& task, int groups, int count, float* weights, float* lanes,
                      float* acc) {
    const float infinity = __builtin_inff();
    for (int t = count; t < groups * kTokens; ++t) {
      for (int g = 0; g < Q; ++g) weights[weight_index(g, t)] = -infinity;
    }
    const Reg old_max = V::load(lanes);
    Reg max = old_max;
    for (int n = 0; n < groups; ++n) max = V::max(V::load(weights + n * V::kLanes), max);
    max = V::template max_within<kTokens>(max);
    Reg sum = V::load(lanes + kMaxLanes);
    if (V::any_differs(max, old_max)) {
      alignas(64) float correction[V::kLanes];
      const Reg factor = V::exp2(V::subtract(old_max, max));
      V::store(correction, factor);
      V::store(lanes, max);
      sum = V::multiply(sum, factor);
      for (int g = 0; g < Q; ++g) {
        float* row = acc + g * task.padded_head_dim;
        const Reg scale = V::broadcast(correction[g * kTokens]);
        for (int i = 0; i < task.padded_head_dim; i += V::kLanes) {
          V::store(row + i, V::multiply(V::load(row + i), scale));
        }
      }
    }
    for (int n = 0; n < groups; ++n) {
      const Reg weight = V::exp2(V::subtract(V::load(weights + n * V::kLanes), max));
      V::store(weights + n * V::kLanes, weight);
      sum = V::add(sum, weight);
    }
    V::store(lanes + kMaxLanes, sum);
  }

  // Adds the weighted values to the accumulators from `column` on, W vectors of Q heads at a time; the rest
  // of the row uses half the width.
  template <int W>
  static void add_values(const AttendTask& task, int column, const Rows<T>& rows, const Rows<T>& ahead,
                         int count, const float* weights, float* acc) {
    for (; column + W * V::kLanes <= task.head_dim; column += W * V::kLanes) {
      add_columns<W>(task, column, rows, ahead, count, weights, acc, [](const T* p) { return V::load(p); });
    }
    if (column == task.head_dim) return;
    if constexpr (W > 1) {
      add_values<W / 2>(task, column, rows, ahead, count, weights, acc);
    } else if constexpr (V::kLanes > 8) {
      add_columns<1>(task, column, rows, ahead, count, weights, acc,
                     [](const T* p) { return V::load_half(p); });
    }
  }

  template <int W, class Load>
  static void add_columns(const AttendTask& task, int column, const Rows<T>& rows, const Rows<T>& ahead,
                          int count, const float* weights, float* acc, Load load) {
    acc += column;
    Reg sums[Q * W];
#pragma GCC unroll 8
    for (int g = 0; g < Q; ++g) {
#pragma GCC unroll 16
      for (int w = 0; w < W; ++w) sums[g * W + w] = V::load(acc + g * task.padded_head_dim + w * V::kLanes);
    }
    for (int t = 0; t < count; ++t) {
      prefetch<W * V::kLanes>(ahead.tile->v[t] + ahead.v_offset, column);
      const T* row = rows.tile->v[t] + rows.v_offset + column;
      Reg v[W];
#pragma GCC unroll 16
      for (int w = 0; w < W; ++w) v[w] = load(row + w * V::kLanes);
#pragma GCC unroll 8
      for (int g = 0; g < Q; ++g) {
        const Reg weight = V::broadcast(weights[weight_index(g, t)]);
#pragma GCC unroll 16
        for (int w = 0; w < W; ++w) sums[g * W + w] = V::multiply_add(v[w], weight, sums[g * W + w]);
      }
    }
#pragma GCC unroll 8
    for (int g = 0; g < Q; ++g) {
#pragma GCC unroll 16
      for (int w = 0; w < W; ++w) V::store(acc + g * task.padded_head_dim + w * V::kLanes, sums[g * W + w]);
    }
  }

  static int weight_index(int g, int t) { return t / kTokens * V::kLanes + g * kTokens + t % kTokens; }
};

template <class V, class T>
void attend_rows(const AttendTask& task) {
  const int64_t acc_length =
      static_cast<int64_t>(task.kv_heads) * task.rows * task.padded_group * task.padded_head_dim;
  for (int64_t i = 0; i < acc_length; i += V::kLanes) V::store(task.acc + i, V::zero());
  for (int head = 0; head < task.kv_heads; ++head) {
    for_each_query_tile(task, head, [&](const QueryTile& queries) {
      V::store(queries.state, V::broadcast(-__builtin_inff()));
      V::store(queries.state + kMaxLanes, V::zero());
    });
  }
  RowWalker<T> walker(task);
  Tile<T> tiles[2];
  int current = 0;
  int count = walker.next(tiles[0]);
  for (int64_t begin = task.begin; count > 0; begin += kTile) {
    const int next_count = walker.next(tiles[1 - current]);
    // The heads of a page are adjacent: memory is read in order until the page ends.
    for (int head = 0; head < task.kv_heads; ++head) {
      const Rows<T> rows{&tiles[current], head * task.k_head_stride, head * task.v_head_stride};
      Rows<T> ahead = rows;
      if (head + 1 < task.kv_heads) {
        ahead.k_offset += task.k_head_stride;
        ahead.v_offset += task.v_head_stride;
      } else if (next_count > 0) {
        ahead = {&tiles[1 - current], 0, 0};
      }
      for_each_query_tile(task, head, [&](const QueryTile& queries) {
        if (queries.end <= begin) return;
        const int own_count = smaller(queries.end - begin, count);
        with_heads(queries.left, [&](auto heads) {
          Step<V, T, heads.value>::run(task, rows, ahead, own_count, queries.q, queries.state, queries.acc);
        });
      });
    }
    current = 1 - current;
    count = next_count;
  }
  for (int head = 0; head < task.kv_heads; ++head) {
    for_each_query_tile(task, head, [&](const QueryTile& queries) {
      with_heads(queries.left, [&](auto heads) {
        Step<V, T, heads.value>::finish(queries.state, smaller(queries.left, kQueryTile), queries.max,
                                        queries.sum);
      });
    });
  }
}

}  // namespace
}  // namespace neo_desktop
