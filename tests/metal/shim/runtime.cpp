// Runs kernels: the threads of a threadgroup are fibers of one thread of the system, switched only
// where they wait. A simdgroup runs until a barrier stops it, since a fair order of simdgroups would
// hide missing barriers; within it, a lane runs until a collective call stops it.
#include "runtime.h"

#include "arena.h"
#include "races.h"
#include "switch.h"

#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>

namespace host {

Thread* current;
Threadgroup threadgroup_now;
const Launch* launch_now;

namespace {

constexpr size_t STACK_BYTES = 256 * 1024;

Thread threads[MAX_THREADS];
Simdgroup simdgroups[MAX_SIMDGROUPS];
unsigned returned, at_barrier;
int barrier_line;
uint32_t random_state;

unsigned char* stacks;
Arena arena;
Races races;
bool races_are_watched;  // the kernel tells of its accesses
Epoch epochs[MAX_THREADS];

void (*kernel)(void* const*);
void* const* buffers;
Fault* fault_now;
void* scheduler_stack;
pthread_t executor;
volatile sig_atomic_t running;
sigjmp_buf recovery;
char signal_stack[64 * 1024];

uint32_t random_number() {  // xorshift32
    random_state ^= random_state << 13;
    random_state ^= random_state >> 17;
    return random_state ^= random_state << 5;
}

bool schedule_is(Schedule schedule) { return launch_now->schedule == schedule; }

}  // namespace

namespace {

void record_fault(int line, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fault_now->message, sizeof fault_now->message, format, arguments);
    va_end(arguments);
    fault_now->line = line;
}

// Leaves the threadgroup for good; its other threads are never resumed.
[[noreturn]] void give_up() {
    void* abandoned;
    current = nullptr;
    host_switch(&abandoned, scheduler_stack);
    __builtin_unreachable();
}

// A set bit of a mask that has one, as the schedule likes.
unsigned choose(uint32_t mask) {
    if (schedule_is(FORWARD)) return __builtin_ctz(mask);
    if (schedule_is(REVERSE)) return 31 - __builtin_clz(mask);
    for (unsigned skipped = random_number() % __builtin_popcount(mask); skipped; skipped--)
        mask &= mask - 1;
    return __builtin_ctz(mask);
}

// The thread to run next, or null if none can.
Thread* next_thread(Simdgroup* group) {
    if (schedule_is(RANDOM) && random_number() % 8 == 0) group = nullptr;
    if (!group || !group->ready) {
        uint32_t candidates = 0;
        for (unsigned i = 0; i < threadgroup_now.simdgroups; i++)
            candidates |= uint32_t(simdgroups[i].ready != 0) << i;
        if (!candidates) return nullptr;
        group = &simdgroups[choose(candidates)];
    }
    unsigned lane = choose(group->ready);
    group->ready &= ~(1u << lane);
    return &threads[group->first_thread + lane];
}

// Runs others until this thread is ready and its turn comes.
void wait(State why) {
    Thread* self = current;
    self->state = why;
    current = next_thread(self->simdgroup);
    if (current != self) host_switch(&self->stack_pointer, current ? current->stack_pointer : scheduler_stack);
    self->state = RUNNING;
}

void complete(Simdgroup& group, unsigned turn) {
    group.took_part[turn] = group.arrived;
    if (group.combine) group.combine(group, turn);
    group.ready |= group.arrived;
    group.arrived = 0;
}

// A fiber's life: its kernel once per threadgroup.
void live() {
    for (;;) {
        kernel(buffers);
        Simdgroup& group = *current->simdgroup;
        group.members &= ~(1u << current->lane);
        returned++;
        if (group.arrived && group.arrived == group.members) {
            unsigned waiting = group.first_thread + __builtin_ctz(group.arrived);
            complete(group, threads[waiting].turn ^ 1);
        }
        wait(RETURNED);
    }
}

void make_fiber(unsigned index) {
    // Stacks that start at different distances from a page boundary share no cache set.
    unsigned char* top = stacks + STACK_BYTES * (index + 1) - 256 - index % 61 * 192;
    void** words = reinterpret_cast<void**>(uintptr_t(top) & ~uintptr_t(63)) - SAVED_WORDS;
    memset(words, 0, SAVED_WORDS * sizeof *words);
    words[RETURN_WORD] = reinterpret_cast<void*>(live);
    threads[index].stack_pointer = words;
}

// All ready threads have run: each must have returned.
void check_all_returned() {
    unsigned collective_count = 0, barrier_count = 0;
    const Thread* waiting = nullptr;
    for (unsigned i = 0; i < threadgroup_now.threads; i++) {
        collective_count += threads[i].state == AT_COLLECTIVE;
        barrier_count += threads[i].state == AT_BARRIER;
        if (threads[i].state == AT_COLLECTIVE) waiting = &threads[i];
    }
    if (collective_count)
        record_fault(waiting->line, "%u threads wait in %s, %u at threadgroup_barrier, %u returned",
                     collective_count, waiting->call, barrier_count, returned);
    else if (barrier_count)
        record_fault(barrier_line, "%u threads wait at threadgroup_barrier, %u returned", barrier_count,
                     returned);
}

uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

void start_threadgroup(Extent id) {
    const Extent full = launch_now->threadgroup, grid = launch_now->grid;
    const Extent start = {id.x * full.x, id.y * full.y, id.z * full.z};
    const Extent size = {least(full.x, grid.x - start.x), least(full.y, grid.y - start.y),
                         least(full.z, grid.z - start.z)};
    threadgroup_now = {id, size, size.count(), (size.count() + LANES - 1) / LANES};
    returned = at_barrier = 0;
    if (races_are_watched) races.clear(arena.used());
    arena.clear();
    races_are_watched = false;
    memset(epochs, 0, sizeof epochs);
    for (unsigned i = 0; i < threadgroup_now.threads; i++) {
        Thread& thread = threads[i];
        thread.simdgroup = &simdgroups[i / LANES];
        const unsigned lane = thread.lane = i % LANES;
        thread.matrix_place = {lane / 16 * 4 + lane / 2 % 4, lane / 8 % 2 * 4 + lane % 2 * 2};
        thread.index = i;
        thread.position = {i % size.x, i / size.x % size.y, i / size.x / size.y};
        thread.grid_position = {start.x + thread.position.x, start.y + thread.position.y,
                                start.z + thread.position.z};
        thread.turn = 0;
    }
    for (unsigned i = 0; i < threadgroup_now.simdgroups; i++) {
        Simdgroup& group = simdgroups[i];
        group.first_thread = i * LANES;
        const unsigned lanes = least(threadgroup_now.threads - i * LANES, LANES);
        group.started = group.members = group.ready = lanes == LANES ? ~0u : (1u << lanes) - 1;
        group.arrived = 0;
    }
}

void run_threadgroup(Extent id) {
    start_threadgroup(id);
    current = next_thread(nullptr);
    host_switch(&scheduler_stack, current->stack_pointer);
    if (!fault_now->message[0]) check_all_returned();
    const size_t* damaged = arena.damaged();
    if (!fault_now->message[0] && damaged)
        record_fault(0, "a threadgroup array of %zu bytes was left by a write", *damaged);
}

uint32_t greatest_common_divisor(uint32_t a, uint32_t b) { return b ? greatest_common_divisor(b, a % b) : a; }

// Threadgroups one after another; in the random schedule by strides that are coprime to the count.
void run_grid() {
    const Extent grid = launch_now->grid, size = launch_now->threadgroup;
    const Extent groups = {(grid.x + size.x - 1) / size.x, (grid.y + size.y - 1) / size.y,
                           (grid.z + size.z - 1) / size.z};
    const uint32_t count = groups.count();
    uint32_t stride = schedule_is(RANDOM) ? random_number() % count + 1 : 1;
    while (greatest_common_divisor(stride, count) != 1) stride++;
    for (uint32_t i = 0; i < count && !fault_now->message[0]; i++) {
        uint32_t group = uint64_t(i) * stride % count;
        if (schedule_is(REVERSE)) group = count - 1 - group;
        run_threadgroup({group % groups.x, group / groups.x % groups.y, group / groups.x / groups.y});
    }
}

const char* meaning(int signal_number) {
    switch (signal_number) {
    case SIGVTALRM: return "no end";
    default: return "access that is not allowed";
    }
}

void* program_counter(void* context) {
    const mcontext_t& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    return reinterpret_cast<void*>(machine.gregs[REG_RIP]);
#else
    return reinterpret_cast<void*>(machine.pc);
#endif
}

// Where an instruction stands in the kernel's library, or 0 if it is elsewhere.
uint64_t library_offset(void* instruction) {
    Dl_info here, kernels;
    if (!dladdr(instruction, &here) || !dladdr(reinterpret_cast<void*>(kernel), &kernels) ||
        here.dli_fbase != kernels.dli_fbase)
        return 0;
    return uintptr_t(instruction) - uintptr_t(here.dli_fbase);
}

void on_signal(int signal_number, siginfo_t* info, void* context) {
    if (!pthread_equal(pthread_self(), executor)) {
        if (signal_number == SIGVTALRM) pthread_kill(executor, SIGVTALRM);
        else signal(signal_number, SIG_DFL);  // it happens again and ends the process
        return;
    }
    if (!running) return;
    if (fault_now->message[0] == 0) {
        fault_now->program_counter = library_offset(program_counter(context));
        if (signal_number == SIGSEGV || signal_number == SIGBUS)
            fault_now->address = reinterpret_cast<uintptr_t>(info->si_addr);
        const Extent id = threadgroup_now.id;
        record_fault(0, "%s, by thread %u of threadgroup (%u, %u, %u)", meaning(signal_number),
                     current ? current->index : 0, id.x, id.y, id.z);
    }
    siglongjmp(recovery, 1);
}

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGVTALRM};

