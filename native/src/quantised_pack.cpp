#include "neo_desktop/quantised_pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "neo_desktop/half.h"
#include "neo_desktop/thread_pool.h"

namespace neo_desktop {
namespace {

constexpr int kMaxColumns = 256;
constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// One row's part of a unit: number * scale * scales[part] + minimum * minima[part].
struct Unit {
  int8_t numbers[kMaxColumns];
  uint16_t scale;
  uint16_t minimum = 0;
  int8_t scales[16];
  int8_t minima[16];
};

uint16_t half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, sizeof half);
  return half;
}

float to_float(uint16_t bits) {
  Half half;
  std::memcpy(&half, &bits, sizeof half);
  return to_float(half);
}

float bfloat_to_float(uint16_t bits) { return to_float(BFloat16{bits}); }

bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }
bool is_finite_bfloat(uint16_t bits) { return (bits & 0x7f80) != 0x7f80; }
uint16_t negated(uint16_t half) { return half ^ 0x8000; }

// Four bytes as a word.
uint32_t word(const int8_t* bytes) {
  uint32_t of_four;
  std::memcpy(&of_four, bytes, sizeof of_four);
  return of_four;
}
constexpr uint32_t each(int byte) { return 0x01010101u * static_cast<uint32_t>(byte); }

// Adds bytes, without carries between them.
uint32_t plus(uint32_t a, uint32_t b) {
  return ((a & each(0x7f)) + (b & each(0x7f))) ^ ((a ^ b) & each(0x80));
}

// Unpacks numbers of `bits` bits from runs of bytes: the low bits of a run are its first numbers. They are
// placed above the lowest `up` bits of the target, which are kept.
template <int bits, int run, int up = 0>
void put_bits(const uint8_t* stored, int count, int8_t* numbers) {
  for (; count > 0; count -= run * 8 / bits, stored += run) {
    for (int shift = 0; shift < 8; shift += bits) {
      for (int i = 0; i < run; ++i) {
        const int number = (stored[i] >> shift & ((1 << bits) - 1)) << up;
        numbers[i] = static_cast<int8_t>(up > 0 ? numbers[i] | number : number);
      }
      numbers += run;
    }
  }
}

void subtract(int offset, int count, int8_t* numbers) {
  for (int i = 0; i < count; ++i) numbers[i] = static_cast<int8_t>(numbers[i] - offset);
}

template <int bits, int offset, bool has_minimum>
void put_block_of_32(const uint8_t* stored, Unit& unit) {
  unit.scale = half_at(stored);
  stored += 2;
  if (has_minimum) {
    unit.minimum = half_at(stored);
    stored += 2;
  }
  if constexpr (bits == 8) {
    std::memcpy(unit.numbers, stored, kBlockColumns);
  } else {
    put_bits<4, 16>(stored + (bits == 5 ? 4 : 0), kBlockColumns, unit.numbers);
  }
  if constexpr (bits == 5) {
    uint32_t fifth;
    std::memcpy(&fifth, stored, sizeof fifth);
    for (int i = 0; i < kBlockColumns; i += 4) {  // the product moves bit j of four to bit 8 * j
      const uint32_t high = ((fifth >> i & 15) * 0x00204081u & each(1)) << 4;
      const uint32_t number = word(unit.numbers + i) | high;
      std::memcpy(unit.numbers + i, &number, sizeof number);
    }
  }
  if constexpr (offset != 0) subtract(offset, kBlockColumns, unit.numbers);
}

// Eight scales and minima in 6 bits each; the last four borrow high bits of the first four.
void put_scales_and_minima(const uint8_t* stored, Unit& unit) {
  unit.scale = half_at(stored);
  unit.minimum = negated(half_at(stored + 2));
  stored += 4;
  for (int i = 0; i < 4; ++i) {
    unit.scales[i] = stored[i] & 63;
    unit.minima[i] = stored[4 + i] & 63;
    unit.scales[4 + i] = static_cast<int8_t>((stored[8 + i] & 15) | (stored[i] >> 6) << 4);
    unit.minima[4 + i] = static_cast<int8_t>((stored[8 + i] >> 4) | (stored[4 + i] >> 6) << 4);
  }
}

