// What launches and graph updates cost on the host, by the driver's interface alone; the same binary
// is run with libeclip and without. Every line printed is a JSON object.
//
//   costs launch [--repeats N]
//   costs lane [--repeats N]
//   costs graph [--repeats N]
//
// `launch` alternates between two grids, so that a plan can send neighbours to one lane or to two.
// It runs on the default stream and on a stream of its own, beside 0 to 256 idle blocking streams,
// with and without waiting after each launch, in rounds, so that what drifts meets all alike. `lane`
// launches into a green context, in every way the driver has: what no hook can go below. `graph` has chains of 300 and of 1,000 kernels.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "../../native/cuda_abi.h"

extern "C" {
CUresult cuInit(unsigned);
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxGetCurrent(CUcontext*);
CUresult cuCtxSynchronize();
CUresult cuDeviceGetDevResource(CUdevice, CUdevResource*, int);
CUresult cuDevSmResourceSplitByCount(CUdevResource*, unsigned*, const CUdevResource*, CUdevResource*,
                                     unsigned, unsigned);
CUresult cuDevResourceGenerateDesc(CUdevResourceDesc*, CUdevResource*, unsigned);
CUresult cuGreenCtxCreate(CUgreenCtx*, CUdevResourceDesc, CUdevice, unsigned);
CUresult cuCtxFromGreenCtx(CUcontext*, CUgreenCtx);
CUresult cuGreenCtxStreamCreate(CUstream*, CUgreenCtx, unsigned, int);
CUresult cuKernelGetFunction(CUfunction*, CUkernel);
CUresult cuStreamCreate(CUstream*, unsigned);
CUresult cuStreamDestroy_v2(CUstream);
CUresult cuStreamSynchronize(CUstream);
CUresult cuLibraryLoadData(CUlibrary*, const void*, void*, void*, unsigned, void*, void*, unsigned);
CUresult cuLibraryGetKernel(CUkernel*, CUlibrary, const char*);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, CUstream, void**, void**);
CUresult cuGraphCreate(CUgraph*, unsigned);
CUresult cuGraphDestroy(CUgraph);
CUresult cuGraphAddKernelNode_v2(CUgraphNode*, CUgraph, const CUgraphNode*, size_t,
                                 const KernelNodeParams*);
CUresult cuGraphInstantiateWithFlags(CUgraphExec*, CUgraph, unsigned long long);
CUresult cuGraphExecDestroy(CUgraphExec);
CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec, CUgraphNode, const KernelNodeParams*);
CUresult cuGraphExecUpdate_v2(CUgraphExec, CUgraph, GraphExecUpdateResultInfo*);
CUresult cuGraphLaunch(CUgraphExec, CUstream);
}

