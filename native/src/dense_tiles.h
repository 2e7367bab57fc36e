// Matmuls with dense tiles, instantiated by each instruction set's file; see DenseKernels.
#pragma once

#include <type_traits>

#include "simd_common.h"

namespace neo_desktop {
namespace {

constexpr int kDenseTileRows = 16;

// The weights of two columns, for as many rows as a register has lanes, from row `part` of a tile on.
template <class V, class T>
inline void load_columns(const T* two, int part, typename V::Reg& first, typename V::Reg& second) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    V::load_pairs(two + 2 * part, first, second);
  } else {
    first = V::load(two + part);
    second = V::load(two + kDenseTileRows + part);
  }
}

// Even and odd columns have separate sums, for any number of rows and lanes.
template <class V, class T, int count>
inline void multiply_dense_rows(const T* tile, const float* x, int64_t columns, float* out) {
  for (int part = 0; part < kDenseTileRows; part += V::kLanes) {
    typename V::Reg even[count], odd[count];
    for (int row = 0; row < count; ++row) even[row] = odd[row] = V::zero();
    const T* weights = tile;
    for (int64_t column = 0; column < columns; column += 2, weights += 2 * kDenseTileRows) {
      __builtin_prefetch(reinterpret_cast<const char*>(weights) + 4096);
      if constexpr (sizeof(T) == 4) __builtin_prefetch(reinterpret_cast<const char*>(weights) + 4160);
      typename V::Reg first, second;
      load_columns<V>(weights, part, first, second);
#pragma GCC unroll 8
      for (int row = 0; row < count; ++row) {
        const float* of_row = x + row * columns + column;
        even[row] = V::multiply_add(first, V::broadcast(of_row[0]), even[row]);
        odd[row] = V::multiply_add(second, V::broadcast(of_row[1]), odd[row]);
      }
    }
    for (int row = 0; row < count; ++row) {
      V::store(out + row * kDenseTileRows + part, V::add(even[row], odd[row]));
    }
  }
}

template <class V, class T>
void multiply_dense(const void* tile, const float* x, int64_t columns, int rows, float* out) {
  const T* of = static_cast<const T*>(tile);
  switch (rows) {
    case 1:
      return multiply_dense_rows<V, T, 1>(of, x, columns, out);
    case 2:
      return multiply_dense_rows<V, T, 2>(of, x, columns, out);
    case 3:
      return multiply_dense_rows<V, T, 3>(of, x, columns, out);
    case 4:
      return multiply_dense_rows<V, T, 4>(of, x, columns, out);
  }
  if constexpr (V::kRowsAtOnce == 8) {
    switch (rows) {
      case 5:
        return multiply_dense_rows<V, T, 5>(of, x, columns, out);
      case 6:
        return multiply_dense_rows<V, T, 6>(of, x, columns, out);
      case 7:
        return multiply_dense_rows<V, T, 7>(of, x, columns, out);
      case 8:
        return multiply_dense_rows<V, T, 8>(of, x, columns, out);
    }
  }
}

template <class V>
constexpr DenseKernels make_dense_kernels() {
  return {{multiply_dense<V, float>, multiply_dense<V, Half>, multiply_dense<V, BFloat16>}, V::kRowsAtOnce};
}

}  // namespace
}  // namespace neo_desktop
