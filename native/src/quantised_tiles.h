// Matmuls with tiles of quantised weights, instantiated by each instruction set's file.
//
// V has registers of kLanes rows (a divisor of 16):
//   Ints, Floats, Bytes  registers; a lane of Bytes has 4 numbers of one row.
//   dot         adds 4 weights times 4 activations to each lane of a Sum.
//   widened     adds what a Sum holds in 16 bits to its lanes of 32.
//   prepare     prepares signed weights for dot.
//   looked_up   replaces numbers below 16 by those in kFp4Numbers.
//   shifted<n>  shifts each byte left by n bits (right if n is negative); other bits may enter.
#pragma once

#include <cmath>
#include <cstring>

#include "neo_desktop/quantised_kernels.h"

namespace neo_desktop {
namespace {

template <int n>
struct Group {
  static constexpr int value = n;
};

template <int count, int first = 0, class Body>
inline void for_each_group(Body body) {
  if constexpr (first < count) {
    body(Group<first>());
    for_each_group<count, first + 1>(body);
  }
}

// The numbers of a group with fewer than 8 bits: of the first 16 columns (half 0), or of the others.
template <class V, WeightType type, int group, int half>
inline auto numbers_of(const typename V::Bytes& bytes, const typename V::Bytes* high) {
  constexpr WeightLayout of = layout_of(type);
  const auto low = half ? V::high(bytes) : V::low(bytes);
  if constexpr (of.is_fp4) {
    return V::looked_up(low);
  } else if constexpr (of.bits == 5) {
    return V::either(low, V::template masked<16>(V::template shifted<4 - group - 4 * half>(*high)));
  } else if constexpr (of.bits == 6) {
    constexpr int place = 4 * (group % 2) + 2 * half;
    return V::either(low, V::template masked<48>(V::template shifted<4 - place>(high[group / 2])));
  } else {
    return low;
  }
}

template <class V, WeightType type>
inline auto load_scales(const uint8_t* p) {
  if constexpr (layout_of(type).is_fp4) {
    return V::load_bfloat(p);
  } else {
    return V::load_half(p);
  }
}

// log2 of a power of two; -1 for 0.
constexpr int log2_of(int x) {
  int log = -1;
  for (; x > 0; x /= 2) ++log;
  return log;
}

// Groups of numbers with fewer than 8 bits after which V's sums are widened, so that pairs of products fit 16
// bits. A pair is at most 2 * 127 times 15 with 4 bits, 28 with MXFP4, and 31 with 5 bits. With 6 bits it is
// 2 * 127 times 63, but each half of a block has its own sum.
constexpr int groups_in_pairs(const WeightLayout& of) { return of.bits == 4 && !of.is_fp4 ? 4 : 2; }

// Adds the products of a block's first 16 columns to of_first[count, kParts], of the others to of_second.
template <class V, WeightType type, int count, bool has_first, bool has_second, class Sums>
inline void add_products(const uint8_t* weights, const int8_t* numbers, Sums& of_first, Sums& of_second) {
  constexpr WeightLayout of = layout_of(type);
  constexpr int kParts = kTileRows / V::kLanes;
  constexpr int kPartBytes = V::kLanes * 4;
  for_each_group<4>([&](auto at) {
    constexpr int kGroup = decltype(at)::value;
    typename V::Bytes first[kParts], second[kParts];
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const uint8_t* of_part = weights + part * kPartBytes;
      const auto bytes = V::load(of_part + kGroup * kTileRows * 4);
      typename V::Bytes high[2];
      for (int group = 0; group < high_groups(of); ++group) {
        high[group] = V::load(of_part + (4 + group) * kTileRows * 4);
      }
      if constexpr (has_first) first[part] = numbers_of<V, type, kGroup, 0>(bytes, high);
      if constexpr (has_second) second[part] = numbers_of<V, type, kGroup, 1>(bytes, high);
    }
#pragma GCC unroll 8
    for (int row = 0; row < count; ++row) {
      const int8_t* columns = numbers + row * kBlockColumns + 4 * kGroup;
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        auto &sum = of_first[row][part], &other = of_second[row][part];
        if constexpr (has_first) sum = V::dot(sum, first[part], columns);
        if constexpr (has_second) other = V::dot(other, second[part], columns + 16);
        if constexpr ((kGroup + 1) % groups_in_pairs(of) == 0) {
          if constexpr (has_first) sum = V::widened(sum);
          if constexpr (has_second && (!has_first || of.scales == 2)) other = V::widened(other);
        }
      }
    }
  });
}

// The same for signed numbers of 8 bits.
template <class V, int count, class Sums>
inline void add_signed_products(const uint8_t* weights, const int8_t* numbers, Sums& sums) {
  constexpr int kParts = kTileRows / V::kLanes;
#pragma GCC unroll 8
  for (int group = 0; group < 8; ++group) {
    typename V::Signed prepared[kParts];
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      prepared[part] = V::prepare(V::load(weights + (group * kTileRows + part * V::kLanes) * 4));
    }
#pragma GCC unroll 8
    for (int row = 0; row < count; ++row) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        sums[row][part] = V::dot(sums[row][part], prepared[part], numbers + row * kBlockColumns + 4 * group);
      }
    }
  }
}

