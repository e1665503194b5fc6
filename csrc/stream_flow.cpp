#include "stream_flow.hpp"

#include <charconv>
#include <utility>

#include "monotonic.hpp"
#include "plain_http.hpp"

namespace laya {
namespace {

// A number of bytes as a chunk's size line, then the bytes.
void append_chunk(std::string& out, std::string_view data) {
    char size[20];
    const auto written = std::to_chars(size, size + sizeof size, data.size(), 16);
    out.append(size, written.ptr).append("\r\n").append(data).append("\r\n");
}

}  // namespace

StreamFlow::StreamFlow(Start start) : start_(std::move(start)), has_engine_head_(!start_.from_head) {
    seen_.has_started = start_.has_started;
}

Cut StreamFlow::take(std::string_view raw, std::string& out) {
    const bool was_held = !held_.empty();
    if (was_held) {
        held_.append(raw);
        raw = held_;
    }
    std::size_t n_head = 0;
    if (!has_engine_head_) {
        n_head = read_stream_head(raw);
        if (n_head == 0) {
            if (!was_held) {
                held_.assign(raw);
            }
            return Cut::LEFT;
        }
        has_engine_head_ = true;
        engine_head_.assign(raw.substr(0, n_head));
    }
    events_.clear();
    Cut cut = Cut::MORE;
    const std::size_t n_cut = n_head + cut_chunks(raw.substr(n_head), start_.takes_end, seen_, events_, cut);
    if (was_held) {
        held_.erase(0, n_cut);
    } else {
        held_.assign(raw.substr(n_cut));
    }
    if (cut == Cut::END) {
        events_.append("data: [DONE]\n\n");
    }
    if (events_.empty()) {
        return cut;
    }
    if (!is_head_sent_) {
        out.append(start_.client_head);
        is_head_sent_ = true;
    }
    append_chunk(out, events_);
    if (cut == Cut::END) {
        out.append("0\r\n\r\n");
    }
    if (!start_.has_started && first_token_s_ == 0) {
        first_token_s_ = monotonic_s();
    }
    return cut;
}

StreamBack StreamFlow::back() {
    StreamBack back;
    back.is_clean = held_.empty();
    back.is_head_sent = is_head_sent_;
    back.first_token_s = first_token_s_;
    back.seen = seen_;
    back.raw = std::move(engine_head_);
    back.raw.append(held_);
    return back;
}

}  // namespace laya
