// Linked in front of the dispatcher's barriers to lose some of them on purpose, which the random
// programs must notice. DROP names the kind to lose: home_lane, lane_lane or lane_home.
#include <cstdlib>
#include <cstring>

#include "../dispatcher.h"

// The linker gives calls of the real one to this one (see the Makefile); `self` is the object.
extern "C" void eclip_lossy_barrier(void* self, const eclip::StreamOrder& home, int from, int to)
    __asm__("__wrap_" ECLIP_BARRIER);
extern "C" void eclip_real_barrier(void* self, const eclip::StreamOrder& home, int from, int to)
    __asm__("__real_" ECLIP_BARRIER);

void eclip_lossy_barrier(void* self, const eclip::StreamOrder& home, int from, int to) {
    const char* kind = from < 0 ? "home_lane" : to < 0 ? "lane_home" : "lane_lane";
    const char* lost = getenv("DROP");
    if (lost != nullptr && strcmp(lost, kind) == 0) return;
    eclip_real_barrier(self, home, from, to);
}
