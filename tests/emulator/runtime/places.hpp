// Places in the code, as reports have them: the loader replaces them with files and lines.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <string>

namespace emulator {

// An address in this module, of a function or in one, relative to where the module was loaded.
inline std::uint32_t offset_in_module(std::uintptr_t address) {
    static const std::uintptr_t base = [] {
        Dl_info info;
        dladdr(reinterpret_cast<const void*>(&offset_in_module), &info);
        return reinterpret_cast<std::uintptr_t>(info.dli_fbase);
    }();
    return address - base;
}

// The line of a report for the call that returns to this offset.
inline std::string place_line(std::uint32_t return_offset) {
    char text[24];
    std::snprintf(text, sizeof text, "<%x>\n", return_offset - 1);
    return text;
}

}  // namespace emulator
