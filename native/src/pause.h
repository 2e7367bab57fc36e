// The instruction for spin-wait loops.
#pragma once

namespace neo_desktop {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace neo_desktop
