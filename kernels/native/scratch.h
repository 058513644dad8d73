// Memory that a thread keeps from call to call.

#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

struct Scratch {
    char* memory = nullptr;
    size_t size = 0;
    ~Scratch() { std::free(memory); }
    void reserve(size_t wanted) {
        if (wanted <= size) return;
        std::free(memory);
        size = (wanted + (wanted >> 2) + 4095) & ~size_t(4095);
        memory = static_cast<char*>(std::aligned_alloc(64, size));
        if (memory == nullptr) {
            size = 0;
            throw std::bad_alloc();
        }
    }
};

}  // namespace
