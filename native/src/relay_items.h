// Operations on the kinds of relay items.
#pragma once

#include <atomic>
#include <string>

#include "neo_desktop/relay.h"

namespace neo_desktop {

enum FlagKind { kReady, kDone };

std::atomic_ref<int32_t> flag(const RelayItem& item, FlagKind kind, size_t layer);

// Throws std::invalid_argument if the item is invalid for this number of layers and these caches and sinks;
// null: no caches or sinks.
void check(const RelayItem& item, const PagedCache* cache, const TensorView* sinks, size_t num_layers);

// True if the GPU cannot proceed without the item: attention and matmuls.
bool is_urgent(const RelayItem& item);
bool is_behind(const RelayItem& item);

// Number of turns of an item; matmuls have one more than layers.
size_t turns_of(const RelayItem& item, size_t num_layers);

// True if the item has work in a turn.
bool takes_part(const RelayItem& item, size_t turn);

// True if a layer of the item waits for its "ready" flag.
bool is_awaited(const RelayItem& item, size_t layer);

// Runs a layer or turn of the item, which check() has accepted.
void run(const RelayItem& item, const PagedCache* cache, int64_t window, const TensorView* sinks,
         size_t layer, int num_threads, Isa isa);

// Describes, for messages, the step that the item waits for, or the step of the CPU that has not ended.
std::string words(const RelayItem& item, size_t layer, bool is_waiting);

}  // namespace neo_desktop
