// What differs between the kinds of items that a relay carries out.
#pragma once

#include <atomic>
#include <string>

#include "neo_desktop/relay.h"

namespace neo_desktop {

enum FlagKind { kReady, kDone };

std::atomic_ref<int32_t> flag(const RelayItem& item, FlagKind kind, size_t layer);

// Throws std::invalid_argument if anything is wrong for so many layers with such caches and sinks; null:
// without any.
void check(const RelayItem& item, const PagedCache* cache, const TensorView* sinks, size_t num_layers);

// Whether the GPU waits for it before it can go on: for attention and products.
bool is_urgent(const RelayItem& item);
bool is_behind(const RelayItem& item);

// How many turns there are for an item, of so many layers; products have one more.
size_t turns_of(const RelayItem& item, size_t num_layers);

// Whether something is done in a turn.
bool takes_part(const RelayItem& item, size_t turn);

// Whether a layer of the item waits for its flag "ready".
bool is_awaited(const RelayItem& item, size_t layer);

// Carries out a layer of the item, or a turn. Must have been checked.
void run(const RelayItem& item, const PagedCache* cache, int64_t window, const TensorView* sinks,
         size_t layer, int num_threads, Isa isa);

// What the GPU did not do while the item waits for it, or the CPU did not end, for people.
std::string words(const RelayItem& item, size_t layer, bool is_waiting);

}  // namespace neo_desktop
