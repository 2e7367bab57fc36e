// Decode attention over dimension pairs: K as [num_pages, kv_heads, head_dim / 2, page_tokens, 2].
//
// The keys of 16 tokens (a segment) lie side by side, two dimensions of each at a time:
//
//   d0 d1 of token 0, d0 d1 of token 1, ... d0 d1 of token 15      one cache line of fp16
//   d2 d3 of token 0, d2 d3 of token 1, ...                        the next one, page_tokens * 2 further on
//
// so that every lane of a vector belongs to one token. A dot product then needs no sum across lanes, which
// costs as much as the multiplications where several query heads share a KV head; and two dimensions at a
// time is what the dot-product instructions of bf16 take. V stays in rows.
//
// A step takes a tile of kSegments segments and up to kQueryTile query heads. Segments may lie anywhere, but
// where they are neighbours in a page, as the engine lays them, memory is read in longer pieces:
//
//   scores   q·k of every token and head, in 2^... base
//   softmax  online: running maximum (the same in all lanes) and sum (per lane) of each head
//   values   acc += weight * v
//
// How the products are made is the business of a class M; PairMath below does it in fp32, for any V.
#pragma once

#include "simd_common.h"

namespace neo_desktop {
namespace {

constexpr int kSegments = 4;
constexpr int kPairTile = kSegments * kSegmentTokens;  // tokens

// Below every score, but so that differences of two scores stay finite.
constexpr float kLowest = -0x1p127f;

// Where one KV head's share of a tile lies, and that of the tile that is read next.
template <class T>
struct PairTile {
  const T* k[kSegments];
  const T* v[kSegments];
  const T* k_ahead[kSegments];
  const T* v_ahead[kSegments];
  const float* k_scale[kSegments];  // of int8, else unused
  const float* v_scale[kSegments];
  int64_t pair_stride;  // elements of K from one pair of dimensions to the next
  int first;            // tokens [first, count) are attended to
  int count;
};

// The first head's segments of a tile. Segments past the last token repeat it.
template <class T>
struct Segments {
  const T* k[kSegments];
  const T* v[kSegments];
  int64_t scale[kSegments];
  int first;
  int count;  // 0: there are no more
};

// Walks a block table from the segment of token `begin` on, tile by tile.
template <class T>
class SegmentWalker {
 public:
  explicit SegmentWalker(const AttendTask& task)
      : task_(task),
        next_(task.begin / kSegmentTokens * kSegmentTokens),
        tokens_(task, task.begin / kSegmentTokens * kSegmentTokens) {}

  void next(Segments<T>& tile) {
    tile.first = smaller(task_.begin > next_ ? task_.begin - next_ : 0, kSegmentTokens);
    tile.count = task_.end > next_ ? smaller(task_.end - next_, kPairTile) : 0;
    for (int s = 0; s < kSegments; ++s) {
      if (s * kSegmentTokens < tile.count) {
        const TokenWalker::Place place = tokens_.next();
        tile.k[s] = static_cast<const T*>(task_.k) + place.page * task_.k_page_stride + place.row * 2;
        tile.v[s] =
            static_cast<const T*>(task_.v) + place.page * task_.v_page_stride + place.row * task_.head_dim;
        tile.scale[s] = place.page * task_.scale_page_stride + place.row;
        tokens_.skip(kSegmentTokens);
      } else if (s > 0) {
        tile.k[s] = tile.k[s - 1];
        tile.v[s] = tile.v[s - 1];
        tile.scale[s] = tile.scale[s - 1];
      }
    }
    next_ += kPairTile;
  }

 private:
  const AttendTask& task_;
  int64_t next_;
  TokenWalker tokens_;
};

// Products in fp32.
template <class V, class Element>
struct PairMath {
  using Vector = V;
  using T = Element;
  using Reg = typename V::Reg;
  static constexpr int kVectorTokens = V::kLanes / 2;
  static constexpr int kSegmentVectors = kSegmentTokens / kVectorTokens;

  // out[g][t] = q[g] · k[t] for Q heads, t up to the tile's count rounded up to whole segments.
  template <int Q>
  static void scores(const AttendTask& task, const PairTile<T>& tile, const QueryTile& queries, float* out) {
    constexpr int heads = Q < V::kHeadsAtOnce ? Q : V::kHeadsAtOnce;
    constexpr int vectors = smaller_of(V::kSums / heads, kSegments * kSegmentVectors);
    for (int n = 0; n * kVectorTokens < tile.count; n += vectors) {
      for (int g = 0; g < Q; g += heads) {
        add_keys<heads, vectors, Q / heads>(task, tile, n, g / heads, queries.q + g * task.padded_head_dim,
                                            out + g * kPairTile);
      }
    }
  }

