// AVX-512 with BF16: one instruction multiplies and adds 16 x 2 pairs of bf16, twice what fp32 does.
#include "attend_pairs.h"
#include "avx512bf16.h"
#include "dense_tiles.h"

namespace neo_desktop {
namespace {

inline __m512 dot(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

template <class Element>
struct Bf16Math {
  using Vector = Avx512;
  using T = Element;
  using Reg = __m512;
  static constexpr int kHeadsAtOnce = 4;

  template <int Q>
  [[gnu::noinline]] static void scores(const AttendTask& task, const PairTile<T>& tile,
                                       const QueryTile& queries, ReadAhead<T>& ahead, float* out) {
    constexpr int heads = Q < kHeadsAtOnce ? Q : kHeadsAtOnce;
    const BFloat16* q = task.q_bf16 + queries.row * task.padded_head_dim;
    for (int g = 0; g < Q; g += heads) {
      add_keys<heads, Q / heads>(task, tile, q + g * task.padded_head_dim, ahead, out + g * kPairTile);
    }
  }

  template <int Q>
  [[gnu::noinline]] static void values(const AttendTask& task, const PairTile<T>& tile, const float* weights,
                                       ReadAhead<T>& ahead, float* acc) {
    constexpr int heads = Q < kHeadsAtOnce ? Q : kHeadsAtOnce;
    alignas(64) BFloat16 parts[2][Q * kPairTile];
    split_weights(weights, Q * kPairTile, parts[0], parts[1]);
    for (int g = 0; g < Q; g += heads) {
      const BFloat16* const own[2] = {parts[0] + g * kPairTile, parts[1] + g * kPairTile};
      float* rows = acc + g * task.padded_head_dim;
      int column = 0;
      for (; column + 2 * kPairLanes <= task.head_dim; column += 2 * kPairLanes) {
        add_columns<heads, 2, Q / heads>(task, tile, column, kPairLanes, own, ahead, rows);
      }
      for (; column < task.head_dim; column += kPairLanes) {
        const int count = smaller(task.head_dim - column, kPairLanes);
        add_columns<heads, 1, Q / heads>(task, tile, column, count, own, ahead, rows);
      }
    }
  }

 private:
  // Two adjacent 16-bit values in all lanes.
  static __m512i broadcast_pair(const BFloat16* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
  }

  template <int heads, int passes>
  static void add_keys(const AttendTask& task, const PairTile<T>& tile, const BFloat16* q,
                       ReadAhead<T>& ahead, float* out) {
    constexpr int kStep = kSegments * kPairLanes / passes;  // elements
    const T* keys[kSegments];
    for (int s = 0; s < kSegments; ++s) keys[s] = tile.k(s);
    Reg sums[heads * kSegments];
#pragma GCC unroll 16
    for (int i = 0; i < heads * kSegments; ++i) sums[i] = Avx512::zero();
    ahead.template during<kStep>(task.head_dim / 2, [&](int pair) {
      __m512i k[kSegments];
#pragma GCC unroll 4
      for (int s = 0; s < kSegments; ++s) {
        k[s] = load_bf16(keys[s]);
        keys[s] += tile.pair_stride;
      }
#pragma GCC unroll 4
      for (int g = 0; g < heads; ++g) {
        const __m512i query = broadcast_pair(q + g * task.padded_head_dim + 2 * pair);
#pragma GCC unroll 4
        for (int s = 0; s < kSegments; ++s) {
          sums[g * kSegments + s] = dot(sums[g * kSegments + s], k[s], query);
        }
      }
    });
    const Reg scale = Avx512::broadcast(task.score_scale);
#pragma GCC unroll 4
    for (int g = 0; g < heads; ++g) {
#pragma GCC unroll 4
      for (int s = 0; s < kSegments; ++s) {
        Avx512::store(out + g * kPairTile + s * kSegmentTokens,
                      Avx512::multiply(sums[g * kSegments + s], scale));
      }
    }
  }

  // Two tokens at a time, W times 32 columns; the last 32 columns may be partial: `count` of 32.
  template <int heads, int W, int passes>
  static void add_columns(const AttendTask& task, const PairTile<T>& tile, int column, int count,
                          const BFloat16* const* weights, ReadAhead<T>& ahead, float* acc) {
    constexpr int kStep = 2 * W * kPairLanes / passes;  // elements
    const bool whole = count == kPairLanes;
    acc += column;
    Reg sums[heads * W * 2];
#pragma GCC unroll 4
    for (int g = 0; g < heads; ++g) {
#pragma GCC unroll 4
      for (int w = 0; w < W * 2; ++w) {
        const float* at = acc + g * task.padded_head_dim + w * Avx512::kLanes;
        sums[g * W * 2 + w] =
            w * Avx512::kLanes < (W - 1) * kPairLanes + count ? Avx512::load(at) : Avx512::zero();
      }
    }
    const auto load = [&](const T* row, int w) {
      return whole || w + 1 < W ? load_bf16(row + w * kPairLanes) : load_bf16(row + w * kPairLanes, count);
    };
    const int begin = tile.first / 2 * 2;
    ahead.template during<kStep>((tile.count - begin + 1) / 2, [&](int i) {
      const int token = begin + 2 * i;
      const int s = token / kSegmentTokens;
      const int64_t skip = static_cast<int64_t>(token % kSegmentTokens) * task.head_dim + column;
      const T* row = tile.v(s) + skip;
      // A row outside the attended range may hold NaN, which a weight of zero would not remove.
      const bool first = token >= tile.first;
      const bool second = token + 1 < tile.count;
      __m512i v[W * 2];
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) {
        const __m512i a = first ? load(row, w) : _mm512_setzero_si512();
        const __m512i b = second ? load(row + task.head_dim, w) : _mm512_setzero_si512();
        v[w * 2] = interleave_low(a, b);
        v[w * 2 + 1] = interleave_high(a, b);
      }
#pragma GCC unroll 4
      for (int g = 0; g < heads; ++g) {
        const __m512i large = broadcast_pair(weights[0] + g * kPairTile + token);
        const __m512i rest = broadcast_pair(weights[1] + g * kPairTile + token);
#pragma GCC unroll 4
        for (int w = 0; w < W * 2; ++w) {
          sums[g * W * 2 + w] = dot(dot(sums[g * W * 2 + w], v[w], large), v[w], rest);
        }
      }
    });
#pragma GCC unroll 4
    for (int g = 0; g < heads; ++g) {
#pragma GCC unroll 4
      for (int w = 0; w < W * 2; ++w) {
        float* at = acc + g * task.padded_head_dim + w * Avx512::kLanes;
        if (w * Avx512::kLanes < (W - 1) * kPairLanes + count) Avx512::store(at, sums[g * W * 2 + w]);
      }
    }
  }
};

// Sums pairs of columns; even and odd pairs have separate sums.
template <int count>
inline void multiply_dense_rows(const BFloat16* tile, const BFloat16* x, int64_t columns, float* out) {
  __m512 sums[2][count];
  for (int row = 0; row < count; ++row) sums[0][row] = sums[1][row] = Avx512::zero();
  const auto add = [&](int chain, int64_t column) {
    const BFloat16* weights = tile + column * kDenseTileRows;
    __builtin_prefetch(reinterpret_cast<const char*>(weights) + 4096);
    const __m512i pairs = _mm512_loadu_si512(weights);
#pragma GCC unroll 8
    for (int row = 0; row < count; ++row) {
      int32_t pair;
      __builtin_memcpy(&pair, x + row * columns + column, sizeof pair);
      sums[chain][row] = dot(sums[chain][row], pairs, _mm512_set1_epi32(pair));
    }
  };
  int64_t column = 0;
  for (; column + 4 <= columns; column += 4) {
    add(0, column);
    add(1, column + 2);
  }
  if (column < columns) add(0, column);
  for (int row = 0; row < count; ++row) {
    Avx512::store(out + row * kDenseTileRows, Avx512::add(sums[0][row], sums[1][row]));
  }
}

void multiply_dense_bf16(const void* tile, const BFloat16* x, int64_t columns, int rows, float* out) {
  const BFloat16* of = static_cast<const BFloat16*>(tile);
  switch (rows) {
    case 1:
      return multiply_dense_rows<1>(of, x, columns, out);
    case 2:
      return multiply_dense_rows<2>(of, x, columns, out);
    case 3:
      return multiply_dense_rows<3>(of, x, columns, out);
    case 4:
      return multiply_dense_rows<4>(of, x, columns, out);
    case 5:
      return multiply_dense_rows<5>(of, x, columns, out);
    case 6:
      return multiply_dense_rows<6>(of, x, columns, out);
    case 7:
      return multiply_dense_rows<7>(of, x, columns, out);
    case 8:
      return multiply_dense_rows<8>(of, x, columns, out);
  }
}

// Peak bf16 dot products; see multiply_adds in simd_common.h.
int64_t dot_products(int64_t rounds, float* kept) {
  constexpr int kChains = 20;
  constexpr int kSteps = 8;
  const __m512i pair = _mm512_set1_epi32(0x3f003f00);  // 0.5, 0.5
  __m512 sums[kChains];
#pragma GCC unroll 20
  for (int i = 0; i < kChains; ++i) sums[i] = Avx512::broadcast(*kept + static_cast<float>(i));
#pragma GCC unroll 1
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 20
      for (int i = 0; i < kChains; ++i) sums[i] = dot(sums[i], pair, pair);
    }
  }
#pragma GCC unroll 20
  for (int i = 1; i < kChains; ++i) sums[0] = Avx512::add(sums[0], sums[i]);
  float lanes[Avx512::kLanes];
  Avx512::store(lanes, sums[0]);
  *kept = 0 * lanes[0];
  return rounds * kSteps * kChains * kPairLanes;
}

}  // namespace

constinit const Bf16Kernels kAvx512Bf16Kernels = {
    multiply_dense_bf16,
    {nullptr, nullptr, attend_pairs<Bf16Math<BFloat16>>, attend_pairs<Bf16Math<Int8>>},
    {0, 0, 5, 3},  // measured on Zen 5
    dot_products};

}  // namespace neo_desktop
