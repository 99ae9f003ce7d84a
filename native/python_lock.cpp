#include "python_lock.h"

#include <cstdlib>

#include "driver.h"
#include "symbols.h"

namespace eclip {
namespace {

struct Python {
    void* (*current)() = nullptr;      // the thread state that holds the lock, as this thread sees it
    void* (*of_thread)() = nullptr;    // the calling thread's own
    void* (*save)() = nullptr;         // give the lock back
    void (*restore)(void*) = nullptr;  // take it again
    int (*initialised)() = nullptr;
    bool usable = false;
};

template <class Function>
void find(Function& function, const char* name) {
    if (function != nullptr) return;
    Symbols object = find_object([=](const Symbols& other) { return other.find(name) != nullptr; });
    function = reinterpret_cast<Function>(object.find(name));
}

Python find_python() {
    Python python;
    if (secure_getenv("ECLIP_KEEP_PYTHON_LOCK") != nullptr) return python;
    find(python.current, "PyThreadState_GetUnchecked");  // since 3.13
    find(python.current, "_PyThreadState_UncheckedGet");
    find(python.of_thread, "PyGILState_GetThisThreadState");
    find(python.save, "PyEval_SaveThread");
    find(python.restore, "PyEval_RestoreThread");
    find(python.initialised, "Py_IsInitialized");
    python.usable = python.current != nullptr && python.of_thread != nullptr &&
                    python.save != nullptr && python.restore != nullptr &&
                    python.initialised != nullptr;
    return python;
}

// When a thread is first kept waiting, the interpreter is there if there is one.
const Python& python() {
    static const Python found = find_python();
    return found;
}

}  // namespace

LetPythonRun::LetPythonRun() {
    const Python& with = python();
    if (!with.usable || !with.initialised()) return;
    // What PyGILState_Check asks, which answers yes to everybody once there are subinterpreters.
    void* mine = with.of_thread();
    if (mine != nullptr && with.current() == mine) kept_ = with.save();
}

LetPythonRun::~LetPythonRun() noexcept(false) {
    if (kept_ != nullptr) python().restore(kept_);
}

}  // namespace eclip