void put_q2_k(const uint8_t* stored, Unit& unit) {
  unit.scale = half_at(stored + 80);
  unit.minimum = negated(half_at(stored + 82));
  for (int i = 0; i < 16; ++i) {
    unit.scales[i] = stored[i] & 15;
    unit.minima[i] = static_cast<int8_t>(stored[i] >> 4);
  }
  put_bits<2, 32>(stored + 16, 256, unit.numbers);
}

void put_q3_k(const uint8_t* stored, Unit& unit) {
  unit.scale = half_at(stored + 108);
  put_bits<4, 8>(stored + 96, 16, unit.scales);
  put_bits<2, 4, 4>(stored + 104, 16, unit.scales);
  subtract(32, 16, unit.scales);
  put_bits<2, 32>(stored + 32, 256, unit.numbers);
  put_bits<1, 32, 2>(stored, 256, unit.numbers);
  subtract(4, 256, unit.numbers);
}

void put_q4_k(const uint8_t* stored, Unit& unit) {
  put_scales_and_minima(stored, unit);
  put_bits<4, 32>(stored + 16, 256, unit.numbers);
}

void put_q5_k(const uint8_t* stored, Unit& unit) {
  put_scales_and_minima(stored, unit);
  put_bits<4, 32>(stored + 48, 256, unit.numbers);
  put_bits<1, 32, 4>(stored + 16, 256, unit.numbers);
}

void put_q6_k(const uint8_t* stored, Unit& unit) {
  unit.scale = half_at(stored + 208);
  std::memcpy(unit.scales, stored + 192, 16);
  put_bits<4, 64>(stored, 256, unit.numbers);
  put_bits<2, 32, 4>(stored + 128, 256, unit.numbers);
  subtract(32, 256, unit.numbers);
}

void look_up(int count, int8_t* numbers) {
  for (int i = 0; i < count; ++i) numbers[i] = kIq4Values[numbers[i]];
}

void put_iq4_nl(const uint8_t* stored, Unit& unit) {
  unit.scale = half_at(stored);
  put_bits<4, 16>(stored + 2, kBlockColumns, unit.numbers);
  look_up(kBlockColumns, unit.numbers);
}

void put_iq4_xs(const uint8_t* stored, Unit& unit) {
  unit.scale = half_at(stored);
  const int high = half_at(stored + 2);
  for (int i = 0; i < 8; ++i) {
    const int low = stored[4 + i / 2] >> (i % 2 * 4) & 15;
    unit.scales[i] = static_cast<int8_t>((low | (high >> (2 * i) & 3) << 4) - 32);
  }
  put_bits<4, 16>(stored + 8, 256, unit.numbers);
  look_up(256, unit.numbers);
}

// A scale is a power of two, stored as its exponent; halved, because numbers are doubled.
void put_mxfp4(const uint8_t* stored, Unit& unit) {
  const int exponent = stored[0];
  if (exponent == 255) {
    unit.scale = 0x7fc0;  // NaN
  } else {
    unit.scale = static_cast<uint16_t>(exponent > 1 ? (exponent - 1) << 7 : 0x20 << exponent);
  }
  put_bits<4, 16>(stored + 1, kBlockColumns, unit.numbers);
}

struct Stored {
  WeightType kept_as;
  int columns;  // per block in the file
  int bytes;
  void (*put)(const uint8_t* stored, Unit& unit);
};

constexpr Stored kStored[kStoredTypes] = {
    {WeightType::kQ8_0, 32, 34, put_block_of_32<8, 0, false>},
    {WeightType::kQ4_0, 32, 18, put_block_of_32<4, 8, false>},
    {WeightType::kQ4_1, 32, 20, put_block_of_32<4, 0, true>},
    {WeightType::kQ5_0, 32, 22, put_block_of_32<5, 16, false>},
    {WeightType::kQ5_1, 32, 24, put_block_of_32<5, 0, true>},
    {WeightType::kQ2_K, 256, 84, put_q2_k},
    {WeightType::kQ6_K, 256, 110, put_q3_k},
    {WeightType::kQ4_K, 256, 144, put_q4_k},
    {WeightType::kQ5_K, 256, 176, put_q5_k},
    {WeightType::kQ6_K, 256, 210, put_q6_k},
    {WeightType::kQ8_0, 32, 18, put_iq4_nl},
    {WeightType::kIq4Xs, 256, 136, put_iq4_xs},
    {WeightType::kMxfp4, 32, 17, put_mxfp4},
};

