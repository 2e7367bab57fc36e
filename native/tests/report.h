// What the test program prints: failures, and which case it was that ended in a fault.
#pragma once

#include <cstdint>
#include <string>

namespace neo_desktop::testing {

class Report {
 public:
  // Makes a fault (a touched guard page) print the case before the process dies of it.
  Report();

  void begin(const char* suite, uint64_t seed, int64_t index);

  // What the case is, for the message if it fails.
  void describe(const std::string& text);

  void fail(const std::string& what);
  int64_t failures() const { return failures_; }

 private:
  std::string case_;
  int64_t failures_ = 0;
};

}  // namespace neo_desktop::testing
