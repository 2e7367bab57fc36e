// Matmuls with quantised weights: their layout, and the contract between the driver (packed_linear.cpp) and
// the kernels. Included by the ISA-specific files: nothing here may generate code of its own.
//
// Rows are packed in tiles of 16, columns in blocks of 32. In GGUF's K types, 8 blocks share a scale: a tile
// consists of units of 1 or 8 blocks. The data of a unit is interleaved by row, so that one register takes
// the same part of every row:
//
//   scales    [16] float16; for MXFP4 bfloat16, which represents all its powers of two
//   minima    [16] float16, if the type has minima: added to the scaled numbers
//   then, per block:
//     scales  [scales, 16] int8, factors on the unit's scale: one for all columns, or one per 16 columns
//     minima  [scales, 16] int8, factors on the unit's minimum
//     numbers [groups, 16, 4] bytes: group g has 4 bytes per row
//     high    [high_groups, 16, 4] bytes: the bits above the lowest four, see below
//
// With 8 bits, byte j of a row is column j. With fewer bits, its low half has the lowest bits of column j and
// its high half those of column 16 + j. Count the columns of group g in the low halves first, then those in
// the high halves. The bits above are then in byte i of a row:
//
//   5 bits: bits g and 4 + g, for the i-th columns of group g
//   6 bits: in high group g / 2, the two bits from 4 * (g % 2) on, and from 2 + 4 * (g % 2)
//
// Numbers of MXFP4 are indices into kFp4Numbers.
#pragma once

#include <cstdint>

#include "neo_desktop/dtype.h"

namespace neo_desktop {

// Types with kernels. Two GGUF types change: Q2_K takes 4 bits, and IQ4_XS, whose numbers come from a table,
// takes 8. kDense + DType: dense weights, see DenseKernels.
enum class WeightType {
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ2_K,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kIq4Xs,
  kMxfp4,
  kDense
};

struct WeightLayout {
  int bits;    // per number; 8-bit numbers are signed
  int offset;  // subtracted from a number
  bool has_minima;
  int scales;  // 8-bit scales per block: 0, 1 or 2; with scales, a unit has 8 blocks
  bool is_fp4 = false;
};

constexpr int kWeightTypes = 11;
constexpr WeightLayout kWeightLayouts[kWeightTypes] = {
    {8, 0, false, 0},  {4, 8, false, 0}, {4, 0, true, 0},        {5, 16, false, 0},
    {5, 0, true, 0},   {4, 0, true, 2},  {4, 0, true, 1},        {5, 0, true, 1},
    {6, 32, false, 2}, {8, 0, false, 1}, {4, 16, false, 0, true}};

// Twice the numbers of MXFP4, plus the offset.
constexpr uint8_t kFp4Numbers[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

constexpr int kTileRows = 16;
constexpr int kBlockColumns = 32;

constexpr bool is_dense(WeightType type) { return type >= WeightType::kDense; }
constexpr WeightType dense_type(DType dtype) {
  return static_cast<WeightType>(kWeightTypes + static_cast<int>(dtype));
}
constexpr DType dtype_of(WeightType dense) {
  return static_cast<DType>(static_cast<int>(dense) - kWeightTypes);
}

constexpr const WeightLayout& layout_of(WeightType type) { return kWeightLayouts[static_cast<int>(type)]; }
constexpr int unit_blocks(const WeightLayout& of) { return of.scales ? 8 : 1; }
constexpr int number_groups(const WeightLayout& of) { return of.bits == 8 ? 8 : 4; }
constexpr int high_groups(const WeightLayout& of) { return of.bits == 8 ? 0 : of.bits - 4; }
constexpr int header_bytes(const WeightLayout& of) { return kTileRows * 2 * (1 + of.has_minima); }
constexpr int block_scale_bytes(const WeightLayout& of) {
  return kTileRows * of.scales * (1 + of.has_minima);
}
constexpr int block_bytes(const WeightLayout& of) {
  return block_scale_bytes(of) + kTileRows * 4 * (number_groups(of) + high_groups(of));
}
constexpr int64_t unit_bytes(const WeightLayout& of) {
  return header_bytes(of) + unit_blocks(of) * block_bytes(of);
}

// Quantised activations of a few rows: x = scale * number in each block. The rows of a block are adjacent:
// rows further apart would map to the same cache sets.
struct QuantisedRows {
  int8_t* numbers;  // [blocks, rows, 32], from -127 to 127
  float* scales;    // [blocks, rows]
  float* sums;      // [blocks, rows]: sum of a block's numbers, times their scale
  // [3, blocks, rows]: minus the sum of a block's numbers, of its first half, and of its second half.
  int32_t* minus_sums;
  int64_t blocks;
  int rows;
};

// Bytes per row and block.
constexpr int kQuantisedBlockBytes = kBlockColumns + 20;

struct QuantisedKernels {
  // Writes a tile's products to out[rows, 16].
  void (*multiply[kWeightTypes])(const uint8_t* tile, const QuantisedRows& x, float* out);
  int rows_at_once;  // of a QuantisedRows, at most
  // Fills one row of `into`. Rounds to nearest even; a non-finite block gets a scale of NaN.
  void (*quantise)(const float* x, const QuantisedRows& into, int row);
};

extern const QuantisedKernels kQuantisedScalar;
#if defined(__x86_64__)
extern const QuantisedKernels kQuantisedAvx2;
extern const QuantisedKernels kQuantisedAvxVnni;
extern const QuantisedKernels kQuantisedVnni;
#elif defined(__aarch64__)
extern const QuantisedKernels kQuantisedNeon;
extern const QuantisedKernels kQuantisedNeonDot;
#endif

}  // namespace neo_desktop
