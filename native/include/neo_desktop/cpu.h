// The processor's capabilities, and the number of threads to use.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace neo_desktop {

// Instruction sets with a kernel, weakest first.
enum class Isa { kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmx, kNeon, kNeonBf16 };

const char* isa_name(Isa isa);

// Returns the ISA called `name`. Throws std::invalid_argument if the name is unknown, or this CPU or build
// lacks the ISA.
Isa isa_from_name(const std::string& name);

// The ISAs of this build that this CPU supports, weakest first.
std::vector<Isa> available_isas();

// The strongest available ISA.
Isa best_isa();

// True if byte dot products exist in 256-bit vectors, or on ARM in 128-bit vectors.
bool has_avx_vnni();
bool has_neon_dot();

// Feature name -> supported by CPU and operating system.
std::map<std::string, bool> cpu_features();

// CPUs in this process's affinity mask: one per core first, then the other hardware threads.
std::vector<int> usable_cpus();

// Threads that this process may keep busy: its CPUs, capped by the cgroup's CPU quota; at least 1.
int num_usable_cpus();

// Threads that leave room for feeding a GPU: one per core, minus two cores, with the same cap; at least 1.
int num_threads_beside_gpu();

// Threads of calls that ask for 0: the configured number, else num_usable_cpus().
int default_num_threads();
void set_default_num_threads(int num_threads);  // 0 resets

// Resolves a call's number of threads: 0 means the default. Throws std::invalid_argument outside [0, 1024].
int check_num_threads(int num_threads);

}  // namespace neo_desktop
