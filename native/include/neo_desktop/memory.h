// Host memory: read bandwidth (the limit that decode attention is measured against), and page placement.
#pragma once

#include <cstdint>

namespace neo_desktop {

// Seconds to read `bytes` bytes at `data` once, front to back, with this many threads.
double read_seconds(const void* data, int64_t bytes, int num_threads);

// Asks for huge pages behind [data, data + bytes), before its first use: scattered reads of a large cache
// then cause far fewer TLB misses. Returns false if the system has none.
bool advise_huge_pages(void* data, int64_t bytes);

// Interleaves the pages of [data, data + bytes) over all NUMA nodes, before their first use: a call's threads
// then get the bandwidth of every node, on any CPU. Returns false if the system has one node only.
bool interleave_numa_nodes(void* data, int64_t bytes);

}  // namespace neo_desktop
