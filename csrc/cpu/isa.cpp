#include "isa.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "../ort/op.h"
#include "ops.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#ifndef HWCAP2_I8MM  // headers of Linux before 5.10
#define HWCAP2_I8MM (1 << 13)
#endif
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(_WIN32)
// Of windows.h, whose macros would rename what is declared here
extern "C" __declspec(dllimport) int __stdcall IsProcessorFeaturePresent(unsigned long feature);
#endif

namespace diffbit {
namespace {

#if defined(__x86_64__) && defined(__linux__)
/// Asks Linux for the tiles' 8 KiB, which it keeps only for processes that asked; since 5.16.
bool may_use_tiles() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

/// Which sets this CPU has and its operating system supports; one member per set in the table.
struct Processor {
  bool avx2 = false, avxvnni = false, avx512vnni = false, amx = false;
  bool neon = false, i8mm = false;
  bool wasm128 = false;

#if defined(__x86_64__) || defined(_M_X64)
  Processor() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool fma = c & bit_FMA, f16c = c & bit_F16C, osxsave = c & bit_OSXSAVE;
    if (!osxsave) return;
    unsigned low, high;  // XCR0: which registers the operating system saves
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    const unsigned leaf7_b = b, leaf7_c = c, subleaves = a;
    avx2 = (low & 6) == 6 && fma && f16c && (leaf7_b & bit_AVX2);
    const unsigned required = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    avx512vnni = avx2 && (low & 0xe6) == 0xe6 && (leaf7_b & required) == required && (leaf7_c & (1u << 11));
#ifdef DIFFBIT_EMULATE_TILES
    amx = avx2;
#elif defined(__linux__)
    const unsigned amx_required = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tile, int8
    amx = avx512vnni && (low & 0x60000) == 0x60000 && (d & amx_required) == amx_required && may_use_tiles();
#endif
    if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) avxvnni = avx2 && (a & (1u << 4));
  }
#elif defined(__aarch64__) && defined(__linux__)
  Processor() : neon(getauxval(AT_HWCAP) & HWCAP_ASIMDDP), i8mm(neon && getauxval(AT_HWCAP2) & HWCAP2_I8MM) {}
#elif defined(__aarch64__) && defined(__APPLE__)
  Processor() : neon(true) {  // all of Apple's have it, i8mm not
    int has = 0;
    size_t size = sizeof has;
    i8mm = sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, nullptr, 0) == 0 && has;
  }
#elif defined(__aarch64__) && defined(_WIN32)
  Processor() {
    constexpr unsigned long DOT_PRODUCTS = 43, I8MM = 66;  // PF_ARM_V82_{DP,I8MM}_INSTRUCTIONS_AVAILABLE
    neon = IsProcessorFeaturePresent(DOT_PRODUCTS);
    i8mm = neon && IsProcessorFeaturePresent(I8MM);  // an older Windows does not know it and says no
  }
#elif defined(__wasm__)
  Processor() : wasm128(true) {}  // a module with SIMD128 loads only where there is SIMD128
#endif
};

struct Available {
  const char* name;
  Isa isa;
};

/// Returns the sets, best first; the last is scalar.
const std::vector<Available>& available() {
  static const std::vector<Available> sets = [] {
    const Processor processor;
    std::vector<Available> best_first;
#define DIFFBIT_ADD(name, more) \
  if (processor.name) best_first.push_back({#name, Isa::name});
    DIFFBIT_ISAS(DIFFBIT_ADD, )
#undef DIFFBIT_ADD
    best_first.push_back({"scalar", Isa::scalar});
    return best_first;
  }();
  return sets;
}

}  // namespace

std::string available_isas(const char* separator) {
  std::string names;
  for (const Available& set : available()) names += (names.empty() ? "" : separator) + std::string(set.name);
  return names;
}

Isa choose_isa() {
  const char* name = std::getenv("DIFFBIT_ISA");
  if (!name || !*name) return available().front().isa;
  for (const Available& set : available())
    if (std::string(name) == set.name) return set.isa;
  throw Error("DIFFBIT_ISA is %s, which this CPU or this build lacks; choose one of %s", name,
              available_isas(", ").c_str());
}

}  // namespace diffbit
