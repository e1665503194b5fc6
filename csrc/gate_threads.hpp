// Owns: a few threads that help whoever has a row of equal pieces of work; kept, as starting one costs more than a piece.
#pragma once

#include <cstddef>
#include <functional>

namespace laya {

// work(0) ... work(n_pieces - 1), by the caller and at most n_threads - 1 others, as far as they come in time. Returns when
// all is done. Where another caller has the threads, the caller does all of it. `work` must not throw.
void share_out(std::size_t n_pieces, std::size_t n_threads, const std::function<void(std::size_t)>& work);

}  // namespace laya
