// Rows of several layers at once to the slots where they are kept.
#pragma once

#include "neo_desktop/tensor_view.h"

namespace neo_desktop {

// into[layer, slots[i]] = rows[layer, i], on several threads.
//
// rows is [layers, n, width], into [layers, slots, width], both of one dtype with contiguous rows; slots is
// [n] int64, all different (of equal ones, any may win). Throws std::invalid_argument if they do not fit
// together or a slot is not there; then nothing was written.
void store_rows(const TensorView& rows, const TensorView& slots, const TensorView& into, int num_threads);

}  // namespace neo_desktop
