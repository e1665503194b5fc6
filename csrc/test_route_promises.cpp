// What the route table promises of a request, shown and not said: it allocates nothing, takes no lock and makes no system
// call; and its tables hold no address, so that they can be memory that processes share.
//
// The lock counter replaces a piece of the C library, which sanitizers replace too, and sanitizers make system calls of
// their own: so all but the first line is shown without one only.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

#include "route_table.hpp"
#include "test_inputs.hpp"

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define IS_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define IS_SANITIZED 1
#endif

namespace {

thread_local std::uint64_t n_allocations = 0;
thread_local std::uint64_t n_locks = 0;

// Where whole cache lines are allocated from while it is there: the tables, and nothing else of the route table.
struct Arena {
    char* begin = nullptr;
    std::size_t used = 0;
    std::size_t bytes = 0;

    bool holds(const void* memory) const {
        return begin != nullptr && memory >= begin && memory < begin + bytes;
    }
} arena;
bool is_arena_open = false;

void* counted(void* memory) {
    ++n_allocations;
    if (memory == nullptr) {
        throw std::bad_alloc();
    }
    return memory;
}

void release(void* memory) {
    if (!arena.holds(memory)) {
        std::free(memory);
    }
}

}  // namespace

// Every allocation of this program is counted, so that a test can say that there was none.
void* operator new(std::size_t size) { return counted(std::malloc(size)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
    const auto align = static_cast<std::size_t>(alignment);
    const std::size_t whole = (size + align - 1) / align * align;
    if (is_arena_open && arena.used + whole <= arena.bytes) {
        return counted(arena.begin + std::exchange(arena.used, arena.used + whole));
    }
    return counted(std::aligned_alloc(align, whole));
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }

#if defined(__linux__) && !defined(IS_SANITIZED)
extern "C" int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
    using Lock = int (*)(pthread_mutex_t*);
    static const Lock real = reinterpret_cast<Lock>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
    ++n_locks;
    return real(mutex);
}
#endif

using laya::ModelRoute;
using laya::RequestFeature;
using laya::RouteTable;

namespace {

constexpr std::uint32_t N_ENDPOINTS = 20;
constexpr std::uint32_t N_REQUESTS = 20'000;

// A model of few and one of many endpoints for each policy.
std::vector<ModelRoute> routes() {
    std::vector<ModelRoute> all;
    for (std::uint8_t policy = 0; policy < laya::N_POLICIES; ++policy) {
        ModelRoute many{{"many " + std::to_string(policy)}, {}, static_cast<laya::Policy>(policy)};
        for (std::uint32_t endpoint = 0; endpoint < N_ENDPOINTS; ++endpoint) {
            many.endpoints.push_back(endpoint);
        }
        all.push_back({{"few " + std::to_string(policy)}, {0, 1, 2}, static_cast<laya::Policy>(policy)});
        all.push_back(std::move(many));
    }
    return all;
}

// Requests of more sessions and prompts than are remembered, of every policy and through both doors; each `left`th one
// stays in flight. Returns false where one found no endpoint.
bool ask(RouteTable& table, const std::vector<ModelRoute>& all, const std::string& text, std::uint32_t left) {
    for (std::uint32_t i = 1; i <= N_REQUESTS; ++i) {
        laya::PrefixBlocks blocks;
        const std::size_t n_blocks = laya::hash_prefix({text.data(), i % text.size()}, blocks);
        const std::string& name = all[i % all.size()].names[0];
        const RequestFeature asked = RequestFeature::pack(laya::FEATURE_VERSION, 1, 0, 8, laya::hash_bytes(name),
                                                          laya::mix64(i % 4999), laya::mix64(i % 900));
        const std::int32_t chosen =
            i % 2 != 0 ? table.choose(asked, 1) : table.route(name, asked, 1, {blocks.data(), n_blocks});
        if (chosen < 0) {
            return false;
        }
        laya::Endpoint& at = table.endpoint(static_cast<std::uint32_t>(chosen));
        at.first_token(i);
        if (i % 7 == 0 && chosen != 0) {
            at.failed(1);
            at.half_open();
        }
        at.served();
        if (i % left != 0) {
            table.settle(static_cast<std::uint32_t>(chosen), 1, 8);
        }
    }
    return true;
}

void make_ready(RouteTable& table, const std::vector<ModelRoute>& all) {
    table.publish(all);
    for (std::uint32_t endpoint = 0; endpoint < N_ENDPOINTS; ++endpoint) {
        table.set_eligible(endpoint, true);
    }
}

void test_a_request_allocates_nothing_and_takes_no_lock() {
    RouteTable table(N_ENDPOINTS, 4096, 1024, 4096);
    const std::vector<ModelRoute> all = routes();
    make_ready(table, all);
    const std::string text(5000, 'x');
    const std::uint64_t allocations = n_allocations;
    const std::uint64_t locks = n_locks;
    require(allocations > 0, "allocations are counted");
    require(ask(table, all, text, N_REQUESTS + 1), "every request finds an endpoint");
    require(n_allocations == allocations, "a request allocates nothing, however many sessions there are");
    require(n_locks == locks, "a request takes no lock");
#if defined(__linux__) && !defined(IS_SANITIZED)
    require(locks > 0, "locks are counted");
#endif
}

#if defined(__linux__) && !defined(IS_SANITIZED)

// The kernel kills a child in this mode at its first system call, but for those that read, write and exit.
void test_a_request_makes_no_system_call() {
    RouteTable table(N_ENDPOINTS, 4096, 1024, 4096);
    const std::vector<ModelRoute> all = routes();
    make_ready(table, all);
    const std::string text(5000, 'x');
    for (const bool asks_for_one : {false, true}) {
        const pid_t child = fork();
        if (child == 0) {
            if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) != 0) {
                _exit(77);
            }
            const bool is_right = ask(table, all, text, N_REQUESTS + 1);
            if (asks_for_one) {
                syscall(SYS_getppid);
            }
            syscall(SYS_exit, is_right ? 0 : 1);
        }
        int status = 0;
        waitpid(child, &status, 0);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
            std::puts("not tested here: the kernel does not confine system calls");
            return;
        }
        const bool was_killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        require(asks_for_one ? was_killed : WIFEXITED(status) && WEXITSTATUS(status) == 0,
                asks_for_one ? "a system call is seen" : "a request makes no system call");
    }
}

