// Tiles of the layout in dimension pairs (attend_pairs.h): their locations, and prefetching.
#pragma once

#include "simd_common.h"
#include "tile_softmax.h"

namespace neo_desktop {
namespace {

constexpr int kSegments = kPairTile / kSegmentTokens;

// Prefetch distance: with less, data comes late; with more, it does not fit L1. For one or two query heads
// less is enough, because the processor's own loads run ahead.
constexpr int kAheadBytes = 16 << 10;
constexpr int kMinAheadGroup = 3;

// Unit of prefetching: 16 tokens of two dimensions, or 32 columns of a row of V.
constexpr int kPiece = 2 * kSegmentTokens;  // elements

// Prefetches half a tile, keys or values of one KV head, during the work on another half. Piece by piece, so
// that memory requests are spread over the computation, and in memory order where segments are adjacent. A
// processor drops prefetches that exceed its memory's rate, on Zen 5 beyond about 64 lines in flight, and it
// serves consecutive lines faster than others.
template <class T>
class ReadAhead {
 public:
  // Segments start `offset` elements after the pointers in `segments`, and their pieces are `stride` elements
  // apart; if segments are adjacent (`together`), all pieces are consecutive.
  ReadAhead(const T* const* segments, int64_t offset, int64_t stride, int head_dim, bool together)
      : segments_(segments),
        offset_(offset),
        next_(segments[0] + offset),
        stride_(together ? kPiece : stride),
        run_((together ? kSegments : 1) * head_dim * kSegmentTokens),
        left_(run_),
        runs_(together ? 1 : kSegments) {}

  // Calls body(i) for each of `steps` steps, which process `elements` elements of the other half, and
  // prefetches the same number.
  template <int elements, class Body>
  [[gnu::always_inline]] void during(int steps, Body body) {
    for (int i = 0; i < steps;) {
      const int end = i + take<elements>(steps - i);
      const T* next = next_;  // kept in registers
      const int64_t stride = stride_;
#pragma GCC unroll 1
      for (; i < end; ++i) {
        next = ask<elements>(i, next, stride);
        body(i);
      }
      next_ = next;
    }
  }

  // For loops that process a piece at a time.
  void ask_for_piece() {
    take<kPiece>(1);
    next_ = ask<kPiece>(0, next_, stride_);
  }

 private:
  // Steps that can prefetch before a run ends; at least one.
  template <int elements>
  [[gnu::always_inline]] int take(int steps) {
    constexpr int kShare = power_of_two(elements);
    if (left_ < kShare) end_run();
    const int within = left_ / kShare;
    if (steps > within) steps = within > 0 ? within : 1;
    left_ -= steps * kShare;
    return steps;
  }

  template <int elements>
  [[gnu::always_inline]] static const T* ask(int i, const T* next, int64_t stride) {
    constexpr int kShare = power_of_two(elements);
    constexpr int kSteps = kShare < kPiece ? kPiece / kShare : 1;  // per piece
    if (kSteps > 1 && i % kSteps != 0) return next;
#pragma GCC unroll 8
    for (int piece = 0; piece < kShare; piece += kPiece) {
      prefetch<kPiece>(next, 0);
      next += stride;
    }
    return next;
  }

  // The smallest power of two that is at least x: shares must divide a piece.
  static constexpr int power_of_two(int x) { return x <= 1 ? 1 : 2 * power_of_two((x + 1) / 2); }

  void end_run() {
    if (--runs_ > 0) {
      next_ = *++segments_ + offset_;
      left_ = run_;
    } else {
      stride_ = 0;  // everything has been prefetched
      left_ = 1 << 30;
    }
  }

  const T* const* segments_;
  int64_t offset_;
  const T* next_;
  int64_t stride_;
  int run_;   // elements per run of contiguous memory
  int left_;  // elements left in this run
  int runs_;
};

// The first head's segments of a tile. Segments past the last token repeat it.
template <class T>
struct Segments {
  const T* k[kSegments];
  const T* v[kSegments];
  int64_t scale[kSegments];
  bool k_together;  // adjacent in memory, in the order of the pairs
  bool v_together;
  int64_t begin;  // first token of the tile
  int first;
  int count;  // 0: the end
};

// One KV head's part of a tile.
template <class T>
struct PairTile {
  const Segments<T>& segments;
  int64_t k_offset;  // elements from the first head's keys to this one's
  int64_t v_offset;
  const float* k_scale;  // int8: this head's scales; else null
  const float* v_scale;
  int64_t pair_stride;  // elements of K between pairs of dimensions
  int first;            // tokens [first, count) are attended to
  int count;

