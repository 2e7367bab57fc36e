// bf16 in the registers of AVX-512 with BF16, for its kernel and for AMX's.
#pragma once

#include "avx512.h"

namespace neo_desktop {
namespace {

constexpr int kPairLanes = 32;  // bf16 values in a register

// 32 values as bf16, which represents int8 exactly.
inline __m512i load_bf16(const BFloat16* p) { return _mm512_loadu_si512(p); }
inline __m512i load_bf16(const Int8* p) {
  const __m512 low = Avx512::load(p);
  return (__m512i)_mm512_cvtne2ps_pbh(Avx512::load(p + Avx512::kLanes), low);
}

// The first `count` values, then zeros.
inline __m512i load_bf16(const BFloat16* p, int count) {
  return _mm512_maskz_loadu_epi16((1u << count) - 1, p);
}
inline __m512i load_bf16(const Int8* p, int count) {
  alignas(kPairLanes) Int8 values[kPairLanes] = {};
  __builtin_memcpy(values, p, count);
  return load_bf16(values);
}

inline __m512 widen_bf16(__m256i values) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

// Splits a weight into the sum of two bf16, 17 bits in total: almost the accuracy of fp32.
inline void split_weights(const float* weights, int count, BFloat16* large, BFloat16* rest) {
  for (int i = 0; i < count; i += Avx512::kLanes) {
    const __m512 weight = Avx512::load(weights + i);
    const __m256i first = (__m256i)_mm512_cvtneps_pbh(weight);
    const __m512 second = Avx512::subtract(weight, widen_bf16(first));
    _mm256_store_si256((__m256i*)(large + i), first);
    _mm256_store_si256((__m256i*)(rest + i), (__m256i)_mm512_cvtneps_pbh(second));
  }
}

// from, from, from + 1, from + 1, ... of 16 bits each
inline __m512i twice_each(int from) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i index = _mm512_add_epi32(lane, _mm512_set1_epi32(from));
  return _mm512_or_si512(index, _mm512_slli_epi32(index, 16));
}

// Interleaves values of a and b: a0 b0 a1 b1 ..., the first 32 here, the rest in interleave_high.
inline __m512i interleave_low(__m512i a, __m512i b) {
  return _mm512_permutex2var_epi16(a, _mm512_add_epi16(_mm512_set1_epi32(32 << 16), twice_each(0)), b);
}
inline __m512i interleave_high(__m512i a, __m512i b) {
  return _mm512_permutex2var_epi16(a, _mm512_add_epi16(_mm512_set1_epi32(32 << 16), twice_each(16)), b);
}

}  // namespace
}  // namespace neo_desktop
