// How long a process takes to hear from another: an eventfd's wake, and a spinning word.
//   g++ -O2 -std=c++20 lab/gpu/wakes.cpp -o wakes && ./wakes [rounds] [microseconds between rounds]
// Prints a JSON line for each way: p50 and p99 in ns, from before the write to after the read.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

struct Shared {
    alignas(64) std::atomic<int64_t> sent;
    alignas(64) std::atomic<int64_t> taken;
};

static int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

static void wait_ns(int64_t duration) {
    const int64_t end = now_ns() + duration;
    if (duration > 200'000) usleep(useconds_t((duration - 100'000) / 1000));
    while (now_ns() < end) {}
}

int main(int count, char **words) {
    const int rounds = count > 1 ? atoi(words[1]) : 5000;
    const int64_t pause_ns = (count > 2 ? atoll(words[2]) : 500) * 1000;
    auto *shared = static_cast<Shared *>(
        mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    for (const bool spins : {false, true}) {
        const int bell = eventfd(0, EFD_NONBLOCK);
        shared->sent = shared->taken = 0;
        const pid_t child = fork();
        if (child == 0) {
            for (int round = 0; round < rounds; ++round) {
                if (spins) {
                    while (shared->sent.load(std::memory_order_acquire) <= round) {}
                } else {
                    pollfd watched{bell, POLLIN, 0};
                    poll(&watched, 1, -1);
                    uint64_t rung;
                    if (read(bell, &rung, sizeof rung) < 0) { --round; continue; }
                }
                shared->taken.store(now_ns(), std::memory_order_release);
            }
            _exit(0);
        }
        std::vector<int64_t> times;
        for (int round = 0; round < rounds; ++round) {
            wait_ns(pause_ns);
            shared->taken = 0;
            const int64_t begin = now_ns();
            shared->sent.store(round + 1, std::memory_order_release);
            if (!spins) {
                const uint64_t one = 1;
                if (write(bell, &one, sizeof one) < 0) return 1;
            }
            int64_t end;
            while ((end = shared->taken.load(std::memory_order_acquire)) == 0) {}
            times.push_back(end - begin);
        }
        waitpid(child, nullptr, 0);
        std::sort(times.begin(), times.end());
        printf("{\"way\": \"%s\", \"pause_us\": %lld, \"p50_ns\": %lld, \"p99_ns\": %lld}\n",
               spins ? "spinning word" : "eventfd", (long long)(pause_ns / 1000),
               (long long)times[times.size() / 2], (long long)times[times.size() * 99 / 100]);
        fflush(stdout);
        close(bell);
    }
}
