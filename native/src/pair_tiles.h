// Tiles of the layout in dimension pairs (attend_pairs.h): where they lie, and how memory is asked for early.
#pragma once

#include "simd_common.h"
#include "tile_softmax.h"

namespace neo_desktop {
namespace {

constexpr int kSegments = kPairTile / kSegmentTokens;

// Memory is asked for by about so much before it is used: less, and it comes late; more, and the first-level
// cache does not hold it. For one or two query heads less is enough: the processor's own loads come early.
constexpr int kAheadBytes = 16 << 10;
constexpr int kMinAheadGroup = 3;

// What is asked for at once: 16 tokens of two dimensions, or 32 columns of a row of V.
constexpr int kPiece = 2 * kSegmentTokens;  // elements

// Asks for half a tile, keys or values of one KV head, while another half is worked on: piece by piece, so
// that requests to memory are spread over the computation, and in the order of memory as far as segments lie
// together, however they are worked on later. A processor drops what is asked for faster than memory can
// deliver, on Zen 5 beyond some 64 lines under way, and pieces in order are delivered faster than others.
template <class T>
class ReadAhead {
 public:
  // Segments begin `offset` elements behind what `segments` points to, and their pieces are `stride` elements
  // apart; where segments lie `together`, all pieces follow each other.
  ReadAhead(const T* const* segments, int64_t offset, int64_t stride, int head_dim, bool together)
      : segments_(segments),
        offset_(offset),
        next_(segments[0] + offset),
        stride_(together ? kPiece : stride),
        run_((together ? kSegments : 1) * head_dim * kSegmentTokens),
        left_(run_),
        runs_(together ? 1 : kSegments) {}

  // Calls body(i) for each of `steps` steps, each of which takes `elements` elements of the other half, and
  // asks for as many.
  template <int elements, class Body>
  [[gnu::always_inline]] void during(int steps, Body body) {
    for (int i = 0; i < steps;) {
      const int end = i + take<elements>(steps - i);
      const T* next = next_;  // in registers
      const int64_t stride = stride_;
#pragma GCC unroll 1
      for (; i < end; ++i) {
        next = ask<elements>(i, next, stride);
        body(i);
      }
      next_ = next;
    }
  }

  // For loops that take a piece at a time.
  void ask_for_piece() {
    take<kPiece>(1);
    next_ = ask<kPiece>(0, next_, stride_);
  }

 private:
  // How many of `steps` steps can ask before a run ends; at least one.
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

  // The least one that is not below x: shares of a piece must make up a piece.
  static constexpr int power_of_two(int x) { return x <= 1 ? 1 : 2 * power_of_two((x + 1) / 2); }

  void end_run() {
    if (--runs_ > 0) {
      next_ = *++segments_ + offset_;
      left_ = run_;
    } else {
      stride_ = 0;  // all has been asked for
      left_ = 1 << 30;
    }
  }

  const T* const* segments_;
  int64_t offset_;
  const T* next_;
  int64_t stride_;
  int run_;   // elements of a run of memory
  int left_;  // of this one
  int runs_;
};

// The first head's segments of a tile. Segments past the last token repeat it.
template <class T>
struct Segments {
  const T* k[kSegments];
  const T* v[kSegments];
  int64_t scale[kSegments];
  bool k_together;  // one after the other in memory, and in the order of the pairs
  bool v_together;
  int first;
  int count;  // 0: there are no more
};

// One KV head's share of a tile.
template <class T>
struct PairTile {
  const Segments<T>& segments;
  int64_t k_offset;  // elements from the first head's keys to this one's
  int64_t v_offset;
  const float* k_scale;  // of int8, else null: this head's, where the memory begins
  const float* v_scale;
  int64_t pair_stride;  // elements of K from one pair of dimensions to the next
  int first;            // tokens [first, count) are attended to
  int count;

  const T* k(int segment) const { return segments.k[segment] + k_offset; }
  const T* v(int segment) const { return segments.v[segment] + v_offset; }
};

// Walks a block table from the segment of token `begin` on, tile by tile; the first tile may lack segments.
template <class T>
class SegmentWalker {
 public:
  explicit SegmentWalker(const AttendTask& task)
      : task_(task),
        next_(task.begin / kSegmentTokens * kSegmentTokens),
        tokens_(task, task.begin / kSegmentTokens * kSegmentTokens) {}

  void next(Segments<T>& tile) {
    tile.first = smaller(task_.begin > next_ ? task_.begin - next_ : 0, kSegmentTokens);
    const int most = kPairTile - static_cast<int>(next_ % kPairTile);
    tile.count = task_.end > next_ ? smaller(task_.end - next_, most) : 0;
    for (int s = 0; s < kSegments; ++s) {
      if (s * kSegmentTokens < tile.count) {
        const TokenWalker::Place place = tokens_.next();
        tile.k[s] = static_cast<const T*>(task_.k) + place.page * task_.k_page_stride + place.row * 2;
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