  // acc[g] += sum over t of weights[g][t] * v[t] for Q heads.
  template <int Q>
  static void values(const AttendTask& task, const PairTile<T>& tile, const float* weights, float* acc) {
    constexpr int heads = Q < V::kValueHeads ? Q : V::kValueHeads;
    for (int g = 0; g < Q; g += heads) {
      add_values<heads, V::kSums / heads, Q / heads>(task, tile, 0, g / heads, weights + g * kPairTile,
                                                     acc + g * task.padded_head_dim);
    }
  }

 private:
  static constexpr int smaller_of(int a, int b) { return a < b ? a : b; }

  // Where heads take several passes over the same tile, each asks for its share of the next one: a processor
  // drops what is asked for faster than memory can deliver, on Zen 5 beyond some 64 lines under way.
  template <int heads, int vectors, int passes>
  static void add_keys(const AttendTask& task, const PairTile<T>& tile, int n, int pass, const float* q,
                       float* out) {
    constexpr int segments = vectors < kSegmentVectors ? 1 : vectors / kSegmentVectors;
    const int within = n % kSegmentVectors * V::kLanes;
    const T* keys[segments];
    const T* ahead[segments];
    for (int s = 0; s < segments; ++s) {
      keys[s] = tile.k[n / kSegmentVectors + s] + within;
      ahead[s] = tile.k_ahead[n / kSegmentVectors + s] + within;
    }
    Reg sums[heads * vectors];
#pragma GCC unroll 16
    for (int i = 0; i < heads * vectors; ++i) sums[i] = V::zero();
#pragma GCC unroll 1
    for (int d = 0; d < task.head_dim; d += 2) {
      Reg k[vectors];
#pragma GCC unroll 16
      for (int i = 0; i < vectors; ++i) {
        k[i] = V::load(keys[i / kSegmentVectors] + i % kSegmentVectors * V::kLanes);
      }
#pragma GCC unroll 4
      for (int s = 0; s < segments; ++s) {
        if (passes > segments || s % passes == pass) prefetch<vectors / segments * V::kLanes>(ahead[s], 0);
        keys[s] += tile.pair_stride;
        ahead[s] += tile.pair_stride;
      }
#pragma GCC unroll 8
      for (int g = 0; g < heads; ++g) {
        const Reg query = V::broadcast_pair(q + g * task.padded_head_dim + d);
#pragma GCC unroll 16
        for (int i = 0; i < vectors; ++i) {
          sums[g * vectors + i] = V::multiply_add(k[i], query, sums[g * vectors + i]);
        }
      }
    }
#pragma GCC unroll 8
    for (int g = 0; g < heads; ++g) {
#pragma GCC unroll 8
      for (int i = 0; i < vectors; i += 2) {
        const Reg pair_sums = V::add_pairs(sums[g * vectors + i], sums[g * vectors + i + 1]);
        V::store(out + g * kPairTile + (n + i) * kVectorTokens, pair_sums);
      }
    }
  }

  // From `column` on, W vectors of a row at a time; what is left of the row is done with half the width.
  template <int heads, int W, int passes>
  static void add_values(const AttendTask& task, const PairTile<T>& tile, int column, int pass,
                         const float* weights, float* acc) {
    for (; column + W * V::kLanes <= task.head_dim; column += W * V::kLanes) {
      add_columns<heads, W, passes>(task, tile, column, pass, weights, acc,
                                    [](const T* p) { return V::load(p); });
    }
    if (column == task.head_dim) return;
    if constexpr (W > 1) {
      add_values<heads, W / 2, passes>(task, tile, column, pass, weights, acc);
    } else if constexpr (V::kLanes > 8) {
      add_columns<heads, 1, passes>(task, tile, column, pass, weights, acc,
                                    [](const T* p) { return V::load_half(p); });
    }
  }

