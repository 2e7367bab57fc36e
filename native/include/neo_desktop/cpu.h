// What this processor can do, and how many threads it may use.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace neo_desktop {

// Instruction sets a kernel exists for, weakest first.
enum class Isa { kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmx, kNeon };

const char* isa_name(Isa isa);

// The ISA called `name`. Throws std::invalid_argument if there is no such ISA or this CPU (or build) lacks
// it.
Isa isa_from_name(const std::string& name);

// What this CPU can run of this build, weakest first.
std::vector<Isa> available_isas();

// The last of them.
Isa best_isa();

// Feature name -> supported by CPU and operating system.
std::map<std::string, bool> cpu_features();

// Threads this process may keep busy: the affinity mask, capped by the cgroup's CPU quota; at least 1.
int default_num_threads();

// The number of threads a call asks for: 0 means the default. Throws std::invalid_argument outside [0, 1024].
int check_num_threads(int num_threads);

}  // namespace neo_desktop
