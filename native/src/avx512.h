// The vector registers of AVX-512 (F, BW, VL, DQ), for its kernel and for kernels of its extensions.
#pragma once

#include <immintrin.h>

#include "simd_common.h"

namespace neo_desktop {
namespace {

struct Avx512 {
  using Reg = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kSums = 16;  // accumulators, of 32 registers
  static constexpr int kHeadsAtOnce = 8;
  static constexpr int kRowsAtOnce = 8;  // for dense matmuls
  static constexpr int vectors_at_once(int heads) { return kSums / heads; }

  static Reg zero() { return _mm512_setzero_ps(); }
  static Reg broadcast(float x) { return _mm512_set1_ps(x); }
  static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
  static Reg subtract(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
  static Reg multiply(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
  static Reg divide(Reg a, Reg b) { return _mm512_div_ps(a, b); }
  static Reg multiply_add(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
  static Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); }  // b where either is NaN
  static bool any_greater(Reg a, Reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
  static bool any_differs(Reg a, Reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ) != 0; }

  static Reg load(const float* p) { return _mm512_loadu_ps(p); }
  static Reg load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static Reg load(const BFloat16* p) { return from_bfloat16(_mm256_loadu_si256((const __m256i*)p)); }
  static Reg load(const Int8* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
  // p[0], p[2], ... and p[1], p[3], ...
  static void load_pairs(const BFloat16* p, Reg& even, Reg& odd) {
    const __m512i pairs = _mm512_loadu_si512(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)));
  }
  static void store(float* p, Reg x) { _mm512_storeu_ps(p, x); }
  static void store(Half* p, Reg x) { _mm256_storeu_si256((__m256i*)p, to_half(x)); }
  static void store(BFloat16* p, Reg x) { _mm256_storeu_si256((__m256i*)p, to_bfloat16(x)); }

  // The lower eight lanes; loads fill the upper ones with zero.
  static Reg load_half(const float* p) { return _mm512_zextps256_ps512(_mm256_loadu_ps(p)); }
  static Reg load_half(const Half* p) {
    return _mm512_zextps256_ps512(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)));
  }
  static Reg load_half(const BFloat16* p) {
    return from_bfloat16(_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)p)));
  }
  static Reg load_half(const Int8* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
  }
  static void store_half(float* p, Reg x) { _mm256_storeu_ps(p, _mm512_castps512_ps256(x)); }
  static void store_half(Half* p, Reg x) {
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(to_half(x)));
  }
  static void store_half(BFloat16* p, Reg x) {
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(to_bfloat16(x)));
  }

  // Lane i of the result is the sum of the lanes in rows[i].
  static Reg sum_each(const Reg* rows) {
    Reg pairs[8];  // per 128-bit quarter: two partial sums for each of two rows
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
                               _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]));
    }
    Reg quads[4];  // per quarter: one partial sum for each of four rows
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512d a = _mm512_castps_pd(pairs[2 * i]);
      const __m512d b = _mm512_castps_pd(pairs[2 * i + 1]);
      quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                               _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const Reg low = _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x44),
                                  _mm512_shuffle_f32x4(quads[0], quads[1], 0xee));
    const Reg high = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x44),
                                   _mm512_shuffle_f32x4(quads[2], quads[3], 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  }

  // p[0], p[1], p[0], p[1], ...
  static Reg broadcast_pair(const float* p) {
    double pair;  // broadcast by the load; from a register it would use an arithmetic port
    __builtin_memcpy(&pair, p, sizeof pair);
    return _mm512_castpd_ps(_mm512_set1_pd(pair));
  }

  // Sums of adjacent lanes, a's before b's.
  static Reg add_pairs(Reg a, Reg b) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return _mm512_add_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
  }

  // The maximum within each run of `width` lanes, in every lane of the run.
  template <int width>
  static Reg max_within(Reg x) {
    if constexpr (width > 1) x = _mm512_max_ps(x, _mm512_permute_ps(x, 0xb1));
    if constexpr (width > 2) x = _mm512_max_ps(x, _mm512_permute_ps(x, 0x4e));
    if constexpr (width > 4) x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    if constexpr (width > 8) x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    return x;
  }

  // 2^x for x <= 0, relative error below 2e-7, NaN for NaN: 2^(x - floor(x)), with floor(x) added to the
  // exponent.
  static Reg exp2(Reg x) {
    const Reg part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Reg power = _mm512_set1_ps(1.87757425e-3f);  // minimax relative error on [0, 1]
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(8.98933876e-3f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(5.58263250e-2f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(2.40153611e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(6.93153083e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(9.99999940e-1f));
    return _mm512_scalef_ps(power, x);  // times 2^floor(x)
  }

 private:
  static Reg from_bfloat16(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  static __m256i to_half(Reg x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static __m256i to_bfloat16(Reg x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet_nan = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet_nan), 16));
  }
};

}  // namespace
}  // namespace neo_desktop
