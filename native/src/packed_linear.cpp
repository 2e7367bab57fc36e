#include "neo_desktop/packed_linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "neo_desktop/cpu.h"
#include "neo_desktop/thread_pool.h"
#include "packed_product.h"

namespace neo_desktop {
namespace {

constexpr int64_t kChunkBytes = 256 << 10;     // of quantised rows per pass over the tiles
constexpr int64_t kDenseChunkBytes = 1 << 20;  // the same for dense rows
constexpr int64_t kSerialElements = 1 << 15;   // of x; one thread quantises them before others wake
constexpr int64_t kBytesPerThread = 192
                                    << 10;  // of weights; waking a thread takes longer than multiplying fewer
constexpr int64_t kRest = 4;                // a thread takes a quarter of its share of the rest
constexpr int64_t kTakesPerThread = 16;     // so that others can do the work of a delayed thread

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
  if (is_dense(type)) return columns * kTileRows * size_of(dtype_of(type));
  const WeightLayout& of = layout_of(type);
  return columns / kBlockColumns / unit_blocks(of) * unit_bytes(of);
}

int64_t tiles_of(const PackedPart& part) { return (part.rows + kTileRows - 1) / kTileRows; }

// Rows [first, first + count), which begin and end with tiles of one part.
PackedMatrix cut(const PackedMatrix& matrix, int64_t first, int64_t count) {
  PackedMatrix found;
  if (matrix.bias) {
    found.bias = *matrix.bias;
    found.bias->data = static_cast<uint8_t*>(found.bias->data) + first * size_of(found.bias->dtype);
    found.bias->shape[0] = count;
  }
  for (const PackedPart& part : matrix.parts) {
    if (first < part.rows) {
      if (first + count > part.rows) fail("a divided matrix's rows lie in two parts");
      const int64_t tile_bytes = part.bytes / tiles_of(part);
      found.parts.push_back({part.type, part.packed + first / kTileRows * tile_bytes,
                             (count + kTileRows - 1) / kTileRows * tile_bytes, count});
      return found;
    }
    first -= part.rows;
  }
  fail("there are no rows for the last matrices");
}

void multiply_rows(PackedProduct& product, int64_t first, int64_t count, uint8_t* memory, float* floats,
                   int num_threads) {
  product.begin(first, count, memory);
  const int64_t passes = (count + product.rows_at_once() - 1) / product.rows_at_once();
  const int threads = useful_threads(passes * product.weight_bytes(), product.tiles(), num_threads);
  const int quantising = count * product.columns() <= kSerialElements ? 1 : threads;
  std::atomic<int64_t> next_row{0}, next_tile{0};
  ThreadPool::shared().run(quantising, [&](int participant) {
    for (int64_t row; (row = next_row.fetch_add(1, std::memory_order_relaxed)) < count;) {
      product.prepare(row, floats + participant * product.columns());
    }
  });
  // Long runs of tiles first, which read fast, then shorter ones, so that all threads finish together.
  const int64_t tiles = product.tiles();
  ThreadPool::shared().run(threads, [&](int) {
    for (int64_t begin = next_tile; begin < tiles;) {
      const int64_t end = begin + std::max<int64_t>((tiles - begin) / (threads * kRest), 1);
      if (!next_tile.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      for (int64_t tile = begin; tile < end; ++tile) product.multiply(tile);
      begin = next_tile.load(std::memory_order_relaxed);
    }
  });
}

}  // namespace

int64_t PackedMatrix::rows() const {
  int64_t rows = 0;
  for (const PackedPart& part : parts) rows += part.rows;
  return rows;
}

std::vector<PackedMatrix> divided(const PackedMatrix& matrix, int64_t count) {
  if (count == 1) return {matrix};
  const int64_t rows = matrix.rows();
  if (count < 1 || rows % count != 0 || rows / count % kTileRows != 0) {
    fail(rows, " rows cannot be divided into ", count, " matrices with a multiple of ", kTileRows);
  }
  if (matrix.bias) check_shape(*matrix.bias, "[rows]", {rows});
  std::vector<PackedMatrix> found;
  for (int64_t i = 0; i < count; ++i) found.push_back(cut(matrix, rows / count * i, rows / count));
  return found;
}

void check_packed_linear(const TensorView& x, const std::vector<PackedPart>& parts,
                         const std::optional<TensorView>& bias, const TensorView& out) {
  check_dims(x, "[n, columns]", 2);
  check_dtype(x, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  check_packed(x, 1);
  if (parts.empty()) fail("there are no weights");
  int64_t rows = 0;
  for (const PackedPart& part : parts) {
    if (is_dense(part.type) != is_dense(parts[0].type)) fail("some parts are quantised, others are not");
    const int64_t columns = is_dense(part.type) ? 2 : unit_blocks(layout_of(part.type)) * kBlockColumns;
    if (x.size(1) % columns != 0 || x.size(1) == 0)
      fail("x has ", x.size(1), " columns; expected a multiple of ", columns);
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

PackedProduct::PackedProduct(const TensorView& x, const std::vector<PackedPart>& parts,
                             const std::optional<TensorView>& bias, const TensorView& out, Isa isa)
    : x_(x),
      parts_(parts),
      bias_(bias),
      out_(out),
      quantised_(quantised_kernels_for(isa)),
      kernels_(kernels_for(isa)),
      blocks_((check_packed_linear(x, parts, bias, out), x.size(1) / kBlockColumns)),
      is_dense_(is_dense(parts[0].type)),
      keeps_bf16_(is_dense_ && x.dtype == DType::kBFloat16 && kernels_.bf16.multiply_dense != nullptr) {
  for (const PackedPart& part : parts) {
    keeps_bf16_ = keeps_bf16_ && dtype_of(part.type) == DType::kBFloat16;
    tiles_ += tiles_of(part);
    bytes_ += part.bytes;
  }
}

void PackedProduct::begin(int64_t first, int64_t count, uint8_t* memory) {
  first_ = first;
  count_ = count;
  memory_ = memory;
}

// The rows that are multiplied together with this row.
QuantisedRows PackedProduct::group_of(int64_t row) const {
  const int64_t first = row / quantised_.rows_at_once * quantised_.rows_at_once;
  const int rows = static_cast<int>(std::min<int64_t>(quantised_.rows_at_once, count_ - first));
  uint8_t* memory = memory_ + first * row_bytes();
  auto* scales = reinterpret_cast<float*>(memory + rows * x_.size(1));
  auto* sums = scales + rows * blocks_;
  auto* minus_sums = reinterpret_cast<int32_t*>(sums + rows * blocks_);
  return {reinterpret_cast<int8_t*>(memory), scales, sums, minus_sums, blocks_, rows};
}

int64_t PackedProduct::chunk() const {
  const int64_t rows = is_dense_ ? kDenseChunkBytes / row_bytes() : kChunkBytes / columns();
  return std::max<int64_t>(rows / 8 * 8, 8);
}

void PackedProduct::prepare_dense(int64_t row) const {
  const void* source = offset(x_.data, x_.dtype, (first_ + row) * x_.stride(0));
  const int dtype = static_cast<int>(x_.dtype);
  if (keeps_bf16_) {
    std::memcpy(memory_ + row * columns() * 2, source, columns() * 2);
  } else if (x_.dtype == DType::kFloat32) {
    std::memcpy(memory_ + row * row_bytes(), source, row_bytes());
  } else {
    auto* into = reinterpret_cast<float*>(memory_ + row * row_bytes());
    const int64_t eights = columns() / 8 * 8;  // kernels convert multiples of 8
    kernels_.widen[dtype](source, into, static_cast<int>(eights), 1.0f);
    kScalarKernels.widen[dtype](offset(const_cast<void*>(source), x_.dtype, eights), into + eights,
                                static_cast<int>(columns() - eights), 1.0f);
  }
}

void PackedProduct::prepare(int64_t row, float* floats) const {
  if (is_dense_) return prepare_dense(row);
  const void* source = offset(x_.data, x_.dtype, (first_ + row) * x_.stride(0));
  const auto* numbers = static_cast<const float*>(source);
  if (x_.dtype != DType::kFloat32) {
    kernels_.widen[static_cast<int>(x_.dtype)](source, floats, static_cast<int>(x_.size(1)), 1.0f);
    numbers = floats;
  }
  quantised_.quantise(numbers, group_of(row), static_cast<int>(row % quantised_.rows_at_once));
}

void PackedProduct::multiply_group(const PackedPart& part, const uint8_t* packed, int64_t row, int rows,
                                   float* products) const {
  if (!is_dense_) {
    quantised_.multiply[static_cast<int>(part.type)](packed, group_of(row), products);
  } else if (keeps_bf16_) {
    const auto* x = reinterpret_cast<const BFloat16*>(memory_) + row * columns();
    kernels_.bf16.multiply_dense(packed, x, columns(), rows, products);
  } else {
    const auto* x = reinterpret_cast<const float*>(memory_) + row * columns();
    kernels_.dense.multiply[static_cast<int>(dtype_of(part.type))](packed, x, columns(), rows, products);
  }
}

void PackedProduct::multiply(int64_t tile) const {
  int64_t column = 0;  // in the result
  const PackedPart* part = parts_.data();
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
  for (int64_t row = 0; row < count_; row += rows_at_once()) {
    const int rows = static_cast<int>(std::min<int64_t>(rows_at_once(), count_ - row));
    alignas(64) float products[8 * kTileRows];
    multiply_group(*part, packed, row, rows, products);
    for (int i = 0; i < rows; ++i) {
      float* of_row = products + i * kTileRows;
      for (int j = 0; bias_ && j < kTileRows; ++j) of_row[j] += bias[j];
      kernels_.narrow[dtype](of_row, narrow, kTileRows, 1.0f);
      std::memcpy(offset(out_.data, out_.dtype, (first_ + row + i) * out_.stride(0) + column), narrow, bytes);
    }
  }
}

uint8_t* own_memory(int64_t bytes) {
  constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(uint8_t* p) const { operator delete[](p, kAlignment); }
  };
  thread_local std::unique_ptr<uint8_t[], Free> memory;
  thread_local int64_t capacity = 0;
  if (bytes > capacity) {
    memory.reset();
    capacity = 0;
    memory.reset(new (kAlignment) uint8_t[bytes]);
    capacity = bytes;
  }
  return memory.get();
}

int useful_threads(int64_t weight_bytes, int64_t tiles, int num_threads) {
  const int64_t useful = std::min(weight_bytes / kBytesPerThread, tiles);
  return static_cast<int>(std::clamp<int64_t>(useful, 1, num_threads));
}

int64_t tiles_at_a_time(int64_t tiles, int threads) {
  return std::max<int64_t>(tiles / (threads * kTakesPerThread), 1);
}

void packed_linear(const TensorView& x, const std::vector<PackedPart>& parts,
                   const std::optional<TensorView>& bias, const TensorView& out, int num_threads, Isa isa) {
  PackedProduct product(x, parts, bias, out, isa);
  num_threads = check_num_threads(num_threads);
  const int64_t n = x.size(0), columns = x.size(1);
  if (n == 0) return;
  const int64_t rows = std::min(n, product.chunk());
  uint8_t* memory = own_memory(rows * product.row_bytes() + num_threads * columns * 4);
  auto* floats = reinterpret_cast<float*>(memory + rows * product.row_bytes());
  for (int64_t first = 0; first < n; first += rows) {
    multiply_rows(product, first, std::min(rows, n - first), memory, floats, num_threads);
  }
}

}  // namespace neo_desktop
