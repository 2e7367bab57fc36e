#include "neo_desktop/quantised_linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>

#include "neo_desktop/kernels.h"
#include "neo_desktop/thread_pool.h"

namespace neo_desktop {
namespace {

constexpr int64_t kChunkBytes = 256 << 10;      // of quantised rows that tiles are multiplied with at a time
constexpr int64_t kSerialElements = 1 << 15;    // of x, that one thread quantises before others have woken
constexpr int64_t kBytesPerThread = 192 << 10;  // of weights: fewer are multiplied before a thread has woken
constexpr int64_t kTakesPerThread = 16;         // so that a thread that is held up leaves the rest to others

const QuantisedKernels& quantised_kernels_for(Isa isa) {
#if defined(__x86_64__)
  const bool is_avx512 = isa == Isa::kAvx512 || isa == Isa::kAvx512Bf16 || isa == Isa::kAmx;
  if (is_avx512 && __builtin_cpu_supports("avx512vnni")) return kQuantisedVnni;
#if defined(NEO_DESKTOP_AVX_VNNI)
  if (isa != Isa::kScalar && has_avx_vnni()) return kQuantisedAvxVnni;
#endif
  if (isa != Isa::kScalar) return kQuantisedAvx2;
#elif defined(__aarch64__)
#if defined(NEO_DESKTOP_NEON_DOT)
  if (isa != Isa::kScalar && has_neon_dot()) return kQuantisedNeonDot;
#endif
  if (isa != Isa::kScalar) return kQuantisedNeon;
#endif
  (void)isa;
  return kQuantisedScalar;
}

int64_t tile_bytes(WeightType type, int64_t columns) {
  const WeightLayout& of = layout_of(type);
  return columns / kBlockColumns / unit_blocks(of) * unit_bytes(of);
}

int64_t tiles_of(const QuantisedPart& part) { return (part.rows + kTileRows - 1) / kTileRows; }

void check(const TensorView& x, const std::vector<QuantisedPart>& parts,
           const std::optional<TensorView>& bias, const TensorView& out) {
  check_dims(x, "[n, columns]", 2);
  check_dtype(x, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  check_packed(x, 1);
  if (x.size(1) % kBlockColumns != 0 || x.size(1) == 0) {
    fail("x has ", x.size(1), " columns; expected a multiple of ", kBlockColumns);
  }
  int64_t rows = 0;
  for (const QuantisedPart& part : parts) {
    const int64_t columns = unit_blocks(layout_of(part.type)) * kBlockColumns;
    if (x.size(1) % columns != 0) fail("x has ", x.size(1), " columns; expected a multiple of ", columns);
    const int64_t bytes = tiles_of(part) * tile_bytes(part.type, x.size(1));
    if (part.rows < 1 || part.bytes != bytes) {
      fail("a part of ", part.rows, " rows has ", part.bytes, " bytes; expected ", bytes);
    }
    rows += part.rows;
  }
  check_dims(out, "[n, rows]", 2);
  check_shape(out, "[n, rows]", {x.size(0), rows});
  check_dtype(out, {x.dtype});
  check_packed(out, 1);
  check_no_overlap(out, 1);
  if (bias) {
    check_shape(*bias, "[rows]", {rows});
    check_dtype(*bias, {x.dtype});
    check_packed(*bias, 1);
  }
}

// Memory that a calling thread keeps between its calls.
class Memory {
 public:
  static Memory& own() {
    thread_local Memory memory;
    return memory;
  }

  // Begins with a cache line.
  uint8_t* bytes(int64_t count) {
    if (count > capacity_) {
      memory_.reset();
      memory_.reset(new (kAlignment) uint8_t[count]);
      capacity_ = count;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(uint8_t* p) const { operator delete[](p, kAlignment); }
  };
  std::unique_ptr<uint8_t[], Free> memory_;
  int64_t capacity_ = 0;
};

class Call {
 public:
  Call(const TensorView& x, const std::vector<QuantisedPart>& parts, const std::optional<TensorView>& bias,
       const TensorView& out, Isa isa)
      : x_(x),
        parts_(parts),
        bias_(bias),
        out_(out),
        quantised_(quantised_kernels_for(isa)),
        kernels_(kernels_for(isa)),
        blocks_(x.size(1) / kBlockColumns),
        tiles_(std::accumulate(parts.begin(), parts.end(), int64_t{0},
                               [](int64_t sum, const auto& part) { return sum + tiles_of(part); })),
        bytes_(std::accumulate(parts.begin(), parts.end(), int64_t{0},
                               [](int64_t sum, const auto& part) { return sum + part.bytes; })) {}

  void run(int num_threads) {
    const int64_t n = x_.size(0), columns = x_.size(1);
    const int64_t chunk = std::clamp<int64_t>(kChunkBytes / columns / 8 * 8, 8, std::max<int64_t>(n, 8));
    const int64_t rows = std::min(n, chunk);
    memory_ = Memory::own().bytes(rows * row_bytes() + num_threads * columns * 4);
    floats_ = reinterpret_cast<float*>(memory_ + rows * row_bytes());
    for (int64_t first = 0; first < n; first += rows) {
      multiply(first, std::min(rows, n - first), num_threads);
    }
  }

 private:
  // Numbers, scales and sums.
  int64_t row_bytes() const { return blocks_ * (kBlockColumns + 12); }

  // Of the rows that are multiplied together with this one, of so many.
  QuantisedRows group_of(int64_t row, int64_t count) const {
    const int64_t first = row / quantised_.rows_at_once * quantised_.rows_at_once;
    const int rows = static_cast<int>(std::min<int64_t>(quantised_.rows_at_once, count - first));
    uint8_t* memory = memory_ + first * row_bytes();
    auto* scales = reinterpret_cast<float*>(memory + rows * x_.size(1));
    auto* sums = reinterpret_cast<int32_t*>(scales + rows * blocks_);
    return {reinterpret_cast<int8_t*>(memory), scales, sums, sums + rows * blocks_, blocks_, rows};
  }

  // Rows [first, first + count) of x.
  void multiply(int64_t first, int64_t count, int num_threads) {
    const int64_t passes = (count + quantised_.rows_at_once - 1) / quantised_.rows_at_once;
    const int64_t useful = std::min(passes * bytes_ / kBytesPerThread, tiles_);
    const int threads = static_cast<int>(std::clamp<int64_t>(useful, 1, num_threads));
    const int quantising = count * x_.size(1) <= kSerialElements ? 1 : threads;
    std::atomic<int64_t> next_row{0}, next_tile{0};
    ThreadPool::shared().run(quantising, [&](int participant) {
      for (int64_t row; (row = next_row.fetch_add(1, std::memory_order_relaxed)) < count;) {
        quantise(first, row, count, floats_ + participant * x_.size(1));
      }
    });
    const int64_t take = std::max<int64_t>(tiles_ / (threads * kTakesPerThread), 1);
    ThreadPool::shared().run(threads, [&](int) {
      for (int64_t begin; (begin = next_tile.fetch_add(take, std::memory_order_relaxed)) < tiles_;) {
        for (int64_t tile = begin; tile < std::min(begin + take, tiles_); ++tile) {
          multiply_tile(tile, first, count);
        }
      }
    });
  }

  void quantise(int64_t first, int64_t row, int64_t count, float* floats) const {
    const void* source = offset(x_.data, x_.dtype, (first + row) * x_.stride(0));
    const auto* numbers = static_cast<const float*>(source);
    if (x_.dtype != DType::kFloat32) {
      kernels_.widen[static_cast<int>(x_.dtype)](source, floats, static_cast<int>(x_.size(1)), 1.0f);
      numbers = floats;
    }
    quantised_.quantise(numbers, group_of(row, count), static_cast<int>(row % quantised_.rows_at_once));
  }

  void multiply_tile(int64_t tile, int64_t first, int64_t count) const {
    int64_t column = 0;  // of the result
    const QuantisedPart* part = parts_.data();
    for (; tile >= tiles_of(*part); ++part) {
      tile -= tiles_of(*part);
      column += part->rows;
    }
    const int64_t width = std::min<int64_t>(part->rows - tile * kTileRows, kTileRows);
    column += tile * kTileRows;
    const int dtype = static_cast<int>(out_.dtype);
    const int64_t bytes = width * size_of(out_.dtype);
    alignas(64) uint8_t narrow[kTileRows * 4]{};
    alignas(64) float bias[kTileRows];
    if (bias_) {
      std::memcpy(narrow, offset(bias_->data, bias_->dtype, column), bytes);
      kernels_.widen[dtype](narrow, bias, kTileRows, 1.0f);
    }
    const uint8_t* packed = part->packed + tile * tile_bytes(part->type, x_.size(1));
    for (int64_t row = 0; row < count; row += quantised_.rows_at_once) {
      const QuantisedRows group = group_of(row, count);
      alignas(64) float products[8 * kTileRows];
      quantised_.multiply[static_cast<int>(part->type)](packed, group, products);
      for (int i = 0; i < group.rows; ++i) {
        float* of_row = products + i * kTileRows;
        for (int j = 0; bias_ && j < kTileRows; ++j) of_row[j] += bias[j];
        kernels_.narrow[dtype](of_row, narrow, kTileRows, 1.0f);
        std::memcpy(offset(out_.data, out_.dtype, (first + row + i) * out_.stride(0) + column), narrow,
                    bytes);
      }
    }
  }

  static uint8_t* offset(void* data, DType dtype, int64_t elements) {
    return static_cast<uint8_t*>(data) + elements * size_of(dtype);
  }

  const TensorView& x_;
  const std::vector<QuantisedPart>& parts_;
  const std::optional<TensorView>& bias_;
  const TensorView& out_;
  const QuantisedKernels& quantised_;
  const Kernels& kernels_;
  const int64_t blocks_;
  const int64_t tiles_;
  const int64_t bytes_;        // of the weights
  uint8_t* memory_ = nullptr;  // of one QuantisedRows after the other
  float* floats_ = nullptr;    // [threads, columns]
};

}  // namespace

void quantised_linear(const TensorView& x, const std::vector<QuantisedPart>& parts,
                      const std::optional<TensorView>& bias, const TensorView& out, int num_threads,
                      Isa isa) {
  check(x, parts, bias, out);
  if (x.size(0) > 0) Call(x, parts, bias, out, isa).run(check_num_threads(num_threads));
}

}  // namespace neo_desktop
