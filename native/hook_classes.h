// What becomes of an entry point, class by class: the bodies of hooks, for either vendor's list.
//
// Who includes this, after all that includes the list for another purpose, says by ECLIP_REAL where the
// driver's own functions are.
#pragma once

#include "hook.h"

namespace eclip {

inline void forget_event(CUevent event) {
    giving::forgetting(event);
    Dispatcher& dispatcher = Dispatcher::get();
    if (dispatcher.on()) dispatcher.forget_event(event);
}

// A memset, or the record of an event.
template <class Call>
CUresult follow(Dispatcher& dispatcher, CUdeviceptr, CUstream stream, Default meaning, Call& call) {
    return dispatcher.pass(stream, meaning, kWork, true, call);
}
template <class Call>
CUresult follow(Dispatcher& dispatcher, CUevent event, CUstream stream, Default meaning,
                Call& call) {
    return dispatcher.record_event(event, stream, meaning, call);
}

}  // namespace eclip

#define ECLIP_MEANING_none Default::legacy
#define ECLIP_MEANING_ptsz Default::thread
#define ECLIP_MEANING_ptds Default::thread
#define ECLIP_MEANING_spt Default::thread

#define ECLIP_ON_STREAM(symbol, threaded, parameters, arguments, wish, held, tell)                \
    ECLIP_HOOK symbol parameters {                                                                \
        tell;                                                                                     \
        const auto real = ECLIP_REAL.symbol;                                                      \
        Dispatcher& dispatcher = Dispatcher::get();                                               \
        if (!dispatcher.on()) return real arguments;                                              \
        return dispatcher.pass(stream, ECLIP_MEANING_##threaded, wish, held,                      \
                               [&](CUstream target) { stream = target; return real arguments; }); \
    }
#define HOOK_FOLLOW(symbol, name, since, threaded, parameters, arguments)             \
    ECLIP_HOOK symbol parameters {                                                    \
        giving::following(a1, stream, ECLIP_MEANING_##threaded);                      \
        const auto real = ECLIP_REAL.symbol;                                          \
        Dispatcher& dispatcher = Dispatcher::get();                                   \
        if (!dispatcher.on()) return real arguments;                                  \
        auto call = [&](CUstream target) { stream = target; return real arguments; }; \
        return follow(dispatcher, a1, stream, ECLIP_MEANING_##threaded, call);        \
    }
#define HOOK_COPY(symbol, name, since, threaded, parameters, arguments)      \
    ECLIP_ON_STREAM(symbol, threaded, parameters, arguments, kWork, false,   \
                    giving::launching(stream, ECLIP_MEANING_##threaded))
#define HOOK_HOME(symbol, name, since, threaded, parameters, arguments)    \
    ECLIP_ON_STREAM(symbol, threaded, parameters, arguments, kHome, false, \
                    giving::taking_place(stream, ECLIP_MEANING_##threaded))
#define HOOK_DEFAULT(symbol, name, since, threaded, parameters, arguments)          \
    ECLIP_HOOK symbol parameters {                                                  \
        constexpr bool waits = giving::copies_to_host(#symbol);                     \
        return giving::in_default(waits, ECLIP_MEANING_##threaded, [&] {            \
            const auto real = ECLIP_REAL.symbol;                                    \
            Dispatcher& dispatcher = Dispatcher::get();                             \
            if (!dispatcher.on()) return real arguments;                            \
            return dispatcher.pass(nullptr, ECLIP_MEANING_##threaded, kHome, false, \
                                   [&](CUstream) { return real arguments; });       \
        });                                                                         \
    }

// An event of a capture draws the waiting stream into it: that must be the user's, never a lane.
#define ECLIP_WAIT_EVENT(symbol, meaning)                                                    \
    ECLIP_HOOK symbol(CUstream stream, CUevent event, unsigned flags) {                      \
        const auto real = ECLIP_REAL.symbol;                                                 \
        Dispatcher& dispatcher = Dispatcher::get();                                          \
        if (!dispatcher.on()) return real(stream, event, flags);                             \
        int wish = dispatcher.any_capture() ? kHome : kFollow;                               \
        return dispatcher.pass(stream, meaning, wish, true,                                  \
                               [&](CUstream target) { return real(target, event, flags); }); \
    }

#define ECLIP_WAIT(symbol, meaning)                                     \
    ECLIP_HOOK symbol(CUstream stream) {                                \
        return giving::waiting(stream, meaning, [&] {                   \
            Dispatcher& dispatcher = Dispatcher::get();                 \
            if (!dispatcher.on()) return ECLIP_REAL.symbol(stream);     \
            return dispatcher.wait(stream, meaning, ECLIP_REAL.symbol); \
        });                                                             \
    }

// Events are recorded where their stream's work went, so that nothing needs to be translated.
#define ECLIP_EVENT_WAIT(symbol)                                                  \
    ECLIP_HOOK symbol(CUevent event) {                                            \
        return giving::waiting_for_event(event, [&] {                             \
            const auto real = ECLIP_REAL.symbol;                                  \
            Dispatcher& dispatcher = Dispatcher::get();                           \
            if (!dispatcher.on()) return real(event);                             \
            return dispatcher.wait_for_event(event, [&] { return real(event); }); \
        });                                                                       \
    }

// What was noted of an event is out of date when it is destroyed, since another may have its handle
// next, and when it is recorded where nobody looks.
#define ECLIP_EVENT_CHANGE(symbol, event, parameters, arguments) \
    ECLIP_HOOK symbol parameters {                               \
        forget_event(event);                                     \
        return ECLIP_REAL.symbol arguments;                      \
    }

#define ECLIP_CAPTURE(way, symbol, meaning, parameters, arguments)                     \
    ECLIP_HOOK symbol parameters {                                                     \
        return giving::way(stream, meaning, [&] {                                      \
            return Dispatcher::get().way(stream, meaning,                              \
                                         [&] { return ECLIP_REAL.symbol arguments; }); \
        });                                                                            \
    }
