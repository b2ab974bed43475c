// Threadgroup memory. It is NaN at first, for floats of all sizes, lies between canaries, and is
// aligned no better than its declaration asks.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace host {

class Arena {
public:
    static constexpr unsigned MAX_SLOTS = 64;
    static constexpr size_t CAPACITY = 320 * 1024;

    // Forgets all arrays.
    void clear() {
        memset(slots_, 0, sizeof slots_);
        used_ = bytes_ = 0;
    }

    // The array with this number, made if need be; null if there are too many or too large ones.
    void* slot(unsigned number, size_t bytes, size_t alignment, size_t limit) {
        if (number >= MAX_SLOTS) return nullptr;
        Slot& slot = slots_[number];
        if (slot.memory) return slot.memory;
        bytes_ += (bytes + 15) / 16 * 16;
        if (bytes_ > limit || bytes_ > MAX_BYTES) return nullptr;
        slot.bytes = bytes;
        slot.memory = memory_ + (used_ + CANARY_BYTES + COARSE - 1) / COARSE * COARSE;
        if (alignment < COARSE) slot.memory += alignment;
        memset(slot.memory - CANARY_BYTES, CANARY, CANARY_BYTES);
        memset(slot.memory, 0xFF, bytes);
        memset(slot.memory + bytes, CANARY, CANARY_BYTES);
        used_ = slot.memory - memory_ + bytes + CANARY_BYTES;
        return slot.memory;
    }

    // As Metal counts them, those of the array that did not fit included.
    size_t bytes() const { return bytes_; }

    // The size of an array with a dead canary beside it, or null.
    const size_t* damaged() const {
        for (const Slot& slot : slots_)
            for (size_t i = 0; slot.memory && i < CANARY_BYTES; i++)
                if (slot.memory[-1 - ptrdiff_t(i)] != CANARY || slot.memory[slot.bytes + i] != CANARY)
                    return &slot.bytes;
        return nullptr;
    }

    // Where the last array ends.
    size_t used() const { return used_; }

    // Of an address from the start; CAPACITY or more if it is elsewhere.
    size_t offset(const void* address) const {
        return static_cast<const unsigned char*>(address) - memory_;
    }

private:
    static constexpr size_t CANARY_BYTES = 64, COARSE = 256, MAX_BYTES = 256 * 1024;
    static constexpr unsigned char CANARY = 0xC7;

    struct Slot {
        unsigned char* memory;
        size_t bytes;
    };

    Slot slots_[MAX_SLOTS];
    size_t used_, bytes_;
    alignas(COARSE) unsigned char memory_[CAPACITY];
    static_assert(CAPACITY >= MAX_BYTES + MAX_SLOTS * 2 * (COARSE + CANARY_BYTES));
};

}  // namespace host
