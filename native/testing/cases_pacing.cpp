// Cases of background in stretches: which launches share one.
//
// Times are long, so that a busy machine blurs them less.
#include "cases.h"

using namespace cases;

namespace {

constexpr const char* kGrainUs = "10000";
constexpr uint64_t kShortUs = 500, kLongUs = 20'000;
constexpr int kShort = 8;  // in a round; together they take about half a grain
constexpr int kLearning = 15, kMostRounds = 300, kEnoughRounds = 3;

std::atomic<int> events{0};  // that libeclip has recorded: the program itself records none

void count_events(const char* call, CUstream) {
    if (strcmp(call, "record") == 0) ++events;
}

// Launches of one kernel on one stream, of different sizes.
class Program {
public:
    Program() {
        setenv("ECLIP_GRAIN_US", kGrainUs, 1);
        setenv("ECLIP_PATIENCE_US", "1000000", 1);
        use_background("0");
        start();
        standin_calls(count_events);
        cell_ = make_cells(1);
        stream_ = make_stream();
    }
    // The stretch that it is in.
    int run(unsigned size, uint64_t us) {
        uint64_t values[3] = {address(cell_), 1, us};
        void* pointers[3] = {&values[0], &values[1], &values[2]};
        CHECK(cuLaunchKernel(kernel_, size, 1, 1, 1, 1, 1, 0, stream_, pointers, nullptr));
        return events;
    }

private:
    CUfunction kernel_ = make_add("a");
    uint64_t* cell_;
    CUstream stream_;
};

bool at_most(const char* what, int found, int most) {
    if (found <= most) return true;
    printf("%s is %d, must be at most %d\n", what, found, most);
    return false;
}

// Whether there are rounds with so few stretches, once kernels are known. Not all have to be: on a busy
// machine kernels do take longer, and more stretches are right.
template <class Round>
bool some_have_at_most(int most, Round&& run) {
    int rounds = 0, few = 0;
    for (; rounds < kMostRounds && few < kEnoughRounds; ++rounds) {
        const bool learned = rounds >= kLearning;
        few += run(learned) <= most && learned;
    }
    CHECK(cuCtxSynchronize());
    if (few == kEnoughRounds) return true;
    printf("%d of %d rounds have at most %d stretches, must be %d\n", few, rounds, most, kEnoughRounds);
    return false;
}

}  // namespace

CASE(kernel_longer_than_the_grain_is_a_stretch_by_itself) {
    Program program;
    bool by_itself = true;
    // One of short kernels and two of a long one each; by their mean, every launch would be one.
    bool few = some_have_at_most(5, [&](bool learned) {
        const int before = events;
        int last = 0;
        for (int index = 0; index < kShort; ++index) last = program.run(1, kShortUs);
        const int first_long = program.run(64, kLongUs), second_long = program.run(64, kLongUs);
        if (learned && preloaded()) by_itself &= last < first_long && first_long < second_long;
        return second_long - before;
    });
    return same("whether each is by itself", by_itself, true) && few;
}

CASE(pause_of_the_program_does_not_lengthen_its_kernels) {
    Program program;
    // If pauses counted, every launch would be one.
    return some_have_at_most(kShort / 2, [&](bool) {
        const int before = events;
        int last = 0;
        for (int index = 0; index < kShort; ++index) {
            last = program.run(1, kShortUs);
            usleep(10 * kShortUs);
        }
        return last - before;
    });
}

// Nobody knows how long they take: the first of them must not be as many as short ones would be.
CASE(kernels_of_a_size_that_is_new_are_few_in_a_stretch) {
    Program program;
    for (int launch = 0; launch < 200; ++launch) program.run(1, 0);
    CHECK(cuCtxSynchronize());
    const int before = program.run(2, kShortUs);
    int launches = 1;
    while (launches < 50 && program.run(2, kShortUs) == before) ++launches;
    CHECK(cuCtxSynchronize());
    return !preloaded() || at_most("the launches of a stretch", launches, 8);
}