// Runs the grid with signals turned into faults.
void run_guarded() {
    struct sigaction action = {}, before[sizeof SIGNALS / sizeof *SIGNALS];
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    stack_t stack = {}, stack_before;
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, &stack_before);
    for (unsigned i = 0; i < sizeof SIGNALS / sizeof *SIGNALS; i++)
        sigaction(SIGNALS[i], &action, &before[i]);
    itimerval timer = {}, timer_before;
    timer.it_value.tv_sec = launch_now->timeout_s;
    setitimer(ITIMER_VIRTUAL, &timer, &timer_before);
    if (sigsetjmp(recovery, 1) == 0) {
        running = 1;
        run_grid();
    }
    running = 0;
    setitimer(ITIMER_VIRTUAL, &timer_before, nullptr);
    for (unsigned i = 0; i < sizeof SIGNALS / sizeof *SIGNALS; i++)
        sigaction(SIGNALS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
}

}  // namespace

unsigned collective(Combine combine, const char* call, int line) {
    Thread& self = *current;
    Simdgroup& group = *self.simdgroup;
    const unsigned turn = self.turn;
    self.turn ^= 1;
    self.call = call;
    self.line = line;
    if (!group.arrived) {
        group.combine = combine;
        group.call = call;
        group.line = line;
    } else if (group.line != line || group.combine != combine) {
        record_fault(line, "lanes of simdgroup %u are apart: one in %s in line %d, another in %s in line %d",
                     self.index / LANES, group.call, group.line, call, line);
        give_up();
    }
    group.arrived |= 1u << self.lane;
    if (group.arrived != group.members) {
        wait(AT_COLLECTIVE);
        return turn;
    }
    complete(group, turn);
    if (schedule_is(RANDOM) && random_number() % 2)
        wait(RUNNING);
    else
        group.ready &= ~(1u << self.lane);
    return turn;
}

