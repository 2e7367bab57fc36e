// What this processor can do, and how many threads it may use.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace neo_desktop {

// Instruction sets a kernel exists for, weakest first.
enum class Isa { kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmx, kNeon, kNeonBf16 };

const char* isa_name(Isa isa);

// The ISA called `name`. Throws std::invalid_argument if there is no such ISA or this CPU (or build) lacks
// it.
Isa isa_from_name(const std::string& name);

// What this CPU can run of this build, weakest first.
std::vector<Isa> available_isas();

// The last of them.
Isa best_isa();

// Whether there are dot products of bytes in vectors of 256 bits, and of 128 on ARM.
bool has_avx_vnni();
bool has_neon_dot();

// Feature name -> supported by CPU and operating system.
std::map<std::string, bool> cpu_features();

// The CPUs of this process's affinity mask: one of each core, then the other hardware threads.
std::vector<int> usable_cpus();

// Threads that this process may keep busy: its CPUs, capped by the cgroup's CPU quota; at least 1.
int num_usable_cpus();

// Threads that leave room for what feeds a GPU: one per core but two cores, capped likewise; at least 1.
int num_threads_beside_gpu();

// Threads of calls that ask for 0: what was set, else num_usable_cpus().
int default_num_threads();
void set_default_num_threads(int num_threads);  // 0: as if nothing had been set

// The number of threads a call asks for: 0 means the default. Throws std::invalid_argument outside [0, 1024].
int check_num_threads(int num_threads);

}  // namespace neo_desktop
