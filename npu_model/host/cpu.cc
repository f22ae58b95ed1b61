#include "npu_model/host/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace cubist {
namespace {

Cpu Detect() {
#if defined(__x86_64__)
  std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0) return Cpu::kOther;
  if (ebx == signature_INTEL_ebx) return Cpu::kIntel;
  if (ebx != signature_AMD_ebx || __get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return Cpu::kOther;
  const std::uint32_t family = (eax >> 8 & 0xf) + (eax >> 20 & 0xff);  // Base and extended.
  if (family == 0x1a) return Cpu::kZen5;
  if (family != 0x19) return Cpu::kOther;
  const bool avx512 = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx & bit_AVX512F) != 0;
  return avx512 ? Cpu::kZen4 : Cpu::kZen3;
#endif
  return Cpu::kOther;
}

}  // namespace

Cpu ThisCpu() {
  static const Cpu kCpu = Detect();  // A virtual machine's answer takes tens of microseconds.
  return kCpu;
}

}  // namespace cubist
