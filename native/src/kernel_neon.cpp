#include "kernel_simd.h"
#include "neon.h"

namespace neo_desktop {

constinit const Kernels kNeonKernels = make_kernels<Neon>();

}  // namespace neo_desktop