void order_simdgroup(int line) {
    epochs[current->index].simdgroup++;
    collective(nullptr, "simdgroup_barrier", line);
}

void fail_at(const char* call, int line, const char* how) {
    record_fault(line, "%s %s", call, how);
    give_up();
}

void barrier(int line) {
    Thread& self = *current;
    self.call = "threadgroup_barrier";
    self.line = line;
    if (at_barrier && line != barrier_line) {
        record_fault(line, "threads are apart: one at threadgroup_barrier in line %d, another in line %d",
                     barrier_line, line);
        give_up();
    }
    barrier_line = line;
    epochs[self.index].threadgroup++;
    if (++at_barrier != threadgroup_now.threads) return wait(AT_BARRIER);
    at_barrier = 0;
    for (unsigned i = 0; i < threadgroup_now.simdgroups; i++) simdgroups[i].ready = simdgroups[i].members;
    self.simdgroup->ready &= ~(1u << self.lane);
}

void multiply_matrices(Simdgroup& group, unsigned turn) {
    using Row = float __attribute__((vector_size(32)));
    const Matrices& in = *reinterpret_cast<Matrices*>(group.operands[turn]);
    const Row* b = reinterpret_cast<const Row*>(in.b);
    Row* out = reinterpret_cast<Row*>(group.results[turn]);
    for (int row = 0; row < 8; row++) {
        Row sums = reinterpret_cast<const Row*>(in.c)[row];
        for (int inner = 0; inner < 8; inner++) sums += in.a[row][inner] * b[inner];  // fused
        out[row] = sums;
    }
}

