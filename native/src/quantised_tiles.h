// Products with tiles of quantised weights, for one instruction set's file to instantiate.
//
// V has registers of kLanes rows (a divisor of 16):
//   Ints, Floats, Bytes  registers; a lane of Bytes is 4 numbers of one row
//   dot                  adds 4 weights times 4 activations to each lane
#pragma once

#include <cmath>
#include <cstring>

#include "neo_desktop/quantised_kernels.h"

namespace neo_desktop {
namespace {

// Each row's sums are added up block by block, whatever the number of rows, of threads and of lanes: products
// depend on none of them.
template <class V, WeightType type, int count>
inline void multiply_rows(const uint8_t* tile, const QuantisedRows& x, float* out) {
  constexpr int kParts = kTileRows / V::kLanes;
  typename V::Floats sums[count][kParts];
  for (int row = 0; row < count; ++row) {
    for (int part = 0; part < kParts; ++part) sums[row][part] = V::zero();
  }
  const int8_t* numbers = x.numbers;
  for (int64_t block = 0; block < x.blocks;
       ++block, tile += tile_block_bytes(type), numbers += count * kBlockColumns) {
    const uint8_t* weights = tile + 2 * kTileRows * (1 + has_minima(type));
    V::prefetch(tile);
    for (int part = 0; part < kParts; ++part) {
      typename V::Ints dots[count];
#pragma GCC unroll 8
      for (int row = 0; row < count; ++row) {
        const int32_t sum = x.sums[block * count + row];
        dots[row] = V::broadcast(-(number_offset(type) + V::template shift<type>()) * sum);
      }
      for (int group = 0; group < number_groups(type); ++group) {
        const auto bytes = V::load(weights + (group * kTileRows + part * V::kLanes) * 4);
        const int8_t* columns = numbers + 4 * group;
        if constexpr (type == WeightType::kQ8_0) {
          const auto prepared = V::prepare(bytes);
#pragma GCC unroll 8
          for (int row = 0; row < count; ++row) {
            dots[row] = V::dot_signed(dots[row], prepared, columns + row * kBlockColumns);
          }
        } else {
          const auto low = V::low(bytes);
          const auto high = V::high(bytes);
#pragma GCC unroll 8
          for (int row = 0; row < count; ++row) {
            const int8_t* of_row = columns + row * kBlockColumns;
            dots[row] = V::dot(V::dot(dots[row], low, of_row), high, of_row + 16);
          }
        }
      }
      const auto scales = V::load_half(tile + 2 * part * V::kLanes);
#pragma GCC unroll 8
      for (int row = 0; row < count; ++row) {
        const int64_t at = block * count + row;
        const auto scale = V::multiply(scales, V::broadcast(x.scales[at]));
        sums[row][part] = V::multiply_add(V::to_floats(dots[row]), scale, sums[row][part]);
        if constexpr (has_minima(type)) {
          const auto minima = V::load_half(tile + 2 * (kTileRows + part * V::kLanes));
          const float sum = x.scales[at] * static_cast<float>(x.sums[at]);
          sums[row][part] = V::multiply_add(minima, V::broadcast(sum), sums[row][part]);
        }
      }
    }
  }
  for (int row = 0; row < count; ++row) {
    for (int part = 0; part < kParts; ++part) {
      V::store(out + row * kTileRows + part * V::kLanes, sums[row][part]);
    }
  }
}

template <class V, WeightType type>
void multiply_tile(const uint8_t* tile, const QuantisedRows& x, float* out) {
  static_assert(V::kRowsAtOnce <= 8);
  switch (x.rows) {
    case 1:
      return multiply_rows<V, type, 1>(tile, x, out);
    case 2:
      return multiply_rows<V, type, 2>(tile, x, out);
    case 3:
      return multiply_rows<V, type, 3>(tile, x, out);
    case 4:
      return multiply_rows<V, type, 4>(tile, x, out);
  }
  if constexpr (V::kRowsAtOnce == 8) {
    switch (x.rows) {
      case 5:
        return multiply_rows<V, type, 5>(tile, x, out);
      case 6:
        return multiply_rows<V, type, 6>(tile, x, out);
      case 7:
        return multiply_rows<V, type, 7>(tile, x, out);
      case 8:
        return multiply_rows<V, type, 8>(tile, x, out);
    }
  }
}

// Plain code, which compilers turn into vectors of the file's instruction set.
inline void quantise_row(const float* x, const QuantisedRows& into, int row) {
  for (int64_t block = 0; block < into.blocks; ++block, x += kBlockColumns) {
    const int64_t at = block * into.rows + row;
    int8_t* numbers = into.numbers + at * kBlockColumns;
    // As numbers, the bits of magnitudes are in the same order, NaN above all: a maximum that compilers can
    // reorder.
    int32_t bits = 0;
    for (int i = 0; i < kBlockColumns; ++i) {
      int32_t magnitude;
      std::memcpy(&magnitude, x + i, sizeof magnitude);
      magnitude &= 0x7fffffff;
      bits = magnitude > bits ? magnitude : bits;
    }
    float most;
    std::memcpy(&most, &bits, sizeof most);
    const bool is_finite = bits < 0x7f800000;
    const float scale = most / 127.0f;
    const float inverse = is_finite && most > 1e-35f ? 127.0f / most : 0.0f;
    int32_t sum = 0;
    for (int i = 0; i < kBlockColumns; ++i) {
      // Adding it moves what is behind the point out of the mantissa: rounded to nearest even.
      constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23
      const float rounded = (is_finite ? x[i] * inverse : 0.0f) + kRounding;
      int32_t number;
      std::memcpy(&number, &rounded, sizeof number);
      number -= 0x4b400000;  // the bits of kRounding
      numbers[i] = static_cast<int8_t>(number);
      sum += number;
    }
    into.scales[at] = is_finite ? scale : __builtin_nanf("");
    into.sums[at] = sum;
  }
}

template <class V>
constexpr QuantisedKernels make_quantised_kernels() {
  return {{multiply_tile<V, WeightType::kQ8_0>, multiply_tile<V, WeightType::kQ4_0>,
           multiply_tile<V, WeightType::kQ4_1>},
          V::kRowsAtOnce,
          quantise_row};
}

}  // namespace
}  // namespace neo_desktop
