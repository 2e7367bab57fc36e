// Matmuls of rows with matrices in tiles, dense or quantised.
#pragma once

#include <optional>
#include <vector>

#include "neo_desktop/cpu.h"
#include "neo_desktop/quantised_kernels.h"
#include "neo_desktop/tensor_view.h"

namespace neo_desktop {

// Weights of consecutive output columns, in the layout of quantised_kernels.h, or of DenseKernels in
// kernels.h.
struct PackedPart {
  WeightType type;
  const uint8_t* packed;  // consecutive tiles of 16 rows
  int64_t bytes;
  int64_t rows;
};

struct PackedMatrix {
  std::vector<PackedPart> parts;
  std::optional<TensorView> bias;

  int64_t rows() const;
};

// Cuts a matrix into `count` with equal numbers of rows. If there are several, their rows are a multiple of
// 16, within one part. Throws std::invalid_argument otherwise.
std::vector<PackedMatrix> divided(const PackedMatrix& matrix, int64_t count);

// out[n, sum of rows] = x[n, columns] @ weights.T + bias[sum of rows]. For quantised weights, each block of
// 32 elements of x is rounded to 8 bits; sums of products are exact within a block, and float32 over blocks.
// For dense weights, sums are float32. x, out and bias are float32, float16 or bfloat16 with one dtype and
// contiguous last dimensions. Either all parts are quantised, or none. Throws std::invalid_argument for
// mismatched arguments.
void packed_linear(const TensorView& x, const std::vector<PackedPart>& parts,
                   const std::optional<TensorView>& bias, const TensorView& out, int num_threads, Isa isa);

// Throws the errors that `packed_linear` throws for these arguments.
void check_packed_linear(const TensorView& x, const std::vector<PackedPart>& parts,
                         const std::optional<TensorView>& bias, const TensorView& out);

}  // namespace neo_desktop
