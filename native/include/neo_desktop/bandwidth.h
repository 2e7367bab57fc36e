// How fast this machine reads memory: the limit that decode attention is measured against.
#pragma once

#include <cstdint>

namespace neo_desktop {

// Seconds to read `bytes` bytes at `data` once, front to back, with this many threads.
double read_seconds(const void* data, int64_t bytes, int num_threads);

}  // namespace neo_desktop
