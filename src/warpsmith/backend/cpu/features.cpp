// What this processor can do, and which kernels that allows.
#include <algorithm>

#include "kernels.h"

#if defined(__linux__) && defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace warpsmith {

std::vector<std::string> cpu_features() {
    std::vector<std::string> found;
#if defined(__linux__) && defined(__aarch64__)
    const unsigned long caps = getauxval(AT_HWCAP);
    if (caps & HWCAP_ASIMD) found.push_back("neon");
    if (caps & HWCAP_ASIMDDP) found.push_back("dotprod");
#ifdef HWCAP2_I8MM
    if (getauxval(AT_HWCAP2) & HWCAP2_I8MM) found.push_back("i8mm");
#endif
#elif defined(__APPLE__) && defined(__aarch64__)
    found = {"neon", "dotprod"};
#elif defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) found.push_back("avx2");
    if (__builtin_cpu_supports("fma")) found.push_back("fma");
    if (__builtin_cpu_supports("f16c")) found.push_back("f16c");
    if (__builtin_cpu_supports("avx512f")) found.push_back("avx512f");
    if (__builtin_cpu_supports("avx512bw")) found.push_back("avx512bw");
    if (__builtin_cpu_supports("avx512vl")) found.push_back("avx512vl");
    if (__builtin_cpu_supports("avx512vnni")) found.push_back("avx512vnni");
#endif
    return found;
}

const Kernels& choose_kernels(const std::vector<std::string>& features) {
    [[maybe_unused]] const auto all = [&](std::initializer_list<const char*> names) {
        return std::all_of(names.begin(), names.end(), [&](const char* name) {
            return std::find(features.begin(), features.end(), name) != features.end();
        });
    };
#if defined(__aarch64__)
    if (all({"neon", "dotprod", "i8mm"})) return kNeonI8mmKernels;
    if (all({"neon", "dotprod"})) return kNeonKernels;
#elif defined(__x86_64__)
    if (all({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni"})) return kAvx512Kernels;
    if (all({"avx2", "fma", "f16c"})) return kAvx2Kernels;
#endif
    return kGenericKernels;
}

}  // namespace warpsmith
