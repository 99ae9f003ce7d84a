// Random programs over the driver's interface, each compared with a sequential run of itself.
//
//   fuzz [--seed N] [--programs N] [--threads N] [--by-thread 1] [--unplanned 1]
//        [--patience SECONDS]
//
// Works with libeclip linked in, preloaded, or absent, which shows that the programs themselves and
// the stand-in are right. Exit status 0: no difference; 1: a difference, with the program's seed.
#include <unistd.h>

#include <csignal>

#include "random_program.h"

using namespace fuzz;

namespace {

unsigned number(int count, char** words, const char* name, unsigned otherwise) {
    for (int index = 1; index + 1 < count; ++index)
        if (strcmp(words[index], name) == 0) return static_cast<unsigned>(atoi(words[index + 1]));
    return otherwise;
}

std::atomic<unsigned> running_seed;

}  // namespace

int main(int count, char** words) {
    unsigned seed = number(count, words, "--seed", 1);
    unsigned programs = number(count, words, "--programs", 1000);
    unsigned threads = number(count, words, "--threads", 1);
    unsigned patience = number(count, words, "--patience", 120);  // seconds for one program
    Random random(seed);
    char path[] = "/tmp/eclip-fuzz-XXXXXX";
    int file = mkstemp(path);
    close(file);
    write_table(path, random, number(count, words, "--by-thread", 0) != 0);
    if (number(count, words, "--unplanned", 0) == 0) setenv("ECLIP_TABLE", path, 1);
    const char* const asking[] = {"always", "never", "auto"};
    setenv("ECLIP_ASK", asking[seed % 3], 1);
    signal(SIGALRM, [](int) {
        fprintf(stderr, "program %u hangs\n", running_seed.load());
        _exit(3);
    });
    CHECK(cuInit(0));
    make_functions(std::make_integer_sequence<int, kKernels>());
    CUcontext context;
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    std::atomic<unsigned> next{0};
    std::atomic<int> different{-1};
    auto work = [&] {
        CHECK(cuCtxSetCurrent(context));
        for (unsigned index; (index = next++) < programs && different < 0;) {
            unsigned mine = seed * 1000003u + index;
            running_seed = mine;
            alarm(patience);
            standin_behave(mine, index % 3 != 0);
            if (!Program(mine, threads > 1).run()) different = static_cast<int>(index);
        }
    };
    std::vector<std::thread> others;
    for (unsigned index = 1; index < threads; ++index) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
    unlink(path);
    if (different >= 0) {
        printf("program %d of seed %u differs\n", different.load(), seed);
        return 1;
    }
    printf("%u programs, no difference\n", programs);
    return 0;
}
