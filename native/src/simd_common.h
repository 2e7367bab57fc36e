// Code shared by all vector kernels. A kernel is written once, for any instruction set: a class V of static
// functions wraps the vector registers (see kernel_avx512.cpp).
//
// Each ISA's file includes these headers with its own compiler flags. All code here must have internal
// linkage (the anonymous namespace), and must not use the standard library's functions: the linker would keep
// one copy of an inline function for all files, perhaps the one compiled for the newest CPU.
#pragma once

#include <cstdint>

#include "neo_desktop/kernels.h"

// Prevents inlining, and copies for particular arguments.
#ifdef __clang__
#define NEO_DESKTOP_ONE_COPY [[gnu::noinline]]
#else
#define NEO_DESKTOP_ONE_COPY [[gnu::noipa]]
#endif

namespace neo_desktop {
namespace {

constexpr int kCacheLineBytes = 64;
constexpr int kFirstLevel = 3;  // __builtin_prefetch's locality for L1

constexpr int smaller(int64_t a, int64_t b) { return static_cast<int>(a < b ? a : b); }

// Prefetches the lines that start in columns [column, column + columns) of a row that is needed next. This
// spreads memory loads over the computation, which is too long between two loads for the processor's own
// prefetcher. Into L1, although a tile fills it: on Zen 5 that was faster than L2.
template <int columns, class T>
inline void prefetch(const T* row, int column) {
  constexpr int kLine = kCacheLineBytes / sizeof(T);
  if constexpr (columns >= kLine) {
#pragma GCC unroll 16
    for (int i = 0; i < columns; i += kLine) __builtin_prefetch(row + column + i, 0, kFirstLevel);
  } else if (column % kLine == 0) {
    __builtin_prefetch(row + column, 0, kFirstLevel);
  }
}

// Follows a request's tokens through its block table, without a division per token. Never reads an entry
// beyond the requested token's.
class TokenWalker {
 public:
  TokenWalker(const AttendTask& task, int64_t token)
      : entry_(task.block_table + token / task.block_tokens),
        offset_(token % task.block_tokens),
        block_tokens_(task.block_tokens),
        blocks_per_page_(static_cast<uint32_t>(task.blocks_per_page)) {}

  // Location of the next token and the later tokens in its block.
  struct Place {
    int64_t page;
    int64_t row;
    int64_t tokens;
  };
  Place next() {
    if (offset_ == block_tokens_) {
      offset_ = 0;
      ++entry_;
    }
    const auto block = static_cast<uint32_t>(*entry_);
    return {block / blocks_per_page_, block % blocks_per_page_ * block_tokens_ + offset_,
            block_tokens_ - offset_};
  }

  // Advances within the block.
  void skip(int64_t tokens) { offset_ += tokens; }

