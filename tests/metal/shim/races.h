// Races for threadgroup memory: two threads, one of them writing, with no barrier between that both
// have passed. Kernels compiled with -fsanitize=thread tell of their accesses; shuffles and
// reductions, which keep lanes together here, order no memory on a GPU.
#pragma once
#include <stddef.h>
#include <string.h>

#include "arena.h"
#include "runtime.h"

namespace host {

// Barriers that a thread has passed; accesses of two threads are ordered if one has passed more.
struct Epoch {
    uint32_t threadgroup, simdgroup;
};

class Races {
public:
    // Forgets accesses to the first bytes.
    void clear(size_t bytes) { memset(cells_, 0, bytes * sizeof *cells_); }

    // Whether an access to byte `offset` races with an earlier one.
    bool access(size_t offset, const Thread& thread, Epoch now, bool writes) {
        Cell& cell = cells_[offset];
        if (conflicts(cell.write, thread, now) || (writes && conflicts(cell.read, thread, now)))
            return true;
        note(writes ? cell.write : cell.read, thread, now);
        return false;
    }

private:
    static constexpr uint16_t MANY = 0xFFFF;

    // The latest accesses of one kind. thread: index + 1, 0 if none, MANY if several threads;
    // simdgroup: index, or MANY
    struct Accesses {
        uint16_t thread, simdgroup;
        Epoch epoch;
    };
    struct Cell {
        Accesses write, read;
    };

    static bool conflicts(const Accesses& before, const Thread& thread, Epoch now) {
        if (before.thread == 0 || before.thread == thread.index + 1) return false;
        if (before.epoch.threadgroup < now.threadgroup) return false;
        return before.simdgroup != thread.index / LANES || before.epoch.simdgroup >= now.simdgroup;
    }

    static void note(Accesses& accesses, const Thread& thread, Epoch now) {
        const uint16_t simdgroup = thread.index / LANES, index = thread.index + 1;
        const bool together = accesses.thread && accesses.epoch.threadgroup == now.threadgroup;
        if (together && accesses.simdgroup != simdgroup)
            accesses = {MANY, MANY, now};
        else if (together && accesses.thread != index && accesses.epoch.simdgroup == now.simdgroup)
            accesses = {MANY, simdgroup, now};
        else
            accesses = {index, simdgroup, now};
    }

    Cell cells_[Arena::CAPACITY];
};

}  // namespace host
