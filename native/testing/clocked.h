// What programs ask of the driver that has a clock of its own (clocked.cpp).
#pragma once

#include <cstdint>

extern "C" {
// From now on time is counted for the calling thread; `tick` hears whenever some has passed.
void clocked_begin(void (*tick)(int64_t now_ns));
void clocked_pass(int64_t ns);                      // the program itself needs so long
void clocked_take(int64_t from_ns, int64_t to_ns);  // nothing of this process runs then
int64_t clocked_queued();   // how long the device still needs for what was launched
int64_t clocked_records();  // events that were recorded so far
}
