// NEON with BF16: one instruction multiplies and adds 4 x 2 pairs of bf16, twice as many as in fp32. Keys in
// dimension pairs need no conversion.
//
// Values are multiplied in fp32: a weight would need two bf16 to keep its accuracy, and two instructions for
// two tokens are no gain over fp32. The keys of int8 caches become bf16, which represents them exactly; the
// integer products of i8mm would also need int8 queries, and lose accuracy.
#include "attend_pairs.h"
#include "neon.h"
#include "pair_math.h"

namespace neo_desktop {
namespace {

inline bfloat16x8_t load_bf16(const BFloat16* p) { return vreinterpretq_bf16_u16(vld1q_u16(&p->bits)); }
inline bfloat16x8_t load_bf16(const Int8* p) {
  const Neon::Reg x = Neon::load(p);  // the upper 16 bits represent small integers exactly
  return vreinterpretq_bf16_u16(vuzp2q_u16(vreinterpretq_u16_f32(x.low), vreinterpretq_u16_f32(x.high)));
}

template <class Element>
struct Bf16Math {
  using Vector = Neon;
  using T = Element;

  template <int Q>
  static void scores(const AttendTask& task, const PairTile<T>& tile, const QueryTile& queries,
                     ReadAhead<T>& ahead, float* out) {
    constexpr int vectors = kSums / Q;
    const BFloat16* q = task.q_bf16 + queries.row * task.padded_head_dim;
    const int count = (tile.count + kSegmentTokens - 1) / kSegmentTokens * kSegmentTokens;
    for (int n = 0; n * kVectorTokens < count; n += vectors) {
      add_keys<Q, vectors>(task, tile, n, q, ahead, out + n * kVectorTokens);
    }
  }

  template <int Q>
  static void values(const AttendTask& task, const PairTile<T>& tile, const float* weights,
                     ReadAhead<T>& ahead, float* acc) {
    PairMath<Neon, T>::template values<Q>(task, tile, weights, ahead, acc);
  }

 private:
  static constexpr int kSums = 16;         // accumulators, of 32 registers
  static constexpr int kVectorTokens = 4;  // keys in a register, two dimensions per key
  static constexpr int kVector = 8;        // their elements; and dimensions of a query in a register
  static constexpr int kSegmentVectors = kSegmentTokens / kVectorTokens;

  // Keys from vector `n` of the tile on.
  template <int heads, int vectors>
  static void add_keys(const AttendTask& task, const PairTile<T>& tile, int n, const BFloat16* q,
                       ReadAhead<T>& ahead, float* out) {
    constexpr int segments = vectors < kSegmentVectors ? 1 : vectors / kSegmentVectors;
    const int within = n % kSegmentVectors * kVector;
    const T* keys[segments];
    for (int s = 0; s < segments; ++s) keys[s] = tile.k(n / kSegmentVectors + s) + within;
    float32x4_t sums[heads * vectors];
#pragma GCC unroll 16
    for (int i = 0; i < heads * vectors; ++i) sums[i] = vdupq_n_f32(0);
#pragma GCC unroll 1
    for (int d = 0; d < task.head_dim; d += kVector) {
      for (int i = 0; i < vectors; ++i) ahead.ask_for_piece();
      bfloat16x8_t query[heads];
#pragma GCC unroll 8
      for (int g = 0; g < heads; ++g) query[g] = load_bf16(q + g * task.padded_head_dim + d);
      add_pair<heads, vectors, 0>(keys, tile.pair_stride, query, sums);
      add_pair<heads, vectors, 1>(keys, tile.pair_stride, query, sums);
      add_pair<heads, vectors, 2>(keys, tile.pair_stride, query, sums);
      add_pair<heads, vectors, 3>(keys, tile.pair_stride, query, sums);
    }
#pragma GCC unroll 8
    for (int g = 0; g < heads; ++g) {
#pragma GCC unroll 16
      for (int i = 0; i < vectors; ++i) {
        vst1q_f32(out + g * kPairTile + i * kVectorTokens,
                  vmulq_n_f32(sums[g * vectors + i], task.score_scale));
      }
    }
  }

  // One of the four pairs of dimensions in a query's register. Inlined, so that the sums stay in registers.
  template <int heads, int vectors, int pair>
  [[gnu::always_inline]] static void add_pair(const T** keys, int64_t stride, const bfloat16x8_t* query,
                                              float32x4_t* sums) {
#pragma GCC unroll 16
    for (int i = 0; i < vectors; ++i) {
      const bfloat16x8_t k = load_bf16(keys[i / kSegmentVectors] + i % kSegmentVectors * kVector);
#pragma GCC unroll 8
      for (int g = 0; g < heads; ++g) {
        sums[g * vectors + i] = vbfdotq_laneq_f32(sums[g * vectors + i], k, query[g], pair);
      }
    }
#pragma GCC unroll 4
    for (int s = 0; s < (vectors + kSegmentVectors - 1) / kSegmentVectors; ++s) keys[s] += stride;
  }
};

// Peak bf16 dot products; see multiply_adds in simd_common.h.
int64_t dot_products(int64_t rounds, float* kept) {
  constexpr int kChains = 24;
  constexpr int kSteps = 8;
  const bfloat16x8_t half = vreinterpretq_bf16_u16(vdupq_n_u16(0x3f00));  // 0.5
  float32x4_t sums[kChains];
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) sums[i] = vdupq_n_f32(*kept + static_cast<float>(i));
#pragma GCC unroll 1
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 24
      for (int i = 0; i < kChains; ++i) sums[i] = vbfdotq_f32(sums[i], half, half);
    }
  }
#pragma GCC unroll 24
  for (int i = 1; i < kChains; ++i) sums[0] = vaddq_f32(sums[0], sums[i]);
  *kept = 0 * vgetq_lane_f32(sums[0], 0);
  return rounds * kSteps * kChains * 8;
}

}  // namespace

constinit const Bf16Kernels kNeonBf16Kernels = {
    nullptr,
    {nullptr, nullptr, attend_pairs<Bf16Math<BFloat16>>, attend_pairs<Bf16Math<Int8>>},
    {0, 0, 3, 3},
    dot_products};

}  // namespace neo_desktop
