// What is tested; each function is one random case.
#pragma once

#include "random.h"
#include "report.h"

namespace neo_desktop::testing {

// paged_attention_decode gives the right answer on every ISA, the same with any number of threads.
void test_decode(Random& random, Report& report);

// It does, or throws, whatever the block tables and lengths hold; if it throws, nothing was written.
void test_decode_of_garbage(Random& random, Report& report);

// prompt_attention gives the right answer on every ISA, with the same bits in any chunks.
void test_prompts(Random& random, Report& report);

// Every token of every head is worked on once, cut where the batch and the threads have no influence.
void test_schedule(Random& random, Report& report);

// paged_kv_write rounds correctly on every ISA, and writes to its slots only; to wrong slots it throws.
void test_write(Random& random, Report& report);

// paged_kv_read gives what the slots hold, rounded correctly, on every ISA; of wrong slots it throws.
void test_read(Random& random, Report& report);

// store_rows copies rows of all layers to their slots and writes nothing else; of wrong slots it throws.
void test_store(Random& random, Report& report);

// Threads that call at the same time get their own answers.
void test_concurrent_calls(Random& random, Report& report);

// The relay answers every layer, and lets nobody wait: cancelled, or destroyed in the middle of an iteration.
void test_relay(Random& random, Report& report);

// Rows that the relay moves between buffers and caches arrive, in the order that is promised.
void test_transfers(Random& random, Report& report);

// Products that the relay computes between layers are right, and nobody waits for those of no matrix.
void test_products(Random& random, Report& report);

// Products with quantised weights are as exact as inputs in 8 bits, and the same bits on every ISA.
void test_quantised(Random& random, Report& report);

// Products with plain weights are as exact as sums in float32, the same with any number of threads.
void test_dense(Random& random, Report& report);

// What lies between two layers is the same bits in one call and in single ones, with any number of threads.
void test_quantised_layer(Random& random, Report& report);

// What experts make of rows is the same bits as by single products, with any number of rows and threads.
void test_experts(Random& random, Report& report);

// The largest error that test_decode has seen, as a share of what it allows.
double largest_decode_error();

}  // namespace neo_desktop::testing
