#include "isa.h"

#include <cstdlib>

#include "op.h"

#if DIFFBIT_X86
#include <cpuid.h>
#elif DIFFBIT_ARM && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace diffbit {
namespace {

constexpr Isa BEST_FIRST[] = {Isa::avx512vnni, Isa::avxvnni, Isa::avx2, Isa::neon, Isa::scalar};

#if DIFFBIT_X86
struct X86 {
  bool avx2 = false, avxvnni = false, avx512vnni = false;

  X86() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool fma = c & bit_FMA, f16c = c & bit_F16C, osxsave = c & bit_OSXSAVE;
    if (!osxsave) return;
    unsigned low, high;  // XCR0: which registers the operating system saves
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    const unsigned leaf7_b = b, leaf7_c = c, subleaves = a;
    avx2 = (low & 6) == 6 && fma && f16c && (leaf7_b & bit_AVX2);
    const unsigned wanted = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    avx512vnni = avx2 && (low & 0xe6) == 0xe6 && (leaf7_b & wanted) == wanted && (leaf7_c & (1u << 11));
    if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) avxvnni = avx2 && (a & (1u << 4));
  }
};
#endif

}  // namespace

const char* name(Isa isa) {
  switch (isa) {
    case Isa::scalar: return "scalar";
    case Isa::avx2: return "avx2";
    case Isa::avxvnni: return "avxvnni";
    case Isa::avx512vnni: return "avx512vnni";
    case Isa::neon: return "neon";
  }
  return "";
}

bool available(Isa isa) {
#if DIFFBIT_X86
  static const X86 cpu;
#endif
  switch (isa) {
    case Isa::scalar: return true;
#if DIFFBIT_HAS_AVX2
    case Isa::avx2: return cpu.avx2;
#endif
#if DIFFBIT_HAS_AVXVNNI
    case Isa::avxvnni: return cpu.avxvnni;
#endif
#if DIFFBIT_HAS_AVX512VNNI
    case Isa::avx512vnni: return cpu.avx512vnni;
#endif
#if DIFFBIT_HAS_NEON && defined(__linux__)
    case Isa::neon: return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif DIFFBIT_HAS_NEON
    case Isa::neon: return true;  // Apple's arm64 processors all have the dot product
#endif
    default: return false;
  }
}

Isa choose_isa() {
  const char* wanted = std::getenv("DIFFBIT_ISA");
  if (wanted && *wanted) {
    for (Isa isa : BEST_FIRST)
      if (available(isa) && std::string(wanted) == name(isa)) return isa;
    std::string offered;
    for (Isa isa : BEST_FIRST)
      if (available(isa)) offered += std::string(offered.empty() ? "" : ", ") + name(isa);
    throw Error("DIFFBIT_ISA is %s, which this CPU or this build lacks; choose one of %s", wanted, offered.c_str());
  }
  for (Isa isa : BEST_FIRST)
    if (available(isa)) return isa;
  return Isa::scalar;
}

}  // namespace diffbit
