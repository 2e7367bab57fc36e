#include "neo_desktop/cpu.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace neo_desktop {
namespace {

// With every core busy, the threads that feed the GPU wait for a time slice, and the GPU waits with them:
// iterations of 14 ms took 40 ms (measured on 16 cores).
constexpr int kCoresLeftFree = 2;  // for Python and the driver

// CPU time per period that a cgroup's files allow, in CPUs; 0 if they set no limit.
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

// The tightest quota from this process's cgroup up to the root; 0 if no cgroup has one.
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

// Caps a number of threads at the quota.
int within_quota(int threads) {
  const double quota = cgroup_cpu_quota();
  return quota > 0 ? std::min(threads, static_cast<int>(std::ceil(quota))) : threads;
}

// Number of CPUs in the mask that precede a CPU in its core; 0 if the system does not say.
int place_in_core(int cpu, const cpu_set_t& mask) {
  std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
  int place = 0;
  // "0,32" or "0-1"
  for (std::string range; std::getline(file, range, ',');) {
    const auto dash = range.find('-');
    const int first = std::stoi(range);
    const int last = dash == std::string::npos ? first : std::stoi(range.substr(dash + 1));
    for (int sibling = first; sibling <= last && sibling < cpu; ++sibling) place += CPU_ISSET(sibling, &mask);
  }
  return place;
}

// (place in its core, number) for the CPUs of this process's affinity mask, in order.
std::vector<std::pair<int, int>> cpus_by_place() {
  std::vector<std::pair<int, int>> cpus;
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &mask)) cpus.emplace_back(place_in_core(cpu, mask), cpu);
    }
  }
  std::sort(cpus.begin(), cpus.end());
  return cpus;
}

std::atomic<int> chosen_num_threads{0};  // 0: not set

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
// Tile registers are large: Linux enables them only for processes that request them, once.
bool has_amx() {
#if defined(NEO_DESKTOP_IMITATE_AMX)
  return has_avx512bf16();
#else
  // Cached: in a virtual machine cpuid takes microseconds.
  static const bool allowed = [] {
    constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
    constexpr unsigned kBf16Tiles = 1u << 22 | 1u << 24;
    unsigned a, b, c, d;
    return has_avx512bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBf16Tiles) == kBf16Tiles &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return allowed;
#endif
}
#endif
#endif

#if defined(__aarch64__)
bool has_neon_bf16() {
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDHP) != 0 && (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
}
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
#if defined(NEO_DESKTOP_NEON_BF16)
    {Isa::kNeonBf16, "neon_bf16", has_neon_bf16},
#endif
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
#elif defined(__aarch64__)
  return {{"asimd", true}, {"bf16", has_neon_bf16()}};
#else
  return {};
#endif
}

std::vector<int> usable_cpus() {
  std::vector<int> numbers;
  for (const auto& [place, cpu] : cpus_by_place()) numbers.push_back(cpu);
  return numbers;
}

int num_usable_cpus() { return within_quota(std::max<int>(static_cast<int>(usable_cpus().size()), 1)); }

int num_threads_beside_gpu() {
  const auto cpus = cpus_by_place();
  const auto is_first = [](const auto& cpu) { return cpu.first == 0; };
  const int cores = static_cast<int>(std::count_if(cpus.begin(), cpus.end(), is_first));
  return std::max(within_quota(cores) - kCoresLeftFree, 1);
}

int default_num_threads() {
  // Counting reads several files, so the result is cached.
  static const int usable = num_usable_cpus();
  const int chosen = chosen_num_threads.load(std::memory_order_relaxed);
  return chosen > 0 ? chosen : usable;
}

void set_default_num_threads(int num_threads) {
  check_num_threads(num_threads);
  chosen_num_threads = num_threads;
}

int check_num_threads(int num_threads) {
  if (num_threads < 0 || num_threads > 1024) {
    throw std::invalid_argument("num_threads is " + std::to_string(num_threads) +
                                "; expected 0 (the default) to 1024");
  }
  return num_threads > 0 ? num_threads : default_num_threads();
}

bool has_avx_vnni() {
#if defined(__x86_64__)
  static const bool has = [] {  // cached: in a virtual machine cpuid takes microseconds
    unsigned a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4) != 0;
  }();
  return has;
#else
  return false;
#endif
}

bool has_neon_dot() {
#if defined(__aarch64__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return false;
#endif
}

}  // namespace neo_desktop
