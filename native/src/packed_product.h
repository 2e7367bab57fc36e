// One matmul with packed weights, divided into parts for threads.
#pragma once

#include <optional>
#include <vector>

#include "neo_desktop/kernels.h"
#include "neo_desktop/packed_linear.h"

namespace neo_desktop {

class PackedProduct {
 public:
  // Throws std::invalid_argument for mismatched arguments. Keeps references to them.
  PackedProduct(const TensorView& x, const std::vector<PackedPart>& parts,
                const std::optional<TensorView>& bias, const TensorView& out, Isa isa);

  int64_t columns() const { return x_.size(1); }
  int64_t tiles() const { return tiles_; }
  int64_t weight_bytes() const { return bytes_; }
  int rows_at_once() const { return is_dense_ ? kernels_.dense.rows_at_once : quantised_.rows_at_once; }
  // Bytes of scratch memory per row of x.
  int64_t row_bytes() const {
    return is_dense_ ? columns() * static_cast<int64_t>(sizeof(float)) : blocks_ * kQuantisedBlockBytes;
  }
  // Rows of x to prepare at a time: quantised rows stay in a core's caches; for dense rows a larger number
  // saves reads of the weights.
  int64_t chunk() const;

  // Selects rows [first, first + count) of x; memory must start at a cache line.
  void begin(int64_t first, int64_t count, uint8_t* memory);

  // Prepares a row, before any tile is multiplied: rounds it to 8 bits for quantised weights. floats
  // [columns] are the calling thread's scratch.
  void prepare(int64_t row, float* floats) const;
  void multiply(int64_t tile) const;

 private:
  QuantisedRows group_of(int64_t row) const;
  void prepare_dense(int64_t row) const;
  void multiply_group(const PackedPart& part, const uint8_t* packed, int64_t row, int rows,
                      float* products) const;
  static uint8_t* offset(void* data, DType dtype, int64_t elements) {
    return static_cast<uint8_t*>(data) + elements * size_of(dtype);
  }

  const TensorView& x_;
  const std::vector<PackedPart>& parts_;
  const std::optional<TensorView>& bias_;
  const TensorView& out_;
  const QuantisedKernels& quantised_;
  const Kernels& kernels_;
  const int64_t blocks_;
  bool is_dense_;
  bool keeps_bf16_;  // keeps rows of x in bf16, for dot products
  int64_t tiles_ = 0;
  int64_t bytes_ = 0;  // of the weights
  int64_t first_ = 0;
  int64_t count_ = 0;
  uint8_t* memory_ = nullptr;  // consecutive QuantisedRows
};

// Memory that the calling thread keeps between its calls; it starts at a cache line.
uint8_t* own_memory(int64_t bytes);

// Number of threads worth waking for this many bytes of weights.
int useful_threads(int64_t weight_bytes, int64_t tiles, int num_threads);

// Number of tiles that a thread takes at a time, small enough that others can do the work of a delayed
// thread.
int64_t tiles_at_a_time(int64_t tiles, int threads);

}  // namespace neo_desktop
