// The twin of cufa/kernels/ptx/ptx_sm89.cuh.
#pragma once

#include "ptx/ptx_common.cuh"

namespace ptx {

inline void half_from_e4m3(unsigned (&pairs)[2], unsigned four) {
    for (int i = 0; i < 2; ++i) {
        pairs[i] = 0;
        for (int e = 0; e < 2; ++e) {
            const float value = twin::float_from_e4m3(four >> (2 * i + e) * 8 & 0xffu);
            pairs[i] |= static_cast<unsigned>(half_from_float(value)) << 16 * e;
        }
    }
}

}  // namespace ptx
