// Products with quantised weights: their layout, and the contract between the driver (quantised_linear.cpp)
// and the kernels. Included by the ISA-specific files: nothing here may generate code of its own.
//
// Rows are packed in tiles of 16, columns in blocks of 32, as in GGUF files; a tile's blocks follow each
// other. In a block, what one row has in GGUF is spread so that one register takes the same part of all rows:
//
//   scales   [16] float16
//   minima   [16] float16, of Q4_1 only
//   numbers  [groups, 16, 4] bytes: group g has the bytes 4g .. 4g + 3 of each row
//
// Of Q8_0, byte j is column j; of the others, its low bits are column j and its high bits column 16 + j.
#pragma once

#include <cstdint>

#include "neo_desktop/dtype.h"

namespace neo_desktop {

enum class WeightType { kQ8_0, kQ4_0, kQ4_1 };

constexpr int kWeightTypes = 3;
constexpr int kTileRows = 16;
constexpr int kBlockColumns = 32;

constexpr bool has_minima(WeightType type) { return type == WeightType::kQ4_1; }
constexpr int number_groups(WeightType type) { return type == WeightType::kQ8_0 ? 8 : 4; }
// What is taken off a number: it is stored so much larger than it is.
constexpr int number_offset(WeightType type) { return type == WeightType::kQ4_0 ? 8 : 0; }
constexpr int64_t tile_block_bytes(WeightType type) {
  return kTileRows * (2 + 2 * has_minima(type) + 4 * number_groups(type));
}

// Activations of a few rows, quantised: x = scale * number in each block. A block of all of them lies
// together: rows apart would fall on the same lines of a cache.
struct QuantisedRows {
  int8_t* numbers;  // [blocks, rows, 32], from -127 to 127
  float* scales;    // [blocks, rows]
  int32_t* sums;    // [blocks, rows]: of a block's numbers
  int64_t blocks;
  int rows;
};

struct QuantisedKernels {
  // Puts a tile's products into out[rows, 16].
  void (*multiply[kWeightTypes])(const uint8_t* tile, const QuantisedRows& x, float* out);
  int rows_at_once;  // of a QuantisedRows, at most
  // Fills one row of `into`. Rounds to nearest even; a block that is not finite has a scale of NaN.
  void (*quantise)(const float* x, const QuantisedRows& into, int row);
};

extern const QuantisedKernels kQuantisedScalar;
#if defined(__x86_64__)
extern const QuantisedKernels kQuantisedAvx2;
extern const QuantisedKernels kQuantisedVnni;
#endif

}  // namespace neo_desktop
