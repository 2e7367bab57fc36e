#include "report.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

namespace neo_desktop::testing {
namespace {

constexpr int64_t kMostPrinted = 20;

char current_case[2000];  // a signal handler may not touch a std::string
struct sigaction earlier_actions[NSIG];

void write_text(const char* text) {
  if (write(STDERR_FILENO, text, std::strlen(text)) < 0) return;  // nothing else is possible here
}

// Restores the previous handler (a sanitizer, or the default) and returns: the instruction faults again.
void on_fault(int number) {
  write_text("fault in ");
  write_text(current_case);
  write_text("\n");
  sigaction(number, &earlier_actions[number], nullptr);
}

}  // namespace

Report::Report() {
  struct sigaction action{};
  action.sa_handler = on_fault;
  for (const int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) {
    sigaction(number, &action, &earlier_actions[number]);
  }
}

void Report::begin(const char* suite, uint64_t seed, int64_t index) {
  case_ = std::string(suite) + ", seed " + std::to_string(seed) + ", case " + std::to_string(index);
  describe("");
}

void Report::describe(const std::string& text) {
  case_ = case_.substr(0, case_.find(": ")) + ": " + text;
  std::snprintf(current_case, sizeof current_case, "%s", case_.c_str());
}

void Report::fail(const std::string& what) {
  if (++failures_ <= kMostPrinted) std::printf("FAILED %s\n       %s\n", case_.c_str(), what.c_str());
  if (failures_ == kMostPrinted + 1) std::printf("... and more\n");
}

}  // namespace neo_desktop::testing
