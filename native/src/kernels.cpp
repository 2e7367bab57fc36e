#include "neo_desktop/kernels.h"

#include "neo_desktop/cpu.h"

namespace neo_desktop {

namespace {

[[maybe_unused]] Kernels with(Kernels kernels, const Bf16Kernels& bf16) {
  kernels.bf16 = bf16;
  return kernels;
}

}  // namespace

const Kernels& kernels_for(Isa isa) {
#if defined(__x86_64__)
  static const Kernels avx512bf16 = with(kAvx512Kernels, kAvx512Bf16Kernels);
  if (isa == Isa::kAvx512Bf16) return avx512bf16;
#if defined(NEO_DESKTOP_AMX)
  static const Kernels amx = [] {
    Kernels kernels = with(kAvx512Kernels, kAmxKernels);
    kernels.bf16.multiply_dense = kAvx512Bf16Kernels.multiply_dense;
    return kernels;
  }();
  if (isa == Isa::kAmx) return amx;
#endif
  if (isa == Isa::kAvx512) return kAvx512Kernels;
  if (isa == Isa::kAvx2) return kAvx2Kernels;
#elif defined(__aarch64__)
#if defined(NEO_DESKTOP_NEON_BF16)
  static const Kernels neon_bf16 = with(kNeonKernels, kNeonBf16Kernels);
  if (isa == Isa::kNeonBf16) return neon_bf16;
#endif
  if (isa == Isa::kNeon) return kNeonKernels;
#endif
  (void)isa;
  return kScalarKernels;
}

}  // namespace neo_desktop
