// Work that waits for the host: host functions, values in memory, other processes.
//
// A stream with a CU mask is always a blocking one, so the default stream waits for lanes and lanes
// for it. For a program's non-blocking stream that is more order than it asked for. It only costs
// time, unless the work waits for the host and the host for the default stream: then both would wait
// for ever. So while such work may be under way, non-blocking streams stay off lanes.
#pragma once

#include "../driver.h"

namespace eclip::gates {

// Around a call that puts such work on a stream.
void begin();
void put(CUstream stream, Default meaning, bool taken);
void keep();  // from now on any may be under way at any time

bool any();  // may be under way

}  // namespace eclip::gates
