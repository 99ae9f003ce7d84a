// A service's row: busy from a first launch until the program has waited for what it launched.
//
// Busy is raised before the driver sees the launch. After the wait it lingers, because many requests
// launch and wait several times. A thread ends it; it also asks for streams that nobody waits for.
#pragma once

#include "giving.h"
#include "lines.h"

namespace eclip::giving {

// How long it lingers after what was launched is done.
constexpr int64_t kLingerNs = 100'000;

void begin_service(int64_t bound_ns);  // once the process has its row; 0: no bound in time
void raise_busy(Line& line);
void clear_busy(Line& line, uint64_t launches);  // what was launched by then is done
void postpone_busy(Line& line, int64_t began_ns);  // likewise, and more was launched since

// Before the driver goes: no question is under way afterwards, and none will be asked.
void end_service();

}  // namespace eclip::giving
