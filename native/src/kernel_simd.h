// All kernels of one instruction set, instantiated by its file.
#pragma once

#include "attend_pairs.h"
#include "attend_prompt.h"
#include "attend_rows.h"
#include "dense_tiles.h"
#include "merge_partials.h"
#include "operator_rows.h"
#include "pair_math.h"
#include "scan_rows.h"

namespace neo_desktop {
namespace {

template <class V>
constexpr Kernels make_kernels() {
  return {
      {attend_rows<V, float>, attend_rows<V, Half>, attend_rows<V, BFloat16>},
      {attend_pairs<PairMath<V, float>>, attend_pairs<PairMath<V, Half>>, attend_pairs<PairMath<V, BFloat16>>,
       attend_pairs<PairMath<V, Int8>>},
      {attend_prompt<V, float>, attend_prompt<V, Half>, attend_prompt<V, BFloat16>},
      merge_partials<V>,
      {widen<V, float>, widen<V, Half>, widen<V, BFloat16>},
      {narrow<V, float>, narrow<V, Half>, narrow<V, BFloat16>},
      read<V>,
      multiply_adds<V>,
      make_row_operators<V>(),
      make_dense_kernels<V>(),
      make_state_kernels<V>(),
      {},
  };
}

}  // namespace
}  // namespace neo_desktop
