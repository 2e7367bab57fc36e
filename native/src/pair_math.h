// Products of attend_pairs.h in fp32, for any vector registers V.
//
// Both halves of a step are the same loop: multiply vectors of memory by a factor per head, and accumulate.
// They share this loop, so that the same few instructions load and prefetch all memory of a request. A
// processor's prefetcher learns from the addresses of one instruction, and would start over with each half.
// On Zen 5 this is worth up to a tenth of the speed.
#pragma once

#include "pair_tiles.h"
#include "simd_common.h"

namespace neo_desktop {
namespace {

template <class V, class Element>
struct PairMath {
  using Vector = V;
  using T = Element;
  using Reg = typename V::Reg;
  static constexpr int kVectorTokens = V::kLanes / 2;
  static constexpr int kSegmentVectors = kSegmentTokens / kVectorTokens;

  // out[g][t] = q[g] · k[t] for Q heads, t up to the tile's count rounded up to whole segments.
  template <int Q>
  static void scores(const AttendTask& task, const PairTile<T>& tile, const QueryTile& queries,
                     ReadAhead<T>& ahead, float* out) {
    constexpr int heads = heads_at_once(Q);
    with_vectors<most_vectors(heads)>(task.head_dim, [&](auto at_once) {
      constexpr int vectors = at_once.value;
      const int count = (tile.count + kSegmentTokens - 1) / kSegmentTokens * kSegmentVectors;
      for (int n = 0; n < count;) {
        // Vectors come in fours: a remainder that is not a multiple of three ends with twos.
        const bool two = vectors == 3 && (count - n == 4 || count - n == 2);
        for (int g = 0; g < Q; g += heads) {
          const float* q = queries.q + g * task.padded_head_dim;
          float* to = out + g * kPairTile + n * kVectorTokens;
          if (two) {
            add_keys<heads, 2, Q / heads>(task, tile, n, q, ahead, to);
          } else {
            add_keys<heads, vectors, Q / heads>(task, tile, n, q, ahead, to);
          }
        }
        n += two ? 2 : vectors;
      }
    });
  }

  // acc[g] += sum over t of weights[g][t] * v[t] for Q heads.
  template <int Q>
  static void values(const AttendTask& task, const PairTile<T>& tile, const float* weights,
                     ReadAhead<T>& ahead, float* acc) {
    constexpr int heads = heads_at_once(Q);
    for (int g = 0; g < Q; g += heads) {
      add_values<heads, most_vectors(heads), Q / heads>(task, tile, 0, weights + g * kPairTile, ahead,
                                                        acc + g * task.padded_head_dim);
    }
  }

 private:
  static constexpr int heads_at_once(int queries) { return smaller(queries, V::kHeadsAtOnce); }
  static constexpr int most_vectors(int heads) {
    return smaller(V::vectors_at_once(heads), kSegments * kSegmentVectors);
  }

  // Calls body with the number of vectors per step, as a Number: at most as many as a row of V has, so that
  // keys and values use the same number.
  template <int most, class Body>
  static void with_vectors(int head_dim, Body body) {
    if constexpr (most > 3) {
      if (most * V::kLanes > head_dim) return with_vectors<most / 2>(head_dim, body);
    }
    body(Number<most>());
  }

  // Adjacent vectors within one segment of keys share the address of the first one.
  static constexpr int run_of(int vectors) {
    return vectors % kSegmentVectors == 0 ? kSegmentVectors : kSegmentVectors % vectors == 0 ? vectors : 1;
  }

  enum class Operand { kKeys, kValues, kEither };

  // With the most heads, arithmetic takes as long as memory, and a specialised loop without branches is worth
  // more than a shared one.
  static constexpr Operand either(Operand operand, int heads) {
    return heads < V::kHeadsAtOnce ? Operand::kEither : operand;
  }

  // Arguments of add_products. Strides are elements between steps, or between heads.
  template <int vectors>
  struct Pass {
    struct Run {
      const T* at[vectors / run_of(vectors)];
      int steps;
    };
    bool keys;
    int num_runs;
    Run runs[kSegments];
    int64_t stride;
    const float* factors;  // per step: two dimensions of a query, or the weight of a token
    int64_t factor_stride;
    float* sums;
    int64_t sum_stride;
  };

