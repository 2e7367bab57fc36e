// Conversions of 16-bit floats without special instructions: exact to float, round to nearest even from
// float.
#pragma once

#include <bit>
#include <cstdint>

#include "neo_desktop/dtype.h"

namespace neo_desktop {

inline float to_float(float x) { return x; }

inline float to_float(Int8 x) { return x.value; }

inline float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // Put exponent and mantissa in place, then let a multiplication correct the bias: denormals come out right.
  const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

inline void from_float(float x, float& out) { out = x; }

inline void from_float(float x, BFloat16& out) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  out.bits = static_cast<uint16_t>(nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void from_float(float x, Half& out) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | (magnitude >> 13 & 0x3ff);  // NaN, its payload kept
  } else if (magnitude >= 0x477ff000) {
    half = 0x7c00;  // 65520 and above round to infinity
  } else if (magnitude < 0x38800000) {
    // Below 2^-14 the result is a denormal: adding 0.5 makes the FPU round at 2^-24, the smallest step.
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  } else {
    half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  out.bits = static_cast<uint16_t>(sign | half);
}

}  // namespace neo_desktop