  template <int heads, int W, int passes, class Load>
  static void add_columns(const AttendTask& task, const PairTile<T>& tile, int column, int pass,
                          const float* weights, float* acc, Load load) {
    constexpr int kShare = W * V::kLanes / passes;
    acc += column;
    Reg sums[heads * W];
#pragma GCC unroll 8
    for (int g = 0; g < heads; ++g) {
#pragma GCC unroll 16
      for (int w = 0; w < W; ++w) sums[g * W + w] = V::load(acc + g * task.padded_head_dim + w * V::kLanes);
    }
    int token = tile.first;
    for (int s = 0; s * kSegmentTokens < tile.count;) {
      const int64_t skip = static_cast<int64_t>(token - s * kSegmentTokens) * task.head_dim + column;
      const T* row = tile.v[s] + skip;
      const T* ahead = tile.v_ahead[s] + skip;
      // Segments of one page lie one after the other: long loops end in fewer mispredicted branches.
      const T* begin = tile.v[s];
      do {
        begin += kSegmentTokens * task.head_dim;
        ++s;
      } while (s * kSegmentTokens < tile.count && tile.v[s] == begin);
      const int end = smaller(tile.count, s * kSegmentTokens);
#pragma GCC unroll 1
      for (; token < end; ++token) {
        prefetch<kShare>(ahead + pass * kShare, 0);
        Reg v[W];
#pragma GCC unroll 16
        for (int w = 0; w < W; ++w) v[w] = load(row + w * V::kLanes);
#pragma GCC unroll 8
        for (int g = 0; g < heads; ++g) {
          const Reg weight = V::broadcast(weights[g * kPairTile + token]);
#pragma GCC unroll 16
          for (int w = 0; w < W; ++w) sums[g * W + w] = V::multiply_add(v[w], weight, sums[g * W + w]);
        }
        row += task.head_dim;
        ahead += task.head_dim;
      }
    }
#pragma GCC unroll 8
    for (int g = 0; g < heads; ++g) {
#pragma GCC unroll 16
      for (int w = 0; w < W; ++w) V::store(acc + g * task.padded_head_dim + w * V::kLanes, sums[g * W + w]);
    }
  }
};

// One tile of one KV head for Q query heads.
template <class M, int Q>
class PairStep {
  using V = typename M::Vector;
  using T = typename M::T;
  using Reg = typename V::Reg;
  static constexpr bool kScaled = sizeof(T) == 1;

 public:
  static void start(float* state) {
    for (int g = 0; g < Q; ++g) {
      V::store(max_of(state, g), V::broadcast(kLowest));
      V::store(sum_of(state, g), V::zero());
    }
  }

  static void run(const AttendTask& task, const PairTile<T>& tile, const QueryTile& queries) {
    alignas(64) float weights[Q * kPairTile];
    M::template scores<Q>(task, tile, queries, weights);
    if constexpr (kScaled) multiply(tile.k_scale, tile.count, weights);
    if (tile.first > 0 || tile.count < kPairTile) mask(tile, kLowest, weights);
    softmax(task, weights, queries.state, queries.acc);
    if constexpr (kScaled) {
      multiply(tile.v_scale, tile.count, weights);
      if (tile.first > 0 || tile.count < kPairTile) mask(tile, 0, weights);
    }
    M::template values<Q>(task, tile, weights, queries.acc);
  }

  static void finish(const QueryTile& queries) {
    for (int g = 0; g < smaller(queries.left, Q); ++g) {
      queries.max[g] = max_of(queries.state, g)[0];
      queries.sum[g] = 0;
      for (int i = 0; i < V::kLanes; ++i) queries.sum[g] += sum_of(queries.state, g)[i];
    }
  }

 private:
  static float* max_of(float* state, int g) { return state + g * 2 * kMaxLanes; }
  static float* sum_of(float* state, int g) { return state + g * 2 * kMaxLanes + kMaxLanes; }

  static void multiply(const float* const* scales, int count, float* weights) {
    for (int s = 0; s * kSegmentTokens < count; ++s) {
      for (int i = 0; i < kSegmentTokens; i += V::kLanes) {
        const Reg scale = V::load(scales[s] + i);
        for (int g = 0; g < Q; ++g) {
          float* at = weights + g * kPairTile + s * kSegmentTokens + i;
          V::store(at, V::multiply(V::load(at), scale));
        }
      }
    }
  }

  // Tokens that are not attended to may hold anything: their scores are replaced, and what a scale that is
  // not a number has made of their weights.
  static void mask(const PairTile<T>& tile, float value, float* weights) {
    for (int g = 0; g < Q; ++g) {
      for (int t = 0; t < tile.first; ++t) weights[g * kPairTile + t] = value;
      for (int t = tile.count; t < kPairTile; ++t) weights[g * kPairTile + t] = value;
    }
  }

