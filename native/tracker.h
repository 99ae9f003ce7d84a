// Which worker a sequence of launches belongs to, and where in its trace it stands.
//
// A launch that is not the expected one is looked for further on in the trace; one that is not in
// the trace at all is unplanned and leaves the place as it was. A sequence that belongs to no worker
// yet, or no longer, is compared with every worker's trace from its first kernel on, and adopted
// once a run of launches agrees. A wrong guess costs speed, never order.
#pragma once

#include <algorithm>
#include <atomic>

#include "table.h"

namespace eclip {

constexpr int kUnplanned = -1;
constexpr int kAgreement = 4;   // launches in a row that make a sequence a worker's

// How many sequences follow each worker, so that two alike workers are shared out.
using Followers = std::atomic<int>[kMostWorkers];

class Tracker {
public:
    struct Step {
        int worker = kUnplanned;
        uint32_t position = 0;
        bool begins_request = false;
    };

    // The place of the next launch, or a step without a worker.
    Step next(const Table& table, Followers& followers, uint64_t identity) {
        if (worker_ >= 0 && table.workers[worker_].kernels[position_].identity == identity) {
            search_length_ = 0;
            return step(table, position_);
        }
        search(table, identity);
        int found = adopt(table, followers);
        if (found >= 0) {
            uint32_t place = (search_length_ - 1) % table.workers[found].kernels.size();
            follow(found, followers);
            search_length_ = 0;
            return step(table, place);
        }
        uint32_t place = position_;
        if (worker_ >= 0 && find(table.workers[worker_], identity, place)) return step(table, place);
        return {};
    }

    // The caller says: a request begins; of this worker, if one is named.
    void begin_request(const Table& table, int worker, Followers& followers) {
        if (worker >= 0 && static_cast<size_t>(worker) < table.workers.size())
            follow(worker, followers);
        position_ = 0;
        search_length_ = 0;
    }

    // Of the plan, taken for a whole request.
    int variant = kMainVariant;

    void leave(Followers& followers) {
        if (worker_ >= 0) --followers[worker_];
        worker_ = kUnplanned;
    }

private:
    Step step(const Table& table, uint32_t place) {
        position_ = place + 1 == table.workers[worker_].kernels.size() ? 0 : place + 1;
        return {worker_, place, place == 0};
    }

    static bool find(const TableWorker& worker, uint64_t identity, uint32_t& place) {
        auto known = worker.positions.find(identity);
        if (known == worker.positions.end()) return false;
        const auto& places = known->second;
        auto after = std::lower_bound(places.begin(), places.end(), place);
        place = after == places.end() ? places.front() : *after;
        return true;
    }

    // Workers whose traces begin with the launches since the search began.
    void search(const Table& table, uint64_t identity) {
        uint32_t agreeing = 0;
        if (search_length_ > 0)
            for (uint32_t rest = candidates_; rest != 0; rest &= rest - 1) {
                int worker = __builtin_ctz(rest);
                const auto& kernels = table.workers[worker].kernels;
                if (kernels[search_length_ % kernels.size()].identity == identity)
                    agreeing |= 1u << worker;
            }
        if (agreeing != 0) {
            ++search_length_;
        } else if (table.heads >> identity % 64 & 1) {
            for (size_t worker = 0; worker < table.workers.size(); ++worker)
                if (table.workers[worker].kernels[0].identity == identity) agreeing |= 1u << worker;
            search_length_ = agreeing != 0 ? 1 : 0;
        } else {
            search_length_ = 0;
        }
        candidates_ = agreeing;
    }

    // The worker that the search has settled on, or none.
    int adopt(const Table& table, const Followers& followers) const {
        if (search_length_ == 0) return kUnplanned;
        // A worker is left only for a run as long as the one that made it ours.
        bool unique = (candidates_ & (candidates_ - 1)) == 0 && worker_ < 0;
        if (!unique && search_length_ < kAgreement) {
            int only = __builtin_ctz(candidates_);
            bool whole = search_length_ >= table.workers[only].kernels.size();
            if (!whole) return kUnplanned;
        }
        int best = kUnplanned;
        for (uint32_t rest = candidates_; rest != 0; rest &= rest - 1) {
            int worker = __builtin_ctz(rest);
            if (worker == worker_) return worker;
            if (best < 0 || followers[worker] < followers[best]) best = worker;
        }
        return best;
    }

    void follow(int worker, Followers& followers) {
        leave(followers);
        worker_ = worker;
        ++followers[worker];
    }

    int worker_ = kUnplanned;
    uint32_t position_ = 0;
    uint32_t search_length_ = 0;
    uint32_t candidates_ = 0;
};

}  // namespace eclip
