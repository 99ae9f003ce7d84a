// Python's global lock, given back while a thread is kept waiting inside a call to the driver.
//
// Most callers release it themselves (PyTorch, Triton, CuPy). Whoever does not would stop every other
// Python thread of the process for as long as a service is busy.
#pragma once

namespace eclip {

// While it lives other Python threads may run. Does nothing where the thread has no lock to give.
class LetPythonRun {
public:
    LetPythonRun();
    ~LetPythonRun() noexcept(false);  // a thread that outlives the interpreter ends here
    LetPythonRun(const LetPythonRun&) = delete;

private:
    void* kept_ = nullptr;
};

}  // namespace eclip
