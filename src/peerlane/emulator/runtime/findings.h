// What was found, each thing once, as JSON for the host, which turns sites into source lines.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../include/peerlane_emulator/hooks.h"

namespace peerlane::emulator {

// One thread's part in a finding.
struct Side {
    int rank = 0, launch = 0;
    Uint3 block{}, thread{};
    std::string action;
    std::uint32_t site = 0;
    int buffer = -1;  // what it waits at, in a deadlock
    std::uint64_t offset = 0;
};

struct Finding {
    std::string kind;
    std::string detail;
    std::vector<Side> sides;
    int buffer = -1;  // the memory concerned, if any
    std::uint64_t offset = 0;
    std::vector<std::uint32_t> fault{};  // the record that a wait left behind, if any
    int schedule = 0;  // the first one that showed it
    int schedules = 1;
    std::uint32_t bytes = 1;  // from `offset` on
    // Where it was seen, by buffer: from the first byte to the end of the last. In the first schedule that showed it.
    struct Place {
        int buffer;
        std::uint64_t begin, end;
    };
    std::vector<Place> places{};
};

class Findings {
  public:
    // Notes a finding of this schedule; the same kind at the same places, in either order, is counted once a schedule.
    void add(int schedule, Finding finding) {
        const std::uint32_t first = finding.sides.empty() ? 0 : finding.sides[0].site;
        const std::uint32_t second = finding.sides.size() < 2 ? first : finding.sides[1].site;
        const Key key{finding.kind, std::min(first, second), std::max(first, second)};
        if (last_schedule_ != schedule) {
            last_schedule_ = schedule;
            ++schedules_;
        }
        const auto [known, is_new] = seen_.try_emplace(key, Seen{schedule, list_.size()});
        if (is_new) {
            finding.schedule = schedule;
            place(finding, finding);
            list_.push_back(std::move(finding));
            return;
        }
        Finding& told = list_[known->second.index];
        if (told.schedule == schedule) place(told, finding);
        if (known->second.schedule != schedule) {
            known->second.schedule = schedule;
            ++told.schedules;
        }
    }

    // How many schedules had a finding.
    int schedules() const { return schedules_; }

    std::string json() const {
        return list(list_, [](const Finding& finding) {
            return object({
                {"kind", quoted(finding.kind)},
                {"detail", quoted(finding.detail)},
                {"schedule", std::to_string(finding.schedule)},
                {"schedules", std::to_string(finding.schedules)},
                {"buffer", std::to_string(finding.buffer)},
                {"offset", std::to_string(finding.offset)},
                {"places", list(finding.places, [](const Finding::Place& place) {
                     return "[" + std::to_string(place.buffer) + "," + std::to_string(place.begin) + "," + std::to_string(place.end) + "]";
                 })},
                {"fault", list(finding.fault, [](std::uint32_t word) { return std::to_string(word); })},
                {"sides", list(finding.sides, json_of_side)},
            });
        });
    }

  private:
    using Key = std::tuple<std::string, std::uint32_t, std::uint32_t>;
    struct Seen {
        int schedule;
        std::size_t index;
    };

    static constexpr std::size_t most_places = 8;
    static void place(Finding& first, const Finding& again) {
        if (again.buffer < 0) return;
        for (auto& known : first.places) {
            if (known.buffer != again.buffer) continue;
            known.begin = std::min(known.begin, again.offset);
            known.end = std::max(known.end, again.offset + again.bytes);
            return;
        }
        if (first.places.size() < most_places) first.places.push_back({again.buffer, again.offset, again.offset + again.bytes});
    }

    static std::string json_of_side(const Side& side) {
        const auto three = [](const Uint3& value) {
            return "[" + std::to_string(value.x) + "," + std::to_string(value.y) + "," + std::to_string(value.z) + "]";
        };
        return object({
            {"rank", std::to_string(side.rank)},
            {"launch", std::to_string(side.launch)},
            {"block", three(side.block)},
            {"thread", three(side.thread)},
            {"action", quoted(side.action)},
            {"site", std::to_string(side.site)},
            {"buffer", std::to_string(side.buffer)},
            {"offset", std::to_string(side.offset)},
        });
    }
    static std::string object(std::initializer_list<std::pair<const char*, std::string>> members) {
        std::string text;
        for (const auto& [name, value] : members) text += (text.empty() ? "" : ",") + quoted(name) + ":" + value;
        return "{" + text + "}";
    }
    template <class T, class F>
    static std::string list(const std::vector<T>& items, const F& json) {
        std::string text;
        for (const T& item : items) text += (text.empty() ? "" : ",") + json(item);
        return "[" + text + "]";
    }
    static std::string quoted(const std::string& text) {
        std::string result = "\"";
        for (const char c : text) {
            if (c == '"' || c == '\\') result += '\\';
            result += c == '\n' ? ' ' : c;
        }
        return result + "\"";
    }

    std::vector<Finding> list_;
    std::map<Key, Seen> seen_;
    int last_schedule_ = -1;
    int schedules_ = 0;
};

}  // namespace peerlane::emulator
