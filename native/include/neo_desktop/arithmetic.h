// Arithmetic throughput of the cores: the other limit that decode attention is measured against.
#pragma once

#include "neo_desktop/cpu.h"
#include "neo_desktop/dtype.h"

namespace neo_desktop {

// Multiply-adds per second of `num_threads` threads together; each works in registers for `seconds`.
// kBFloat16 uses the instruction set's bf16 dot products, if it has them; otherwise fp32. Throws
// std::invalid_argument for dtypes other than these two, and for seconds outside (0, 10].
double fma_rate(double seconds, int num_threads, Isa isa, DType dtype);

}  // namespace neo_desktop
