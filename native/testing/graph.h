// The stand-in's graphs: nodes, clones, executables and captures, under the engine's lock.
#pragma once

#include <map>

#include "engine.h"

namespace standin {

// What a kernel is here: a host function of 64-bit arguments.
struct Function {
    const char* name;
    void (*run)(const uint64_t* arguments);
    int arguments;
    bool library;  // belongs to no context, so that graphs may move it
    CUlibrary owner = nullptr;
};

struct Kernel {
    Function* function = nullptr;
    KernelNodeParams shape{};
    std::vector<uint64_t> values;
    std::vector<void*> pointers;  // to the values, for whoever asks for the parameters
    Context* context = nullptr;   // none: that of the stream it is launched on
    int priority = 0;             // of a node; a stream has its own
};

struct Graph;

struct Node {
    int type = kNodeEmpty;
    std::vector<Node*> after;
    std::vector<Node*> programmatic;  // of those before it, from whose end on it may not wait
    std::shared_ptr<Graph> child;     // its own, never another node's
    bool enabled = true;              // in an executable
    Node* original = nullptr;  // what it is a clone of
    Kernel kernel;
    MemsetNodeParams memset{};
    MemcpyNodeParams memcpy{};
    void (*host)(void*) = nullptr;
    void* host_data = nullptr;
};

struct Graph {
    std::vector<std::unique_ptr<Node>> nodes;
    Node* add(int type, const std::vector<Node*>& after);
    bool remove(const Node* node);  // and every edge to it, here or in a child graph
    std::unique_ptr<Graph> clone() const;
};

struct Exec {
    std::unique_ptr<Graph> graph;  // its nodes' originals are those it was made from
    WorkPtr last;
};

struct Capture {
    Graph* graph = nullptr;
    Stream* origin = nullptr;
    int mode = 0;
    uint64_t thread = 0;
    bool invalid = false;
};

Mask mask_of(const Stream& stream);
Kernel make_kernel(const KernelNodeParams& params, CUfunction function);
void run_kernel(const Kernel& kernel, const Mask& mask);
std::function<void()> work_of(const Node& node, const Mask& stream_mask);
CUresult launch(Exec& exec, Stream& stream);
CUresult update(Exec& exec, const Graph& graph);

}  // namespace standin
