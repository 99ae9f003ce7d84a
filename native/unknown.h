// Entry points of the driver that libeclip has never heard of: newer ones than its list.
//
// One may take a stream, and then work would get past the order that lanes need. Who asks for it may
// only be looking whether it is there; so it is given a stub, and the first call through a stub ends
// planning: all streams are joined back home before the driver sees the call.
#pragma once

namespace eclip {

// Whether a name, with or without the suffix of a version, is on none of the lists.
bool is_unknown(const char* name);

// What to call in the place of the function: a stub, the same one each time. Where no stub is left,
// planning ends at once and the function itself is the answer.
void* in_front_of_unknown(const char* name, void* function);

}  // namespace eclip
