// Barriers, reductions, exchanges and matrices of simdgroups, and atomics. Each call's line tells the
// executor where a lane waits; lanes at different lines are apart, which is a fault.
#pragma once
#include "maths.h"
#include "runtime.h"

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };

constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

#define AT int line = __builtin_LINE()

inline bool at_random() { return host::launch_now->schedule == host::RANDOM; }

// Only the random schedule makes lanes meet at what orders no memory (a load, a store, a barrier
// without flags), which shows that they are apart; in the others a lane that needs what another has
// not yet written finds out.
inline void meet_at_random(const char* call, int line) {
    if (at_random()) host::collective(nullptr, call, line);
}

inline void threadgroup_barrier(mem_flags flags, AT) {
    if (flags == mem_flags::mem_none) host::fail_at("threadgroup_barrier", line, "orders no memory");
    host::barrier(line);
}

inline void simdgroup_barrier(mem_flags flags, AT) {
    if (flags == mem_flags::mem_none) return meet_at_random("simdgroup_barrier", line);
    host::order_simdgroup(line);
}

// ---- one value per lane

inline unsigned lane_index() { return host::current->lane; }

template <class T>
inline T& operand(unsigned turn, unsigned lane) {
    static_assert(sizeof(T) <= host::OPERAND_BYTES);
    return reinterpret_cast<T*>(host::current->simdgroup->operands[turn])[lane];
}

template <class T>
inline T& result(host::Simdgroup& group, unsigned turn, unsigned index = 0) {
    return reinterpret_cast<T*>(group.results[turn])[index];
}

// Waits with `value` as this lane's operand; returns the turn.
template <class T>
inline unsigned exchange(const T& value, host::Combine combine, const char* call, int line) {
    operand<T>(host::current->turn, lane_index()) = value;
    return host::collective(combine, call, line);
}

// Halves are added to halves, as a butterfly of shuffles does; lanes that are gone do not count.
template <class T, class Operation>
inline void reduce_lanes(host::Simdgroup& group, unsigned turn) {
    T values[host::LANES];
    uint32_t present = group.took_part[turn];
    __builtin_memcpy(static_cast<void*>(values), group.operands[turn], sizeof values);
    for (unsigned step = host::LANES / 2; step; step /= 2) {
        for (unsigned i = 0; i < step; i++) {
            const bool here = present >> i & 1, there = present >> (i + step) & 1;
            if (here && there)
                values[i] = Operation::combine(values[i], values[i + step]);
            else if (there)
                values[i] = values[i + step];
        }
        present |= present >> step;
    }
    result<T>(group, turn) = values[0];
}

