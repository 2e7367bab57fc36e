// Code shared by kernels with 256-bit registers. See simd_common.h for the reason of internal linkage.
#pragma once

#include <immintrin.h>

#include "quantised_tiles.h"

namespace neo_desktop {
namespace {

struct Registers256 {
  using Ints = __m256i;
  using Floats = __m256;
  using Bytes = __m256i;
  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 16;
  static constexpr int kRowsAtOnce = 4;

  static void prefetch(const uint8_t* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
  static __m256 zero() { return _mm256_setzero_ps(); }
  static __m256i broadcast(int32_t x) { return _mm256_set1_epi32(x); }
  template <int n>
  static __m256i broadcast_shifted(const int32_t* p) {
    return _mm256_slli_epi32(_mm256_set1_epi32(*p), n);
  }
  static __m256 broadcast(float x) { return _mm256_set1_ps(x); }
  static __m256i load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
  static __m256i load_small(const uint8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
  }
  template <int mask>
  static __m256i masked(__m256i bytes) {
    return _mm256_and_si256(bytes, _mm256_set1_epi8(mask));
  }
  template <int n>
  static __m256i shifted(__m256i bytes) {
    return n >= 0 ? _mm256_slli_epi16(bytes, n > 0 ? n : 0) : _mm256_srli_epi16(bytes, n < 0 ? -n : 0);
  }
  static __m256i either(__m256i a, __m256i b) { return _mm256_or_si256(a, b); }
  static __m256i low(__m256i bytes) { return masked<15>(bytes); }
  static __m256i high(__m256i bytes) { return masked<15>(shifted<-4>(bytes)); }
  static __m256i looked_up(__m256i bytes) {
    const __m128i numbers = _mm_loadu_si128((const __m128i*)kFp4Numbers);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), bytes);
  }
  static __m256i four_columns(const int8_t* columns) {
    int32_t four;
    std::memcpy(&four, columns, sizeof four);
    return _mm256_set1_epi32(four);
  }
  static __m256 load_half(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static __m256 load_bfloat(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static __m256 to_floats(__m256i x) { return _mm256_cvtepi32_ps(x); }
  static __m256i add(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
  static __m256i multiply(__m256i a, __m256i b) { return _mm256_mullo_epi32(a, b); }
  static __m256 multiply(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
  static __m256 multiply_add(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
  static void store(float* p, __m256 x) { _mm256_storeu_ps(p, x); }
};

}  // namespace
}  // namespace neo_desktop
