// NEON alone: products in 16 bits, added in pairs.
#include "quantised_neon.h"

namespace neo_desktop {
namespace {

struct Neon : NeonRegisters {
  static int32x4_t dot(int32x4_t sum, int8x16_t weights, const int8_t* columns) {
    const int8x16_t four = four_columns(columns);
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(weights), vget_low_s8(four)));
    const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(weights), vget_high_s8(four)));
    return vaddq_s32(sum, vpaddq_s32(low, high));
  }
  static int32x4_t dot(int32x4_t sum, uint8x16_t weights, const int8_t* columns) {
    return dot(sum, vreinterpretq_s8_u8(weights), columns);
  }
};

}  // namespace

constinit const QuantisedKernels kQuantisedNeon = make_quantised_kernels<Neon>();

}  // namespace neo_desktop