void* threadgroup_slot(unsigned number, size_t bytes, size_t alignment) {
    if (void* memory = arena.slot(number, bytes, alignment, launch_now->threadgroup_bytes)) return memory;
    if (number >= Arena::MAX_SLOTS)
        record_fault(0, "more than %u threadgroup arrays", Arena::MAX_SLOTS);
    else
        record_fault(0, "%zu bytes of threadgroup memory; %u are allowed", arena.bytes(),
                     launch_now->threadgroup_bytes);
    give_up();
}

// What the compiler's sanitizers call; their data are as in GCC's libsanitizer.
struct SanitizerPlace {
    const char* file;
    uint32_t line, column;
};

struct BoundsData {
    SanitizerPlace place;
    const void *array_type, *index_type;
};

struct AlignmentData {
    SanitizerPlace place;
    const void* type;
    unsigned char log2_alignment, kind;
};

static void* call_site(void* return_address) { return static_cast<char*>(return_address) - 1; }

extern "C" [[noreturn]] void __ubsan_handle_out_of_bounds_abort(BoundsData*, uintptr_t index) {
    fault_now->program_counter = library_offset(call_site(__builtin_return_address(0)));
    record_fault(0, "index %td is outside an array, in thread %u", ptrdiff_t(index), current->index);
    give_up();
}

extern "C" [[noreturn]] void __ubsan_handle_divrem_overflow_abort(void*, uintptr_t, uintptr_t) {
    fault_now->program_counter = library_offset(call_site(__builtin_return_address(0)));
    record_fault(0, "integer division by zero or overflow, in thread %u", current->index);
    give_up();
}

extern "C" [[noreturn]] void __ubsan_handle_float_cast_overflow_abort(void*, uintptr_t) {
    fault_now->program_counter = library_offset(call_site(__builtin_return_address(0)));
    record_fault(0, "a float that no such integer can hold, in thread %u", current->index);
    give_up();
}

extern "C" [[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(AlignmentData* data, uintptr_t address) {
    fault_now->program_counter = library_offset(call_site(__builtin_return_address(0)));
    fault_now->address = address;
    record_fault(0, "misaligned access, in thread %u: %u bytes of alignment are needed", current->index,
                 1u << data->log2_alignment);
    give_up();
}

// What code compiled with -fsanitize=thread calls.
static void accessed(const void* address, size_t bytes, bool writes, void* return_address) {
    const size_t offset = arena.offset(address);
    if (offset >= Arena::CAPACITY || !current) return;
    races_are_watched = true;
    for (size_t i = 0; i < bytes; i++) {
        if (!races.access(offset + i, *current, epochs[current->index], writes)) continue;
        fault_now->program_counter = library_offset(call_site(return_address));
        record_fault(0, "race for threadgroup memory, %s by thread %u", writes ? "written" : "read",
                     current->index);
        give_up();
    }
}

#define ACCESS(name, bytes, writes) \
    extern "C" void name(const void* address) { accessed(address, bytes, writes, __builtin_return_address(0)); }
#define ACCESSES(bytes)                            \
    ACCESS(__tsan_read##bytes, bytes, false)       \
    ACCESS(__tsan_write##bytes, bytes, true)       \
    ACCESS(__tsan_unaligned_read##bytes, bytes, false) \
    ACCESS(__tsan_unaligned_write##bytes, bytes, true)
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
extern "C" void __tsan_read_range(const void* address, size_t bytes) {
    accessed(address, bytes, false, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(const void* address, size_t bytes) {
    accessed(address, bytes, true, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

// Runs a kernel once. fault: zeroed
extern "C" void host_launch(void (*run)(void* const*), void* const* arguments, const Launch* launch,
                            Fault* fault) {
    static bool fibers_are_usable = false;
    if (!stacks) {
        constexpr int PRIVATE = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* memory = mmap(nullptr, STACK_BYTES * MAX_THREADS, PROT_READ | PROT_WRITE, PRIVATE, -1, 0);
        if (memory == MAP_FAILED) {
            fault_now = fault;
            return record_fault(0, "no memory for stacks");
        }
        stacks = static_cast<unsigned char*>(memory);
    }
    if (!fibers_are_usable)
        for (unsigned i = 0; i < MAX_THREADS; i++) make_fiber(i);
    kernel = run;
    buffers = arguments;
    launch_now = launch;
    fault_now = fault;
    random_state = launch->seed * 2654435761u | 1;
    executor = pthread_self();
    run_guarded();
    fibers_are_usable = !fault->message[0];
}

}  // namespace host
