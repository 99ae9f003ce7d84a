#include "rehome.h"

#include <algorithm>

#include "dispatcher.h"
#include "giving.h"
#include "matching.h"

namespace eclip {
namespace {

constexpr int kMostExecutables = 7;  // of one graph: each is an executable more

// A kernel's clusters; of one block where it has none, or the driver does not know them.
CUlaunchAttribute read_cluster(CUgraphNode node) {
    auto ask = driver().cuGraphKernelNodeGetAttribute;
    CUlaunchAttribute attribute{};
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    bool known = ask != nullptr && ask(node, attribute.id, &attribute.bytes) == CUDA_SUCCESS &&
                 attribute.cluster[0] * attribute.cluster[1] * attribute.cluster[2] > 0;
    if (!known) std::fill(attribute.cluster, attribute.cluster + 3, 1u);
    return attribute;
}

}  // namespace

bool fits(CUgraphNode node, const KernelNodeParams& params, CUstream lane) {
    const Driver& real = driver();
    CUlaunchAttribute attribute = read_cluster(node);
    if (real.cuOccupancyMaxActiveClusters == nullptr ||
        attribute.cluster[0] * attribute.cluster[1] * attribute.cluster[2] == 1)
        return true;
    CUfunction function = params.func;
    if (params.kern != nullptr && real.cuKernelGetFunction(&function, params.kern) != CUDA_SUCCESS)
        return false;
    CUlaunchConfig config{{params.grid[0], params.grid[1], params.grid[2]},
                          {params.block[0], params.block[1], params.block[2]},
                          params.sharedMemBytes, lane, &attribute, 1};
    int clusters = 0;
    return real.cuOccupancyMaxActiveClusters(&clusters, function, &config) == CUDA_SUCCESS &&
           clusters > 0;
}

namespace {

// What is planned for a graph, node by node.
struct Plan {
    int worker = -1;
    std::vector<KernelNodeParams> params;  // of kernels; their arguments stay the node's
    std::vector<int> positions;            // of kernels in the worker's trace, -1 where it has none
    size_t kernels = 0, planned = 0;
};

// Lanes are of one context: what belongs to another must not move there. The driver may not say
// whose a kernel is; then it runs where the graph was made, which is most likely the current one.
bool is_of_lanes(const KernelNodeParams& params) {
    CUcontext context = params.ctx;
    if (context == nullptr) driver().cuCtxGetCurrent(&context);
    return context == Dispatcher::get().pool().primary;
}

// What is known of every kernel of a graph, in launch order; false where it is left as it is.
bool read_kernels(const Sequence& sequence, Plan& plan, std::vector<uint64_t>& identities) {
    Dispatcher& dispatcher = Dispatcher::get();
    for (size_t place = 0; place < sequence.size(); ++place) {
        KernelNodeParams& params = plan.params.emplace_back();
        if (sequence.nodes[place].type != kNodeKernel) continue;
        if (driver().cuGraphKernelNodeGetParams_v2(sequence.handles[place], &params) != CUDA_SUCCESS)
            return false;
        if (!is_of_lanes(params)) {
            say("a graph of another device or context than the plan's runs as it is");
            return false;
        }
        identities.push_back(
            dispatcher.workers().identities().of(launch_of(sequence.handles[place], params)));
    }
    plan.kernels = identities.size();
    return !identities.empty();
}

// Which places of its worker's trace a graph's kernels have; false where the graph is nobody's.
bool plan_graph(const Sequence& sequence, Plan& plan) {
    std::vector<uint64_t> identities;
    if (!read_kernels(sequence, plan, identities)) return false;
    Match chosen;
    plan.worker = choose_worker(identities, chosen);
    if (plan.worker < 0) return false;
    size_t seen = 0;
    for (const Sequence::Node& node : sequence.nodes)
        plan.positions.push_back(node.type == kNodeKernel ? chosen.positions[seen++] : -1);
    for (int position : chosen.positions) plan.planned += position >= 0;
    return true;
}

// The lane of every node in one of the plan's variants; kHome: it stays.
std::vector<int> choose_lanes(const Sequence& sequence, const Plan& plan, int variant) {
    Dispatcher& dispatcher = Dispatcher::get();
    std::vector<int> kernel_lanes;
    for (size_t place = 0; place < sequence.size(); ++place) {
        if (sequence.nodes[place].type != kNodeKernel) continue;
        int before = kernel_lanes.empty() ? kFollow : kernel_lanes.back();
        int position = plan.positions[place];
        // One that the trace does not have stays with its neighbour: two switches cost more.
        kernel_lanes.push_back(
            position < 0 ? before
                         : dispatcher.workers().lane_of(
                               {plan.worker, static_cast<uint32_t>(position), false}, variant));
    }
    auto first = std::find_if(kernel_lanes.begin(), kernel_lanes.end(),
                              [](int lane) { return lane != kFollow; });
    std::fill(kernel_lanes.begin(), first, first == kernel_lanes.end() ? kHome : *first);
    std::vector<int> lanes;
    size_t seen = 0;  // memory nodes go with the kernel that follows them, or the last
    for (size_t place = 0; place < sequence.size(); ++place) {
        int type = sequence.nodes[place].type;
        int lane = can_move(type) ? kernel_lanes[std::min(seen, plan.kernels - 1)] : kHome;
        seen += type == kNodeKernel;
        if (type == kNodeKernel && lane >= 0 &&
            !fits(sequence.handles[place], plan.params[place], dispatcher.pool().lanes[lane].stream))
            lane = kHome;
        lanes.push_back(lane);
    }
    return lanes;
}

// Where the plan has joints for the worker, by the graph's places.
std::vector<size_t> find_joints(const Plan& plan) {
    const auto& kernels = Dispatcher::get().table().workers[plan.worker].kernels;
    std::vector<size_t> joints;
    for (size_t place = 1; place < plan.positions.size(); ++place)
        if (plan.positions[place] > 0 && kernels[plan.positions[place]].joint != 0)
            joints.push_back(place);
    return joints;
}

// A node has a priority of its own: the stream that its graph is launched on gives it none.
CUresult prefer(CUgraphNode twin, int priority) {
    auto set = driver().cuGraphKernelNodeSetAttribute;
    CUlaunchAttribute attribute{};
    attribute.priority = priority;
    if (priority == 0) return CUDA_SUCCESS;
    if (set != nullptr) return set(twin, CU_LAUNCH_ATTRIBUTE_PRIORITY, &attribute.bytes);
    say("this driver keeps no priorities of graphs' kernels: the plan's are ignored");
    return CUDA_SUCCESS;
}

CUresult move_node(CUgraphNode twin, int type, CUcontext context, int priority) {
    const Driver& real = driver();
    GraphNodeParams params{};
    params.type = type;
    if (type == kNodeKernel) {
        KernelNodeParams kernel{};
        CUresult status = real.cuGraphKernelNodeGetParams_v2(twin, &kernel);
        if (status != CUDA_SUCCESS) return status;
        // A function belongs to one context, a kernel to none: only the latter can move.
        if (kernel.kern == nullptr && kernel.ctx != context) return CUDA_SUCCESS;
        if (kernel.kern != nullptr) {
            kernel.func = nullptr;
            kernel.ctx = context;
            status = real.cuGraphKernelNodeSetParams_v2(twin, &kernel);
        }
        return status == CUDA_SUCCESS ? prefer(twin, priority) : status;
    }
    if (type == kNodeMemset) {
        CUresult status = real.cuGraphMemsetNodeGetParams(twin, &params.memset);
        if (status != CUDA_SUCCESS) return status;
        params.memset.ctx = context;
    } else {
        CUresult status = real.cuGraphMemcpyNodeGetParams(twin, params.memcpy.copy3d);
        if (status != CUDA_SUCCESS) return status;
        params.memcpy.copyCtx = context;
    }
    return real.cuGraphNodeSetParams(twin, &params);
}

int priority_of(int lane) {
    return lane >= kFirstPlace ? 0 : Dispatcher::get().pool().lanes[lane].priority;
}

// An executable for the graph that is made from it or from a clone.
std::unique_ptr<Executable> make_executable(const Sequence& sequence, int worker) {
    auto made = std::make_unique<Executable>();
    made->worker = worker;
    made->sequence = sequence;
    for (size_t place = 0; place < sequence.size(); ++place) {
        made->places[sequence.handles[place]] = place;
        made->nodes.push_back({sequence.handles[place]});
    }
    return made;
}

}  // namespace

std::unique_ptr<Executable> make_on_lanes(CUgraph graph, const Sequence& sequence,
                                          const std::vector<CUgraphNode>& handles, int worker,
                                          const std::vector<int>& lanes) {
    auto made = make_executable(sequence, worker);
    std::vector<CUgraphNode> twins;
    CUresult status = clone_on_lanes(graph, sequence, handles, lanes, made->clone, twins);
    if (status != CUDA_SUCCESS) {
        say("a graph cannot be placed on lanes (status %d) and runs unplanned", status);
        return nullptr;
    }
    made->moved = true;
    made->stored = made->clone;
    for (size_t place = 0; place < sequence.size(); ++place) {
        Placed& placed = made->nodes[place];
        placed.twin = placed.stored = twins[place];
        placed.lane = lanes[place];
    }
    return made;
}

namespace {

// As the user made it, with a clone from which parts can be made.
std::unique_ptr<Executable> make_at_home(CUgraph graph, const Sequence& sequence, int worker) {
    auto made = make_executable(sequence, worker);
    std::vector<CUgraphNode> twins;
    CUresult status = clone_on_lanes(graph, sequence, sequence.handles,
                                     std::vector<int>(sequence.size(), kHome), made->stored, twins);
    if (status != CUDA_SUCCESS) {
        if (sequence.whole == nullptr) made->keep_whole("it cannot be cloned");
        return made;
    }
    for (size_t place = 0; place < sequence.size(); ++place) made->nodes[place].stored = twins[place];
    return made;
}

bool can_rehome() {
    Dispatcher& dispatcher = Dispatcher::get();
    const Driver& real = driver();
    if (!dispatcher.on() || !dispatcher.setup().planning()) return false;
    if (!dispatcher.cap().on() && (dispatcher.table().mode != Mode::plan || !dispatcher.pool().any))
        return false;
    if (real.cuGraphNodeSetParams != nullptr && real.cuGraphGetEdges_v2 != nullptr &&
        real.cuGraphKernelNodeGetParams_v2 != nullptr)
        return true;
    say("this driver cannot re-home graphs (CUDA 12.3 or newer can); they run unplanned");
    return false;
}

// For every variant of the plan that has this worker on other lanes an executable of its own.
void add_variants(CUgraph graph, const Plan& plan, Executable& main, const std::vector<int>& lanes) {
    const auto& variants = Dispatcher::get().table().variants;
    std::vector<std::vector<int>> known;
    for (size_t variant = 0; variant < variants.size(); ++variant) {
        if ((variants[variant].active >> plan.worker & 1) == 0) continue;
        std::vector<int> others = choose_lanes(main.sequence, plan, static_cast<int>(variant));
        if (others == lanes) continue;
        auto same = std::find(known.begin(), known.end(), others);
        if (same == known.end()) {
            if (known.size() == kMostExecutables) {
                say("a graph keeps %d variants of the plan; further ones run as for all workers",
                    kMostExecutables);
                return;
            }
            auto made = make_on_lanes(graph, main.sequence, main.sequence.handles, plan.worker, others);
            if (made == nullptr) return;
            made->joints = main.joints;
            main.variants.push_back(std::move(made));
            same = known.insert(known.end(), others);
        }
        main.variant_of[static_cast<int>(variant)] = static_cast<size_t>(same - known.begin());
    }
}

// With what child graphs hold, if the driver says where that is in a clone.
CUresult read_placeable(CUgraph graph, Sequence& sequence) {
    CUresult status = read_sequence(graph, true, sequence);
    bool nested = std::any_of(sequence.nodes.begin(), sequence.nodes.end(),
                              [](const Sequence::Node& node) { return node.parent >= 0; });
    if (status != CUDA_SUCCESS || !nested || sequence.whole != nullptr) return status;
    CUgraph clone = nullptr;
    std::vector<CUgraphNode> twins;
    if (clone_on_lanes(graph, sequence, sequence.handles, std::vector<int>(sequence.size(), kHome),
                       clone, twins) == CUDA_SUCCESS) {
        driver().cuGraphDestroy(clone);
        return CUDA_SUCCESS;
    }
    return read_sequence(graph, false, sequence);
}

}  // namespace

bool can_move(int type) {
    return type == kNodeKernel || type == kNodeMemset || type == kNodeMemcpy;
}

Launch launch_of(CUgraphNode node, const KernelNodeParams& params) {
    const CUlaunchAttribute attribute = read_cluster(node);
    const unsigned* cluster = attribute.cluster;
    return {params.kern ? reinterpret_cast<CUfunction>(params.kern) : params.func,
            {params.grid[0], params.grid[1], params.grid[2]},
            {params.block[0], params.block[1], params.block[2]},
            params.sharedMemBytes, cluster[0] * cluster[1] * cluster[2]};
}

CUcontext context_of_lane(int lane) {
    if (lane < 0) return nullptr;
    const Pool& pool = Dispatcher::get().pool();
    if (lane >= kFirstPlace) return pool.places[lane - kFirstPlace].context;
    return pool.lanes[lane].context;
}

CUresult clone_on_lanes(CUgraph graph, const Sequence& sequence,
                        const std::vector<CUgraphNode>& handles, const std::vector<int>& lanes,
                        CUgraph& clone, std::vector<CUgraphNode>& twins) {
    CUresult status = driver().cuGraphClone(&clone, graph);
    if (status != CUDA_SUCCESS) return status;
    status = find_in_clone(sequence, handles, clone, twins);
    for (size_t place = 0; place < sequence.size() && status == CUDA_SUCCESS; ++place)
        if (lanes[place] >= 0)
            status = move_node(twins[place], sequence.nodes[place].type,
                               context_of_lane(lanes[place]), priority_of(lanes[place]));
    if (status != CUDA_SUCCESS) {
        driver().cuGraphDestroy(clone);
        clone = nullptr;
    }
    return status;
}

std::unique_ptr<Executable> keep_graph(CUgraph graph) {
    Sequence sequence;
    const bool cuts = giving::cuts_graphs(), plans = can_rehome();
    Dispatcher& dispatcher = Dispatcher::get();
    const bool records = dispatcher.on() && dispatcher.table().mode == Mode::record;
    if (!cuts && !dispatcher.on()) return nullptr;
    CUresult status = read_placeable(graph, sequence);
    if (status != CUDA_SUCCESS || sequence.records_events) dispatcher.distrust_events();
    if (status != CUDA_SUCCESS) return nullptr;
    if (plans && dispatcher.cap().on()) return keep_placed(graph, sequence);
    Plan plan;
    if (!plans || !plan_graph(sequence, plan))
        return cuts || records ? make_at_home(graph, sequence, -1) : nullptr;
    Counters& counts = counters();
    count(counts.graphs);
    count(counts.graph_kernels, plan.kernels);
    count(counts.graph_planned, plan.planned);
    std::vector<int> lanes = choose_lanes(sequence, plan, kMainVariant);
    const bool moves = std::any_of(lanes.begin(), lanes.end(), [](int lane) { return lane >= 0; });
    // All on the whole device, whoever is active: it can stay as it is.
    if (!moves && !cuts && dispatcher.table().variants.empty()) return nullptr;
    auto made = moves ? make_on_lanes(graph, sequence, sequence.handles, plan.worker, lanes)
                      : make_at_home(graph, sequence, plan.worker);
    if (made == nullptr) return nullptr;
    made->joints = find_joints(plan);
    add_variants(graph, plan, *made, lanes);
    return made;
}

}  // namespace eclip
