// Copies rows of several layers to their slots.
#pragma once

#include "neo_desktop/tensor_view.h"

namespace neo_desktop {

// into[layer, slots[i]] = rows[layer, i], on several threads.
//
// rows is [layers, n, width], into [layers, slots, width], both with one dtype and contiguous rows; slots is
// [n] int64, distinct (of equal slots, any row may win). Throws std::invalid_argument for mismatched
// arguments and for invalid slots, before it writes anything.
void store_rows(const TensorView& rows, const TensorView& slots, const TensorView& into, int num_threads);

}  // namespace neo_desktop