  const T* k(int segment) const { return segments.k[segment] + k_offset; }
  const T* v(int segment) const { return segments.v[segment] + v_offset; }
};

// The bits of two dimensions, each of `bytes` bytes.
template <int bytes>
struct PairOf;
template <>
struct PairOf<1> {
  using Type = uint16_t;
};
template <>
struct PairOf<2> {
  using Type = uint32_t;
};
template <>
struct PairOf<4> {
  using Type = uint64_t;
};

#if __has_builtin(__builtin_shufflevector)
#define NEO_DESKTOP_MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define NEO_DESKTOP_MIX(a, b, ...) __builtin_shuffle(a, b, Four{__VA_ARGS__})
#endif

// Writes a tile's rows as keys in pairs, [head_dim / 2, kPairTile, 2]; its segments past the last token stay
// as they were. Four tokens of eight dimensions at a time.
template <class T>
inline void pair_rows(const PairTile<T>& tile, int head_dim, T* out) {
  constexpr int kTokens = 4;
  typedef typename PairOf<sizeof(T)>::Type Four __attribute__((vector_size(kTokens * 2 * sizeof(T))));
  for (int s = 0; s * kSegmentTokens < tile.count; ++s) {
    for (int d = 0; d < head_dim; d += 2 * kTokens) {
      const T* row = tile.v(s) + d;
      T* to = out + d * kPairTile + s * kPiece;
      for (int t = 0; t < kSegmentTokens; t += kTokens, row += kTokens * head_dim, to += 2 * kTokens) {
        Four x[kTokens];
#pragma GCC unroll 4
        for (int i = 0; i < kTokens; ++i) __builtin_memcpy(&x[i], row + i * head_dim, sizeof(Four));
        const Four low[2] = {NEO_DESKTOP_MIX(x[0], x[1], 0, 4, 1, 5),
                             NEO_DESKTOP_MIX(x[2], x[3], 0, 4, 1, 5)};
        const Four high[2] = {NEO_DESKTOP_MIX(x[0], x[1], 2, 6, 3, 7),
                              NEO_DESKTOP_MIX(x[2], x[3], 2, 6, 3, 7)};
        x[0] = NEO_DESKTOP_MIX(low[0], low[1], 0, 1, 4, 5);
        x[1] = NEO_DESKTOP_MIX(low[0], low[1], 2, 3, 6, 7);
        x[2] = NEO_DESKTOP_MIX(high[0], high[1], 0, 1, 4, 5);
        x[3] = NEO_DESKTOP_MIX(high[0], high[1], 2, 3, 6, 7);
#pragma GCC unroll 4
        for (int i = 0; i < kTokens; ++i) __builtin_memcpy(to + i * 2 * kPairTile, &x[i], sizeof(Four));
      }
    }
  }
}

#undef NEO_DESKTOP_MIX

// Walks a block table from the segment of token `begin` on, tile by tile; the first tile may lack segments.
template <class T>
class SegmentWalker {
 public:
  explicit SegmentWalker(const AttendTask& task)
      : task_(task),
        next_(task.begin / kSegmentTokens * kSegmentTokens),
        tokens_(task, task.begin / kSegmentTokens * kSegmentTokens) {}

  void next(Segments<T>& tile) {
    tile.begin = next_;
    tile.first = smaller(task_.begin > next_ ? task_.begin - next_ : 0, kSegmentTokens);
    const int most = kPairTile - static_cast<int>(next_ % kPairTile);
    tile.count = task_.end > next_ ? smaller(task_.end - next_, most) : 0;
    for (int s = 0; s < kSegments; ++s) {
      if (s * kSegmentTokens < tile.count) {
        const TokenWalker::Place place = tokens_.next();
        tile.k[s] = task_.paired != nullptr
                        ? static_cast<const T*>(task_.paired) + s * kPiece
                        : static_cast<const T*>(task_.k) + place.page * task_.k_page_stride + place.row * 2;
        tile.v[s] =
            static_cast<const T*>(task_.v) + place.page * task_.v_page_stride + place.row * task_.head_dim;
        tile.scale[s] = place.page * task_.scale_page_stride + place.row;
        tokens_.skip(kSegmentTokens);
      } else if (s > 0) {
        tile.k[s] = tile.k[s - 1];
        tile.v[s] = tile.v[s - 1];
        tile.scale[s] = tile.scale[s - 1];
      }
    }
    next_ += most;
    const bool whole = tile.count == kPairTile;
    tile.k_together = whole && task_.page_tokens == kPairTile;
    tile.v_together = whole;
    for (int s = 1; whole && s < kSegments; ++s) {
      tile.k_together &= tile.k[s] == tile.k[0] + s * kPiece;
      tile.v_together &= tile.v[s] == tile.v[0] + s * kSegmentTokens * task_.head_dim;
    }
  }

 private:
  const AttendTask& task_;
  int64_t next_;
  TokenWalker tokens_;
};

}  // namespace
}  // namespace neo_desktop