#define REDUCTION(name, expression)                                                     \
    struct name##_operation {                                                           \
        template <class T>                                                              \
        static T combine(T a, T b) {                                                    \
            return T(expression);                                                       \
        }                                                                               \
    };                                                                                  \
    template <class T>                                                                  \
    inline T name(T value, AT) {                                                        \
        const unsigned turn = exchange(value, reduce_lanes<T, name##_operation>, #name, line); \
        return result<T>(*host::current->simdgroup, turn);                              \
    }
REDUCTION(simd_sum, a + b)
REDUCTION(simd_product, a * b)
REDUCTION(simd_max, metal::max(a, b))
REDUCTION(simd_min, metal::min(a, b))
REDUCTION(simd_and, a & b)
REDUCTION(simd_or, a | b)
REDUCTION(simd_xor, a ^ b)

inline bool simd_any(bool condition, AT) { return simd_or<uint>(condition, line); }
inline bool simd_all(bool condition, AT) { return simd_and<uint>(condition, line); }

template <class T, bool INCLUSIVE>
inline void add_prefixes(host::Simdgroup& group, unsigned turn) {
    T sum = T(0);
    for (unsigned lane = 0; lane < host::LANES; lane++) {
        if (!(group.took_part[turn] >> lane & 1)) continue;
        const T value = reinterpret_cast<T*>(group.operands[turn])[lane];
        result<T>(group, turn, lane) = INCLUSIVE ? T(sum + value) : sum;
        sum = T(sum + value);
    }
}

template <class T>
inline T simd_prefix_inclusive_sum(T value, AT) {
    const unsigned turn = exchange(value, add_prefixes<T, true>, "simd_prefix_inclusive_sum", line);
    return result<T>(*host::current->simdgroup, turn, lane_index());
}

template <class T>
inline T simd_prefix_exclusive_sum(T value, AT) {
    const unsigned turn = exchange(value, add_prefixes<T, false>, "simd_prefix_exclusive_sum", line);
    return result<T>(*host::current->simdgroup, turn, lane_index());
}

// What a lane reads of one that is gone, or beyond the simdgroup, is undefined: NaN here.
template <class T>
inline T from_lane(T value, unsigned source, const char* call, int line) {
    const unsigned turn = exchange(value, nullptr, call, line);
    T got;
    if (source < host::LANES && host::current->simdgroup->took_part[turn] >> source & 1)
        got = operand<T>(turn, source);
    else
        __builtin_memset(static_cast<void*>(&got), 0xFF, sizeof got);
    return got;
}

#define EXCHANGE(name, source)                                              \
    template <class T>                                                      \
    inline T name(T value, ushort argument, AT) {                           \
        const unsigned lane = lane_index();                                 \
        return from_lane(value, source, #name, line);                       \
    }
EXCHANGE(simd_broadcast, (void(lane), argument))
EXCHANGE(simd_shuffle, (void(lane), argument))
EXCHANGE(simd_shuffle_xor, lane ^ argument)
EXCHANGE(simd_shuffle_down, lane + argument)
EXCHANGE(simd_shuffle_up, lane - argument)
EXCHANGE(simd_shuffle_rotate_down, (lane + argument) % host::LANES)
EXCHANGE(simd_shuffle_rotate_up, (lane - argument) % host::LANES)
EXCHANGE(quad_broadcast, lane / 4 * 4 + argument)
EXCHANGE(quad_shuffle, lane / 4 * 4 + argument)
EXCHANGE(quad_shuffle_xor, lane ^ argument)

template <class T>
inline T simd_broadcast_first(T value, AT) {
    const unsigned turn = exchange(value, nullptr, "simd_broadcast_first", line);
    return operand<T>(turn, __builtin_ctz(host::current->simdgroup->took_part[turn]));
}

// The lanes that would read beyond the simdgroup read `filling` from its other end instead.
template <class T>
inline T simd_shuffle_and_fill_up(T value, T filling, ushort distance, AT) {
    const unsigned lane = lane_index();
    const T shuffled = from_lane(value, lane - distance, "simd_shuffle_and_fill_up", line);
    const T filled = from_lane(filling, (lane - distance) % host::LANES, "simd_shuffle_and_fill_up", line);
    return lane < distance ? filled : shuffled;
}

template <class T>
inline T simd_shuffle_and_fill_down(T value, T filling, ushort distance, AT) {
    const unsigned source = lane_index() + distance;
    const T shuffled = from_lane(value, source, "simd_shuffle_and_fill_down", line);
    const T filled = from_lane(filling, source % host::LANES, "simd_shuffle_and_fill_down", line);
    return source < host::LANES ? shuffled : filled;
}

// ---- matrices of 8 x 8 elements, two in each lane

template <class T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
    static_assert(ROWS == 8 && COLUMNS == 8);
    vec<T, 2> elements;

    simdgroup_matrix() { __builtin_memset(elements.all, 0xFF, sizeof elements.all); }
    explicit simdgroup_matrix(T diagonal) {
        const host::MatrixPlace place = host::current->matrix_place;
        for (unsigned i = 0; i < 2; i++)
            elements[i] = place.row == place.column + i ? diagonal : T(0);
    }
    vec<T, 2>& thread_elements() { return elements; }
    const vec<T, 2>& thread_elements() const { return elements; }
};

using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int ROWS, int COLUMNS>
inline simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, ROWS, COLUMNS> filled;
    filled.elements = vec<T, 2>(value);
    return filled;
}