const Stored& stored_as(StoredType type) { return kStored[static_cast<int>(type)]; }

// Addresses of a row's parts in a tile's unit.
struct RowPlace {
  const WeightLayout& of;
  uint8_t* unit;
  int row;

  uint8_t* scale() const { return unit + 2 * row; }
  uint8_t* minimum() const { return unit + 2 * (kTileRows + row); }
  uint8_t* block(int i) const { return unit + header_bytes(of) + i * block_bytes(of); }
  uint8_t& small_scale(int i, int half) const { return block(i)[half * kTileRows + row]; }
  uint8_t& small_minimum(int i, int half) const { return block(i)[(of.scales + half) * kTileRows + row]; }
  uint8_t* group(int i, int g) const { return block(i) + block_scale_bytes(of) + (g * kTileRows + row) * 4; }
};

// The bits above the lowest four of a column: byte and first bit.
struct HighBits {
  HighBits(const RowPlace& place, int i, int column) {
    const int half = column / 16, group = column % 16 / 4, byte = column % 4;
    const bool is_five = place.of.bits == 5;
    at = place.group(i, 4 + (is_five ? 0 : group / 2)) + byte;
    shift = is_five ? group + 4 * half : 4 * (group % 2) + 2 * half;
  }
  uint8_t* at;
  int shift;
};

template <int bits>
void pack_block(const int8_t* numbers, int offset, const RowPlace& place, int i) {
  uint8_t* const groups = place.group(i, 0);
  constexpr int kGroupBytes = 4 * kTileRows;
  if constexpr (bits == 8) {
    for (int g = 0; g < 8; ++g) std::memcpy(groups + g * kGroupBytes, numbers + 4 * g, 4);
    return;
  }
  constexpr int kHigh = bits == 4 ? 0 : bits == 5 ? 1 : 2;  // groups
  uint32_t high[2]{};
  for (int g = 0; g < 4; ++g) {
    const uint32_t first = plus(word(numbers + 4 * g), each(offset));
    const uint32_t second = plus(word(numbers + 16 + 4 * g), each(offset));
    const uint32_t low = (first & each(15)) | (second & each(15)) << 4;
    if constexpr (bits == 5) {
      high[0] |= (first >> 4 & each(1)) << g | (second >> 4 & each(1)) << (4 + g);
    }
    if constexpr (bits == 6) {
      const int shift = 4 * (g % 2);
      high[g / 2] |= (first >> 4 & each(3)) << shift | (second >> 4 & each(3)) << (2 + shift);
    }
    std::memcpy(groups + g * kGroupBytes, &low, sizeof low);
  }
  for (int g = 0; g < kHigh; ++g) std::memcpy(groups + (4 + g) * kGroupBytes, &high[g], sizeof high[g]);
}

template <int bits>
void pack(const Unit& unit, const RowPlace& place) {
  const WeightLayout& of = place.of;
  std::memcpy(place.scale(), &unit.scale, 2);
  if (of.has_minima) std::memcpy(place.minimum(), &unit.minimum, 2);
  for (int i = 0; i < unit_blocks(of); ++i) {
    for (int half = 0; half < of.scales; ++half) {
      place.small_scale(i, half) = static_cast<uint8_t>(unit.scales[i * of.scales + half]);
      if (of.has_minima) {
        place.small_minimum(i, half) = static_cast<uint8_t>(unit.minima[i * of.scales + half]);
      }
    }
    pack_block<bits>(unit.numbers + i * kBlockColumns, of.offset, place, i);
  }
}

using Pack = void(const Unit& unit, const RowPlace& place);

Pack* pack_of(int bits) {
  if (bits == 4) return pack<4>;
  if (bits == 5) return pack<5>;
  return bits == 6 ? pack<6> : pack<8>;
}