 private:
  const int32_t* entry_;
  int64_t offset_;
  int64_t block_tokens_;
  uint32_t blocks_per_page_;
};

// The query heads [g, g + kQueryTile) of one KV head and one row of queries, with their running results.
struct QueryTile {
  QueryTile(const AttendTask& task, int head, int of_rows, int g)
      : left(task.group - g), end(task.context_len - (task.rows - 1 - of_rows)) {
    row = (static_cast<int64_t>(head) * task.rows + of_rows) * task.padded_group + g;
    q = task.q + row * task.padded_head_dim;
    state = task.state + row * 2 * kMaxLanes;
    max = task.max + row;
    sum = task.sum + row;
    acc = task.acc + row * task.padded_head_dim;
  }
  int left;     // number of query heads from g on
  int64_t end;  // of the tokens that they attend to, also beyond the task
  int64_t row;  // of the first query head in q, max, sum and acc
  const float* q;
  float* state;  // [kQueryTile, 2, kMaxLanes] or less: running maxima and sums, in the kernel's layout
  float* max;
  float* sum;
  float* acc;
};

template <class Body>
inline void for_each_query_tile(const AttendTask& task, int head, Body body) {
  for (int row = 0; row < task.rows; ++row) {
    for (int g = 0; g < task.group; g += kQueryTile) body(QueryTile(task, head, row, g));
  }
}

// A compile-time number, as an argument of generic functions.
template <int n>
struct Number {
  static constexpr int value = n;
};

// Calls body with the smallest of 1, 2, 4 and 8 that is at least `queries`, as a Number.
template <class Body>
inline void with_heads(int queries, Body body) {
  if (queries > 4) {
    body(Number<8>());
  } else if (queries > 2) {
    body(Number<4>());
  } else if (queries == 2) {
    body(Number<2>());
  } else {
    body(Number<1>());
  }
}

// tanh(x), relative error below 4e-7. Infinity and NaN become NaN.
template <class V>
inline typename V::Reg tanh(typename V::Reg x) {
  const auto flat = V::broadcast(-9.02f);  // beyond this, fp32 rounds tanh to -1 or 1
  const auto above = V::max(flat, x);
  const auto within = V::subtract(V::zero(), V::max(flat, V::subtract(V::zero(), above)));
  // x * P(x^2) / Q(x^2) with the minimax relative error, 2.1e-8; the rest is rounding.
  const auto square = V::multiply(within, within);
  auto p = V::broadcast(1.33187740e-8f);
  p = V::multiply_add(p, square, V::broadcast(2.05832600e-5f));
  p = V::multiply_add(p, square, V::broadcast(3.49402102e-3f));
  p = V::multiply_add(p, square, V::broadcast(1.33797066e-1f));
  p = V::multiply_add(p, square, V::broadcast(9.99999979e-1f));
  auto q = V::broadcast(7.76189540e-7f);
  q = V::multiply_add(q, square, V::broadcast(3.28307072e-4f));
  q = V::multiply_add(q, square, V::broadcast(2.58710217e-2f));
  q = V::multiply_add(q, square, V::broadcast(4.67130218e-1f));
  q = V::multiply_add(q, square, V::broadcast(1.0f));
  return V::multiply_add(x, V::zero(), V::divide(V::multiply(within, p), q));
}

// Replaces each score by cap * tanh(score / cap); their number is a multiple of the lanes. Kept out of the
// kernels' loops, which stay the same for models without a cap.
template <class V>
NEO_DESKTOP_ONE_COPY void cap_scores(float cap, float* scores, int count) {
  const auto by = V::broadcast(1.0f / cap);
  const auto most = V::broadcast(cap);
  for (int i = 0; i < count; i += V::kLanes) {
    V::store(scores + i, V::multiply(tanh<V>(V::multiply(V::load(scores + i), by)), most));
  }
}

template <class V, class T>
void widen(const void* source, float* target, int length, float factor) {
  const T* from = static_cast<const T*>(source);
  const auto by = V::broadcast(factor);
  int i = 0;
  for (; i + V::kLanes <= length; i += V::kLanes) V::store(target + i, V::multiply(V::load(from + i), by));
  if constexpr (V::kLanes > 8) {
    if (i < length) V::store_half(target + i, V::multiply(V::load_half(from + i), by));
  }
}

template <class V, class T>
void narrow(const float* source, void* target, int length, float factor) {
  T* to = static_cast<T*>(target);
  const auto by = V::broadcast(factor);
  int i = 0;
  for (; i + V::kLanes <= length; i += V::kLanes) V::store(to + i, V::multiply(V::load(source + i), by));
  if constexpr (V::kLanes > 8) {
    if (i < length) V::store_half(to + i, V::multiply(V::load_half(source + i), by));
  }
}

template <class V>
float read(const void* data, int64_t bytes) {
  const float* from = static_cast<const float*>(data);
  const int64_t length = bytes / static_cast<int64_t>(sizeof(float));
  typename V::Reg any = V::zero();
  for (int64_t i = 0; i + V::kLanes <= length; i += V::kLanes) any = V::max(V::load(from + i), any);
  float lanes[V::kLanes];
  V::store(lanes, any);
  return lanes[0];
}

template <class V>
int64_t multiply_adds(int64_t rounds, float* kept) {
  // An accumulator's next addition waits some cycles for the last one, and two or more additions can start
  // per cycle. So all registers are accumulators, except the two constants.
  constexpr int kChains = V::kSums + 4;
  constexpr int kSteps = 8;  // per round; makes the loop counter cheap
  const auto factor = V::broadcast(0.5f);
  const auto addend = V::broadcast(1.0f);
  typename V::Reg sums[kChains];  // all tend to 2: neither infinite nor denormal
#pragma GCC unroll 32
  for (int i = 0; i < kChains; ++i) sums[i] = V::broadcast(*kept + static_cast<float>(i));
#pragma GCC unroll 1
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 32
      for (int i = 0; i < kChains; ++i) sums[i] = V::multiply_add(sums[i], factor, addend);
    }
  }
#pragma GCC unroll 32
  for (int i = 1; i < kChains; ++i) sums[0] = V::add(sums[0], sums[i]);
  float lanes[V::kLanes];
  V::store(lanes, sums[0]);
  *kept = lanes[0];
  return rounds * kSteps * kChains * V::kLanes;
}

}  // namespace
}  // namespace neo_desktop
