// Host memory: how fast it is read (the limit that decode attention is measured against), and its pages.
#pragma once

#include <cstdint>

namespace neo_desktop {

// Seconds to read `bytes` bytes at `data` once, front to back, with this many threads.
double read_seconds(const void* data, int64_t bytes, int num_threads);

// Asks for huge pages behind [data, data + bytes), before its first use: scattered reads of a large cache
// then miss the TLB far less. Returns false where the system has none to give.
bool advise_huge_pages(void* data, int64_t bytes);

// Spreads the pages of [data, data + bytes) over all NUMA nodes, before their first use: a call's threads
// then read with the bandwidth of all of them, wherever they run. Returns false where there is one node only.
bool interleave_numa_nodes(void* data, int64_t bytes);

}  // namespace neo_desktop
