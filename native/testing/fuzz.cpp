// Random programs over the driver's interface, each compared with a sequential run of itself.
//
//   fuzz [--seed N] [--programs N] [--first N] [--threads N] [--by-thread 1] [--record 1]
//        [--cap 1] [--unplanned 1] [--batch N] [--patience SECONDS]
//
// With --cap there is no plan, and programs change their cap all the time.
// Works with libeclip linked in, preloaded, or absent, which shows that the programs themselves and
// the stand-in are right. A batch of programs shares a process and a plan: a process remembers what
// a lane has refused and runs ever less on lanes. Exit status 0: no difference; 1: a difference, with
// the program's number, from which --first repeats its batch; 3: a program hangs.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string>

#include "random_program.h"

using namespace fuzz;

namespace {

struct Options {
    unsigned seed, programs, first, threads, batch, patience;
    bool by_thread, record, unplanned, cap;
};

unsigned number(int count, char** words, const char* name, unsigned otherwise) {
    for (int index = 1; index + 1 < count; ++index)
        if (strcmp(words[index], name) == 0) return static_cast<unsigned>(atoi(words[index + 1]));
    return otherwise;
}

std::atomic<unsigned> running;

// A process of its own: some programs under one plan. Its exit status.
int run_batch(const Options& options, unsigned first, unsigned end) {
    Random random(options.seed + 7919 * (first + 1));
    char path[] = "/tmp/eclip-fuzz-XXXXXX";
    close(mkstemp(path));
    write_table(path, random, {options.by_thread, options.record});
    std::string board = std::string(path) + "-board";
    if (options.cap) setenv("ECLIP_SMS", "24", 1);
    else if (!options.unplanned) setenv("ECLIP_TABLE", path, 1);
    setenv("ECLIP_BOARD", board.c_str(), 0);  // who names one looks at it meanwhile
    moving_caps = options.cap;
    describe_device();
    setenv("ECLIP_RECORD", "/dev/null", 1);
    const char* const asking[] = {"always", "never", "auto"};
    setenv("ECLIP_ASK", asking[random() % 3], 1);
    bool misfits = random() % 4 == 0;
    signal(SIGALRM, [](int) {
        fprintf(stderr, "program %u hangs\n", running.load());
        _exit(3);
    });
    CHECK(cuInit(0));
    make_functions(std::make_integer_sequence<int, kKernels>());
    Contexts contexts;
    CHECK(cuDevicePrimaryCtxRetain(&contexts.planned, 0));
    CHECK(cuDevicePrimaryCtxRetain(&contexts.other_device, 1));
    std::atomic<unsigned> next{first};
    std::atomic<int> different{-1};
    auto work = [&] {
        for (unsigned index; (index = next++) < end && different < 0;) {
            running = index;
            alarm(options.patience);
            unsigned seed = options.seed * 1000003u + index;
            standin_behave(seed, index % 3 != 0);
            Program program(seed, options.threads > 1, misfits, contexts);
            if (!program.run()) different = static_cast<int>(index);
        }
    };
    std::vector<std::thread> others;
    for (unsigned index = 1; index < options.threads; ++index) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
    unlink(path);
    unlink(board.c_str());
    forget_device();
    if (different < 0) return 0;
    printf("program %d of seed %u differs\n", different.load(), options.seed);
    return 1;
}

}  // namespace

int main(int count, char** words) {
    auto option = [&](const char* name, unsigned otherwise) {
        return number(count, words, name, otherwise);
    };
    const Options options{option("--seed", 1), option("--programs", 1000), option("--first", 0),
                          option("--threads", 1), option("--batch", 20), option("--patience", 120),
                          option("--by-thread", 0) != 0, option("--record", 0) != 0,
                          option("--unplanned", 0) != 0, option("--cap", 0) != 0};
    const unsigned end = options.first + options.programs;
    for (unsigned next = options.first; next < end; next += options.batch) {
        pid_t child = fork();
        if (child == 0) {
            int status = run_batch(options, next, std::min(end, next + options.batch));
            fflush(stdout);
            _exit(status);
        }
        int ended = 0;
        waitpid(child, &ended, 0);
        if (ended == 0) continue;
        if (WIFSIGNALED(ended)) printf("the batch from program %u ended by a signal\n", next);
        return WIFEXITED(ended) ? WEXITSTATUS(ended) : 4;
    }
    printf("%u programs, no difference\n", options.programs);
    return 0;
}
