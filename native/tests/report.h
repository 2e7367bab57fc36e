// Output of the test program: failures, and the case that ended in a fault.
#pragma once

#include <cstdint>
#include <string>

namespace neo_desktop::testing {

class Report {
 public:
  // Installs a handler that prints the case if it faults (on a guard page) before the process dies.
  Report();

  void begin(const char* suite, uint64_t seed, int64_t index);

  // Sets the description of the case, for the message if it fails.
  void describe(const std::string& text);

  void fail(const std::string& what);
  int64_t failures() const { return failures_; }

 private:
  std::string case_;
  int64_t failures_ = 0;
};

}  // namespace neo_desktop::testing
