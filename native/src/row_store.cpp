#include "neo_desktop/row_store.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "neo_desktop/cpu.h"
#include "neo_desktop/thread_pool.h"

namespace neo_desktop {
namespace {

constexpr int64_t kPieceBytes = 256 << 10;  // bytes that a thread copies per piece, about

void check(const TensorView& rows, const TensorView& slots, const TensorView& into) {
  check_dims(rows, "[layers, n of slots, width]", 3);
  check_dims(into, "[layers, slots, width]", 3);
  check_dims(slots, "[n]", 1);
  check_dtype(slots, {DType::kInt64});
  check_dtype(rows, {into.dtype});
  check_shape(rows, "[layers of into, n of slots, width of into]",
              {into.size(0), slots.size(0), into.size(2)});
  check_packed(rows, 1);
  check_packed(into, 1);
  check_packed(slots, 1);
  check_no_overlap(into, 2);
  const auto* numbers = static_cast<const int64_t*>(slots.data);
  for (int64_t i = 0; i < slots.size(0); ++i) {
    if (numbers[i] < 0 || numbers[i] >= into.size(1)) {
      fail("slots[", i, "] is ", numbers[i], "; into has slots 0 to ", into.size(1) - 1);
    }
  }
}

}  // namespace

void store_rows(const TensorView& rows, const TensorView& slots, const TensorView& into, int num_threads) {
  check(rows, slots, into);
  const int threads = check_num_threads(num_threads);
  const int64_t item = size_of(rows.dtype), row_bytes = rows.size(2) * item;
  const int64_t count = slots.size(0), total = rows.size(0) * count;
  if (total == 0 || row_bytes == 0) return;
  const auto* numbers = static_cast<const int64_t*>(slots.data);
  const auto* from = static_cast<const char*>(rows.data);
  auto* to = static_cast<char*>(into.data);
  const int64_t in_piece = std::max<int64_t>(kPieceBytes / row_bytes, 1);
  const int64_t pieces = (total + in_piece - 1) / in_piece;
  std::atomic<int64_t> next_piece{0};
  ThreadPool::shared().run(static_cast<int>(std::min<int64_t>(threads, pieces)), [&](int) {
    for (int64_t p = next_piece++; p < pieces; p = next_piece++) {
      const int64_t end = std::min(total, (p + 1) * in_piece);
      for (int64_t row = p * in_piece; row < end; ++row) {
        const int64_t layer = row / count, i = row % count;
        std::memcpy(to + (layer * into.stride(0) + numbers[i] * into.stride(1)) * item,
                    from + (layer * rows.stride(0) + i * rows.stride(1)) * item,
                    static_cast<size_t>(row_bytes));
      }
    }
  });
}

}  // namespace neo_desktop