// Matrix operations need all 32 lanes. Where lanes do not meet, some may rightly have gone on and
// returned; then only those that never were are missing.
inline void demand_all_lanes(const char* call, int line, bool lanes_meet) {
    const host::Simdgroup& group = *host::current->simdgroup;
    if ((lanes_meet ? group.members : group.started) == ~0u) return;
    host::fail_at(call, line, "in a simdgroup that is not whole");
}

template <class T, class P>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const P* source, ulong row_elements = 8,
                           ulong2 origin = ulong2(0), bool transposed = false, AT) {
    static_assert(std::same_as<T, std::remove_cv_t<P>>, "simdgroup_load: element types differ");
    demand_all_lanes("simdgroup_load", line, at_random());
    const host::MatrixPlace place = host::current->matrix_place;
    source += origin.y * row_elements + origin.x;
    for (unsigned i = 0; i < 2; i++)
        matrix.elements[i] = transposed ? source[(place.column + i) * row_elements + place.row]
                                        : source[place.row * row_elements + place.column + i];
    meet_at_random("simdgroup_load", line);
}

template <class T, class P>
inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& matrix, P* target, ulong row_elements = 8,
                            ulong2 origin = ulong2(0), bool transposed = false, AT) {
    static_assert(std::same_as<T, P>, "simdgroup_store: element types differ");
    demand_all_lanes("simdgroup_store", line, at_random());
    meet_at_random("simdgroup_store", line);
    const host::MatrixPlace place = host::current->matrix_place;
    target += origin.y * row_elements + origin.x;
    for (unsigned i = 0; i < 2; i++)
        (transposed ? target[(place.column + i) * row_elements + place.row]
                    : target[place.row * row_elements + place.column + i]) = matrix.elements[i];
}

template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b,
                                          const simdgroup_matrix<C, 8, 8>& c, AT) {
    demand_all_lanes("simdgroup_multiply_accumulate", line, true);
    host::Thread& self = *host::current;
    const host::MatrixPlace place = host::current->matrix_place;
    host::Matrices& in = *reinterpret_cast<host::Matrices*>(self.simdgroup->operands[self.turn]);
    for (unsigned i = 0; i < 2; i++) {
        in.a[place.row][place.column + i] = float(a.elements[i]);
        in.b[place.row][place.column + i] = float(b.elements[i]);
        in.c[place.row][place.column + i] = float(c.elements[i]);
    }
    const unsigned turn = host::collective(host::multiply_matrices, "simdgroup_multiply_accumulate", line);
    for (unsigned i = 0; i < 2; i++)
        d.elements[i] = D(result<float>(*self.simdgroup, turn, place.row * 8 + place.column + i));
}

template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b, AT) {
    simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), line);
}

#undef AT

// ---- atomics: threads are fibers of one thread, so that plain operations do

enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
    T value;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;

template <class T>
inline T atomic_load_explicit(const atomic<T>* object, memory_order) {
    return object->value;
}

template <class T>
inline void atomic_store_explicit(atomic<T>* object, std::type_identity_t<T> value, memory_order) {
    object->value = value;
}

#define ATOMIC(name, expression)                                                             \
    template <class T>                                                                       \
    inline T atomic_##name##_explicit(atomic<T>* object, std::type_identity_t<T> value, memory_order) { \
        const T old = object->value;                                                         \
        object->value = T(expression);                                                       \
        return old;                                                                          \
    }
ATOMIC(exchange, value)
ATOMIC(fetch_add, old + value)
ATOMIC(fetch_sub, old - value)
ATOMIC(fetch_max, metal::max(old, value))
ATOMIC(fetch_min, metal::min(old, value))
ATOMIC(fetch_and, old & value)
ATOMIC(fetch_or, old | value)

}  // namespace metal
