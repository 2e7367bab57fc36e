// Products of rows with matrices that lie in tiles, quantised or not.
#pragma once

#include <optional>
#include <vector>

#include "neo_desktop/cpu.h"
#include "neo_desktop/quantised_kernels.h"
#include "neo_desktop/tensor_view.h"

namespace neo_desktop {

// Some output columns' weights, packed as quantised_kernels.h says, or DenseKernels in kernels.h.
struct PackedPart {
  WeightType type;
  const uint8_t* packed;  // a tile of 16 rows after the other
  int64_t bytes;
  int64_t rows;
};

struct PackedMatrix {
  std::vector<PackedPart> parts;
  std::optional<TensorView> bias;

  int64_t rows() const;
};

// out[n, sum of rows] = x[n, columns] @ weights.T + bias[sum of rows]. For quantised weights each block of 32
// numbers of x is rounded to 8 bits; sums of products are exact within a block, and float32 over blocks. For
// others sums are float32. x, out and bias are float32, float16 or bfloat16 of one dtype; their last
// dimension is contiguous. Parts are all quantised, or none is. Throws std::invalid_argument for what does
// not fit together.
void packed_linear(const TensorView& x, const std::vector<PackedPart>& parts,
                   const std::optional<TensorView>& bias, const TensorView& out, int num_threads, Isa isa);

// Throws what `packed_linear` throws for such arguments.
void check_packed_linear(const TensorView& x, const std::vector<PackedPart>& parts,
                         const std::optional<TensorView>& bias, const TensorView& out);

}  // namespace neo_desktop