namespace {

const char* const kSource =
    ".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry empty()\n{\n    ret;\n}\n";

#define CHECK(call)                                                                   \
    if (CUresult status = call) {                                                     \
        fprintf(stderr, "%s returned %d\n", #call, status);                           \
        exit(1);                                                                      \
    }

double now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

struct Spread {
    double median, low, high;  // of the 10th and 90th percentile
};

Spread spread_of(std::vector<double>& times) {
    std::sort(times.begin(), times.end());
    size_t last = times.size() - 1;
    return {times[last / 2], times[last / 10], times[last - last / 10]};
}

CUfunction kernel;

// Bursts that fit the launch queue, each after the device is idle.
void time_launches(CUfunction function, CUstream stream, bool waits, int repeats,
                   std::vector<double>& times) {
    constexpr int kBurst = 100;
    for (int repeat = -3; repeat < repeats; ++repeat) {
        CHECK(cuCtxSynchronize());
        double start = now_ns();
        for (int launch = 0; launch < kBurst; ++launch) {
            CHECK(cuLaunchKernel(function, 1 + launch % 2, 1, 1, 32, 1, 1, 0, stream, nullptr,
                                 nullptr));
            if (waits) CHECK(cuStreamSynchronize(stream));
        }
        if (repeat >= 0) times.push_back((now_ns() - start) / kBurst);
    }
}

constexpr int kRounds = 4;

void measure_launches(int repeats) {
    const int idles[] = {0, 1, 8, 32, 64, 256};
    std::vector<double> times[2][std::size(idles)][2];
    for (int round = 0; round < kRounds; ++round)
        for (int own : {0, 1})
            for (size_t index = 0; index < std::size(idles); ++index) {
                std::vector<CUstream> streams(static_cast<size_t>(idles[index]) + 1);
                for (CUstream& stream : streams) CHECK(cuStreamCreate(&stream, 0));
                for (CUstream stream : streams)  // each has been used and is empty now
                    CHECK(cuLaunchKernel(kernel, 3, 1, 1, 32, 1, 1, 0, stream, nullptr, nullptr));
                for (int waits : {0, 1})
                    time_launches(kernel, own ? streams[0] : nullptr, waits, repeats / kRounds,
                                  times[own][index][waits]);
                for (CUstream stream : streams) CHECK(cuStreamDestroy_v2(stream));
            }
    for (int own : {0, 1})
        for (size_t index = 0; index < std::size(idles); ++index)
            for (int waits : {0, 1}) {
                Spread found = spread_of(times[own][index][waits]);
                printf("{\"stream\": \"%s\", \"idle\": %d, \"waits\": %s, \"ns\": %.1f, "
                       "\"low_ns\": %.1f, \"high_ns\": %.1f}\n",
                       own ? "own" : "default", idles[index], waits ? "true" : "false",
                       found.median, found.low, found.high);
            }
}

// A kernel belongs to no context and is looked up in the stream's at each launch; a function belongs
// to one, its primary or the lane's; and either context may be the current one.
void measure_lanes(int repeats) {
    CUcontext primary, lane;
    CUdevResource whole, half, rest;
    unsigned groups = 1;
    CUdevResourceDesc description;
    CUgreenCtx green;
    CUstream streams[2];
    CHECK(cuCtxGetCurrent(&primary));
    CHECK(cuDeviceGetDevResource(0, &whole, CU_DEV_RESOURCE_TYPE_SM));
    CHECK(cuDevSmResourceSplitByCount(&half, &groups, &whole, &rest, 0, 64));
    CHECK(cuDevResourceGenerateDesc(&description, &half, 1));
    CHECK(cuGreenCtxCreate(&green, description, 0, CU_GREEN_CTX_DEFAULT_STREAM));
    CHECK(cuCtxFromGreenCtx(&lane, green));
    CHECK(cuStreamCreate(&streams[0], CU_STREAM_NON_BLOCKING));
    CHECK(cuGreenCtxStreamCreate(&streams[1], green, CU_STREAM_NON_BLOCKING, 0));
    CUfunction functions[3] = {kernel};
    CHECK(cuKernelGetFunction(&functions[1], reinterpret_cast<CUkernel>(kernel)));
    CHECK(cuCtxSetCurrent(lane));
    CHECK(cuKernelGetFunction(&functions[2], reinterpret_cast<CUkernel>(kernel)));
    const char* const names[] = {"kernel", "function", "lane's function"};
    std::vector<double> times[2][2][3];
    for (int round = 0; round < kRounds; ++round)
        for (int on_lane : {0, 1})
            for (int current : {0, 1})
                for (int way = 0; way < 3; ++way) {
                    if (!on_lane && (current || way == 2)) continue;
                    CHECK(cuCtxSetCurrent(current ? lane : primary));
                    time_launches(functions[way], streams[on_lane], false, repeats / kRounds,
                                  times[on_lane][current][way]);
                }
    for (int on_lane : {0, 1})
        for (int current : {0, 1})
            for (int way = 0; way < 3; ++way)
                if (!times[on_lane][current][way].empty())
                    printf("{\"stream\": \"%s\", \"current\": \"%s\", \"launched\": \"%s\", "
                           "\"ns\": %.1f}\n",
                           on_lane ? "lane" : "plain", current ? "lane" : "primary", names[way],
                           spread_of(times[on_lane][current][way]).median);
}

struct Chain {
    CUgraph graph;
    std::vector<CUgraphNode> nodes;
};

KernelNodeParams params_of(size_t index) {
    KernelNodeParams params{};
    params.kern = reinterpret_cast<CUkernel>(kernel);
    params.grid[0] = 1 + static_cast<unsigned>(index % 2);
    params.grid[1] = params.grid[2] = params.block[1] = params.block[2] = 1;
    params.block[0] = 32;
    return params;
}

Chain make_chain(size_t length) {
    Chain chain;
    CHECK(cuGraphCreate(&chain.graph, 0));
    for (size_t index = 0; index < length; ++index) {
        KernelNodeParams params = params_of(index);
        CUgraphNode node;
        const CUgraphNode* after = index > 0 ? &chain.nodes.back() : nullptr;
        CHECK(cuGraphAddKernelNode_v2(&node, chain.graph, after, index > 0, &params));
        chain.nodes.push_back(node);
    }
    return chain;
}

void measure_graphs(int repeats) {
    for (size_t length : {300, 1000}) {
        Chain chain = make_chain(length), other = make_chain(length);
        std::vector<double> making, setting, updating, launching;
        for (int repeat = 0; repeat < repeats; ++repeat) {
            CUgraphExec exec;
            double start = now_ns();
            CHECK(cuGraphInstantiateWithFlags(&exec, chain.graph, 0));
            double made = now_ns();
            for (size_t index = 0; index < length; ++index) {
                KernelNodeParams params = params_of(index);
                CHECK(cuGraphExecKernelNodeSetParams_v2(exec, chain.nodes[index], &params));
            }
            double set = now_ns();
            GraphExecUpdateResultInfo info;
            CHECK(cuGraphExecUpdate_v2(exec, other.graph, &info));
            double updated = now_ns();
            CHECK(cuGraphLaunch(exec, nullptr));
            CHECK(cuCtxSynchronize());
            double before = now_ns();
            CHECK(cuGraphLaunch(exec, nullptr));
            launching.push_back(now_ns() - before);
            CHECK(cuCtxSynchronize());
            CHECK(cuGraphExecDestroy(exec));
            making.push_back(made - start);
            setting.push_back(set - made);
            updating.push_back(updated - set);
        }
        printf("{\"nodes\": %zu, \"instantiate_ns\": %.0f, \"set_all_ns\": %.0f, "
               "\"update_ns\": %.0f, \"launch_ns\": %.0f}\n",
               length, spread_of(making).median, spread_of(setting).median,
               spread_of(updating).median, spread_of(launching).median);
    }
}

}  // namespace

int main(int count, char** words) {
    std::string what = count > 1 ? words[1] : "";
    int repeats = count > 3 ? atoi(words[3]) : 50;
    CUcontext context;
    CUlibrary library;
    CUkernel found;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuLibraryLoadData(&library, kSource, nullptr, nullptr, 0, nullptr, nullptr, 0));
    CHECK(cuLibraryGetKernel(&found, library, "empty"));
    kernel = reinterpret_cast<CUfunction>(found);
    if (what == "launch") measure_launches(repeats);
    if (what == "lane") measure_lanes(repeats);
    if (what == "graph") measure_graphs(repeats);
    return what == "launch" || what == "lane" || what == "graph" ? 0 : 2;
}
