// What kernels and the executor know of each other. runtime.cpp is the executor, compiled once to a
// library; each kernel variant is a small library beside it that calls what is declared here.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace host {

constexpr unsigned LANES = 32, MAX_SIMDGROUPS = 32, MAX_THREADS = LANES * MAX_SIMDGROUPS;
constexpr unsigned OPERAND_BYTES = 64;  // of one lane
constexpr unsigned RESULT_BYTES = 1024;  // of a whole simdgroup

struct Extent {
    uint32_t x, y, z;
    uint32_t count() const { return x * y * z; }
};

enum Schedule : int32_t { FORWARD, REVERSE, RANDOM };

// One launch; executor.py has the same structure.
struct Launch {
    Extent grid;         // threads
    Extent threadgroup;  // threads
    int32_t schedule;
    uint32_t seed;
    uint32_t threadgroup_bytes;  // limit of threadgroup memory
    uint32_t timeout_s;  // of the process, on its processors
};

// What went wrong; executor.py has the same structure. An empty message: nothing.
struct Fault {
    uint64_t address;          // that was accessed, or 0
    uint64_t program_counter;  // relative to the kernel's library, or 0
    int32_t line;              // of the kernel text, or 0
    char message[500];
};

// Computed once per collective call, by the lane that arrives last.
struct Simdgroup;
using Combine = void (*)(Simdgroup&, unsigned turn);

// Collective calls alternate between two sets of operands and results, called turns: a lane may
// reach the next call before the others have read the results of this one.
struct Simdgroup {
    alignas(64) unsigned char operands[2][LANES * OPERAND_BYTES];
    alignas(64) unsigned char results[2][RESULT_BYTES];
    uint32_t took_part[2];  // lanes whose operands are there
    uint32_t started;       // lanes that there are
    uint32_t members;       // lanes that have not returned
    uint32_t arrived;       // lanes that wait at the collective call
    uint32_t ready;         // lanes that can go on
    unsigned first_thread;
    Combine combine;
    const char* call;
    int line;
};

enum State : uint8_t { RUNNING, AT_COLLECTIVE, AT_BARRIER, RETURNED };

// Where a lane's two elements of a matrix stand: neighbours in a row. Apple's own layout, on which
// kernels that use thread_elements() build.
struct MatrixPlace {
    unsigned row, column;
};

struct Thread {
    void* stack_pointer;
    Simdgroup* simdgroup;
    uint32_t lane, index;
    MatrixPlace matrix_place;
    Extent position, grid_position;
    unsigned turn;
    State state;
    const char* call;  // where it waits
    int line;
};

struct Threadgroup {
    Extent id, size;
    unsigned threads, simdgroups;
};

extern Thread* current;
extern Threadgroup threadgroup_now;
extern const Launch* launch_now;

// Waits for all lanes of the simdgroup that have not returned; they must be at the same call.
// The caller has put its operand into operands[current->turn]. Returns that turn.
unsigned collective(Combine combine, const char* call, int line);

// Ends the launch with a fault: this call, in this line, is wrong in this way.
[[noreturn]] void fail_at(const char* call, int line, const char* how);

// Waits for the lanes of the simdgroup, and orders their accesses to memory.
void order_simdgroup(int line);

// Waits for all threads of the threadgroup.
void barrier(int line);

// Operands of a * b + c; the result goes to results. Each element is one chain of fused
// multiply-adds, ascending in the inner dimension.
struct Matrices {
    float a[8][8], b[8][8], c[8][8];
};
static_assert(sizeof(Matrices) <= sizeof Simdgroup::operands[0]);
void multiply_matrices(Simdgroup& group, unsigned turn);

// The memory of the declaration with this number, the same for all threads of a threadgroup.
void* threadgroup_slot(unsigned number, size_t bytes, size_t alignment);

// `threadgroup float a[8];` becomes `float (&a)[8] = host::ThreadgroupMemory<0>();`.
template <unsigned NUMBER>
struct ThreadgroupMemory {
    template <class A>
    operator A&() const {
        return *static_cast<A*>(threadgroup_slot(NUMBER, sizeof(A), alignof(A)));
    }
};

}  // namespace host
