// The order of sums, shared by decode and prefill attention: a row of queries has the same bits in any call.
//
//   tiles    of kPairTile tokens, at multiples of kPairTile (tile_softmax.h)
//   chunks   of some tiles, whose partial softmaxes are merged in order; they depend only on the number of
//   tokens
//            up to the query and on the model, and start at multiples of their length. These are whole
//            segments: while one thread writes the newest token's key, no other thread reads next to it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace neo_desktop {

// A chunk's first tile is not prefetched in time. So chunks are long, unless a single request must occupy all
// threads. A chunk's result, a row of fp32 per query head, also passes through memory; it should be small
// compared with the keys and values that its query heads share.
constexpr int64_t kMinChunkTokens = 1024;
constexpr int64_t kMinChunkTokensPerQuery = 256;
constexpr int64_t kMaxChunks = 64;  // per request and head, plus one: bounds the memory of partial results

// Chunk i has the tokens of [first + i * tokens, first + (i + 1) * tokens) that are in [begin, end).
struct ContextChunks {
  int64_t begin;  // first token attended to
  int64_t end;
  int64_t first;
  int64_t tokens;
  int64_t count;

  // Chunks of the last `window` tokens of `context_len`, or of the whole context if it is 0, for `group`
  // query heads per KV head.
  static ContextChunks of(int64_t context_len, int64_t window, int64_t group) {
    const auto divide_up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const int64_t begin = window > 0 ? std::max<int64_t>(0, context_len - window) : 0;
    const int64_t least = std::max(kMinChunkTokens, group * kMinChunkTokensPerQuery);
    const int64_t tokens = divide_up(context_len - begin, least * kMaxChunks) * least;
    const int64_t first = begin / tokens * tokens;
    return {begin, context_len, first, tokens, divide_up(context_len - first, tokens)};
  }
};

// The divisor of a row. `sink` is the score of one more token whose value is zero; null: no sink.
inline float denominator(float max, float sum, const float* sink) {
  return sink == nullptr ? sum : sum + std::exp2(*sink * std::numbers::log2e_v<float> - max);
}

}  // namespace neo_desktop
