// A capped process among others: which slices are whose, by the board, and one move at a time.
//
// Slices are claimed under a lock of the whole board. A process holds all slices where a kernel of its
// own may run: while it moves, those that it comes from and those that it goes to. So processes are
// disjoint at any time, as long as what they want fits on the device: whoever shrinks waits for its
// last kernel outside, and only then others may have these slices. Where it does not fit, slices are
// shared, and this is said.
#pragma once

#include <string>

#include "cap.h"
#include "seat.h"

namespace eclip::moving {

// Take a place for so many units on the device's board, and keep to it from then on. Returns what is
// wrong, or nothing.
std::string begin(Cap& cap, const std::vector<uint32_t>& units, uint32_t wanted, CUdevice device);

// Ask for another number of units; a thread of ours does the rest. False: there is no cap, or no such
// number.
bool ask(int64_t wanted);
int64_t held();  // units where work of ours may run; 0: there is no cap

}  // namespace eclip::moving
