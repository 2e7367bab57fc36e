#include "neo_desktop/kernels.h"

#include "neo_desktop/cpu.h"

namespace neo_desktop {

namespace {

[[maybe_unused]] Kernels with(Kernels kernels, const Bf16Kernels& attend_bf16) {
  kernels.attend_bf16 = attend_bf16;
  return kernels;
}

}  // namespace

const Kernels& kernels_for(Isa isa) {
#if defined(__x86_64__)
  static const Kernels avx512bf16 = with(kAvx512Kernels, kAvx512Bf16Kernels);
  if (isa == Isa::kAvx512Bf16) return avx512bf16;
  if (isa == Isa::kAvx512) return kAvx512Kernels;
  if (isa == Isa::kAvx2) return kAvx2Kernels;
#endif
  (void)isa;
  return kScalarKernels;
}

}  // namespace neo_desktop
