// A captured graph, for the cases of graphs.
#pragma once

#include "cases.h"

namespace cases {

// A captured graph on the plan's lanes, and its nodes in the order of their launches.
struct Captured {
    CUstream stream = make_stream();
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    std::vector<CUgraphNode> nodes;

    template <class Body>
    explicit Captured(Body&& body) {
        CHECK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        body(stream);
        CHECK(cuStreamEndCapture(stream, &graph));
        CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
        size_t count = 0;
        CHECK(cuGraphGetNodes(graph, nullptr, &count));
        nodes.resize(count);
        CHECK(cuGraphGetNodes(graph, nodes.data(), &count));
    }

    // To a function of a module, which cannot run on a lane: libeclip must instantiate anew.
    CUresult refuse_update(CUgraphNode node, std::vector<uint64_t> arguments) const {
        CUfunction other = standin_function("other", run_add, 3, 0);
        std::vector<void*> pointers;
        for (uint64_t& argument : arguments) pointers.push_back(&argument);
        KernelNodeParams params{other, {1, 1, 1}, {1, 1, 1}, 0, pointers.data(),
                                nullptr, nullptr, nullptr};
        return cuGraphExecKernelNodeSetParams_v2(exec, node, &params);
    }

    void run() const {
        CHECK(cuGraphLaunch(exec, stream));
        CHECK(cuStreamSynchronize(stream));
    }
};

}  // namespace cases
