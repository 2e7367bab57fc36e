// Code shared by NEON's kernels. See simd_common.h for the reason of internal linkage.
#pragma once

#include <arm_neon.h>

#include "quantised_tiles.h"

namespace neo_desktop {
namespace {

struct NeonRegisters {
  using Ints = int32x4_t;
  using Floats = float32x4_t;
  using Bytes = uint8x16_t;
  using Signed = int8x16_t;
  using Sum = int32x4_t;
  static constexpr int kLanes = 4;
  static constexpr int kRegisters = 32;
  static constexpr int kRowsAtOnce = 4;
  static constexpr int kSignedShift = 0;

  static void prefetch(const uint8_t* p) { __builtin_prefetch(p); }
  static float32x4_t zero() { return vdupq_n_f32(0.0f); }
  static int32x4_t broadcast(int32_t x) { return vdupq_n_s32(x); }
  template <int n>
  static int32x4_t broadcast_shifted(const int32_t* p) {
    return vshlq_n_s32(vld1q_dup_s32(p), n);
  }
  static float32x4_t broadcast(float x) { return vdupq_n_f32(x); }
  static uint8x16_t load(const uint8_t* p) { return vld1q_u8(p); }
  static int32x4_t load_small(const uint8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, sizeof four);
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)))));
  }
  static int32x4_t widened(int32x4_t sum) { return sum; }
  static int8x16_t prepare(uint8x16_t bytes) { return vreinterpretq_s8_u8(bytes); }
  template <int mask>
  static uint8x16_t masked(uint8x16_t bytes) {
    return vandq_u8(bytes, vdupq_n_u8(mask));
  }
  template <int n>
  static uint8x16_t shifted(uint8x16_t bytes) {
    return vshlq_u8(bytes, vdupq_n_s8(n));
  }
  static uint8x16_t either(uint8x16_t a, uint8x16_t b) { return vorrq_u8(a, b); }
  static uint8x16_t low(uint8x16_t bytes) { return masked<15>(bytes); }
  static uint8x16_t high(uint8x16_t bytes) { return vshrq_n_u8(bytes, 4); }
  static uint8x16_t looked_up(uint8x16_t bytes) { return vqtbl1q_u8(vld1q_u8(kFp4Numbers), bytes); }
  static int8x16_t four_columns(const int8_t* columns) {
    int32_t four;
    std::memcpy(&four, columns, sizeof four);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
  }
  static float32x4_t load_half(const uint8_t* p) {
    uint16_t halves[4];
    std::memcpy(halves, p, sizeof halves);
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves)));
  }
  static float32x4_t load_bfloat(const uint8_t* p) {
    uint16_t numbers[4];
    std::memcpy(numbers, p, sizeof numbers);
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(numbers), 16));
  }
  static float32x4_t to_floats(int32x4_t x) { return vcvtq_f32_s32(x); }
  static int32x4_t add(int32x4_t a, int32x4_t b) { return vaddq_s32(a, b); }
  static int32x4_t multiply(int32x4_t a, int32x4_t b) { return vmulq_s32(a, b); }
  static float32x4_t multiply(float32x4_t a, float32x4_t b) { return vmulq_f32(a, b); }
  static float32x4_t multiply_add(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }
  static void store(float* p, float32x4_t x) { vst1q_f32(p, x); }
};

}  // namespace
}  // namespace neo_desktop
