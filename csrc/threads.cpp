// Owns: how many threads a parallel region of llama.cpp may use now. A library of its own, laya/_threads.so, that an
// engine's process loads before llama.cpp; it knows neither Python nor llama.cpp.
//
// llama.cpp opens one OpenMP region for each graph it computes and takes the number of threads that it is given there,
// so bounding GOMP_parallel bounds the next graph. The bound lies in memory shared with the gateway: 0 means none.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <link.h>

namespace {

using Region = void (*)(void*);
using Parallel = void (*)(Region, void*, unsigned, unsigned);

std::atomic<std::uint32_t> unbounded{0};
std::atomic<std::atomic<std::uint32_t>*> most{&unbounded};

int find_runtime(dl_phdr_info* info, std::size_t, void* found) {
    if (std::strstr(info->dlpi_name, "libgomp") == nullptr) return 0;
    *static_cast<void**>(found) = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    return 1;
}

// llama.cpp's own runtime, which may lie anywhere and be called libgomp-SOMETHING.
Parallel runtime_parallel() {
    void* runtime = nullptr;
    dl_iterate_phdr(find_runtime, &runtime);
    return runtime == nullptr ? nullptr : reinterpret_cast<Parallel>(dlsym(runtime, "GOMP_parallel"));
}

}  // namespace

// `shared` must stay mapped for the life of the process.
extern "C" void laya_follow_threads(std::uint32_t* shared) {
    most.store(reinterpret_cast<std::atomic<std::uint32_t>*>(shared));
}

extern "C" void GOMP_parallel(Region region, void* data, unsigned n_threads, unsigned flags) {
    static const Parallel real = runtime_parallel();
    const std::uint32_t bound = most.load(std::memory_order_relaxed)->load(std::memory_order_relaxed);
    if (real == nullptr) {
        region(data);  // no runtime, no threads: correct, and slow
    } else {
        real(region, data, bound != 0 && (n_threads == 0 || bound < n_threads) ? bound : n_threads, flags);
    }
}
