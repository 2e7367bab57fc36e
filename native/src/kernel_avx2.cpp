// AVX2 with FMA and F16C.
#include <immintrin.h>

#include "kernel_simd.h"

namespace neo_desktop {
namespace {

struct Avx2 {
  using Reg = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kSums = 8;  // accumulators, of 16 registers
  static constexpr int kHeadsAtOnce = 4;
  static constexpr int kRowsAtOnce = 4;  // for dense matmuls
  // Four heads have 12 sums, enough to hide an addition's latency.
  static constexpr int vectors_at_once(int heads) { return heads == 4 ? 3 : kSums / heads; }

  static Reg zero() { return _mm256_setzero_ps(); }
  static Reg broadcast(float x) { return _mm256_set1_ps(x); }
  static Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
  static Reg subtract(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
  static Reg multiply(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
  static Reg divide(Reg a, Reg b) { return _mm256_div_ps(a, b); }
  static Reg multiply_add(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
  static Reg max(Reg a, Reg b) { return _mm256_max_ps(a, b); }  // b where either is NaN
  static bool any_greater(Reg a, Reg b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
  static bool any_differs(Reg a, Reg b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ)) != 0; }

  static Reg load(const float* p) { return _mm256_loadu_ps(p); }
  static Reg load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static Reg load(const BFloat16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static Reg load(const Int8* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
  }
  // p[0], p[2], ... and p[1], p[3], ...
  static void load_pairs(const BFloat16* p, Reg& even, Reg& odd) {
    const __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
    even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000)));
  }
  static void store(float* p, Reg x) { _mm256_storeu_ps(p, x); }
  static void store(Half* p, Reg x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void store(BFloat16* p, Reg x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet_nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i wide = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet_nan, nan), 16);
    const __m128i low = _mm256_castsi256_si128(wide);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(low, _mm256_extracti128_si256(wide, 1)));
  }

  // Lane i of the result is the sum of the lanes in rows[i].
  static Reg sum_each(const Reg* rows) {
    Reg pairs[4];  // per 128-bit half: two partial sums for each of two rows
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      pairs[i] = _mm256_add_ps(_mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
                               _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]));
    }
    Reg quads[2];  // per half: one partial sum for each of four rows
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m256d a = _mm256_castps_pd(pairs[2 * i]);
      const __m256d b = _mm256_castps_pd(pairs[2 * i + 1]);
      quads[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                               _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(quads[0], quads[1], 0x20),
                         _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
  }

  // p[0], p[1], p[0], p[1], ...
  static Reg broadcast_pair(const float* p) {
    double pair;  // broadcast by the load
    __builtin_memcpy(&pair, p, sizeof pair);
    return _mm256_castpd_ps(_mm256_set1_pd(pair));
  }

  // Sums of adjacent lanes, a's before b's.
  static Reg add_pairs(Reg a, Reg b) {
    const __m256d sums = _mm256_castps_pd(_mm256_hadd_ps(a, b));  // the middle two quarters are swapped
    return _mm256_castpd_ps(_mm256_permute4x64_pd(sums, 0xd8));
  }

  // The maximum within each run of `width` lanes, in every lane of the run.
  template <int width>
  static Reg max_within(Reg x) {
    if constexpr (width > 1) x = _mm256_max_ps(x, _mm256_permute_ps(x, 0xb1));
    if constexpr (width > 2) x = _mm256_max_ps(x, _mm256_permute_ps(x, 0x4e));
    if constexpr (width > 4) x = _mm256_max_ps(x, _mm256_permute2f128_ps(x, x, 0x01));
    return x;
  }

  // 2^x for x <= 0, relative error below 3e-7, NaN for NaN. Below -126, where fp32 turns denormal, 0.
  static Reg exp2(Reg x) {
    const Reg tiny = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_LT_OQ);
    x = _mm256_max_ps(_mm256_set1_ps(-126.0f), x);  // this operand order keeps NaN
    const Reg whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Reg part = _mm256_sub_ps(x, whole);
    Reg power = _mm256_set1_ps(1.33908634e-3f);  // Chebyshev interpolation of 2^x on [-1/2, 1/2]
    power = _mm256_fmadd_ps(power, part, _mm256_set1_ps(9.67603192e-3f));
    power = _mm256_fmadd_ps(power, part, _mm256_set1_ps(5.55035711e-2f));
    power = _mm256_fmadd_ps(power, part, _mm256_set1_ps(2.40221075e-1f));
    power = _mm256_fmadd_ps(power, part, _mm256_set1_ps(6.93147188e-1f));
    power = _mm256_fmadd_ps(power, part, _mm256_set1_ps(1.00000008f));
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    power = _mm256_mul_ps(power, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
    return _mm256_andnot_ps(tiny, power);
  }
};

}  // namespace

constinit const Kernels kAvx2Kernels = make_kernels<Avx2>();

}  // namespace neo_desktop
