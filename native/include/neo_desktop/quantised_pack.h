// From rows of GGUF files to tiles of quantised weights, and back to floats.
#pragma once

#include <cstdint>

#include "neo_desktop/quantised_kernels.h"

namespace neo_desktop {

// How rows lie in files; llama.cpp's names.
enum class StoredType {
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ2_K,
  kQ3_K,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kIq4Nl,
  kIq4Xs,
  kMxfp4
};

constexpr int kStoredTypes = 13;

// What it is kept as: the same numbers, perhaps in more bits.
WeightType weight_type_of(StoredType type);

// Bytes of a row in the file. `columns` is a multiple of what stored_columns gives.
int64_t stored_bytes(StoredType type, int64_t columns);
int64_t stored_columns(StoredType type);

// Bytes of rows in tiles, the last of which may have fewer than 16.
int64_t packed_bytes(StoredType type, int64_t rows, int64_t columns);

// Puts rows [first, first + count) into their tiles. Returns false if a scale is not finite: they are not to
// be used then.
bool pack_rows(StoredType type, const uint8_t* stored, int64_t first, int64_t count, int64_t columns,
               uint8_t* packed, int num_threads);

// Puts count rows into out[count, columns], as floats.
void unpack_rows(WeightType type, const uint8_t* packed, const int64_t* rows, int64_t count, int64_t columns,
                 float* out, int num_threads);

}  // namespace neo_desktop
