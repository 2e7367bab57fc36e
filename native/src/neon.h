// The vector registers of NEON on every 64-bit ARM processor, for its kernel and for kernels of its
// extensions. A vector is two registers. 16 of the 32 registers are then accumulators where the other kernels
// have 8, enough to keep the multipliers of large cores busy.
#pragma once

#include <arm_neon.h>

#include "simd_common.h"

namespace neo_desktop {
namespace {

struct Neon {
  struct Reg {
    float32x4_t low;
    float32x4_t high;
  };
  static constexpr int kLanes = 8;
  static constexpr int kSums = 8;  // accumulator vectors
  static constexpr int kHeadsAtOnce = 4;
  static constexpr int kRowsAtOnce = 4;  // for dense matmuls
  static constexpr int vectors_at_once(int heads) { return kSums / heads; }

  static Reg zero() { return broadcast(0); }
  static Reg broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static Reg add(Reg a, Reg b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
  static Reg subtract(Reg a, Reg b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
  static Reg multiply(Reg a, Reg b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
  static Reg divide(Reg a, Reg b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
  static Reg multiply_add(Reg a, Reg b, Reg c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
  }
  // The other number if one of the two is NaN.
  static Reg max(Reg a, Reg b) { return {vmaxnmq_f32(a.low, b.low), vmaxnmq_f32(a.high, b.high)}; }
  static bool any_greater(Reg a, Reg b) {
    return vmaxvq_u32(vorrq_u32(vcgtq_f32(a.low, b.low), vcgtq_f32(a.high, b.high))) != 0;
  }
  static bool any_differs(Reg a, Reg b) {
    return vminvq_u32(vandq_u32(vceqq_f32(a.low, b.low), vceqq_f32(a.high, b.high))) == 0;
  }

  static Reg load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static Reg load(const Half* p) {
    const float16x8_t x = vreinterpretq_f16_u16(vld1q_u16(&p->bits));
    return {vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)};
  }
  static Reg load(const BFloat16* p) {
    const uint16x8_t x = vld1q_u16(&p->bits);
    const uint16x8_t zero = vdupq_n_u16(0);
    return {vreinterpretq_f32_u16(vzip1q_u16(zero, x)), vreinterpretq_f32_u16(vzip2q_u16(zero, x))};
  }
  static Reg load(const Int8* p) {
    const int16x8_t x = vmovl_s8(vld1_s8(&p->value));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x))};
  }
  // p[0], p[2], ... and p[1], p[3], ...
  static void load_pairs(const BFloat16* p, Reg& even, Reg& odd) {
    const uint32x4_t low = vreinterpretq_u32_u16(vld1q_u16(&p->bits));
    const uint32x4_t high = vreinterpretq_u32_u16(vld1q_u16(&p->bits + 8));
    const uint32x4_t upper = vdupq_n_u32(0xffff0000);
    even = {vreinterpretq_f32_u32(vshlq_n_u32(low, 16)), vreinterpretq_f32_u32(vshlq_n_u32(high, 16))};
    odd = {vreinterpretq_f32_u32(vandq_u32(low, upper)), vreinterpretq_f32_u32(vandq_u32(high, upper))};
  }
  static void store(float* p, Reg x) {
    vst1q_f32(p, x.low);
    vst1q_f32(p + 4, x.high);
  }
  static void store(Half* p, Reg x) {
    vst1q_u16(&p->bits, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.low), x.high)));
  }
  static void store(BFloat16* p, Reg x) {
    vst1q_u16(&p->bits, vcombine_u16(to_bfloat16(x.low), to_bfloat16(x.high)));
  }

  // Lane i of the result is the sum of the lanes in rows[i].
  static Reg sum_each(const Reg* rows) { return {sum_four(rows), sum_four(rows + 4)}; }

  // p[0], p[1], p[0], p[1], ...
  static Reg broadcast_pair(const float* p) {
    const float32x2_t pair = vld1_f32(p);
    return {vcombine_f32(pair, pair), vcombine_f32(pair, pair)};
  }

  // Sums of adjacent lanes, a's before b's.
  static Reg add_pairs(Reg a, Reg b) { return {vpaddq_f32(a.low, a.high), vpaddq_f32(b.low, b.high)}; }

  // The maximum within each run of `width` lanes, in every lane of the run.
  template <int width>
  static Reg max_within(Reg x) {
    if constexpr (width > 1) x = max(x, {vrev64q_f32(x.low), vrev64q_f32(x.high)});
    if constexpr (width > 2) x = max(x, {vextq_f32(x.low, x.low, 2), vextq_f32(x.high, x.high, 2)});
    if constexpr (width > 4) x = max(x, {x.high, x.low});
    return x;
  }

  // 2^x for x <= 0, relative error below 3e-7, NaN for NaN. Below -126, where fp32 turns denormal, 0.
  static Reg exp2(Reg x) { return {exp2(x.low), exp2(x.high)}; }

 private:
  static float32x4_t sum_four(const Reg* rows) {
    float32x4_t halves[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) halves[i] = vaddq_f32(rows[i].low, rows[i].high);
    return vpaddq_f32(vpaddq_f32(halves[0], halves[1]), vpaddq_f32(halves[2], halves[3]));
  }

  static float32x4_t exp2(float32x4_t x) {
    const uint32x4_t tiny = vcltq_f32(x, vdupq_n_f32(-126.0f));
    x = vmaxq_f32(x, vdupq_n_f32(-126.0f));  // NaN where x is
    const float32x4_t whole = vrndnq_f32(x);
    const float32x4_t part = vsubq_f32(x, whole);
    float32x4_t power = vdupq_n_f32(1.33908634e-3f);  // Chebyshev interpolation of 2^x on [-1/2, 1/2]
    power = vfmaq_f32(vdupq_n_f32(9.67603192e-3f), power, part);
    power = vfmaq_f32(vdupq_n_f32(5.55035711e-2f), power, part);
    power = vfmaq_f32(vdupq_n_f32(2.40221075e-1f), power, part);
    power = vfmaq_f32(vdupq_n_f32(6.93147188e-1f), power, part);
    power = vfmaq_f32(vdupq_n_f32(1.00000008f), power, part);
    const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(whole), vdupq_n_s32(127));
    power = vmulq_f32(power, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(power), tiny));
  }

  static uint16x4_t to_bfloat16(float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet_nan = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet_nan), 16);
  }
};

}  // namespace
}  // namespace neo_desktop
