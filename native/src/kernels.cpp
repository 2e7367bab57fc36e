#include "neo_desktop/kernels.h"

#include "neo_desktop/cpu.h"

namespace neo_desktop {

const Kernels& kernels_for(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return kAvx512Kernels;
  if (isa == Isa::kAvx2) return kAvx2Kernels;
#endif
  (void)isa;
  return kScalarKernels;
}

}  // namespace neo_desktop
