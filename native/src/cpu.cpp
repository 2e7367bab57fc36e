#include "neo_desktop/cpu.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace neo_desktop {
namespace {

// CPUs' worth of time per period that a cgroup's files allow; 0 where they set no limit.
double cpus_in_cgroup_v2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return 0;
  return std::stod(quota) / period;
}

double cpus_in_cgroup_v1(const std::string& folder) {
  double quota = 0;
  double period = 0;
  if (!(std::ifstream(folder + "/cpu.cfs_quota_us") >> quota) || quota <= 0) return 0;
  if (!(std::ifstream(folder + "/cpu.cfs_period_us") >> period) || period <= 0) return 0;
  return quota / period;
}

// The tightest quota on the way from this process's cgroup up to the root; 0 where there is none.
double cgroup_cpu_quota() {
  double tightest = 0;
  auto walk_up = [&](const std::string& root, std::string path, auto cpus_in) {
    for (;;) {
      const double cpus = cpus_in(root + path);
      if (cpus > 0) tightest = tightest > 0 ? std::min(tightest, cpus) : cpus;
      const auto slash = path.find_last_of('/');
      if (slash == std::string::npos) return;
      path.resize(slash);
    }
  };
  std::ifstream cgroups("/proc/self/cgroup");  // lines "id:controllers:path"; version 2 has no controllers
  for (std::string line; std::getline(cgroups, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    if (controllers.empty()) {
      walk_up("/sys/fs/cgroup", path, cpus_in_cgroup_v2);
      continue;
    }
    std::istringstream names(controllers);
    for (std::string name; std::getline(names, name, ',');) {
      if (name == "cpu") walk_up("/sys/fs/cgroup/cpu", path, cpus_in_cgroup_v1);
    }
  }
  return tightest;
}

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#if defined(NEO_DESKTOP_AMX)
// Tile registers are large: Linux saves them only for processes that ask for them, once.
bool has_amx() {
#if defined(NEO_DESKTOP_IMITATE_AMX)
  return has_avx512bf16();
#else
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  constexpr unsigned kBf16Tiles = 1u << 22 | 1u << 24;
  unsigned a, b, c, d;
  if (!has_avx512bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16Tiles) != kBf16Tiles) {
    return false;
  }
  static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
#endif
}
#endif
#endif

// The instruction sets of this build, weakest first.
struct IsaEntry {
  Isa isa;
  const char* name;
  bool (*available)();
};
constexpr IsaEntry kIsas[] = {
    {Isa::kScalar, "scalar", [] { return true; }},
#if defined(__x86_64__)
    {Isa::kAvx2, "avx2", has_avx2},
    {Isa::kAvx512, "avx512", has_avx512},
    {Isa::kAvx512Bf16, "avx512bf16", has_avx512bf16},
#if defined(NEO_DESKTOP_AMX)
    {Isa::kAmx, "amx", has_amx},
#endif
#elif defined(__aarch64__)
    {Isa::kNeon, "neon", [] { return true; }},
#endif
};

// "scalar, avx2 or avx512"
std::string isa_choices() {
  std::string names;
  for (const IsaEntry& entry : kIsas) {
    const bool last = &entry == std::end(kIsas) - 1;
    if (!names.empty()) names += last ? " or " : ", ";
    names += entry.name;
  }
  return names;
}

}  // namespace

const char* isa_name(Isa isa) {
  for (const IsaEntry& entry : kIsas) {
    if (entry.isa == isa) return entry.name;
  }
  return "of another build";
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (const IsaEntry& entry : kIsas) {
    if (entry.available()) isas.push_back(entry.isa);
  }
  return isas;
}

Isa best_isa() { return available_isas().back(); }

Isa isa_from_name(const std::string& name) {
  for (const IsaEntry& entry : kIsas) {
    if (name != entry.name) continue;
    if (entry.available()) return entry.isa;
    throw std::invalid_argument("isa '" + name + "' is not available on this CPU; the best one here is '" +
                                isa_name(best_isa()) + "'");
  }
  throw std::invalid_argument("isa '" + name + "' is unknown; choose " + isa_choices());
}

std::map<std::string, bool> cpu_features() {
#if defined(__x86_64__)
  return {{"avx2", __builtin_cpu_supports("avx2") != 0},
          {"fma", __builtin_cpu_supports("fma") != 0},
          {"f16c", __builtin_cpu_supports("f16c") != 0},
          {"avx512f", __builtin_cpu_supports("avx512f") != 0},
          {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
          {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
          {"avx512dq", __builtin_cpu_supports("avx512dq") != 0},
          {"avx512vnni", __builtin_cpu_supports("avx512vnni") != 0},
          {"avx512bf16", __builtin_cpu_supports("avx512bf16") != 0}};
#else
  return {};
#endif
}

int default_num_threads() {
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) threads = CPU_COUNT(&mask);
  const double quota = cgroup_cpu_quota();
  if (quota > 0) threads = std::min(threads, static_cast<int>(std::ceil(quota)));
  return std::max(threads, 1);
}

int check_num_threads(int num_threads) {
  if (num_threads < 0 || num_threads > 1024) {
    throw std::invalid_argument("num_threads is " + std::to_string(num_threads) +
                                "; expected 0 (the default) to 1024");
  }
  // The default reads several files: once per process is enough.
  static const int default_threads = default_num_threads();
  return num_threads > 0 ? num_threads : default_threads;
}

}  // namespace neo_desktop