  static void softmax(const AttendTask& task, float* weights, float* state, float* acc) {
    bool greater = false;
    for (int g = 0; g < Q; ++g) {
      greater |= V::any_greater(tile_max(weights + g * kPairTile), V::load(max_of(state, g)));
    }
    if (greater) {  // seldom, after a request's first tiles
      for (int g = 0; g < Q; ++g) raise_max(task, tile_max(weights + g * kPairTile), state, acc, g);
    }
    for (int g = 0; g < Q; ++g) {
      const Reg max = V::load(max_of(state, g));
      Reg sum = V::load(sum_of(state, g));
#pragma GCC unroll 16
      for (int i = 0; i < kPairTile; i += V::kLanes) {
        float* at = weights + g * kPairTile + i;
        const Reg weight = V::exp2(V::subtract(V::load(at), max));
        V::store(at, weight);
        sum = V::add(sum, weight);
      }
      V::store(sum_of(state, g), sum);
    }
  }

  static Reg tile_max(const float* scores) {
    Reg max = V::load(scores);
#pragma GCC unroll 16
    for (int i = V::kLanes; i < kPairTile; i += V::kLanes) max = V::max(V::load(scores + i), max);
    return max;
  }

  static void raise_max(const AttendTask& task, Reg candidate, float* state, float* acc, int g) {
    const Reg old = V::load(max_of(state, g));
    const Reg max = V::template max_within<V::kLanes>(V::max(candidate, old));
    const Reg factor = V::exp2(V::subtract(old, max));
    V::store(max_of(state, g), max);
    V::store(sum_of(state, g), V::multiply(V::load(sum_of(state, g)), factor));
    float* row = acc + g * task.padded_head_dim;
    for (int i = 0; i < task.padded_head_dim; i += V::kLanes) {
      V::store(row + i, V::multiply(V::load(row + i), factor));
    }
  }
};

template <class M>
void attend_pairs(const AttendTask& task) {
  using V = typename M::Vector;
  using T = typename M::T;
  const int64_t acc_length = static_cast<int64_t>(task.kv_heads) * task.padded_group * task.padded_head_dim;
  for (int64_t i = 0; i < acc_length; i += V::kLanes) V::store(task.acc + i, V::zero());
  for (int head = 0; head < task.kv_heads; ++head) {
    for_each_query_tile(task, head, [&](const QueryTile& queries) {
      with_heads(queries.left, [&](auto heads) { PairStep<M, heads.value>::start(queries.state); });
    });
  }
  SegmentWalker<T> walker(task);
  Segments<T> tiles[2];
  Segments<T> of_next_task{};
  if (task.next != nullptr) SegmentWalker<T>(*task.next).next(of_next_task);
  int current = 0;
  walker.next(tiles[0]);
  while (tiles[current].count > 0) {
    const Segments<T>& now = tiles[current];
    walker.next(tiles[1 - current]);
    const Segments<T>& next = tiles[1 - current].count > 0 ? tiles[1 - current] : of_next_task;
    // The heads of a page lie one after the other: memory is read in order, as far as the page goes.
    for (int head = 0; head < task.kv_heads; ++head) {
      PairTile<T> tile;
      tile.pair_stride = task.page_tokens * 2;
      tile.first = now.first;
      tile.count = now.count;
      const bool last_head = head + 1 == task.kv_heads;
      for (int s = 0; s < kSegments; ++s) {
        tile.k[s] = now.k[s] + head * task.k_head_stride;
        tile.v[s] = now.v[s] + head * task.v_head_stride;
        if (last_head && next.count > 0) {
          tile.k_ahead[s] = next.k[s];
          tile.v_ahead[s] = next.v[s];
        } else {
          tile.k_ahead[s] = tile.k[s] + (last_head ? 0 : task.k_head_stride);
          tile.v_ahead[s] = tile.v[s] + (last_head ? 0 : task.v_head_stride);
        }
        if constexpr (sizeof(T) == 1) {
          tile.k_scale[s] = task.k_scale + now.scale[s] + head * task.scale_head_stride;
          tile.v_scale[s] = task.v_scale + now.scale[s] + head * task.scale_head_stride;
        }
      }
      for_each_query_tile(task, head, [&](const QueryTile& queries) {
        with_heads(queries.left, [&](auto heads) { PairStep<M, heads.value>::run(task, tile, queries); });
      });
    }
    current = 1 - current;
  }
  for (int head = 0; head < task.kv_heads; ++head) {
    for_each_query_tile(task, head, [&](const QueryTile& queries) {
      with_heads(queries.left, [&](auto heads) { PairStep<M, heads.value>::finish(queries); });
    });
  }
}

}  // namespace
}  // namespace neo_desktop
