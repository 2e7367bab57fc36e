// One product with quantised weights, in parts that threads share.
#pragma once

#include <optional>
#include <vector>

#include "neo_desktop/kernels.h"
#include "neo_desktop/quantised_linear.h"

namespace neo_desktop {

class QuantisedProduct {
 public:
  // Throws std::invalid_argument for what does not fit together. Keeps references.
  QuantisedProduct(const TensorView& x, const std::vector<QuantisedPart>& parts,
                   const std::optional<TensorView>& bias, const TensorView& out, Isa isa);

  int64_t columns() const { return x_.size(1); }
  int64_t tiles() const { return tiles_; }
  int64_t weight_bytes() const { return bytes_; }
  int rows_at_once() const { return quantised_.rows_at_once; }
  // Of memory, for each row of x: numbers, scales and sums.
  int64_t row_bytes() const { return blocks_ * kQuantisedBlockBytes; }

  // From now on it is about rows [first, first + count) of x; memory begins with a cache line.
  void begin(int64_t first, int64_t count, uint8_t* memory);

  // Each row has to be quantised before a tile is multiplied; floats [columns] are this thread's scratch.
  void quantise(int64_t row, float* floats) const;
  void multiply(int64_t tile) const;

 private:
  QuantisedRows group_of(int64_t row) const;
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
  int64_t tiles_ = 0;
  int64_t bytes_ = 0;  // of the weights
  int64_t first_ = 0;
  int64_t count_ = 0;
  uint8_t* memory_ = nullptr;  // of one QuantisedRows after the other
};

// Memory of the calling thread that it keeps between its calls; it begins with a cache line.
uint8_t* own_memory(int64_t bytes);

// How many threads are worth waking for so many bytes of weights.
int useful_threads(int64_t weight_bytes, int64_t tiles, int num_threads);

// How many tiles a thread takes at a time, so that one that is held up leaves the rest to others.
int64_t tiles_at_a_time(int64_t tiles, int threads);

}  // namespace neo_desktop
