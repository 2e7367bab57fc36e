#include "avx512.h"
#include "kernel_simd.h"

namespace neo_desktop {

constinit const Kernels kAvx512Kernels = make_kernels<Avx512>();

}  // namespace neo_desktop
