// Decode attention over dimension pairs: K as [num_pages, kv_heads, head_dim / 2, page_tokens, 2].
//
// The keys of 16 tokens (a segment) are interleaved, two dimensions at a time:
//
//   d0 d1 of token 0, d0 d1 of token 1, ... d0 d1 of token 15      one cache line of fp16
//   d2 d3 of token 0, d2 d3 of token 1, ...                        the next one, page_tokens * 2 further on
//
// so every lane of a vector belongs to one token. A dot product then needs no sum across lanes, which would
// cost as much as the multiplications if several query heads share a KV head. Two dimensions at a time also
// suit the dot-product instructions of bf16. V stays in rows.
//
// If the keys are also the values, memory has rows alone, and each tile's keys are paired in scratch memory.
//
// A step takes a tile of kSegments segments and up to kQueryTile query heads. Segments may be anywhere, but
// if they are adjacent in a page, as the engine places them, memory is read in longer pieces:
//
//   scores   q·k of every token and head, in 2^... base
//   softmax  online (tile_softmax.h): running maximum and sum per head
//   values   acc += weight * v
//
// Tiles end at multiples of kPairTile tokens of the context, even with a window.
//
// A class M computes the products, for example PairMath (pair_math.h).
#pragma once

#include "pair_tiles.h"
#include "simd_common.h"
#include "tile_softmax.h"

namespace neo_desktop {
namespace {

// One tile of one KV head for Q query heads.
template <class M, int Q>
class PairStep {
  using V = typename M::Vector;
  using T = typename M::T;
  using Reg = typename V::Reg;
  static constexpr bool kScaled = sizeof(T) == 1;

 public:
  static void start(float* state) {
    for (int g = 0; g < Q; ++g) TileSoftmax<V>::start(max_of(state, g), sum_of(state, g));
  }

  static void run(const AttendTask& task, const PairTile<T>& tile, const QueryTile& queries,
                  ReadAhead<T>& during_scores, ReadAhead<T>& during_values) {
    alignas(64) float weights[Q * kPairTile];
    M::template scores<Q>(task, tile, queries, during_scores, weights);
    if constexpr (kScaled) multiply(tile, tile.k_scale, weights);
    if (task.softcap > 0) cap(task, tile, weights);
    if (tile.first > 0 || tile.count < kPairTile) mask(tile, kLowest, weights);
    for (int g = 0; g < Q; ++g) {
      TileSoftmax<V>::run(weights + g * kPairTile, max_of(queries.state, g), sum_of(queries.state, g),
                          queries.acc + g * task.padded_head_dim, task.padded_head_dim);
    }
    if constexpr (kScaled) {
      multiply(tile, tile.v_scale, weights);
      if (tile.first > 0 || tile.count < kPairTile) mask(tile, 0, weights);
    }
    M::template values<Q>(task, tile, weights, during_values, queries.acc);
  }

  static void finish(const QueryTile& queries) {
    for (int g = 0; g < smaller(queries.left, Q); ++g) {
      queries.max[g] = max_of(queries.state, g)[0];
      queries.sum[g] = TileSoftmax<V>::total(sum_of(queries.state, g));
    }
  }

 private:
  static float* max_of(float* state, int g) { return state + g * 2 * kMaxLanes; }
  static float* sum_of(float* state, int g) { return state + g * 2 * kMaxLanes + kMaxLanes; }

  static void multiply(const PairTile<T>& tile, const float* scales, float* weights) {
    for (int s = 0; s * kSegmentTokens < tile.count; ++s) {
      for (int i = 0; i < kSegmentTokens; i += V::kLanes) {
        const Reg scale = V::load(scales + tile.segments.scale[s] + i);
        for (int g = 0; g < Q; ++g) {
          float* at = weights + g * kPairTile + s * kSegmentTokens + i;
          V::store(at, V::multiply(V::load(at), scale));
        }
      }
    }
  }

  static void cap(const AttendTask& task, const PairTile<T>& tile, float* weights) {
    const int count = (tile.count + kSegmentTokens - 1) / kSegmentTokens * kSegmentTokens;
    for (int g = 0; g < Q; ++g) cap_scores<V>(task.softcap, weights + g * kPairTile, count);
  }

  // Masks tokens outside the attended range. Their memory may hold anything, so both scores and the weights
  // that a NaN scale has spoiled are replaced.
  static void mask(const PairTile<T>& tile, float value, float* weights) {
    for (int g = 0; g < Q; ++g) {
      for (int t = 0; t < tile.first; ++t) weights[g * kPairTile + t] = value;
      for (int t = tile.count; t < kPairTile; ++t) weights[g * kPairTile + t] = value;
    }
  }
};

template <class M>
void attend_pairs(const AttendTask& task) {
  using V = typename M::Vector;
  using T = typename M::T;
  const int64_t acc_length =
      static_cast<int64_t>(task.kv_heads) * task.rows * task.padded_group * task.padded_head_dim;
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
  // Half a tile is prefetched one or two halves ahead.
  const int64_t half_bytes = static_cast<int64_t>(kPairTile) * task.head_dim * sizeof(T);
  const bool far = half_bytes < kAheadBytes && task.group >= kMinAheadGroup;
  T* const paired = static_cast<T*>(task.paired);
  const int64_t pair_stride = (paired == nullptr ? task.page_tokens : kPairTile) * 2;
  int current = 0;
  walker.next(tiles[0]);
  while (tiles[current].count > 0) {
    const Segments<T>& now = tiles[current];
    walker.next(tiles[1 - current]);
    const Segments<T>& next = tiles[1 - current].count > 0 ? tiles[1 - current] : of_next_task;
    // The heads of a page are adjacent: memory is read in order until the page ends.
    for (int head = 0; head < task.kv_heads; ++head) {
      const bool last = head + 1 == task.kv_heads && next.count > 0;
      const Segments<T>& after = last ? next : now;
      const int head_after = last ? 0 : smaller(head + 1, task.kv_heads - 1);
      PairTile<T> tile{.segments = now,
                       .k_offset = paired == nullptr ? head * task.k_head_stride : 0,
                       .v_offset = head * task.v_head_stride,
                       .k_scale = task.k_scale + head * task.scale_head_stride,
                       .v_scale = task.v_scale + head * task.scale_head_stride,
                       .pair_stride = pair_stride,
                       .first = now.first,
                       .count = now.count};
      const bool from_rows = paired != nullptr;
      if (from_rows) pair_rows(tile, task.head_dim, paired);
      ReadAhead<T> keys(
          from_rows ? after.v : after.k, head_after * (from_rows ? task.v_head_stride : task.k_head_stride),
          from_rows ? kPiece : pair_stride, task.head_dim, from_rows ? after.v_together : after.k_together);
      ReadAhead<T> values(far ? after.v : now.v, far ? head_after * task.v_head_stride : tile.v_offset,
                          kPiece, task.head_dim, (far ? after : now).v_together);
      ReadAhead<T>& during_scores = far ? keys : values;
      ReadAhead<T>& during_values = far ? values : keys;
      for_each_query_tile(task, head, [&](const QueryTile& queries) {
        if (queries.end <= now.begin + now.first) return;
        tile.count = smaller(queries.end - now.begin, now.count);
        with_heads(queries.left, [&](auto heads) {
          PairStep<M, heads.value>::run(task, tile, queries, during_scores, during_values);
        });
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