struct Range {
    std::uint64_t begin;
    std::uint64_t end;
};

std::vector<Range> mapped() {
    std::vector<Range> ranges;
    std::FILE* maps = std::fopen("/proc/self/maps", "r");
    require(maps != nullptr, "the memory map can be read");
    char line[512];
    while (std::fgets(line, sizeof line, maps) != nullptr) {
        Range range{};
        if (std::sscanf(line, "%lx-%lx", &range.begin, &range.end) == 2) {
            ranges.push_back(range);
        }
    }
    std::fclose(maps);
    return ranges;
}

std::uint64_t count_addresses(const std::vector<Range>& ranges) {
    std::uint64_t n = 0;
    for (std::size_t at = 0; at + 8 <= arena.used; at += 8) {
        std::uint64_t word;
        std::memcpy(&word, arena.begin + at, sizeof word);
        for (const Range& range : ranges) {
            n += word >= range.begin && word < range.end ? 1 : 0;
        }
    }
    return n;
}

// The tables lie in memory that a forked process shares. It chooses, and leaves requests in flight; this one sees and
// settles them, and finds the sessions where the other put them.
void test_tables_hold_no_address_and_can_be_shared() {
    arena.bytes = std::size_t{1} << 20;
    arena.begin = static_cast<char*>(
        mmap(nullptr, arena.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    require(arena.begin != MAP_FAILED, "there is memory to share");
    const std::vector<ModelRoute> all = routes();
    const std::string text(5000, 'x');
    is_arena_open = true;
    {
        RouteTable table(N_ENDPOINTS, 4096, 1024, 4096);
        make_ready(table, all);
        is_arena_open = false;
        const std::size_t least = N_ENDPOINTS * sizeof(laya::Endpoint) + 2 * 4096 + all.size() * sizeof(laya::ModelSlot);
        require(arena.used >= least, "all tables are in the shared memory");
        const pid_t child = fork();
        if (child == 0) {
            _exit(ask(table, all, text, 10) ? 0 : 1);
        }
        int status = 0;
        waitpid(child, &status, 0);
        require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "another process chooses too");
        std::uint64_t n_seqs = 0;
        std::uint64_t tokens = 0;
        for (std::uint32_t endpoint = 0; endpoint < N_ENDPOINTS; ++endpoint) {
            const laya::Load load = table.load(endpoint);
            n_seqs += load.n_seqs;
            tokens += load.tokens;
            require(table.endpoint(endpoint).ttft_us.load() > 0, "what another process measured is known here");
            table.settle(endpoint, load.n_seqs, load.tokens);
            require(table.load(endpoint).n_seqs == 0, "what another process began can be settled here");
        }
        require(n_seqs == N_REQUESTS / 10 && tokens == 8 * n_seqs, "what another process has in flight is seen here");
        const std::uint64_t session = laya::mix64(N_REQUESTS % 4999);
        require(table.homes(all[N_REQUESTS % all.size()].names[0], session, {}).session >= 0,
                "where another process put a session is known here");
        require(count_addresses(mapped()) == 0, "no word of the tables is an address");
        table.endpoint(0).seed.store(reinterpret_cast<std::uint64_t>(&table));
        require(count_addresses(mapped()) == 1, "an address is seen");
    }
    munmap(arena.begin, arena.bytes);
    arena = {};
}

#endif

}  // namespace

int main() {
    test_a_request_allocates_nothing_and_takes_no_lock();
#if defined(__linux__) && !defined(IS_SANITIZED)
    test_a_request_makes_no_system_call();
    test_tables_hold_no_address_and_can_be_shared();
#endif
    std::puts("ok");
    return 0;
}
