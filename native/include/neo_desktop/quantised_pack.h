// Conversion of GGUF rows to tiles of quantised weights, and of tiles to floats.
#pragma once

#include <cstdint>

#include "neo_desktop/quantised_kernels.h"

namespace neo_desktop {

// Row formats in files, under llama.cpp's names.
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

// The type in memory: the same numbers, possibly in more bits.
WeightType weight_type_of(StoredType type);

// Bytes of a row in the file. `columns` is a multiple of stored_columns().
int64_t stored_bytes(StoredType type, int64_t columns);
int64_t stored_columns(StoredType type);

// Bytes of rows in tiles; the last tile may have fewer than 16 rows.
int64_t packed_bytes(StoredType type, int64_t rows, int64_t columns);

// Packs rows [first, first + count) into their tiles. Returns false if a scale is not finite; the rows are
// then unusable.
bool pack_rows(StoredType type, const uint8_t* stored, int64_t first, int64_t count, int64_t columns,
               uint8_t* packed, int num_threads);

// Unpacks count rows to out[count, columns], as floats.
void unpack_rows(WeightType type, const uint8_t* packed, const int64_t* rows, int64_t count, int64_t columns,
                 float* out, int num_threads);

}  // namespace neo_desktop
