// The shim's C interface: what Python calls after loading it, and what library/ calls in a program
// without Python. install.cpp says what holds for all of it.
#pragma once

#include "process/allocators.h"

#define VRAMX_EXPORT extern "C" __attribute__((visibility("default")))

// The torch it was compiled for, as "2.11.0".
VRAMX_EXPORT const char* vramx_torch_built_for();
// Puts the core behind torch; `is_late` accepts that CUDA is initialised. 0 on success, else
// vramx_torch_error() says why not.
VRAMX_EXPORT int vramx_torch_install(const vramx::AllocatorsHandle* core, int is_late);
VRAMX_EXPORT const char* vramx_torch_error();
// Bounds what vramx and torch's own allocator hold of a device (-1: of each) together.
VRAMX_EXPORT void vramx_torch_set_limit(int device, unsigned long long bytes);
VRAMX_EXPORT void vramx_torch_note_profiler();
VRAMX_EXPORT int vramx_torch_is_installed();
// Whether torch's allocator of now keeps a history; before CUDA is initialised none does.
VRAMX_EXPORT int vramx_torch_keeps_history();
