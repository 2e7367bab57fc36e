// Memory that a calling thread keeps between its calls, so that calls in a row allocate nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "neo_desktop/kernels.h"

namespace neo_desktop {

inline int64_t rounded_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// Rounds up, so that the next array starts at a vector.
inline int64_t whole_vectors(int64_t floats) { return rounded_up(floats, kMaxLanes); }

// A processor prefetches the following memory within a page, and so takes it away from the core that writes
// there. Each thread therefore works in its own pages: on two dies of a Zen 5 this is worth up to a sixth of
// the speed.
constexpr int64_t kPageBytes = 4096;
inline int64_t whole_pages(int64_t floats) { return rounded_up(floats, kPageBytes / sizeof(float)); }

class ScratchFloats {
 public:
  // Starts at a page; the content is left over from the last call.
  float* take(int64_t count) {
    if (count > capacity_) {
      memory_.reset();
      memory_.reset(new (std::align_val_t{kPageBytes}) float[count]);
      capacity_ = count;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { operator delete[](p, std::align_val_t{kPageBytes}); }
  };
  std::unique_ptr<float[], Free> memory_;
  int64_t capacity_ = 0;
};

}  // namespace neo_desktop