// Each row's sums are accumulated block by block, so products do not depend on the number of rows, threads or
// lanes.
template <class V, WeightType type, int count>
inline void multiply_rows(const uint8_t* tile, const QuantisedRows& x, float* out) {
  constexpr WeightLayout of = layout_of(type);
  constexpr int kParts = kTileRows / V::kLanes;
  constexpr int kSums = of.scales == 2 ? 2 : 1;  // sums of products per block
  constexpr int kOff = log2_of(of.offset + (of.bits == 8 ? V::kSignedShift : 0));
  typename V::Floats sums[count][kParts];
  for (int row = 0; row < count; ++row) {
    for (int part = 0; part < kParts; ++part) sums[row][part] = V::zero();
  }
  const int64_t all = x.blocks * count;  // number of sums per kind
  const int8_t* numbers = x.numbers;
  const uint8_t* unit = tile;
  const uint8_t* scales = tile + header_bytes(of);
  for (int64_t block = 0; block < x.blocks; ++block, numbers += count * kBlockColumns) {
    if (block && block % unit_blocks(of) == 0) {
      unit = scales;
      scales += header_bytes(of);
    }
    const uint8_t* weights = scales + block_scale_bytes(of);
    for (int line = 0; line < block_bytes(of); line += 64) V::prefetch(scales + 4096 + line);
    typename V::Sum dots[kSums][count][kParts];
    for (int half = 0; half < kSums; ++half) {
#pragma GCC unroll 8
      for (int row = 0; row < count; ++row) {
        const int32_t* minus_sum = x.minus_sums + (kSums == 1 ? 0 : 1 + half) * all + block * count + row;
        for (int part = 0; part < kParts; ++part) {
          if constexpr (kOff < 0) {
            dots[half][row][part] = V::broadcast(0);
          } else {
            dots[half][row][part] = V::template broadcast_shifted<kOff>(minus_sum);
          }
        }
      }
    }
    if constexpr (of.bits == 8) {
      add_signed_products<V, count>(weights, numbers, dots[0]);
    } else if constexpr (kSums == 1 || kSums * count * kParts <= V::kRegisters - 8) {
      add_products<V, type, count, true, true>(weights, numbers, dots[0], dots[kSums - 1]);
    } else {
      add_products<V, type, count, true, false>(weights, numbers, dots[0], dots[1]);
      add_products<V, type, count, false, true>(weights, numbers, dots[0], dots[1]);
    }
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      auto scale = load_scales<V, type>(unit + 2 * part * V::kLanes);
      const uint8_t* small = scales + part * V::kLanes;
      if constexpr (of.scales == 1) scale = V::multiply(scale, V::to_floats(V::load_small(small)));
#pragma GCC unroll 8
      for (int row = 0; row < count; ++row) {
        const int64_t at = block * count + row;
        typename V::Ints total = dots[0][row][part];
        if constexpr (of.scales == 2) {
          total = V::add(V::multiply(total, V::load_small(small)),
                         V::multiply(dots[1][row][part], V::load_small(small + kTileRows)));
        }
        const auto by = V::multiply(scale, V::broadcast(x.scales[at]));
        sums[row][part] = V::multiply_add(V::to_floats(total), by, sums[row][part]);
      }
      if constexpr (of.has_minima) {
        auto minimum = V::load_half(unit + 2 * (kTileRows + part * V::kLanes));
        const uint8_t* minima = small + of.scales * kTileRows;
        if constexpr (of.scales == 1) minimum = V::multiply(minimum, V::to_floats(V::load_small(minima)));
#pragma GCC unroll 8
        for (int row = 0; row < count; ++row) {
          const int64_t at = block * count + row;
          if constexpr (of.scales == 2) {
            const int32_t* minus_sum = x.minus_sums + all + at;
            const auto total =
                V::add(V::multiply(V::load_small(minima), V::broadcast(*minus_sum)),
                       V::multiply(V::load_small(minima + kTileRows), V::broadcast(minus_sum[all])));
            const auto by = V::multiply(minimum, V::broadcast(-x.scales[at]));
            sums[row][part] = V::multiply_add(V::to_floats(total), by, sums[row][part]);
          } else {
            sums[row][part] = V::multiply_add(minimum, V::broadcast(x.sums[at]), sums[row][part]);
          }
        }
      }
    }
    scales += block_bytes(of);
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

// Plain code that compilers vectorise for the file's instruction set.
inline void quantise_row(const float* x, const QuantisedRows& into, int row) {
  for (int64_t block = 0; block < into.blocks; ++block, x += kBlockColumns) {
    const int64_t at = block * into.rows + row;
    int8_t* numbers = into.numbers + at * kBlockColumns;
    // As integers, magnitudes have the same order, with NaN above all: compilers can reorder this maximum.
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
    int32_t sums[2] = {0, 0};
    for (int half = 0; half < 2; ++half) {
      for (int i = 16 * half; i < 16 * half + 16; ++i) {
        // The addition shifts the fraction out of the mantissa: it rounds to nearest even.
        constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23
        const float rounded = (is_finite ? x[i] * inverse : 0.0f) + kRounding;
        int32_t number;
        std::memcpy(&number, &rounded, sizeof number);
        number -= 0x4b400000;  // the bits of kRounding
        numbers[i] = static_cast<int8_t>(number);
        sums[half] += number;
      }
    }
    into.scales[at] = is_finite ? scale : __builtin_nanf("");
    const int64_t all = into.blocks * into.rows;
    into.sums[at] = into.scales[at] * static_cast<float>(sums[0] + sums[1]);
    into.minus_sums[at] = -(sums[0] + sums[1]);
    into.minus_sums[all + at] = -sums[0];
    into.minus_sums[2 * all + at] = -sums[1];
  }
}

template <class V, int type = 0>
constexpr void put_kernels(QuantisedKernels& kernels) {
  if constexpr (type < kWeightTypes) {
    kernels.multiply[type] = multiply_tile<V, static_cast<WeightType>(type)>;
    put_kernels<V, type + 1>(kernels);
  }
}

template <class V>
constexpr QuantisedKernels make_quantised_kernels() {
  QuantisedKernels kernels{{}, V::kRowsAtOnce, quantise_row};
  put_kernels<V>(kernels);
  return kernels;
}

}  // namespace
}  // namespace neo_desktop