  // Accumulates the products of `vectors` vectors and each head's factor, step by step. Sums of values
  // continue the previous ones. Sums of keys start at zero, and in the end each token's two sums are added.
  //
  // If heads take several passes over the same memory, each pass prefetches its share.
  template <int heads, int vectors, int passes, Operand operand, class Load>
  NEO_DESKTOP_ONE_COPY static void add_products(const Pass<vectors>& pass, ReadAhead<T>& ahead, Load load) {
    constexpr int kRun = run_of(vectors);
    constexpr int kStep = vectors * V::kLanes / passes;  // elements
    int keys = operand == Operand::kEither ? pass.keys : operand == Operand::kKeys;
    Reg sums[heads * vectors];
#pragma GCC unroll 8
    for (int g = 0; g < heads; ++g) {
#pragma GCC unroll 16
      for (int i = 0; i < vectors; ++i) {
        sums[g * vectors + i] = keys ? V::zero() : V::load(pass.sums + g * pass.sum_stride + i * V::kLanes);
      }
    }
    const float* factors = pass.factors;
    const int64_t factor_stride = pass.factor_stride;
    const int64_t stride = pass.stride;
    for (int run = 0; run < pass.num_runs; ++run) {
      const T* at[vectors / kRun];
      for (int i = 0; i < vectors / kRun; ++i) at[i] = pass.runs[run].at[i];
      ahead.template during<kStep>(pass.runs[run].steps, [&](int) {
        Reg x[vectors];
#pragma GCC unroll 16
        for (int i = 0; i < vectors; ++i) x[i] = load(at[i / kRun] + i % kRun * V::kLanes);
#pragma GCC unroll 16
        for (int i = 0; i < vectors / kRun; ++i) at[i] += stride;
        const auto add = [&](int g, Reg factor) {
#pragma GCC unroll 16
          for (int i = 0; i < vectors; ++i) {
            sums[g * vectors + i] = V::multiply_add(x[i], factor, sums[g * vectors + i]);
          }
        };
        // Otherwise the compiler would make separate loops for keys and values.
        if constexpr (operand == Operand::kEither) asm volatile("" : "+r"(keys));
        if (keys) {
#pragma GCC unroll 8
          for (int g = 0; g < heads; ++g) add(g, V::broadcast_pair(factors + g * factor_stride));
          factors += 2;
        } else {
#pragma GCC unroll 8
          for (int g = 0; g < heads; ++g) add(g, V::broadcast(factors[g * factor_stride]));
          factors += 1;
        }
      });
    }
    float* to = pass.sums;
    if (keys) {
#pragma GCC unroll 8
      for (int g = 0; g < heads; ++g) {
        const Reg* own = sums + g * vectors;
#pragma GCC unroll 8
        for (int i = 0; i + 1 < vectors; i += 2) {
          V::store(to + i * kVectorTokens, V::add_pairs(own[i], own[i + 1]));
        }
        if constexpr (vectors % 2 == 1) {  // the next vectors' sums overwrite the excess
          const Reg last = own[vectors - 1];
          V::store(to + (vectors - 1) * kVectorTokens, V::add_pairs(last, last));
        }
        to += pass.sum_stride;
      }
    } else {
#pragma GCC unroll 8
      for (int g = 0; g < heads; ++g) {
#pragma GCC unroll 16
        for (int i = 0; i < vectors; ++i) V::store(to + i * V::kLanes, sums[g * vectors + i]);
        to += pass.sum_stride;
      }
    }
  }

  // Conversions of memory to vectors. Lambdas would give keys and values different instances of add_products.
  struct Whole {
    Reg operator()(const T* p) const { return V::load(p); }
  };
  struct LowerHalf {
    Reg operator()(const T* p) const { return V::load_half(p); }
  };

  // `vectors` vectors of keys from vector n of the tile on.
  template <int heads, int vectors, int passes>
  static void add_keys(const AttendTask& task, const PairTile<T>& tile, int n, const float* q,
                       ReadAhead<T>& ahead, float* out) {
    constexpr int kRun = run_of(vectors);
    Pass<vectors> pass;
    pass.keys = true;
    pass.num_runs = 1;
    for (int i = 0; i < vectors; i += kRun) {
      pass.runs[0].at[i / kRun] = tile.k((n + i) / kSegmentVectors) + (n + i) % kSegmentVectors * V::kLanes;
    }
    pass.runs[0].steps = task.head_dim / 2;
    pass.stride = tile.pair_stride;
    pass.factors = q;
    pass.factor_stride = task.padded_head_dim;
    pass.sums = out;
    pass.sum_stride = kPairTile;
    add_products<heads, vectors, passes, either(Operand::kKeys, heads)>(pass, ahead, Whole());
  }

  // From `column` on, W vectors of a row at a time; the rest of the row uses half the width.
  template <int heads, int W, int passes>
  static void add_values(const AttendTask& task, const PairTile<T>& tile, int column, const float* weights,
                         ReadAhead<T>& ahead, float* acc) {
    // With three at a time, two and two are faster than three and one.
    const int left_alone = W == 3 ? (W + 1) * V::kLanes : -1;
    for (; column + W * V::kLanes <= task.head_dim && task.head_dim - column != left_alone;
         column += W * V::kLanes) {
      add_columns<heads, W, passes>(task, tile, column, weights, ahead, acc, Whole());
    }
    if (column == task.head_dim) return;
    if constexpr (W > 1) {
      add_values<heads, W == 3 ? 2 : W / 2, passes>(task, tile, column, weights, ahead, acc);
    } else if constexpr (V::kLanes > 8) {
      add_columns<heads, 1, passes>(task, tile, column, weights, ahead, acc, LowerHalf());
    }
  }

  template <int heads, int W, int passes, class Load>
  static void add_columns(const AttendTask& task, const PairTile<T>& tile, int column, const float* weights,
                          ReadAhead<T>& ahead, float* acc, Load load) {
    constexpr int kRun = run_of(W);
    Pass<W> pass;
    pass.keys = false;
    pass.num_runs = 0;
    int token = tile.first;
    for (int s = 0; s * kSegmentTokens < tile.count;) {
      const T* begin = tile.v(s);
      const T* row = begin + static_cast<int64_t>(token - s * kSegmentTokens) * task.head_dim + column;
      // Segments of one page are consecutive: long loops end in fewer mispredicted branches.
      do {
        begin += kSegmentTokens * task.head_dim;
        ++s;
      } while (s * kSegmentTokens < tile.count && tile.v(s) == begin);
      auto& run = pass.runs[pass.num_runs++];
      for (int i = 0; i < W; i += kRun) run.at[i / kRun] = row + i * V::kLanes;
      run.steps = smaller(tile.count, s * kSegmentTokens) - token;
      token += run.steps;
    }
    pass.stride = task.head_dim;
    pass.factors = weights + tile.first;
    pass.factor_stride = kPairTile;
    pass.sums = acc + column;
    pass.sum_stride = task.padded_head_dim;
    add_products<heads, W, passes, either(Operand::kValues, heads)>(pass, ahead, load);
  }
};

}  // namespace
}  // namespace neo_desktop
