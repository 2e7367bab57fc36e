// One call of decode attention, divided among threads.
#pragma once

#include <cstdint>

#include "neo_desktop/kernels.h"
#include "neo_desktop/paged_attention.h"
#include "neo_desktop/paged_cache.h"

namespace neo_desktop {

// Arguments must have been checked; block_tokens is the size of their blocks. `sinks` [heads] may be null.
void run_decode(const DecodeArguments& arguments, const PagedCache& cache, int64_t block_tokens,
                int64_t window, const float* sinks, int num_threads, const Kernels& kernels);

}  // namespace neo_desktop
