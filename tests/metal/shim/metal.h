// The Metal Shading Language as C++20 for g++: included before the text of a kernel.
#pragma once
#include "simdgroup.h"

#define __METAL__ 1
#define __METAL_VERSION__ 310
#define MLX_METAL_JIT 1

using namespace metal;

// What a kernel's parameter with this attribute holds.
namespace host {

#define ATTRIBUTE(name, expression) \
    inline auto name() { return expression; }
inline uint3 three(Extent extent) { return uint3(extent.x, extent.y, extent.z); }
inline uint groups(uint threads, uint size) { return (threads + size - 1) / size; }
ATTRIBUTE(dispatch_quadgroups_per_threadgroup, groups(launch_now->threadgroup.count(), 4))
ATTRIBUTE(dispatch_simdgroups_per_threadgroup, groups(launch_now->threadgroup.count(), LANES))
ATTRIBUTE(dispatch_threads_per_threadgroup, three(launch_now->threadgroup))
ATTRIBUTE(grid_origin, uint3(0))
ATTRIBUTE(grid_size, three(launch_now->grid))
ATTRIBUTE(quadgroup_index_in_threadgroup, current->index / 4)
ATTRIBUTE(quadgroups_per_threadgroup, groups(threadgroup_now.threads, 4))
ATTRIBUTE(simdgroup_index_in_threadgroup, current->index / LANES)
ATTRIBUTE(simdgroups_per_threadgroup, threadgroup_now.simdgroups)
ATTRIBUTE(thread_execution_width, LANES)
ATTRIBUTE(thread_index_in_quadgroup, current->index % 4)
ATTRIBUTE(thread_index_in_simdgroup, current->lane)
ATTRIBUTE(thread_index_in_threadgroup, current->index)
ATTRIBUTE(thread_position_in_grid, three(current->grid_position))
ATTRIBUTE(thread_position_in_threadgroup, three(current->position))
ATTRIBUTE(threadgroup_position_in_grid, three(threadgroup_now.id))
ATTRIBUTE(threadgroups_per_grid, uint3(groups(launch_now->grid.x, launch_now->threadgroup.x),
                                       groups(launch_now->grid.y, launch_now->threadgroup.y),
                                       groups(launch_now->grid.z, launch_now->threadgroup.z)))
ATTRIBUTE(threads_per_grid, three(launch_now->grid))
ATTRIBUTE(threads_per_simdgroup, LANES)
ATTRIBUTE(threads_per_threadgroup, three(threadgroup_now.size))
#undef ATTRIBUTE

}  // namespace host

// Address spaces mean nothing here; the second compiler checks them. Declarations of threadgroup
// arrays are rewritten before.
#define constant
#define device
#define kernel
#define thread
#define threadgroup
