// AVX-512 with BF16: one instruction multiplies and adds 16 x 2 pairs of bf16, twice what fp32 does.
#include "attend_pairs.h"
#include "avx512.h"

namespace neo_desktop {
namespace {

constexpr int kPairLanes = 32;  // bf16 values in a register

// 32 values as bf16, which holds those of int8 exactly.
inline __m512i load_bf16(const BFloat16* p) { return _mm512_loadu_si512(p); }
inline __m512i load_bf16(const Int8* p) {
  const __m512 low = Avx512::load(p);
  return (__m512i)_mm512_cvtne2ps_pbh(Avx512::load(p + Avx512::kLanes), low);
}

// The first `count` of them, zero after that.
inline __m512i load_bf16(const BFloat16* p, int count) {
  return _mm512_maskz_loadu_epi16((1u << count) - 1, p);
}
inline __m512i load_bf16(const Int8* p, int count) {
  alignas(kPairLanes) Int8 values[kPairLanes] = {};
  __builtin_memcpy(values, p, count);
  return load_bf16(values);
}

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
  static void scores(const AttendTask& task, const PairTile<T>& tile, const QueryTile& queries, float* out) {
    constexpr int heads = Q < kHeadsAtOnce ? Q : kHeadsAtOnce;
    const BFloat16* q = task.q_bf16 + queries.row * task.padded_head_dim;
    for (int g = 0; g < Q; g += heads) {
      add_keys<heads>(task, tile, q + g * task.padded_head_dim, out + g * kPairTile);
    }
  }

  template <int Q>
  static void values(const AttendTask& task, const PairTile<T>& tile, const float* weights, float* acc) {
    constexpr int heads = Q < kHeadsAtOnce ? Q : kHeadsAtOnce;
    // A weight is the sum of two bf16, to 17 bits: little is lost against fp32.
    alignas(64) BFloat16 parts[2][Q * kPairTile];
    for (int i = 0; i < Q * kPairTile; i += Avx512::kLanes) {
      const Reg weight = Avx512::load(weights + i);
      const __m256i large = (__m256i)_mm512_cvtneps_pbh(weight);
      const Reg rest = Avx512::subtract(weight, widen(large));
      _mm256_store_si256((__m256i*)(parts[0] + i), large);
      _mm256_store_si256((__m256i*)(parts[1] + i), (__m256i)_mm512_cvtneps_pbh(rest));
    }
    for (int g = 0; g < Q; g += heads) {
      const BFloat16* const own[2] = {parts[0] + g * kPairTile, parts[1] + g * kPairTile};
      float* rows = acc + g * task.padded_head_dim;
      int column = 0;
      for (; column + 2 * kPairLanes <= task.head_dim; column += 2 * kPairLanes) {
        add_columns<heads, 2>(task, tile, column, kPairLanes, own, rows);
      }
      for (; column < task.head_dim; column += kPairLanes) {
        add_columns<heads, 1>(task, tile, column, smaller(task.head_dim - column, kPairLanes), own, rows);
      }
    }
  }

 private:
  static Reg widen(__m256i bf16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
  }

  // Two neighbouring 16-bit values in all lanes.
  static __m512i broadcast_pair(const BFloat16* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
  }

  template <int heads>
  static void add_keys(const AttendTask& task, const PairTile<T>& tile, const BFloat16* q, float* out) {
    const T* keys[kSegments];
    const T* ahead[kSegments];
    for (int s = 0; s < kSegments; ++s) {
      keys[s] = tile.k[s];
      ahead[s] = tile.k_ahead[s];
    }
    Reg sums[heads * kSegments];
#pragma GCC unroll 16
    for (int i = 0; i < heads * kSegments; ++i) sums[i] = Avx512::zero();
#pragma GCC unroll 1
    for (int d = 0; d < task.head_dim; d += 2) {
      __m512i k[kSegments];
#pragma GCC unroll 4
      for (int s = 0; s < kSegments; ++s) {
        k[s] = load_bf16(keys[s]);
        if constexpr (prefetches(heads)) prefetch<kPairLanes>(ahead[s], 0);
        keys[s] += tile.pair_stride;
        ahead[s] += tile.pair_stride;
      }
#pragma GCC unroll 4
      for (int g = 0; g < heads; ++g) {
        const __m512i query = broadcast_pair(q + g * task.padded_head_dim + d);
#pragma GCC unroll 4
        for (int s = 0; s < kSegments; ++s)
          sums[g * kSegments + s] = dot(sums[g * kSegments + s], k[s], query);
      }
    }
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

  // Two tokens at a time, W times 32 columns; of the last 32 only `count` exist.
  template <int heads, int W>
  static void add_columns(const AttendTask& task, const PairTile<T>& tile, int column, int count,
                          const BFloat16* const* weights, float* acc) {
    const __m512i low = _mm512_add_epi16(_mm512_set1_epi32(32 << 16), every_second(0));
    const __m512i high = _mm512_add_epi16(_mm512_set1_epi32(32 << 16), every_second(16));
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
#pragma GCC unroll 1
    for (int token = tile.first / 2 * 2; token < tile.count; token += 2) {
      const int s = token / kSegmentTokens;
      const int64_t skip = static_cast<int64_t>(token % kSegmentTokens) * task.head_dim + column;
      const T* row = tile.v[s] + skip;
      const T* ahead = tile.v_ahead[s] + skip;
      // A row that is not attended to may hold NaN, which a weight of zero would not silence.
      const bool first = token >= tile.first;
      const bool second = token + 1 < tile.count;
      __m512i v[W * 2];
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) {
        const __m512i a = first ? load(row, w) : _mm512_setzero_si512();
        const __m512i b = second ? load(row + task.head_dim, w) : _mm512_setzero_si512();
        v[w * 2] = _mm512_permutex2var_epi16(a, low, b);
        v[w * 2 + 1] = _mm512_permutex2var_epi16(a, high, b);
        if constexpr (prefetches(heads)) {
          prefetch<kPairLanes>(ahead + w * kPairLanes, 0);
          prefetch<kPairLanes>(ahead + task.head_dim + w * kPairLanes, 0);
        }
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
    }
#pragma GCC unroll 4
    for (int g = 0; g < heads; ++g) {
#pragma GCC unroll 4
      for (int w = 0; w < W * 2; ++w) {
        float* at = acc + g * task.padded_head_dim + w * Avx512::kLanes;
        if (w * Avx512::kLanes < (W - 1) * kPairLanes + count) Avx512::store(at, sums[g * W * 2 + w]);
      }
    }
  }

  // from, from, from + 1, from + 1, ... of 16 bits each
  static __m512i every_second(int from) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i index = _mm512_add_epi32(lane, _mm512_set1_epi32(from));
    return _mm512_or_si512(index, _mm512_slli_epi32(index, 16));
  }
};

}  // namespace

constinit const Bf16Kernels kAvx512Bf16Kernels = {nullptr, nullptr, attend_pairs<Bf16Math<BFloat16>>,
                                                  attend_pairs<Bf16Math<Int8>>};

}  // namespace neo_desktop