void to_floats(const RowPlace& place, float* out) {
  const WeightLayout& of = place.of;
  const uint16_t scale_bits = half_at(place.scale());
  const float scale = of.is_fp4 ? bfloat_to_float(scale_bits) : to_float(scale_bits);
  const float minimum = of.has_minima ? to_float(half_at(place.minimum())) : 0.0f;
  for (int i = 0; i < unit_blocks(of); ++i) {
    for (int column = 0; column < kBlockColumns; ++column) {
      int number;
      if (of.bits == 8) {
        number = static_cast<int8_t>(place.group(i, column / 4)[column % 4]);
      } else {
        const int low = column % 16;
        number = place.group(i, low / 4)[low % 4] >> (column / 16 * 4) & 15;
        if (of.bits > 4) {
          const HighBits high(place, i, column);
          number |= (*high.at >> high.shift & (of.bits == 5 ? 1 : 3)) << 4;
        }
        number = (of.is_fp4 ? kFp4Numbers[number] : number) - of.offset;
      }
      float of_column = scale, added = minimum;
      if (of.scales) {
        const int half = of.scales == 2 ? column / 16 : 0;
        of_column *= static_cast<float>(static_cast<int8_t>(place.small_scale(i, half)));
        if (of.has_minima) added *= static_cast<float>(place.small_minimum(i, half));
      }
      const float product = static_cast<float>(number) * of_column;
      *out++ = of.has_minima ? product + added : product;
    }
  }
}

int64_t tile_bytes(const WeightLayout& of, int64_t columns) {
  return columns / kBlockColumns / unit_blocks(of) * unit_bytes(of);
}

// Calls body(i) for i in [0, count).
template <class Body>
void in_parallel(int64_t count, int64_t elements, int num_threads, Body body) {
  const int64_t threads = elements < 1 << 14 ? 1 : std::min<int64_t>(num_threads, count);
  ThreadPool::shared().run_parts(threads, count, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) body(i);
  });
}

}  // namespace

WeightType weight_type_of(StoredType type) { return stored_as(type).kept_as; }

int64_t stored_columns(StoredType type) { return stored_as(type).columns; }

int64_t stored_bytes(StoredType type, int64_t columns) {
  return columns / stored_as(type).columns * stored_as(type).bytes;
}

int64_t packed_bytes(StoredType type, int64_t rows, int64_t columns) {
  return (rows + kTileRows - 1) / kTileRows * tile_bytes(layout_of(weight_type_of(type)), columns);
}

bool pack_rows(StoredType type, const uint8_t* stored, int64_t first, int64_t count, int64_t columns,
               uint8_t* packed, int num_threads) {
  if (count < 1) return true;
  const Stored& as = stored_as(type);
  const WeightLayout& of = layout_of(as.kept_as);
  const int64_t bytes = tile_bytes(of, columns), row_bytes = stored_bytes(type, columns);
  const int64_t first_tile = first / kTileRows, last_tile = (first + count - 1) / kTileRows;
  Pack* const put_into_tile = pack_of(of.bits);
  std::atomic<bool> all_finite{true};
  in_parallel(last_tile - first_tile + 1, count * columns, num_threads, [&](int64_t i) {
    const int64_t tile = first_tile + i;
    const int64_t begin = std::max(tile * kTileRows, first);
    const int64_t end = std::min((tile + 1) * kTileRows, first + count);
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* from = stored + (row - first) * row_bytes;
      RowPlace place{of, packed + tile * bytes, static_cast<int>(row % kTileRows)};
      for (int64_t column = 0; column < columns; column += as.columns, from += as.bytes) {
        Unit unit;
        as.put(from, unit);
        const bool has_scale = of.is_fp4 ? is_finite_bfloat(unit.scale) : is_finite(unit.scale);
        if (!has_scale || !is_finite(unit.minimum)) all_finite = false;
        put_into_tile(unit, place);
        place.unit += unit_bytes(of);
      }
    }
  });
  return all_finite;
}

void unpack_rows(WeightType type, const uint8_t* packed, const int64_t* rows, int64_t count, int64_t columns,
                 float* out, int num_threads) {
  const WeightLayout& of = layout_of(type);
  const int64_t bytes = tile_bytes(of, columns);
  in_parallel(count, count * columns, num_threads, [&](int64_t i) {
    RowPlace place{of, const_cast<uint8_t*>(packed) + rows[i] / kTileRows * bytes,
                   static_cast<int>(rows[i] % kTileRows)};
    float* into = out + i * columns;
    for (int64_t column = 0; column < columns; column += unit_blocks(of) * kBlockColumns) {
      to_floats(place, into + column);
      place.unit += unit_bytes(of);
    }
  });
}

}  // namespace neo_desktop
