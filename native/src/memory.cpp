#include "neo_desktop/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "neo_desktop/cpu.h"
#include "neo_desktop/kernels.h"
#include "neo_desktop/thread_pool.h"

namespace neo_desktop {
namespace {

constexpr int64_t kPieceBytes = 1 << 20;  // what a thread reads before it asks for more

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
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  return begin < end && madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
#else
  return false;
#endif
}

}  // namespace neo_desktop
