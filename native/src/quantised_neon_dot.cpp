// NEON with dot products.
#include "quantised_neon.h"

namespace neo_desktop {
namespace {

struct NeonDot : NeonRegisters {
  static int32x4_t dot(int32x4_t sum, int8x16_t weights, const int8_t* columns) {
    return vdotq_s32(sum, weights, four_columns(columns));
  }
  static int32x4_t dot(int32x4_t sum, uint8x16_t weights, const int8_t* columns) {
    return dot(sum, vreinterpretq_s8_u8(weights), columns);
  }
};

}  // namespace

constinit const QuantisedKernels kQuantisedNeonDot = make_quantised_kernels<NeonDot>();

}  // namespace neo_desktop
