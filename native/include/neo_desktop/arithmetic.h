// How fast the cores multiply and add: the other limit that decode attention is measured against.
#pragma once

#include "neo_desktop/cpu.h"
#include "neo_desktop/dtype.h"

namespace neo_desktop {

// Multiply-adds per second of this many threads together, each working in its registers for `seconds`.
// For kBFloat16 with the instruction set's dot products, where it has them; in fp32 otherwise. Throws
// std::invalid_argument for any other dtype than these two, and for seconds outside (0, 10].
double fma_rate(double seconds, int num_threads, Isa isa, DType dtype);

}  // namespace neo_desktop
