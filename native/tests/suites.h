// The test suites; each function runs one random case.
#pragma once

#include "random.h"
#include "report.h"

namespace neo_desktop::testing {

// paged_attention_decode gives the right result on every ISA, the same with any number of threads.
void test_decode(Random& random, Report& report);

// With any content of block tables and lengths, it gives the right result or throws before it writes
// anything.
void test_decode_of_garbage(Random& random, Report& report);

// prompt_attention gives the right result on every ISA, with the same bits for any division into chunks.
void test_prompts(Random& random, Report& report);

// Every token of every head is processed once; the cuts do not depend on the batch or the threads.
void test_schedule(Random& random, Report& report);

// paged_kv_write rounds correctly on every ISA, and writes to its slots only; for invalid slots it throws.
void test_write(Random& random, Report& report);

// paged_kv_read returns the slots' content, rounded correctly, on every ISA; for invalid slots it throws.
void test_read(Random& random, Report& report);

// store_rows copies the layers' rows to their slots and writes nothing else; for invalid slots it throws.
void test_store(Random& random, Report& report);

// Concurrent callers get their own results.
void test_concurrent_calls(Random& random, Report& report);

// The relay answers every layer, and no wait hangs if an iteration is cancelled or the relay is destroyed.
void test_relay(Random& random, Report& report);

// Rows that the relay moves between buffers and caches arrive, in the promised order.
void test_transfers(Random& random, Report& report);

// Matmuls that the relay computes between layers are right, and turns without a matrix make no thread wait.
void test_products(Random& random, Report& report);

// Matmuls with quantised weights are as exact as 8-bit inputs permit, with the same bits on every ISA.
void test_quantised(Random& random, Report& report);

// Matmuls with dense weights are as exact as sums in float32, the same with any number of threads.
void test_dense(Random& random, Report& report);

// The work between two layers has the same bits in one call and in single calls, with any number of threads.
void test_quantised_layer(Random& random, Report& report);

// Experts' results have the same bits as single matmuls, with any number of rows and threads.
void test_experts(Random& random, Report& report);

// The largest error in test_decode, relative to the allowed one.
double largest_decode_error();

}  // namespace neo_desktop::testing
