// The Python face of the CPU engine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#if defined(__linux__) && defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace nb = nanobind;

// Instruction sets this processor has, of those a kernel could be written for.
static std::vector<std::string> features() {
    std::vector<std::string> found;
#if defined(__linux__) && defined(__aarch64__)
    const unsigned long caps = getauxval(AT_HWCAP), caps2 = getauxval(AT_HWCAP2);
    if (caps & HWCAP_ASIMD) found.push_back("neon");
    if (caps & HWCAP_ASIMDDP) found.push_back("dotprod");
#ifdef HWCAP2_I8MM
    if (caps2 & HWCAP2_I8MM) found.push_back("i8mm");
#endif
#ifdef HWCAP2_BF16
    if (caps2 & HWCAP2_BF16) found.push_back("bf16");
#endif
    (void)caps2;
#elif defined(__APPLE__) && defined(__aarch64__)
    found = {"neon", "dotprod"};
#elif defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) found.push_back("avx2");
    if (__builtin_cpu_supports("fma")) found.push_back("fma");
    if (__builtin_cpu_supports("avx512f")) found.push_back("avx512f");
    if (__builtin_cpu_supports("avx512bw")) found.push_back("avx512bw");
    if (__builtin_cpu_supports("avx512vnni")) found.push_back("avx512vnni");
    if (__builtin_cpu_supports("avx512bf16")) found.push_back("avx512bf16");
#endif
    return found;
}

NB_MODULE(_cpu, m) {
    m.doc() = "Kernels of the CPU backend.";
    m.def("features", &features, "Instruction sets of this processor that matter to the kernels.");
}
