// Failures on request, of calls and of operations.
//
//   IMITATED_GPU_FAIL="CALL ERROR FIRST TIMES,..."  the FIRST-th of these calls and the TIMES - 1 after it
//                                                   return this error. CALL is a function's name, "NAME in
//                                                   a capture", or "operation". An operation's error kills
//                                                   the device in the middle of work.
//   IMITATED_GPU_HANG=N                             The N-th operation never ends.
//   IMITATED_GPU_DELAY_US=N                         Each operation takes N microseconds longer.
//
// The functions below request the same in a running process. As on a real GPU, some errors are final: all
// later calls fail.
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "device.h"

namespace imitated {
namespace {

struct Failure {
  std::string call;
  cudaError_t error;
  long first;  // counts down to 1
  long times;
};

cudaError_t died_of = cudaSuccess;
unsigned num_failed = 0;
long hang_at = 0;  // counts down; 0: no operation hangs
int delay = 0;
thread_local cudaError_t last_error = cudaSuccess;

std::vector<Failure>& failures() {
  static auto& made = *[] {
    auto* given = new std::vector<Failure>;
    const char* text = std::getenv("IMITATED_GPU_FAIL");
    std::istringstream all(text ? text : "");
    for (std::string one; std::getline(all, one, ',');) {
      // The call's name may hold spaces: the last three words are numbers.
      const auto times = one.rfind(' '), first = one.rfind(' ', times - 1), error = one.rfind(' ', first - 1);
      if (error == std::string::npos) {
        std::fprintf(stderr, "IMITATED_GPU_FAIL: '%s' is not CALL ERROR FIRST TIMES\n", one.c_str());
        std::abort();
      }
      given->push_back({one.substr(0, error), static_cast<cudaError_t>(std::stoi(one.substr(error))),
                        std::stol(one.substr(first)), std::stol(one.substr(times))});
    }
    hang_at = static_cast<long>(setting("IMITATED_GPU_HANG", 0));
    delay = static_cast<int>(setting("IMITATED_GPU_DELAY_US", 0));
    return given;
  }();
  return made;
}

cudaError_t requested(const std::string& call) {
  for (auto& failure : failures()) {
    if (failure.call != call || failure.times == 0) continue;
    if (failure.first > 1) {
      failure.first--;
      continue;
    }
    failure.times--;
    num_failed++;
    return failure.error;
  }
  return cudaSuccess;
}

bool is_sticky(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
      return true;
    default:
      return false;
  }
}

}  // namespace

void complain(const std::string& what) { std::fprintf(stderr, "imitated GPU: %s\n", what.c_str()); }

cudaError_t fail(cudaError_t error, const std::string& why) {
  complain(why + " (error " + std::to_string(error) + ")");
  return last_error = error;
}

cudaError_t death() { return died_of; }

void die(cudaError_t error, const std::string& why) {
  died_of = error;
  complain("the device dies: " + why + " (error " + std::to_string(error) + ")");
  drop_all();
}

cudaError_t refused(const char* call) {
  if (died_of) return last_error = died_of;
  const cudaError_t error = requested(call);
  if (!error) return cudaSuccess;
  if (is_sticky(error)) die(error, call);
  return fail(error, std::string(call) + " fails as it was asked to");
}

Injuries next_injuries() {
  const cudaError_t error = requested("operation");
  const bool never_ends = hang_at > 0 && --hang_at == 0;
  num_failed += never_ends;
  return {error, never_ends};
}

int delay_us() { return delay; }

}  // namespace imitated

using namespace imitated;

EXPORT cudaError_t cudaGetLastError() { return died_of ? died_of : std::exchange(last_error, cudaSuccess); }
EXPORT cudaError_t cudaPeekAtLastError() { return died_of ? died_of : last_error; }

EXPORT void imitated_gpu_fail(const char* call, int error, long first, long times) {
  Guard guard(lock);
  failures().push_back({call, static_cast<cudaError_t>(error), first, times});
}

EXPORT void imitated_gpu_hang(long number) {
  Guard guard(lock);
  hang_at = number;
}

EXPORT unsigned imitated_gpu_num_failed() {
  Guard guard(lock);
  return num_failed;
}

EXPORT void imitated_gpu_delay(int us) {
  Guard guard(lock);
  delay = us;
}

// Drops all requested failures and their effects: hung operations and a dead device.
EXPORT void imitated_gpu_recover() {
  Guard guard(lock);
  failures().clear();
  hang_at = delay = num_failed = 0;
  drop_all();
  set_up_queues();
  died_of = last_error = cudaSuccess;
}
