// Places in the code, as reports have them: the loader replaces them with files and lines.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <string>

namespace emulator {

// Where the module was loaded that has this address, of a function or in one.
inline std::uintptr_t module_of(std::uintptr_t address) {
    Dl_info info;
    if (!dladdr(reinterpret_cast<const void*>(address), &info)) return 0;
    return reinterpret_cast<std::uintptr_t>(info.dli_fbase);
}

// The line of a report for the call that returns to this offset.
inline std::string place_line(std::uint32_t return_offset) {
    char text[24];
    std::snprintf(text, sizeof text, "<%x>\n", return_offset - 1);
    return text;
}

}  // namespace emulator
