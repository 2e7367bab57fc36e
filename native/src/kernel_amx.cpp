// AMX: a tile instruction multiplies 16 x 32 by 32 x 16 bf16. Keys in dimension pairs are the second matrix
// in their memory layout; values are interleaved two tokens at a time when they are loaded. All query heads
// of a tile are processed at once, so that even large groups are memory-bound.
#include "amx.h"
#include "attend_pairs.h"
#include "avx512bf16.h"

namespace neo_desktop {
namespace {

constexpr int kTileRowBytes = 64;
constexpr int kTileTokens = 32;  // weights per tile row
constexpr int kValueTiles = 4;   // of 16 columns each

enum TileName { kScores = 0, kQueries = 1, kRight = 2, kWeights = 3, kOut = 4 };  // kOut has three more

template <class Element>
struct AmxMath {
  using Vector = Avx512;
  using T = Element;

  template <int Q>
  static void scores(const AttendTask& task, const PairTile<T>& tile, const QueryTile& queries,
                     ReadAhead<T>& ahead, float* out) {
    configure<Q>();
    const BFloat16* q = task.q_bf16 + queries.row * task.padded_head_dim;
    const int64_t q_bytes = task.padded_head_dim * sizeof(BFloat16);
    for (int s = 0; s * kSegmentTokens < tile.count; ++s) {
      tile_zero<kScores>();
      for (int d = 0; d < task.head_dim; d += kPairLanes) {
        const int64_t at = d / 2 * tile.pair_stride;
        for (int i = 0; i < kPairLanes / 2; ++i) ahead.ask_for_piece();
        tile_load<kQueries>(q + d, q_bytes);
        load_keys(tile.k(s) + at, tile.pair_stride);
        tile_dot_bf16<kScores, kQueries, kRight>();
      }
      tile_store<kScores>(out + s * kSegmentTokens, kPairTile * sizeof(float));
    }
    const __m512 scale = Avx512::broadcast(task.score_scale);
    for (int i = 0; i < Q * kPairTile; i += Avx512::kLanes) {
      Avx512::store(out + i, Avx512::multiply(Avx512::load(out + i), scale));
    }
  }

  template <int Q>
  static void values(const AttendTask& task, const PairTile<T>& tile, const float* weights,
                     ReadAhead<T>& ahead, float* acc) {
    // Rows of the left matrix: the large parts of the heads' weights, then the remainders.
    alignas(64) BFloat16 parts[2 * Q * kPairTile];
    split_weights(weights, Q * kPairTile, parts, parts + Q * kPairTile);
    for (int column = 0; column < task.head_dim; column += kValueTiles * Avx512::kLanes) {
      const int width = smaller(task.head_dim - column, kValueTiles * Avx512::kLanes);
      tile_zero<kOut>();
      tile_zero<kOut + 1>();
      tile_zero<kOut + 2>();
      tile_zero<kOut + 3>();
      for (int token = 0; token < tile.count; token += kTileTokens) {
        alignas(64) BFloat16 right[kValueTiles][kTileTokens / 2][kPairLanes];
        interleave(task, tile, token, column, width, ahead, right);
        tile_load<kWeights>(parts + token, kPairTile * sizeof(BFloat16));
        add<kOut>(right[0]);
        add<kOut + 1>(right[1]);
        if (width > kPairLanes) {
          add<kOut + 2>(right[2]);
          add<kOut + 3>(right[3]);
        }
      }
      take<Q, kOut>(task, column, acc);
      take<Q, kOut + 1>(task, column + Avx512::kLanes, acc);
      if (width > kPairLanes) {
        take<Q, kOut + 2>(task, column + 2 * Avx512::kLanes, acc);
        take<Q, kOut + 3>(task, column + 3 * Avx512::kLanes, acc);
      }
    }
  }

 private:
  template <int Q>
  static void configure() {
    static constexpr TileConfig config = [] {
      TileConfig shape;
      shape.set(kScores, Q, kTileRowBytes);
      shape.set(kQueries, Q, kTileRowBytes);
      shape.set(kRight, 16, kTileRowBytes);
      shape.set(kWeights, 2 * Q, kTileRowBytes);
      for (int i = 0; i < kValueTiles; ++i) shape.set(kOut + i, 2 * Q, kTileRowBytes);
      return shape;
    }();
    tile_configure(config);
  }

