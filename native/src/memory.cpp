#include "neo_desktop/memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "neo_desktop/cpu.h"
#include "neo_desktop/kernels.h"
#include "neo_desktop/thread_pool.h"

namespace neo_desktop {
namespace {

constexpr int64_t kPieceBytes = 1 << 20;  // bytes that a thread reads per piece

[[maybe_unused]] std::pair<uintptr_t, uintptr_t> whole_pages(const void* data, int64_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(data);
  return {(address + page - 1) / page * page, (address + bytes) / page * page};
}

}  // namespace

double read_seconds(const void* data, int64_t bytes, int num_threads) {
  const int64_t pieces = (bytes + kPieceBytes - 1) / kPieceBytes;
  const Kernels& kernels = kernels_for(best_isa());
  std::atomic<int64_t> next_piece{0};
  std::atomic<float> kept{0};
  const auto start = std::chrono::steady_clock::now();
  ThreadPool::shared().run(static_cast<int>(std::min<int64_t>(num_threads, pieces)), [&](int) {
    for (int64_t p = next_piece++; p < pieces; p = next_piece++) {
      const int64_t begin = p * kPieceBytes;
      const int64_t length = std::min(kPieceBytes, bytes - begin);
      kept.store(kernels.read(static_cast<const char*>(data) + begin, length), std::memory_order_relaxed);
    }
  });
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count();
}

bool advise_huge_pages(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  const auto [begin, end] = whole_pages(data, bytes);
  return begin < end && madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
#else
  return false;
#endif
}

bool interleave_numa_nodes(void* data, int64_t bytes) {
#if defined(SYS_mbind)
  // "0-1" or "0,2-3": the nodes that have memory.
  std::ifstream file("/sys/devices/system/node/has_memory");
  std::string ranges;
  if (!(file >> ranges)) return false;
  constexpr int kMaxNodes = 1024;
  constexpr int kWordBits = 8 * sizeof(unsigned long);
  unsigned long nodes[kMaxNodes / kWordBits] = {};
  int count = 0;
  std::istringstream parts(ranges);
  for (std::string part; std::getline(parts, part, ',');) {
    const int first = std::atoi(part.c_str());
    const auto dash = part.find('-');
    const int last = dash == std::string::npos ? first : std::atoi(part.c_str() + dash + 1);
    for (int node = first; node <= last && node < kMaxNodes; ++node, ++count) {
      nodes[node / kWordBits] |= 1UL << node % kWordBits;
    }
  }
  if (count < 2) return false;
  constexpr int kInterleave = 3;  // MPOL_INTERLEAVE
  const auto [begin, end] = whole_pages(data, bytes);
  return begin < end && syscall(SYS_mbind, begin, end - begin, kInterleave, nodes, kMaxNodes, 0) == 0;
#else
  return false;
#endif
}

}  // namespace neo_desktop
