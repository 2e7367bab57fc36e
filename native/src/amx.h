// AMX's tile registers: eight matrices of 16 rows of 64 bytes. NEO_DESKTOP_IMITATE_AMX emulates them, so that
// other processors can test the code that uses them.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace neo_desktop {
namespace {

// Rows and bytes per row of the registers, in the processor's format.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr void set(int tile, int num_rows, int num_bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(num_bytes);
  }
};

#if !defined(NEO_DESKTOP_IMITATE_AMX)

inline void tile_configure(const TileConfig& config) { _tile_loadconfig(&config); }
inline void tile_release() { _tile_release(); }
// The compilers' intrinsics require literal register numbers, not template arguments.
template <int t>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(t));
}
template <int t>
inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(t) : "memory");
}
template <int t>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(t) : "memory");
}
// sum [m, n] += a [m, 2k] · b, whose row k holds rows 2k and 2k + 1 of a [2k, n] matrix, two by two.
template <int sum, int a, int b>
inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(a), "i"(b));
}

#else

struct Tile {
  alignas(64) unsigned char bytes[16][64];
};
inline thread_local TileConfig tile_config;
inline thread_local Tile tiles[8];

inline void tile_configure(const TileConfig& config) { tile_config = config; }
inline void tile_release() { tile_config = {}; }
template <int t>
inline void tile_zero() {
  tiles[t] = {};
}
template <int t>
inline void tile_load(const void* from, int64_t stride) {
  tiles[t] = {};
  for (int row = 0; row < tile_config.rows[t]; ++row) {
    __builtin_memcpy(tiles[t].bytes[row], static_cast<const char*>(from) + row * stride,
                     tile_config.row_bytes[t]);
  }
}
template <int t>
inline void tile_store(void* to, int64_t stride) {
  for (int row = 0; row < tile_config.rows[t]; ++row) {
    __builtin_memcpy(static_cast<char*>(to) + row * stride, tiles[t].bytes[row], tile_config.row_bytes[t]);
  }
}
template <int sum, int a, int b>
inline void tile_dot_bf16() {
  const auto value = [](const Tile& tile, int row, int column) {
    uint32_t bits = 0;
    __builtin_memcpy(reinterpret_cast<char*>(&bits) + 2, tile.bytes[row] + 2 * column, 2);
    float wide;
    __builtin_memcpy(&wide, &bits, sizeof wide);
    return wide;
  };
  for (int m = 0; m < tile_config.rows[sum]; ++m) {
    for (int n = 0; n < tile_config.row_bytes[sum] / 4; ++n) {
      float total;
      __builtin_memcpy(&total, tiles[sum].bytes[m] + 4 * n, sizeof total);
      for (int k = 0; k < tile_config.row_bytes[a] / 4; ++k) {
        total += value(tiles[a], m, 2 * k) * value(tiles[b], k, 2 * n);
        total += value(tiles[a], m, 2 * k + 1) * value(tiles[b], k, 2 * n + 1);
      }
      __builtin_memcpy(tiles[sum].bytes[m] + 4 * n, &total, sizeof total);
    }
  }
}

#endif

}  // namespace
}  // namespace neo_desktop