  static void load_keys(const T* keys, int64_t pair_stride) {
    if constexpr (sizeof(T) == sizeof(BFloat16)) {
      tile_load<kRight>(keys, pair_stride * sizeof(T));
    } else {
      alignas(64) BFloat16 wide[kPairLanes / 2][kPairLanes];
      for (int i = 0; i < kPairLanes / 2; ++i) {
        _mm512_store_si512(wide[i], load_bf16(keys + i * pair_stride));
      }
      tile_load<kRight>(wide, kTileRowBytes);
    }
  }

  // Tokens [token, token + 32) of `width` columns, interleaved in pairs; zero for tokens outside the attended
  // range.
  static void interleave(const AttendTask& task, const PairTile<T>& tile, int token, int column, int width,
                         ReadAhead<T>& ahead, BFloat16 (*right)[kTileTokens / 2][kPairLanes]) {
    for (int i = 0; i < kTileTokens; i += 2) {
      const int t = token + i;
      const int s = t / kSegmentTokens;
      const int64_t skip = static_cast<int64_t>(t % kSegmentTokens) * task.head_dim + column;
      const bool first = t >= tile.first && t < tile.count;
      const bool second = t + 1 >= tile.first && t + 1 < tile.count;
      for (int w = 0; w * kPairLanes < width; ++w) {
        const T* row = tile.v(s) + skip + w * kPairLanes;
        const __m512i a = first ? load_bf16(row) : _mm512_setzero_si512();
        const __m512i b = second ? load_bf16(row + task.head_dim) : _mm512_setzero_si512();
        _mm512_store_si512(right[2 * w][i / 2], interleave_low(a, b));
        _mm512_store_si512(right[2 * w + 1][i / 2], interleave_high(a, b));
        ahead.ask_for_piece();
        ahead.ask_for_piece();
      }
    }
  }

  template <int out>
  static void add(const BFloat16 (*right)[kPairLanes]) {
    tile_load<kRight>(right, kTileRowBytes);
    tile_dot_bf16<out, kWeights, kRight>();
  }

  template <int Q, int out>
  static void take(const AttendTask& task, int column, float* acc) {
    alignas(64) float rows[2 * Q][Avx512::kLanes];
    tile_store<out>(rows, kTileRowBytes);
    for (int g = 0; g < Q; ++g) {
      float* at = acc + g * task.padded_head_dim + column;
      Avx512::store(
          at, Avx512::add(Avx512::load(at), Avx512::add(Avx512::load(rows[g]), Avx512::load(rows[Q + g]))));
    }
  }
};

template <class T>
void attend_tiles(const AttendTask& task) {
  if (task.head_dim % kPairLanes != 0) {  // a row would end inside a tile
    kAvx512Bf16Kernels
        .attend[sizeof(T) == 1 ? static_cast<int>(DType::kInt8) : static_cast<int>(DType::kBFloat16)](task);
    return;
  }
  attend_pairs<AmxMath<T>>(task);
  tile_release();
}

// Whole tiles; the kernels' share of this peak depends on the number of query heads per KV head.
int64_t multiply_adds(int64_t rounds, float* kept) {
  static constexpr TileConfig config = [] {
    TileConfig shape;
    for (int tile = 0; tile < 6; ++tile) shape.set(tile, 16, kTileRowBytes);
    return shape;
  }();
  tile_configure(config);
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  tile_zero<4>();
  tile_zero<5>();
  for (int64_t round = 0; round < rounds; ++round) {
    tile_dot_bf16<0, 4, 5>();
    tile_dot_bf16<1, 4, 5>();
    tile_dot_bf16<2, 4, 5>();
    tile_dot_bf16<3, 4, 5>();
  }
  alignas(64) float rows[16][16];
  tile_store<0>(rows, kTileRowBytes);
  *kept = rows[0][0];
  tile_release();
  return rounds * 4 * 16 * 16 * kPairLanes;
}

}  // namespace

constinit const Bf16Kernels kAmxKernels = {
    nullptr, {nullptr, nullptr, attend_tiles<BFloat16>, attend_tiles<Int8>}, {0, 0, 3, 3}, multiply_adds};

}  // namespace neo_desktop
